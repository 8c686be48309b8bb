"""Unmodified clients (tritonclient, openai, kserve) against a real server."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tritonclient.http as triton
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

from service.app import create_app
from service.settings import Settings
from tests.service.conftest import HeldRuns, listening, until
from tests.service.tiny import ECHO, hidden_states, mean, write_encoder, write_model

pytestmark = pytest.mark.process

IDS = np.array([[2, 4, 5, 3], [2, 6, 7, 3]])
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the tiny encoder in two versions, and the echo of every datatype."""
    root = tmp_path_factory.mktemp("repository")
    for version in ("1", "2"):
        (root / "tiny").mkdir(exist_ok=True)
        write_encoder(root / "tiny" / version)
    (root / "echo" / "1").mkdir(parents=True)
    write_model(root / "echo" / "1" / "model.onnx", ECHO)
    with listening(create_app(Settings(model=root, probe=False))) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Any]:
    with triton.InferenceServerClient(address.removeprefix("http://")) as client:
        yield client


def inputs(ids: np.ndarray = IDS, *, binary: bool = True) -> list[Any]:
    made: list[Any] = []
    for name, array in (("input_ids", ids), ("attention_mask", np.ones_like(ids))):
        made.append(triton.InferInput(name, list(array.shape), "INT64"))
        made[-1].set_data_from_numpy(array, binary_data=binary)
    return made


def refused(status: int, text: str) -> Any:
    return pytest.raises(InferenceServerException, match=rf"\[{status}\] .*{text}")


# -- tritonclient: inference ---------------------------------------------


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_triton_infers(client: Any, binary_in: bool, binary_out: bool | None) -> None:
    outputs = None
    if binary_out is not None:
        outputs = [
            triton.InferRequestedOutput(name, binary_data=binary_out)
            for name in ("kept", "last_hidden_state")
        ]
    result = client.infer("tiny", inputs(binary=binary_in), outputs=outputs, request_id="seven")
    np.testing.assert_array_equal(result.as_numpy("last_hidden_state"), hidden_states(IDS))
    np.testing.assert_array_equal(result.as_numpy("kept"), np.ones((2, 4), np.bool_))
    response = result.get_response()
    assert (response["model_name"], response["model_version"], response["id"]) == (
        "tiny",
        "2",
        "seven",
    )
    assert response["parameters"]["tokens"] == 8
    assert result.as_numpy("other") is None


@pytest.mark.parametrize("packed", [None, "gzip", "deflate"])
def test_triton_compresses_requests(client: Any, packed: str | None) -> None:
    result = client.infer(
        "tiny",
        inputs(),
        request_compression_algorithm=packed,
        response_compression_algorithm=packed,
        model_version="1",
        priority=1,
        timeout=10_000_000,
        parameters={"mine": 3},
    )
    np.testing.assert_array_equal(result.as_numpy("last_hidden_state"), hidden_states(IDS))
    assert result.get_response()["model_version"] == "1"


@pytest.mark.parametrize("binary", [True, False])
def test_triton_every_datatype_is_returned_unchanged(client: Any, binary: bool) -> None:
    arrays: dict[str, np.ndarray] = {
        "b": np.array([True, False]),
        "u8": np.array([0, 255], np.uint8),
        "u64": np.array([0, 2**64 - 1], np.uint64),
        "i8": np.array([-128, 127], np.int8),
        "i64": np.array([-(2**63), 2**63 - 1], np.int64),
        "f16": np.array([0.5, -65504], np.float16),
        "f32": np.array([[0.1, 1.5], [-2.25, 3]], np.float32),
        "f64": np.array(0.1),
    }
    sent: list[Any] = []
    for name, array in arrays.items():
        datatype = triton.InferInput(name, list(array.shape), "")
        datatype = {"b": "BOOL", "u": "UINT", "i": "INT", "f": "FP"}[name[0]] + name[1:]
        sent.append(triton.InferInput(name, list(array.shape), datatype))
        sent[-1].set_data_from_numpy(array, binary_data=binary)
    result = client.infer("echo", sent)
    for name, array in arrays.items():
        np.testing.assert_array_equal(result.as_numpy(f"{name}_out"), array, strict=True)


def test_triton_infers_asynchronously(address: str) -> None:
    with triton.InferenceServerClient(address.removeprefix("http://"), concurrency=4) as client:
        rows = np.random.default_rng(0).integers(0, 8, (20, 1, 5))
        waiting = [client.async_infer("tiny", inputs(row)) for row in rows]
        for row, one in zip(rows, waiting, strict=True):
            found = one.get_result().as_numpy("last_hidden_state")
            np.testing.assert_array_equal(found, hidden_states(row))


# -- tritonclient: errors ---------------------------------------------


def test_triton_unsupported_requests_are_refused(client: Any) -> None:
    with refused(404, "unknown model 'other'"):
        client.infer("other", inputs())
    with refused(422, "sequences are not supported"):
        client.infer("tiny", inputs(), sequence_id=7, sequence_start=True)
    with refused(422, "classification is not supported"):
        client.infer("tiny", inputs(), outputs=[triton.InferRequestedOutput("kept", class_count=2)])
    with refused(504, "."):
        client.infer("tiny", inputs(), timeout=1)
    shared = triton.InferInput("input_ids", [2, 4], "INT64")
    shared.set_shared_memory("region", 64)
    with refused(422, "shared memory is not supported"):
        client.infer("tiny", [shared, inputs()[1]])
    text = triton.InferInput("input_ids", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"a text"], np.object_))
    with refused(422, "BYTES is not supported; send texts to /embed"):
        client.infer("tiny", [text, inputs()[1]])
    with refused(404, "Not Found"):
        client.get_system_shared_memory_status()
    assert client.infer("tiny", inputs()).as_numpy("kept").all()


# -- tritonclient: the server and its models ---------------------------------------------


def test_triton_reads_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "1")
    assert not client.is_model_ready("tiny", "3")
    assert not client.is_model_ready("other")
    server = client.get_server_metadata()
    assert server["name"] == "attnserve"
    assert {
        "binary_tensor_data",
        "model_configuration",
        "model_repository",
        "parameters",
        "schedule_policy",
        "statistics",
    } <= set(server["extensions"])
    model = client.get_model_metadata("tiny")
    assert model["versions"] == ["1", "2"]
    assert model["inputs"][0] == {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]}
    with refused(404, "unknown model 'other'"):
        client.get_model_metadata("other")


def test_triton_configuration_matches_its_schema(client: Any) -> None:
    response = client.get_model_config("tiny", "1")
    config = json_format.Parse(json.dumps(response), model_config_pb2.ModelConfig())
    assert (config.name, config.backend) == ("tiny", "onnxruntime")
    assert config.platform == "onnxruntime_onnx"
    assert config.max_batch_size > 0
    assert [(one.name, one.data_type, list(one.dims)) for one in config.input] == [
        ("input_ids", model_config_pb2.TYPE_INT64, [-1]),
        ("attention_mask", model_config_pb2.TYPE_INT64, [-1]),
    ]
    assert [(one.name, one.data_type, list(one.dims)) for one in config.output] == [
        ("last_hidden_state", model_config_pb2.TYPE_FP32, [-1, 4]),
        ("kept", model_config_pb2.TYPE_BOOL, [-1]),
    ]
    assert config.HasField("dynamic_batching")
    assert config.dynamic_batching.default_queue_policy.allow_timeout_override
    # Rows of the echo are not a batch: one of its inputs has no axes at all.
    config = json_format.Parse(
        json.dumps(client.get_model_config("echo")), model_config_pb2.ModelConfig()
    )
    assert config.max_batch_size == 0
    assert {one.name: list(one.dims) for one in config.input}["f32"] == [-1, 2]
    assert not config.HasField("dynamic_batching")


def test_triton_reads_statistics(client: Any) -> None:
    client.infer("tiny", inputs())
    (stats,) = client.get_inference_statistics("tiny", "2")["model_stats"]
    assert (stats["name"], stats["version"]) == ("tiny", "2") and stats["inference_count"] >= 2
    assert set(stats["inference_stats"]) == {
        "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit",
        "cache_miss",
    }  # fmt: skip
    every = client.get_inference_statistics()["model_stats"]
    found = [(one["name"], one["version"]) for one in every]
    assert {("tiny", "1"), ("tiny", "2"), ("echo", "1")} <= set(found)
    both = client.get_inference_statistics("tiny")["model_stats"]
    assert [one["version"] for one in both] == ["1", "2"]
    with refused(404, "unknown model 'other'"):
        client.get_inference_statistics("other")


def test_triton_loads_and_unloads(client: Any) -> None:
    def index() -> dict[tuple[str, str], str]:
        return {
            (one["name"], one["version"]): one["state"]
            for one in client.get_model_repository_index()
        }

    assert index() == {("tiny", "1"): "READY", ("tiny", "2"): "READY", ("echo", "1"): "READY"}
    client.unload_model("echo", unload_dependents=True)
    assert index()["echo", "1"] == "UNAVAILABLE"
    assert not client.is_model_ready("echo")
    with refused(503, "the model 'echo' is not loaded; load it, or wait until it is"):
        client.get_model_metadata("echo")
    with refused(503, "the model 'echo' is not loaded"):
        client.infer("echo", inputs())
    assert client.is_server_ready()
    client.load_model("echo")
    assert client.is_model_ready("echo")
    assert index()["echo", "1"] == "READY"
    client.load_model("echo")  # again: it is reloaded
    with refused(404, "other"):
        client.load_model("other")
    with refused(404, "other"):
        client.unload_model("other")
    with refused(422, "config"):
        client.load_model("echo", config='{"backend": "python"}')
    with refused(422, "file:1/model.onnx"):
        client.load_model("echo", files={"file:1/model.onnx": b"no model"})
    assert client.infer("tiny", inputs()).as_numpy("kept").all()


# -- openai ---------------------------------------------


@pytest.fixture
def ask(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_openai_embeds(ask: openai.OpenAI) -> None:
    """In base64, which it asks for by itself, and in floats."""
    expected = [mean([2, 4, 5, 6, 3]), mean([2, 7, 3])]
    for answer in (
        ask.embeddings.create(model="tiny", input=["a b c", "d"]),
        ask.embeddings.create(model="tiny", input=["a b c", "d"], encoding_format="float"),
        ask.embeddings.create(model="tiny", input=[[2, 4, 5, 6, 3], [2, 7, 3]], dimensions=4),
    ):
        found = [one.embedding for one in answer.data]
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
        assert [one.index for one in answer.data] == [0, 1]
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (8, 8)
        assert answer.model == "tiny"
    one = ask.embeddings.create(model="tiny", input="d", user="someone")
    np.testing.assert_allclose(one.data[0].embedding, expected[1], rtol=1e-6, atol=1e-6)


def test_openai_lists_models(ask: openai.OpenAI) -> None:
    assert {model.id for model in ask.models.list()} == {"tiny", "echo"}
    assert ask.models.retrieve("tiny").owned_by == "attnserve"


def test_openai_errors_have_its_types(ask: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="unknown model 'other'") as not_found:
        ask.embeddings.create(model="other", input="a")
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="more than the limit of 8") as too_long:
        ask.embeddings.create(model="tiny", input="a " * 9)
    assert (too_long.value.type, too_long.value.param) == ("invalid_request_error", "input")
    with pytest.raises(openai.APIStatusError, match="2049 texts in one request") as too_many:
        ask.embeddings.create(model="tiny", input=["a"] * 2049)
    assert too_many.value.status_code == 413
    with pytest.raises(openai.NotFoundError, match="POST /v1/chat/completions: Not Found"):
        ask.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])


def test_openai_retries_after_429(tmp_path: Path, hold: Callable[[], HeldRuns]) -> None:
    app = create_app(Settings(model=write_encoder(tmp_path / "tiny"), probe=False, max_queue=1))
    with listening(app) as address, ThreadPoolExecutor(2) as threads:
        clients = [
            openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=tries)
            for tries in (0, 0, 5)
        ]
        held = hold()
        waiting = [threads.submit(_embed, clients[0])]
        held.wait()
        waiting.append(threads.submit(_embed, clients[1]))
        until(lambda: app.state.repository.engine("tiny").batcher.waiting)
        with pytest.raises(openai.RateLimitError) as overloaded:
            _embed(clients[0])
        assert overloaded.value.response.headers["retry-after"]
        assert overloaded.value.code == "rate_limit_exceeded"
        timer = threading.Timer(0.5, held.go.set)
        timer.start()
        np.testing.assert_allclose(_embed(clients[2]), mean([2, 7, 3]), rtol=1e-6)
        timer.join()
        for one in waiting:
            np.testing.assert_allclose(one.result(), mean([2, 7, 3]), rtol=1e-6)
        for client in clients:
            client.close()


def _embed(client: openai.OpenAI) -> list[float]:
    return client.embeddings.create(model="tiny", input="d").data[0].embedding


# -- kserve ---------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("kserve") is None and sys.version_info >= (3, 14),
    reason="kserve is not made for Python 3.14",
)
def test_kserve_client_calls_succeed(address: str) -> None:
    """In a process of its own: its protocol buffers have the names of tritonclient's."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.service.kserve_calls", address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all calls as expected\n"
