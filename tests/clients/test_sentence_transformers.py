"""Stock installations of sentence-transformers run our graphs, and answer as the original does.

optimum-intel and optimum-onnx need other versions of transformers than ``constraints.txt`` has.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnserve.models.artifact import open_artifact
from attnserve.serving.loaded_model import Model
from tests.clients.environments import environment
from tests.clients.stock_sentence_transformers import scores, vectors
from tests.files import last_entry, write_json, write_lines
from tests.hub_folders import CASES, QUERY, TEXTS, WORDS, Case, write_folder

pytestmark = [
    pytest.mark.clients,
    pytest.mark.export,
    pytest.mark.filterwarnings("ignore"),  # of the libraries, about their own use of torch
]

if find_spec("sentence_transformers") is None or find_spec("openvino") is None:
    pytest.skip("pip install 'attnserve[dev]'", allow_module_level=True)

SCRIPT = Path(__file__).with_name("stock_sentence_transformers.py")

FOLDERS = (
    "mean", "cls", "last token", "qwen", "normalized", "dense", "dense, normalized", "prompts",
    "default prompt", "dimensions", "lower case", "cross-encoder", "classes",
)  # fmt: skip

EXACT_RANK = 16
"""Shared dimensions with which ``collab_dk`` is lossless for these networks."""

INT8 = "normalized"
"""The folder that is converted to int8."""

NOT_IN_ONNX = {"dense", "dense, normalized"}
"""Folders that ``backend="onnx"`` cannot load: it needs hidden states, and these graphs pool."""

Answers = Mapping[str, Any]


class Folders:
    """The folders by path.

    Attributes:
        jobs: What the stock installation computes.
        wanted: The answers of the original in torch.
        own: The answers of ``attnserve.integrations``.
        names: The names of the cases.
        int8: The path of the folder in int8, whose answers differ.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.wanted: dict[str, Answers] = {}
        self.own: dict[str, Answers] = {}
        self.names: dict[str, str] = {}
        self.int8 = ""

    def add(self, name: str, path: Path, wanted: Answers, inputs: list[Any]) -> None:
        from attnserve.integrations.sentence_transformers import load

        prompts = [key.removeprefix("prompt ") for key in wanted if key.startswith("prompt ")]
        job = {"kind": CASES[name].kind, "inputs": inputs, "prompts": prompts}
        self.jobs[str(path)], self.names[str(path)] = job, name
        self.wanted[str(path)] = wanted
        self.own[str(path)] = answers(CASES[name], load(path), inputs, prompts)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The cases as exported and as optimized without loss, and one in int8."""
    import attnserve
    from attnserve.exporters.hugging_face import export

    found, root = Folders(), tmp_path_factory.mktemp("folders")
    for name in FOLDERS:
        case, place = CASES[name], root / name.replace(",", "").replace(" ", "-")
        write_folder(case, place / "hub")
        task = {"rerank": "rerank", "classifier": "sequence-classification"}.get(case.kind)
        export(place / "hub", place / "export", task=task, exporter="torchscript", openvino=True)
        inputs = [[QUERY, text] for text in TEXTS] if case.kind == "rerank" else TEXTS
        wanted = original(case, place / "hub", inputs)
        found.add(name, place / "export", wanted, inputs)
        if case.network != "qwen":  # the norms of its queries and keys allow no shared dimensions
            attnserve.optimize(
                place / "export", place / "optimized", collab_dk=EXACT_RANK, mixing="dense",
                openvino=True,
            )  # fmt: skip
            found.add(name, place / "optimized", wanted, inputs)
    place = root / INT8
    texts = write_lines(place / "texts.txt", sentences(600, seed=0))
    attnserve.optimize(
        place / "export", place / "int8", precision="int8-full", calib=texts, runtime="openvino"
    )
    unseen = sentences(150, seed=1)
    found.int8 = str(place / "int8")
    found.add(INT8, place / "int8", original(CASES[INT8], place / "hub", unseen), unseen)
    return found


def sentences(count: int, seed: int) -> list[str]:
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(WORDS[:-1], k=chosen.randint(3, 20))) for _ in range(count)]


def original(case: Case, folder: Path, inputs: list[Any]) -> Answers:
    """The answers of the original in torch."""
    from sentence_transformers import CrossEncoder, SentenceTransformer

    if case.kind != "embedding":
        return scores(CrossEncoder(str(folder), device="cpu"), inputs)
    model = SentenceTransformer(str(folder), device="cpu")
    return vectors(model, inputs, ["", *(name for name, text in model.prompts.items() if text)])


def answers(case: Case, model: Any, inputs: list[Any], prompts: list[str]) -> Answers:
    return vectors(model, inputs, prompts) if case.kind == "embedding" else scores(model, inputs)


@pytest.mark.parametrize("backend", ["openvino", "onnx"])
def test_stock_library_answers_as_the_original(
    backend: str, folders: Folders, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    client, writes = f"sentence_transformers_{backend}", pytestconfig.getoption("--write-clients")
    with environment(client, tmp_path, write=writes) as (python, row):
        chosen = {
            path: job for path, job in folders.jobs.items()
            if backend != "onnx" or folders.names[path] not in NOT_IN_ONNX
        }  # fmt: skip
        found = ask(python, backend, chosen, tmp_path)
        assert found.keys() == chosen.keys()
        int8 = found.pop(folders.int8)
        cosines = [compare(found[path], folders.wanted[path], path) for path in found]
        row["lowest_cosine"] = min(cosine for cosine in cosines if cosine is not None)
        check_int8(int8, folders)


def ask(python: Path, backend: str, jobs: Mapping[str, Any], folder: Path) -> dict[str, Answers]:
    """The answers of a stock installation."""
    job, result = folder / "job.json", folder / "result.json"
    write_json(job, jobs)
    variables = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, "-W", "ignore", SCRIPT, backend, job, result],
        env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(result.read_text())


def compare(found: Answers, wanted: Answers, path: str) -> float | None:
    """Compare all answers of a folder; the lowest cosine of its vectors."""
    assert found.keys() == wanted.keys()
    lowest: list[float] = []
    for call, expected in wanted.items():
        one, values = np.array(found[call]), np.array(expected)
        assert one.shape == values.shape, (path, call)
        if call == "ubinary":
            assert (one == values).all(), path
        elif call == "int8":  # a value at the border of two integers may be rounded to either
            assert np.abs(one.astype(int) - values.astype(int)).max() <= 1, path
        else:
            np.testing.assert_allclose(one, values, rtol=1e-4, atol=1e-4, err_msg=f"{path} {call}")
            if call not in ("similarity", "scores"):
                lowest.append(lowest_cosine(one, values))
                assert lowest[-1] >= 0.99999, (path, call)
    return min(lowest, default=None)


def lowest_cosine(found: np.ndarray, wanted: np.ndarray) -> float:
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    return float(((found * wanted).sum(1) / norms).min())


def check_int8(found: Answers, folders: Folders) -> None:
    """Check the recorded lower bound of the similarity, on texts that the conversion did not see.

    The similarity is the Spearman correlation of the cosines of all pairs of texts.
    """
    (bound,) = {min(one["ci95"][0] for one in last_entry(Path(folders.int8))["qualities"])}
    assert 0.9 < bound < 1
    own, wanted = (np.array(one["prompt "]) for one in (found, folders.wanted[folders.int8]))
    assert own.shape == wanted.shape and (own != wanted).any()
    assert spearman_of_pairs(own, wanted) >= bound


def spearman_of_pairs(found: np.ndarray, wanted: np.ndarray) -> float:
    ranks: list[np.ndarray] = []
    for each in (found, wanted):
        unit = each / np.linalg.norm(each, axis=1, keepdims=True)
        cosines = (unit @ unit.T)[np.triu_indices(len(unit), k=1)]
        ranks.append(cosines.argsort().argsort())
    return float(np.corrcoef(*ranks)[0, 1])


def test_integration_and_service_answer_as_the_original(folders: Folders) -> None:
    for path, wanted in folders.wanted.items():
        if path == folders.int8:
            check_int8(folders.own[path], folders)
            continue
        compare(folders.own[path], wanted, path)
        for call in wanted:
            if call.startswith("prompt "):
                found = served(Path(path), call.removeprefix("prompt "))
                assert lowest_cosine(found, np.array(wanted[call])) >= 0.99999, (path, call)


def served(folder: Path, prompt: str) -> np.ndarray:
    """The vectors of the service."""
    artifact = open_artifact(folder)
    model = Model(artifact)
    start = artifact.prompt(prompt) if prompt else artifact.prompt()
    fed = model.text_inputs(model.encode([start + text for text in TEXTS]))
    name = model.text_output("embed")
    return model.vectors("embed", fed, model.run(fed, [name])[name])
