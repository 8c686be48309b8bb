"""The groups of options of the commands. This module defines every option, once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import BeforeValidator, Field, FiniteFloat, NonNegativeInt, model_validator

from attnserve.context import AUTO, Device, Progress, Provider, RunContext, ignore_progress
from attnserve.literals import (
    Alignment,
    Importance,
    LearnedTask,
    MixingOption,
    Pooling,
    TaskName,
    TrainedPrecision,
)
from attnserve.options.base import Cli, Options
from attnserve.options.fields import (
    CALIBRATION,
    INT8,
    PRECISION,
    Allowed,
    Converted,
    Cosine,
    Counts,
    File,
    Files,
    Lengths,
    MeasureName,
    Minutes,
    Names,
    Ranks,
    RemovedShare,
    SearchMeasureName,
    TokenizerFile,
    fail,
    read_lengths,
    read_minutes,
    read_names,
    read_ranks,
    read_weights,
)
from attnserve.paths import StrPath
from graph_passes.analysis.workload import Phase

__all__ = [
    "GROUPS",
    "Comparison",
    "Data",
    "Goal",
    "Rewrites",
    "Run",
    "Scoring",
    "Target",
    "Timing",
    "Training",
    "Write",
    "check_files",
    "check_seed",
]

# The panels of the help.
SEARCH = "Automatic search"
REWRITES = "Rewrites by hand"
OUTPUT = "Output"
RUN = "Run"


class Rewrites(Options):
    """Rewrites that are requested by hand.

    Rewrites are applied in the ``order`` of their passes; blocks are refit before and after
    dimensions are shared. Then operators are fused, and the precision is converted. ``layers``
    restricts the rewrites that do not name layers themselves.
    """

    panel = REWRITES
    area = "request"
    MODIFIERS: ClassVar = ("mixing", "collab_cache", "align", "importance", "layers", "refit")
    """Fields that request no rewrite, but modify the requested ones."""

    collab_dk: Annotated[
        Ranks | None,
        BeforeValidator(
            read_ranks, json_schema_input_type=int | Sequence[int] | Mapping[str, int] | str | None
        ),
        Field(examples=["128, or 128,96 for two layers"]),
        Cli(metavar="R", panel=""),
    ] = None
    """Compress by hand: the queries and keys of all heads share R dimensions. One number for all
    layers, or one per layer (R1,R2,...).

    In Python also R by layer name."""
    mixing: MixingOption = "auto"
    """Dimensions that a head with `collab_dk` reads: all R (dense), some (sparse), or the fastest
    of both and of own dimensions, by measured time at equal error (auto)."""
    head_dk: Annotated[int | None, Cli(metavar="K")] = None
    """Average number of Q/K dimensions per head (sparse mixing). Without `collab_dk`, each head
    keeps its own dimensions."""
    collab_cache: bool = False
    """Store the shared dimensions in a decoder's KV cache. The cache becomes smaller and changes
    its shape.

    It holds R shared dimensions (and H content logits) per token instead of H*K."""
    reuse: Annotated[StrPath | Mapping[str, Any] | None, Cli(metavar="FORM")] = None
    """Reuse attention probabilities of earlier layers: partial:K[:P], full:P, alternate,
    all-end[:P], auto, or a .json file of edges."""
    align: Alignment = "similarity"
    """Heads whose probabilities `reuse` takes: the most similar ones, or those with the same
    index."""
    prune: RemovedShare | None = None
    """Share of the heads to remove, least important first."""
    importance: Importance = "energy"
    """Head-importance criterion: output energy not recoverable from other heads (energy),
    leave-one-out loss (loo), or Voting-to-Stay (voting)."""
    prune_heads: Annotated[StrPath | Mapping[str, Any] | None, Cli(metavar="FILE")] = None
    """Heads to keep (1) and to remove (0), as .json: {"layer": [1, 0, ...]}."""
    skip: Names = ()
    """Layers whose attention is replaced by an affine map, or by a constant (LAYER:constant)."""
    ffn: RemovedShare | None = None
    """Share of the feed-forward neurons to remove."""
    strip_cache: bool = False
    """Remove a decoder's KV cache from the inputs and outputs, for models that only take whole
    sequences."""
    layers: Names | None = None
    """Layers to rewrite: comma-separated names or indices (default: all)."""
    refit: Annotated[bool, Cli(panel=CALIBRATION)] = True
    """Fit the output projections of rewritten layers to the calibration data."""

    @property
    def are_given(self) -> bool:
        """Whether any rewrite is requested."""
        return any(self.changed(*self.MODIFIERS))

    @property
    def uses_layers(self) -> bool:
        """Whether a rewrite is requested for the layers that ``layers`` names."""
        is_form = isinstance(self.reuse, str) and not self.reuse.endswith(".json")
        return is_form or any(o is not None for o in (self.collab_dk, self.head_dk, self.prune))

    @classmethod
    def requests(cls) -> list[str]:
        """The names of the fields that request a rewrite."""
        return [name for name in cls.model_fields if name not in cls.MODIFIERS]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_dk is not None and self.mixing == "dense":
            fail(
                f"`head_dk` {self.head_dk} applies to sparse mixing, and `mixing` is dense: every "
                "head reads all shared dimensions",
                "leave one of them out",
                "request.conflict",
            )
        is_collaborative = self.collab_dk is not None or self.head_dk is not None
        for option, is_given, is_used, requirement in (
            (f"`mixing` {self.mixing}", self.mixing != "auto", is_collaborative, "collab_dk"),
            ("`collab_cache`", self.collab_cache, is_collaborative, "collab_dk"),
            ("`importance`", self.importance != "energy", self.prune is not None, "prune"),
            ("`align`", self.align != "similarity", self.reuse is not None, "reuse"),
        ):
            if is_given and not is_used:
                fail(
                    f"{option} has no effect without `{requirement}`",
                    f"give `{requirement}`, or leave it out",
                    "request.conflict",
                )
        if self.prune is not None and self.prune_heads is not None:
            fail(
                "`prune` and `prune_heads` both choose the heads to remove",
                "give one of them",
                "request.conflict",
            )
        return self


class Goal(Options):
    """Goal of a search, and the rewrites that it may use."""

    panel = SEARCH
    area = "goal"

    keep: Annotated[
        float | None, Field(gt=0, le=1, examples=[0.99]), Cli(metavar="SHARE", panel="")
    ] = None
    """Find the fastest model that keeps this share of the quality, for example 0.99. The quality is
    the value of `measure`; with `eval_data`, the task score must be kept as well.

    Models are selected by a confidence bound and verified on held-out data."""
    target_speedup: Annotated[
        float | None, Field(ge=1, lt=1000, examples=[1.5]), Cli(metavar="FACTOR")
    ] = None
    """Minimum speed-up; minimizes the quality loss subject to it. Excludes `keep`."""
    eval_data: File | None = None
    """Labeled data in a format of `evaluate`: the share `keep` applies to its score too."""
    task: TaskName | None = None
    """The task of `eval_data`, whose score must be kept."""
    measure: SearchMeasureName = "auto"
    allow: Annotated[
        tuple[Allowed, ...],
        BeforeValidator(read_names, json_schema_input_type=Sequence[Allowed] | Allowed),
        Field(examples=["ffn"]),
        Cli(metavar="ffn"),
    ] = ()
    """Let the search remove feed-forward neurons."""
    recover: Annotated[
        Minutes | None,
        BeforeValidator(read_minutes, json_schema_input_type=float | str | None),
        Cli(metavar="TIME"),
    ] = None
    """Train faster models on the calibration data within the search, for example 20m (extra
    torch)."""
    training: Annotated[str, Cli(metavar="NAME")] = "distill"
    """Training method of `recover` (distill; other packages may add methods)."""

    @property
    def is_given(self) -> bool:
        """Whether a search is requested."""
        return self.keep is not None or self.target_speedup is not None

    def require(self) -> None:
        """Check that a search is requested.

        Raises:
            InvalidArgument: No goal is given.
        """
        if not self.is_given:
            fail(
                "a search needs a goal: `keep` or `target_speedup`",
                "give one of them",
                "goal.conflict",
            )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.keep is not None and self.target_speedup is not None:
            fail(
                "both `keep` and `target_speedup` are given: a search has one goal",
                "give one of them",
                "goal.conflict",
            )
        searches = self.eval_data or self.task or self.allow or self.measure == "score"
        if not self.is_given and searches:
            fail(
                "`eval_data`, `task`, `allow` and `measure` score apply to a search",
                "give `keep` or `target_speedup` too",
                "optimize.conflict",
            )
        if not self.is_given and self.recover is not None:
            fail(
                "`recover` applies to a search",
                "give `keep` or `target_speedup` too, or run `attnserve recover` on the result",
                "optimize.conflict",
            )
        if self.recover is None and self.training != "distill":
            fail("`training` applies to `recover`", "give `recover` too", "optimize.conflict")
        if (self.task is None) != (self.eval_data is None):
            fail(
                "`eval_data` and `task` belong together: the file, and the score to compute on it",
                f"give both; `task` is {' or '.join(get_args(TaskName))}",
                "goal.conflict",
            )
        if self.measure == "score" and self.task is None:
            fail(
                "`measure` is score: expected a score to measure",
                "give `eval_data` and `task` too",
                "goal.conflict",
            )
        return self


class Data(Options):
    """Data to calibrate on, and to compare with the original.

    Part of each file is held out to measure the quality; the lowest value over the files counts.
    Without data, shared dimensions are computed from the weights alone, with several times the
    error.
    """

    panel = CALIBRATION
    area = "data"

    calib: Annotated[Files, Cli(metavar="FILE", panel="")] = ()
    """Calibration data: text with one sentence per line, an .npz of input arrays, or a folder of
    .npz; can be repeated. The quality of each file is measured."""
    also_prove: Files = ()
    """Additional data to verify the result on, for example text of another kind; can be
    repeated."""
    calib_weights: Annotated[
        tuple[float, ...],
        BeforeValidator(read_weights, json_schema_input_type=Sequence[float] | str),
        Field(examples=["3,1"]),
        Cli(metavar="W1,W2,..."),
    ] = ()
    """Shares of several `calib` files in the rows to fit, for example 3,1 (default: all rows to fit
    of all files)."""
    tokenizer: TokenizerFile = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_files(self.calib, self.calib_weights)
        check_files(self.also_prove, name="also_prove")
        fitted = {path.resolve() for path in self.calib}
        if both := [str(path) for path in self.also_prove if path.resolve() in fitted]:
            fail(
                f"`also_prove` names {both[0]}, which `calib` names too: no row may be both fitted"
                " and verified",
                "leave it out: rows of `calib` are held out for the verification",
                "data.repeated",
            )
        return self

    def require(self) -> None:
        """Check that calibration data is given.

        Raises:
            InvalidArgument: No calibration data is given.
        """
        if not self.calib:
            fail(
                "calibration data is required, but `calib` is not given",
                "give `calib`, for example a text file with one sentence per line",
                "optimize.no_data",
            )


def check_files(
    paths: Sequence[Path], weights: Sequence[float] = (), *, name: str = "calib"
) -> None:
    """Check that files are given once, and that there is one positive weight for each, or none.

    Args:
        name: Name of the option with the files.

    Raises:
        InvalidArgument: A file is given twice, or the weights do not fit the files.
    """
    resolved = [path.resolve() for path in paths]
    if duplicate := next(
        (str(p) for p, f in zip(paths, resolved, strict=True) if resolved.count(f) > 1), ""
    ):
        fail(
            f"`{name}` names {duplicate} more than once",
            "give each file once" + ("; `calib_weights` sets its share" if name == "calib" else ""),
            "data.repeated",
        )
    if weights and (len(weights) != len(paths) or not all(0 < w < math.inf for w in weights)):
        fail(
            f"`calib_weights` is {', '.join(f'{w:g}' for w in weights)}: expected one number above"
            f" 0 for each of {len(paths)} files of `calib`",
            "for example 3,1 for two files",
            "data.weights",
        )


class Target(Options):
    """The precision of a model, and its target workloads, at which it should be fast.

    Costs are reported at this batch size and the middle length.
    """

    panel = RUN
    area = "target"

    precision: Converted = "float32"
    """Convert to any registered precision, including one of another package; auto is the precision
    in which a search finds the fastest model.

    All rewrites come first. A search leaves blocks in float32 whose int8 or int4 form is slower or
    loses too much."""
    batch: Annotated[int | None, Field(ge=1), Cli(metavar="N")] = None
    """Batch size to optimize for (default: 1, or 8 for lists of documents)."""
    sequence: Annotated[
        Lengths | None,
        BeforeValidator(read_lengths, json_schema_input_type=Lengths | str | None),
        Field(examples=["128, or 16-512"]),
        Cli(metavar="N|N-M", flags=("--seq",)),
    ] = None
    """Sequence length to optimize for and to report costs at, or a range such as 16-512 (default:
    the lengths of the calibration data, else 128)."""
    phase: Phase | None = None
    """Workload at which decoders with a cache should be fast: a prompt, a token after cached ones,
    or a sequence after as many cached tokens (default: a token with int4, else a sequence)."""


class Run(Options):
    """Runtime options: provider, threads, runtime and seed."""

    panel = RUN
    area = "run"

    threads: Annotated[NonNegativeInt, Cli(metavar="N", limits_threads=True)] = 0
    """Number of threads of what is timed or served, of numpy and of PyTorch; 0 uses the default of
    each library. Searches measure losses with all threads."""
    provider: Provider = "cpu"
    """Execution provider."""
    runtime: Annotated[str, Cli(metavar="NAME")] = AUTO
    """Library that runs the models: onnxruntime, openvino, or one of another package; auto is
    openvino for a precision that only it computes, and onnxruntime otherwise. Searches for such a
    precision time models in the fastest one."""
    seed: Annotated[NonNegativeInt, Cli(metavar="N")] = 0
    """Seed of random choices."""

    @property
    def device(self) -> Device:
        """The runtime, provider and threads of these options."""
        return Device(self.provider, self.threads, self.runtime)

    def context(self, progress: Progress = ignore_progress) -> RunContext:
        """The context of a run with these options."""
        return RunContext(self.device, self.seed, progress)


def check_seed(seed: int) -> None:
    """Check the seed of a function that takes no other option of a run.

    Raises:
        InvalidArgument: The seed is negative.
    """
    Run(seed=seed)


class Write(Options):
    """Output options: the written files, and the conditions under which nothing is written."""

    panel = OUTPUT
    area = "write"

    min_cosine: Cosine | None = None
    """Exit with code 1 and write nothing if the mean output cosine is lower."""
    external_data: bool = False
    """Write the weights to a file beside the model."""
    openvino: bool = False
    """Write openvino/openvino_model.xml too, which sentence-transformers loads without attnserve;
    always written to the folders of models that OpenVINO runs."""
    dry_run: bool = False
    """Compute and report everything, but write nothing."""
    force: bool = False
    """Overwrite an existing output."""


class Training(Options):
    """Options of the training of ``recover``."""

    area = "recovery"

    minutes: Annotated[FiniteFloat, Field(ge=0, examples=[20]), Cli(metavar="N")] = 20.0
    """Training time in minutes."""
    precision: Annotated[TrainedPrecision, Cli(panel=PRECISION, switches=(INT8,))] = "float32"
    """Train for the rounding of a precision, and write the converted model."""
    task: LearnedTask | None = None
    """Learn the labels of the tables (.tsv) in `data` too."""
    measure: MeasureName = "auto"


class Comparison(Options):
    """The data on which ``verify`` compares two models."""

    area = "compare"

    data: Annotated[Files, Cli(metavar="FILE")] = ()
    """Text, .npz or a folder of .npz (default: random inputs); can be repeated."""
    measure: MeasureName = "auto"
    tokenizer: TokenizerFile = None


class Scoring(Options):
    """The task of ``evaluate``, its data, and the conversion of texts to vectors."""

    area = "evaluate"
    codes: ClassVar = {"task": "evaluate.task"}

    task: TaskName | None = None
    """The task whose score is computed."""
    data: File | None = None
    """A .tsv file with a header line; a folder (retrieval), text (perplexity), CoNLL
    (token-classification) or .npz (image-classification). With `mteb`, a folder with the data sets
    of the tasks (default: the cache, or a download).

    Columns of tables are found by their names; others are ignored. sts: score, sentence1,
    sentence2. classification: label, text (or sentence). rerank: query, document, relevance. The
    folder of retrieval has queries, documents and qrels. perplexity: a text per line, or .npz.
    image-classification: the inputs of the model, and label."""
    pooling: Pooling | None = None
    """Pooling of the token outputs (default: the artifact's, else mean)."""
    max_length: Annotated[int | None, Field(ge=1), Cli(metavar="N")] = None
    """Truncate texts to N tokens."""
    tokenizer: TokenizerFile = None

    def require(self) -> tuple[TaskName, Path]:
        """The task and its data.

        Raises:
            InvalidArgument: The task or its data is not given.
        """
        if self.task is None or self.data is None:
            fail("expected `task` with `data`", "give both", "evaluate.usage")
        return self.task, self.data


class Timing(Options):
    """Shapes and rounds of ``bench``."""

    area = "benchmark"

    batches: Annotated[Counts, Cli(metavar="N,...", flags=("--batch",))] = (1,)
    """Batch sizes, separated by commas."""
    sequences: Annotated[Counts, Cli(metavar="N,...", flags=("--seq",))] = (128,)
    """Sequence lengths, separated by commas."""
    rounds: Annotated[int | None, Field(ge=1), Cli(metavar="N")] = None
    """Interleaved rounds per shape (default: about 8 seconds)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("batches", "sequences"):
            if not getattr(self, name):
                fail(f"`{name}` is empty", "give at least one value", "benchmark.empty")
        return self


GROUPS = (Goal, Rewrites, Data, Target, Run, Write, Training, Comparison, Scoring, Timing)
