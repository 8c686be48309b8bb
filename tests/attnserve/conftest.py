"""A tiny BERT in several exports, and calibration text."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from attnserve.data.datasets import load_inputs
from attnserve.models import quantized
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import load_model
from attnserve.planning.search import precisions
from attnserve.precision import schemes
from attnserve.runtime.interface import Batch
from tests.fixtures.make import BERT
from tests.texts import write_sentences

Build = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_export(made_once: Build) -> Build:
    """(attention, exporter, opset, layers) -> the artifact folder: 4 heads x 8, 64 positions.

    A copy of an export of ``tests/fixtures/make.py``. It is shared: copy it before changing it.
    """

    def build(
        attention: Any = "eager", exporter: Any = "torchscript", opset: int = 17, layers: int = 2
    ) -> Path:
        name = f"{attention}-{exporter}-{opset}-{layers}"
        return made_once(f"tiny-{name}", lambda folder: shutil.copytree(BERT / name, folder))

    return build


@pytest.fixture(scope="session")
def tiny(tiny_export: Build) -> Path:
    """One export of the tiny BERT; shared: copy it before changing it."""
    return tiny_export()


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny artifact that a test may change."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture(scope="session")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 sentences of 3 to 20 words."""
    return write_sentences(tmp_path_factory.mktemp("text") / "sentences.txt", 60, 20, seed=0)


@pytest.fixture(scope="module")
def tiny_graph(tiny: Path) -> ir.Model:
    """The graph of ``tiny``, read once per module; a test that changes it clones it."""
    return load_model(open_artifact(tiny))


@pytest.fixture(scope="module")
def tiny_batches(tiny: Path, tiny_graph: ir.Model, sentences: Path) -> list[Batch]:
    """All sentences as inputs of ``tiny``."""
    return list(load_inputs(sentences, tiny_graph, open_artifact(tiny), split=False).fit)


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without figures: to draw them takes most of the time of ``analyze``."""
    monkeypatch.setattr("attnserve.reports.analyze.FIGURES", ())


@pytest.fixture
def cpu_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """(int8, bfloat16) -> a CPU with or without the instructions for these products."""

    def choose(*, int8: bool = True, bfloat16: bool = True) -> None:
        for module in (schemes, quantized, precisions):
            monkeypatch.setattr(module, "has_int8_dot_product", lambda: int8)
        monkeypatch.setattr(schemes, "has_bfloat16_product", lambda: bfloat16)

    return choose
