"""One loaded version of a model: its session, tokenizer and cost, and the checks of what it is fed.

A ``Model`` is synchronous and may be used by several threads; it knows nothing of queues, event
loops or HTTP. What it cannot be fed it refuses in words (``InvalidData``); what breaks while it
runs is a ``ModelFailed``, for the engine to retry or reload.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from attnserve.models.artifact import Artifact, load_model
from attnserve.models.example_inputs import example_inputs, id_bound
from attnserve.models.tokenizer import Encoding, load_tokenizer, model_inputs, pool
from attnserve.runtime.backends import open_runner
from attnserve.runtime.cuda import PARITY, Cuda
from attnserve.runtime.session import Provider, weight_bytes
from graph_passes.analysis.cost import model_cost
from graph_passes.errors import AttnserveError, CheckFailed, InvalidData, InvalidModel
from service.errors import ModelFailed, NotFound, OutOfMemory

__all__ = ["NOT_REWRITTEN", "Model", "Tensor", "TextTask"]

TextTask = Literal["embed", "classify"]

NOT_REWRITTEN: Mapping[str, Any] = {"rewritten": False, "why": "rewriting is switched off"}
"""Of a model that runs in the operators it was exported in."""

DTYPES: Mapping[str, np.dtype[Any]] = {
    "tensor(bool)": np.dtype(np.bool_),
    "tensor(uint8)": np.dtype(np.uint8),
    "tensor(uint16)": np.dtype(np.uint16),
    "tensor(uint32)": np.dtype(np.uint32),
    "tensor(uint64)": np.dtype(np.uint64),
    "tensor(int8)": np.dtype(np.int8),
    "tensor(int16)": np.dtype(np.int16),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(float)": np.dtype(np.float32),
    "tensor(double)": np.dtype(np.float64),
}
"""What ONNX Runtime calls the types that can be served."""

MUCH = 10_000_000
"""Bytes of weights that are worth the tenth of a second in which Python looks for what is left."""

TRIED_ROWS, TRIED_LENGTHS = 3, (8, 2, 1)
"""The shapes of the first run; the lengths are tried until the model takes one."""

ROW_TOLERANCE = 0.05
"""How far a row may move, relative to its length, when others share its batch. Integers whose scale
is taken from the whole batch move it by some thousandths; rows that are mixed, by their size."""


@dataclass(frozen=True)
class Tensor:
    """An input or output of the model.

    ``axes`` are sizes, or the names of axes that any size fits (None: without a name). ONNX Runtime
    says no axes for a scalar and for a tensor of any rank alike.
    """

    name: str
    dtype: np.dtype[Any]
    axes: tuple[int | str | None, ...]


class Model:
    """A loaded model.

    Args:
        artifact: What to load.
        name: What clients call it; the artifact's own name where left out.
        version: A number, as text.
        provider: The execution provider.
        threads: Intra-op threads of a run; 0 leaves it to ONNX Runtime.
        cuda: How the GPU is used.
        cuda_graphs: The most shapes that are captured as CUDA graphs; 0 for none.
        at_once: How many runs there will be at a time.
        graph: A file that is run in the place of the artifact's, and computes the same; all that is
            told of the model (cost, inputs, lineage) is the artifact's.
        operators: What was done to make ``graph`` of it, or why it is run as it is.

    Raises:
        InvalidModel: It cannot be read, or has an input or output that is no plain tensor.
        InvalidArgument: The provider is not available here.
        MissingExtra: ONNX Runtime is not installed.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        name: str | None = None,
        version: str = "1",
        provider: Provider = "cpu",
        threads: int = 0,
        cuda: Cuda = PARITY,
        cuda_graphs: int = 0,
        at_once: int = 1,
        graph: Path | None = None,
        operators: Mapping[str, Any] = NOT_REWRITTEN,
    ) -> None:
        self.artifact = artifact
        self.operators = operators
        self.name = name or artifact.name
        self.version = version
        self.provider: Provider = provider
        original = load_model(artifact)
        cost = model_cost(original)
        # An input leads to its graph, and that to all weights: a second copy of the model.
        shapes = {name: ir.Value(name=name, shape=v.shape) for name, v in cost.inputs.items()}
        self.cost = replace(cost, inputs=shapes)
        self._id_bounds = {
            value.name: bound for value in original.graph.inputs if (bound := id_bound(value))
        }
        self._examples = _examples(original)
        self._is_large = weight_bytes(original) > MUCH
        del original
        self._give_back()
        self._captures = cuda_graphs > 0
        self._session: Any = open_runner(
            graph or artifact.model,
            provider=provider,
            threads=threads,
            cuda=cuda,
            buckets=cuda_graphs,
            longest=artifact.max_length,
            at_once=at_once,
        )
        self.inputs = tuple(_tensor(value) for value in self._session.get_inputs())
        self.outputs = tuple(_tensor(value) for value in self._session.get_outputs())
        path = artifact.tokenizer
        self.encoder = load_tokenizer(path, max_length=artifact.max_length) if path else None
        self.labels = _labels(artifact)
        self.rows_are_independent = False
        self.max_rows: int | None = 1

    # -- what it is fed ---------------------------------------------------------------------------

    def check(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Refuse, in words, what the runtime would refuse in its own, or answer with nonsense.

        Raises:
            InvalidData: The inputs do not fit the model.
        """
        expected = [tensor.name for tensor in self.inputs]
        for name in inputs:
            if name not in expected:
                raise InvalidData(
                    f"unknown input {name!r}: {self.name} takes {', '.join(expected)}"
                )
        for name in expected:
            if name not in inputs:
                raise InvalidData(
                    f"missing input {name!r}: {self.name} takes {', '.join(expected)}"
                )
        sizes: dict[str, tuple[int, str]] = {}
        for tensor in self.inputs:
            self._check_tensor(tensor, inputs[tensor.name], sizes)
        shape = self.ids(inputs).shape
        if shape[:1] == (0,):
            raise InvalidData(
                f"the inputs have no rows: the batch axis of {list(shape)} is 0",
                "send at least one row",
            )

    def check_outputs(self, names: Sequence[str]) -> None:
        """Raises ``InvalidData`` where one of ``names`` is no output."""
        known = [output.name for output in self.outputs]
        for name in names:
            if name not in known:
                raise InvalidData(f"unknown output {name!r}: expected one of {', '.join(known)}")

    def ids(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """The input whose first two axes count tokens."""
        return inputs["input_ids"] if "input_ids" in inputs else inputs[self.inputs[0].name]

    def tokens(self, inputs: Mapping[str, np.ndarray]) -> int:
        """Tokens of ``inputs``, what is masked not counted."""
        mask = inputs.get("attention_mask")
        if mask is not None:
            return int(np.count_nonzero(mask))
        return math.prod(self.ids(inputs).shape[:2])

    def macs(self, inputs: Mapping[str, np.ndarray]) -> int | None:
        """Multiply-accumulates of one run; None where the graph cannot be counted."""
        return self.cost.macs_of({name: array.shape for name, array in inputs.items()})

    # -- running ----------------------------------------------------------------------------------

    def run(
        self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] = ()
    ) -> dict[str, np.ndarray]:
        """Run the session on checked inputs; all outputs where ``outputs`` is empty.

        Raises:
            InvalidData: The graph cannot take these sizes or values.
            OutOfMemory: There is no memory left for them.
            ModelFailed: The session or its device is broken.
        """
        names = list(outputs) or [output.name for output in self.outputs]
        try:
            results = self._session.run(names, dict(inputs))
        except Exception as error:  # onnxruntime raises a class of its own for each status
            raise _run_failed(error, inputs) from error
        return dict(zip(names, results, strict=True))

    def encode(self, texts: Sequence[str], *, truncate: bool) -> list[Encoding]:
        """One ``Encoding`` a text.

        Raises:
            NotFound: There is no tokenizer beside the model.
            InvalidData: A text is too long, or no text.
        """
        self.require_tokenizer()
        assert self.encoder is not None
        return self.encoder.encode(texts, truncate=truncate)

    def require_tokenizer(self) -> None:
        """Raises ``NotFound`` where texts cannot be read."""
        if self.encoder is None:
            raise NotFound(
                f"{self.name} has no tokenizer.json beside it, which reading texts needs",
                f"send token ids to /v2/models/{self.name}/infer",
            )

    def text_inputs(self, encodings: Sequence[Encoding]) -> dict[str, np.ndarray]:
        """The inputs of a batch of texts, checked and padded to the longest.

        Raises:
            InvalidData: The model takes no texts, or they do not fit it.
        """
        assert self.encoder is not None
        missing = (self._fixed_rows or 0) - len(encodings)
        inputs = self.encoder.batch_inputs(
            [*encodings, *[encodings[-1]] * missing], model_inputs(self._session)
        )
        self.check(inputs)
        return inputs

    def text_output(self, task: TextTask) -> str:
        """The output that ``task`` reads."""
        names = [tensor.name for tensor in self.outputs]
        return "logits" if task == "classify" and "logits" in names else names[0]

    def vectors(
        self, task: TextTask, inputs: Mapping[str, np.ndarray], output: np.ndarray
    ) -> np.ndarray:  # B D
        """What ``task`` makes of its output: pooled embeddings, or scores that sum to one.

        Raises:
            CheckFailed: The model gives NaN or infinite numbers.
            InvalidArgument, InvalidData: Its output is no embedding, or holds no classes.
        """
        if task == "embed":
            mask = inputs.get("attention_mask")
            if mask is None:  # without a mask there is no padding
                mask = np.ones(output.shape[:2], dtype=np.bool_)
            found = pool(output, mask, self.artifact.pooling, self.artifact.normalize)
        else:
            found = _scores(output)
        if not np.isfinite(found).all():
            raise CheckFailed(
                f"{self.name} gives NaN or infinite numbers for these texts",
                "check its weights, and that it does not overflow in half precision",
            )
        return found

    @property
    def plan_id(self) -> str | None:
        """Which plan the model was rewritten by: a checksum of it; None where it was not."""
        entry = next(iter(reversed(self.artifact.lineage)), None)
        plan = entry.get("plan") if isinstance(entry, dict) else None
        if plan is None:
            return None
        return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def vocabulary(self) -> int:
        """How many token ids there are, as far as its graph tells."""
        return self._id_bounds.get("input_ids") or 2**31

    @property
    def takes_mask(self) -> bool:
        """Whether texts of different lengths can share a batch."""
        return any(tensor.name == "attention_mask" for tensor in self.inputs)

    @property
    def classifies(self) -> bool:
        """Whether it gives scores of classes."""
        output = next((tensor for tensor in self.outputs if tensor.name == "logits"), None)
        return len((output or self.outputs[0]).axes) == 2 and bool(output or self.labels)

    def warm_up(self) -> None:
        """Run it as traffic would, and find out whether rows may share a batch.

        The runtime plans its memory and a device compiles its kernels in the first run: not in the
        first request. A graph may mix the rows of a batch (a mean over all of them): strangers
        may share a batch only where a row's answer is the same alone and in company. In the same
        way it finds out whether a run may be padded up to the shape of another.

        Raises:
            OutOfMemory, ModelFailed: It does not run.
        """
        for inputs in self._examples:
            try:
                together = self.run(inputs)
            except InvalidData:  # too long, or a graph that takes no example of ours
                continue
            if self._fixed_rows is None:
                self.rows_are_independent = all(
                    self._is_independent(inputs, together, index) for index in range(TRIED_ROWS)
                )
            if self._captures:
                self._session.allow_padding(
                    rows=self.rows_are_independent, tokens=self._ignores_padding(inputs)
                )
            break
        self.max_rows = self._fixed_rows or (None if self.rows_are_independent else 1)

    def close(self) -> None:
        """Free the session: nothing may run any more."""
        self._session = _Closed()
        self._give_back()

    def _give_back(self) -> None:
        """Return what reading or running a model has left behind to the system.

        A graph is full of cycles: its weights stay until Python looks for such. And what is freed
        in between other things stays with glibc until it is told to look.
        """
        if self._is_large:
            gc.collect()
            with suppress(OSError, AttributeError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)

    def _is_independent(
        self,
        inputs: Mapping[str, np.ndarray],
        together: Mapping[str, np.ndarray],
        index: int,
    ) -> bool:
        if any(array.shape[:1] != (TRIED_ROWS,) for array in inputs.values()):
            return False
        try:
            alone = self.run({name: array[index : index + 1] for name, array in inputs.items()})
        except InvalidData:
            return False
        return _same_row(together, alone, index)

    def _ignores_padding(self, inputs: Mapping[str, np.ndarray]) -> bool:
        """Whether zeros after the tokens, in the mask too, leave the answers as they are."""
        length = inputs["attention_mask"].shape[-1] if self.takes_mask else 0
        if length < 2:
            return False
        short, padded = dict(inputs), {name: array.copy() for name, array in inputs.items()}
        for tensor in self.inputs:
            if len(tensor.axes) > 1 and not isinstance(tensor.axes[1], int):
                short[tensor.name] = inputs[tensor.name][:, : length // 2]
                padded[tensor.name][:, length // 2 :] = 0
        try:
            expected, found = self.run(short), self.run(padded)
        except InvalidData:
            return False
        return all(_starts_with(found[name], array) for name, array in expected.items())

    @property
    def _fixed_rows(self) -> int | None:
        axes = self.inputs[0].axes
        return axes[0] if axes and isinstance(axes[0], int) else None

    def _check_tensor(
        self, tensor: Tensor, array: np.ndarray, sizes: dict[str, tuple[int, str]]
    ) -> None:
        what = f"input {tensor.name!r}"
        if array.dtype != tensor.dtype:
            raise InvalidData(f"{what} is {array.dtype}: expected {tensor.dtype}")
        fixed = [axis if isinstance(axis, int) else -1 for axis in tensor.axes]
        if fixed and (
            array.ndim != len(fixed)
            or any(want not in (-1, got) for want, got in zip(fixed, array.shape, strict=True))
        ):
            raise InvalidData(f"{what} has shape {list(array.shape)}: expected {fixed}")
        # Ids and masks are never empty; the cache of a decoder is, at its first step.
        if array.size == 0 and array.ndim <= 2:
            raise InvalidData(f"{what} has shape {list(array.shape)}: it is empty")
        # The runtime would broadcast where it can: another answer, at another cost.
        for axis, size in zip(tensor.axes, array.shape, strict=False):
            if isinstance(axis, str) and (known := sizes.setdefault(axis, (size, what)))[0] != size:
                raise InvalidData(
                    f"{what} has shape {list(array.shape)}: its axis {axis!r} is {size},"
                    f" but {known[0]} in {known[1]}"
                )
        # A CUDA Gather reads outside of its table without a word, and -1 is nobody's token.
        bound = self._id_bounds.get(tensor.name)
        if bound and array.size and (array.min() < 0 or array.max() >= bound):
            wrong = array[(array < 0) | (array >= bound)].flat[0]
            raise InvalidData(f"{what} holds {wrong}: expected ids from 0 to {bound - 1}")


class _Closed:
    """In the place of a session that was freed."""

    def __getattr__(self, name: str) -> Any:
        raise ModelFailed("the model is unloaded", "load it again")


def _examples(graph: ir.Model) -> list[dict[str, np.ndarray]]:
    """Inputs of a first run at several lengths; none where they cannot be made."""
    found: list[dict[str, np.ndarray]] = []
    first = next((value.shape for value in graph.graph.inputs if value.shape is not None), None)
    rows = first[0] if first is not None and len(first) else TRIED_ROWS
    for length in TRIED_LENGTHS:
        try:
            found.append(
                example_inputs(graph, rows if isinstance(rows, int) else TRIED_ROWS, length)
            )
        except AttnserveError:  # fixed axes of another length, types without examples
            continue
    return found


def _same_row(
    together: Mapping[str, np.ndarray], alone: Mapping[str, np.ndarray], index: int
) -> bool:
    for name, batch in together.items():
        row = alone[name]
        if row.shape[:1] != (1,) or batch.shape != (TRIED_ROWS, *row.shape[1:]):
            return False
        if not _close(batch[index], row[0]):
            return False
    return True


def _starts_with(longer: np.ndarray, array: np.ndarray) -> bool:
    """Whether ``array`` is the beginning of ``longer`` along every axis."""
    if longer.ndim != array.ndim or any(
        a < b for a, b in zip(longer.shape, array.shape, strict=True)
    ):
        return False
    return _close(longer[tuple(map(slice, array.shape))], array)


def _close(found: np.ndarray, expected: np.ndarray) -> bool:
    one, other = (np.nan_to_num(array.astype(np.float64)) for array in (found, expected))
    return bool(np.linalg.norm(one - other) <= ROW_TOLERANCE * np.linalg.norm(other) + 1e-9)


def _scores(logits: np.ndarray) -> np.ndarray:
    """Softmax over the classes; of a single one, its sigmoid."""
    if logits.ndim != 2:
        raise InvalidData(
            f"the model gives an output of shape {list(logits.shape)}:"
            " classes need [batch, classes]",
            "use /embed, or a model with a classification head",
        )
    logits = logits.astype(np.float64)
    if logits.shape[1] == 1:
        return 1 / (1 + np.exp(-logits))
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _labels(artifact: Artifact) -> dict[int, str]:
    """Names of the classes: attnserve.json's ``id2label``, else config.json's, else none."""
    given: Any = artifact.record.get("id2label")
    if given is None:
        path = artifact.companion("config.json")
        try:
            config: Any = json.loads(path.read_text(encoding="utf-8")) if path else {}
        except (OSError, ValueError) as error:
            raise InvalidModel(f"{path}: not valid JSON: {error}", "copy it again") from error
        given = config.get("id2label") if isinstance(config, dict) else None
    if isinstance(given, list):
        given = dict(enumerate(given))
    if not isinstance(given, dict):
        return {}
    try:
        return {int(key): str(label) for key, label in given.items()}
    except ValueError as error:
        raise InvalidModel(
            f"{artifact.folder}: id2label names a class that is no number", "mend it"
        ) from error


def _tensor(value: Any) -> Tensor:
    if value.type not in DTYPES:
        raise InvalidModel(
            f"{value.name!r} is a {value.type}: only tensors of numbers and booleans are served",
            "export the model without it",
        )
    return Tensor(value.name, DTYPES[value.type], tuple(value.shape))


def _run_failed(error: Exception, inputs: Mapping[str, np.ndarray]) -> Exception:
    """What a failed run means: no memory, a broken device, or inputs that the graph cannot take.

    Types, ranks and names are checked before a run, and a graph that loads is well formed, so what
    is left of a failure on the host lies in the sizes and values of the inputs: most often a
    sequence longer than the model's positions.
    """
    if isinstance(error, ModelFailed):
        return error
    text = str(error)
    if isinstance(error, MemoryError) or re.search(r"allocat|out of memory", text, re.IGNORECASE):
        return OutOfMemory(
            "out of memory for this request", "send fewer or shorter texts at a time"
        )
    kind = type(error).__name__
    if kind in ("EPFail", "EngineError") or "CUDA failure" in text:
        return ModelFailed(f"the model's session failed: {kind}", "try again: it is being reloaded")
    detail = text.strip().rpartition("Status Message: ")[2]
    detail = re.sub(r"^/\S+:\d+ [^)]*\) ", "", detail).splitlines()  # where in its C++ sources
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
    return InvalidData(
        f"the model cannot run {shapes}: {detail[0][:300] if detail else type(error).__name__}",
        "is the sequence longer than the model's positions?",
    )
