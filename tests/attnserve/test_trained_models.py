"""Trained models of other projects: accuracy at full rank, and promises against unseen data."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import numpy as np
import pytest

from attnserve.checks.compare import verify
from attnserve.checks.inspect import inspect
from attnserve.checks.quality import Quality
from attnserve.planning.optimize import optimize
from attnserve.runtime.session import open_session
from tests.attnserve.costs import count_instead_of_timing
from tests.stories import samples, stories


def vit_accuracy(path: Path, data: Path) -> float:
    """Return the accuracy on the 10,000 MNIST test images, in percent."""
    images = np.frombuffer(
        gzip.decompress((data / "t10k-images-idx3-ubyte.gz").read_bytes())[16:], np.uint8
    ).reshape(-1, 1, 28, 28)
    labels = np.frombuffer(
        gzip.decompress((data / "t10k-labels-idx1-ubyte.gz").read_bytes())[8:], np.uint8
    )
    session = open_session(path)
    scaled = ((images / 255 - 0.1307) / 0.3081).astype(np.float32)
    logits = [session.run(None, {"image": part})[0] for part in np.array_split(scaled, 20)]
    return float(np.mean(np.concatenate(logits).argmax(-1) == labels)) * 100


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
    assert len(inspect(model).reading.blocks) == 6
    optimize(model, tmp_path / "exact.onnx", collab_dk=4 * 64)
    accuracy = [vit_accuracy(path, shared / "data" / "mnist")
                for path in (model, tmp_path / "exact.onnx")]  # fmt: skip
    assert accuracy == pytest.approx([97.21, 97.21], abs=0.1)


def test_optimize_sorting_decoder_keeps_sorting(shared: Path, tmp_path: Path):
    model = shared / "models" / "gpt_nano_sort" / "gpt_nano_sort.onnx"
    assert len(inspect(model).reading.blocks) == 3
    optimize(model, tmp_path / "exact.onnx", collab_dk=3 * 16)
    assert [count_sorted(path) for path in (model, tmp_path / "exact.onnx")] == [729, 729]


def quality_on(original: Path, new: Path, data: Path) -> Quality:
    quality = verify(original, new, data=data, threads=1).quality
    assert quality is not None
    return quality


@pytest.mark.timing(seconds=200)
def test_search_keeps_the_next_tokens_of_a_language_model(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Calibrated on samples of the model, checked on stories that people wrote."""
    count_instead_of_timing(monkeypatch)
    monkeypatch.setenv("ATTNSERVE_CACHE", str(tmp_path / "cache"))
    folder = shared / "models" / "stories260K"
    model, unseen = folder / "stories260K.onnx", tmp_path / "stories.npz"
    text = shared / "data" / "lm" / "tinystories_sample.txt"
    np.savez(unseen, idx=stories(text, folder / "tok512.bin"))
    np.savez(tmp_path / "samples.npz", idx=samples())
    speeds: list[float] = []
    for keep in (0.99, 0.95):
        output = tmp_path / f"{keep}.onnx"
        report = optimize(
            model, output, calib=tmp_path / "samples.npz", keep=keep, allow=["ffn"], threads=1
        )
        assert report.found is not None
        speeds.append(report.found.speedup)
        found = quality_on(model, output, unseen)
        assert found.measure == "top1"
        if keep == 0.99:
            assert found.value >= 0.97
            assert found.also["perplexity"] <= 1.01 * found.also["perplexity_original"]
        else:
            assert found.value >= 0.93
    assert speeds[1] > speeds[0]


def test_constant_cosine_of_a_language_model_is_high_and_its_quality_low(
    shared: Path, tmp_path: Path
):
    """Half of the heads pruned keep a cosine of 0.99, and change one token in seven."""
    model = shared / "models" / "stories260K" / "stories260K.onnx"
    np.savez(tmp_path / "samples.npz", idx=samples()[:70])
    report = optimize(model, tmp_path / "half.onnx", calib=tmp_path / "samples.npz", prune=0.5)
    assert report.fidelity.mean_cosine > 0.98
    quality = report.fidelity.quality
    assert quality is not None and quality.measure == "top1"
    assert quality.value < 0.95 and quality.constant < 0.2


@pytest.mark.timing(seconds=120)
def test_search_proof_of_a_classifier_agrees_with_unseen_images(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    count_instead_of_timing(monkeypatch)
    monkeypatch.setenv("ATTNSERVE_CACHE", str(tmp_path / "cache"))
    model = shared / "models" / "vit_mnist_researchase" / "vit_mnist_researchase.onnx"
    data = shared / "data" / "mnist" / "t10k-images-idx3-ubyte.gz"
    pixels = np.frombuffer(gzip.decompress(data.read_bytes())[16:], np.uint8)
    images = ((pixels.reshape(-1, 1, 28, 28) / 255 - 0.1307) / 0.3081).astype(np.float32)
    np.savez(tmp_path / "calib.npz", image=images[:1400])
    np.savez(tmp_path / "unseen.npz", image=images[5000:7000])
    report = optimize(
        model, tmp_path / "new.onnx", calib=tmp_path / "calib.npz", keep=0.98, allow=["ffn"],
        threads=1,
    )  # fmt: skip
    proof = report.fidelity.quality
    assert report.found is not None and report.found.gain
    assert proof is not None and proof.measure == "kl" and proof.ci95 is not None
    found = quality_on(model, tmp_path / "new.onnx", tmp_path / "unseen.npz")
    assert found.ci95 is not None
    assert found.ci95[1] >= proof.ci95[0] and proof.ci95[1] >= found.ci95[0]
    assert found.value >= 0.97
