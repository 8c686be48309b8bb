"""The files for sentence-transformers: read back they give the record, and users keep theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.models.artifact import Artifact, open_artifact
from attnserve.models.folder_settings import read_settings
from attnserve.models.library_files import LibraryModel, library_model, write_library_files
from attnserve.models.lineage import LineageEntry, OptimizeEntry
from attnserve.models.model_card import MARK, is_own_card, model_card
from attnserve.models.onnx_files import load_model, save_model
from attnserve.models.outputs import check_openvino, output_file, write_rewritten
from attnserve.models.record import Record
from graph_passes.errors import InvalidArgument, InvalidModel, InvalidOutput
from tests.errors import raises
from tests.files import tree, write_json

GRAPH = """<ir_version: 10, opset_import: ["" : 18]>
encoder (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
=> (float[batch, {axes}] {output})
<float[9, 4] table = {{{table}}}, int64[1] one = {{1}}, int64[1] last = {{2}}> {{
  hidden = Gather <axis = 0> (table, input_ids)
  mask = Cast <to = 1> (attention_mask)
  column = Unsqueeze (mask, last)
  masked = Mul (hidden, column)
  {output} = {compute}
}}"""

MODULES, LIBRARY = "modules.json", "config_sentence_transformers.json"


def graph(output: str = "last_hidden_state", *, pooled: bool = False) -> ir.Model:
    """A graph whose hidden states are rows of a table, or their sums."""
    table = ", ".join(map(str, np.random.default_rng(0).standard_normal(36).round(3)))
    compute = "ReduceSum <keepdims = 0> (masked, one)" if pooled else "Identity (masked)"
    axes = "4" if pooled else "sequence, 4"
    return ir.from_onnx_text(GRAPH.format(axes=axes, output=output, table=table, compute=compute))


def artifact(folder: Path, model: ir.Model, **record: Any) -> Artifact:
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder / "model.onnx")
    write_json(folder / "config.json", {"model_type": "bert", "num_labels": 4})
    write_json(folder / "tokenizer.json", {})
    return Artifact(folder / "model.onnx", Record.model_validate(record))


def view(folder: Path, model: ir.Model, **record: Any) -> LibraryModel:
    found = library_model(artifact(folder, model, **record), model)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "record",
    [
        {"pooling": "mean", "normalize": False},
        {"pooling": "cls", "normalize": True, "max_length": 12},
        {"pooling": "last", "normalize": True, "similarity": "dot", "dimensions": 3},
        {"pooling": "mean", "normalize": False, "prompts": {"query": "q: ", "document": ""}},
        {"pooling": "cls", "normalize": False, "prompts": {"q": "ä "}, "default_prompt": "q"},
        {"pooling": "mean", "normalize": True, "lower_case": True, "truncation_side": "left"},
    ],
)
def test_files_read_back_give_the_record(tmp_path: Path, record: dict[str, Any]):
    write_library_files(view(tmp_path, graph(), **record), tmp_path)
    assert read_settings(tmp_path).record().to_json() == record


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_scores_read_back_give_the_activation(tmp_path: Path, activation: str):
    found = view(tmp_path, graph("logits", pooled=True), activation=activation, pooling="none")
    assert (found.kind, found.width) == ("CrossEncoder", 4)
    write_library_files(found, tmp_path)
    assert read_settings(tmp_path).record().to_json() == {"activation": activation}


def test_activation_of_the_problem_is_left_to_the_library(tmp_path: Path):
    """It gives logits, also for the original."""
    model = graph("logits", pooled=True)
    source = artifact(tmp_path, model, activation="sigmoid")
    write_json(tmp_path / "config.json", {
        "model_type": "bert", "problem_type": "multi_label_classification"})  # fmt: skip
    found = library_model(source, model)
    assert found is not None and found.activation is None


def test_modules_are_classes_of_the_library(tmp_path: Path):
    files = view(tmp_path, graph(), normalize=True).files()
    kinds = [entry["type"] for entry in files[MODULES]]
    assert kinds == [
        f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Normalize")
    ]


def test_pooled_graph_repeats_its_vector(tmp_path: Path):
    model = graph("sentence_embedding", pooled=True)
    found = view(tmp_path, model, pooling="none", normalize=True)
    assert (found.repeats_vector, found.pooling_mode, found.width) == (True, "cls", 4)


@pytest.mark.parametrize(
    ("model", "record"),
    [
        (graph(), {"pooling": "none"}),
        (graph("logits"), {}),
        (graph("logits", pooled=True), {"template": "{query} {document}"}),
        (graph("logits"), {"task": "fill-mask", "pooling": "none"}),
        (graph("sentence_embedding", pooled=True), {"task": "fill-mask", "pooling": "none"}),
        (graph("start_logits"), {"pooling": "none"}),
        (graph(), {"padding": "left"}),
        (graph(), {"output": "missing"}),
    ],
)
def test_model_that_the_library_cannot_load_has_no_files(
    tmp_path: Path, model: ir.Model, record: dict[str, Any]
):
    assert library_model(artifact(tmp_path, model, **record), model) is None


def test_model_without_configuration_has_no_files(tmp_path: Path):
    source = artifact(tmp_path, graph())
    (tmp_path / "config.json").unlink()
    assert library_model(source, graph()) is None


# --- writing ------------------------------------------------------------------------------------


def rewrite(source: Artifact, target: Path, *, openvino: bool = False) -> None:
    model = load_model(source)
    entry = LineageEntry(rewrite="fuse", plan={"format": 1})
    write_rewritten(
        target, model, source, entry, external=False, openvino=model if openvino else None
    )


def test_folder_has_all_files_and_opens(tmp_path: Path):
    source = artifact(tmp_path / "old", graph(), pooling="cls", normalize=True)
    rewrite(source, tmp_path / "new" / "model.onnx")
    new = open_artifact(tmp_path / "new")
    assert (new.pooling, new.normalize) == ("cls", True)
    assert new.record.files.keys() == {"model.onnx"}
    assert {"modules.json", "1_Pooling/config.json", "README.md"} <= tree(tmp_path / "new").keys()
    stated = load_model(new).metadata_props
    assert stated["attnserve.rewrite"] == "fuse" and stated["attnserve.plan"] == new.plan_id


def test_metadata_of_an_earlier_rewrite_is_replaced(tmp_path: Path):
    model = graph()
    model.metadata_props.update({"attnserve.parent_sha256": "old", "mine": "kept"})
    source = artifact(tmp_path / "old", model)
    rewrite(source, tmp_path / "new" / "model.onnx")
    stated = load_model(open_artifact(tmp_path / "new")).metadata_props
    assert "attnserve.parent_sha256" not in stated and stated["mine"] == "kept"


def test_single_file_gets_no_files_of_libraries(tmp_path: Path):
    source = artifact(tmp_path / "old", graph())
    rewrite(source, tmp_path / "new" / "small.onnx")
    assert not {"modules.json", "README.md"} & tree(tmp_path / "new").keys()
    with raises(InvalidArgument, "openvino.no_folder"):
        check_openvino(tmp_path / "new" / "small.onnx", source, graph())


def test_openvino_of_a_model_without_texts_is_refused(tmp_path: Path):
    source = artifact(tmp_path / "old", graph("scores"))
    with raises(InvalidArgument, "openvino.not_loadable"):
        check_openvino(tmp_path / "new" / "model.onnx", source, graph("scores"))


def test_file_of_the_user_is_not_overwritten(tmp_path: Path):
    source = artifact(tmp_path / "old", graph())
    write_json(tmp_path / "new" / MODULES, [])
    with raises(InvalidOutput, "output.exists", MODULES):
        output_file(tmp_path / "new", source, graph())


def test_broken_configuration_is_refused_before_the_work(tmp_path: Path):
    source = artifact(tmp_path / "old", graph())
    (tmp_path / "old" / "config.json").write_text("{")
    with raises(InvalidModel, "artifact.json"):
        output_file(tmp_path / "new", source, graph())


def test_card_of_the_user_is_kept(tmp_path: Path):
    source = artifact(tmp_path / "old", graph())
    new = tmp_path / "new"
    rewrite(source, new / "model.onnx")
    assert MARK in (new / "README.md").read_text() and is_own_card(new / "README.md")
    for text in ("mine", "\udcff"):
        (new / "README.md").write_bytes(text.encode(errors="surrogateescape"))
        before = (new / "README.md").read_bytes()
        rewrite(source, new / "model.onnx")
        assert (new / "README.md").read_bytes() == before


def test_card_escapes_names(tmp_path: Path):
    name = "<script>\n# [x](y) | `z` \ud800"
    source = artifact(tmp_path, graph(), source=f"a/{name}")
    entry = LineageEntry.model_validate({"rewrite": name, "source": {"file": name}})
    hostile = Artifact(source.model, source.record.model_copy(update={"lineage": (entry,)}))
    card = model_card(hostile, None, has_openvino=False)
    card.encode()
    assert "<script>" not in card and "[x](y)" not in card and "\n# [" not in card
    assert "base_model" not in card


@pytest.mark.parametrize("source", ["/data/models/minilm", "models/minilm"])
def test_card_of_a_local_source_has_no_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "minilm").mkdir(parents=True)
    of = {name: Artifact(tmp_path / "model.onnx", Record(source=name)) for name in (source, "a/b")}
    assert "base_model" not in model_card(of[source], None, has_openvino=False)
    assert 'base_model: "a/b"' in model_card(of["a/b"], None, has_openvino=False)


def quality(split: str, **values: Any) -> dict[str, Any]:
    return {"measure": "similarity", "value": 0.5, "rows": 9, "split": split, **values}


def card_of(**entry: Any) -> str:
    """The card of a model whose last rewrite has these fields, with an OpenVINO file."""
    rewrite = OptimizeEntry.model_validate({"rewrite": "int8-full", **entry})
    model = Artifact(Path("model.onnx"), Record(lineage=(rewrite,)))
    found = LibraryModel("SentenceTransformer", "last_hidden_state", False, 4, model.record)
    return model_card(model, found, has_openvino=True)


def test_card_names_the_data_of_other_verifications():
    card = card_of(
        calibration={"file": "texts.txt"},
        quality=quality("verify"),
        also_proved=[
            {"data": "other.txt", "quality": quality("data")},
            {"data": "two files", "quality": quality("data", file="a.txt")},
        ],
    )
    rows = [line for line in card.split("\n") if line.startswith("| similarity |")]
    for row, data in zip(
        rows, ["texts.txt, verify", "other.txt, data", "a.txt, data"], strict=True
    ):
        assert f"| {data} |" in row


def test_card_has_the_warnings_of_the_last_rewrite():
    card = card_of(warnings=["larger than the original", "a_b not refitted\n# x"])
    assert "\n- larger than the original\n- a\\_b not refitted \\# x\n" in card


INT8 = {"int8_activations": "static"}


@pytest.mark.parametrize(
    ("entry", "loads", "stock", "served"),
    [
        # Without rounded activations, all runtimes compute the same.
        ({"search": {}}, 'load("FOLDER")', True, "[cpu]' FOLDER"),
        ({**INT8, "search": {}}, 'load("FOLDER")', False, "[cpu]' FOLDER"),
        (
            {**INT8, "search": {}, "other_runtimes": {"openvino": {}}},
            'load("FOLDER")', True, "[cpu]' FOLDER",
        ),
        (
            {**INT8, "search": {"asked": {"runtime": "openvino"}}},
            'load("FOLDER", runtime="openvino")', True, "[cpu,openvino]' FOLDER --runtime openvino",
        ),
        ({"plan": {"precision": "bfloat16-cpu"}}, 'load("FOLDER")', True, "[cpu,openvino]' FOLDER"),
        (
            {**INT8, "plan": {"precision": "int8-full-bfloat16"},
             "other_runtimes": {"openvino+onnxruntime": {}}},
            'load("FOLDER", runtime="openvino")', True, "[cpu,openvino]' FOLDER --runtime openvino",
        ),
        (INT8, 'load("FOLDER")', False, "[cpu]' FOLDER"),  # not known
    ],
)  # fmt: skip
def test_card_recommends_only_runtimes_that_keep_the_quality(
    entry: dict[str, Any], loads: str, stock: bool, served: str
):
    card = card_of(**entry)
    assert loads in card and ('backend="openvino"' in card) == stock
    assert ("quality in OpenVINO is not verified" in card) != stock
    assert served.replace(" FOLDER", "\nattnserve serve FOLDER") + "\n```" in card


def test_card_names_the_runtimes_of_an_int8_model():
    card = card_of(**INT8, search={}, other_runtimes={"openvino": {}})
    assert "measured in onnxruntime, and is kept in openvino." in card
    assert "measured in" not in card_of(search={})


# --- OpenVINO -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pooled", [False, True])
def test_openvino_file_gives_the_output_at_each_token(tmp_path: Path, pooled: bool):
    openvino = pytest.importorskip("openvino")
    output = "sentence_embedding" if pooled else "token_embeddings"
    record = {"pooling": "none" if pooled else "mean"}
    source = artifact(tmp_path / "old", graph(output, pooled=pooled), **record)
    rewrite(source, tmp_path / "new" / "model.onnx", openvino=True)
    file = tmp_path / "new" / "openvino" / "openvino_model.xml"
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(file, "CPU", exact)
    ids = np.array([[1, 2, 3], [4, 5, 0]])
    mask = np.array([[1, 1, 1], [1, 1, 0]])
    found = compiled({"input_ids": ids, "attention_mask": mask})["last_hidden_state"]
    table = load_model(source).graph.initializers["table"].const_value
    assert table is not None
    wanted = table.numpy()[ids] * mask[..., None]
    if pooled:
        wanted = np.repeat(wanted.sum(1, keepdims=True), 3, axis=1)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    # Without the option, the file of the earlier graph must not stay.
    rewrite(source, tmp_path / "new" / "model.onnx")
    assert not [*file.parent.glob("*")]


def test_refused_fused_graph_is_replaced_by_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = artifact(tmp_path / "old", graph(), pooling="mean")
    fused, written = graph(), list[ir.Model]()

    def write(model: ir.Model, path: Path, **_: Any) -> None:
        written.append(model)
        if model is fused:
            raise InvalidModel("refused", "", code="session.graph_refused")
        path.write_text("")

    monkeypatch.setattr("attnserve.models.outputs.write_openvino", write)
    model, entry = load_model(source), LineageEntry(rewrite="fuse")
    target = tmp_path / "new" / "model.onnx"
    write_rewritten(target, model, source, entry, external=False, openvino=fused)
    assert written[0] is fused and written[1] is model
    assert (target.parent / "openvino" / "openvino_model.xml").is_file()


def test_failed_write_keeps_the_earlier_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = artifact(tmp_path / "old", graph(), pooling="mean")
    new = tmp_path / "new"
    rewrite(source, new / "model.onnx")
    for suffix in ("xml", "bin"):
        write_json(new / "openvino" / f"openvino_model.{suffix}", {})
    before = tree(new)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attnserve.models.outputs.write_record", fail)
    with raises(InvalidOutput, "output.not_writable"):
        rewrite(source, new / "model.onnx")
    assert tree(new) == before


def test_files_of_an_earlier_model_are_removed(tmp_path: Path):
    """They would give another pooling or normalization to the new model."""
    new = tmp_path / "new"
    rewrite(
        artifact(tmp_path / "dense", graph(), pooling="mean", normalize=True), new / "model.onnx"
    )
    openvino = [f"openvino/openvino_model.{suffix}" for suffix in ("xml", "bin")]
    for name in openvino:
        write_json(new / name, {})
    earlier = {"modules.json", "1_Pooling/config.json", "2_Normalize/config.json", *openvino}
    assert earlier <= tree(new).keys()
    other = artifact(tmp_path / "left", graph(), pooling="mean", padding="left")
    rewrite(other, new / "model.onnx")
    assert not earlier & tree(new).keys() and (new / "model.onnx").is_file()
