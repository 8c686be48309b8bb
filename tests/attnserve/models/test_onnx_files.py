"""Read and write ONNX files: hostile files, external data, links."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from attnserve.models.onnx_files import load_model, save_model
from attnserve.runtime.external_data import external_files
from attnserve.runtime.onnx_reader import LARGE
from attnserve.runtime.session import open_session
from graph_passes.errors import InvalidModel
from tests.attnserve.models.files import LINEAR
from tests.errors import raises


@contextmanager
def edited(path: Path) -> Iterator[onnx.ModelProto]:
    """The message of a model, which is written again after the context."""
    proto = onnx.load(path, load_external_data=False)
    yield proto
    path.write_bytes(proto.SerializeToString())


def relocate(path: Path, **entries: str) -> Path:
    """Change the external data entries of a model."""
    with edited(path) as proto:
        external = proto.graph.initializer[0].external_data
        changed = {e.key: e.value for e in external} | entries
        del external[:]
        for key, value in changed.items():
            external.add(key=key, value=value)
    return path


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
    with edited(plain) as proto:
        weight = proto.graph.initializer[0]
        for field, value in change.items():
            weight.ClearField(field)
            if isinstance(value, list):
                weight.dims.extend(value)
            else:
                setattr(weight, field, value)
    with raises(InvalidModel, f"artifact.weight_{cause}", shown):
        load_model(plain)


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
    with edited(plain) as proto:
        weight = proto.graph.initializer.add(name="typed", dims=[2, 3], data_type=dtype)
        getattr(weight, field).extend([1] * count)
    if accepted:
        array = load_model(plain).graph.initializers["typed"].const_value
        assert array is not None and array.numpy().shape == (2, 3)
        return
    with raises(InvalidModel, "artifact.weight_size", "typed"):
        load_model(plain)


@pytest.mark.parametrize("version", [None, -1, 0, 2**31, 2**62])
def test_load_model_without_opset_or_out_of_range_is_refused(plain: Path, version: int | None):
    with edited(plain) as proto:
        if version is None:
            del proto.opset_import[:]
        else:
            proto.opset_import[0].version = version
    code, value = ("no_opset", "") if version is None else ("opset", version)
    with raises(InvalidModel, f"artifact.{code}", value):
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
    with edited(plain) as proto:
        proto.graph.node[0].CopyFrom(node)
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
    with edited(plain) as proto:
        proto.graph.initializer.append(numpy_helper.from_array(weight, "large"))
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


def test_load_model_axes_of_length_minus_one_are_free(plain: Path):
    proto = onnx.load(plain)
    axes = proto.graph.input[0].type.tensor_type.shape.dim
    count = len(axes)
    for axis in axes:
        if axis.WhichOneof("value") != "dim_value":
            axis.dim_value = -1
    plain.write_bytes(proto.SerializeToString())
    shape = load_model(plain).graph.inputs[0].shape
    assert shape is not None and len(shape) == count
    assert all(not isinstance(axis, int) or axis > 0 for axis in shape)


def test_load_model_name_that_is_no_text_is_refused(plain: Path):
    content = plain.read_bytes()
    assert b"MatMul" in content
    plain.write_bytes(content.replace(b"MatMul", b"Mat\xfful"))
    with raises(InvalidModel, "artifact.malformed", "UTF-8"):
        load_model(plain)


@pytest.mark.parametrize("place", ["input", "output"])
def test_load_model_undefined_value_is_refused(plain: Path, place: str):
    with edited(plain) as proto:
        if place == "input":
            proto.graph.node[0].input[0] = "nowhere"
        else:
            proto.graph.output[0].name = "nowhere"
    with raises(InvalidModel, "artifact.malformed", "'nowhere' is used and never defined"):
        load_model(plain)


@pytest.mark.parametrize("axes", [[1 << 31], [1 << 16, 1 << 16], [2, 1 << 62]])
def test_load_model_declared_size_that_fits_no_memory_is_refused(plain: Path, axes: list[int]):
    """A few bytes made the conversion to float16 ask for 16 GiB."""
    proto = onnx.load(plain)
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT, axes)
    proto.graph.input[0].type.CopyFrom(kind)
    plain.write_bytes(proto.SerializeToString())
    with raises(InvalidModel, "artifact.declared_size"):
        load_model(plain)
