"""Heads of exported models: the modules of an embedding, and the score of a reranker.

Heads are PyTorch modules after the hidden states. The package torch is an argument, because it is
an optional dependency; its objects are typed ``Any``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from attnserve.models.folder_settings import FolderSettings, Module, torch_name
from attnserve.models.settings_files import Dense, LayerNorm, LogitScore, Normalize, Pooling
from graph_passes.errors import InvalidModel

__all__ = [
    "chat_template_of_pairs",
    "embedding_head",
    "first_line",
    "pair_template",
    "scorer",
    "token_score",
]

LINEAR = 1e-3
"""Maximum error of a score that is computed from two rows of the language head, relative to the
largest logit."""

PAIR_TEMPLATES = {
    "qwen3": (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query"
        ' and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that"
        " answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
}
"""Templates by ``model_type`` for rerankers without a template in their files. The template for
Qwen3-Reranker comes from its authors (Zhang et al. 2025, Qwen3 Embedding)."""


def token_score(settings: FolderSettings, tokenizer: Any) -> LogitScore:
    """The token ids of a reranker's score: the ids in its files, else the ids of "yes" and "no".

    Raises:
        InvalidModel: The vocabulary lacks the ids of the files, or "yes" and "no".
    """
    vocabulary = tokenizer.get_vocab()
    score = settings.token_score
    if score is None and {"yes", "no"} <= vocabulary.keys():
        score = LogitScore(true_token_id=vocabulary["yes"], false_token_id=vocabulary["no"])
    if score is None or max(score.true_token_id, score.false_token_id or 0) >= len(tokenizer):
        raise InvalidModel(
            f"{settings.folder}: a reranker without classifier needs the tokens 'yes' and 'no'",
            "state true_token_id and false_token_id in a module LogitScore (sentence-transformers)",
            code="export.answer_tokens",
        )
    return score


def pair_template(settings: FolderSettings, tokenizer: Any, model_type: str) -> str:
    """The text of a pair, with {query} and {document}, by the chat template or ``PAIR_TEMPLATES``.

    Raises:
        InvalidModel: Neither the tokenizer nor ``PAIR_TEMPLATES`` has a template.
    """
    template = chat_template_of_pairs(settings, tokenizer) or PAIR_TEMPLATES.get(model_type)
    if template is None:
        raise InvalidModel(
            f"{settings.folder}: the model has no template of a query and a document",
            "add a chat_template.jinja with the roles query and document (sentence-transformers)",
            code="export.no_template",
        )
    return template


def chat_template_of_pairs(settings: FolderSettings, tokenizer: Any) -> str | None:
    """The text of a pair by the chat template; None if it does not write a query and a document.

    As in sentence-transformers, the template has the roles query and document; the default prompt
    of the model is a system message.
    """
    prompt = settings.prompt
    variables = dict(settings.transformer.processing_kwargs.chat_template)
    variables.pop("restore_suffix", None)  # no code truncates the end of a template
    texts = ([("system", prompt)] if prompt else []) + [
        ("query", "{query}"),
        ("document", "{document}"),
    ]
    for parts in (False, True):
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if parts else text}
            for role, text in texts
        ]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **variables)
        except Exception:  # no chat template, or a template of another form, which raises any error
            continue
        if text.count("{query}") == text.count("{document}") == 1:
            return text
    return None


def scorer(torch: Any, network: Any, score: LogitScore) -> tuple[Any, Any]:
    """Split a network into its part before the language head, and a module for the score.

    The language head is linear, so two of its rows suffice in place of the whole vocabulary.

    Raises:
        InvalidModel: The logits are not linear in the hidden states.
    """
    base = network.base_model
    output = network.get_output_embeddings()

    def score_of(rows: Any) -> Any:
        """The row of the first token, minus that of the second token if there is one: (1, ...)."""
        row = rows[[score.true_token_id]]
        return row if score.false_token_id is None else row - rows[[score.false_token_id]]

    weights = {"weight": score_of(output.weight)}
    if output.bias is not None:
        weights["bias"] = score_of(output.bias)
    linear = torch.nn.Linear(output.weight.shape[1], 1, bias="bias" in weights)
    linear.load_state_dict(weights)
    vector = "sentence_embedding"
    pool = _Step("token_embeddings", vector, _pooling(torch, ["lasttoken"]))
    head = _head(torch, [pool, _Step(vector, vector, _layer(torch, linear))])
    ids = torch.arange(8)[None] % network.config.vocab_size
    with torch.no_grad():
        logits = network(input_ids=ids).logits[:, -1]  # 1 V
        score_logits = score_of(logits.T)[0]
        hidden = base(input_ids=ids).last_hidden_state
        own_scores = head(hidden, torch.ones_like(ids))[:, 0]
    if float((own_scores - score_logits).abs().max()) > LINEAR * float(logits.abs().max()):
        raise InvalidModel(
            f"the score of {network.config.model_type} is not linear in its hidden states",
            "export it with the task text-generation",
            code="export.not_linear",
        )
    return base, head


def embedding_head(torch: Any, modules: Sequence[Module]) -> Any:
    """A module that applies sentence-transformers modules to (hidden states B S D, mask B S).

    Raises:
        InvalidModel: The weights of a module cannot be read.
    """
    return _head(torch, [_step(torch, module) for module in modules])


class _Step(NamedTuple):
    """A step of a head.

    Attributes:
        source: The name of the value that the step reads.
        target: The name of the value that the step writes.
        layer: A module of (value, mask).
    """

    source: str
    target: str
    layer: Any


def _head(torch: Any, steps: Sequence[_Step]) -> Any:
    """A module of (hidden states B S D, mask B S) that applies the steps in order."""

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(step.layer for step in steps)

        def forward(self, hidden: Any, mask: Any) -> Any:
            values = {"token_embeddings": hidden}
            for step in steps:
                values[step.target] = step.layer(values[step.source], mask)
            return values["sentence_embedding"]

    return Head()


def _step(torch: Any, module: Module) -> _Step:
    """The step of a module of sentence-transformers.

    Raises:
        InvalidModel: The weights of the module cannot be read.
    """
    settings = module.settings
    if isinstance(settings, Pooling):
        return _Step("token_embeddings", "sentence_embedding", _pooling(torch, settings.modes))
    assert isinstance(settings, Dense | LayerNorm | Normalize)
    if isinstance(settings, Normalize):
        layer = _layer(torch, lambda vectors: torch.nn.functional.normalize(vectors, dim=-1))
    elif isinstance(settings, LayerNorm):
        weights = _weights(module)
        norm = torch.nn.LayerNorm(len(weights["norm.weight"]))
        layer = _layer(torch, _loaded(module, "norm", norm, weights))
    else:
        layer = _dense(torch, module, settings)
    return _Step(settings.module_input_name, settings.output, layer)


def _pooling(torch: Any, modes: Sequence[str]) -> Any:
    """A module that pools hidden states (B S D); the vectors of several poolings are joined."""

    def pooled(mode: str, hidden: Any, mask: Any) -> Any:
        real = mask.to(hidden.dtype)
        if mode == "max":
            lowest = torch.finfo(hidden.dtype).min
            return hidden.masked_fill(mask[..., None] == 0, lowest).max(1).values
        weights = real
        if mode == "weightedmean":  # by the position after padding
            weights = real * torch.cumsum(real, 1)
        elif mode in ("cls", "lasttoken"):  # the first or the last real token
            places = torch.arange(mask.shape[1]) + 1
            order = places if mode == "lasttoken" else -places + mask.shape[1] + 1
            positions = mask * order  # B S
            weights = (positions == positions.max(dim=1, keepdim=True).values).to(hidden.dtype)
        count = weights.sum(1, keepdim=True)
        if mode == "mean_sqrt_len_tokens":
            count = torch.sqrt(count)
        return (hidden * weights[..., None]).sum(1) / count

    class Pool(torch.nn.Module):
        def forward(self, hidden: Any, mask: Any) -> Any:
            return torch.cat([pooled(mode, hidden, mask) for mode in modes], dim=-1)

    return Pool()


def _layer(torch: Any, apply: Callable[[Any], Any]) -> Any:
    """A module of (values, mask) that applies a function to the values and ignores the mask."""

    class Maskless(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.apply_to = apply

        def forward(self, values: Any, mask: Any) -> Any:
            return self.apply_to(values)

    return Maskless()


def _dense(torch: Any, module: Module, settings: Dense) -> Any:
    """A linear layer with its activation, and the input added if ``use_residual``."""
    weights = _weights(module)
    layers: dict[str, Any] = {}
    for name in ("linear", "residual"):
        if (weight := weights.get(f"{name}.weight")) is not None:
            layer = torch.nn.Linear(*reversed(weight.shape), bias=f"{name}.bias" in weights)
            layers[name] = _loaded(module, name, layer, weights)
    if "linear" not in layers:
        raise _not_weights(module, KeyError("linear.weight"))
    activation = getattr(torch.nn, torch_name(settings.activation_function))()

    class DenseLayer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleDict(layers)

        def forward(self, values: Any, mask: Any) -> Any:
            output = activation(layers["linear"](values))
            if not settings.use_residual:
                return output
            return output + (layers["residual"](values) if "residual" in layers else values)

    return DenseLayer()


def _weights(module: Module) -> Mapping[str, Any]:
    """The weights of a module by name.

    Raises:
        InvalidModel: The file is missing or damaged.
    """
    from safetensors.torch import load_file

    if not module.weights.is_file():
        raise InvalidModel(
            f"{module.weights}: no such file; pickled weights are never loaded",
            "save the model with sentence-transformers 2.3 or later",
            code="export.no_weights",
        )
    try:
        return load_file(module.weights)
    except Exception as error:  # SafetensorError is not an OSError
        raise _not_weights(module, error) from error


def _loaded(module: Module, name: str, layer: Any, weights: Mapping[str, Any]) -> Any:
    """Load the weights named ``name`` into ``layer``, in float32, and return the layer.

    Raises:
        InvalidModel: The weights are missing or have other shapes.
    """
    own = {k.removeprefix(f"{name}."): w.float() for k, w in weights.items() if k.startswith(name)}
    try:
        layer.load_state_dict(own)
    except Exception as error:  # RuntimeError of another shape, KeyError
        raise _not_weights(module, error) from error
    return layer


def _not_weights(module: Module, error: Exception) -> InvalidModel:
    """The error of a damaged file of weights."""
    return InvalidModel(
        f"{module.weights}: not the weights of a module {module.kind}: {first_line(error)}",
        "download the model again",
        code="export.load",
    )


def first_line(error: Exception) -> str:
    """The first line of an exception's text, at most 200 characters."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
