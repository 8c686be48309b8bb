"""The record of a model, attnserve.json: its fields, and records of several models in a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, cast

from pydantic import AfterValidator, Field, FiniteFloat, StrictBool, StrictStr, ValidationError

from attnserve.literals import Activation, Padding, Pooling, Side, Similarity
from attnserve.models.json_files import first_problem
from attnserve.models.lineage import AnyEntry
from attnserve.models.recorded import Recorded
from graph_passes.errors import InvalidModel

__all__ = ["RECORD", "Record", "merged_record", "parse_record", "read_record", "write_record"]

RECORD = "attnserve.json"
"""The file name of the record."""

RESTORE = "restore or remove the file"


def _require_places(template: str) -> str:
    """The template, if it has a place for the query and one for the document.

    Raises:
        ValueError: A place is missing or repeated.
    """
    if not template.count("{query}") == template.count("{document}") == 1:
        raise ValueError("expected {query} and {document}, once each")
    return template


Count = Annotated[int, Field(strict=True, gt=0)]
Index = Annotated[int, Field(strict=True, ge=0)]
Template = Annotated[StrictStr, AfterValidator(_require_places)]


class Record(Recorded, frozen=True):
    """The content of attnserve.json about one model.

    Fields that are not given have the values of the folder's other files, or the defaults of
    ``Artifact``.

    Attributes:
        source, task, exporter, opset, attention: The exported model, and the options of the export.
        max_abs_error: The largest difference to PyTorch.
        versions: Versions of the packages that exported it.
        max_length: Maximum number of tokens of a text.
        pooling, normalize, dimensions, prompts, default_prompt, similarity: Settings of embeddings.
        output: The output from which embeddings and scores are computed.
        activation, id2label: Settings of scores.
        template: The text of a pair, with {query} and {document}; else the tokenizer joins pairs.
        padding: The side of padding, by default "right"; "left" is for graphs that pool the last
            position themselves.
        lower_case: Whether texts are converted to lower case before the tokenizer normalizes them.
        truncation_side: The side at which long texts lose tokens, instead of that of the
            tokenizer's files.
        first_position: The position id of the first token, for an input ``position_ids``.
        files: Checksums of the model's files, by name; exports have none.
        lineage: The rewrites of the model, oldest first.
        others: Records of other models in the folder, by file name.
    """

    pooling: Pooling | None = None
    normalize: StrictBool | None = None
    dimensions: Count | None = None
    prompts: dict[str, StrictStr] | None = None
    default_prompt: StrictStr | None = None
    similarity: Similarity | None = None
    output: StrictStr | None = None
    padding: Padding | None = None
    lower_case: StrictBool | None = None
    truncation_side: Side | None = None
    activation: Activation | None = None
    template: Template | None = None
    max_length: Count | None = None
    first_position: Index | None = None
    id2label: dict[str, Any] | list[Any] | None = None
    task: StrictStr | None = None
    exporter: StrictStr | None = None
    opset: int | None = None
    attention: StrictStr | None = None
    max_abs_error: FiniteFloat | None = None
    versions: Mapping[str, str] | None = None
    source: StrictStr | None = None
    format: int = 1
    files: Mapping[str, StrictStr] = {}
    lineage: tuple[AnyEntry, ...] = ()
    others: Mapping[str, Record] = {}

    @classmethod
    def parse(cls, content: Any, path: Path, fix: str = RESTORE) -> Self:
        """The record with this JSON content.

        Args:
            path: The file that it comes from, for messages.

        Raises:
            InvalidModel: A value is invalid, or cannot be written as JSON: text with lone
                surrogates, or an integer of more than 64 bits.
        """
        # orjson writes the parts of the record that the service answers with. Not at the top of the
        # module: Ctrl-C during this import ends Python with a segmentation fault.
        import orjson

        try:
            orjson.dumps(content)
            return cls.model_validate(content)
        except (TypeError, ValidationError) as error:
            is_invalid = isinstance(error, ValidationError)
            problem = first_problem(error) if is_invalid else str(error)
            raise InvalidModel(f"{path}: {problem}", fix, code="artifact.record") from error

    def over(self, base: Self) -> Self:
        """Return ``base`` updated with the fields that are given here."""
        return base.model_copy(update=self.stated)

    def describes(self, folder: Path) -> str | None:
        """The existing model in ``folder`` that this is the record of, if any."""
        files = self.files if "files" in self.model_fields_set else {"model.onnx": ""}
        return next(
            (name for name in files if name.endswith(".onnx") and (folder / name).is_file()), None
        )

    def without(self, *fields: str) -> Self:
        kept = {name: value for name, value in self.stated.items() if name not in fields}
        return type(self)().model_copy(update=kept)


def merged_record(file: Path, record: Record) -> Record:
    """Add the records of other models in the folder of ``file`` under "others", by file name."""
    path = file.with_name(RECORD)
    if not path.is_file():
        return record
    earlier = parse_record(path)
    others = dict(earlier.others)
    name = earlier.describes(path.parent)
    if name is not None:
        others[name] = earlier.without("others")
    others.pop(file.name, None)
    return record.model_copy(update={"others": others}) if others else record


def write_record(folder: Path, record: Record) -> None:
    """Write attnserve.json as indented JSON."""
    text = json.dumps(record.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
    (folder / RECORD).write_text(text + "\n", encoding="utf-8")


def read_record(model: Path) -> Record:
    """The record of one model; empty if attnserve.json describes only other models."""
    path = model.with_name(RECORD)
    if not path.is_file():
        return Record()
    record = parse_record(path)
    if model.name in record.others:
        return record.others[model.name]
    is_its_own = record.describes(path.parent) in (model.name, None)
    return record.without("others") if is_its_own else Record()


def parse_record(path: Path) -> Record:
    """The content of a file attnserve.json, with the records of other models under "others".

    Raises:
        InvalidModel: The file cannot be read, or a value is invalid.
    """
    import orjson

    try:
        content: Any = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        place = error.strerror if isinstance(error, OSError) else f"line {error.lineno}"
        raise InvalidModel(
            f"{path}: not valid JSON: {place}", RESTORE, code="artifact.record"
        ) from error
    if not isinstance(content, dict):
        raise InvalidModel(f"{path}: expected a JSON object", RESTORE, code="artifact.record")
    return Record.parse(cast(Mapping[str, Any], content), path)
