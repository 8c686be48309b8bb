"""A model whose attention heads are multiplied by gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from attnserve.calibration.layerwise import SegmentedModel
from attnserve.context import RunContext
from attnserve.models.masks import not_finite, token_mask
from attnserve.models.output_kinds import counts_tokens
from attnserve.runtime.interface import Batch
from graph_passes.blocks import AttentionBlock
from graph_passes.emit.editing import Inserter
from graph_passes.errors import InvalidModel

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

__all__ = ["GatedModel", "GatedOutputs", "Output"]

Output = tuple["Float[np.ndarray, 'B S D']", "Bool[np.ndarray, 'B S']"]
"""An output and the mask of its real tokens; an output without a token axis has one per text."""


class GatedOutputs(NamedTuple):
    """The outputs of one batch with changed gates of one block.

    Attributes:
        block: The index of the block.
        variation: The index of the variation.
        full_outputs: The outputs with all gates at 1.
        outputs: The outputs with each gate of the variation.
    """

    block: int
    variation: int
    full_outputs: list[Output]
    outputs: list[list[Output]]


class GatedModel:
    """A copy of a model with a gate on the attention context of each head.

    The gates are graph inputs. After a change of a gate, only the later layers run again.

    Attributes:
        gates: By name of the input, a gate of ones for each block.
        by_token: Whether each output has an axis of tokens.
    """

    def __init__(
        self,
        model: ir.Model,
        blocks: Sequence[AttentionBlock],
        context: RunContext,
    ) -> None:
        self.blocks = blocks
        outputs = _results(model, blocks)
        self.output_names = [value.name for value in outputs]
        self.num_outputs = len(outputs)
        self.by_token = [counts_tokens(model, value) for value in outputs]
        places = [index for index, v in enumerate(model.graph.outputs) if v in set(outputs)]
        copy = model.clone()
        values = {v.name: v for node in copy.graph for v in node.outputs}
        self.gates = {
            _gate(copy, block, values[block.context.name], index): np.ones(
                block.num_heads, _dtype(block).numpy()
            )
            for index, block in enumerate(blocks)
        }
        copy.graph.sort()
        copy.graph.outputs[:] = [copy.graph.outputs[index] for index in places]
        self.inputs = {value.name or "": value for value in copy.graph.inputs}
        gates = [self.inputs[name] for name in self.gates]
        self.segments = SegmentedModel(copy, gates, context)

    def run(self, batch: Batch) -> list[Output]:
        """Run the model with all gates at 1."""
        state = self.segments.start(batch | self.gates)
        return self._outputs(self.segments.finish(0, state), batch)

    def vary(
        self,
        batches: Sequence[Batch],
        full_outputs: Sequence[list[Output]],
        variations: Sequence[Sequence[Sequence[np.ndarray]]],
        progress: Callable[[int, int], None],
    ) -> Iterator[GatedOutputs]:
        """Yield the outputs for each batch, block and variation of its gates.

        Args:
            full_outputs: The outputs of each batch with all gates at 1.
            variations: By block, the variations, each of one or more gates (H,).
        """
        total = len(batches) * sum(map(len, variations))
        count = 0
        for batch, batch_outputs in zip(batches, full_outputs, strict=True):
            state = self.segments.start(batch | self.gates)
            for block, (name, ones) in enumerate(self.gates.items()):
                for variation, gates in enumerate(variations[block]):
                    outputs: list[list[Output]] = []
                    for gate in gates:
                        gated_state = state | {self.inputs[name]: gate.astype(ones.dtype)}
                        outputs.append(
                            self._outputs(self.segments.finish(block, gated_state), batch)
                        )
                    yield GatedOutputs(block, variation, batch_outputs, outputs)
                    count += 1
                    progress(count, total)
                state = self.segments.run(block, state)

    def _outputs(self, arrays: Sequence[np.ndarray], batch: Batch) -> list[Output]:
        """The outputs of a batch by token, or by text without a token axis."""
        outputs: list[Output] = []
        for array, by_token in zip(arrays, self.by_token, strict=True):
            if by_token:
                tokens = (*array.shape, 1, 1)[:2]
                real = token_mask(batch, tokens)
            else:
                tokens = (len(np.atleast_1d(array)), 1)
                real = np.ones(tokens, bool)
            outputs.append((array.reshape(*tokens, -1).astype(np.float64), real))
        return outputs

    def by_block(
        self, values: Sequence[Float[np.ndarray, "N O"]]
    ) -> dict[str, Float[np.ndarray, " N"]]:
        """Average over outputs, by block name.

        Raises:
            InvalidData: A value is not finite.
        """
        means = {b.name: array.mean(1) for b, array in zip(self.blocks, values, strict=True)}
        for name, array in means.items():
            if not np.isfinite(array).all():
                raise not_finite(name)
        return means


def _gate(copy: ir.Model, block: AttentionBlock, head_outputs: ir.Value, index: int) -> str:
    """Multiply the context of each head by a new graph input (H,), and return the input's name.

    Args:
        head_outputs: The context of the block in ``copy``.
    """
    producer = head_outputs.producer()
    assert producer is not None
    gate = ir.Value(
        name=f"attnserve/gate_{index}",
        type=ir.TensorType(_dtype(block)),
        shape=ir.Shape([block.num_heads]),
    )
    readers = list(head_outputs.uses())
    make = Inserter(copy.graph, producer, f"attnserve/gated_{index}")  # the caller sorts the nodes
    result = _emit_gate(make, block, head_outputs, gate)
    for node, position in readers:
        node.replace_input_with(position, result)
    outputs = copy.graph.outputs
    outputs[:] = [result if value is head_outputs else value for value in outputs]
    copy.graph.inputs.append(gate)
    return gate.name or ""


def _emit_gate(
    make: Inserter, block: AttentionBlock, head_outputs: ir.Value, gate: ir.Value
) -> ir.Value:
    """Emit head_outputs * gate in the layout of the context."""

    def reshaped(value: ir.Value, *shape: int) -> ir.Value:
        return make.op("Reshape", [value, make.constant(np.array(shape, np.int64), "to")], "shaped")

    H = block.num_heads
    order = block.context_axes
    if order is None:
        if _heads_apart(block):
            return make.op("Mul", [head_outputs, reshaped(gate, H, 1, 1)], "gated")
        heads_apart = reshaped(head_outputs, 0, 0, H, -1)
        product = make.op("Mul", [heads_apart, reshaped(gate, H, 1)], "gated")
        return make.op("Reshape", [product, make.op("Shape", [head_outputs], "shape")], "merged")
    # [B, H, S, V] or [B*H, S, V]
    ordered = make.op("Transpose", [head_outputs], "ordered", perm=order)
    shape = make.op("Shape", [ordered], "shape")
    last = make.constant(np.array([len(order) - 2, len(order) - 1], np.int64), "last")
    heads = make.constant(np.array([-1, H], np.int64), "heads")
    apart = make.op("Concat", [heads, make.op("Gather", [shape, last], "sizes")], "apart", axis=0)
    heads_apart = make.op("Reshape", [ordered, apart], "split")
    product = make.op("Mul", [heads_apart, reshaped(gate, H, 1, 1)], "gated")
    back = make.op("Reshape", [product, shape], "joined")
    return make.op("Transpose", [back], "as_it_was", perm=np.argsort(order).tolist())


def _heads_apart(block: AttentionBlock) -> bool:
    """Whether the context of a fused operator is (B, H, S, V) and not (B, S, H*V)."""
    shape = block.context.shape
    return len(shape) == 4 if shape is not None else block.q.layout == "B H T K"


def _dtype(block: AttentionBlock) -> ir.DataType:
    """The element type of the context: from the graph, else from the value weights."""
    dtype = block.context.dtype
    if dtype is None and block.v.dtype.is_floating_point():
        dtype = block.v.dtype
    return dtype or ir.DataType.FLOAT


def _results(model: ir.Model, blocks: Sequence[AttentionBlock]) -> list[ir.Value]:
    """The float outputs, without keys, values and probabilities of the blocks.

    Raises:
        InvalidModel: The model has no such output.
    """
    inner: set[ir.Value] = set()
    for block in blocks:
        nodes = (*block.k.nodes, *block.v.nodes)
        inner |= {value for node in nodes for value in node.outputs}
        inner |= set(block.product.outputs) - {block.context}
        inner |= set(block.probability_values)
    outputs = [
        value
        for value in model.graph.outputs
        if value not in inner and (value.dtype is None or value.dtype.is_floating_point())
    ]
    if not outputs:
        names = ", ".join(value.name or "" for value in model.graph.outputs)
        raise InvalidModel(
            f"the model has no float output that depends on attention: {names or 'no outputs'}",
            "export the model with its hidden states or logits",
            code="importance.no_output",
        )
    return outputs
