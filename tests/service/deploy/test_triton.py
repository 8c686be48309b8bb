"""A Triton model repository: what is written, and what is refused.

Triton is not needed: config.pbtxt is parsed into the message that Triton itself reads, from the
tritonclient package, and the served model and its warm-up requests are run in ONNX Runtime.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf import text_format
from onnx import numpy_helper, parser

from attnserve.cli.app import main
from attnserve.exporters.triton_repository import write_repository
from attnserve.models.artifact import open_artifact
from attnserve.models.checksums import sha256
from attnserve.models.onnx_files import save_model
from attnserve.precision.convert import convert
from benchmarks.gpu.encoder import random_encoder
from graph_passes.errors import InvalidArgument, InvalidModel, InvalidOutput
from tests.errors import raises
from tests.service.tiny import ECHO, write_model

NUMPY = {"TYPE_INT64": np.int64, "TYPE_FP32": np.float32, "TYPE_BOOL": np.bool_}


@pytest.fixture(scope="module")
def config_pb2() -> Any:
    """tritonclient.grpc.model_config_pb2, without the rest of that package, which needs grpcio."""
    package = importlib.util.find_spec("tritonclient")
    if package is None or not package.submodule_search_locations:
        pytest.skip("tritonclient is not installed")
    path = Path(package.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def parsed(config_pb2: Any) -> Any:
    def parse(folder: Path) -> Any:
        return text_format.Parse((folder / "config.pbtxt").read_text(), config_pb2.ModelConfig())

    return parse


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_write_repository_default_config_is_readable_by_triton(
    encoder: Path, tmp_path: Path, parsed: Any, config_pb2: Any
):
    written = write_repository(encoder, tmp_path / "models", instances=2, max_delay_us=500)
    folder = tmp_path / "models" / "tiny"
    assert written.folder == folder
    assert names(folder) == {
        "config.pbtxt", "1/model.onnx", "1/tokenizer.json", "1/attnserve.json",
        "warmup/input_0", "warmup/input_1",
    }  # fmt: skip
    config = parsed(folder)
    assert (config.name, config.backend, config.max_batch_size) == ("tiny", "onnxruntime", 32)
    assert [(i.name, i.data_type, list(i.dims)) for i in config.input] == [
        ("input_ids", config_pb2.TYPE_INT64, [-1]),
        ("attention_mask", config_pb2.TYPE_INT64, [-1]),
    ]
    assert [(o.name, o.data_type, list(o.dims)) for o in config.output] == [
        ("last_hidden_state", config_pb2.TYPE_FP32, [-1, 4]),
        ("kept", config_pb2.TYPE_BOOL, [-1]),
    ]
    assert config.HasField("dynamic_batching")
    assert config.dynamic_batching.max_queue_delay_microseconds == 500
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 512
    (group,) = config.instance_group
    assert (group.count, group.kind) == (2, config_pb2.ModelInstanceGroup.KIND_CPU)


def test_write_repository_copies_model_unchanged(encoder: Path, tmp_path: Path):
    folder = write_repository(encoder, tmp_path).folder
    assert sha256(folder / "1/model.onnx") == sha256(encoder / "model.onnx")
    assert open_artifact(folder / "1").record == open_artifact(encoder).record


def test_write_repository_warm_up_requests_run(
    encoder: Path, tmp_path: Path, parsed: Any, config_pb2: Any
):
    folder = write_repository(encoder, tmp_path, max_batch=4).folder
    session = onnxruntime.InferenceSession(folder / "1/model.onnx")
    warm_ups = parsed(folder).model_warmup
    assert [request.batch_size for request in warm_ups] == [1, 4]
    for request in warm_ups:
        feeds = {}
        for name, value in request.inputs.items():
            dtype = NUMPY[config_pb2.DataType.Name(value.data_type)]
            row = np.frombuffer((folder / "warmup" / value.input_data_file).read_bytes(), dtype)
            feeds[name] = np.repeat(row.reshape(1, *value.dims), request.batch_size, axis=0)
        assert feeds["attention_mask"].all()
        assert session.run(None, feeds)[0].shape == (request.batch_size, 8, 4)


def test_write_repository_cuda_sets_gpu_instances(
    encoder: Path, tmp_path: Path, parsed: Any, config_pb2: Any
):
    folder = write_repository(encoder, tmp_path, provider="cuda").folder
    assert parsed(folder).instance_group[0].kind == config_pb2.ModelInstanceGroup.KIND_GPU


def test_write_repository_bfloat16_needs_cuda_and_is_copied_unchanged(tmp_path: Path, parsed: Any):
    path = tmp_path / "half.onnx"
    save_model(
        convert(random_encoder(layers=1, hidden=16, heads=2, positions=32), "bfloat16"), path
    )
    folder = write_repository(path, tmp_path / "gpu", provider="cuda").folder
    assert (folder / "1" / "model.onnx").read_bytes() == path.read_bytes()
    assert [value.data_type for value in parsed(folder).output] == [11]  # TYPE_FP32
    with raises(InvalidModel, "session.bfloat16_cpu"):
        write_repository(path, tmp_path / "cpu")
    assert not (tmp_path / "cpu").exists()


def test_write_repository_threads_sets_parameter(encoder: Path, tmp_path: Path, parsed: Any):
    config = parsed(write_repository(encoder, tmp_path, threads=3).folder)
    assert config.parameters["intra_op_thread_count"].string_value == "3"
    assert not parsed(write_repository(encoder, tmp_path, name="free").folder).parameters


def test_write_repository_max_batch_zero_has_no_batching(
    encoder: Path, tmp_path: Path, parsed: Any
):
    config = parsed(write_repository(encoder, tmp_path, max_batch=0).folder)
    assert config.max_batch_size == 0 and not config.HasField("dynamic_batching")
    assert list(config.input[0].dims) == [-1, -1]
    assert [request.batch_size for request in config.model_warmup] == [1]
    with raises(InvalidArgument, "triton.delay", "`max_batch` is 0"):
        write_repository(encoder, tmp_path, max_batch=0, max_delay_us=500, force=True)


def test_write_repository_dependent_rows_have_no_batching(tmp_path: Path, parsed: Any):
    """The axes are free, but the output's rows are not those of the input."""
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    sum (float[batch, sequence] x) => (float[one, sequence] y)
    { y = ReduceSum<keepdims = 1>(x, axes) }
    """
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "axes"))
    onnx.save(model, tmp_path / "sum.onnx")
    config = parsed(write_repository(tmp_path / "sum.onnx", tmp_path / "out").folder)
    assert config.max_batch_size == 0 and list(config.output[0].dims) == [1, -1]
    with raises(InvalidArgument, "triton.batch", "`max_batch` is 8"):
        write_repository(tmp_path / "sum.onnx", tmp_path / "two", max_batch=8)
    with raises(InvalidArgument, "triton.delay", "`max_delay_us` is 500", "batch axis"):
        write_repository(tmp_path / "sum.onnx", tmp_path / "two", max_delay_us=500)
    assert not (tmp_path / "two").exists()


def test_write_repository_fixed_axes_are_kept(tmp_path: Path, parsed: Any):
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    twice (float[2, 5] x) => (float[2, 5] y) { y = Add(x, x) }
    """
    path = write_model(tmp_path / "twice.onnx", text)
    config = parsed(write_repository(path, tmp_path / "out").folder)
    assert (config.max_batch_size, list(config.input[0].dims)) == (0, [2, 5])


def test_write_repository_fixed_length_and_free_batch_is_batched(tmp_path: Path, parsed: Any):
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    twice (int64[batch, 16] x, float[batch, 16] m) => (float[batch, 16] y)
    { f = Cast <to = 1> (x) y = Mul(f, m) }
    """
    path = write_model(tmp_path / "twice.onnx", text)
    config = parsed(write_repository(path, tmp_path / "out", max_batch=8).folder)
    assert config.max_batch_size == 8 and config.HasField("dynamic_batching")
    assert [list(value.dims) for value in (*config.input, *config.output)] == [[16]] * 3
    warm_up = {request.batch_size: request.inputs["x"].dims for request in config.model_warmup}
    assert {rows: list(dims) for rows, dims in warm_up.items()} == {1: [16], 8: [16]}


@pytest.mark.parametrize(
    ("graph", "why"),
    [
        ("(float[2, n] x) => (float[2, n] y) { y = Add(x, x) }", "'x' is fixed to 2"),
        ("(float[n] x, float s) => (float[n] y) { y = Mul(x, s) }", "'s' has no axes"),
        ("(float[n, 16] x) => (float[16, n] y) { y = Transpose(x) }", "output 'y'"),
    ],
)
def test_write_repository_max_batch_refusal_names_the_axis(tmp_path: Path, graph: str, why: str):
    text = f'<ir_version: 10, opset_import: ["": 18]> g {graph}'
    path = write_model(tmp_path / "one.onnx", text)
    with raises(InvalidArgument, "triton.batch", why):
        write_repository(path, tmp_path / "out", max_batch=8)


def test_write_repository_all_datatypes_and_scalars_are_described(
    tmp_path: Path, parsed: Any, config_pb2: Any
):
    path = write_model(tmp_path / "echo.onnx", ECHO)
    config = parsed(write_repository(path, tmp_path / "out", max_batch=0).folder)
    named = {value.name: value for value in config.input}
    kinds = {name: config_pb2.DataType.Name(value.data_type) for name, value in named.items()}
    assert kinds == {
        "b": "TYPE_BOOL", "u8": "TYPE_UINT8", "u64": "TYPE_UINT64", "i8": "TYPE_INT8",
        "i64": "TYPE_INT64", "f16": "TYPE_FP16", "f32": "TYPE_FP32", "f64": "TYPE_FP64",
    }  # fmt: skip
    assert list(named["f64"].dims) == [1]
    assert named["f64"].HasField("reshape") and not named["f64"].reshape.shape


def test_write_repository_special_characters_in_names_are_quoted(tmp_path: Path, parsed: Any):
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[n, 2] x) => (float[n, 2] y)'
        " { y = Identity(x) }"
    )
    for value, name in ((model.graph.input[0], 'a"\\\nb}'), (model.graph.output[0], "é:0")):
        value.name = name
    model.graph.node[0].input[0], model.graph.node[0].output[0] = 'a"\\\nb}', "é:0"
    onnx.save(model, tmp_path / "odd.onnx")
    config = parsed(write_repository(tmp_path / "odd.onnx", tmp_path / "out").folder)
    assert (config.input[0].name, config.output[0].name) == ('a"\\\nb}', "é:0")


def test_write_repository_external_data_is_copied_and_record_renamed(encoder: Path, tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    model = onnx.load(encoder / "model.onnx")
    onnx.save(
        model, source / "enc.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    record = {"pooling": "cls", "files": {"enc.onnx": "1" * 64, "w.bin": "2" * 64}}
    (source / "attnserve.json").write_text(json.dumps(record))
    folder = write_repository(source / "enc.onnx", tmp_path / "out").folder
    assert names(folder / "1") == {"model.onnx", "w.bin", "attnserve.json"}
    files = open_artifact(folder / "1").record.files
    assert files == {"model.onnx": "1" * 64, "w.bin": "2" * 64}
    feeds = {name: np.ones((1, 3), np.int64) for name in ("input_ids", "attention_mask")}
    onnxruntime.InferenceSession(folder / "1/model.onnx").run(None, feeds)


def test_write_repository_existing_model_needs_force(encoder: Path, tmp_path: Path, parsed: Any):
    write_repository(encoder, tmp_path)
    with pytest.raises(InvalidOutput) as caught:
        write_repository(encoder, tmp_path, max_batch=8)
    assert caught.value.code == "output.exists"
    assert parsed(tmp_path / "tiny").max_batch_size == 32
    write_repository(encoder, tmp_path, max_batch=8, force=True)
    assert parsed(tmp_path / "tiny").max_batch_size == 8
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]  # nothing half-written


@pytest.mark.parametrize("other", ["2", "notes.txt"])
def test_write_repository_force_keeps_foreign_files(encoder: Path, tmp_path: Path, other: str):
    write_repository(encoder, tmp_path)
    (tmp_path / "tiny" / other).mkdir()
    with raises(InvalidOutput, "output.foreign", f"holds {other}"):
        write_repository(encoder, tmp_path, force=True)


def test_write_repository_keeps_other_models(encoder: Path, tmp_path: Path):
    write_repository(encoder, tmp_path, name="a")
    before = names(tmp_path / "a")
    write_repository(encoder, tmp_path, name="b")
    assert names(tmp_path / "a") == before


def test_write_repository_output_over_input_is_refused(encoder: Path):
    for repository, name in ((encoder.parent, None), (encoder.parent.parent, encoder.parent.name)):
        with pytest.raises(InvalidOutput) as caught:
            write_repository(encoder, repository, name=name, force=True)
        assert caught.value.code == "output.is_input"


@pytest.mark.parametrize(
    ("options", "code", "value"),
    [
        *(({"name": name}, "name", "`name`")
          for name in ("", "..", "a/b", ".hidden", "a b", "-f", "x" * 129)),
        *(({name: number}, "number", f"`{name}` is {number}")
          for name, number in (("max_batch", -1), ("instances", 0), ("threads", -1))),
    ],
)  # fmt: skip
def test_write_repository_invalid_option_is_refused(
    encoder: Path, tmp_path: Path, options: dict[str, Any], code: str, value: str
):
    with raises(InvalidArgument, f"triton.{code}", value):
        write_repository(encoder, tmp_path / "out", **options)


def test_write_repository_broken_model_writes_nothing(tmp_path: Path):
    (tmp_path / "broken.onnx").write_bytes(b"\x08\x07junk")
    with pytest.raises(InvalidModel):
        write_repository(tmp_path / "broken.onnx", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_write_repository_model_that_cannot_run_writes_nothing(tmp_path: Path):
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    bad (float[n, s] x) => (float[n, s] y) { seven = Constant<value = float[7] {1,1,1,1,1,1,1}>()
      eight = Concat<axis = 1>(x, x) y = MatMul(eight, x) }
    """
    path = write_model(tmp_path / "bad.onnx", text)
    with raises(InvalidModel, "triton.does_not_run"):
        write_repository(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_write_repository_disk_full_keeps_old_model(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_repository(encoder, tmp_path)
    before = (tmp_path / "tiny" / "config.pbtxt").read_text()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attnserve.exporters.triton_repository.shutil.copyfile", full)
    with raises(InvalidOutput, "output.write_failed", "No space left"):
        write_repository(encoder, tmp_path, max_batch=2, force=True)
    assert (tmp_path / "tiny" / "config.pbtxt").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_deploy_triton_command_writes_and_refuses_existing(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = ["deploy", "triton", str(tmp_path), "--model", str(encoder), "--max-batch", "4"]
    assert main([*options, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["name"], shown["max_batch_size"]) == ("tiny", 4)
    assert main(options) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*options, "--force"]) == 0
    assert "batches of up to 4" in capsys.readouterr().out
