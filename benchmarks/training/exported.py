"""A trained translator as an ONNX graph, its rows for ``optimize``, and its BLEU."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attnserve.context import ONE_THREAD
from attnserve.runtime.session import open_session
from benchmarks.training.data import Corpus, Pair, read_corpus, tensors
from benchmarks.training.loop import Training, translations
from benchmarks.training.model import greedy
from benchmarks.training.translation import bleu
from benchmarks.training.variants import Settings, find


def trained(data: Path, cache: Path, variant: str = "vanilla", seed: int = 0) -> Training:
    """A variant of ``benchmarks.training.translation``, from its checkpoint if there is one."""
    settings = Settings()
    corpus = read_corpus(data, cache, vocabulary=settings.vocabulary, longest=settings.longest)
    (found,) = find([variant])
    training = Training(found, settings, seed, corpus)
    training.run(cache / f"{found.name}-{seed}.pt", resume=True)
    return training


def export(training: Training, path: Path) -> None:
    """Write the model: source (batch, S) and target (batch, T) to logits (batch, T, vocabulary)."""
    example = tensors(training.corpus.val[:2])
    axes = [{0: "batch", 1: name} for name in ("source_length", "target_length")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about its own code
        torch.onnx.export(
            training.model.eval(), example, str(path), dynamo=True, verbose=False,
            input_names=["source", "target"], output_names=["logits"], dynamic_shapes=tuple(axes),
        )  # fmt: skip


def write_rows(pairs: Sequence[Pair], folder: Path) -> Path:
    """Write an .npz of each target length. Sources are padded; the model masks the padding."""
    folder.mkdir()
    for length in sorted({len(target) for _, target in pairs}):
        source, target = tensors([pair for pair in pairs if len(pair[1]) == length])
        np.savez(folder / f"{length:03d}.npz", source=source.numpy(), target=target[:, :-1].numpy())
    return folder


def score(model: Path, corpus: Corpus, longest: int) -> float:
    """BLEU on the test pairs of a graph with the inputs and outputs of ``export``."""
    session = open_session(model, ONE_THREAD)

    def logits(target: Tensor, source: Tensor) -> Tensor:
        (found,) = session.run(None, {"source": source.numpy(), "target": target.numpy()})
        return torch.from_numpy(found[:, -1])

    def translate(source: Tensor) -> list[list[int]]:
        return greedy(partial(logits, source=source), len(source), longest)

    return bleu(translations(translate, corpus.test, corpus), corpus.references)[0]
