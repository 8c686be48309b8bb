"""Deploy the application on Ray Serve: replicas, autoscaling, several machines.

Each replica is a process that runs the application of ``service.app`` with its own model, queue,
batcher and metrics. Ray's proxy balances requests over the replicas and replaces unhealthy ones.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from fastapi import FastAPI

from attnserve.serving.backends import MOST_RUNS
from graph_passes.errors import InvalidArgument, InvalidModel, MissingExtra
from service.app import create_app
from service.engine.repository import Repository
from service.errors import NotReady
from service.log import configure_log
from service.server import STOP_SIGNALS
from service.settings import RaySettings, Settings

log = logging.getLogger("attnserve")

NAME = "attnserve"


def deployment_options(settings: Settings, ray: RaySettings) -> dict[str, Any]:
    """The arguments of ``ray.serve.deployment``.

    Raises:
        InvalidArgument: ``max_replicas`` is less than ``replicas``, or ``target_ongoing`` is given
            without it.
    """
    if ray.max_replicas is not None and ray.max_replicas < ray.replicas:
        raise InvalidArgument(
            f"`max_replicas` is {ray.max_replicas}: expected at least `replicas`, {ray.replicas}",
            "raise `max_replicas`",
            code="ray.replicas",
        )
    if ray.max_replicas is None and "target_ongoing" in dict(ray.changed()):
        raise InvalidArgument(
            f"`target_ongoing` is {ray.target_ongoing:g}, but without `max_replicas` the number of"
            " replicas is fixed",
            "set `max_replicas`",
            code="ray.target_ongoing",
        )
    options: dict[str, Any] = {
        "name": NAME,
        "ray_actor_options": {"num_cpus": ray.cpus, "num_gpus": ray.gpus},
        # Ray's default is 5 requests per replica, which is too few to form batches; above that,
        # Ray's proxy answers 503. With this limit the replica's own queue answers 429 first.
        "max_ongoing_requests": 2 * (settings.max_queue + (settings.concurrency or MOST_RUNS)),
        "graceful_shutdown_timeout_s": ray.drain_s,
    }
    if ray.max_replicas is None:
        options["num_replicas"] = ray.replicas
    else:
        options["autoscaling_config"] = {
            "min_replicas": ray.replicas,
            "max_replicas": ray.max_replicas,
            "target_ongoing_requests": ray.target_ongoing,
        }
    return options


def replica_settings(settings: Settings, ray: RaySettings) -> Settings:
    """The settings of each replica.

    The default number of threads is the number of cores. Loading by requests is off, because a
    request would reach a single replica.
    """
    threads = settings.threads or max(1, int(ray.cpus))
    return settings.model_copy(update={"threads": threads, "model_control": False})


def application(settings: Settings, ray: RaySettings | None = None) -> Any:
    """A Ray Serve application, for ``ray.serve.run``.

    Args:
        settings: Settings of each replica. The model must have the same path on every machine.
        ray: Number and resources of replicas; None for the environment variables.

    Raises:
        MissingExtra: Ray is not installed.
        InvalidArgument: See ``deployment_options``.
    """
    serve = _require_serve()
    ray = ray or RaySettings()
    options = deployment_options(settings, ray)
    needed = tuple(name for name in ("api_keys", "admin_keys") if getattr(settings, name))
    replica = replica_settings(settings, ray)
    build = partial(_build, replica.model_copy(update=NO_SECRETS), needed)
    return serve.deployment(**options)(serve.ingress(build)(_Replica)).bind()


NO_SECRETS: Mapping[str, Any] = {"api_keys": (), "admin_keys": (), "ssl_keyfile_password": None}
"""Values that remove secrets from settings, because Ray stores them; replicas read the keys from
the environment."""

repositories: list[Repository] = []
"""The repository of this process, if it is a replica."""


def _build(settings: Settings, names: Sequence[str]) -> FastAPI:
    """The application of a replica.

    Args:
        names: Names of the settings of API keys that the service uses.

    Raises:
        InvalidArgument: The service requires keys that this machine does not have.
    """
    secrets = Settings(model=settings.model)
    if missing_settings := [name for name in names if not getattr(secrets, name)]:
        variable = f"ATTNSERVE_{missing_settings[0].upper()}"
        raise InvalidArgument(
            f"{variable} is not set on the machine of this replica: the service requires keys",
            f"set {variable} on every machine before Ray starts"
            + (", or use a file of keys" * (missing_settings[0] == "api_keys")),
            code="ray.keys",
        )
    keys = {"api_keys": secrets.api_keys, "admin_keys": secrets.admin_keys}
    app = create_app(settings.model_copy(update=keys))
    repositories.append(app.state.repository)
    return app


class _Replica:
    """A replica with a health check. After three failures in a row, 10 s apart, Ray replaces it."""

    def check_health(self) -> None:
        """Raise ``NotReady`` if a model cannot run."""
        for engine in (engine for repository in repositories for engine in repository.engines()):
            if not engine.ready:
                raise NotReady(f"{engine.name} is not ready: {engine.reason}")


def run(settings: Settings, ray: RaySettings | None = None) -> None:
    """Serve on Ray: on this machine until interrupted, or on a running cluster.

    Raises:
        MissingExtra: Ray is not installed.
        InvalidModel: The path of the model does not exist.
        InvalidArgument: No cluster answers at the address, the port is 0, or the replicas did not
            start. See also ``deployment_options``.
    """
    configure_log(settings)
    ray_settings = ray or RaySettings()
    app = application(settings, ray_settings)
    if ray_settings.address is None and not settings.model.exists():
        raise InvalidModel(f"{settings.model}: no such file or folder", "check the path")
    if settings.port == 0:
        raise InvalidArgument(
            "`port` is 0, and Ray's proxies need a port that all machines know",
            "for example 8000",
            code="ray.port",
        )
    if settings.ssl_certfile is not None:
        raise InvalidArgument(
            "`ssl_certfile` is set, but Ray's proxy serves plain HTTP",
            "unset it, and end TLS at a proxy in front",
            code="ray.tls",
        )
    # Ray reports usage statistics unless this variable is 0.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    runtime = import_module("ray")
    serve = _require_serve()
    try:
        runtime.init(
            address=ray_settings.address,
            include_dashboard=None if ray_settings.address else False,
            logging_level=logging.WARNING,
            log_to_driver=settings.log_level == "debug",
        )
    except ConnectionError as error:
        raise InvalidArgument(
            f"`address` is {ray_settings.address}: no Ray cluster answers there",
            "check it with ray status",
            code="ray.address",
        ) from error
    # Replace Ray's handlers: this one also interrupts the wait for the start of the replicas.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler)
    try:
        serve.start(http_options={"host": settings.host, "port": settings.port})
        try:
            serve.run(app, name=NAME, logging_config={"enable_access_log": False})
        except RuntimeError as error:
            raise InvalidArgument(
                f"the replicas on Ray did not start: {_last_line(error)}",
                "try the model with attnserve serve; every machine needs it at this path",
                code="ray.start",
            ) from error
        log.info("serving %s on Ray at http://%s:%d", settings.model, settings.host, settings.port)
        while ray_settings.address is None:
            time.sleep(1)
    except KeyboardInterrupt:
        for number in STOP_SIGNALS:  # do not interrupt the shutdown
            signal.signal(number, signal.SIG_IGN)
        if ray_settings.address is None:
            serve.shutdown()
    finally:
        runtime.shutdown()


def _require_serve() -> Any:
    try:
        return import_module("ray.serve")
    except ImportError as error:
        raise MissingExtra("Ray Serve is not installed.", "pip install 'attnserve[ray]'") from error


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
