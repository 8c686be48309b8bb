"""Serve models from the command line, with one process or several workers."""

from __future__ import annotations

import logging
import os

from attnserve.runtime.machine import available_cores
from attnserve.runtime.session import warn_of_old_runtimes
from graph_passes.errors import InvalidArgument
from service.app import create_app
from service.engine.device import on_device
from service.engine.repository import Repository
from service.log import configure_log, flush_log
from service.metrics import Metrics
from service.server import Server, bind_socket, check_tls
from service.settings import Settings

log = logging.getLogger("attnserve")


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Logs go to stderr, nothing to stdout.

    The signal starts a drain: the server reports not ready, answers the accepted requests and
    returns. A SIGINT during the drain refuses the unanswered requests.

    Raises:
        KeyboardInterrupt: A SIGINT interrupted the drain.
        InvalidArgument: The address or the provider is not available, the file of API keys cannot
            be read, or this system does not support several workers.
        InvalidModel: No model can be loaded.
        MissingExtra: ONNX Runtime is not installed.
        ServiceError: No worker can be started, or a worker failed during the drain.
    """
    if settings.workers > 1 and os.name != "posix":  # no inherited sockets, no file locks
        raise InvalidArgument(
            f"`workers` is {settings.workers}: several workers need Linux or macOS",
            "serve with one worker",
            code="workers.unsupported",
        )
    configure_log(settings)
    if not (settings.is_local or settings.api_keys or settings.api_keys_file):
        log.warning("every client that reaches %s is served: no API keys are set", settings.host)
    try:
        check_tls(settings)
        settings = on_device(settings)
        warn_of_old_runtimes(settings.device)
        _serve(share_cores(settings))
    finally:
        flush_log()  # before the error is printed


def share_cores(settings: Settings) -> Settings:
    """Set the number of threads of a run, if runs share the cores or a CPU quota applies.

    ONNX Runtime would otherwise use all cores of the machine. Tokenizers use half of them, so that
    long texts leave cores to other runs.
    """
    threads = settings.threads
    cores = available_cores()
    if not threads and (settings.workers > 1 or cores < (os.cpu_count() or 1)):
        runs = settings.workers * max(1, settings.concurrency) if settings.workers > 1 else 1
        threads = max(1, cores // runs)
    # Workers inherit this variable.
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads or max(1, cores // 2)))
    return settings.model_copy(update={"threads": threads})


def _serve(settings: Settings) -> None:
    with bind_socket(settings) as listener:
        if settings.workers > 1:
            from service.workers.supervisor import supervise  # imports POSIX-only modules

            supervise(settings, listener)
            return
        repository = Repository(settings, Metrics())
        app = create_app(settings, repository)
        Server(app, repository).run(sockets=[listener])
