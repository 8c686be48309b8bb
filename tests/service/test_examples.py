"""The README's examples of serving: each command is run, and answered as the README shows."""

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
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from service.app import create_app
from service.settings import Settings
from tests.service.conftest import listening

pytestmark = pytest.mark.process

README = Path(__file__).parents[2] / "README.md"

# The inputs and the token ids of a BERT, and nothing else of it.
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
    """A command, and what it prints: "..." stands for anything."""

    command: str
    answer: str


def examples() -> list[Example]:
    """Those of the README's section on serving."""
    (section,) = re.findall(
        r"^## Serve\n(.*?)^## ", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    found: list[Example] = []
    for block in re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^(?=curl )", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            shown = [line.removeprefix("#") for line in lines if line.startswith("#")]
            command = [line for line in lines if not line.startswith("#")]
            found.append(Example("\n".join(command), "".join(shown)))
    return found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models") / "smaller"
    folder.mkdir()
    model = parser.parse_model(BERT)
    table = np.random.default_rng(0).standard_normal((30522, 4)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(table, "words"))
    onnx.save(model, folder / "model.onnx")
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 101), ("[SEP]", 102)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    with listening(create_app(Settings(model=folder, probe=False))) as address:
        yield address


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


@pytest.mark.skipif(
    shutil.which("curl") is None or shutil.which("bash") is None, reason="needs curl and bash"
)
@pytest.mark.parametrize("example", examples(), ids=lambda example: example.command[:60])
def test_an_example_of_the_readme(address: str, example: Example) -> None:
    command = example.command.replace("localhost:8000", address.removeprefix("http://"))
    assert command != example.command
    done = subprocess.run(
        ["bash", "-ec", command], capture_output=True, text=True, timeout=60, check=True
    )
    pattern = ".*".join(map(re.escape, squeezed(example.answer).split("...")))
    assert re.fullmatch(pattern, squeezed(done.stdout), re.DOTALL), done.stdout


def test_every_protocol_has_an_example() -> None:
    commands = " ".join(example.command for example in examples())
    for path in ("/embed", "/similarity", "/tokenize", "/v1/", "/v2/models", "/v2/repository"):
        assert f"localhost:8000{path}" in commands
