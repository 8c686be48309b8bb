"""Compare a rewritten model with the original, output by output and token by token."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from attnserve.checks.measures import not_finite_rows
from attnserve.checks.quality import QualityMeter, check_measure
from attnserve.context import DEFAULT_CONTEXT, Progress, RunContext, ignore_progress
from attnserve.data.datasets import load_inputs
from attnserve.models.artifact import open_artifact
from attnserve.models.cache_inputs import (
    empty_axes,
    is_reshaped_cache,
    require_empty,
    shaped_for,
    stripped_caches,
)
from attnserve.models.example_inputs import random_batches
from attnserve.models.masks import flat_mask, token_mask
from attnserve.models.measured import Fidelity, OutputFidelity
from attnserve.models.onnx_files import load_model
from attnserve.models.output_kinds import counts_tokens, is_cache_name, same_outputs
from attnserve.models.rows import fixed_axes, row_count
from attnserve.options import Comparison, Run
from attnserve.paths import StrPath
from attnserve.precision.convert import is_bfloat16, on_cpu
from attnserve.runtime.external_data import weight_bytes
from attnserve.runtime.interface import Batch, owned
from attnserve.runtime.session import OpenNew, open_session
from graph_passes.errors import InvalidArgument, InvalidData, InvalidModel

__all__ = [
    "Tally",
    "compare",
    "verify",
]

KEPT_BYTES = 2**26
KEPT_SHARE = 0.25
"""Limits of the stored outputs of one model while the other model runs: bytes, and a share of the
model's size; the larger limit applies."""


def verify(
    original: StrPath,
    new: StrPath,
    *,
    comparison: Comparison = Comparison(),
    run: Run = Run(),
    progress: Progress | None = None,
) -> Fidelity:
    """Compare the outputs of a new model with those of its original, on data or random inputs.

    If the new model has caches of other shapes, both models start from empty caches (``compare``).

    Raises:
        InvalidArgument: ``measure`` is given without ``data``.
        InvalidModel: The models do not have the same inputs and outputs.
        InvalidData: The data does not fit the models, or no random input does.
    """
    artifact = open_artifact(original)
    before, after = load_model(artifact), load_model(open_artifact(new))
    # Inputs of a fixed shape also fit a model that takes any shape.
    axes = fixed_axes(value.shape for value in after.graph.inputs if value.shape)
    narrower = before if axes == (None, None) else after
    meter = None
    measure = comparison.measure
    if comparison.data:
        rows = load_inputs(
            comparison.data, narrower, artifact, tokenizer=comparison.tokenizer, split=False
        )
        batches, source = rows.fit, rows.source.file
        check_measure(measure, rows)
        meter = QualityMeter(before, artifact, measure=measure, data=rows)
    elif measure != "auto":
        raise InvalidArgument(
            "`measure` needs `data`, which is not given",
            "give `data`, or leave `measure` out",
            code="compare.measure",
        )
    else:
        batches = random_batches(narrower, run.seed, empty=empty_axes(before, after))
        source = "random inputs"
    context = run.context(progress or ignore_progress)
    return compare(before, after, batches, source, meter=meter, context=context)


def compare(
    before: ir.Model,
    after: ir.Model,
    batches: Sequence[Batch],
    source: str,
    *,
    meter: QualityMeter | None = None,
    context: RunContext = DEFAULT_CONTEXT,
    open_new: OpenNew | None = None,
) -> Fidelity:
    """Run the batches through two models in memory and compare their outputs.

    ``meter`` measures the quality, and names the part of the data; the mean cosine does not count
    caches. ``source`` is the name of the data. ``open_new`` opens the second model; without it,
    both run on the device of the context.

    If caches have different shapes (``empty_axes``), the batches must leave them empty, and the
    returned caches are not compared. On the CPU a bfloat16 model is computed in float32 with each
    result rounded (``precision.convert.on_cpu``); ``Fidelity.data`` mentions it.

    Raises:
        InvalidModel: The models do not have the same inputs and outputs.
        InvalidData: A model refuses a batch, a batch fills a cache of different shape, or the masks
            hide all tokens.
    """
    _require_same_signature(before, after)
    empty = empty_axes(before, after)
    require_empty(batches, empty)
    is_held_out = meter is not None and meter.split not in ("data", "random")
    source = f"held out of {source}" if is_held_out else source
    source += ", empty caches" if empty else ""
    counterparts = {value.name: value for value in after.graph.outputs}
    duplicates = same_outputs(before)
    tallies = {
        index: Tally(by_token=counts_tokens(before, a))
        for index, a in enumerate(before.graph.outputs)
        if (b := counterparts.get(a.name)) is not None and not (empty and is_reshaped_cache(a, b))
        if index not in duplicates
    }
    models = (before, after)
    if context.device.provider == "cpu" and any(map(is_bfloat16, models)):
        source += ", bfloat16 rounded in float32"
        models = tuple(map(on_cpu, models))
    for ran in _run_both(models, batches, empty, context, open_new):
        new_arrays = dict(zip(counterparts, ran.after, strict=True))
        after_arrays = [
            new_arrays.get(value.name, array)  # a removed cache is not compared
            for value, array in zip(before.graph.outputs, ran.before, strict=True)
        ]
        for index, tally in tallies.items():
            tally.add(ran.before[index], after_arrays[index], ran.batch)
        if meter is not None:
            meter.add(ran.before, after_arrays, ran.batch)
    _require_tokens(tallies.values())
    names = [value.name or "" for value in before.graph.outputs]
    results = [
        tally.result(names[index], [names[i] for i, first in duplicates.items() if first == index])
        for index, tally in tallies.items()
    ]
    scored = [result for result in results if not is_cache_name(result.name)] or results
    return Fidelity(
        outputs=tuple(results),
        mean_cosine=float(np.mean([result.mean_cosine for result in scored])),
        min_cosine=min(result.min_cosine for result in scored),
        data=source,
        is_held_out=is_held_out,
        qualities=tuple(meter.results()) if meter is not None else (),
    )


def _require_same_signature(before: ir.Model, after: ir.Model) -> None:
    """Check that two models have the same inputs and outputs, except for removed caches.

    Raises:
        InvalidModel: The names differ, or the type of an integer input.
    """
    stripped = stripped_caches(before, after)
    for side, values_before, values_after in (
        ("inputs", before.graph.inputs, after.graph.inputs),
        ("outputs", before.graph.outputs, after.graph.outputs),
    ):
        names_before, names_after = (
            [v.name for v in values] for values in (values_before, values_after)
        )
        if stripped:
            names_before = [
                name
                for name in names_before
                if name in names_after or not is_cache_name(name or "")
            ]
        if names_before != names_after:
            raise InvalidModel(
                f"the models have different {side}: {', '.join(map(str, names_before))} against "
                f"{', '.join(map(str, names_after))}",
                "compare a model with the one it was made from",
                code="compare.signature",
            )
    for value in before.graph.inputs:
        dtype = value.dtype
        counterpart = next((v for v in after.graph.inputs if v.name == value.name), value)
        if dtype != counterpart.dtype and dtype and dtype.is_integer():
            raise InvalidModel(
                f"input {value.name!r} is {dtype.name} in the first model, and "
                f"{counterpart.dtype.name if counterpart.dtype else 'unknown'} in the second",
                "convert one of them, so that both take the same inputs",
                code="compare.signature",
            )


def _require_tokens(tallies: Collection[Tally]) -> None:
    """Check that a token of some output was compared.

    Raises:
        InvalidData: The original is NaN in every row, or the masks hide all tokens.
    """
    if any(tally.count for tally in tallies):
        return
    if any(tally.excluded for tally in tallies):
        raise InvalidData(
            "the original gives NaN in every row: nothing can be compared",
            "check the inputs, and the original model",
            code="compare.not_finite",
        )
    raise InvalidData(
        "no token of the data is compared: its masks hide all of them",
        "give masks that are 1 for real tokens and 0 for padding",
        code="compare.no_token",
    )


class _Ran(NamedTuple):
    """A batch, and the outputs of both models, in the order of each graph."""

    batch: Batch
    before: list[np.ndarray]
    after: list[np.ndarray]


def _run_both(
    models: Sequence[ir.Model],
    batches: Sequence[Batch],
    empty: Collection[str],
    context: RunContext,
    open_new: OpenNew | None,
) -> Iterator[_Ran]:
    """Run each batch through both models.

    The models take turns, because a session needs as much memory as its model. The outputs of the
    first model are kept until they reach ``KEPT_SHARE`` of its size.
    """
    progress = context.stage("verify")
    runs = 0
    limit = max(KEPT_BYTES, int(KEPT_SHARE * weight_bytes(models[0])))

    open_one = partial(open_session, device=context.device)
    openers = open_one, open_new or open_one

    def run_each(index: int, chunk: Sequence[Batch]) -> Iterator[list[np.ndarray]]:
        nonlocal runs
        model = models[index]
        session = openers[index](model)
        for batch in chunk:
            outputs = session.run(None, shaped_for(model, batch, empty))
            runs += 1
            progress(runs, len(models) * len(batches))
            yield outputs

    start = 0
    while start < len(batches):
        outputs_before: list[list[np.ndarray]] = []
        size = 0
        for outputs in run_each(0, batches[start:]):
            outputs_before.append([owned(array) for array in outputs])
            size += sum(array.nbytes for array in outputs)
            if size >= limit:
                break
        chunk = batches[start : start + len(outputs_before)]
        yield from map(_Ran, chunk, outputs_before, run_each(1, chunk))
        start += len(outputs_before)


class Tally:
    """Running sums over batches for one output.

    Args:
        by_token: Whether axis 1 counts tokens; padding is then excluded. The number of columns of
            (B, D) may equal the number of tokens.
    """

    def __init__(self, *, by_token: bool = True) -> None:
        self.by_token = by_token
        self.count = self.tokens = self.rows = 0
        self.not_finite: list[int] = []
        self.excluded: list[int] = []
        self.max = self.sum = self.squares = self.reference = self.cosines = 0.0
        self.least = 1.0

    def add(self, original: np.ndarray, new: np.ndarray, batch: Batch) -> None:
        """Add the output of both models for a batch, (B, ...) or with flattened tokens (B*T, ...).

        Raises:
            InvalidModel: The shapes differ.
        """
        if original.shape != new.shape:
            raise InvalidModel(
                f"an output of the first model has shape {original.shape}, of the second "
                f"{new.shape}",
                "compare a model with the one it was made from",
                code="compare.output_shape",
            )
        texts = row_count(batch) if batch else len(np.atleast_1d(original))
        of_text = max(len(np.atleast_1d(original)) // max(texts, 1), 1)  # if tokens are flattened
        for rows, positions in zip(
            (self.excluded, self.not_finite), not_finite_rows(original, new, batch), strict=True
        ):
            rows += (self.rows + np.unique(positions // of_text)).tolist()
        self.rows += texts
        a = np.atleast_2d(original.astype(np.float64))
        b = np.atleast_2d(new.astype(np.float64))
        mask = token_mask(batch, a.shape[:2]) if self.by_token else np.ones(a.shape[:2], bool)
        if a.ndim == 2 and (row_mask := flat_mask(batch, len(a))) is not None:  # (B*T, D)
            mask = np.broadcast_to(row_mask.reshape(-1, 1), a.shape)
        mask = mask.reshape(*mask.shape, *(1,) * (a.ndim - 2))
        a, b, real = (
            array.reshape(-1, a.shape[-1]) for array in (a, b, np.broadcast_to(mask, a.shape))
        )  # tokens D
        usable_rows = real.any(axis=1) & ~(real & np.isnan(a)).any(axis=1)
        a, b, real = (array[usable_rows] for array in (a, b, real))
        if not a.size:
            return
        with np.errstate(invalid="ignore", over="ignore"):
            a, b = np.where(real, a, 0.0), np.where(real, b, 0.0)
            # Equal infinities (masked logits) have no error.
            difference = np.abs(np.where(a == b, 0.0, a - b))
            difference = np.where(np.isfinite(difference), difference, 0.0)
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

    def result(self, name: str, same_outputs: Sequence[str] = ()) -> OutputFidelity:
        """The errors of the output with this name.

        Args:
            same_outputs: Names of other outputs that are the same value.
        """
        count, tokens = max(self.count, 1), max(self.tokens, 1)
        relative = (
            (self.squares / self.reference) ** 0.5 if self.reference else float(self.squares > 0)
        )
        errors = [self.max, self.sum / count, relative]
        max_error, mean, relative = [math.inf] * 3 if self.not_finite else errors
        return OutputFidelity(
            name=name,
            max_abs_error=max_error,
            mean_abs_error=mean,
            relative_error=relative,
            mean_cosine=self.cosines / tokens if self.tokens else 1.0,
            min_cosine=self.least,
            not_finite_rows=tuple(self.not_finite),
            excluded_rows=tuple(self.excluded),
            same_outputs=tuple(same_outputs),
        )
