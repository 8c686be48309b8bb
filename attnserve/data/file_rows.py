"""Read the rows of a file of texts or of arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.data.array_files import array_batches, read_arrays, with_unequal_lengths
from attnserve.data.joined_texts import TextJoiner
from attnserve.data.query_lists import encode_listed, lists_of_rows, read_listed
from attnserve.data.row_batches import RowBatch, RowInfo
from attnserve.data.text_files import ROLE, check_roles, read_roles
from attnserve.literals import Role
from attnserve.models.artifact import Artifact
from attnserve.models.masks import token_mask
from attnserve.models.rows import filled, fixed_axes
from attnserve.models.tokenizer import Encoding, TextInput, text_input
from attnserve.models.tokenizer_files import load_encoder
from attnserve.options import Lengths
from attnserve.runtime.interface import Batch
from graph_passes.errors import InvalidData

__all__ = ["FileRows", "read_file", "wanted_inputs"]

BATCH_SIZE = 16


@dataclass(frozen=True, eq=False, kw_only=True)
class FileRows:
    """The rows of a file.

    Attributes:
        lengths: Number of real tokens of each row.
        sizes: The length at which the model runs each row.
        roles: The role of each row; empty without roles.
        batches: Makes batches of rows of one role.
        joiner: Makes longer rows of the texts; None if they are long enough.
    """

    path: Path
    rows: Sequence[Encoding | Batch]
    lengths: Sequence[int]
    sizes: Sequence[int]
    roles: Sequence[Role]
    batches: Callable[[Sequence[Any], RowInfo], list[Batch]]
    joiner: TextJoiner | None = None

    def of_role(self, indices: Sequence[int], role: Role | None) -> list[int]:
        """The rows that have a role, or none."""
        return [i for i in indices if (self.roles[i] if self.roles else None) == role]


def read_file(
    path: Path,
    model: ir.Model,
    artifact: Artifact,
    *,
    tokenizer: Path | None,
    sequence: Lengths | None,
    least_queries: int,
    read: Callable[[Path], list[str]],
) -> FileRows:
    """Read the rows of a file, for ``datasets.load_inputs``.

    Args:
        least_queries: The fewest queries whose documents are lists (``encode_listed``).

    Raises:
        InvalidData: The file is missing, empty or malformed, does not fit the model, or needs a
            tokenizer that is missing.
    """
    if not path.exists():
        raise InvalidData(f"{path}: no such file", "check the path", code="data.missing")
    if path.is_dir() or path.suffix.lower() == ".npz":
        return _read_array_file(path, model, artifact)
    inputs = wanted_inputs(model)
    fixed_rows, tokens = fixed_axes(value.shape for value in model.graph.inputs)
    encoder_path = tokenizer or artifact.tokenizer
    if encoder_path is None:
        raise InvalidData(
            f"{path.name} is text, but {artifact.folder} has no tokenizer.json",
            "pass its path as `tokenizer`, or use an .npz of input arrays",
            code="data.no_tokenizer",
        )
    encoder = load_encoder(artifact, encoder_path).with_length(tokens)
    roles: list[Role] = []
    joiner = None
    if artifact.record.task == "rerank":
        rows = encode_listed(encoder, read_listed(path, read), least_queries)
        lengths = [len(encoding) for encoding in rows]
    else:
        texts = read(path)
        roles = read_roles(path)
        if roles and len(roles) != len(texts):
            raise InvalidData(
                f"{path}: {len(roles)} texts have a role, and {len(texts)} are read",
                "leave out the column role, or columns of texts that the task does not read",
                code="data.role",
            )
        rows = encoder.encode(texts)
        lengths = [len(encoding) for encoding in rows]
        if sequence is not None:
            joiner = TextJoiner(encoder, texts, lengths, sequence)
    # Without a mask, rows cannot be padded.
    size = fixed_rows or (BATCH_SIZE if "attention_mask" in inputs else 1)

    def batches(rows: Sequence[Encoding], info: RowInfo) -> list[Batch]:
        rows = filled(rows, size) if fixed_rows else rows
        return [
            RowBatch(feed, replace(info, lists=lists_of_rows([rows[i] for i in indices])))
            for indices, feed in encoder.batches(rows, size, inputs)
        ]

    return FileRows(
        path=path,
        rows=rows,
        lengths=lengths,
        sizes=lengths,
        roles=roles,
        batches=batches,
        joiner=joiner if joiner is not None and joiner.is_needed else None,
    )


def _read_array_file(path: Path, model: ir.Model, artifact: Artifact) -> FileRows:
    """Read an .npz file, or a folder of .npz files."""
    fixed_rows, tokens = fixed_axes(value.shape for value in model.graph.inputs)
    dtypes = {name: value.dtype for name, value in wanted_inputs(model).items()}
    rows = read_arrays(path, dtypes, {} if ROLE in dtypes else {ROLE: np.dtype(str)})
    roles = _take_roles(path, rows, dtypes)
    if tokens is None:
        rows = [with_unequal_lengths(row, artifact.max_length) for row in rows]
    shapes = [next((a.shape for a in row.values() if a.ndim in (2, 3)), None) for row in rows]
    sizes = [128 if shape is None else shape[1] for shape in shapes]
    return FileRows(
        path=path,
        rows=rows,
        lengths=[
            size if shape is None else int(token_mask(row, shape[:2]).sum())
            for row, shape, size in zip(rows, shapes, sizes, strict=True)
        ],
        sizes=sizes,
        roles=roles,
        batches=partial(array_batches, size=fixed_rows or BATCH_SIZE, fill=fixed_rows is not None),
    )


def _take_roles(path: Path, rows: Sequence[Batch], wanted: Collection[str]) -> list[Role]:
    """Remove the roles from rows of arrays, and check them; empty without roles.

    Raises:
        InvalidData: Only rows of some files have a role, or ``check_roles`` refuses the roles.
    """
    found = [row.pop(ROLE, None) if ROLE not in wanted else None for row in rows]
    if all(role is None for role in found):
        return []
    roles = ["" if role is None or role.size != 1 else str(role.item()) for role in found]
    return check_roles(path, roles, [f"row {index}" for index in range(len(rows))])


def wanted_inputs(model: ir.Model) -> dict[str, TextInput]:
    """The inputs of a model by name."""
    return {
        value.name: text_input(
            value.name, np.dtype(value.dtype.numpy()), [*value.shape] if value.shape else []
        )
        for value in model.graph.inputs
        if value.name and value.name not in model.graph.initializers and value.dtype is not None
    }
