"""Sessions: in memory and on disk, with weights beside the model, and without the runtime."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from attnserve.models.artifact import load_model, save_model
from attnserve.runtime import session as sessions
from attnserve.runtime.cuda import PARITY, Cuda
from attnserve.runtime.external_data import external_files
from attnserve.runtime.session import (
    open_session,
    require_runtime,
    weight_bytes,
    why_no_cuda,
)
from graph_passes.errors import InvalidArgument, InvalidModel, MissingExtra
from tests.errors import raises

ROOT = Path(__file__).parents[3]

EXP = '<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y) { y = Exp(x) }'
X = np.array([0.0, 1.0], np.float32)


def scaled(size: int = 256) -> ir.Model:
    model = ir.from_onnx_text(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[{size}] x) => (float[{size}] y) '
        "{ y = Mul(x, w) }"
    )
    weight = ir.tensor(np.arange(size, dtype=np.float32), name="w")
    value = next(v for v in model.graph.node(0).inputs if v is not None and v.name == "w")
    value.const_value, value.shape, value.type = weight, weight.shape, ir.TensorType(weight.dtype)
    model.graph.register_initializer(value)
    return model


def test_a_model_runs_from_memory_as_from_disk(tmp_path: Path):
    model = ir.from_onnx_text(EXP)
    save_model(model, tmp_path / "m.onnx")
    for source in (model, tmp_path / "m.onnx"):
        (got,) = open_session(source).run(None, {"x": X})
        np.testing.assert_allclose(got, np.exp(X), atol=1e-6)


def test_a_model_in_memory_with_weights_on_disk_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_model(scaled(), tmp_path / "m.onnx", external=True)
    model = load_model(tmp_path / "m.onnx")
    assert external_files(model) == (tmp_path / "m.onnx.data",)
    monkeypatch.chdir("/")  # not found by accident
    (got,) = open_session(model).run(None, {"x": np.ones(256, np.float32)})
    np.testing.assert_array_equal(got, np.arange(256, dtype=np.float32))
    assert external_files(model) == (tmp_path / "m.onnx.data",), "the model stays as it was"


def test_a_model_too_large_for_a_message_goes_through_a_folder(monkeypatch: pytest.MonkeyPatch):
    model = scaled()
    assert weight_bytes(model) == 1024
    monkeypatch.setattr(sessions, "PROTOBUF_LIMIT_BYTES", 1024)
    (got,) = open_session(model).run(None, {"x": np.ones(256, np.float32)})
    np.testing.assert_array_equal(got, np.arange(256, dtype=np.float32))


NO_BIAS = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    g (float[batch, sequence, 8] x) => (float[batch, sequence, 8] y) {
        y = com.microsoft.Attention <num_heads = 2> (x, w)
    }"""


def without_bias(dtype: str = "float32") -> ir.Model:
    """An operator whose kernel on the CPU reads a bias that is not there, and crashes."""
    model = ir.from_onnx_text(NO_BIAS)
    array = np.random.default_rng(0).standard_normal((8, 24)).astype(dtype)
    value = next(v for v in model.graph.node(0).inputs if v is not None and v.name == "w")
    value.const_value = ir.tensor(array, name="w")
    value.shape, value.type = ir.Shape(array.shape), ir.TensorType(value.const_value.dtype)
    model.graph.register_initializer(value)
    return model


def by_hand(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    q, k, v = (part.reshape(*x.shape[:2], 2, 4) for part in np.split(x @ weight, 3, axis=-1))
    logits = np.einsum("bshk,bthk->bhst", q, k) / 2
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bhst,bthk->bshk", e / e.sum(-1, keepdims=True), v).reshape(x.shape)


RUN = """
import sys
from pathlib import Path
import numpy as np
import onnx
import onnx_ir as ir
from attnserve.runtime.session import open_session
path, where = Path(sys.argv[1]), sys.argv[2]
source = path if where == "path" else ir.load(path)
x = np.load(path.with_suffix(".npy"))
(got,) = open_session(source, optimize=where != "memory, as it is").run(None, {"x": x})
np.save(path.with_name("got.npy"), got)
"""


@pytest.mark.process
@pytest.mark.parametrize("where", ["path", "memory", "memory, as it is"])
@pytest.mark.parametrize("external", [False, True])
def test_attention_without_a_bias_does_not_end_the_process(
    tmp_path: Path, where: str, external: bool
):
    """In a process of its own: what it guards against is a segmentation fault. Within 1e-5."""
    model = without_bias()
    save_model(model, tmp_path / "m.onnx", external=external)
    x = np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)
    np.save(tmp_path / "m.npy", x)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "m.onnx"), where],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    weight = model.graph.initializers["w"].const_value
    assert weight is not None
    expected = by_hand(x, weight.numpy())
    np.testing.assert_allclose(np.load(tmp_path / "got.npy"), expected, atol=1e-5, rtol=0)


def test_file_of_attention_without_a_bias_stays_as_it_is(tmp_path: Path):
    save_model(without_bias(), tmp_path / "m.onnx")
    before = (tmp_path / "m.onnx").read_bytes()
    open_session(tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").read_bytes() == before


def test_model_of_attention_without_a_bias_stays_as_it_is():
    model = without_bias()
    before = ir.to_onnx_text(model)
    open_session(model)
    assert ir.to_onnx_text(model) == before


def test_attention_without_a_bias_and_with_a_weight_that_is_fed_is_refused():
    model = ir.from_onnx_text(NO_BIAS.replace("] x)", "] x, float[8, 24] w)"))
    with raises(InvalidModel, "session.attention_bias"):
        open_session(model)


def test_attention_without_a_bias_in_the_body_of_a_node_is_mended_too():
    body = """
    g (float[batch, sequence, 8] x, bool flag) => (float[batch, sequence, 8] y) {
        y = If (flag) <
            then_branch = yes () => (float[batch, sequence, 8] a) {
                a = com.microsoft.Attention <num_heads = 2> (x, w)
            },
            else_branch = no () => (float[batch, sequence, 8] b) { b = Identity(x) }>
    }"""
    proto = onnx.parser.parse_model(NO_BIAS.split("\n", 1)[0] + body)
    weight = np.random.default_rng(0).standard_normal((8, 24)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    x = np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)
    session = open_session(ir.from_proto(proto))
    (got,) = session.run(None, {"x": x, "flag": np.array(True)})
    np.testing.assert_allclose(got, by_hand(x, weight), atol=1e-5, rtol=0)


def test_a_bias_that_is_there_is_kept():
    text = NO_BIAS.replace("(x, w)", "(x, w, b)").replace("] x)", "] x, float[24] b)")
    model = without_bias()
    given = ir.from_onnx_text(text)
    weight = model.graph.initializers["w"]
    assert weight.const_value is not None
    value = next(v for v in given.graph.node(0).inputs if v is not None and v.name == "w")
    value.const_value, value.type, value.shape = weight.const_value, weight.type, weight.shape
    given.graph.register_initializer(value)
    x = np.ones((1, 3, 8), np.float32)
    bias = np.arange(24, dtype=np.float32)
    (got,) = open_session(given).run(None, {"x": x, "b": bias})
    assert np.abs(got - by_hand(x, weight.const_value.numpy())).max() > 1


def test_a_graph_that_the_runtime_refuses_is_an_invalid_model():
    bad = ir.from_onnx_text(EXP.replace("Exp", "Explode"))
    with raises(InvalidModel, "session.graph_refused", "Explode"):
        open_session(bad)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path):
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with raises(InvalidModel, "session.graph_refused", "m.onnx"):
        open_session(tmp_path / "m.onnx")


def test_negative_threads_are_refused():
    with raises(InvalidArgument, "session.threads", -1):
        open_session(ir.from_onnx_text(EXP), threads=-1)


def test_cuda_without_the_provider_is_refused():
    if "CUDAExecutionProvider" in require_runtime().get_available_providers():
        pytest.skip("this ONNX Runtime has the CUDA provider")
    with raises(InvalidArgument, "session.no_cuda"):
        open_session(ir.from_onnx_text(EXP), provider="cuda")


@pytest.mark.parametrize("device", [True, False])
def test_cuda_without_a_device_never_runs_on_the_cpu_in_silence(
    monkeypatch: pytest.MonkeyPatch, device: bool
):
    providers = ["CUDAExecutionProvider"] * device + ["CPUExecutionProvider"]
    made: list[object] = []

    def start(source: bytes, options: object, providers: object) -> SimpleNamespace:
        made.append(providers)
        return SimpleNamespace(get_providers=lambda: there)

    there = providers
    runtime = SimpleNamespace(
        SessionOptions=SimpleNamespace,
        InferenceSession=start,
        get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"],
    )
    monkeypatch.setattr(sessions, "require_runtime", lambda: runtime)
    model = ir.from_onnx_text(EXP)
    if device:
        open_session(model, provider="cuda")
    else:
        with raises(InvalidArgument, "session.no_device"):
            open_session(model, provider="cuda")
    # TensorFloat-32 would make parity meaningless.
    assert made == [[("CUDAExecutionProvider", PARITY.provider_options()), "CPUExecutionProvider"]]
    made.clear()
    speed = Cuda(tf32=True, memory_bytes=2**30)
    if device:
        open_session(model, provider="cuda", cuda=speed)
        assert made[0][0] == ("CUDAExecutionProvider", speed.provider_options())  # type: ignore[index]


def test_it_is_known_why_nothing_runs_on_cuda(monkeypatch: pytest.MonkeyPatch):
    if "CUDAExecutionProvider" not in require_runtime().get_available_providers():
        assert (
            why_no_cuda() == "`provider` is cuda: this ONNX Runtime has no CUDA execution provider."
        )
    monkeypatch.setattr(sessions, "_providers", lambda *_: ["CPUExecutionProvider"])
    assert why_no_cuda() is None


def test_a_profile_is_written_where_it_is_asked_for(tmp_path: Path):
    session = open_session(ir.from_onnx_text(EXP), profile=tmp_path / "exp")
    session.run(None, {"x": X})
    path = Path(session.end_profiling())
    assert path.parent == tmp_path and path.name.startswith("exp") and path.stat().st_size


def test_without_the_runtime_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with raises(MissingExtra, "extra.onnxruntime", "pip install 'attnserve[cpu]'"):
        require_runtime()


@pytest.mark.process
def test_without_the_runtime_a_command_says_which_extra_to_install(tiny: Path, tmp_path: Path):
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
