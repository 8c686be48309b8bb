"""Run the examples of docs/howto/serve.md and compare the answers with those on the page."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from service.app import create_app
from service.settings import Settings
from tests.service.conftest import listening
from tests.word_tokenizer import TEXT, word_tokenizer

pytestmark = pytest.mark.process

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "serve.md"

# A model with the inputs of BERT that looks up one vector per token.
BERT = """
<ir_version: 10, opset_import: ["": 18]>
bert (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask,
      int64[batch, sequence] token_type_ids) => (float[batch, sequence, 4] last_hidden_state)
{
    last_hidden_state = Gather(words, input_ids)
}
"""
WORDS = {
    "[PAD]": 0,
    "[UNK]": 100,
    "[CLS]": 101,
    "[SEP]": 102,
    "and": 1998,
    "one": 2028,
    "another": 2178,
    "text": 3793,
}


@dataclass(frozen=True)
class Example:
    """A command and its output, in which "..." matches any text."""

    command: str
    answer: str


def parse_examples(text: str) -> list[Example]:
    """The commands of a block, each with the output in the comments that follow it."""
    found: list[Example] = []
    for part in re.split(r"^(?=curl )", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        shown = [line.removeprefix("#") for line in lines if line.startswith("#")]
        command = [line for line in lines if not line.startswith("#")]
        found.append(Example("\n".join(command), "".join(shown)))
    return found


def examples() -> list[Example]:
    """The commands of the blocks that are marked ``run: serve``."""
    blocks = re.findall(
        r"^<!-- run: serve -->\n```sh\n(.*?)^```",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    return [example for block in blocks for example in parse_examples(block)]


def write_bert(folder: Path) -> Path:
    """The model that the examples name: BERT's inputs, and four dimensions."""
    folder.mkdir()
    model = parser.parse_model(BERT)
    table = np.random.default_rng(0).standard_normal((30522, 4)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(table, "words"))
    onnx.save(model, folder / "model.onnx")
    word_tokenizer(WORDS, single=TEXT).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = write_bert(tmp_path_factory.mktemp("models") / "smaller")
    with listening(create_app(Settings(model=folder, probe=False))) as address:
        yield address


def is_answer(example: Example, answer: str) -> bool:
    """Whether ``answer`` is what the example shows, except for white space."""

    def squeezed(text: str) -> str:
        return re.sub(r"\s+", "", text)

    pattern = ".*".join(map(re.escape, squeezed(example.answer).split("...")))
    return re.fullmatch(pattern, squeezed(answer), re.DOTALL) is not None


@pytest.mark.skipif(
    shutil.which("curl") is None or shutil.which("bash") is None, reason="needs curl and bash"
)
@pytest.mark.parametrize("example", examples(), ids=lambda example: example.command[:60])
def test_example_command_prints_what_the_page_shows(address: str, example: Example) -> None:
    command = example.command.replace("localhost:8000", address.removeprefix("http://"))
    assert command != example.command
    done = subprocess.run(
        ["bash", "-ec", command], capture_output=True, text=True, timeout=60, check=True
    )
    assert is_answer(example, done.stdout), done.stdout


def test_examples_cover_every_protocol() -> None:
    commands = " ".join(example.command for example in examples())
    for path in ("/embed", "/similarity", "/tokenize", "/v1/", "/v2/models", "/v2/repository"):
        assert f"localhost:8000{path}" in commands
