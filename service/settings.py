"""Settings of the server, from options or the environment (``ATTNSERVE_PORT=9000``)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
)

from attnserve.context import AUTO, Device
from attnserve.options import Cli, Options
from attnserve.runtime.machine import available_cores

if TYPE_CHECKING:  # `attnserve --help` needs these types
    from attnserve.runtime.cuda import Cuda

LogLevel = Literal["debug", "info", "warning", "error"]

ServedBy = Literal["auto", "cpu", "cuda"]
"""Execution providers; ``on_device`` replaces "auto" before models are loaded."""

BATCH_TOKENS = {"auto": 512, "cpu": 512, "cuda": 16_384}
"""Least default of ``max_batch_tokens`` by provider. On a CPU, larger batches raise the latency but
not the throughput, unless starting a run takes long."""

BATCH_OVERHEADS = 20
"""Default of ``max_batch_tokens`` in units of ``run_overhead_tokens``. That is half of the cost of
starting a run, so that a full batch costs ten times its start."""

MOST_CPU_TOKENS = 2048
"""Largest default of ``max_batch_tokens`` on a CPU."""

RUN_OVERHEAD = {"auto": 4, "cpu": 4, "cuda": 512}
"""Default of ``run_overhead_tokens`` by provider, if the overhead of a run was not measured."""


def _listed(value: object) -> object:
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


def _listed_secrets(value: object) -> object:
    parts = _listed(value)
    if parts == [] and isinstance(value, str):  # an empty secret would disable authentication
        raise ValueError("expected keys separated by commas, or unset")
    return parts


def _parsed(value: object) -> object:
    import orjson  # Ctrl-C during this import ends Python with a segmentation fault

    try:
        return orjson.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"expected JSON: {error}") from error


class Limits(BaseModel):
    """Settings of one model, which override the settings of the service."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    threads: PositiveInt | None = None
    concurrency: PositiveInt | None = None
    max_batch_tokens: PositiveInt | None = None
    max_queue: NonNegativeInt | None = None


ByModel = Annotated[Mapping[str, Limits], BeforeValidator(_parsed)]
Listed = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Count = Annotated[int, Field(ge=1), Cli(metavar="N")]
Size = Annotated[int, Field(ge=0), Cli(metavar="N")]
Rate = Annotated[float, Field(gt=0, le=1), Cli(metavar="R")]
Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(_listed_secrets)]


BATCHING = "Batching and limits"
ACCESS = "Access"
QUALITY = "Quality in production"
LOADING = "Loading of models"
RUN = "Run"
SCALING = "Scaling"
"""Panels of the help."""


class EnvironmentOptions(Options):
    """Options that are not given, or None, are read from environment variables.

    A variable is ``prefix`` and the name of the field, in any case.
    """

    prefix: ClassVar[str]
    area, invalid = "settings", "invalid"
    reads_environment = True

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            arguments = {name: value for name, value in values.items() if value is not None}
            super().__init__(**{**self.environment(), **arguments})

    @classmethod
    def environment(cls) -> dict[str, str]:
        """The values that environment variables set, by field."""
        variables = {name.upper(): value for name, value in os.environ.items()}
        keys = {name: f"{cls.prefix}{name.upper()}" for name in cls.model_fields}
        return {name: variables[key] for name, key in keys.items() if key in variables}

    @classmethod
    def advice(cls, name: str, values: Mapping[str, Any]) -> str:
        # A value may come from a parameter: name the parameter only if it was given.
        is_given = values.get(name) not in (None, cls.environment().get(name))
        return f"set {f'`{name}` or ' if is_given else ''}{cls.prefix}{name.upper()}"


class Settings(EnvironmentOptions):
    """Settings of one server process.

    Raises:
        InvalidArgument: A value is invalid, or a variable misspells the name of keys.
    """

    prefix = "ATTNSERVE_"

    model: Annotated[Path, Cli(metavar="MODEL")]
    """An .onnx file, an artifact folder, or a folder of models (NAME/VERSION/model.onnx or
    NAME/model.onnx)."""
    default_model: Annotated[str | None, Cli(metavar="NAME")] = None
    """Model of requests that name none, if several are served."""
    host: Annotated[str, Cli(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all interfaces."""
    port: Annotated[int, Field(ge=0, le=65535), Cli(metavar="N")] = 8000
    """Port to listen on; 0 for any free port."""
    workers: Annotated[int, Field(ge=1, le=256), Cli(metavar="N")] = 1
    """Number of worker processes. Each has its own copy of the models and its own limits of rows,
    runs and requests."""
    provider: Annotated[ServedBy, Cli(panel=RUN)] = "auto"
    """Execution provider; auto uses CUDA if a GPU is usable, else the CPU."""
    runtime: Annotated[str, Cli(metavar="NAME", panel=RUN)] = AUTO
    """Library that runs the models: onnxruntime, openvino, or one of another package; auto runs
    each model in the installed one that is fastest for it with equal outputs."""
    threads: Annotated[Size, Cli(metavar="N", panel=RUN)] = 0
    """Threads of one run; 0 uses the default of ONNX Runtime."""
    concurrency: Size = 0
    """Concurrent runs. A run that is alone uses all `threads`; on a CPU, concurrent ones share the
    cores. 0 chooses: on a CPU one per core, 4 with 8 cores and more, and 1 for weights above 500 MB
    or if `threads` is less than the number of cores."""
    gpu_memory_bytes: PositiveInt | None = None
    """Maximum GPU memory of a session, for weights and activations. A model has one session; with
    CUDA graphs, one per concurrent run."""
    cuda_graphs: Annotated[int, Field(ge=0, le=256)] = 0
    """Maximum number of shapes per session that are captured as CUDA graphs."""
    tf32: bool = False
    """Allow TF32 on CUDA: float32 products use 10-bit mantissas."""

    max_batch_tokens: Annotated[
        Count | None,
        Field(
            description="Maximum of rows x longest row of a batch, in tokens; by default"
            f" {BATCH_TOKENS['cpu']} on a CPU, more if starting a run takes long, and"
            f" {BATCH_TOKENS['cuda']} on CUDA."
        ),
        Cli(metavar="N", panel=BATCHING),
    ] = None
    run_overhead_tokens: NonNegativeInt | None = Field(
        default=None,
        description="Maximum padding that a row may add to a batch, in tokens: half of the cost of"
        " starting a run. By default it is measured when a model is loaded on a CPU, and"
        f" {RUN_OVERHEAD['cuda']} on CUDA.",
    )
    model_limits: ByModel = Field(default={})
    """Values of threads, concurrency, max_batch_tokens and max_queue for single models, as JSON:
    {"NAME": {"concurrency": 1, "max_queue": 64}}."""
    max_wait_ms: Annotated[float, Field(ge=0, le=60_000), Cli(metavar="MS", panel=BATCHING)] = 0
    """Maximum time in milliseconds that a free slot waits for a batch to fill; 0 starts at once."""
    max_queue: Annotated[Size, Cli(metavar="N", panel=BATCHING)] = 512
    """Maximum number of waiting rows (texts); the server answers 429 above it."""
    timeout_ms: Annotated[PositiveFloat, Cli(metavar="MS", panel=BATCHING)] = 30_000
    """Timeout in milliseconds of requests without the header x-timeout-ms; the server answers 504
    after it."""
    max_timeout_ms: Annotated[float, Field(gt=0, le=86_400_000)] = 300_000
    """Maximum of the header x-timeout-ms, in milliseconds. A larger timeout_ms raises it."""

    max_body_bytes: PositiveInt = 2_000_000
    """Maximum size of a request body in bytes."""
    max_inputs: PositiveInt = 2048
    """Maximum number of texts per request; the default is that of OpenAI's API."""
    max_text_chars: PositiveInt = 200_000
    """Maximum number of characters of one text."""
    max_tokens: PositiveInt = 300_000
    """Maximum number of tokens of the texts of one request."""
    max_padded_tokens: PositiveInt = 16_384
    """Maximum number of tokens of the tensors of one request, with padding."""
    max_tensor_bytes: PositiveInt = 64_000_000
    """Maximum size in bytes of the input tensors of one request, and of its output tensors."""
    any_token_ids: bool = False
    """Accept token ids that do not begin with the special token of the model."""
    max_open_bytes: PositiveInt = 256_000_000
    """Maximum size in bytes of the bodies of all open requests (the server answers 429 above it)
    and of their output tensors (requests wait for free memory). Outputs count twice: they exist per
    row and joined."""
    max_run_bytes: PositiveInt = 2_000_000_000
    """Maximum number of bytes that one operator reads and writes in the run of one row. Attention
    that is not fused needs 2 x heads x length^2 numbers."""

    ssl_certfile: Annotated[Path | None, Cli(metavar="FILE", panel=ACCESS)] = None
    """PEM file of the server's certificate: serve HTTPS with it."""
    ssl_keyfile: Annotated[Path | None, Cli(metavar="FILE", panel=ACCESS)] = None
    """PEM file of the server's private key, if `ssl_certfile` does not contain it."""
    ssl_keyfile_password: SecretStr | None = None
    """Password of the private key."""
    ssl_ca_certs: Annotated[Path | None, Cli(metavar="FILE", panel=ACCESS)] = None
    """PEM file of certificate authorities: every client, also a health check, needs a certificate
    of one of them."""
    api_keys: Secrets = ()
    """Accepted API keys, separated by commas; none accepts every client."""
    api_keys_file: Annotated[Path | None, Cli(metavar="FILE", panel=ACCESS)] = None
    """File with one API key per line; lines that start with # are comments."""
    admin_keys: Secrets = ()
    """API keys that may load and unload models, separated by commas; if empty, every accepted
    client may. They are valid for all other requests too."""
    model_control: bool | None = None
    """Allow clients to load and unload models; by default if host is a loopback address."""
    cors_origins: Annotated[Listed, Cli(metavar="URL,...", panel=ACCESS)] = ()
    """Allowed CORS origins, separated by commas; * for all."""

    shadow: Annotated[Path | None, Cli(metavar="ORIGINAL", panel=QUALITY)] = None
    """Original of the served model. A sample of the requests also runs through it, after the
    answer, to measure the quality and to test the quality guarantee of the served model."""
    shadow_rate: Annotated[Rate, Cli(metavar="R", panel=QUALITY)] = 0.005
    """Share of the requests of which one row is compared with the original; at least 0.04 for the
    first 64 rows."""
    sample_texts: Annotated[Path | None, Cli(metavar="FILE", panel=QUALITY)] = None
    """File that collects request texts, one per line, for calibration. It contains client data."""
    sample_rate: Annotated[Rate, Cli(metavar="R", panel=QUALITY)] = 0.01
    """Share of the texts that are collected, until the file has 10 MB."""
    sample_mask: Annotated[bool, Cli(panel=QUALITY)] = False
    """Replace numbers and mail addresses in collected texts."""

    probe: Annotated[bool, Cli(panel=LOADING)] = True
    """Load check: load and run each model in a separate process before it is served."""
    probe_timeout_s: Annotated[PositiveFloat, Cli(metavar="S", panel=LOADING)] = 300
    """Timeout in seconds to load a model and run it once."""
    probe_cache: bool = True
    """Keep the results of the load check and of operator fusion in the user's cache folder
    (XDG_CACHE_HOME), and skip both for a model that passed them on this machine."""
    strict_readiness: bool = True
    """Report not ready until every model that was on disk at the start is loaded or unloaded."""
    rewrite: Annotated[bool, Cli(panel=LOADING)] = True
    """Fuse operators if the fused model is equivalent (cosine at least 1 - 1e-6), faster on
    average, and at no shape more than 3% slower (upper end of the 95% interval)."""
    drain_delay_s: Annotated[NonNegativeFloat, Cli(metavar="S", panel=RUN)] = 0
    """Seconds between reporting not ready and closing the socket when the server stops, for a load
    balancer to notice."""
    drain_timeout_s: Annotated[PositiveFloat, Cli(metavar="S", panel=RUN)] = 25
    """Seconds to answer accepted requests when the server stops. Later, unanswered requests are
    refused, and the server exits with an error."""
    max_connections: PositiveInt = 1000
    """Maximum number of open connections of a process. A further connection replaces one that waits
    for its client. If there is none, it is answered with 503, except for health checks."""
    log_level: LogLevel = "info"
    """Log level; info and debug log every request."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log: text or JSON, one line per record."""
    access_log: bool = True
    """Log every request, at the level info."""

    @classmethod
    def environment(cls) -> dict[str, str]:
        _refuse_misspelled_keys()
        return super().environment()

    def logged_at(self, level: str | None) -> Settings:
        """Copy of the settings with another log level; None keeps the level."""
        return self if level is None else self.model_copy(update={"log_level": level})

    def for_model(self, model: str) -> Settings:
        """Copy of the settings with the limits of a model."""
        limits = self.model_limits.get(model)
        if limits is None:
            return self
        return self.model_copy(update=limits.model_dump(exclude_none=True))

    @property
    def device(self) -> Device:
        """Device of the models; the provider "auto", which ``on_device`` replaces, means CPU."""
        return Device("cuda" if self.provider == "cuda" else "cpu", self.threads, self.runtime)

    @property
    def shares_cores(self) -> bool:
        """Whether runs that take all their threads may need more of them than there are cores."""
        cores = available_cores()
        runs = max(1, self.concurrency) if 0 < self.threads < cores else 1
        return self.workers * runs * (self.threads or cores) > cores

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    @property
    def controls_models(self) -> bool:
        """Whether clients may load and unload models."""
        return self.is_local if self.model_control is None else self.model_control

    def batch_tokens(self, overhead: int) -> int:
        """``max_batch_tokens``, or its default for a model with this ``overhead_tokens``."""
        default = max(BATCH_TOKENS[self.provider], min(BATCH_OVERHEADS * overhead, MOST_CPU_TOKENS))
        return self.max_batch_tokens or default

    def overhead_tokens(self, measured: int | None) -> int:
        """``run_overhead_tokens``, or the measured overhead, or the default of the provider."""
        for tokens in (self.run_overhead_tokens, measured):
            if tokens is not None:
                return tokens
        return RUN_OVERHEAD[self.provider]

    @property
    def cuda(self) -> Cuda:
        """GPU options of the sessions."""
        from attnserve.runtime.cuda import Cuda

        return Cuda(tf32=self.tf32, memory_bytes=self.gpu_memory_bytes)


def is_loopback(host: str) -> bool:
    """Whether a host name or address belongs to the loopback interface."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class RaySettings(EnvironmentOptions):
    """Number and resources of replicas on Ray Serve."""

    prefix = "ATTNSERVE_RAY_"
    panel = SCALING

    address: Annotated[str | None, Cli(metavar="ADDRESS", panel="")] = None
    """Address of a running Ray cluster; if omitted, one is started here."""
    replicas: Count = 1
    """Minimum number of replicas."""
    max_replicas: Count | None = None
    """Maximum number of replicas; if omitted, their number is fixed."""
    target_ongoing: Annotated[PositiveFloat, Cli(metavar="N")] = 16
    """Average open requests per replica above which another replica starts."""
    cpus: Annotated[NonNegativeFloat, Cli(metavar="N")] = 1
    """CPU cores per replica."""
    gpus: Annotated[NonNegativeFloat, Cli(metavar="N")] = 0
    """GPUs per replica."""
    drain_s: NonNegativeFloat = 30
    """Time limit in seconds for a stopping replica to answer its requests."""


def _refuse_misspelled_keys() -> None:
    """Refuse misspelled variables of API keys, because unknown variables are ignored."""
    names = {f"{Settings.prefix}{name}".upper() for name in Settings.model_fields}
    for name in os.environ:
        is_key = re.match("ATTNSERVE_(API|ADMIN)_?KEY", name, re.IGNORECASE)
        if is_key and name.upper() not in names:
            from graph_passes.errors import InvalidArgument

            raise InvalidArgument(
                f"{name}: no such setting",
                "set ATTNSERVE_API_KEYS, ATTNSERVE_API_KEYS_FILE or ATTNSERVE_ADMIN_KEYS",
                code="settings.unknown",
            )
