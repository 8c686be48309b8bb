"""Training within a time budget: AdamW, warm-up, cosine decay, averaged weights, checkpoints."""

from __future__ import annotations

import io
import math
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from attnserve.models.training_result import TrainingResult
from attnserve.recovery.batches import can_be_mixed, count_tokens, mixed, place_of_step
from attnserve.recovery.distillation import Distillation
from attnserve.recovery.module import memory_errors
from attnserve.recovery.teacher import remembered
from attnserve.runtime.checkpoint import Checkpoint
from attnserve.runtime.interface import Batch
from attnserve.runtime.machine import has_bfloat16_product
from graph_passes.errors import CheckFailed

__all__ = [
    "half_type",
    "halved",
    "is_stuck",
    "rate_for",
    "torch_threads",
    "train",
]

LEARNING_RATE = 2.5e-4
"""Learning rate for a first loss of 1; scaled by the root of the first loss (``rate_for``)."""

LARGEST_ROOT = 1.2
"""Maximum root of the first loss in the learning-rate heuristic."""

LABELED_SHARE = 0.05
"""Weight of the label loss in the learning-rate heuristic; most of that loss cannot be reduced. For
a trained classifier, 3e-5 improves within minutes, and 1e-4 only degrades."""

WARM_UP = 20
"""Steps with a growing learning rate."""

TOO_FAST = 2
"""Number of first measurements; if all are worse than the initial weights, the training restarts
with a lower learning rate. Near an optimum, gradients are mostly noise, and AdamW moves every
weight randomly by the learning rate."""

SLOWER = 3.0
"""Divisor of the learning rate at a restart."""

AVERAGE = 0.99
"""Decay of the averaged weights per step, after the first steps."""

MEASURED_EVERY_S = 60.0
MEASUREMENTS = 8
"""Number of measurements in a short run; in longer runs, there is one per minute."""

PATIENCE = 6
"""Number of measurements in a row without improvement after which training ends (``is_stuck``)."""


def train(distillation: Distillation, seconds: float, checkpoint: Checkpoint) -> TrainingResult:
    """Train until the time is used up; ``distillation.student`` then has the best weights.

    The best weights have the smallest loss on the rows to choose; the initial weights are included.
    Averages of the weights over the last steps are measured.

    Args:
        seconds: Time budget of the training, including the time before an interruption.
        checkpoint: The saved state, from which an interrupted training continues.

    Raises:
        InvalidData: No output or state of the original depends on the data.
        CheckFailed: The loss is not finite, and no weights are better than the initial ones.
    """
    trainer = _Trainer(distillation, seconds, checkpoint)
    result = trainer.run()
    result.states = len(distillation.states)
    result.weights = sum(weight.numel() for weight in distillation.module.weights)
    if result.is_better:
        distillation.write_weights(trainer.best)
    return result


@contextmanager
def torch_threads(count: int) -> Generator[None]:
    """Set the number of threads of PyTorch; 0 leaves PyTorch's default."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def half_type(device: str) -> torch.dtype | None:
    """The half precision in which a device multiplies fast; None if it has none.

    The type is bfloat16, or float16 on GPUs whose tensor cores have no bfloat16 (Volta and Turing).
    """
    if device != "cuda":
        return torch.bfloat16 if has_bfloat16_product() else None
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float16 if torch.cuda.get_device_capability() >= (7, 0) else None


def rate_for(first_loss: float) -> float:
    """The largest learning rate of a training that starts with this loss.

    The loss is about quadratic in the distance to the optimal weights, so the distance is about the
    root of the loss. AdamW moves every weight by about the learning rate in a step. With a larger
    rate, the first steps would increase a small loss.
    """
    root = math.sqrt(max(first_loss, 0.0))  # KL of equal logits may be rounded below 0
    return LEARNING_RATE * min(root, LARGEST_ROOT)


def is_stuck(losses: Sequence[float], seconds: float, budget: float) -> bool:
    """Whether the last ``PATIENCE`` measurements are no better than those before, after half time.

    The loss before the training is ignored, because the first steps may exceed it.
    """
    if seconds < budget / 2 or len(losses) <= PATIENCE:
        return False
    return min(losses[-PATIENCE:]) >= min(losses[:-PATIENCE])


class _Trainer:
    """The state of ``train``: the module's weights, their average and the best weights so far."""

    def __init__(self, distillation: Distillation, budget: float, checkpoint: Checkpoint) -> None:
        self.distillation = distillation
        self.module = distillation.module
        self.teacher = distillation.teacher
        self.batches = distillation.batches()
        self.loss = distillation.loss(self.batches)
        self.seed = distillation.job.context.seed
        self.clock = distillation.job.context.clock
        self.budget = budget
        self.checkpoint = checkpoint
        self.weights = list(self.module.weights)
        self.average = [weight.detach().clone() for weight in self.weights]
        self.best = [weight.detach().clone() for weight in self.weights]
        self.optimizer = self._new_optimizer()
        self.result = TrainingResult()
        self._expected = remembered(self.teacher, halved)  # later epochs use them again
        self._device = self.module.device.type
        self._half = half_type(self._device)
        self._scaler = torch.amp.GradScaler(self._device, enabled=self._half is torch.float16)

    def run(self) -> TrainingResult:
        """Train from the checkpoint, or from the start; ``best`` then has the best weights."""
        self._resume()
        result = self.result
        start = self.clock() - result.seconds
        if not result.history:
            result.loss = result.first_loss = self.distillation.loss_to_choose(self.average)
        interval = min(MEASURED_EVERY_S, self.budget / MEASUREMENTS)
        progress = self.distillation.job.context.stage("train (s)")
        last_measured = self.clock()
        losses: list[float] = []
        while (elapsed := self.clock() - start) < self.budget:
            with memory_errors():
                loss = self._step(elapsed / self.budget)
            if not math.isfinite(loss):
                if self._half is not None:  # masks may overflow
                    self._half = None
                    self._scaler = torch.amp.GradScaler(self._device, enabled=False)
                    continue
                self._not_finite()
                break
            losses.append(loss)
            progress(min(int(elapsed), int(self.budget)), math.ceil(self.budget))
            if self.clock() - last_measured < interval:
                continue
            began = self.clock()
            self._measure(began - start, losses)
            _, first = result.since
            if not result.is_better and len(result.history) - first >= TOO_FAST:
                self._restart()
            last_measured, losses = self.clock(), []
            interval = max(interval, 5 * (last_measured - began))  # at most a sixth of the time
            if is_stuck([loss for _, _, loss in result.history], began - start, self.budget):
                result.stopped = "no gain"
                break
        else:
            if losses:
                self._measure(self.clock() - start, losses)
        result.seconds = self.clock() - start
        return result

    def _step(self, share: float) -> float:
        """One step of the optimizer, at a share of the time; returns the loss."""
        step = self.result.steps
        batches, expected = self._step_batches(step)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for batch, arrays in zip(batches, expected, strict=True):
            with self._precision():
                outputs = self.module(self.distillation.feed(batch))
            loss = self.loss(outputs, arrays, batch) / len(batches)
            total += float(loss.detach())
            if not math.isfinite(total):
                return total
            self._scaler.scale(loss).backward()
        reducible = total
        with self._precision():
            labeled_loss = self.distillation.labeled_loss(step)
        if labeled_loss is not None:
            total += float(labeled_loss.detach())
            reducible += LABELED_SHARE * float(labeled_loss.detach())
            if not math.isfinite(total):
                return total
            self._scaler.scale(labeled_loss).backward()
        self._scaler.unscale_(self.optimizer)
        norm = float(torch.nn.utils.clip_grad_norm_(self.weights, 1.0))
        if not math.isfinite(norm):
            if self._scaler.get_scale() <= 1:
                return norm
            self._scaler.update()  # the gradients overflowed: a smaller scale
            return self._step(share)
        if step < WARM_UP and not self.result.restarts:  # the mean over the first steps
            rate = self.result.learning_rate
            self.result.learning_rate += (rate_for(reducible) - rate) / (step + 1)
        start, _ = self.result.since
        steps_since_start = step - start
        warmth = min((steps_since_start + 1) / WARM_UP, 1.0) * (1 + math.cos(math.pi * share)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = self.result.learning_rate * warmth
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.result.steps += 1
        self.result.tokens += sum(map(count_tokens, batches))
        decay = min(AVERAGE, (1 + steps_since_start) / (10 + steps_since_start))
        get_ema_multi_avg_fn(decay)(self.average, self.weights, steps_since_start)
        return total

    def _precision(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._half is None else torch.autocast(self._device, self._half)

    def _step_batches(self, step: int) -> tuple[Sequence[Batch], Sequence[list[np.ndarray]]]:
        """The batches of a step, and the teacher's outputs for them.

        From the second epoch on, texts are mixed as augmentation against overfitting.
        """
        index = place_of_step(step, len(self.batches), self.seed)
        batches = self.batches[index]
        if not any(map(can_be_mixed, batches)):
            return batches, [self._expected((index, at), one) for at, one in enumerate(batches)]
        if step >= len(self.batches):
            random = np.random.default_rng((self.seed, step))
            batches = [mixed(batch, random) for batch in batches]
        return batches, [self.teacher(batch) for batch in batches]

    def _measure(self, elapsed: float, losses: Sequence[float]) -> None:
        """Measure the averaged weights, keep them if they are the best, and save the state."""
        result = self.result
        loss = self.distillation.loss_to_choose(self.average)
        result.history.append((elapsed, float(np.mean(losses or [math.nan])), loss))
        if loss < result.loss:
            result.loss = loss
            self.best = [weight.clone() for weight in self.average]
        result.seconds = elapsed
        state = {
            "weights": [weight.detach() for weight in self.weights],
            "average": self.average,
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
            "result": asdict(result),
        }
        self.checkpoint.write(lambda file: torch.save(state, file))

    def _restart(self) -> None:
        """Start again from the initial weights, with a lower learning rate."""
        result = self.result
        with torch.no_grad():
            for values in (self.weights, self.average):
                for value, initial in zip(values, self.best, strict=True):
                    value.copy_(initial)
        self.optimizer = self._new_optimizer()
        result.learning_rate /= SLOWER
        result.restarts += 1
        result.since = (result.steps, len(result.history))

    def _new_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.weights, fused=True)

    def _resume(self) -> None:
        """Continue from the checkpoint, if there is one of these weights."""
        try:
            content = io.BytesIO(self.checkpoint.read() or b"")
            state = torch.load(content, map_location="cpu", weights_only=True)
        except Exception:  # torch raises exceptions of many types for a damaged file
            return
        if "result" not in state:  # written by an older version
            return
        shapes = [weight.shape for weight in self.weights]
        if [weight.shape for weight in state["weights"]] != shapes:
            return
        with torch.no_grad():
            for key, values in (
                ("weights", self.weights),
                ("average", self.average),
                ("best", self.best),
            ):
                for value, stored in zip(values, state[key], strict=True):
                    value.copy_(stored)
        self.optimizer.load_state_dict(state["optimizer"])
        self.result = TrainingResult(**state["result"])
        self.result.stopped = "time"

    def _not_finite(self) -> None:
        """Stop, because the loss is not finite; the best earlier weights are the result.

        Raises:
            CheckFailed: No weights are better than the initial ones.
        """
        self.result.stopped = "not finite"
        if not self.result.is_better:
            raise CheckFailed(
                f"the loss is not finite at step {self.result.steps}: nothing was written",
                "check that the outputs of `teacher` on `data` are finite, or try another `seed`",
                code="recovery.not_finite",
            )


def halved(array: np.ndarray) -> np.ndarray:
    """The array in float16, or unchanged if float16 cannot hold its values."""
    if array.dtype != np.float32:
        return array
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    return half if np.isfinite(half).all() else array
