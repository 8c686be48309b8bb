"""A Triton model repository from a model: what `attnserve deploy triton` writes.

    DIR/NAME/config.pbtxt           inputs, outputs, dynamic batching, instances, warm-up
    DIR/NAME/1/model.onnx           byte for byte, and its external data beside it
    DIR/NAME/1/tokenizer.json ...   beside it, for `attnserve serve DIR` and clients; not for Triton
    DIR/NAME/warmup/...             the values of the warm-up requests

Triton batches requests of one shape only: texts of different lengths share a batch there only when
their client pads them to the same length.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.context import Provider
from attnserve.models.artifact import (
    Artifact,
    copy_companions,
    load_model,
    open_artifact,
    write_record,
)
from attnserve.models.example_inputs import example_inputs
from attnserve.models.precision import is_bfloat16, on_cpu
from attnserve.runtime.external_data import external_files
from attnserve.runtime.session import open_session
from graph_passes.errors import InvalidArgument, InvalidModel, InvalidOutput

__all__ = ["TritonModel", "Value", "write_repository"]

DATATYPES: Mapping[str, str] = {
    "tensor(bool)": "TYPE_BOOL",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(uint16)": "TYPE_UINT16",
    "tensor(uint32)": "TYPE_UINT32",
    "tensor(uint64)": "TYPE_UINT64",
    "tensor(int8)": "TYPE_INT8",
    "tensor(int16)": "TYPE_INT16",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(float16)": "TYPE_FP16",
    "tensor(float)": "TYPE_FP32",
    "tensor(double)": "TYPE_FP64",
    "tensor(bfloat16)": "TYPE_BF16",
}
"""What ONNX Runtime and Triton call the same type."""

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
VERSION = "1"
DEFAULT_MAX_BATCH = 32
MAX_QUEUE = 512
"""Requests that wait; past it Triton answers "unavailable", as our own server answers 429."""

WARM_UP_TOKENS = 128
SHAPES = ((1, 8), (3, 7))
"""Rows and tokens of two runs that show which axes of an output follow the rows of the inputs."""


@dataclass(frozen=True)
class Value:
    """An input or output as config.pbtxt names it; ``dims`` without the batch axis, -1 for any."""

    name: str
    datatype: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class TritonModel:
    """What was written.

    Attributes:
        folder: DIR/NAME.
        max_batch_size: 0 where Triton passes requests on one by one, batch axis included.
        instances: Runs at once.
    """

    folder: Path
    name: str
    max_batch_size: int
    instances: int
    provider: Provider
    threads: int
    max_delay_us: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder)}


def write_repository(
    model: Path,
    repository: Path,
    *,
    name: str | None = None,
    max_batch: int | None = None,
    instances: int = 1,
    provider: Provider = "cpu",
    threads: int = 0,
    max_delay_us: int = 0,
    force: bool = False,
) -> TritonModel:
    """Write one model into a Triton repository: all of it, or nothing.

    The model is run here, on the CPU, before anything is written.

    Args:
        model: An .onnx file or an artifact folder.
        repository: Triton's --model-repository; made where missing. Other models stay.
        name: Of the model there; the artifact's own by default.
        max_batch: Rows of a batch; 0 for no batching, None for 32 where the model can batch.
        instances: Copies of the model that run at once, on the CPU or on every GPU.
        provider: Where Triton runs it.
        threads: Of one run on the CPU; 0 leaves it to ONNX Runtime.
        max_delay_us: Microseconds a request may wait for its batch to fill.
        force: Replace the model where it is there already.

    Raises:
        InvalidModel: The model cannot be read or run, or has a value that Triton has no type for.
        InvalidArgument: The name is no folder's name, a number is negative, or the model cannot
            run in batches as asked.
        InvalidOutput: The model is there already, or the place cannot be written.
    """
    artifact = open_artifact(model)
    called = name if name is not None else artifact.name
    _check_arguments(called, max_batch, instances, threads, max_delay_us)
    folder = repository / called
    _check_place(folder, artifact, force=force)
    graph = load_model(artifact)
    shown = _examine(artifact, graph, provider)
    if max_batch and not shown.batches:
        raise InvalidArgument(
            f"--max-batch {max_batch}: the rows of {artifact.name}'s outputs do not follow those of"
            " its inputs, so that requests cannot share a run",
            "use --max-batch 0",
        )
    rows = (DEFAULT_MAX_BATCH if shown.batches else 0) if max_batch is None else max_batch
    written = TritonModel(
        folder=folder,
        name=called,
        max_batch_size=rows,
        instances=instances,
        provider=provider,
        threads=threads,
        max_delay_us=max_delay_us,
        inputs=tuple(_without_batch(value, rows) for value in shown.inputs),
        outputs=tuple(_without_batch(value, rows) for value in shown.outputs),
    )
    _write(written, artifact, graph, shown.warm_up, force=force)
    return written


@dataclass(frozen=True)
class _Shown:
    """What two runs showed: values with all their axes, and whether rows can share a run.

    ``warm_up`` is one row that runs, as long as a usual text where the model takes that.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    batches: bool
    warm_up: Mapping[str, np.ndarray]


def _examine(artifact: Artifact, graph: ir.Model, provider: Provider) -> _Shown:
    elsewhere = provider == "cuda" and is_bfloat16(graph)  # which no CPU runs as it is
    session = open_session(on_cpu(graph) if elsewhere else artifact.model)
    inputs, outputs = session.get_inputs(), session.get_outputs()
    names = [value.name for value in outputs]
    runs: list[tuple[int, list[np.ndarray]]] = []
    warm_up: Mapping[str, np.ndarray] = {}
    for rows, tokens in SHAPES:
        try:
            feeds = example_inputs(graph, rows, tokens)
        except InvalidArgument:  # an axis is fixed: the graph's own size is all that it takes
            if runs:
                break
            rows = _fixed(graph, 0, rows)
            feeds = example_inputs(graph, rows, _fixed(graph, 1, tokens))
        try:
            runs.append((rows, [np.asarray(value) for value in session.run(names, feeds)]))
        except Exception as error:  # onnxruntime raises a class of its own for each status
            raise InvalidModel(
                f"{artifact.model}: ONNX Runtime cannot run it: {str(error)[:300]}",
                "check the file with `attnserve inspect`, or export it again",
            ) from error
        warm_up = warm_up or feeds
    with suppress(Exception):  # fewer positions than that: the short row stays
        usual = min(WARM_UP_TOKENS, artifact.max_length or WARM_UP_TOKENS)
        feeds = example_inputs(graph, 1, usual)
        session.run(names, feeds)
        warm_up = feeds
    free = all(value.shape and not isinstance(value.shape[0], int) for value in inputs)
    follow = all(
        array.ndim > 0 and array.shape[0] == rows for rows, arrays in runs for array in arrays
    )
    return _Shown(
        inputs=tuple(_value(value, warm_up[value.name].ndim) for value in inputs),
        outputs=tuple(
            _value(value, array.ndim) for value, array in zip(outputs, runs[-1][1], strict=True)
        ),
        batches=free and follow and len(runs) == len(SHAPES),
        warm_up=warm_up,
    )


def _fixed(graph: ir.Model, axis: int, otherwise: int) -> int:
    """The size that the graph's inputs of two axes or more have there."""
    for value in graph.graph.inputs:
        if value.shape is not None and len(value.shape) > 1 and isinstance(value.shape[axis], int):
            return int(value.shape[axis])  # pyright: ignore[reportArgumentType]
    return otherwise


def _value(value: Any, rank: int) -> Value:
    if value.type not in DATATYPES:
        raise InvalidModel(
            f"{value.name!r} is a {value.type}: Triton serves tensors of numbers and booleans",
            "export the model without it",
        )
    # ONNX Runtime says no axes for a scalar and for a tensor of unknown rank alike: a run knows.
    axes = value.shape if len(value.shape) == rank else [None] * rank
    dims = tuple(axis if isinstance(axis, int) else -1 for axis in axes)
    return Value(value.name, DATATYPES[value.type], dims)


def _without_batch(value: Value, rows: int) -> Value:
    return Value(value.name, value.datatype, value.dims[1:]) if rows else value


def _check_arguments(
    name: str, max_batch: int | None, instances: int, threads: int, max_delay_us: int
) -> None:
    if not NAME.fullmatch(name):
        raise InvalidArgument(
            f"--name {name!r}: expected letters, digits, '.', '_' and '-', at most 128",
            "give another --name",
        )
    for option, number, least in (
        ("--max-batch", max_batch or 0, 0),
        ("--instances", instances, 1),
        ("--threads", threads, 0),
        ("--max-delay-us", max_delay_us, 0),
    ):
        if number < least:
            raise InvalidArgument(f"{option} {number}: expected at least {least}", "raise it")


def _check_place(folder: Path, artifact: Artifact, *, force: bool) -> None:
    """Refuse to overwrite what is there; with ``force``, what is no model of ours."""
    source = artifact.folder.resolve()
    if source == folder.resolve() or folder.resolve() in source.parents:
        raise InvalidOutput(f"{folder}: the output holds the input", "choose another DIR or --name")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InvalidOutput(f"{folder}: is there already, and no folder", "choose another --name")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not force:
        raise InvalidOutput(f"{folder}: exists already", "choose another --name, or add --force")
    known = {"config.pbtxt", VERSION, "warmup"}
    other = sorted(path.name for path in folder.iterdir() if path.name not in known)
    if other or not (folder / "config.pbtxt").is_file():
        raise InvalidOutput(
            f"{folder}: holds {other[0] if other else 'no config.pbtxt'}, so it was not written"
            " here, and --force would lose it",
            "choose another --name, or remove the folder",
        )


def _write(
    written: TritonModel,
    artifact: Artifact,
    graph: ir.Model,
    warm_up: Mapping[str, np.ndarray],
    *,
    force: bool,
) -> None:
    folder, repository = written.folder, written.folder.parent
    stage: Path | None = None
    made = [path for path in (repository, *repository.parents) if not path.exists()]
    try:
        repository.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=".attnserve-", dir=repository))
        new = stage / "new"
        (new / VERSION).mkdir(parents=True)
        _copy_model(artifact, graph, new / VERSION)
        (new / "warmup").mkdir()
        for index, value in enumerate(written.inputs):
            content = np.ascontiguousarray(warm_up[value.name]).tobytes()
            (new / "warmup" / f"input_{index}").write_bytes(content)
        (new / "config.pbtxt").write_text(_config(written, warm_up), encoding="ascii")
        if folder.exists():  # empty, or with --force
            folder.rename(stage / "old")
        new.rename(folder)
    except OSError as error:
        raise InvalidOutput(
            f"{folder}: writing failed: {error.strerror or error}",
            "free some space, or choose another DIR",
        ) from error
    finally:
        if stage is not None:
            if (stage / "old").exists() and not folder.exists():
                (stage / "old").rename(folder)
            shutil.rmtree(stage, ignore_errors=True)
        with suppress(OSError):  # folders that were made here and hold nothing go again
            for path in made:
                path.rmdir()


def _copy_model(artifact: Artifact, graph: ir.Model, folder: Path) -> None:
    shutil.copyfile(artifact.model, folder / "model.onnx")
    base = artifact.folder.resolve()
    for path in external_files(graph):
        relative = (base / path).resolve().relative_to(base)
        if relative == Path("model.onnx") != Path(artifact.model.name):
            raise InvalidModel(
                f"{artifact.model}: keeps weights in a file called model.onnx",
                "save it with its external data under another name",
            )
        (folder / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base / relative, folder / relative)
    copy_companions(artifact, folder)
    if artifact.record:
        record = dict(artifact.record)
        if isinstance(files := record.get("files"), dict):
            record["files"] = {
                "model.onnx" if name == artifact.model.name else name: checksum
                for name, checksum in files.items()
            }
        write_record(folder, record)


def _config(written: TritonModel, feeds: Mapping[str, np.ndarray]) -> str:
    kind = "KIND_GPU" if written.provider == "cuda" else "KIND_CPU"
    fields: list[tuple[str, Any]] = [
        ("name", written.name),
        ("backend", "onnxruntime"),
        ("max_batch_size", written.max_batch_size),
        *(("input", _described(value)) for value in written.inputs),
        *(("output", _described(value)) for value in written.outputs),
        ("instance_group", [("count", written.instances), ("kind", _Enum(kind))]),
    ]
    if written.max_batch_size:
        policy = [("max_queue_size", MAX_QUEUE)]
        fields.append(
            (
                "dynamic_batching",
                [
                    ("max_queue_delay_microseconds", written.max_delay_us),
                    ("default_queue_policy", policy),
                ],
            )
        )
    if written.threads:
        parameter = [
            ("key", "intra_op_thread_count"),
            ("value", [("string_value", str(written.threads))]),
        ]
        fields.append(("parameters", parameter))
    for rows in dict.fromkeys((1, written.max_batch_size or 1)):
        inputs = [
            (
                "inputs",
                [
                    ("key", value.name),
                    (
                        "value",
                        [
                            ("data_type", _Enum(value.datatype)),
                            ("dims", _warm_up_dims(written, feeds[value.name])),
                            ("input_data_file", f"input_{index}"),
                        ],
                    ),
                ],
            )
            for index, value in enumerate(written.inputs)
        ]
        fields.append(("model_warmup", [("name", f"rows_{rows}"), ("batch_size", rows), *inputs]))
    return "\n".join(_lines(fields)) + "\n"


def _warm_up_dims(written: TritonModel, array: np.ndarray) -> list[int]:
    return list(array.shape[1:] if written.max_batch_size else array.shape) or [1]


def _described(value: Value) -> list[tuple[str, Any]]:
    fields: list[tuple[str, Any]] = [("name", value.name), ("data_type", _Enum(value.datatype))]
    if value.dims:
        return [*fields, ("dims", list(value.dims))]
    # Triton knows no scalars: one number, of which the runtime sees no axis.
    return [*fields, ("dims", [1]), ("reshape", [("shape", [])])]


class _Enum(str):
    """A word of protobuf's text format that is written without quotes."""


def _lines(fields: Sequence[tuple[str, Any]], indent: str = "") -> Iterator[str]:
    """Protobuf's text format: scalars, enums, lists of numbers, and messages as lists of fields."""
    for key, value in fields:
        match value:
            case _Enum() | int():
                yield f"{indent}{key}: {value}"
            case str():
                yield f"{indent}{key}: {_quoted(value)}"
            case [] | [int(), *_]:
                yield f"{indent}{key}: [{', '.join(map(str, value))}]"
            case _:
                yield f"{indent}{key} {{"
                yield from _lines(value, f"{indent}  ")
                yield f"{indent}}}"


def _quoted(text: str) -> str:
    """Any string, in printable ASCII: other bytes as three octal digits."""
    plain = (
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}"
        for byte in text.encode()
    )
    return f'"{"".join(plain)}"'
