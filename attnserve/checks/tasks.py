"""The tasks of ``attnserve evaluate``: each runs a model on a file and returns its score."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnserve.checks.labeled_tables import read_labeled_table
from attnserve.checks.measures import next_token_nats
from attnserve.checks.rankings import Ranking, measure_rankings
from attnserve.checks.scores import PerplexityScore, RatioScore, Score, StsScore
from attnserve.checks.task_data import (
    label_names,
    read_judgments,
    read_texts,
    read_words,
    require_relevant,
)
from attnserve.context import RunContext
from attnserve.data.array_files import read_arrays
from attnserve.data.datasets import load_inputs
from attnserve.data.file_rows import wanted_inputs
from attnserve.data.text_files import read_pairs
from attnserve.literals import Pooling, TaskName
from attnserve.models.artifact import Artifact
from attnserve.models.embeddings import output_name, pool, run_texts
from attnserve.models.onnx_files import load_model
from attnserve.models.rows import filled, fixed_axes
from attnserve.models.tokenizer import Encoding, Text, TextEncoder
from attnserve.models.tokenizer_files import load_encoder
from attnserve.runtime.interface import RunFailed, Session
from graph_passes.errors import CheckFailed, InvalidArgument, InvalidData

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["TASKS", "OpenModel", "entities_of"]

DOCUMENTS = 100
"""Documents that retrieval ranks for each query: the cutoff of recall in BEIR (2021)."""

QUERIES_AT_ONCE = 256


@dataclass(frozen=True)
class OpenModel:
    """An open session with its artifact and the options of ``evaluate``.

    Attributes:
        index: The session that embeds the documents of a retrieval; None for ``session``.
    """

    session: Session
    artifact: Artifact
    pooling: Pooling
    tokenizer: Path | None
    batch_size: int
    context: RunContext
    index: Session | None = None

    @cached_property
    def encoder(self) -> TextEncoder:
        _, tokens = fixed_axes(value.shape for value in self.session.get_inputs())
        return load_encoder(self.artifact, self.tokenizer).with_length(tokens)

    @cached_property
    def output(self) -> str:
        """The name of the output with scores."""
        names = [value.name for value in self.session.get_outputs()]
        return output_name(names, self.artifact.output, scores=True)

    @cached_property
    def progress(self) -> Callable[[int, int], None]:
        return self.context.stage("evaluate")

    def embed(self, texts: Sequence[str], normalize: bool) -> Float[np.ndarray, "N D"]:
        """The embeddings of texts with their prompts, in float64; long texts are truncated.

        Raises:
            InvalidData: ``texts`` is empty or does not fit the model.
            InvalidArgument: The options do not fit the model.
            CheckFailed: The model returns NaN or infinity.
        """
        if not texts:
            raise InvalidData("`texts` is empty", "pass at least one text", code="text.no_texts")
        parts = [
            (indices, pool(hidden, mask, self.pooling, normalize, self.artifact.dimensions))
            for indices, hidden, mask in self._runs(
                self.encoder.encode(texts), self.artifact.output
            )
        ]
        order = np.argsort(np.concatenate([indices for indices, _ in parts]))
        vectors = np.concatenate([pooled for _, pooled in parts])[order]
        if not np.isfinite(vectors).all():
            raise CheckFailed(
                "the model returns NaN or infinity for text"
                f" {np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0]}",
                "check its weights; half precision may overflow",
                code="text.not_finite",
            )
        return vectors.astype(np.float64)

    def logits(
        self, encodings: Sequence[Encoding], axes: str
    ) -> Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(indices, finite logits, mask) of batches; ``axes`` describes the logits to a reader."""
        for indices, logits, mask in self._runs(encodings, self.output):
            check_logits(logits, axes)
            yield indices, logits, mask

    def _runs(
        self, encodings: Sequence[Encoding], output: str | None
    ) -> Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(indices, a model output, mask) of batches."""
        return run_texts(
            self.session,
            self.encoder,
            encodings,
            batch_size=self.batch_size,
            output=output,
            progress=self.progress,
        )


def check_logits(logits: np.ndarray, axes: str) -> None:
    """Check the number of axes, a last axis of size 1 if ``axes`` says so, and finite numbers."""
    names = axes.split(", ")
    if logits.ndim != len(names) or (names[-1] == "1" and logits.shape[-1] != 1):
        raise InvalidArgument(
            f"`task` expects logits [{axes}], the model returns {list(logits.shape)}",
            "export the model with the task of this score, or name another output in attnserve.json"
            " (`output`)",
            code="evaluate.no_logits",
        )
    if not np.isfinite(logits).all():
        raise CheckFailed(
            "the model returns NaN or infinite logits",
            "check its weights",
            code="evaluate.not_finite",
        )


def _sts(run: OpenModel, data: Path) -> StsScore:
    rows = read_labeled_table(data, "sts", run.artifact)
    scores = np.array([row.label for row in rows])  # N
    if len(set(scores)) < 2:
        raise InvalidData(
            f"{data}: all {len(rows)} rows have the same score: the correlation is undefined",
            "provide at least two rows with different scores",
            code="evaluate.constant_scores",
        )
    texts = [row.texts[side] for side in (0, 1) for row in rows]
    first, second = np.split(run.embed(texts, normalize=True), 2)  # N D
    cosines = np.einsum("nd,nd->n", first, second)  # N
    if np.ptp(cosines) == 0:
        raise CheckFailed(
            "the model returns the same cosine for every pair: the correlation is undefined",
            "check the model's weights and the pooling",
            code="evaluate.constant_cosines",
        )
    return StsScore(cosines, scores, seed=run.context.seed)


def _check_range(data: Path, lines: Sequence[int], labels: np.ndarray, classes: int) -> None:
    if labels.max() >= classes:
        at = int(labels.argmax())
        raise InvalidData(
            f"{data}, line {lines[at]}: label {str(labels[at])!r}, but the model has {classes}"
            " classes",
            f"use labels 0 to {classes - 1}",
            code="evaluate.label_range",
        )


def _classification(run: OpenModel, data: Path) -> RatioScore:
    rows = read_labeled_table(data, "classification", run.artifact)
    labels = np.array([row.label for row in rows])  # N
    encodings = run.encoder.encode([row.texts[0] for row in rows])
    predictions = np.empty(len(rows), np.int64)
    for indices, logits, _ in run.logits(encodings, "batch, classes"):
        _check_range(data, [row.line for row in rows], labels, logits.shape[1])
        predictions[indices] = logits.argmax(axis=1)
    return RatioScore.mean(
        "classification", "accuracy", predictions == labels, seed=run.context.seed
    )


def _image_classification(run: OpenModel, data: Path) -> RatioScore:
    inputs = wanted_inputs(load_model(run.artifact))
    dtypes = {name: value.dtype for name, value in inputs.items()}
    rows = read_arrays(data, {**dtypes, "label": np.dtype(np.int64)})
    labels = np.array([row["label"].item() for row in rows])  # N
    predictions = np.empty(len(rows), np.int64)
    fixed_rows, _ = fixed_axes(value.shape for value in run.session.get_inputs())
    size = fixed_rows or run.batch_size
    groups: dict[tuple[Any, ...], list[int]] = {}  # the rows of a batch have equal shapes
    for index, row in enumerate(rows):
        groups.setdefault(tuple(row[name].shape for name in dtypes), []).append(index)
    done = 0
    for indices in (
        group[start : start + size]
        for group in groups.values()
        for start in range(0, len(group), size)
    ):
        batch = filled(indices, size) if fixed_rows else indices
        feed = {name: np.concatenate([rows[index][name] for index in batch]) for name in dtypes}
        try:
            (logits,) = run.session.run([run.output], feed)
        except RunFailed as error:
            raise InvalidData(
                f"{data}: the model refuses a batch: {error.reason}",
                "write arrays of the shapes that the model takes",
                code="evaluate.batch_refused",
            ) from error
        check_logits(logits, "batch, classes")
        _check_range(data, range(1, len(rows) + 1), labels, logits.shape[1])
        predictions[indices] = logits.argmax(axis=1)[: len(indices)]
        done += len(indices)
        run.progress(done, len(rows))
    return RatioScore.mean(
        "image-classification", "accuracy", predictions == labels, seed=run.context.seed
    )


def _retrieval(run: OpenModel, data: Path) -> RatioScore:
    queries = read_texts(data, "queries.tsv", "queries.jsonl")
    documents = read_texts(data, "documents.tsv", "corpus.jsonl")
    judged = read_judgments(data, queries, documents)
    artifact = run.artifact
    ask, answer = artifact.prompt("query"), artifact.prompt("document", "passage", "corpus")
    normalize = artifact.ranks_unit_vectors
    indexer = run if run.index is None else replace(run, session=run.index)
    query_vectors = run.embed([ask + queries[key] for key in judged], normalize)  # N D
    document_vectors = indexer.embed([answer + x for x in documents.values()], normalize)
    keys = list(documents)
    rankings: list[Ranking] = []
    relevances = list(judged.values())
    for start in range(0, len(query_vectors), QUERIES_AT_ONCE):
        similarities = query_vectors[start : start + QUERIES_AT_ONCE] @ document_vectors.T
        order = np.argsort(-similarities, axis=1, kind="stable")[:, :DOCUMENTS]
        rankings += [
            Ranking([keys[index] for index in ranked], relevance)
            for ranked, relevance in zip(order, relevances[start:], strict=False)
        ]
    ndcg, recall = measure_rankings(rankings, "nDCG@10", f"R@{DOCUMENTS}")
    return RatioScore.mean(
        "retrieval",
        "ndcg_at_10",
        ndcg,
        seed=run.context.seed,
        recall_at_100=float(recall.mean()),
    )


def _rerank(run: OpenModel, data: Path) -> RatioScore:
    groups: dict[str, list[tuple[str, float]]] = {}
    for query, document, relevance in read_pairs(data):
        groups.setdefault(query, []).append((document, relevance))
    groups = {query: rows for query, rows in groups.items() if max(x for _, x in rows) > 0}
    require_relevant(data, groups)
    prompt = run.artifact.prompt()  # as the service
    pairs: list[Text] = [
        (prompt + query, text) for query, rows in groups.items() for text, _ in rows
    ]
    scores = np.empty(len(pairs))
    for indices, logits, _ in run.logits(run.encoder.encode(pairs), "batch, 1"):
        scores[indices] = logits[:, 0]
    ends = np.cumsum([len(rows) for rows in groups.values()])
    rankings = [
        Ranking.of_scores(of_query, [value for _, value in rows])
        for of_query, rows in zip(np.split(scores, ends[:-1]), groups.values(), strict=True)
    ]
    ndcg, reciprocal = measure_rankings(rankings, "nDCG@10", "RR@10")
    return RatioScore.mean(
        "rerank",
        "ndcg_at_10",
        ndcg,
        seed=run.context.seed,
        mrr_at_10=float(reciprocal.mean()),
    )


def _perplexity(run: OpenModel, data: Path) -> PerplexityScore:
    inputs = load_inputs(
        data, load_model(run.artifact), run.artifact, tokenizer=run.tokenizer, split=False
    )
    nats: list[float] = []
    tokens: list[float] = []
    rows = sum(len(next(iter(batch.values()))) for batch in inputs.fit)
    for batch in inputs.fit:
        for index in range(len(next(iter(batch.values())))):
            # Logits of a whole batch may need gigabytes.
            row = {name: array[index : index + 1] for name, array in batch.items()}
            try:
                (logits,) = run.session.run([run.output], row)
            except RunFailed as error:
                raise InvalidData(
                    f"{data}: the model refuses a row: {error.reason}",
                    "reduce `max_length` to the number of positions of the model",
                    code="evaluate.batch_refused",
                ) from error
            check_logits(logits, "batch, sequence, vocabulary")
            token_nats = next_token_nats(logits, row)
            if token_nats is None:
                raise InvalidArgument(
                    "`task` perplexity expects one logit per token id of the vocabulary, the model"
                    f" returns {list(logits.shape)}",
                    "export a language model with the task text-generation",
                    code="evaluate.no_logits",
                )
            nats.append(float(token_nats[0].sum()))
            tokens.append(float(token_nats[1].sum()))
        run.progress(len(nats), rows)
    if not sum(tokens):
        raise InvalidData(
            f"{data}: no row has two tokens", "use longer texts", code="evaluate.no_tokens"
        )
    return PerplexityScore(np.array(nats), np.array(tokens), seed=run.context.seed)


def _token_classification(run: OpenModel, data: Path) -> RatioScore:
    sentences = read_words(data)
    names = {index: name for name, index in label_names(run.artifact).items()}
    known_labels = set(names.values())
    for sentence in sentences:
        if unknown := sorted(set(sentence.labels) - known_labels):
            raise InvalidData(
                f"{data}, sentence of line {sentence.line}: label {unknown[0]!r}: expected a name"
                f" of the model's config.json ({', '.join(sorted(known_labels)[:8]) or 'none'})",
                "correct the row, or put the model's config.json into its folder",
                code="evaluate.unknown_label",
            )
    encodings = [run.encoder.encode_words(sentence.words) for sentence in sentences]
    right, expected, predicted = np.zeros((3, len(sentences)))
    for indices, logits, mask in run.logits(
        [encoding for encoding, _ in encodings], "batch, sequence, classes"
    ):
        for index, row, real in zip(indices, logits, mask, strict=True):
            classes = row[real].argmax(axis=-1)
            places = encodings[index][1]
            # Truncated words have no prediction.
            guess = ["O" if at is None else names.get(int(classes[at]), "O") for at in places]
            gold = entities_of(sentences[index].labels)
            entities = entities_of(guess)
            right[index], expected[index] = len(gold & entities), len(gold)
            predicted[index] = len(entities)
    if not expected.sum():
        raise InvalidData(
            f"{data}: every word has the label O",
            "add sentences with entities",
            code="evaluate.no_entities",
        )
    return RatioScore(
        "token-classification",
        "f1",
        2 * right,
        expected + predicted,
        {
            "precision": float(right.sum() / max(predicted.sum(), 1)),
            "recall": float(right.sum() / expected.sum()),
        },
        seed=run.context.seed,
    )


def entities_of(labels: Sequence[str]) -> set[tuple[int, int, str]]:
    """Return (first word, end, type) of the entities of labels in the scheme IOB (conlleval).

    An entity begins with B-, or with I- after another type. Labels without a prefix are entities of
    one word each.
    """
    entities: set[tuple[int, int, str]] = set()
    start, kind = 0, ""
    for at, label in enumerate([*labels, "O"]):
        prefix, _, name = label.partition("-")
        continues = bool(kind) and prefix == "I" and name == kind
        if kind and not continues:
            entities.add((start, at, kind))
            kind = ""
        if prefix in ("B", "I") and name:
            start, kind = (start, kind) if continues else (at, name)
        elif label != "O":
            entities.add((at, at + 1, label))
    return entities


TASKS: Mapping[TaskName, Callable[[OpenModel, Path], Score]] = {
    "sts": _sts,
    "classification": _classification,
    "retrieval": _retrieval,
    "rerank": _rerank,
    "perplexity": _perplexity,
    "token-classification": _token_classification,
    "image-classification": _image_classification,
}
