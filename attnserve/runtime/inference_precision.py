"""The precision that a runtime computes float32 operators in, as the model itself states it.

OpenVINO computes a float32 graph in bfloat16 where the CPU has it, with float32 weights in the
file. A model that was compared with its original in that precision carries the fact in its ONNX
metadata, so that every session of it computes the same.
"""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["compute_in_bfloat16", "computes_in_bfloat16", "precision_in"]

KEY = "attnserve.inference_precision"


def compute_in_bfloat16(model: ir.Model) -> None:
    """State that float32 operators of the model are computed in bfloat16."""
    model.metadata_props[KEY] = "bfloat16"


def computes_in_bfloat16(model: ir.Model) -> bool:
    """Whether the model states that its float32 operators are computed in bfloat16."""
    return model.metadata_props.get(KEY) == "bfloat16"


def precision_in(weights: str, *, in_bfloat16: bool) -> str:
    """The data types that a model computes with: "int8+float32" in bfloat16 is "int8+bfloat16".

    Args:
        weights: The data types of the weights, joined by +.
        in_bfloat16: Whether float32 weights are computed in bfloat16.
    """
    if not in_bfloat16:
        return weights
    return "+".join("bfloat16" if name == "float32" else name for name in weights.split("+"))
