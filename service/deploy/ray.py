"""The same application on Ray Serve: replicas, autoscaling, several machines.

Every replica runs the application of ``service.app`` unchanged, in a process of its own: its own
copy of the model, queue, batcher and metrics. Ray's proxy spreads requests over replicas, and takes
a replica that says that it is not well out and starts another.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from importlib import import_module
from types import FrameType
from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from graph_passes.errors import InvalidArgument, InvalidModel, MissingExtra
from service.app import create_app
from service.settings import Settings

__all__ = ["RaySettings", "application", "deployment_options", "run"]

log = logging.getLogger("attnserve")

NAME = "attnserve"


class RaySettings(BaseSettings):
    """How many replicas run the application, and on what (``ATTNSERVE_RAY_REPLICAS=4``)."""

    model_config = SettingsConfigDict(env_prefix="ATTNSERVE_RAY_", frozen=True)

    address: str | None = Field(
        default=None, description="Of a running Ray cluster; one is started here where left out."
    )
    replicas: int = Field(default=1, ge=1, description="The least that run.")
    max_replicas: int | None = Field(
        default=None, ge=1, description="Scale up to so many; left out, their number is fixed."
    )
    target_ongoing: float = Field(
        default=16, gt=0, description="Requests a replica has on average before another starts."
    )
    cpus: float = Field(default=1, ge=0, description="Cores that a replica reserves.")
    gpus: float = Field(default=0, ge=0, description="GPUs that a replica reserves.")
    drain_s: float = Field(
        default=30, ge=0, description="Seconds that a stopping replica has to answer its requests."
    )


def deployment_options(settings: Settings, ray: RaySettings) -> dict[str, Any]:
    """What ``serve.deployment`` is given.

    Raises:
        InvalidArgument: The most replicas are fewer than the least.
    """
    if ray.max_replicas is not None and ray.max_replicas < ray.replicas:
        raise InvalidArgument(
            f"--max-replicas {ray.max_replicas}: fewer than the {ray.replicas} of --replicas",
            "raise --max-replicas",
        )
    options: dict[str, Any] = {
        "name": NAME,
        "ray_actor_options": {"num_cpus": ray.cpus, "num_gpus": ray.gpus},
        # Ray's own bound would stop requests in its proxy, at 5 a replica by default, and answer
        # 503: past ours a replica answers 429 itself, and what it holds can share batches.
        "max_ongoing_requests": 2 * (settings.max_queue + settings.concurrency),
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


def application(settings: Settings, ray: RaySettings | None = None) -> Any:
    """A Ray Serve application, for ``ray.serve.run``.

    Args:
        settings: Of each replica. Its model must lie at the same path on every machine.
        ray: How many replicas, and on what; None for what the environment says.

    Raises:
        MissingExtra: Ray is not installed.
        InvalidArgument: The numbers of replicas contradict each other.
    """
    serve = _require_serve()
    options = deployment_options(settings, ray or RaySettings())

    def build() -> Any:  # runs in the replica
        return create_app(settings)

    return serve.deployment(**options)(serve.ingress(build)()).bind()


def run(settings: Settings, ray: RaySettings | None = None) -> None:
    """Serve on Ray: until interrupted on this machine, or handed over to a running cluster.

    Raises:
        MissingExtra: Ray is not installed.
        InvalidModel: There is nothing at the path of the model.
        InvalidArgument: The address of the cluster or the numbers of replicas cannot work, or the
            replicas did not start.
    """
    logging.basicConfig(
        stream=sys.stderr, level=settings.log_level.upper(), format="%(message)s", force=True
    )
    chosen = ray or RaySettings()
    app = application(settings, chosen)
    if chosen.address is None and not settings.model.exists():
        raise InvalidModel(f"{settings.model}: no such file or folder", "check the path")
    # Ray reports to its makers unless told not to: whoever wants that can say so.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    runtime, serve = import_module("ray"), _require_serve()
    try:
        runtime.init(
            address=chosen.address,
            include_dashboard=None if chosen.address else False,
            logging_level=logging.WARNING,
            log_to_driver=settings.log_level == "debug",
        )
    except ConnectionError as error:
        raise InvalidArgument(
            f"--address {chosen.address}: no Ray cluster answers there",
            "check it with `ray status`",
        ) from error
    for number in STOPS:  # Ray has set its own
        signal.signal(number, _stop)
    try:
        serve.start(http_options={"host": settings.host, "port": settings.port})
        try:
            serve.run(app, name=NAME, logging_config={"enable_access_log": False})
        except RuntimeError as error:
            raise InvalidArgument(
                f"the replicas on Ray did not start: {_last_line(error)}",
                "try the same model with `attnserve serve`; every machine needs it at this path",
            ) from error
        log.info("serving %s on Ray at http://%s:%d", settings.model, settings.host, settings.port)
        while chosen.address is None:
            time.sleep(1)
    except KeyboardInterrupt:
        for number in STOPS:  # once is enough: what follows is not interrupted
            signal.signal(number, signal.SIG_IGN)
        if chosen.address is None:
            serve.shutdown()
    finally:
        runtime.shutdown()


STOPS = (signal.SIGINT, signal.SIGTERM)


def _stop(number: int, frame: FrameType | None) -> None:
    """Also while the replicas start, which Ray waits for without looking at anything else."""
    raise KeyboardInterrupt


def _require_serve() -> Any:
    try:
        return import_module("ray.serve")
    except ImportError as error:
        raise MissingExtra("Ray Serve is not installed.", "pip install 'attnserve[ray]'") from error


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
