"""Authorization: API keys, and the permission to load and unload models."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from graph_passes.errors import InvalidArgument
from service.errors import ErrorResponses
from service.log import REQUEST
from service.protocol import HEALTH
from service.settings import Settings, is_loopback

RELOAD_S = 1.0
"""Interval of the checks of the key file."""

log = logging.getLogger("attnserve")

CONTROL = re.compile(r"/v2/repository/models/[^/]*/(un)?load\s*")
"""Paths that load or unload a model. Starlette's routes also match a trailing line break."""

OPEN = (*HEALTH, "/")
"""Paths that need no key, except for POST: health checks, and the dashboard page. The data of the
dashboard needs a key."""

Keys = dict[bytes, str]
"""The name of each key, by the SHA-256 checksum of the key."""


def read_keys(settings: Settings) -> Keys:
    """All keys of ``settings`` and of its key file with their names; empty if no key is required.

    A line of the file may name its key: ``KEY NAME``. The name of any other key is the beginning of
    its SHA-256 checksum.

    Raises:
        InvalidArgument: The file cannot be read or holds no key, or a key is empty or not plain
            ASCII.
    """
    keys = [(key.get_secret_value(), "") for key in settings.api_keys]
    if settings.api_keys_file is not None:
        keys += _read_file(settings.api_keys_file)
    _check_keys(keys)
    _check_keys([(key.get_secret_value(), "") for key in settings.admin_keys])
    names = _named(keys)
    return names | _admin_keys(settings) if names else {}


def _check_keys(keys: Sequence[tuple[str, str]]) -> None:
    """Check that no key is empty, and that HTTP headers can carry each."""
    for number, (key, _) in enumerate(keys, 1):
        if not key:  # requests without a key would match an empty key
            raise InvalidArgument(
                f"key {number} of {len(keys)} is empty", "remove or set it", code="keys.empty"
            )
        if not key.isascii() or not key.isprintable() or " " in key:
            raise InvalidArgument(
                f"key {number} of {len(keys)} holds spaces or characters other than plain ASCII",
                "HTTP headers can carry only those",
                code="keys.characters",
            )


def _read_file(path: Path) -> list[tuple[str, str]]:
    """The keys of a file, each with its name."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InvalidArgument(
            f"{path}: cannot be read: {reason}", "check the path", code="keys.unreadable"
        ) from error
    fields = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    if not fields:  # an empty file must not disable authentication
        raise InvalidArgument(f"{path}: holds no key", "write one key per line", code="keys.none")
    return [(key, name.strip()) for key, _, name in fields]


def _admin_keys(settings: Settings) -> Keys:
    return _named((key.get_secret_value(), "") for key in settings.admin_keys)


def _named(keys: Iterable[tuple[str, str]]) -> Keys:
    """Keys with their names; the default name is the beginning of the checksum."""
    checksums = ((hashlib.sha256(key.encode()).digest(), name) for key, name in keys)
    return {checksum: name or checksum.hex()[:8] for checksum, name in checksums}


class Authorize:
    """ASGI middleware: refuses requests without a known key, and loading of models.

    A key is sent as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``. A service with keys
    answers 401 to other requests. Every worker reloads a changed key file. If the file cannot be
    read, or contains no key, the previous keys stay valid.

    Loading and unloading is answered with 403, unless the client has the permission. A web page of
    another site can send requests to a server on the same machine. Browsers send the site in
    ``Origin``, even if its name was bound to another address (DNS rebinding).
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, keys: Keys, errors: ErrorResponses
    ) -> None:
        self._app, self._settings, self._errors = app, settings, errors
        self._version = self._file_version()
        self._looked_at = monotonic()
        self._known = keys
        self._admins = _admin_keys(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._refresh()
        answer = self._app if scope["type"] != "http" else self._refusal(scope) or self._app
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        path = scope["path"]
        is_open = path in OPEN and scope["method"] != "POST"
        if self._known and not is_open and not _is_known(scope, self._known):
            text = (
                "the API key is missing or unknown;"
                " send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            )
            return self._errors.answer(scope, 401, text)
        if not CONTROL.fullmatch(path):
            return None
        origin = Headers(scope=scope).get("origin")
        if not self._settings.controls_models:
            text = (
                "loading and unloading of models is off;"
                " set ATTNSERVE_MODEL_CONTROL=true, and ATTNSERVE_ADMIN_KEYS"
            )
        elif origin is not None and not self._is_own(origin):
            text = (
                f"web pages of {origin} may not load or unload models;"
                " add it to ATTNSERVE_CORS_ORIGINS to allow it"
            )
        elif self._admins and not _is_known(scope, self._admins):
            text = "this API key may not load or unload models; use one of ATTNSERVE_ADMIN_KEYS"
        else:
            return None
        return self._errors.answer(scope, 403, text)

    def _is_own(self, origin: str) -> bool:
        if origin in self._settings.cors_origins:
            return True
        with suppress(ValueError):  # ``origin`` is not a URL
            return self._settings.is_local and is_loopback(urlsplit(origin).hostname or "")
        return False

    def _file_version(self) -> tuple[int, int] | None:
        """A value that changes with the file; None without a file."""
        path = self._settings.api_keys_file
        try:
            status = path.stat() if path else None
        except OSError:
            return None
        return status and (status.st_mtime_ns, status.st_ino)

    def _refresh(self) -> None:
        if monotonic() - self._looked_at < RELOAD_S:
            return
        self._looked_at, version = monotonic(), self._file_version()
        if version == self._version:
            return
        self._version = version
        try:
            self._known = read_keys(self._settings)
            log.info("%s: reloaded", self._settings.api_keys_file)
        except InvalidArgument as error:
            log.error("the previous API keys stay valid: %s", error.what)


def _is_known(scope: Scope, names: Keys) -> bool:
    """Whether the key of a request has one of these checksums; the log gets the name of the key.

    All keys are compared in constant time, to prevent timing attacks.
    """
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    value = token if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    digest = hashlib.sha256(value.strip().encode()).digest()
    matched = None
    for checksum, name in names.items():
        matched = name if hmac.compare_digest(digest, checksum) else matched
    if matched is not None and (fields := REQUEST.get()) is not None:
        fields.setdefault("key", matched)
    return matched is not None
