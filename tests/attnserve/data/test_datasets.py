"""Calibration data, and its moments against numpy computations of single sentences."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnserve.calibration.moments import collect_moments
from attnserve.checks.certify import read_attention
from attnserve.context import RunContext
from attnserve.data.datasets import Dataset, load_inputs
from attnserve.data.file_rows import BATCH_SIZE
from attnserve.data.row_batches import thinned
from attnserve.models.artifact import Artifact, open_artifact
from attnserve.models.masks import token_mask
from attnserve.models.onnx_files import load_model
from attnserve.options import Data
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import InvalidArgument, InvalidData
from tests.errors import raises
from tests.files import write_lines
from tests.graph_passes.graphs import observing

HEADER = '<ir_version: 8, opset_import: ["" : 17]> g'
IDS = f"{HEADER} (int64[batch, seq] input_ids, int64[batch, seq] attention_mask)"
COPY = f"{IDS} => (int64[batch, seq] y) {{ y = Mul(input_ids, attention_mask) }}"


def read(path: Path, artifact: Artifact, **options: object) -> Dataset:
    return load_inputs(path, load_model(artifact), artifact, **options)  # type: ignore[arg-type]


def rows(batches: list | tuple | object) -> int:
    return sum(len(batch["input_ids"]) for batch in batches)  # type: ignore[union-attr]


# Text


def texts(batches: Iterable[Any]) -> set[tuple[int, ...]]:
    """The tokens of each row, without padding."""
    return {
        tuple(ids[mask != 0])
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    }


def test_load_inputs_splits_the_distinct_sentences(tiny: Path, sentences: Path):
    data = read(sentences, open_artifact(tiny))
    distinct = data.source.distinct_rows
    parts = [data.fit, data.choose, *data.verify]
    assert [rows(part) for part in parts[1:]] == [distinct // 7] * 3
    assert sum(map(rows, parts)) == distinct
    found = [texts(part) for part in parts]
    assert len(set.union(*found)) == sum(map(len, found)) == distinct, "parts are disjoint"
    assert (data.source.file, data.source.rows) == ("sentences.txt", 60)
    assert data.source.fit_tokens < data.source.tokens
    assert len(data.source.sha256) == 64
    assert max(len(batch["input_ids"]) for batch in data.fit) == BATCH_SIZE


def test_load_inputs_removes_duplicates_before_the_split(
    tiny: Path, sentences: Path, tmp_path: Path
):
    once = read(sentences, open_artifact(tiny))
    (tmp_path / "twice.txt").write_text(2 * sentences.read_text())
    twice = read(tmp_path / "twice.txt", open_artifact(tiny))
    assert twice.source.rows == 2 * once.source.rows
    assert twice.source.distinct_rows == once.source.distinct_rows
    assert texts(twice.fit).isdisjoint(texts(twice.held_out))


def test_held_out_rows_come_from_the_whole_file_and_all_lengths(tmp_path: Path):
    """10,000 rows sorted by length: each part has about as many of each quarter."""
    model = ir.from_onnx_text(f"{HEADER} (float[b, t] x) => (float[b, t] y) {{ y = Neg(x) }}")
    folder = tmp_path / "rows"
    folder.mkdir()
    for length in range(1, 41):
        rows = np.zeros((250, length), np.float32)
        rows[:, 0] = np.arange(250) + 250 * (length - 1)  # the place in the file
        np.savez(folder / f"{length:02}.npz", x=rows)
    data = load_inputs(folder, model, Artifact(tmp_path / "model.onnx"))
    for part in (data.choose, *data.verify):
        places = np.concatenate([batch["x"][:, 0] for batch in part])
        quarters = np.histogram(places, bins=4, range=(0, 10_000))[0]
        assert len(places) == 400 and quarters.min() >= 80


def test_split_depends_on_the_rows_alone(tiny: Path, sentences: Path):
    one, two = (read(sentences, open_artifact(tiny)) for _ in range(2))
    assert texts(one.choose) == texts(two.choose) and texts(one.to_verify) == texts(two.to_verify)


def test_load_inputs_without_split_has_all_rows_in_each_part(tiny: Path, sentences: Path):
    data = read(sentences, open_artifact(tiny), split=False)
    assert rows(data.fit) == rows(data.choose) == rows(data.to_verify) == 60


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, (1, 1, 1)), (2, (1, 1, 1)), (3, (2, 1, 1)), (4, (1, 1, 2)), (9, (6, 1, 2))],
)
def test_load_inputs_few_sentences_fill_all_parts(
    tiny: Path, tmp_path: Path, count: int, expected: tuple[int, ...]
):
    words = ["a", "the", "man", "woman", "dog", "cat", "child", "is", "are"]
    (tmp_path / "few.txt").write_text("\n".join(words[:count]))
    data = read(tmp_path / "few.txt", open_artifact(tiny))
    assert (rows(data.fit), rows(data.choose), rows(data.to_verify)) == expected


@pytest.mark.parametrize(
    ("rows", "lengths", "expected"),
    [(80, (3, 60), True), (80, (20, 60), False), (40, (3, 60), False)],
    ids=["short and long", "alike", "too few"],
)
def test_length_edge_separates_short_and_long_texts(
    tiny: Path, tmp_path: Path, rows: int, lengths: tuple[int, int], expected: bool
):
    lines = ["dog " * n for n in lengths for _ in range(rows)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    edge = read(tmp_path / "text.txt", open_artifact(tiny), split=False).length_edge
    assert (edge is not None) is expected
    assert edge is None or lengths[0] < edge < lengths[1]


def test_short_texts_are_joined_up_to_the_requested_length(tiny: Path, sentences: Path):
    """Joined rows are made within each part, so that parts stay disjoint."""
    plain, joined = (read(sentences, open_artifact(tiny), sequence=n) for n in (None, 60))
    assert plain.source.joined_rows is None and joined.source.joined_to == 60
    for before, after in ((plain.fit, joined.fit), (plain.choose, joined.choose)):
        added = texts(after) - texts(before)
        assert texts(before) < texts(after)
        assert max(map(len, added)) > 2 * max(map(len, texts(before)))
        assert max(map(len, added)) <= 60
    assert joined.length == plain.length


def test_short_texts_are_joined_over_the_requested_range(tiny: Path, sentences: Path):
    plain, joined = (read(sentences, open_artifact(tiny), sequence=n) for n in (None, (40, 60)))
    added = texts(joined.fit) - texts(plain.fit)
    # The last row of a part has the texts that are left.
    assert sorted(map(len, added))[1] >= 40 and max(map(len, added)) <= 60
    assert joined.source.joined_to == (40, 60)


def test_texts_are_joined_up_to_the_maximum_length(tiny: Path, sentences: Path):
    """Longer texts are cut by the service too."""
    data = read(sentences, open_artifact(tiny), sequence=10_000)
    assert max(data.lengths) <= 64


def test_long_texts_among_short_ones_are_not_repeated(tiny: Path, tmp_path: Path):
    words = ["man", "woman", "dog", "cat", "child", "park", "house", "ball"]
    lines = [f"{a} {b}" for a in words for b in words]
    lines += [f"{word} " * 55 for word in words]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    data = read(tmp_path / "text.txt", open_artifact(tiny), sequence=32)
    assert data.source.joined_rows
    for part in (data.fit, data.choose, *data.verify):
        assert rows(part) == len(texts(part)), "all rows are distinct"


def test_texts_of_about_the_requested_length_are_not_joined(tiny: Path, sentences: Path):
    data = read(sentences, open_artifact(tiny), sequence=16)
    assert data.source.joined_rows is None


def test_load_inputs_length_is_the_median(tiny: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("a\na b\na b c\n")
    assert read(tmp_path / "text.txt", open_artifact(tiny)).length == 4  # [CLS] a b [SEP]


def test_load_inputs_truncates_to_max_length(tiny: Path, tmp_path: Path):
    (tmp_path / "long.txt").write_text("dog " * 500)
    assert read(tmp_path / "long.txt", open_artifact(tiny)).length == 64


def test_load_inputs_of_a_reranker_are_pairs(tiny: Path, tmp_path: Path):
    (tmp_path / "pairs.txt").write_text("the cat\tthe dog cat\nthe dog\n", encoding="utf-8")
    artifact = open_artifact(tiny)
    artifact = replace(artifact, record=artifact.record.model_copy(update={"task": "rerank"}))
    data = read(tmp_path / "pairs.txt", artifact, sequence=64, split=False)
    (batch,) = data.fit
    assert batch["input_ids"].shape == (2, 8)  # [CLS] the cat [SEP] the dog cat [SEP]
    assert batch["token_type_ids"].tolist() == [[0] * 4 + [1] * 4, [0] * 8]
    assert batch["attention_mask"].sum(axis=1).tolist() == [8, 4]


def test_load_inputs_tokenizer_path(tiny: Path, sentences: Path, tmp_path: Path):
    bare = tmp_path / "bare.onnx"
    bare.write_bytes((tiny / "model.onnx").read_bytes())
    artifact = open_artifact(bare)
    with raises(InvalidData, "data.no_tokenizer"):
        read(sentences, artifact)
    data = read(sentences, artifact, tokenizer=tiny / "tokenizer.json", split=False)
    assert rows(data.fit) == 60


def test_load_inputs_without_mask_has_batches_of_one(tiny: Path, sentences: Path):
    model = ir.from_onnx_text(
        f"{HEADER} (int64[batch, seq] input_ids) => (int64[batch, seq] y) {{ y = Neg(input_ids) }}"
    )
    data = load_inputs(sentences, model, open_artifact(tiny))
    assert {len(batch["input_ids"]) for batch in data.fit} == {1}


def test_load_inputs_keeps_fixed_batch(tiny: Path, sentences: Path):
    model = ir.from_onnx_text(COPY.replace("batch", "2"))
    data = load_inputs(sentences, model, open_artifact(tiny))
    assert {len(batch["input_ids"]) for batch in data.fit} == {2}


def test_load_inputs_fills_batches_of_a_fixed_shape(tiny: Path, tmp_path: Path):
    """All batches have the shape, of text and of arrays; the first rows come again."""
    path = write_lines(tmp_path / "calib.txt", (f"a man {'is ' * n}playing" for n in range(25)))
    model = ir.from_onnx_text(COPY.replace("batch", "4").replace("seq", "9"))
    data = load_inputs(path, model, open_artifact(tiny))
    batches = [*data.fit, *data.held_out]
    assert {batch["input_ids"].shape for batch in batches} == {(4, 9)}
    assert all(batch["attention_mask"][:, :3].all() for batch in batches)
    arrays = {name: np.ones((25, 9), np.int64) for name in ("input_ids", "attention_mask")}
    arrays["input_ids"][:, 0] = np.arange(25)
    np.savez(tmp_path / "calib.npz", **arrays)
    data = load_inputs(tmp_path / "calib.npz", model, open_artifact(tiny))
    batches = [*data.fit, *data.held_out]
    assert {batch["input_ids"].shape for batch in batches} == {(4, 9)}
    assert {int(i) for b in batches for i in b["input_ids"][:, 0]} == set(range(25))


def test_weights_of_a_file_without_rows_to_fit_are_refused(tiny: Path, tmp_path: Path):
    many = [f"a man {'is ' * n}playing" for n in range(40)]
    (tmp_path / "many.txt").write_text("\n".join(many))
    held_out = read(tmp_path / "many.txt", open_artifact(tiny)).to_verify
    ids = {tuple(row[mask != 0]) for b in held_out
           for row, mask in zip(b["input_ids"], b["attention_mask"], strict=True)}  # fmt: skip
    for text in many:
        (tmp_path / "few.txt").write_text(text)
        single = read(tmp_path / "few.txt", open_artifact(tiny), split=False).fit[0]["input_ids"]
        if tuple(single[0]) in ids:
            break
    with raises(InvalidData, "data.no_fit", "few.txt"):
        load_inputs(
            [tmp_path / "many.txt", tmp_path / "few.txt"], load_model(open_artifact(tiny)),
            open_artifact(tiny), weights=(3, 1),
        )  # fmt: skip


# Several files


@pytest.fixture
def other(sentences: Path, tmp_path: Path) -> Path:
    """A third of the sentences, and 60 texts of another kind."""
    lines = sentences.read_text().splitlines()[:20]
    lines += [f"{a} {b} {c}" for a in ("dog", "cat", "man") for b in ("is", "was", "and", "on")
              for c in ("good", "bad", "happy", "sad", "very")]  # fmt: skip
    return write_lines(tmp_path / "other.txt", lines)


def read_files(files: list[Path], artifact: Artifact, **options: object) -> Dataset:
    return load_inputs(files, load_model(artifact), artifact, **options)  # type: ignore[arg-type]


def test_files_are_split_apart_and_their_parts_are_disjoint(
    tiny: Path, sentences: Path, other: Path
):
    artifact = open_artifact(tiny)
    alone = [read(path, artifact) for path in (sentences, other)]
    data = read_files([sentences, other], artifact)
    parts = [data.fit, data.choose, *data.verify]
    for number, part in enumerate(parts):
        both = [(one.fit, one.choose, *one.verify)[number] for one in alone]
        later = {row for one in parts[number + 1 :] for row in texts(one)}
        assert texts(part) == set.union(*map(texts, both)) - later
        assert texts(part).isdisjoint(later)
    assert texts(data.verify[-1]) == set.union(*(texts(one.verify[-1]) for one in alone))
    assert [file.source.file for file in data.files] == ["sentences.txt", "other.txt"]
    for batch in data.to_verify:
        assert any(batch is each for each in data.file_of(batch).to_verify)
    source = data.source
    assert source.rows == sum(one.source.rows for one in alone)
    assert source.fit_rows == rows(data.fit)
    assert source.held_out_rows == tuple(rows(part) for part in parts[1:])
    assert json.dumps(source.to_json(), allow_nan=False)


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 5), (1, 1000)])
def test_weights_are_shares_of_the_rows_to_fit(
    tiny: Path, sentences: Path, other: Path, weights: tuple[float, float]
):
    artifact = open_artifact(tiny)
    every, data = (read_files([sentences, other], artifact, weights=w) for w in ((), weights))
    counts = [rows(file.fit) for file in data.files]
    assert counts[0] == pytest.approx(max(counts[1] * weights[0] / weights[1], 1), abs=1)
    # One file has all of its rows.
    assert any(n == rows(file.fit) for n, file in zip(counts, every.files, strict=True))
    assert texts(data.fit) <= texts(every.fit)
    assert texts(data.choose) == texts(every.choose), "weights concern the fit alone"
    assert texts(data.to_verify) == texts(every.to_verify)
    assert data.source.sha256 != every.source.sha256


def test_rows_that_unsplit_files_share_are_in_both(tiny: Path, sentences: Path, tmp_path: Path):
    second = tmp_path / "other.txt"
    second.write_text(sentences.read_text())
    data = read_files([sentences, second], open_artifact(tiny), split=False)
    assert [rows(file.fit) for file in data.files] == [60, 60]


def test_files_of_one_name_are_told_apart(tiny: Path, sentences: Path, tmp_path: Path):
    (tmp_path / "b").mkdir()
    second = tmp_path / "b" / sentences.name
    second.write_text("the dog is happy\nthe cat is sad\n")
    data = read_files([sentences, second], open_artifact(tiny))
    assert [file.source.file for file in data.files] == [str(sentences), str(second)]


def test_short_file_among_files_is_joined(tiny: Path, sentences: Path, tmp_path: Path):
    long = write_lines(tmp_path / "long.txt", ("dog " * n for n in range(30, 60)))
    data = read_files([sentences, long], open_artifact(tiny), sequence=60)
    short, other = data.files
    assert other.source.joined_rows is None
    assert data.source.joined_rows == short.source.joined_rows > 0
    assert data.source.joined_to == 60


@pytest.mark.parametrize("weights", [(1,), (1, 2, 3), (0, 1), (1, -2), (1, np.nan), (1, np.inf)])
def test_weights_that_are_not_one_positive_number_per_file_are_refused(
    tiny: Path, sentences: Path, other: Path, weights: tuple[float, ...]
):
    with raises(InvalidArgument, "data.weights"):
        read_files([sentences, other], open_artifact(tiny), weights=weights)


def test_file_that_is_given_twice_is_refused(tiny: Path, sentences: Path):
    again = sentences.parent / "." / sentences.name
    with raises(InvalidArgument, "data.repeated", sentences.name):
        read_files([sentences, again], open_artifact(tiny))
    with raises(InvalidArgument, "data.repeated", "`also_prove`", again):
        Data(calib=(sentences,), also_prove=(again,))
    with raises(InvalidArgument, "data.repeated", "`also_prove`", again):
        Data(also_prove=(sentences, again))


@pytest.mark.parametrize("count", [0, 1])
def test_missing_file_is_refused(tiny: Path, sentences: Path, tmp_path: Path, count: int):
    with raises(InvalidData, "data.missing", "nothing.txt"):
        read_files([sentences] * count + [tmp_path / "nothing.txt"], open_artifact(tiny))


# Arrays


def arrays(count: int = 3, length: int = 5) -> dict[str, np.ndarray]:
    ids = np.arange(count * length).reshape(count, length) % 100
    return {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "token_type_ids": np.zeros_like(ids),
    }


@pytest.fixture
def artifact(tiny: Path) -> Artifact:
    return open_artifact(tiny)


def test_load_inputs_npz_rows_by_input_name(artifact: Artifact, tmp_path: Path):
    np.savez(tmp_path / "calib.npz", **arrays(20, 7))
    data = read(tmp_path / "calib.npz", artifact)
    assert (rows(data.fit), rows(data.choose), rows(data.to_verify), data.length) == (14, 2, 4, 7)
    everything = texts([*data.fit, *data.held_out])
    assert everything == {tuple(row) for row in arrays(20, 7)["input_ids"]}


def test_load_inputs_npz_folder_with_several_lengths(artifact: Artifact, tmp_path: Path):
    for length in (4, 9, 12):
        np.savez(tmp_path / f"{length}.npz", **arrays(3, length))
    data = read(tmp_path, artifact, split=False)
    assert sorted(batch["input_ids"].shape for batch in data.fit) == [(3, 4), (3, 9), (3, 12)]
    assert data.length == 9


def test_rows_that_differ_in_padding_alone_are_one_row(artifact: Artifact, tmp_path: Path):
    """A folder of tokenized batches pads the same text to different lengths."""
    for length in (7, 9):
        padded = {n: np.pad(a, ((0, 0), (0, length - 7))) for n, a in arrays(30, 7).items()}
        np.savez(tmp_path / f"{length}.npz", **padded)
    data = read(tmp_path, artifact)
    assert data.source.distinct_rows == 30
    parts = [{row[:7] for row in texts(part)} for part in (data.fit, data.choose, data.to_verify)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 30


def test_load_inputs_converts_integer_width(artifact: Artifact, tmp_path: Path):
    np.savez(tmp_path / "c.npz", **{k: v.astype(np.int32) for k, v in arrays().items()})
    assert read(tmp_path / "c.npz", artifact).fit[0]["input_ids"].dtype == np.int64


@pytest.mark.parametrize(
    ("change", "cause", "value"),
    [
        ({"input_ids": None}, "names", "missing ['input_ids'], not an input none"),
        ({"ids": np.ones((3, 5))}, "names", "missing none, not an input ['ids']"),
        ({"input_ids": np.ones((3, 5))}, "type", "'input_ids' is float64"),
        ({"input_ids": np.array([["a"] * 5] * 3)}, "type", "'input_ids' is <U1"),
        ({"input_ids": np.ones((2, 5), int)}, "rows", "'input_ids': 2"),
        ({"input_ids": np.int64(3)}, "rows", "'input_ids': 0"),
        ({key: np.ones((0, 5), int) for key in arrays()}, "rows", "0"),
    ],
)
def test_load_inputs_mismatched_arrays_are_refused(
    artifact: Artifact, tmp_path: Path, change: dict, cause: str, value: str
):
    given = {key: value for key, value in (arrays() | change).items() if value is not None}
    np.savez(tmp_path / "calib.npz", **given)
    with raises(InvalidData, f"data.array_{cause}", value):
        read(tmp_path / "calib.npz", artifact)


def test_load_inputs_never_unpickles_objects(artifact: Artifact, tmp_path: Path):
    np.savez(tmp_path / "c.npz", **(arrays() | {"input_ids": np.array([{}], dtype=object)}))
    with raises(InvalidData, "data.not_npz"):
        read(tmp_path / "c.npz", artifact)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"text"])
def test_load_inputs_damaged_archive_is_refused(artifact: Artifact, tmp_path: Path, content: bytes):
    (tmp_path / "c.npz").write_bytes(content)
    with raises(InvalidData, "data.not_npz"):
        read(tmp_path / "c.npz", artifact)


def test_load_inputs_folder_without_npz_is_refused(artifact: Artifact, tmp_path: Path):
    with raises(InvalidData, "data.no_npz"):
        read(tmp_path, artifact)


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": np.full((3, 5), 10**6)},
        {"input_ids": np.ones((3, 5, 2), int)},
        {key: np.ones((3, 200), int) for key in arrays()},
    ],
    ids=["vocabulary", "rank", "positions"],
)
def test_collect_moments_refused_arrays_are_invalid_data(
    artifact: Artifact, tmp_path: Path, change: dict
):
    np.savez(tmp_path / "c.npz", **(arrays() | change))
    graph = load_model(artifact)
    data = load_inputs(tmp_path / "c.npz", graph, artifact, split=False)
    with raises(InvalidData, "session.inputs_refused", "input_ids (3, "):
        collect_moments(graph, read_attention(graph).blocks, data.fit)


# Masks


def graph_of(path: Path, inputs: str) -> Artifact:
    """A model with these inputs, one of which are ids."""
    text = f"{HEADER} ({inputs}) => (int64[b, n] y) {{ y = Identity(input_ids) }}"
    ir.save(ir.from_onnx_text(text), path)
    return open_artifact(path)


def test_arrays_count_real_tokens_and_keep_the_length_at_which_they_run(tmp_path: Path):
    mask = np.zeros((300, 24), int)
    mask[:, :3] = 1
    np.savez(tmp_path / "rows.npz", input_ids=np.arange(7200).reshape(300, 24), attention_mask=mask)
    data = read(
        tmp_path / "rows.npz",
        graph_of(tmp_path / "m.onnx", "int64[b, s] input_ids, int64[b, s] attention_mask"),
    )
    assert data.source.tokens == 900 and data.source.lengths == (3,) * 5
    assert data.source.fit_tokens == 3 * data.source.fit_rows
    assert data.length == 24


@pytest.mark.parametrize("source", ["input_ids", "encoder_hidden_states"])
def test_mask_of_the_source_is_not_that_of_a_target_of_the_same_length(source: str, tmp_path: Path):
    ids, mask = np.ones((8, 6), int), np.ones((8, 6), int)
    mask[:, 2:] = 0
    if source == "input_ids":
        text = "int64[b, s] input_ids, int64[b, s] attention_mask, int64[b, t] decoder_input_ids"
        arrays = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids}
    else:
        text = ("int64[b, t] input_ids, int64[b, s] encoder_attention_mask,"
                " float[b, s, 4] encoder_hidden_states")  # fmt: skip
        states = np.ones((8, 6, 4), np.float32)
        arrays = {"input_ids": ids, "encoder_attention_mask": mask, "encoder_hidden_states": states}
    np.savez(tmp_path / "rows.npz", **arrays)
    data = read(tmp_path / "rows.npz", graph_of(tmp_path / "m.onnx", text))
    [batch] = data.fit
    target, *sources = sorted(arrays, key=lambda name: name != ("decoder_input_ids"
                              if source == "input_ids" else "input_ids"))  # fmt: skip
    rows = len(batch[target])
    assert batch[target].shape == (rows, 6) and token_mask(batch, (rows, 6)).all()
    assert all(batch[name].shape[1] == 7 for name in sources)
    assert token_mask(batch, (rows, 7)).sum(1).tolist() == [2] * rows


# Moments


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def by_hand(graph: ir.Model, block: AttentionBlock, texts: list[dict[str, np.ndarray]]):
    """The moments of one self-attention block by their definitions, one sentence at a time."""
    session = observing(graph, [block.x])
    assert block.output is not None
    tokens = [session.run(None, text)[0][0].astype(np.float64) for text in texts]  # S D
    everything = np.concatenate(tokens)
    mean = everything.mean(0)
    covariance = (everything - mean).T @ (everything - mean) / len(everything)
    matrix, heads = block.output.matrix(), range(block.num_heads)
    spread, weight = np.zeros_like(covariance), np.zeros(block.num_heads)
    for x in tokens:
        for h in heads:
            q, k, v = (x @ p.heads()[h] + p.offset[h] for p in (block.q, block.k, block.v))
            probabilities = softmax(block.scale * q @ k.T)
            written = v @ matrix[block.output.rows[h]]  # S D
            for p in probabilities:  # of one query
                for values, add in ((x, "keys"), (written, "writes")):
                    centred = values - p @ values
                    if add == "keys":
                        spread += (centred * p[:, None]).T @ centred
                    else:
                        weight[h] += (p[:, None] * centred**2).sum()
    queries = len(everything)
    return mean, covariance, spread / queries / block.num_heads, np.sqrt(weight / queries)


@pytest.mark.parametrize(
    "export",
    [("eager", "torchscript", 17), ("sdpa", "dynamo", 18)],
    ids=["eager-torchscript", "sdpa-dynamo"],
)
def test_collect_moments_equals_single_sentences(
    tiny_export: Callable[..., Path], sentences: Path, export: tuple
):
    folder = tiny_export(*export)
    artifact = open_artifact(folder)
    graph = load_model(artifact)
    data = load_inputs(sentences, graph, artifact, split=False)
    assert any((batch["attention_mask"] == 0).any() for batch in data.fit), "nothing is padded"
    blocks = read_attention(graph).blocks
    got = collect_moments(graph, blocks, data.fit)
    singles = [
        {name: array[i : i + 1, :length] for name, array in batch.items()}
        for batch in data.fit
        for i, length in enumerate(batch["attention_mask"].sum(1))
    ]
    assert len(singles) == 60
    for block in blocks:
        mean, covariance, keys, weight = by_hand(graph, block, singles)
        moments = got[block.name]
        # float32 activations: relative to the largest entry.
        for found, expected in (
            (moments.query_mean, mean),
            (moments.query_covariance, covariance),
            (moments.key_covariance, keys),
            (moments.head_weight, weight),
        ):
            assert found is not None
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_collect_moments_is_independent_of_batching(tiny: Path, sentences: Path):
    artifact = open_artifact(tiny)
    graph = load_model(artifact)
    data = load_inputs(sentences, graph, artifact, split=False)
    blocks = read_attention(graph).blocks[:1]
    halves = [
        {name: array[part] for name, array in batch.items()}
        for batch in data.fit
        for part in (slice(None, 5), slice(5, None))
    ]
    one, two = (
        collect_moments(graph, blocks, batches)[blocks[0].name] for batches in (data.fit, halves)
    )
    np.testing.assert_allclose(one.key_covariance, two.key_covariance, rtol=0, atol=1e-5)
    np.testing.assert_allclose(one.query_covariance, two.query_covariance, rtol=0, atol=1e-5)


def test_collect_moments_leaves_graph_unchanged_and_reports_progress(tiny: Path, sentences: Path):
    artifact = open_artifact(tiny)
    graph = load_model(artifact)
    data, blocks = load_inputs(sentences, graph, artifact), read_attention(graph).blocks
    before, seen = ir.to_onnx_text(graph), []
    collect_moments(
        graph, blocks, data.fit, context=RunContext(progress=lambda *step: seen.append(step[1:]))
    )
    assert ir.to_onnx_text(graph) == before
    assert seen == [(i + 1, len(data.fit)) for i in range(len(data.fit))]


def test_collect_moments_padding_only_is_refused(tiny: Path):
    graph = load_model(open_artifact(tiny))
    batch = arrays() | {"attention_mask": np.zeros((3, 5), int)}
    with raises(InvalidData, "calibration.no_token"):
        collect_moments(graph, read_attention(graph).blocks, [batch])


BARE = (
    HEADER
    + """ (float[batch, seq, 4] x) => (float[batch, seq, 4] y)
<int64[4] split = {0, 0, 2, 2}, int64[3] merge = {0, 0, 4}, float[1] scale = {0.5}> {
    q0 = MatMul(x, wq)  q1 = Reshape(q0, split)  q = Transpose<perm = [0, 2, 1, 3]>(q1)
    k0 = MatMul(x, wk)  k1 = Reshape(k0, split)  k = Transpose<perm = [0, 2, 3, 1]>(k1)
    v0 = MatMul(x, wv)  v1 = Reshape(v0, split)  v = Transpose<perm = [0, 2, 1, 3]>(v1)
    s0 = MatMul(q, k)  s = Mul(s0, scale)  p = Softmax<axis = -1>(s)
    c = MatMul(p, v)  c1 = Transpose<perm = [0, 2, 1, 3]>(c)  c2 = Reshape(c1, merge)
    y = MatMul(c2, wo)
}"""
)


def bare() -> ir.Model:
    """Attention and nothing else: its tokens are the graph's own input."""
    proto = ir.to_proto(ir.from_onnx_text(BARE))
    random = np.random.default_rng(0)
    for name in ("wq", "wk", "wv", "wo"):
        weight = ir.tensor(random.standard_normal((4, 4)).astype(np.float32), name=name)
        proto.graph.initializer.append(ir.to_proto(weight))
    return ir.from_proto(proto)


def test_collect_moments_of_graph_input():
    graph = bare()
    (block,) = read_attention(graph).blocks
    x = np.random.default_rng(1).standard_normal((3, 6, 4)).astype(np.float32)
    moments = collect_moments(graph, [block], [{"x": x}])[block.name]
    np.testing.assert_allclose(moments.query_mean, x.reshape(-1, 4).mean(0), atol=1e-6)


def test_collect_moments_infinite_activations_are_refused():
    graph = bare()
    x = np.ones((1, 3, 4), np.float32)
    x[0, 0, 0] = np.inf
    with (
        np.errstate(invalid="ignore"),
        raises(InvalidData, "calibration.not_finite"),
    ):
        collect_moments(graph, read_attention(graph).blocks, [{"x": x}])


def test_load_inputs_source_is_json_with_checksum(tiny: Path, sentences: Path, tmp_path: Path):
    assert json.dumps(read(sentences, open_artifact(tiny)).source.to_json(), allow_nan=False)
    np.savez(tmp_path / "c.npz", **arrays())
    first = read(tmp_path, open_artifact(tiny)).source.sha256
    assert len(first) == 64
    np.savez(tmp_path / "d.npz", **arrays())
    second = read(tmp_path, open_artifact(tiny)).source.sha256
    assert second != first, "a folder's is of all its files"


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=30), tokens=st.integers(1, 300))
def test_thinned_keeps_about_that_many_tokens_from_all_lengths(sizes: list[int], tokens: int):
    batches = [{"input_ids": np.ones((2, size), np.int64)} for size in sorted(sizes)]
    chosen = thinned(batches, tokens)
    places = [next(i for i, batch in enumerate(batches) if batch is each) for each in chosen]
    assert places == sorted(set(places))
    assert chosen
    if tokens >= 2 * sum(sizes):
        assert len(chosen) == len(batches)
    gaps = np.diff([-1, *places, len(batches)])
    assert gaps.max() <= 2 * len(batches) / len(chosen) + 1
