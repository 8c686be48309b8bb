"""analyze: the written files, refused inputs and the report page."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve import analyze, optimize
from attnserve.calibration.similarity import HeadSimilarity
from attnserve.options import GROUPS
from attnserve.reports.analysis import Analysis, NotAnalyzed
from attnserve.reports.analyze import findings, render
from attnserve.reports.plots import FIGURES
from graph_passes.errors import (
    AttnserveError,
    InvalidData,
    InvalidModel,
    InvalidOutput,
    MissingExtra,
)
from tests.attnserve.reports.pages import HOSTILE, Page, hide, require_self_contained
from tests.errors import raises
from tests.files import tree

pytest.importorskip("jinja2", reason="pip install 'attnserve[report]'")
pytest.importorskip("matplotlib", reason="pip install 'attnserve[report]'")

Build = Callable[..., Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of ``analysis``."""
    return tmp_path_factory.mktemp("analysis") / "not" / "there yet"


@pytest.fixture(scope="module", autouse=True)
def analysis(tiny: Path, sentences: Path, written: Path) -> Analysis:
    """The analysis of the tiny BERT, which is also written to a folder."""
    return analyze(tiny, written, calib=sentences, threads=1)


def page_of(analysis: Analysis) -> Page:
    paths = {"model": Path("m.onnx"), "calib": Path("c.txt"), "output": Path("out")}
    return Page(render(analysis, **paths))


def commands(analysis: Analysis, **paths: str) -> list[str]:
    """The ``attnserve optimize`` commands on the page."""
    given = {"model": "m.onnx", "calib": "c.txt", "output": "out", **paths}
    page = render(analysis, **{name: Path(path) for name, path in given.items()})
    lines = re.findall("<code>(attnserve optimize .*)</code>", page)
    return [unescape(re.sub("</?span>", "", line)) for line in lines]


def parameters(analysis: Analysis) -> list[dict[str, str]]:
    return [dict(finding.parameters) for finding in findings(analysis, Path("out"))]


# Output


def test_analyze_writes_readable_json_the_mask_and_the_page(written: Path):
    assert list(tree(written)) == ["analysis.json", "mask.json", "report.html"]
    text = (written / "analysis.json").read_text(encoding="utf-8")
    content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert content["format"] == 1 and re.fullmatch("[0-9a-f]{64}", content["model"]["sha256"])
    row = next(line for line in text.splitlines() if '"energy_share"' in line)
    assert row.count(",") >= 4  # a row of numbers stays on one line
    mask = json.loads((written / "mask.json").read_text(encoding="utf-8"))
    votes = {layer["name"]: layer["votes"]["mask"] for layer in content["layers"]}
    assert mask == content["mask"] == votes
    assert all(len(bits) == 4 and sum(bits) == 2 for bits in mask.values())


# Refused input


@pytest.mark.parametrize("force", [False, True])
def test_analyze_output_that_is_a_file_is_refused(
    tiny: Path, sentences: Path, tmp_path: Path, force: bool
):
    (tmp_path / "file").write_text("mine")
    with raises(InvalidOutput, "output.not_folder"):
        analyze(tiny, tmp_path / "file", calib=sentences, force=force)
    assert (tmp_path / "file").read_text() == "mine"


def refused(error: type[AttnserveError], code: str, model: Path, output: Path, **options: Any):
    with raises(error, code):
        analyze(model, output, **options)
    assert not output.exists() and not output.parent.exists()


def test_analyze_invalid_input_writes_nothing(tiny: Path, sentences: Path, tmp_path: Path):
    out = tmp_path / "a" / "b"
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe\x00")
    refused(InvalidData, "data.missing", tiny, out, calib=tmp_path / "no.txt")
    refused(InvalidData, "text.empty_file", tiny, out, calib=empty)
    refused(InvalidData, "text.not_utf8", tiny, out, calib=binary)
    refused(InvalidModel, "artifact.missing", tmp_path / "no.onnx", out, calib=sentences)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(tiny / "model.onnx", bare)
    refused(InvalidData, "data.no_tokenizer", bare, out, calib=sentences)


def test_analyze_weights_not_finite_are_refused(model: Path, sentences: Path, tmp_path: Path):
    graph = ir.load(model / "model.onnx")
    name, value = next(
        (n, v) for n, v in graph.graph.initializers.items() if "word_embeddings" in n
    )
    assert value.const_value is not None
    broken = np.full(value.const_value.shape.numpy(), np.nan, np.float32)
    value.const_value = ir.tensor(broken, name=name)
    ir.save(graph, model / "model.onnx")
    refused(InvalidModel, "model.not_finite", model, tmp_path / "a" / "b", calib=sentences)


# Page


def test_page_has_no_external_references(written: Path):
    require_self_contained((written / "report.html").read_text(encoding="utf-8"))


def test_page_is_well_formed_and_complete(written: Path):
    content = (written / "report.html").read_text(encoding="utf-8")
    page = Page(content)
    assert page.open == [] and "script" not in page.tags
    assert page.tags.count("svg") == page.tags.count("figure") == len(FIGURES)
    assert page.tags.count("figcaption") == len(FIGURES) and page.tags.count("h1") == 1
    assert page.tags.count("details") >= 4
    assert "prefers-color-scheme: dark" in content and "@media print" in content
    assert len(content) < 500_000


def test_figures_use_page_colors_and_axis_labels(analysis: Analysis):
    for draw in FIGURES:
        figure = draw(analysis)
        assert figure is not None
        assert "var(--ink)" in figure.svg and "#0b0b0" not in figure.svg
        assert "<metadata" not in figure.svg and figure.svg.startswith("<svg")
        assert figure.caption.endswith(".")
        words = Page(figure.svg).text
        assert any(axis in words for axis in ("layer", "tokens, n", "directions, % of all"))


def test_page_escapes_hostile_names(analysis: Analysis):
    first, *rest = analysis.layers
    similarity = analysis.similarity
    hostile = replace(
        analysis,
        model={**analysis.model, "name": HOSTILE, "file": HOSTILE},
        calibration=analysis.calibration.model_copy(update={"file": HOSTILE}),
        layers=(replace(first, name=HOSTILE, notes=(HOSTILE,)), *rest),
        similarity=replace(similarity, layers=(HOSTILE, *similarity.layers[1:])),
        not_analyzed=(NotAnalyzed(HOSTILE, HOSTILE),),
    )
    page = page_of(hostile)
    assert "script" not in page.tags and page.open == []
    assert page.text.count(HOSTILE) >= 6


@pytest.mark.usefixtures("no_figures")
def test_page_commands_quote_paths_for_the_shell(analysis: Analysis):
    lines = commands(analysis, model="my model; rm -rf x", calib="a'b.txt")
    assert lines and all("'my model; rm -rf x'" in line for line in lines)
    assert all("""'a'"'"'b.txt'""" in line for line in lines)


@pytest.mark.usefixtures("no_figures")
def test_page_commands_use_options_of_optimize(analysis: Analysis):
    names = [name for each in parameters(analysis) for name in each]
    lines = " ".join(commands(analysis))
    fields = {name for group in GROUPS for name in group.model_fields}
    assert set(names) <= fields | set(inspect.signature(optimize).parameters)
    for option in ("--collab-dk", "--prune 0.1", "--importance energy", "--prune-heads out/mask"):
        assert option in lines
    assert lines.count("--calib c.txt") == lines.count(" -o out/") == names.count("output")


# Findings


def test_findings_name_dimensions_heads_and_lengths(analysis: Analysis):
    text = " ".join(finding.text for finding in findings(analysis, Path("out")))
    rows = analysis.summary()
    assert f"{min(row.rank or 0 for row in rows)} of 32 " in text
    assert "1 head of 4 in layer" in text and "4 of 8 heads" in text
    share = 100 * np.mean(analysis.lengths > 8)
    assert f"{share:.0f} % of the texts" in text and "head size (8)" in text


def test_findings_shared_dimensions_hold_99_percent(analysis: Analysis):
    (given,) = [each["collab_dk"] for each in parameters(analysis) if "collab_dk" in each]
    sizes = [int(size) for size in given.split(",")]
    for size, row in zip(sizes, analysis.summary(), strict=True):
        assert row.rank is not None and row.rank <= size <= 32 and size % 8 == 0


def alike(analysis: Analysis, value: float) -> Analysis:
    matrix = np.full((8, 8), value)
    np.fill_diagonal(matrix, 1.0)
    names = tuple(layer.name for layer in analysis.layers)
    return replace(analysis, similarity=HeadSimilarity(names, (4, 4), matrix, 100))


@pytest.mark.parametrize(
    ("uniform", "offered"), [(0.4, True), (0.84, True), (0.88, False), (0.95, False)]
)
def test_findings_similarity_must_exceed_that_to_uniform_attention(
    analysis: Analysis, uniform: float, offered: bool
):
    """Heads of an untrained model are nearly uniform, so that all are alike."""
    similarity = replace(alike(analysis, 0.9).similarity, uniform=np.full(8, uniform))
    found = findings(replace(analysis, similarity=similarity), Path("out"))
    assert any("reuse" in finding.parameters for finding in found) == offered
    assert any(f"{uniform:.2f}" in finding.text for finding in found)


def test_analysis_json_and_page_show_uniform_attention(analysis: Analysis):
    similarity = replace(alike(analysis, 0.9).similarity, uniform=np.linspace(0.3, 0.8, 8))
    shown = replace(analysis, similarity=similarity)
    means = [similarity.uniform[:4].mean(), similarity.uniform[4:].mean()]
    assert shown.to_json()["similarity"]["uniform"] == pytest.approx(means, abs=1e-3)
    assert [row.uniform for row in shown.summary()] == pytest.approx(means)
    page = render(shown, model=Path("m"), calib=Path("c"), output=Path("o"))
    assert f"<td>{means[0]:.2f}</td>" in page and page.count("uniform attention") >= 3


def test_findings_suggest_reuse_for_similar_layers_only(analysis: Analysis):
    for value, offered in ((0.9, True), (0.3, False)):
        found = findings(alike(analysis, value), Path("out"))
        (text,) = [each.text for each in found if "Layers 0 and 1" in each.text]
        assert f"{value:.2f}" in text
        assert any("reuse" in each.parameters for each in found) is offered


def test_analysis_layers_that_cannot_be_compared_are_null(analysis: Analysis):
    apart = alike(analysis, 0.5)
    apart.similarity.matrix[:4, 4:] = np.nan
    apart.similarity.matrix[4:, :4] = np.nan
    assert apart.summary()[1].nearest is None
    content = json.loads(json.dumps(apart.to_json(), allow_nan=False))
    assert content["similarity"]["matrix"][0][7] is None
    assert content["similarity"]["sequential"] == {}
    assert page_of(apart).open == []


def test_page_names_missing_measurements(analysis: Analysis):
    first, second = analysis.layers
    without = replace(
        analysis,
        layers=(
            replace(first, weights=None, calibrated=None, ranks=None, notes=("no spectrum here",)),
            replace(second, calibrated=None, weights=replace(second.weights, product=None)),
        ),
        not_analyzed=(NotAnalyzed("decoder", "its keys are cached"),),
    )
    page = page_of(without)
    assert "Layer 0: no spectrum here." in page.text and "its keys are cached" in page.text
    assert not any("collab_dk" in each for each in parameters(without))


def test_analyze_one_layer_of_one_head(tiny_bert: Build, sentences: Path, tmp_path: Path):
    from attnserve.exporters.hugging_face import export

    small = tiny_bert(num_hidden_layers=1, num_attention_heads=1, initializer_range=0.3)
    export(str(small), tmp_path / "small", attention="eager", exporter="torchscript", opset=17)
    found = analyze(tmp_path / "small", tmp_path / "out", calib=sentences)
    assert list(found.mask.values()) == [[1]]
    page = Page((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    assert page.open == [] and "--reuse" not in page.text


@pytest.mark.parametrize("name", ["jinja2", "matplotlib"])
def test_analyze_without_the_report_extra_is_refused_before_it_runs(
    name: str, tiny: Path, sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hide(monkeypatch, name)
    with raises(MissingExtra, "extra.report", name, "pip install 'attnserve[report]'"):
        analyze(tiny, tmp_path / "out", calib=sentences)
    assert not (tmp_path / "out").exists()
