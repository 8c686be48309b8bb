"""Trained models of other projects: accuracy at full rank, and promises against unseen data."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import numpy as np
import pytest

from attnserve import optimize, verify
from attnserve.checks.inspect import inspect
from attnserve.runtime.session import open_session
from tests.stories import stories

SAMPLES = Path(__file__).parents[1] / "fixtures" / "stories260K.npz"
"""240 rows that stories260K drew at temperature 1."""


def mnist(data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the 10,000 MNIST test images (N, 1, 28, 28) as the model wants them, and labels."""
    images = np.frombuffer(
        gzip.decompress((data / "t10k-images-idx3-ubyte.gz").read_bytes())[16:], np.uint8
    ).reshape(-1, 1, 28, 28)
    labels = np.frombuffer(
        gzip.decompress((data / "t10k-labels-idx1-ubyte.gz").read_bytes())[8:], np.uint8
    )
    return ((images / 255 - 0.1307) / 0.3081).astype(np.float32), labels


def predict(path: Path, images: np.ndarray) -> np.ndarray:
    """Return the digit that a vision transformer sees in each image."""
    session = open_session(path)
    logits = [session.run(None, {"image": part})[0] for part in np.array_split(images, 5)]
    return np.concatenate(logits).argmax(-1)


def count_sorted(path: Path) -> int:
    """Return how many of all 729 inputs of six digits the model sorts, digit by digit."""
    session = open_session(path)
    digits = np.array(list(itertools.product(range(3), repeat=6)))
    tokens = np.zeros((len(digits), 11), np.int64)
    tokens[:, :6] = digits
    output = np.zeros_like(digits)
    for place in range(6):
        logits = session.run(None, {"idx": tokens})[0]
        output[:, place] = logits[:, 5 + place].argmax(-1)
        if place < 5:
            tokens[:, 6 + place] = output[:, place]
    return int((output == np.sort(digits, axis=1)).all(axis=1).sum())


@pytest.mark.timing(seconds=30)
def test_optimize_vision_transformer_keeps_its_accuracy(shared: Path, tmp_path: Path):
    model = shared / "models" / "vit_mnist_researchase" / "vit_mnist_researchase.onnx"
    assert len(inspect(model).matches.blocks) == 6
    optimize(model, tmp_path / "exact.onnx", collab_dk=4 * 64, mixing="dense")
    images, labels = (array[:2500] for array in mnist(shared / "data" / "mnist"))
    before, after = (predict(path, images) for path in (model, tmp_path / "exact.onnx"))
    assert np.mean(before == labels) == pytest.approx(0.96, abs=1e-3)
    assert np.mean(before == after) > 0.999


def test_optimize_sorting_decoder_keeps_sorting(shared: Path, tmp_path: Path):
    model = shared / "models" / "gpt_nano_sort" / "gpt_nano_sort.onnx"
    assert len(inspect(model).matches.blocks) == 3
    optimize(model, tmp_path / "exact.onnx", collab_dk=3 * 16, mixing="dense")
    assert [count_sorted(path) for path in (model, tmp_path / "exact.onnx")] == [729, 729]


@pytest.mark.timing(seconds=20)
def test_optimize_language_model_has_a_high_cosine_although_tokens_change(
    shared: Path, tmp_path: Path
):
    """Half of the heads pruned keep a cosine of 0.99, and change one token in seven."""
    folder = shared / "models" / "stories260K"
    model, data = folder / "stories260K.onnx", tmp_path / "stories.npz"
    text = shared / "data" / "lm" / "tinystories_sample.txt"
    np.savez(data, idx=stories(text, folder / "tok512.bin"))
    report = optimize(model, tmp_path / "half.onnx", calib=data, prune=0.5)
    assert report.fidelity.mean_cosine > 0.98
    quality = report.fidelity.quality
    assert quality is not None and quality.measure == "top1"
    assert quality.value < 0.95 and quality.constant < 0.2


@pytest.mark.timing(seconds=60)
def test_search_vision_transformer_keeps_its_promise(shared: Path, tmp_path: Path):
    model = shared / "models" / "vit_mnist_researchase" / "vit_mnist_researchase.onnx"
    images, _ = mnist(shared / "data" / "mnist")
    for name, part in (("calibration", images[:560]), ("unseen", images[560:2560])):
        np.savez(tmp_path / f"{name}.npz", image=part)
    report = optimize(
        model, tmp_path / "fast", calib=tmp_path / "calibration.npz", keep=0.95, allow=["ffn"],
        threads=1,
    )  # fmt: skip
    assert report.search is not None and report.search.gain
    found = verify(model, tmp_path / "fast", data=tmp_path / "unseen.npz").quality
    assert found is not None and found.measure == "kl" and found.ci95 is not None
    assert found.ci95[1] >= 0.95


@pytest.mark.timing(seconds=120)
def test_search_language_model_keeps_its_promise(shared: Path, tmp_path: Path):
    folder = shared / "models" / "stories260K"
    model, rows = folder / "stories260K.onnx", np.load(SAMPLES)["idx"].astype(np.int64)
    np.savez(tmp_path / "calibration.npz", idx=rows[:180])
    np.savez(tmp_path / "unseen.npz", idx=rows[180:])
    report = optimize(
        model, tmp_path / "fast", calib=tmp_path / "calibration.npz", keep=0.95, allow=["ffn"],
        threads=1,
    )  # fmt: skip
    assert report.search is not None
    new = tmp_path / "fast" / "model.onnx"
    found = verify(model, new, data=tmp_path / "unseen.npz").quality
    assert found is not None and found.measure == "top1" and found.ci95 is not None
    assert found.ci95[1] >= 0.95
    assert found.also["perplexity"] <= 1.05 * found.also["perplexity_original"]
