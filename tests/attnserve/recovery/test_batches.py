"""Batches of rows to train on: rows of like length, and texts that are mixed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="pip install 'attnserve[torch]'")

from attnserve.recovery.batches import TOKENS, count_tokens, mixed, regroup


def test_regroup_keeps_all_rows_in_batches_of_like_length():
    source = np.random.default_rng(0)
    lengths = source.integers(1, 90, 80)
    rows = [(np.arange(1, n + 1) + 1000 * i, np.ones(n, int)) for i, n in enumerate(lengths)]
    width = 90
    batches = [
        {
            "input_ids": np.stack([np.pad(ids, (0, width - len(ids))) for ids, _ in part]),
            "attention_mask": np.stack([np.pad(m, (0, width - len(m))) for _, m in part]),
        }
        for part in (rows[:50], rows[50:])
    ]
    made = [batch for step in regroup(batches, seed=0) for batch in step]
    found = [
        ids[mask.astype(bool)].tolist()
        for batch in made
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert sorted(found) == sorted(ids.tolist() for ids, _ in rows)
    assert all(batch["input_ids"].size <= TOKENS for batch in made)
    assert sum(map(count_tokens, made)) == sum(len(ids) for ids, _ in rows)
    assert len(made) < 2 * sum(map(count_tokens, made)) / TOKENS + 2


@given(st.lists(st.integers(2, 12), min_size=2, max_size=6), st.integers(0, 2**32 - 1))
def test_mixed_texts_are_the_start_of_one_and_the_end_of_another(lengths: list[int], seed: int):
    width = max(lengths)
    batch = {
        "input_ids": np.stack(
            [np.pad(100 * i + np.arange(1, n + 1), (0, width - n)) for i, n in enumerate(lengths)]
        ),
        "attention_mask": np.stack([np.arange(width) < n for n in lengths]).astype(int),
    }
    made = mixed(batch, np.random.default_rng(seed))
    for i, (ids, mask) in enumerate(zip(*made.values(), strict=True)):
        text = ids[mask.astype(bool)].tolist()
        other = text[-1] // 100
        cut = sum(token // 100 == i for token in text) if other != i else len(text)
        whole = batch["input_ids"][other]
        assert text == [*batch["input_ids"][i][:cut], *whole[cut : lengths[other]]]
        assert cut >= 1 and not ids[len(text) :].any()


def padded_left(lengths: list[int], pad: int) -> dict[str, np.ndarray]:
    width = max(lengths)
    rows = [100 * i + np.arange(1, n + 1) for i, n in enumerate(lengths)]
    return {
        "input_ids": np.stack([np.pad(r, (width - len(r), 0), constant_values=pad) for r in rows]),
        "attention_mask": np.stack([np.arange(width) >= width - n for n in lengths]).astype(int),
    }


def test_regroup_keeps_the_side_and_the_id_of_padding():
    """Graphs that take the vector of the last position read no padding."""
    lengths = np.random.default_rng(0).integers(1, 40, 60).tolist()
    made = [
        batch
        for step in regroup([padded_left(lengths[:30], 7), padded_left(lengths[30:], 7)], seed=0)
        for batch in step
    ]
    assert sum(len(batch["input_ids"]) for batch in made) == 60
    for batch in made:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        assert mask[:, -1].all()
        assert (ids[mask == 0] == 7).all()
        assert (np.diff(mask, axis=1) >= 0).all()


@given(st.lists(st.integers(2, 12), min_size=2, max_size=6), st.integers(0, 2**32 - 1))
def test_mixed_texts_with_padding_on_the_left_are_whole(lengths: list[int], seed: int):
    batch = padded_left(lengths, 0)
    made = mixed(batch, np.random.default_rng(seed))
    for i, (ids, mask) in enumerate(zip(*made.values(), strict=True)):
        text = ids[mask.astype(bool)]
        assert mask[-1] and (np.diff(mask) >= 0).all()
        end = i if len(set(lengths)) > 1 else text[-1] // 100  # without padding either end
        assert text.all() and text[-1] // 100 == end


def test_rows_behind_a_cache_count_their_ids():
    row = {"input_ids": np.ones((1, 250), int), "past.key": np.ones((1, 2, 4, 3), np.float32)}
    made = regroup([row] * 6, seed=0)
    assert [len(batch["input_ids"]) for step in made for batch in step] == [4, 2]
    assert count_tokens(made[0][0]) == 1000


def test_images_and_single_texts_are_not_mixed():
    random = np.random.default_rng(0)
    for batch in (
        {"pixel_values": np.zeros((4, 3, 4, 4), np.float32)},
        {"input_ids": np.ones((1, 9), int), "attention_mask": np.ones((1, 9), int)},
    ):
        assert mixed(batch, random) is batch


def test_regroup_groups_images_of_equal_shape():
    batches = [{"pixel_values": np.full((1, 3, 4, 4), i, np.float32)} for i in range(20)]
    made = regroup(batches, seed=0)
    assert [[len(batch["pixel_values"]) for batch in step] for step in made] == [[16], [4]]
    kept = regroup(batches, seed=0, fixed_rows=True)
    assert [len(step) for step in kept] == [17, 3]
    assert all(len(batch["pixel_values"]) == 1 for step in kept for batch in step)
