"""The distillation loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pip install 'attnserve[torch]'")

from attnserve.checks.quality import Quality  # noqa: E402
from attnserve.recovery.loss import HIDDEN_WEIGHT as HIDDEN  # noqa: E402
from attnserve.recovery.loss import LAST_WEIGHT as LAST  # noqa: E402
from attnserve.recovery.loss import SERVED_WEIGHT as SERVED  # noqa: E402
from attnserve.recovery.loss import DistillationLoss  # noqa: E402
from attnserve.recovery.teacher import remembered, without_caches  # noqa: E402
from attnserve.runtime.interface import owned  # noqa: E402
from graph_passes.errors import InvalidData  # noqa: E402
from tests.attnserve.qualities import quality_of  # noqa: E402

MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
BATCH = {"input_ids": MASK, "attention_mask": MASK}


def quality(measure: Any) -> Quality:
    return quality_of(measure, 1.0, rows=3, output="out")


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal(shape, dtype=np.float32) for shape in shapes]


def objective(measure: Any, given: list[np.ndarray], pooling: Any = "mean") -> DistillationLoss:
    return DistillationLoss(
        [quality(measure)], ["out"], len(given) - 1, pooling, [BATCH], lambda _: given
    )


def loss(found: DistillationLoss, student: list[np.ndarray], teacher: list[np.ndarray]) -> float:
    return float(found([torch.from_numpy(array) for array in student], teacher, BATCH))


CASES = [
    ("similarity", (3, 4, 8), "mean", LAST + SERVED + HIDDEN),
    ("similarity", (3, 4, 8), "cls", LAST + SERVED + HIDDEN),
    ("similarity", (3, 8), "none", SERVED + HIDDEN),
    ("index", (3, 4, 8), "mean", LAST + SERVED + HIDDEN),
    ("index", (3, 8), "none", SERVED + HIDDEN),
    ("r2", (3, 4, 8), "mean", LAST + HIDDEN),
    ("kl", (3, 5), "mean", SERVED + HIDDEN),
    ("top1", (3, 4, 9), "mean", SERVED + HIDDEN),
]


@pytest.mark.parametrize(("measure", "shape", "pooling", "total"), CASES)
def test_loss_is_0_for_equal_and_its_weights_for_a_constant(
    measure: str, shape: tuple[int, ...], pooling: str, total: float
):
    teacher = arrays(shape, (3, 4, 6))
    found = objective(measure, teacher, pooling)
    assert loss(found, teacher, teacher) == pytest.approx(0, abs=1e-6)
    assert sum(term.weight for term in found.terms) == pytest.approx(total)
    # Each term alone is its weight for the best constant, by the definition of its unit.
    state = teacher[1][MASK.astype(bool)]
    constant = np.broadcast_to(state.mean(0), teacher[1].shape).copy()
    assert loss(found, [teacher[0], constant], teacher) == pytest.approx(HIDDEN, rel=1e-5)
    if measure == "kl":
        p = torch.softmax(torch.from_numpy(teacher[0]), -1).mean(0).log()
        found_loss = loss(found, [p.expand(3, -1).numpy().copy(), teacher[1]], teacher)
        assert found_loss == pytest.approx(SERVED, rel=1e-5)


def test_padding_does_not_count():
    teacher = arrays((3, 4, 8), (3, 4, 6), (12, 6))  # the last one has its tokens in one axis
    found = objective("similarity", teacher)
    student = [array.copy() for array in teacher]
    for array in student:
        array.reshape(3, 4, -1)[MASK == 0] = 100.0
    assert loss(found, student, teacher) == pytest.approx(0, abs=1e-6)


def test_gradient_at_padding_is_0():
    teacher = arrays((3, 4, 8), (3, 4, 6))
    found = objective("r2", teacher)
    student = [torch.from_numpy(array + 1).requires_grad_() for array in teacher]
    with torch.no_grad():
        student[1][torch.from_numpy(MASK == 0)] = torch.nan
    value = found(student, teacher, BATCH)
    value.backward()
    assert torch.isfinite(value)
    for tensor in student:
        assert tensor.grad is not None
        is_zero = (tensor.grad == 0).all(-1)
        assert (is_zero == torch.from_numpy(MASK == 0)).all()


def test_impossible_class_of_the_teacher_has_a_finite_loss():
    teacher = arrays((3, 5))
    teacher[0][:, 0] = -np.inf
    found = objective("kl", teacher)
    student = torch.randn(3, 5, requires_grad=True)
    value = found([student], teacher, BATCH)
    value.backward()
    assert torch.isfinite(value) and student.grad is not None and student.grad.isfinite().all()


def test_constant_teacher_is_refused():
    with pytest.raises(InvalidData) as caught:
        objective("r2", [np.ones((3, 4, 8), np.float32)])
    assert caught.value.code == "recovery.constant_teacher"


def test_one_number_per_token_is_compared_at_real_tokens_of_any_length():
    """As the logits of the positions of an answer, (B, T)."""
    teacher = {3: arrays((2, 3)), 5: arrays((2, 5))}
    batches = [
        {"input_ids": np.ones((2, n), int), "attention_mask": np.ones((2, n), int)} for n in teacher
    ]
    batches[1]["attention_mask"][0, 3:] = 0
    found = DistillationLoss(
        [quality("r2")], ["out"], 0, "mean", batches, lambda b: teacher[b["input_ids"].shape[1]],
        resized=[0],
    )  # fmt: skip
    real = np.concatenate(
        [teacher[b["input_ids"].shape[1]][0][b["attention_mask"] != 0] for b in batches]
    )
    assert found.terms[0].unit == pytest.approx(real.var(), rel=1e-5)
    student = teacher[5][0].copy()
    student[0, 3:] = np.inf  # padding
    student[1, 0] += 2
    measured = float(found([torch.from_numpy(student)], teacher[5], batches[1]))
    assert measured == pytest.approx(LAST * 4 / 8 / real.var(), rel=1e-5)


def test_answers_are_kept_up_to_a_limit_and_caches_are_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("attnserve.recovery.teacher.KEPT_BYTES", 8)
    calls: list[int] = []

    def teacher(batch: Any) -> list[np.ndarray]:
        calls.append(batch["x"][0])
        return [np.float32([batch["x"][0], 1]), np.zeros(1000, np.float32), np.zeros(3)]

    answers = remembered(without_caches(teacher, ["logits", "present.0.key"]), owned)
    batches = [{"x": np.array([i])} for i in range(3)]
    for _ in range(2):
        for index, batch in enumerate(batches):
            logits, cache = answers(index, batch)
            assert logits.tolist() == [index, 1] and cache.size == 0
    assert calls == [0, 1, 2, 1, 2]


def test_student_without_the_caches_of_its_teacher_learns_the_other_outputs():
    random = np.random.default_rng(0)
    cache, out, state = (random.standard_normal((3, 4, 8)).astype(np.float32) for _ in range(3))
    found = DistillationLoss(
        [quality("r2")], ["present", "out"], 1, "mean", [BATCH], lambda _: [cache, out, state],
        student_outputs=["out"],
    )  # fmt: skip
    assert loss(found, [out, state], [cache, out, state]) == pytest.approx(0, abs=1e-6)
    assert loss(found, [state, state], [cache, out, state]) > 0.5 * LAST
