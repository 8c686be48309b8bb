from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser
from pydantic import ValidationError
from starlette.testclient import TestClient

from attnserve.models.artifact import open_artifact
from attnserve.serving.loaded_model import Model
from graph_passes.errors import InvalidModel
from service.api.texts import TextSimilarityRequest
from service.errors import UnsupportedTask
from tests.errors import raises
from tests.service.conftest import HeldRuns
from tests.service.tiny import (
    CLASSIFIER,
    cosine,
    hidden_states,
    ids_request,
    make_tokenizer,
    mean,
    write_classifier,
    write_encoder,
    write_model,
)
from tests.word_tokenizer import panicking

# Vectors as wide as their text has tokens.
AS_WIDE_AS_LONG = """
<ir_version: 10, opset_import: ["": 18]>
wide (int64[batch, sequence] input_ids) => (float[batch, width] sentence_embedding) {
    sentence_embedding = Cast<to = 1>(input_ids)
}
"""


@pytest.mark.parametrize(
    ("record", "size"), [({}, 4), ({"dimensions": 2}, 2)], ids=["graph", "artifact"]
)
def test_embed_too_large_dimensions_are_refused_before_the_run(
    start: Callable[..., TestClient],
    tmp_path: Path,
    hold: Callable[[], HeldRuns],
    record: dict[str, int],
    size: int,
) -> None:
    client = start(write_encoder(tmp_path / "m", **record))
    held = hold()
    held.go.set()
    for path, body, status in (
        ("/texts/embed", {"inputs": "a"}, 422),
        ("/embed", {"inputs": "a"}, 422),
        ("/v1/embeddings", {"model": "m", "input": "a"}, 400),
    ):
        refused = client.post(path, json={**body, "dimensions": size + 1})
        assert refused.status_code == status
        assert f"have {size}" in refused.text
    assert held.started == 0
    assert client.post("/embed", json={"inputs": "a", "dimensions": size}).status_code == 200
    assert held.started == 1


def test_embed_too_large_dimensions_of_unknown_size_are_refused_after_the_run(
    start: Callable[..., TestClient], tmp_path: Path, hold: Callable[[], HeldRuns]
) -> None:
    path = write_model(tmp_path / "wide.onnx", AS_WIDE_AS_LONG, tokenizer=True)
    client = start(path)
    held = hold()
    held.go.set()
    for dimensions, status in ((3, 200), (4, 422)):
        body = {"inputs": "a", "dimensions": dimensions}
        assert client.post("/texts/embed", json=body).status_code == status
    assert held.started == 2


def test_embed_dimensions_of_a_classifier_are_an_unsupported_task(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    client = start(write_classifier(tmp_path / "c"))
    refused = client.post("/texts/embed", json={"inputs": "a", "dimensions": 9})
    assert (refused.status_code, "no embeddings" in refused.text) == (404, True)


def test_embed_averages_tokens_without_padding(client: TestClient) -> None:
    body = client.post("/texts/embed", json={"inputs": ["a b c", "d"], "truncate": True}).json()
    assert body["model"] == "tiny"
    assert body["usage"] == {"tokens": 8}  # with two special tokens per text
    expected = [mean([2, 4, 5, 6, 3]), mean([2, 7, 3])]
    np.testing.assert_allclose(body["embeddings"], expected, rtol=1e-6, atol=1e-6)
    single = client.post("/texts/embed", json={"inputs": "d"}).json()
    assert single["embeddings"] == body["embeddings"][1:]


def test_embed_empty_text_is_its_special_tokens(client: TestClient) -> None:
    body = client.post("/texts/embed", json={"inputs": ""}).json()
    assert body["usage"] == {"tokens": 2}
    np.testing.assert_allclose(body["embeddings"], [mean([2, 3])], rtol=1e-6, atol=1e-6)


def test_embed_long_text_is_truncated_or_refused(client: TestClient) -> None:
    long = " ".join("abcd" * 5)
    cut = client.post("/texts/embed", json={"inputs": long})
    assert cut.json()["usage"] == {"tokens": 8}
    np.testing.assert_allclose(
        cut.json()["embeddings"], [mean([2, 4, 5, 6, 7, 4, 5, 3])], rtol=1e-6, atol=1e-6
    )
    refused = client.post("/texts/embed", json={"inputs": ["a", long], "truncate": False})
    assert refused.status_code == 422
    assert refused.json()["error"].startswith("text 1 has 22 tokens, more than the limit of 8")


@pytest.mark.parametrize("normalize", [True, False])
def test_embed_uses_pooling_of_artifact(
    start: Callable[..., TestClient], tmp_path: Path, normalize: bool
) -> None:
    model = write_encoder(tmp_path / "model", pooling="cls", normalize=normalize)
    (vector,) = start(model).post("/texts/embed", json={"inputs": "a"}).json()["embeddings"]
    first = hidden_states(np.array([[2, 4, 3]]))[0, 0]
    expected = first / np.linalg.norm(first) if normalize else first
    np.testing.assert_allclose(vector, expected, rtol=1e-6, atol=1e-6)


# -- /texts/predict ----------------------------------------------------------------------------


def test_predict_orders_classes_by_score(start: Callable[..., TestClient], tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "c", id2label={"0": "A", "1": "B", "2": "C"})
    answer = start(folder).post("/texts/predict", json={"inputs": ["b b c", "a"]})
    assert answer.status_code == 200, answer.text
    first, second = answer.json()["predictions"]
    assert [one["label"] for one in first] == ["B", "C", "A"]
    assert [one["label"] for one in second] == ["A", "B", "C"]  # a tie keeps its order
    powers = np.exp([2, 1, 0])
    np.testing.assert_allclose([one["score"] for one in first], powers / powers.sum(), rtol=1e-6)
    assert answer.json()["usage"] == {"tokens": 8}
    assert int(answer.headers["x-tokens"]) == 8


def test_predict_several_labels_have_sigmoids(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    client = start(write_classifier(tmp_path / "c", activation="sigmoid"))
    (found,) = client.post("/texts/predict", json={"inputs": "b b c"}).json()["predictions"]
    expected = 1 / (1 + np.exp([-2.0, -1, 0]))
    np.testing.assert_allclose([one["score"] for one in found], expected, rtol=1e-6)


def test_predict_takes_the_output_that_the_record_names(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    record = {"output": "probs", "activation": "identity"}
    folder = write_classifier(tmp_path / "c", **record)
    write_model(folder / "model.onnx", CLASSIFIER.replace("logits", "probs"))
    answer = start(folder).post("/texts/predict", json={"inputs": "b b c"})
    assert answer.status_code == 200, answer.text
    assert [one["score"] for one in answer.json()["predictions"][0]] == [2, 1, 0]


def test_predict_labels_come_from_config_or_are_numbers(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    folder = write_classifier(tmp_path / "c")
    body = {"inputs": "c", "top_k": 1}
    (found,) = start(folder).post("/texts/predict", json=body).json()["predictions"]
    assert [one["label"] for one in found] == ["2"]
    (folder / "config.json").write_text('{"id2label": {"2": "sea"}}')
    (found,) = start(folder).post("/texts/predict", json=body).json()["predictions"]
    assert [one["label"] for one in found] == ["sea"]


def test_predict_model_without_classes_is_not_found(client: TestClient) -> None:
    answer = client.post("/texts/predict", json={"inputs": "a"})
    assert answer.status_code == 404
    assert answer.json()["error"].startswith("tiny has no classes")
    assert "`output`" in answer.text


# -- /texts/similarity ----------------------------------------------------------------------------


def test_similarity_of_pairs_and_of_one_source(client: TestClient) -> None:
    expected = [1.0, cosine([2, 4, 3], [2, 5, 6, 3])]
    many = client.post("/texts/similarity", json={"source": "a", "targets": ["a", "b c"]})
    np.testing.assert_allclose(many.json()["similarities"], expected, rtol=1e-5)
    assert many.json()["usage"] == {"tokens": 7}  # repeated texts are run once
    pairs = client.post("/texts/similarity", json={"pairs": [["a", "a"], ["b c", "a"]]})
    np.testing.assert_allclose(pairs.json()["similarities"], expected, rtol=1e-5)
    repeated = client.post(
        "/texts/similarity", json={"source": "a", "targets": ["a", "b c"] * 5000}
    )
    np.testing.assert_allclose(repeated.json()["similarities"], expected * 5000, rtol=1e-5)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "expected either 'pairs', or 'source' and 'targets'"),
        ({"source": "a"}, "expected either"),
        ({"targets": ["a"]}, "expected either"),
        ({"pairs": [["a", "b"]], "source": "a", "targets": ["b"]}, "expected either"),
        ({"pairs": []}, "pairs: List should have at least 1 item"),
        ({"pairs": [["a"]]}, "pairs.0: List should have at least 2 items"),
        ({"pairs": [["a", "b", "c"]]}, "pairs.0: List should have at most 2 items"),
        ({"source": "a", "targets": []}, "targets: List should have at least 1 item"),
        ({"source": "a", "targets": ["b"] * 10_001}, "targets: List should have at most 10000"),
        ({"pairs": [["a", "b"]] * 10_001}, "pairs: List should have at most 10000"),
    ],
)
def test_similarity_invalid_body_is_refused(client: TestClient, body: Any, text: str) -> None:
    answer = client.post("/texts/similarity", json=body)
    assert answer.status_code == 422
    assert text in answer.json()["error"]


def test_similarity_with_many_errors_is_refused_at_once(client: TestClient) -> None:
    """The error of each item would take memory, and block the event loop."""
    for body in ({"source": "a", "targets": [1] * 300_000}, {"pairs": [[]] * 300_000},
                 {"source": "a"} | {f"x{i}": 0 for i in range(100_000)}):  # fmt: skip
        with pytest.raises(ValidationError) as caught:
            TextSimilarityRequest.model_validate(body)
        assert caught.value.error_count() == 1
        answer = client.post("/texts/similarity", json=body)
        assert answer.status_code == 422 and len(answer.content) < 300


def test_null_is_a_field_that_is_left_out(client: TestClient) -> None:
    for path, body in (
        ("/texts/embed", {"inputs": "a", "truncate": None, "dimensions": None}),
        ("/v1/embeddings", {"model": "tiny", "input": "a", "encoding_format": None}),
    ):
        assert client.post(path, json=body).status_code == 200
    assert client.post("/texts/embed", json={"inputs": None}).status_code == 422
    ids = {"shape": [1, 3], "datatype": "INT64", "data": [2, 4, 3], "parameters": None}
    inputs = [{"name": name, **ids} for name in ("input_ids", "attention_mask")]
    body = {"inputs": inputs, "parameters": None, "outputs": None, "id": None}
    assert client.post("/v2/models/tiny/infer", json=body).status_code == 200


# -- /texts/tokenize ----------------------------------------------------------------------------


def test_tokenize_returns_ids_with_special_tokens(client: TestClient) -> None:
    body = client.post("/texts/tokenize", json={"inputs": ["a b", ""]}).json()
    assert body == {"tokens": [[2, 4, 5, 3], [2, 3]], "model": "tiny", "usage": {"tokens": 6}}
    long = client.post("/texts/tokenize", json={"inputs": "a " * 9})
    assert long.status_code == 422
    cut = client.post("/texts/tokenize", json={"inputs": "a " * 9, "truncate": True})
    assert len(cut.json()["tokens"][0]) == 8


def test_tokenize_is_no_inference(client: TestClient) -> None:
    def inferences() -> int:
        (stats,) = client.get("/v2/models/tiny/stats").json()["model_stats"]
        return stats["inference_stats"]["success"]["count"]

    before = inferences()
    client.post("/texts/tokenize", json={"inputs": "a"})
    assert inferences() == before


# -- which model ----------------------------------------------------------------------------------


def test_embed_selects_model_and_version_by_name(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    write_encoder(tmp_path / "one" / "1")
    write_encoder(tmp_path / "one" / "2", normalize=True)
    write_encoder(tmp_path / "other")
    client = start(tmp_path)

    def norm(**which: str) -> float:
        answer = client.post("/texts/embed", json={"inputs": "a", **which})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-model"] == which["model"]
        return float(np.linalg.norm(answer.json()["embeddings"][0]))

    assert norm(model="one") == norm(model="one", version="2") == pytest.approx(1)
    assert norm(model="one", version="1") == norm(model="other") != pytest.approx(1)
    unnamed = client.post("/texts/embed", json={"inputs": "a"})
    assert unnamed.status_code == 404
    assert "several models: one, other" in unnamed.json()["error"]


# -- rows that may not share ----------------------------------------------------------------------


def test_embed_model_that_mixes_rows_runs_texts_alone(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    """The graph subtracts the mean of the batch: in a batch, a text would have another vector."""
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    mixer (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
      => (float[batch, 1] y) <int64[1] sequence_axis = {1}>
    {
        ids = Cast<to = 1>(input_ids)
        sums = ReduceSum(ids, sequence_axis)
        all = ReduceMean<keepdims = 1>(sums)
        y = Sub(sums, all)
    }
    """
    client = start(write_model(tmp_path / "mixer.onnx", text, tokenizer=True))
    model = client.app.state.repository.engine().model  # type: ignore[attr-defined]
    assert (model.rows_are_independent, model.max_rows) == (False, 1)
    answer = client.post("/texts/embed", json={"inputs": ["a", "b", "c"]})
    assert answer.json()["embeddings"] == [[0.0], [0.0], [0.0]]
    # The rows of one request of tensors run together.
    y = client.post("/v2/models/mixer/infer", json=ids_request([2], [4])).json()["outputs"][0]
    assert y["data"] == [-1.0, 1.0]


@pytest.mark.parametrize("route", ["/texts/embed", "/texts/tokenize"])
def test_tokenizer_panic_is_refused_and_others_are_served(
    start: Callable[..., TestClient], tmp_path: Path, route: str
) -> None:
    path = write_encoder(tmp_path / "m") / "tokenizer.json"
    path.write_text(panicking(make_tokenizer()))
    client = start(tmp_path / "m", timeout_ms=5000)
    for _ in range(2):
        refused = client.post(route, json={"inputs": "b"})
        assert refused.status_code == 422 and "tokenizer" in refused.json()["error"]
        assert client.post("/texts/embed", json={"inputs": "a"}).status_code == 200


# -- outputs that are not embeddings --------------------------------------------------------------

# One number per token, like the start logits of a question-answering model.
PER_TOKEN = """
<ir_version: 10, opset_import: ["": 18]>
scores (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
  => (float[batch, {axis}] start_logits)
{{ start_logits = Cast<to = 1>(input_ids) }}
"""


@pytest.mark.parametrize(
    ("axis", "texts"),
    [("sequence", ["a", "b c d"]), ("sequence", ["a"]), ("width", ["a", "b c d"])],
)
def test_texts_output_of_one_number_per_token_is_refused(
    start: Callable[..., TestClient], tmp_path: Path, axis: str, texts: list[str]
) -> None:
    path = tmp_path / "scores.onnx"
    write_model(path, PER_TOKEN.format(axis=axis), tokenizer=True)
    (tmp_path / "config.json").write_text('{"id2label": {"0": "A"}}')
    client = start(path, max_batch_tokens=4)
    for route, body, status in (
        ("/texts/embed", {"inputs": texts}, 422),
        ("/texts/predict", {"inputs": texts}, 422),
        ("/texts/similarity", {"source": texts[0], "targets": texts}, 422),
        ("/v1/embeddings", {"model": "scores", "input": texts}, 400),
    ):
        if len(texts) > 1 or axis == "sequence":
            answer = client.post(route, json=body)
            assert answer.status_code == status, (route, answer.text)


# Scores of 8 classes per text, or of a vocabulary of 8 per token.
SCORES = """
<ir_version: 10, opset_import: ["": 18]>
scores (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
  => (float[batch, {axes}] {name}) <int64[1] last = {{-1}}, int64[3] wide = {{1, 1, 8}}>
{{
    numbers = Cast<to = 1>(input_ids)
    each = Unsqueeze(numbers, last)
    tokens = Tile(each, wide)
    texts = ReduceMean<keepdims = 0>(tokens, one)
    one = Neg(last)
    {name} = Identity({source})
}}
"""


@pytest.mark.parametrize(
    ("axes", "name", "config", "route"),
    [
        ("8", "logits", {}, "/predict"),
        ("8", "output", {"id2label": {str(i): "x" for i in range(8)}}, "/predict"),
        ("sequence, 8", "logits", {}, "/v2/models/scores/infer"),
        ("sequence, 8", "lm_logits", {}, "/v2/models/scores/infer"),
        ("sequence, 8", "output", {"architectures": ["XForCausalLM"], "vocab_size": 8}, "/infer"),
        (
            "sequence, 8",
            "output",
            {"architectures": ["XForMaskedLM"], "vocab_size": 8},
            "/embed_sparse",
        ),
    ],
)
def test_embed_scores_are_refused_with_the_right_route(
    start: Callable[..., TestClient], tmp_path: Path, axes: str, name: str, config: object,
    route: str,
) -> None:  # fmt: skip
    graph = SCORES.format(axes=axes, name=name, source="tokens" if "," in axes else "texts")
    write_model(tmp_path / "scores.onnx", graph, tokenizer=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    client = start(tmp_path / "scores.onnx")
    for path, body in (
        ("/texts/embed", {"inputs": ["a", "b c"]}),
        ("/v1/embeddings", {"model": "scores", "input": "a"}),
        ("/texts/similarity", {"source": "a", "targets": ["b"]}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 404 and route in answer.text, answer.text
    app: Any = client.app
    engine = app.state.repository.engine("scores")
    with raises(UnsupportedTask, "model.no_embeddings", "scores"):
        asyncio.run(engine.run_task("embed", ["a"]))


def test_embed_reranker_names_rerank(start: Callable[..., TestClient], tmp_path: Path) -> None:
    graph = SCORES.replace("wide = {{1, 1, 8}}", "wide = {{1, 1, 1}}")
    graph = graph.format(axes="1", name="logits", source="texts")
    client = start(write_model(tmp_path / "m.onnx", graph, tokenizer=True))
    answer = client.post("/texts/embed", json={"inputs": "a"})
    assert answer.status_code == 404 and "/rerank" in answer.text


def test_embed_vector_with_names_of_classes_in_config_is_served(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    """config.json of an encoder may hold id2label of a classifier that it was made of."""
    graph = SCORES.format(axes="8", name="sentence_embedding", source="texts")
    write_model(tmp_path / "m.onnx", graph, tokenizer=True)
    (tmp_path / "config.json").write_text('{"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}')
    client = start(tmp_path / "m.onnx")
    assert client.post("/texts/embed", json={"inputs": "a"}).json()["embeddings"] == [[3] * 8]
    assert client.post("/texts/predict", json={"inputs": "a"}).status_code == 404


# Hidden states, and another output.
TWO_OUTPUTS = """
<ir_version: 10, opset_import: ["": 18]>
two (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
  => (float[batch, sequence, 2] {hidden}, float[batch, 2] {other})
  <int64[1] last = {{-1}}, int64[3] wide = {{1, 1, 2}}, float ten = {{10}}>
{{
    numbers = Cast<to = 1>(input_ids)
    each = Unsqueeze(numbers, last)
    {hidden} = Tile(each, wide)
    one = Neg(last)
    texts = ReduceMax<keepdims = 0>({hidden}, one)
    {other} = Mul(texts, ten)
}}
"""


@pytest.mark.parametrize(
    ("hidden", "other", "swapped", "vector"),
    [
        ("token_embeddings", "sentence_embedding", False, [40, 40]),
        ("last_hidden_state", "sentence_embedding", False, [40, 40]),
        ("last_hidden_state", "pooler_output", True, [3, 3]),
        ("token_embeddings", "pooler_output", True, [3, 3]),
        ("hidden", "other", False, [3, 3]),
    ],
)
def test_embed_sentence_embedding_precedes_hidden_states_and_these_other_outputs(
    start: Callable[..., TestClient], tmp_path: Path, hidden: str, other: str, swapped: bool,
    vector: list[float],
) -> None:  # fmt: skip
    model = parser.parse_model(TWO_OUTPUTS.format(hidden=hidden, other=other))
    if swapped:
        outputs = [*model.graph.output][::-1]
        del model.graph.output[:]
        model.graph.output.extend(outputs)
    onnx.save(model, tmp_path / "m.onnx")
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    client = start(tmp_path / "m.onnx")
    assert client.post("/texts/embed", json={"inputs": "a"}).json()["embeddings"] == [vector]


def test_model_with_pooler_output_in_place_of_hidden_states_is_refused(tmp_path: Path) -> None:
    """BERT's pooler is not a pooling of sentence-transformers."""
    graph = SCORES.format(axes="8", name="pooler_output", source="texts")
    write_model(tmp_path / "model.onnx", graph, tokenizer=True)
    record = tmp_path / "attnserve.json"
    record.write_text('{"pooling": "cls"}')
    with raises(InvalidModel, "model.no_output", "pooler_output"):
        Model(open_artifact(tmp_path))
    record.write_text('{"pooling": "none"}')
    assert Model(open_artifact(tmp_path)).text_output("embed") == "pooler_output"


# Rows whose second token is "d" have no output.
FEWER_ROWS = """
<ir_version: 10, opset_import: ["": 18]>
fewer (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
  => (float[kept, width] y) <int64 one = {1}, int64 seven = {7}>
{
    second = Gather<axis = 1>(input_ids, one)
    is_seven = Equal(second, seven)
    is_kept = Not(is_seven)
    numbers = Cast<to = 1>(input_ids)
    y = Compress<axis = 0>(numbers, is_kept)
}
"""


def test_embed_output_with_fewer_rows_is_refused(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    path = write_model(tmp_path / "fewer.onnx", FEWER_ROWS, tokenizer=True)
    client = start(path, timeout_ms=2000)
    assert client.post("/texts/embed", json={"inputs": ["a", "b"]}).status_code == 200
    assert client.post("/texts/embed", json={"inputs": ["a", "d"]}).status_code == 422
    assert client.post("/texts/embed", json={"inputs": "d"}).status_code == 422
