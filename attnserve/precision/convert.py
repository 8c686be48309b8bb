"""Convert a float32 model to float16, bfloat16 or int8, after all rewrites.

float16: ``onnxruntime.transformers.float16``. Inputs and outputs stay float32. It is for GPUs. A
CPU runs it through casts and gains no speed (MiniLM-L6: mean cosine of tokens 1.0000, half the
file size, 0.95x the speed at 128 tokens).

bfloat16: ``passes.convert_bfloat16``; ONNX Runtime has no converter. bfloat16 has the range of
float32, so it cannot overflow, and 3 mantissa bits less than float16. Inputs, outputs and operators
without a CUDA kernel stay float32. ONNX Runtime has no bfloat16 matrix products for CPUs and
refuses such a model there; ``on_cpu`` returns an equivalent that a CPU can run.

int8: ``int8``. Weights are signed bytes of 7 ("int8") or 8 bits ("int8-full"). Activations have
static scales from calibration data, or scales per row without it. The model stays a function of
the text: other rows of a batch have no effect.

int4: ``int4``. Signed 4-bit weights with one scale for 32 of them, for MatMul with constant
matrices. It reads about a seventh of the bytes. It is for decoders that run one token at a time,
whose speed depends on the bytes read; with many tokens int8 is faster.

With calibration data, int8 and int4 weights are rounded such that their errors cancel
(``rounding``).
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import get_args

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common

from attnserve.choices import INTEGER, Precision
from attnserve.models.quantized import FACTORS, Bits, quantized_node
from attnserve.precision.int4 import quantize_to_int4
from attnserve.precision.int8 import Rounding, large_tables, quantize, roundings
from attnserve.precision.products import Moments, Range, collect_ranges, product_of
from attnserve.runtime.external_data import map_external_data
from attnserve.runtime.interface import Batch
from attnserve.runtime.machine import has_int8_dot_product
from attnserve.runtime.session import RUNTIMES, open_session
from attnserve.runtime.workarounds import part_transposes
from graph_passes.analysis.constants import (
    constant_tensor,
    constant_type,
    is_constant,
    is_dequantized,
)
from graph_passes.analysis.quantization import is_quantized
from graph_passes.analysis.shapes import set_missing_types
from graph_passes.emit.editing import remove_unused
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
from graph_passes.passes.convert_bfloat16 import COMPUTES, ToBfloat16
from graph_passes.passes.round_bfloat16 import RoundInFloat32
from graph_passes.passes.skip_attention import skipped

__all__ = [
    "BITS",
    "LARGEST",
    "Precision",
    "check_cpu",
    "convert",
    "convert_alone",
    "is_bfloat16",
    "nodes_of_blocks",
    "on_cpu",
    "precision_of",
    "roundings_of",
]


LARGEST = 30_000.0
"""Largest absolute value of float16 constants; larger finite values are clamped to it. Additive
masks of -3.4e38 still mask. The sum of two masks and a score stays below 65504, so that no logit
is -inf and no row of probabilities is NaN."""

SHARE = 1 / 10
"""Minimum share of the weights for which ``precision_of`` reports a data type."""

SCALES = frozenset({"Cast", "Mul", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators between a sum of integer products and its scale."""

CONTAINERS = frozenset({"ConcatFromSequence", "Optional", "OptionalGetElement",
                        "OptionalHasElement", "SequenceAt", "SequenceConstruct", "SequenceEmpty",
                        "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap",
                        "SplitToSequence"})  # fmt: skip
"""Operators of sequences and optional values."""

OLDEST_OPSET = 11
"""The first opset that int8 models are written in."""

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
    rounding: Mapping[tuple[str, bool], Rounding] | None = None,
) -> ir.Model:
    """Convert a copy of the model to another precision, with the same inputs and outputs (lossy).

    "float32" returns ``model`` itself. Convert last: passes do not match quantized products. Those
    of the model stay as they are. The result was loaded once by ONNX Runtime on the CPU.

    Args:
        calibration: Inputs for the static scales of int8 activations and for the rounding of int8
            and int4 weights. Without them, int8 scales are computed for each row at run time,
            which is less accurate and slower.
        float_blocks: Attention and feed-forward blocks that stay float32; for int8 and int4.
        to_nearest: Round weights to the nearest all the same, which takes less time, for models
            that are only timed or tried.
        rounding: Round int8 weights as those that ``roundings_of`` was asked for.

    Raises:
        InvalidArgument: The precision is unknown, the model has no float32 weights that are left
            to convert, it has no such block, or this CPU multiplies "int8-full" weights inexactly.
        CannotRewrite: The model has no weights to convert, its opset is too old, the conversion
            fails, or ONNX Runtime does not run the result.
        InvalidData: The model refuses the calibration data, or its activations are not finite.
        MissingExtra: ONNX Runtime is not installed.
    """
    if precision == "float32":
        return model
    if precision not in (*MAKE, *INTEGER):
        raise InvalidArgument(
            f"precision {precision!r}: expected one of {', '.join(get_args(Precision))}",
            "for example int8",
            code="precision.unknown",
        )
    _check(model, precision)
    with _conversion(precision):
        copy = model.clone()
        kept = nodes_of_blocks(copy, float_blocks)
        _prepare(copy)
        ranges = collect_ranges(copy, calibration) if precision in BITS else {}
        if precision in MAKE:
            made = MAKE[precision](copy)
        else:
            moments = None if to_nearest or rounding else Moments(copy, calibration)
            made = _small(copy, precision, ranges, moments, kept, rounding=rounding)
        _finish(model, made, precision, is_whole=not float_blocks)
    return made


def roundings_of(
    model: ir.Model,
    precision: Precision,
    calibration: Sequence[Batch],
    *,
    float_blocks: Collection[str] = (),
) -> dict[tuple[str, bool], Rounding]:
    """How ``convert`` rounds int8 weights, for models with the same graph and trained weights.

    Raises:
        Those of ``convert``.
    """
    _check(model, precision)
    with _conversion(precision):
        copy = model.clone()
        kept = nodes_of_blocks(copy, float_blocks)
        _prepare(copy)
        _require_opset(copy, precision, OLDEST_OPSET)
        ranges = collect_ranges(copy, calibration)
        moments = Moments(copy, calibration)
        return roundings(copy, BITS[precision], ranges, moments, keep=kept)


def convert_alone(
    model: ir.Model,
    precision: Precision,
    calibration: Sequence[Batch],
    parts: Sequence[Collection[str]],
) -> Iterator[ir.Model]:
    """For each part, a copy of the model in which only its blocks are converted.

    Activations are observed once for all of them.

    Args:
        precision: One of ``INTEGER``.

    Raises:
        Those of ``convert``.
    """
    ranges: Mapping[str, Range] | None = None
    moments: Moments | None = None
    for names in parts:
        with _conversion(precision):
            copy = model.clone()
            chosen = nodes_of_blocks(copy, names)
            _prepare(copy)
            if ranges is None or moments is None:
                moments = Moments(copy, calibration)
                ranges = collect_ranges(copy, calibration) if precision in BITS else {}
            others = [node for node in _nodes(copy) if node not in chosen]
            made = _small(copy, precision, ranges, moments, others, tables=False)
            _finish(model, made, precision, is_whole=False)
        yield made


@contextmanager
def _conversion(precision: Precision) -> Generator[None]:
    """Suppress the tools' warnings, and turn their exceptions, of many types, into ours."""
    try:
        with _quiet():
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


def _check(model: ir.Model, precision: Precision) -> None:
    """Check the CPU, the model and the installation before a conversion."""
    check_cpu(precision)
    _check_source(model, precision)
    RUNTIMES["onnxruntime"].version()  # is installed


def _prepare(copy: ir.Model) -> None:
    """Write a copy as the tools need it: unique names, and all constants as initializers.

    Outputs that no node computes are removed, and so are repetitions; ``_finish`` restores them.
    """
    map_external_data(copy)
    computed = [value for value in copy.graph.outputs if value.producer() is not None]
    given = [value for value in copy.graph.outputs if value.producer() is None]
    copy.graph.outputs[:] = dict.fromkeys(computed)
    for value in given:
        tensor = copy.graph.initializers.pop(value.name or "", None)
        if tensor is not None and value.uses():
            value.name = f"{value.name}/weights"  # its name is that of the output
            copy.graph.register_initializer(value)
    _give_names(copy)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(copy)


def _finish(model: ir.Model, made: ir.Model, precision: Precision, *, is_whole: bool) -> None:
    """Restore what the tools overwrite, and check that the result is converted and runs.

    Args:
        is_whole: Whether all blocks were to be converted.
    """
    common.NameFixPass()(made)  # names in subgraphs must differ from those of outer graphs
    _restore_outputs(model, made)
    _restore(model, made, precision)
    if is_whole and precision not in BITS and not _is_converted(model, made, precision):
        raise CannotRewrite(
            f"{precision}: the weights are still {precision_of(made)}: the model has no "
            "weight matrix that can be converted"
            + (" (those of Gemm stay in float32)" if precision == "int4" else "")
            + ", or they are graph inputs",
            FLOAT32,
            code="precision.unchanged",
        )
    _load(made)


def _is_converted(before: ir.Model, made: ir.Model, precision: Precision) -> bool:
    """Whether weights have the new type; in a model that was quantized partly, any weights."""
    if quantized_node(before) is not None:
        return _sizes(made)[precision] > _sizes(before)[precision]
    return precision in precision_of(made)


def nodes_of_blocks(model: ir.Model, blocks: Collection[str]) -> set[ir.Node]:
    """The products of these attention and feed-forward blocks with their weights.

    Raises:
        InvalidArgument: The model has no such block.
    """
    if not blocks:
        return set()
    found = {block.name: block.nodes for block in find_attention(model)[0]}
    found |= {gap.name: gap.nodes for gap in skipped(model)}
    for block in find_feed_forward(model):
        found.setdefault(block.name, (*block.products, block.product))
    if missing := [name for name in blocks if name not in found]:
        raise InvalidArgument(
            f"`float_blocks` names {missing[0]}, which the model does not have",
            "`attnserve inspect` lists its blocks",
            code="precision.no_block",
        )
    return {node for name in blocks for node in found[name]}


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    return iter(ir.traversal.RecursiveGraphIterator(model.graph))


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
    """Check that this CPU computes a precision correctly.

    Raises:
        InvalidArgument: "int8-full" on a CPU whose int8 kernels may saturate.
    """
    if precision == "int8-full" and not has_int8_dot_product():
        raise InvalidArgument(
            "int8-full: this CPU has no VNNI, AMX or ARM dot product, so its int8 kernels saturate "
            "with 8-bit weights",
            "use int8, whose 7-bit weights are exact on every CPU",
            code="precision.cpu",
        )


def is_bfloat16(model: ir.Model) -> bool:
    """Whether any constant is bfloat16."""
    return any(tensor.dtype == ir.DataType.BFLOAT16 for tensor in _tensors(model))


def precision_of(model: ir.Model) -> Precision | str:
    """The data type of a model's weights, for reports.

    Data types with at least a tenth of the elements are joined, most elements first:
    "int8+float32". Only tensors of rank 2 or more count; a model without any is "float32".
    """
    sizes = _sizes(model)
    total = sum(sizes.values())
    found = [name for name, size in sizes.most_common() if size >= SHARE * total]
    return "+".join(found) or "float32"


def _sizes(model: ir.Model) -> Counter[str]:
    """The number of weights by the name of their data type."""
    sizes: Counter[str] = Counter()
    packed, masks = _packed(model), _byte_masks(model)
    for tensor in _tensors(model):
        dtype = tensor.dtype
        byte = dtype in (ir.DataType.INT8, ir.DataType.UINT8)
        if len(tensor.shape) <= 1 or (byte and tensor.name in masks):
            continue
        if bits := packed.get(tensor.name or ""):
            sizes[f"int{bits}"] += tensor.size * 8 // bits
        elif byte or dtype.is_floating_point() or dtype.bitwidth < 8:
            sizes[NAMES.get(dtype, dtype.name.lower())] += tensor.size
    return sizes


def _byte_masks(model: ir.Model) -> set[str]:
    """The names of constant bytes that are masks, not weights: causal ones of older exporters."""
    return {
        name
        for graph in model.graphs()
        for name, value in graph.initializers.items()
        if value.uses() and all(_reads_mask(node) for node, _ in value.uses())
    }


def _reads_mask(node: ir.Node) -> bool:
    if node.op_type == "Cast":
        return node.attributes.get_int("to", 0) == ir.DataType.BOOL
    return node.op_type in ("Slice", "Where") and not node.domain


def _packed(model: ir.Model) -> dict[str, int]:
    """The number of bits of weights that are packed into bytes, by name."""
    return {
        node.inputs[1].name or "": node.attributes.get_int("bits", 4)
        for node in _nodes(model)
        if node.op_type == "MatMulNBits" and node.inputs[1] is not None
    }


def _load(model: ir.Model) -> None:
    """Load the model on the CPU.

    A bfloat16 graph is validated up to its missing kernels, and its CPU equivalent is loaded.

    Raises:
        InvalidModel: ONNX Runtime refuses it.
    """
    try:
        open_session(model)
    except InvalidModel as error:
        if error.code != "session.bfloat16_cpu":
            raise
        open_session(on_cpu(model))


def _tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value
        for node in graph:
            tensor = constant_tensor(node.outputs[0]) if node.op_type == "Constant" else None
            if tensor is not None:
                yield tensor


def _check_source(model: ir.Model, precision: Precision) -> None:
    """Check that there are float32 weights to convert.

    Quantized products stay as they are, beside float ones that are converted.
    """
    fix, found = "pass the original float32 model", precision_of(model)
    quantized = quantized_node(model)
    if quantized is not None:
        floats = [name for name in found.split("+") if "float" in name]
        if floats in ([], ["float32"]) and _has_products(model, precision):
            return
        where = f"{quantized.op_type} {quantized.name or 'without a name'}"
        why = f"nothing is left to convert, because its products are quantized, as {where} is"
        if floats not in ([], ["float32"]):
            why = f"expected float32 weights beside the quantized ones, but they are {floats[0]}"
        raise InvalidArgument(f"{precision}: {why}", fix, code="precision.already")
    if found != "float32":
        raise InvalidArgument(
            f"{precision}: expected a float32 model, but its weights are {found}",
            fix,
            code="precision.already",
        )


def _has_products(model: ir.Model, precision: Precision) -> bool:
    """Whether any product with constant float32 weights can be converted."""
    products = [one for one in map(product_of, _nodes(model)) if one is not None]
    if precision == "int4":
        return any(one.node.op_type == "MatMul" for one in products)
    if precision in BITS:
        return bool(products or large_tables(model))
    return bool(products) or any(
        node.op_type == "Conv"
        and is_constant(node.inputs[1])
        and not is_dequantized(node.inputs[1])
        and constant_type(node.inputs[1]) == ir.DataType.FLOAT
        for node in _nodes(model)
    )


def _around_quantized(model: ir.Model) -> set[str]:
    """Names of the nodes that stay float32 because of quantized products.

    Those are the quantized nodes, the products of dequantized values, which ONNX Runtime runs in
    integers, and the nodes between an integer product and its scale: its sums exceed float16.
    """
    kept = {node for node in _nodes(model) if is_quantized(node)}
    pending = [output for node in kept for output in node.outputs if _is_unscaled(output)]
    kept |= {n for n in _nodes(model) if n.op_type in FACTORS and _multiplies_quantized(n)}
    while pending:
        for user, _ in pending.pop().uses():
            if user in kept or user.op_type not in SCALES:
                continue
            kept.add(user)
            sources = [value.producer() for value in user.inputs if value is not None]
            if user.op_type == "Mul" and any(one and one.op_type == "Cast" for one in sources):
                continue  # scaled
            pending += user.outputs
    return {node.name or "" for node in kept}


def _multiplies_quantized(node: ir.Node) -> bool:
    """Whether a product has dequantized weights, or two dequantized factors."""
    factors = node.inputs[:2]
    made = [None if value is None else value.producer() for value in factors]
    is_weight = [is_constant(value) and is_dequantized(value) for value in factors]
    return any(is_weight) or all(one and one.op_type == "DequantizeLinear" for one in made)


def _is_unscaled(value: ir.Value) -> bool:
    """Whether a value is a sum of integer products, or a scale that is computed at run time."""
    node = value.producer()
    if node is None:
        return False
    is_scale = node.op_type == "DynamicQuantizeLinear" and value is node.outputs[1]
    return is_scale or node.op_type in ("MatMulInteger", "ConvInteger")


# ---- float16 -------------------------------------------------------------------------------------


def _halved(model: ir.Model) -> ir.Model:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    set_missing_types(model)  # the tool converts only values that are typed float32
    containers = {node.name or "" for node in _nodes(model) if _is_container(node)}
    exact = sorted(_positions(model) | _around_quantized(model) | containers)
    proto = ir.to_proto(model)
    constants = {tensor.name for tensor in proto.graph.initializer}
    others = [value for value in proto.graph.value_info if value.name not in constants]
    del proto.graph.value_info[:]  # else the tool casts constants that stay float32
    proto.graph.value_info.extend(others)
    _refuse_sequences(model)
    proto = convert_float_to_float16(
        proto,
        keep_io_types=True,
        disable_shape_infer=True,
        max_finite_val=LARGEST,
        node_block_list=exact,
    )
    _drop_repeats(proto)
    made = ir.from_proto(proto)
    made.graph.sort()  # the tool appends casts at the end
    _join_casts(made)
    part_transposes(made)
    return made


def _positions(model: ir.Model) -> set[str]:
    """Names of nodes that compute angles or buckets from positions.

    They stay float32, because float16 represents integers exactly only up to 2048. They are the
    float ancestors of Sin, Cos and casts to integers. Roots that depend on weights are excluded.
    """
    names: set[str] = set()
    for root in ir.traversal.RecursiveGraphIterator(model.graph):
        to = ir.DataType(root.attributes.get_int("to", 1)) if root.op_type == "Cast" else None
        if root.op_type not in ("Sin", "Cos") and (to is None or not to.is_integer()):
            continue
        found, pending = {root}, [root]
        while pending:
            for value in pending.pop().inputs:
                node = value.producer() if value is not None else None
                if node is not None and node not in found and _is_float(node):
                    found.add(node)
                    pending.append(node)
        read = [value for node in found for value in node.inputs if value is not None]
        tensors = [value.const_value for value in read if value.is_initializer()]
        if not any(t is not None and sum(n > 1 for n in t.shape.numpy()) > 1 for t in tensors):
            names |= {node.name or "" for node in found}
    return names


def _refuse_sequences(model: ir.Model) -> None:
    for value in (*model.graph.inputs, *model.graph.outputs):
        if isinstance(value.type, ir.SequenceType) and value.dtype == ir.DataType.FLOAT:
            raise CannotRewrite(
                f"float16: {value.name!r} is a sequence of float32 tensors, whose type ONNX "
                "Runtime's tool does not keep",
                "export the model with tensors as inputs and outputs, or convert to bfloat16",
                code="precision.signature",
            )


def _is_container(node: ir.Node) -> bool:
    """Whether a node reads or writes a sequence or an optional value, whose type the tool keeps."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    kinds = (ir.SequenceType, ir.OptionalType)
    return node.op_type in CONTAINERS or any(isinstance(value.type, kinds) for value in values)


def _is_float(node: ir.Node) -> bool:
    return any(value.dtype == ir.DataType.FLOAT for value in node.outputs)


def _drop_repeats(proto: onnx.ModelProto) -> None:
    """Remove repeated casts: the tool adds one of the same name for each user of a value."""
    seen: set[str] = set()
    for node in list(proto.graph.node):
        if node.name.endswith("_cast_to_fp32_node"):
            if node.name in seen:
                proto.graph.node.remove(node)
            seen.add(node.name)


def _join_casts(model: ir.Model) -> None:
    """Remove the casts to float16 and back between two nodes that stay float32."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if not (node.name or "").endswith("_cast_to_fp32_node") or node.inputs[0] is None:
            continue
        before = node.inputs[0].producer()
        if before is not None and (before.name or "").endswith("_cast_to_fp16_node"):
            source = before.inputs[0]
            assert source is not None
            node.outputs[0].replace_all_uses_with(source)
    remove_unused(model)


# ---- bfloat16 ------------------------------------------------------------------------------------


def _in_bfloat16(model: ir.Model) -> ir.Model:
    _require_opset(model, "bfloat16", min(COMPUTES))
    set_missing_types(model)
    ToBfloat16(frozenset(_positions(model) | _around_quantized(model)))(model)
    return model


# ---- int8 and int4 -------------------------------------------------------------------------------


def _small(
    model: ir.Model,
    precision: Precision,
    ranges: Mapping[str, Range],
    moments: Moments | None,
    keep: Collection[ir.Node],
    *,
    tables: bool = True,
    rounding: Mapping[tuple[str, bool], Rounding] | None = None,
) -> ir.Model:
    """Convert all products but those of ``keep`` to int8 or int4."""
    if precision == "int4":
        quantize_to_int4(model, moments, keep=keep)
        return model
    _require_opset(model, precision, OLDEST_OPSET)
    quantize(
        model, BITS[precision], ranges, keep=keep, tables=tables, moments=moments, rounding=rounding
    )
    return model


# ---- all -----------------------------------------------------------------------------------------


def _require_opset(model: ir.Model, precision: Precision, oldest: int) -> None:
    opset = model.opset_imports.get("", 1)
    if opset < oldest:
        raise CannotRewrite(
            f"{precision}: the model has opset {opset}, the conversion needs {oldest}",
            "export it again with a newer opset, or convert to float16",
            code="precision.opset",
        )


def _give_names(model: ir.Model) -> None:
    """Give unique names to all values and nodes of all graphs; the tools identify them by name."""
    common.NameFixPass()(model)
    for index, node in enumerate(_nodes(model)):
        node.name = f"{node.name or node.op_type}/{index}"


def _restore_outputs(before: ir.Model, after: ir.Model) -> None:
    """Restore the outputs that are inputs, initializers, or other outputs once more."""
    computed = {value.name: value for value in (*after.graph.inputs, *after.graph.outputs)}
    outputs: list[ir.Value] = []
    for value in before.graph.outputs:
        found = computed.get(value.name)
        if found is None and value.const_value is not None:
            found = ir.Value(
                name=value.name, shape=value.shape, type=value.type, const_value=value.const_value
            )
            after.graph.register_initializer(found)
            computed[value.name] = found
        if found is not None:
            outputs.append(found)
    after.graph.outputs[:] = outputs
    map_external_data(after)


def _restore(before: ir.Model, after: ir.Model, precision: Precision) -> None:
    """Restore shapes of inputs and outputs and the metadata, which the tools overwrite."""
    for ours, theirs in (
        (before.graph.inputs, after.graph.inputs),
        (before.graph.outputs, after.graph.outputs),
    ):
        # Extracted parts may have outputs without a declared type.
        old = [(v.name, v.dtype or w.dtype) for v, w in zip(ours, theirs, strict=False)]
        new = [(v.name, v.dtype) for v in theirs]
        if old != new or len(ours) != len(theirs):
            raise CannotRewrite(
                f"{precision}: ONNX Runtime's tool changes inputs or outputs: {old} to {new}",
                FLOAT32,
                code="precision.signature",
            )
        for value, other in zip(ours, theirs, strict=True):
            other.shape = value.shape.copy() if value.shape is not None else None
    after.producer_name, after.producer_version = before.producer_name, before.producer_version
    after.metadata_props.clear()
    after.metadata_props.update(before.metadata_props)
    after.graph.name = before.graph.name


MAKE: Mapping[str, Callable[[ir.Model], ir.Model]] = {
    "float16": _halved,
    "bfloat16": _in_bfloat16,
}

BITS: Mapping[str, Bits] = {"int8": 7, "int8-full": 8}
"""Bits of the weights, by precision."""


@contextmanager
def _quiet() -> Generator[None]:
    """Suppress warnings of the tools, which log to the root logger and add a handler to it."""
    root, handler = logging.getLogger(), logging.NullHandler()
    disabled = logging.root.manager.disable
    root.addHandler(handler)
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        root.removeHandler(handler)
