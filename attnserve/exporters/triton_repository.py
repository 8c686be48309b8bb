"""Write a Triton model repository (`attnserve deploy triton`).

    DIR/NAME/config.pbtxt           inputs, outputs, dynamic batching, instances, warm-up
    DIR/NAME/1/model.onnx           a copy of the model, with its external data beside it
    DIR/NAME/1/tokenizer.json ...   for `attnserve serve DIR` and clients; Triton ignores them
    DIR/NAME/warmup/...             values of the warm-up requests

Triton batches only requests of equal shape: texts of different lengths share a batch if their
client pads them to one length.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.context import Provider
from attnserve.models.artifact import Artifact, copy_companions, open_artifact
from attnserve.models.example_inputs import example_inputs
from attnserve.models.onnx_files import external_data_locations, load_model
from attnserve.models.outputs import staging_folder
from attnserve.models.quantized import batch_invariant
from attnserve.models.record import write_record
from attnserve.models.rows import fixed_axes
from attnserve.precision.convert import is_bfloat16, on_cpu
from attnserve.runtime.interface import RunFailed
from attnserve.runtime.session import open_session
from attnserve.serving.tensor_codec import NAMES, ONNX_TYPES
from graph_passes.analysis.workload import Workload
from graph_passes.errors import (
    AttnserveError,
    InvalidArgument,
    InvalidModel,
    InvalidOutput,
    Refusal,
)

__all__ = ["TritonModel", "Value", "write_repository"]

DATATYPES: Mapping[str, str] = {
    **{name: f"TYPE_{NAMES[dtype]}" for name, dtype in ONNX_TYPES.items()},
    "tensor(bfloat16)": "TYPE_BF16",
}
"""Triton's name of each tensor type of ONNX Runtime."""

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
"""The pattern of a model's name, which is also the name of its folder."""

VERSION = "1"
"""The folder of the only version."""

DEFAULT_MAX_BATCH = 32
"""Maximum batch size of a model that can batch, by default."""

MAX_QUEUE = 512
"""Maximum number of waiting requests; Triton refuses more as "unavailable"."""

WARM_UP_TOKENS = 128
"""Number of tokens of a warm-up request."""

SHAPES = ((1, 8), (3, 7))
"""Rows and tokens of two runs that show whether the first axis of every output is the batch."""


@dataclass(frozen=True)
class Value:
    """An input or output in config.pbtxt.

    Attributes:
        name: The name in the graph.
        datatype: Triton's name of the type.
        dims: The sizes of the axes without the batch axis; -1 for any size.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class TritonModel:
    """The model that was written, and its configuration.

    Attributes:
        folder: DIR/NAME.
        name: The name in the repository.
        max_batch_size: 0 if Triton does not batch; the batch axis is then part of ``dims``.
        instances: Concurrent runs.
        provider: Execution provider in Triton.
        threads: Threads of one run on the CPU; 0 for ONNX Runtime's default.
        max_delay_us: Maximum time in microseconds that a request waits for its batch to fill.
        inputs: The inputs.
        outputs: The outputs.
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
    """Write one model into a Triton repository, completely or not at all.

    The model is run on the CPU before anything is written.

    Args:
        model: An .onnx file or an artifact folder.
        repository: Triton's model repository, created if missing. Other models are kept.
        name: Name in the repository; by default the name of the artifact.
        max_batch: Maximum batch size; 0 for no batching, None for 32 if the model can batch.
        instances: Concurrent copies of the model, on the CPU or on every GPU.
        provider: Execution provider in Triton.
        threads: Threads of one run on the CPU; 0 for ONNX Runtime's default.
        max_delay_us: Maximum time in microseconds that a request waits for its batch to fill.
        force: Replace an existing model.

    Raises:
        InvalidModel: The model cannot be read or run, or has a type that Triton does not support.
        InvalidArgument: The name is invalid, a number is too small, or the model cannot be batched
            as requested.
        InvalidOutput: The model exists already, or cannot be written.
    """
    artifact = open_artifact(model)
    called = name if name is not None else artifact.name
    _check_arguments(called, max_batch, instances, threads, max_delay_us)
    folder = repository / called
    _check_place(folder, artifact, force=force)
    graph = load_model(artifact)
    examined = _examine(artifact, graph, provider)
    if max_batch and examined.not_batched is not None:
        raise InvalidArgument(
            f"`max_batch` is {max_batch}: {artifact.name} cannot be batched, because"
            f" {examined.not_batched}",
            "set `max_batch` to 0",
            code="triton.batch",
        )
    default = DEFAULT_MAX_BATCH if examined.not_batched is None else 0
    rows = default if max_batch is None else max_batch
    if max_delay_us and not rows:
        why = examined.not_batched or "`max_batch` is 0"
        raise InvalidArgument(
            f"`max_delay_us` is {max_delay_us}: {artifact.name} is not batched, because {why}",
            "set `max_delay_us` to 0",
            code="triton.delay",
        )
    entry = TritonModel(
        folder=folder,
        name=called,
        max_batch_size=rows,
        instances=instances,
        provider=provider,
        threads=threads,
        max_delay_us=max_delay_us,
        inputs=tuple(_without_batch(value, rows) for value in examined.inputs),
        outputs=tuple(_without_batch(value, rows) for value in examined.outputs),
    )
    _write(entry, artifact, examined.warm_up, force=force)
    return entry


@dataclass(frozen=True)
class _Examined:
    """Result of two runs.

    Attributes:
        inputs: The inputs with all their axes.
        outputs: The outputs with all their axes.
        not_batched: The reason why the model cannot be batched; None if it can.
        warm_up: The inputs of one row, of ``WARM_UP_TOKENS`` tokens if the model takes so many.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    not_batched: Refusal | None
    warm_up: Mapping[str, np.ndarray]


def _examine(artifact: Artifact, graph: ir.Model, provider: Provider) -> _Examined:
    """Run a model at two shapes.

    Raises:
        InvalidModel: The model cannot be run, or has a type that Triton does not support.
    """
    converts = provider == "cuda" and is_bfloat16(graph)  # CPUs cannot run bfloat16
    session = open_session(on_cpu(graph) if converts else artifact.model)
    inputs = session.get_inputs()
    outputs = session.get_outputs()
    names = [value.name for value in outputs]
    runs: list[tuple[int, list[np.ndarray]]] = []
    warm_up: Mapping[str, np.ndarray] = {}
    fixed_rows, fixed_tokens = fixed_axes(value.shape for value in inputs)
    for rows, tokens in SHAPES:
        rows, tokens = fixed_rows or rows, fixed_tokens or tokens
        feeds = example_inputs(graph, Workload.of(rows, tokens))
        try:
            runs.append((rows, session.run(names, feeds)))
        except RunFailed as error:
            raise InvalidModel(
                f"{artifact.model}: ONNX Runtime cannot run it: {error.reason}",
                "check the file with `attnserve inspect`, or export it again",
                code="triton.does_not_run",
            ) from error
        warm_up = warm_up or feeds
    with suppress(AttnserveError):  # the model may have fewer positions
        length = fixed_tokens or min(WARM_UP_TOKENS, artifact.max_length or WARM_UP_TOKENS)
        feeds = example_inputs(graph, Workload.of(1, length))
        session.run(names, feeds)
        warm_up = feeds
    return _Examined(
        inputs=tuple(_value(value, warm_up[value.name].ndim) for value in inputs),
        outputs=tuple(
            _value(value, array.ndim) for value, array in zip(outputs, runs[-1][1], strict=True)
        ),
        not_batched=_batch_refusal(graph, inputs, outputs, runs),
        warm_up=warm_up,
    )


def _batch_refusal(
    graph: ir.Model,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    runs: Sequence[tuple[int, Sequence[np.ndarray]]],
) -> Refusal | None:
    """Return why requests cannot be rows of one run; None if they can.

    Args:
        runs: The numbers of rows and the outputs of two runs.
    """
    for value in inputs:
        if not value.shape:
            return Refusal("no_axes", f"its input {value.name!r} has no axes")
        if isinstance(value.shape[0], int):
            fixed = f"the first axis of its input {value.name!r} is fixed to {value.shape[0]}"
            return Refusal("fixed_axis", fixed)
    for place, value in enumerate(outputs):
        if any(arrays[place].shape[:1] != (rows,) for rows, arrays in runs):
            other = f"the first axis of its output {value.name!r} is not the batch axis of"
            return Refusal("other_axis", f"{other} its inputs")
    if not batch_invariant(graph):
        return Refusal("batch_dependent", "its dynamic quantization depends on the batch")
    return None


def _value(value: Any, rank: int) -> Value:
    """An input or output of a session with all its axes.

    Args:
        rank: The number of axes of its arrays.

    Raises:
        InvalidModel: Triton does not support the type.
    """
    if value.type not in DATATYPES:
        raise InvalidModel(
            f"{value.name!r} is a {value.type}: expected a tensor of numbers or booleans",
            "export the model without it",
            code="triton.type",
        )
    # ONNX Runtime reports no axes for scalars and unknown ranks: a run shows the rank.
    axes = value.shape if len(value.shape) == rank else [None] * rank
    dims = tuple(axis if isinstance(axis, int) else -1 for axis in axes)
    return Value(value.name, DATATYPES[value.type], dims)


def _without_batch(value: Value, rows: int) -> Value:
    """Remove the batch axis of a value, unless ``rows``, the maximum batch size, is 0."""
    return Value(value.name, value.datatype, value.dims[1:]) if rows else value


def _check_arguments(
    name: str, max_batch: int | None, instances: int, threads: int, max_delay_us: int
) -> None:
    """Check the arguments of ``write_repository``.

    Raises:
        InvalidArgument: The name is invalid, or a number is too small.
    """
    if not NAME.fullmatch(name):
        raise InvalidArgument(
            f"`name` is {name!r}: expected 1 to 128 letters, digits, '.', '_' and '-', not starting"
            " with '.' or '-'",
            "choose another `name`",
            code="triton.name",
        )
    for parameter, number, minimum in (
        ("max_batch", max_batch or 0, 0),
        ("instances", instances, 1),
        ("threads", threads, 0),
        ("max_delay_us", max_delay_us, 0),
    ):
        if number < minimum:
            raise InvalidArgument(
                f"`{parameter}` is {number}: expected at least {minimum}",
                f"raise `{parameter}`",
                code="triton.number",
            )


def _check_place(folder: Path, artifact: Artifact, *, force: bool) -> None:
    """Check that a model can be written to a folder.

    Args:
        force: Whether an existing model may be replaced.

    Raises:
        InvalidOutput: The folder exists, or cannot be written.
    """
    source = artifact.folder.resolve()
    if source == folder.resolve() or folder.resolve() in source.parents:
        raise InvalidOutput(
            f"{folder}: the output would overwrite the input",
            "choose another `repository` or `name`",
            code="output.is_input",
        )
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InvalidOutput(
            f"{folder}: exists and is not a folder", "choose another `name`", code="output.exists"
        )
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not force:
        raise InvalidOutput(
            f"{folder}: exists already",
            "choose another `name`, or set `force`",
            code="output.exists",
        )
    names = {"config.pbtxt", VERSION, "warmup"}
    stray_files = sorted(path.name for path in folder.iterdir() if path.name not in names)
    if stray_files or not (folder / "config.pbtxt").is_file():
        content = stray_files[0] if stray_files else "no config.pbtxt"
        raise InvalidOutput(
            f"{folder}: holds {content}, so it is not a model that"
            " attnserve wrote, and `force` would delete it",
            "choose another `name`, or remove the folder",
            code="output.foreign",
        )


def _write(
    entry: TritonModel,
    artifact: Artifact,
    warm_up: Mapping[str, np.ndarray],
    *,
    force: bool,
) -> None:
    """Write the folder of a model, completely or not at all.

    Raises:
        InvalidOutput: The folder cannot be written.
    """
    folder = entry.folder
    try:
        with staging_folder(folder.parent) as stage:
            new_folder, old_folder = stage / "new", stage / "old"
            (new_folder / VERSION).mkdir(parents=True)
            _copy_model(artifact, new_folder / VERSION)
            (new_folder / "warmup").mkdir()
            for index, value in enumerate(entry.inputs):
                content = np.ascontiguousarray(warm_up[value.name]).tobytes()
                (new_folder / "warmup" / f"input_{index}").write_bytes(content)
            (new_folder / "config.pbtxt").write_text(_config(entry, warm_up), encoding="ascii")
            try:
                if folder.exists():  # empty, or `force` is set
                    folder.rename(old_folder)
                new_folder.rename(folder)
            finally:
                if old_folder.exists() and not folder.exists():
                    old_folder.rename(folder)
    except OSError as error:
        raise InvalidOutput(
            f"{folder}: writing failed: {error.strerror or error}",
            "free some space, or choose another `repository`",
            code="output.write_failed",
        ) from error


def _copy_model(artifact: Artifact, folder: Path) -> None:
    """Copy the model as model.onnx, with its external data, its tokenizer and its record.

    Raises:
        InvalidModel: The external data is in a file called model.onnx.
    """
    shutil.copyfile(artifact.model, folder / "model.onnx")
    for location in external_data_locations(artifact.model):
        relative = Path(location)
        if relative == Path("model.onnx"):
            raise InvalidModel(
                f"{artifact.model}: its external data is in a file called model.onnx",
                "save it with its external data under another name",
            )
        (folder / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(artifact.folder / relative, folder / relative)
    copy_companions(artifact, folder)
    record = artifact.record
    if record.stated:
        if record.files:
            files = {
                "model.onnx" if name == artifact.model.name else name: checksum
                for name, checksum in record.files.items()
            }
            record = record.model_copy(update={"files": files})
        write_record(folder, record)


def _config(entry: TritonModel, feeds: Mapping[str, np.ndarray]) -> str:
    """The content of config.pbtxt, in protobuf's text format.

    Args:
        feeds: The values of a warm-up request.
    """
    kind = "KIND_GPU" if entry.provider == "cuda" else "KIND_CPU"
    lines = [
        f"name: {_quote(entry.name)}",
        'backend: "onnxruntime"',
        f"max_batch_size: {entry.max_batch_size}",
        *(f"input {{ {_describe(value)} }}" for value in entry.inputs),
        *(f"output {{ {_describe(value)} }}" for value in entry.outputs),
        f"instance_group {{ count: {entry.instances} kind: {kind} }}",
    ]
    if entry.max_batch_size:
        lines.append(
            f"dynamic_batching {{ max_queue_delay_microseconds: {entry.max_delay_us}"
            f" default_queue_policy {{ max_queue_size: {MAX_QUEUE} }} }}"
        )
    if entry.threads:
        value = f'value {{ string_value: "{entry.threads}" }}'
        lines.append(f'parameters {{ key: "intra_op_thread_count" {value} }}')
    for rows in dict.fromkeys((1, entry.max_batch_size or 1)):
        lines.append(f'model_warmup {{ name: "rows_{rows}" batch_size: {rows}')
        for index, value in enumerate(entry.inputs):
            shape = feeds[value.name].shape[1 if entry.max_batch_size else 0 :]
            lines.append(
                f"  inputs {{ key: {_quote(value.name)} value {{ data_type: {value.datatype}"
                f' dims: {list(shape) or [1]} input_data_file: "input_{index}" }} }}'
            )
        lines.append("}")
    return "\n".join(lines) + "\n"


def _describe(value: Value) -> str:
    """The fields of an input or output in config.pbtxt."""
    # Triton has no scalars: a scalar is one number that is reshaped to no axes.
    dims = f"{list(value.dims)}" if value.dims else "[1] reshape { shape: [] }"
    return f"name: {_quote(value.name)} data_type: {value.datatype} dims: {dims}"


def _quote(text: str) -> str:
    """Quote ``text`` in printable ASCII; other bytes become three octal digits."""
    plain = (
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}"
        for byte in text.encode()
    )
    return f'"{"".join(plain)}"'
