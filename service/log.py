"""Logging to stderr: one line per record, as text or JSON, with fields of the request."""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import re
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from time import monotonic, sleep
from typing import Any

import orjson

from attnserve.control_characters import escape_control
from service.settings import Settings

REQUEST: ContextVar[dict[str, str] | None] = ContextVar("request", default=None)
"""Client address, ids and key of the current request: a part of each log line of the request."""

LOG_RECORDS = 10_000
"""Maximum number of log records that wait for stderr."""

FLUSH_S = 2.0

PLAIN = re.compile(r"[^\s\"'=\x00-\x1f\x7f-\xa0]+")
"""Pattern of values that need no quotes in a text line."""


class _Formatter(logging.Formatter):
    """Formats a record with its ``fields`` and the fields of the request."""

    def __init__(self, log_format: str) -> None:
        super().__init__()
        self._is_json = log_format == "json"

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        level = record.levelname.lower()
        message = record.getMessage()
        fields: dict[str, Any] = {**(REQUEST.get() or {}), **getattr(record, "fields", {})}
        stack = self.formatException(record.exc_info) if record.exc_info else ""
        if self._is_json:
            line = {"time": time, "level": level, "logger": record.name, "message": message}
            return orjson.dumps(line | fields | ({"exception": stack} if stack else {})).decode()
        head = f"{time} {level} {record.name}: "
        told = "".join(f" {name}={_quoted(value)}" for name, value in fields.items())
        lines = [message + told, *stack.splitlines()]
        return "\n".join(head + escape_control(line).replace("\n", "\\n") for line in lines)


def _quoted(value: Any) -> str:
    is_plain = isinstance(value, str) and PLAIN.fullmatch(value)
    return value if is_plain else orjson.dumps(value).decode()


class _QueuedLog(QueueHandler):
    """Queues formatted lines for a thread; drops lines if the queue is full."""

    def __init__(self) -> None:
        self.records: queue.Queue[logging.LogRecord] = queue.Queue(LOG_RECORDS)
        super().__init__(self.records)

    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(queue.Full):
            self.records.put_nowait(record)

    def flush(self) -> None:
        """Wait until the queue is written, at most ``FLUSH_S``; ``logging`` calls this at exit."""
        end = monotonic() + FLUSH_S
        while self.records.unfinished_tasks and monotonic() < end:
            sleep(0.005)


class _LogWriter(QueueListener):
    """Writes to the file descriptor; a blocked stream would hold a lock that exit needs."""

    def handle(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            os.write(2, f"{record.getMessage()}\n".encode(errors="backslashreplace"))


def configure_log(settings: Settings) -> None:
    """Log to stderr from a thread, including Python warnings and the stacks of a crash.

    A stalled reader of stderr must not block the event loop.
    """
    faulthandler.enable(2)
    handler = _QueuedLog()
    handler.setFormatter(_Formatter(settings.log_format))
    logging.basicConfig(handlers=[handler], level=settings.log_level.upper(), force=True)
    logging.captureWarnings(True)
    logging.getLogger("attnserve.access").disabled = not settings.access_log
    _LogWriter(handler.records).start()


def flush_log() -> None:
    """Wait until the log is written."""
    for handler in logging.getLogger().handlers:
        handler.flush()
