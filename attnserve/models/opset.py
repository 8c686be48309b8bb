"""A model in a newer opset, by onnx's and onnxscript's own converters: the same function."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

import onnx_ir as ir

from attnserve.runtime.external_data import map_external_data
from graph_passes.errors import CannotRewrite

__all__ = ["raise_opset"]


def raise_opset(model: ir.Model, opset: int) -> None:
    """Make ``model`` import at least this opset of ai.onnx, in place.

    The names of values, inputs and outputs stay. Nothing changes where it is as new already.

    Raises:
        CannotRewrite: A converter has no rule for one of its operators; then nothing changed.
    """
    before = model.opset_imports.get("", 0)
    if before >= opset:
        return
    # Imported here: with all its operators onnxscript takes a second.
    from onnxscript.version_converter import convert_version

    raised = model.clone()  # a converter that fails may leave half of its work
    map_external_data(raised)  # the other converter loses the folder of external tensors
    try:
        with _quiet("onnxscript.version_converter"):
            convert_version(raised, opset, fallback=True)
    except Exception as error:  # of many kinds, from two libraries
        raise _refused(before, opset) from error
    if raised.opset_imports.get("", 0) < opset:
        raise _refused(before, opset)
    model.graph = raised.graph
    model.functions.clear()  # they were inlined
    model.functions.update(raised.functions)


def _refused(before: int, opset: int) -> CannotRewrite:
    return CannotRewrite(
        f"the model is in opset {before}, and onnx's converter does not bring it to {opset}",
        "export it again with a newer opset, or keep its attention operators",
        code="opset.not_converted",
    )


@contextmanager
def _quiet(name: str) -> Generator[None]:
    """It warns of every step that it leaves to the other converter."""
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
