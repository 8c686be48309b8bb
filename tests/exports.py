"""Build the networks of ``tests/architectures.py``, and export them with PyTorch."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Generator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import onnx

from tests.architectures import (
    ARCHITECTURES,
    LENGTHS,
    OTHER_LENGTHS,
    Architecture,
    Cell,
    Variant,
    feeds,
    run,
)
from tests.networks import Attention


@lru_cache(maxsize=4)
def network(name: str, attention: Attention, variant: Variant = "") -> Any:
    """The network in evaluation mode with random weights; the last few are cached."""
    import torch

    torch.manual_seed(0)
    with quiet():
        built = ARCHITECTURES[name].build(attention).eval()
    with torch.no_grad():
        for key, weight in built.named_parameters():
            centre = 1.0 if weight.ndim == 1 and key.endswith("weight") else 0.0
            weight.copy_(centre + 0.3 * torch.randn(weight.shape))
    return built.to({"fp16": torch.float16, "bf16": torch.bfloat16}.get(variant, torch.float32))


def export(cell: Cell, path: Path) -> str:
    """Export a cell with PyTorch's defaults; return the reason if that fails, or an empty string.

    The dynamo exporter stores weights in a file beside the graph. An export fails as well if ONNX's
    checker rejects the graph, or if the graph runs only at the lengths of the traced example.
    """
    import torch

    torch.set_num_threads(1)  # test machines have few cores, and share them
    torch.backends.mha.set_fastpath_enabled(False)  # its operator cannot be exported
    architecture = ARCHITECTURES[cell.architecture]
    model = network(cell.architecture, cell.attention, cell.variant)
    dtype = next(model.parameters()).dtype

    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def forward(self, *values: Any) -> Any:
            return tuple(self.outputs(*values).values())

        def outputs(self, *values: Any) -> dict[str, Any]:
            inputs = dict(zip(architecture.inputs, values, strict=True))
            return architecture.call(self.network, **inputs)

    wrapper = Wrapper().eval()
    values = tuple(
        value.to(dtype) if value.is_floating_point() else value
        for value in map(torch.from_numpy, feeds(architecture).values())
    )
    with quiet(), torch.no_grad():
        options: dict[str, Any] = {
            "opset_version": cell.opset,
            "input_names": list(architecture.inputs),
            "output_names": list(wrapper.outputs(*values)),
        }
        if cell.exporter == "dynamo":
            shapes = _dynamic_shapes(architecture)
            options |= {"dynamic_shapes": (shapes,), "verbose": False}
        else:
            mode = torch.onnx.TrainingMode
            training = mode.TRAINING if cell.variant == "dropout" else mode.EVAL
            options |= {"dynamic_axes": _named_axes(architecture), "training": training}
        try:
            dynamo = cell.exporter == "dynamo"
            torch.onnx.export(wrapper, values, str(path), dynamo=dynamo, **options)
            onnx.checker.check_model(path, full_check=True)
        except Exception as error:
            return _short(error)
    as_traced, otherwise = (_runs(path, architecture, at) for at in (LENGTHS, OTHER_LENGTHS))
    return "the graph runs only at the lengths that were traced" if as_traced > otherwise else ""


def _runs(path: Path, architecture: Architecture, lengths: Mapping[str, int]) -> bool:
    try:
        run(path, architecture, lengths)
    except Exception:  # onnxruntime raises a class of its own for each status
        return False
    return True


def _named_axes(architecture: Architecture) -> dict[str, dict[int, str]]:
    return {
        name: {axis: dim for axis, dim in enumerate(dims) if isinstance(dim, str)}
        for name, dims in architecture.inputs.items()
    }


def _dynamic_shapes(architecture: Architecture) -> tuple[dict[int, Any], ...]:
    """Named dimensions; sums of lengths cannot be named and are left to the exporter."""
    import torch

    @cache
    def dim(name: str) -> Any:
        if "+" in name:
            return torch.export.Dim.DYNAMIC
        return torch.export.Dim(name, min=1 if name == "batch" else 2, max=40)

    return tuple(
        {axis: dim(name) for axis, name in axes.items()}
        for axes in _named_axes(architecture).values()
    )


def _short(error: BaseException) -> str:
    """The sentence with the reason in PyTorch's report."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    first = re.sub(r"^\[ShapeInferenceError\] \(op_type:(\w+), node name: .*?\): ", r"\1: ", first)
    return re.split(r"(?<=[^.])\. ", first)[0].rstrip(".")[:160]


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Suppress output, warnings and logs of exporters; failures are exceptions."""
    silent, disabled = io.StringIO(), logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(silent),
        contextlib.redirect_stderr(silent),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)
