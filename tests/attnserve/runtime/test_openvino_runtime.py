"""OpenVINO beside ONNX Runtime: the same results and the same refusals, whatever ran before."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from attnserve.context import ONE_THREAD, Device, RunContext
from attnserve.models.artifact import open_artifact
from attnserve.models.example_inputs import random_batches
from attnserve.models.onnx_files import load_model, save_model
from attnserve.precision.convert import context_for
from attnserve.runtime import openvino_runtime
from attnserve.runtime.by_length import LengthRunner
from attnserve.runtime.inference_precision import compute_in_bfloat16
from attnserve.runtime.interface import Feed, RunFailed, Session, SessionOptions
from attnserve.runtime.machine import has_bfloat16_product
from attnserve.runtime.observer import Observer, state_of
from attnserve.runtime.onnx_runtime import OnnxSession
from attnserve.runtime.openvino_session import MOST_ATTEMPTS
from attnserve.runtime.session import RUNTIMES, open_session, runtime_of
from attnserve.runtime.stop import STOP, Stop
from graph_passes.errors import InvalidArgument, InvalidModel, MissingExtra
from graph_passes.matching.find import find_attention
from graph_passes.passes.decompose_attention import DecomposeAttention
from graph_passes.passes.fuse_attention import FuseAttention
from tests.errors import raises
from tests.onnx_text import with_weights

openvino = pytest.importorskip("openvino")

OPENVINO = Device(threads=1, runtime="openvino")

GRAPHS = sorted((Path(__file__).parents[2] / "fixtures/onnx").glob("*.onnx"))

ROWS = 50

TABLE = """
<ir_version: 8, opset_import: ["" : 17]>
g (int64[batch, tokens] ids, int64[batch, tokens] mask) => (float[batch, tokens, 4] y) {
    rows = Gather (w, ids)
    weights = Cast <to = 1> (mask)
    one = Constant <value_ints = [2]> ()
    wide = Unsqueeze (weights, one)
    start = Constant <value_ints = [0]> ()
    lengths = Shape <start = 1> (ids)
    axis = Constant <value_ints = [0]> ()
    positions = Slice (p, start, lengths, axis)
    placed = Add (rows, positions)
    y = Mul (placed, wide)
}
"""
"""A table of 50 rows with 8 positions, as encoders have them."""

POSITIONS = 8


def table() -> ir.Model:
    generator = np.random.default_rng(0)
    w, p = (generator.normal(size=(n, 4)).astype(np.float32) for n in (ROWS, POSITIONS))
    return with_weights(TABLE, w=w, p=p)


@pytest.fixture(scope="module")
def pair() -> tuple[Session, Session]:
    """The table in ONNX Runtime and in OpenVINO."""
    return open_session(table(), ONE_THREAD), open_session(table(), OPENVINO)


def ids_of(rows: int, tokens: int, first: int = 0) -> dict[str, np.ndarray]:
    ids = (np.arange(rows * tokens).reshape(rows, tokens) + first) % ROWS
    return {"ids": ids, "mask": np.ones((rows, tokens), np.int64)}


def result(session: Session, feed: dict[str, np.ndarray]) -> np.ndarray | None:
    """The first output; None if the session refuses the inputs."""
    try:
        return session.run(None, feed)[0]
    except RunFailed as refused:
        assert refused.kind == "inputs"
        return None


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: path.stem)
def test_graph_of_an_architecture_gives_what_onnx_runtime_gives(path: Path):
    model = load_model(open_artifact(path))
    feed = random_batches(model, 0)[0]
    expected = open_session(path, ONE_THREAD).run(None, feed)
    got = open_session(path, OPENVINO).run(None, feed)
    # Weights in float16 round sums differently: 1e-3 of the largest value.
    tolerance = 1e-3 if "fp16" in path.stem else 1e-4
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=tolerance * (np.abs(other).max() + 1e-9))


def test_description_is_that_of_the_graph(pair: tuple[Session, Session]):
    for side in ("get_inputs", "get_outputs"):
        values = [
            [(v.name, v.type, list(v.shape)) for v in getattr(session, side)()] for session in pair
        ]
        assert values[0] == values[1]


Run = tuple[int, int, int]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 10), st.sampled_from([0, 7, 10**6]))))
def test_results_do_not_depend_on_the_runs_before(pair: tuple[Session, Session], runs: list[Run]):
    # Refused are more tokens than positions, and ids outside of the table.
    for rows, tokens, first in runs:
        feed = ids_of(rows, tokens)
        feed["ids"] = feed["ids"] + first if first > ROWS else ids_of(rows, tokens, first)["ids"]
        expected, got = (result(session, feed) for session in pair)
        assert (got is None) == (expected is None) == (tokens > POSITIONS or first > ROWS)
        if expected is not None:
            np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"mask": None},
        {"other": np.ones(1)},
        {"mask": np.ones((2, 3), np.int64)},
        {"mask": np.ones((2, 4), np.int32)},
        {"mask": np.ones(4, np.int64)},
        {"ids": np.full((2, 4), ROWS)},
        {"ids": np.full((2, 4), -ROWS - 1)},
    ],
    ids=["missing", "unknown", "sizes", "type", "axes", "id", "negative id"],
)
def test_inputs_that_do_not_fit_are_refused(
    pair: tuple[Session, Session], change: dict[str, np.ndarray | None]
):
    feed = {name: array for name, array in {**ids_of(2, 4), **change}.items() if array is not None}
    for session in pair:
        with raises(RunFailed, "session.inputs_refused"):
            session.run(None, feed)
    np.testing.assert_allclose(*(session.run(None, ids_of(2, 4))[0] for session in pair), atol=1e-6)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_runs_of_several_threads_give_their_own_results(
    pair: tuple[Session, Session], concurrency: int
):
    """Some runs are refused: the model is compiled again while the other one runs."""
    plain = pair[0]
    session = open_session(table(), OPENVINO, SessionOptions(concurrency=concurrency))
    wrong: list[str] = []

    def work(first: int) -> None:
        for turn in range(30):
            feed = ids_of(1 + turn % 3, 1 + (turn + first) % (POSITIONS + 2), first)
            expected, got = result(plain, feed), result(session, feed)
            if (got is None) != (expected is None) or (
                expected is not None and got is not None and np.abs(got - expected).max() > 1e-6
            ):
                wrong.append(f"thread {first}, turn {turn}")

    threads = [threading.Thread(target=work, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(("broken", "error"), [(3, None), (MOST_ATTEMPTS, "device")])
def test_a_run_is_repeated_while_other_runs_break_its_model(
    broken: int, error: str | None, pair: tuple[Session, Session], monkeypatch: pytest.MonkeyPatch
):
    session, feed = open_session(table(), OPENVINO, SessionOptions(concurrency=2)), ids_of(2, 4)
    start, others = openvino.InferRequest.start_async, list[np.ndarray | None]()

    def start_beside_another(request: Any, given: Feed, **options: Any) -> None:
        if given["ids"].shape == (2, 4) and len(others) < broken:
            others.append(result(session, ids_of(1, POSITIONS + 1)))
            raise RuntimeError("another run broke the model")
        start(request, given, **options)

    monkeypatch.setattr(openvino.InferRequest, "start_async", start_beside_another)
    if error:
        with raises(RunFailed, "session.inputs_refused") as failed:
            session.run(None, feed)
        assert failed.value.kind == error
    else:
        np.testing.assert_allclose(*(each.run(None, feed)[0] for each in (session, pair[0])))
    assert others == [None] * broken


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_refused_run_is_repeated_once_if_others_may_run_beside_it(
    concurrency: int, monkeypatch: pytest.MonkeyPatch
):
    """A run beside the one that breaks a model may report it first."""
    start, attempts = openvino.InferRequest.start_async, list[Any]()

    def counted(request: Any, given: Feed, **options: Any) -> None:
        attempts.append(request)
        start(request, given, **options)

    monkeypatch.setattr(openvino.InferRequest, "start_async", counted)
    session = open_session(table(), OPENVINO, SessionOptions(concurrency=concurrency))
    assert result(session, ids_of(1, POSITIONS + 1)) is None
    assert len(attempts) == concurrency
    assert result(session, ids_of(1, POSITIONS)) is not None


def test_run_waits_while_the_model_that_another_run_broke_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
):
    session = open_session(table(), OPENVINO, SessionOptions(concurrency=2))
    expected = session.run(None, ids_of(2, 4))[0]
    compile = openvino.Core.compile_model
    compiling, go = threading.Event(), threading.Event()

    def held(*given: Any) -> Any:
        compiling.set()
        assert go.wait(10)
        return compile(*given)

    monkeypatch.setattr(openvino.Core, "compile_model", held)
    with ThreadPoolExecutor(2) as pool:
        refused = pool.submit(result, session, ids_of(1, POSITIONS + 1))
        assert compiling.wait(10)
        waiting = pool.submit(session.run, None, ids_of(2, 4))
        assert not wait([waiting], timeout=0.1).done
        go.set()
        np.testing.assert_array_equal(waiting.result()[0], expected)
        assert refused.result() is None


@pytest.mark.parametrize(
    "call", [(openvino.CompiledModel, "create_infer_request"), (openvino.Core, "compile_model")]
)
def test_failure_before_a_run_is_one_of_the_device(
    call: tuple[type, str], monkeypatch: pytest.MonkeyPatch
):
    """The next run compiles the model again."""
    session = open_session(table(), OPENVINO)

    def fails(*_: Any) -> Any:
        raise RuntimeError("no device")

    with monkeypatch.context() as patch:
        patch.setattr(*call, fails)
        with pytest.raises(RunFailed, match="no device") as caught:
            session.run(None, ids_of(1, POSITIONS + 1))  # it breaks the compiled model
    assert caught.value.kind == "device"
    assert result(session, ids_of(1, POSITIONS)) is not None


def test_outputs_are_right_after_a_run_that_nobody_waits_for():
    path = next(path for path in GRAPHS if path.stem == "bert-torchscript17-eager")
    session = open_session(path, OPENVINO)
    small = random_batches(load_model(open_artifact(path)), 0)[0]
    large = {name: np.repeat(array[:1], 4096, axis=0) for name, array in small.items()}
    before = session.run(None, small)
    for delay in np.random.default_rng(0).uniform(0, 0.05, 20):
        stop = Stop()
        token = STOP.set(stop)
        timer = threading.Timer(delay, stop.set)
        timer.start()
        try:
            with suppress(RunFailed):
                session.run(None, large)
        finally:
            STOP.reset(token)
            timer.join()
        for one, other in zip(session.run(None, small), before, strict=True):
            np.testing.assert_array_equal(one, other)


def test_bind_runs_the_same_inputs_again(pair: tuple[Session, Session]):
    run = pair[1].bind(ids_of(2, 4))
    run()
    run()
    np.testing.assert_allclose(*(session.run(None, ids_of(3, 5))[0] for session in pair), atol=1e-6)


def test_named_outputs_are_returned_in_their_order():
    model = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n] x, float[n] unused) '
        "=> (float[n] a, float[n] b, float[n] x2) { a = Exp(x) b = Neg(a) x2 = Identity(x) }"
    )
    x = np.array([0.0, 1.0], np.float32)
    session = open_session(model, OPENVINO)
    feed = {"x": x, "unused": x}
    for got, expected in zip(session.run(["b", "a"], feed), (-np.exp(x), np.exp(x)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_allclose(session.run(None, feed)[2], x)


@pytest.mark.skipif(not has_bfloat16_product(), reason="the CPU does not multiply bfloat16")
def test_compiled_model_is_read_again_and_damage_repaired(tmp_path: Path):
    file = tmp_path / "model.compiled"
    feed = ids_of(2, 5)
    [expected] = open_session(table(), OPENVINO, SessionOptions(compiled=file)).run(None, feed)
    written = file.read_bytes()
    damaged = [written[:100], b"", bytes(len(written)), written[:-1] + b"?"]
    for content in (written, *damaged):
        file.write_bytes(content)
        session = open_session(table(), OPENVINO, SessionOptions(compiled=file))
        np.testing.assert_array_equal(session.run(None, feed)[0], expected)
        assert result(session, {**feed, "ids": feed["ids"] + ROWS}) is None
        before = file.stat().st_mtime_ns  # the repaired file is read
        open_session(table(), OPENVINO, SessionOptions(compiled=file))
        assert file.stat().st_mtime_ns == before


def test_compiled_model_is_optional(tmp_path: Path):
    missing = tmp_path / "missing" / "model.compiled"
    session = open_session(table(), OPENVINO, SessionOptions(compiled=missing))
    assert result(session, ids_of(2, 5)) is not None


@pytest.mark.skipif(not has_bfloat16_product(), reason="the CPU does not multiply bfloat16")
def test_model_is_computed_in_bfloat16_only_if_it_says_so(tmp_path: Path):
    generator = np.random.default_rng(0)
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 64] x) => (float[n, 64] y) {'
    weight = generator.normal(size=(64, 64)).astype(np.float32)
    model = with_weights(text + " y = MatMul(x, w) }", w=weight)
    x = generator.normal(size=(32, 64)).astype(np.float32)
    exact = x.astype(np.float64) @ weight
    errors: list[float] = []
    for states_it in (False, True):
        if states_it:
            compute_in_bfloat16(model)
        save_model(model, tmp_path / f"{states_it}.onnx")
        for source in (model, tmp_path / f"{states_it}.onnx"):
            (got,) = open_session(source, OPENVINO).run(None, {"x": x})
            errors.append(float(np.abs(got - exact).max() / np.abs(exact).max()))
    # float32 rounds at 2^-24, bfloat16 at 2^-8.
    assert max(errors[:2]) < 1e-5 < 1e-4 < min(errors[2:])


@pytest.mark.parametrize("from_file", [False, True])
def test_runtime_auto_is_the_one_that_computes_the_stated_precision(
    from_file: bool, tmp_path: Path
):
    for states_it, expected in ((False, "onnxruntime"), (True, "openvino")):
        model = table()
        if states_it:
            compute_in_bfloat16(model)
        save_model(model, tmp_path / "model.onnx")
        source = tmp_path / "model.onnx" if from_file else model
        auto = Device(threads=1, runtime="auto")
        assert runtime_of(source, auto) == expected
        opened = open_session(source, auto)
        assert isinstance(opened, OnnxSession) != states_it
        assert runtime_of(source, ONE_THREAD) == "onnxruntime"


ATTENTION = """
<ir_version: 10, opset_import: ["" : 23]>
g (float[batch, tokens, 8] x, float[batch, 1, tokens, tokens] mask) => (float[batch, tokens, 8] y) {
    BOUND
    y = Attention <q_num_heads = 2, kv_num_heads = 2> (x, x, x, bias)
}
"""

FINITE = "low = Constant <value_float = -30000.0> () bias = Max (mask, low)"


def masked(rows: int, tokens: int, seen: int) -> dict[str, np.ndarray]:
    """Rows of which attention sees the first tokens."""
    generator = np.random.default_rng(tokens)
    mask = np.zeros((rows, 1, tokens, tokens), np.float32)
    mask[..., seen:] = -np.inf
    return {"x": generator.normal(size=(rows, tokens, 8)).astype(np.float32), "mask": mask}


@pytest.mark.parametrize("tokens", [5, 256, 257])
@pytest.mark.parametrize(
    ("has_unit", "is_known"), [(True, True), (True, False), (False, True)],
    ids=["matrix unit", "unknown setting", "no matrix unit"],
)  # fmt: skip
def test_attention_in_bfloat16_equals_float32_at_each_length(
    tokens: int, has_unit: bool, is_known: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(openvino_runtime, "has_matrix_unit", lambda: has_unit)
    if not is_known:
        monkeypatch.setattr(openvino_runtime, "SEPARATE_OPERATORS", {"NO_SETTING": "1"})
    model = ir.from_onnx_text(ATTENTION.replace("BOUND", FINITE))
    exact = open_session(model, ONE_THREAD)
    compute_in_bfloat16(model)
    session = open_session(model, OPENVINO)
    assert isinstance(session, LengthRunner) == (has_unit and is_known)
    for rows in (1, 3):
        feed = masked(rows, tokens, tokens - 1)
        (expected,), (got,) = (each.run(None, feed) for each in (exact, session))
        assert np.abs(got - expected).max() < 0.05  # values of up to 4, rounded at 2^-8
        assert session.bind(feed)() is None


@pytest.mark.parametrize(("has_unit", "expected"), [(True, 256), (False, None)])
def test_short_rows_have_other_kernels_with_a_matrix_unit(
    has_unit: bool, expected: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(openvino_runtime, "has_matrix_unit", lambda: has_unit)
    assert RUNTIMES["openvino"].short_rows == expected


def test_attention_to_no_token_is_zero_with_an_infinite_mask():
    model = ir.from_onnx_text(ATTENTION.replace("BOUND", "bias = Identity (mask)"))
    (got,) = open_session(model, OPENVINO).run(None, masked(2, 6, 0))
    assert not got.any()


def test_graph_that_openvino_refuses_is_an_error_with_the_next_step():
    text = '<ir_version: 8, opset_import: ["" : 17, "own" : 1]> g (float[n] x) => (float[n] y)'
    with raises(InvalidModel, "session.graph_refused") as refused:
        open_session(ir.from_onnx_text(text + " { y = own.Unknown(x) }"), OPENVINO)
    assert refused.value.fix == "set `runtime` to onnxruntime"
    with raises(InvalidArgument, "session.provider"):
        open_session(table(), Device("cuda", runtime="openvino"))


def test_observer_of_a_part_states_the_number_of_sizes_that_reshape_reads():
    """OpenVINO needs the rank of every value; the sizes are computed outside of the part."""
    text = """
    <ir_version: 10, opset_import: ["" : 18]>
    g (float[batch, tokens, 8] x) => (float[batch, tokens, h, d] y) {
        start = Shape <end = 2> (x)
        heads = Constant <value_ints = [2, -1]> ()
        sizes = Concat <axis = 0> (start, heads)
        before = Relu (x)
        y = Reshape (before, sizes)
    }
    """
    model = ir.from_onnx_text(text)
    values = {value.name: value for node in model.graph for value in node.outputs}
    for rows, tokens in ((2, 3), (1, 5)):
        feed = {"x": np.ones((rows, tokens, 8), np.float32)}
        state = state_of(model.graph.inputs, feed)
        state |= Observer(model, [values["sizes"]], state)(state)
        found = Observer(model, [values["y"]], state, OPENVINO)(state)[values["y"]]
        np.testing.assert_array_equal(found, np.ones((rows, tokens, 2, 4)))


def test_signal_after_sessions_that_end_in_any_order_reaches_its_handler():
    """Each plugin of OpenVINO moves the stack of signal handlers."""
    program = (
        "import signal, onnx_ir as ir\n"
        "from attnserve.runtime.openvino_runtime import OpenVino\n"
        "from attnserve.context import ONE_THREAD\n"
        "model = ir.from_onnx_text('<ir_version: 8, opset_import: [\"\" : 17]> g (float[n] x) '\n"
        "    '=> (float[n] y) { y = Abs(x) }')\n"
        "sessions = [OpenVino().open(model, ONE_THREAD) for _ in range(4)]\n"
        "while sessions:\n"
        "    del sessions[0]\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: print('ended'))\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    command = [sys.executable, "-X", "faulthandler", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "ended\n"), result.stderr


@pytest.mark.parametrize("version", ["2025.4.1", "2026.1.0"])
def test_old_openvino_is_refused_with_the_command(version: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(openvino_runtime, "version", lambda _: version)
    with raises(MissingExtra, "extra.openvino") as refused:
        open_session(table(), OPENVINO)
    assert "pip install" in refused.value.fix
    with raises(MissingExtra, "extra.openvino"):  # before any work
        context_for("bfloat16-cpu", RunContext())


def scaled_attention(scale: float) -> ir.Model:
    """A layer with com.microsoft Attention: two heads of size 8, and the output projection."""
    random = np.random.default_rng(0)
    weight, bias = random.standard_normal((16, 48)), random.standard_normal(48)
    node = helper.make_node(
        "Attention", ["x", "w", "b"], ["c"], domain="com.microsoft", num_heads=2, scale=scale
    )
    output = helper.make_node("MatMul", ["c", "o"], ["y"])
    values = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["b", "s", 16]) for name in "xy"
    ]
    weights = [
        numpy_helper.from_array(array.astype(np.float32), name)
        for name, array in (("w", weight), ("b", bias), ("o", weight[:, :16]))
    ]
    graph = helper.make_graph([node, output], "scaled", values[:1], values[1:], weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=8))


def test_attention_of_another_scale_is_refused_until_it_is_fused_again() -> None:
    """OpenVINO ignores the attribute; fusion puts the factor into the weights."""
    x = np.random.default_rng(1).standard_normal((2, 5, 16)).astype(np.float32)
    feed, model = {"x": x}, scaled_attention(1.0)
    (expected,) = open_session(model, Device(runtime="onnxruntime")).run(None, feed)
    with raises(InvalidModel, "session.graph_refused", "another scale than 1"):
        open_session(model, OPENVINO)
    [block] = find_attention(model).blocks
    DecomposeAttention([block.name])(model)
    FuseAttention({block.name: "attention"})(model)
    (found,) = open_session(model, OPENVINO).run(None, feed)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    default = scaled_attention(8**-0.5)
    (expected,) = open_session(default, Device(runtime="onnxruntime")).run(None, feed)
    (found,) = open_session(default, OPENVINO).run(None, feed)
    np.testing.assert_allclose(found, expected, atol=1e-5)
