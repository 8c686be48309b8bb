"""open_session: models in memory and on disk, external data, CUDA, and missing ONNX Runtime."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.cli.app import main
from attnserve.context import Device
from attnserve.models.onnx_files import load_model, save_model
from attnserve.runtime import onnx_runtime as sessions
from attnserve.runtime import openvino_runtime, session
from attnserve.runtime.cuda import PARITY, Cuda
from attnserve.runtime.external_data import (
    external_files,
    external_folder,
    release_mapped_pages,
    weight_bytes,
)
from attnserve.runtime.inference_precision import compute_in_bfloat16
from attnserve.runtime.interface import AS_SERVED, RunFailed, SessionOptions, owned
from attnserve.runtime.onnx_runtime import OnnxSession, require_runtime, run_errors
from attnserve.runtime.session import (
    open_session,
    require_cuda,
    selectable_runtimes,
    warn_of_old_runtimes,
)
from graph_passes.errors import (
    InvalidArgument,
    InvalidData,
    InvalidModel,
    MissingExtra,
    OutdatedExtra,
    Refusal,
)
from tests.errors import raises
from tests.onnx_text import EXP, with_weights

ROOT = Path(__file__).parents[3]

X = np.array([0.0, 1.0], np.float32)


def scaled() -> ir.Model:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[256] x) => (float[256] y)'
    return with_weights(text + " { y = Mul(x, w) }", w=np.arange(256, dtype=np.float32))


def test_open_session_of_model_and_of_file_agree(tmp_path: Path):
    model = ir.from_onnx_text(EXP)
    save_model(model, tmp_path / "m.onnx")
    for source in (model, tmp_path / "m.onnx"):
        (got,) = open_session(source).run(None, {"x": X})
        np.testing.assert_allclose(got, np.exp(X), atol=1e-6)


def test_open_session_weights_in_a_file_are_not_read_into_python(tmp_path: Path):
    save_model(scaled(), tmp_path / "m.onnx", external=True)
    model = load_model(tmp_path / "m.onnx")
    open_session(model)
    weight = model.graph.initializers["w"].const_value
    assert isinstance(weight, ir.ExternalTensor) and weight.raw is None


def test_open_session_weights_in_two_folders_runs(tmp_path: Path):
    model = scaled()
    other = ir.Value(name="b", const_value=ir.tensor(np.ones(256, np.float32), name="b"))
    model.graph.register_initializer(other)
    added = ir.node("Add", [model.graph.outputs[0], other])
    added.outputs[0].name = "sum"
    added.outputs[0].type, added.outputs[0].shape = other.type, model.graph.outputs[0].shape
    model.graph.append(added)
    model.graph.outputs[0] = added.outputs[0]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save_model(model, tmp_path / name / "m.onnx", external=True)
    mixed, part = (load_model(tmp_path / name / "m.onnx") for name in ("one", "two"))
    assert external_folder(mixed) == tmp_path / "one"
    mixed.graph.initializers["b"].const_value = part.graph.initializers["b"].const_value
    assert external_folder(mixed) is None
    (got,) = open_session(mixed).run(None, {"x": np.ones(256, np.float32)})
    np.testing.assert_array_equal(got, np.arange(256, dtype=np.float32) + 1)


def test_release_mapped_pages_keeps_values(tmp_path: Path):
    save_model(scaled(), tmp_path / "m.onnx", external=True)
    model = load_model(tmp_path / "m.onnx")
    weight = model.graph.initializers["w"].const_value
    assert weight is not None
    array = weight.numpy()
    np.testing.assert_array_equal(array, np.arange(256))
    release_mapped_pages(model)
    np.testing.assert_array_equal(array, np.arange(256))


def test_owned_output_is_copied_once():
    (got,) = open_session(ir.from_onnx_text(EXP)).run(None, {"x": X})
    kept = owned(got)
    assert kept.flags.owndata and owned(kept) is kept
    np.testing.assert_array_equal(kept, got)


@pytest.mark.parametrize("limit", [None, 1024])
@pytest.mark.parametrize("external", [False, True])
def test_open_session_model_with_external_data_or_above_protobuf_limit_runs(
    external: bool, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, files = scaled(), (tmp_path / "m.onnx.data",) if external else ()
    if external:
        save_model(model, tmp_path / "m.onnx", external=True)
        model = load_model(tmp_path / "m.onnx")
    assert weight_bytes(model) == 1024 and external_files(model) == files
    if limit is not None:
        monkeypatch.setattr(sessions, "PROTOBUF_LIMIT_BYTES", limit)
    monkeypatch.chdir("/")  # the path must not be relative to the working folder
    (got,) = open_session(model).run(None, {"x": np.ones(256, np.float32)})
    np.testing.assert_array_equal(got, np.arange(256, dtype=np.float32))
    assert external_files(model) == files, "the model is unchanged"


NO_BIAS = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    g (float[batch, sequence, 8] x) => (float[batch, sequence, 8] y) {
        y = com.microsoft.Attention <num_heads = 2> (x, w)
    }"""


WEIGHT = np.random.default_rng(0).standard_normal((8, 24)).astype(np.float32)


def without_bias() -> ir.Model:
    """Return an operator whose CPU kernel reads a missing bias, and crashes."""
    return with_weights(NO_BIAS, w=WEIGHT)


def reference(x: np.ndarray, weight: np.ndarray = WEIGHT) -> np.ndarray:
    """Compute attention without a bias in numpy."""
    q, k, v = (part.reshape(*x.shape[:2], 2, 4) for part in np.split(x @ weight, 3, axis=-1))
    logits = np.einsum("bshk,bthk->bhst", q, k) / 2
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bhst,bthk->bshk", e / e.sum(-1, keepdims=True), v).reshape(x.shape)


RUN = """
import sys
from pathlib import Path
import numpy as np
import onnx_ir as ir
from attnserve.runtime.interface import SessionOptions
from attnserve.runtime.session import open_session
path, where = Path(sys.argv[1]), sys.argv[2]
source = path if where == "path" else ir.load(path)
x = np.load(path.with_suffix(".npy"))
options = SessionOptions(optimize=where != "memory, as it is")
(got,) = open_session(source, options=options).run(None, {"x": x})
np.save(path.with_name("got.npy"), got)
"""


@pytest.mark.process
@pytest.mark.parametrize("where", ["path", "memory", "memory, as it is"])
@pytest.mark.parametrize("external", [False, True])
def test_open_session_attention_without_bias_does_not_crash(
    tmp_path: Path, where: str, external: bool
):
    """In a separate process, because the failure would be a segmentation fault; within 1e-5."""
    save_model(without_bias(), tmp_path / "m.onnx", external=external)
    x = np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)
    np.save(tmp_path / "m.npy", x)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "m.onnx"), where],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    np.testing.assert_allclose(np.load(tmp_path / "got.npy"), reference(x), atol=1e-5, rtol=0)


def test_open_session_attention_without_bias_does_not_change_file_or_model(tmp_path: Path):
    model = without_bias()
    save_model(model, tmp_path / "m.onnx")
    file, text = (tmp_path / "m.onnx").read_bytes(), ir.to_onnx_text(model)
    open_session(tmp_path / "m.onnx")
    open_session(model)
    assert (tmp_path / "m.onnx").read_bytes() == file and ir.to_onnx_text(model) == text


def test_open_session_attention_without_bias_and_constant_weight_is_refused():
    model = ir.from_onnx_text(NO_BIAS.replace("] x)", "] x, float[8, 24] w)"))
    with raises(InvalidModel, "session.attention_bias"):
        open_session(model)


def test_open_session_attention_without_bias_in_a_subgraph_runs():
    body = """
    g (float[batch, sequence, 8] x, bool flag) => (float[batch, sequence, 8] y) {
        y = If (flag) <
            then_branch = yes () => (float[batch, sequence, 8] a) {
                a = com.microsoft.Attention <num_heads = 2> (x, w)
            },
            else_branch = no () => (float[batch, sequence, 8] b) { b = Identity(x) }>
    }"""
    x = np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)
    session = open_session(with_weights(NO_BIAS.split("\n", 1)[0] + body, w=WEIGHT))
    (got,) = session.run(None, {"x": x, "flag": np.array(True)})
    np.testing.assert_allclose(got, reference(x), atol=1e-5, rtol=0)


def test_open_session_attention_with_bias_keeps_it():
    text = NO_BIAS.replace("(x, w)", "(x, w, b)").replace("] x)", "] x, float[24] b)")
    x = np.ones((1, 3, 8), np.float32)
    feed = {"x": x, "b": np.arange(24, dtype=np.float32)}
    (got,) = open_session(with_weights(text, w=WEIGHT)).run(None, feed)
    assert np.abs(got - reference(x)).max() > 1


def test_open_session_invalid_graph_or_file_is_refused(tmp_path: Path):
    with raises(InvalidModel, "session.graph_refused", "Explode"):
        open_session(ir.from_onnx_text(EXP.replace("Exp", "Explode")))
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with raises(InvalidModel, "session.graph_refused", "m.onnx"):
        open_session(tmp_path / "m.onnx")


def test_open_session_negative_threads_are_refused():
    with raises(InvalidArgument, "session.threads", -1):
        open_session(ir.from_onnx_text(EXP), Device(threads=-1))


def test_open_session_has_no_more_threads_than_the_cpu_quota(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions, "available_cores", lambda: 3)
    for cores, expected in ((8, 3), (3, 0)):
        monkeypatch.setattr(sessions.os, "cpu_count", lambda cores=cores: cores)
        session = open_session(ir.from_onnx_text(EXP))
        assert session.native.get_session_options().intra_op_num_threads == expected


def test_threads_do_not_wait_busily_after_a_run() -> None:
    """ONNX Runtime's default takes the core of each idle thread for about 50 ms after a run."""
    size = 256
    text = (
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[n, {size}] x) => (float[n, {size}] y)'
    )
    model = with_weights(text + " { y = MatMul(x, w) }", w=np.ones((size, size), np.float32))
    session = open_session(model, Device(threads=4), AS_SERVED)
    feed = {"x": np.ones((size, size), np.float32)}
    waited: list[float] = []
    for _ in range(5):
        session.run(None, feed)
        start = time.process_time()
        time.sleep(0.1)
        waited.append(time.process_time() - start)
    assert min(waited) < 0.02


def test_open_session_cuda_without_provider_is_refused():
    if "CUDAExecutionProvider" in require_runtime().get_available_providers():
        pytest.skip("this ONNX Runtime has the CUDA provider")
    with raises(InvalidArgument, "session.no_cuda"):
        open_session(ir.from_onnx_text(EXP), Device("cuda"))


@pytest.mark.parametrize("device", [True, False])
def test_open_session_cuda_without_device_is_refused(monkeypatch: pytest.MonkeyPatch, device: bool):
    available = ["CUDAExecutionProvider"] * device + ["CPUExecutionProvider"]
    requested: list[object] = []

    def start(source: bytes, options: object, providers: object) -> SimpleNamespace:
        requested.append(providers)
        return SimpleNamespace(get_providers=lambda: available)

    runtime = SimpleNamespace(
        SessionOptions=MagicMock,
        InferenceSession=start,
        get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"],
        set_default_logger_severity=lambda severity: None,
    )
    monkeypatch.setattr(sessions, "require_runtime", lambda: runtime)
    model = ir.from_onnx_text(EXP)
    if device:
        open_session(model, Device("cuda"))
    else:
        with raises(InvalidArgument, "session.no_device"):
            open_session(model, Device("cuda"))
    # Without TF32, which would make parity meaningless.
    parity = ("CUDAExecutionProvider", PARITY.provider_options())
    assert requested == [[parity, "CPUExecutionProvider"]]
    requested.clear()
    speed = Cuda(tf32=True, memory_bytes=2**30)
    if device:
        open_session(model, Device("cuda"), SessionOptions(cuda=speed))
        assert requested[0][0] == ("CUDAExecutionProvider", speed.provider_options())  # type: ignore[index]


def test_require_cuda_is_none_only_with_provider(monkeypatch: pytest.MonkeyPatch):
    if "CUDAExecutionProvider" not in require_runtime().get_available_providers():
        assert "CUDA" in str(Refusal.of(require_cuda))
    monkeypatch.setattr(sessions, "execution_providers", lambda *_: ["CPUExecutionProvider"])
    assert Refusal.of(require_cuda) is None


def test_open_session_profile_is_written_to_the_given_prefix(tmp_path: Path):
    session = open_session(ir.from_onnx_text(EXP), options=SessionOptions(profile=tmp_path / "exp"))
    session.run(None, {"x": X})
    path = Path(session.end_profiling())
    assert path.parent == tmp_path and path.name.startswith("exp") and path.stat().st_size


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("0", "0")])
def test_require_runtime_turns_telemetry_off_unless_it_is_wanted(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", given or "")
    if given is None:
        monkeypatch.delenv("ORT_DISABLE_TELEMETRY")
    require_runtime()
    assert os.environ["ORT_DISABLE_TELEMETRY"] == expected


def test_require_runtime_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with raises(MissingExtra, "extra.onnxruntime", "pip install 'attnserve[cpu]'"):
        require_runtime()


@pytest.mark.process
def test_command_without_onnx_runtime_names_the_extra(tiny: Path, tmp_path: Path):
    code = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "from attnserve.cli.app import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    for arguments in (
        ["inspect", str(tiny)],
        ["optimize", str(tiny), "-o", str(tmp_path / "new"), "--collab-dk", "16"],
        ["verify", str(tiny), str(tiny)],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 2, arguments
        assert done.stdout == ""
        error, fix = done.stderr.splitlines()
        assert error.startswith("error: ONNX Runtime is not installed")
        assert "pip install 'attnserve[cpu]' (or 'attnserve[gpu]'" in fix
    assert not any(tmp_path.iterdir())


ORT_ERRORS = [
    (
        "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Add node. "
        "Name:'sum/7' Status Message: /onnxruntime_src/onnxruntime/core/element_wise_ops.h:5 void "
        "onnxruntime::BroadcastIterator::Init(ptrdiff_t, ptrdiff_t) axis == 1 was false. "
        "Attempting to broadcast an axis by a dimension other than 1. 3 by 4\n",
        ["Add node 'sum/7'", "3 by 4"],
    ),
    (
        "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid dimensions for input: x for the "
        "following indices\n index: 0 Got: 3 Expected: 2\n index: 1 Got: 4 Expected: 3\n Please "
        "fix either the inputs/outputs or the model.",
        ["input: x", "Got: 3 Expected: 2", "Got: 4 Expected: 3"],
    ),
    (
        "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : no MatMul(13)",
        ["NOT_IMPLEMENTED: no MatMul(13)"],
    ),
]


@pytest.mark.parametrize(("text", "parts"), ORT_ERRORS)
def test_failed_run_has_node_and_reason(text: str, parts: list[str]) -> None:
    with pytest.raises(RunFailed) as caught, run_errors({}):
        raise RuntimeError(text)
    found = caught.value.reason
    assert all(part in found for part in parts)
    assert "\n" not in found and "onnxruntime_src" not in found and "ONNXRuntimeError" not in found


@pytest.mark.parametrize(
    ("error", "reason", "kind"),
    [
        (KeyError(), "KeyError", "inputs"),
        (MemoryError(), "MemoryError", "memory"),
        (RuntimeError("Failed to allocate memory"), "Failed to allocate memory", "memory"),
        (RuntimeError("CUDA failure 700"), "CUDA failure 700", "device"),
        (type("EPFail", (Exception,), {})("lost"), "lost", "device"),
    ],
)
def test_failed_run_has_a_kind(error: Exception, reason: str, kind: str) -> None:
    with pytest.raises(RunFailed) as caught, run_errors({}):
        raise error
    assert (caught.value.reason, caught.value.kind) == (reason, kind)


def test_run_refused_inputs_are_described(tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    g (float[2, 3] x) => (float[2, 3] y) { y = Relu(x) }
    """
    session = open_session(ir.from_onnx_text(text))
    with raises(InvalidData, "session.inputs_refused", "Got: 4 Expected: 3"):
        session.run(None, {"x": np.ones((2, 4), np.float32)})


@pytest.fixture
def openvino_release(monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[[str | None], None]]:
    """Choose the installed release of OpenVINO; None if it is not installed."""

    def choose(release: str | None) -> None:
        def version(name: str) -> str:
            if release is None:
                raise PackageNotFoundError(name)
            return release

        monkeypatch.setattr(openvino_runtime, "version", version)

    session._warn_once.cache_clear()
    yield choose
    session._warn_once.cache_clear()


OPENVINO, AUTO = Device(threads=1, runtime="openvino"), Device(threads=1, runtime="auto")
UPGRADE = "pip install --upgrade 'openvino>=2026.2'"
INSTALL = "pip install 'attnserve[openvino]'"


@pytest.mark.parametrize(
    ("release", "values"), [("2026.1.0", ["2026.1.0", "2026.2 or later", UPGRADE]), (None, [])]
)
def test_runtime_auto_warns_once_of_an_old_openvino_and_runs_in_the_other_runtime(
    release: str | None, values: list[str], openvino_release: Callable[[str | None], None],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    openvino_release(release)
    model = ir.from_onnx_text(EXP)
    compute_in_bfloat16(model)  # OpenVINO would compute it
    for _ in range(2):
        warn_of_old_runtimes(AUTO)
        assert selectable_runtimes(AUTO) == ["onnxruntime"]
        assert isinstance(open_session(model, AUTO), OnnxSession)
    assert len(caplog.messages) == bool(values)
    assert all(value in caplog.text for value in values)


def test_old_openvino_that_is_not_wanted_needs_no_warning(
    openvino_release: Callable[[str | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    openvino_release("2026.1.0")
    for device in (Device(), OPENVINO, Device("cuda", runtime="auto")):
        warn_of_old_runtimes(device)
        selectable_runtimes(device)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("release", "error", "fix"),
    [(None, MissingExtra, INSTALL), ("2026.1.0", OutdatedExtra, UPGRADE)],
)
def test_runtime_openvino_without_a_usable_one_is_an_error_with_the_command(
    release: str | None, error: type[MissingExtra], fix: str,
    openvino_release: Callable[[str | None], None], tiny: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    openvino_release(release)
    with raises(error, "extra.openvino", fix):
        open_session(ir.from_onnx_text(EXP), OPENVINO)
    for arguments in (
        ["verify", str(tiny), str(tiny)],
        ["optimize", str(tiny), "-o", str(tmp_path / "new"), "--precision", "int8"],
    ):
        assert main([*arguments, "--runtime", "openvino"]) == 2
        first, second = capsys.readouterr().err.splitlines()
        assert first.startswith("error: OpenVINO") and second.strip() == fix


def test_openvino_that_cannot_be_imported_is_missing(
    openvino_release: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino_release("2026.2.0")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with raises(MissingExtra, "extra.openvino", INSTALL):
        open_session(ir.from_onnx_text(EXP), OPENVINO)
    assert selectable_runtimes(AUTO) == ["onnxruntime"]
