"""Load a model folder as a ``SentenceTransformer`` or ``CrossEncoder`` in a runtime of attnserve.

sentence-transformers tokenizes, pools and normalizes as for its own models. The network in its
module ``Transformer`` is a session of this package: neither Optimum nor weights of PyTorch are
needed.

The package is an optional dependency, and is imported on first use. Its objects are typed ``Any``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from attnserve.context import AUTO, Device, Provider
from attnserve.fusion import fused_for_libraries
from attnserve.models.artifact import open_artifact
from attnserve.models.checksums import check_checksums
from attnserve.models.library_files import LibraryModel, library_model
from attnserve.models.onnx_files import load_model
from attnserve.models.tokenizer import model_inputs
from attnserve.paths import StrPath
from attnserve.runtime.interface import RunFailed, Session
from attnserve.runtime.session import open_session
from graph_passes.errors import InvalidData, InvalidModel, MissingExtra

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder, SentenceTransformer

__all__ = ["load"]


def load(
    folder: StrPath,
    *,
    runtime: str = AUTO,
    provider: Provider = "cpu",
    threads: int = 0,
    **options: Any,
) -> SentenceTransformer | CrossEncoder:
    """Load a model as sentence-transformers would load its original.

    Prompts, similarity, dimensions and the activation of scores come from the record. Of the files
    of sentence-transformers in the folder, only the settings that all commands read are used. The
    operators are fused, without a comparison of speeds. The model works in one process: it cannot
    be copied to others (``start_multi_process_pool``).

    Args:
        folder: An artifact folder, a folder with onnx/model.onnx, or an .onnx file.
        runtime: The library that runs the model; see ``Run.runtime``.
        provider: Execution provider. Inputs and outputs are on the CPU.
        threads: Number of threads of the runtime; 0 is its default.
        options: Arguments of the class of sentence-transformers, such as ``truncate_dim`` and
            ``prompts``; they override the settings of the record.

    Returns:
        A ``CrossEncoder`` for models with scores, otherwise a ``SentenceTransformer``.

    Raises:
        MissingExtra: sentence-transformers or the runtime is not installed.
        InvalidModel: The folder is invalid, or has no embeddings or scores of texts.
        InvalidData: The inputs of the model are not integers.
        InvalidArgument: The provider is not available.
    """
    artifact = open_artifact(folder)
    check_checksums(artifact)
    graph = load_model(artifact, in_place=True)
    view = library_model(artifact, graph)
    if view is None:
        raise InvalidModel(
            f"{artifact.model}: sentence-transformers cannot load it: expected config.json and"
            " tokenizer.json, and a graph from tokens to embeddings or scores",
            "serve it with `attnserve serve`",
            code="integration.not_loadable",
        )
    library = _import_library()
    device = Device(provider, threads, runtime)
    session = open_session(fused_for_libraries(graph, provider), device)
    config = artifact.companion("config.json")
    assert config is not None  # library_model has read it
    tokenizer = artifact.tokenizer
    assert tokenizer is not None
    modules = _modules(view, session, str(config.parent), str(tokenizer.parent))
    settings = {**view.files()["config_sentence_transformers.json"], "device": "cpu"}
    kind = getattr(library, settings.pop("model_type"))
    if view.activation is not None:
        import torch

        settings["activation_fn"] = getattr(torch.nn, view.activation.rpartition(".")[2])()
    return kind(modules=modules, **{**settings, **options})


def _import_library() -> Any:
    """The package sentence_transformers.

    Raises:
        MissingExtra: The package is not installed, or older than version 6.
    """
    try:
        import_module("sentence_transformers.base.modules")
        return import_module("sentence_transformers")
    except ImportError as error:
        raise MissingExtra(
            "sentence-transformers 6 is not installed",
            "pip install 'sentence-transformers>=6.2'",
            code="extra.sentence_transformers",
        ) from error


def _modules(view: LibraryModel, session: Session, config: str, tokenizer: str) -> list[Any]:
    """The modules of a model, with the session as its network.

    Args:
        config: The folder of config.json.
        tokenizer: The folder of tokenizer.json.
    """
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    class SessionTransformer(Transformer):
        """A module Transformer whose network is a session."""

        def _load_model(self, *args: Any, **_: Any) -> Any:
            return _network(view, session, args[2])

    text = view.files()["sentence_bert_config.json"]
    # Without these, the constructor would apply a chat template, unlike the loader of the library.
    output = {"method": "forward", "method_output_name": "last_hidden_state"}
    text.setdefault("modality_config", {"text": output})
    text.setdefault("module_output_name", "token_embeddings")
    text["processor_kwargs"] = {**text.pop("tokenizer_args", {}), "local_files_only": True}
    modules: list[Any] = [
        SessionTransformer(
            config, **text, tokenizer_name_or_path=None if config == tokenizer else tokenizer
        )
    ]
    if view.is_embedding:
        modules.append(Pooling(view.width, view.pooling_mode))
        modules += [Normalize()] if view.record.normalize else []
    return modules


def _network(view: LibraryModel, session: Session, config: Any) -> Any:
    """A module of PyTorch that runs a session and returns an output of transformers.

    Args:
        config: The configuration of transformers.
    """
    import torch
    from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

    kinds = {name: value.dtype for name, value in model_inputs(session).items()}

    def run(given: Mapping[str, Any]) -> Any:
        feed = {
            name: given[name].cpu().numpy().astype(kind, copy=False) for name, kind in kinds.items()
        }
        try:
            (output,) = session.run([view.output], feed)
        except RunFailed as error:
            raise InvalidData(f"the model refuses a batch of texts: {error.reason}") from error
        return torch.from_numpy(np.asarray(output, np.float32))

    class SessionNetwork(torch.nn.Module):
        """The network in place of the transformers network."""

        def __init__(self) -> None:
            super().__init__()
            self.config = config
            self.name_or_path = config.name_or_path
            self.dtype = torch.float32
            self.device = torch.device("cpu")

        def forward(
            self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None, **_: Any
        ) -> BaseModelOutput | SequenceClassifierOutput:
            types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            values = run(
                {
                    "input_ids": input_ids,
                    "attention_mask": attention_mask,
                    "token_type_ids": types,
                }
            )
            if not view.is_embedding:
                return SequenceClassifierOutput(logits=values)
            if view.repeats_vector:
                values = values[:, None].expand(*input_ids.shape, -1)
            return BaseModelOutput(last_hidden_state=values)

    return SessionNetwork()
