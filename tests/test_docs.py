"""Check the documentation: code blocks, commands, tables of results, links and generated pages."""

from __future__ import annotations

import json
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import attnserve
from attnserve.cli.app import main
from attnserve.limits import (
    MIN_LOSSLESS_GAIN,
    MIN_REMOVAL_GAIN,
    MIN_SPEEDUP,
    ROUNDING,
    SAME_ERROR,
    SELECTION_CONFIDENCE,
)
from docs.hooks import reference
from docs.hooks.tables import peers, readme, results, searches, serving
from graph_passes.passes.fuse_attention import FuseAttention
from graph_passes.public import PASSES
from service.settings import RaySettings, Settings

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<mark>run[^>]*?) -->\n *)?```(?P<language>\w+)\n"
    r"(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


SMALLER = {
    "--collab-dk 256": "--collab-dk 64",
    "--collab-dk 128": "--collab-dk 32",
    "--head-dk 24": "--head-dk 6",
    "collab_dk=128": "collab_dk=32",
}
"""Sizes in the pages, which fit MiniLM, and sizes for the model of the tests."""


@dataclass(frozen=True)
class Block:
    """A fenced code block; ``mark`` is ``run`` if tests execute it."""

    page: Path
    mark: str | None
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.code.splitlines()[0][:50]}"


def read_blocks() -> Iterator[Block]:
    for page in PAGES:
        for match in FENCE.finditer(page.read_text(encoding="utf-8")):
            code = textwrap.dedent(match["code"])
            yield Block(page, match["mark"], match["language"], code)


BLOCKS = list(read_blocks())


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def command_lines(block: Block) -> list[list[str]]:
    """The arguments of every ``attnserve`` command of a shell block."""
    lines = block.code.replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("attnserve ")]


def split_command(arguments: list[str]) -> tuple[str, list[str]]:
    """The name of the command (``deploy ray``) and its arguments."""
    words = 2 if arguments[0] == "deploy" else 1
    return " ".join(arguments[:words]), arguments[words:]


def test_layout_names_existing_folders():
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)
    paths = [path for row in rows for path in re.findall(r"`([\w./]+)`", row)]
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_names_of_the_architecture_page_exist():
    text = (ROOT / "docs/concepts/architecture.md").read_text("utf-8")
    names = re.findall(r"`((?:attnserve|graph_passes|service)\.[\w.]+)`", text)
    assert len(names) > 20
    objects = [name for name in dict.fromkeys(names) if not name.endswith(".json")]
    assert [name for name in objects if not resolves(name)] == []


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_table_of_rewrites_has_the_order_of_plans():
    page = (ROOT / "docs" / "howto" / "rewrites-by-hand.md").read_text(encoding="utf-8")
    passes = re.findall(r"^\| `--[^|]* \| `(\w+)` \|", page, re.MULTILINE)
    ordered = sorted(PASSES, key=lambda each: each.order)
    before = [each.name for each in ordered if each.order < FuseAttention.order]
    assert passes == [name for name in before if name != "decompose_attention"]


def test_readme_has_at_most_150_lines():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_readme_quick_start_has_the_promised_commands():
    lines = [line for block in of("sh") if block.page == README for line in block.code.splitlines()]
    assert {"make demo", "make test"} <= set(lines)
    assert "attnserve optimize model.onnx --collab-dk 256" in lines
    assert any("--keep 0.99" in line for line in lines)


def test_readme_results_equal_the_result_files():
    text = README.read_text(encoding="utf-8")
    assert readme.README_TABLE.search(text), "the markers of the table are missing"
    assert readme.with_results(text) == text, "run python -m docs.hooks.tables.readme"


def test_readme_results_begin_with_the_default_goal_and_name_what_they_are_from():
    first, *others = readme.results().split("\n\n")[0].splitlines()[2:]
    assert "`--keep 0.99" in first
    assert len(others) >= 8
    for line in readme.results().split("\n\n")[1:]:
        assert "benchmarks/results/" in line and "1 thread" in line


def test_rows_that_an_older_result_lacks_come_from_the_planner(tmp_path: Path, monkeypatch: Any):
    stored = results.load("peers")
    measured = {"speedup": [1.5, 1.4, 1.6], "p50_ms": 1.0}
    cells = dict.fromkeys(peers.PEER_LENGTHS, measured)
    kept = {"sentences": 0.5, "paragraphs": 0.5}
    every: list[dict[str, Any]] = [
        {"model": name, "turns": cells, "overlap": kept} for name in readme.README_MODELS
    ]
    for rows, places in ((stored["rows"][:1], ["peers", "planner"]), (every, ["peers"])):
        (tmp_path / "peers.json").write_text(json.dumps({**stored, "rows": rows}), "utf-8")
        shutil.copy(results.RESULTS / "planner.json", tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(results, "RESULTS", tmp_path)
            shown, *sources = readme.results().split("\n\n")
        assert [re.findall(r"results/(\w+)\.json", line)[0] for line in sources] == places
        expected = set(readme.STAND_INS) | {row["model"] for row in rows}
        assert len(shown.splitlines()) - 2 == len(expected & set(readme.README_MODELS))


def test_planner_table_shows_every_model_that_was_timed():
    """Slow ones too."""
    shown = searches.planner_speed().splitlines()
    for row in results.load("planner")["speeds"]:
        name = searches.PLANNER_MODELS[row["model"]]
        assert [line for line in shown if line.startswith(f"| {name} |")]


def test_table_of_rerankers_names_the_goal_and_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    torch = "sentence-transformers, torch"
    measures = {"tau": 0.99, "top1": 1.0, "ndcg_at_10": 0.9}
    row = {
        "system": "attnserve, bfloat16-cpu", "p50_ms": 20.0, "p90_ms": 30.0, "near": measures,
        "over": {torch: [2.5, 2.25, 2.75]}, **measures,
        **{f"{name}_ci95": [0.5, 1.0] for name in measures},
    }  # fmt: skip
    goals = {"best": row["system"], "fastest_peer": torch, "over_fastest_peer": [2.5, 2.25, 2.75]}
    result = {
        "command": "python -m benchmarks.rerank", "rows": [row], "goals": goals, "documents": 30,
        "queries": 10, "threads": 2, "versions": {}, "machine": {"cpu": "a CPU", "threads": 1},
        "cpu_flags": ["avx2"],
    }  # fmt: skip
    (tmp_path / "rerank.json").write_text(json.dumps(result), encoding="utf-8")
    shown = peers.rerank("rerank")
    for text in ("| 20.0 ms | 30.0 ms | 2.50x |", "2.25 to 2.75", "a CPU (avx2), 2 threads"):
        assert text in shown


MEASURED = re.compile(
    r"\d[\d,]*\.\d+ ?(?:x|times)\b|\d[\d,.]* ?(?:ms|µs)\b|\d[\d,.]* ?%|\d[\d,.]* texts per second"
    r"|(?<![\w.])0\.\d{2,}"
)
"""What looks like a measured ratio, time or share."""

EXPLAINED = {
    r"99% of (?:the|its)|allows a loss of 0\.01|0\.95 with a guarantee of 0\.99": "a goal",
    r"attention only at 0\.98 and 0\.995": "goals of rows",
    "1\\.5 times as fast\\.": "the goal of the command above",
    "1\\.65 times, and|\\(2\\.7 times in int8": "names of rows",
    "output maps and the weight 0\\.005": "a setting of the trained models",
    r"95% (?:bootstrap )?intervals?|a confidence of 95%": "the confidence of intervals",
    f"{SELECTION_CONFIDENCE:.0%} confidence|confidence {SELECTION_CONFIDENCE:.0%}": "limits.py",
    f"{MIN_SPEEDUP} of the original's|{1 - MIN_SPEEDUP:.0%} slower": "limits.py",
    f"{MIN_LOSSLESS_GAIN} times as fast on average": "limits.py",
    f"{MIN_REMOVAL_GAIN} times as fast, at the": "limits.py",
    f"{SAME_ERROR} times the error": "limits.py",
    f"(?:below|less than) {ROUNDING:.4f}": "limits.py",
    "worst 5% of texts": "limits.TAIL",
    f"{serving.UTILIZATION:.0%} utilization|{serving.UTILIZATION} x texts": "a planned share",
    "in at least 93% of": "tests/attnserve/checks/test_quality.py",
    r"0\.05 / \(k|sum to 5%|at most 5% for|at most 4%|at least 95% of runs":
        "tests/attnserve/serving/test_live_quality.py",
    r"at least 4% of the requests|A rate of 0\.005|: 0\.5% if|and 1% if": "arithmetic",
    "(?:at|below) 100 %|try 1 to 3 ms": "advice",
}  # fmt: skip
"""Numbers in sentences that are no measurements, as patterns, and what they are."""


def test_sentences_contain_no_measured_numbers():
    """Measurements stand in generated tables, or in the checked table of the README."""
    unused, found = set(EXPLAINED), list[tuple[str, str]]()
    for page in PAGES:
        text = FENCE.sub("", readme.README_TABLE.sub("", page.read_text(encoding="utf-8")))
        text = " ".join(re.sub(r"`(?!\d+\.\d+x`)[^`]*`|(?<=\])\([^)]*\)", "", text).split())
        for pattern in EXPLAINED:
            text, count = re.subn(pattern, "", text)
            unused -= {pattern} if count else set()
        found += [(page.name, match[0]) for match in MEASURED.finditer(text)]
    assert found == []
    assert unused == set()


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_shell_block_commands_parse(block: Block):
    for arguments in command_lines(block):
        name, rest = split_command(arguments)
        reference.commands()[name].make_context(name, rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_inline_commands_name_existing_options(page: Path):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for words in re.findall(r"`attnserve ([^`]+)`", text):
        name, rest = split_command(words.split())
        options = re.findall(r"(?<!\S)(--?[a-z][a-z0-9-]*)", " ".join(rest))
        if name == "--version":
            continue
        known = {
            option
            for parameter in reference.commands()[name].params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert set(options) <= known, name


def test_inline_options_exist():
    known = {
        option
        for command in reference.commands().values()
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    } | {"--version", "--help"}
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        options = set(re.findall(r"(?<=`)(--[a-z][a-z0-9-]*)", text))
        assert options <= known, (page, options - known)


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_make_targets_exist(block: Block):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([a-z-]+)", block.code, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_block_compiles(block: Block):
    compile(block.code, str(block.page), "exec")


@pytest.mark.parametrize("block", of("json"), ids=str)
def test_json_block_parses(block: Block):
    json.loads(block.code)


def test_variables_exist():
    known = {
        f"{kind.prefix}{name}".upper()
        for kind in (Settings, RaySettings)
        for name in kind.model_fields
    }
    for page in PAGES:
        names = set(re.findall(r"\bATTNSERVE_\w+", page.read_text(encoding="utf-8")))
        names.discard("ATTNSERVE_CACHE")  # of all commands
        assert names <= known, (page, names - known)


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_yaml_block_parses(block: Block):
    assert pytest.importorskip("yaml").safe_load(block.code)


@pytest.fixture(scope="module")
def small_encoder(tiny_bert: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the pages use: ``model/`` with 4 layers of 12 heads, and texts."""
    folder = tmp_path_factory.mktemp("docs")
    source = tiny_bert(
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=12,
        intermediate_size=192,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    attnserve.export(str(source), folder / "model", exporter="torchscript", attention="eager")
    words = ["a cat sat", "the dog ran home", "a bird", "a man with a guitar", "the happy child"]
    lines = [f"{first} and {second}" for first in words for second in words]
    (folder / "texts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def pages_to_run() -> list[Path]:
    return list(dict.fromkeys(block.page for block in BLOCKS if block.mark == "run"))


@pytest.mark.process
@pytest.mark.parametrize("page", pages_to_run(), ids=lambda page: page.stem)
def test_marked_blocks_run(
    page: Path, small_encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The blocks of a page run in order in one folder."""
    folder = Path(shutil.copytree(small_encoder, tmp_path / "docs"))
    monkeypatch.chdir(folder)
    for block in BLOCKS:
        if block.page != page or block.mark != "run":
            continue
        code = re.sub("|".join(SMALLER), lambda match: SMALLER[match[0]], block.code)
        if block.language == "python":
            exec(compile(code, str(page), "exec"), {})
            continue
        for arguments in command_lines(replace(block, code=code)):
            assert main(arguments) == 0, arguments


@pytest.mark.process
def test_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path):
    pytest.importorskip("material", reason="pip install 'attnserve[docs]'")
    command = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {path.stem: path.read_text("utf-8") for path in (tmp_path / "site").rglob("*.html")}
    for name, page in pages.items():
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*src=\"(https?:[^\"]+)", page)
        loaded += re.findall(
            r"<link[^>]*rel=\"(?:stylesheet|preload)\"[^>]*href=\"(http[^\"]+)", page
        )
        assert not loaded, name
        assert "generate:" not in page, f"{name}: a directive was not replaced"
        assert 'class="arithmatex"' not in page, f"{name}: an equation was not converted"
    assert "<math" in pages["collaborative-heads"]
    for command_name in reference.commands():
        assert f"attnserve {command_name} " in pages["cli"]
    assert "/v2/health/ready" in pages["http"]
