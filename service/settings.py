"""What an operator can set, by argument or by environment (``ATTNSERVE_PORT=9000``)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from attnserve.session import Provider

__all__ = ["LogLevel", "Settings"]

LogLevel = Literal["debug", "info", "warning", "error"]


class Settings(BaseSettings):
    """How one process serves one model."""

    model_config = SettingsConfigDict(env_prefix="ATTNSERVE_", frozen=True)

    model: Path = Field(description="An .onnx file, or an artifact folder.")
    host: str = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 for all.")
    port: int = Field(default=8000, ge=0, le=65535, description="0 takes any free port.")
    provider: Provider = Field(default="cpu", description="Execution provider.")
    threads: int = Field(
        default=0, ge=0, description="Threads of one run; 0 leaves it to ONNX Runtime."
    )
    concurrency: int = Field(
        default=1,
        ge=1,
        description="Runs at once: more than one where threads is less than the cores.",
    )
    max_queue: int = Field(
        default=512,
        ge=0,
        description="Requests that may wait for a run; past it the answer is 429.",
    )
    max_body_bytes: int = Field(default=2_000_000, ge=1, description="Bytes of one request's body.")
    max_inputs: int = Field(default=32, ge=1, description="Texts of one /embed request.")
    max_tokens: int = Field(
        default=16_384,
        ge=1,
        description="Tokens of one request, padding included: bounds its memory.",
    )
    log_level: LogLevel = Field(
        default="info", description="From info on, a line for every request."
    )
