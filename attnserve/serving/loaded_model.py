"""A loaded model: session, tokenizer, cost, and validation of inputs.

A ``Model`` is synchronous and thread-safe. It refuses invalid inputs with ``InvalidData``. A
failure of its session is a ``ModelFailed``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from attnserve.context import Provider
from attnserve.literals import Side
from attnserve.models.artifact import Artifact
from attnserve.models.embeddings import pool
from attnserve.models.rows import fixed_axes
from attnserve.models.tokenizer import FILLED, Encoding, Text, load_encoder, model_inputs
from attnserve.runtime.inference_precision import precision_in
from attnserve.runtime.interface import LongRows, RunFailed, Session, ValueInfo
from attnserve.runtime.memory_use import return_freed_memory
from attnserve.runtime.session import RUNTIMES
from attnserve.serving.activations import scores_of
from attnserve.serving.backends import ON_CPU, RunnerOptions, RunnerPool, open_runner
from attnserve.serving.check_cache import compiled_file
from attnserve.serving.cuda_graphs import GraphRunner
from attnserve.serving.graph_facts import WARM_UP_ROWS, GraphFacts
from attnserve.serving.operator_report import NOT_REWRITTEN, OperatorReport
from attnserve.serving.row_independence import has_independent_rows, ignores_padding
from attnserve.serving.tensor_codec import ONNX_TYPES
from attnserve.serving.text_tasks import TextTask, tasks_of, text_output
from graph_passes.errors import (
    AttnserveError,
    CheckFailed,
    InvalidArgument,
    InvalidData,
    InvalidModel,
    Refusal,
)

__all__ = [
    "Model",
    "ModelFailed",
    "OutOfMemory",
    "Tensor",
]

SEND_TEXTS = (
    "send texts (langchain-openai: check_embedding_ctx_length=False), or ids of POST /tokenize"
)

SHAPES_CACHED = 1024


class ModelFailed(AttnserveError):
    """The model's session, or the device that it runs on, is broken."""

    default_code = "model.failed"


class OutOfMemory(ModelFailed):
    """The run does not fit into memory."""

    default_code = "model.out_of_memory"


@dataclass(frozen=True)
class Tensor:
    """An input or output of the model.

    ``axes`` are fixed sizes, or names of free axes (None: without a name). ONNX Runtime reports no
    axes for scalars and for tensors of unknown rank.
    """

    name: str
    dtype: np.dtype[Any]
    axes: tuple[int | str | None, ...]

    @property
    def shape(self) -> list[int]:
        """The sizes of the axes, -1 for free ones."""
        return [axis if isinstance(axis, int) else -1 for axis in self.axes]


class Model:
    """A loaded model.

    Args:
        artifact: The model to load.
        options: Options of the session.
        name: By default the name of the artifact.
        graph: An equivalent file that is run instead of the artifact's; inputs and lineage come
            from the artifact.
        operators: The operators of ``graph``.
        facts: Facts of the artifact's graph, with the costs of the one that runs; None reads those
            of the artifact here.

    Raises:
        InvalidModel: It cannot be read, has an input or output that is not a plain tensor, or one
            name for axes of different sizes.
        InvalidArgument: The provider is not available.
        MissingExtra: ONNX Runtime is not installed.
    """

    def __init__(
        self,
        artifact: Artifact,
        options: RunnerOptions = ON_CPU,
        *,
        name: str | None = None,
        graph: Path | None = None,
        operators: OperatorReport = NOT_REWRITTEN,
        facts: GraphFacts | None = None,
    ) -> None:
        self.artifact = artifact
        self.operators = operators
        self.name = name or artifact.name
        self.provider: Provider = options.device.provider
        runtime: str = operators.get("runtime") or options.device.runtime_name
        self.long_rows = long_rows = _long_rows(operators)
        facts = facts or GraphFacts.read(artifact)
        self.precisions: dict[str, str] = {
            name: precision_in(
                facts.precision,
                in_bfloat16=facts.in_bfloat16 and RUNTIMES[name].computes_bfloat16,
            )
            for name in (runtime, *([long_rows.runtime] if long_rows else []))
        }
        """The data types that each runtime of the model computes with (``precision_of``), by its
        name; that of short rows first."""
        self.cost = cost = facts.cost

        @lru_cache(SHAPES_CACHED)
        def cost_at(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[int | None, ...]:
            return cost.macs_of(dict(shapes)), cost.largest_node_bytes(dict(shapes))

        self._cost_at = cost_at
        self._id_bounds, self._examples = facts.id_bounds, facts.examples
        self.int8_warning, self.batch_invariant = facts.int8_warning, facts.batch_invariant
        self._session: Session = open_runner(
            graph or artifact.model,
            replace(options, device=replace(options.device, runtime=runtime)),
            longest=artifact.max_length,
            long_rows=long_rows,
            copied=facts.external if graph is None else (),
            compiled=graph and compiled_file(graph),
        )
        self.inputs = tuple(_tensor(value) for value in self._session.get_inputs())
        self.outputs = tuple(_tensor(value) for value in self._session.get_outputs())
        self.encoder = load_encoder(artifact) if artifact.tokenizer else None
        self._require_different_axes()
        _, tokens = fixed_axes(tensor.axes for tensor in self.inputs if tensor.name == "input_ids")
        if self.encoder and (tokens is None or tokens > self.encoder.special_tokens):
            self.encoder = self.encoder.with_length(tokens)
        self.labels = artifact.labels
        if self.encoder:
            self._check_text_output()
        self.created = int(artifact.model.stat().st_mtime)
        self.rows_are_independent = False
        self.max_rows: int | None = 1

    # -- inputs and outputs -----------------------------------------------------------------------

    def check(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Validate names, types, shapes and token ids.

        Raises:
            InvalidData: The inputs do not fit the model.
        """
        names = [tensor.name for tensor in self.inputs]
        for name in (*inputs, *names):
            if name not in names or name not in inputs:
                fault = "missing" if name in names else "unknown"
                raise InvalidData(f"{fault} input {name!r}: {self.name} takes {', '.join(names)}")
        sizes: dict[str, tuple[int, str]] = {}
        for tensor in self.inputs:
            self._check_tensor(tensor, inputs[tensor.name], sizes)
        shape = self.ids(inputs).shape
        if shape[:1] == (0,):
            raise InvalidData(
                f"the inputs have no rows: the batch axis of {list(shape)} is 0",
                "send at least one row",
            )

    def _require_different_axes(self) -> None:
        """Refuse axes of one name that have different sizes for every text.

        Axes of one name have one size, also for ONNX Runtime, which reuses memory by it.
        """
        caches: Collection[str] = ()
        if self.encoder is not None:
            with suppress(InvalidData):  # the model takes no texts
                inputs = model_inputs(self._session)
                caches = [name for name, value in inputs.items() if value.cache is not None]
        axes: dict[str, tuple[str, str]] = {}
        for tensor in self.inputs:
            if tensor.name in caches:
                meanings = ["rows", *["cached tokens"] * len(tensor.axes)]
            elif tensor.name in FILLED and len(tensor.axes) == 2:
                meanings = ["rows", "tokens"]
            else:
                continue
            for axis, meaning in zip(tensor.axes, meanings, strict=False):
                if not isinstance(axis, str):
                    continue
                first_meaning, first_tensor = axes.setdefault(axis, (meaning, tensor.name))
                if first_meaning != meaning and "tokens" in (first_meaning, meaning):
                    raise InvalidModel(
                        f"{self.artifact.model}: the axis {axis!r} counts {first_meaning} in "
                        f"{first_tensor!r} and {meaning} in {tensor.name!r}: expected a name of "
                        "its own for each",
                        "export the model again with dynamic axes of different names, for example"
                        " batch and sequence",
                        code="model.axis_name",
                    )

    def check_outputs(self, names: Sequence[str]) -> None:
        """Raise ``InvalidData`` if one of ``names`` is not an output."""
        own_names = [output.name for output in self.outputs]
        for name in names:
            if name not in own_names:
                raise InvalidData(
                    f"unknown output {name!r}: expected one of {', '.join(own_names)}"
                )

    def ids(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """The input whose first two axes are rows and tokens."""
        return inputs["input_ids"] if "input_ids" in inputs else inputs[self.inputs[0].name]

    def tokens(self, inputs: Mapping[str, np.ndarray]) -> int:
        """Number of unmasked tokens, without tokens of a cache."""
        mask = inputs.get("attention_mask")
        shape = self.ids(inputs).shape[:2]
        if mask is not None and mask.ndim == 2 and len(shape) == 2 and mask.shape[1] >= shape[1]:
            return int(np.count_nonzero(mask[:, mask.shape[1] - shape[1] :]))
        return math.prod(shape)

    def macs(self, inputs: Mapping[str, np.ndarray]) -> int | None:
        """Multiply-accumulates of one run; None if they cannot be counted."""
        return self._cost_at(tuple((name, array.shape) for name, array in inputs.items()))[0]

    @property
    def runtime(self) -> str:
        """The names of its runtimes, joined by +."""
        return "+".join(self.precisions)

    @property
    def precision(self) -> str:
        """The data types that it computes with, of each runtime if they differ."""
        return ", ".join(dict.fromkeys(self.precisions.values()))

    def runtime_of(self, tokens: int | None) -> str:
        """The name of the runtime that runs rows of this length."""
        if self.long_rows is not None and (tokens or 0) > self.long_rows.above:
            return self.long_rows.runtime
        return next(iter(self.precisions))

    def output_bytes(self, shapes: Mapping[str, Sequence[int]], outputs: Sequence[str]) -> int:
        """Size of ``outputs`` for inputs of these shapes; an axis of unknown size counts as 1."""
        sizes: dict[int | str | None, int] = {}
        for tensor in self.inputs:
            sizes |= zip(tensor.axes, shapes[tensor.name], strict=False)
        sizes[None] = 1
        return sum(
            math.prod(
                (axis if isinstance(axis, int) else sizes.get(axis, 1)) for axis in value.axes
            )
            * value.dtype.itemsize
            for value in self.outputs
            if value.name in outputs
        )

    def run_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
        """Bytes that the largest operator of a run reads and writes; None if unknown.

        Attention scores grow with the square of the length.
        """
        return self._cost_at(tuple(shapes.items()))[1]

    # -- running ----------------------------------------------------------------------------------

    def run(
        self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] = ()
    ) -> dict[str, np.ndarray]:
        """Run the session on checked inputs; return all outputs if ``outputs`` is empty.

        Raises:
            InvalidData: The graph cannot take these sizes or values.
            OutOfMemory: The run does not fit into memory.
            ModelFailed: The session or its device is broken.
        """
        names = list(outputs) or [output.name for output in self.outputs]
        try:
            results = self._session.run(names, inputs)
        except RunFailed as error:
            raise _run_failed(error, inputs) from error
        return dict(zip(names, results, strict=True))

    def encode(
        self,
        texts: Sequence[Text | Encoding],
        *,
        truncate: bool = True,
        side: Side | None = None,
    ) -> list[Encoding]:
        """The tokens of texts, or given ones, whose ids are checked; needs a tokenizer.

        Raises:
            InvalidData: See ``TextEncoder.encode``; or an id is not in the vocabulary.
        """
        assert self.encoder is not None
        bound = self._id_bounds.get("input_ids") or 2**31
        # Checked per text: in a batch, one bad id would fail other requests.
        for index, text in enumerate(texts):
            ids = text.ids if isinstance(text, Encoding) else ()
            if wrong := [token for token in ids if not 0 <= token < bound]:
                raise InvalidData(
                    f"text {index} holds {wrong[0]}: expected ids from 0 to {bound - 1}", SEND_TEXTS
                )
        return self.encoder.encode(texts, truncate=truncate, side=side)

    def text_inputs(self, encodings: Sequence[Encoding]) -> dict[str, np.ndarray]:
        """The checked inputs of a batch of texts, padded to the longest; needs a tokenizer.

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

    def text_shapes(self, text: Encoding) -> dict[str, tuple[int, ...]]:
        """The shapes of the inputs for one text; needs a tokenizer.

        Raises:
            InvalidData: The model takes no texts.
        """
        assert self.encoder is not None
        inputs = self.encoder.batch_inputs([text], model_inputs(self._session))
        return {name: array.shape for name, array in inputs.items()}

    @property
    def fixed_tokens(self) -> int | None:
        """The fixed length that texts are padded to; None pads to the longest text of a batch."""
        return self.encoder and self.encoder.length

    def text_output(self, task: TextTask) -> str:
        """The name of the output that ``task`` uses.

        Raises:
            InvalidArgument: The artifact names an output that the model does not have.
        """
        return text_output(task, [output.name for output in self.outputs], self.artifact)

    def vectors(
        self, task: TextTask, inputs: Mapping[str, np.ndarray], output: np.ndarray
    ) -> np.ndarray:  # B D, or B S D for "tokens"
        """The answer of each text of a batch, from an output of the model.

        Args:
            task: "embed" pools token vectors (not normalized), "tokens" gives them all, padding
                too; "classify" and "rerank" give logits, "sparse" the weight of each token of the
                vocabulary: the largest log(1 + relu(logit)) of any token (Formal et al. 2021,
                SPLADE v2).

        Raises:
            CheckFailed: The output holds NaN or infinite numbers.
            InvalidArgument, InvalidData: The output has no embeddings or no classes.
        """
        axes = self._axes_of(self.text_output(task))
        if len(axes) == 2 and isinstance(axes[1], str) and axes[1] in self._length_axes:
            raise InvalidData(
                f"the output of {self.name} has one number per token: expected one vector per text"
                " or per token",
                "use the tensors of the output",
            )
        mask = inputs.get("attention_mask")
        if mask is None:  # without a mask there is no padding
            mask = np.ones(output.shape[:2], dtype=np.bool_)
        if task == "embed":
            artifact = self.artifact
            vectors = pool(output, mask, artifact.pooling, False, artifact.dimensions)
        elif task == "classify":
            vectors = scores_of(output, "identity")
        elif task == "tokens":
            vectors = output.astype(np.float32, copy=False)
        elif task == "sparse":
            largest = np.where(mask[..., None] != 0, output, 0).max(axis=1)
            vectors = np.log1p(np.maximum(largest.astype(np.float32), 0))
        elif output.ndim == 2 and output.shape[1] == 1:
            vectors = output.astype(np.float64)
        else:
            raise InvalidData(f"the output has the shape {list(output.shape)}: expected [batch, 1]")
        if not np.isfinite(vectors).all():
            raise CheckFailed(
                f"the output of {self.name} holds NaN or infinite numbers for these texts",
                "check its weights, and that it does not overflow in half precision",
            )
        return vectors

    def text_rows(
        self,
        task: TextTask,
        encodings: Sequence[Encoding],
        inputs: Mapping[str, np.ndarray],
        output: np.ndarray,
    ) -> list[np.ndarray]:  # 1 D each, or S D without padding for "tokens"
        """The answer of each text of a batch; see ``vectors``."""
        vectors = self.vectors(task, inputs, output)
        if task != "tokens":
            return [vectors[index : index + 1] for index in range(len(encodings))]
        assert self.encoder is not None
        masks = self.encoder.mask(encodings)
        return [row[mask] for row, mask in zip(vectors, masks, strict=False)]  # rows may be filled

    def _check_text_output(self) -> None:
        """Check that the graph has hidden states, if the folder states how to pool them.

        Raises:
            InvalidModel: It has BERT's pooler_output instead.
        """
        stated = self.artifact.record.pooling
        if stated not in (None, "none") and self.text_output("embed") == "pooler_output":
            raise InvalidModel(
                f"{self.artifact.model}: `pooling` is {stated}, but the graph has no hidden states:"
                f" its output is pooler_output",
                "export the model again, or set `pooling` to none in attnserve.json",
                code="model.no_output",
            )

    @property
    def _length_axes(self) -> set[int | str | None]:
        return {tensor.axes[1] for tensor in self.inputs if len(tensor.axes) > 1}

    def _axes_of(self, output: str) -> tuple[int | str | None, ...]:
        return next(tensor.axes for tensor in self.outputs if tensor.name == output)

    @property
    def signature(self) -> list[list[Any]]:
        """Name, type and shape of each input, as JSON."""
        return [[one.name, str(one.dtype), one.shape] for one in self.inputs]

    @property
    def card(self) -> dict[str, Any]:
        """A description of the model and of its optimization, as JSON."""
        artifact = self.artifact
        return {
            "parameters": self.cost.parameters,
            "max_length": self.encoder.max_length if self.encoder else None,
            "pooling": artifact.pooling,
            "normalize": artifact.normalize,
            "dimensions": artifact.dimensions,
            "prompts": artifact.prompts,
            "takes_text": self.encoder is not None,
            "classifies": self.can("classify"),
            "provider": self.provider,
            "runtime": self.runtime,
            "precision": self.precision,
            "source": artifact.source,
            "plan": artifact.plan_id,
            "operators": self.operators,
            "optimization": artifact.optimization,
        }

    @property
    def takes_mask(self) -> bool:
        """Whether texts of different lengths can share a batch."""
        return any(tensor.name == "attention_mask" for tensor in self.inputs)

    @cached_property
    def tasks(self) -> Mapping[TextTask, Refusal | None]:
        """Why it cannot do each task of texts; None for each that it can do; see ``tasks_of``."""
        inputs, outputs = (
            {tensor.name: tensor.axes for tensor in tensors}
            for tensors in (self.inputs, self.outputs)
        )
        return tasks_of(self.name, self.artifact, inputs, outputs)

    def can(self, task: TextTask) -> bool:
        """Whether it can do a task; False if the folder does not describe its outputs."""
        try:
            return self.tasks[task] is None
        except (InvalidArgument, InvalidModel):
            return False

    def warm_up(self) -> None:
        """Run the model once, and test whether its rows are independent.

        The first run allocates memory and compiles kernels. A graph may mix the rows of a batch
        (for example by a mean over them): requests share a batch only if a row has the same output
        alone and in a batch. Rows of a model with dynamic quantization of the whole batch run one
        by one. If CUDA graphs are captured, a second test shows whether runs may be padded.

        Raises:
            OutOfMemory, ModelFailed: It does not run.
        """
        for inputs in self._examples:
            try:
                outputs = self.run(inputs)
            except InvalidData:  # too long, or the graph needs other inputs
                continue
            if self._fixed_rows is None:
                self.rows_are_independent = has_independent_rows(
                    self.run, inputs, outputs, WARM_UP_ROWS
                )
                if self.long_rows is not None:
                    tokens = self.long_rows.above + 1
                    longer = {n: _with_tokens(array, tokens) for n, array in inputs.items()}
                    self.rows_are_independent &= has_independent_rows(
                        self.run, longer, self.run(longer), WARM_UP_ROWS
                    )
            if isinstance(self._session, GraphRunner | RunnerPool):
                padded_inputs = [
                    tensor.name
                    for tensor in self.inputs
                    if len(tensor.axes) > 1 and not isinstance(tensor.axes[1], int)
                ]
                self._session.allow_padding(
                    rows=self.batch_invariant and self.rows_are_independent,
                    tokens=self.batch_invariant
                    and ignores_padding(self.run, inputs, padded_inputs),
                )
            break
        if not self.batch_invariant:
            self.max_rows = 1
        else:
            self.max_rows = self._fixed_rows or (None if self.rows_are_independent else 1)

    def close(self) -> None:
        """Free the session and return its memory to the system; the model cannot run afterwards."""
        self._session = CLOSED
        return_freed_memory()

    @property
    def _fixed_rows(self) -> int | None:
        axes = self.inputs[0].axes
        return axes[0] if axes and isinstance(axes[0], int) else None

    def _check_tensor(
        self, tensor: Tensor, array: np.ndarray, sizes: dict[str, tuple[int, str]]
    ) -> None:
        subject = f"input {tensor.name!r}"
        if array.dtype != tensor.dtype:
            raise InvalidData(f"{subject} is {array.dtype}: expected {tensor.dtype}")
        shape = tensor.shape
        if shape and (
            array.ndim != len(shape)
            or any(want not in (-1, got) for want, got in zip(shape, array.shape, strict=True))
        ):
            raise InvalidData(f"{subject} has shape {list(array.shape)}: expected {shape}")
        # Ids and masks are never empty; the key/value cache of a decoder is, in its first step.
        if array.size == 0 and array.ndim <= 2:
            raise InvalidData(f"{subject} has shape {list(array.shape)}: it is empty")
        # ONNX Runtime would broadcast axes of the same name if it can, with another result.
        for axis, size in zip(tensor.axes, array.shape, strict=False):
            if (
                isinstance(axis, str)
                and (first_use := sizes.setdefault(axis, (size, subject)))[0] != size
            ):
                raise InvalidData(
                    f"{subject} has shape {list(array.shape)}: its axis {axis!r} is {size},"
                    f" but {first_use[0]} in {first_use[1]}"
                )
        # Gather on CUDA does not check its indices, and negative ids wrap around.
        bound = self._id_bounds.get(tensor.name)
        if bound and array.size and (array.min() < 0 or array.max() >= bound):
            wrong = array[(array < 0) | (array >= bound)].flat[0]
            raise InvalidData(f"{subject} holds {wrong}: expected ids from 0 to {bound - 1}")


class _Closed:
    """Placeholder for a freed session."""

    def __getattr__(self, name: str) -> Any:
        raise ModelFailed("the model is unloaded", "load it again")


CLOSED: Any = _Closed()


def _long_rows(operators: OperatorReport) -> LongRows | None:
    """The rows that another runtime runs, as the report states them."""
    found = operators.get("long_rows") if operators["rewritten"] else None
    return None if found is None else LongRows(**found)


def _with_tokens(array: np.ndarray, tokens: int) -> np.ndarray:
    """Rows whose tokens are repeated to another number."""
    return np.resize(array.T, (tokens, len(array))).T if array.ndim == 2 else array


def _tensor(value: ValueInfo) -> Tensor:
    if value.type not in ONNX_TYPES:
        raise InvalidModel(
            f"{value.name!r} is a {value.type}: expected a tensor of numbers or booleans",
            "export the model without it",
            code="model.datatype",
        )
    return Tensor(value.name, ONNX_TYPES[value.type], tuple(value.shape))


def _run_failed(error: RunFailed, inputs: Mapping[str, np.ndarray]) -> Exception:
    """Convert a failed run to the error of the request."""
    if error.kind == "memory":
        return OutOfMemory(
            "out of memory for this request", "send fewer or shorter texts at a time"
        )
    if error.kind == "device":
        kind = type(error.__cause__).__name__
        return ModelFailed(f"the model's session failed: {kind}", "try again")
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
    return InvalidData(
        f"the model cannot run {shapes}: {error.reason}",
        "send a shorter sequence, or the tensors that the model takes",
    )
