"""Read model inputs from text or .npz files, and split them into a part to fit and held-out parts.

The held-out parts are the rows to choose, and two parts of rows to verify.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import onnx_ir as ir

from attnserve.data.array_files import array_batches, read_arrays, with_unequal_lengths
from attnserve.data.lengths import length_bounds
from attnserve.data.query_lists import (
    Lists,
    encode_listed,
    lists_of_rows,
    read_listed,
    together,
)
from attnserve.data.text_files import ROLE, check_roles, read_roles, read_sentences
from attnserve.literals import Role
from attnserve.models.artifact import Artifact
from attnserve.models.checksums import path_sha256
from attnserve.models.lineage import Calibration
from attnserve.models.masks import token_mask
from attnserve.models.recorded import present
from attnserve.models.rows import filled, fixed_axes, row_content
from attnserve.models.tokenizer import (
    Encoding,
    TextEncoder,
    TextInput,
    load_encoder,
    text_input,
)
from attnserve.options import Lengths, check_files
from attnserve.runtime.interface import Batch
from graph_passes.errors import InvalidData

__all__ = [
    "HELD_OUT",
    "JOINED",
    "Dataset",
    "content_digest",
    "load_inputs",
    "require_rows",
    "thinned",
    "wanted_inputs",
]

BATCH_SIZE = 16

HELD_OUT = 7
"""Inverse share of the distinct rows in each held-out part."""

MOST_HELD_OUT = 400
"""Maximum number of rows of a held-out part."""

WIDE = 4
"""Ratio of the 95th to the 5th percentile of lengths from which short and long texts are measured
separately."""

JOINED = 4
"""Texts are joined for lengths that are at least this many times their median length: MiniLM keeps
0.99 of the cosine of sentences and 0.79 of paragraphs if it is calibrated on sentences alone."""

MIN_KIND = 10
"""Minimum number of short (and of long) texts in a held-out part to measure them separately."""

PATCHES = 64
"""The assumed number of tokens of an image."""

HELD_OUT_PARTS = 3
"""Number of held-out parts: to choose, to verify, and to verify again if the first verification
fails."""

LEAST_SEARCHED = 2 * HELD_OUT
"""Minimum number of distinct rows of a file for a search: two in each held-out part, because
qualities are relative to the variation between rows."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Model inputs in batches of similar length, in disjoint parts of distinct rows.

    The parts depend on the file alone, so that other commands with the same file hold out the same
    rows. Files of less than four rows have parts that are equal or empty. Of several files, the
    parts are joined.

    Attributes:
        fit: Batches to fit: for statistics and weights.
        choose: Batches to choose, which a search may measure repeatedly.
        verify: Parts to verify, which are measured once; the second one only if the first
            verification fails.
        length: Median of the lengths in tokens at which the model runs; rows of arrays keep their
            padding.
        lengths: Number of real tokens (without a mask the size of axis 1) of each row, joined rows
            included; 128 for rows without axis 1.
        source: File name, rows, tokens and checksum, for records.
        files: The data of each file if there are several; they share the batches.
        lists: The lists of documents of a query that rows of a batch belong to, by the id of the
            batch; empty if the rows are not lists.
        query_lengths: The lengths of queries, if rows have roles.
        documents: Identities of the batches that hold documents, if rows have roles: each batch
            then has rows of one role.
    """

    fit: Sequence[Batch]
    choose: Sequence[Batch]
    verify: Sequence[Sequence[Batch]]
    length: int
    source: Calibration
    lengths: Sequence[int] = ()
    files: Sequence[Dataset] = ()
    lists: Mapping[int, Lists] = field(default_factory=dict[int, Lists])
    query_lengths: Sequence[int] = ()
    documents: Collection[int] = ()

    def role_of(self, batch: Batch) -> Role | None:
        """The role of the rows of a batch; None without roles."""
        file = self.file_of(batch)
        if not len(file.query_lengths):
            return None
        return "document" if id(batch) in file.documents else "query"

    def of_queries(self) -> Dataset:
        """The data for a model that runs queries only: with roles, the lengths of queries."""
        if not len(self.query_lengths):
            return self
        return replace(self, length=int(np.median(self.query_lengths)), lengths=self.query_lengths)

    @property
    def held_out(self) -> list[Batch]:
        """All batches to verify: the held-out ones except those to choose."""
        return [batch for part in self.verify for batch in part]

    def file_of(self, batch: Batch) -> Dataset:
        """The data of the file that a batch comes from."""
        return self._files.get(id(batch), self)

    def lists_of(self, batch: Batch) -> Lists | None:
        """The lists that the rows of a batch belong to; None if they are not lists."""
        return self.file_of(batch).lists.get(id(batch))

    @cached_property
    def _files(self) -> dict[int, Dataset]:
        return {
            id(batch): file
            for file in self.files
            for batch in (*file.fit, *file.choose, *file.held_out)
        }

    @cached_property
    def length_edge(self) -> int | None:
        """The length that separates short and long texts; None if lengths are similar.

        Quality is measured for both separately, because similarities within one kind of text are
        harder to keep than those between kinds. Lists of documents are not separated.
        """
        if not len(self.lengths) or self.lists:
            return None
        low, high = np.percentile(self.lengths, (5, 95))
        edge = round(float(low * high) ** 0.5)
        short = int((np.asarray(self.lengths) <= edge).sum())
        enough = min(short, len(self.lengths) - short) >= MIN_KIND * HELD_OUT
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
        path: The file or folder, or several of them. Each is split and measured separately.
            A row that one file holds out is not used by another one to fit or to choose.
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
        _read_file(
            one,
            model,
            artifact,
            tokenizer=tokenizer,
            sequence=sequence,
            split=split,
            read=read,
        )
        for one in paths
    ]
    if len(files) == 1:
        return files[0].dataset(paths[0].name)
    _drop_held_out(files)
    if weights:
        _apply_weights(files, weights)
    names = [one.name for one in paths]
    names = [str(p) if names.count(p.name) > 1 else p.name for p in paths]
    datasets = [file.dataset(name) for file, name in zip(files, names, strict=True)]
    return _combined(files, datasets, weights)


@dataclass(eq=False)
class _File:
    """The rows of a file.

    Attributes:
        lengths: Number of real tokens of each row.
        sizes: The length at which the model runs each row.
        parts: Indices of the rows to fit, to choose and to verify.
        is_split: Whether the parts differ.
        join: Makes longer rows of the texts of a part.
        batches: Makes batches of rows, and adds their lists to ``lists``.
        roles: The role of each row; empty without roles.
    """

    path: Path
    rows: Sequence[Encoding | Batch]
    lengths: Sequence[int]
    sizes: Sequence[int]
    distinct: Sequence[int]
    parts: list[list[int]]
    is_split: bool
    sequence: Lengths | None
    join: Callable[[Sequence[int]], list[Encoding]] | None
    batches: Callable[[Sequence[Any]], list[Batch]]
    lists: dict[int, Lists]
    roles: Sequence[Role] = ()

    def of_role(self, part: Sequence[int]) -> tuple[list[int], list[int]]:
        """The queries and the documents of a part; without roles, all rows are queries."""
        documents = [i for i in part if self.roles and self.roles[i] == "document"]
        return [i for i in part if not self.roles or self.roles[i] == "query"], documents

    def dataset(self, name: str) -> Dataset:
        split_parts = [self.of_role(part) for part in self.parts]
        joined_rows = [
            [[] if self.join is None or not some else self.join(some) for some in part]
            for part in split_parts
        ]
        parts = [
            [
                [*(self.rows[i] for i in some), *more]
                for some, more in zip(part, rows_of_part, strict=True)
            ]
            for part, rows_of_part in zip(split_parts, joined_rows, strict=True)
        ]
        more_lengths = [len(row) for part in joined_rows for some in part for row in some]
        all_lengths = [*self.lengths, *more_lengths]
        query_lengths = [self.lengths[i] for i in self.of_role(range(len(self.rows)))[0]]
        query_lengths += [len(row) for queries, _ in joined_rows for row in queries]
        counts: dict[str, Any] = {"joined_rows": len(more_lengths), "joined_to": self.sequence}
        source = Calibration(
            file=name,
            rows=len(self.rows),
            distinct_rows=len(self.distinct),
            tokens=int(sum(self.lengths)),
            fit_rows=sum(map(len, parts[0])),
            fit_tokens=sum(self.lengths[i] for i in self.parts[0])
            + sum(len(row) for some in joined_rows[0] for row in some),
            held_out_rows=tuple(sum(map(len, part)) for part in parts[1:]),
            lengths=_percentiles(all_lengths),
            sha256=path_sha256(self.path, "*.npz"),
            **(counts if more_lengths else {}),
            **present(documents=len(self.of_role(self.distinct)[1])),
        )
        made = [[self.batches(some) if some else [] for some in part]
                for part in (parts if self.is_split else parts[:1])]  # fmt: skip
        made = made if self.is_split else made * len(parts)
        fit, choose, *verify = ([*queries, *documents] for queries, documents in made)
        return Dataset(
            fit, choose, verify, int(np.median(self.sizes)), source, all_lengths,
            query_lengths=query_lengths if self.roles else (),
            lists=self.lists,
            documents={id(batch) for _, documents in made for batch in documents},
        )  # fmt: skip


def _read_file(
    path: Path,
    model: ir.Model,
    artifact: Artifact,
    *,
    tokenizer: Path | None,
    sequence: Lengths | None,
    split: bool,
    read: Callable[[Path], list[str]],
) -> _File:
    if not path.exists():
        raise InvalidData(f"{path}: no such file", "check the path", code="data.missing")
    inputs = wanted_inputs(model)
    fixed_rows, tokens = fixed_axes(value.shape for value in model.graph.inputs if value.shape)
    size = fixed_rows or BATCH_SIZE
    join: Callable[[Sequence[int]], list[Encoding]] | None = None
    lists: dict[int, Lists] = {}
    rows: Sequence[Encoding | Batch]
    if path.is_dir() or path.suffix.lower() == ".npz":
        dtypes = {name: value.dtype for name, value in inputs.items()}
        arrays = read_arrays(path, dtypes, {} if ROLE in dtypes else {ROLE: np.dtype(str)})
        roles = _take_roles(path, arrays, dtypes)
        if tokens is None:
            arrays = [with_unequal_lengths(row, artifact.max_length) for row in arrays]
        rows = arrays
        shapes = [next((a.shape for a in row.values() if a.ndim in (2, 3)), None) for row in arrays]
        sizes = [128 if shape is None else shape[1] for shape in shapes]
        lengths = [
            size if shape is None else int(token_mask(row, shape[:2]).sum())
            for row, shape, size in zip(arrays, shapes, sizes, strict=True)
        ]
        make = partial(array_batches, size=size, fill=fixed_rows is not None)
    else:
        encoder_path = tokenizer or artifact.tokenizer
        if encoder_path is None:
            raise InvalidData(
                f"{path.name} is text, but {artifact.folder} has no tokenizer.json",
                "pass its path as `tokenizer`, or use an .npz of input arrays",
                code="data.no_tokenizer",
            )
        encoder = load_encoder(artifact, encoder_path).with_length(tokens)
        are_pairs = artifact.record.task == "rerank"
        texts = [] if are_pairs else read(path)
        roles = [] if are_pairs else read_roles(path)
        if roles and len(roles) != len(texts):
            raise InvalidData(
                f"{path}: {len(roles)} texts have a role, and {len(texts)} are read",
                "leave out the column role, or columns of texts that the task does not read",
                code="data.role",
            )
        if are_pairs:
            rows = encode_listed(encoder, read_listed(path, read), LEAST_SEARCHED if split else 1)
        else:
            rows = encoder.encode(texts)
        lengths = sizes = [len(encoding) for encoding in rows]
        if sequence is not None and not are_pairs:
            median = float(np.median(lengths))
            shortest, longest = length_bounds(sequence)
            longest = min(longest, encoder.max_length or longest)
            if longest >= JOINED * median:
                shortest = 2 * median if isinstance(sequence, int) else max(2 * median, shortest)
                join = partial(_joined, encoder, texts, lengths, shortest, longest)
        if "attention_mask" not in inputs:
            size = fixed_rows or 1  # without a mask, rows cannot be padded
        make = partial(
            _text_batches, encoder, inputs=inputs, size=size, fill=fixed_rows is not None,
            lists=lists,
        )  # fmt: skip
    everything = range(len(rows))
    distinct = _distinct(rows, roles) if split else everything
    places = [list(everything)] * 3
    if split:  # each part has rows of both roles
        strata = [[i for i in distinct if roles[i] == r] for r in get_args(Role)] if roles else []
        split_strata = [
            _split_groups(together(rows, stratum), lengths) for stratum in strata or [distinct]
        ]
        places = [[i for part in parts for i in part] for parts in zip(*split_strata, strict=True)]
    batches = cast(Callable[[Sequence[Any]], list[Batch]], make)
    return _File(
        path, rows, lengths, sizes, distinct, places, split, sequence, join, batches, lists, roles
    )


def _split_groups(groups: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
    """The rows of each part; all rows of a group are in one part (``_split``)."""
    mean_lengths = [sum(lengths[i] for i in group) // len(group) for group in groups]
    return [[i for number in part for i in groups[number]] for part in _split(mean_lengths)]


def _take_roles(path: Path, rows: Sequence[Batch], wanted: Collection[str]) -> list[Role]:
    """Remove the roles from rows of arrays, and check them; empty without roles.

    Raises:
        InvalidData: Rows of some files have a role, or see ``check_roles``.
    """
    found = [row.pop(ROLE, None) if ROLE not in wanted else None for row in rows]
    if all(role is None for role in found):
        return []
    roles = ["" if role is None or role.size != 1 else str(role.item()) for role in found]
    return check_roles(path, roles, [f"row {index}" for index in range(len(rows))])


def _drop_held_out(files: Sequence[_File]) -> None:
    """Remove rows that another file has in a later part (to choose or to verify)."""
    contents = [
        [[(index, _content(file.rows[index])) for index in part] for part in file.parts]
        for file in files
    ]
    for file, file_contents in zip(files, contents, strict=True):
        others = [parts for parts in contents if parts is not file_contents]
        for level, part in enumerate(file_contents):
            later_contents = {c for parts in others for rows in parts[level + 1 :] for _, c in rows}
            file.parts[level] = [index for index, content in part if content not in later_contents]


def _apply_weights(files: Sequence[_File], weights: Sequence[float]) -> None:
    """Keep as many rows to fit as possible, in the shares of the weights and of all lengths."""
    for file in files:
        if not file.parts[0]:
            raise InvalidData(
                f"{file.path.name}: the other files have all its rows to fit among those held out",
                "leave the file out, or give it rows of its own",
                code="data.no_fit",
            )
    least = min(len(file.parts[0]) / weight for file, weight in zip(files, weights, strict=True))
    for file, weight in zip(files, weights, strict=True):
        fit = file.parts[0]
        count = min(max(round(weight * least), 1), len(fit))
        random = np.random.default_rng(len(fit))
        strata = _strata([file.lengths[i] for i in fit], count, random)
        file.parts[0] = sorted(fit[random.choice(stratum)] for stratum in strata)


def _combined(
    files: Sequence[_File], datasets: Sequence[Dataset], weights: Sequence[float]
) -> Dataset:
    """One dataset of several files."""
    sources = [dataset.source for dataset in datasets]
    lengths = [length for dataset in datasets for length in dataset.lengths]
    has_roles = any(len(dataset.query_lengths) for dataset in datasets)
    query_lengths = [
        length
        for dataset in datasets if has_roles
        for length in dataset.query_lengths or dataset.lengths
    ]  # fmt: skip
    checksums = "".join(source.sha256 for source in sources)
    counts = ("rows", "distinct_rows", "tokens", "fit_rows", "fit_tokens")
    fields: dict[str, Any] = {
        name: sum(getattr(source, name) for source in sources) for name in counts
    }
    if joined_sources := [source for source in sources if source.joined_rows]:
        fields["joined_rows"] = sum(source.joined_rows for source in joined_sources)
        fields["joined_to"] = joined_sources[0].joined_to
    if weights:
        fields["weights"] = tuple(weights)
    source = Calibration(
        file=", ".join(source.file for source in sources),
        held_out_rows=tuple(np.sum([source.held_out_rows for source in sources], 0).tolist()),
        lengths=_percentiles(lengths),
        sha256=hashlib.sha256(f"{checksums} {list(map(float, weights))}".encode()).hexdigest(),
        files=tuple(sources),
        **fields,
    )
    return Dataset(
        fit=[batch for dataset in datasets for batch in dataset.fit],
        choose=[batch for dataset in datasets for batch in dataset.choose],
        verify=[
            [batch for part in parts for batch in part]
            for parts in zip(*(dataset.verify for dataset in datasets), strict=True)
        ],
        length=int(np.median([size for file in files for size in file.sizes])),
        source=source,
        lengths=lengths,
        files=datasets,
        query_lengths=query_lengths,
    )


def _percentiles(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(np.percentile(lengths, (0, 5, 50, 95, 100)).round().astype(int).tolist())


def _joined(
    encoder: TextEncoder,
    texts: Sequence[str],
    lengths: Sequence[int],
    shortest: float,
    longest: int,
    indices: Sequence[int],
) -> list[Encoding]:
    """Rows of several texts each, with lengths spread evenly by their logarithm over a range.

    Each text is part of at most one row. A text that is long enough alone is left out, because its
    row exists already.
    """
    random = np.random.default_rng(len(indices))
    special = encoder.special_tokens  # each row has them once
    groups: list[list[str]] = []
    remaining_tokens = 0.0
    for index in map(int, random.permutation(np.asarray(indices, int))):
        if remaining_tokens <= 0:
            groups.append([])
            remaining_tokens = shortest * (longest / shortest) ** random.random() - special
        groups[-1].append(texts[index])
        remaining_tokens -= lengths[index] - special
    joined_texts = [" ".join(group) for group in groups if len(group) > 1]
    return encoder.encode(joined_texts, max_length=longest) if joined_texts else []


def require_rows(data: Dataset, least: int, *, fix: str, code: str) -> None:
    """Check that each file has enough distinct rows, and that no part is empty.

    Raises:
        InvalidData: A file has less than ``least``, also of one role, or files hold out the rows of
            each other.
    """
    sources = [file.source for file in data.files or [data]]
    for source in sources:
        queries = source.distinct_rows - source.documents
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
    for batch in (*data.fit, *data.choose, *data.held_out):
        for name, array in batch.items():
            digest.update(f"{name} {array.shape} {array.dtype}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def thinned(batches: Sequence[Batch], tokens: int) -> list[Batch]:
    """Evenly spaced batches with about this many tokens, at least one; all if they have fewer."""
    counts = [_token_count(batch) for batch in batches]
    wanted = max(round(len(batches) * tokens / max(sum(counts), 1)), 1)
    if wanted >= len(batches):
        return list(batches)
    places = (np.arange(wanted) + 0.5) * len(batches) / wanted
    return [batches[int(place)] for place in places]


def _token_count(batch: Batch) -> int:
    """The number of real tokens; rows that are not sequences of ids count as an image's patches."""
    ids = next((x for x in batch.values() if x.ndim == 2 and x.dtype.kind in "iu"), None)
    if ids is not None:
        return int(token_mask(batch, ids.shape).sum())
    return PATCHES * max((len(x) for x in batch.values() if x.ndim), default=1)


def _distinct(rows: Sequence[Encoding | Batch], roles: Sequence[Role]) -> list[int]:
    """The index of the first of equal rows of one role, as the model sees them."""
    first: dict[tuple[bytes, Role | None], int] = {}
    for index, row in enumerate(rows):
        first.setdefault((_content(row), roles[index] if roles else None), index)
    return list(first.values())


def _content(row: Encoding | Batch) -> bytes:
    """A checksum of a row as the model sees it."""
    if isinstance(row, Encoding):
        content = np.asarray([row.ids, row.type_ids]).tobytes()
    else:
        content = row_content(row)
    return hashlib.sha256(content).digest()


def _split(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the rows (or lists) to fit, then of the rows of each held-out part, by length.

    Rows are sorted by length and cut into strata; each held-out part has one random row of each
    stratum, so that all parts have similar lengths and come from the whole file.
    """
    rows = len(lengths)
    if rows < HELD_OUT_PARTS + 1:
        last = [rows - 1]
        return [list(range(max(rows - 1, 1))), last, last, []]
    random = np.random.default_rng(rows)
    count = min(max(rows // HELD_OUT, 1), MOST_HELD_OUT)
    held: list[list[int]] = [[] for _ in range(HELD_OUT_PARTS)]
    for stratum in _strata(lengths, count, random):
        for part, index in zip(held, random.permutation(stratum), strict=False):
            part.append(int(index))
    taken = {index for part in held for index in part}
    return [[index for index in range(rows) if index not in taken], *map(sorted, held)]


def _strata(
    lengths: Sequence[int], count: int, random: np.random.Generator
) -> list[np.ndarray[Any, Any]]:
    """Indices in groups of similar length; those of equal length are in random order."""
    order = np.lexsort((random.permutation(len(lengths)), np.asarray(lengths)))
    return np.array_split(order, count)


def wanted_inputs(model: ir.Model) -> dict[str, TextInput]:
    """The inputs of a model by name."""
    return {
        value.name: text_input(
            value.name, np.dtype(value.dtype.numpy()), [*value.shape] if value.shape else []
        )
        for value in model.graph.inputs
        if value.name and value.name not in model.graph.initializers and value.dtype is not None
    }


def _text_batches(
    encoder: TextEncoder,
    rows: Sequence[Encoding],
    *,
    inputs: Mapping[str, TextInput],
    size: int,
    fill: bool,
    lists: dict[int, Lists],
) -> list[Batch]:
    rows = filled(rows, size) if fill else rows
    batches: list[Batch] = []
    for indices, feed in encoder.batches(rows, size, inputs):
        batches.append(feed)
        if (of_batch := lists_of_rows([rows[i] for i in indices])) is not None:
            lists[id(feed)] = of_batch
    return batches
