"""Head importance, by three measures.

    head_energy     energy of the head's output about its mean
    leave_one_out   change of the model outputs without the head, and its sum over a block
    sensitivity     change of the model outputs with the head's gate (Michel et al. 2019,
                    arXiv 1905.10650)

One calibration batch is run and reduced at a time. Padding is excluded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir

from attnserve.calibration.activations import by_head, evenly
from attnserve.calibration.layerwise import SegmentedModel
from attnserve.context import DEFAULT_CONTEXT, RunContext
from attnserve.models.masks import no_token, not_finite, token_mask
from attnserve.models.output_kinds import counts_tokens
from attnserve.models.rows import row_count
from attnserve.runtime.interface import Batch
from attnserve.runtime.observer import observe
from graph_passes.blocks import AttentionBlock
from graph_passes.emit.editing import Inserter
from graph_passes.errors import InvalidArgument, InvalidModel

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

__all__ = ["head_energy", "leave_one_out", "leave_one_out_total", "sensitivity"]

MOST_ROWS = 64
"""Default number of texts that the gated model runs on, once (or twice) per head."""

SIGNS = 2
"""Number of random sign vectors per block in ``leave_one_out_total``."""

STEP = 1 / 64
"""Step of a gate in each direction. The truncation error of a central difference is proportional to
its square, the rounding error of float32 to its inverse; both are near 1e-4 here."""


# Energy


def head_energy(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
) -> dict[str, Float[np.ndarray, " H"]]:
    """The energy of each head about its mean over real tokens, by block name.

    With c_h the attention context of head h, it is E |(c_h - E c_h) W_O^h|^2. The mean output of a
    head can move into a bias, so that only the deviation is lost. Without an output projection, it
    is the energy of the attention context itself.

    Raises:
        InvalidData: The model refuses a batch, a block sees no real token, or its contexts are not
            finite.
    """
    sums = {block.name: _Energy(block) for block in blocks}
    values = [[block.context] for block in blocks]
    for batch, arrays in observe(model, values, batches, context, "measure energy"):
        for block, (heads,) in zip(blocks, arrays, strict=True):
            sums[block.name].add(by_head(block, heads), batch)
    return {name: energy.result() for name, energy in sums.items()}


class _Energy:
    """Running sums and Gram matrices of the attention context of each head."""

    def __init__(self, block: AttentionBlock) -> None:
        self.block = block
        self.tokens = 0
        self.total: Any = 0.0  # H V
        self.products: Any = 0.0  # H V V

    def add(self, head_outputs: Float[np.ndarray, "B H S V"], batch: Batch) -> None:
        """Add the attention context of one batch."""
        B, _, S, _ = head_outputs.shape
        real = token_mask(batch, (B, S))
        heads = head_outputs.swapaxes(1, 2)[real].swapaxes(0, 1).astype(np.float64)  # H Q V
        self.tokens += heads.shape[1]
        self.total = self.total + heads.sum(1)
        self.products = self.products + heads.swapaxes(1, 2) @ heads

    def result(self) -> Float[np.ndarray, " H"]:
        """The energy of each head.

        Raises:
            InvalidData: There is no real token, or the contexts are not finite.
        """
        if not self.tokens:
            raise no_token(self.block.name)
        mean = self.total / self.tokens
        covariance = self.products / self.tokens - mean[:, :, None] * mean[:, None, :]
        if self.block.output is not None:
            rows = self.block.output.matrix()[self.block.output.rows].astype(np.float64)  # H V D
            energy = np.einsum("hvw,hvw->h", covariance, rows @ rows.swapaxes(1, 2))
        else:
            energy = np.trace(covariance, axis1=1, axis2=2)
        if not np.isfinite(energy).all():
            raise not_finite(self.block.name)
        return np.maximum(energy, 0.0)


# Gates


def leave_one_out(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
    most_rows: int = MOST_ROWS,
) -> dict[str, Float[np.ndarray, " H"]]:
    """The relative squared change of the outputs without each head, by block name.

    It is E |out - out without h|^2 / E |out - E out|^2 over unmasked tokens, averaged over the
    float outputs except caches and probabilities. The bias of the output projection stays.

    Args:
        blocks: Blocks of the main graph; fused operators may stay as they are.
        most_rows: Approximate number of texts to run, in whole batches spread evenly, at least one
            batch. The cost is one run of the layers from the block on, per head and batch.

    Raises:
        InvalidArgument: ``most_rows`` is not positive.
        InvalidModel: No output is of floats.
        InvalidData: The model refuses a batch, there is no real token, or outputs are not finite.
    """
    gates = [list(1 - np.eye(block.num_heads)) for block in blocks]
    return _changes(model, blocks, batches, gates, most_rows, context)


def leave_one_out_total(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
    most_rows: int = MOST_ROWS,
) -> dict[str, float]:
    """An estimate of the sum of ``leave_one_out`` over the heads of each block, by block name.

    The context of each head is multiplied by 1 + s_h / sqrt(H) with random signs s_h. That changes
    the outputs about as much as one head does. In the mean over the signs, the squared change times
    H is the sum over heads (Hutchinson's estimator), if the outputs are linear in the gates.

    Args:
        most_rows: As in ``leave_one_out``; the cost is ``SIGNS`` runs per block and batch.

    Raises:
        InvalidArgument, InvalidModel, InvalidData: In the cases of ``leave_one_out``.
    """
    signs = np.random.default_rng(context.seed)
    gates = [
        [1 + signs.choice([-1, 1], block.num_heads) / block.num_heads**0.5 for _ in range(SIGNS)]
        for block in blocks
    ]
    changes = _changes(model, blocks, batches, gates, most_rows, context)
    return {block.name: block.num_heads * float(changes[block.name].mean()) for block in blocks}


def _changes(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    gates: Sequence[Sequence[np.ndarray]],
    most_rows: int,
    context: RunContext,
) -> dict[str, Float[np.ndarray, " N"]]:
    """The relative squared change of the outputs with each of N gates (H,), by block name."""
    gated_model = _Gated(model, blocks, context)
    totals = [np.zeros((len(vectors), gated_model.num_outputs)) for vectors in gates]
    spreads = [_Spread() for _ in range(gated_model.num_outputs)]
    sample = _some(batches, most_rows)
    full_outputs = [gated_model.run(batch) for batch in sample]
    for batch_outputs in full_outputs:
        for spread, (out, real) in zip(spreads, batch_outputs, strict=True):
            spread.add(out[real])
    variances = _variances(spreads, gated_model.output_names)
    progress = context.stage("leave heads out")
    variations = [[(vector,) for vector in vectors] for vectors in gates]
    for change in gated_model.vary(sample, full_outputs, variations, progress):
        (gated_outputs,) = change.outputs
        pairs = zip(change.full_outputs, gated_outputs, strict=True)
        for i, ((out, real), (gated_out, _)) in enumerate(pairs):
            squares = np.square(out[real] - gated_out[real])
            totals[change.block][change.variation, i] += squares.sum()
    counts = np.array([spread.count for spread in spreads])
    return gated_model.by_block([total / counts / variances for total in totals])


def sensitivity(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
    most_rows: int = MOST_ROWS,
) -> dict[str, Float[np.ndarray, " H"]]:
    """E_x |d out(x) / d xi_h| at xi_h = 1, by block name; xi_h multiplies the context of head h.

    This is I_h of Michel et al. (2019) with the norm of the outputs in place of the loss, because
    the texts have no labels. The derivative is a central difference of ``STEP``, accurate to about
    1e-3 in float32. The norm of a text is the root mean square over its unmasked tokens, divided by
    the root of E |out - E out|^2, and averaged over outputs as in ``leave_one_out``.

    Args:
        blocks: Blocks of the main graph; fused operators may stay as they are.
        most_rows: As in ``leave_one_out``; the cost is two runs per head and batch.

    Raises:
        InvalidArgument, InvalidModel, InvalidData: In the cases of ``leave_one_out``.
    """
    gated_model = _Gated(model, blocks, context)
    totals = [np.zeros((block.num_heads, gated_model.num_outputs)) for block in blocks]
    texts = np.zeros(gated_model.num_outputs)
    spreads = [_Spread() for _ in range(gated_model.num_outputs)]
    sample = _some(batches, most_rows)
    full_outputs = [gated_model.run(batch) for batch in sample]
    for batch_outputs in full_outputs:
        for i, (out, real) in enumerate(batch_outputs):
            spreads[i].add(out[real])
            texts[i] += real.any(1).sum()
    variances = _variances(spreads, gated_model.output_names)
    progress = context.stage("measure sensitivity")
    steps = [STEP * np.eye(block.num_heads) for block in blocks]
    variations = [[(1 + step, 1 - step) for step in by_head] for by_head in steps]
    for change in gated_model.vary(sample, full_outputs, variations, progress):
        upper, lower = change.outputs
        for i, ((up, real), (down, _)) in enumerate(zip(upper, lower, strict=True)):
            squares = np.where(real, np.square((up - down) / (2 * STEP)).sum(-1), 0.0)
            norms = np.sqrt(squares.sum(1) / np.maximum(1, real.sum(1)))
            totals[change.block][change.variation, i] += norms.sum()
    return gated_model.by_block([total / texts / np.sqrt(variances) for total in totals])


Output = tuple["Float[np.ndarray, 'B S D']", "Bool[np.ndarray, 'B S']"]
"""An output and the mask of its real tokens; without a token axis there is one per text."""


class _Change(NamedTuple):
    """The outputs of one batch with other gates of one block.

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


class _Gated:
    """A copy of a model with a gate on the attention context of each head.

    The gates are graph inputs. To vary one, only the layers after it run.

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
    ) -> Iterator[_Change]:
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
                    yield _Change(block, variation, batch_outputs, outputs)
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


def _dtype(block: AttentionBlock) -> ir.DataType:
    """The element type of the context: from the graph, else from the value weights."""
    dtype = block.context.dtype
    if dtype is None and block.v.dtype.is_floating_point():
        dtype = block.v.dtype
    return dtype or ir.DataType.FLOAT


def _results(model: ir.Model, blocks: Sequence[AttentionBlock]) -> list[ir.Value]:
    """The float outputs, without keys, values and probabilities of the blocks.

    Raises:
        InvalidModel: There is none.
    """
    inner: set[ir.Value] = set()
    for block in blocks:
        inner |= {v for part in (block.k, block.v) for node in part.nodes for v in node.outputs}
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


def _some(batches: Sequence[Batch], most_rows: int) -> list[Batch]:
    """Batches with about ``most_rows`` texts, spread evenly; at least one.

    Batches are not cut: a model may have a fixed batch size.

    Raises:
        InvalidArgument: ``most_rows`` is not positive.
    """
    if most_rows < 1:
        raise InvalidArgument(
            f"`most_rows` is {most_rows}: expected 1 or more", code="importance.most_rows"
        )
    rows = sum(map(row_count, batches))
    if rows <= most_rows:
        return list(batches)
    return evenly(batches, max(1, len(batches) * most_rows // rows))


class _Spread:
    """Running sums of E |out - E out|^2; each width of vectors has its own mean."""

    def __init__(self) -> None:
        self.count = 0
        self.squares = 0.0
        self.sums: dict[int, tuple[int, Any]] = {}

    def add(self, vectors: Float[np.ndarray, "N D"]) -> None:
        """Add N vectors."""
        count, width = vectors.shape
        before, total = self.sums.get(width, (0, 0.0))
        self.sums[width] = before + count, total + vectors.sum(0)
        self.count += count
        self.squares += float(np.square(vectors).sum())

    def variance(self) -> float:
        """E |out - E out|^2."""
        means = sum(
            float(np.square(total).sum()) / count for count, total in self.sums.values() if count
        )
        return max(0.0, self.squares - means) / self.count


def _variances(spreads: Sequence[_Spread], names: Sequence[str | None]) -> Float[np.ndarray, " O"]:
    """The variance of each output; infinite for constant outputs, which removes them.

    Raises:
        InvalidData: An output has no real token, or is not finite.
    """
    variances: list[float] = []
    for spread, name in zip(spreads, names, strict=True):
        if not spread.count:
            raise no_token(f"output {name!r}")
        if not np.isfinite(spread.squares):
            raise not_finite(f"output {name!r}")
        floor = 1e-12 * spread.squares / spread.count  # the rounding error of a constant output
        variance = spread.variance()
        variances.append(variance if variance > floor else np.inf)
    return np.array(variances)
