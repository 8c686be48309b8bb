"""Test with one batch whether a model computes rows independently and ignores padding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from graph_passes.errors import InvalidData

__all__ = ["has_independent_rows", "ignores_padding"]

Arrays = Mapping[str, np.ndarray]
Run = Callable[[Arrays], Arrays]
"""A function from inputs to outputs, by name; ``InvalidData`` if the model refuses the inputs."""

ROW_TOLERANCE = 0.05
"""Maximum relative difference between a row alone and the same row in a batch. Dynamic quantization
over the whole batch gives about 1e-3, and ``batch_invariant`` detects it by its operators; graphs
that mix rows give about 1."""


def has_independent_rows(run: Run, inputs: Arrays, together: Arrays, rows: int) -> bool:
    """Whether each row has the same outputs alone as in the batch.

    Args:
        together: The outputs of the batch.
    """
    if any(array.shape[:1] != (rows,) for array in inputs.values()):
        return False
    for index in range(rows):
        try:
            alone = run({name: array[index : index + 1] for name, array in inputs.items()})
        except InvalidData:
            return False
        for name, row in alone.items():
            if row.shape[:1] != (1,) or together[name].shape != (rows, *row.shape[1:]):
                return False
            if not _close(together[name][index], row[0]):
                return False
    return True


def ignores_padding(run: Run, inputs: Arrays, padded: Collection[str]) -> bool:
    """Whether padding (zeros in tokens and mask) leaves the outputs unchanged.

    Args:
        padded: Inputs whose axis 1 counts tokens.
    """
    length = inputs["attention_mask"].shape[-1] if "attention_mask" in inputs else 0
    if length < 2:
        return False
    short = dict(inputs)
    longer = {name: array.copy() for name, array in inputs.items()}
    for name in padded:
        short[name] = inputs[name][:, : length // 2]
        longer[name][:, length // 2 :] = 0
    try:
        expected, outputs = run(short), run(longer)
    except InvalidData:
        return False
    return all(_starts_with(outputs[name], array) for name, array in expected.items())


def _starts_with(longer: np.ndarray, array: np.ndarray) -> bool:
    """Whether ``array`` is the beginning of ``longer`` along every axis."""
    start = longer[tuple(map(slice, array.shape))] if longer.ndim == array.ndim else longer
    return start.shape == array.shape and _close(start, array)


def _close(array: np.ndarray, expected: np.ndarray) -> bool:
    one, other = (np.nan_to_num(values.astype(np.float64)) for values in (array, expected))
    return bool(np.linalg.norm(one - other) <= ROW_TOLERANCE * np.linalg.norm(other) + 1e-9)
