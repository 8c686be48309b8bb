"""Random model folders of sentence-transformers and transformers, and what these make of texts.

A folder is written by the libraries themselves, then its JSON files are changed as a case says. It
holds onnx/model.onnx like a folder of the Hugging Face hub: the hidden states or logits, or for
modules other than a pooling the whole chain of modules, as Optimum exports it.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.word_tokenizer import PAIR, TEXT, word_tokenizer

HIDDEN, POSITIONS = 16, 40
WORDS = ["the", "The", "red", "Red", "cat", "CAT", "dog", "Dog", "sat", "ran", "by", "sea", "Sea"]
WORDS += ["house", "House", "on", "a", "A", "big", "BIG", "##s"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = SPECIAL + WORDS

LONG = " ".join(
    ("The Red cat ran by the sea", "a BIG dog sat on the House")[i % 2] for i in range(9)
)
TEXTS = ["Red CAT", "the Dog sat by the sea", LONG, "a big house " + LONG[::-1], "Sea"]
QUERY = "The Dog by the Sea"

Kind = Literal["embedding", "rerank", "classifier"]
Modules = Callable[[Any], Sequence[Any]]
"""Modules after the network, from the package ``sentence_transformers.sentence_transformer``."""


@dataclass(frozen=True)
class Case:
    """A model folder.

    ``modules`` are those after the network, ``files`` changes of JSON files by path (None removes
    a key), ``network`` the network, ``config`` changes of its configuration, and ``reference``
    changes for the library alone, where it fails on long texts.
    """

    kind: Kind = "embedding"
    modules: Modules | None = None
    files: Mapping[str, Any] = field(default_factory=dict[str, Any])
    network: str = "bert"
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reference: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_simple(self) -> bool:
        """Whether the graph of hidden states or logits suffices."""
        if self.modules is None:
            return True
        made = self.modules(layers())
        names = [type(one).__name__ for one in made]
        modes = ("mean", "cls", "lasttoken")
        first = getattr(made[0], "pooling_mode", None)
        normal = all(one.module_input_name == "sentence_embedding" for one in made[1:]
                     if type(one).__name__ == "Normalize")  # fmt: skip
        return first in modes and {*names[1:]} <= {"Normalize", "Dropout"} and normal


def layers() -> Any:
    """The modules of sentence-transformers."""
    from types import SimpleNamespace

    from sentence_transformers.sentence_transformer import modules

    made = {name: getattr(modules, name) for name in modules.__all__}
    from sentence_transformers.base.modules import Dense, Normalize

    return SimpleNamespace(**made | {"Dense": Dense, "Normalize": Normalize})


def pool(mode: Any, **options: Any) -> Modules:
    return lambda to: [to.Pooling(HIDDEN, mode, **options)]


def then(mode: Any, *more: Callable[[Any], Any]) -> Modules:
    return lambda to: [to.Pooling(HIDDEN, mode), *(one(to) for one in more)]


def dense(inputs: int, outputs: int, activation: str | None = None, **options: Any) -> Any:
    def build(to: Any) -> Any:
        import torch

        chosen = {"activation_function": getattr(torch.nn, activation)()} if activation else {}
        return to.Dense(inputs, outputs, **chosen, **options)

    return build


def normalize(to: Any) -> Any:
    return to.Normalize()


MEAN = then("mean")
POOLING, SENTENCE = "1_Pooling/config.json", "sentence_bert_config.json"
LIBRARY, TOKENIZER = "config_sentence_transformers.json", "tokenizer_config.json"
NO_MODALITY = {"modality_config": None, "module_output_name": None, "transformer_task": None}
"""The file of the module Transformer before sentence-transformers 5.4."""

SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"
OLD_CE: dict[str, Any] = {"modules.json": None, LIBRARY: None, SENTENCE: None}
"""A cross-encoder before sentence-transformers 5.4, which has no modules."""


def stated(name: str = SENTENCE, **keys: Any) -> dict[str, Any]:
    """The file of the module Transformer, as older versions wrote it."""
    moved = {SENTENCE: None} if name != SENTENCE else {}
    return moved | {name: {**(NO_MODALITY if name == SENTENCE else {}), **keys}}


def legacy(**modes: bool) -> dict[str, Any]:
    keys = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    found = {f"pooling_mode_{key}": modes.get(key, False) for key in keys}
    gone = {"pooling_mode": None, "embedding_dimension": None}
    return {POOLING: {**gone, "word_embedding_dimension": HIDDEN, **found}}


def scores(kind: Kind, labels: int, activation: str | None = None, **more: Any) -> Case:
    """A cross-encoder or classifier with this activation in config_sentence_transformers.json."""
    files = {LIBRARY: {"activation_fn": activation}} if kind == "rerank" else {}
    return Case(kind, files={**files, **more.pop("files", {})},
                config={"num_labels": labels, **more.pop("config", {})}, **more)  # fmt: skip


CASES: dict[str, Case] = {
    # Poolings
    "mean": Case(modules=MEAN),
    "cls": Case(modules=pool("cls")),
    "last token": Case(modules=pool("lasttoken")),
    "max": Case(modules=pool("max")),
    "sqrt": Case(modules=pool("mean_sqrt_len_tokens")),
    "weighted": Case(modules=pool("weightedmean")),
    "cls+mean": Case(modules=pool(("cls", "mean"))),
    "three poolings": Case(modules=pool(("max", "lasttoken", "weightedmean"))),
    "old cls": Case(modules=pool("cls"), files=legacy(cls_token=True)),
    # Modules
    "normalized": Case(modules=then("mean", normalize)),
    "dense": Case(modules=then("cls", dense(HIDDEN, 12))),
    "dense, normalized": Case(modules=then("mean", dense(HIDDEN, 12), normalize)),
    "normalized, dense": Case(modules=then("mean", normalize, dense(HIDDEN, 12))),
    "identity without bias": Case(modules=then("mean", dense(HIDDEN, 8, "Identity", bias=False))),
    "projected residual": Case(modules=then("mean", dense(HIDDEN, 8, "GELU", use_residual=True))),
    "two dense": Case(
        modules=then("mean", dense(HIDDEN, 24, "SiLU"), dense(24, 8, "Sigmoid"), normalize)
    ),
    "dense of the last token": Case(modules=then("lasttoken", dense(HIDDEN, 12, "Tanh"))),
    "dropout": Case(modules=then("cls", lambda to: to.Dropout(0.5), normalize)),
    "layer norm": Case(modules=then("mean", lambda to: to.LayerNorm(HIDDEN))),
    "dense of tokens": Case(
        modules=lambda to: [
            dense(HIDDEN, 12, module_input_name="token_embeddings")(to),
            to.Pooling(12, "mean"),
        ]
    ),
    "normalized tokens": Case(
        modules=lambda to: [to.Normalize("token_embeddings"), to.Pooling(HIDDEN, "mean")]
    ),
    # Lengths, lower case, truncation
    "length": Case(modules=MEAN, files=stated(max_seq_length=12)),
    "length of the call": Case(
        modules=MEAN, files={SENTENCE: {"processing_kwargs": {"text": {"max_length": 7}}}}
    ),
    "length of the tokenizer": Case(modules=MEAN, files={TOKENIZER: {"model_max_length": 13}}),
    "length above the positions": Case(
        modules=MEAN, files=stated(max_seq_length=100), reference=stated(max_seq_length=POSITIONS)
    ),
    "lower case": Case(modules=MEAN, files=stated(max_seq_length=30, do_lower_case=True)),
    "lower case of xlm-roberta": Case(
        modules=then("cls", normalize),
        files=stated("sentence_xlm-roberta_config.json", do_lower_case=True),
    ),
    "lower case of the tokenizer": Case(modules=MEAN, files={TOKENIZER: {"do_lower_case": True}}),
    "cut at the left": Case(modules=pool("cls"), files={TOKENIZER: {"truncation_side": "left"}}),
    "cut at the left by tokenizer.json": Case(
        modules=MEAN,
        network="words",
        files={
            "tokenizer.json": {
                "truncation": {
                    "direction": "Left",
                    "max_length": 12,
                    "strategy": "LongestFirst",
                    "stride": 0,
                }
            }
        },
    ),
    # Prompts and dimensions
    "prompts": Case(
        modules=MEAN, files={LIBRARY: {"prompts": {"query": "The Sea ", "document": "a "}}}
    ),
    "default prompt": Case(
        modules=then("cls", normalize),
        files={LIBRARY: {"prompts": {"query": "The Sea "}, "default_prompt_name": "query"}},
    ),
    "dimensions": Case(modules=MEAN, files={LIBRARY: {"truncate_dim": 6}}),
    "dimensions, normalized": Case(
        modules=then("mean", normalize), files={LIBRARY: {"truncate_dim": 6}}
    ),
    # Networks
    "roberta": Case(
        modules=then("mean", normalize),
        network="roberta",
        reference={TOKENIZER: {"model_max_length": POSITIONS - 1}},
    ),
    "distilbert": Case(modules=pool("max"), network="distilbert"),
    "qwen": Case(
        modules=then("lasttoken", normalize),
        network="qwen",
        files={TOKENIZER: {"padding_side": "left"}},
    ),
    "qwen with a chat template": Case(
        modules=then("lasttoken", normalize),
        network="qwen",
        files=stated(max_seq_length=30) | {TOKENIZER: {"chat_template": "{{ messages }}"}},
    ),
    "qwen, length above the positions": Case(
        modules=MEAN, network="qwen", files=stated(max_seq_length=55)
    ),
    "qwen without modules": Case(
        network="qwen",
        files={"modules.json": None, LIBRARY: None, SENTENCE: None},
        modules=pool("lasttoken"),
    ),
    # Cross-encoders
    "cross-encoder": scores("rerank", 1),
    "logits": scores("rerank", 1, IDENTITY),
    "sigmoid": scores("rerank", 1, SIGMOID),
    "cross-encoder of a regression": scores("rerank", 1, config={"problem_type": "regression"}),
    "nested logits": scores(
        "rerank",
        1,
        files=OLD_CE | {"config.json": {"sentence_transformers": {"activation_fn": IDENTITY}}},
    ),
    "pairs of roberta": scores(
        "rerank",
        1,
        IDENTITY,
        network="roberta",
        reference={TOKENIZER: {"model_max_length": POSITIONS - 1}},
    ),
    "pairs cut at the left": scores(
        "rerank", 1, IDENTITY, files={TOKENIZER: {"truncation_side": "left"}}
    ),
    "pairs in lower case": scores("rerank", 1, IDENTITY, files={SENTENCE: {"do_lower_case": True}}),
    "pairs with a prompt": scores(
        "rerank",
        1,
        files={
            LIBRARY: {
                "prompts": {"own": "red "},
                "default_prompt_name": "own",
                "activation_fn": SIGMOID,
            }
        },
    ),
    "three classes of a cross-encoder": scores("rerank", 3, SIGMOID),
    # Classifiers
    "classes": scores("classifier", 3),
    "labels": scores("classifier", 3, config={"problem_type": "multi_label_classification"}),
    "one class": scores("classifier", 1),
    "regression": scores("classifier", 1, config={"problem_type": "regression"}),
    "classes in lower case, cut at the left": scores(
        "classifier", 3, files={TOKENIZER: {"do_lower_case": True, "truncation_side": "left"}}
    ),
}


# --- writing ------------------------------------------------------------------------------------


def write_folder(case: Case, folder: Path) -> None:
    """Write the folder of a case, with onnx/model.onnx."""
    import torch

    torch.manual_seed(0)
    source = network_folder(case.kind == "embedding", case.network, json.dumps({**case.config}))
    if case.modules is not None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.base.modules import Transformer

        made = case.modules(layers())
        library = SentenceTransformer(modules=[Transformer(str(source)), *made], device="cpu")
        for parameter in (p for one in made for p in one.parameters()):
            torch.nn.init.normal_(parameter, std=0.5)
        library.save(str(folder), create_model_card=False)
        model = chain(library) if not case.is_simple else library[0].model
    elif case.kind == "rerank":
        from sentence_transformers import CrossEncoder

        library = CrossEncoder(str(source), device="cpu")
        library.save(str(folder), create_model_card=False)
        model = library[0].model
    else:
        import transformers

        shutil.copytree(source, folder)
        auto = transformers.AutoModelForSequenceClassification
        model = auto.from_pretrained(folder, attn_implementation="eager")
    write_onnx(model.eval(), folder / "onnx" / "model.onnx", case)
    change(folder, case.files)


def change(folder: Path, files: Mapping[str, Any]) -> None:
    """Change keys of JSON files; None removes a key or file."""
    for name, keys in files.items():
        path = folder / name
        if keys is None:
            path.unlink(missing_ok=True)
            continue
        content = json.loads(path.read_text()) if path.is_file() else {}
        content = {key: x for key, x in {**content, **keys}.items() if x is not None}
        path.write_text(json.dumps(content))


@cache
def network_folder(encodes: bool, name: str, changes: str) -> Path:
    """A folder with a random network and its tokenizer."""
    import torch
    import transformers

    sizes = {
        "vocab_size": len(VOCABULARY), "hidden_size": HIDDEN, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": POSITIONS,
        "pad_token_id": 0, **json.loads(changes),
    }  # fmt: skip
    if name == "distilbert":
        sizes |= {"dim": HIDDEN, "n_layers": 1, "n_heads": 2, "hidden_dim": 24}
    if name == "qwen":
        sizes |= {"num_key_value_heads": 1, "head_dim": 8}
    kind = {"bert": "Bert", "words": "Bert", "roberta": "XLMRoberta", "distilbert": "DistilBert",
            "qwen": "Qwen3"}[name]  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes)
    auto = "AutoModel" if encodes else "AutoModelForSequenceClassification"
    auto = "AutoModelForCausalLM" if name == "qwen" else auto
    torch.manual_seed(1)
    network = getattr(transformers, auto).from_config(config)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim == 2:
                weight.copy_(0.4 * torch.randn(weight.shape))
    folder = Path(tempfile.mkdtemp(prefix="network-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    network.save_pretrained(folder)
    tokenizer(name, folder)
    return folder


def tokenizer(name: str, folder: Path) -> None:
    """Save BERT's tokenizer, or one that transformers does not change."""
    import transformers
    from tokenizers import normalizers

    if name in ("bert", "distilbert"):
        kind = (
            transformers.DistilBertTokenizer if name == "distilbert" else transformers.BertTokenizer
        )
        vocabulary = {word: index for index, word in enumerate(VOCABULARY)}
        kind(vocab=vocabulary, do_lower_case=False).save_pretrained(folder)
        return
    made = word_tokenizer(
        VOCABULARY,
        single="$A [SEP]" if name == "qwen" else TEXT,
        pair="[CLS] $A [SEP] [SEP] $B [SEP]" if name == "roberta" else PAIR,
    )
    made.normalizer = normalizers.Strip()
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)


def chain(library: Any) -> Any:
    """The modules of a model as one module, as Optimum exports them."""
    import torch

    class Modules(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = torch.nn.ModuleList(library)

        def forward(self, **inputs: Any) -> Any:
            features = dict(inputs)
            for one in self.all:
                features = one(features)
            return {key: features[key] for key in ("token_embeddings", "sentence_embedding")}

    return Modules()


def write_onnx(model: Any, path: Path, case: Case) -> None:
    """Export a module with its default inputs and all outputs."""
    import torch

    names = ["input_ids", "attention_mask"]
    names += ["token_type_ids"] if case.network in ("bert", "words", "roberta") else []
    outputs = ["last_hidden_state"] if case.kind == "embedding" else ["logits"]
    simple = case.is_simple
    outputs = outputs if simple else ["token_embeddings", "sentence_embedding"]

    class Graph(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *values: Any) -> Any:
            options = {"return_dict": True} if simple else {}
            result = self.model(**dict(zip(names, values, strict=True)), **options)
            return tuple(result[name] for name in outputs)

    path.parent.mkdir(parents=True, exist_ok=True)
    values = (torch.randint(5, 20, (2, 7)), torch.ones(2, 7, dtype=torch.int64),
              torch.zeros(2, 7, dtype=torch.int64))[: len(names)]  # fmt: skip
    values[1][1, 5:] = 0
    axes = {name: {0: "batch", 1: "sequence"} for name in names}
    for name in outputs:
        per_text = name in ("logits", "sentence_embedding")
        axes[name] = {0: "batch"} if per_text else {0: "batch", 1: "sequence"}
    with torch.no_grad():
        torch.onnx.export(
            Graph().eval(), values, path, dynamo=False, opset_version=17, input_names=names,
            output_names=outputs, dynamic_axes=axes,
        )  # fmt: skip


# --- what the libraries make of texts -----------------------------------------------------------


def expected(case: Case, folder: Path, copy: Path) -> dict[str, np.ndarray]:
    """The vectors by prompt ("" is the default), or the scores, by the libraries themselves.

    Texts run one by one, so that padding plays no role.
    """
    shutil.copytree(folder, copy)
    change(copy, case.reference)
    if case.kind == "embedding":
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(copy), device="cpu")
        names = ["", *(name for name, text in model.prompts.items() if text)]
        return {
            name: np.asarray(model.encode(TEXTS, batch_size=1, prompt_name=name or None))
            for name in names
        }
    if case.kind == "rerank" and case.config["num_labels"] == 1:
        from sentence_transformers import CrossEncoder

        model = CrossEncoder(str(copy), device="cpu")
        return {"": np.asarray(model.predict([(QUERY, text) for text in TEXTS], batch_size=1))}
    return {"": np.asarray(_class_scores(case, copy))}


def _class_scores(case: Case, folder: Path) -> list[list[float]]:
    import transformers

    options: dict[str, Any] = {"top_k": None, "truncation": True}
    if case.kind == "rerank":
        from sentence_transformers import CrossEncoder

        model = CrossEncoder(str(folder), device="cpu")
        name = type(model.activation_fn).__name__.lower()
        # /texts/predict gives probabilities, where sentence-transformers gives logits.
        options["function_to_apply"] = "softmax" if name == "identity" else name
    run = transformers.pipeline("text-classification", str(folder), device="cpu")
    positions = POSITIONS - (case.network == "roberta")
    limit = {"max_length": min(positions, run.tokenizer.model_max_length)}
    order = [run.model.config.id2label[i] for i in range(run.model.config.num_labels)]
    found = [{x["label"]: x["score"] for x in run(text, **options, **limit)} for text in TEXTS]
    return [[one[label] for label in order] for one in found]
