"""Convert a model to a newer opset with the converters of onnx and onnxscript."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from attnserve.runtime.external_data import map_external_data
from attnserve.runtime.silence import silenced
from graph_passes.errors import CannotRewrite

__all__ = ["raise_opset"]


def raise_opset(model: ir.Model, opset: int) -> None:
    """Convert ``model`` in place to at least this opset of ai.onnx; names and metadata are kept.

    Raises:
        CannotRewrite: A converter does not support an operator; ``model`` is unchanged.
    """
    old_opset = model.opset_imports.get("", 0)
    if old_opset >= opset:
        return
    # Imported on first use: onnxscript takes a second to import.
    from onnxscript.version_converter import convert_version

    raised = model.clone()  # a failing converter leaves a partly converted model
    map_external_data(raised)  # the fallback converter loses the folder of external tensors
    failure: Exception | None = None
    try:
        with silenced():  # of each use of the fallback converter
            convert_version(raised, opset, fallback=True)
    except Exception as error:  # the libraries raise exceptions of many types
        failure = error
    if failure is not None or raised.opset_imports.get("", 0) < opset:
        raise CannotRewrite(
            f"the model cannot be converted from opset {old_opset} to {opset}",
            "export it again with a newer opset, or keep its attention operators",
            code="opset.not_converted",
        ) from failure
    _copy_metadata(model, raised)
    model.graph = raised.graph
    model.functions.clear()  # they were inlined
    model.functions.update(raised.functions)


def _copy_metadata(old: ir.Model, new: ir.Model) -> None:
    """Copy the metadata of graphs and nodes, such as block names, which converters may drop.

    Nodes correspond if they are in graphs with one name and have an output with one name.
    """
    new.graph.metadata_props.update(old.graph.metadata_props)
    metadata = {key: node.metadata_props for key, node in _nodes_by_output(old)}
    for key, node in _nodes_by_output(new):
        node.metadata_props.update(metadata.get(key, {}))


def _nodes_by_output(model: ir.Model) -> Iterator[tuple[tuple[str | None, str], ir.Node]]:
    """Yield each node, with the names of its graph and of each output."""
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in graph:
            for value in node.outputs:
                if value.name:
                    yield (graph.name, value.name), node
