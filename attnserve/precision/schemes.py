"""The table of precisions to which a model can be converted, one row for each.

int8: ``int8``. Weights have 7 ("int8") or 8 bits ("int8-full"). Activations have static scales from
calibration data, or scales per row without it. The model stays a function of the text: other rows
of a batch have no effect.

int4: ``int4``. Signed 4-bit weights with one scale for 32 weights, for MatMul with constant
matrices. A run reads about a seventh of the bytes of float32. int4 is for decoders that run one
token at a time, whose speed depends on the bytes read; with many tokens int8 is faster.

bfloat16: ``half`` converts the weights, for GPUs. On CPUs the weights stay float32 and the model
states that its products are computed in bfloat16 (``runtime.inference_precision``), alone
("bfloat16-cpu") or together with int8 ("int8-full-bfloat16"). OpenVINO computes both.

With calibration data, int8 and int4 weights are rounded such that their errors cancel
(``rounding``). Another package adds a row with ``SCHEMES.add`` (``graph_passes.registry``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import onnx_ir as ir

from attnserve.context import AUTO, Provider
from attnserve.literals import Precision
from attnserve.models.quantized import Bits
from attnserve.precision.half import to_bfloat16, to_float16
from attnserve.precision.int4 import quantize_to_int4
from attnserve.precision.int8 import quantize
from attnserve.precision.int8_grids import Rounding, large_tables
from attnserve.precision.products import InputMoments, Range, WeightKey, collect_ranges, product_of
from attnserve.runtime.interface import Batch
from attnserve.runtime.machine import has_bfloat16_product, has_int8_dot_product
from graph_passes.analysis.constants import constant_type, is_constant, is_dequantized
from graph_passes.errors import Refusal
from graph_passes.passes.convert_bfloat16 import COMPUTES
from graph_passes.registry import Registry

__all__ = ["SCHEMES", "Activations", "Conversion", "Scheme"]


class Activations:
    """Activations of products on calibration data, observed on first use.

    Args:
        model: The model, which must not change before the first use.
        batches: Calibration data.
    """

    def __init__(self, model: ir.Model, batches: Sequence[Batch]) -> None:
        self._model = model
        self._batches = batches

    @cached_property
    def ranges(self) -> Mapping[str, Range]:
        """Ranges of activations by name; empty without data."""
        return collect_ranges(self._model, self._batches)

    @cached_property
    def moments(self) -> InputMoments:
        """Second moments of activations by name."""
        return InputMoments(self._model, self._batches)


@dataclass(frozen=True, eq=False)
class Conversion:
    """Input of a conversion.

    Attributes:
        model: A copy of the model, which may be changed. All names are unique, and constants are
            initializers.
        calibration: Activations on calibration data.
        float_nodes: Nodes that stay float32.
        to_nearest: Round weights to the nearest.
        tables: Whether large embeddings are converted too.
        rounding: Precomputed rounding of int8 weights.
    """

    model: ir.Model
    calibration: Activations
    float_nodes: Collection[ir.Node] = ()
    to_nearest: bool = False
    tables: bool = True
    rounding: Mapping[WeightKey, Rounding] | None = None

    @property
    def moments(self) -> InputMoments | None:
        """Second moments for GPTQ rounding; None rounds to the nearest."""
        return None if self.to_nearest or self.rounding else self.calibration.moments


@dataclass(frozen=True)
class Scheme:
    """A precision.

    Attributes:
        name: The name in plans, records and options.
        write: Returns the converted model.
        can_convert: Tells whether a node has float32 weights that this scheme converts.
        stored: The type of the converted weights, as ``precision_of`` reports it. A conversion that
            leaves no weights of this type is refused; empty disables this check.
        provider: The kind of processor for which the precision is made.
        allows_float_blocks: Whether single blocks may stay in ``rest``, by measured time and loss.
            Operators that contain the projections are not used before the conversion.
        for_tokens: Whether the precision is for decoders that generate text: models with a cache
            are then timed at one token at a time.
        bits: Number of bits of int8 weights, which ``recovery`` trains too; None if the weights
            are not int8.
        runs_on_cpu: Whether ONNX Runtime has kernels for CPUs.
        in_bfloat16: Whether float32 weights of the result are computed in bfloat16.
        runtime: The only runtime that computes the precision; empty for every runtime.
        oldest_opset: Minimum opset of the model.
        refusal: Returns why this machine does not compute the precision correctly; None if it does.
    """

    name: str
    write: Callable[[Conversion], ir.Model]
    can_convert: Callable[[ir.Node], bool]
    stored: str = ""
    provider: Provider = "cpu"
    allows_float_blocks: bool = False
    for_tokens: bool = False
    bits: Bits | None = None
    runs_on_cpu: bool = True
    in_bfloat16: bool = False
    runtime: str = ""
    oldest_opset: int = 1
    refusal: Callable[[], Refusal | None] = lambda: None

    @property
    def rest(self) -> Precision:
        """The precision of float32 weights that are not converted."""
        return "bfloat16-cpu" if self.in_bfloat16 else "float32"

    def has_weights(self, model: ir.Model) -> bool:
        """Whether the model has float32 weights that can be converted."""
        if self.bits and large_tables(model):
            return True
        return any(map(self.can_convert, model.graph.all_nodes()))


def _is_product(node: ir.Node) -> bool:
    """Whether a node multiplies by a float32 matrix."""
    return product_of(node) is not None


def _is_matmul(node: ir.Node) -> bool:
    return node.op_type == "MatMul" and _is_product(node)


def _is_product_or_convolution(node: ir.Node) -> bool:
    """Whether a node has float32 weights of a product or a convolution."""
    if node.op_type != "Conv":
        return _is_product(node)
    weight = node.inputs[1]
    if not is_constant(weight) or is_dequantized(weight):
        return False
    return constant_type(weight) == ir.DataType.FLOAT


def _unchanged(given: Conversion) -> ir.Model:
    return given.model


def _to_int8(bits: Bits, given: Conversion) -> ir.Model:
    quantize(
        given.model,
        bits,
        given.calibration.ranges,
        float_nodes=given.float_nodes,
        tables=given.tables,
        unsigned=bits == 8 and not has_int8_dot_product(),
        moments=given.moments,
        rounding=given.rounding,
    )
    return given.model


def _bfloat16_refusal() -> Refusal | None:
    """Return why this CPU does not multiply in bfloat16; None if it does."""
    if has_bfloat16_product():
        return None
    return Refusal(
        "cpu",
        "this CPU has no instructions for products in bfloat16 (avx512_bf16, AMX)",
        "use float32 or int8",
    )


def _to_int4(given: Conversion) -> ir.Model:
    quantize_to_int4(given.model, given.moments, float_nodes=given.float_nodes)
    return given.model


INT8 = Scheme(
    "int8", partial(_to_int8, 7), _is_product, allows_float_blocks=True, bits=7, oldest_opset=11
)

INT8_FULL = replace(INT8, name="int8-full", write=partial(_to_int8, 8), bits=8)

SCHEMES = Registry[Scheme](
    "precision",
    Scheme("float32", _unchanged, lambda node: False),
    Scheme(
        "float16",
        lambda given: to_float16(given.model),
        _is_product_or_convolution,
        stored="float16",
        provider="cuda",
    ),
    Scheme(
        "bfloat16",
        lambda given: to_bfloat16(given.model),
        _is_product_or_convolution,
        stored="bfloat16",
        provider="cuda",
        runs_on_cpu=False,
        oldest_opset=min(COMPUTES),
    ),
    Scheme(
        "bfloat16-cpu",
        _unchanged,
        _is_product_or_convolution,
        in_bfloat16=True,
        runtime="openvino",
        refusal=_bfloat16_refusal,
    ),
    INT8,
    INT8_FULL,
    replace(
        INT8_FULL,
        name="int8-full-bfloat16",
        in_bfloat16=True,
        runtime="openvino",
        refusal=_bfloat16_refusal,
    ),
    Scheme("int4", _to_int4, _is_matmul, stored="int4", allows_float_blocks=True, for_tokens=True),
    other_values=(AUTO,),
)
"""The precisions."""
