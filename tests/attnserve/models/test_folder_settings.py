"""What a model folder says: every key is read, known to be harmless, or refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from attnserve.models.artifact import open_artifact
from attnserve.models.folder_settings import read_settings
from attnserve.models.settings_files import MODULES, TRANSFORMER_FILES, Library, Transformer
from attnserve.models.tokenizer_files import BERT_MODELS, BERT_TOKENIZERS, load_encoder
from graph_passes.errors import InvalidModel
from tests.attnserve.models.files import write_modules
from tests.errors import check_length, raises
from tests.files import write_json
from tests.word_tokenizer import PAIR, TEXT, word_tokenizer

SENTENCE, LIBRARY = "sentence_bert_config.json", "config_sentence_transformers.json"
TOKENIZER, POOLING = "tokenizer_config.json", "1_Pooling/config.json"
RUN = {"method": "forward", "method_output_name": "last_hidden_state"}
SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content", "key"),
    [
        (SENTENCE, {"attend_twice": True}, "attend_twice"),
        (SENTENCE, {"processing_kwargs": {"text": {"stride": 3}}}, "processing_kwargs.text.stride"),
        (SENTENCE, {"processing_kwargs": {"speech": {}}}, "processing_kwargs.speech"),
        (SENTENCE, {"tokenizer_args": {"add_eos": True}}, "tokenizer_args.add_eos"),
        (SENTENCE, {"model_kwargs": {"rotary_factor": 2}}, "model_args.rotary_factor"),
        (SENTENCE, {"config_args": {"num_layers": 2}}, "config_args.num_layers"),
        (LIBRARY, {"centered": True}, "centered"),
        (POOLING, {"pooling_mode": "cls", "weights": "idf"}, "weights"),
        (POOLING, {"pooling_mode_cls_token": True, "pooling_mode_median": True}, "_median"),
        ("2_Normalize/config.json", {"p": 1}, "p"),
        ("modules.json", [{"type": "a.B", "path": "", "only": "query"}], "only"),
    ],
)
def test_unknown_key_is_refused_by_its_name(hub: Path, file: str, content: Any, key: str) -> None:
    write_json(hub / file, content)
    with raises(InvalidModel, "settings.unknown_key", key, str(hub / file)):
        open_artifact(hub)


@pytest.mark.parametrize(
    ("file", "content", "code", "key"),
    [
        *((SENTENCE, content, "export.config", key) for content, key in (
            *(({"max_seq_length": one}, "max_seq_length") for one in ("12", 0, -1, 1.5, [256])),
            ({"query_length": 32}, "query_length"),
            ({"tokenizer_name_or_path": "other"}, "tokenizer_name_or_path"),
            ({"processing_kwargs": {"text": {"truncation": "only_first"}}}, "truncation"),
            ({"processing_kwargs": {"text": {"add_special_tokens": False}}}, "add_special_tokens"),
            ({"transformer_task": "fill-mask"}, "transformer_task"),
            ({"modality_config": {"text": {**RUN, "method": "get_text_features"}}}, "method"),
            ({"modality_config": {"text": {**RUN, "method_output_name": "pooler_output"}}},
             "method_output_name"),
            ({"modality_config": {"message": {**RUN, "format": "flat"}}}, "modality_config"),
            ({"module_output_name": "sentence_embedding"}, "module_output_name"),
        )),
        *(("2_Dense/config.json", content, "export.config", key) for content, key in (
            ({"activation_function": "mine.Tanh"}, "activation_function"),
            ({"activation_function": "torch.nn.modules.activation.Softmax"}, "activation_function"),
            ({"module_output_name": "scores"}, "module_output_name"),
        )),
        *((LIBRARY, content, "export.config", key) for content, key in (
            ({"prompts": ["query: "]}, "prompts"),
            ({"prompts": {"query": 1}}, "prompts"),
            ({"prompts": {}, "default_prompt_name": "query"}, "default_prompt_name"),
            ({"truncate_dim": 0}, "truncate_dim"),
            ({"similarity_fn_name": "euclidean"}, "similarity_fn_name"),
            ([], "expected a JSON object"),
        )),
        (LIBRARY, {"model_type": "SparseEncoder"}, "export.module", "SpladePooling"),
        (LIBRARY, {"model_type": "MultiVectorEncoder"}, "settings.model_type", "MultiVector"),
        (POOLING, {}, "export.pooling", "1_Pooling"),
    ],
)  # fmt: skip
def test_value_that_is_not_supported_is_refused_by_its_name(
    hub: Path, file: str, content: object, code: str, key: str
) -> None:
    if file.startswith("2_Dense"):
        write_modules(hub, "Transformer", "Pooling", "Dense")
    write_json(hub / file, content)
    values = [key, Path(file).parts[0]] if file.startswith(("2_Dense", SENTENCE)) else [key]
    with raises(InvalidModel, code, *values):
        open_artifact(hub)


def test_value_that_is_not_supported_is_refused_with_the_name_of_its_file(hub: Path) -> None:
    (hub / SENTENCE).unlink()
    write_json(hub / "sentence_roberta_config.json", {"module_output_name": "sentence_embedding"})
    with raises(InvalidModel, "export.config", "sentence_roberta_config.json: module_output_name"):
        open_artifact(hub)


def test_keys_that_change_nothing_are_accepted(hub: Path) -> None:
    expected = open_artifact(hub).record
    write_json(hub / LIBRARY, {
        "__version__": {"sentence_transformers": "9"}, "requirements": {},
        "model_type": "SentenceTransformer", "prompts": {"query": None},
    })  # fmt: skip
    modality = {"text": RUN}
    write_json(hub / SENTENCE, {
        "max_seq_length": 256, "unpad_inputs": None, "transformer_task": "feature-extraction",
        "modality_config": modality, "module_output_name": "token_embeddings",
        "model_args": {"dtype": "float16"}, "tokenizer_args": {"use_fast": True},
        "processing_kwargs": {"text": {"padding": "max_length"}}, "query_length": None,
    })  # fmt: skip
    named = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
    write_json(hub / "2_Normalize" / "config.json", named)
    write_json(
        hub / POOLING, {"pooling_mode": ["cls"], "include_prompt": True, "embedding_dimension": 8}
    )
    assert open_artifact(hub).record == expected


def test_no_key_is_read_and_ignored_at_once() -> None:
    for file in (Library, Transformer, *MODULES.values()):
        assert not file.ignored.keys() & file.model_fields.keys()
        assert all(file.ignored.values())


# --- modules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["sentence_transformers.models.LSTM", "custom_st.Transformer", "pylate.models.Pooling"]
)
def test_unknown_module_is_refused_by_its_name(hub: Path, kind: str) -> None:
    write_modules(hub, "Transformer", "Pooling", "Normalize")
    listed = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        {"type": kind, "path": "2_Other"},
    ]
    write_json(hub / "modules.json", listed)
    with raises(InvalidModel, "export.module", kind.rpartition(".")[2], "modules.json"):
        open_artifact(hub)


@pytest.mark.parametrize(
    ("names", "normalize"),
    [
        (("Normalize", "Dense"), False),
        (("Dense", "Normalize"), True),
        (("Normalize", "Dense", "Normalize"), True),
        (("Dropout", "LayerNorm"), False),
    ],
)
def test_modules_after_the_pooling_keep_their_order(
    hub: Path, names: tuple[str, ...], normalize: bool
) -> None:
    write_modules(hub, "Transformer", "Pooling", *names)
    settings = read_settings(hub)
    embedding = settings.embedding
    kinds = [one.kind for one in settings.head]
    assert kinds == ["Pooling", *(name for name in names if name != "Dropout")]
    assert (embedding["pooling"], embedding["normalize"]) == ("none", normalize)
    artifact = open_artifact(hub)
    assert (artifact.output, artifact.normalize) == ("sentence_embedding", normalize)


def test_pooling_without_the_prompt_is_refused_if_there_are_prompts(hub: Path) -> None:
    write_json(hub / POOLING, {"pooling_mode": "cls", "include_prompt": False})
    assert open_artifact(hub).pooling == "cls"
    write_json(hub / LIBRARY, {"prompts": {"query": "Q: "}})
    with raises(InvalidModel, "export.include_prompt", "1_Pooling"):
        open_artifact(hub)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "last"),
        ({"architectures": ["Qwen3ForCausalLM"], "is_causal": False}, "mean"),
        ({"architectures": ["BertForMaskedLM"]}, "mean"),
    ],
)
def test_default_pooling_of_a_language_model_is_the_last_token(
    hub: Path, config: dict[str, Any], pooling: str
) -> None:
    (hub / "modules.json").unlink()
    write_json(hub / "config.json", config)
    assert read_settings(hub).embedding["pooling"] == open_artifact(hub).pooling == pooling


@pytest.mark.parametrize(
    ("content", "pooling"),
    [
        ({"word_embedding_dimension": 8, "pooling_mode_mean_tokens": False}, "mean"),  # the default
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, "none"),
        ({"pooling_mode": "lasttoken", "pooling_mode_cls_token": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["cls"]}, "cls"),
    ],
)
def test_pooling_by_the_keys_of_all_versions(
    hub: Path, content: dict[str, Any], pooling: str
) -> None:
    write_json(hub / POOLING, content)
    artifact = open_artifact(hub)
    assert artifact.pooling == pooling
    assert artifact.output == ("sentence_embedding" if pooling == "none" else None)
    write_modules(hub, "Transformer", "Pooling")
    assert artifact.normalize and not open_artifact(hub).normalize


def test_empty_prompts_are_left_out_and_the_default_prompt_is_kept(hub: Path) -> None:
    content = {"prompts": {"query": "", "document": ""}, "default_prompt_name": "query"}
    write_json(hub / LIBRARY, content)
    assert not open_artifact(hub).record.stated.keys() & {"prompts", "default_prompt"}
    write_json(hub / LIBRARY, {**content, "prompts": {"query": "the ", "document": ""}})
    artifact = open_artifact(hub)
    found = (artifact.prompt(), artifact.prompt("document"), artifact.prompt("passage"))
    assert found == ("the ", "", "")  # the default prompt is not one of documents


# --- sparse vectors -----------------------------------------------------------------------------

SPLADE = "1_SpladePooling/config.json"
LOGITS = {"method": "forward", "method_output_name": "logits"}


@pytest.fixture
def sparse(hub: Path) -> Path:
    """The files of a SparseEncoder, as sentence-transformers 6 writes them."""
    write_modules(hub, "Transformer", "SpladePooling")
    write_json(hub / SPLADE, {"pooling_strategy": "max", "activation_function": "relu",
                              "embedding_dimension": 30522})  # fmt: skip
    write_json(hub / SENTENCE, {"transformer_task": "fill-mask", "max_seq_length": 9,
                                "modality_config": {"text": LOGITS},
                                "module_output_name": "token_embeddings"})  # fmt: skip
    write_json(hub / LIBRARY, {"model_type": "SparseEncoder", "similarity_fn_name": "dot",
                               "prompts": {"query": "Q: "}})  # fmt: skip
    return hub


SPARSE_RECORD: dict[str, Any] = {
    "pooling": "none", "normalize": False, "task": "fill-mask", "output": "logits", "max_length": 9,
}  # fmt: skip


def test_sparse_encoder_is_a_masked_language_model(sparse: Path) -> None:
    assert open_artifact(sparse).record.stated == SPARSE_RECORD | {"prompts": {"query": "Q: "}}


def test_sparse_encoder_of_older_versions_is_read(sparse: Path) -> None:
    write_modules(sparse, "MLMTransformer", "SpladePooling")
    write_json(sparse / SENTENCE, {"max_seq_length": 9, "do_lower_case": True})
    write_json(sparse / SPLADE, {"pooling_strategy": "max", "word_embedding_dimension": None})
    write_json(sparse / LIBRARY, {})  # the module suffices
    assert open_artifact(sparse).record.stated == SPARSE_RECORD | {"lower_case": True}


def test_sparse_encoder_without_modules_has_the_pooling_of_the_library(sparse: Path) -> None:
    (sparse / "modules.json").unlink()
    (sparse / SPLADE).unlink()
    assert open_artifact(sparse).record.stated == SPARSE_RECORD | {"prompts": {"query": "Q: "}}


@pytest.mark.parametrize(
    ("file", "content", "code", "values"),
    [
        (SPLADE, {"pooling_strategy": "sum"}, "export.sparse_pooling", ["is sum", "max"]),
        (SPLADE, {"activation_function": "log1p_relu"}, "export.sparse_pooling", ["log1p_relu"]),
        (SPLADE, {"activation_function": "gelu"}, "export.config", ["activation_function"]),
        (SPLADE, {"pooling_strategy": "max", "top": 3}, "settings.unknown_key", ["top"]),
        (SPLADE, {}, "export.pooling", []),
        (LIBRARY, {"model_type": "SparseEncoder", "max_active_dims": 64}, "export.sparse_pooling",
         ["max_active_dims is 64"]),
        (SENTENCE, {"max_seq_length": 9}, "export.config", ["transformer_task", "fill-mask"]),
        (SENTENCE, {"transformer_task": "fill-mask", "module_output_name": "scores"},
         "export.config", ["module_output_name"]),
        (SENTENCE, {"transformer_task": "fill-mask", "modality_config": {"text": RUN}},
         "export.config", ["method_output_name", "logits"]),
    ],
)  # fmt: skip
def test_other_sparse_vectors_are_refused_by_their_setting(
    sparse: Path, file: str, content: dict[str, Any], code: str, values: list[str]
) -> None:
    write_json(sparse / file, content)
    with raises(InvalidModel, code, str(sparse / file), *values) as caught:
        open_artifact(sparse)
    check_length(caught.value)


@pytest.mark.parametrize(
    "names",
    [
        ("Transformer",),
        ("SpladePooling",),
        ("SparseStaticEmbedding",),
        ("Router",),
        ("Transformer", "SpladePooling", "Normalize"),
        ("Transformer", "SpladePooling", "SpladePooling"),
        ("Transformer", "Pooling", "SparseAutoEncoder"),
        ("MLMTransformer", "Pooling"),
    ],
)
def test_other_modules_of_a_sparse_encoder_are_refused(sparse: Path, names: tuple[str, ...]):
    write_json(sparse / "2_SpladePooling" / "config.json", {"pooling_strategy": "max"})
    write_json(sparse / "config.json", {"pooling_strategy": "max"})  # of a module at the path ""
    write_modules(sparse, *names)
    with raises(InvalidModel, "export.module", ", ".join(names), "SpladePooling") as caught:
        open_artifact(sparse)
    check_length(caught.value)


def test_fill_mask_without_a_sparse_encoder_is_refused(sparse: Path) -> None:
    write_modules(sparse, "Transformer")
    write_json(sparse / LIBRARY, {"model_type": "CrossEncoder"})
    with raises(InvalidModel, "export.config", "transformer_task", "SparseEncoder"):
        open_artifact(sparse)


# --- scores -------------------------------------------------------------------------------------

LABELS = {"id2label": {"0": "a", "1": "b", "2": "c"}}


@pytest.mark.parametrize(
    ("config", "library", "activation"),
    [
        ({"problem_type": "multi_label_classification", **LABELS}, {}, "sigmoid"),
        ({"problem_type": "regression", "num_labels": 1}, {}, "identity"),
        ({"problem_type": "single_label_classification", **LABELS}, {}, None),
        ({"num_labels": 1}, {"activation_fn": IDENTITY}, "identity"),
        ({"id2label": {"0": "a"}}, {"activation_fn": SIGMOID}, "sigmoid"),
        ({"id2label": {"0": "a"}, "problem_type": "regression"}, {"activation_fn": SIGMOID},
         "sigmoid"),
        (LABELS, {"activation_fn": IDENTITY}, None),
        ({"problem_type": "multi_label_classification", **LABELS}, {"activation_fn": IDENTITY},
         "sigmoid"),
        ({"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.0.1"},
          "num_labels": 1}, {}, "identity"),
        ({"sbert_ce_default_activation_function": IDENTITY, "num_labels": 1}, {}, "identity"),
        ({"sentence_transformers": {"activation_fn": SIGMOID}, **LABELS}, {}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": IDENTITY}, **LABELS}, {}, None),
        ({"sentence_transformers": None, "num_labels": 1}, {}, None),
    ],
)  # fmt: skip
def test_activation_of_an_onnx_file_is_that_of_the_folder(
    hub: Path, config: dict[str, Any], library: dict[str, Any], activation: str | None
) -> None:
    (hub / "modules.json").unlink()
    write_json(hub / "config.json", config)
    write_json(hub / LIBRARY, library)
    assert open_artifact(hub).activation == activation


@pytest.mark.parametrize(
    ("config", "code", "value"),
    [
        ({"problem_type": "ranking"}, "export.config", "problem_type"),
        ({"sentence_transformers": {"activation_fn": "mine.Sigmoid"}}, "export.activation", "mine"),
        ({"sentence_transformers": {"scale": 2}}, "settings.unknown_key", "scale"),
        ({"sbert_ce_default_activation_function": "torch.nn.ELU"}, "export.activation", "ELU"),
    ],
)
def test_activation_that_is_not_known_is_refused(
    hub: Path, config: dict[str, Any], code: str, value: str
) -> None:
    (hub / "modules.json").unlink()
    write_json(hub / "config.json", config)
    with raises(InvalidModel, code, value):
        open_artifact(hub)
    write_json(hub / LIBRARY, {"activation_fn": "torch.nn.Tanh"})  # precedes config.json
    write_json(hub / "config.json", {})
    with raises(InvalidModel, "export.activation", "torch.nn.Tanh"):
        open_artifact(hub)


@pytest.mark.parametrize(
    ("config", "labels"),
    [
        ({"architectures": ["BertForSequenceClassification"]}, {0: "LABEL_0", 1: "LABEL_1"}),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "x"}}, {0: "x"}),
        ({"architectures": ["BertModel"]}, {}),
    ],
)
def test_labels_that_transformers_does_not_save_are_its_default(
    hub: Path, config: dict[str, Any], labels: dict[int, str]
) -> None:
    write_json(hub / "config.json", config)
    assert open_artifact(hub).labels == labels


def test_prompts_of_a_cross_encoder_are_read(hub: Path) -> None:
    write_modules(hub, "Transformer")
    write_json(hub / LIBRARY, {"prompts": {"own": "Q: "}, "default_prompt_name": "own",
                               "model_type": "CrossEncoder"})  # fmt: skip
    assert open_artifact(hub).prompt() == "Q: "


# --- texts --------------------------------------------------------------------------------------

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "A", "B"]
CLS, SEP, A, B, C = 2, 3, 4, 5, 6


@pytest.fixture
def texts(hub: Path) -> Path:
    """The folder with a tokenizer of words, in upper and lower case."""
    word_tokenizer(WORDS, single=TEXT, pair=PAIR).save(str(hub / "tokenizer.json"))
    (hub / SENTENCE).unlink()
    write_json(hub / "config.json", {"model_type": "deberta-v2", "max_position_embeddings": 8})
    return hub


def ids(folder: Path, text: str | tuple[str, str]) -> list[int]:
    (found,) = load_encoder(open_artifact(folder)).encode([text])
    return found.ids


@pytest.mark.parametrize("name", TRANSFORMER_FILES)
def test_length_and_lower_case_are_read_from_every_name(texts: Path, name: str) -> None:
    write_json(texts / name, {"max_seq_length": 5, "do_lower_case": True})
    assert ids(texts, "A B c a b") == [CLS, A, B, C, SEP]
    write_json(texts / name, {"max_seq_length": 4, "do_lower_case": False})
    assert ids(texts, "A B c a b") == [CLS, 7, 8, SEP]


@pytest.mark.parametrize(
    ("content", "length"),
    [
        ({"processing_kwargs": {"text": {"max_length": 4}}, "max_seq_length": 6}, 4),
        ({"processing_kwargs": {"common": {"max_length": 5}, "text": {"max_length": 4}}}, 5),
        ({"tokenizer_args": {"model_max_length": 4}, "max_seq_length": 6}, 4),
        ({"processor_kwargs": {"model_max_length": 5}}, 5),
        ({"max_seq_length": 100}, 8),  # no more than the positions
        ({}, 8),
    ],
)
def test_length_by_precedence_within_the_positions(
    texts: Path, content: dict[str, Any], length: int
) -> None:
    write_json(texts / SENTENCE, content)
    assert len(ids(texts, "a b c " * 9)) == length


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "roformer", "max_position_embeddings": 8, "rotary_value": False},
        {"model_type": "gptj", "n_positions": 8, "rotary_dim": 4},
    ],
)
def test_table_of_rotary_angles_limits_a_stated_length(texts: Path, config: dict[str, Any]) -> None:
    write_json(texts / "config.json", config)
    write_json(texts / SENTENCE, {"max_seq_length": 12})
    assert len(ids(texts, "a b c " * 9)) == 8


def test_rotary_positions_do_not_limit_a_stated_length(texts: Path) -> None:
    config = {"model_type": "qwen3", "max_position_embeddings": 8, "rope_parameters": {}}
    write_json(texts / "config.json", config)
    assert len(ids(texts, "a b c " * 9)) == 8
    write_json(texts / SENTENCE, {"max_seq_length": 12})
    assert len(ids(texts, "a b c " * 9)) == 12


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (TOKENIZER, {"truncation_side": "left"}),
        (SENTENCE, {"tokenizer_args": {"truncation_side": "left"}}),
    ],
)
def test_truncation_at_the_left_equals_that_of_tokenizers(
    texts: Path, file: str, content: dict[str, Any]
) -> None:
    write_json(texts / file, content)
    assert ids(texts, "a b c a b c b") == [CLS, B, C, A, B, C, B, SEP]
    own = Tokenizer.from_file(str(texts / "tokenizer.json"))
    own.enable_truncation(8, strategy="longest_first", direction="left")
    for pair in (("a b c a", "c c"), ("a b", "a b c a b c"), ("a b c", "a b c b"), ("a", "b")):
        assert ids(texts, pair) == own.encode(*pair).ids


def test_truncation_side_of_tokenizer_json_counts_if_nothing_else_does(texts: Path) -> None:
    own = Tokenizer.from_file(str(texts / "tokenizer.json"))
    own.enable_truncation(100, direction="left")
    own.save(str(texts / "tokenizer.json"))
    assert ids(texts, "a b c a b c b") == [CLS, B, C, A, B, C, B, SEP]
    write_json(texts / TOKENIZER, {"truncation_side": "right"})
    assert ids(texts, "a b c a b c b") == [CLS, A, B, C, A, B, C, SEP]
    write_json(texts / TOKENIZER, {"truncation_side": "middle"})
    with raises(InvalidModel, "export.config", "truncation_side"):
        ids(texts, "a")


@pytest.mark.parametrize(
    ("config", "model", "found"),
    [
        ({"tokenizer_class": "BertTokenizerFast", "do_lower_case": True}, {}, [CLS, A, B, SEP]),
        ({"tokenizer_class": "BertTokenizer"}, {}, [CLS, A, B, SEP]),
        ({"tokenizer_class": "BertTokenizer", "do_lower_case": False}, {}, [CLS, 7, 8, SEP]),
        (
            {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": True},
            {"model_type": "bert"},
            [CLS, 7, 8, SEP],
        ),
        ({}, {"model_type": "bert"}, [CLS, A, B, SEP]),
        ({"do_lower_case": False}, {"model_type": "bert"}, [CLS, 7, 8, SEP]),
        ({}, {"model_type": "bert", "tokenizer_class": "RobertaTokenizer"}, [CLS, 7, 8, SEP]),
        ({}, {"model_type": "llama"}, [CLS, 7, 8, SEP]),
    ],
)
def test_lower_case_of_bert_is_that_of_tokenizer_config(
    texts: Path, config: dict[str, Any], model: dict[str, Any], found: list[int]
) -> None:
    """As in transformers: tokenizer.json has another normalizer, or none."""
    own = Tokenizer.from_file(str(texts / "tokenizer.json"))
    own.normalizer = normalizers.BertNormalizer(lowercase=False)
    own.save(str(texts / "tokenizer.json"))
    write_json(texts / TOKENIZER, config)
    write_json(texts / "config.json", model)
    assert ids(texts, "A B") == found


@pytest.mark.parametrize("name", ["RobertaTokenizerFast", "GPT2Tokenizer", "OtherTokenizer"])
@pytest.mark.parametrize("stated", [True, False, None])
def test_space_before_a_text_is_that_of_tokenizer_config(
    texts: Path, name: str, stated: bool | None
) -> None:
    """As in transformers, for GPT-2's family only: tokenizer.json says the opposite."""
    words = {"[UNK]": 0, "a": 1, "Ġa": 2}
    own = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=not stated)
    own.save(str(texts / "tokenizer.json"))
    settings = {} if stated is None else {"add_prefix_space": stated}
    write_json(texts / TOKENIZER, {"tokenizer_class": name, **settings})
    is_added = not stated if name == "OtherTokenizer" else bool(stated)
    assert ids(texts, "a a") == [2 if is_added else 1, 2]


@pytest.mark.parametrize(
    "tokens",
    [
        {"additional_special_tokens": ["b"]},
        {"extra_special_tokens": [{"content": "b", "lstrip": False}]},
        {"extra_special_tokens": {"marker": "b", "other": "absent"}},
    ],
)
def test_special_tokens_of_tokenizer_config_are_found_inside_words(
    texts: Path, tokens: dict[str, Any]
) -> None:
    assert B not in ids(texts, "aba")
    write_json(texts / TOKENIZER, tokens)
    assert ids(texts, "aba") == [CLS, A, B, A, SEP]
    write_json(texts / TOKENIZER, {"additional_special_tokens": "b"})
    with raises(InvalidModel, "export.config", "additional_special_tokens"):
        ids(texts, "a")


@pytest.mark.parametrize(
    ("name", "settings", "key"),
    [
        ("AlbertTokenizer", {"do_lower_case": False}, "do_lower_case"),
        ("AlbertTokenizerFast", {"keep_accents": True}, "keep_accents"),
        ("DebertaV2Tokenizer", {"do_lower_case": False}, "do_lower_case"),
        ("DebertaV2Tokenizer", {"split_by_punct": True}, "split_by_punct"),
        ("XLMRobertaTokenizer", {"add_prefix_space": False}, "add_prefix_space"),
        (None, {"do_lower_case": False}, "do_lower_case"),
        ("AlbertTokenizer", {"do_lower_case": True, "keep_accents": False}, None),
        ("DebertaV2Tokenizer", {"do_lower_case": True, "split_by_punct": False}, None),
        ("AlbertTokenizer", {}, None),
        ("PreTrainedTokenizerFast", {"do_lower_case": False}, None),
    ],
)
def test_keys_that_contradict_tokenizer_json_are_refused(
    texts: Path, name: str | None, settings: dict[str, Any], key: str | None
) -> None:
    own = Tokenizer.from_file(str(texts / "tokenizer.json"))
    steps = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    own.normalizer = normalizers.Sequence(steps)
    own.save(str(texts / "tokenizer.json"))
    write_json(texts / TOKENIZER, {**({"tokenizer_class": name} if name else {}), **settings})
    write_json(texts / "config.json", {"model_type": "albert"})
    if key is None:
        assert ids(texts, "A B") == [CLS, A, B, SEP]
        return
    with raises(InvalidModel, "text.contradiction", key):
        ids(texts, "A B")


def test_flags_of_added_tokens_are_those_of_tokenizer_config(texts: Path) -> None:
    """As in transformers: [SEP] takes the space before it, and is part of no word."""
    own = Tokenizer.from_file(str(texts / "tokenizer.json"))
    own.add_special_tokens(["[SEP]"])
    own.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    own.save(str(texts / "tokenizer.json"))
    unknown = own.token_to_id("[UNK]")
    assert ids(texts, "a [SEP]") == [CLS, A, unknown, SEP, SEP]
    stated = {"content": "[SEP]", "lstrip": True, "special": True, "normalized": False}
    write_json(texts / TOKENIZER, {"added_tokens_decoder": {str(SEP): stated}})
    assert ids(texts, "a [SEP]") == [CLS, A, SEP, SEP]


@pytest.mark.parametrize(
    ("number", "entry", "code"),
    [
        ("99", {"content": "new"}, "text.contradiction"),
        ("x", {"content": "new"}, "text.tokenizer_failed"),
        ("0", {}, "text.tokenizer_failed"),
        ("0", {"content": 3}, "text.tokenizer_failed"),
        ("0", {"content": "a", "lstrip": "yes"}, "text.tokenizer_failed"),
        ("0", [], "export.config"),
    ],
)
def test_added_tokens_that_are_wrong_are_refused(
    texts: Path, number: str, entry: object, code: str
) -> None:
    write_json(texts / TOKENIZER, {"added_tokens_decoder": {number: entry}})
    with raises(InvalidModel, code):
        ids(texts, "a")


def test_added_token_with_the_next_id_is_added(texts: Path) -> None:
    size = Tokenizer.from_file(str(texts / "tokenizer.json")).get_vocab_size()
    stated = {str(size): {"content": "<new>", "special": True}}
    write_json(texts / TOKENIZER, {"added_tokens_decoder": stated})
    assert ids(texts, "a <new>") == [CLS, A, size, SEP]


@pytest.mark.export
def test_tokenizers_of_bert_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    classes = {kind: getattr(transformers, name or "", None)
               for kind, name in TOKENIZER_MAPPING_NAMES.items()}  # fmt: skip
    bert = transformers.BertTokenizer
    found = {
        kind for kind, one in classes.items() if isinstance(one, type) and issubclass(one, bert)
    }
    assert found <= BERT_MODELS
    listed = {kind for kind, name in TOKENIZER_MAPPING_NAMES.items()
              if str(name).removesuffix("Fast") in BERT_TOKENIZERS}  # fmt: skip
    assert listed == BERT_MODELS
