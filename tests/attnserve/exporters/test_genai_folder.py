"""Folders for onnxruntime-genai: it generates the tokens that ONNX Runtime computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from attnserve import optimize
from attnserve.cli.app import main
from attnserve.exporters.genai_folder import write_genai_folder
from attnserve.runtime.session import open_session
from graph_passes.errors import InvalidModel, InvalidOutput
from tests.architectures import Cell
from tests.errors import raises
from tests.files import write_json

LAYERS, HEADS, HEAD_SIZE = 2, 3, 8
VOCABULARY = 24  # the width of the states, which are the logits here
CONFIG = {"eos_token_id": 23, "n_positions": 48, "vocab_size": VOCABULARY, "hidden_size": 24}
PROMPT = [5, 6, 7]


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    """A folder with a tiny GPT-2 with a cache; its states serve as logits."""
    model = onnx.load(Cell("GPT-2, cached", "eager", "torchscript", 17).committed)
    for node in model.graph.node:
        for index, name in enumerate(node.output):
            if name == "last_hidden_state":
                node.output[index] = "logits"
    model.graph.output[0].name = "logits"
    folder = tmp_path / "decoder"
    folder.mkdir()
    onnx.save(model, folder / "model.onnx")
    write_json(folder / "config.json", CONFIG)
    return folder


def greedy(model: Path, count: int) -> list[int]:
    """The most probable tokens after the prompt, by ONNX Runtime."""
    session = open_session(model)
    shapes = {v.name: v.shape for v in session.get_inputs() if "past" in v.name}
    past = {n: np.zeros((1, s[1], 0, s[3]), np.float32) for n, s in shapes.items()}
    tokens, new = list(PROMPT), list(PROMPT)
    while len(tokens) < count and tokens[-1] != CONFIG["eos_token_id"]:
        mask = np.ones((1, len(tokens)), np.int64)
        feed: dict[str, Any] = {"input_ids": np.array([new]), "attention_mask": mask, **past}
        logits, *present = session.run(None, feed)
        past = dict(zip(shapes, present, strict=True))
        new = [int(np.argmax(logits[0, -1]))]
        tokens += new
    return tokens[len(PROMPT) :]


def generated(folder: Path, count: int) -> list[int]:
    """The same by onnxruntime-genai."""
    genai = pytest.importorskip("onnxruntime_genai", reason="pip install onnxruntime-genai")
    model = genai.Model(str(folder))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=count, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(PROMPT)
    tokens: list[int] = []
    while not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    return tokens


@pytest.mark.parametrize("options", [{}, {"precision": "int8"}])
def test_generated_tokens_are_those_of_onnxruntime(
    options: dict[str, Any], decoder: Path, tmp_path: Path
) -> None:
    model = decoder
    if options:
        optimize(decoder, model := tmp_path / "new", **options)
    write_genai_folder(model, tmp_path / "genai")
    expected = greedy(model / "model.onnx", 16)
    assert len(expected) > 3
    assert generated(tmp_path / "genai", 16) == expected


def test_shared_key_cache_is_refused(decoder: Path, tmp_path: Path) -> None:
    """onnxruntime-genai gives the values the shape of the keys."""
    optimize(
        decoder, tmp_path / "new", collab_dk=HEADS * HEAD_SIZE, mixing="dense", collab_cache=True
    )
    with raises(InvalidModel, "genai.cache_shape", "layer 0"):
        write_genai_folder(tmp_path / "new", tmp_path / "genai")


@pytest.mark.parametrize(
    ("generation", "more", "expected"),
    [
        ({"eos_token_id": None}, {}, {"eos_token_id": 23, "pad_token_id": 23}),
        ({"eos_token_id": []}, {}, {"eos_token_id": 23}),
        ({"eos_token_id": [None, 22]}, {}, {"eos_token_id": [22], "pad_token_id": 22}),
        ({"eos_token_id": [None]}, {}, {"eos_token_id": 23}),
        ({"pad_token_id": None}, {"pad_token_id": 4}, {"pad_token_id": 4}),
        ({"bos_token_id": None}, {"bos_token_id": 3}, {"bos_token_id": 3}),
        ({"bos_token_id": 0}, {"bos_token_id": 3}, {"bos_token_id": 0}),
        ({}, {"eos_token_id": None, "text_config": {"eos_token_id": 21}}, {"eos_token_id": 21}),
        ({"n_positions": None}, {}, {"context_length": 48}),
    ],
)
def test_null_in_one_file_does_not_override_another(
    decoder: Path,
    tmp_path: Path,
    generation: dict[str, Any],
    more: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    write_json(decoder / "config.json", CONFIG | more)
    write_json(decoder / "generation_config.json", generation)
    write_genai_folder(decoder, tmp_path / "genai")
    told = json.loads((tmp_path / "genai" / "genai_config.json").read_text())["model"]
    assert {key: told[key] for key in expected} == expected


def test_config_has_names_sizes_and_settings(decoder: Path, tmp_path: Path) -> None:
    write_json(
        decoder / "generation_config.json",
        {"eos_token_id": [22, 23], "top_p": 0.9, "transformers_version": "5"},
    )
    (decoder / "tokenizer.json").write_text("{}")
    written = write_genai_folder(decoder, tmp_path / "out" / "genai", provider="cuda")
    assert (written.layers, written.context_length) == (LAYERS, 48)
    config = json.loads((tmp_path / "out" / "genai" / "genai_config.json").read_text())
    model, decoder_config = config["model"], config["model"]["decoder"]
    assert (model["eos_token_id"], model["pad_token_id"]) == ([22, 23], 22)
    assert model["vocab_size"] == VOCABULARY and model["context_length"] == 48
    assert decoder_config["session_options"]["provider_options"] == [{"cuda": {}}]
    assert decoder_config["inputs"]["past_key_names"] == "past_key_values.%d.key"
    assert decoder_config["outputs"]["present_value_names"] == "present.%d.value"
    assert decoder_config["num_key_value_heads"] == HEADS
    assert config["search"]["top_p"] == 0.9 and "transformers_version" not in config["search"]
    assert (tmp_path / "out" / "genai" / "tokenizer.json").is_file()


@pytest.mark.parametrize(("samples", "beams"), [(False, 4), (True, None)])
def test_beams_are_kept_without_sampling(
    decoder: Path, tmp_path: Path, samples: bool, beams: int | None
) -> None:
    write_json(decoder / "generation_config.json", {"num_beams": 4, "do_sample": samples})
    write_genai_folder(decoder, tmp_path / "genai")
    config = json.loads((tmp_path / "genai" / "genai_config.json").read_text())
    assert config["search"].get("num_beams") == beams


def test_external_data_is_written(decoder: Path, tmp_path: Path) -> None:
    path = decoder / "model.onnx"
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    write_genai_folder(decoder, tmp_path / "genai")
    assert (tmp_path / "genai" / "model.onnx.data").is_file()
    assert generated(tmp_path / "genai", 12) == greedy(path, 12)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, ...) for key in ("eos_token_id", "n_positions", "vocab_size")),  # no such key
        ("vocab_size", [24]), ("n_positions", [48]), ("n_positions", 0), ("eos_token_id", ["</s>"]),
    ],
)  # fmt: skip
def test_config_without_valid_tokens_or_positions_is_refused(
    key: str, value: Any, decoder: Path, tmp_path: Path
) -> None:
    config = CONFIG | {key: value}
    write_json(decoder / "config.json", {k: v for k, v in config.items() if v is not ...})
    with raises(InvalidModel, "genai.config", key if key != "n_positions" else "position"):
        write_genai_folder(decoder, tmp_path / "genai")
    assert not (tmp_path / "genai").exists()


def test_settings_without_meaning_are_left_out(decoder: Path, tmp_path: Path) -> None:
    change = {"pad_token_id": "<pad>", "bos_token_id": None, "max_position_embeddings": None}
    write_json(decoder / "config.json", CONFIG | change)
    write_json(decoder / "generation_config.json", {"temperature": float("nan"), "top_k": "all"})
    assert write_genai_folder(decoder, tmp_path / "genai").context_length == 48
    config = json.loads((tmp_path / "genai" / "genai_config.json").read_text())
    assert config["model"]["pad_token_id"] == 23 and "bos_token_id" not in config["model"]
    assert config["search"].keys() == {"max_length", "past_present_share_buffer"}


def test_force_removes_files_of_the_replaced_model(decoder: Path, tmp_path: Path) -> None:
    optimize(decoder, tmp_path / "old", precision="int8")
    (tmp_path / "old" / "model.onnx.data").touch()
    write_genai_folder(decoder, tmp_path / "old", force=True)
    assert not (tmp_path / "old" / "attnserve.json").exists()
    assert not (tmp_path / "old" / "model.onnx.data").exists()
    assert generated(tmp_path / "old", 12) == greedy(decoder / "model.onnx", 12)


def test_model_without_logits_is_refused(tmp_path: Path) -> None:
    model = Cell("GPT-2, cached", "eager", "torchscript", 17).committed
    with raises(InvalidModel, "genai.logits", "logits"):
        write_genai_folder(model, tmp_path / "genai")


def test_model_without_cache_is_refused(decoder: Path, tmp_path: Path) -> None:
    optimize(decoder, tmp_path / "new", strip_cache=True)
    with raises(InvalidModel, "genai.caches", "cache"):
        write_genai_folder(tmp_path / "new", tmp_path / "genai")


def test_unknown_input_is_refused(decoder: Path, tmp_path: Path) -> None:
    model = onnx.load(decoder / "model.onnx")
    model.graph.input.add().CopyFrom(
        onnx.helper.make_tensor_value_info("token_type_ids", onnx.TensorProto.INT64, ["b", "s"])
    )
    onnx.save(model, decoder / "model.onnx")
    with raises(InvalidModel, "genai.input", "token_type_ids"):
        write_genai_folder(decoder, tmp_path / "genai")


def test_command_writes_and_refuses_existing(
    decoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["deploy", "genai", str(tmp_path / "genai"), "--model", str(decoder)]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == LAYERS
    assert main(arguments) == 2
    assert main([*arguments, "--force"]) == 0
    with raises(InvalidOutput, "output.is_input"):
        write_genai_folder(decoder, decoder)
