"""Models with external data, which PyTorch's exporter writes by default."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import external_data_helper, numpy_helper, parser

import attnserve
from attnserve import verify
from attnserve.cli.app import main
from attnserve.context import ONE_THREAD
from attnserve.models.artifact import open_artifact
from attnserve.models.checksums import fingerprint
from attnserve.models.onnx_files import load_model, save_model
from attnserve.models.opset import raise_opset
from attnserve.planning.served_graph.lossless import fuse_lossless
from attnserve.runtime.external_data import external_files, map_external_data
from attnserve.runtime.session import open_session
from graph_passes.errors import InvalidOutput
from tests.attnserve.costs import fused_is_faster
from tests.files import tree

DENSE: dict[str, Any] = {"collab_dk": 16, "mixing": "dense"}
REQUESTS: dict[str, dict[str, Any]] = {
    "by hand": DENSE,
    "search": {"keep": 0.9, "sequence": 32},
    "float16": {"collab_dk": 16, "precision": "float16"},
    "bfloat16": {**DENSE, "precision": "bfloat16"},
    "int8": {**DENSE, "precision": "int8"},
    "precision alone": {"precision": "float16"},
}
SOURCES = ("inside", "beside", "all beside", "mixed")


@pytest.fixture(scope="session")
def torch_files(
    tiny_bert: Callable[..., Path],
    made_once: Callable[[str, Callable[[Path], object]], Path],
) -> Path:
    """Folders named by ``SOURCES``, each with one export of the same BERT and its tokenizer.

    "inside" and "beside" are files as torch.onnx writes them. "beside" is its default: tensors over
    256 bytes lie in model.onnx.data. "all beside" has all float32 tensors in weights.bin, small
    ones too, and "mixed" every other one; onnx's own helper writes both. ONNX Runtime refuses
    external shapes (integers). Shared by all tests: copy a folder to change it.
    """
    import torch
    import transformers

    from tests.exports import quiet

    class Encoder(torch.nn.Module):
        def __init__(self, bert: Any) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.bert(input_ids, attention_mask=attention_mask).last_hidden_state

    def make(folder: Path) -> None:
        source = tiny_bert(initializer_range=0.3)
        for name in SOURCES:
            (folder / name).mkdir(parents=True)
            for file in source.glob("token*.json"):
                shutil.copy(file, folder / name)
        bert = transformers.BertModel.from_pretrained(
            source, add_pooling_layer=False, attn_implementation="eager"
        )
        batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence", min=2, max=64)
        axes = {0: batch, 1: sequence}
        with quiet():
            program = torch.onnx.export(
                Encoder(bert).eval(),
                (torch.ones(2, 7, dtype=torch.long), torch.ones(2, 7, dtype=torch.long)),
                folder / "beside" / "model.onnx",
                dynamo=True,
                verbose=False,
                input_names=["input_ids", "attention_mask"],
                output_names=["last_hidden_state"],
                dynamic_shapes=(axes, axes),
            )
            assert program is not None
            program.save(str(folder / "inside" / "model.onnx"), external_data=False)
        for name, step in (("all beside", 1), ("mixed", 2)):
            proto = onnx.load(folder / "inside" / "model.onnx")
            floats = [t for t in proto.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
            for tensor in floats[::step]:
                external_data_helper.set_external_data(tensor, "weights.bin")
            onnx.save(proto, folder / name / "model.onnx")

    return made_once("torch-external-data", make)


def test_load_model_external_data_is_where_the_exporter_wrote_it(torch_files: Path):
    """PyTorch writes external data by default, including an integer table."""
    external: dict[str, set[bool]] = {}
    for name in SOURCES:
        model = load_model(torch_files / name / "model.onnx")
        values = model.graph.initializers.values()
        external[name] = {
            isinstance(value.const_value, ir.ExternalTensor)
            for value in values
            if value.dtype == ir.DataType.FLOAT
        }
        if name == "beside":
            table = model.graph.initializers["bert.embeddings.position_ids"].const_value
            assert isinstance(table, ir.ExternalTensor)
    assert external == {
        "inside": {False},
        "beside": {False, True},
        "all beside": {True},
        "mixed": {False, True},
    }


def arrays(model: ir.Model) -> dict[str, np.ndarray]:
    values = model.graph.initializers.values()
    return {str(v.name): v.const_value.numpy() for v in values if v.const_value is not None}


SEARCH = pytest.param("search", marks=pytest.mark.timing(seconds=15))


@pytest.mark.parametrize("how", [*sorted(REQUESTS.keys() - {"search"}), SEARCH])
def test_optimize_writes_the_same_weights_for_every_place_of_weights(
    how: str, torch_files: Path, sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ATTNSERVE_CACHE", str(tmp_path / "cache"))
    expected: dict[str, np.ndarray] = {}
    for index, name in enumerate(SOURCES if how in ("by hand", "int8") else SOURCES[:2]):
        source, before = torch_files / name, tree(torch_files / name)
        for external_data in (False, True) if how == "by hand" else (index % 2 == 0,):
            output = tmp_path / f"{name} {external_data}"
            report = attnserve.optimize(
                source,
                output,
                calib=sentences if how == "search" else None,
                external_data=external_data,
                threads=1,
                **REQUESTS[how],
            )
            assert tree(source) == before
            assert (output / "model.onnx.data").exists() == external_data
            assert bool(external_files(load_model(output / "model.onnx"))) == external_data
            onnx.checker.check_model(output / "model.onnx")
            moved = Path(shutil.move(output, tmp_path / f"{output.name} moved"))
            weights = arrays(load_model(moved / "model.onnx"))
            expected = expected or weights
            assert weights.keys() == expected.keys()
            for key, array in weights.items():
                np.testing.assert_array_equal(array, expected[key], err_msg=f"{output.name} {key}")
            assert report.fidelity.mean_cosine > 0.5
            if how != "bfloat16":  # no CPU runs it
                assert verify(source, moved, threads=1).mean_cosine > 0.5


@pytest.mark.parametrize("name", SOURCES)
def test_fuse_lossless_reads_external_data(name: str, torch_files: Path, tmp_path: Path):
    source, fused = open_artifact(torch_files / name), tmp_path / "model.onnx"
    fuse_lossless(source, fused, ONE_THREAD, fused_is_faster)
    assert not external_files(load_model(tmp_path / "model.onnx"))
    assert verify(torch_files / name, tmp_path / "model.onnx", threads=1).mean_cosine > 0.9999


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("beside", []),
        ("mixed", ["--external-data"]),
        ("beside", ["--int8", "--external-data"]),
    ],
)
def test_optimize_with_relative_paths_writes_beside_the_input(
    options: list[str],
    name: str,
    torch_files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    folder = Path(shutil.copytree(torch_files / name, tmp_path / "model"))
    before = tree(folder)
    monkeypatch.chdir(folder)
    request = ["--collab-dk", "16", "--mixing", "dense"]
    command = ["optimize", "model.onnx", "-o", "new.onnx", *request, *options]
    for force in ([], ["--force"]):  # the second time over existing files
        assert main([*command, *force]) == 0
        after = tree(folder)
        assert {key: after[key] for key in before} == before
        data = {"new.onnx.data"} if options else set[str]()
        assert after.keys() - before.keys() == {"attnserve.json", "new.onnx", *data}
        assert main(["verify", "model.onnx", "new.onnx"]) == 0
    assert main(["optimize", "model.onnx", "-o", "model.onnx", *request, "--force"]) != 0


def test_optimize_that_fails_to_write_leaves_the_earlier_output(
    torch_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    output = tmp_path / "out"
    attnserve.optimize(
        torch_files / "beside", output, collab_dk=16, mixing="dense", external_data=True
    )
    before = tree(tmp_path)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attnserve.models.outputs.write_record", fail)  # after the weights
    for external_data in (False, True):
        with pytest.raises(InvalidOutput):
            attnserve.optimize(
                torch_files / "beside",
                output,
                collab_dk=24,
                mixing="dense",
                external_data=external_data,
                force=True,
            )
        assert tree(tmp_path) == before


# Functions

ADD = """<ir_version: 10, opset_import: ["" : 13]>
add (float[n, 64] x) => (float[n, 64] y) {
    shift = Constant <value = float[1] {2.0}> ()
    z = Mul(x, w)
    y = Add(z, shift)
}"""


@pytest.fixture
def attribute(tmp_path: Path) -> Path:
    """y = w x + 2, with w of 256 bytes and the 2, of a Constant node, in weights.bin."""
    proto = parser.parse_model(ADD)
    weight = np.arange(64, dtype=np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    shift = proto.graph.node[0].attribute[0].t
    shift.CopyFrom(numpy_helper.from_array(np.full(1, 2, np.float32), "shift"))
    path = tmp_path / "attribute" / "model.onnx"
    path.parent.mkdir()
    onnx.save_model(
        proto,
        path,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
        convert_attribute=True,
    )
    return path


X = np.ones((1, 64), np.float32)
Y = np.arange(64, dtype=np.float32)[None] + 2


def test_map_external_data_keeps_arrays_that_are_in_use(attribute: Path):
    model = load_model(attribute)
    held = arrays(model)["w"]
    map_external_data(model)
    assert external_files(model) == ()
    assert np.shares_memory(arrays(model)["w"], held), "no copy"
    assert np.array_equal(held, np.arange(64))
    gc.collect()
    assert np.array_equal(arrays(model)["w"], np.arange(64))


@pytest.mark.parametrize("external", [False, True])
def test_save_model_writes_tensors_of_attributes(external: bool, attribute: Path, tmp_path: Path):
    model = load_model(attribute)
    held = arrays(model)["w"]  # of 256 bytes: onnx_ir stores it inside
    (tmp_path / "new").mkdir()
    save_model(model, tmp_path / "new" / "model.onnx", external=external)
    assert external_files(model) == (attribute.with_name("weights.bin"),), "the model is unchanged"
    for source in (model, tmp_path / "new" / "model.onnx", attribute):
        np.testing.assert_array_equal(open_session(source).run(None, {"x": X})[0], Y)
    assert np.array_equal(held, np.arange(64))


def test_save_model_over_its_own_files_writes_the_same_weights(torch_files: Path, tmp_path: Path):
    folder = Path(shutil.copytree(torch_files / "beside", tmp_path / "model"))
    path = folder / "model.onnx"
    expected = arrays(load_model(torch_files / "beside" / "model.onnx"))
    for external in (True, False):
        model = load_model(path)
        held = arrays(model)
        save_model(model, path, external=external)
        for name, array in arrays(load_model(path)).items():
            np.testing.assert_array_equal(array, expected[name])
            np.testing.assert_array_equal(array, held[name])


def test_raise_opset_keeps_small_external_tensors(attribute: Path):
    """onnx's converter receives them by reference, without their folder."""
    model = load_model(attribute)
    raise_opset(model, 23)
    np.testing.assert_array_equal(open_session(model).run(None, {"x": X})[0], Y)


def test_fingerprint_covers_external_tensors_of_attributes(attribute: Path):
    before = fingerprint(open_artifact(attribute))
    data = attribute.with_name("weights.bin")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    assert fingerprint(open_artifact(attribute)) != before
