"""Heads of exported models: pooling, dense layers, and the score of a reranker.

They are PyTorch modules after the hidden states. torch is passed in, because it is an optional
dependency; its objects are typed ``Any``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnserve.choices import Pooling
from attnserve.models.json_files import read_json
from attnserve.models.sentence_transformers import (
    Embedding,
    TokenScore,
    read_prompt,
    read_token_score,
)
from graph_passes.errors import InvalidModel

__all__ = [
    "dense_layers",
    "first_line",
    "pair_template",
    "pooling_head",
    "scorer",
    "scores_by_token",
    "token_score",
]

LINEAR = 1e-3
"""Maximum difference of a score by two rows of the language head, relative to all logits."""

PAIR_TEMPLATES = {
    "qwen3": (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query"
        ' and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that"
        " answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
}
"""Templates of rerankers that state none, by ``model_type``: the one of Qwen3-Reranker's authors
(Zhang et al. 2025, Qwen3 Embedding)."""


def scores_by_token(source: Path) -> bool:
    """Whether a model folder has a language model instead of a classifier.

    Raises:
        InvalidModel: A file is malformed.
    """
    path = source / "config.json"
    config: Any = read_json(path) if path.is_file() else {}
    names = config.get("architectures") if isinstance(config, dict) else None
    return read_token_score(source) is not None or any(
        str(one).endswith("ForCausalLM") for one in names or ()
    )


def token_score(source: Path, tokenizer: Any) -> TokenScore:
    """The tokens of a reranker: those that it states, else "yes" against "no".

    Raises:
        InvalidModel: Both are not in the vocabulary.
    """
    vocabulary = tokenizer.get_vocab()
    found = read_token_score(source)
    if found is None and {"yes", "no"} <= vocabulary.keys():
        found = TokenScore(vocabulary["yes"], vocabulary["no"])
    if found is None or max(found.true_id, found.false_id or 0) >= len(tokenizer):
        raise InvalidModel(
            f"{source}: a reranker without classifier needs the tokens 'yes' and 'no'",
            "state true_token_id and false_token_id in a module LogitScore (sentence-transformers)",
            code="export.answer_tokens",
        )
    return found


def pair_template(source: Path, tokenizer: Any, model_type: str) -> str:
    """The text of a pair, with {query} and {document}, by the chat template or ``PAIR_TEMPLATES``.

    As in sentence-transformers, a chat template has the roles query and document; the default
    prompt of the model is a system message.

    Raises:
        InvalidModel: Neither has it.
    """
    prompt = read_prompt(source)
    texts = ([("system", prompt)] if prompt else []) + [
        ("query", "{query}"), ("document", "{document}"),
    ]  # fmt: skip
    for parts in (False, True):
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if parts else text}
            for role, text in texts
        ]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # no chat template, or one of another form, which raises any error
            continue
        if text.count("{query}") == text.count("{document}") == 1:
            return text
    if model_type not in PAIR_TEMPLATES:
        raise InvalidModel(
            f"{source}: the model states no template of a query and a document",
            "add a chat_template.jinja with the roles query and document (sentence-transformers)",
            code="export.no_template",
        )
    return PAIR_TEMPLATES[model_type]


def scorer(torch: Any, network: Any, score: TokenScore) -> tuple[Any, Any]:
    """The network without its language head, and a module from its hidden states to the score.

    The head is linear, so that two of its rows suffice: the vocabulary is not multiplied.

    Raises:
        InvalidModel: The logits are not linear in the hidden states.
    """
    base, output = network.base_model, network.get_output_embeddings()
    weight = output.weight[[score.true_id]]
    bias: Any = None if output.bias is None else output.bias[[score.true_id]]
    if score.false_id is not None:
        weight = weight - output.weight[[score.false_id]]
        bias = None if output.bias is None else bias - output.bias[[score.false_id]]
    linear = torch.nn.Linear(weight.shape[1], 1, bias=bias is not None)
    linear.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    head = pooling_head(torch, "last", [linear])
    ids = torch.arange(8)[None] % network.config.vocab_size
    with torch.no_grad():
        logits = network(input_ids=ids).logits[:, -1]
        expected = logits[:, score.true_id]
        if score.false_id is not None:
            expected = expected - logits[:, score.false_id]
        hidden = base(input_ids=ids).last_hidden_state
        found = head(hidden, torch.ones_like(ids))[:, 0]
    if float((found - expected).abs().max()) > LINEAR * float(logits.abs().max()):
        raise InvalidModel(
            f"the score of {network.config.model_type} is not linear in its hidden states",
            "export it with the task text-generation",
            code="export.not_linear",
        )
    return base, head


def dense_layers(torch: Any, embedding: Embedding) -> list[Any]:
    """The dense layers of an embedding, with their activations.

    Raises:
        InvalidModel: The weights of a layer cannot be read.
    """
    from safetensors.torch import load_file

    layers: list[Any] = []
    for one in embedding.dense:
        try:
            weights = load_file(one.weights)
            weight, bias = weights["linear.weight"], weights.get("linear.bias")
            linear = torch.nn.Linear(*reversed(weight.shape), bias=bias is not None)
            linear.load_state_dict(
                {"weight": weight.float()} | ({} if bias is None else {"bias": bias.float()})
            )
        except Exception as error:  # SafetensorError, KeyError, RuntimeError of another shape
            raise InvalidModel(
                f"{one.weights}: not the weights of a linear layer: {first_line(error)}",
                "download the model again",
                code="export.load",
            ) from error
        layers += [linear, getattr(torch.nn, one.activation)()]
    return layers


def pooling_head(torch: Any, pooling: Pooling, layers: list[Any]) -> Any:
    """A module from (hidden states B S D, mask B S) through a pooling and these layers."""

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*layers)

        def forward(self, hidden: Any, mask: Any) -> Any:
            weights = mask.to(hidden.dtype)
            if pooling != "mean":  # one token: the first or the last one that is real
                places = torch.arange(mask.shape[1]) + 1
                order = places if pooling == "last" else -places + mask.shape[1] + 1
                found = mask * order  # B S
                weights = (found == found.max(dim=1, keepdim=True).values).to(hidden.dtype)
            pooled = (hidden * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
            return self.layers(pooled)

    return Head()


def first_line(error: Exception) -> str:
    """The first line of an exception's text, at most 200 characters."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
