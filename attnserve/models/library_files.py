"""The files with which sentence-transformers loads a model folder, made from its record.

``folder_settings`` reads the same files. ``modules.json`` names classes of the library alone:
version 6 imports no others. Modules that ``pooling`` and ``normalize`` of a record do not express
are part of the graph, whose output then is one vector per text. Such a graph is given to the
library with this vector at each token (``write_openvino``), so that any pooling returns it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import onnx_ir as ir

from attnserve.literals import Pooling
from attnserve.models.artifact import Artifact
from attnserve.models.embeddings import VECTOR_OUTPUTS, preferred_output
from attnserve.models.folder_settings import POOLINGS, PROBLEMS, SCORE_CLASSES, given
from attnserve.models.record import Record
from attnserve.models.settings_files import LEGACY_MODES, Mode
from attnserve.models.tokenizer_files import longest_text
from graph_passes.analysis.shapes import infer_shapes_small

__all__ = ["LIBRARY_FILES", "LibraryModel", "library_model", "write_library_files"]

INPUTS = {"input_ids", "attention_mask", "token_type_ids"}
"""The inputs that the library gives to a graph."""

CLASSES = "sentence_transformers.models."
"""The module of the library's classes, by a name that all versions know."""

MODES: Mapping[Pooling, Mode] = {ours: cast(Mode, name) for name, ours in POOLINGS.items()}

LIBRARY_FILES = (
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "2_Normalize/config.json",
)
"""All files that ``write_library_files`` may write."""


@dataclass(frozen=True)
class LibraryModel:
    """A model as sentence-transformers loads it.

    Attributes:
        kind: The class of the library.
        output: The output of the graph that it needs.
        is_pooled: Whether the output is one vector per text.
        width: The size of a vector, or the number of classes.
        record: The record of the model.
        max_length: The maximum number of tokens of a text; None for no limit.
        activation: The class of the activation of scores; None for the library's default.
    """

    kind: Literal["SentenceTransformer", "CrossEncoder"]
    output: str
    is_pooled: bool
    width: int
    record: Record
    max_length: int | None = None
    activation: str | None = None

    @property
    def is_embedding(self) -> bool:
        return self.kind == "SentenceTransformer"

    @property
    def output_name(self) -> str:
        """The name that the library expects of the output."""
        return "last_hidden_state" if self.is_embedding else "logits"

    @property
    def repeats_vector(self) -> bool:
        """Whether the library must get the vector of a text at each of its tokens."""
        return self.is_embedding and self.is_pooled

    @property
    def pooling_mode(self) -> Mode:
        """The library's name of the pooling; a repeated vector results from any pooling."""
        return "cls" if self.is_pooled else MODES[self.record.pooling or "mean"]

    @property
    def default_prompt(self) -> str | None:
        """The name of the prompt for inputs that name none, if it exists."""
        name = self.record.default_prompt
        return name if name in (self.record.prompts or {}) else None

    def files(self) -> dict[str, Any]:
        """The JSON files by path."""
        modules = [("Transformer", "")]
        files: dict[str, Any] = {}
        if self.is_embedding:
            modules.append(("Pooling", "1_Pooling"))
            # These keys are read by all versions, and by text-embeddings-inference.
            files["1_Pooling/config.json"] = {
                "word_embedding_dimension": self.width,
                **{key: mode == self.pooling_mode for key, mode in LEGACY_MODES.items()},
                "include_prompt": True,
            }
            if self.record.normalize:
                modules.append(("Normalize", "2_Normalize"))
                files["2_Normalize/config.json"] = {}
        entries = [
            {"idx": at, "name": str(at), "path": path, "type": CLASSES + name}
            for at, (name, path) in enumerate(modules)
        ]
        return {
            "modules.json": entries,
            "config_sentence_transformers.json": self._library,
            "sentence_bert_config.json": self._transformer,
            **files,
        }

    @property
    def _library(self) -> dict[str, Any]:
        """The settings of the whole model."""
        record = self.record
        settings: dict[str, Any] = {
            "model_type": self.kind,
            "prompts": record.prompts or {},
            "default_prompt_name": self.default_prompt,
        }
        if not self.is_embedding:
            return settings | given(activation_fn=self.activation)
        settings["similarity_fn_name"] = record.similarity or "cosine"
        return settings | given(truncate_dim=record.dimensions)

    @property
    def _transformer(self) -> dict[str, Any]:
        """The settings of the tokenizer and the network."""
        side = self.record.truncation_side
        settings = given(
            max_seq_length=self.max_length,
            do_lower_case=self.record.lower_case,
            tokenizer_args=side and {"truncation_side": side},
        )
        if self.is_embedding:
            return settings
        output = {"method": "forward", "method_output_name": "logits"}
        return settings | {
            "transformer_task": "sequence-classification",
            "modality_config": {"text": output},
            "module_output_name": "scores",
        }


def library_model(artifact: Artifact, graph: ir.Model) -> LibraryModel | None:
    """The model as sentence-transformers loads it; None if the library cannot.

    It needs config.json and tokenizer.json, a graph that takes only tokens and their mask, and an
    embedding or the scores of texts. Rerankers with a template have no form in the library that
    computes their score from one graph. Graphs that need padding on the left are left out too, and
    masked language models: sparse vectors are no embeddings of a ``SentenceTransformer``.

    Raises:
        InvalidModel: config.json or tokenizer_config.json is not valid.
    """
    record = artifact.record
    inputs = {value.name for value in graph.graph.inputs}
    is_fed = {"input_ids", "attention_mask"} <= inputs <= INPUTS
    if not (is_fed and artifact.config.get("model_type") and artifact.tokenizer):
        return None
    if record.template is not None or record.padding == "left" or record.task == "fill-mask":
        return None
    values = {value.name or "": value for value in graph.graph.outputs}
    is_scores = "logits" in values and not values.keys() & set(VECTOR_OUTPUTS)
    output = record.output or preferred_output([*values], scores=is_scores)
    if output not in values or output not in (*VECTOR_OUTPUTS, "logits"):
        return None
    shape = tuple(infer_shapes_small(graph, batch=2, sequence=5).shape(values[output]) or ())
    if len(shape) not in (2, 3):
        return None
    is_pooled, longest = len(shape) == 2, longest_text(artifact)
    if not is_pooled and (output == "logits" or record.pooling == "none"):
        return None
    if output != "logits":
        return LibraryModel("SentenceTransformer", output, is_pooled, shape[-1], record, longest)
    stated = record.activation
    # The library does not derive an activation from the type of problem.
    by_problem = PROBLEMS.get(artifact.settings.problem_type)
    activation = SCORE_CLASSES[stated] if stated and stated != by_problem else None
    return LibraryModel("CrossEncoder", output, is_pooled, shape[-1], record, longest, activation)


def write_library_files(model: LibraryModel, folder: Path) -> None:
    """Write ``LibraryModel.files`` into ``folder``, as indented JSON."""
    for name, content in model.files().items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
