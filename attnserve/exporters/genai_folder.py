"""Write a folder for onnxruntime-genai, which generates text (`attnserve deploy genai`).

    DIR/genai_config.json           names of inputs and outputs, token ids, settings of the search
    DIR/model.onnx                  the decoder, with large weights in model.onnx.data
    DIR/tokenizer.json ...          for the tokenizer of onnxruntime-genai

onnxruntime-genai reads the shape of a layer's cache from its keys; values must have equal shapes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from attnserve.context import Provider
from attnserve.data.file_rows import wanted_inputs
from attnserve.models.artifact import Artifact, copy_companions, open_artifact
from attnserve.models.json_files import json_object
from attnserve.models.onnx_files import data_file, load_model, save_model
from attnserve.models.outputs import check_output, staged
from attnserve.models.record import RECORD
from attnserve.models.tokenizer import TextInput
from attnserve.paths import StrPath
from attnserve.runtime.external_data import external_files
from graph_passes.errors import InvalidModel

__all__ = ["GenaiFolder", "write_genai_folder"]

CONFIG = "genai_config.json"
"""The file that onnxruntime-genai reads first."""

TOKENS = ("input_ids", "attention_mask", "position_ids")
"""Inputs that onnxruntime-genai provides, besides caches."""

POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
"""Keys of config.json with the number of positions."""

SEARCH = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "num_beams",
    "length_penalty",
    "early_stopping",
)
"""Keys of generation_config.json that are kept."""


@dataclass(frozen=True)
class GenaiFolder:
    """The written folder.

    Attributes:
        folder: The folder.
        layers: Number of layers with a cache.
        context_length: Maximum number of tokens of prompt and answer together.
        provider: The execution provider in onnxruntime-genai.
    """

    folder: Path
    layers: int
    context_length: int
    provider: Provider


@dataclass(frozen=True)
class _Caches:
    """The caches among the inputs or outputs of a graph.

    Attributes:
        keys: The name of the cached keys, with %d for the layer.
        values: The name of the cached values, with %d for the layer.
        layers: The number of layers.
    """

    keys: str
    values: str
    layers: int


def write_genai_folder(
    model: StrPath, folder: Path, *, provider: Provider = "cpu", force: bool = False
) -> GenaiFolder:
    """Write a decoder with a cache for onnxruntime-genai.

    Args:
        model: An .onnx file or an artifact folder, with config.json and the tokenizer beside it.
        folder: The new folder.
        provider: Execution provider in onnxruntime-genai.
        force: Replace files of an existing folder.

    Raises:
        InvalidModel: The model cannot be read, has no logits or no cache of every layer, has keys
            and values of different shapes, or config.json lacks the end token or the number of
            positions.
        InvalidOutput: ``folder`` exists, is the model's folder, or cannot be written.
    """
    artifact = open_artifact(model)
    for source in artifact.folders:
        check_output(folder, source=source, force=force)
    graph = load_model(artifact)
    described = _describe(artifact, graph, provider)

    def finish(stage: Path) -> None:
        for name in (RECORD, data_file(folder / "model.onnx").name):  # files of the replaced model
            if not (stage / name).exists():
                (folder / name).unlink(missing_ok=True)

    with staged(folder, finish) as stage:
        save_model(graph, stage / "model.onnx", external=bool(external_files(graph)))
        copy_companions(artifact, stage)
        text = json.dumps(described, indent=2, allow_nan=False)
        (stage / CONFIG).write_text(text + "\n", encoding="utf-8")
    layers = described["model"]["decoder"]["num_hidden_layers"]
    return GenaiFolder(folder, layers, described["model"]["context_length"], provider)


def _describe(artifact: Artifact, graph: ir.Model, provider: Provider) -> dict[str, Any]:
    """The content of genai_config.json.

    Raises:
        InvalidModel: onnxruntime-genai cannot run the model, or a setting is missing.
    """
    inputs = wanted_inputs(graph)
    outputs = {value.name or "": value for value in graph.graph.outputs}
    width = _vocabulary_axis(artifact, inputs, outputs.pop("logits", None))
    past, present = _paired_caches(artifact, inputs, outputs)
    tokens, search = _token_settings(artifact, width)
    cache = inputs[past.keys % 0].cache or (0, 0)
    facts = {
        "hidden_size": artifact.config.get("hidden_size"),
        "num_attention_heads": artifact.config.get("num_attention_heads"),
        "num_key_value_heads": cache[0],
        "head_size": cache[-1],
    }
    return {
        "model": {
            "type": "decoder",
            **tokens,
            "decoder": {
                "filename": "model.onnx",
                "session_options": {
                    "provider_options": [{"cuda": {}}] if provider == "cuda" else []
                },
                "num_hidden_layers": past.layers,
                **{key: value for key, value in facts.items() if value},
                "inputs": {
                    **{name: name for name in TOKENS if name in inputs},
                    "past_key_names": past.keys,
                    "past_value_names": past.values,
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": present.keys,
                    "present_value_names": present.values,
                },
            },
        },
        "search": {
            **search,
            "max_length": tokens["context_length"],
            "past_present_share_buffer": False,  # the graph may concatenate past and new keys
        },
    }


def _vocabulary_axis(
    artifact: Artifact, inputs: Mapping[str, TextInput], logits: ir.Value | None
) -> Any:
    """The last axis of the logits, after checks that the graph reads tokens and returns logits.

    Raises:
        InvalidModel: There are other inputs than tokens and caches, or no logits.
    """
    others = [name for name, one in inputs.items() if name not in TOKENS and one.cache is None]
    if others:
        raise InvalidModel(
            f"{artifact.model}: onnxruntime-genai does not fill the input {others[0]!r}",
            f"export a decoder whose inputs are {', '.join(TOKENS)} and caches",
            code="genai.input",
        )
    if logits is None or logits.shape is None or "input_ids" not in inputs:
        raise InvalidModel(
            f"{artifact.model}: there is no input input_ids, or no output logits",
            "export the model for text generation, with a cache",
            code="genai.logits",
        )
    return logits.shape[-1]


def _paired_caches(
    artifact: Artifact, inputs: Mapping[str, TextInput], outputs: Iterable[str]
) -> tuple[_Caches, _Caches]:
    """The caches among the inputs, and those among the outputs, of the same layers.

    Raises:
        InvalidModel: A layer lacks a cache, or its keys have another shape than its values.
    """
    past = _caches(artifact, [name for name, one in inputs.items() if one.cache is not None])
    present = _caches(artifact, outputs)
    if past.layers != present.layers:
        raise InvalidModel(
            f"{artifact.model}: {past.layers} layers have a cache as input, {present.layers} as"
            " output",
            "export the model again, with one cache of each layer as input and output",
            code="genai.caches",
        )
    for layer in range(past.layers):
        keys, values = (inputs[name % layer].cache for name in (past.keys, past.values))
        if keys != values:
            raise InvalidModel(
                f"{artifact.model}: the cached keys of layer {layer} have another shape than its"
                " values, which onnxruntime-genai cannot hold",
                "use a model that was made without `collab_cache`",
                code="genai.cache_shape",
            )
    return past, present


def _caches(artifact: Artifact, names: Iterable[str]) -> _Caches:
    """Find the caches among inputs or outputs: keys and values of each layer, from layer 0.

    Raises:
        InvalidModel: Other caches exist.
    """
    names = list(names)
    sizes: dict[str, dict[str, set[int]]] = {"key": {}, "value": {}}
    for name in names:
        words = re.findall("key|value", name.lower())
        number = re.search(r"\d+", name)
        if words and number:
            template = name.replace("%", "%%").replace(number[0], "%d", 1)
            sizes[words[-1]].setdefault(template, set()).add(int(number[0]))
    layers = set(range(len(names) // 2))
    if not layers or any(
        [*layers_by_template.values()] != [layers] for layers_by_template in sizes.values()
    ):
        raise InvalidModel(
            f"{artifact.model}: expected a cache of keys and one of values for each layer, found "
            + (", ".join(names[:4]) or "none"),
            "export the decoder with a cache (past_key_values as inputs, present as outputs)",
            code="genai.caches",
        )
    (keys,), (values,) = sizes["key"], sizes["value"]
    return _Caches(keys, values, len(layers))


def _token_settings(artifact: Artifact, width: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read config.json and generation_config.json.

    Args:
        artifact: The folder with the files.
        width: The last axis of the logits, as in the graph.

    Returns:
        The tokens and the positions, and the settings of ``SEARCH``, by the keys of
        genai_config.json.

    Raises:
        InvalidModel: The end token, the number of positions or the number of tokens is missing.
    """
    path = artifact.companion("generation_config.json")
    generation = json_object(path) if path else {}
    text: Any = artifact.config.get("text_config")  # models for text and images
    sources = (text if isinstance(text, dict) else {}, artifact.config, generation)
    values: dict[str, Any] = {}
    for key, value in (entry for source in sources for entry in source.items()):
        stated = [item for item in value if item is not None] if isinstance(value, list) else value
        if stated not in (None, []):  # null and lists of null count as missing
            values[key] = stated
    length = next((values[key] for key in POSITIONS if key in values), artifact.max_length)
    end: Any = values.get("eos_token_id")
    ends: list[Any] = end if isinstance(end, list) else [end]
    vocabulary = width if isinstance(width, int) else values.get("vocab_size")
    for key, is_valid in (
        ("eos_token_id", all(map(_is_count, ends))),
        ("max_position_embeddings", _is_count(length, least=1)),
        ("vocab_size", _is_count(vocabulary, least=1)),
    ):
        if not is_valid:
            raise InvalidModel(
                f"{artifact.folder}: config.json has no valid {key}",
                "copy config.json of the model to the folder of the .onnx file",
                code="genai.config",
            )
    pad, begin = values.get("pad_token_id"), values.get("bos_token_id")
    tokens = {"eos_token_id": end, "pad_token_id": pad if _is_count(pad) else ends[0]}
    if _is_count(begin):
        tokens["bos_token_id"] = begin
    search = {
        key: value
        for key in SEARCH
        if isinstance(value := generation.get(key), int | float) and math.isfinite(value)
    }
    if search.get("do_sample"):
        search.pop("num_beams", None)  # onnxruntime-genai cannot sample beams
    return {**tokens, "vocab_size": vocabulary, "context_length": length}, search


def _is_count(value: Any, least: int = 0) -> bool:
    """Whether a value is an integer of at least ``least``."""
    return type(value) is int and value >= least
