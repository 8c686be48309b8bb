"""Read and write artifacts: records, hostile files, external data, outputs and staging."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import orjson
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from attnserve.models.artifact import Artifact, copy_companions, open_artifact
from attnserve.models.model_folder import Place, find_models
from attnserve.models.onnx_files import external_data_locations, load_model, save_model
from attnserve.models.outputs import check_output, check_target, staged
from attnserve.models.record import merged_record, write_record
from attnserve.runtime.external_data import external_files
from attnserve.runtime.onnx_reader import LARGE
from attnserve.runtime.session import open_session
from graph_passes.errors import InvalidModel, InvalidOutput
from tests.errors import raises

LINEAR = """<ir_version: 10, opset_import: ["" : 18]>
linear (float[n, 64] x) => (float[n, 64] y) { y = MatMul(x, w) }"""


def linear(path: Path) -> Path:
    model = parser.parse_model(LINEAR)
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return linear(tmp_path / "plain" / "model.onnx")


@pytest.fixture
def external(plain: Path, tmp_path: Path) -> Path:
    """The same model with its weights in model.onnx.data."""
    path = tmp_path / "external" / "model.onnx"
    path.parent.mkdir()
    save_model(load_model(plain), path, external=True)
    return path


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def relocate(path: Path, **entries: str) -> Path:
    """Change the external data entries of a model."""
    proto = onnx.load(path, load_external_data=False)
    changed = {e.key: e.value for e in proto.graph.initializer[0].external_data} | entries
    del proto.graph.initializer[0].external_data[:]
    for key, value in changed.items():
        proto.graph.initializer[0].external_data.add(key=key, value=value)
    path.write_bytes(proto.SerializeToString())
    return path


# Finding the model


def test_open_artifact_folder_uses_model_onnx_or_the_only_model(plain: Path):
    artifact = open_artifact(plain.parent)
    assert (artifact.model, artifact.name, artifact.folder) == (plain, "plain", plain.parent)
    other = plain.rename(plain.with_name("encoder.onnx"))
    assert (open_artifact(plain.parent).model, open_artifact(plain.parent).name) == (
        other,
        "encoder",
    )


def test_open_artifact_folder_without_one_model_is_refused(plain: Path):
    shutil.copy(plain, plain.with_name("a.onnx"))
    plain.rename(plain.with_name("b.onnx"))
    with raises(InvalidModel, "artifact.model_count", "found 2 "):
        open_artifact(plain.parent)
    for path in plain.parent.iterdir():
        path.unlink()
    with raises(InvalidModel, "artifact.model_count", "found 0"):
        open_artifact(plain.parent)


# --- folders of the Hugging Face hub ------------------------------------------------------------


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A model of sentence-transformers as on the hub: ONNX files in a folder of their own."""
    folder = tmp_path / "encoder"
    linear(folder / "onnx" / "model.onnx")
    shutil.copy(folder / "onnx" / "model.onnx", folder / "onnx" / "model_O2.onnx")
    for name in ("config.json", "tokenizer.json"):
        write_json(folder / name, {"name": name})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 256})
    write_modules(folder, "Transformer", "Pooling", "Normalize")
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    return folder


def write_modules(folder: Path, *names: str) -> None:
    kinds = [f"sentence_transformers.models.{name}" for name in names]
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(names[1:], start=1))]
    modules = [{"path": path, "type": kind} for path, kind in zip(paths, kinds, strict=True)]
    write_json(folder / "modules.json", modules)


@pytest.mark.parametrize("where", ["", "onnx", "onnx/model.onnx", "onnx/model_O2.onnx"])
def test_open_artifact_of_the_hub_has_tokenizer_and_pooling(hub: Path, where: str):
    artifact = open_artifact(hub / where)
    assert artifact.tokenizer == hub / "tokenizer.json"
    assert artifact.model.name == Path(where).name if where.endswith(".onnx") else "model.onnx"
    assert artifact.name == ("model_O2" if "O2" in where else "encoder")
    assert (artifact.pooling, artifact.normalize, artifact.max_length) == ("cls", True, 256)


def test_open_artifact_record_precedes_modules(hub: Path):
    write_record(hub / "onnx", {"pooling": "last"})
    artifact = open_artifact(hub)
    assert (artifact.pooling, artifact.normalize, artifact.max_length) == ("last", False, None)
    write_record(hub / "onnx", {"lineage": []})  # of optimize
    assert open_artifact(hub).pooling == "cls"


@pytest.mark.parametrize("kind", ["dense", "pooling", "prompt"])
def test_open_artifact_what_the_graph_has_to_compute_is_its_output(hub: Path, kind: str):
    """Dense layers, and poolings that are not supported; everything else is still read."""
    write_json(
        hub / "config_sentence_transformers.json",
        {"prompts": {"query": "Q: "}, "truncate_dim": 3, "similarity_fn_name": "dot"},
    )
    if kind == "dense":
        write_modules(hub, "Transformer", "Pooling", "Dense", "Normalize")
    elif kind == "pooling":
        write_json(hub / "1_Pooling" / "config.json", {"pooling_mode": "weightedmean"})
    else:
        write_json(
            hub / "1_Pooling" / "config.json", {"pooling_mode": "mean", "include_prompt": False}
        )
    artifact = open_artifact(hub)
    assert (artifact.output, artifact.pooling) == ("sentence_embedding", "none")
    assert (artifact.prompt("query"), artifact.dimensions) == ("Q: ", 3)
    assert (artifact.similarity, artifact.normalize) == ("dot", True)


def test_open_artifact_unknown_similarity_is_the_default(hub: Path):
    write_json(hub / "config_sentence_transformers.json", {"similarity_fn_name": "euclidean"})
    assert open_artifact(hub).similarity == "cosine"


@pytest.mark.parametrize("names", [("Transformer",), ("Transformer", "LogitScore"), ("BoW",)])
def test_open_artifact_ignores_modules_without_pooling(hub: Path, names: tuple[str, ...]):
    write_modules(hub, *names)
    assert open_artifact(hub).record == {}


@pytest.mark.parametrize("mode", [None, 5, True, [1], [["cls"]], {"a": 1}])
def test_open_artifact_malformed_pooling_is_refused(hub: Path, mode: object):
    write_json(hub / "1_Pooling" / "config.json", {"pooling_mode": mode})
    with raises(InvalidModel, "export.config", "pooling_mode"):
        open_artifact(hub)


@pytest.mark.parametrize("path", ["../other", "/etc", "..", ".", "a/b", "a" * 5000, "a\0b"])
def test_open_artifact_module_outside_the_folder_is_refused(hub: Path, path: str):
    kinds = [("", "Transformer"), (path, "Pooling")]
    modules = [{"path": where, "type": f"models.{kind}"} for where, kind in kinds]
    write_json(hub / "modules.json", modules)
    with raises(InvalidModel, "export.modules"):
        open_artifact(hub)


@pytest.mark.parametrize("length", ["long", 0, -1, 1.5, [256]])
def test_open_artifact_invalid_length_is_refused(hub: Path, length: object):
    write_json(hub / "sentence_bert_config.json", {"max_seq_length": length})
    with raises(InvalidModel, "export.config", "max_seq_length"):
        open_artifact(hub)


@pytest.mark.parametrize("broken", ["prompt", "length"])
def test_open_artifact_settings_that_are_no_json_are_refused(hub: Path, broken: str):
    if broken == "prompt":
        content = {"prompts": {"query": "\ud800"}}
        write_json(hub / "config_sentence_transformers.json", content)
    else:
        write_json(hub / "sentence_bert_config.json", {"max_seq_length": 10**30})
    with raises(InvalidModel, "artifact.record", "modules.json"):
        open_artifact(hub)


def test_output_above_the_folder_onnx_is_refused(hub: Path):
    """It would hide the original."""
    artifact = open_artifact(hub)
    for output in (hub, hub / "new.onnx"):
        with raises(InvalidOutput, "output.is_input"):
            check_target(output, artifact, load_model(artifact), force=True)


def test_record_of_a_model_above_the_folder_onnx_is_not_that_of_the_one_in_it(hub: Path):
    linear(hub / "model.onnx")
    write_record(hub, {"files": {"model.onnx": ""}, "lineage": [{"rewrite": "prune"}]})
    assert open_artifact(hub / "onnx").lineage == []


def test_a_folder_named_onnx_is_a_plain_one_without_configuration(tmp_path: Path):
    linear(tmp_path / "onnx" / "model.onnx")
    assert open_artifact(tmp_path / "onnx").shared is None
    with raises(InvalidModel, "artifact.model_count", "found 0"):
        open_artifact(tmp_path)


def test_output_of_a_hub_model_gets_its_tokenizer(hub: Path, tmp_path: Path):
    artifact, output = open_artifact(hub), tmp_path / "out"
    output.mkdir()
    copy_companions(artifact, output)
    assert {path.name for path in output.iterdir()} == {"config.json", "tokenizer.json"}
    (output / "tokenizer.json").write_text("{}")
    with raises(InvalidOutput, "output.exists", "tokenizer.json"):
        check_target(output, artifact, load_model(artifact))


@pytest.mark.parametrize("level", ["model", "folder of models"])
def test_find_models_of_the_hub(hub: Path, level: str):
    found = find_models(hub if level == "model" else hub.parent)
    assert found == {"encoder": {"1": Place(hub)}}


def test_find_models_a_model_named_onnx_hides_no_others(hub: Path):
    shutil.copytree(hub / "onnx", hub / "other")
    assert find_models(hub).keys() == {"onnx", "other"}


@pytest.mark.parametrize("where", ["nothing", "nothing.onnx"])
def test_open_artifact_missing_path_is_refused(tmp_path: Path, where: str):
    with raises(InvalidModel, "artifact.missing"):
        open_artifact(tmp_path / where)


# The record


def test_record_properties_and_defaults(plain: Path):
    artifact = open_artifact(plain)
    assert (artifact.pooling, artifact.normalize, artifact.max_length) == ("mean", False, None)
    assert artifact.lineage == [] and artifact.tokenizer is None
    record = {"pooling": "cls", "normalize": True, "max_length": 64, "lineage": [{"rewrite": "x"}]}
    write_record(plain.parent, record)
    (plain.parent / "tokenizer.json").write_text("{}")
    artifact = open_artifact(plain)
    assert (artifact.pooling, artifact.normalize, artifact.max_length) == ("cls", True, 64)
    assert artifact.lineage == [{"rewrite": "x"}]
    assert artifact.tokenizer == plain.parent / "tokenizer.json"


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b'{"loss": NaN}', "not valid JSON"),
        (b'{"source": "\\ud800"}', "not valid JSON"),
        (b'{"normalize": "false"}', "'normalize'"),
        (b'{"normalize": 1}', "'normalize'"),
        (b'{"max_length": true}', "'max_length'"),
        (b'{"max_length": 0}', "'max_length'"),
        (b'{"pooling": "max"}', "'pooling'"),
        (b'{"id2label": "A"}', "'id2label'"),
        (b'{"activation": "tanh"}', "'activation'"),
        (b'{"template": "{query}"}', "'template'"),
        (b'{"template": "{query}{document}{query}"}', "'template'"),
        (b'{"first_position": -1}', "'first_position'"),
        (b'{"others": {"a.onnx": {"normalize": 0}}}', "'normalize'"),
        (b'{"others": {"a.onnx": []}}', "expected"),
        (b"[1]", "JSON object"),
        (b"null", "JSON object"),
        (b'{"lineage": 3}', "'lineage'"),
        (b'{"files": []}', "'files'"),
        (b'{"others": []}', "'others'"),
        (b'{"others": {"a.onnx": {"files": 3}}}', "'files'"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_open_artifact_invalid_record_is_refused(plain: Path, content: bytes, value: str):
    (plain.parent / "attnserve.json").write_bytes(content)
    with raises(InvalidModel, "artifact.record", value):
        open_artifact(plain)


def test_open_artifact_record_can_be_written_as_json(plain: Path):
    """The service answers with parts of the record, and orjson writes no larger integers."""
    content = b'{"lineage": [{"before": 1000000000000000000000000000000}], "max_length": null}'
    (plain.parent / "attnserve.json").write_bytes(content)
    artifact = open_artifact(plain)
    assert orjson.loads(orjson.dumps(artifact.lineage)) == [{"before": 1e30}]
    assert artifact.max_length is None


@pytest.mark.parametrize(
    ("config", "record", "first"),
    [
        ({"model_type": "xlm-roberta", "pad_token_id": 1}, {}, 2),
        ({"model_type": "roberta"}, {}, 2),
        ({"model_type": "mpnet", "pad_token_id": 0}, {}, 1),
        ({"model_type": "bert", "pad_token_id": 1}, {}, 0),
        ({"model_type": "roberta"}, {"first_position": 0}, 0),
        (None, {"first_position": 3}, 3),
        (None, {}, 0),
    ],
)
def test_open_artifact_first_position_is_stated_or_that_of_the_model_type(
    config: object, record: dict[str, object], first: int, plain: Path
):
    if config is not None:
        (plain.parent / "config.json").write_text(json.dumps(config))
    write_record(plain.parent, record)
    assert open_artifact(plain).first_position == first


def test_open_artifact_record_applies_to_its_model(plain: Path):
    write_record(plain.parent, {"pooling": "cls", "files": {"other.onnx": "0"}})
    assert open_artifact(plain).pooling == "cls"  # renamed: there is no other
    shutil.copy(plain, plain.with_name("other.onnx"))
    assert open_artifact(plain).pooling == "mean"
    assert open_artifact(plain.with_name("other.onnx")).pooling == "cls"


# Invalid model files


@pytest.mark.parametrize(
    "content",
    [b"", b"hello, this is a text\n" * 20, b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(range(256)) * 8],
    ids=["empty", "text", "jpeg"],
)
def test_load_model_other_file_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with raises(InvalidModel, "artifact.not_onnx"):
        load_model(path)


def test_load_model_truncated_file_is_refused(plain: Path):
    content = plain.read_bytes()
    for length in [*range(0, 200, 7), *range(200, len(content), 997), len(content) - 1]:
        plain.write_bytes(content[:length])
        with pytest.raises(InvalidModel):
            load_model(plain)


def test_load_model_long_name_of_the_default_domain_is_the_default(plain: Path):
    proto = onnx.load(plain)
    version = proto.opset_import[0].version
    for each in (*proto.opset_import, *proto.graph.node):
        assert each.domain == ""
        each.domain = "ai.onnx"
    onnx.save(proto, plain)
    model = load_model(plain)
    assert model.opset_imports == {"": version}
    assert {node.domain for node in model.graph} == {""}


@pytest.mark.parametrize("version", [3, 8])
def test_load_model_weights_listed_as_inputs_are_weights(plain: Path, version: int):
    inputs = [value.name for value in load_model(plain).graph.inputs]
    proto = onnx.load(plain)
    proto.ir_version = version
    for tensor in proto.graph.initializer:
        proto.graph.input.append(
            onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
    onnx.save(proto, plain)
    model = load_model(plain)
    assert [value.name for value in model.graph.inputs] == inputs
    assert model.ir_version >= 4 and len(model.graph.initializers) == len(proto.graph.initializer)


def test_load_model_without_opset_is_refused(plain: Path):
    proto = onnx.load(plain)
    del proto.opset_import[:]
    onnx.save(proto, plain)
    with raises(InvalidModel, "artifact.no_opset"):
        load_model(plain)


@pytest.mark.parametrize(
    ("change", "cause", "shown"),
    [
        ({"raw_data": b"1234"}, "size", "has 4 bytes"),
        ({"dims": [64, -64]}, "shape", -64),
        ({"dims": [10**6, 10**6]}, "size", "expected 4000000000000"),
        ({"data_type": 99}, "type", ""),
    ],
)
def test_load_model_inconsistent_weight_is_refused(
    plain: Path, change: dict, cause: str, shown: object
):
    proto = onnx.load(plain)
    weight = proto.graph.initializer[0]
    for field, value in change.items():
        weight.ClearField(field)
        if isinstance(value, list):
            weight.dims.extend(value)
        else:
            setattr(weight, field, value)
    onnx.save(proto, plain)
    with raises(InvalidModel, f"artifact.weight_{cause}", shown):
        load_model(plain)


# External data


@pytest.mark.parametrize(
    ("dtype", "field", "count", "accepted"),
    [
        (TensorProto.FLOAT, "float_data", 6, True),
        (TensorProto.FLOAT16, "int32_data", 6, True),
        (TensorProto.INT4, "int32_data", 3, True),
        (TensorProto.UINT32, "uint64_data", 6, True),
        (TensorProto.COMPLEX64, "float_data", 12, True),
        (TensorProto.FLOAT, "float_data", 5, False),
        (TensorProto.FLOAT, "int32_data", 6, False),
        (TensorProto.INT64, "float_data", 6, False),
    ],
)
def test_load_model_typed_elements_match_type_and_shape(
    plain: Path, dtype: int, field: str, count: int, accepted: bool
):
    proto = onnx.load(plain)
    weight = TensorProto(name="typed", dims=[2, 3], data_type=dtype)
    getattr(weight, field).extend([1] * count)
    proto.graph.initializer.append(weight)
    plain.write_bytes(proto.SerializeToString())
    if accepted:
        array = load_model(plain).graph.initializers["typed"].const_value
        assert array is not None and array.numpy().shape == (2, 3)
        return
    with raises(InvalidModel, "artifact.weight_size", "typed"):
        load_model(plain)


@pytest.mark.parametrize("version", [-1, 0, 2**31, 2**62])
def test_load_model_opset_out_of_range_is_refused(plain: Path, version: int):
    proto = onnx.load(plain)
    proto.opset_import[0].version = version
    plain.write_bytes(proto.SerializeToString())
    with raises(InvalidModel, "artifact.opset", version):
        load_model(plain)


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("If", ["x"], ["y"]),  # without branches
        helper.make_node("Softmax", ["x"], ["y"], axis=1.5),
        helper.make_node("MatMul", ["x"], ["y"]),
        helper.make_node("Abs", ["x"], ["y", "z"]),
    ],
)
def test_load_model_invalid_node_is_refused(plain: Path, node: onnx.NodeProto):
    proto = onnx.load(plain)
    proto.graph.node[0].CopyFrom(node)
    plain.write_bytes(proto.SerializeToString())
    with raises(InvalidModel, "artifact.node", node.op_type):
        load_model(plain)


def test_load_model_reads_external_data(external: Path, plain: Path):
    one, other = (load_model(path).graph.initializers["w"] for path in (external, plain))
    assert other.const_value is not None and one.const_value is not None
    np.testing.assert_array_equal(one.const_value.numpy(), other.const_value.numpy())
    assert external_files(load_model(external)) == (external.with_name("model.onnx.data"),)
    assert external_files(load_model(plain)) == ()


@pytest.mark.parametrize(
    "location",
    ["/etc/passwd", "../plain/model.onnx", "a/../../x", "..\\x", "a\\b", "C:x", "", "a\0b"],
)
def test_load_model_external_data_outside_folder_is_refused(external: Path, location: str):
    with raises(InvalidModel, "artifact.external_outside"):
        load_model(relocate(external, location=location))


@pytest.mark.parametrize("inside", [True, False])
def test_load_model_external_data_link_must_stay_in_folder(
    external: Path, tmp_path: Path, inside: bool
):
    (tmp_path / "secret").write_bytes(bytes(16384))
    link = external.parent / "link"
    link.symlink_to("model.onnx.data" if inside else tmp_path / "secret")
    relocate(external, location="link", offset="0")
    if inside:
        assert load_model(external).graph.initializers["w"] is not None
        return
    with raises(InvalidModel, "artifact.external_outside"):
        load_model(external)


def test_load_model_hard_linked_external_data_is_refused(external: Path):
    external.with_name("other").hardlink_to(external.with_name("model.onnx.data"))
    with raises(InvalidModel, "artifact.external_hard_link", "model.onnx.data"):
        load_model(external)


@pytest.mark.parametrize("in_place", [True, False])
def test_load_model_reads_a_hard_linked_model(plain: Path, in_place: bool):
    weight = np.arange(2 * LARGE, dtype=np.float32)  # large enough to be mapped
    proto = onnx.load(plain)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "large"))
    onnx.save(proto, plain)
    plain.with_name("other.onnx").hardlink_to(plain)
    found = load_model(plain, in_place=in_place).graph.initializers["large"].const_value
    assert found is not None
    np.testing.assert_array_equal(found.numpy(), weight)


def test_load_model_missing_or_short_external_data_is_refused(external: Path):
    data = external.with_name("model.onnx.data")
    data.write_bytes(data.read_bytes()[:-1])
    with raises(InvalidModel, "artifact.external_truncated", 16384, 16383):
        load_model(external)
    data.unlink()
    with raises(InvalidModel, "artifact.external_missing", "model.onnx.data"):
        load_model(external)


@pytest.mark.parametrize(
    ("entries", "cause", "value"),
    [
        ({"offset": "-4"}, "offset", -4),
        ({"length": "-16384"}, "offset", "-16384 bytes"),
        ({"length": "8"}, "offset", "8 bytes"),
        ({"offset": "ten"}, "offset", ""),
        ({"offset": "1"}, "truncated", 16385),
    ],
)
def test_load_model_invalid_external_range_is_refused(
    external: Path, entries: dict[str, str], cause: str, value: object
):
    with raises(InvalidModel, f"artifact.external_{cause}", value):
        load_model(relocate(external, **entries))


def test_load_model_checks_tensors_of_subgraphs_attributes_and_functions(plain: Path):
    hidden = TensorProto(name="hidden", dims=[1], data_type=TensorProto.FLOAT)
    hidden.data_location = TensorProto.EXTERNAL
    hidden.external_data.add(key="location", value="/etc/passwd")
    constant = helper.make_node("Constant", [], ["c"], value=hidden)
    body = helper.make_graph([constant], "body", [], [])
    branch = helper.make_node("If", ["c"], ["d"], then_branch=body, else_branch=body)
    function = helper.make_function("f", "F", [], ["c"], [constant], [])
    sparse = onnx.SparseTensorProto(values=hidden, indices=hidden, dims=[1])
    sparse_constant = helper.make_node("Constant", [], ["c"], sparse_value=sparse)
    for change in (
        lambda proto: proto.graph.node.append(constant),
        lambda proto: proto.graph.node.append(branch),
        lambda proto: proto.functions.append(function),
        lambda proto: proto.graph.sparse_initializer.append(sparse),
        lambda proto: proto.graph.node.append(sparse_constant),
    ):
        proto = onnx.load(plain)
        change(proto)
        path = plain.with_name("hostile.onnx")
        path.write_bytes(proto.SerializeToString())
        with raises(InvalidModel, "artifact.external_outside"):
            load_model(path)


def nested(depth: int, calls: int) -> onnx.ModelProto:
    """A model of nested local functions that becomes ``calls`` ** ``depth`` nodes."""
    functions: list[onnx.FunctionProto] = []
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    for level in range(depth):
        inner, domain = (f"f{level + 1}", "local") if level < depth - 1 else ("Abs", "")
        names = ["a", *(f"t{i}" for i in range(calls - 1)), "b"]
        nodes = [
            helper.make_node(inner, [old], [new], domain=domain) for old, new in pairwise(names)
        ]
        functions.append(helper.make_function("local", f"f{level}", ["a"], ["b"], nodes, opsets))
    model = parser.parse_model(LINEAR.replace("MatMul(x, w)", "Abs(x)"))
    model.opset_import.append(opsets[1])
    model.functions.extend(functions)
    model.graph.node[0].CopyFrom(helper.make_node("f0", ["x"], ["y"], domain="local"))
    return model


@pytest.mark.parametrize(("depth", "calls"), [(3, 4), (2, 60)])
def test_load_model_inlines_local_functions(tmp_path: Path, depth: int, calls: int):
    path = tmp_path / "model.onnx"
    onnx.save(nested(depth, calls), path)
    model = load_model(path)
    assert [node.op_type for node in model.graph] == ["Abs"] * calls**depth
    assert not model.functions


@pytest.mark.parametrize(("depth", "calls"), [(16, 2), (30, 2), (70, 1), (2, 300)])
def test_load_model_exponential_local_functions_are_refused(tmp_path: Path, depth: int, calls: int):
    path = tmp_path / "model.onnx"
    onnx.save(nested(depth, calls), path)
    with raises(InvalidModel, "artifact.functions"):
        load_model(path)


def test_load_model_recursive_local_function_is_refused(tmp_path: Path):
    model = nested(3, 2)
    model.functions[2].node[0].CopyFrom(helper.make_node("f0", ["a"], ["t0"], domain="local"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    with raises(InvalidModel, "artifact.functions"):
        load_model(path)


def test_save_model_external_model_inside_or_beside(external: Path, tmp_path: Path):
    x = np.ones((2, 64), np.float32)
    expected = open_session(external).run(None, {"x": x})[0]
    for folder, beside in (("whole", False), ("beside", True)):
        path = tmp_path / folder / "other.onnx"
        path.parent.mkdir()
        save_model(load_model(external), path, external=beside)
        assert path.with_name("other.onnx.data").exists() == beside
        external_copy = open_session(path).run(None, {"x": x})[0]
        np.testing.assert_array_equal(external_copy, expected)


# Outputs


def target(output: Path, source: Path, *, force: bool = False) -> Path:
    return check_target(output, open_artifact(source), load_model(source), force=force)


def test_check_target_folder_is_model_onnx_in_it(plain: Path, tmp_path: Path):
    assert target(tmp_path / "new", plain) == tmp_path / "new" / "model.onnx"
    assert target(tmp_path / "new" / "a.onnx", plain) == tmp_path / "new" / "a.onnx"
    assert not (tmp_path / "new").exists()
    (tmp_path / "new.onnx").mkdir()
    assert target(tmp_path / "new.onnx", plain) == tmp_path / "new.onnx" / "model.onnx"


def test_check_target_input_under_any_name_is_refused(plain: Path, external: Path, tmp_path: Path):
    (tmp_path / "soft.onnx").symlink_to(plain)
    (tmp_path / "hard.onnx").hardlink_to(plain)
    (tmp_path / "folder").symlink_to(plain.parent)
    names = ("plain", "plain/model.onnx", "soft.onnx", "hard.onnx", "folder")
    for name in (*names, "plain/../plain/model.onnx"):
        with raises(InvalidOutput, "output.is_input"):
            target(tmp_path / name, plain, force=True)
    other = plain.rename(plain.with_name("encoder.onnx"))
    with raises(InvalidOutput, "output.is_input"):
        target(plain.parent, other, force=True)
    renamed = external.rename(external.with_name("source.onnx"))
    with raises(InvalidOutput, "output.is_input", "model.onnx.data"):
        target(external.with_name("model.onnx"), renamed, force=True)


@pytest.mark.parametrize("name", ["model.onnx", "attnserve.json"])
def test_check_target_existing_file_needs_force(plain: Path, tmp_path: Path, name: str):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / name).write_text("{}")
    with raises(InvalidOutput, "output.exists"):
        target(tmp_path / "new", plain)
    assert target(tmp_path / "new", plain, force=True) == tmp_path / "new" / "model.onnx"


def test_check_target_record_without_model_needs_force(plain: Path, tmp_path: Path):
    (tmp_path / "new").mkdir()
    write_record(tmp_path / "new", {"pooling": "cls"})
    with raises(InvalidOutput, "output.exists", "attnserve.json"):
        target(tmp_path / "new" / "other.onnx", plain)


def test_merged_record_keeps_the_records_of_other_models(plain: Path):
    """The newest record is at the top level, the others are under "others"."""
    folder = plain.parent
    write_record(folder, {"source": "model.onnx"})
    for name in ("a.onnx", "b.onnx", "a.onnx"):
        file = target(folder / name, plain, force=True)
        shutil.copyfile(plain, file)
        write_record(folder, merged_record(file, {"source": name, "files": {name: "sha"}}))
    record = json.loads((folder / "attnserve.json").read_text())
    assert record["files"] == {"a.onnx": "sha"}
    assert set(record["others"]) == {"model.onnx", "b.onnx"}
    for name in ("model.onnx", "a.onnx", "b.onnx"):
        assert open_artifact(folder / name).record["source"] == name


def test_check_target_different_tokenizer_needs_force(plain: Path, tmp_path: Path):
    (plain.parent / "tokenizer.json").write_text("ours")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "tokenizer.json").write_text("ours")
    target(tmp_path / "new", plain)  # equal content is not lost
    (tmp_path / "new" / "tokenizer.json").write_text("theirs")
    with raises(InvalidOutput, "output.exists", "tokenizer.json"):
        target(tmp_path / "new", plain)


@pytest.mark.parametrize("path", ["/dev/null/x", "/dev/null/x/model.onnx", "/proc/none/a.onnx"])
def test_output_that_cannot_be_written_is_refused(plain: Path, path: str):
    with pytest.raises(InvalidOutput):
        output = target(Path(path), plain)
        with staged(output.parent):  # some file systems refuse only the write
            pass


def test_check_output_below_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with raises(InvalidOutput, "output.not_writable"):
        check_output(tmp_path / "file" / "new.onnx")


# Writing


def test_staged_success_moves_all_files(tmp_path: Path):
    with staged(tmp_path / "a" / "b") as stage:
        (stage / "model.onnx").write_text("m")
        (stage / "attnserve.json").write_text("{}")
        assert list((tmp_path / "a" / "b").iterdir()) == [stage]
    assert tree(tmp_path) == {
        "a": None,
        "a/b": None,
        "a/b/attnserve.json": b"{}",
        "a/b/model.onnx": b"m",
    }


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
@pytest.mark.parametrize("folder", ["", "kept/a/b"])
def test_staged_failure_changes_nothing(tmp_path: Path, folder: str, error: type[BaseException]):
    (tmp_path / "kept").mkdir()
    (tmp_path / "model.onnx").write_text("old")
    before = tree(tmp_path)
    with pytest.raises(error), staged(tmp_path / folder) as stage:
        (stage / "model.onnx").write_text("half")
        raise error
    assert tree(tmp_path) == before


def test_staged_finish_of_two_writers_keeps_both_records(tmp_path: Path):
    """A writer reads the record of the folder only after the other has moved its own."""
    folder, started = tmp_path / "out", threading.Event()

    def write(name: str) -> None:
        def finish(stage: Path) -> None:
            record = merged_record(folder / name, {"files": {name: ""}})
            if name == "a.onnx":
                started.set()
                time.sleep(0.2)
            write_record(stage, record)

        with staged(folder, finish) as stage:
            (stage / name).write_text(name)

    first = threading.Thread(target=write, args=("a.onnx",))
    first.start()
    assert started.wait(10)
    write("b.onnx")
    first.join()
    record = json.loads((folder / "attnserve.json").read_text())
    assert list(record["files"]) == ["b.onnx"] and list(record["others"]) == ["a.onnx"]


def test_staged_files_are_on_disk_before_they_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    with staged(tmp_path / "new") as stage:
        (stage / "model.onnx").write_text("m")
    paths = (tmp_path / "new" / "model.onnx", tmp_path / "new")
    assert flushed == [path.stat().st_ino for path in paths]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("minilm", "minilm"),
        ("minilm/model.onnx", "minilm"),
        ("volume/..data", "volume"),
        ("volume/model.onnx", "volume"),
        ("releases/../minilm", "minilm"),
        ("releases/42", "42"),
    ],
)
def test_name_is_that_of_the_given_path(tmp_path: Path, path: str, name: str):
    (tmp_path / "releases" / "42").mkdir(parents=True)
    (tmp_path / "releases" / "42" / "model.onnx").touch()
    (tmp_path / "minilm").symlink_to("releases/42")
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume" / "..data").symlink_to(tmp_path / "releases" / "42")
    (tmp_path / "volume" / "model.onnx").symlink_to("..data/model.onnx")
    assert open_artifact(tmp_path / path).name == name


def test_name_of_model_in_root_folder_is_usable():
    assert Artifact(Path("/model.onnx")).name == "model"


def test_staged_full_disk_is_invalid_output(tmp_path: Path):
    before = tree(tmp_path)
    with (
        raises(InvalidOutput, "output.write_failed", "No space left on device"),
        staged(tmp_path / "new"),
    ):
        raise OSError(28, "No space left on device")
    assert tree(tmp_path) == before


def test_copy_companions_copies_known_files_only(plain: Path, tmp_path: Path):
    for name in ("tokenizer.json", "vocab.txt", "notes.txt"):
        (plain.parent / name).write_text(name)
    (tmp_path / "new").mkdir()
    copy_companions(Artifact(plain), tmp_path / "new")
    names = ("tokenizer.json", "vocab.txt")
    assert tree(tmp_path / "new") == {name: name.encode() for name in names}


@pytest.mark.parametrize("kind", ["plain", "external"])
def test_model_in_the_cache_of_hugging_face_is_read(
    kind: str, plain: Path, external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """snapshots/REVISION/onnx/model.onnx and its data are links to blobs/CHECKSUM."""
    monkeypatch.setattr("attnserve.runtime.onnx_reader.LARGE", 1024)
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "1" / "onnx"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    source = {"plain": plain, "external": external}[kind]
    for index, file in enumerate(sorted(source.parent.glob("model.onnx*"))):
        shutil.copy(file, blobs / f"{index}abc")
        (snapshot / file.name).symlink_to(Path("../../../blobs") / f"{index}abc")
    for in_place in (False, True):
        model = load_model(snapshot / "model.onnx", in_place=in_place)
        weight = model.graph.initializers["w"].const_value
        expected = load_model(source).graph.initializers["w"].const_value
        assert weight is not None and expected is not None
        np.testing.assert_array_equal(weight.numpy(), expected.numpy())
    save_model(load_model(snapshot / "model.onnx"), tmp_path / "saved.onnx")
    assert load_model(tmp_path / "saved.onnx").graph.initializers["w"] is not None
    assert open_session(load_model(snapshot / "model.onnx")).get_inputs()
    assert external_data_locations(snapshot / "model.onnx") == (
        ["model.onnx.data"] if kind == "external" else []
    )


@pytest.mark.skipif(sys.platform == "win32", reason="not a file name there")
def test_file_name_with_a_colon_is_read(plain: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("attnserve.runtime.onnx_reader.LARGE", 1024)
    renamed = plain.rename(plain.with_name("2026-11-01T10:00.onnx"))
    assert load_model(renamed, in_place=True).graph.initializers["w"] is not None


def test_external_data_beside_the_target_of_no_link_is_refused(external: Path, tmp_path: Path):
    """Only a model that is a link itself may have its data behind links."""
    other = tmp_path / "other"
    other.mkdir()
    data = external.with_name("model.onnx.data")
    shutil.copy(data, other / "data")
    data.unlink()
    data.symlink_to(other / "data")
    with raises(InvalidModel, "artifact.external_outside"):
        load_model(external)
