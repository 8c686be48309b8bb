"""The application on Ray Serve. Tests of replicas are skipped without the [ray] extra."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from starlette.testclient import TestClient

from attnserve.cli.app import main
from graph_passes.errors import InvalidArgument
from service.deploy import ray
from service.deploy.ray import deployment_options, replica_settings
from service.errors import NotReady
from service.settings import RaySettings, Settings
from tests.errors import raises
from tests.service.conftest import until
from tests.service.processes import free_port

ROOT = Path(__file__).parents[3]
HAS_RAY = importlib.util.find_spec("ray") is not None


def test_deployment_options_replicas_are_fixed_by_default(encoder: Path):
    options = deployment_options(Settings(model=encoder), RaySettings(replicas=3, cpus=2, gpus=1))
    assert options["num_replicas"] == 3 and "autoscaling_config" not in options
    assert options["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 1}


def test_deployment_options_max_replicas_enables_autoscaling(encoder: Path):
    settings = RaySettings(replicas=1, max_replicas=4, target_ongoing=8)
    options = deployment_options(Settings(model=encoder), settings)
    assert "num_replicas" not in options
    assert options["autoscaling_config"] == {
        "min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 8,
    }  # fmt: skip


@pytest.mark.parametrize(("given", "cpus", "threads"), [(0, 2.0, 2), (0, 0.5, 1), (3, 1.0, 3)])
def test_replicas_keep_to_their_cores_and_load_no_models(
    encoder: Path, given: int, cpus: float, threads: int
):
    settings = replica_settings(Settings(model=encoder, threads=given), RaySettings(cpus=cpus))
    assert settings.threads == threads and not settings.controls_models


def test_ray_settings_are_read_from_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ATTNSERVE_RAY_REPLICAS", "5")
    assert RaySettings().replicas == 5


def test_deployment_options_max_replicas_below_replicas_is_refused(encoder: Path):
    with raises(InvalidArgument, "ray.replicas", "`max_replicas` is 1"):
        deployment_options(Settings(model=encoder), RaySettings(replicas=2, max_replicas=1))


def test_deployment_options_target_of_fixed_replicas_is_refused(encoder: Path):
    with raises(InvalidArgument, "ray.target_ongoing", "`target_ongoing` is 4", "`max_replicas`"):
        deployment_options(Settings(model=encoder), RaySettings(target_ongoing=4))


def test_deployment_options_ray_limit_exceeds_own_queue(encoder: Path):
    settings = Settings(model=encoder, max_queue=100)
    assert deployment_options(settings, RaySettings())["max_ongoing_requests"] > 100


def test_deploy_ray_invalid_value_names_option_and_variable(
    encoder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["deploy", "ray", str(encoder), "--target-ongoing", "-1"]) == 2
    shown = capsys.readouterr().err
    assert "--target-ongoing is -1.0" in shown and "ATTNSERVE_RAY_TARGET_ONGOING" in shown


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_deploy_ray_without_ray_names_the_extra(encoder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["deploy", "ray", str(encoder)]) == 2
    assert "pip install 'attnserve[ray]'" in capsys.readouterr().err


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What Ray Serve is given: the builder of the application, and the class of the replica."""
    given: dict[str, Any] = {}

    class Serve:
        @staticmethod
        def ingress(build: Any) -> Any:
            given["build"] = build
            return lambda replica: given.setdefault("replica", replica)

        @staticmethod
        def deployment(**options: Any) -> Any:
            return lambda _: SimpleNamespace(bind=lambda: None)

    monkeypatch.setitem(sys.modules, "ray.serve", Serve)
    monkeypatch.setattr(ray, "repositories", [])
    return given


def test_application_sends_no_keys_to_replicas(
    encoder: Path, bound: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ATTNSERVE_API_KEYS", "first-key")
    monkeypatch.setenv("ATTNSERVE_ADMIN_KEYS", "boss-key")
    ray.application(Settings(model=encoder, probe=False))
    sent = pickle.dumps(bound["build"])
    assert b"first-key" not in sent and b"boss-key" not in sent
    build = pickle.loads(sent)  # on another machine
    with TestClient(build()) as client:
        assert client.get("/v2").status_code == 401
        assert client.get("/v2", headers={"x-api-key": "first-key"}).status_code == 200
    monkeypatch.delenv("ATTNSERVE_API_KEYS")
    with pytest.raises(InvalidArgument) as error:  # it must not serve everybody
        build()
    assert error.value.code == "ray.keys"


def test_replica_check_fails_while_a_model_cannot_run(encoder: Path, bound: dict[str, Any]):
    ray.application(Settings(model=encoder, probe=False))
    app, replica = bound["build"](), bound["replica"]()
    with TestClient(app):
        replica.check_health()
        app.state.repository.engine()._broken = "its device is gone"
        with raises(NotReady, "model.not_ready", "its device is gone"):
            replica.check_health()


@pytest.fixture(scope="module")
def url(encoder: Path) -> Iterator[str]:
    """Two replicas on this machine."""
    if not HAS_RAY:
        pytest.skip("Ray is not installed: pip install 'attnserve[ray]'")
    port = free_port()
    command = [sys.executable, "-m", "attnserve", "deploy", "ray", str(encoder)]
    options = ["--port", str(port), "--replicas", "2", "--cpus", "0.25"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": ""}
    process = subprocess.Popen([*command, *options], env=environment, cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: ready(url) and len(replicas(process)) == 2, 120)
        yield f"{process.pid} {url}"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


def ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/v2/health/ready", timeout=5).status_code == 200
    return False


def replicas(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if "ServeReplica" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.mark.process
def test_deploy_ray_killed_replica_is_replaced(url: str):
    pid, _, address = url.partition(" ")
    process = psutil.Process(int(pid))

    def running() -> list[psutil.Process]:
        return replicas(process)  # pyright: ignore[reportArgumentType]

    with httpx.Client(base_url=address, timeout=30) as client:
        wanted = client.post("/texts/embed", json={"inputs": ["a b", "c"]}).json()["embeddings"]
        assert len(wanted) == 2
        (victim, survivor) = running()
        victim.kill()
        good = 0
        for _ in range(100):
            with suppress(httpx.HTTPError):
                answer = client.post("/texts/embed", json={"inputs": ["a b", "c"]})
                if answer.status_code == 200:
                    assert answer.json()["embeddings"] == wanted
                    assert "x-compute-ms" in answer.headers
                    good += 1
        assert good >= 90
        # Ray notices by its health checks, 10 s apart.
        until(lambda: len(running()) == 2 and victim not in running(), 60)
        assert survivor in running()


@pytest.mark.process
def test_deploy_ray_errors_have_the_body_of_the_service(url: str):
    address = url.partition(" ")[2]
    answer = httpx.post(f"{address}/v2/models/nobody/infer", json={"inputs": []}, timeout=30)
    assert answer.status_code in (404, 422) and set(answer.json()) == {"error"}
