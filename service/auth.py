"""Who may ask what: API keys, and the rights to load and unload models."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Mapping
from time import monotonic
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from graph_passes.errors import InvalidArgument
from service.errors import Forbidden, Unauthorized, explain
from service.log import REQUEST
from service.settings import Settings, is_loopback

__all__ = ["GuardControl", "RequireKey", "read_keys"]

RELOAD_S = 1.0
"""How often the key file is looked at."""

log = logging.getLogger("attnserve")

CONTROL = re.compile(r"/v2/repository/models/[^/]*/(un)?load")

OPEN = ("/v2/health/live", "/v2/health/ready", "/")
"""Paths that need no key: health checks, and the dashboard page, whose data does need one."""


def read_keys(settings: Settings) -> dict[bytes, str]:
    """All keys of ``settings`` and of its key file with their names; empty if no key is required.

    A line of the file may name its key: ``KEY NAME``. The name of another key is the beginning of
    its SHA-256 checksum.

    Raises:
        InvalidArgument: The file cannot be read or holds no key, or a key is empty or not plain
            ASCII.
    """
    keys = [(key.get_secret_value(), "") for key in settings.api_keys]
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
        keys += [(key, name.strip()) for key, _, name in (line.partition(" ") for line in found)]
    for number, (key, _) in enumerate(keys, 1):
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
    if keys:
        keys += [(key.get_secret_value(), "") for key in settings.admin_keys]
    return {key.encode(): name or _fingerprint(key.encode()) for key, name in keys}


def _fingerprint(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()[:8]


class GuardControl:
    """ASGI middleware: 403 for loading and unloading models, unless the client may do it.

    A page of another site can send requests to a server of the same machine. Browsers name the site
    in ``Origin``, also if its name was bound to another address (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings
        admins = [key.get_secret_value().encode() for key in settings.admin_keys]
        self._admins = _checksums({key: _fingerprint(key) for key in admins})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        answer = self._app if error is None else explain(scope, error)
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope) -> Forbidden | None:
        if not CONTROL.fullmatch(scope["path"]):
            return None
        if not self._settings.controls_models:
            return Forbidden(
                "loading and unloading of models is off",
                "set ATTNSERVE_MODEL_CONTROL=true, and ATTNSERVE_ADMIN_KEYS",
            )
        origin = next((v.decode("latin-1") for n, v in scope["headers"] if n == b"origin"), None)
        if origin is not None and not self._is_own(origin):
            return Forbidden(f"pages of {origin} may not load or unload models")
        if self._admins and not is_known(_given(scope), self._admins):
            return Forbidden("this needs a key of an administrator", "see ATTNSERVE_ADMIN_KEYS")
        return None

    def _is_own(self, origin: str) -> bool:
        if origin in self._settings.cors_origins:
            return True
        return self._settings.is_local and is_loopback(urlsplit(origin).hostname or "")


class RequireKey:
    """ASGI middleware: 401 without ``Authorization: Bearer KEY`` or ``x-api-key: KEY``.

    A key file is read again when it has changed, in every worker. If it cannot be read, or holds no
    key, the keys before stay.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._path = settings.api_keys_file
        self._version, self._looked_at = self._file_version(), monotonic()
        self._known = _checksums(read_keys(settings))

    def _file_version(self) -> tuple[int, int] | None:
        """Changes with the file; None if there is none."""
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    def _refresh(self) -> None:
        if self._path is None or monotonic() - self._looked_at < RELOAD_S:
            return
        self._looked_at, version = monotonic(), self._file_version()
        if version == self._version:
            return
        self._version = version
        try:
            self._known = _checksums(read_keys(self._settings))
            log.info("%s: read again", self._path)
        except InvalidArgument as error:
            log.error("the API keys stay as they are: %s", error.what)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._refresh()
        if scope["type"] != "http" or scope["path"] in OPEN or is_known(_given(scope), self._known):
            await self._app(scope, receive, send)
            return
        error = Unauthorized(
            "the API key is missing or unknown",
            "send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        )
        await explain(scope, error)(scope, receive, send)


def _checksums(keys: Mapping[bytes, str]) -> dict[bytes, str]:
    return {hashlib.sha256(key).digest(): name for key, name in keys.items()}


def is_known(given: bytes, known: Mapping[bytes, str]) -> bool:
    """Whether a key has one of these checksums; its name goes to the log.

    All are compared, in constant time, so that the time of a refusal reveals nothing.
    """
    digest, found = hashlib.sha256(given).digest(), None
    for each, name in known.items():
        found = name if hmac.compare_digest(digest, each) else found
    if found is not None and (fields := REQUEST.get()) is not None:
        fields.setdefault("key", found)
    return found is not None


def _given(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return b""
