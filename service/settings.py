"""What an operator can set, by option or by environment (``ATTNSERVE_PORT=9000``)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from attnserve.runtime.cuda import Cuda
from graph_passes.errors import InvalidArgument

__all__ = ["LogLevel", "ServedBy", "Settings", "read", "read_settings"]

Kind = TypeVar("Kind", bound=BaseSettings)

LogLevel = Literal["debug", "info", "warning", "error"]

ServedBy = Literal["auto", "cpu", "cuda"]
"""Until a ``Repository`` is made: there "auto" becomes one of the two others."""

BATCH_TOKENS = {"cpu": 512, "cuda": 16_384}
"""On a CPU a larger batch is no faster than two smaller ones, and answers later."""

RUN_OVERHEAD = {"cpu": 4, "cuda": 512}
"""What starting a run costs, in tokens: below it padding is cheaper than another run. 4 and 8 gave
7 % more texts a second than 16 on one CPU core (MiniLM, sentences of 16 tokens on average)."""


def _listed(value: object) -> object:
    return (
        [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, str)
        else value
    )


def _listed_secrets(value: object) -> object:
    parts = _listed(value)
    if parts == [] and isinstance(value, str):  # an unset secret would let everybody in
        raise ValueError("set but holds no key; expected keys separated by commas, or unset")
    return parts


Listed = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_listed_secrets)]


class Settings(BaseSettings):
    """How one process serves its models."""

    model_config = SettingsConfigDict(env_prefix="ATTNSERVE_", frozen=True)

    model: Path = Field(
        description="An .onnx file, an artifact folder, or a folder of models"
        " (NAME/VERSION/model.onnx or NAME/model.onnx)."
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 for all.")
    port: int = Field(default=8000, ge=0, le=65535, description="0 takes any free port.")
    workers: int = Field(
        default=1,
        ge=1,
        le=256,
        description="Processes that serve, each with its own copy of the models; limits of rows,"
        " runs and requests are those of each.",
    )
    provider: ServedBy = Field(
        default="auto",
        description="Execution provider; auto is CUDA where a GPU can be used, and else the CPU.",
    )
    threads: int = Field(
        default=0, ge=0, description="Threads of one run; 0 leaves it to ONNX Runtime."
    )
    concurrency: int = Field(
        default=1,
        ge=1,
        description="Runs at once: more than one where threads is less than the cores.",
    )
    gpu_memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Most GPU memory of a session: weights and activations. A model has one"
        " session; with CUDA graphs, one for each of the runs at once.",
    )
    cuda_graphs: int = Field(
        default=0,
        ge=0,
        le=256,
        description="Most shapes of a session whose runs are captured as CUDA graphs; 0 for none.",
    )
    tf32: bool = Field(
        default=False, description="On CUDA, round the factors of float32 products to 10 bits."
    )

    max_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Padded tokens of a batch, rows x longest; by default"
        f" {BATCH_TOKENS['cpu']} on a CPU and {BATCH_TOKENS['cuda']} on CUDA.",
    )
    run_overhead_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Padding that a row may bring into a batch, in tokens: what starting a run"
        f" costs. By default {RUN_OVERHEAD['cpu']} on a CPU and {RUN_OVERHEAD['cuda']} on CUDA.",
    )
    max_wait_ms: float = Field(
        default=0,
        ge=0,
        le=60_000,
        description="How long a free slot waits for a batch to fill; 0 starts at once.",
    )
    max_queue: int = Field(
        default=512,
        ge=0,
        description="Rows (texts) that may wait for a run; past it the answer is 429.",
    )
    timeout_ms: float = Field(
        default=30_000,
        gt=0,
        description="Time of a request that names none (x-timeout-ms); past it the answer is 504.",
    )
    max_timeout_ms: float = Field(
        default=300_000,
        gt=0,
        le=86_400_000,
        description="Maximum of x-timeout-ms. A larger timeout_ms raises it.",
    )

    max_body_bytes: int = Field(default=2_000_000, ge=1, description="Bytes of one request's body.")
    max_inputs: int = Field(default=32, ge=1, description="Texts of one request.")
    max_text_chars: int = Field(default=200_000, ge=1, description="Characters of one text.")
    max_tokens: int = Field(
        default=16_384, ge=1, description="Tokens of one request: bounds its memory."
    )
    max_tensor_bytes: int = Field(
        default=64_000_000, ge=1, description="Bytes of one request's tensors."
    )

    api_keys: Secrets = Field(
        default=(), description="Keys that are let in, separated by commas; none lets all in."
    )
    api_keys_file: Path | None = Field(
        default=None, description="A file with a key a line; lines that start with # are comments."
    )
    cors_origins: Listed = Field(
        default=(), description="Origins whose pages may ask, separated by commas; * for all."
    )

    probe: bool = Field(
        default=True,
        description="Load and run a model in a process of its own before it is trusted.",
    )
    probe_timeout_s: float = Field(
        default=300, gt=0, description="Time for a model to load and run once."
    )
    rewrite: bool = Field(
        default=True,
        description="Run a model in the operators that are fastest here, where the probe finds that"
        " they compute the same: cosine at least 1 - 1e-6, faster at every length tried.",
    )
    drain_delay_s: float = Field(
        default=0,
        ge=0,
        description="Seconds between not being ready and not listening any more, when told to stop:"
        " time for a balancer to notice.",
    )
    log_level: LogLevel = Field(
        default="info", description="From info on, a line for every request."
    )

    @property
    def batch_tokens(self) -> int:
        """``max_batch_tokens``, by default that of the provider."""
        return self.max_batch_tokens or BATCH_TOKENS[self._device]

    @property
    def overhead_tokens(self) -> int:
        """``run_overhead_tokens``, by default that of the provider."""
        given = self.run_overhead_tokens
        return RUN_OVERHEAD[self._device] if given is None else given

    @property
    def cuda(self) -> Cuda:
        """How sessions use the GPU."""
        return Cuda(tf32=self.tf32, memory_bytes=self.gpu_memory_bytes)

    @property
    def _device(self) -> str:
        return "cuda" if self.provider == "cuda" else "cpu"


def read_settings(**given: Any) -> Settings:
    """``given`` (what is None is not), and for the rest what the environment says.

    Raises:
        InvalidArgument: A value cannot work, or a variable misspells ATTNSERVE_API_KEYS.
    """
    _refuse_misspelled_keys()
    return read(Settings, given)


def _refuse_misspelled_keys() -> None:
    """Unknown variables are ignored, but a misspelled ATTNSERVE_API_KEYS would let everybody in."""
    known = {f"ATTNSERVE_{name}".upper() for name in Settings.model_fields}
    for name in os.environ:
        if re.match("ATTNSERVE_API_?KEY", name, re.IGNORECASE) and name.upper() not in known:
            raise InvalidArgument(
                f"{name}: no such setting", "set ATTNSERVE_API_KEYS or ATTNSERVE_API_KEYS_FILE"
            )


def read(kind: type[Kind], given: Mapping[str, Any]) -> Kind:
    """Settings of a kind: see ``read_settings``."""
    try:
        return kind(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(map(str, first["loc"][:1])) or "settings"
        shown = "" if name == "api_keys" else f" {first['input']!r}"
        variable = f"{kind.model_config.get('env_prefix', '')}{name.upper()}"
        # Not every setting is an option: one is named only where it can have been given.
        option = "" if given.get(name) is None else f"--{name.replace('_', '-')} or "
        raise InvalidArgument(
            f"{name}{shown}: {first['msg']}", f"mend {option}{variable}"
        ) from error
