"""What the mask inputs of models say."""

from __future__ import annotations

import numpy as np
import pytest

from attnserve.models.masks import flat_mask, padding_value, read_mask, token_mask

REAL = np.array([[True, False], [True, True]])
ADDED = np.where(REAL, 0.0, -np.inf)

KINDS: dict[str, tuple[str, np.ndarray]] = {
    "integers": ("attention_mask", REAL.astype(np.int64)),
    "booleans": ("attention_mask", REAL),
    "padding of PyTorch": ("src_key_padding_mask", ~REAL),
    "integers named padding": ("padding_mask", REAL.astype(np.int32)),
    "factors": ("attention_mask", REAL.astype(np.float32)),
    "added infinity": ("attention_mask", ADDED.astype(np.float32)),
    "added minimum": ("mask", np.maximum(ADDED, np.finfo(np.float16).min).astype(np.float16)),
    "added ten thousand": ("mask", np.maximum(ADDED, -1e4)),
}


@pytest.mark.parametrize(("name", "mask"), KINDS.values(), ids=KINDS)
def test_mask_of_each_kind_keeps_the_same_tokens(name: str, mask: np.ndarray):
    np.testing.assert_array_equal(read_mask(name, mask), REAL)
    np.testing.assert_array_equal(
        token_mask({"ids": np.ones((2, 2), int), name: mask}, (2, 2)), REAL
    )
    np.testing.assert_array_equal(flat_mask({name: mask}, 4), REAL)
    assert token_mask({name: mask}, (2, 3)).all(), "of another shape"
    # Another row, and its padding, in the same kind.
    padded = np.append(mask, [[padding_value(name, mask)]] * 2, axis=1).astype(mask.dtype)
    np.testing.assert_array_equal(read_mask(name, padded), np.append(REAL, [[False]] * 2, axis=1))


def test_mask_that_hides_nothing_keeps_all_tokens():
    for mask in (np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32), np.ones((2, 3), int)):
        assert read_mask("attention_mask", mask).all()
    assert token_mask({}, (1, 4)).shape == (1, 4) and flat_mask({}, 4) is None
    assert padding_value("input_ids", np.ones((1, 3), int)) == 0
