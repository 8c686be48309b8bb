"""optimize with ``collab_cache``: decoding of a GPT-2 with a collaborative key cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from attnserve import bench, optimize, verify
from attnserve.checks.inspect import inspect
from attnserve.cli.app import main
from attnserve.literals import MixingOption
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import load_model
from attnserve.planning.optimize import OptimizeReport
from attnserve.runtime.session import open_session
from graph_passes.errors import CannotRewrite, InvalidData
from tests.architectures import Cell
from tests.errors import raises
from tests.word_tokenizer import word_tokenizer

LAYERS, H, K, D, VOCABULARY = 2, 3, 8, 24, 61
EXACT = H * K
CACHES = [f"past_key_values.{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value")]


@pytest.fixture(scope="session")
def gpt2() -> Path:
    """A tiny random GPT-2: past keys and values are inputs, the present ones outputs."""
    return Cell("GPT-2, cached", "eager", "torchscript", 17).committed


def decode(model: Path, steps: tuple[int, ...] = (5, 1, 1, 1)) -> list[np.ndarray]:
    """Return the states of a prefill and of single-token steps; each step uses the last cache."""
    session, rng = open_session(model), np.random.default_rng(0)
    shapes = {value.name: value.shape for value in session.get_inputs()}
    past = {name: np.zeros((2, shapes[name][1], 0, shapes[name][3]), np.float32) for name in CACHES}
    states: list[np.ndarray] = []
    for index, length in enumerate(steps):
        ids = rng.integers(0, VOCABULARY, (2, length))
        mask = np.ones((2, sum(steps[: index + 1])), np.int64)
        state, *present = session.run(None, {"input_ids": ids, "attention_mask": mask, **past})
        past = dict(zip(CACHES, present, strict=True))
        states.append(np.asarray(state))
    return states


def optimized(gpt2: Path, folder: Path, R: int, **options: Any) -> OptimizeReport:
    return optimize(
        gpt2, folder / f"{R}.onnx", collab_dk=R, mixing="dense", collab_cache=True, **options
    )


def cache_shape(model: Path) -> list[str]:
    (keys,) = (v for v in load_model(model).graph.inputs if v.name == "past_key_values.0.key")
    return [str(dim) for dim in keys.shape or ()]


def sequences(path: Path, past: int = 0, rows: int = 12, length: int = 9) -> Path:
    rng = np.random.default_rng(1)
    shape = (rows, H, past, K)
    arrays: dict[str, Any] = {
        "input_ids": rng.integers(0, VOCABULARY, (rows, length)),
        "attention_mask": np.ones((rows, past + length), np.int64),
    }
    arrays |= {name: rng.standard_normal(shape).astype(np.float32) for name in CACHES}
    np.savez(path, **arrays)
    return path


def test_optimize_cache_and_int8_are_calibrated_together(gpt2: Path, tmp_path: Path):
    """The converted model has other caches than the rows, which leave them empty."""
    calib = sequences(tmp_path / "rows.npz")
    float32 = optimized(gpt2, tmp_path, 8, calib=calib)
    int8 = optimized(gpt2, tmp_path / "int8", 8, precision="int8", calib=calib)
    assert int8.record.int8_activations == "static"
    assert int8.fidelity.mean_cosine > float32.fidelity.mean_cosine - 0.01
    for before, after in zip(decode(float32.output), decode(int8.output), strict=True):
        assert np.linalg.norm(before - after) < 0.1 * np.linalg.norm(before)


def test_optimize_full_rank_cache_keeps_decoding_exact(gpt2: Path, tmp_path: Path):
    report = optimized(gpt2, tmp_path, EXACT)
    for new, old in zip(decode(report.output), decode(gpt2), strict=True):
        np.testing.assert_allclose(new, old, atol=1e-4, rtol=0)
    assert report.fidelity.min_cosine >= 1 - 1e-6
    assert any("shrinks only if R" in warning for warning in report.record.warnings)


@pytest.mark.timing(seconds=10)
def test_optimize_cache_shrinks_and_error_falls_with_rank(gpt2: Path, tmp_path: Path):
    expected, errors = decode(gpt2), []
    for R in (2, 10, 20):
        report = optimized(gpt2, tmp_path, R)
        assert cache_shape(report.output) == ["batch", "1", "past", str(R + H)]
        assert [change.cache_width for change in report.changes] == [R + H] * LAYERS
        warnings = report.record.warnings
        assert any(f"from 48 to {2 * (R + H)} numbers" in warning for warning in warnings)
        assert not any("shrinks only" in warning for warning in warnings)
        pairs = zip(decode(report.output), expected, strict=True)
        errors.append(float(sum(np.linalg.norm(new - old) for new, old in pairs)))
    assert errors == sorted(errors, reverse=True)


def test_optimize_cache_is_recorded_and_inspected(gpt2: Path, tmp_path: Path):
    report = optimized(gpt2, tmp_path, 10)
    (entry,) = open_artifact(report.output).lineage
    assert [change.cache_width for change in entry.changes] == [10 + H] * LAYERS
    assert entry.fidelity.data == "random inputs, empty caches"
    matches = inspect(report.output).matches
    assert [block.form for block in matches.blocks] == ["collaborative"] * LAYERS
    assert all(block.k.past is not None for block in matches.blocks)
    assert matches.unmatched == ()


@pytest.mark.parametrize("mixing", ["dense", "sparse"])
def test_optimize_cached_keys_without_collab_cache_is_refused(
    mixing: MixingOption, gpt2: Path, tmp_path: Path
):
    with raises(CannotRewrite, "request.nothing", "`collab_cache`"):
        optimize(gpt2, tmp_path / "new.onnx", collab_dk=10, mixing=mixing)
    with raises(CannotRewrite, "rewrite.cached", "`collab_cache`"):
        optimize(gpt2, tmp_path / "new.onnx", collab_dk=10, mixing=mixing, layers=["0"])


@pytest.mark.parametrize(
    ("R", "options"),
    [(10, {"mixing": "sparse"}), (10, {"head_dk": 4}), (EXACT, {"head_dk": 4})],
    ids=str,
)
def test_optimize_sparse_mixing_of_cached_keys_is_dense(
    R: int, options: dict[str, Any], gpt2: Path, tmp_path: Path
):
    """Every head reads the dimensions that the cache holds."""
    report = optimize(gpt2, tmp_path / "new.onnx", collab_dk=R, collab_cache=True, **options)
    assert [(change.rank, change.head_size) for change in report.changes] == [(R, None)] * LAYERS
    warned = [warning for warning in report.record.warnings if "gets dense mixing" in warning]
    assert len(warned) == LAYERS


def test_optimize_cache_of_selected_layers(gpt2: Path, tmp_path: Path):
    report = optimized(gpt2, tmp_path, EXACT, layers=["1"])
    assert cache_shape(report.output) == ["batch", str(H), "past", str(K)]
    for new, old in zip(decode(report.output), decode(gpt2), strict=True):
        np.testing.assert_allclose(new, old, atol=1e-4, rtol=0)


@pytest.mark.timing(seconds=6)
def test_optimize_cache_is_calibrated_on_whole_sequences(gpt2: Path, tmp_path: Path):
    calib = sequences(tmp_path / "calib.npz")
    plain, fitted = (
        verify(gpt2, optimized(gpt2, tmp_path, 12, calib=data, force=True).output, data=calib)
        for data in (None, calib)
    )
    assert fitted.data == "calib.npz, empty caches"
    assert [output.name for output in fitted.outputs] == [
        "last_hidden_state", "present.0.value", "present.1.value",
    ]  # fmt: skip
    assert fitted.outputs[0].relative_error < plain.outputs[0].relative_error


def test_optimize_filled_caches_are_refused(gpt2: Path, tmp_path: Path):
    filled = sequences(tmp_path / "filled.npz", past=4)
    with raises(InvalidData, "compare.cache_not_empty"):
        optimized(gpt2, tmp_path, 12, calib=filled)
    report = optimized(gpt2, tmp_path, 12)
    with raises(InvalidData, "compare.cache_not_empty"):
        verify(gpt2, report.output, data=filled)


def test_optimize_collab_cache_option_warns(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    new = tmp_path / "new.onnx"
    options = ["--collab-dk", "24", "--mixing", "dense", "--collab-cache"]
    assert main(["optimize", str(gpt2), "-o", str(new), *options]) == 0
    assert "this model can read only caches that it wrote" in " ".join(
        capsys.readouterr().err.split()
    )
    assert main(["verify", str(gpt2), str(new), "--min-cosine", "0.999"]) == 0


def test_optimize_texts_run_with_empty_caches(gpt2: Path, tmp_path: Path) -> None:
    """A tokenizer is enough to calibrate, compare and score a model with a cache."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    shutil.copy(gpt2, folder / "model.onnx")
    words = [f"w{index}" for index in range(VOCABULARY)]
    word_tokenizer(words, unknown="w0").save(str(folder / "tokenizer.json"))
    texts = tmp_path / "texts.txt"
    rng = np.random.default_rng(0)
    lines = [" ".join(f"w{i}" for i in rng.integers(1, VOCABULARY, 9)) for _ in range(60)]
    texts.write_text("\n".join(lines))
    optimize(
        folder, tmp_path / "new", calib=texts, collab_dk=EXACT, mixing="dense", collab_cache=True
    )
    found = verify(folder, tmp_path / "new", data=texts)
    states = next(output for output in found.outputs if output.name == "last_hidden_state")
    assert states.min_cosine is not None and states.min_cosine > 1 - 1e-5


@pytest.mark.process
def test_bench_reports_decoding_and_the_size_of_the_cache(gpt2: Path, tmp_path: Path) -> None:
    """A shared cache has R keys per token and layer, and H content terms, instead of H K keys."""
    optimized(gpt2, tmp_path, R := EXACT // 2)
    paths = [gpt2, tmp_path / f"{R}.onnx"]
    full, shared = (result.decoding for result in bench(paths, sequences=(16,), rounds=2).results)
    assert full is not None and shared is not None
    assert full.cache_bytes_per_token == 4 * LAYERS * 2 * H * K
    assert shared.cache_bytes_per_token == 4 * LAYERS * (R + H + H * K)
    for found in (full, shared):
        assert found.first_token_ms is not None and found.first_token_ms > 0
        assert found.per_token_ms is not None and found.per_token_ms > 0


@pytest.mark.process
@pytest.mark.parametrize(("axis", "size"), [(0, 4), (1, 8)], ids=["batch", "sequence"])
def test_bench_fixed_axis_leaves_out_what_does_not_run(
    axis: int, size: int, gpt2: Path, tmp_path: Path
) -> None:
    model = onnx.load(gpt2)
    model.graph.input[0].type.tensor_type.shape.dim[axis].dim_value = size
    onnx.save(model, path := tmp_path / "fixed.onnx")
    batch, sequence = (size, 8) if axis == 0 else (2, size)
    (result,) = bench([path], batches=(batch,), sequences=(sequence,), rounds=2).results
    assert result.decoding is not None and result.decoding.first_token_ms is not None
    assert result.decoding.cache_bytes_per_token == 4 * LAYERS * 2 * H * K
    assert (result.decoding.per_token_ms is None) == (axis == 1)
