"""The uvicorn server of one process: its socket, its log, and a graceful stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from graph_passes.errors import InvalidArgument
from service.engine.repository import Repository
from service.errors import ServiceError
from service.log import flush_log
from service.protocol import ConnectionState, Protocol
from service.settings import Settings

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

KEEP_ALIVE_S = 75
"""Seconds after which an idle connection is closed. uvicorn's default of 5 s is shorter than the
pauses of many clients, and a request that is sent while the connection closes gets no answer."""

CLOSE = (b"connection", b"close")

RESERVED_FILES = 128
"""Number of open files that are not connections: models, the log, connections being refused."""

CUT_S = 2.0
"""Seconds to send the refusals after the drain timeout."""

log = logging.getLogger("attnserve")


class Server(uvicorn.Server):
    """A uvicorn server that answers accepted requests before it stops.

    After the first SIGTERM or SIGINT, the server reports not ready, stops accepting connections and
    drains. After a SIGINT during the drain, or the drain timeout, it refuses unanswered requests.
    If the process still does not end, because a run does not return, the process is terminated.

    The port opens before the models are loaded, so that a probe can distinguish a loading server
    from a dead one. Until then the server is not ready, and inference is answered with 503.
    """

    def __init__(self, app: FastAPI, repository: Repository) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                limit_concurrency=_most_connections(repository.settings),
                http=Protocol,
                # Otherwise every local client could write a false address to the log.
                proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,
                **_tls(repository.settings),
            )
        )
        self.server_state = self._connections = ConnectionState()
        self._repository = repository
        self._loading: asyncio.Task[None] | None = None
        self._is_loaded = False
        self._load_error: BaseException | None = None
        self._interrupted = False
        self._unanswered = 0  # number of requests when the drain timed out
        self._watchdog: threading.Timer | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until stopped by a signal.

        Raises:
            KeyboardInterrupt: A SIGINT interrupted the drain, or came while models were loaded.
            SystemExit: A SIGTERM came while models were loaded.
            AttnserveError: ``load`` failed.
            ServiceError: Requests were refused, because they were not answered in time.
        """
        try:
            super().run(sockets)
        finally:
            if self._watchdog is not None:
                self._watchdog.cancel()
        if self._load_error is not None:
            raise self._load_error
        if self._interrupted:
            raise KeyboardInterrupt
        if lost_count := self._unanswered + self._connections.cut_answers:
            raise ServiceError(
                f"{lost_count} connections were closed during the drain: their requests were not"
                " answered"
                f" in {self._repository.settings.drain_timeout_s:g} s, or the answers not read",
                "raise ATTNSERVE_DRAIN_TIMEOUT_S, or lower the timeouts of requests",
                code="server.drain_timeout",
            )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._loading = asyncio.create_task(self._load_all())

    async def load(self) -> None:
        """Load the models, after the port is open."""
        repository = self._repository
        await repository.start()
        address = self.servers[0].sockets[0].getsockname()
        log_ready(repository.settings, address, (engine.name for engine in repository.engines()))

    async def _load_all(self) -> None:
        try:
            await self.load()
            self._is_loaded = True  # this task is not done yet, but the server is ready
        except Exception as error:
            self._load_error = self._load_error or error
            self.should_exit = True
            return
        self._repository.log_operators()
        # Exempt the objects that exist now (modules, routes, models) from garbage collection: a
        # full collection over them takes 50 ms between two answers, without them 5 ms.
        gc.collect()
        gc.freeze()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        is_second_signal = (
            self._repository.draining and sig == signal.SIGINT and not self._interrupted
        )
        if is_second_signal and self._loading is not None:
            # uvicorn would close every connection: an error answer tells clients the reason.
            self._interrupted = True
            self._loading.get_loop().call_soon_threadsafe(self._repository.abandon)
            return
        if self._loading is not None and not self._is_loaded:
            is_interrupt = sig == signal.SIGINT
            self._load_error = KeyboardInterrupt() if is_interrupt else SystemExit(128 + sig)
        if self._watchdog is None:
            settings = self._repository.settings
            seconds = settings.drain_delay_s + settings.drain_timeout_s + 2 * CUT_S
            self._watchdog = threading.Timer(seconds, _end_process)
            self._watchdog.daemon = True
            self._watchdog.start()
        if not self._repository.draining:
            self._connections.cut_answers = 0
        self._repository.draining = True
        # uvicorn closes idle connections. This header keeps clients from sending another request
        # on a closing connection.
        self.server_state.default_headers.append(CLOSE)
        self.config.encoded_headers.append(CLOSE)  # uvicorn makes the default anew each second
        # In place of uvicorn's handler, which raises the signals again after the drain.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        settings = self._repository.settings
        delay = 0 if self._load_error is not None else settings.drain_delay_s
        if self._loading is not None:
            self._loading.cancel()
            self._repository.loader.stop()
        while delay > 0 and not self._interrupted:  # not ready, but still accepting connections
            await asyncio.sleep(min(delay, 0.1))
            delay -= 0.1
        timer = asyncio.get_running_loop().call_later(settings.drain_timeout_s, self._cut)
        await super().shutdown(sockets)
        timer.cancel()

    def _cut(self) -> None:
        """End the drain: refuse unanswered requests, and close remaining connections."""
        connections = self.server_state.connections
        self._unanswered = len(connections)
        self._repository.abandon()

        def abort() -> None:
            for connection in list(connections):
                connection.transport.abort()

        asyncio.get_running_loop().call_later(CUT_S, abort)


def _end_process() -> None:
    """Terminate a process that an endless run keeps alive."""
    log.error("a run does not return: the process is ended")
    flush_log()
    os._exit(1)


def _most_connections(settings: Settings) -> int:
    """``max_connections``, or fewer if this process may not open as many files.

    The soft limit of open files is raised to the hard one.
    """
    most = settings.max_connections
    if os.name != "posix":
        return most
    import resource

    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS allows fewer than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY or most <= files - RESERVED_FILES:
        return most
    allowed = max(files - RESERVED_FILES, files // 2)
    log.warning("at most %d connections, because at most %d files may be open", allowed, files)
    return allowed


def _tls(settings: Settings) -> dict[str, Any]:
    """The options of uvicorn for HTTPS."""
    password = settings.ssl_keyfile_password
    return {
        **settings.model_dump(include={"ssl_certfile", "ssl_keyfile", "ssl_ca_certs"}),
        # Without a password OpenSSL would ask the terminal for one.
        "ssl_keyfile_password": password.get_secret_value() if password else " ",
        "ssl_cert_reqs": ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE,
    }


def check_tls(settings: Settings) -> None:
    """Check that the files of ``settings`` make an HTTPS server.

    Raises:
        InvalidArgument: The files are missing or do not match.
    """
    needs = settings.ssl_keyfile or settings.ssl_keyfile_password or settings.ssl_ca_certs
    try:
        if needs and settings.ssl_certfile is None:
            raise ValueError("`ssl_certfile` is missing")
        uvicorn.Config(FastAPI(), log_config=None, **_tls(settings)).load()
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"HTTPS is not possible: {error}",
            "check `ssl_certfile`, `ssl_keyfile`, `ssl_ca_certs` and the password of the key",
            code="server.tls",
        ) from error


def log_ready(settings: Settings, address: tuple[Any, ...], names: Iterable[str]) -> None:
    """Log the served models and the address of the socket."""
    host, port = address[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if settings.ssl_certfile is None else "https"
    served = ", ".join(dict.fromkeys(names))
    log.info("serving %s at %s://%s:%d", served, scheme, shown, port)


def bind_socket(settings: Settings) -> socket.socket:
    """Return a socket that is bound to the address of ``settings``, but does not listen yet.

    Raises:
        InvalidArgument: The address is in use, or no address of this machine.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio disables Nagle's algorithm (40 ms per answer) only for sockets that name TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # bind despite old connections in TIME_WAIT
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise InvalidArgument(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}",
            "choose another host or port",
            code="address.unavailable",
        ) from error
    return listener
