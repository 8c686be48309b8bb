"""The peak memory of ``optimize``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnserve.models.onnx_files import save_model
from benchmarks.gpu.encoder import random_encoder
from graph_passes.matching.find import find_attention

BASE_BYTES = 260e6
"""Python, numpy, ONNX Runtime and activations. The whole peak varies by 75 MB between runs."""

MEASURE = """
import sys
from pathlib import Path
import attnserve
from attnserve.planning import served_speed
served_speed.SECONDS_PER_MODEL = 0
model, masks, output = map(Path, sys.argv[1:])
attnserve.optimize(model, output, prune_heads=masks, threads=1)
status = Path("/proc/self/status").read_text().splitlines()
print(next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")))
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status")
@pytest.mark.parametrize("external", [False, True])
def test_optimize_memory_is_at_most_two_models(external: bool, tmp_path: Path):
    path, masks = tmp_path / "model.onnx", tmp_path / "masks.json"
    model = random_encoder(layers=5, positions=32)
    masks.write_text(json.dumps({b.name: [0] * 3 + [1] * 9 for b in find_attention(model).blocks}))
    save_model(model, path, external=external)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, path, masks, tmp_path / "new.onnx"],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    size = sum(file.stat().st_size for file in tmp_path.glob("model.onnx*"))
    assert size > 140e6
    assert int(done.stdout) < 2 * size + BASE_BYTES
