"""read_attention never returns a wrong block for mutated graphs: it matches them correctly or not.

The expected values do not come from the certificate: the whole mutant runs in ONNX Runtime, at
other lengths than those of the certificate, and the inputs and outputs of every certified block are
compared with ``attention_reference``. Where collaborative attention applies, the rewritten mutant
must compute the same outputs.

Corrupted files are read, or refused with an error of attnserve.

    MUTANTS=20000 python -m pytest tests/attnserve/test_mutations.py

runs more mutants; equal numbers are equal mutants.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from attnserve import optimize
from attnserve.checks.certify import SHAPES, read_attention
from attnserve.checks.inspect import inspect
from graph_passes.analysis.constants import constant_array
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import AttnserveError
from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import Collaborate, exact_rank, factor
from graph_passes.passes.decompose_attention import DecomposeAttention
from graph_passes.passes.shared_dimensions import sharing_refusal
from graph_passes.reference import attention_reference, inputs_of, logits_reference
from tests.attnserve.mutation_seeds import SEEDS, TRAPS
from tests.attnserve.mutations import corrupted, mutant
from tests.graph_passes.graphs import observing, text_of

COUNT = int(os.environ.get("MUTANTS", "400"))
CHUNKS = 4
"""Number of tests among which the mutants are divided."""

TOLERANCE = 1e-3
"""Largest difference of a certified block from the reference; relative above magnitude 1."""

REWRITE_TOLERANCE = 1e-4
"""Largest difference of the outputs of a rewritten mutant; relative above magnitude 1."""

LENGTHS = (
    {"batch": 5, "sequence": 6, "memory": 8, "past": 2},
    {"batch": 1, "sequence": 9, "memory": 5, "past": 3},
)
"""Lengths of the runs."""

EQUAL_LENGTHS = tuple(
    {"batch": batch, "sequence": length, "memory": length, "past": length}
    for batch, length in ((5, 6), (1, 9))
)
"""Lengths for mutants that need equal numbers of queries and keys."""

assert not {(lengths["batch"], lengths["sequence"]) for lengths in LENGTHS} & set(SHAPES)


def feeds_of(model: ir.Model, lengths: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Return normal numbers, small enough for Exp.

    Every row of a mask shows the first key and hides the second.
    """
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for value in model.graph.inputs:
        assert value.name is not None and value.shape is not None and value.dtype is not None
        shape = [dim if isinstance(dim, int) else lengths[str(dim.value)] for dim in value.shape]
        dtype = value.dtype.numpy()
        if "mask" not in value.name:
            arrays[value.name] = (rng.standard_normal(shape) / 2).astype(dtype)
            continue
        seen = rng.random(shape) < 0.7
        seen[..., 0], seen[..., 1] = True, False
        # Low enough to hide a key, and near enough to keep the digits of the sum.
        arrays[value.name] = (
            np.where(seen, 0, -30).astype(dtype) if dtype == np.float32 else seen.astype(dtype)
        )
    return arrays


Captured = dict[ir.Value, np.ndarray]


def captured(
    model: ir.Model, values: Sequence[ir.Value], feeds: Sequence[Mapping[str, np.ndarray]]
) -> list[Captured]:
    """Run the whole model and return these values for each feed."""
    computed = [value for value in dict.fromkeys(values) if value.producer() is not None]
    session = observing(model, computed, optimize=False)
    runs = []
    for arrays in feeds:
        feed = {i.name: arrays[i.name] for i in session.get_inputs()}
        run = dict(zip(computed, session.run(None, feed), strict=True))
        runs.append(run | {v: arrays[v.name] for v in model.graph.inputs if v.name in arrays})
    return [
        run | {value: constant_array(value) for value in values if value not in run} for run in runs
    ]


def largest(got: np.ndarray, want: np.ndarray, counted: np.ndarray) -> float:
    """Return the largest difference where ``counted``; relative above magnitude 1."""
    if got.size != want.size:
        return np.inf
    got = got.astype(np.float64).reshape(want.shape)
    off = np.abs(got - want) / np.maximum(1.0, np.abs(want))
    off = np.where(np.isnan(off), np.inf, off)
    return float(np.max(np.where(counted, off, 0.0), initial=0.0))


def largest_difference(block: AttentionBlock, run: Captured) -> tuple[float, str]:
    """Return the largest difference of the graph from the block's reference, and the value's name.

    Rows without a visible key are not compared: their softmax is NaN, and 0 in the reference.
    Runs with overflowed tokens are not compared.
    """
    tokens = (block.q.input, block.k.input, block.v.input)
    if not all(np.isfinite(run[value]).all() for value in tokens):
        return 0.0, "nothing"
    batch = block.q.sequences(lambda value: run[value].shape)
    with np.errstate(all="ignore"):
        expected = attention_reference(block, run, batch)
    sees = expected.probabilities.sum(axis=-1) > 0  # B H S
    worst = [(0.0, "nothing")]
    if block.softmax is not None and block.softmax.axes:
        logits = logits_reference(block, run, batch)
        got = run[block.softmax.logits].transpose(block.softmax.axes)
        worst.append((largest(got, logits, np.full(logits.shape, True)), "logits"))
    if block.probabilities is not None:
        got = run[block.probabilities]
        worst.append((largest(got, expected.probabilities, sees[..., None]), "probabilities"))
    rows = sees.all(axis=1)[..., None]  # B S 1
    if block.output is not None:
        assert expected.output is not None
        got = run[block.output.output]
        if block.output.sequence_first:
            got = got.reshape(-1, batch, expected.output.shape[-1]).swapaxes(0, 1)
        worst.append((largest(got, expected.output, rows), "output"))
    got = run[block.context]
    if block.context_axes is not None:
        by_head = got.transpose(block.context_axes).reshape(
            batch, block.num_heads, -1, block.v_head_size
        )
        got = np.moveaxis(by_head, 1, 2)
    worst.append((largest(got, expected.context, rows), "context"))
    return max(worst)


def values_of(block: AttentionBlock) -> list[ir.Value]:
    """Return all values that ``largest_difference`` compares."""
    output = None if block.output is None else block.output.output
    logits = None if block.softmax is None else block.softmax.logits
    compared = (logits, block.probabilities, block.context, output, block.q.output)
    return [*inputs_of(block), *(value for value in compared if value is not None)]


def runnable(
    model: ir.Model, blocks: Sequence[AttentionBlock]
) -> tuple[list[dict[str, np.ndarray]], list[Captured]] | None:
    """Run the mutant at lengths that it supports; None if it supports none of them."""
    values = [value for block in blocks for value in values_of(block)]
    for lengths in (LENGTHS, EQUAL_LENGTHS):
        feeds = [feeds_of(model, sizes, seed) for seed, sizes in enumerate(lengths)]
        with suppress(Exception):  # onnxruntime has one exception class per status
            return feeds, captured(model, [*values, *model.graph.outputs], feeds)
    return None


def judge(model: ir.Model) -> Iterator[tuple[str, str]]:
    """Yield verdicts ("read", "missed", "refused", "rewritten", "wrong") and their details."""
    matches = read_attention(model)
    if not all(unmatched.reason for unmatched in matches.unmatched):
        yield "wrong", "an unmatched block without a reason"
    if not matches.blocks:
        yield "missed", ""
        return
    runs = runnable(model, matches.blocks)
    if runs is None:
        yield "refused", "ONNX Runtime does not run the whole mutant"
        return
    feeds, results = runs
    for block in matches.blocks:
        worst, where = max(largest_difference(block, run) for run in results)
        if worst > TOLERANCE:
            yield "wrong", f"{block.name}: {where} differ by {worst:.1e}"
            return
    yield "read", ""
    shared = [block for block in matches.blocks if sharing_refusal(block) is None]
    if not shared:
        return
    before = [[run[output] for output in model.graph.outputs] for run in results]
    names = {block.name for block in shared}
    DecomposeAttention(frozenset(b.name for b in shared if b.softmax is None))(model)
    blocks = [block for block in find_attention(model).blocks if block.name in names]
    Collaborate.with_factors({b.name: factor(b, exact_rank(b)) for b in blocks})(model)
    after = captured(model, list(model.graph.outputs), feeds)
    for old, run in zip(before, after, strict=True):
        for value, want in zip(model.graph.outputs, old, strict=True):
            got = run[value]
            finite = np.isfinite(want)
            if got.shape != want.shape or largest(got, want, finite) > REWRITE_TOLERANCE:
                yield "wrong", f"collaborative heads change the output {value.name!r}"
                return
    yield "rewritten", ""


@pytest.mark.fuzz
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_read_attention_of_mutants_is_never_wrong(chunk: int):
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    numbers = range(chunk, COUNT, CHUNKS)
    for number in numbers:
        model, changes = mutant(number)
        text = text_of(model)
        try:
            verdicts = list(judge(model))
        except Exception as error:
            verdicts = [("wrong", f"crashed: {type(error).__name__}: {error}")]
        for verdict, detail in verdicts:
            counts[verdict] += 1
            if verdict == "wrong":
                wrong.append(f"{changes}\n{detail}\n{text}")
    assert not wrong, "\n\n".join(wrong[:3])
    # Neither all nor none are matched, and most were compared.
    share = {verdict: count / len(numbers) for verdict, count in counts.items()}
    assert share["read"] > 0.3 and share["missed"] > 0.2, counts
    assert share.get("rewritten", 0) > 0.1 and share.get("refused", 0) < 0.1, counts


@pytest.mark.parametrize("name", TRAPS)
def test_read_attention_of_traps_is_not_wrong(name: str):
    assert [detail for verdict, detail in judge(TRAPS[name]()) if verdict == "wrong"] == []


@pytest.mark.parametrize("name", SEEDS)
def test_read_attention_of_seeds_matches(name: str):
    assert next(judge(SEEDS[name]()))[0] == "read"


FIXTURES = Path(__file__).parents[1] / "fixtures" / "onnx"


COMMANDS: Mapping[str, Callable[[Path], object]] = {
    "inspect": inspect,
    "--collab-dk": lambda path: optimize(path, path.parent / "out", collab_dk=8, mixing="dense",
                                         force=True, threads=1),
    "--fp16": lambda path: optimize(path, path.parent / "out", precision="float16", force=True,
                                    threads=1),
}  # fmt: skip


@pytest.mark.fuzz
@pytest.mark.parametrize("command", COMMANDS)
def test_corrupted_files_are_read_or_refused(command: str, tmp_path: Path):
    """No other exception is raised, which the command line would call unexpected."""
    files = sorted(path for path in FIXTURES.glob("*.onnx") if path.stat().st_size < 300_000)
    path, codes, wrong = tmp_path / "model.onnx", Counter[str](), list[str]()
    for number in range(COUNT // 10):
        content, change = corrupted(number, files)
        path.write_bytes(content)
        try:
            COMMANDS[command](path)
            codes["read"] += 1
        except AttnserveError as error:
            codes[error.code] += 1
        except Exception as error:
            wrong.append(f"{change}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong[:5])
    assert len(codes) > 2 and 0 < codes["read"] < 0.9 * codes.total(), codes


def test_inspect_attention_of_rank_1_is_not_counted(tmp_path: Path):
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 23]> g (float[n, 4] x) => (float[n, 4] y)'
        " { y = Attention(x, x, x) }"
    )
    del proto.graph.input[0].type.tensor_type.shape.dim[1:]
    onnx.save(proto, tmp_path / "model.onnx")
    assert inspect(tmp_path / "model.onnx").total_macs is None
