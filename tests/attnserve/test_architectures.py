"""Attention of every architecture matches, is verified and agrees with the configuration.

The default tests use one committed graph per architecture (``tests/fixtures/onnx``). The tests
marked ``export`` export cells of ``tests/architectures.py``: an architecture, exported one way.
They take a subset with every pair of properties of a cell, and compare its results with the
recorded ones of all cells. Matches are compared with the configuration of the model. Collaborative
heads with R = H*K must keep the outputs.

``make support`` (``pytest --write-support``) exports all cells, and writes the results to
``tests/fixtures/support.json`` and ``docs/support.md``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.checks.certify import read_attention
from attnserve.checks.inspect import inspect, inspect_graph
from attnserve.models.onnx_files import load_model
from graph_passes.analyses import Analyses
from graph_passes.analysis.parameters import parameters
from graph_passes.blocks import AttentionBlock
from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import Collaborate, exact_rank, factor
from graph_passes.passes.decompose_attention import DecomposeAttention
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.reuse_attention import ReuseAttention, reuse_refusal
from tests import architectures, exports
from tests.architectures import (
    ARCHITECTURES,
    CELLS,
    COMMITTED,
    EXTERNAL,
    UNREAD,
    Cell,
    assert_same_outputs,
    covering,
)
from tests.attention_layers import Layer
from tests.fixtures import make
from tests.graph_passes.graphs import grafted, masked

SUPPORT = Path(__file__).parents[2] / "docs" / "support.md"
RESULTS = Path(__file__).parents[1] / "fixtures" / "support.json"
"""``Results`` of all cells, which ``make support`` writes."""

SCALE = {"": 1e-6, "dropout": 1e-6, "fp16": 1e-3, "bf16": 1e-2}
"""Maximum relative difference of the scale, which the graph stores in its own type."""

SAME = {"": 1e-4, "dropout": 1e-4, "fp16": 2e-2, "bf16": 2e-2}
"""Maximum difference of equal outputs."""

Build = Callable[[Cell], "Outcome"]
Results = Mapping[str, Mapping[str, Any]]
"""``cells``: ``Outcome.coverage`` by ``str(cell)``. ``rewrites``: ``Outcome.rewrites`` of all cells
of an architecture."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The reason why PyTorch cannot export a cell, or the graph and its match report."""

    reason: str
    path: Path
    expected: Sequence[Layer] = ()
    attention: Sequence[Mapping[str, Any]] = ()
    missed: Sequence[str] = ()

    @property
    def layers(self) -> list[Layer]:
        """The matched layers, in terms of the configuration."""
        names = [field.name for field in fields(Layer)]
        return [Layer(**{name: block[name] for name in names}) for block in self.attention]

    @property
    def coverage(self) -> list[str]:
        """ "2/2" if two of two layers are right, or "no", and the reasons."""
        if self.reason:
            return ["no", without_names(self.reason)]
        right = sum(map(eq, self.layers, self.expected))
        return [f"{right}/{len(self.expected)}", *dict.fromkeys(map(without_names, self.missed))]

    @property
    def rewrites(self) -> dict[str, list[str | bool]]:
        """By the name of the rewrite, True if it applies to a layer, and the reasons if not."""
        answers: dict[str, dict[str | bool, None]] = {}
        for block in self.attention:
            for rewrite, answer in block["rewrites"].items():
                one = without_names(answer) if isinstance(answer, str) else answer
                answers.setdefault(rewrite, {})[one] = None
        return {rewrite: list(found) for rewrite, found in answers.items()}


def without_names(reason: str) -> str:
    return re.sub(r" '[^']*'", "", reason)


@pytest.fixture(scope="session")
def outcome(
    exported: Callable[[Cell], tuple[Path, str]],
    made_once: Callable[[str, Callable[[Path], object]], Path],
) -> Build:
    """Return a function that exports and inspects a cell, once for all test processes."""

    def build(cell: Cell) -> Outcome:
        path, reason = exported(cell)
        if reason:
            return Outcome(reason, path)

        def read(target: Path) -> None:
            content = inspect_graph(load_model(path), batch=2, sequence=8).to_json()
            content["expected"] = [asdict(layer) for layer in expected_layers(cell)]
            target.write_text(json.dumps(content), encoding="utf-8")

        content = json.loads(made_once(f"{cell}.json", read).read_text(encoding="utf-8"))
        return Outcome(
            reason="",
            path=path,
            expected=near([Layer(**layer) for layer in content["expected"]], cell),
            attention=content["attention"],
            missed=[miss["reason"] for miss in content["missed"]],
        )

    return build


@pytest.fixture(scope="session")
def results() -> Results:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "exported_cell" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--write-support")
        cells = CELLS if everything else covering(CELLS, COMMITTED)
        metafunc.parametrize("exported_cell", cells, ids=str)


@pytest.mark.export
def test_read_attention_export_agrees_with_configuration(
    exported_cell: Cell,
    outcome: Build,
    results: Results,
    pytestconfig: pytest.Config,
):
    cell, result = exported_cell, outcome(exported_cell)
    if not pytestconfig.getoption("--write-support"):
        assert result.coverage == results["cells"][str(cell)], "run make support"
        recorded = results["rewrites"].get(cell.architecture, {})
        assert all({*found} <= {*recorded[one]} for one, found in result.rewrites.items())
    if result.reason:
        pytest.skip(f"PyTorch cannot export it: {result.reason}")
    if cell.missed:
        assert len(result.missed) == len(result.expected) and not result.attention
        assert all(re.fullmatch(r"\w.{10,250}[^.]", reason) for reason in result.missed)
        return
    assert result.missed == []
    assert result.layers == result.expected
    names = [
        block["name"] for block in result.attention if block["rewrites"]["collaborate"] is True
    ]
    if cell not in COMMITTED:  # the default tests check the committed graph
        check_full_rank(cell, result.path, frozenset(names))


def check_full_rank(cell: Cell, path: Path, names: frozenset[str]) -> None:
    """Collaborative heads with R = H*K in these blocks give the same outputs."""
    architecture = ARCHITECTURES[cell.architecture]
    if not names:
        return
    try:
        expected = architectures.run(path, architecture, architectures.OTHER_LENGTHS)
    except Exception as error:  # onnxruntime raises a class of its own for each status
        pytest.skip(f"ONNX Runtime does not run the model itself: {error}")
    model = collaborated(load_model(path), names)
    got = architectures.run(model, architecture, architectures.OTHER_LENGTHS)
    for one, other in zip(expected, got, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(other, one, atol=SAME[cell.variant], rtol=0)


every_committed = pytest.mark.parametrize("cell", COMMITTED, ids=str)


@pytest.fixture(scope="session")
def expected() -> dict[str, Any]:
    return json.loads(make.EXPECTED.read_text(encoding="utf-8"))


def test_committed_graphs_cover_every_architecture_and_exporter():
    assert {cell.architecture for cell in COMMITTED} == ARCHITECTURES.keys() - UNREAD
    assert {(cell.exporter, cell.opset) for cell in COMMITTED} >= {*architectures.EXPORTERS}
    assert all(cell.committed.with_suffix(".onnx.data").is_file() for cell in EXTERNAL)


@every_committed
def test_inspect_committed_graph_agrees_with_configuration(cell: Cell, expected: dict[str, Any]):
    inspection = inspect(cell.committed, batch=2, sequence=8)
    entry = expected[str(cell)]
    assert inspection.matches.unmatched == ()
    layers = near([Layer(**layer) for layer in entry["layers"]], cell)
    assert [layer_of(block) for block in inspection.matches.blocks] == layers
    assert make.rewrites_that_apply(inspection.to_json()) == entry["rewrites"]
    check_full_rank(
        cell,
        cell.committed,
        frozenset(
            block.name
            for block, names in zip(inspection.matches.blocks, entry["rewrites"], strict=True)
            if "collaborate" in names
        ),
    )


@pytest.mark.export
@every_committed
def test_inspect_new_export_equals_committed_graph(cell: Cell, outcome: Build):
    committed = inspect(cell.committed, batch=2, sequence=8).to_json()["attention"]
    measured = {"max_abs_error": 0}
    assert [block | measured for block in outcome(cell).attention] == [
        block | measured for block in committed
    ], "run python -m tests.fixtures.make"


def expected_layers(cell: Cell) -> list[Layer]:
    config = exports.network(cell.architecture, cell.attention).config
    return ARCHITECTURES[cell.architecture].layers(config)


def near(layers: Iterable[Layer], cell: Cell) -> list[Layer]:
    """The layers, compared with the scale that the graph stores in its own type."""
    return [
        replace(layer, scale=pytest.approx(layer.scale, rel=SCALE[cell.variant]))
        for layer in layers
    ]


def layer_of(block: AttentionBlock) -> Layer:
    return Layer(
        num_heads=block.num_heads,
        num_kv_heads=block.num_kv_heads,
        head_size=block.head_size,
        scale=block.scale,
        kind=block.kind,
        position=block.position,
    )


def collaborated(model: ir.Model, names: frozenset[str]) -> ir.Model:
    """The model with the exact R in these blocks, as ``attnserve.planning.optimize`` does it."""
    blocks, _ = find_attention(model)
    fused = frozenset(block.name for block in blocks if block.name in names and not block.softmax)
    if fused:
        DecomposeAttention(fused)(model)
        blocks = read_attention(model).blocks
    factors = {
        block.name: factor(block, exact_rank(block)) for block in blocks if block.name in names
    }
    assert factors.keys() == names
    Collaborate.with_factors(factors)(model)
    return model


HANDFUL = (
    Cell("GPT-2", "eager", "torchscript", 11),  # packed in a Gemm, causal
    Cell("Llama", "eager", "dynamo", 18),  # rotary positions, grouped key/value heads
    Cell("T5", "eager", "dynamo", 18),  # biases by head, cross-attention
    Cell("Qwen3", "eager", "dynamo", 18),  # q/k norm
    Cell("ALBERT", "sdpa", "torchscript", 17),  # one weight for all layers
    Cell("ViT", "sdpa", "dynamo", 23),  # a fused operator
    Cell("BART", "eager", "dynamo", 18),  # encoder, decoder and cross-attention
    Cell("BERT", "eager", "torchscript", 17, "fp16"),
)
"""Committed graphs, one for each pattern that PruneHeads and ReuseAttention distinguish."""


@pytest.mark.parametrize("cell", HANDFUL, ids=str)
def test_prune_heads_every_other_head_equals_masked(cell: Cell):
    """Pruned and masked models have equal outputs; pruned blocks keep their names."""
    path = cell.committed
    blocks = read_attention(load_model(path)).blocks
    analyses = Analyses.of(load_model(path))
    assert not any(PruneHeads.refusal(block, None, analyses) for block in blocks)
    masks = {block.name: [head % 2 for head in range(block.num_heads)] for block in blocks}
    model = decomposed(load_model(path))
    PruneHeads(masks)(model)
    matches = read_attention(model)
    assert [miss.reason for miss in matches.unmatched] == []
    assert {b.name: b.num_heads for b in matches.blocks} == {n: sum(m) for n, m in masks.items()}
    assert parameters(model) < parameters(load_model(path))
    assert_same_outputs(model, masked(load_model(path), masks), cell, SAME[cell.variant])


@pytest.mark.parametrize("cell", HANDFUL, ids=str)
@pytest.mark.parametrize("part", [1, 2], ids=["all heads", "every other head"])
def test_reuse_attention_earlier_layers_equals_grafted(cell: Cell, part: int):
    """The outputs equal those of a model whose probabilities are replaced, with fewer weights."""
    path = cell.committed
    model = decomposed(load_model(path))
    edges = edges_of(find_attention(model).blocks, part)
    assert edges
    ReuseAttention(edges)(model)
    matches = read_attention(model)
    assert [miss.reason for miss in matches.unmatched] == []
    assert {b.name for b in matches.blocks if b.form == "reuse"} == edges.keys()
    if cell.architecture != "ALBERT":  # its other layers still use the shared weights
        assert parameters(model) < parameters(load_model(path))
    expected = grafted(decomposed(load_model(path)), edges)
    assert_same_outputs(model, expected, cell, SAME[cell.variant])


def edges_of(blocks: Sequence[AttentionBlock], part: int) -> dict[str, dict[int, tuple[str, int]]]:
    """Edges of reuse: heads of each layer from the first possible source layer."""
    edges: dict[str, dict[int, tuple[str, int]]] = {}
    for index, block in enumerate(blocks):
        sources = [
            other
            for other in blocks[:index]
            if other.name not in edges and reuse_refusal(block, [other]) is None
        ]
        if sources:
            name, heads = sources[0].name, range(0, block.num_heads, part)
            edges[block.name] = {head: (name, head % sources[0].num_heads) for head in heads}
    return edges


def decomposed(model: ir.Model) -> ir.Model:
    """The model with decomposed fused operators."""
    fused = frozenset(block.name for block in find_attention(model).blocks if not block.softmax)
    return DecomposeAttention(fused)(model).model if fused else model


@pytest.mark.export
def test_new_results_of_all_cells_are_written(outcome: Build, pytestconfig: pytest.Config):
    if not pytestconfig.getoption("--write-support"):
        pytest.skip("make support exports all cells")
    write({cell: outcome(cell) for cell in CELLS})


def test_support_page_equals_results(results: Results):
    assert list(results["cells"]) == [str(cell) for cell in CELLS], "run make support"
    assert SUPPORT.read_text(encoding="utf-8") == support(results), "run make support"


@pytest.mark.parametrize("cells", [CELLS, CELLS[::-1]], ids=["in order", "in reverse"])
def test_covering_subset_has_every_architecture_exporter_opset_and_variant(cells: list[Cell]):
    subset = covering(cells, COMMITTED)
    assert {*COMMITTED} <= {*subset} <= {*CELLS} and len(subset) < len(CELLS) / 2

    def values(cells: Iterable[Cell]) -> list[set[tuple[Any, ...]]]:
        return [
            {(cell.architecture, cell.exporter) for cell in cells},
            {(cell.architecture, cell.attention) for cell in cells},
            {(cell.architecture, cell.variant) for cell in cells},
            {(cell.exporter, cell.opset, cell.attention) for cell in cells},
            {(cell.exporter, cell.variant) for cell in cells},
            {(cell.attention, cell.variant) for cell in cells},
        ]

    assert values(subset) == values(CELLS)


# ---- docs/support.md ----------------------------------------------------------------------------

INTRODUCTION = """\
# Supported models

The tests find attention in tiny random models that PyTorch exports. `make support` writes it.
"2/2" means that two of two attention blocks are matched, verified, and agree with the model
configuration. "no" means that PyTorch cannot export the model. Footnotes give reasons.
"""


class Notes:
    """Footnotes: numbered reasons."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, reasons: Iterable[str]) -> str:
        numbers = {self.numbers.setdefault(one, len(self.numbers) + 1) for one in reasons}
        return "".join(f"[^{number}]" for number in sorted(numbers))

    def __str__(self) -> str:
        return "\n".join(f"[^{number}]: {reason}" for reason, number in self.numbers.items())


def write(outcomes: Mapping[Cell, Outcome]) -> None:
    """Write the results, a line for each cell and each architecture, and the page."""
    rewrites: dict[str, dict[str, list[str | bool]]] = {}
    for cell, outcome in outcomes.items():
        for rewrite, found in outcome.rewrites.items():
            known = rewrites.setdefault(cell.architecture, {}).setdefault(rewrite, [])
            known += [one for one in found if one not in known]
    cells = {str(cell): outcome.coverage for cell, outcome in outcomes.items()}
    parts = (
        f"{json.dumps(part)}: {{\n"
        + ",\n".join(f"{json.dumps(key)}: {json.dumps(one)}" for key, one in content.items())
        for part, content in (("cells", cells), ("rewrites", rewrites))
    )
    RESULTS.write_text("{\n" + "\n},\n".join(parts) + "\n}\n}\n", encoding="utf-8")
    SUPPORT.write_text(support({"cells": cells, "rewrites": rewrites}), encoding="utf-8")


def support(results: Results) -> str:
    notes = Notes()
    usual, special = dict[tuple[str, str], str](), dict[tuple[str, str], str]()
    for cell in CELLS:
        share, *reasons = results["cells"][str(cell)]
        text = share + notes.mark(reasons)
        if (cell.exporter, cell.opset) in architectures.EXPORTERS and not cell.variant:
            usual[cell.architecture, cell.column] = text
        else:
            special[cell.column, cell.architecture] = text
    applied = {
        (architecture, rewrite): "✓" * (True in found)
        + notes.mark(one for one in found if one is not True)
        for architecture, rewrites in results["rewrites"].items()
        for rewrite, found in rewrites.items()
    }
    parts = (
        INTRODUCTION,
        table("architecture", usual),
        "## Older opsets, half precision, dropout\n",
        table("export", special),
        "## Rewrites\n\n✓ with a footnote: the rewrite applies to some blocks, not to all.\n",
        table("architecture", applied),
        f"{notes}\n",
    )
    return "\n".join(parts)


def table(corner: str, entries: Mapping[tuple[str, str], str]) -> str:
    """Markdown, from (row, column) -> text."""
    columns = list(dict.fromkeys(column for _, column in entries))
    lines = [[corner, *columns], ["---"] * (len(columns) + 1)]
    for row in dict.fromkeys(row for row, _ in entries):
        lines.append([row, *(entries.get((row, column), "") for column in columns)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
