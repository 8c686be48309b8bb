"""The closed-form fit: what it solves, what it never makes worse, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnserve.calibration.cross_validation import RIDGES
from attnserve.calibration.map_moments import last_map_moments
from attnserve.calibration.original_outputs import collect_outputs
from attnserve.calibration.refit import refit
from attnserve.calibration.ridge import FitMoments, NormalEquations
from attnserve.checks.certify import read_attention
from attnserve.context import RunContext
from attnserve.runtime.interface import Batch
from graph_passes.errors import InvalidData
from graph_passes.matching.find import find_attention
from graph_passes.passes.fuse_residuals import residual_of
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons
from graph_passes.passes.reuse_attention import ReuseAttention
from graph_passes.passes.skip_attention import AffineMap, SkipAttention, skipped
from tests.errors import raises
from tests.graph_passes.graphs import D, H, V, layers, observing, run, text_of, weights
from tests.graph_passes.graphs import graph as graph_of
from tests.graph_passes.layouts import SEQUENCE_FIRST

seeds = st.integers(0, 10**6)


@dataclass
class Sample:
    """Tokens, targets that are nearly affine in them, and a map to start from."""

    c: np.ndarray
    t: np.ndarray
    prior: np.ndarray

    @property
    def moments(self) -> FitMoments:
        return FitMoments.of(self.c, self.t)

    def fit(self, ridge: float) -> tuple[np.ndarray, np.ndarray]:
        return NormalEquations(self.moments, self.prior).solve(ridge)


def sample(seed: int, tokens: int = 50, N: int = 6, width: int = 4) -> Sample:
    random = np.random.default_rng(seed)
    c = random.standard_normal((tokens, N)) @ random.standard_normal((N, N))
    c += random.standard_normal(N)
    truth = random.standard_normal((N, width))
    t = c @ truth + 0.3 * random.standard_normal((tokens, width)) + random.standard_normal(width)
    return Sample(c, t, truth + 0.5 * random.standard_normal((N, width)))


# Moments


@given(seed=seeds, tokens=st.integers(1, 50))
def test_moments_error_is_the_sum_over_tokens(seed: int, tokens: int):
    given = sample(seed, tokens)
    random = np.random.default_rng(seed + 1)
    weight, bias = random.standard_normal((6, 4)), random.standard_normal(4)
    direct = np.sum((given.c @ weight + bias - given.t) ** 2)
    assert given.moments.error(weight, bias) == pytest.approx(direct, rel=1e-9, abs=1e-9)
    spread = np.sum((given.t - given.t.mean(0)) ** 2)
    assert given.moments.variation == pytest.approx(spread, rel=1e-9, abs=1e-9)
    covariance = np.cov(given.c, rowvar=False, bias=True)
    np.testing.assert_allclose(given.moments.covariance, covariance, rtol=1e-9, atol=1e-9)


@given(seed=seeds, at=st.integers(0, 50))
def test_moments_are_additive(seed: int, at: int):
    given = sample(seed)
    parts = FitMoments.of(given.c[:at], given.t[:at]) + FitMoments.of(given.c[at:], given.t[at:])
    for name, whole in vars(given.moments).items():
        np.testing.assert_allclose(vars(parts)[name], whole, rtol=1e-9, atol=1e-9)


# The ridge


@given(seed=seeds)
def test_solve_tiny_ridge_is_least_squares(seed: int):
    given = sample(seed)
    weight, bias = given.fit(1e-12)
    with_one = np.hstack([given.c, np.ones((len(given.c), 1))])
    best = np.linalg.lstsq(with_one, given.t, rcond=None)[0]
    np.testing.assert_allclose(weight, best[:-1], rtol=1e-4, atol=1e-4)
    assert given.moments.error(weight, bias) == pytest.approx(
        np.sum((with_one @ best - given.t) ** 2), rel=1e-6
    )


def test_solve_infinite_ridge_changes_only_the_bias():
    given = sample(0)
    weight, bias = given.fit(np.inf)
    np.testing.assert_array_equal(weight, given.prior)
    np.testing.assert_allclose(bias, (given.t - given.c @ given.prior).mean(0), atol=1e-12)
    np.testing.assert_allclose(given.fit(1e9)[0], given.prior, atol=1e-6)


@given(seed=seeds, ridge=st.sampled_from([ridge for ridge in RIDGES if np.isfinite(ridge)]))
def test_solve_ridge_equals_augmented_least_squares(seed: int, ridge: float):
    """min sum |c W + b - t|^2 / n + ridge * unit |W - W_O|^2, unit being the mean variance of c."""
    given = sample(seed, tokens=20)
    weight, bias = given.fit(ridge)
    unit = np.var(given.c, axis=0).mean()
    root = np.sqrt(ridge * unit * len(given.c))
    rows = np.vstack(
        [np.hstack([given.c, np.ones((20, 1))]), np.hstack([root * np.eye(6), np.zeros((6, 1))])]
    )
    best = np.linalg.lstsq(rows, np.vstack([given.t, root * given.prior]), rcond=None)[0]
    np.testing.assert_allclose(weight, best[:-1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bias, best[-1], rtol=1e-5, atol=1e-5)


@given(seed=seeds)
def test_solve_stronger_ridge_is_closer_to_the_prior(seed: int):
    given = sample(seed)
    found = [given.fit(ridge) for ridge in RIDGES]
    distances = [float(np.linalg.norm(weight - given.prior)) for weight, _ in found]
    errors = [given.moments.error(*each) for each in found]
    assert np.all(np.diff(distances) <= 1e-9) and distances[-1] == 0
    assert np.all(np.diff(errors) >= -1e-6)
    assert errors[-1] <= given.moments.error(given.prior, np.zeros(4)) + 1e-6


def test_solve_fewer_tokens_than_dimensions_is_finite():
    given = sample(0, tokens=1)
    for weight, bias in map(given.fit, RIDGES):
        assert np.isfinite(weight).all()
        np.testing.assert_allclose(given.c @ weight + bias, given.t, atol=1e-6)
        np.testing.assert_allclose(weight, given.prior, atol=1e-6)  # nothing varies


def test_a_constant_is_the_mean():
    given = sample(0)
    empty = Sample(np.zeros((50, 0)), given.t, np.zeros((0, 4)))
    for weight, bias in map(empty.fit, RIDGES):
        assert weight.shape == (0, 4)
        np.testing.assert_allclose(bias, given.t.mean(0), atol=1e-12)


# Models

ONE, TWO = "attention_0", "attention_1"
MASK = """
        real = Cast <to = 1> (attention_mask)
        hidden = Sub(one, real)
        low_hidden = Mul(hidden, low)
        wide = Unsqueeze(low_hidden, a12)
        m = Add(s, wide)"""
TOKENS = "int64[batch, sequence] attention_mask"


def model(count: int = 2, **options: object) -> ir.Model:
    inputs = options.pop("inputs", f"float[batch, sequence, {D}] x, {TOKENS}")
    constants = {"a12": np.array([1, 2], np.int64)}
    return layers(count, inputs=inputs, constants=constants, **{"mask": MASK, **options})  # pyright: ignore


def texts(seed: int = 0, *, count: int = 6, rows: int = 4, longest: int = 9) -> list[Batch]:
    """Batches of tokens with a mean of their own, padded to various widths."""
    random = np.random.default_rng(seed)
    batches: list[Batch] = []
    for _ in range(count):
        width = int(random.integers(2, longest, endpoint=True))
        lengths = random.integers(1, width, rows, endpoint=True)
        x = random.standard_normal((rows, width, D)) + np.linspace(-1, 1, D)
        mask = np.arange(width) < lengths[:, None]
        batches.append({"x": x.astype(np.float32), "attention_mask": mask.astype(np.int64)})
    return batches


def pruned(original: ir.Model, masks: dict[str, Sequence[int]] | None = None) -> ir.Model:
    return PruneHeads(masks or {ONE: (1, 0, 1), TWO: (0, 1, 1)})(original.clone()).model


@pytest.fixture
def original() -> ir.Model:
    return model()


@pytest.fixture
def graph(original: ir.Model) -> ir.Model:
    return pruned(original)


def distance(
    graph: ir.Model, original: ir.Model, batches: Sequence[Batch], names: Sequence[str]
) -> dict[str, float]:
    """How far what attentions add is from what they should add: what is missing to the original's
    sum with the residual. Over real tokens; found without refit."""
    found: dict[str, float] = {}
    for name in names:
        sides: list[list[np.ndarray]] = []
        for side in (graph, original):
            places = {block.name: block.output for block in find_attention(side).blocks}
            places |= {gap.name: gap for gap in skipped(side)}
            output = places[name].output
            beside, _ = residual_of(output) or (None, None)
            values = [output] if beside is None else [output, beside]
            session = observing(side, values)
            rows = [
                [made[batch["attention_mask"].astype(bool)] for made in
                 session.run(None, batch)[-len(values) :]]
                for batch in batches
            ]  # fmt: skip
            sides.append([np.concatenate(part).astype(np.float64) for part in zip(*rows)])  # noqa: B905
        (new, *beside_new), (old, *beside_old) = sides
        wanted = old + beside_old[0] - beside_new[0] if beside_old else old
        found[name] = float(
            (np.sum((new - wanted) ** 2) / np.sum((wanted - wanted.mean(0)) ** 2)) ** 0.5
        )
    return found


def constants(graph: ir.Model) -> dict[str, np.ndarray]:
    return {
        name: value.const_value.numpy()
        for name, value in graph.graph.initializers.items()
        if value.const_value is not None
    }


def output_weights(graph: ir.Model) -> list[np.ndarray]:
    blocks = find_attention(graph).blocks
    return [block.output.matrix() for block in blocks if block.output is not None]


def test_refit_reduces_and_reports_the_error(original: ir.Model, graph: ir.Model):
    before = distance(graph, original, texts(), [ONE, TWO])
    found = refit(graph, original, [ONE, TWO], texts())
    after = distance(graph, original, texts(), [ONE, TWO])
    assert list(found) == [ONE, TWO]
    for name in (ONE, TWO):
        assert found[name].relative_error == pytest.approx(after[name], rel=1e-3)
        assert after[name] < 0.85 * before[name]
    # The second layer was judged behind the first as it was fitted by then.
    assert found[ONE].relative_error_before == pytest.approx(before[ONE], rel=1e-3)
    assert found[TWO].relative_error_before != pytest.approx(before[TWO], rel=1e-3)


def test_refit_reduces_the_error_on_unseen_text(original: ir.Model, graph: ir.Model):
    unseen = texts(99)
    before = distance(graph, original, unseen, [ONE, TWO])
    refit(graph, original, [ONE, TWO], texts(count=20))
    after = distance(graph, original, unseen, [ONE, TWO])
    assert after[ONE] < 0.8 * before[ONE] and after[TWO] < 0.8 * before[TWO]


def test_refit_graph_still_matches_and_keeps_its_interface(original: ir.Model, graph: ir.Model):
    refit(graph, original, [ONE, TWO], texts())
    matches = read_attention(graph)
    assert [block.name for block in matches.blocks] == [ONE, TWO]
    assert [block.num_heads for block in matches.blocks] == [2, 2]
    assert not matches.unmatched
    for side in ("inputs", "outputs"):
        ours, theirs = (getattr(each.graph, side) for each in (graph, original))
        assert [(v.name, v.dtype, str(v.shape)) for v in ours] == [
            (v.name, v.dtype, str(v.shape)) for v in theirs
        ]


def test_refit_keeps_other_weights_and_layers(original: ir.Model):
    graph = pruned(original, {ONE: (1, 0, 1)})
    before = constants(graph)
    refit(graph, original, [ONE], texts())
    after = constants(graph)
    gone = before.keys() - after.keys()
    assert len(gone) <= 2, "W_O of the layer, and its bias"
    for name in before.keys() & after.keys():
        np.testing.assert_array_equal(after[name], before[name])
    np.testing.assert_array_equal(output_weights(graph)[1], weights(1)["Wo"])


def test_refit_of_a_layer_compensates_earlier_layers(original: ir.Model):
    """The second layer is whole, and computes what it did: what is missing is in the residual."""
    graph = pruned(original, {ONE: (1, 0, 1)})
    before = distance(graph, original, texts(), [ONE, TWO])
    found = refit(graph, original, [TWO], texts())
    after = distance(graph, original, texts(), [ONE, TWO])
    assert after[ONE] == before[ONE]
    assert found[TWO].relative_error == pytest.approx(after[TWO], rel=1e-3)
    assert after[TWO] < 0.85 * before[TWO]


def test_refit_disabled_only_reports_the_error(original: ir.Model, graph: ir.Model):
    text, before = text_of(graph), constants(graph)
    found = refit(graph, original, [ONE, TWO], texts(), fit=False)
    assert text_of(graph) == text
    after = constants(graph)
    assert after.keys() == before.keys()
    assert all(np.array_equal(after[name], array) for name, array in before.items())
    measured = distance(graph, original, texts(), [ONE, TWO])
    for name, done in found.items():
        assert done.relative_error == done.relative_error_before
        assert done.relative_error == pytest.approx(measured[name], rel=1e-3)


def test_refit_of_an_unchanged_model_changes_nothing(original: ir.Model):
    graph = original.clone()
    found = refit(graph, original, [ONE, TWO], texts())
    for done in found.values():
        assert done.relative_error_before < 1e-5 and done.relative_error < 1e-5
    for mine, theirs in zip(output_weights(graph), output_weights(original), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_refit_unknown_names_are_ignored(original: ir.Model):
    assert refit(original.clone(), original, ["nothing"], texts()) == {}
    assert refit(original.clone(), original, [], texts()) == {}


def test_refit_leaves_a_block_whose_outputs_are_neurons_of_the_next():
    random = np.random.default_rng(0)
    body = """
        h1 = MatMul(x, W1)
        a1 = Relu(h1)
        h2 = MatMul(a1, W2)
        a2 = Relu(h2)
        out = MatMul(a2, W3)"""
    sizes = {"W1": (D, 2 * D), "W2": (2 * D, 2 * D), "W3": (2 * D, D)}
    constants = {n: random.standard_normal(s).astype(np.float32) for n, s in sizes.items()}
    inputs = f"float[batch, sequence, {D}] x, {TOKENS}"
    original = graph_of(body, inputs=inputs, constants=constants)
    first, second = "feed_forward_0", "feed_forward_1"
    masks = {name: np.arange(2 * D) % 3 != 0 for name in (first, second)}
    rewritten = PruneNeurons(masks)(original.clone()).model
    errors = refit(rewritten, original, [first, second], texts())
    assert list(errors) == [second]
    assert errors[second].relative_error < errors[second].relative_error_before


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("count", "rows", "longest"), [(1, 1, 2), (1, 4, 9), (2, 1, 3), (5, 1, 3)])
def test_refit_on_little_text_does_not_increase_the_error(
    count: int, rows: int, longest: int, seed: int
):
    """On unseen text the fit to a few tokens is no worse than no fit, but for a hundredth."""
    original, names = model(), [ONE, TWO]
    graph, unseen = pruned(original), texts(99, count=10)
    before = distance(graph, original, unseen, names)
    few = texts(seed, count=count, rows=rows, longest=longest)
    refit(graph, original, names, few)
    after = distance(graph, original, unseen, names)
    for name in names:
        assert after[name] <= 1.01 * before[name], (before, after)


def test_refit_on_one_text_changes_nothing(original: ir.Model, graph: ir.Model):
    before = text_of(graph), constants(graph)
    found = refit(graph, original, [ONE, TWO], texts(count=1, rows=1))
    assert {done.ridge for done in found.values()} == {None}
    assert all(done.relative_error == done.relative_error_before for done in found.values())
    assert text_of(graph) == before[0] and constants(graph).keys() == before[1].keys()


def test_refit_on_one_batch_cross_validates_its_texts(original: ir.Model):
    """Its texts judge each other, of whatever length they are."""
    found = refit(pruned(original), original, [ONE, TWO], texts(count=1, rows=60))
    for done in found.values():
        assert done.ridge is not None and done.relative_error < done.relative_error_before


def test_refit_of_a_replaced_attention_needs_one_text(original: ir.Model):
    """It has no weights yet that could be better."""
    found = refit(skip(original), original, [ONE], texts(count=1, rows=1))[ONE]
    assert found.ridge == 1.0 and found.relative_error < found.relative_error_before


def test_refit_cross_validation_does_not_depend_on_batches(original: ir.Model):
    many = texts(count=1, rows=30)[0]
    alone = [{name: array[i : i + 1] for name, array in many.items()} for i in range(30)]
    pair = [refit(pruned(original), original, [ONE, TWO], batches) for batches in ([many], alone)]
    for name in (ONE, TWO):
        assert pair[0][name].ridge == pair[1][name].ridge
        assert pair[0][name].relative_error == pytest.approx(pair[1][name].relative_error, rel=1e-4)


# Padding


def padded(batches: Sequence[Batch], more: int, value: float) -> list[Batch]:
    """The same texts in wider batches, all padding being this value."""
    wide: list[Batch] = []
    for batch in batches:
        real = batch["attention_mask"].astype(bool)
        x = np.where(real[..., None], batch["x"], np.float32(value))
        x = np.pad(x, ((0, 0), (0, more), (0, 0)), constant_values=value)
        mask = np.pad(batch["attention_mask"], ((0, 0), (0, more)))
        wide.append({"x": x.astype(np.float32), "attention_mask": mask})
    return wide


@pytest.mark.parametrize(("more", "value"), [(0, 0.0), (3, 0.0), (0, 100.0), (5, -1e4)])
def test_refit_ignores_padding(more: int, value: float, original: ir.Model):
    fitted: list[list[np.ndarray]] = []
    errors: list[list[float]] = []
    for batches in (texts(), padded(texts(), more, value)):
        graph = pruned(original)
        found = refit(graph, original, [ONE, TWO], batches)
        fitted.append(output_weights(graph))
        errors.append([done.relative_error for done in found.values()])
    np.testing.assert_allclose(errors[1], errors[0], rtol=1e-4)
    for mine, theirs in zip(*fitted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-3, rtol=1e-3)


FLAT = {
    "output": """
        shape = Shape(x)
        rows = Reshape(c, flat_context)
        o = MatMul(rows, Wo)
        written = Add(o, bo)
        out = Reshape(written, shape)"""
}
LAYOUTS = {
    "batch first": ({}, "float[batch, sequence, 12] x", False),
    "tokens first": (SEQUENCE_FIRST, "float[sequence, batch, 12] x", True),
    "flattened": (FLAT, "float[batch, sequence, 12] x", False),
}


@pytest.mark.parametrize("width", [5, 4], ids=["wide", "square"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_moments_ignore_padding_in_any_layout(layout: str, width: int):
    parts, x, turned = LAYOUTS[layout]
    graph = layers(
        1,
        inputs=f"{x}, {TOKENS}",
        constants={"a12": np.array([1, 2], np.int64), "flat_context": np.array([-1, H * V])},
        **{"mask": MASK, **parts},
    )
    mask = np.arange(width) < np.array([1, 2, width, 3])[:, None]
    tokens = np.random.default_rng(0).standard_normal((4, width, D)).astype(np.float32)
    batch = {
        "x": tokens.swapaxes(0, 1).copy() if turned else tokens,
        "attention_mask": mask.astype(np.int64),
    }
    (block,) = find_attention(graph).blocks
    found = dict(last_map_moments(graph, [block], [batch]))[block.name]
    out = run(graph, batch) - batch["x"]  # B S D, or S B D
    real = (out.swapaxes(0, 1) if turned else out)[mask].astype(np.float64)
    assert found.count == mask.sum()
    np.testing.assert_allclose(found.t, real.sum(0), atol=1e-4)
    assert found.tt == pytest.approx(np.sum(real**2), rel=1e-5)


# Shared weights


def test_refit_keeps_shared_output_projections_shared():
    original = model(3, same=("Wo", "bo"))
    names = [ONE, TWO, "attention_2"]
    graph = pruned(original, dict.fromkeys(names, (1, 0, 1)))
    assert len({block.output.weight for block in find_attention(graph).blocks if block.output}) == 1
    before = distance(graph, original, texts(), names)
    found = refit(graph, original, names, texts())
    blocks = read_attention(graph).blocks
    assert len({block.output.weight for block in blocks if block.output}) == 1
    wide = [name for name, array in constants(graph).items() if array.shape == (2 * V, D)]
    assert len(wide) == 1, "one constant for all three"
    assert len({(done.relative_error, done.ridge) for done in found.values()}) == 1
    after = distance(graph, original, texts(), names)
    assert sum(after.values()) < sum(before.values())


def test_refit_unchanged_layer_keeps_its_shared_weight():
    original = model(2, same=("Wo", "bo"))
    graph = pruned(original, {ONE: (1, 0, 1)})
    refit(graph, original, [ONE], texts())
    np.testing.assert_array_equal(output_weights(graph)[1], weights()["Wo"])


@pytest.mark.parametrize("shared", [False, True], ids=["own weights", "the first and the third"])
def test_refit_equals_refits_of_one_weight_at_a_time(shared: bool):
    """Each sees what was fitted before it: nothing that was computed before that is used."""
    original = model(3)
    if shared:
        first, third = (block.output for block in find_attention(original).blocks[::2])
        assert first is not None and third is not None
        ir.convenience.replace_all_uses_with(third.weight.value, first.weight.value)
        ir.convenience.replace_all_uses_with(
            original.graph.initializers["bo_2"], original.graph.initializers["bo_0"]
        )
    names = [ONE, TWO, "attention_2"]
    steps = [[ONE, "attention_2"], [TWO]] if shared else [[name] for name in names]
    once, stepwise = (pruned(original, dict.fromkeys(names, (1, 0, 1))) for _ in range(2))
    found = refit(once, original, names, texts())
    expected = {n: f for each in steps for n, f in refit(stepwise, original, each, texts()).items()}
    assert found.keys() == expected.keys()
    for name, done in found.items():
        assert done.ridge == expected[name].ridge
        assert done.relative_error == pytest.approx(expected[name].relative_error, rel=1e-4)
    for mine, theirs in zip(output_weights(once), output_weights(stepwise), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_refit_accepts_collected_outputs():
    original, batches, names = model(), texts(), [ONE, TWO]
    outputs = collect_outputs(original, [*names, "nothing"], batches)
    assert list(outputs.arrays) == names and list(map(len, outputs.arrays.values())) == [6, 6]
    candidates: list[dict[str, Sequence[int]]] = [
        {ONE: (1, 0, 1), TWO: (0, 1, 1)},
        {ONE: (1, 1, 0)},
    ]
    for masks in candidates:
        mine, theirs = pruned(original, masks), pruned(original, masks)
        found = refit(mine, original, list(masks), batches, original_outputs=outputs)
        for name, done in refit(theirs, original, list(masks), batches).items():
            assert found[name].ridge == done.ridge
            assert found[name].relative_error == pytest.approx(done.relative_error, rel=1e-4)
        for a, b in zip(output_weights(mine), output_weights(theirs), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)


# Other rewrites


def test_refit_of_reused_attention_reduces_the_error(original: ir.Model):
    graph = original.clone()
    ReuseAttention({TWO: {0: (ONE, 2), 2: (ONE, 1)}})(graph)
    unseen = texts(99, count=20)
    before = distance(graph, original, unseen, [TWO])[TWO]
    found = refit(graph, original, [TWO], texts(count=40))
    assert found[TWO].relative_error < found[TWO].relative_error_before
    assert distance(graph, original, unseen, [TWO])[TWO] < before
    assert [block.form for block in read_attention(graph).blocks] == ["standard", "reuse"]


def skip(original: ir.Model, name: str = ONE, *, affine: bool = True) -> ir.Model:
    weight = np.zeros((D, D)) if affine else None
    return SkipAttention({name: AffineMap(weight, np.zeros(D))})(original.clone()).model


def test_affine_replacement_of_affine_attention_is_exact(original: ir.Model):
    """A text of one token attends to itself alone: out = (x W_V + b_V) W_O + b_O."""
    graph = skip(original)
    alone = texts(count=20, rows=8, longest=2)
    alone = [{name: array[:, :1] for name, array in batch.items()} for batch in alone]
    found = refit(graph, original, [ONE], alone)
    assert found[ONE].relative_error_before > 0.5
    assert found[ONE].relative_error < 1e-3
    (gap,) = skipped(graph)
    w = weights(0)
    assert gap.affine.weight is not None
    np.testing.assert_allclose(gap.affine.weight, w["Wv"] @ w["Wo"], atol=1e-3)
    np.testing.assert_allclose(gap.affine.bias, w["bv"] @ w["Wo"] + w["bo"], atol=1e-3)
    unseen = {"x": np.ones((3, 1, D), np.float32), "attention_mask": np.ones((3, 1), np.int64)}
    np.testing.assert_allclose(run(graph, unseen), run(original, unseen), atol=2e-3)


def test_a_constant_is_the_mean_output(original: ir.Model):
    graph = skip(original, affine=False)
    found = refit(graph, original, [ONE], texts())
    assert found[ONE].relative_error == pytest.approx(1, abs=1e-6)  # all its variation is lost
    (gap,) = skipped(graph)
    assert gap.affine.weight is None
    (block, _) = find_attention(original).blocks
    moments = dict(last_map_moments(original, [block], texts()))[ONE]
    np.testing.assert_allclose(gap.affine.bias, moments.t / moments.count, atol=1e-5)


def test_affine_replacement_is_at_least_as_good_as_a_constant(original: ir.Model):
    errors = {
        affine: refit(skip(original, affine=affine), original, [ONE], texts(count=20))[ONE]
        for affine in (True, False)
    }
    assert errors[True].relative_error < errors[False].relative_error


def test_refit_of_a_replaced_attention_can_be_repeated(original: ir.Model):
    graph = skip(original)
    first = refit(graph, original, [ONE], texts())[ONE]
    second = refit(graph, original, [ONE], texts())[ONE]
    assert second.relative_error_before == pytest.approx(first.relative_error, rel=1e-4)
    assert second.relative_error == pytest.approx(first.relative_error, rel=1e-3)
    assert len(skipped(graph)) == 1


def test_error_of_constant_attention_is_finite():
    """Values of zero: the output is its bias, everywhere."""
    original = model(1)
    for name in ("Wv_0", "bv_0"):
        value = original.graph.initializers[name]
        assert value.const_value is not None
        value.const_value = ir.tensor(np.zeros_like(value.const_value.numpy()), name=name)
    for graph in (pruned(original, {ONE: (1, 0, 1)}), skip(original)):
        found = refit(graph, original, [ONE], texts())[ONE]
        assert np.isfinite(found.relative_error_before)
        assert found.relative_error < 1e-5


# Data that does not work


def test_refit_of_padding_only_is_refused(original: ir.Model):
    empty = [{**b, "attention_mask": np.zeros_like(b["attention_mask"])} for b in texts()]
    for what in (
        lambda: refit(pruned(original), original, [ONE], empty),
        lambda: list(last_map_moments(original, find_attention(original).blocks, empty)),
    ):
        with raises(InvalidData, "calibration.no_token", "attention_0"):
            what()


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_refit_of_non_finite_activations_is_refused(value: float, original: ir.Model):
    batches = texts()
    batches[-1]["x"][0, 0] = value
    text = text_of(graph := pruned(original))
    with raises(InvalidData, "calibration.not_finite", "attention_0"):
        refit(graph, original, [ONE, TWO], batches)
    assert text_of(graph) == text, "nothing was changed"


def test_refit_invalid_inputs_are_refused(original: ir.Model):
    wrong = [{**batch, "x": batch["x"][..., :5]} for batch in texts()]
    with raises(InvalidData, "session.inputs_refused", "x (4, "):
        refit(pruned(original), original, [ONE], wrong)


def test_refit_progress_reaches_the_total():
    original, seen = model(), list[tuple[int, int]]()
    refit(
        pruned(original), original, [ONE, TWO], texts(),
        context=RunContext(progress=lambda stage, done, total: seen.append((done, total))),
    )  # fmt: skip
    assert [done for done, _ in seen] == list(range(1, 13)) and seen[-1] == (12, 12)
