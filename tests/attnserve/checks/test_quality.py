"""Measures of quality: their kinds, their values for known errors, and the coverage of bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve.checks.measures import MIN_ROWS, Scores
from attnserve.checks.meters import new_meter
from attnserve.checks.quality import (
    QualityMeter,
    allowed_loss,
    largest_loss,
    limited_losses,
)
from attnserve.checks.relations import MOST_PAIRED
from attnserve.data.datasets import Dataset
from attnserve.data.row_batches import RowBatch, RowInfo
from attnserve.intervals import mean_lower_bound
from attnserve.limits import ROUNDING, SELECTION_CONFIDENCE, TAIL
from attnserve.models.artifact import Artifact
from attnserve.models.lineage import Calibration
from attnserve.models.measured import Losses, Quality
from tests.attnserve.qualities import quality_of

RANDOM = np.random.default_rng(0)
STATE = RANDOM.bit_generator.state
HEADER = '<ir_version: 10, opset_import: ["" : 20, "test" : 1]> g'


@pytest.fixture(autouse=True)
def _reset_generator() -> None:
    RANDOM.bit_generator.state = STATE


def meter(
    signature: str,
    *,
    measure: str = "auto",
    tokenizer: Path | None = None,
    data: Dataset | None = None,
    body: str = "test.Model(x, x)",
) -> QualityMeter:
    """A meter of a graph ``x -> signature``; with a tokenizer, of a model for text."""
    model = ir.from_onnx_text(
        f"{HEADER} (float[b, t] x) => ({signature}) {{ {signature.split()[-1]} = {body} }}"
    )
    folder = Path("model.onnx") if tokenizer is None else tokenizer / "model.onnx"
    return QualityMeter(model, Artifact(folder), measure=measure, data=data)  # type: ignore[arg-type]


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def measured(meter: QualityMeter, a: np.ndarray, b: np.ndarray, mask: np.ndarray | None = None):
    meter.add([a], [b], {} if mask is None else {"attention_mask": mask})
    return meter.results()[0]


def test_probabilities_are_compared_as_what_they_are():
    """The divergence of two softmaxes is that of their logits, however many classes there are."""
    a = logits(60, 100)
    b = a + RANDOM.standard_normal(a.shape)
    expected = measured(meter("float[b, c] logits"), a, b)
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (a, b))
    for body in ("Softmax(x)", "Softmax <axis = 1> (x)"):
        found = measured(meter("float[b, 100] probs", body=body), p, q)
        assert found.measure == "kl"
        assert found.also["kl_nats"] == pytest.approx(expected.also["kl_nats"], rel=1e-4)
        assert found.value == pytest.approx(expected.value, abs=1e-4)
    certain = np.eye(60, 100, dtype=np.float16)
    assert np.isfinite(measured(meter("float[b, 100] probs", body="Softmax(x)"), certain, q).value)


def test_outputs_with_as_many_columns_as_class_names_are_classes(tmp_path: Path):
    labels = {str(i): f"class {i}" for i in range(100)}
    (tmp_path / "config.json").write_text(json.dumps({"id2label": labels}))
    graph = ir.from_onnx_text(f"{HEADER} (float[b, t] x) => (float[b, 100] y) {{ y = test.M(x) }}")
    found = QualityMeter(graph, Artifact(tmp_path / "model.onnx"))
    a = logits(40, 100)
    assert measured(found, a, a).measure == "kl"


def logits(rows: int, classes: int, spread: float = 3.0) -> np.ndarray:
    return spread * RANDOM.standard_normal((rows, classes))


# Kinds of outputs


@pytest.mark.parametrize(
    ("signature", "shape", "for_text", "expected"),
    [
        ("float[b, t, d] hidden", (40, 5, 8), True, "similarity"),
        ("float[b, t, d] hidden", (40, 5, 8), False, "r2"),
        ("float[b, d] sentence_embedding", (40, 96), True, "similarity"),
        ("float[b, d] y", (40, 96), False, "similarity"),
        ("float[b, d] sentence_embedding", (40, 24), True, "similarity"),
        ("float[b, d] pooler_output", (40, 24), False, "similarity"),
        ("float[b, d] representation", (40, 96), True, "similarity"),
        ("float[b, c] logits", (40, 128), True, "kl"),
        ("float[b, c] y", (40, 10), False, "kl"),
        ("float[b, c] logits", (40, 1), True, "r2"),
        ("float[b] score", (40,), True, "r2"),
        ("float[b, t, v] logits", (40, 5, 30), True, "top1"),
        ("float[b, h, t, d] maps", (40, 3, 5, 8), False, "r2"),
    ],
)
def test_measure_is_chosen_by_the_kind_of_output(
    signature: str, shape: tuple[int, ...], for_text: bool, expected: str, text_folder: Path
):
    a = RANDOM.standard_normal(shape)
    found = measured(meter(signature, tokenizer=text_folder if for_text else None), a, a)
    assert found.measure == expected
    assert found.value == pytest.approx(1.0) and found.losses.bounded == pytest.approx(0, abs=1e-9)
    assert found.rows == 40 and found.ci95 is not None


def test_output_of_changing_width_is_measured_as_numbers(text_folder: Path):
    """The logits of the positions of an answer; their padding does not count."""
    found = meter("float[b, t] start_logits", tokenizer=text_folder, body="Identity(x)")
    for tokens in (5, 7):
        a, mask = RANDOM.standard_normal((20, tokens)), np.ones((20, tokens), np.int64)
        mask[::2, 3:] = 0
        found.add([a], [np.where(mask, 0.9 * a, 50.0)], {"attention_mask": mask})
    (quality,) = found.results()
    assert quality.measure == "r2" and quality.rows == 40
    assert quality.value == pytest.approx(1 - 0.1**2, abs=1e-3)


def test_output_as_wide_as_the_token_table_is_a_vocabulary(text_folder: Path):
    model = ir.from_onnx_text(
        f"{HEADER} (int64[b, t] ids) => (float[b, t, v] y) <float[30, 4] table = "
        f"{{{', '.join(['0'] * 120)}}}> {{ y = Gather(table, ids) }}"
    )
    found = QualityMeter(model, Artifact(text_folder / "model.onnx"))
    a = logits(40 * 5, 30).reshape(40, 5, 30)
    assert measured(found, a, a).measure == "top1"


def test_output_as_wide_as_the_table_of_positions_is_no_vocabulary():
    model = ir.from_onnx_text(
        f"{HEADER} (int64[b, t] ids, int64[b, t] positions) => (float[b, t, d] y) "
        f"<float[30, 4] table = {{{', '.join(['0'] * 120)}}}, "
        f"float[4, 4] places = {{{', '.join(['0'] * 16)}}}> "
        "{ a = Gather(table, ids) b = Gather(places, positions) y = Add(a, b) }"
    )
    a = RANDOM.standard_normal((40, 5, 4))
    assert measured(QualityMeter(model, Artifact(Path("model.onnx"))), a, a).measure == "r2"


def test_interval_ends_at_the_largest_possible_value():
    found = meter("float[b, t, v] logits", tokenizer=None)
    a = logits(40 * 5, 30).reshape(40, 5, 30)
    b = a.copy()
    b[0, 0] = -b[0, 0]  # one token of 200
    quality = measured(found, a, b)
    assert quality.measure == "top1" and quality.ci95 is not None
    assert quality.ci95[0] < quality.value < quality.ci95[1] <= 1.0


def test_caches_are_not_measured():
    model = ir.from_onnx_text(
        f"{HEADER} (float[b, t] x) => (float[b, t, v] logits, float[b, h, t, k] present_0_key) "
        "{ logits = Identity(x) present_0_key = Identity(x) }"
    )
    found = QualityMeter(model, Artifact(Path("model.onnx")))
    a, cache = logits(160, 30).reshape(40, 4, 30), RANDOM.standard_normal((40, 2, 4, 8))
    found.add([a, cache], [a, -cache], {})
    assert [quality.output for quality in found.results()] == ["logits"]


# A constant predictor


@pytest.mark.parametrize("measure", ["auto", "similarity", "r2", "kl", "top1"])
@pytest.mark.parametrize(
    ("signature", "shape", "offset"),
    [
        ("float[b, t, d] hidden", (60, 5, 16), 20.0),  # vectors in a narrow cone
        ("float[b, d] y", (60, 96), 5.0),
        ("float[b, c] logits", (60, 4), 0.0),
        ("float[b, t, v] logits", (60, 6, 20), 0.0),
    ],
)
def test_constant_predictor_keeps_no_nine_tenths(
    measure: str, signature: str, shape: tuple[int, ...], offset: float, text_folder: Path
):
    """Also where the raw cosine of the constant is above 0.99, or where one class dominates."""
    a = offset + RANDOM.standard_normal(shape)
    if "logits" in signature:
        a[..., 0] += 6.0  # one class wins nearly always
    mean = a.mean(axis=tuple(range(a.ndim - 1)), keepdims=True)
    if "logits" in signature:  # the best constant is the mean distribution
        p = np.exp(a - a.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        mean = np.log(p.mean(axis=tuple(range(a.ndim - 1)), keepdims=True))
    found = measured(
        meter(signature, measure=measure, tokenizer=text_folder), a, np.broadcast_to(mean, a.shape)
    )
    assert found.losses.bounded > 0.1 and found.losses.measured > 0.1


def test_cosine_reports_the_constant_of_a_narrow_cone():
    a = 20.0 + RANDOM.standard_normal((60, 5, 16))
    mean = np.broadcast_to(a.mean((0, 1)), a.shape)
    found = measured(meter("float[b, t, d] y", measure="cosine"), a, mean)
    assert found.value > 0.99
    assert found.constant == pytest.approx(found.value, abs=1e-9)


# Values


def test_r2_of_known_noise():
    a = 7 + RANDOM.standard_normal((500, 4, 8))
    b = a + 0.2 * RANDOM.standard_normal(a.shape)
    found = measured(meter("float[b, t, d] y"), a, b)
    assert found.value == pytest.approx(1 - 0.04, abs=2e-3)
    assert found.lower < found.value and found.p5 < found.value


def test_r2_ignores_padding():
    a = RANDOM.standard_normal((50, 6, 8))
    mask = np.ones((50, 6), np.int64)
    mask[:, 4:] = 0
    b = a.copy()
    b[:, 4:] = 99
    assert measured(meter("float[b, t, d] y"), a, b, mask).value == pytest.approx(1)


def test_kl_is_the_share_of_the_constant_predictors_divergence():
    a = logits(4000, 3)
    b = a + 0.3 * RANDOM.standard_normal(a.shape)
    found = measured(meter("float[b, c] logits"), a, b)

    def probabilities(x: np.ndarray) -> np.ndarray:
        return np.exp(x) / np.exp(x).sum(1, keepdims=True)

    p, q = probabilities(a), probabilities(b)
    constant = (p * np.log(p / p.mean(0))).sum(1).mean()
    divergence = (p * np.log(p / q)).sum(1).mean()
    assert found.value == pytest.approx(1 - divergence / constant, abs=1e-9)
    assert found.also["top1"] == (a.argmax(1) == b.argmax(1)).mean()


def test_top1_counts_tokens_and_reports_perplexity():
    a = logits(50 * 8, 20).reshape(50, 8, 20)
    ids = np.zeros((50, 8), np.int64)
    ids[:, 1:] = a[:, :-1].argmax(-1)  # the text that the model predicts
    b = a.copy()
    b[:, 3] = -b[:, 3]  # one of eight tokens is wrong
    found = meter("float[b, t, v] logits")
    found.add([a], [b], {"input_ids": ids})
    quality = found.results()[0]
    assert quality.value == pytest.approx(7 / 8)
    assert quality.also["perplexity"] > quality.also["perplexity_original"]


def test_similarity_is_one_after_a_rotation(text_folder: Path):
    """Similarities are what users of embeddings see; a rotation keeps all of them."""
    a = RANDOM.standard_normal((80, 70))
    rotation = np.linalg.qr(RANDOM.standard_normal((70, 70)))[0]
    found = measured(meter("float[b, d] y", tokenizer=text_folder), a, a @ rotation)
    assert found.value == pytest.approx(1, abs=1e-6) and found.also["overlap"] == 1
    assert found.also["r2"] < 0.1


def test_similarity_matches_scipy(text_folder: Path):
    from scipy.stats import spearmanr

    a = RANDOM.standard_normal((60, 70))
    b = a + 0.5 * RANDOM.standard_normal(a.shape)
    found = measured(meter("float[b, d] y", tokenizer=text_folder), a, b)
    pairs = np.triu_indices(60, 1)

    def cosines(x: np.ndarray) -> np.ndarray:
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        return (unit @ unit.T)[pairs]

    assert found.value == pytest.approx(spearmanr(cosines(a), cosines(b)).statistic, abs=1e-4)


@pytest.mark.timing(seconds=8)
def test_similarity_of_many_texts_is_that_of_a_part(text_folder: Path):
    """Time and memory of all pairs grow with the square of the texts."""
    a = RANDOM.standard_normal((20 * MOST_PAIRED, 70)).astype(np.float32)
    b = a + 0.5 * RANDOM.standard_normal(a.shape).astype(np.float32)
    found = measured(meter("float[b, d] y", tokenizer=text_folder), a, b)
    part = measured(meter("float[b, d] y", tokenizer=text_folder), a[:1000], b[:1000])
    assert found.rows == MOST_PAIRED
    assert found.value == pytest.approx(part.value, abs=0.005)  # 3 standard errors of the part


def test_short_and_long_texts_are_measured_apart(text_folder: Path):
    """Long texts lost everything; over all pairs the two kinds would hide it."""
    a = RANDOM.standard_normal((80, 12, 16))
    a[40:] += 5
    b = a.copy()
    b[40:] = 5 + RANDOM.standard_normal((40, 12, 16))
    mask = np.ones((80, 12), np.int64)
    mask[:40, 3:] = 0
    data = Dataset([], [], [], 6, Calibration(), lengths=[3] * 200 + [12] * 200)
    found = meter("float[b, t, d] y", tokenizer=text_folder, data=data)
    found.add([a], [b], {"attention_mask": mask})
    worst, best = found.results()
    assert worst.lengths == "more than 6 tokens" and worst.value < 0.5
    assert best.value == pytest.approx(1) and best.rows == 40


def test_files_are_measured_apart():
    """One file lost everything; both files together would hide it."""
    a = RANDOM.standard_normal((80, 12, 16))
    a[40:] *= 0.1
    b = a.copy()
    b[40:] = 0.1 * RANDOM.standard_normal((40, 12, 16))
    batches = [
        RowBatch({"x": rows}, RowInfo(file))
        for file, rows in (("good.txt", a[:40]), ("bad.txt", a[40:]))
    ]
    files = [Dataset([], [], [[batch]], 12, Calibration(file=batch.info.file)) for batch in batches]
    found = meter(
        "float[b, t, d] y", data=Dataset([], [], [batches], 12, Calibration(), files=files)
    )
    found.add([a[:40]], [b[:40]], batches[0])
    found.add([a[40:]], [b[40:]], batches[1])
    worst, best = found.results()
    assert worst.file == "bad.txt" and worst.value < 0.5 and worst.to_json()["file"] == "bad.txt"
    assert best.file == "good.txt" and best.value == pytest.approx(1) and best.rows == 40


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("signature", ["float[b, t, d] y", "float[b, t, v] logits"])
def test_not_finite_output_is_a_large_loss(bad: float, signature: str):
    a = RANDOM.standard_normal((40, 5, 8))
    found = measured(meter(signature), a, np.full_like(a, bad))
    assert found.losses.bounded > 0.5
    assert np.isfinite([found.value, found.lower, found.p5]).all()


def test_masked_logits_of_both_models_are_equal():
    a = logits(40 * 5, 8).reshape(40, 5, 8)
    a[..., 2] = -np.inf
    assert measured(meter("float[b, t, v] logits"), a, a).value == 1


def test_a_bad_tail_is_a_loss_although_the_mean_is_good():
    a = RANDOM.standard_normal((400, 6, 32))
    b = a.copy()
    b[:28] += RANDOM.standard_normal((28, 6, 32)) * 0.4  # 7 % of the texts
    found = measured(meter("float[b, t, d] y"), a, b)
    assert found.value > 0.985 and found.p5 < 0.9
    assert found.losses.bounded == pytest.approx((1 - found.p5) / 5)


def test_second_condition_has_a_bound(text_folder: Path):
    """A choice must keep R^2 with a margin, a verification its value."""
    a = RANDOM.standard_normal((100, 6, 32))
    b = a + 0.1 * RANDOM.standard_normal(a.shape) * RANDOM.exponential(size=(100, 1, 1))
    similarity = new_meter("similarity")
    similarity.add(a, b, {})
    scores = similarity.scores()
    assert scores.second is not None and scores.second.value == scores.also["r2"]
    second, bound = 1 - scores.second.value, 1 - scores.second.bound(SELECTION_CONFIDENCE)
    assert second < bound < 2 * second
    found = measured(meter("float[b, t, d] y", tokenizer=text_folder), a, b)
    assert found.measure == "similarity" and found.losses == limited_losses(scores)
    assert found.losses.measured < bound <= found.losses.bounded


def test_loss_that_is_no_number_is_infinite_and_the_largest():
    def scores(value: float, rest: float, second: Scores | None = None) -> Scores:
        """Scores of 40 texts, of which all but one have the measure ``rest``."""
        texts = np.array([1.0, *[rest] * 39])
        return Scores("r2", value, texts, texts, 0.0, {}, second)

    losses = limited_losses(scores(0.99, 0.9, scores(0.97, 0.96)))
    assert losses.measured == 1 - 0.97 and losses.bounded == pytest.approx(0.1, abs=0.01)
    assert limited_losses(scores(0.99, 0.9, scores(float("nan"), 1.0))).measured == float("inf")
    good = quality_of("r2", 0.97, losses=Losses(0.03, 0.04))
    bad = good.model_copy(update={"losses": Losses(0.03, float("inf"))})
    assert largest_loss([good, bad], bounded=True) == float("inf")
    assert largest_loss([bad, good], bounded=False) == 0.03
    assert largest_loss([], bounded=True) == 0
    assert allowed_loss(0.9) == pytest.approx(0.1) and allowed_loss(1.0) == ROUNDING


def test_few_texts_have_no_interval():
    a = RANDOM.standard_normal((MIN_ROWS - 1, 5, 8))
    found = measured(meter("float[b, t, d] y"), a, a + 0.1)
    assert found.ci95 is None and found.lower == found.value


@settings(max_examples=30)
@given(rows=st.integers(4, 40), noise=st.floats(0, 2), seed=st.integers(0, 99))
def test_batches_do_not_matter(rows: int, noise: float, seed: int):
    random = np.random.default_rng(seed)
    a = random.standard_normal((rows, 3, 6))
    b = a + noise * random.standard_normal(a.shape)
    for signature in ("float[b, t, d] y", "float[b, t, v] logits"):
        whole, parts = meter(signature), meter(signature)
        whole.add([a], [b], {})
        for part in np.array_split(np.arange(rows), 3):
            if len(part):
                parts.add([a[part]], [b[part]], {})
        one, two = whole.results()[0], parts.results()[0]
        assert one.value == pytest.approx(two.value, abs=1e-9)
        assert one.lower == pytest.approx(two.lower, abs=1e-9)
        assert one.lower <= one.value <= 1 + 1e-12


# Coverage

LOSSES: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], float]] = {
    "exponential": (lambda random, n: random.exponential(1, n), 1.0),
    "gamma": (lambda random, n: random.gamma(0.5, 1, n), 0.5),
    "log-normal": (lambda random, n: random.lognormal(0, 0.5, n), float(np.exp(0.125))),
}


@pytest.mark.parametrize("rows", [30, 100, 1000])
@pytest.mark.parametrize("name", LOSSES)
def test_lower_bound_covers_the_mean_of_skewed_losses(name: str, rows: int):
    """In 1,000 draws a coverage of 93 % has a standard error of 0.8 %."""
    draw, mean = LOSSES[name]
    random = np.random.default_rng(rows)
    limit = 1 - 0.01 * mean
    covered = [mean_lower_bound(1 - 0.01 * draw(random, rows)) <= limit for _ in range(1000)]
    assert np.mean(covered) >= 0.93


def test_interval_of_similarity_covers_the_value_of_many_texts(text_folder: Path):
    """Pairs of the same text are dependent: the interval counts texts."""
    random = np.random.default_rng(1)
    a = random.standard_normal((1200, 70)) * np.linspace(0.3, 3, 70)
    b = a + 0.5 * random.standard_normal(a.shape)
    truth = measured(meter("float[b, d] y", tokenizer=text_folder), a, b).value
    found: list[Quality] = [
        measured(meter("float[b, d] y", tokenizer=text_folder), a[rows], b[rows])
        for rows in (random.choice(1200, 60, replace=False) for _ in range(150))
    ]
    assert np.mean([quality.lower <= truth for quality in found]) >= 0.92
    assert np.mean([quality.ci95[0] <= truth <= quality.ci95[1] for quality in found]) >= 0.91  # type: ignore[index]


@pytest.mark.parametrize(
    ("signature", "shape"),
    [
        ("float[b, d] sentence_embedding", (40, 96)),
        ("float[b, c] logits", (40, 5)),
        ("float[b, t, 96] hidden", (40, 4, 96)),
    ],
)
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_text_whose_output_is_not_finite_has_a_loss_of_one(
    signature: str, shape: tuple[int, ...], broken: float
):
    a = RANDOM.standard_normal(shape).astype(np.float32)
    b = a.copy()
    b[7] = broken
    found = measured(meter(signature), a, b)
    assert found.losses == (1.0, 1.0)
    assert np.isfinite(found.value) and "NaN" in found.describe()
    assert measured(meter(signature), b, b).losses.bounded == pytest.approx(0, abs=1e-9)


def test_padding_may_be_anything_in_either_layout():
    mask = np.arange(6) < np.arange(1, 41)[:, None] % 6 + 1
    a = RANDOM.standard_normal((40, 6, 8))
    b = a + 0.1 * RANDOM.standard_normal(a.shape)
    expected = measured(meter("float[b, t, 8] hidden"), a, b, mask.astype(np.int64))
    b[~mask] = np.nan
    flat = (x.reshape(-1, 8) for x in (a, b))
    found = measured(meter("float[n, 8] hidden", measure="r2"), *flat, mask.astype(np.int64))
    assert found.value == pytest.approx(expected.value, abs=1e-12)
    assert (found.rows, found.is_finite) == (40, True)


def test_pooled_vectors_are_compared_with_those_of_tokens(text_folder: Path):
    """The shadow of a service compares what is served with the output of the original."""
    a = RANDOM.standard_normal((40, 6, 8)).astype(np.float32)
    found = measured(meter("float[b, t, 8] hidden", tokenizer=text_folder), a, a.mean(axis=1))
    assert found.measure == "similarity" and found.value == pytest.approx(1, abs=1e-6)


def test_rows_that_are_not_finite_are_named():
    a = RANDOM.standard_normal((40, 4, 96)).astype(np.float32)
    b = a.copy()
    b[[7, 9]] = np.nan
    found = measured(meter("float[b, t, 96] hidden"), a, b)
    assert found.not_finite_rows == (7, 9) and found.to_json()["not_finite_rows"] == [7, 9]
    assert "7, 9" in found.describe()


def test_rows_that_are_nan_in_the_original_are_left_out_and_named():
    a = RANDOM.standard_normal((40, 5)).astype(np.float32)
    b = a + 0.1 * RANDOM.standard_normal(a.shape).astype(np.float32)
    rest = np.delete(np.arange(40), [3, 20])
    expected = measured(meter("float[b, c] logits"), a[rest], b[rest])
    a[[3, 20]] = np.nan
    found = measured(meter("float[b, c] logits"), a, b)
    assert (found.rows, found.excluded_rows, found.is_finite) == (38, (3, 20), True)
    assert found.value == pytest.approx(expected.value, abs=1e-12)
    assert "3, 20" in found.describe()


def test_outputs_of_one_value_are_measured_once():
    outputs = "float[b, d] sentence_embedding, float[b, d] copy"
    model = ir.from_onnx_text(
        f"{HEADER} (float[b, t] x) => ({outputs}) "
        "{ sentence_embedding = test.Model(x, x) copy = Identity(sentence_embedding) }"
    )
    model.graph.outputs[1].name = "461"
    counted = QualityMeter(model, Artifact(Path("model.onnx")))
    a = RANDOM.standard_normal((40, 96)).astype(np.float32)
    counted.add([a, a], [a, a], {"x": a})
    (found,) = counted.results()
    assert found.outputs == "sentence_embedding = 461"
    assert found.to_json()["same_outputs"] == ["461"]


def test_p5_of_top1_is_the_percentile_of_the_agreement():
    """Half of the tokens of each tenth text change their best token; its KL is small."""
    a = RANDOM.standard_normal((40, 8, 100)).astype(np.float32)
    b = a.copy()
    for text in range(0, 40, 10):
        for token in range(4):
            first, second = np.argsort(-a[text, token])[:2]
            b[text, token, [first, second]] = a[text, token, [second, first]]
    found = measured(meter("float[b, t, v] logits"), a, b)
    agreement = (a.argmax(-1) == b.argmax(-1)).mean(1)
    assert found.measure == "top1"
    assert found.p5 == pytest.approx(np.percentile(agreement, 5))
    assert found.losses.measured == 1 - found.value < (1 - found.p5) / TAIL
    single = np.full(40, 0.6)
    kl = Scores("kl", 0.99, single, single, 0.0, {})
    top1 = Scores("top1", 0.99, np.ones(40), np.zeros(40), 0.0, {}, second=kl)
    assert limited_losses(top1).measured == (1 - kl.p5) / TAIL, "a promise limits that of KL"
