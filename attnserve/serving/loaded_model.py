"""A loaded model: session, signature, tokenizer and cost.

A ``Model`` is synchronous and thread-safe. A failure of its session is a ``ModelFailed``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from attnserve.context import Provider
from attnserve.literals import Side
from attnserve.models.artifact import Artifact
from attnserve.models.rows import fixed_axes
from attnserve.models.tokenizer import Encoding, Text, TextEncoder, TextInput, model_inputs
from attnserve.models.tokenizer_files import load_encoder, longest_text
from attnserve.runtime.by_load import IS_ALONE, run_together
from attnserve.runtime.inference_precision import precision_in
from attnserve.runtime.interface import Feed, RunFailed, Session
from attnserve.runtime.memory_use import return_freed_memory
from attnserve.runtime.session import RUNTIMES
from attnserve.serving.backends import (
    ON_CPU,
    RunnerOptions,
    open_runner,
    sessions_by_least_length,
)
from attnserve.serving.check_cache import compiled_file
from attnserve.serving.graph_facts import WARM_UP_ROWS, GraphFacts
from attnserve.serving.operator_report import NOT_REWRITTEN, OperatorReport
from attnserve.serving.padding import PaddingRunner, PaddingSession, run_overhead
from attnserve.serving.row_independence import has_independent_rows, ignores_padding
from attnserve.serving.signature import Signature
from attnserve.serving.text_tasks import TextTask, task_vectors, tasks_of, text_output
from graph_passes.analysis.cost import Cost
from graph_passes.errors import (
    AttnserveError,
    CheckFailed,
    InvalidArgument,
    InvalidData,
    InvalidModel,
    Refusal,
)

__all__ = ["Model", "ModelFailed", "OutOfMemory"]

log = logging.getLogger("attnserve")

SEND_TEXTS = (
    "send texts (langchain-openai: check_embedding_ctx_length=False), or ids of POST /tokenize"
)

SHAPES_CACHED = 1024


class ModelFailed(AttnserveError):
    """The model's session or its device is broken."""

    default_code = "model.failed"


class OutOfMemory(ModelFailed):
    """The run does not fit into memory."""

    default_code = "model.out_of_memory"


class Model:
    """A loaded model.

    Args:
        artifact: The model to load.
        options: Options of the session.
        name: By default the name of the artifact.
        graph: An equivalent file to run instead of the artifact's; inputs and lineage come from the
            artifact.
        operators: The operators of ``graph``.
        facts: Facts of the artifact's graph, with the costs of the graph that runs; None reads the
            facts of the artifact.

    Raises:
        InvalidModel: The model cannot be read, has an input or output that is not a plain tensor,
            or one name for axes of different sizes.
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
        fused = operators.fused
        runtime = options.device.runtime_name if fused is None else fused.runtime
        self.long_rows = None if fused is None else fused.long_rows
        runtimes = [runtime] if self.long_rows is None else [runtime, self.long_rows.runtime]
        facts = facts or GraphFacts.read(artifact)
        self.precisions = {name: _precision_in(name, facts) for name in runtimes}
        """The data types in which each runtime of the model computes (``precision_of``), by the
        name of the runtime; the runtime of short rows comes first."""
        self.cost = facts.cost
        self._cost_at = lru_cache(SHAPES_CACHED)(partial(_run_cost, self.cost))
        self._examples = facts.examples
        self._example: Feed | None = None  # inputs that the model accepts
        self.int8_warning, self.batch_invariant = facts.int8_warning, facts.batch_invariant
        # Each runtime holds the weights.
        options = options.with_concurrency(len(runtimes) * facts.weight_bytes)
        self.concurrency = options.concurrency
        """Maximum number of concurrent runs."""
        self.session: Session = open_runner(
            graph or artifact.model,
            replace(options, device=replace(options.device, runtime=runtime)),
            longest=longest_text(artifact),
            long_rows=self.long_rows,
            copied=facts.external if graph is None else (),
            compiled=graph and compiled_file(graph),
        )
        self.signature = Signature.read(self.name, self.session, facts.id_bounds)
        self.encoder = _load_encoder(artifact, self.signature)
        self._text_shapes: dict[int, dict[str, tuple[int, ...]]] = {}  # by the number of tokens
        self.signature.require_different_axes(artifact.model, self._caches)
        self.labels = artifact.labels
        if self.encoder:
            self._check_text_output()
        self.created = int(artifact.model.stat().st_mtime)
        self.rows_are_independent = False
        self.max_rows: int | None = 1
        self.run_overhead: int | None = None
        """Padding in tokens that costs half as much as starting a run; None if not measured."""

    # -- cost and runtime -------------------------------------------------------------------------

    def macs(self, inputs: Feed) -> int | None:
        """Multiply-accumulates of one run; None if they cannot be counted."""
        return self._cost_at(tuple((name, array.shape) for name, array in inputs.items()))[0]

    @property
    def runtime(self) -> str:
        """The names of the model's runtimes, joined by +."""
        return "+".join(self.precisions)

    @property
    def precision(self) -> str:
        """The data types in which the model computes, for each runtime if they differ."""
        return ", ".join(dict.fromkeys(self.precisions.values()))

    def runtime_for(self, tokens: int | None) -> str:
        """The name of the runtime that runs rows of this length."""
        if self.long_rows is not None and (tokens or 0) > self.long_rows.above:
            return self.long_rows.runtime
        return next(iter(self.precisions))

    def kernels_of(self, tokens: int | None) -> tuple[str, bool]:
        """The runtime that runs rows of this length, and whether it has other kernels for them.

        A row has the same result in a batch of rows with equal kernels.
        """
        runtime = self.runtime_for(tokens)
        short_rows = RUNTIMES[runtime].short_rows
        return runtime, short_rows is not None and (tokens or 0) > short_rows

    def run_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
        """Bytes that the largest operator of a run reads and writes; None if unknown.

        Attention scores grow with the square of the length.
        """
        return self._cost_at(tuple(shapes.items()))[1]

    # -- running ----------------------------------------------------------------------------------

    def run(self, inputs: Feed, outputs: Sequence[str] = ()) -> dict[str, np.ndarray]:
        """Run the session on checked inputs; return all outputs if ``outputs`` is empty.

        Raises:
            InvalidData: The graph cannot take these sizes or values.
            OutOfMemory: The run does not fit into memory.
            ModelFailed: The session or its device is broken.
        """
        names = tuple(outputs) or self.signature.output_names
        try:
            results = self.session.run(names, inputs)
        except RunFailed as error:
            raise _run_failed(error, inputs) from error
        return dict(zip(names, results, strict=True))

    def warm_up(self) -> None:
        """Run the model once, and test whether its rows are independent.

        The first run allocates memory and compiles kernels. A graph may mix the rows of a batch,
        for example by a mean over rows: requests share a batch only if a row has the same output
        alone and in a batch. If dynamic quantization covers the whole batch, rows run one by one. A
        second test shows whether sessions may pad their runs.

        Raises:
            OutOfMemory, ModelFailed: The model does not run.
        """
        for inputs in self._examples:
            try:
                outputs = self.run(inputs)
            except InvalidData:  # too many tokens, or the graph needs other inputs
                continue
            if self.concurrency > 1:
                run_together(partial(self.run, inputs), self.concurrency)
            if self.signature.fixed_rows is None:
                self.rows_are_independent = has_independent_rows(
                    self.run, inputs, outputs, WARM_UP_ROWS
                )
                if self.long_rows is not None:
                    tokens = self.long_rows.above + 1
                    longer = {n: _with_tokens(array, tokens) for n, array in inputs.items()}
                    self.rows_are_independent &= has_independent_rows(
                        self.run, longer, self.run(longer), WARM_UP_ROWS
                    )
                    if self.concurrency > 1:
                        run_together(partial(self.run, longer), self.concurrency)
            self._allow_padding(inputs)
            self._example = inputs
            break
        if self.batch_invariant:
            self.max_rows = self.signature.fixed_rows or (None if self.rows_are_independent else 1)

    def _allow_padding(self, inputs: Feed) -> None:
        """Allow sessions to pad their runs, if padding does not change the outputs."""
        sessions = sessions_by_least_length(self.session).values()
        padding_sessions = [each for each in sessions if isinstance(each, PaddingSession)]
        if not padding_sessions:
            return
        padded_inputs = [
            tensor.name
            for tensor in self.signature.inputs
            if len(tensor.axes) > 1 and not isinstance(tensor.axes[1], int)
        ]
        rows = self.batch_invariant and self.rows_are_independent
        tokens = self.batch_invariant and ignores_padding(self.run, inputs, padded_inputs)
        for session in padding_sessions:
            session.allow_padding(rows=rows, tokens=tokens)

    @property
    def size_multiple(self) -> int:
        """The tokens of runs are padded to multiples of this number, by the runtime of any row."""
        sessions = sessions_by_least_length(self.session).values()
        runners = (session for session in sessions if isinstance(session, PaddingRunner))
        return max((runner.multiple for runner in runners), default=1)

    def prepare_batches(self) -> None:
        """Compile kernels before the first request, and measure the cost of starting a run."""
        example = self._example
        if self.provider != "cpu" or self.max_rows is not None or example is None:
            return
        try:
            for least, session in sessions_by_least_length(self.session).items():
                if isinstance(session, PaddingRunner):
                    session.compile_sizes(example, least, self.concurrency)
            is_alone = IS_ALONE.set(self.concurrency == 1)
            try:
                self.run_overhead = run_overhead(self.session, example)
            finally:
                IS_ALONE.reset(is_alone)
        except RunFailed as error:  # without the preparation, runs take longer
            log.info("%s: the sizes of its runs were not prepared: %s", self.name, error.reason)

    def close(self) -> None:
        """Free the session and return its memory to the system. The model cannot run afterwards."""
        self.session = CLOSED
        return_freed_memory()

    # -- texts ------------------------------------------------------------------------------------

    def encode(
        self,
        texts: Sequence[Text | Encoding],
        *,
        truncate: bool = True,
        side: Side | None = None,
    ) -> list[Encoding]:
        """The tokens of texts, and given tokens with checked ids. The model must have a tokenizer.

        Raises:
            InvalidData: An id is not in the vocabulary; otherwise see ``TextEncoder.encode``.
        """
        assert self.encoder is not None
        bound = self.signature.id_bounds.get("input_ids") or 2**31
        # Ids are checked per text: in a batch, one invalid id would fail other requests.
        for index, text in enumerate(texts):
            ids = text.ids if isinstance(text, Encoding) else ()
            if wrong := [token for token in ids if not 0 <= token < bound]:
                raise InvalidData(
                    f"text {index} holds {wrong[0]}: expected ids from 0 to {bound - 1}", SEND_TEXTS
                )
        return self.encoder.encode(texts, truncate=truncate, side=side)

    def text_inputs(self, encodings: Sequence[Encoding]) -> dict[str, np.ndarray]:
        """The checked inputs of a batch of texts, padded to the longest text.

        Raises:
            InvalidData: The model takes no texts, or the texts do not fit the model.
        """
        assert self.encoder is not None
        missing = (self.signature.fixed_rows or 0) - len(encodings)
        inputs = self.encoder.batch_inputs(
            [*encodings, *[encodings[-1]] * missing], self._text_inputs
        )
        self.signature.check(inputs)
        return inputs

    def text_shapes(self, text: Encoding) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the inputs for one text.

        Raises:
            InvalidData: The model takes no texts.
        """
        assert self.encoder is not None
        if (shapes := self._text_shapes.get(len(text))) is None:
            inputs = self.encoder.batch_inputs([text], self._text_inputs)
            shapes = {name: array.shape for name, array in inputs.items()}
            self._text_shapes[len(text)] = shapes
        return shapes

    @cached_property
    def _text_inputs(self) -> dict[str, TextInput]:
        """The inputs that texts fill; see ``model_inputs``."""
        return model_inputs(self.session)

    @property
    def fixed_tokens(self) -> int | None:
        """The fixed length to which texts are padded; None for the longest text of a batch."""
        return self.encoder and self.encoder.length

    @property
    def _caches(self) -> list[str]:
        """The cache inputs of a model that takes texts."""
        if self.encoder is not None:
            with suppress(InvalidData):  # the model takes no texts
                inputs = self._text_inputs
                return [name for name, value in inputs.items() if value.cache is not None]
        return []

    def text_output(self, task: TextTask) -> str:
        """The name of the output that ``task`` uses.

        Raises:
            InvalidArgument: The artifact names an output that the model does not have.
        """
        return text_output(task, self.signature.output_names, self.artifact)

    def vectors(
        self, task: TextTask, inputs: Feed, output: np.ndarray
    ) -> np.ndarray:  # B D, or B S D for "tokens"
        """Compute the answer for each text of a batch from an output; see ``task_vectors``.

        Raises:
            CheckFailed: The output holds NaN or infinite numbers.
            InvalidArgument, InvalidData: The output has no embeddings or no classes.
        """
        axes = self.signature.axes_of(self.text_output(task))
        if len(axes) == 2 and isinstance(axes[1], str) and axes[1] in self.signature.length_axes:
            raise InvalidData(
                f"the output of {self.name} has one number per token: expected one vector per text"
                " or per token",
                "use the tensors of the output",
            )
        vectors = task_vectors(task, output, inputs.get("attention_mask"), self.artifact)
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
        inputs: Feed,
        output: np.ndarray,
    ) -> list[np.ndarray]:  # 1 D each, or S D without padding for "tokens"
        """The answer for each text of a batch, as separate arrays; see ``vectors``."""
        vectors = self.vectors(task, inputs, output)
        if task != "tokens":
            return [vectors[index : index + 1] for index in range(len(encodings))]
        assert self.encoder is not None
        masks = self.encoder.mask(encodings)
        return [row[mask] for row, mask in zip(vectors, masks, strict=False)]  # without filled rows

    def _check_text_output(self) -> None:
        """Check that the graph returns hidden states, if the folder states how to pool them.

        Raises:
            InvalidModel: The graph returns BERT's pooler_output instead.
        """
        stated = self.artifact.record.pooling
        if stated not in (None, "none") and self.text_output("embed") == "pooler_output":
            raise InvalidModel(
                f"{self.artifact.model}: `pooling` is {stated}, but the graph has no hidden states:"
                f" its output is pooler_output",
                "export the model again, or set `pooling` to none in attnserve.json",
                code="model.no_output",
            )

    @cached_property
    def tasks(self) -> Mapping[TextTask, Refusal | None]:
        """For each task of texts, the reason why the model cannot do it, or None (``tasks_of``)."""
        return tasks_of(self.signature, self.artifact)

    def can(self, task: TextTask) -> bool:
        """Whether the model can do a task; False if the folder does not describe its outputs."""
        try:
            return self.tasks[task] is None
        except (InvalidArgument, InvalidModel):
            return False


def _precision_in(runtime: str, facts: GraphFacts) -> str:
    """The data types in which a runtime computes a graph."""
    in_bfloat16 = facts.in_bfloat16 and RUNTIMES[runtime].computes_bfloat16
    return precision_in(facts.precision, in_bfloat16=in_bfloat16)


def _run_cost(
    cost: Cost, shapes: tuple[tuple[str, tuple[int, ...]], ...]
) -> tuple[int | None, int | None]:
    """MACs of a run with inputs of these shapes, and bytes of its largest operator."""
    return cost.macs_of(dict(shapes)), cost.largest_node_bytes(dict(shapes))


def _load_encoder(artifact: Artifact, signature: Signature) -> TextEncoder | None:
    """The text encoder, of the fixed length of the graph if a text fits; None without tokenizer."""
    if artifact.tokenizer is None:
        return None
    encoder = load_encoder(artifact)
    ids = [tensor.axes for tensor in signature.inputs if tensor.name == "input_ids"]
    _, tokens = fixed_axes(ids)
    fits = tokens is None or tokens > encoder.special_tokens
    return encoder.with_length(tokens) if fits else encoder


class _Closed:
    """Placeholder for a freed session."""

    def __getattr__(self, name: str) -> Any:
        raise ModelFailed("the model is unloaded", "load it again")


CLOSED: Any = _Closed()


def _with_tokens(array: np.ndarray, tokens: int) -> np.ndarray:
    """Repeat the tokens of rows to another number of tokens."""
    return np.resize(array.T, (tokens, len(array))).T if array.ndim == 2 else array


def _run_failed(error: RunFailed, inputs: Feed) -> Exception:
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
