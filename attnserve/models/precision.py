"""Convert a float32 model to float16, bfloat16 or int8, after all rewrites.

float16: ``onnxruntime.transformers.float16``. Inputs and outputs stay float32. It is for GPUs. A
CPU runs it through casts and gains no speed (MiniLM-L6: mean cosine of tokens 1.0000, half the
file size, 0.95x the speed at 128 tokens).

bfloat16: ``passes.convert_bfloat16``; ONNX Runtime has no converter. bfloat16 has the range of
float32, so it cannot overflow, and 3 mantissa bits less than float16. Inputs, outputs and operators
without a CUDA kernel stay float32. ONNX Runtime has no bfloat16 matrix products for CPUs and
refuses such a model there; ``on_cpu`` returns an equivalent that a CPU can run.

int8: ``onnxruntime.quantization.quantize_dynamic``. Weights are signed bytes with one scale per
column and no zero point. Activations are quantized at run time with one scale per tensor.
Weights of matrix products are within -64..63 ("int8", 7 bits) or -127..127 ("int8-full", 8 bits).
ONNX Runtime adds pairs of products in 16-bit sums on x86 CPUs without VNNI. 7-bit weights cannot
saturate them: 2 x 255 x 64 = 32,640. "int8-full" needs a CPU with exact kernels (``cpu``) and gives
wrong results on others. Results for MiniLM-L6 (as exported, 90.7 MB) and 499 sentences: mean and
least cosine of the tokens' last hidden state to float32, and the speed-up of 1 x 128 tokens on one
thread (Xeon, VNNI); reduce_range was measured before weights of 64 were clamped to 63:

    MatMul weights                 tables   MB     mean     least    speed-up
    QInt8, one scale per tensor    Gather   23.1   0.9607   0.858    2.05x    (the tool's defaults)
    QInt8, one scale per column    Gather   23.2   0.9920   0.974    1.94x
    the same                       words    23.8   0.9922   0.978             (int8-full)
    the same                       none     59.0   0.9923   0.979    2.04x
    the same, reduce_range         Gather   23.2   0.9910   0.972    2.00x    (int8: words)
    QUInt8, one scale per column   Gather   23.2   0.9923   0.973    0.97x
    8-bit MatMulNBits, blocks 128  none     58.8   0.9990   0.997    1.13x    (fused attention)

A scale per column costs no measurable time. Unsigned weights lose the whole speed-up.
An embedding table (Gather) is quantized with one scale and 8 bits if it holds at least a twentieth
of the weights: word embeddings do, position embeddings do not.
Convolutions, stacked weights and products of activations stay float32.

Fused attention: com.microsoft Attention contains its projections. The tool converts it to
QAttention, but drops ``attention_bias`` without a warning, and treats ai.onnx Attention as the same
operator. Both stay float32 here. Speed-ups over the float32 export at 16, 128 and 512 tokens, with
the rest of the graph fused (SkipLayerNormalization, BiasGelu) and int8:

    QAttention, key mask                            2.89x  2.51x  2.86x
    MultiHeadAttention, products of int8 around it  2.86x  2.47x  2.76x
    plain operators, products of int8               2.84x  2.69x  2.65x
    Attention in float32, with attention_bias       1.96x  1.87x  2.28x

MultiHeadAttention takes any mask, so it is the operator to emit before int8 conversion.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common

from attnserve.choices import Precision
from attnserve.runtime.cpu import has_int8_dot_product
from attnserve.runtime.external_data import map_external_data
from attnserve.runtime.session import (
    PROTOBUF_LIMIT_BYTES,
    lacks_kernels,
    open_session,
    require_runtime,
    weight_bytes,
)
from graph_passes.analysis.constants import constant_array, constant_tensor, is_constant
from graph_passes.analysis.shapes import set_missing_types
from graph_passes.emit.editing import remove_unused
from graph_passes.errors import (
    AttnserveError,
    CannotRewrite,
    InvalidArgument,
    InvalidModel,
    InvariantBroken,
)
from graph_passes.passes.convert_bfloat16 import COMPUTES, ToBfloat16
from graph_passes.passes.round_bfloat16 import RoundInFloat32

__all__ = [
    "LARGEST",
    "Precision",
    "check_cpu",
    "convert",
    "int8_warning",
    "int8_weight_bits",
    "is_bfloat16",
    "on_cpu",
    "precision_of",
]


LARGEST = 30_000.0
"""Largest absolute value of float16 constants; larger finite values are clamped to it. Additive
masks of -3.4e38 still mask. The sum of two masks and a score stays below 65504, so that no logit
is -inf and no row of probabilities is NaN."""

TABLE = 1 / 20
"""Minimum share of the weight bytes for which the table of a Gather is quantized. Smaller tables
save little and may need to be exact (rotary angles, relative positions)."""

SHARE = 1 / 10
"""Minimum share of the weights for which ``precision_of`` reports a data type."""

OLDEST_OPSET = 11
"""The first opset with DynamicQuantizeLinear."""

QUANTIZED = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear",
                       "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul",
                       "ConvInteger", "QGemm", "QAttention", "QEmbedLayerNormalization",
                       "DynamicQuantizeLSTM", "MatMulNBits", "GatherBlockQuantized"})  # fmt: skip
"""Operators of quantized models, besides QLinear..."""

LARGEST_7_BIT = 64
"""The largest absolute weight with which 16-bit sums of two products never saturate."""

INT8_PRODUCTS = frozenset({"MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul",
                           "QAttention", "QGemm", "QLinearMatMul", "ConvInteger", "QLinearConv",
                           "DynamicQuantizeLSTM"})  # fmt: skip
"""Operators that multiply 8-bit activations by 8-bit weights."""

FACTORS = frozenset({"MatMul", "Gemm", "Conv"})
"""Operators that ONNX Runtime runs in 8 bits if their inputs are dequantized."""

NAMES = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.DOUBLE: "float64",
    ir.DataType.UINT8: "int8",
    ir.DataType.UINT4: "int4",
}
"""Names of data types in reports, if they differ from ONNX's."""

FLOAT32 = "keep the float32 model"


def convert(model: ir.Model, precision: Precision) -> ir.Model:
    """Convert a copy of the model to another precision, with the same inputs and outputs (lossy).

    "float32" returns ``model`` itself. Convert last: passes do not match quantized products. The
    result was loaded once by ONNX Runtime on the CPU.

    Raises:
        InvalidArgument: The precision is unknown, the model is not float32, or this CPU multiplies
            "int8-full" weights inexactly.
        CannotRewrite: The model has no weights to convert, its opset is too old, the conversion
            fails, or ONNX Runtime does not run the result.
        MissingExtra: ONNX Runtime is not installed.
    """
    if precision == "float32":
        return model
    if precision not in MAKE:
        raise InvalidArgument(
            f"precision {precision!r}: expected one of {', '.join(get_args(Precision))}",
            "for example int8",
            code="precision.unknown",
        )
    check_cpu(precision)
    _check_source(model, precision)
    require_runtime()
    copy = model.clone()
    map_external_data(copy)
    try:
        with _quiet():
            _give_names(copy)
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(copy)
            made = MAKE[precision](copy)
        common.NameFixPass()(made)  # names in subgraphs must differ from those of outer graphs
        _restore(model, made, precision)
        if not precision.startswith("int8") and precision not in precision_of(made):
            raise CannotRewrite(
                f"{precision}: the weights are still {precision_of(made)}: the model has no "
                "weight matrices, or they are graph inputs",
                FLOAT32,
                code="precision.unchanged",
            )
        _load(made)
    except AttnserveError as error:
        if isinstance(error, CannotRewrite | InvariantBroken):
            raise
        raise CannotRewrite(
            f"{precision}: the converted model does not run: {error.what}",
            FLOAT32,
            code="precision.does_not_run",
        ) from error
    except Exception as error:  # the tools raise exceptions of many types
        what = f"{type(error).__name__}: {error}"[:300]
        raise CannotRewrite(
            f"{precision}: the conversion fails on this model: {what}",
            FLOAT32,
            code="precision.failed",
        ) from error
    return made


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


def int8_weight_bits(model: ir.Model) -> Literal[7, 8] | None:
    """Bits of the signed 8-bit weights that are multiplied by 8-bit activations.

    7 if all are within -64..64 (other tools do not clamp 64 to 63), 8 if not, None without such
    weights. Unsigned weights are not counted: their kernels do not saturate.
    """
    bits: Literal[7, 8] | None = None
    for value in _int8_weights(model):
        weights = constant_array(value)
        if weights.size and max(-int(weights.min()), int(weights.max())) > LARGEST_7_BIT:
            return 8
        bits = 7
    return bits


def _int8_weights(model: ir.Model) -> Iterator[ir.Value]:
    """Signed 8-bit weights of products with 8-bit activations."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if not _multiplies_int8(node):
            continue
        for value in node.inputs:
            tensor = None if value is None else constant_tensor(value)
            if tensor is not None and tensor.dtype == ir.DataType.INT8 and len(tensor.shape) > 1:
                assert value is not None
                yield value


def _multiplies_int8(node: ir.Node) -> bool:
    """Whether a node multiplies constants by 8-bit activations, or dequantizes such constants."""
    if node.op_type != "DequantizeLinear":
        return node.op_type in INT8_PRODUCTS
    # ONNX Runtime converts a product to QLinearMatMul if all its factors are dequantized.
    users = [user for user, _ in node.outputs[0].uses() if user.op_type in FACTORS]
    return any(_is_dequantized(value) for user in users for value in user.inputs[:1])


def _is_dequantized(value: ir.Value | None) -> bool:
    producer = None if value is None else value.producer()
    return producer is not None and producer.op_type == "DequantizeLinear"


def int8_warning(model: ir.Model) -> str | None:
    """Return why int8 products of the model are inexact on this CPU; None if they are exact."""
    if has_int8_dot_product() or int8_weight_bits(model) != 8:
        return None
    return (
        "int8 weights outside -64..64 saturate on this CPU, which has no VNNI, AMX or ARM dot "
        "product: results are inaccurate; quantize the float32 model with 7-bit weights "
        "(attnserve precision int8, or reduce_range=True in onnxruntime.quantization)"
    )


def is_bfloat16(model: ir.Model) -> bool:
    """Whether any constant is bfloat16."""
    return any(tensor.dtype == ir.DataType.BFLOAT16 for tensor in _tensors(model))


def precision_of(model: ir.Model) -> Precision | str:
    """The data type of a model's weights, for reports.

    Data types with at least a tenth of the elements are joined, most elements first:
    "int8+float32". Only tensors of rank 2 or more count; a model without any is "float32".
    """
    sizes: Counter[str] = Counter()
    for tensor in _tensors(model):
        dtype = tensor.dtype
        byte = dtype in (ir.DataType.INT8, ir.DataType.UINT8)
        if len(tensor.shape) > 1 and (byte or dtype.is_floating_point() or dtype.bitwidth < 8):
            sizes[NAMES.get(dtype, dtype.name.lower())] += tensor.size
    total = sum(sizes.values())
    found = [name for name, size in sizes.most_common() if size >= SHARE * total]
    return "+".join(found) or "float32"


def _load(model: ir.Model) -> None:
    """Load the model on the CPU.

    A bfloat16 graph is validated up to its missing kernels, and its CPU equivalent is loaded.

    Raises:
        InvalidModel: ONNX Runtime refuses it.
    """
    try:
        open_session(model)
    except InvalidModel as error:
        if not (is_bfloat16(model) and lacks_kernels(error)):
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
    found = precision_of(model)
    fix = "pass the original float32 model"
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type in QUANTIZED or node.op_type.startswith("QLinear"):
            where = f"{node.op_type} {node.name or 'without a name'}"
            raise InvalidArgument(
                f"{precision}: the model is already int8: {where}", fix, code="precision.already"
            )
    if found != "float32":
        raise InvalidArgument(
            f"{precision}: expected a float32 model, but its weights are {found}",
            fix,
            code="precision.already",
        )


# ---- float16 -------------------------------------------------------------------------------------


def _halved(model: ir.Model) -> ir.Model:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    set_missing_types(model)  # the tool converts only values that are typed float32
    exact = sorted(_positions(model))
    proto = ir.to_proto(model)
    constants = {tensor.name for tensor in proto.graph.initializer}
    others = [value for value in proto.graph.value_info if value.name not in constants]
    del proto.graph.value_info[:]  # else the tool casts constants that stay float32
    proto.graph.value_info.extend(others)
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
    ToBfloat16(frozenset(_positions(model)))(model)
    return model


# ---- int8 ----------------------------------------------------------------------------------------


def _quantized(model: ir.Model, *, reduce_range: bool) -> ir.Model:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    _require_opset(model, "int8", OLDEST_OPSET)
    nodes = list(ir.traversal.RecursiveGraphIterator(model.graph))
    _gather_weights(model, nodes)
    least = TABLE * weight_bytes(model)
    left = [node.name for node in nodes if not _fits(node, least)]
    if not any(_fits(node, least) for node in nodes if node.op_type != "Gather"):
        raise CannotRewrite(
            "int8: the model has no MatMul, Gemm or com.microsoft Attention with constant float32 "
            "weights that can be quantized",
            FLOAT32,
            code="precision.no_weights",
        )
    large = weight_bytes(model) >= PROTOBUF_LIMIT_BYTES
    with tempfile.TemporaryDirectory(prefix="attnserve-", ignore_cleanup_errors=True) as folder:
        source, target = Path(folder) / "model.onnx", Path(folder) / "int8.onnx"
        ir.save(model, source, external_data="model.onnx.data")
        quantize_dynamic(
            source,
            target,
            op_types_to_quantize=["MatMul", "Gather", "Attention"],
            per_channel=True,
            reduce_range=reduce_range,  # of products; tables of Gather keep 8 bits
            weight_type=QuantType.QInt8,
            nodes_to_exclude=left,
            use_external_data_format=large,
            extra_options={
                "WeightSymmetric": True,
                "MatMulConstBOnly": True,
                "EnableSubgraph": any(graph is not model.graph for graph in model.graphs()),
                # For outputs of operators without shape inference; other types are excluded.
                "DefaultTensorType": onnx.TensorProto.FLOAT,
            },
        )
        made = ir.external_data.load_to_model(ir.load(target))
    if reduce_range:
        _clamp_to_7_bits(made)
    return made


def _clamp_to_7_bits(model: ir.Model) -> None:
    """Clamp int8 weights of products to at most 63.

    ``reduce_range`` gives -64..64, and 64 needs 8 bits. 7-bit integers are -64..63.
    """
    for value in _int8_weights(model):
        array = constant_array(value)
        if value.is_initializer() and array.max(initial=0) > 63:
            value.const_value = ir.tensor(np.minimum(array, np.int8(63)), name=value.name)


def _gather_weights(model: ir.Model, nodes: list[ir.Node]) -> None:
    """Replace constant expressions that are weights by initializers, as the tool requires.

    The tool transposes Gemm weights in place, even if other nodes read them. Such weights get a
    transposed copy here.
    """
    made: dict[tuple[ir.Value, bool], ir.Value] = {}
    for node in nodes:
        kind = (node.domain, node.op_type)
        places = {("", "MatMul"): (1,), ("", "Gemm"): (1,), ("com.microsoft", "Attention"): (1, 2)}
        turned = kind == ("", "Gemm") and bool(node.attributes.get_int("transB", 0))
        for place in places.get(kind, ()):
            value = node.inputs[place] if place < len(node.inputs) else None
            if not is_constant(value) or (value.is_initializer() and not turned):
                continue
            if (value, turned) not in made:
                made[value, turned] = _weight(value, turned=turned)
            node.replace_input_with(place, made[value, turned])
            if turned:
                node.attributes["transB"] = ir.AttrInt64("transB", 0)
        sizes = node.attributes.get_ints("qkv_hidden_sizes", ())
        if kind == ("com.microsoft", "Attention") and len(set(sizes)) == 1:
            node.attributes.pop("qkv_hidden_sizes")  # equal sizes are the default
    remove_unused(model)


def _weight(value: ir.Value, *, turned: bool) -> ir.Value:
    """Register a constant, transposed if ``turned``, as an initializer of its graph."""
    array = constant_array(value)
    array = np.ascontiguousarray(array.T if turned else array)
    name = f"{value.name}/{'transposed' if turned else 'constant'}"
    weight = ir.val(name, const_value=ir.tensor(array, name=name))
    owner = value.graph
    assert isinstance(owner, ir.Graph)
    owner.register_initializer(weight)
    return weight


def _fits(node: ir.Node, least: float) -> bool:
    """Whether the tool quantizes a node correctly.

    Args:
        least: Minimum size in bytes of a table to quantize.
    """
    place = 0 if node.op_type == "Gather" else 1
    value = node.inputs[place] if place < len(node.inputs) else None
    if value is None or not value.is_initializer() or value.const_value is None:
        return False
    weight = value.const_value
    if weight.dtype != ir.DataType.FLOAT or len(weight.shape) != 2:
        return False  # ONNX Runtime has no kernel for stacked matrices with a scale per column
    match node.domain, node.op_type:
        case "", "MatMul":
            return True
        case "", "Gemm":
            numbers = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
            return numbers == [1.0, 1.0] and not node.attributes.get_int("transA", 0)
        case "", "Gather":
            result = node.outputs[0]
            inside = all(user.graph is node.graph for user, _ in result.uses())
            products = any(user.op_type != "Gather" for user, _ in value.uses())
            return weight.nbytes >= least and inside and not products
        case "com.microsoft", "Attention":
            bias = node.inputs[2] if len(node.inputs) > 2 else None
            others = any(value is not None for value in node.inputs[4:])  # cache, attention_bias
            return bias is not None and not others and "qkv_hidden_sizes" not in node.attributes
        case _:
            return False


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
    for index, node in enumerate(ir.traversal.RecursiveGraphIterator(model.graph)):
        node.name = f"{node.name or node.op_type}/{index}"


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
    "int8": partial(_quantized, reduce_range=True),
    "int8-full": partial(_quantized, reduce_range=False),
}


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
