"""Operators on images: convolution, pooling, resizing and normalization of channels."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from attnserve.recovery.operators.registry import Call, integers, operator

__all__: list[str] = []

RESIZE_MODES: dict[tuple[str, ...], dict[str, Any]] = {
    ("nearest", "asymmetric", "floor"): {"mode": "nearest"},
    ("linear", "half_pixel"): {"mode": "bilinear", "align_corners": False},
    ("linear", "pytorch_half_pixel"): {"mode": "bilinear", "align_corners": False},
    ("linear", "align_corners"): {"mode": "bilinear", "align_corners": True},
    ("cubic", "half_pixel"): {"mode": "bicubic", "align_corners": False},
    ("cubic", "pytorch_half_pixel"): {"mode": "bicubic", "align_corners": False},
    ("cubic", "align_corners"): {"mode": "bicubic", "align_corners": True},
}
"""The forms of Resize that ``interpolate`` of PyTorch has, for images (B, C, height, width)."""


@operator("Resize", on_host=(1, 2, 3))
def _resize(
    call: Call,
    x: Tensor,
    roi: Tensor | None = None,
    scales: Tensor | None = None,
    sizes: Tensor | None = None,
) -> Tensor:
    form = (call.text("mode", "nearest"), call.text("coordinate_transformation_mode", "half_pixel"))
    if form[0] == "nearest":
        form = (*form, call.text("nearest_mode", "round_prefer_floor"))
    is_usual = not (
        call.integer("antialias", 0)
        or call.integer("exclude_outside", 0)
        or call.text("keep_aspect_ratio_policy", "stretch") != "stretch"
        or call.integers("axes") is not None
        or (form[0] == "cubic" and call.number("cubic_coeff_a", -0.75) != -0.75)
    )
    options = RESIZE_MODES.get(form) if is_usual and call.version > 10 and x.ndim == 4 else None
    if options is None:
        raise call.unsupported(f"its mode is {', '.join(form)}")
    if sizes is not None and sizes.numel():
        return F.interpolate(x, size=integers(sizes[2:]), **options)
    assert scales is not None
    return F.interpolate(x, scale_factor=scales[2:].tolist(), **options)


@operator("BatchNormalization")
def _batch_normalization(
    call: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    if call.integer("training_mode", 0):
        raise call.unsupported("it is in training mode")
    return F.batch_norm(x, mean, variance, scale, bias, eps=call.number("epsilon", 1e-5))


@operator("GlobalAveragePool")
def _global_average_pool(call: Call, x: Tensor) -> Tensor:
    return x.mean(tuple(range(2, x.ndim)), keepdim=True)


@operator("InstanceNormalization")
def _instance_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=scale, bias=bias, eps=call.number("epsilon", 1e-5))


def _padded(call: Call, x: Tensor, value: float = 0.0) -> Tensor:
    """The image with the padding of a convolution or pooling."""
    if call.text("auto_pad", "NOTSET") != "NOTSET":
        raise call.unsupported("it has automatic padding")
    axes = x.ndim - 2
    pads = call.integers("pads") or [0] * (2 * axes)
    # PyTorch pads from the last axis to the first, both sides of each.
    flat = [size for axis in reversed(range(axes)) for size in (pads[axis], pads[axis + axes])]
    return F.pad(x, flat, value=value) if any(flat) else x


@operator("Conv")
def _conv(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    axes = x.ndim - 2
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[axes]
    return convolve(
        _padded(call, x),
        weight,
        bias,
        stride=call.integers("strides") or [1] * axes,
        dilation=call.integers("dilations") or [1] * axes,
        groups=call.integer("group", 1),
    )


@operator("ConvTranspose")
def _conv_transpose(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    axes = x.ndim - 2
    pads = call.integers("pads") or [0] * (2 * axes)
    if call.text("auto_pad", "NOTSET") != "NOTSET" or call.integers("output_shape") is not None:
        raise call.unsupported("it has automatic padding")
    if pads[:axes] != pads[axes:]:
        raise call.unsupported("its padding is not symmetric")
    convolve = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[axes]
    return convolve(
        x,
        weight,
        bias,
        stride=call.integers("strides") or [1] * axes,
        padding=pads[:axes],
        output_padding=call.integers("output_padding") or [0] * axes,
        groups=call.integer("group", 1),
        dilation=call.integers("dilations") or [1] * axes,
    )


@operator("MaxPool")
def _max_pool(call: Call, x: Tensor) -> Tensor:
    if call.integer("ceil_mode", 0) or len(call.node.outputs) > 1:
        raise call.unsupported("it rounds up, or returns indices")
    axes = x.ndim - 2
    pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[axes]
    return pool(
        _padded(call, x, -math.inf),
        call.integers("kernel_shape") or [],
        stride=call.integers("strides") or [1] * axes,
        dilation=call.integers("dilations") or [1] * axes,
    )


@operator("AveragePool")
def _average_pool(call: Call, x: Tensor) -> Tensor:
    axes = x.ndim - 2
    pads, dilations = call.integers("pads") or [0], call.integers("dilations") or [1]
    if call.integer("ceil_mode", 0) or max(dilations) > 1:
        raise call.unsupported("it rounds up, or is dilated")
    if any(pads) and not call.integer("count_include_pad", 0):
        raise call.unsupported("its means leave out padding")
    pool = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[axes]
    kernel, stride = call.integers("kernel_shape") or [], call.integers("strides") or [1] * axes
    return pool(_padded(call, x), kernel, stride=stride)


@operator("GroupNormalization")
def _group_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups = call.integer("num_groups", 1)
    if call.version < 21:  # one number for each group
        scale, bias = (t.repeat_interleave(x.shape[1] // groups) for t in (scale, bias))
    return F.group_norm(x, groups, scale, bias, call.number("epsilon", 1e-5))
