"""Checks of models in a child process, and operator fusion."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from attnserve.context import ONE_THREAD, Device
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import data_file
from attnserve.planning.served_graph.fusion_report import FusionReport
from attnserve.runtime.interface import LongRows
from attnserve.runtime.isolation import WorkerCrashed, limit_process, run_isolated
from attnserve.serving import check_cache, model_check
from attnserve.serving.check_cache import CheckCache, compiled_file
from attnserve.serving.check_result import CachedResult, identify
from attnserve.serving.graph_facts import GraphCost, GraphFacts
from attnserve.serving.model_check import LoadChecker
from attnserve.serving.operator_report import OperatorReport
from graph_passes.errors import InvalidArgument, InvalidModel, MissingExtra
from tests.errors import raises
from tests.fixtures.checked_child import ABSENT, REFUSING, Child
from tests.service.conftest import until
from tests.service.tiny import write_encoder, write_model

pytestmark = pytest.mark.process


def checker(folder: Path | None = None, **given: Any) -> LoadChecker:
    chosen = {"device": ONE_THREAD, "timeout_s": 60, "rewrite": True, **given}
    return LoadChecker(folder=folder, **chosen)


def test_check_rewrite_off_tries_no_fusion(bert: Path, child: Child, tmp_path: Path) -> None:
    child("lossless.fuse_lossless = None")
    one = checker(tmp_path / "rewritten", rewrite=False)
    assert one.check(open_artifact(bert)) == replace(
        identify(open_artifact(bert)), operators=model_check.NOT_REWRITTEN
    )
    assert not list((tmp_path / "rewritten").glob("*.onnx"))


def test_identity_depends_on_the_files_of_sentence_transformers(tmp_path: Path) -> None:
    """A model whose pooling changed is not the model that is served."""
    folder = write_encoder(tmp_path / "m")
    (folder / "attnserve.json").unlink()
    models = "sentence_transformers.models"
    modules = [
        {"path": "", "type": f"{models}.Transformer"},
        {"path": "1_Pooling", "type": f"{models}.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    found: set[str] = set()
    for mode in ("cls", "lasttoken"):
        config = json.dumps({"pooling_mode": mode})
        (folder / "1_Pooling" / "config.json").write_text(config)
        found.add(identify(open_artifact(folder)).identity)
    assert len(found) == 2


def test_check_result_is_cached_and_file_is_private(
    bert: Path, child: Child, tmp_path: Path
) -> None:
    folder = tmp_path / "rewritten"
    one = checker(folder)
    found = one.check(open_artifact(bert))
    assert found.fused_file is not None and list(folder.glob("*.onnx")) == [found.fused_file]
    assert folder.stat().st_mode & 0o077 == 0
    assert found.identity == identify(open_artifact(bert)).identity
    child("raise SystemExit(5)")
    assert one.check(open_artifact(bert)) == found
    assert checker(folder).check(open_artifact(bert)) == found  # of another worker


@pytest.mark.usefixtures("child")
def test_checker_temporary_folder_is_deleted_with_it(bert: Path) -> None:
    one = checker()
    path = one.check(open_artifact(bert)).fused_file
    assert path is not None and path.is_file()
    del one
    until(lambda: not path.parent.exists())  # the thread of the fusion may still end


BREAKS: Mapping[str, tuple[str, str]] = {
    "crashes": ("lossless.fuse_lossless = lambda *a, **k: os.abort()", "signal SIGABRT"),
    "hangs": ("import time; lossless.fuse_lossless = lambda *a, **k: time.sleep(60)",
              "did not finish within 1 s"),
    "is wrong": ("never = equality.Tolerance(2, 0)\n"
                 "kinds = equality.TOLERANCES\n"
                 "equality.TOLERANCES = dict.fromkeys(kinds, never)", "differs at 1 x 1"),
    "is slower": ("timing.MIN_LOSSLESS_GAIN = 1e9",
                  "x as fast, expected at least 1000000000.0x"),
    "has a defect": ("lossless.fusion_passes = None", "TypeError: 'NoneType' object is not"),
    "babbles": ("lossless.fuse_lossless = lambda *a, **k: print('{') or sys.exit(0)\n"
                "import sys", "exit status 0: {"),
}  # fmt: skip


@pytest.mark.parametrize("way", BREAKS)
def test_check_fusion_fails_original_is_served(
    bert: Path, child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    more, why = BREAKS[way]
    if way == "hangs":
        monkeypatch.setattr(model_check, "FUSION_TIMEOUT_S", 1)
    child(more)
    found = checker(tmp_path / "rewritten").check(open_artifact(bert))
    assert found.fused_file is None and found.operators.fused is None
    assert why in found.operators.why
    assert [path.suffix for path in (tmp_path / "rewritten").iterdir()] == [".json"]


def test_check_crash_of_another_runtime_leaves_the_first(
    bert: Path, child: Child, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The child that compares the runtimes crashes; a second one has ONNX Runtime alone."""
    child(
        "fuse_lossless = lossless.fuse_lossless\n"
        "def crash(artifact, new, device):\n"
        "    if device.runtime == 'auto':\n"
        "        os.abort()\n"
        "    return fuse_lossless(artifact, new, device)\n"
        "lossless.fuse_lossless = crash"
    )
    auto = replace(ONE_THREAD, runtime="auto")
    found = checker(tmp_path / "checks", device=auto).check(open_artifact(bert))
    assert found.operators.fused is not None
    assert found.operators.fused.runtime == "onnxruntime"
    assert "SIGABRT" in found.operators.fused.refused["auto"]
    assert "the runtimes could not be compared" in caplog.text


def test_check_keeps_the_reason_for_no_comparison_if_nothing_is_faster(
    bert: Path, child: Child, tmp_path: Path
) -> None:
    child(
        "fuse_lossless = lossless.fuse_lossless\n"
        "def crash(artifact, new, device):\n"
        "    if device.runtime == 'auto':\n"
        "        os.abort()\n"
        "    timing.MIN_LOSSLESS_GAIN = 1e9\n"
        "    return fuse_lossless(artifact, new, device)\n"
        "lossless.fuse_lossless = crash"
    )
    auto = replace(ONE_THREAD, runtime="auto")
    found = checker(tmp_path / "checks", device=auto).check(open_artifact(bert))
    assert found.operators.fused is None and "x as fast" in found.operators.why
    assert "SIGABRT" in found.operators.refused_runtimes["auto"]


def test_check_in_a_runtime_that_is_not_installed_names_the_command(
    bert: Path, child: Child
) -> None:
    child(ABSENT)
    with raises(MissingExtra, "extra.openvino", "pip install 'attnserve[openvino]'"):
        checker(device=replace(ONE_THREAD, runtime="openvino")).check(open_artifact(bert))


@pytest.mark.parametrize("is_faster", [True, False])
def test_check_keeps_the_refusals_of_runtimes_in_the_cache(
    bert: Path, child: Child, tmp_path: Path, is_faster: bool
) -> None:
    child(REFUSING if is_faster else f"{REFUSING}\ntiming.MIN_LOSSLESS_GAIN = 1e9")
    auto = replace(ONE_THREAD, runtime="auto")
    found = checker(tmp_path / "checks", device=auto).check(open_artifact(bert))
    assert (found.operators.fused is not None) == (found.fused_file is not None) == is_faster
    assert found.operators.refused_runtimes == {"openvino": "no kernel for Erf"}
    child("raise SystemExit(5)")
    again = checker(tmp_path / "checks", device=auto).check(open_artifact(bert))
    assert again.operators == found.operators
    assert again.unfused("no memory").operators.refused == found.operators.refused_runtimes


def test_check_slow_fusion_ends_in_the_background(bert: Path, gate: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rewritten"
    one, worker = checker(folder), checker(folder)
    first = one.check(open_artifact(bert))
    assert first.fused_file is None and first.operators == model_check.PENDING
    second = worker.check(open_artifact(bert))  # another process: the load is not checked again
    assert first.fusion is not None and second.fusion is not None
    assert one.check(open_artifact(bert)).fusion is first.fusion
    gate.touch()
    fused = first.fusion.result(300)
    assert fused.operators.fused is not None and fused.identity == first.identity
    assert second.fusion.result(300) == fused and (tmp_path / "count").read_text() == "x"
    assert fused.fused_file is not None and fused.fused_file.is_file()
    assert one.check(open_artifact(bert)) == fused == checker(folder).check(open_artifact(bert))


def test_check_files_replaced_during_the_fusion_are_not_mixed(
    bert: Path, gate: Path, tmp_path: Path
) -> None:
    """The fused model of other weights must not be found for the first ones."""
    copy = Path(shutil.copytree(bert, tmp_path / "copy"))
    one = checker(tmp_path / "rewritten")
    first = one.check(open_artifact(copy))
    model = onnx.load(copy / "model.onnx")
    model.producer_name = "replaced"
    onnx.save(model, copy / "model.onnx")
    gate.touch()
    assert first.fusion is not None
    found = first.fusion.result(300)
    assert found.fused_file is None and "changed" in found.operators.why
    again = checker(tmp_path / "rewritten").check(open_artifact(bert))
    assert again.fusion is not None  # nothing was known of its fusion
    assert again.fusion.result(300).fused_file is not None


@pytest.mark.parametrize("way", ["close", "SIGTERM", "SIGINT"])
def test_check_stopped_fusion_is_not_cached(
    bert: Path, gate: Path, tmp_path: Path, way: str
) -> None:
    """A server that stops says nothing about the model."""
    one = checker(tmp_path / "rewritten")
    first = one.check(open_artifact(bert))
    (process,) = until(lambda: [c for c in one._children if c.poll() is None])
    if way == "close":
        one.close()
    else:
        until(lambda: is_ended_by_sigint(process.pid))
        process.send_signal(signal.Signals[way])
    assert first.fusion is not None and first.fusion.result(300).fused_file is None
    other = checker(tmp_path / "rewritten")
    assert other.check(open_artifact(bert)).operators == model_check.PENDING
    other.close()


def is_ended_by_sigint(pid: int) -> bool:
    """A child of the check starts by blocking SIGINT, then ignores it, then ends by it."""
    status = dict(re.findall(r"(\w+):\t(.*)", Path(f"/proc/{pid}/status").read_text()))
    return not any(int(status[held], 16) & 1 << signal.SIGINT - 1 for held in ("SigBlk", "SigIgn"))


def test_check_little_memory_or_disk_is_tried_again(
    bert: Path, child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "rewritten"
    with monkeypatch.context() as patch:
        patch.setattr(model_check, "available_bytes", lambda: 1 << 20)
        found = checker(folder).check(open_artifact(bert))
        assert found.fused_file is None and "of memory" in found.operators.why
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        found = checker(folder).check(open_artifact(bert))
        assert found.fused_file is None and "cache folder" in found.operators.why
    assert checker(folder).check(open_artifact(bert)).fused_file is not None


@pytest.mark.parametrize(
    ("macs_per_s", "limit", "waits"), [(2e10, 300, True), (4e7, 713, True), (1e6, 3600, False)]
)
def test_check_time_limit_and_waiting_follow_macs(
    bert: Path, tmp_path: Path, macs_per_s: float, limit: float, waits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The model has 17,408 MACs per token, so 16,384 tokens are 285 million."""
    one, limits, waited = checker(tmp_path / "rewritten"), list[float](), list[float]()
    monkeypatch.setattr(model_check, "MACS_PER_S", macs_per_s)
    monkeypatch.setattr(one, "_recall", lambda artifact, content: passed)
    passed = replace(identify(open_artifact(bert)), operators=model_check.PENDING)

    class Fusion(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            waited.append(timeout or 0)
            raise TimeoutError

    def start(artifact: object, result: object, timeout_s: float) -> Future[Any]:
        limits.append(timeout_s)
        return Fusion()

    monkeypatch.setattr(one, "_start_fusion", start)
    one.check(open_artifact(bert))
    assert limits == pytest.approx([limit], rel=0.01)
    assert waited == ([model_check.FOREGROUND_S] if waits else [0])


@pytest.mark.usefixtures("child")
def test_check_unsuitable_model_is_not_fused(tmp_path: Path) -> None:
    model = write_encoder(tmp_path / "m")
    found = checker(tmp_path / "rewritten").check(open_artifact(model))
    assert found.fused_file is None
    assert "no block can be written in a faster operator" in found.operators.why


def test_check_folder_not_writable_original_is_served(child: Child, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    artifact = open_artifact(write_encoder(tmp_path / "m"))
    found = checker(tmp_path / "file" / "rewritten").check(artifact)
    assert found.operators == OperatorReport(why="there is no folder for it")


def test_check_model_folder_with_python_files_executes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_encoder(tmp_path / "m")
    (folder / "random.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(folder)
    checker(rewrite=False).check(open_artifact(Path()))
    assert not (tmp_path / "executed").exists()


LARGE_CONSTANT = """
<ir_version: 8, opset_import: ["": 17]>
large (float[n] x) => (float[n] y) <int64[1] size = {350000000}> {
  ones = ConstantOfShape <value = float[1] {1.0}> (size)
  most = ReduceMax<keepdims = 0>(ones)
  y = Mul(x, most)
}
"""
"""Some bytes, from which ONNX Runtime computes 1.4 GB: while it opens the model, or in each run."""


def test_check_small_file_that_takes_much_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    write_model(tmp_path / "m" / "model.onnx", LARGE_CONSTANT)
    with raises(InvalidModel, "model.memory", "MB of memory"):
        checker(tmp_path / "checks", rewrite=False).check(open_artifact(tmp_path / "m"))


def test_check_child_ends_on_interrupt() -> None:
    with pytest.raises(WorkerCrashed) as caught:
        run_isolated(signal.raise_signal, signal.SIGINT, prepare=limit_process, silent=True)
    assert caught.value.status == -signal.SIGINT


@pytest.mark.parametrize("error", ["RuntimeError", "CheckFailed", "InvalidArgument"])
def test_check_other_error_is_an_invalid_model(
    bert: Path, child: Child, tmp_path: Path, error: str
) -> None:
    child(
        "from graph_passes.errors import *\n"
        "class Failing:\n"
        f"    def __init__(self, *a, **k): raise {error}('no reason')\n"
        "attnserve.serving.model_check.Model = Failing"
    )
    kept = error == "InvalidArgument"
    with pytest.raises(InvalidArgument if kept else InvalidModel, match="no reason"):
        checker(tmp_path / "rewritten").check(open_artifact(bert))


MEMORY_EATER = """
import numpy as np
class Hungry:
    def __init__(self, *a, **k): self.kept = np.empty(1 << 30)
attnserve.serving.model_check.Model = Hungry
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX limits")
def test_check_child_memory_is_limited(
    bert: Path, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 GB are more than the limit for a small file; the array is never written."""
    monkeypatch.setattr(model_check, "MEMORY_PER_CORE_BYTES", 0)
    child(MEMORY_EATER)
    with pytest.raises(InvalidModel, match=r"(?i)allocate|memory"):
        checker(rewrite=False).check(open_artifact(bert))


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX limits")
def test_check_child_processor_time_is_limited() -> None:
    prepare = partial(limit_process, 0, 1)
    with pytest.raises(WorkerCrashed) as caught:
        run_isolated(exec, "while True: pass", prepare=prepare, silent=True, timeout_s=30)
    assert caught.value.status in (-signal.SIGXCPU, -signal.SIGKILL)


def test_graph_facts_json_round_trip_is_equal(bert: Path) -> None:
    facts = GraphFacts.read(open_artifact(bert))
    again = GraphFacts.model_validate(json.loads(json.dumps(facts.to_json())))
    assert again.cost.macs == facts.cost.macs
    assert again.cost.node_bytes == facts.cost.node_bytes != ()
    assert {n: v.shape for n, v in again.cost.inputs.items()} == {
        n: v.shape for n, v in facts.cost.inputs.items()
    }
    for ours, theirs in zip(again.examples, facts.examples, strict=True):
        assert all(np.array_equal(ours[name], array) for name, array in theirs.items())
    assert again.id_bounds == facts.id_bounds and again.external == facts.external
    shapes = {name: array.shape for name, array in facts.examples[0].items()}
    assert again.cost.macs_of(shapes) == facts.cost.macs_of(shapes) is not None


SCALAR_INPUT = """
<ir_version: 8, opset_import: ["": 17]>
scale (float[n, 2] x, float scale) => (float[n, 2] y) { y = Mul(x, scale) }
"""

FUSION = FusionReport(
    attention=2,
    gelu=0,
    min_cosine=0.5,
    max_error=1e-6,
    speedup=1.5,
    speedups={"1 x 8": 1.5},
    kept=["layer 1"],
    long_rows=LongRows(32, "openvino"),
)


@pytest.mark.parametrize(
    ("operators", "written"),
    [
        (OperatorReport(why="no reason"), {"rewritten": False, "why": "no reason"}),
        (
            OperatorReport(why="later", is_pending=True),
            {"rewritten": False, "pending": True, "why": "later"},
        ),
        (
            OperatorReport(why="1.00x as fast", refused={"openvino": "no kernel"}),
            {"rewritten": False, "why": "1.00x as fast", "refused": {"openvino": "no kernel"}},
        ),
        (
            OperatorReport(fused=FUSION),
            {
                "rewritten": True,
                "attention": 2,
                "gelu": 0,
                "min_cosine": 0.5,
                "max_error": 1e-6,
                "speedup": 1.5,
                "speedups": {"1 x 8": 1.5},
                "kept": ["layer 1"],
                "runtime": "onnxruntime",
                "long_rows": {"above": 32, "runtime": "openvino"},
                "refused": {},
            },
        ),
    ],
)
def test_cached_result_json_round_trip_is_equal(
    bert: Path, operators: OperatorReport, written: dict[str, Any]
) -> None:
    facts = GraphFacts.read(open_artifact(bert))
    cost = None if operators.fused is None else GraphCost.model_validate(facts.to_json())
    cached = CachedResult(identity="i", facts=facts, operators=operators, fused_cost=cost)
    content = json.loads(json.dumps(cached.to_json()))
    assert list(content) == ["identity", "facts", "operators", "running"]
    assert content["operators"] == written
    assert bool(content["running"]) == (cost is not None)
    again = CachedResult.model_validate(content)
    assert again.operators == operators and again.to_json() == content
    assert (again.fused_cost is None) == (cost is None)


def test_check_model_with_a_scalar_input_passes(tmp_path: Path) -> None:
    model = write_model(tmp_path / "scalar.onnx", SCALAR_INPUT)
    facts = checker(rewrite=False).check(open_artifact(model)).facts
    assert facts.inputs == {"x": ("n", 2), "scale": ()}


def test_check_external_data_outside_the_folder_is_refused(bert: Path, child: Child) -> None:
    """A child that a hostile model controls does not make the server read other files."""
    child(
        "def facts(self):\n"
        "    return {**self._facts.to_json(), 'external': ['../../../../../../etc/passwd']}\n"
        "attnserve.serving.model_check._CheckProcess.facts = facts"
    )
    with raises(InvalidModel, "artifact.external_outside"):
        checker(rewrite=False).check(open_artifact(bert))


def test_check_external_data_that_is_no_file_is_refused(tmp_path: Path, child: Child) -> None:
    """Reading a device or a pipe may never end."""
    folder = write_encoder(tmp_path / "tiny")
    os.mkfifo(folder / "pipe")
    child(
        "def facts(self):\n"
        "    return {**self._facts.to_json(), 'external': ['pipe']}\n"
        "attnserve.serving.model_check._CheckProcess.facts = facts"
    )
    with raises(InvalidModel, "artifact.file", "it is not a regular file"):
        checker(rewrite=False).check(open_artifact(folder))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the results that are kept between processes."""
    monkeypatch.delenv("ATTNSERVE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "attnserve" / "checks"


@pytest.fixture
def checked(
    bert: Path, child: Child, cache: Path, made_once: Callable[[str, Callable[[Path], None]], Path]
) -> Path:
    """The folder of the kept results, with that of ``bert``."""

    def make(folder: Path) -> None:
        found = checker(cached=True).check(open_artifact(bert))
        assert found.fused_file is not None and found.fused_file.parent == cache
        assert cache.stat().st_mode & 0o077 == 0
        assert {path.suffix for path in cache.iterdir()} == {".json", ".onnx"}
        shutil.copytree(cache, folder)

    made = made_once("checked-bert", make)
    shutil.copytree(made, cache, dirs_exist_ok=True)
    child("raise SystemExit(5)")
    return cache


@pytest.mark.usefixtures("checked")
def test_check_on_another_cpu_is_made_again(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest operators and runtime depend on the CPU; a home folder may be shared."""
    flags = check_cache.cpu_flags()
    assert checker(cached=True).check(open_artifact(bert)).fused_file is not None
    monkeypatch.setattr(check_cache, "cpu_flags", lambda: flags ^ {"avx512_bf16"})
    with raises(InvalidModel, "model.crash", "exit status 5"):  # of the child of a new check
        checker(cached=True).check(open_artifact(bert))
    monkeypatch.setattr(check_cache, "cpu_flags", lambda: flags)
    assert checker(cached=True).check(open_artifact(bert)).fused_file is not None


def test_check_cached_result_needs_no_child_in_the_next_process(bert: Path, checked: Path) -> None:
    found = checker(cached=True).check(open_artifact(bert))
    assert found.fused_file is not None and found.fused_file.parent == checked
    for other in (checker(), checker(cached=True, device=Device(threads=2))):
        with raises(InvalidModel, "model.crash", "exit status 5"):
            other.check(open_artifact(bert))


SPOILS: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "another json": (
        "*.json",
        lambda path: path.write_bytes(path.read_bytes().replace(b"macs", b"mcas")),
    ),
    "cut json": ("*.json", lambda path: path.write_bytes(path.read_bytes()[:100])),
    "another fused model": (
        "*.onnx",
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
    ),
    "no fused model": ("*.onnx", Path.unlink),
    "open to others": ("*.json", lambda path: path.chmod(0o666)),
    "folder open to others": ("", lambda path: path.chmod(0o777)),
}


@pytest.mark.parametrize("way", SPOILS)
def test_check_damaged_or_foreign_cache_entry_is_ignored(
    bert: Path, child: Child, checked: Path, way: str
) -> None:
    (fused,) = checked.glob("*.onnx")
    pattern, spoil = SPOILS[way]
    (path,) = checked.glob(pattern) if pattern else [checked]
    spoil(path)
    with raises(InvalidModel, "model.crash", "exit status 5"):
        checker(cached=True).check(open_artifact(bert))
    if way in ("cut json", "no fused model"):  # a new check mends each of them
        child("")
        found = checker(cached=True).check(open_artifact(bert))
        assert found.fused_file == fused and fused.stat().st_size > 100
        child("raise SystemExit(5)")
        assert checker(cached=True).check(open_artifact(bert)) == found


def test_check_cached_result_of_other_external_data_is_ignored(
    child: Child, tmp_path: Path, cache: Path
) -> None:
    folder = write_encoder(tmp_path / "tiny")
    model = onnx.load(folder / "model.onnx")
    onnx.save(
        model, folder / "model.onnx", save_as_external_data=True, location="weights.bin",
        size_threshold=0,
    )  # fmt: skip
    first = checker(cached=True).check(open_artifact(folder))
    child("raise SystemExit(5)")
    assert checker(cached=True).check(open_artifact(folder)) == first
    content = bytearray((folder / "weights.bin").read_bytes())
    content[0] ^= 1
    (folder / "weights.bin").write_bytes(content)
    with raises(InvalidModel, "model.crash", "exit status 5"):
        checker(cached=True).check(open_artifact(folder))


def test_check_timeout_of_fusion_is_tried_again_later(
    bert: Path, child: Child, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine must not turn off fusion for good."""
    monkeypatch.setattr(model_check, "FUSION_TIMEOUT_S", 1)
    child("import time; lossless.fuse_lossless = lambda *a, **k: time.sleep(60)")
    first = checker(cached=True).check(open_artifact(bert))
    assert first.fused_file is None
    child("raise SystemExit(5)")
    assert checker(cached=True).check(open_artifact(bert)) == first
    child("")
    now = time.time()
    monkeypatch.setattr(check_cache, "time", lambda: now + check_cache.RETRY_S)
    monkeypatch.setattr(model_check, "FUSION_TIMEOUT_S", 300)
    assert checker(cached=True).check(open_artifact(bert)).fused_file is not None


@pytest.mark.usefixtures("cache")
def test_cache_keeps_the_last_used_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_cache, "MOST_ENTRIES", 2)
    cache = CheckCache()
    for number, name in enumerate(["a", "b", "a", "c"]):
        file = cache.file(name)
        assert file is not None
        file.write_bytes(name.encode())
        if cache.read(name) is None:
            cache.write(name, {"of": name}, fused=True)
        os.utime(file.with_suffix(".json"), (number, number))
    assert cache.read("a") == {"of": "a"} and cache.read("c") == {"of": "c"}
    assert cache.read("b") is None
    assert cache.folder is not None and len(list(cache.folder.iterdir())) == 4


def test_cache_moves_data_files_and_compares_their_checksums(tmp_path: Path) -> None:
    cache = CheckCache(tmp_path / "checks")
    with cache.new_file("a") as new:
        assert new is not None
        new.write_bytes(b"graph")
        data_file(new).write_bytes(b"weights")
        kept = cache.keep(new)
        folder = new.parent
    assert kept == cache.file("a") and data_file(kept).read_bytes() == b"weights"
    assert not folder.exists()
    cache.write("a", {"of": "a"}, fused=True)
    assert cache.read("a") == {"of": "a"}
    data_file(kept).write_bytes(b"others")
    assert cache.read("a") is None
    compiled_file(kept).touch()
    with cache.new_file("a") as new:
        assert new is not None
        new.write_bytes(b"another graph")
        assert not compiled_file(cache.keep(new)).exists()


def test_cache_shared_by_processes_of_one_id_keeps_the_files_of_both(tmp_path: Path) -> None:
    """Two containers with one volume: each process has the id 1."""
    one, other = CheckCache(tmp_path / "checks"), CheckCache(tmp_path / "checks")
    with one.new_file("a") as first, other.new_file("a") as second:
        assert first is not None and second is not None and first != second
        first.write_bytes(b"first")
        second.write_bytes(b"second")
        assert one.keep(first).read_bytes() == b"first"
        assert other.keep(second).read_bytes() == b"second"


@pytest.mark.usefixtures("cache")
def test_cache_deletes_data_files_with_their_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_cache, "MOST_ENTRIES", 1)
    cache = CheckCache()
    for number, name in enumerate("ab"):
        file = cache.file(name)
        assert file is not None
        for path in (file, data_file(file), compiled_file(file)):
            path.write_bytes(name.encode())
        cache.write(name, {}, fused=True)
        os.utime(file.with_suffix(".json"), (number, number))
    cache.write("b", {}, fused=True)
    assert cache.folder is not None and len(list(cache.folder.iterdir())) == 4
    assert cache.read("b") == {} and cache.read("a") is None


def test_cache_lock_is_held_by_one_until_others_give_up(tmp_path: Path) -> None:
    one, other = CheckCache(tmp_path / "checks"), CheckCache(tmp_path / "checks")
    with one.lock(lambda: False) as held:
        assert held
        tries = iter([False, True])
        with other.lock(lambda: next(tries)) as also:
            assert not also
    with other.lock(lambda: False) as held:
        assert held


def test_check_without_a_cache_folder_succeeds(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("ATTNSERVE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = write_encoder(tmp_path / "tiny")
    assert checker(cached=True).check(open_artifact(folder)).identity
