"""Multi30k as token ids: vocabulary, batches of similar length, tensors."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

PAD, BOS, EOS = 0, 1, 2
CACHE = Path(".cache/training")
"""The default folder of vocabularies and checkpoints."""

FILES = {"train": "multi30k_train", "val": "multi30k_val", "test": "multi30k_test_2016_flickr"}

Pair = tuple[list[int], list[int]]
"""Token ids of a sentence and of its translation, without BOS and EOS."""


@dataclass(frozen=True)
class Corpus:
    """Tokenized sentence pairs, English to German.

    Attributes:
        references: The translations of ``test`` as text.
    """

    tokenizer: Tokenizer
    train: list[Pair]
    val: list[Pair]
    test: list[Pair]
    references: list[str]

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return self.tokenizer.get_vocab_size()


def read_corpus(folder: Path, cache: Path, *, vocabulary: int, longest: int) -> Corpus:
    """Read the files ``FILES`` and encode them with a BPE vocabulary of the training texts.

    The vocabulary is kept in ``cache``, because training it again may break ties differently.

    Raises:
        SystemExit: A file is missing, or its two languages differ in length.
    """
    texts = {part: _texts(folder, name) for part, name in FILES.items()}
    training = [line for lines in texts["train"] for line in lines]
    key = zlib.crc32("\n".join(training).encode())
    path = cache / f"vocabulary-{vocabulary}-{key:08x}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        train_tokenizer(training, vocabulary).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))

    def encoded(part: str) -> list[Pair]:
        sides = [[each.ids for each in tokenizer.encode_batch(lines)] for lines in texts[part]]
        return list(zip(*sides, strict=True))

    train = [pair for pair in encoded("train") if max(map(len, pair)) < longest]
    return Corpus(tokenizer, train, encoded("val"), encoded("test"), texts["test"][1])


def batches(pairs: Sequence[Pair], tokens: int, seed: int) -> list[list[int]]:
    """Rows of each batch: similar lengths, at most ``tokens`` with padding, in random order."""
    random = np.random.default_rng(seed)
    lengths = [max(map(len, pair)) + 1 for pair in pairs]
    found: list[list[int]] = [[]]
    longest = 0
    for row in np.argsort(np.asarray(lengths) + random.uniform(0, 4, len(lengths))).tolist():
        longest = max(longest, lengths[row])
        if found[-1] and longest * (len(found[-1]) + 1) > tokens:
            found.append([])
            longest = lengths[row]
        found[-1].append(row)
    return [found[place] for place in random.permutation(len(found))]


def stream(pairs: Sequence[Pair], tokens: int, seed: int) -> Iterator[list[int]]:
    """Batches of one epoch after the other, the same for the same seed."""
    epoch = 0
    while True:
        yield from batches(pairs, tokens, 1000 * seed + epoch)
        epoch += 1


def tensors(pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """Source (B, S) that ends with EOS, and target (B, T) from BOS to EOS, padded."""
    return (
        _padded([[*source, EOS] for source, _ in pairs]),
        _padded([[BOS, *target, EOS] for _, target in pairs]),
    )


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows])


def _texts(folder: Path, name: str) -> tuple[list[str], list[str]]:
    paths = [folder / f"{name}.{language}" for language in ("en", "de")]
    for path in paths:
        if not path.is_file():
            raise SystemExit(f"{path} does not exist: --data needs the Multi30k files, en and de")
    source, target = (path.read_text(encoding="utf-8").splitlines() for path in paths)
    if len(source) != len(target) or not source:
        raise SystemExit(f"{paths[0]} has {len(source)} lines and {paths[1]} has {len(target)}")
    return source, target


def train_tokenizer(texts: list[str], size: int) -> Tokenizer:
    """A BPE tokenizer of bytes with ``size`` tokens: PAD, BOS, EOS and those of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
