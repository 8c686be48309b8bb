"""Several workers: shared statistics and models, supervision, and shared state."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic, time
from typing import Any

import httpx2
import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from attnserve.runtime.interface import SessionOptions
from attnserve.runtime.session import open_session
from attnserve.serving import backends
from graph_passes.errors import InvalidModel
from service import launch
from service import settings as settings_module
from service.engine.repository import Repository
from service.errors import NotReady
from service.launch import share_cores
from service.metrics import Metrics
from service.settings import Settings
from service.workers import shared_repository
from service.workers.shared_repository import SharedRepository
from service.workers.shared_state import SharedState, Status
from tests.errors import raises
from tests.fixtures.make import BERT
from tests.service.conftest import until
from tests.service.tiny import write_encoder
from tests.service.workers.processes import Client, Server, repository, serving

pytestmark = pytest.mark.process

EMBED = {"inputs": ["a b", "c"]}

# -- as one --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("workers")
    models = repository(folder / "models", "counted", "other", "tiny")
    with serving(models, folder) as server:
        server.wait()
        yield server


@pytest.fixture
def clients(server: Server) -> list[Client]:
    """One for each worker."""
    return [server.client(pid) for pid in server.pids()]


def test_statistics_of_every_worker_cover_all_workers(clients: list[Client]) -> None:
    one, two = clients
    body = EMBED | {"model": "counted"}
    assert [one.post("/texts/embed", body) for _ in range(3)] == [200] * 3
    assert [two.post("/texts/embed", body) for _ in range(4)] == [200] * 4
    assert two.post("/texts/embed", body | {"inputs": ["a"] * 2049}) == 413
    idle = b'attnserve_in_flight{model="counted",version="1"} 0.0'
    for client in clients:
        (told,) = client.get("/v2/models/counted/stats")["model_stats"]
        assert told["inference_stats"]["success"]["count"] == 7
        assert told["inference_stats"]["fail"]["count"] == 1
        assert (told["inference_count"], told["execution_count"]) == (14, 7)
        (batches,) = told["batch_stats"]
        assert batches["batch_size"] == 2 and batches["compute_infer"]["count"] == 7
        assert batches["compute_infer"]["ns"] == told["inference_stats"]["compute_infer"]["ns"]
        assert time() - told["last_inference"] / 1e3 < 60

        # What is in flight elsewhere is told a second late.
        until(partial(lambda asked: idle in asked.ask("GET", "/metrics")[1], client))
        samples = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(client.ask("GET", "/metrics")[1].decode())
            for sample in family.samples
        }
        assert samples["attnserve_inferences_total", "1", "counted", "success"] == 7
        assert samples["attnserve_request_seconds_count", "1", "counted"] == 7
        assert samples["attnserve_rejects_total", "1", "counted", "too_large"] == 1
        assert samples["attnserve_model_ready", "1", "counted"] == 1
        assert samples["attnserve_workers",] == 2

        def window(client: Client = client) -> dict[str, Any]:
            (model,) = [m for m in client.get("/stats.json")["models"] if m["name"] == "counted"]
            assert model["requests"] == 7
            return model["window"]

        # The last minute is that of all workers, a second late.
        until(lambda: sum(second["requests"] for second in window()["seconds"]) == 7)
        assert window()["batch_rows"] == {"2": 7} and window()["rejects"] == {"too_large": 1}
        assert client.get("/stats.json")["workers"] == {"wanted": 2, "serving": 2}


def test_answers_of_all_workers_are_compared_with_one_original(tmp_path: Path) -> None:
    original, served = write_encoder(tmp_path / "original"), write_encoder(tmp_path / "tiny")
    with serving(served, tmp_path / "run", shadow=original, shadow_rate=1) as server:
        server.wait()
        second = server.client(server.pids()[1])
        first = server.client(server.pids()[0])
        for _ in range(6):
            for worker in (first, second):
                assert worker.post("/texts/embed", EMBED) == 200
            until(lambda: not list(server.temporary.glob("*/shadow/*.row")))
        for client in (first, second):

            def rows(client: Client = client) -> int:
                (model,) = client.get("/stats.json")["models"]
                return (model["quality"] or {"rows": 0})["rows"]

            until(lambda: rows() >= 8)
            series = client.ask("GET", "/metrics")[1]
            assert b'attnserve_quality_value{measure="similarity",model="tiny"' in series
            assert b'result="compared"' in series and b'result="sent"' in series


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_all_workers_give_the_same_vectors_in_any_batch_and_after_a_reload(
    tmp_path: Path, runtime: str
) -> None:
    pytest.importorskip(runtime)
    model = Path(shutil.copytree(BERT / "sdpa-torchscript-17-2", tmp_path / "bert"))
    texts = ["a dog", "a man is playing a guitar on the stage", "cats", "the sun is out " * 4]
    with serving(model, tmp_path / "run", runtime=runtime, threads=1) as server:
        server.wait()
        clients = [server.client(pid) for pid in server.pids()]

        def vectors(client: Client, inputs: list[str]) -> np.ndarray:
            status, answer = client.ask("POST", "/texts/embed", {"inputs": inputs})
            assert status == 200, answer
            return np.array(json.loads(answer)["embeddings"])

        expected = vectors(clients[0], texts)
        assert np.linalg.norm(expected[0] - expected[1]) > 0.1
        for is_reloaded in (False, True):
            for client in clients:
                assert client.get("/v2/models/bert")["parameters"]["runtime"] == runtime
                alone = np.concatenate([vectors(client, [text]) for text in texts])
                for found in (vectors(client, texts), vectors(client, texts[::-1])[::-1], alone):
                    np.testing.assert_allclose(found, expected, atol=1e-5)
            if not is_reloaded:
                (model / "LICENSE").touch()
                assert clients[1].post("/v2/repository/models/bert/load") == 200


def test_load_and_unload_apply_to_all_workers(server: Server, clients: list[Client]) -> None:
    one, two = clients
    body = EMBED | {"model": "other"}
    assert one.ready and two.ready
    assert one.post("/v2/repository/models/other/unload") == 200
    for client in clients:
        assert ("other", "1", "UNAVAILABLE") in client.index()
        assert client.post("/texts/embed", body) == 503
        assert client.post("/texts/embed", EMBED | {"model": "tiny"}) == 200
        assert client.ready
    assert two.post("/v2/repository/models/other/load") == 200
    for client in clients:
        assert ("other", "1", "READY") in client.index()
        assert client.post("/texts/embed", body) == 200
        assert client.post("/v2/repository/models/none/load") == 404

    # A new version, and one that cannot be loaded: what is well is served by all.
    models = server.temporary.parent / "models" / "other"
    write_encoder(models / "2")
    write_encoder(models / "3")
    (models / "3" / "model.onnx").write_bytes(b"not a model")
    assert one.post("/v2/repository/models/other/load") == 422
    for client in clients:
        assert client.get("/v2/models/other")["versions"] == ["1", "2"]
        assert ("other", "3", "UNAVAILABLE") in client.index()
        assert client.ask("GET", "/v2/models/other/versions/2/ready")[0] == 200
        assert client.ready


# -- life and death ------------------------------------------------------------------------------


def test_killed_worker_is_replaced_while_others_serve(server: Server) -> None:
    before = server.pids()
    other = server.client(before[1])
    body = EMBED | {"model": "tiny"}
    assert other.post("/v2/repository/models/counted/unload") == 200

    def answered() -> int:
        (told,) = other.get("/v2/models/tiny/stats")["model_stats"]
        return told["inference_stats"]["success"]["count"]

    first, asked, seen, done = answered(), 0, list[int | str](), threading.Event()

    def load() -> None:
        while not done.wait(0.01):
            try:
                answer = httpx2.post(f"http://127.0.0.1:{server.port}/texts/embed", json=body)
                seen.append(answer.status_code)
            except httpx2.TransportError as error:
                seen.append(type(error).__name__)

    def replaced() -> bool:
        nonlocal asked
        assert other.ready and other.post("/texts/embed", body) == 200  # all the time
        asked += 1
        return before[0] not in server.pids() and other.get("/stats.json")["workers"] == {
            "wanted": 2,
            "serving": 2,
        }

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(load) for _ in range(2)]
        try:
            until(lambda: len(seen) > 20)
            psutil.Process(before[0]).kill()
            until(replaced)
            new = server.client(next(pid for pid in server.pids() if pid not in before))
        finally:  # otherwise the threads would not end
            done.set()
    assert [one.result() for one in running] == [None, None]
    lost = [one for one in seen if one != 200]
    assert len(lost) <= 2 and not any(isinstance(one, int) for one in lost), lost
    # Nothing that was answered is forgotten; what the dead worker computed may not have been seen.
    well = first + asked + seen.count(200)
    assert well <= answered() <= well + len(lost)
    assert "ended with signal SIGKILL; restart in 0 s" in server.log
    # It has what the others have, not what is on disk.
    for client in (new, other):
        assert ("counted", "1", "UNAVAILABLE") in client.index()
    assert new.post("/v2/repository/models/counted/load") == 200
    for client in (new, other):
        assert ("counted", "1", "READY") in client.index() and client.ready


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, 0, id="told to stop"),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, id="left alone"),
    ],
)
def test_workers_drain_and_exit_after_end_of_supervisor(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    model = write_encoder(tmp_path / "tiny")
    with serving(model, tmp_path, max_wait_ms=1000) as server, ThreadPoolExecutor(4) as threads:
        server.wait()
        workers = [psutil.Process(pid) for pid in server.pids()]
        clients = [server.client(worker.pid) for worker in workers for _ in range(2)]
        accepted = [threads.submit(client.post, "/texts/embed", EMBED) for client in clients]
        watching = server.any_client()
        series = b'attnserve_in_flight{model="tiny",version="1"} 4.0'
        until(lambda: series in watching.ask("GET", "/metrics")[1])
        server.process.send_signal(number)
        assert [one.result() for one in accepted] == [200] * 4
        assert server.process.wait(20) == code
        psutil.wait_procs(workers, timeout=10)
        assert not any(worker.is_running() for worker in workers)
        assert server.left == []
        assert "Traceback" not in server.log and "error" not in server.log
        with pytest.raises(ConnectionRefusedError):
            server.any_client().get("/v2/health/live")


@pytest.mark.parametrize("workers", [1, 2])
def test_second_interrupt_refuses_unanswered_requests(tmp_path: Path, workers: int) -> None:
    """The first SIGINT waits for answers, here for a batch that takes a minute to fill."""
    model, wait = write_encoder(tmp_path / "tiny"), {"max_wait_ms": 60_000, "timeout_ms": 90_000}
    with (
        serving(model, tmp_path, workers=workers, **wait) as server,
        ThreadPoolExecutor(1) as threads,
    ):
        server.wait(workers)
        asked = threads.submit(server.any_client().ask, "POST", "/texts/embed", EMBED)
        watching = server.any_client()
        series = b'attnserve_in_flight{model="tiny",version="1"} 1.0'
        until(lambda: series in watching.ask("GET", "/metrics")[1])
        server.process.send_signal(signal.SIGINT)
        threading.Event().wait(1)
        assert not asked.done() and server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        status, body = asked.result(10)
        assert status == 503 and b"the server is stopping" in body
        assert server.process.wait(20) == 130
        assert server.left == []
        assert "Traceback" not in server.log


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGSTOP, id="suspended process"),
        pytest.param(signal.SIGUSR1, id="blocked event loop", marks=pytest.mark.timing),
    ],
)
def test_hanging_worker_is_killed_and_replaced(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: time.sleep(60))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with serving(write_encoder(tmp_path / "tiny"), tmp_path) as server:
        server.wait()
        silent, other = server.pids()
        client = server.client(other)
        os.kill(silent, number)
        until(lambda: f"(process {silent}) hangs: it is killed" in server.log)
        until(lambda: "serves again" in server.log)
        assert other in server.pids() and silent not in server.pids()
        assert client.post("/texts/embed", EMBED) == 200
        assert server.log.count("hangs: it is killed") == 1  # who speaks is left alone


def test_ready_log_omits_models_that_failed_to_load(tmp_path: Path) -> None:
    models = repository(tmp_path / "models", "broken", "tiny")
    (models / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    with serving(models, tmp_path) as server:
        server.wait()
        assert re.search(r"attnserve: serving tiny at http", server.log), server.log


def test_invalid_model_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    with serving(tmp_path / "model.onnx", tmp_path) as server:
        assert server.process.wait(30) == 2
        lines = [line for line in server.log.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "model.onnx" in lines[0]
        assert server.left == []


def test_worker_crashing_at_startup_is_retried_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'service.workers.worker' in sys.orig_argv: os._exit(7)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with serving(write_encoder(tmp_path / "tiny"), tmp_path) as server:
        assert server.process.wait(30) == 2
        assert server.log.count("restart in") >= 2
        assert re.search(r"error: worker \d ended with exit status 7 before it served", server.log)
        assert server.left == []


def test_worker_environment_has_tracing_settings_and_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import json, os, pathlib, sys\n"
        "if 'service.workers.worker' in sys.orig_argv:\n"
        f"    file = pathlib.Path({str(tmp_path)!r}, f'seen{{os.getpid()}}')\n"
        "    file.write_text(json.dumps([dict(os.environ), sys.path]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with serving(write_encoder(tmp_path / "tiny"), tmp_path) as server:
        server.wait()
        assert server.any_client().ready
    seen = [json.loads(file.read_text()) for file in tmp_path.glob("seen*")]
    assert len(seen) == 2
    for variables, path in seen:
        assert variables["OTEL_SERVICE_NAME"] == "name"
        assert "AWS_SECRET_ACCESS_KEY" not in variables
        assert not any(name.startswith("ATTNSERVE_") for name in variables)
        assert "" not in variables["PYTHONPATH"].split(os.pathsep) and "" not in path


# -- what a worker shares, two of them in this process -------------------------------------------


Starts = Callable[[int], Awaitable[SharedRepository]]


@asynccontextmanager
async def together(
    model: Path, folder: Path
) -> AsyncIterator[tuple[SharedRepository, SharedState, Starts]]:
    """A worker that serves, the state that it shares, and a way to start another."""
    state = SharedState(folder, 2)
    started: list[SharedRepository] = []

    async def start(worker: int) -> SharedRepository:
        settings = Settings(model=model, probe=False, workers=2)
        one = SharedRepository(settings, Metrics(), worker=worker, state=state)
        await one.join()
        started.append(one)
        return one

    try:
        yield await start(0), state, start
    finally:
        for one in started:
            await one.leave()
            await one.close()


async def test_ready_requires_all_workers_first_and_serving_ones_later(tmp_path: Path) -> None:
    async with together(write_encoder(tmp_path / "tiny"), _folder(tmp_path)) as (one, state, start):
        assert not one.ready
        two = await start(1)
        assert not one.ready  # the supervisor has not seen it yet
        state.set_complete()
        assert one.ready and two.ready and one.workers == (2, 2)
        state.set_status(replace(_status(state, 1), ready=False))
        assert one.ready and two.ready  # half of the workers are
        one.loader.missing.add("gone")
        assert not one.ready
        one.loader.missing.clear()
        state.remove_status(1)  # it died
        assert one.ready and one.workers == (2, 1)


async def test_worker_start_with_changed_files_is_refused(tmp_path: Path) -> None:
    models = repository(tmp_path / "models", "tiny")
    async with together(models, _folder(tmp_path)) as (one, _, start):
        write_encoder(models / "tiny" / "2")  # not asked for yet: of no concern
        two = await start(1)
        assert two.versions("tiny") == one.versions("tiny") == ["1"]
        await two.leave()
        record = models / "tiny" / "1" / "attnserve.json"
        record.write_text(json.dumps({"max_length": 4}))
        with pytest.raises(InvalidModel) as changed:
            await start(1)
        assert changed.value.code == "model.changed"
        await one.load("tiny")
        two = await start(1)
        assert two.versions("tiny") == one.versions("tiny") == ["1", "2"]


async def test_worker_start_with_changed_files_of_one_model_serves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that changed on disk must not take models away that did not change."""
    models = repository(tmp_path / "models", "tiny", "other")
    ended: list[int] = []
    monkeypatch.setattr(shared_repository, "MAX_RETRIES", 0)
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.append(number))
    async with together(models, _folder(tmp_path)) as (_, _, start):
        record = models / "tiny" / "1" / "attnserve.json"
        before = record.read_bytes() if record.exists() else None
        record.write_text(json.dumps({"max_length": 4}))
        two = await start(1)
        assert two.versions("other") == ["1"] and not two.ready_here
        with pytest.raises(NotReady):
            two.engine("tiny")
        await asyncio.sleep(1)  # it tries again, and does not end
        assert not ended
        record.unlink() if before is None else record.write_bytes(before)
        end = monotonic() + 30
        while not two.ready_here:
            assert monotonic() < end
            await asyncio.sleep(0.05)
        assert two.versions("tiny") == ["1"]


def out_of_memory(*args: object, **kwargs: object) -> None:
    raise MemoryError


async def test_load_fails_if_another_worker_cannot_follow(tmp_path: Path) -> None:
    models = repository(tmp_path / "models", "tiny")
    async with together(models, _folder(tmp_path)) as (one, state, start):
        two = await start(1)
        state.set_complete()
        write_encoder(models / "tiny" / "2")
        two.loader._load = out_of_memory  # type: ignore[method-assign, assignment]
        with raises(NotReady, "model.unexpected", "MemoryError"):
            await one.load("tiny")
        assert one.ready_here and not two.ready_here
        assert one.ready and two.ready  # one of two can answer
        del two.loader._load
        await one.load("tiny")
        assert two.versions("tiny") == ["1", "2"] and two.ready_here


@pytest.mark.parametrize("action", ["load", "unload"])
async def test_change_that_cannot_be_written_is_refused_and_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """As with a full disk: the other workers would not follow."""
    models = repository(tmp_path / "models", "other", "tiny")

    def full(self: SharedState, target: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with together(models, _folder(tmp_path)) as (one, state, _):
        state.set_complete()
        write_encoder(models / "tiny" / "2")
        with monkeypatch.context() as patch:
            patch.setattr(SharedState, "set_target", full)
            with raises(NotReady, "workers.not_written", "tiny", "No space left"):
                await getattr(one, action)("tiny")
        deadline = monotonic() + 10
        while [e.version for e in one.engines() if e.name == "tiny"] != ["1"]:
            assert monotonic() < deadline
            await asyncio.sleep(0.05)
        await one.load("tiny")
        assert one.versions("tiny") == ["1", "2"]


@pytest.mark.parametrize("heals", [True, False])
async def test_worker_that_cannot_follow_tries_again_then_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heals: bool
) -> None:
    """A worker that serves other models than its peers must not stay like that."""
    models = repository(tmp_path / "models", "tiny")
    ended: list[int] = []
    monkeypatch.setattr(shared_repository, "MAX_RETRIES", 1)
    async with together(models, _folder(tmp_path)) as (one, state, start):
        two = await start(1)
        state.set_complete()
        write_encoder(models / "tiny" / "2")
        two.loader._load = out_of_memory  # type: ignore[method-assign, assignment]
        with pytest.raises(NotReady):
            await one.load("tiny")
        monkeypatch.setattr(os, "kill", lambda pid, number: ended.append(number))
        if heals:
            del two.loader._load
        deadline = monotonic() + 10
        while not (two.ready_here if heals else ended):
            assert monotonic() < deadline
            await asyncio.sleep(0.05)
        assert two.versions("tiny") == (["1", "2"] if heals else ["1"])
    assert set(ended) == (set() if heals else {signal.SIGTERM})


@pytest.mark.process
def test_workers_that_cannot_write_keep_serving(tmp_path: Path) -> None:
    """As with a full disk: they need no file to answer."""
    with serving(write_encoder(tmp_path / "tiny"), tmp_path) as server:
        server.wait()
        before = server.pids()
        for pid in before:
            psutil.Process(pid).rlimit(psutil.RLIMIT_FSIZE, (0, 0))
        client, start = server.client(before[0]), monotonic()
        while monotonic() < start + 6:  # twice the time of a hang
            assert client.post("/texts/embed", EMBED) == 200
        assert server.pids() == before


async def test_load_waits_until_a_hanging_worker_is_removed(tmp_path: Path) -> None:
    """As the supervisor does with one that sends no heartbeat."""
    async with together(write_encoder(tmp_path / "tiny"), _folder(tmp_path)) as (one, state, _):
        state.set_status(Status(1, serving=True, ready=True))
        load = asyncio.ensure_future(one.load("tiny"))
        await asyncio.sleep(0.5)
        assert not load.done()
        state.remove_status(1)
        await asyncio.wait_for(load, 10)


def test_share_cores_divides_available_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)

    def threads(cores: int = 8, **given: int) -> int:
        monkeypatch.setattr(launch, "available_cores", lambda: cores)
        return share_cores(Settings(model=tmp_path, **given)).threads  # type: ignore[arg-type]

    assert (threads(), os.environ["RAYON_NUM_THREADS"]) == (0, "4")
    monkeypatch.delenv("RAYON_NUM_THREADS")
    assert threads(workers=2, concurrency=2) == 2
    assert os.environ["RAYON_NUM_THREADS"] == "2"
    assert threads(workers=2) == 4
    assert threads(workers=16) == 1
    assert threads(workers=2, threads=3) == 3
    assert threads(cores=3) == 3  # by a quota
    assert threads(cores=3, concurrency=2) == 3  # of a run that is alone


def test_sessions_that_share_cores_do_not_spin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (settings_module, backends):
        monkeypatch.setattr(module, "available_cores", lambda: 4)

    def shares(**given: int) -> bool:
        return Settings(model=tmp_path, **given).shares_cores  # type: ignore[arg-type]

    assert not shares() and not shares(workers=4, threads=1) and not shares(threads=4)
    assert not shares(concurrency=2)  # only a run that is alone takes all cores
    assert shares(concurrency=3, threads=2) and shares(workers=4, threads=2)

    seen: list[bool] = []

    def opened(source: Any, device: Any, options: SessionOptions) -> Any:
        seen.append(options.spinning)
        return open_session(source, device, options)

    monkeypatch.setattr(backends, "open_session", opened)
    model = write_encoder(tmp_path / "tiny")

    async def load(**given: int) -> None:
        settings = Settings.model_validate({"model": model, "probe": False, **given})
        repository = Repository(settings)
        await repository.start()
        await repository.close()

    asyncio.run(load(concurrency=1))
    asyncio.run(load())  # alone, shared
    asyncio.run(load(concurrency=2, workers=2))
    assert seen == [True, True, False, False, False]


def _status(state: SharedState, worker: int) -> Status:
    status = state.status(worker)
    assert status is not None
    return status


def _folder(path: Path) -> Path:
    folder = path / "shared"
    folder.mkdir()
    return folder
