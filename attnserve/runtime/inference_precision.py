"""The precision in which a runtime computes float32 operators, as stated in the model.

OpenVINO computes a float32 graph in bfloat16 where the CPU has it, with float32 weights in the
file. The ONNX metadata of a model states whether it was compared with its original in that
precision, so that every session of the model computes in the same precision.
"""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["compute_in_bfloat16", "computes_in_bfloat16", "precision_in"]

KEY = "attnserve.inference_precision"


def compute_in_bfloat16(model: ir.Model) -> None:
    """State in the metadata that float32 operators of the model are computed in bfloat16."""
    model.metadata_props[KEY] = "bfloat16"


def computes_in_bfloat16(model: ir.Model) -> bool:
    """Whether the model states that its float32 operators are computed in bfloat16."""
    return model.metadata_props.get(KEY) == "bfloat16"


def precision_in(weights: str, *, in_bfloat16: bool) -> str:
    """The data types of a computation: "int8+float32" weights give "int8+bfloat16" in bfloat16.

    Args:
        weights: The data types of the weights, joined by +.
        in_bfloat16: Whether float32 weights are computed in bfloat16.
    """
    if not in_bfloat16:
        return weights
    return "+".join("bfloat16" if name == "float32" else name for name in weights.split("+"))
