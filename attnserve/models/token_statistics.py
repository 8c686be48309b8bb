"""Token ids of calibration data, so that traffic with other tokens can be recognized."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnserve.models.datasets import Dataset, token_mask
from attnserve.runtime.session import Batch

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

__all__ = ["seen_ids", "token_statistics", "unseen_share"]

INPUT = "input_ids"


def token_statistics(data: Dataset) -> dict[str, Any] | None:
    """Statistics of the token ids of a dataset, for the record of an artifact.

    Returns:
        None if the model has no integer input ``input_ids`` (B, S). Otherwise "distinct", the
        number of distinct ids in the rows to fit; "unseen_share", the share of the tokens of the
        held-out rows whose id is not among them; and "seen", these ids: bit i % 8 of byte i // 8 is
        1 for each id i. The bytes are compressed (zlib) and written in base64, about 5 kB for a
        vocabulary of 30,000.
    """
    fitted, held_out = (_token_ids(part) for part in (data.fit, [*data.choose, *data.held_out]))
    if fitted is None or held_out is None:
        return None
    seen = np.zeros(fitted.max(initial=-1) + 1, bool)
    seen[fitted] = True
    packed = np.packbits(seen, bitorder="little").tobytes()
    return {
        "distinct": int(seen.sum()),
        "unseen_share": unseen_share(held_out, seen),
        "seen": base64.b64encode(zlib.compress(packed, 9)).decode("ascii"),
    }


def seen_ids(statistics: dict[str, Any]) -> Bool[np.ndarray, " V"]:
    """Whether each id up to the largest one occurs in the rows to fit, from their statistics."""
    packed = zlib.decompress(base64.b64decode(statistics["seen"]))
    return np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little").astype(bool)


def unseen_share(ids: Int[np.ndarray, " T"], seen: Bool[np.ndarray, " V"]) -> float:
    """The share of token ids that are not seen; 0 of no ids."""
    known = seen[ids[ids < len(seen)]]
    return 1 - float(known.sum()) / len(ids) if len(ids) else 0.0


def _token_ids(batches: Sequence[Batch]) -> Int[np.ndarray, " T"] | None:
    """The ids of all tokens without padding; None if they are not found."""
    found = [np.zeros(0, np.int64)]
    for batch in batches:
        ids = batch.get(INPUT)
        if ids is None or ids.ndim != 2 or ids.dtype.kind not in "iu":
            return None
        found.append(ids[token_mask(batch, ids.shape)].astype(np.int64))
    return np.concatenate(found)
