"""Write one HTML page per artifact: its rewrites, cost, quality, latency and attention.

The page shows the attention blocks of the graph, and from attnserve.json every rewrite with its
cost, quality, latency and changes. A report needs neither the original nor data, because the record
contains the measured values. Only the attention blocks are matched and certified for the page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from attnserve.checks.inspect import Inspection, inspect_graph
from attnserve.context import Progress, ignore_progress
from attnserve.models.artifact import Artifact, open_artifact
from attnserve.models.checksums import sha256
from attnserve.models.lineage import SIZES
from attnserve.models.model_folder import find_models
from attnserve.models.onnx_files import load_model
from attnserve.models.outputs import check_folder, check_output, staged
from attnserve.options import check_seed
from attnserve.paths import StrPath, as_path
from attnserve.reports.drawing import require_extra
from attnserve.reports.model_plots import figures
from attnserve.reports.pages import render_page
from attnserve.runtime.external_data import external_files
from graph_passes.errors import InvalidModel

__all__ = ["ModelReport", "report"]

SEQUENCE = 128
"""Tokens at which MACs are counted for a model without a rewrite."""


@dataclass(frozen=True, eq=False)
class ModelReport:
    """The report of one model.

    Attributes:
        name, version: As in the service.
        artifact: The model and its record.
        output: The page.
        inspection: The attention blocks, as in ``attnserve inspect``.
        size: Bytes of the model file and its external data.
    """

    name: str
    version: str
    artifact: Artifact
    output: Path
    inspection: Inspection
    size: int

    def to_json(self) -> dict[str, Any]:
        return {
            "model": str(self.artifact.model),
            "name": self.name,
            "version": self.version,
            "output": str(self.output),
        }


def report(
    models: StrPath,
    output: StrPath | None = None,
    *,
    seed: int = 0,
    force: bool = False,
    progress: Progress | None = None,
) -> list[ModelReport]:
    """Write one HTML page for each model at a path.

    Args:
        models: An .onnx file, an artifact folder, or a folder of models as for ``serve``.
        output: Folder for the pages, NAME.html; by default each page is report.html beside its
            model (NAME-report.html beside NAME.onnx).
        seed: Seed of the inputs that certify the attention blocks.
        force: Replace existing pages.

    Raises:
        InvalidModel: The path has no model, or a model or its record cannot be read.
        InvalidArgument: ``seed`` is negative.
        InvalidOutput: A page exists, or cannot be written.
        MissingExtra: jinja2, matplotlib or ONNX Runtime is not installed.
    """
    require_extra("jinja2", "matplotlib")
    progress = progress or ignore_progress
    check_seed(seed)
    reported_models = list(_reported_models(Path(models), as_path(output)))
    for model in reported_models:
        check_output(model.page, force=force)
    reports: list[ModelReport] = []
    pages: defaultdict[Path, dict[str, str]] = defaultdict(dict)
    for number, model in enumerate(reported_models):
        progress("reports", number, len(reported_models))
        reports.append(_read(model, seed))
        pages[model.page.parent][model.page.name] = render(reports[-1])
    for folder, contents in pages.items():
        with staged(folder) as stage:
            for name, content in contents.items():
                (stage / name).write_text(content, encoding="utf-8")
    progress("reports", len(reported_models), len(reported_models))
    return reports


class _ReportedModel(NamedTuple):
    """A model, by its name and version as in the service, and the page to write."""

    name: str
    version: str
    artifact: Artifact
    page: Path


def _reported_models(path: Path, output: Path | None) -> Iterator[_ReportedModel]:
    """Find the models at a path.

    Args:
        path: An .onnx file, an artifact folder, or a folder of models.
        output: The folder of the pages; None writes each page beside its model.

    Raises:
        InvalidModel: The path has no model.
        InvalidOutput: ``output`` is not a folder.
    """
    if output is not None:
        check_folder(output)
    models = find_models(path)
    if not models:
        raise InvalidModel(
            f"{path}: no model in this folder",
            "pass an .onnx file, an artifact folder or a folder of models",
            code="artifact.model_count",
        )
    for name, versions in models.items():
        for version, location in versions.items():
            artifact = open_artifact(location.path, location.companion_folder)
            prefix = "" if artifact.model.stem == "model" else f"{artifact.model.stem}-"
            page = artifact.folder / f"{prefix}report.html"
            if output is not None:
                page = output / (f"{name}-{version}.html" if len(versions) > 1 else f"{name}.html")
            yield _ReportedModel(name, version, artifact, page)


def _read(model: _ReportedModel, seed: int) -> ModelReport:
    """Read the record of one model, and match and certify its attention blocks."""
    artifact = model.artifact
    graph = load_model(artifact.model, in_place=True)
    files = {artifact.model, *external_files(graph)}
    last_rewrite = artifact.lineage[-1] if artifact.lineage else None
    return ModelReport(
        name=model.name,
        version=model.version,
        artifact=artifact,
        output=model.page,
        inspection=inspect_graph(
            graph,
            batch=(last_rewrite and last_rewrite.batch) or 1,
            sequence=(last_rewrite and last_rewrite.sequence) or SEQUENCE,
            seed=seed,
        ),
        size=sum(file.stat().st_size for file in files),
    )


def render(report: ModelReport) -> str:
    """Render a report as one HTML document without external references."""
    content = report.inspection.to_json()
    return render_page(
        "report.html.j2",
        report=report,
        artifact=report.artifact,
        record=report.artifact.record.to_json(),
        sha256=sha256(report.artifact.model),
        attention=content["attention"],
        unmatched=content["missed"],
        macs=content["macs"],
        parameters=content["parameters"],
        # The newest rewrite comes first.
        rewrites=[
            (number, rewrite, figures(rewrite))
            for number, rewrite in reversed(list(enumerate(report.artifact.lineage, start=1)))
        ],
        columns={name: name.replace("_", " ") for name in SIZES},
    )
