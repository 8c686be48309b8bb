"""API keys: who may ask, where keys are set."""

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
"""What balancers ask and what holds no data: the page at / asks for what it shows with a key."""


def read_keys(settings: Settings) -> tuple[bytes, ...]:
    """The keys of ``settings`` and of its file; none where everybody may ask.

    Raises:
        InvalidArgument: The file cannot be read or holds no key, or a key is empty or no plain
            ASCII.
    """
    keys = [key.get_secret_value() for key in settings.api_keys]
    path = settings.api_keys_file
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise InvalidArgument(f"{path}: cannot be read: {reason}", "check the path") from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:  # else a file that was emptied by mistake would let everybody in
            raise InvalidArgument(f"{path}: holds no key", "write a key a line")
        keys += found
    for number, key in enumerate(keys, 1):
        if not key:  # a request without a key sends this one
            raise InvalidArgument(f"key {number} of {len(keys)} is empty", "remove or set it")
        if not key.isascii() or not key.isprintable() or " " in key:
            raise InvalidArgument(
                f"key {number} of {len(keys)} holds more than plain ASCII characters",
                "HTTP headers carry nothing else",
            )
    return tuple(key.encode() for key in keys)


class RequireKey:
    """ASGI middleware: 401 without ``Authorization: Bearer KEY`` or ``x-api-key: KEY``.

    Keys are compared by checksum and in constant time, and always with all of them: how long a
    refusal takes tells nothing.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[bytes]) -> None:
        self._app = app
        self._known = [hashlib.sha256(key).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._is_known(_given(scope)):
            await self._app(scope, receive, send)
            return
        error = Unauthorized(
            "no API key, or not one that this server knows",
            "send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        )
        await explain(scope["path"], error)(scope, receive, send)

    def _is_known(self, given: bytes) -> bool:
        digest, found = hashlib.sha256(given).digest(), False
        for known in self._known:
            found |= hmac.compare_digest(digest, known)
        return found


def _given(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return b""
