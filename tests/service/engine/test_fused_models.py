"""Serving of models with fused operators."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from starlette.testclient import TestClient

import attnserve
from attnserve.models import onnx_files
from attnserve.planning.served_graph import equality
from attnserve.precision import schemes
from attnserve.runtime import openvino_runtime
from attnserve.runtime.machine import has_bfloat16_product
from attnserve.serving import graph_facts, model_check
from attnserve.serving.check_result import CheckResult
from attnserve.serving.loaded_model import ModelFailed
from attnserve.serving.model_check import LoadChecker
from graph_passes.errors import InvalidModel
from service.api.triton import configuration
from service.dashboard.stats import report
from service.engine.repository import Repository
from service.metrics import Metrics
from service.settings import Settings
from service.workers.shared_repository import SharedRepository
from service.workers.shared_state import SharedState
from tests.fixtures.checked_child import ABSENT, REFUSING, Child
from tests.service import conftest

pytestmark = pytest.mark.process


serving = partial(conftest.serving, limit_s=300, threads=1, probe=True, runtime="onnxruntime")
"""Run a script with a repository that checks its models."""


ONE_RUNTIME = "lossless._splits = lambda *given: []\n"
"""The child chooses one runtime for all lengths."""


async def served(path: Path, **settings: Any) -> Mapping[str, Any]:
    """What a repository over ``path`` says of the model, and what it answers."""
    async with serving(path, **settings) as repository:
        engine = repository.engine()
        repository.log_operators()
        found = await engine.run_task("embed", ["a man is playing a guitar", "a dog"])
        config = configuration(engine)
        told = json.loads(config["parameters"]["operators"]["string_value"])
        (stats,) = report(repository)["models"]
        assert told == stats["card"]["operators"] == engine.model.operators.to_json()
        return {
            **told,
            "runtime": engine.model.runtime,
            "precision": engine.model.precision,
            "vectors": found.vectors,
            "macs": found.macs,
            "plan": engine.model.artifact.plan_id,
            "config": {name: config[name] for name in ("input", "output", "max_batch_size")},
            "file": config["default_model_filename"],
        }


@pytest.mark.usefixtures("child")
async def test_repository_fused_model_gives_same_vectors(
    bert: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "attnserve")
    fast = await served(bert)
    assert (fast["rewritten"], fast["attention"], fast["gelu"]) == (True, 2, 2)
    assert "bert runs with fused operators (2 attention, 2 GELU) in onnxruntime: " in caplog.text
    plain = await served(bert, rewrite=False)
    assert plain["rewritten"] is False and plain["why"] == "operator fusion is off"
    assert np.abs(fast["vectors"] - plain["vectors"]).max() < 1e-6
    for same in ("macs", "plan", "config", "file"):  # the other keys are those of the artifact
        assert fast[same] == plain[same]


@pytest.mark.parametrize("chosen", ["openvino", "onnxruntime"])
async def test_repository_runtime_auto_names_the_fastest(
    bert: Path, child: Child, caplog: pytest.LogCaptureFixture, chosen: str
) -> None:
    """Whichever runtime is faster here, both give the vectors of the model as it is."""
    pytest.importorskip("openvino")
    caplog.set_level("INFO", "attnserve")
    index = "0" if chosen == "onnxruntime" else "len(times) - 1"
    child(f"{ONE_RUNTIME}lossless.fastest = lambda original, times, lengths: {index}")
    fast = await served(bert, runtime="auto")
    assert (fast["rewritten"], fast["runtime"], fast["refused"]) == (True, chosen, {})
    assert f" in {chosen}: speed-up " in caplog.text
    plain = await served(bert, rewrite=False)
    assert np.abs(fast["vectors"] - plain["vectors"]).max() < 1e-5
    for same in ("plan", "file", "macs"):
        assert fast[same] == plain[same]


async def test_repository_long_rows_run_in_another_runtime(bert: Path, child: Child) -> None:
    """The runtime of a text follows from its own length, whatever is in its batch."""
    pytest.importorskip("openvino")
    child(
        "from attnserve.runtime.interface import LongRows\n"
        "lossless._splits = lambda singles, inputs, verified: [\n"
        "    singles[0]._replace(long_rows=LongRows(8, 'openvino'))]\n"
        "lossless.fastest = lambda original, times, lengths: len(times) - 1"
    )
    texts = ["a dog", "a man is playing a guitar on the stage", "cats", "the sun is out " * 4]
    lengths: list[int] = []
    async with serving(bert, runtime="auto") as repository:
        model = repository.engine().model
        found = await repository.engine().run_task("embed", texts)
        assert model.long_rows
        assert (model.runtime, model.rows_are_independent) == ("onnxruntime+openvino", True)
        assert found.runtimes.count("onnxruntime") == found.runtimes.count("openvino") == 1
        for row, text in zip(found.result.rows, texts, strict=True):
            alone = await repository.engine().run_task("embed", [text])
            assert alone.runtimes == ["openvino" if row.tokens > 8 else "onnxruntime"]
            np.testing.assert_allclose(alone.vectors, row.result[0], atol=1e-6)
            lengths.append(row.tokens)
    assert min(lengths) <= 8 < max(lengths)
    async with serving(bert, rewrite=False) as repository:
        plain = await repository.engine().run_task("embed", texts)
    np.testing.assert_allclose(found.vectors, plain.vectors, atol=1e-5)


@pytest.mark.parametrize(
    ("runtime", "precision"), [("openvino", "bfloat16"), ("onnxruntime", "float32")]
)
async def test_repository_bfloat16_is_what_the_runtime_computes(
    bert: Path, tmp_path: Path, child: Child, runtime: str, precision: str
) -> None:
    """The same file: in ONNX Runtime it is the original in float32."""
    pytest.importorskip("openvino")
    if not has_bfloat16_product():
        pytest.skip("this CPU has no products in bfloat16")
    child(
        f"{ONE_RUNTIME}lossless.fastest = lambda original, times, lengths: 0\n"  # the stated one
        f"timing.MIN_LOSSLESS_GAIN = {0 if runtime == 'openvino' else 1e9}"
    )
    report = attnserve.optimize(bert, tmp_path / "fast", precision="bfloat16-cpu")
    plain = await served(bert, rewrite=False)
    fast = await served(tmp_path / "fast", runtime="auto")
    assert (fast["runtime"], fast["precision"]) == (runtime, precision)
    error = np.abs(fast["vectors"] - plain["vectors"]).max()
    assert 1e-4 < error < 0.05 if precision == "bfloat16" else error < 1e-6
    assert 1e-7 < 1 - report.fidelity.min_cosine < 1e-2  # measured in bfloat16


async def test_repository_artifact_of_openvino_is_served_without_it(
    bert: Path, tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vectors differ by no more than the bound of bfloat16."""
    pytest.importorskip("openvino")
    monkeypatch.setattr(schemes, "has_bfloat16_product", lambda: True)
    attnserve.optimize(bert, tmp_path / "fast", precision="bfloat16-cpu")
    expected = await served(tmp_path / "fast", rewrite=False, runtime="openvino")
    assert expected["runtime"] == "openvino"

    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    child(ABSENT)
    monkeypatch.setattr(openvino_runtime, "version", absent)
    for rewrite in (True, False):
        found = await served(tmp_path / "fast", rewrite=rewrite, runtime="auto")
        assert (found["runtime"], found["precision"]) == ("onnxruntime", "float32")
        cosine, error = equality.distance(expected["vectors"], found["vectors"])
        bound = equality.TOLERANCES[ir.DataType.BFLOAT16]
        assert cosine >= bound.cosine and error <= bound.error


@pytest.mark.parametrize("is_faster", [True, False])
def test_refused_runtime_is_in_the_log_and_in_the_metadata(
    bert: Path, child: Child, start: Callable[..., TestClient],
    caplog: pytest.LogCaptureFixture, is_faster: bool,
) -> None:  # fmt: skip
    """Also if no fused graph is faster, so that the model is served as it is."""
    caplog.set_level("INFO", "attnserve")
    child(REFUSING if is_faster else f"{REFUSING}\ntiming.MIN_LOSSLESS_GAIN = 1e9")
    client = start(bert, probe=True, threads=1, runtime="auto")
    client.app.state.repository.log_operators()  # type: ignore[attr-defined]
    assert "bert does not run in openvino: no kernel for Erf" in caplog.messages
    assert ("with fused operators" in caplog.text) == is_faster
    parameters = client.get("/v2/models/bert").json()["parameters"]
    assert parameters["runtime"] == "onnxruntime"
    assert parameters["refused"] == {"openvino": "no kernel for Erf"}


async def test_refusal_of_a_runtime_remains_if_the_fused_model_does_not_load(
    bert: Path, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(REFUSING)
    monkeypatch.setattr(model_check, "FOREGROUND_S", 0)
    async with serving(bert, runtime="auto") as repository:
        engine = repository.engine()
        assert engine.model.operators == model_check.PENDING

        def fail(*given: object) -> None:
            raise InvalidModel("no memory")

        monkeypatch.setattr(repository.loader, "_load", fail)
        while engine.model.operators == model_check.PENDING:
            await asyncio.sleep(0.05)
        assert engine.model.operators.why == "no memory"
        assert engine.model.operators.refused_runtimes == {"openvino": "no kernel for Erf"}


async def test_repository_unchecked_model_is_not_fused(bert: Path) -> None:
    told = await served(bert, probe=False)
    assert (told["rewritten"], told["why"]) == (False, "the load check is off")


@pytest.mark.usefixtures("child")
async def test_repository_fused_file_does_not_load_original_is_served(
    bert: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "attnserve")
    check = LoadChecker.check

    def truncated(self: LoadChecker, artifact: Any) -> CheckResult:
        found = check(self, artifact)
        assert found.fused_file is not None
        found.fused_file.write_bytes(found.fused_file.read_bytes()[:1000])
        return found

    monkeypatch.setattr(LoadChecker, "check", truncated)
    told = await served(bert)
    assert told["rewritten"] is False and "ONNX Runtime refuses the graph" in told["why"]
    assert "bert runs without fused operators: " in caplog.text
    assert np.isfinite(told["vectors"]).all()


@pytest.mark.usefixtures("child")
async def test_repository_pruned_model_is_fused(bert: Path, tmp_path: Path) -> None:
    """Else it would be slower than the original, which is."""
    attnserve.optimize(bert, tmp_path / "pruned", prune_heads={"0": [1, 0, 1, 1]})
    told = await served(tmp_path / "pruned")
    assert (told["rewritten"], told["attention"], told["gelu"]) == (True, 2, 2)
    plain = await served(tmp_path / "pruned", rewrite=False)
    assert np.abs(told["vectors"] - plain["vectors"]).max() < 1e-6
    assert told["plan"] == plain["plan"] is not None


async def test_repository_checked_model_is_not_read_in_the_server(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child computes the facts of the graph; the server only opens the session."""
    expected = await served(bert, rewrite=False, probe=False)

    def refuse(*given: object) -> None:
        raise AssertionError("the graph was read in the server")

    for module in (graph_facts, model_check, onnx_files):
        monkeypatch.setattr(module, "load_model", refuse)
    found = await served(bert, rewrite=False)
    assert found["macs"] == expected["macs"] and found["config"] == expected["config"]
    assert np.array_equal(found["vectors"], expected["vectors"])


async def ask(repository: Repository) -> np.ndarray:
    return (await repository.engine().run_task("embed", ["a man", "a dog"])).vectors


async def test_repository_serves_original_until_it_is_fused_in_the_background(
    bert: Path, gate: Path
) -> None:
    async with serving(bert) as repository:
        plain = repository.engine()
        assert repository.ready and plain.model.operators == model_check.PENDING
        before = await ask(repository)
        gate.touch()
        while repository.engine() is plain:  # no request is lost meanwhile
            await ask(repository)
        fused = repository.engine()
        assert fused.identity == plain.identity and fused.model.operators.fused is not None
        assert np.abs(await ask(repository) - before).max() < 1e-6
        await repository.loader.settled()
        with pytest.raises(ModelFailed):  # the first session is freed
            plain.model.run({})


@pytest.mark.usefixtures("child")
async def test_repository_load_of_an_unfused_model_fuses_it_later(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For lack of memory, at first: a later load of the same files must not lose its fusion."""
    free = model_check.available_bytes
    monkeypatch.setattr(model_check, "available_bytes", lambda: 1 << 20)
    async with serving(bert) as repository:
        plain = repository.engine()
        assert plain.model.operators.fused is None
        before = await ask(repository)
        await repository.load("bert")
        assert repository.engine() is plain  # nothing new is known
        monkeypatch.setattr(model_check, "available_bytes", free)
        await repository.load("bert")
        await repository.loader.settled()
        fused = repository.engine()
        assert fused is not plain and fused.model.operators.fused is not None
        assert np.abs(await ask(repository) - before).max() < 1e-6
        await repository.load("bert")
        assert repository.engine() is fused


async def test_repository_model_loaded_meanwhile_is_not_replaced_by_fused_one(
    bert: Path, gate: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(bert, tmp_path / "bert"))
    async with serving(copy) as repository:
        plain = repository.engine()
        record = copy / "attnserve.json"
        told = json.loads(record.read_text()) if record.exists() else {}
        record.write_text(json.dumps(told | {"pooling": "cls"}))
        await repository.load("bert")
        other = repository.engine()
        assert other is not plain
        expected = await ask(repository)
        gate.touch()
        while repository.engine() is other:
            await asyncio.sleep(0.1)
        assert repository.engine().identity == other.identity != plain.identity
        assert np.abs(await ask(repository) - expected).max() < 1e-6


async def test_repository_that_is_closed_ends_the_fusion(bert: Path, gate: Path) -> None:
    children: list[subprocess.Popen[bytes]] = []
    async with serving(bert) as repository:
        while not children:
            await asyncio.sleep(0.05)
            running = repository.loader.checker_of("tiny")._children
            children.extend(child for child in running if child.poll() is None)
    assert not gate.exists()
    assert [child.wait(30) for child in children] == [-signal.SIGKILL]


async def test_repository_fusion_that_fails_is_reported(
    bert: Path, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    child("lossless.fuse_lossless = lambda *a, **k: os.abort()")
    monkeypatch.setattr(model_check, "FOREGROUND_S", 0)
    async with serving(bert) as repository:
        engine = repository.engine()
        while engine.model.operators == model_check.PENDING:
            await asyncio.sleep(0.05)
        assert "SIGABRT" in engine.model.operators.why and repository.engine() is engine
        assert np.isfinite(await ask(repository)).all()


async def test_workers_share_one_fusion_and_all_serve_its_result(
    bert: Path, gate: Path, tmp_path: Path
) -> None:
    """The second worker checks nothing, and both replace their model when the fusion has ended."""
    (tmp_path / "shared").mkdir()
    state = SharedState(tmp_path / "shared", 2)
    async with asyncio.timeout(300):
        workers: list[SharedRepository] = []
        for number in range(2):
            settings = Settings(model=bert, threads=1, workers=2, runtime="onnxruntime")
            workers.append(SharedRepository(settings, Metrics(), worker=number, state=state))
            await workers[-1].join()
        state.set_complete()
        plain = [worker.engine() for worker in workers]
        assert all(one.model.operators == model_check.PENDING for one in plain)

        def running() -> int:
            children = [
                child for worker in workers for child in worker.loader.checker_of("tiny")._children
            ]
            return sum(child.poll() is None for child in children)

        while not running():
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)
        assert running() == 1
        gate.touch()
        for worker, before in zip(workers, plain, strict=True):
            while worker.engine() is before:
                await asyncio.sleep(0.1)
            assert worker.engine().model.operators.fused is not None
            assert worker.engine().identity == before.identity and worker.ready
        for worker in workers:
            await worker.leave()
            await worker.close()
