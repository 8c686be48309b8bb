"""Find the files of a model: folders, the hub, companions, names and properties."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from attnserve.models.artifact import Artifact, copy_companions, open_artifact
from attnserve.models.lineage import OptimizeEntry
from attnserve.models.model_folder import ModelLocation, find_models
from attnserve.models.onnx_files import external_data_locations, load_model, save_model
from attnserve.models.outputs import output_file
from attnserve.models.record import Record, write_record
from attnserve.runtime.session import open_session
from graph_passes.errors import InvalidModel
from tests.attnserve.models.files import linear, write_modules
from tests.errors import raises
from tests.files import tree, write_json

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


@pytest.mark.parametrize("where", ["", "onnx", "onnx/model.onnx", "onnx/model_O2.onnx"])
def test_open_artifact_of_the_hub_has_tokenizer_and_pooling(hub: Path, where: str):
    artifact = open_artifact(hub / where)
    assert artifact.tokenizer == hub / "tokenizer.json"
    assert artifact.model.name == Path(where).name if where.endswith(".onnx") else "model.onnx"
    assert artifact.name == ("model_O2" if "O2" in where else "encoder")
    assert (artifact.pooling, artifact.normalize, artifact.max_length) == ("cls", True, 256)


def test_open_artifact_record_precedes_modules(hub: Path):
    write_record(hub / "onnx", Record(pooling="last"))
    artifact = open_artifact(hub)
    assert (artifact.pooling, artifact.normalize, artifact.max_length) == ("last", False, None)
    write_record(hub / "onnx", Record(lineage=()))  # of optimize
    assert open_artifact(hub).pooling == "cls"


@pytest.mark.parametrize("kind", ["dense", "pooling"])
def test_open_artifact_what_the_graph_has_to_compute_is_its_output(hub: Path, kind: str):
    """Dense layers, and poolings that attnserve.json does not have; the rest is still read."""
    write_json(
        hub / "config_sentence_transformers.json",
        {"prompts": {"query": "Q: "}, "truncate_dim": 3, "similarity_fn_name": "dot"},
    )
    if kind == "dense":
        write_modules(hub, "Transformer", "Pooling", "Dense", "Normalize")
    else:
        write_json(hub / "1_Pooling" / "config.json", {"pooling_mode": "weightedmean"})
    artifact = open_artifact(hub)
    assert (artifact.output, artifact.pooling) == ("sentence_embedding", "none")
    assert (artifact.prompt("query"), artifact.dimensions) == ("Q: ", 3)
    assert (artifact.similarity, artifact.normalize) == ("dot", True)


@pytest.mark.parametrize("name", ["euclidean", "manhattan", "maxsim"])
def test_open_artifact_unknown_similarity_is_refused(hub: Path, name: str):
    write_json(hub / "config_sentence_transformers.json", {"similarity_fn_name": name})
    with raises(InvalidModel, "export.config", "similarity_fn_name", name):
        open_artifact(hub)
    write_record(hub / "onnx", Record(pooling="cls"))  # says what the folder does not
    assert open_artifact(hub).similarity == "cosine"


@pytest.mark.parametrize("names", [("Transformer",), ("Transformer", "LogitScore")])
def test_open_artifact_without_pooling_reads_only_lengths(hub: Path, names: tuple[str, ...]):
    write_modules(hub, *names)
    write_json(hub / "1_LogitScore" / "config.json", {"true_token_id": 5})
    assert open_artifact(hub).record == Record(max_length=256)


@pytest.mark.parametrize(
    ("file", "content", "code", "value"),
    [
        *(("1_Pooling/config.json", {"pooling_mode": mode}, "export.config", "pooling_mode")
          for mode in (None, 5, True, [1], [["cls"]], {"a": 1})),
        *(("modules.json", content, "export.modules", "modules.json")
          for content in ({"a": 1}, ["x"], [{"type": "Pooling"}])),
    ],
)  # fmt: skip
def test_open_artifact_malformed_file_is_refused(
    hub: Path, file: str, content: object, code: str, value: str
):
    write_json(hub / file, content)
    with raises(InvalidModel, code, value):
        open_artifact(hub)


@pytest.mark.parametrize("path", ["../other", "/etc", "..", ".", "a/b", "a" * 5000, "a\0b"])
def test_open_artifact_module_outside_the_folder_is_refused(hub: Path, path: str):
    kinds = [("", "Transformer"), (path, "Pooling")]
    modules = [{"path": where, "type": f"models.{kind}"} for where, kind in kinds]
    write_json(hub / "modules.json", modules)
    with raises(InvalidModel, "export.modules"):
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


def test_record_of_a_model_above_the_folder_onnx_is_not_that_of_the_one_in_it(hub: Path):
    linear(hub / "model.onnx")
    write_record(hub, Record(files={"model.onnx": ""}, lineage=(OptimizeEntry(rewrite="x"),)))
    assert open_artifact(hub / "onnx").lineage == ()


def test_a_folder_named_onnx_is_a_plain_one_without_configuration(tmp_path: Path):
    linear(tmp_path / "onnx" / "model.onnx")
    assert open_artifact(tmp_path / "onnx").companion_folder is None
    with raises(InvalidModel, "artifact.model_count", "found 0"):
        open_artifact(tmp_path)


@pytest.mark.parametrize("level", ["model", "folder of models"])
def test_find_models_of_the_hub(hub: Path, level: str):
    found = find_models(hub if level == "model" else hub.parent)
    assert found == {"encoder": {"1": ModelLocation(hub)}}


@pytest.mark.skipif(os.name != "posix", reason="names are bytes on POSIX only")
def test_find_models_folder_whose_name_is_no_text_is_left_out(plain: Path, tmp_path: Path):
    """It could not be named in a URL, and the index of all models would fail."""
    models = tmp_path / "models"
    for name in (b"caf\xe9", b"cafe"):
        folder = models / os.fsdecode(name)
        folder.mkdir(parents=True)
        shutil.copyfile(plain, folder / "model.onnx")
    assert find_models(models).keys() == {"cafe"}


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
    assert artifact.lineage == () and artifact.tokenizer is None
    record = {"pooling": "cls", "normalize": True, "max_length": 64, "lineage": [{"rewrite": "x"}]}
    write_record(plain.parent, Record.model_validate(record))
    (plain.parent / "tokenizer.json").write_text("{}")
    artifact = open_artifact(plain)
    assert (artifact.pooling, artifact.normalize, artifact.max_length) == ("cls", True, 64)
    assert artifact.lineage == (OptimizeEntry(rewrite="x"),)
    assert artifact.tokenizer == plain.parent / "tokenizer.json"


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
    write_record(plain.parent, Record.model_validate(record))
    assert open_artifact(plain).first_position == first


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


def test_copy_companions_copies_known_files_only(plain: Path, tmp_path: Path):
    for name in ("tokenizer.json", "vocab.txt", "notes.txt"):
        (plain.parent / name).write_text(name)
    (tmp_path / "new").mkdir()
    copy_companions(Artifact(plain), tmp_path / "new")
    names = ("tokenizer.json", "vocab.txt")
    assert tree(tmp_path / "new") == {name: name.encode() for name in names}


def test_copy_companions_link_out_of_the_folder_is_refused(plain: Path, tmp_path: Path):
    """The copy is published with the model: it must not hold a private file."""
    (tmp_path / "key").write_text("private")
    (plain.parent / "vocab.txt").symlink_to(tmp_path / "key")
    (tmp_path / "new").mkdir()
    with raises(InvalidModel, "artifact.link_outside", "vocab.txt"):
        copy_companions(Artifact(plain), tmp_path / "new")
    with raises(InvalidModel, "artifact.link_outside", "vocab.txt"):
        output_file(tmp_path / "other", Artifact(plain), load_model(plain))
    assert not tree(tmp_path / "new")


def test_copy_companions_links_inside_are_followed(plain: Path, tmp_path: Path):
    """Kubernetes mounts files as links to ..data, and a hub cache as links to its blobs."""
    (plain.parent / "..data").mkdir()
    (plain.parent / "..data" / "vocab.txt").write_text("inside")
    (plain.parent / "vocab.txt").symlink_to("..data/vocab.txt")
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "1" / "onnx"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "1").write_bytes(plain.read_bytes())
    (blobs / "2").write_text("blob")
    (snapshot / "model.onnx").symlink_to(blobs / "1")
    (snapshot.parent / "tokenizer.json").symlink_to(blobs / "2")
    for artifact, name, text in (
        (Artifact(plain), "vocab.txt", "inside"),
        (
            Artifact(snapshot / "model.onnx", companion_folder=snapshot.parent),
            "tokenizer.json",
            "blob",
        ),
    ):
        (new := tmp_path / f"new {name}").mkdir()
        copy_companions(artifact, new)
        assert (new / name).read_text() == text


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
