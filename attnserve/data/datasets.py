"""Read model inputs from text or .npz files, in a part to fit and held-out parts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx_ir as ir

from attnserve.data.file_rows import read_file
from attnserve.data.row_batches import RowInfo, row_info
from attnserve.data.splits import (
    INVERSE_HELD_OUT_SHARE,
    LEAST_SEARCHED,
    FileParts,
    weighted,
    without_held_out,
)
from attnserve.data.text_files import read_sentences
from attnserve.literals import Role
from attnserve.models.artifact import Artifact
from attnserve.models.checksums import path_sha256
from attnserve.models.lineage import Calibration
from attnserve.options import Lengths, check_files
from attnserve.runtime.interface import Batch
from graph_passes.errors import InvalidData

__all__ = ["Dataset", "content_digest", "load_inputs", "require_rows"]

WIDE = 4
"""Ratio of the 95th to the 5th percentile of lengths from which short and long texts are measured
separately."""

MIN_KIND = 10
"""Minimum number of short (and of long) texts in a held-out part to measure them separately."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Model inputs in batches of similar length, in disjoint parts of distinct rows.

    The batches are ``RowBatch``: they know the file, the role and the lists of their rows.

    The parts depend on the file alone, so that other commands with the same file hold out the same
    rows. Files of less than four rows have parts that are equal or empty. Of several files, the
    parts are joined.

    Attributes:
        fit: Batches to fit: for statistics and weights.
        choose: Batches to choose, which a search may measure repeatedly.
        verify: Parts to verify, which are measured once; the second part only if the first
            verification fails.
        length: Median of the lengths in tokens at which the model runs; rows of arrays keep their
            padding.
        lengths: Number of real tokens (without a mask the size of axis 1) of each row, joined rows
            included; 128 for rows without axis 1.
        source: File name, rows, tokens and checksum, for records.
        files: The data of each file if there are several; they share the batches.
        query_lengths: The lengths of queries, if rows have roles.
    """

    fit: Sequence[Batch]
    choose: Sequence[Batch]
    verify: Sequence[Sequence[Batch]]
    length: int
    source: Calibration
    lengths: Sequence[int] = ()
    files: Sequence[Dataset] = ()
    query_lengths: Sequence[int] = ()

    def of_queries(self) -> Dataset:
        """The data for a model that runs queries only: with roles, the lengths of queries."""
        if not len(self.query_lengths):
            return self
        return replace(self, length=int(np.median(self.query_lengths)), lengths=self.query_lengths)

    @property
    def to_verify(self) -> list[Batch]:
        return [batch for part in self.verify for batch in part]

    @property
    def held_out(self) -> list[Batch]:
        """All batches that are not used to fit: the batches to choose and to verify."""
        return [*self.choose, *self.to_verify]

    def file_of(self, batch: Batch) -> Dataset:
        """The data of the file of a batch."""
        name = row_info(batch).file
        return next((file for file in self.files if file.source.file == name), self)

    @cached_property
    def has_lists(self) -> bool:
        """Whether rows are lists of the documents of a query."""
        batches = (*self.fit, *self.held_out)
        return any(row_info(batch).lists is not None for batch in batches)

    @cached_property
    def length_edge(self) -> int | None:
        """The length that separates short and long texts; None if lengths are similar.

        Quality is measured for both separately, because similarities within one kind of text are
        harder to keep than similarities between kinds. Lists of documents are not separated.
        """
        if not len(self.lengths) or self.has_lists:
            return None
        low, high = np.percentile(self.lengths, (5, 95))
        edge = round(float(low * high) ** 0.5)
        short = int((np.asarray(self.lengths) <= edge).sum())
        enough = min(short, len(self.lengths) - short) >= MIN_KIND * INVERSE_HELD_OUT_SHARE
        return edge if high >= WIDE * low and enough else None


def load_inputs(
    path: Path | Sequence[Path],
    model: ir.Model,
    artifact: Artifact,
    *,
    weights: Sequence[float] = (),
    tokenizer: Path | None = None,
    sequence: Lengths | None = None,
    split: bool = True,
    read: Callable[[Path], list[str]] = read_sentences,
) -> Dataset:
    """Read a text (one sentence per line), an .npz (named input arrays) or a folder of .npz.

    For a reranker, a row of text is a query and a document (``read_listed``). All documents of a
    query are in one part if there are enough lists (``encode_listed``). A column or array ``role``
    splits the rows of other models into queries and documents: each part has rows of both.

    Args:
        path: The file or folder, or several. Each is split and measured separately. A row that one
            file holds out is not used by another file to fit or to choose.
        model: The model whose inputs are filled.
        artifact: Its artifact, for the tokenizer and the maximum length of a text.
        weights: The share of the rows to fit that each file contributes, up to a common factor.
            Rows of the other files are left out until the shares are right; without weights, all
            rows are used.
        tokenizer: Path of tokenizer.json; by default the artifact's.
        sequence: The length, or range of lengths, of the target workloads. If texts are
            much shorter, rows of mixed lengths up to it, or over the range, are made of several
            texts of the same part, in addition to the texts.
        split: Split the distinct rows into parts; False puts all rows into each part, of which
            there is one to verify.
        read: Reads the texts of a file.

    Raises:
        InvalidData: The data is empty, unreadable or does not fit the model, or text is given
            without a tokenizer.
        InvalidArgument: A file is given twice, or the weights are not one positive number for each.
    """
    paths = [path] if isinstance(path, Path) else list(path)
    check_files(paths, weights)
    files = [
        read_file(
            file_path,
            model,
            artifact,
            tokenizer=tokenizer,
            sequence=sequence,
            least_queries=LEAST_SEARCHED if split else 1,
            read=read,
        )
        for file_path in paths
    ]
    splits = [FileParts.of(file) if split else FileParts.whole(file) for file in files]
    if len(splits) == 1:
        return _file_data(splits[0], paths[0].name)
    splits = without_held_out(splits)
    if weights:
        splits = weighted(splits, weights)
    names = [p.name for p in paths]
    names = [str(p) if names.count(p.name) > 1 else p.name for p in paths]
    datasets = [_file_data(parts, name) for parts, name in zip(splits, names, strict=True)]
    sizes = [size for file in files for size in file.sizes]
    return _combined(datasets, weights, length=int(np.median(sizes)))


def _file_data(split: FileParts, name: str) -> Dataset:
    file = split.file
    roles: Sequence[Role | None] = get_args(Role) if file.roles else (None,)
    query_lengths = [file.lengths[i] for i in file.of_role(range(len(file.rows)), "query")]
    parts: list[list[Batch]] = []
    joined_lengths: list[list[int]] = []  # lengths of the joined rows of each part
    for part in split.parts:
        parts.append([])
        joined_lengths.append([])
        for role in roles:
            indices = file.of_role(part, role)
            joined = file.joiner.rows(indices) if file.joiner else []
            rows = [*(file.rows[i] for i in indices), *joined]
            parts[-1] += file.batches(rows, RowInfo(name, role))
            joined_lengths[-1] += map(len, joined)
            query_lengths += map(len, joined if role == "query" else ())
    sizes = zip(map(len, split.parts), map(len, joined_lengths), strict=True)
    counts = [*map(sum, sizes)]
    if len(parts) == 1:  # the same rows to fit, to choose and to verify
        parts, counts = parts * 3, counts * 3
    fit, choose, *verify = parts
    all_joined = [length for part in joined_lengths for length in part]
    lengths = [*file.lengths, *all_joined]
    source = Calibration(
        file=name,
        rows=len(file.rows),
        distinct_rows=len(split.distinct),
        tokens=int(sum(file.lengths)),
        fit_rows=counts[0],
        fit_tokens=sum(file.lengths[i] for i in split.parts[0]) + sum(joined_lengths[0]),
        held_out_rows=tuple(counts[1:]),
        lengths=_percentiles(lengths),
        sha256=path_sha256(file.path, "*.npz"),
        joined_rows=len(all_joined) or None,
        joined_to=file.joiner.sequence if file.joiner and all_joined else None,
        documents=len(file.of_role(split.distinct, "document")) or None,
    )
    return Dataset(
        fit=fit,
        choose=choose,
        verify=verify,
        length=int(np.median(file.sizes)),
        source=source,
        lengths=lengths,
        query_lengths=query_lengths,
    )


def _combined(datasets: Sequence[Dataset], weights: Sequence[float], *, length: int) -> Dataset:
    sources = [dataset.source for dataset in datasets]
    lengths = [length for dataset in datasets for length in dataset.lengths]
    has_roles = any(len(dataset.query_lengths) for dataset in datasets)
    query_lengths = [
        length
        for dataset in datasets
        if has_roles
        for length in dataset.query_lengths or dataset.lengths
    ]
    checksums = "".join(source.sha256 for source in sources)
    counts = ("rows", "distinct_rows", "tokens", "fit_rows", "fit_tokens")
    fields: dict[str, Any] = {
        name: sum(getattr(source, name) for source in sources) for name in counts
    }
    source = Calibration(
        file=", ".join(source.file for source in sources),
        held_out_rows=tuple(np.sum([source.held_out_rows for source in sources], 0).tolist()),
        lengths=_percentiles(lengths),
        sha256=hashlib.sha256(f"{checksums} {list(map(float, weights))}".encode()).hexdigest(),
        files=tuple(sources),
        joined_rows=sum(source.joined_rows or 0 for source in sources) or None,
        joined_to=next((source.joined_to for source in sources if source.joined_to), None),
        weights=tuple(weights),
        **fields,
    )
    return Dataset(
        fit=[batch for dataset in datasets for batch in dataset.fit],
        choose=[batch for dataset in datasets for batch in dataset.choose],
        verify=[
            [batch for part in parts for batch in part]
            for parts in zip(*(dataset.verify for dataset in datasets), strict=True)
        ],
        length=length,
        source=source,
        lengths=lengths,
        files=datasets,
        query_lengths=query_lengths,
    )


def _percentiles(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(np.percentile(lengths, (0, 5, 50, 95, 100)).round().astype(int).tolist())


def require_rows(data: Dataset, least: int, *, fix: str, code: str) -> None:
    """Check that each file has enough distinct rows, and that no part is empty.

    Raises:
        InvalidData: A file has less than ``least``, also of one role, or files hold out the rows of
            each other.
    """
    sources = [file.source for file in data.files or [data]]
    for source in sources:
        queries = source.distinct_rows - (source.documents or 0)
        if source.documents and min(queries, source.documents) < least:
            raise InvalidData(
                f"{source.file} has {queries} distinct queries and {source.documents} documents: "
                f"expected at least {least} of both to fit, to choose and to verify",
                fix,
                code=code,
            )
    smallest = min(sources, key=lambda source: source.distinct_rows)
    if smallest.distinct_rows < least:
        raise InvalidData(
            f"{smallest.file} has {smallest.distinct_rows} distinct rows: expected at least {least}"
            " to fit, to choose and to verify",
            fix,
            code=code,
        )
    if not all([data.fit, data.choose, *data.verify]):
        raise InvalidData(
            "the files have nearly the same rows: none are left for one of the parts to fit, to "
            "choose and to verify",
            f"{fix}, each row in one file",
            code=code,
        )


def content_digest(data: Dataset) -> str:
    """Checksum of all model inputs, which also depend on the tokenizer and on prompts."""
    digest = hashlib.sha256()
    for batch in (*data.fit, *data.held_out):
        for name, array in batch.items():
            digest.update(f"{name} {array.shape} {array.dtype}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()
