"""The README.md of a model folder: the changes, the verified quality, and how to load the model.

Names of files, models and outputs come from others: they are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnserve.literals import Precision
from attnserve.models.artifact import Artifact
from attnserve.models.library_files import LibraryModel
from attnserve.models.lineage import LineageEntry, OptimizeEntry, RecoverEntry, search_of
from attnserve.models.measured import Quality
from attnserve.runtime.machine import cpu_name, gpu_name
from attnserve.runtime.onnx_runtime import OnnxRuntime
from attnserve.runtime.openvino_runtime import OpenVino
from attnserve.versions import package_versions

__all__ = ["CARD", "TaskScore", "is_own_card", "model_card", "with_scores"]

CARD = "README.md"

MARK = "<!-- attnserve writes this card again with the model; remove this line to keep yours -->"
"""A card with this line may be replaced."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)

SPECIAL = re.compile(r"([\\`*_{}\[\]()<>#+!|~$&:@])")
"""Characters with a meaning in Markdown or HTML."""

INDEX = (
    "The measure index compares what queries of this model and queries of the original find among "
    "documents that the original embedded: an existing index can stay. Its other measures hold if "
    "this model embeds the documents too."
)
"""The guarantee of the measure "index"."""

IN_OPENVINO = ("bfloat16-cpu", "int8-full-bfloat16")
"""The precisions that only OpenVINO computes; see ``precision.schemes``."""

SCORES = "## MTEB\n"
"""The heading of the scores."""


@dataclass(frozen=True)
class TaskScore:
    """The main score of a task of MTEB.

    Attributes:
        value: The mean over the splits and languages.
        revision: The revision of the data on the Hugging Face hub, or the checksum of local data.
        mteb: The version of mteb.
    """

    task: str
    metric: str
    value: float
    splits: tuple[str, ...]
    revision: str
    mteb: str


def is_own_card(path: Path) -> bool:
    """Whether a card is missing, or was written by ``model_card`` and not changed to keep it."""
    if not path.exists() and not path.is_symlink():
        return True
    try:
        return path.is_file() and MARK in path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def model_card(artifact: Artifact, view: LibraryModel | None, *, has_openvino: bool) -> str:
    """The text of a model card in Markdown, with the metadata of the Hugging Face hub.

    Args:
        artifact: The model. Its last speeds were measured on this machine.
        view: The model as sentence-transformers loads it; None if it cannot.
        has_openvino: Whether the folder has an OpenVINO file.
    """
    verified = _verified_in(artifact)
    parts = [
        _metadata(artifact, view, has_openvino=has_openvino),
        f"# {_escaped((artifact.source or 'ONNX model').rpartition('/')[2])}",
        MARK,
        _origin(artifact),
        *_changes(artifact.lineage),
        *_quality(artifact, verified),
        *_speed(artifact.lineage),
        *_loading(view, verified, has_openvino=has_openvino),
        _serving(verified),
    ]
    return "\n\n".join(parts) + "\n"


def with_scores(card: str, scores: Sequence[TaskScore]) -> str:
    """A card of ``model_card`` with the scores of tasks, in place of earlier ones."""
    first, *sections = re.split(r"^(?=## )", card, flags=re.MULTILINE)
    sections = [section for section in sections if not section.startswith(SCORES)]
    # After the changes and the quality.
    before = ("## Changes", "## Quality")
    place = sum(section.startswith(before) for section in sections)
    rows = [
        (
            _escaped(score.task),
            _escaped(score.metric),
            f"{score.value:.4f}",
            _escaped(", ".join(score.splits)),
            _escaped(score.revision[:19]),
            _escaped(score.mteb),
        )
        for score in scores
    ]
    table = _table(("task", "metric", "score", "splits", "data", "mteb"), rows)
    sections.insert(place, f"{SCORES}\n{table}\n\nThe results are in the folder `mteb`.\n\n")
    return first + "".join(sections)


def _metadata(artifact: Artifact, view: LibraryModel | None, *, has_openvino: bool) -> str:
    tags = ["attnserve", "onnx", *(["openvino"] if has_openvino else [])]
    lines = [f"tags: [{', '.join(tags)}]"]
    if view is not None:
        task = "sentence-similarity" if view.is_embedding else "text-classification"
        task = "text-ranking" if not view.is_embedding and view.width == 1 else task
        lines += ["library_name: sentence-transformers", f"pipeline_tag: {task}"]
    source = artifact.record.source or ""  # uncut: the end of a local path may look like an id
    if HUB_ID.fullmatch(source) and not Path(source).exists():
        lines.append(f'base_model: "{source}"')
    return "\n".join(["---", *lines, "---"])


def _origin(artifact: Artifact) -> str:
    version = package_versions(["attnserve"]).get("attnserve", "")
    source = f" from {_escaped(artifact.source)}" if artifact.source else ""
    return f"An ONNX model that attnserve {version} made{source}. `attnserve.json` has the record."


def _changes(lineage: Sequence[LineageEntry]) -> list[str]:
    if not lineage:
        return ["## Changes\n\nNone: the graph is the exported model."]
    rows = [
        (
            _escaped(entry.rewrite.replace("+", ", ")),
            _pair(entry, "parameters", 1e6, "M"),
            _pair(entry, "macs", 1e9, "G"),
            _pair(entry, "bytes", 1e6, "MB"),
        )
        for entry in lineage
    ]
    return ["## Changes\n\n" + _table(("rewrite", "parameters", "MACs", "weights"), rows)]


def _pair(entry: LineageEntry, field: str, unit: float, name: str) -> str:
    values = [getattr(cost, field, None) for cost in (entry.before, entry.after)]
    return " to ".join(f"{value / unit:.2f} {name}" if value else "unknown" for value in values)


@dataclass(frozen=True)
class _Verified:
    """The runtimes in which the quality of the last rewrite was measured.

    Attributes:
        first: The runtime of the comparison; empty if it is not known.
        others: Other runtimes in which the quality is kept.
        differs: Whether the outputs depend on the runtime: activations are rounded to integers.
    """

    first: str
    others: Sequence[str]
    differs: bool

    def includes(self, runtime: str) -> bool:
        return not self.differs or runtime in (self.first, *self.others)

    @property
    def required(self) -> str:
        """The runtime that commands must name; empty if they may run the default one."""
        return "" if self.includes(OnnxRuntime.name) else self.first

    def describe(self) -> str:
        """A sentence; empty if the runtime has no effect or is not known."""
        if not (self.differs and self.first):
            return ""
        others = f", and is kept in {' and '.join(self.others)}" if self.others else ""
        return (
            _escaped(f"The quality was measured in {self.first}{others}.")
            + " Activations are rounded to integers, which differ between runtimes."
        )


def _verified_in(artifact: Artifact) -> _Verified:
    entry = artifact.lineage[-1] if artifact.lineage else None
    if not isinstance(entry, OptimizeEntry | RecoverEntry):
        return _Verified("", (), differs=False)
    precision = (entry.plan or {}).get("precision")
    search, speeds = search_of(entry), entry.speedups if isinstance(entry, OptimizeEntry) else None
    first = ""
    if precision in IN_OPENVINO:
        first = OpenVino.name
    elif search is not None:
        first = search.goal.runtime
    elif speeds is not None:
        first = speeds.device.runtime_name
    # A pair of runtimes (``by_length``) contains a "+".
    others = [name for name in artifact.other_runtimes if "+" not in name]
    return _Verified(first, others, entry.int8_activations is not None or precision == "int4")


def _quality(artifact: Artifact, verified: _Verified) -> list[str]:
    """The last verified quality, with intervals, data and warnings, or the error of the export."""
    heading = "## Quality\n\n"
    if not artifact.lineage:
        error = artifact.record.max_abs_error
        if error is None:
            return []
        return [
            f"{heading}The largest difference of an output to PyTorch is {error:.1e}, on random"
            " tokens at two shapes."
        ]
    entry = artifact.lineage[-1]
    lines = [f"Compared with {_escaped(entry.source.file)}, the model that was rewritten."]
    file = entry.calibration.file if entry.calibration else ""
    found = [(quality, file) for quality in entry.qualities]
    if isinstance(entry, OptimizeEntry):
        found += [(each, other.data) for other in entry.also_verified for each in other.qualities]
    if found:
        lines.append(
            _table(
                ("measure", "output", "value", "95 % interval", "rows", "data", "other measures"),
                [_quality_row(*row) for row in found],
            )
        )
        if any(quality.measure == "index" for quality, _ in found):
            lines.append(INDEX)
    if (fidelity := entry.fidelity) is not None:
        lines.append(
            f"Cosine of the outputs: mean {fidelity.mean_cosine:.4f}, minimum"
            f" {fidelity.min_cosine:.4f} ({_escaped(fidelity.data)})."
        )
    lines.append(f"{verified.describe()} The quality holds for inputs like these.".lstrip())
    if entry.warnings:
        lines.append("Warnings:")
        lines.append("\n".join(f"- {_escaped(text, 1000)}" for text in entry.warnings))
    return [heading + "\n\n".join(lines)]


def _quality_row(quality: Quality, file: str) -> tuple[str, ...]:
    """The cells of a quality; ``file`` is its data, if it does not name one of several files."""
    interval = "none" if quality.ci95 is None else "{:.4f} to {:.4f}".format(*quality.ci95)
    parts = (quality.file or file, quality.split, quality.lengths)
    data = ", ".join(part for part in parts if part)
    others = ", ".join(f"{name} {x:.4f}" for name, x in quality.also.items())
    return (
        _escaped(quality.measure),
        _escaped(quality.outputs),
        f"{quality.value:.4f}",
        interval,
        quality.searched.removesuffix(" rows"),
        _escaped(data),
        _escaped(others),
    )


def _speed(lineage: Sequence[LineageEntry]) -> list[str]:
    """The measured speed-up, with the machine."""
    last = lineage[-1] if lineage else None
    if not isinstance(last, OptimizeEntry) or (speeds := last.speedups) is None:
        return []
    device = speeds.device
    gpu = gpu_name() if device.provider == "cuda" else None
    precision: Precision = (last.plan or {}).get("precision", "float32")
    served = speeds.served
    return [
        "## Speed\n\n"
        f"Served, {served.value:.2f} times as fast as the fused original"
        f" (95 % interval {served.ci95[0]:.2f} to {served.ci95[1]:.2f}):"
        f" {speeds.describe(precision)}. Measured on {_escaped(gpu or cpu_name())}."
    ]


def _loading(view: LibraryModel | None, verified: _Verified, *, has_openvino: bool) -> list[str]:
    if view is None:
        return []
    call = (
        'vectors = model.encode(["a text"])'
        if view.is_embedding
        else 'scores = model.predict([("a query", "a document")])'
    )
    if not view.is_embedding and view.width > 1:
        call = 'scores = model.predict("a text")'
    runtime = f', runtime="{verified.required}"' if verified.required else ""
    integration = _code(
        "python",
        "from attnserve.integrations.sentence_transformers import load",
        "",
        f'model = load("FOLDER"{runtime})',
        call,
    )
    parts = ["## Load", f"In sentence-transformers 6, with attnserve:\n\n{integration}"]
    if has_openvino and not verified.includes(OpenVino.name):
        parts.append(
            "The file for OpenVINO (`openvino/openvino_model.xml`) is the same model, but its"
            " quality in OpenVINO is not verified."
        )
    elif has_openvino:
        stock = _code(
            "python",
            f"from sentence_transformers import {view.kind}",
            "",
            f'model = {view.kind}("FOLDER", backend="openvino")',
            call,
        )
        parts.append(
            f"Without it (`pip install 'sentence-transformers[openvino]'`):\n\n{stock}\n\n"
            "OpenVINO computes in bfloat16 where the CPU has it. For the results of float32, add\n"
            '`model_kwargs={"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}`.'
        )
    return parts


def _serving(verified: _Verified) -> str:
    extras = "cpu,openvino" if verified.first == OpenVino.name else "cpu"
    runtime = f" --runtime {verified.required}" if verified.required else ""
    install, serve = f"pip install 'attnserve[{extras}]'", f"attnserve serve FOLDER{runtime}"
    return "## Serve\n\n" + _code("sh", install, serve)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(language: str, *lines: str) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _escaped(text: str, longest: int = 200) -> str:
    """A text on one line, whose characters have no meaning in Markdown and HTML."""
    # isprintable is false for control characters, and for lone surrogates, which have no UTF-8.
    plain = "".join(letter if letter.isprintable() else " " for letter in text[:longest])
    return SPECIAL.sub(r"\\\1", plain)
