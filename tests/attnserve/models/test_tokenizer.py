"""Tokenization, batches, pooling and text files."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from attnserve.literals import Padding, Side
from attnserve.models.artifact import open_artifact
from attnserve.models.embeddings import pool
from attnserve.models.tokenizer import Encoding, TextEncoder, TextInput, text_input
from attnserve.models.tokenizer_files import load_encoder
from graph_passes.errors import InvalidArgument, InvalidData, InvalidModel
from tests.attnserve.models.files import encoder_of
from tests.errors import raises
from tests.word_tokenizer import PAIR, TEXT, panicking, word_tokenizer

INPUTS = {
    "input_ids": TextInput(np.dtype(np.int64)),
    "attention_mask": TextInput(np.dtype(np.int64)),
    "token_type_ids": TextInput(np.dtype(np.int32)),
}
VOCABULARY = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "a": 5, "b": 6, "c": 7}
CLS, SEP, PAD = 2, 3, 0


@pytest.fixture
def tokenizer() -> Tokenizer:
    """a -> 5, b -> 6, c -> 7; texts become [CLS] ... [SEP]."""
    return word_tokenizer(VOCABULARY, single=TEXT)


@pytest.fixture
def pair_tokenizer() -> Tokenizer:
    """The same for pairs: they become [CLS] ... [SEP] ... [SEP]."""
    return word_tokenizer(VOCABULARY, single=TEXT, pair=PAIR)


@pytest.fixture
def encoder(tokenizer: Tokenizer) -> TextEncoder:
    return TextEncoder(tokenizer, pad_id=PAD, max_length=4)


def ids(encodings: list[Encoding]) -> list[list[int]]:
    return [encoding.ids for encoding in encodings]


# --- encode -------------------------------------------------------------------------------------


def test_encode_truncation_keeps_special_tokens(
    encoder: TextEncoder,
) -> None:
    assert ids(encoder.encode(["a b", "a b c"])) == [[CLS, 5, 6, SEP], [CLS, 5, 6, SEP]]


def test_encode_without_truncation_long_text_is_refused(
    encoder: TextEncoder,
) -> None:
    assert len(encoder.encode(["a b"], truncate=False)[0]) == 4
    with raises(InvalidData, "text.too_long", "text 1 has 5 tokens", 4):
        encoder.encode(["a", "a b c"], truncate=False)


def test_encode_given_encoding_is_kept_or_truncated(encoder: TextEncoder) -> None:
    given = Encoding([9, 8, 7, 6, 5], [0] * 5)
    assert ids(encoder.encode(["a", given, "b"])) == [[CLS, 5, SEP], [9, 8, 7, 6], [CLS, 6, SEP]]
    with raises(InvalidData, "text.too_long", "text 1 has 5 tokens", 4):
        encoder.encode(["a", given], truncate=False)
    with raises(InvalidData, "text.empty", "text 0"):
        encoder.encode([Encoding([], [])])


def test_encode_max_length_overrides_the_default(encoder: TextEncoder) -> None:
    assert ids(encoder.encode(["a b c"], max_length=3)) == [[CLS, 5, SEP]]
    assert ids(encoder.encode(["a b c"], max_length=9)) == [[CLS, 5, 6, 7, SEP]]


@pytest.mark.parametrize("length", [2, 1, 0, -1])
def test_encode_length_of_special_tokens_only_is_refused(
    length: int, encoder: TextEncoder, tokenizer: Tokenizer
) -> None:
    with raises(InvalidArgument, "text.max_length", "at least 3"):
        encoder.encode(["a"], max_length=length)
    with pytest.raises(InvalidArgument):
        TextEncoder(tokenizer, pad_id=PAD, max_length=length)


def test_encode_truncates_special_tokens_inside_a_text(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens(["[SEP]"])
    encoder = TextEncoder(tokenizer, pad_id=PAD)
    assert ids(encoder.encode(["a [SEP] [SEP] b"], max_length=4)) == [[CLS, 5, SEP, SEP]]


def test_encoder_disables_truncation_and_padding_of_the_tokenizer(tokenizer: Tokenizer) -> None:
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=16)
    assert ids(TextEncoder(tokenizer, pad_id=PAD).encode(["a b c"])) == [[CLS, 5, 6, 7, SEP]]


def test_encode_empty_text_is_special_tokens_or_refused(
    encoder: TextEncoder, tokenizer: Tokenizer
) -> None:
    assert ids(encoder.encode([""])) == [[CLS, SEP]]
    assert encoder.encode([]) == []
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    with raises(InvalidData, "text.empty", "text 1"):
        TextEncoder(tokenizer, pad_id=PAD).encode(["a", " "])


@pytest.mark.parametrize("text", ["\ud800", 7, None, b"a"])
def test_encode_other_than_unicode_text_is_refused(text: str, encoder: TextEncoder) -> None:
    with raises(InvalidData, "text.not_unicode"):
        encoder.encode(["a", text])


def test_encode_tokenizer_panics_is_invalid_data_and_later_texts_are_encoded(
    tokenizer: Tokenizer,
) -> None:
    encoder = TextEncoder(Tokenizer.from_str(panicking(tokenizer)), pad_id=PAD)
    with raises(InvalidData, "text.tokenizer_failed", "chunk size must be non-zero"):
        encoder.encode(["b"])
    assert ids(encoder.encode(["a"])) == [[CLS, SEP]]


def test_encode_unknown_token_missing_is_invalid_data(tokenizer: Tokenizer) -> None:
    content = json.loads(tokenizer.to_str())
    del content["model"]["vocab"]["[UNK]"]
    encoder = TextEncoder(Tokenizer.from_str(json.dumps(content)), pad_id=PAD)
    with raises(InvalidData, "text.tokenizer_failed", "[UNK]"):
        encoder.encode(["new"])


PANICS = {
    "when it is read": (
        "text.not_tokenizer",
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    ),
    "when it encodes": (
        "text.tokenizer_failed",
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
    ),
}


@pytest.mark.parametrize("when", PANICS)
def test_load_encoder_that_panics_is_invalid_model(
    tokenizer: Tokenizer, tmp_path: Path, when: str
) -> None:
    path = tmp_path / "tokenizer.json"
    code, settings = PANICS[when]
    path.write_text(json.dumps(json.loads(tokenizer.to_str()) | settings))
    with raises(InvalidModel, code, "tokenizer.json"):
        encoder_of(path)


@given(st.lists(st.sampled_from("abc"), max_size=12), st.integers(3, 9))
def test_encode_truncation_equals_tokenizers(words: list[str], limit: int) -> None:
    vocabulary = {"[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "a": 5, "b": 6, "c": 7}
    template = "[CLS] $A [SEP] [SEP]"
    ours, theirs = (word_tokenizer(vocabulary, single=template) for _ in range(2))
    theirs.enable_truncation(limit + 1)
    text = " ".join(words)
    encoder = TextEncoder(ours, pad_id=PAD, max_length=limit + 1)
    assert encoder.encode([text])[0].ids == theirs.encode(text).ids


def test_encode_is_thread_safe_for_different_lengths(encoder: TextEncoder) -> None:
    wrong: list[int] = []

    def work(length: int) -> None:
        for _ in range(200):
            if len(encoder.encode(["a b c a b c a b c"], max_length=length)[0]) != length:
                wrong.append(length)

    threads = [threading.Thread(target=work, args=(length,)) for length in (3, 5, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- batches ------------------------------------------------------------------------------------


def test_batch_inputs_are_padded_in_the_types_of_the_model(
    encoder: TextEncoder,
) -> None:
    batch = encoder.batch_inputs(encoder.encode(["a", "a b"]), INPUTS)
    assert batch["input_ids"].tolist() == [[CLS, 5, SEP, PAD], [CLS, 5, 6, SEP]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch["token_type_ids"].tolist() == [[0] * 4] * 2
    assert {name: TextInput(array.dtype) for name, array in batch.items()} == INPUTS


def test_batch_inputs_fills_inputs_of_the_model_only(encoder: TextEncoder) -> None:
    wanted = {"input_ids": INPUTS["input_ids"], "attention_mask": INPUTS["attention_mask"]}
    assert encoder.batch_inputs(encoder.encode(["a"]), wanted).keys() == wanted.keys()


def test_batch_inputs_unknown_input_is_refused(encoder: TextEncoder) -> None:
    with raises(InvalidData, "text.unknown_input", "'pixel_values'"):
        encoder.batch_inputs(encoder.encode(["a"]), {"pixel_values": TextInput(np.dtype(np.int64))})


@pytest.mark.parametrize(
    ("name", "shape", "cache"),
    [
        ("past_key_values.0.key", ["batch", 2, "past", 8], (2, 0, 8)),
        ("past_key_self_3", ["batch", 8, 16, None], (8, 16, 0)),  # keys are transposed
        ("past_key_values.0.encoder.key", ["batch", 2, "source", 8], None),
        ("past_1", [2, "batch", 4, "past", 8], None),  # the batch is not the first axis
        ("past_0", ["rows", 64, "past"], None),  # rows are those of all heads
        ("past_mask", ["batch", "past"], None),
        ("hidden", ["batch", "sequence", 8], None),
    ],
)
def test_text_input_of_a_cache_is_empty(
    name: str, shape: list[object], cache: tuple[int, ...] | None, encoder: TextEncoder
) -> None:
    found = text_input(name, np.dtype(np.float16), shape)
    assert found.cache == cache
    if cache is not None:
        array = encoder.batch_inputs(encoder.encode(["a", "b", "a b"]), {**INPUTS, name: found})[
            name
        ]
        assert array.shape == (3, *cache) and array.dtype == np.float16


def test_batch_inputs_without_mask_need_equal_lengths(encoder: TextEncoder) -> None:
    wanted = {"input_ids": INPUTS["input_ids"]}
    assert encoder.batch_inputs(encoder.encode(["a", "b"]), wanted)["input_ids"].shape == (2, 3)
    with raises(InvalidData, "text.no_mask"):
        encoder.batch_inputs(encoder.encode(["a", "a b"]), wanted)


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 7))
def test_batches_cover_every_text_longest_first(lengths: list[int], size: int) -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    encoder = TextEncoder(tokenizer, pad_id=PAD)
    encodings = [Encoding([n] * n, [0] * n) for n in lengths]
    seen: list[int] = []
    widths: list[int] = []
    for indices, inputs in encoder.batches(encodings, size, INPUTS):
        assert 1 <= len(indices) <= size
        assert inputs["attention_mask"].sum(axis=1).tolist() == [lengths[i] for i in indices]
        seen.extend(indices.tolist())
        widths.append(inputs["input_ids"].shape[1])
    assert sorted(seen) == list(range(len(lengths)))
    assert widths == sorted(widths, reverse=True)


def test_batches_size_below_one_is_refused(encoder: TextEncoder) -> None:
    with raises(InvalidArgument, "text.batch_size", 0):
        list(encoder.batches(encoder.encode(["a"]), 0, INPUTS))


# --- load_encoder -------------------------------------------------------------------------------


def save(tokenizer: Tokenizer, folder: Path, **config: object) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_load_encoder_of_file_and_folder_are_equal(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save(tokenizer, tmp_path, model_max_length=4)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        encoder = encoder_of(path)
        assert ids(encoder.encode(["a b c"])) == [[CLS, 5, 6, SEP]]
        assert encoder.max_length == 4
    assert encoder_of(tmp_path, max_length=5).max_length == 5


@pytest.mark.parametrize("stated", [10**30, 1e30, None, "512", 0])
def test_load_encoder_invalid_max_length_is_no_limit(
    stated: object, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    assert encoder_of(save(tokenizer, tmp_path, model_max_length=stated)).max_length is None


def test_positions_of_the_model_limit_texts_if_nothing_else_does(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save(tokenizer, tmp_path, model_max_length=10**30)
    (tmp_path / "model.onnx").touch()
    for config, expected in (
        ({"max_position_embeddings": 6}, 6),
        ({"max_position_embeddings": 8, "model_type": "roberta", "pad_token_id": 1}, 6),
        ({}, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert load_encoder(open_artifact(tmp_path)).max_length == expected
    (tmp_path / "attnserve.json").write_text('{"max_length": 5}')
    assert load_encoder(open_artifact(tmp_path)).max_length == 5


@pytest.mark.parametrize("model_type", [{"a": {}}, [], 1])
def test_model_type_that_is_no_name_is_refused(
    model_type: object, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save(tokenizer, tmp_path)
    (tmp_path / "model.onnx").touch()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with raises(InvalidModel, "export.config", "model_type"):
        load_encoder(open_artifact(tmp_path))


@pytest.mark.parametrize("pad", ["b", {"content": "b"}])
def test_load_encoder_pad_token_of_config_and_tokenizer(
    pad: object, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    assert encoder_of(save(tokenizer, tmp_path, pad_token=pad)).pad_id == 6
    tokenizer.enable_padding(pad_id=7, pad_token="c")
    assert encoder_of(save(tokenizer, tmp_path, pad_token=pad)).pad_id == 6
    assert encoder_of(save(tokenizer, tmp_path)).pad_id == 7
    # As in transformers, this file counts only without added_tokens_decoder.
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "a"}')
    assert encoder_of(save(tokenizer, tmp_path)).pad_id == 5
    assert encoder_of(save(tokenizer, tmp_path, pad_token=pad)).pad_id == 5
    found = encoder_of(save(tokenizer, tmp_path, pad_token=pad, added_tokens_decoder={}))
    assert found.pad_id == 6


def test_load_encoder_pad_token_of_the_network(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A word None is not a pad token, and the default of the key does not count."""
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"]["None"] = 8
    folder = save(Tokenizer.from_str(json.dumps(content)), tmp_path)
    (tmp_path / "model.onnx").touch()
    for config, expected in (({}, PAD), ({"pad_token_id": 7}, 7), ({"pad_token_id": -1}, PAD)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert load_encoder(open_artifact(folder)).pad_id == expected


def test_load_encoder_missing_or_damaged_is_refused(
    tmp_path: Path,
) -> None:
    with raises(InvalidData, "text.no_tokenizer", "tokenizer.json"):
        encoder_of(tmp_path)
    for content in (b"", b"{}", b"not json", b"\xff\xfe"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with raises(InvalidModel, "text.not_tokenizer") as caught:
            encoder_of(tmp_path)
        assert len(str(caught.value).splitlines()) == 2


# --- pairs, words and padding -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [(None, [0, 0, 0, 1, 1]), (["input_ids"], [0] * 5), ([*INPUTS], [0, 0, 0, 1, 1])],
)
def test_token_types_are_zeros_if_the_folder_leaves_them_out(
    names: list[str] | None, expected: list[int], pair_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    stated = {} if names is None else {"model_input_names": names}
    encoder = encoder_of(save(pair_tokenizer, tmp_path, **stated))
    fed = encoder.batch_inputs(encoder.encode([("a", "b")]), INPUTS)
    assert fed["token_type_ids"].tolist() == [expected]


@pytest.mark.parametrize("length", range(5, 16))
@pytest.mark.parametrize("sizes", [(2, 9), (9, 2), (5, 5), (6, 5), (1, 1)])
def test_encode_pair_is_truncated_as_by_tokenizers(
    length: int, sizes: tuple[int, int], pair_tokenizer: Tokenizer
) -> None:
    first, second = (" ".join("abc"[i % 3] for i in range(size)) for size in sizes)
    copy = Tokenizer.from_str(pair_tokenizer.to_str())
    encoder = TextEncoder(copy, pad_id=PAD, max_length=length)
    (found,) = encoder.encode([(first, second)])
    pair_tokenizer.enable_truncation(length, strategy="longest_first")
    expected = pair_tokenizer.encode(first, second)
    assert (found.ids, found.type_ids) == (expected.ids, expected.type_ids)


def test_encode_words_finds_first_tokens(tokenizer: Tokenizer) -> None:
    encoder = TextEncoder(tokenizer, pad_id=PAD, max_length=5)
    encoding, places = encoder.encode_words(["a b", "", "c", "a"])
    assert encoding.ids == [CLS, 5, 6, 7, SEP]
    assert places == [1, None, 3, None]  # the second word has no token, the last is truncated


@pytest.mark.parametrize(
    ("normalizer", "splitter"),
    [
        ([], pre_tokenizers.ByteLevel(add_prefix_space=False)),
        ([], pre_tokenizers.ByteLevel(add_prefix_space=True)),
        ([], pre_tokenizers.Metaspace(prepend_scheme="never")),
        ([], pre_tokenizers.Metaspace()),
        ([], pre_tokenizers.WhitespaceSplit()),
        ([normalizers.Replace(" ", "▁")], None),
        ([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")], None),
    ],
)
def test_encode_words_gives_the_tokens_of_the_text(normalizer: list[Any], splitter: Any) -> None:
    words = ["a", "b", "Ġ", "▁", "Ġa", "Ġb", "▁a", "▁b"]
    ids = {word: index for index, word in enumerate(words)}
    merges = [(first, second) for first in "Ġ▁" for second in "ab"]
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.normalizer = normalizers.Sequence(normalizer)
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    encoding, places = TextEncoder(tokenizer, pad_id=0).encode_words(["b", "a", "b"])
    assert encoding.ids == tokenizer.encode("b a b").ids and places == [0, 1, 2]


@pytest.mark.parametrize("padding", ["right", "left"])
def test_batch_inputs_padding_side_and_position_ids(padding: Padding, tokenizer: Tokenizer) -> None:
    encoder = TextEncoder(tokenizer, pad_id=PAD, padding=padding)
    integers = TextInput(np.dtype(np.int64))
    names = dict.fromkeys(("input_ids", "attention_mask", "position_ids"), integers)
    inputs = encoder.batch_inputs(encoder.encode(["a b", "c"]), names)
    rows = {name: array[1].tolist() for name, array in inputs.items()}
    if padding == "right":
        real = [True, True, True, False]
        assert rows["input_ids"] == [CLS, 7, SEP, PAD]
    else:
        real = [False, True, True, True]
        assert rows["input_ids"] == [PAD, CLS, 7, SEP]
    assert rows["attention_mask"] == [int(one) for one in real]
    assert inputs["position_ids"][0].tolist() == [0, 1, 2, 3]
    assert inputs["position_ids"][1][real].tolist() == [0, 1, 2]
    encoder = TextEncoder(tokenizer, pad_id=PAD, padding=padding, first_position=2)
    inputs = encoder.batch_inputs(encoder.encode(["a b", "c"]), names)
    assert inputs["position_ids"][1][real].tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    ("side", "given", "pair"),
    [("right", [5, 6, 7], [5, 7, 7, 6, 5, 7]), ("left", [6, 7, 5], [5, 7, 7, 6, 6, 7])],
)
def test_encode_truncates_given_ids_and_templates_at_either_side(
    side: Side, given: list[int], pair: list[int], tokenizer: Tokenizer
) -> None:
    encoder = TextEncoder(tokenizer, pad_id=PAD, max_length=3, truncation_side=side)
    assert ids(encoder.encode([Encoding([5, 6, 7, 5], [0] * 4)])) == [given]
    text = "a {query} b {document} c"
    encoder = TextEncoder(tokenizer, pad_id=PAD, max_length=6, template=text, truncation_side=side)
    assert ids(encoder.encode([("c c", "a a b")])) == [pair]


@pytest.mark.parametrize(("side", "kept"), [("right", [5, 6]), ("left", [7, 5])])
def test_truncated_ids_keep_their_special_tokens(
    side: Side, kept: list[int], encoder: TextEncoder
) -> None:
    """The ids of a text give the vector of the text."""
    given = Encoding([CLS, 5, 6, 7, 5, SEP], [0] * 6)
    text = encoder.encode(["a b c a"], side=side)
    assert ids(encoder.encode([given], side=side)) == ids(text) == [[CLS, *kept, SEP]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("template", [None, "a {query} b {document}"])
def test_truncation_takes_time_in_proportion_to_the_text(
    tokenizer: Tokenizer, side: Side, template: str | None
) -> None:
    """One document of 10,000 tokens in a template took 47 s, and nine long texts 11 s."""
    encoder = TextEncoder(
        tokenizer, pad_id=PAD, max_length=512, template=template, truncation_side=side
    )
    long = "a " * 30_000
    for text in (long, ("a", long), (long, long)):
        start = time.process_time()
        (found,) = encoder.encode([text])
        assert len(found) == 512
        assert time.process_time() - start < 10


# --- templates ----------------------------------------------------------------------------------


def test_encode_pair_fills_the_template(tokenizer: Tokenizer) -> None:
    encoder = TextEncoder(tokenizer, pad_id=PAD, template="a {query} b {document} c")
    found = encoder.encode([("c", "a"), "c c", ("", "b")])
    # The template states the special tokens of a pair; other texts have those of the tokenizer.
    assert ids(found) == [[5, 7, 6, 5, 7], [CLS, 7, 7, SEP], [5, 6, 6, 7]]
    assert encoder.special_tokens == 3
    # Braces in the texts are not places of the template.
    assert ids(encoder.encode([("{document}", "a")])) == [[5, 1, 1, 1, 6, 5, 7]]
    reverse = TextEncoder(tokenizer, pad_id=PAD, template="{document} c {query}")
    assert ids(reverse.encode([("a", "b b")])) == [[6, 6, 7, 5]]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (9, [5, 7, 7, 6, 5, 6, 5, 7]),
        (7, [5, 7, 7, 6, 5, 6, 7]),
        (5, [5, 7, 7, 6, 7]),
        (4, [5, 7, 6, 7]),
    ],
)
def test_encode_template_truncates_the_document_then_the_query(
    limit: int, expected: list[int], tokenizer: Tokenizer
) -> None:
    text = "a {query} b {document} c"
    encoder = TextEncoder(tokenizer, pad_id=PAD, max_length=limit, template=text)
    assert ids(encoder.encode([("c c", "a b a")])) == [expected]
    with raises(InvalidArgument, "text.max_length", "3 are special"):
        TextEncoder(tokenizer, pad_id=PAD, max_length=3, template=text)


# --- pool ---------------------------------------------------------------------------------------

HIDDEN = np.array([[[1.0, 2.0], [3.0, 6.0], [1e9, np.pi]]], np.float32)  # B S D
MASK = np.array([[1, 1, 0]])


def test_pool_padding_side_does_not_matter() -> None:
    flipped, mask = HIDDEN[:, [2, 0, 1]], MASK[:, [2, 0, 1]]
    for pooling, expected in (("mean", [2, 4]), ("cls", [1, 2]), ("last", [3, 6])):
        assert pool(HIDDEN, MASK, pooling, False).tolist() == [expected]
        assert pool(flipped, mask, pooling, False).tolist() == [expected]


def test_pool_dimensions_are_cut_before_vectors_are_normalized() -> None:
    vectors = np.array([[3.0, 4.0, 12.0]], np.float32)
    assert pool(vectors, MASK, "none", False, 2).tolist() == [[3, 4]]
    np.testing.assert_allclose(pool(vectors, MASK, "none", True, 2), [[0.6, 0.8]], atol=1e-7)
    for dimensions in (0, 4):
        with raises(InvalidArgument, "text.dimensions", "1 to 3"):
            pool(vectors, MASK, "none", True, dimensions)


def test_pool_pooled_output_is_unchanged() -> None:
    for pooling in ("mean", "cls", "last", "none"):
        assert pool(HIDDEN[:, 0], MASK, pooling, False).tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    ("hidden", "pooling", "code", "shape"),
    [
        (HIDDEN, "none", "text.pooling", "[1, 3, 2]"),
        (HIDDEN[0, 0], "mean", "text.pool_shape", "(2,)"),
    ],
)
def test_pool_other_shape_is_refused(
    hidden: np.ndarray, pooling: str, code: str, shape: str
) -> None:
    with raises(InvalidArgument, code, shape):
        pool(hidden, MASK, pooling, False)  # type: ignore[arg-type]


def test_pool_normalize_keeps_zero() -> None:
    vectors = pool(np.array([[3.0, 4.0], [0.0, 0.0]], np.float32), MASK, "none", True)
    np.testing.assert_allclose(vectors, [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)


def test_pool_float16_is_summed_in_float32() -> None:
    hidden = np.full((1, 8, 1), 60000, np.float16)
    pooled = pool(hidden, np.ones((1, 8)), "mean", False)
    assert pooled.dtype == np.float32
    np.testing.assert_allclose(pooled, [[60000]], rtol=1e-3)


def test_pool_row_without_tokens_is_zero() -> None:
    assert pool(HIDDEN, np.zeros((1, 3)), "mean", True).tolist() == [[0.0, 0.0]]


# --- against transformers -----------------------------------------------------------------------


def test_encode_equals_transformers(tiny_bert: Callable[..., Path]) -> None:
    import transformers

    folder = tiny_bert()
    texts = ["A man is playing a guitar.", "Dogs!", "zebra 42 xyz, the cat"]
    expected = transformers.AutoTokenizer.from_pretrained(folder)(texts)
    encodings = encoder_of(folder).encode(texts)
    assert ids(encodings) == expected["input_ids"]
    assert [encoding.type_ids for encoding in encodings] == expected["token_type_ids"]
