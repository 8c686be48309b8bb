"""Train a small cross-encoder, and write lists of candidates for it: the data of a reranker.

    python -m benchmarks.reranker --pairs STS_TRAIN.tsv STS_DEV.tsv -o FOLDER

Fine-tunes all-MiniLM-L6-v2 (from the [demo] extra) with a head of one logit on pairs of sentences.
Its target is their score (0 to 5, as a share) and 0 for pairs of unrelated sentences. FOLDER has
the layout of Hugging Face, which the ``CrossEncoder`` of sentence-transformers loads, with
calibration.tsv and test.tsv (query, document, relevance). No sentence is on two of the three sides:
those to train, to calibrate and to test; the last file of ``--pairs`` is for the test.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks._common import description, minilm, write_lines
from benchmarks.classifier import MAX_TOKENS, fine_tune

RELEVANT = 4.0
"""The lowest score of a pair whose sentences are a query and a relevant document."""

CANDIDATES = 30
"""Documents of a list: the relevant one, and sentences of other pairs."""

NEGATIVES = 3
"""Unrelated documents of each query to train."""

CALIBRATION = 0.4
"""The share of the pairs outside of the test that are to calibrate."""


class Pair(NamedTuple):
    """Two sentences and their similarity, 0 to 5."""

    score: float
    query: str
    document: str


class Candidate(NamedTuple):
    """A document for a query, and its relevance, 0 or 1."""

    query: str
    document: str
    relevance: int


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument(
        "--pairs", type=Path, nargs="+", required=True, help="score, sentence1, sentence2"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the model")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e-4, help="the highest learning rate")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 is its default")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    to_train, calibration, test = sides([read_pairs(path) for path in options.pairs], options.seed)
    start = time.perf_counter()
    train(to_train, options)
    print(f"trained in {time.perf_counter() - start:.0f} s", flush=True)
    write_lists(calibration, test, options.output, options.seed)
    return 0


def read_pairs(path: Path) -> list[Pair]:
    """Read a .tsv with the columns score, sentence1 and sentence2."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    return [
        Pair(float(row["score"]), row["sentence1"].strip(), row["sentence2"].strip())
        for row in rows
    ]


def related(pairs: Sequence[Pair]) -> list[str]:
    """Name the group of each pair: pairs with a common sentence, also by others, have one group."""
    parent: dict[str, str] = {}

    def root(sentence: str) -> str:
        parent.setdefault(sentence, sentence)
        while parent[sentence] != sentence:
            parent[sentence] = sentence = parent[parent[sentence]]
        return sentence

    for pair in pairs:
        parent[root(pair.query)] = root(pair.document)
    return [root(pair.query) for pair in pairs]


def sides(files: Sequence[Sequence[Pair]], seed: int) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """The pairs to train, to calibrate and to test; no sentence is on two sides.

    All pairs that are related to one of the last file are for the test.
    """
    pairs = [pair for file in files for pair in file]
    groups = related(pairs)
    tested = set(groups[len(pairs) - len(files[-1]) :])
    others = sorted({*groups} - tested)
    draws = np.random.default_rng(seed).random(len(others))
    side = dict.fromkeys(tested, 2) | dict(zip(others, (draws < CALIBRATION).tolist(), strict=True))
    to_train, calibration, test = (
        [pair for pair, group in zip(pairs, groups, strict=True) if side[group] == number]
        for number in range(3)
    )
    return to_train, calibration, test


def write_lists(calibration: Sequence[Pair], test: Sequence[Pair], folder: Path, seed: int) -> None:
    """Write calibration.tsv and test.tsv with random documents, near.tsv with near ones."""
    for name, pairs, near in (
        ("calibration", calibration, False), ("test", test, False), ("near", test, True),
    ):  # fmt: skip
        lists = relevance_lists(pairs, CANDIDATES, seed, by_words=near)
        lines = ["query\tdocument\trelevance", *("\t".join(map(str, row)) for row in lists)]
        write_lines(folder / f"{name}.tsv", lines)
        print(f"{name}: {len(lists) // CANDIDATES} queries", flush=True)


def relevance_lists(
    pairs: Sequence[Pair], candidates: int, seed: int, *, by_words: bool = False
) -> list[Candidate]:
    """Lists of ``candidates`` documents: that of a relevant pair, and sentences of other pairs.

    These pairs share no sentence with the relevant one. A query has one list, whose documents are
    in random order.

    Args:
        by_words: Take the sentences that share the largest part of their words with the query, as a
            first search would find them. False takes random ones, most of which are so far from
            relevant that their order says little.
    """
    random = np.random.default_rng(seed)
    groups = related(pairs)
    documents = list(
        {pair.document: group for pair, group in zip(pairs, groups, strict=True)}.items()
    )
    bags = [words(text) for text, _ in documents]
    lists: list[Candidate] = []
    queries: set[str] = set()
    for pair, group in zip(pairs, groups, strict=True):
        if pair.score < RELEVANT or pair.query in (*queries, pair.document):
            continue
        queries.add(pair.query)
        order = random.permutation(len(documents))
        if by_words:
            own = words(pair.query)
            shares = [len(own & bags[at]) / len(own | bags[at]) for at in order]
            order = order[np.argsort(np.negative(shares), kind="stable")]
        others = [documents[at][0] for at in order.tolist() if documents[at][1] != group]
        rows = [Candidate(pair.query, text, 0) for text in others[: candidates - 1]]
        rows.append(Candidate(pair.query, pair.document, 1))
        lists += [rows[at] for at in random.permutation(len(rows))]
    return lists


def words(text: str) -> frozenset[str]:
    """The words of a text in lower case, and itself, so that no text has none."""
    return frozenset([text, *re.findall(r"\w+", text.lower())])


def train(pairs: Sequence[Pair], options: argparse.Namespace) -> None:
    """Fine-tune the encoder with a head, and save it with its tokenizer."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(minilm())
    network: Any = AutoModelForSequenceClassification.from_pretrained(
        minilm(), num_labels=1, problem_type="multi_label_classification"
    )
    unrelated = relevance_lists(pairs, NEGATIVES + 1, options.seed)
    rows = [(pair.query, pair.document, pair.score / 5) for pair in pairs]
    rows += [(row.query, row.document, 0.0) for row in unrelated if not row.relevance]
    queries, documents, targets = map(list, zip(*rows, strict=True))
    encoded = tokenizer(queries, documents, truncation=True, max_length=2 * MAX_TOKENS)
    fine_tune(network, tokenizer, encoded, torch.tensor(targets)[:, None], options)
    network.config.problem_type = None  # its logit is a score of a pair, and not that of a label
    network.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)


if __name__ == "__main__":
    sys.exit(main())
