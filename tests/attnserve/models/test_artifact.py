"""What is on disk: hostile files are refused, and nothing is half written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from attnserve.models.artifact import (
    Artifact,
    check_output,
    check_target,
    copy_companions,
    load_model,
    merged_record,
    open_artifact,
    save_model,
    staged,
    write_record,
)
from attnserve.runtime.external_data import external_files
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
    """The same, its weights in model.onnx.data."""
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
    """Change what a model says of its external data."""
    proto = onnx.load(path, load_external_data=False)
    facts = {e.key: e.value for e in proto.graph.initializer[0].external_data} | entries
    del proto.graph.initializer[0].external_data[:]
    for key, value in facts.items():
        proto.graph.initializer[0].external_data.add(key=key, value=value)
    path.write_bytes(proto.SerializeToString())
    return path


# Finding the model


def test_a_folder_is_its_model_onnx_and_takes_the_folders_name(plain: Path):
    artifact = open_artifact(plain.parent)
    assert (artifact.model, artifact.name, artifact.folder) == (plain, "plain", plain.parent)


def test_a_folder_with_one_other_model_is_that_model(plain: Path):
    other = plain.rename(plain.with_name("encoder.onnx"))
    assert open_artifact(plain.parent).model == other
    assert open_artifact(plain.parent).name == "encoder"


def test_of_two_models_none_is_chosen(plain: Path):
    shutil.copy(plain, plain.with_name("a.onnx"))
    plain.rename(plain.with_name("b.onnx"))
    with raises(InvalidModel, "artifact.model_count", "found 2 "):
        open_artifact(plain.parent)


@pytest.mark.parametrize("where", ["nothing", "nothing.onnx"])
def test_a_path_without_anything_is_refused(tmp_path: Path, where: str):
    with raises(InvalidModel, "artifact.missing"):
        open_artifact(tmp_path / where)


def test_an_empty_folder_is_refused(tmp_path: Path):
    with raises(InvalidModel, "artifact.model_count", "found 0"):
        open_artifact(tmp_path)


# The record


def test_the_record_tells_pooling_length_and_lineage(plain: Path):
    record = {"pooling": "cls", "normalize": True, "max_length": 64, "lineage": [{"rewrite": "x"}]}
    write_record(plain.parent, record)
    artifact = open_artifact(plain)
    assert (artifact.pooling, artifact.normalize, artifact.max_length) == ("cls", True, 64)
    assert artifact.lineage == [{"rewrite": "x"}]


def test_without_a_record_everything_has_its_default(plain: Path):
    artifact = open_artifact(plain)
    assert (artifact.pooling, artifact.normalize, artifact.max_length) == ("mean", False, None)
    assert artifact.lineage == [] and artifact.tokenizer is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ('{"loss": NaN}', "NaN is not a JSON number"),
        ("[1]", "expected a JSON object"),
        ("null", "expected a JSON object"),
        ('{"lineage": 3}', "'lineage': expected a JSON list"),
        ('{"files": []}', "'files': expected a JSON object"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_broken_record_is_refused(plain: Path, text: str, value: str):
    (plain.parent / "attnserve.json").write_text(text)
    with raises(InvalidModel, "artifact.record", value):
        open_artifact(plain)


def test_a_record_that_is_not_text_is_refused(plain: Path):
    (plain.parent / "attnserve.json").write_bytes(b"\xff\xfe\x00")
    with raises(InvalidModel, "artifact.record"):
        open_artifact(plain)


def test_a_record_speaks_for_the_model_it_names(plain: Path):
    write_record(plain.parent, {"pooling": "cls", "files": {"other.onnx": "0"}})
    assert open_artifact(plain).pooling == "cls"  # renamed: there is no other
    shutil.copy(plain, plain.with_name("other.onnx"))
    assert open_artifact(plain).pooling == "mean"
    assert open_artifact(plain.with_name("other.onnx")).pooling == "cls"


# Files that are no models


@pytest.mark.parametrize(
    "content",
    [b"", b"hello, this is a text\n" * 20, b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(range(256)) * 8],
    ids=["empty", "text", "jpeg"],
)
def test_what_is_not_onnx_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with raises(InvalidModel, "artifact.not_onnx"):
        load_model(path)


def test_every_truncation_of_a_file_is_refused(plain: Path):
    content = plain.read_bytes()
    for length in [*range(0, 200, 7), *range(200, len(content), 997), len(content) - 1]:
        plain.write_bytes(content[:length])
        with pytest.raises(InvalidModel):
            load_model(plain)


def test_a_model_without_an_opset_is_refused(plain: Path):
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
def test_weights_that_are_not_what_they_say_are_refused(
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


def test_external_data_is_read_from_the_models_folder(external: Path, plain: Path):
    one, other = (load_model(path).graph.initializers["w"] for path in (external, plain))
    assert other.const_value is not None and one.const_value is not None
    np.testing.assert_array_equal(one.const_value.numpy(), other.const_value.numpy())
    assert external_files(load_model(external)) == (external.with_name("model.onnx.data"),)
    assert external_files(load_model(plain)) == ()


@pytest.mark.parametrize(
    "location",
    ["/etc/passwd", "../plain/model.onnx", "a/../../x", "..\\x", "a\\b", "C:x", "", "a\0b"],
)
def test_external_data_outside_the_folder_is_refused(external: Path, location: str):
    with raises(InvalidModel, "artifact.external_outside"):
        load_model(relocate(external, location=location))


def test_external_data_through_a_link_out_of_the_folder_is_refused(external: Path, tmp_path: Path):
    (tmp_path / "secret").write_bytes(bytes(16384))
    (external.parent / "link").symlink_to(tmp_path / "secret")
    with raises(InvalidModel, "artifact.external_outside"):
        load_model(relocate(external, location="link", offset="0"))


def test_a_link_that_stays_in_the_folder_is_followed(external: Path):
    (external.parent / "link").symlink_to("model.onnx.data")
    assert load_model(relocate(external, location="link")).graph.initializers["w"] is not None


def test_missing_external_data_is_named(external: Path):
    external.with_name("model.onnx.data").unlink()
    with raises(InvalidModel, "artifact.external_missing", "model.onnx.data"):
        load_model(external)


def test_external_data_that_is_too_short_is_refused(external: Path):
    data = external.with_name("model.onnx.data")
    data.write_bytes(data.read_bytes()[:-1])
    with raises(InvalidModel, "artifact.external_truncated", 16384, 16383):
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
def test_external_data_with_a_false_place_is_refused(
    external: Path, entries: dict[str, str], cause: str, value: object
):
    with raises(InvalidModel, f"artifact.external_{cause}", value):
        load_model(relocate(external, **entries))


def test_external_data_hidden_in_a_subgraph_an_attribute_or_a_function_is_found(plain: Path):
    hidden = TensorProto(name="hidden", dims=[1], data_type=TensorProto.FLOAT)
    hidden.data_location = TensorProto.EXTERNAL
    hidden.external_data.add(key="location", value="/etc/passwd")
    constant = helper.make_node("Constant", [], ["c"], value=hidden)
    body = helper.make_graph([constant], "body", [], [])
    branch = helper.make_node("If", ["c"], ["d"], then_branch=body, else_branch=body)
    function = helper.make_function("f", "F", [], ["c"], [constant], [])
    sparse = onnx.SparseTensorProto(values=hidden, indices=hidden, dims=[1])
    for change in (
        lambda proto: proto.graph.node.append(constant),
        lambda proto: proto.graph.node.append(branch),
        lambda proto: proto.functions.append(function),
        lambda proto: proto.graph.sparse_initializer.append(sparse),
    ):
        proto = onnx.load(plain)
        change(proto)
        path = plain.with_name("hostile.onnx")
        path.write_bytes(proto.SerializeToString())
        with raises(InvalidModel, "artifact.external_outside"):
            load_model(path)


def test_an_external_model_is_saved_whole_either_way(external: Path, tmp_path: Path):
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


def test_a_folder_receives_model_onnx_and_a_file_is_itself(plain: Path, tmp_path: Path):
    assert target(tmp_path / "new", plain) == tmp_path / "new" / "model.onnx"
    assert target(tmp_path / "new" / "a.onnx", plain) == tmp_path / "new" / "a.onnx"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["", "model.onnx"])
def test_the_input_is_no_output_even_by_force(plain: Path, name: str):
    with raises(InvalidOutput, "output.is_input"):
        target(plain.parent / name if name else plain.parent, plain, force=True)


def test_the_folder_of_a_model_with_another_name_is_no_output(plain: Path):
    other = plain.rename(plain.with_name("encoder.onnx"))
    with raises(InvalidOutput, "output.is_input"):
        target(plain.parent, other, force=True)


def test_the_input_by_another_name_is_no_output(plain: Path, tmp_path: Path):
    for name, make in (
        ("soft.onnx", lambda path: path.symlink_to(plain)),
        ("hard.onnx", lambda path: path.hardlink_to(plain)),
    ):
        make(tmp_path / name)
        with raises(InvalidOutput, "output.is_input"):
            target(tmp_path / name, plain, force=True)
    (tmp_path / "folder").symlink_to(plain.parent)
    for path in (tmp_path / "folder", tmp_path / "plain" / ".." / "plain" / "model.onnx"):
        with raises(InvalidOutput, "output.is_input"):
            target(path, plain, force=True)


def test_the_inputs_external_data_is_no_output(external: Path):
    renamed = external.rename(external.with_name("source.onnx"))
    with raises(InvalidOutput, "output.is_input", "model.onnx.data"):
        target(external.with_name("model.onnx"), renamed, force=True)


@pytest.mark.parametrize("name", ["model.onnx", "attnserve.json"])
def test_what_exists_is_replaced_by_force_only(plain: Path, tmp_path: Path, name: str):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / name).write_text("{}")
    with raises(InvalidOutput, "output.exists"):
        target(tmp_path / "new", plain)
    assert target(tmp_path / "new", plain, force=True) == tmp_path / "new" / "model.onnx"


def test_a_record_that_speaks_for_no_model_is_replaced_by_force_only(plain: Path, tmp_path: Path):
    (tmp_path / "new").mkdir()
    write_record(tmp_path / "new", {"pooling": "cls"})
    with raises(InvalidOutput, "output.exists", "attnserve.json"):
        target(tmp_path / "new" / "other.onnx", plain)


def test_models_in_one_folder_keep_a_record_each(plain: Path):
    """The newest stands at the top level, its neighbours under "others"; none is lost."""
    folder = plain.parent
    write_record(folder, {"pooling": "cls"})
    for name in ("a.onnx", "b.onnx", "a.onnx"):
        file = target(folder / name, plain, force=True)
        shutil.copyfile(plain, file)
        write_record(folder, merged_record(file, {"pooling": name, "files": {name: "sha"}}))
    record = json.loads((folder / "attnserve.json").read_text())
    assert record["files"] == {"a.onnx": "sha"}
    assert set(record["others"]) == {"model.onnx", "b.onnx"}
    for name, pooling in (("model.onnx", "cls"), ("a.onnx", "a.onnx"), ("b.onnx", "b.onnx")):
        assert open_artifact(folder / name).record["pooling"] == pooling


def test_another_models_tokenizer_is_replaced_by_force_only(plain: Path, tmp_path: Path):
    (plain.parent / "tokenizer.json").write_text("ours")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "tokenizer.json").write_text("ours")
    target(tmp_path / "new", plain)  # the same: nothing is lost
    (tmp_path / "new" / "tokenizer.json").write_text("theirs")
    with raises(InvalidOutput, "output.exists", "tokenizer.json"):
        target(tmp_path / "new", plain)


@pytest.mark.parametrize("path", ["/dev/null/x", "/dev/null/x/model.onnx", "/proc/none/a.onnx"])
def test_a_place_that_cannot_be_written_is_refused(plain: Path, path: str):
    with pytest.raises(InvalidOutput):
        output = target(Path(path), plain)
        with staged(output.parent):  # a file system that refuses only when it is asked
            pass


def test_a_path_below_a_file_is_refused(plain: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with raises(InvalidOutput, "output.not_writable"):
        check_output(tmp_path / "file" / "new.onnx")


def test_a_folder_called_like_a_model_is_a_folder(plain: Path, tmp_path: Path):
    (tmp_path / "new.onnx").mkdir()
    assert target(tmp_path / "new.onnx", plain) == tmp_path / "new.onnx" / "model.onnx"


# Writing


def test_staged_files_arrive_together(tmp_path: Path):
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
def test_work_that_fails_leaves_nothing_not_even_folders(
    tmp_path: Path, error: type[BaseException]
):
    (tmp_path / "kept").mkdir()
    before = tree(tmp_path)
    with pytest.raises(error), staged(tmp_path / "kept" / "a" / "b") as stage:
        (stage / "model.onnx").write_text("half")
        raise error
    assert tree(tmp_path) == before


def test_work_that_fails_leaves_what_was_there(tmp_path: Path):
    (tmp_path / "model.onnx").write_text("old")
    with pytest.raises(RuntimeError), staged(tmp_path) as stage:
        (stage / "model.onnx").write_text("half")
        raise RuntimeError
    assert tree(tmp_path) == {"model.onnx": b"old"}


def test_a_full_disk_is_an_error_of_the_output(tmp_path: Path):
    before = tree(tmp_path)
    with (
        raises(InvalidOutput, "output.write_failed", "No space left on device"),
        staged(tmp_path / "new"),
    ):
        raise OSError(28, "No space left on device")
    assert tree(tmp_path) == before


def test_companions_are_copied_and_nothing_else(plain: Path, tmp_path: Path):
    for name in ("tokenizer.json", "vocab.txt", "notes.txt"):
        (plain.parent / name).write_text(name)
    (tmp_path / "new").mkdir()
    copy_companions(Artifact(plain), tmp_path / "new")
    assert tree(tmp_path / "new") == {
        "tokenizer.json": b"tokenizer.json",
        "vocab.txt": b"vocab.txt",
    }


def test_a_tokenizer_beside_the_model_is_found(plain: Path):
    (plain.parent / "tokenizer.json").write_text("{}")
    assert open_artifact(plain).tokenizer == plain.parent / "tokenizer.json"
