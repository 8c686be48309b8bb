"""Train one variant: schedule, curve, checkpoints, pruning, and its result."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from attnserve.nn import GroupedHeadAttention, group_loss, voting_to_stay
from benchmarks.training.data import PAD, Corpus, Pair, batches, stream, tensors
from benchmarks.training.model import Translator
from benchmarks.training.variants import Settings, Variant

VOTING_BATCHES = 100
"""Training batches that vote; the paper takes one epoch."""

LENGTH = 16
"""Source and target tokens of the sentence whose MACs are counted."""


@dataclass
class Training:
    """A variant in training. Its state is saved at each point of the curve.

    Attributes:
        masks: Heads that stay, by layer, once the model is pruned.
        seconds, cpu_seconds: Time of the steps, without evaluation.
        curve: Step, mean training loss since the last point (smoothed, without the group loss) and
            validation loss (not smoothed), in nats per token.
    """

    variant: Variant
    settings: Settings
    seed: int
    corpus: Corpus
    step: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    masks: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = Translator(self.variant, self.settings, self.corpus.vocabulary)
        self.optimizer = self._optimizer()

    def run(
        self,
        checkpoint: Path | None = None,
        *,
        resume: bool = False,
        deadline: float = math.inf,
        say: Callable[[str], None] = print,
    ) -> bool:
        """Train to the end and return True, or False after the deadline (``time.monotonic``).

        With ``resume``, start from the checkpoint if there is one of this variant and settings. A
        run that is resumed gives the same model as one without interruption.
        """
        if resume and checkpoint is not None:
            self._load(checkpoint)
        settings, losses = self.settings, []
        order = stream(self.corpus.train, settings.batch_tokens, self.seed)
        for rows in islice(order, self.step, settings.steps):
            if time.monotonic() > deadline and self.step % settings.evaluate_every == 0:
                return False
            if self.variant.keep != "all" and self.step == settings.steps // 2 and not self.masks:
                self.prune(self._elected())
            wall, cpu = time.perf_counter(), time.process_time()
            losses.append(self._train([self.corpus.train[row] for row in rows]))
            self.seconds += time.perf_counter() - wall
            self.cpu_seconds += time.process_time() - cpu
            self.step += 1
            if self.step % settings.evaluate_every == 0 or self.step == settings.steps:
                self._evaluate(sum(losses) / len(losses), say)
                losses.clear()
                if checkpoint is not None:
                    self._save(checkpoint)
        return True

    def prune(self, masks: dict[str, list[int]]) -> None:
        """Keep the heads whose mask is 1. The optimizer keeps its state of all other weights."""
        for name, mask in masks.items():
            layer = self.model.get_submodule(name)
            assert isinstance(layer, GroupedHeadAttention)
            self.model.set_submodule(name, layer.pruned(mask))
        self.masks, old = masks, self.optimizer
        self.optimizer = self._optimizer()
        for parameter in self.model.parameters():
            if parameter in old.state:
                self.optimizer.state[parameter] = old.state[parameter]

    @property
    def result(self) -> dict[str, Any]:
        """Curve, size and speed."""
        source = torch.full((1, LENGTH), PAD + 1)
        self.model.eval()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.model(source, source)
        return {
            "curve": self.curve,
            "parameters": sum(part.numel() for part in self.model.parameters()),
            "macs": counter.get_total_flops() // 2,
            "steps_per_s": self.step / self.seconds,
            "steps_per_cpu_s": self.step / self.cpu_seconds,
        }

    def translations(self, pairs: list[Pair]) -> list[str]:
        """Greedy translations as text, in the order of the pairs."""
        self.model.eval()
        return translations(
            lambda source: self.model.translate(source, self.settings.longest), pairs, self.corpus
        )

    def _train(self, pairs: list[Pair]) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.settings)
        self.model.train()
        loss = self._loss(pairs, self.settings.smoothing)
        total = loss
        if self.variant.kind == "grouped" and not self.masks:
            total = loss + group_loss(self.model)
        total.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not math.isfinite(loss.item()):
            raise SystemExit(f"{self.variant.name}: the loss is {loss.item()} at step {self.step}")
        return loss.item()

    def _loss(self, pairs: list[Pair], smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
        source, target = tensors(pairs)
        logits = self.model(source, target[:, :-1])
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD,
            label_smoothing=smoothing, reduction=reduction,
        )  # fmt: skip

    @torch.no_grad()
    def _evaluate(self, train_loss: float, say: Callable[[str], None]) -> None:
        if self.variant.kind == "grouped" and not self.masks:
            for layer in self._grouped().values():
                layer.reassign()
        self.model.eval()
        pairs = self.corpus.val
        total = sum(
            self._loss([pairs[row] for row in rows], reduction="sum").item()
            for rows in batches(pairs, self.settings.batch_tokens, 0)
        )
        val_loss = total / sum(len(target) + 1 for _, target in pairs)
        self.curve.append({"step": self.step, "train_loss": train_loss, "val_loss": val_loss})
        say(
            f"{self.variant.name}, seed {self.seed}: step {self.step} of {self.settings.steps},"
            f" loss {train_loss:.3f}, val {val_loss:.3f}, {self.step / self.seconds:.2f} steps/s"
        )

    def _grouped(self) -> dict[str, GroupedHeadAttention]:
        return {
            name: layer
            for name, layer in self.model.named_modules()
            if isinstance(layer, GroupedHeadAttention)
        }

    def _elected(self) -> dict[str, list[int]]:
        """The heads that stay in each layer: as voted, or as many at random."""
        if self.variant.keep == "random":
            choice = random.Random(self.seed)
            masks = {}
            for name, layer in self._grouped().items():
                kept = choice.sample(range(layer.num_heads), layer.num_groups)
                masks[name] = [int(head in kept) for head in range(layer.num_heads)]
            return masks
        train = self.corpus.train
        voters = batches(train, self.settings.batch_tokens, self.seed)[:VOTING_BATCHES]
        votes = voting_to_stay(
            self.model, ([train[row] for row in rows] for rows in voters), self._loss
        )
        return {name: vote.mask.tolist() for name, vote in votes.items()}

    def _optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)

    def _identity(self) -> dict[str, Any]:
        return {"variant": asdict(self.variant), "settings": self.settings.to_json()}

    def _save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = {name: getattr(self, name) for name in PROGRESS}
        stored |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        new = path.with_suffix(".new")
        torch.save({**self._identity(), **stored, "random": torch.get_rng_state()}, new)
        new.replace(path)

    def _load(self, path: Path) -> None:
        if not path.is_file():
            return
        stored = torch.load(path, weights_only=True)
        if any(stored[name] != value for name, value in self._identity().items()):
            return
        if stored["masks"]:
            self.prune(stored["masks"])
        for name in PROGRESS:
            setattr(self, name, stored[name])
        self.model.load_state_dict(stored["model"])
        self.optimizer.load_state_dict(stored["optimizer"])
        torch.set_rng_state(stored["random"])


def translations(
    translate: Callable[[Tensor], list[list[int]]], pairs: Sequence[Pair], corpus: Corpus
) -> list[str]:
    """The translations as text, in the order of the pairs.

    Args:
        translate: Returns the token ids of the translations of sources (B, S).
    """
    order = sorted(range(len(pairs)), key=lambda row: len(pairs[row][0]))
    found: dict[int, str] = {}
    for start in range(0, len(order), 50):
        rows = order[start : start + 50]
        source, _ = tensors([pairs[row] for row in rows])
        texts = corpus.tokenizer.decode_batch(translate(source))
        found |= {row: text.strip() for row, text in zip(rows, texts, strict=True)}
    return [found[row] for row in range(len(pairs))]


PROGRESS = ("step", "seconds", "cpu_seconds", "curve", "masks")
"""The attributes of ``Training`` that a checkpoint holds."""


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    if step < settings.warm_up:
        return settings.rate * (step + 1) / settings.warm_up
    done = (step - settings.warm_up) / max(settings.steps - settings.warm_up, 1)
    return settings.rate * (1 + math.cos(math.pi * done)) / 2
