"""precision: the same model in 16 or 8 bits, after all rewrites.

float16: ``onnxruntime.transformers.float16``. Inputs and outputs stay float32. It is for GPUs: a
CPU runs it too, through casts, and no faster (MiniLM-L6: mean cosine of a token 1.0000, half the
file, 0.95x the speed at 128 tokens).

bfloat16: ``passes.convert_bfloat16``, for ONNX Runtime's tool does not make it. It has the range of
float32, so that nothing overflows, and 3 bits less of a mantissa than float16. Inputs and outputs
stay float32, and so does what CUDA has no kernel for. ONNX Runtime has no products in bfloat16 for
CPUs and refuses such a model there: ``on_cpu`` is what a CPU can run in its place.

int8: ``onnxruntime.quantization.quantize_dynamic``. Weights become signed bytes with one scale a
column and no zero point; activations are rounded as they come, with one scale a tensor. The weights
of products are within -64..64 ("int8", 7 bits): ONNX Runtime adds pairs of products in 16-bit sums
that saturate on x86 CPUs without VNNI, and 2 x 255 x 64 = 32,640 fits into them. "int8-full" uses
-127..127. It can only be made on a CPU with exact kernels (``cpu``), and gives wrong results on
others. Measured on MiniLM-L6 (as exported, 90.7 MB) with 499 sentences, mean and least cosine of a
token's last hidden state to float32, and the speed-up of a run of 1 x 128 tokens on one thread
(Xeon, VNNI):

    weights, of MatMul             tables   MB     mean     least    speed-up
    QInt8, one scale a tensor      Gather   23.1   0.9607   0.858    2.05x    (the tool's defaults)
    QInt8, a scale a column        Gather   23.2   0.9920   0.974    1.94x
    the same                       words    23.8   0.9922   0.978             (int8-full)
    the same                       none     59.0   0.9923   0.979    2.04x
    the same, reduce_range         Gather   23.2   0.9910   0.972    2.00x    (int8: words)
    QUInt8, a scale a column       Gather   23.2   0.9923   0.973    0.97x
    8-bit MatMulNBits, blocks 128  none     58.8   0.9990   0.997    1.13x    (fused attention)

A scale a column costs no time that can be measured; unsigned weights cost all that is gained.
A table that tokens pick rows from (Gather) gets one scale and all 8 bits, where it holds a
twentieth of the weights: words do, positions do not.
Convolutions, stacked weights and products of activations stay float32.

Fused attention. com.microsoft Attention holds its projections. The tool makes QAttention of it, but
leaves ``attention_bias`` out in silence, and takes ai.onnx Attention for the same operator: such
operators stay as they are here, in float32. Speed-ups over the float32 export at 16, 128 and 512
tokens, the rest of the graph fused (SkipLayerNormalization, BiasGelu) and int8:

    QAttention, key mask                            2.89x  2.51x  2.86x
    MultiHeadAttention, products of int8 around it  2.86x  2.47x  2.76x
    plain operators, products of int8               2.84x  2.69x  2.65x
    Attention in float32, with attention_bias       1.96x  1.87x  2.28x

So MultiHeadAttention, which takes any mask, is what to write where int8 follows.
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
"""Finite float32 beyond it becomes this. A mask of -3.4e38 still hides what it hides, and two masks
and a score add up to less than 65504: nothing becomes -inf, and no row of them NaN."""

TABLE = 1 / 20
"""The share of a model's weight bytes from which a table behind a Gather is quantized. Less saves
nothing, and may be what must be exact: rotary angles, relative positions."""

SHARE = 1 / 10
"""The share of a model's weights from which a data type is named."""

OLDEST_OPSET = 11
"""The first with DynamicQuantizeLinear."""

QUANTIZED = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear",
                       "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul",
                       "ConvInteger", "QGemm", "QAttention", "QEmbedLayerNormalization",
                       "DynamicQuantizeLSTM", "MatMulNBits", "GatherBlockQuantized"})  # fmt: skip
"""Operators of models that are quantized already, and every QLinear..."""

LARGEST_7_BIT = 64
"""The largest absolute weight with which 16-bit sums of two products never saturate."""

INT8_PRODUCTS = frozenset({"MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul",
                           "QAttention", "QGemm", "QLinearMatMul", "ConvInteger", "QLinearConv",
                           "DynamicQuantizeLSTM"})  # fmt: skip
"""Operators that multiply 8-bit activations by 8-bit weights."""

FACTORS = frozenset({"MatMul", "Gemm", "Conv"})
"""Operators that ONNX Runtime runs in 8 bits where their inputs are dequantized."""

NAMES = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.DOUBLE: "float64",
    ir.DataType.UINT8: "int8",
    ir.DataType.UINT4: "int4",
}
"""What data types are called in reports, where not by their own name."""

FLOAT32 = "keep the float32 model"


def convert(model: ir.Model, precision: Precision) -> ir.Model:
    """The model in another precision, with the inputs and outputs it has; lossy.

    ``model`` is not changed; float32 returns it as it is. Call this last: quantized products are
    not found or rewritten any more. ONNX Runtime has loaded what comes out on the CPU once.

    Raises:
        InvalidArgument: No such precision, or the model is in it, or in a smaller one, already, or
            this CPU multiplies "int8-full" weights wrongly.
        CannotRewrite: It holds nothing to convert, its opset is too old, or what converts it fails
            on it or makes a model that ONNX Runtime does not run.
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
        common.NameFixPass()(made)  # bodies must not repeat the names of what is around them
        _restore(model, made, precision)
        if not precision.startswith("int8") and precision not in precision_of(made):
            raise CannotRewrite(
                f"{precision}: the weights are still {precision_of(made)}: the model holds no "
                "matrices, or its inputs may replace them",
                FLOAT32,
                code="precision.unchanged",
            )
        _load(made)
    except AttnserveError as error:
        if isinstance(error, CannotRewrite | InvariantBroken):
            raise
        raise CannotRewrite(
            f"{precision}: the model that was made does not run: {error.what}",
            FLOAT32,
            code="precision.does_not_run",
        ) from error
    except Exception as error:  # the tools raise whatever they stumble over
        what = f"{type(error).__name__}: {error}"[:300]
        raise CannotRewrite(
            f"{precision}: the conversion fails on this model: {what}",
            FLOAT32,
            code="precision.failed",
        ) from error
    return made


def on_cpu(model: ir.Model) -> ir.Model:
    """What a CPU can run of a model: itself, or, where it computes in bfloat16, a copy that
    computes in float32 and rounds every result, slowly."""
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

    7 if all are within -64..64, 8 if not, None if there are none. Unsigned weights are not counted:
    their kernels do not saturate.
    """
    found: Literal[7, 8] | None = None
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if not _multiplies_int8(node):
            continue
        for value in node.inputs:
            tensor = None if value is None else constant_tensor(value)
            if tensor is None or tensor.dtype != ir.DataType.INT8 or len(tensor.shape) < 2:
                continue
            weights = tensor.numpy()
            if weights.size and max(-int(weights.min()), int(weights.max())) > LARGEST_7_BIT:
                return 8
            found = 7
    return found


def _multiplies_int8(node: ir.Node) -> bool:
    """Whether a node multiplies constants by 8-bit activations, or dequantizes such constants."""
    if node.op_type != "DequantizeLinear":
        return node.op_type in INT8_PRODUCTS
    # ONNX Runtime makes QLinearMatMul of a product of which all factors are dequantized.
    users = [user for user, _ in node.outputs[0].uses() if user.op_type in FACTORS]
    return any(_is_dequantized(value) for user in users for value in user.inputs[:1])


def _is_dequantized(value: ir.Value | None) -> bool:
    producer = None if value is None else value.producer()
    return producer is not None and producer.op_type == "DequantizeLinear"


def int8_warning(model: ir.Model) -> str | None:
    """Why the int8 products of a model are wrong on this CPU; None where they are exact."""
    if has_int8_dot_product() or int8_weight_bits(model) != 8:
        return None
    return (
        "int8 weights outside -64..64 saturate on this CPU, which has no VNNI, AMX or ARM dot "
        "product: results are inaccurate; quantize the float32 model with 7-bit weights "
        "(attnserve precision int8, or reduce_range=True in onnxruntime.quantization)"
    )


def is_bfloat16(model: ir.Model) -> bool:
    """Whether any constant is held in bfloat16."""
    return any(tensor.dtype == ir.DataType.BFLOAT16 for tensor in _tensors(model))


def precision_of(model: ir.Model) -> Precision | str:
    """The data type of a model's weights, for reports.

    Several that hold a tenth of the elements each are joined, the most first: "int8+float32". Only
    matrices and larger tensors count; a model without any is "float32".
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
    """Load it, on the CPU: of bfloat16 the graph itself, up to its kernels, and what stands for it.

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
    fix = "give the float32 model it was made from"
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type in QUANTIZED or node.op_type.startswith("QLinear"):
            where = f"{node.op_type} {node.name or 'without a name'}"
            raise InvalidArgument(
                f"{precision}: the model is already int8: {where}", fix, code="precision.already"
            )
    if found == precision:
        raise InvalidArgument(
            f"{precision}: the model's weights are {found} already", fix, code="precision.already"
        )
    if found != "float32":
        raise InvalidArgument(
            f"{precision}: expected a float32 model, the weights of this one are {found}",
            fix,
            code="precision.already",
        )


# ---- float16 -------------------------------------------------------------------------------------


def _halved(model: ir.Model) -> ir.Model:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    set_missing_types(model)  # the tool converts only what it knows to be float32
    exact = sorted(_positions(model))
    proto = ir.to_proto(model)
    constants = {tensor.name for tensor in proto.graph.initializer}
    others = [value for value in proto.graph.value_info if value.name not in constants]
    del proto.graph.value_info[:]  # or it takes constants that stay float32 for converted ones
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
    made.graph.sort()  # casts were put at the end
    _join_casts(made)
    return made


def _positions(model: ir.Model) -> set[str]:
    """Nodes that compute angles or buckets from positions: float16 counts to 2048 and no further.

    They are what Sin, Cos and casts to integers are made of, back to where numbers were integers.
    Roots that weights lead to are left alone.
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
    """A value that two nodes need in float32 is cast twice, under one name: once is enough."""
    seen: set[str] = set()
    for node in list(proto.graph.node):
        if node.name.endswith("_cast_to_fp32_node"):
            if node.name in seen:
                proto.graph.node.remove(node)
            seen.add(node.name)


def _join_casts(model: ir.Model) -> None:
    """Between two nodes that stay float32 the tool goes through float16: it need not."""
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
    opset = model.opset_imports.get("", 1)
    if opset < min(COMPUTES):
        raise CannotRewrite(
            f"bfloat16: the model has opset {opset}, bfloat16 needs {min(COMPUTES)}",
            "export it again with a newer opset, or make it float16",
            code="precision.opset",
        )
    set_missing_types(model)
    ToBfloat16(frozenset(_positions(model)))(model)
    return model


# ---- int8 ----------------------------------------------------------------------------------------


def _quantized(model: ir.Model, *, reduce_range: bool) -> ir.Model:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    opset = model.opset_imports.get("", 1)
    if opset < OLDEST_OPSET:
        raise CannotRewrite(
            f"int8: the model has opset {opset}, dynamic quantization needs {OLDEST_OPSET}",
            "export it again with a newer opset",
            code="precision.opset",
        )
    nodes = list(ir.traversal.RecursiveGraphIterator(model.graph))
    _gather_weights(model, nodes)
    least = TABLE * weight_bytes(model)
    left = [node.name for node in nodes if not _fits(node, least)]
    if not any(_fits(node, least) for node in nodes if node.op_type != "Gather"):
        raise CannotRewrite(
            "int8: the model has no MatMul, Gemm or com.microsoft Attention by constant float32 "
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
            reduce_range=reduce_range,  # of products; tables behind a Gather keep 8 bits
            weight_type=QuantType.QInt8,
            nodes_to_exclude=left,
            use_external_data_format=large,
            extra_options={
                "WeightSymmetric": True,
                "MatMulConstBOnly": True,
                "EnableSubgraph": any(graph is not model.graph for graph in model.graphs()),
                # Of what follows an operator that ONNX does not know: all else was refused above.
                "DefaultTensorType": onnx.TensorProto.FLOAT,
            },
        )
        return ir.external_data.load_to_model(ir.load(target))


def _gather_weights(model: ir.Model, nodes: list[ir.Node]) -> None:
    """Weights that are made of weights become weights, as the tool wants them.

    It transposes weights of Gemm in place, whoever else reads them: here they get their own.
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
            node.attributes.pop("qkv_hidden_sizes")  # that is what the operator takes without
    remove_unused(model)


def _weight(value: ir.Value, *, turned: bool) -> ir.Value:
    """A constant as an initializer where it is made, transposed or as it is."""
    array = constant_array(value)
    array = np.ascontiguousarray(array.T if turned else array)
    name = f"{value.name}/{'transposed' if turned else 'constant'}"
    weight = ir.val(name, const_value=ir.tensor(array, name=name))
    owner = value.graph
    assert isinstance(owner, ir.Graph)
    owner.register_initializer(weight)
    return weight


def _fits(node: ir.Node, least: float) -> bool:
    """Whether the tool may touch a node: what it makes then means the same.

    Args:
        least: The bytes from which a table is quantized.
    """
    place = 0 if node.op_type == "Gather" else 1
    value = node.inputs[place] if place < len(node.inputs) else None
    if value is None or not value.is_initializer() or value.const_value is None:
        return False
    weight = value.const_value
    if weight.dtype != ir.DataType.FLOAT or len(weight.shape) != 2:
        return False  # a scale a column is for matrices: ONNX Runtime multiplies no stacks of them
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
            others = any(value is not None for value in node.inputs[4:])  # caches, a score's bias
            return bias is not None and not others and "qkv_hidden_sizes" not in node.attributes
        case _:
            return False


# ---- both ----------------------------------------------------------------------------------------


def _give_names(model: ir.Model) -> None:
    """Names for everything, of nodes too: by them the tools tell what is theirs, in all bodies."""
    common.NameFixPass()(model)
    for index, node in enumerate(ir.traversal.RecursiveGraphIterator(model.graph)):
        node.name = f"{node.name or node.op_type}/{index}"


def _restore(before: ir.Model, after: ir.Model, precision: Precision) -> None:
    """What the tools write over is as it was: axes, and what the model says of itself."""
    for ours, theirs in (
        (before.graph.inputs, after.graph.inputs),
        (before.graph.outputs, after.graph.outputs),
    ):
        # A type that is not stated, as of what is cut out of a model, is no promise.
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
    """Without the tools' advice: they write to the root logger, and give it a handler to do so."""
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
