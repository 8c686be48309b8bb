"""API keys: requests without a known key are refused if keys are configured."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from graph_passes.errors import InvalidArgument
from service.errors import Unauthorized, explain
from service.settings import Settings

__all__ = ["RequireKey", "read_keys"]

OPEN = ("/v2/health/live", "/v2/health/ready", "/")
"""Paths that need no key: health checks, and the dashboard page, whose data does need one."""


def read_keys(settings: Settings) -> tuple[bytes, ...]:
    """The keys of ``settings`` and of its key file; empty if no key is required.

    Raises:
        InvalidArgument: The file cannot be read or holds no key, or a key is empty or not plain
            ASCII.
    """
    keys = [key.get_secret_value() for key in settings.api_keys]
    path = settings.api_keys_file
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise InvalidArgument(
                f"{path}: cannot be read: {reason}", "check the path", code="keys.unreadable"
            ) from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:  # an empty file must not disable authentication
            raise InvalidArgument(
                f"{path}: holds no key", "write one key per line", code="keys.none"
            )
        keys += found
    for number, key in enumerate(keys, 1):
        if not key:  # requests without a key would match it
            raise InvalidArgument(
                f"key {number} of {len(keys)} is empty", "remove or set it", code="keys.empty"
            )
        if not key.isascii() or not key.isprintable() or " " in key:
            raise InvalidArgument(
                f"key {number} of {len(keys)} holds spaces or characters other than plain ASCII",
                "HTTP headers can carry only those",
                code="keys.characters",
            )
    return tuple(key.encode() for key in keys)


class RequireKey:
    """ASGI middleware: 401 without ``Authorization: Bearer KEY`` or ``x-api-key: KEY``.

    The checksum of the request's key is compared in constant time with that of every known key, so
    that the time of a refusal reveals nothing.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[bytes]) -> None:
        self._app = app
        self._known = [hashlib.sha256(key).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._is_known(_given(scope)):
            await self._app(scope, receive, send)
            return
        error = Unauthorized(
            "the API key is missing or unknown",
            "send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        )
        await explain(scope, error)(scope, receive, send)

    def _is_known(self, given: bytes) -> bool:
        digest, is_known = hashlib.sha256(given).digest(), False
        for known in self._known:
            is_known |= hmac.compare_digest(digest, known)
        return is_known


def _given(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return b""
