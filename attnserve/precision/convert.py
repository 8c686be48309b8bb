"""Convert a float32 model to another precision, after all rewrites (``schemes``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import onnx_ir as ir
import onnx_ir.passes.common as common

from attnserve.context import AUTO, RunContext
from attnserve.literals import Precision
from attnserve.models.quantized import quantized_node
from attnserve.precision.int8 import roundings
from attnserve.precision.int8_grids import Rounding
from attnserve.precision.products import WeightKey
from attnserve.precision.schemes import SCHEMES, Activations, Conversion, Scheme
from attnserve.runtime.external_data import all_tensors, map_external_data
from attnserve.runtime.inference_precision import compute_in_bfloat16
from attnserve.runtime.interface import Batch
from attnserve.runtime.session import RUNTIMES, open_session
from attnserve.runtime.silence import silenced
from graph_passes.errors import (
    AttnserveError,
    CannotRewrite,
    InvalidArgument,
    InvalidData,
    InvalidModel,
    InvariantBroken,
)
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes.round_bfloat16 import RoundInFloat32
from graph_passes.passes.skip_attention import skipped

__all__ = [
    "check_cpu",
    "context_for",
    "convert",
    "convert_alone",
    "is_bfloat16",
    "nodes_of_blocks",
    "on_cpu",
    "precision_of",
    "roundings_of",
]


NAMES = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.DOUBLE: "float64",
    ir.DataType.UINT8: "int8",
    ir.DataType.UINT4: "int4",
}
"""Names of data types in reports, if they differ from ONNX's."""

FLOAT32 = "keep the float32 model"


def convert(
    model: ir.Model,
    precision: Precision,
    calibration: Sequence[Batch] = (),
    *,
    float_blocks: Collection[str] = (),
    to_nearest: bool = False,
    rounding: Mapping[WeightKey, Rounding] | None = None,
) -> ir.Model:
    """Convert a copy of the model to another precision, with the same inputs and outputs (lossy).

    "float32" returns ``model`` itself. Convert last: passes do not match quantized products.
    Quantized products of the model stay unchanged. The result is loaded once by ONNX Runtime on the
    CPU as a check.

    Args:
        calibration: Inputs for the static scales of int8 activations and for the rounding of int8
            and int4 weights. Without them, int8 scales are computed for each row at run time,
            which is less accurate and slower.
        float_blocks: Attention and feed-forward blocks that stay float32; for int8 and int4.
        to_nearest: Use round-to-nearest even with calibration data (faster), for models that are
            only timed or tried.
        rounding: Precomputed rounding of int8 weights, from ``roundings_of``.

    Raises:
        InvalidArgument: The precision is unknown, the model has no float32 weights to convert or no
            block of ``float_blocks``, or this CPU multiplies "int8-full" weights inexactly.
        CannotRewrite: No weight fits the precision, the opset is too old, the conversion fails, or
            ONNX Runtime does not run the result.
        InvalidData: The model refuses the calibration data, or its activations are not finite.
        MissingExtra: ONNX Runtime is not installed.
    """
    if precision == "float32":
        return model
    scheme = SCHEMES[precision]
    _check(model, scheme)
    with _conversion(precision):
        copy, float_nodes = _prepare_copy(model, scheme, float_blocks)
        activations = Activations(copy, calibration)
        result = scheme.write(
            Conversion(copy, activations, float_nodes, to_nearest=to_nearest, rounding=rounding)
        )
        _finish(model, result, scheme, is_whole=not float_blocks)
    return result


def roundings_of(
    model: ir.Model,
    precision: Precision,
    calibration: Sequence[Batch],
    *,
    float_blocks: Collection[str] = (),
) -> dict[WeightKey, Rounding]:
    """The GPTQ rounding of int8 weights, for reuse after training the weights.

    Raises:
        InvalidArgument, CannotRewrite, InvalidData, MissingExtra: In the cases of ``convert``.
    """
    scheme = SCHEMES[precision]
    assert scheme.bits is not None
    _check(model, scheme)
    with _conversion(precision):
        copy, float_nodes = _prepare_copy(model, scheme, float_blocks)
        activations = Activations(copy, calibration)
        return roundings(
            copy, scheme.bits, activations.ranges, activations.moments, float_nodes=float_nodes
        )


def convert_alone(
    model: ir.Model,
    precision: Precision,
    calibration: Sequence[Batch],
    groups: Sequence[Collection[str]],
) -> Iterator[ir.Model]:
    """Yield, for each group of blocks, a copy of the model in which only these are converted.

    Activations are observed once for all groups.

    Args:
        precision: Name of a scheme in which single blocks may stay float32.

    Raises:
        InvalidArgument, CannotRewrite, InvalidData, MissingExtra: In the cases of ``convert``.
    """
    scheme = SCHEMES[precision]
    activations: Activations | None = None
    for names in groups:
        with _conversion(precision):
            copy, own_nodes = _prepare_copy(model, scheme, names)
            activations = activations or Activations(copy, calibration)
            float_nodes = [node for node in copy.graph.all_nodes() if node not in own_nodes]
            result = scheme.write(Conversion(copy, activations, float_nodes, tables=False))
            _finish(model, result, scheme, is_whole=False)
        yield result


@contextmanager
def _conversion(precision: Precision) -> Generator[None]:
    """Suppress the warnings of a conversion, and raise its exceptions as errors of this package."""
    try:
        with silenced():
            yield
    except AttnserveError as error:
        if isinstance(error, CannotRewrite | InvalidArgument | InvalidData | InvariantBroken):
            raise
        raise CannotRewrite(
            f"{precision}: the converted model does not run: {error.what}",
            FLOAT32,
            code="precision.does_not_run",
        ) from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}"[:300]
        raise CannotRewrite(
            f"{precision}: the conversion fails on this model: {what}",
            FLOAT32,
            code="precision.failed",
        ) from error


def _check(model: ir.Model, scheme: Scheme) -> None:
    """Check the CPU, the model and the installation before a conversion.

    Raises:
        InvalidArgument: The CPU does not compute the precision correctly, or the model has no
            float32 weights to convert.
        MissingExtra: ONNX Runtime is not installed.
    """
    check_cpu(scheme.name)
    _check_source(model, scheme)
    RUNTIMES["onnxruntime"].version()  # is installed


def _prepare_copy(
    model: ir.Model, scheme: Scheme, blocks: Collection[str]
) -> tuple[ir.Model, set[ir.Node]]:
    """Prepare a copy for the conversion; return it with its nodes of these blocks.

    In the copy, names are unique, and all constants are initializers. Outputs that no node
    computes, and repeated outputs, are removed; ``_finish`` restores them.

    Raises:
        InvalidArgument: The model has no such block.
        CannotRewrite: The opset is too old.
    """
    copy = model.clone()
    block_nodes = nodes_of_blocks(copy, blocks)
    map_external_data(copy)
    computed = [value for value in copy.graph.outputs if value.producer() is not None]
    not_computed = [value for value in copy.graph.outputs if value.producer() is None]
    copy.graph.outputs[:] = dict.fromkeys(computed)
    for value in not_computed:
        tensor = copy.graph.initializers.pop(value.name or "", None)
        if tensor is not None and value.uses():
            value.name = f"{value.name}/weights"  # the output has the same name
            copy.graph.register_initializer(value)
    common.NameFixPass()(copy)
    for index, node in enumerate(copy.graph.all_nodes()):  # conversions identify nodes by name
        node.name = f"{node.name or node.op_type}/{index}"
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(copy)
    opset = copy.opset_imports.get("", 1)
    if opset < scheme.oldest_opset:
        raise CannotRewrite(
            f"{scheme.name}: the model has opset {opset}, the conversion needs "
            f"{scheme.oldest_opset}",
            "export it again with a newer opset, or convert to float16",
            code="precision.opset",
        )
    return copy, block_nodes


def _finish(model: ir.Model, result: ir.Model, scheme: Scheme, *, is_whole: bool) -> None:
    """Restore overwritten outputs and metadata, and check that the result is converted and runs.

    Args:
        model: The model before the conversion.
        result: The converted model.
        is_whole: Whether all blocks were to be converted.

    Raises:
        CannotRewrite: The weights are not converted.
        InvalidModel: ONNX Runtime refuses the result.
    """
    precision = scheme.name
    common.NameFixPass()(result)  # names in subgraphs must differ from those of outer graphs
    _restore_outputs(model, result)
    _restore(model, result, precision)
    if scheme.in_bfloat16:
        compute_in_bfloat16(result)
    if is_whole and scheme.stored and not _is_converted(model, result, scheme.stored):
        raise CannotRewrite(
            f"{precision}: the weights are still {precision_of(result)}: the model has no "
            "weight matrix that can be converted"
            + (" (those of Gemm stay in float32)" if precision == "int4" else "")
            + ", or they are graph inputs",
            FLOAT32,
            code="precision.unchanged",
        )
    _load(result)


def _is_converted(model: ir.Model, result: ir.Model, data_type: str) -> bool:
    """Whether weights have the new type; in a model that was quantized partly, any weights."""
    if quantized_node(model) is not None:
        return _sizes(result)[data_type] > _sizes(model)[data_type]
    return data_type in precision_of(result)


def nodes_of_blocks(model: ir.Model, blocks: Collection[str]) -> set[ir.Node]:
    """The products of these attention and feed-forward blocks with their weights.

    Raises:
        InvalidArgument: The model has no such block.
    """
    if not blocks:
        return set()
    nodes_by_block = {block.name: block.nodes for block in find_attention(model).blocks}
    nodes_by_block |= {gap.name: gap.nodes for gap in skipped(model)}
    for block in find_feed_forward(model):
        nodes_by_block.setdefault(block.name, (*block.products, block.product))
    if missing := [name for name in blocks if name not in nodes_by_block]:
        raise InvalidArgument(
            f"`float_blocks` names {missing[0]}, which the model does not have",
            "`attnserve inspect` lists its blocks",
            code="precision.no_block",
        )
    return {node for name in blocks for node in nodes_by_block[name]}


def on_cpu(model: ir.Model) -> ir.Model:
    """Return an equivalent model that a CPU can run.

    For a bfloat16 model this is a slow copy that computes in float32 and rounds every result;
    other models are returned unchanged.
    """
    if not is_bfloat16(model):
        return model
    copy = model.clone()
    RoundInFloat32()(copy)
    return copy


def check_cpu(precision: Precision) -> None:
    """Check that this machine computes a precision correctly; ``AUTO`` is one that it computes.

    Raises:
        InvalidArgument: The machine does not, or the precision is unknown.
    """
    if precision != AUTO and (refusal := SCHEMES[precision].refusal()) is not None:
        raise refusal.error(precision, kind=InvalidArgument, area="precision")


def context_for(precision: Precision, context: RunContext) -> RunContext:
    """The context with the runtime that computes a precision; unchanged for ``AUTO``.

    Raises:
        InvalidArgument: The context names another runtime.
        MissingExtra: The runtime is not installed.
    """
    needed = "" if precision == AUTO else SCHEMES[precision].runtime
    if not needed:
        return context
    RUNTIMES[needed].version()  # raises before long work
    device = context.device
    if device.runtime != AUTO:
        RUNTIMES[device.runtime]  # raises if the name is unknown
    if device.runtime not in (AUTO, needed) or device.provider != "cpu":
        raise InvalidArgument(
            f"{precision}: {device.runtime} on {device.provider} does not compute it",
            f"set `runtime` to {needed} and `provider` to cpu",
            code="precision.runtime",
        )
    return replace(context, device=replace(device, runtime=needed))


def is_bfloat16(model: ir.Model) -> bool:
    """Whether any constant is bfloat16."""
    return any(tensor.dtype == ir.DataType.BFLOAT16 for tensor in all_tensors(model))


def precision_of(model: ir.Model) -> str:
    """The data type of a model's weights, for reports.

    Data types with at least a tenth of the elements are joined, most elements first:
    "int8+float32". Only tensors of rank 2 or more count; a model without any is "float32".
    """
    sizes = _sizes(model)
    total = sum(sizes.values())
    types = [name for name, size in sizes.most_common() if size >= total / 10]
    return "+".join(types) or "float32"


def _sizes(model: ir.Model) -> Counter[str]:
    """The number of weights by the name of their data type."""
    sizes: Counter[str] = Counter()
    packed = _packed(model)
    masks = _byte_masks(model)
    for tensor in all_tensors(model):
        dtype = tensor.dtype
        is_byte = dtype in (ir.DataType.INT8, ir.DataType.UINT8)
        if len(tensor.shape) <= 1 or (is_byte and tensor.name in masks):
            continue
        if bits := packed.get(tensor.name or ""):
            sizes[f"int{bits}"] += tensor.size * 8 // bits
        elif is_byte or dtype.is_floating_point() or dtype.bitwidth < 8:
            sizes[NAMES.get(dtype, dtype.name.lower())] += tensor.size
    return sizes


def _byte_masks(model: ir.Model) -> set[str]:
    """The names of constant bytes that are masks, not weights: causal masks of older exporters."""
    return {
        name
        for graph in model.graphs()
        for name, value in graph.initializers.items()
        if value.uses() and all(_reads_mask(node) for node, _ in value.uses())
    }


def _reads_mask(node: ir.Node) -> bool:
    """Whether a node reads bytes as a mask."""
    if node.op_type == "Cast":
        return node.attributes.get_int("to", 0) == ir.DataType.BOOL
    return node.op_type in ("Slice", "Where") and not node.domain


def _packed(model: ir.Model) -> dict[str, int]:
    """The number of bits of weights that are packed into bytes, by name."""
    return {
        node.inputs[1].name or "": node.attributes.get_int("bits", 4)
        for node in model.graph.all_nodes()
        if node.op_type == "MatMulNBits" and node.inputs[1] is not None
    }


def _load(model: ir.Model) -> None:
    """Load the model on the CPU.

    A bfloat16 graph is validated up to its missing kernels, and its CPU equivalent is loaded.

    Raises:
        InvalidModel: ONNX Runtime refuses the model.
    """
    try:
        open_session(model)
    except InvalidModel as error:
        if error.code != "session.bfloat16_cpu":
            raise
        open_session(on_cpu(model))


def _check_source(model: ir.Model, scheme: Scheme) -> None:
    """Check that a model has float32 weights to convert.

    Float products are converted; quantized products do not change.

    Raises:
        InvalidArgument: The model has no such weights, or its weights have another type.
    """
    data_type = precision_of(model)
    product = quantized_node(model)
    floats = [name for name in data_type.split("+") if "float" in name]
    why = ""
    if product is None and data_type != "float32":
        why = f"expected a float32 model, but its weights are {data_type}"
    elif product is not None and floats not in ([], ["float32"]):
        why = f"expected float32 weights beside the quantized ones, but they are {floats[0]}"
    elif product is not None and not scheme.has_weights(model):
        where = f"{product.op_type} {product.name or 'without a name'}"
        why = f"nothing is left to convert, because its products are quantized, as {where} is"
    if why:
        raise InvalidArgument(
            f"{scheme.name}: {why}", "pass the original float32 model", code="precision.already"
        )


def _restore_outputs(model: ir.Model, result: ir.Model) -> None:
    """Restore the outputs that are inputs, initializers, or other outputs once more."""
    values = {value.name: value for value in (*result.graph.inputs, *result.graph.outputs)}
    outputs: list[ir.Value] = []
    for value in model.graph.outputs:
        computed_value = values.get(value.name)
        if computed_value is None and value.const_value is not None:
            computed_value = ir.Value(
                name=value.name, shape=value.shape, type=value.type, const_value=value.const_value
            )
            result.graph.register_initializer(computed_value)
            values[value.name] = computed_value
        if computed_value is not None:
            outputs.append(computed_value)
    result.graph.outputs[:] = outputs
    map_external_data(result)


def _restore(model: ir.Model, result: ir.Model, precision: Precision) -> None:
    """Restore the shapes of inputs and outputs and the metadata, which conversions overwrite."""
    for values, new_values in (
        (model.graph.inputs, result.graph.inputs),
        (model.graph.outputs, result.graph.outputs),
    ):
        # Extracted subgraphs may have outputs without a declared type.
        signature = [(v.name, v.dtype or w.dtype) for v, w in zip(values, new_values, strict=False)]
        new_signature = [(v.name, v.dtype) for v in new_values]
        if signature != new_signature or len(values) != len(new_values):
            raise CannotRewrite(
                f"{precision}: the conversion changes inputs or outputs: {signature} to "
                f"{new_signature}",
                FLOAT32,
                code="precision.signature",
            )
        for value, new_value in zip(values, new_values, strict=True):
            new_value.shape = value.shape.copy() if value.shape is not None else None
    result.producer_name = model.producer_name
    result.producer_version = model.producer_version
    result.metadata_props.clear()
    result.metadata_props.update(model.metadata_props)
    result.graph.name = model.graph.name
