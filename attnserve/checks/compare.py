"""verify: the new model against the original, output by output, token by token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.context import Provider
from attnserve.models.artifact import load_model, open_artifact
from attnserve.models.datasets import load_inputs, token_mask
from attnserve.models.example_inputs import example_inputs
from attnserve.models.precision import is_bfloat16, on_cpu
from attnserve.runtime.session import Batch, open_session, run
from graph_passes.errors import InvalidArgument, InvalidData, InvalidModel

__all__ = [
    "Fidelity",
    "OutputFidelity",
    "Tally",
    "check_cosine_bound",
    "compare",
    "empty_axes",
    "random_batches",
    "require_empty",
    "shaped_for",
    "verify",
]

RANDOM_SHAPES = ((1, 4), (1, 8), (2, 16), (4, 32))
"""(batch, sequence) of the random inputs where no data is given; short models take the first."""


@dataclass(frozen=True)
class OutputFidelity:
    """One output. Cosines are taken over the last axis, token by token, padding excluded."""

    name: str
    max_abs_error: float
    mean_abs_error: float
    relative_error: float
    mean_cosine: float
    min_cosine: float


@dataclass(frozen=True)
class Fidelity:
    """All outputs, the mean and least cosine over them, and what it was measured on.

    Attributes:
        standard_error: Of the mean cosine, texts (not tokens) being what was drawn; 0 for one text.
    """

    outputs: tuple[OutputFidelity, ...]
    mean_cosine: float
    min_cosine: float
    data: str
    standard_error: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verify(
    original: Path,
    new: Path,
    *,
    data: Path | None = None,
    tokenizer: Path | None = None,
    provider: Provider = "cpu",
    threads: int = 0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Fidelity:
    """Run both models on the same inputs: real ones where given, else random ones.

    Where the new model's caches have other shapes, both start from empty ones (see ``compare``).

    Raises:
        InvalidModel: The two do not have the same inputs and outputs.
        InvalidData: The data does not fit, or no random input does.
    """
    artifact = open_artifact(original)
    before, after = load_model(artifact), load_model(open_artifact(new))
    if data is not None:
        batches = load_inputs(data, before, artifact, tokenizer=tokenizer, split=False).fit
        source = data.name
    else:
        batches = random_batches(before, seed, empty=empty_axes(before, after))
        source = "random inputs"
    return compare(
        before, after, batches, source, provider=provider, threads=threads, progress=progress
    )


def check_cosine_bound(bound: float | None) -> None:
    """A bound that nothing can break, or nothing can keep, is a mistake.

    Raises:
        InvalidArgument: It is not a cosine.
    """
    if bound is not None and not -1 <= bound <= 1:
        raise InvalidArgument(
            f"--min-cosine {bound}: expected a cosine, -1 to 1", "for example --min-cosine 0.98"
        )


def random_batches(
    model: ir.Model, seed: int = 0, *, empty: Mapping[str, int] | None = None
) -> list[Batch]:
    """Valid random inputs at a few shapes, some of them padded: those that the model runs.

    How many positions a model has is often not to be seen in its graph, so it is asked. Axes of
    fixed size keep their size.

    Args:
        empty: Inputs that hold nothing, and which of their axes has length 0.

    Raises:
        InvalidArgument, InvalidData: It runs at none of the shapes.
    """
    session = open_session(model)
    fixed_batch, fixed_sequence = _fixed_axes(model)
    shapes = [(fixed_batch or batch, fixed_sequence or tokens) for batch, tokens in RANDOM_SHAPES]
    batches: list[Batch] = []
    for index, (batch, sequence) in enumerate(shapes):
        try:
            inputs = example_inputs(model, batch, sequence, seed + index, padded=True)
            for name, axis in (empty or {}).items():
                inputs[name] = inputs[name].take(range(0), axis)
            run(session, inputs)
        except (InvalidArgument, InvalidData):  # fewer positions than this shape has
            if not batches:
                raise
            break
        batches.append(inputs)
    return batches


def _fixed_axes(model: ir.Model) -> tuple[int | None, int | None]:
    """(batch, sequence) where the inputs have a fixed one; tokens lie on axis 1 of a matrix."""
    shapes = [value.shape for value in model.graph.inputs if value.shape]
    leading = (shape[0] for shape in shapes if len(shape) > 1)
    second = (shape[1] for shape in shapes if len(shape) == 2)
    batch = next((size for size in leading if isinstance(size, int)), None)
    return batch, next((size for size in second if isinstance(size, int)), None)


def empty_axes(before: ir.Model, after: ir.Model) -> dict[str, int]:
    """Inputs that must be empty for two models to be comparable, and which of their axes.

    They are the caches that differ in heads or head size, (B, H, P, K) and (B, 1, P, R), and all
    other inputs of their length P: what one model has cached means nothing to the other.
    """
    pairs = zip(before.graph.inputs, after.graph.inputs, strict=False)
    changed = {a.name or "": a.shape[2] for a, b in pairs if _is_cache(a, b) and a.shape}
    lengths = {str(dim) for dim in changed.values() if not isinstance(dim, int) and dim.value}
    alike = {
        value.name or "": axis
        for value in before.graph.inputs
        for axis, dim in enumerate(value.shape or ())
        if str(dim) in lengths
    }
    return {**dict.fromkeys(changed, 2), **alike}


def _is_cache(a: ir.Value, b: ir.Value) -> bool:
    """Whether a value (B, H, T, K), T being free, has other heads or another K in another model."""
    if a.shape is None or b.shape is None or not len(a.shape) == len(b.shape) == 4:
        return False
    other = [axis for axis in range(4) if a.shape[axis] != b.shape[axis]]
    return bool(other) and set(other) <= {1, 3} and not isinstance(a.shape[2], int)


def require_empty(batches: Sequence[Batch], empty: Collection[str]) -> None:
    """Refuse data with filled caches, which only the model that filled them can read.

    Raises:
        InvalidData: Naming the first cache that holds something.
    """
    for batch in batches:
        for name in empty:
            if name in batch and batch[name].size:
                raise InvalidData(
                    f"the cache {name!r} has shape {batch[name].shape}: expected length 0, as the "
                    "rewritten model's cache is another",
                    "give whole sequences and empty caches, and masks of the sequences' length",
                )


def shaped_for(model: ir.Model, batch: Batch, empty: Collection[str]) -> Batch:
    """The batch with empty caches of the shapes that a model takes."""
    feed = dict(batch)
    for value in model.graph.inputs:
        name = value.name or ""
        array = batch.get(name)
        if name not in empty or array is None or value.shape is None:
            continue
        if len(value.shape) == array.ndim:  # else the model says what is wrong
            pairs = zip(value.shape, array.shape, strict=True)
            feed[name] = array.reshape([a if isinstance(a, int) else n for a, n in pairs])
    return feed


def compare(
    before: ir.Model,
    after: ir.Model,
    batches: Sequence[Batch],
    source: str,
    *,
    provider: Provider = "cpu",
    threads: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Fidelity:
    """Stream the batches through two models in memory.

    Where caches of the two have other shapes (``empty_axes``), the batches must leave them empty,
    and those that the models return are not compared. On the CPU a model in bfloat16 is computed in
    float32, each result rounded (``precision.on_cpu``), and the name of the data says so.

    Raises:
        InvalidModel: The two do not have the same inputs and outputs.
        InvalidData: A model refuses a batch, or it fills a cache that the two do not share.
    """
    for what, ours, theirs in (
        ("inputs", before.graph.inputs, after.graph.inputs),
        ("outputs", before.graph.outputs, after.graph.outputs),
    ):
        left, right = ([v.name for v in values] for values in (ours, theirs))
        if left != right:
            raise InvalidModel(
                f"the models have different {what}: {', '.join(map(str, left))} against "
                f"{', '.join(map(str, right))}",
                "verify a model against the one it was made from",
            )
    empty = empty_axes(before, after)
    require_empty(batches, empty)
    source += ", empty caches" if empty else ""
    pairs = zip(before.graph.outputs, after.graph.outputs, strict=True)
    cached = [bool(empty) and _is_cache(a, b) for a, b in pairs]
    models = (before, after)
    if provider == "cpu" and any(map(is_bfloat16, models)):
        source += ", bfloat16 rounded in float32"
        models = tuple(map(on_cpu, models))
    sessions = [open_session(m, provider=provider, threads=threads) for m in models]
    tallies = [Tally() for _ in cached]
    for done, batch in enumerate(batches, start=1):
        feeds = [shaped_for(model, batch, empty) for model in (before, after)]
        results = [run(session, feed) for session, feed in zip(sessions, feeds, strict=True)]
        for tally, skip, a, b in zip(tallies, cached, *results, strict=True):
            if skip:
                continue
            if a.shape != b.shape:
                raise InvalidModel(
                    f"an output of the first model has shape {a.shape}, of the second {b.shape}",
                    "verify a model against the one it was made from",
                )
            tally.add(a, b, batch)
        if progress is not None:
            progress(done, len(batches))
    outputs = tuple(
        tally.result(value.name or "")
        for tally, skip, value in zip(tallies, cached, before.graph.outputs, strict=True)
        if not skip
    )
    return Fidelity(
        outputs,
        float(np.mean([o.mean_cosine for o in outputs])),
        min(o.min_cosine for o in outputs),
        source,
        max(t.standard_error for t, skip in zip(tallies, cached, strict=True) if not skip),
    )


class Tally:
    """Running sums over batches of one output."""

    def __init__(self) -> None:
        self.count = self.tokens = 0
        self.max = self.sum = self.squares = self.reference = self.cosines = 0.0
        self.least = 1.0
        self.texts: list[tuple[float, int]] = []  # sum of cosines and tokens of each

    def add(self, original: np.ndarray, new: np.ndarray, batch: Batch) -> None:
        a = np.atleast_2d(original.astype(np.float64))
        b = np.atleast_2d(new.astype(np.float64))
        mask = token_mask(batch, a.shape[:2])  # one number a token, or a vector a token
        mask = mask.reshape(*mask.shape, *(1,) * (a.ndim - 2))
        text = np.repeat(np.arange(len(a)), a[0, ..., 0].size if len(a) else 0)
        a, b, real = (
            array.reshape(-1, a.shape[-1]) for array in (a, b, np.broadcast_to(mask, a.shape))
        )  # tokens D
        some = real.any(axis=1)
        a, b, real, text = (array[some] for array in (a, b, real, text))
        if not a.size:
            return
        with np.errstate(invalid="ignore", over="ignore"):
            a, b = np.where(real, a, 0.0), np.where(real, b, 0.0)
            # The same infinity on both sides (a masked logit) is agreement, not an error.
            difference = np.abs(np.where(a == b, 0.0, a - b))
            difference = np.where(np.isnan(difference), np.inf, difference)
            lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
            cosines = (a * b).sum(1) / np.where(lengths > 0, lengths, 1.0)  # 0 where one is zero
            self.squares += float((difference**2).sum())
        cosines = np.where(np.isfinite(cosines), np.clip(cosines, -1, 1), 0.0)
        cosines = np.where((a == b).all(axis=1), 1.0, cosines)
        self.count += int(real.sum())
        self.tokens += len(a)
        self.max = max(self.max, float(difference.max()))
        self.sum += float(difference.sum())
        self.reference += float((np.where(np.isfinite(a), a, 0.0) ** 2).sum())
        self.cosines += float(cosines.sum())
        self.least = min(self.least, float(cosines.min()))
        sums, counts = np.bincount(text, cosines), np.bincount(text)
        self.texts += [(s, n) for s, n in zip(sums.tolist(), counts.tolist(), strict=True) if n]

    @property
    def standard_error(self) -> float:
        """Of the mean cosine, a ratio of sums over texts (Cochran 1977, section 6.4)."""
        if len(self.texts) < 2:
            return 0.0
        sums, counts = np.array(self.texts).T
        apart = sums - counts * sums.sum() / counts.sum()
        spread = float(np.square(apart).sum()) * len(sums) / (len(sums) - 1)
        return spread**0.5 / float(counts.sum())

    def result(self, name: str) -> OutputFidelity:
        count, tokens = max(self.count, 1), max(self.tokens, 1)
        relative = (
            (self.squares / self.reference) ** 0.5 if self.reference else float(self.squares > 0)
        )
        big = np.finfo(np.float64).max  # JSON has no infinity
        return OutputFidelity(
            name,
            min(self.max, big),
            min(self.sum / count, big),
            min(relative, big),
            self.cosines / tokens if self.tokens else 1.0,
            self.least,
        )
