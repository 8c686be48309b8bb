"""The inputs and outputs of a model, and the validation of arrays against them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnserve.models.tokenizer import FILLED
from attnserve.runtime.interface import Feed, Session, ValueInfo
from attnserve.serving.tensor_codec import ONNX_TYPES
from graph_passes.errors import InvalidData, InvalidModel

__all__ = ["Axes", "Signature", "Tensor"]

Axes = tuple[int | str | None, ...]
"""Fixed sizes, or names of free axes (None: without a name)."""


@dataclass(frozen=True)
class Tensor:
    """An input or output of the model.

    ``axes`` are fixed sizes, or names of free axes (None: without a name). ONNX Runtime reports no
    axes for scalars and for tensors of unknown rank.
    """

    name: str
    dtype: np.dtype[Any]
    axes: Axes

    @property
    def shape(self) -> list[int]:
        """The sizes of the axes, -1 for free axes."""
        return [axis if isinstance(axis, int) else -1 for axis in self.axes]


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a model.

    Attributes:
        model: The name of the model, for messages.
        inputs, outputs: In the order of the graph.
        id_bounds: Number of valid ids of each input with token ids.
    """

    model: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    id_bounds: Mapping[str, int]

    @classmethod
    def read(cls, model: str, session: Session, id_bounds: Mapping[str, int]) -> Signature:
        """The signature of an open model.

        Raises:
            InvalidModel: An input or output is not a plain tensor.
        """
        inputs, outputs = session.get_inputs(), session.get_outputs()
        return cls(model, tuple(map(_tensor, inputs)), tuple(map(_tensor, outputs)), id_bounds)

    def check(self, inputs: Feed) -> None:
        """Validate names, types, shapes and token ids.

        Raises:
            InvalidData: The inputs do not fit the model.
        """
        names = [tensor.name for tensor in self.inputs]
        for name in (*inputs, *names):
            if name not in names or name not in inputs:
                fault = "missing" if name in names else "unknown"
                raise InvalidData(f"{fault} input {name!r}: {self.model} takes {', '.join(names)}")
        sizes: dict[str, tuple[int, str]] = {}
        for tensor in self.inputs:
            self._check_tensor(tensor, inputs[tensor.name], sizes)
        shape = self.ids(inputs).shape
        if shape[:1] == (0,):
            raise InvalidData(
                f"the inputs have no rows: the batch axis of {list(shape)} is 0",
                "send at least one row",
            )

    def require_different_axes(self, file: Path, caches: Collection[str]) -> None:
        """Refuse axes that have one name, but different sizes for every text.

        Axes of one name must have one size: ONNX Runtime also relies on it when it reuses memory.

        Args:
            file: The file of the model, for the message.
            caches: The names of inputs that are caches.

        Raises:
            InvalidModel: An axis counts tokens in one input, and something else in another one.
        """
        axes: dict[str, tuple[str, str]] = {}
        for tensor in self.inputs:
            if tensor.name in caches:
                meanings = ["rows", *["cached tokens"] * len(tensor.axes)]
            elif tensor.name in FILLED and len(tensor.axes) == 2:
                meanings = ["rows", "tokens"]
            else:
                continue
            for axis, meaning in zip(tensor.axes, meanings, strict=False):
                if not isinstance(axis, str):
                    continue
                first_meaning, first_tensor = axes.setdefault(axis, (meaning, tensor.name))
                if first_meaning != meaning and "tokens" in (first_meaning, meaning):
                    raise InvalidModel(
                        f"{file}: the axis {axis!r} counts {first_meaning} in "
                        f"{first_tensor!r} and {meaning} in {tensor.name!r}: expected a name of "
                        "its own for each",
                        "export the model again with dynamic axes of different names, for example"
                        " batch and sequence",
                        code="model.axis_name",
                    )

    def check_outputs(self, names: Sequence[str]) -> None:
        """Raise ``InvalidData`` if one of ``names`` is not an output."""
        for name in names:
            if name not in self.output_names:
                raise InvalidData(
                    f"unknown output {name!r}: expected one of {', '.join(self.output_names)}"
                )

    def ids(self, inputs: Feed) -> np.ndarray:
        """An input whose first two axes are rows and tokens."""
        return inputs["input_ids"] if "input_ids" in inputs else inputs[self.inputs[0].name]

    def tokens(self, inputs: Feed) -> int:
        """Number of unmasked tokens, without cached tokens."""
        mask = inputs.get("attention_mask")
        shape = self.ids(inputs).shape[:2]
        if mask is not None and mask.ndim == 2 and len(shape) == 2 and mask.shape[1] >= shape[1]:
            return int(np.count_nonzero(mask[:, mask.shape[1] - shape[1] :]))
        return math.prod(shape)

    def output_bytes(self, shapes: Mapping[str, Sequence[int]], outputs: Sequence[str]) -> int:
        """Size of ``outputs`` for inputs of these shapes; an axis of unknown size counts as 1."""
        return sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in self._output_shapes(shapes, outputs)
        )

    def vector_bytes(self, shapes: Mapping[str, Sequence[int]], outputs: Sequence[str]) -> int:
        """Size of one vector of ``outputs``: the last axis, for a row or for one of its tokens."""
        return sum(
            math.prod(shape[-1:]) * dtype.itemsize
            for shape, dtype in self._output_shapes(shapes, outputs)
        )

    def _output_shapes(
        self, shapes: Mapping[str, Sequence[int]], outputs: Sequence[str]
    ) -> Iterator[tuple[list[int], np.dtype[Any]]]:
        """The shape and type of each of ``outputs`` for inputs of these shapes."""
        sizes: dict[int | str | None, int] = {}
        for tensor in self.inputs:
            sizes |= zip(tensor.axes, shapes[tensor.name], strict=False)
        sizes[None] = 1
        for value in self.outputs:
            if value.name in outputs:
                shape = [
                    axis if isinstance(axis, int) else sizes.get(axis, 1) for axis in value.axes
                ]
                yield shape, value.dtype

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs, in order."""
        return tuple(output.name for output in self.outputs)

    @property
    def input_types(self) -> list[list[Any]]:
        """Name, type and shape of each input, as JSON."""
        return [[tensor.name, str(tensor.dtype), tensor.shape] for tensor in self.inputs]

    @property
    def takes_mask(self) -> bool:
        """Whether the model has an attention mask: texts of different lengths share a batch."""
        return any(tensor.name == "attention_mask" for tensor in self.inputs)

    @property
    def fixed_rows(self) -> int | None:
        """The fixed number of rows of a batch; None if any number is possible."""
        axes = self.inputs[0].axes
        return axes[0] if axes and isinstance(axes[0], int) else None

    @property
    def length_axes(self) -> set[int | str | None]:
        """The second axes of the inputs, which count tokens."""
        return {tensor.axes[1] for tensor in self.inputs if len(tensor.axes) > 1}

    def axes_of(self, output: str) -> Axes:
        """The axes of an output."""
        return next(tensor.axes for tensor in self.outputs if tensor.name == output)

    def _check_tensor(
        self, tensor: Tensor, array: np.ndarray, sizes: dict[str, tuple[int, str]]
    ) -> None:
        subject = f"input {tensor.name!r}"
        if array.dtype != tensor.dtype:
            raise InvalidData(f"{subject} is {array.dtype}: expected {tensor.dtype}")
        shape = tensor.shape
        if shape and (
            array.ndim != len(shape)
            or any(want not in (-1, got) for want, got in zip(shape, array.shape, strict=True))
        ):
            raise InvalidData(f"{subject} has shape {list(array.shape)}: expected {shape}")
        # Ids and masks are never empty; the key/value cache of a decoder is, in its first step.
        if array.size == 0 and array.ndim <= 2:
            raise InvalidData(f"{subject} has shape {list(array.shape)}: it is empty")
        # ONNX Runtime may broadcast axes of the same name, with another result.
        for axis, size in zip(tensor.axes, array.shape, strict=False):
            if (
                isinstance(axis, str)
                and (first_use := sizes.setdefault(axis, (size, subject)))[0] != size
            ):
                raise InvalidData(
                    f"{subject} has shape {list(array.shape)}: its axis {axis!r} is {size},"
                    f" but {first_use[0]} in {first_use[1]}"
                )
        # Gather on CUDA does not check its indices, and negative ids wrap around.
        bound = self.id_bounds.get(tensor.name)
        if bound and array.size and (array.min() < 0 or array.max() >= bound):
            wrong = array[(array < 0) | (array >= bound)].flat[0]
            raise InvalidData(f"{subject} holds {wrong}: expected ids from 0 to {bound - 1}")


def _tensor(value: ValueInfo) -> Tensor:
    if value.type not in ONNX_TYPES:
        raise InvalidModel(
            f"{value.name!r} is a {value.type}: expected a tensor of numbers or booleans",
            "export the model without it",
            code="model.datatype",
        )
    return Tensor(value.name, ONNX_TYPES[value.type], tuple(value.shape))
