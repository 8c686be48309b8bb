"""The precision that a runtime computes float32 operators in, as the model itself states it.

OpenVINO computes a float32 graph in bfloat16 where the CPU has it, with float32 weights in the
file. A model that was compared with its original in that precision carries the fact in its ONNX
metadata, so that every session of it computes the same.
"""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["compute_in_bfloat16", "computes_in_bfloat16"]

KEY = "attnserve.inference_precision"


def compute_in_bfloat16(model: ir.Model) -> None:
    """State that float32 operators of the model are computed in bfloat16."""
    model.metadata_props[KEY] = "bfloat16"


def computes_in_bfloat16(model: ir.Model) -> bool:
    """Whether the model states that its float32 operators are computed in bfloat16."""
    return model.metadata_props.get(KEY) == "bfloat16"
