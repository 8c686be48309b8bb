"""Served vectors and scores of model folders equal those of sentence-transformers and transformers.

Each folder of ``tests/hub_folders.py`` is served twice: exported, and by its own ONNX file. It is
loaded by ``attnserve.integrations`` too, and by ``tests/tei_reader.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.hub_folders import CASES, LIBRARY, QUERY, TEXTS, TOKENIZER, Case, expected, write_folder
from tests.tei_reader import TeiReader

pytestmark = [
    pytest.mark.export,
    # The libraries warn about their own use of torch; what they return is compared.
    pytest.mark.filterwarnings("ignore"),
]

if find_spec("sentence_transformers") is None:
    pytest.skip("pip install 'attnserve[dev]'", allow_module_level=True)

NOT_IN_TEI = {"pairs with a prompt": "TEI puts no prompt before the query of a reranker"}
"""Folders of which text-embeddings-inference gives other scores, and why."""


@pytest.mark.parametrize("name", CASES)
def test_served_answers_equal_those_of_the_libraries(
    name: str, start: Callable[..., TestClient], tmp_path: Path
) -> None:
    from attnserve.exporters.hugging_face import export

    case, models = CASES[name], tmp_path / "models"
    write_folder(case, models / "hub")
    wanted = expected(case, models / "hub", tmp_path / "copy")
    task = None if case.kind == "embedding" else "sequence-classification"
    if case.kind == "rerank" and case.config["num_labels"] == 1:
        task = "rerank"
    export(models / "hub", models / "export", task=task, exporter="torchscript")
    client = start(models, rewrite=False)
    for model in ("export", "hub"):
        for prompt, values in wanted.items():
            if case.kind == "embedding" or values.ndim == 1:
                own = loaded(case, models / model, prompt)
                np.testing.assert_allclose(own, values, rtol=1e-4, atol=1e-4 * np.abs(values).max())
            found = served(client, case, model, prompt, values.ndim)
            if case.kind != "embedding":
                np.testing.assert_allclose(found, values, rtol=1e-4, atol=1e-4)
                continue
            norms = np.linalg.norm(found, axis=1) * np.linalg.norm(values, axis=1)
            assert ((found * values).sum(1) / norms).min() >= 0.99999, (model, prompt)
            if "dimensions" not in name:  # shortened vectors are normalized again
                np.testing.assert_allclose(found, values, atol=1e-4 * np.abs(values).max())
    if name not in NOT_IN_TEI:
        check_tei_reader(case, models / "export", client)


def check_tei_reader(case: Case, folder: Path, client: TestClient) -> None:
    """Compare what text-embeddings-inference makes of a folder with what is served by its routes.

    It keeps all dimensions, unless the request names their number.
    """
    reader = TeiReader(folder)

    def ask(route: str, **body: Any) -> Any:
        answer = client.post(f"/models/{folder.name}{route}", json={"truncate": True, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    if not reader.is_classifier:
        size = (case.files.get(LIBRARY) or {}).get("truncate_dim")
        for prompt in (None, *reader.prompts):
            found = ask("/embed", inputs=TEXTS, prompt_name=prompt, dimensions=size)
            cosines = (np.array(found) * reader.embed(TEXTS, prompt, size)).sum(1)
            assert cosines.min() >= 0.99999, prompt
        return
    pairs = [(QUERY, text) for text in TEXTS]
    if case.kind == "rerank" and case.config["num_labels"] == 1:
        ranks = ask("/rerank", query=QUERY, texts=TEXTS, raw_scores=True)
        found = [[one["score"]] for one in sorted(ranks, key=lambda one: one["index"])]
        own = reader.scores(pairs)
    else:
        predictions = ask("/predict", inputs=[[text] for text in TEXTS], raw_scores=True)
        scores = [{one["label"]: one["score"] for one in text} for text in predictions]
        found = [[one[f"LABEL_{at}"] for at in range(len(one))] for one in scores]
        own = reader.scores(TEXTS)
    np.testing.assert_allclose(found, own, atol=1e-5)


def loaded(case: Case, folder: Path, prompt: str) -> np.ndarray:
    """What a model of sentence-transformers on the runtime here gives for texts or pairs."""
    from attnserve.integrations.sentence_transformers import load

    model: Any = load(folder)
    if case.kind == "embedding":
        return np.asarray(model.encode(TEXTS, prompt_name=prompt or None))
    return np.asarray(model.predict([(QUERY, text) for text in TEXTS]))


def served(client: TestClient, case: Case, model: str, prompt: str, axes: int) -> np.ndarray:
    """The answer of the service in the form of ``expected``."""
    if case.kind == "embedding":
        named = {"prompt_name": prompt} if prompt else {}
        answer = client.post("/texts/embed", json={"model": model, "inputs": TEXTS, **named})
        assert answer.status_code == 200, answer.text
        return np.array(answer.json()["embeddings"])
    if axes == 1:
        side = case.files.get(TOKENIZER, {}).get("truncation_side", "right")  # TEI's is "right"
        cut = {"truncate": True, "truncation_direction": side}
        body = {"model": model, "query": QUERY, "texts": TEXTS, **cut}
        answer = client.post("/rerank", json=body)
        assert answer.status_code == 200, answer.text
        ranks = sorted(answer.json(), key=lambda one: one["index"])
        return np.array([one["score"] for one in ranks])
    answer = client.post("/texts/predict", json={"model": model, "inputs": TEXTS})
    assert answer.status_code == 200, answer.text
    found = [{one["label"]: one["score"] for one in text} for text in answer.json()["predictions"]]
    return np.array([[one[f"LABEL_{at}"] for at in range(len(one))] for one in found])
