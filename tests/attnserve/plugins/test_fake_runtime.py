"""A runtime of another package: on the command line, in a plan, and in the service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attnserve.plugins.conftest import Run, check_embeds

CODE = """
from attnserve.runtime.onnx_runtime import OnnxRuntime
from attnserve.runtime.session import RUNTIMES

class Fake(OnnxRuntime):
    name = "fake"
    computes_bfloat16 = False
    size_multiple = 1
    short_rows: int | None = None

    def open(self, source, device, options):
        with open({log!r}, "a") as log:
            log.write("opened\\n")
        return super().open(source, device, options)

RUNTIMES.add(Fake())
"""


@pytest.mark.process
def test_runtime_of_another_package(
    tiny: Path, texts: Path, tmp_path: Path, run: Run, environment: dict[str, str]
):
    log = tmp_path / "log.txt"
    code = CODE.format(log=str(log))

    def opened() -> int:
        """Sessions since the last call."""
        text = log.read_text() if log.exists() else ""
        log.write_text("")
        return len(text.splitlines())

    report = run(code, "bench", tiny, "--seq", "8", "--rounds", "1", "--runtime", "fake")
    assert report["machine"]["runtime"] == "fake" and opened() == 1

    plan = tmp_path / "plan.json"
    asked = ("--calib", texts, "--keep", "0.5", "--seq", "8", "--runtime", "fake")
    made = run(code, "plan", tiny, *asked, "-o", plan)
    assert made["asked"]["runtime"] == "fake" and opened() > 1
    run(code, "optimize", tiny, "--plan", plan, "--calib", texts, "-o", tmp_path / "new")
    assert opened() > 1

    check_embeds(tmp_path / "new", environment | {"ATTNSERVE_RUNTIME": "fake"})
    assert opened() >= 1


@pytest.mark.process
def test_unknown_runtime_is_refused(tiny: Path, run: Run):
    with pytest.raises(AssertionError, match="error: --runtime is 'none': expected onnxruntime"):
        run("", "bench", tiny, "--runtime", "none")
