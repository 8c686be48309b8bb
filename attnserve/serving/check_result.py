"""The result of a load check, and the checksum of all files of the checked model."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

from attnserve.models.artifact import Artifact
from attnserve.models.checksums import sha256
from attnserve.models.onnx_validation import external_file
from attnserve.models.recorded import Recorded
from attnserve.serving.graph_facts import GraphCost, GraphFacts
from attnserve.serving.operator_report import OperatorReport
from graph_passes.errors import InvalidModel

__all__ = ["FIX", "CachedResult", "CheckResult", "checksum_of", "identify"]

CONFIGURATION_FILES = ("tokenizer.json", "tokenizer_config.json", "attnserve.json", "config.json")
"""Files beside the model that change its results."""

FIX = "do not use this file; if you made it, check it with onnx.checker.check_model"


@dataclass(frozen=True)
class CheckResult:
    """A model that passed the check.

    Attributes:
        checksum: A checksum of the model's files except the external data (``checksum_of``).
        identity: A checksum of all files of the model.
        external: The external data files of the model with their checksums.
        fused_file: The model with fused operators; None if the original is run.
        operators: The operators of the model that is run.
        facts: Facts of the original.
        fused_cost: The cost of the fused model; None if the original is run.
        fusion: Future result of the fusion in the background; None if no fusion runs.
    """

    checksum: str
    identity: str
    external: tuple[tuple[Path, str], ...]
    fused_file: Path | None
    operators: OperatorReport
    facts: GraphFacts = field(compare=False)
    fused_cost: GraphCost | None = field(default=None, compare=False)
    fusion: Future[CheckResult] | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls, artifact: Artifact, checksum: str, facts: GraphFacts, operators: OperatorReport
    ) -> CheckResult:
        """The result for a model that is run without operator fusion.

        Raises:
            InvalidModel: External data cannot be read, or is outside of the folder.
        """
        if any(external_file(artifact.model, location) is None for location in facts.external):
            raise InvalidModel(
                f"{artifact.model}: external data is outside its folder",
                FIX,
                code="artifact.external_outside",
            )
        paths = (artifact.folder / location for location in facts.external)
        external = tuple((path, sha256(path)) for path in paths)
        digest = hashlib.sha256(checksum.encode())
        for path, data_checksum in external:
            digest.update(f" {path.name} {data_checksum}".encode())
        return cls(checksum, digest.hexdigest(), external, None, operators, facts)

    def is_current(self, artifact: Artifact) -> bool:
        """Whether all files of the model are unchanged."""
        with suppress(InvalidModel, OSError):
            now = self.of(artifact, checksum_of(artifact), self.facts, self.operators)
            return now.identity == self.identity
        return False

    @property
    def external_is_current(self) -> bool:
        """Whether the external data is unchanged."""
        with suppress(InvalidModel):
            return all(sha256(path) == checksum for path, checksum in self.external)
        return False

    def unfused(self, why: str) -> CheckResult:
        """The result for the model without operator fusion, for the reason ``why``."""
        operators = OperatorReport(why=why, refused=self.operators.refused_runtimes)
        return replace(self, fused_file=None, operators=operators, fused_cost=None)

    @property
    def running_facts(self) -> GraphFacts:
        """Facts of the model that is run."""
        return self.facts if self.fused_cost is None else self.facts.with_cost(self.fused_cost)


def _cost_to_json(cost: GraphCost | None) -> dict[str, Any]:
    return {} if cost is None else cost.to_json()


class CachedResult(Recorded, frozen=True):
    """The part of a ``CheckResult`` that the cache stores; the others follow from the files.

    JSON has an empty object if there is no ``fused_cost``.
    """

    identity: str
    facts: GraphFacts
    operators: OperatorReport
    fused_cost: Annotated[
        GraphCost | None,
        BeforeValidator(lambda content: content or None),
        PlainSerializer(_cost_to_json),
        Field(alias="running"),
    ]


def identify(artifact: Artifact) -> CheckResult:
    """Create the result of a trusted model without check and fusion.

    Raises:
        InvalidModel: The model cannot be read.
    """
    checksum = checksum_of(artifact)
    facts = GraphFacts.read(artifact)
    operators = OperatorReport(why="the load check is off")
    return CheckResult.of(artifact, checksum, facts, operators)


def checksum_of(artifact: Artifact) -> str:
    """A checksum of a model without external data, whose list needs the graph, which may crash."""
    digest = hashlib.sha256(sha256(artifact.model).encode())
    for name in CONFIGURATION_FILES:
        path = artifact.companion(name)
        digest.update(f" {name} {path and sha256(path)}".encode())
    # The record also contains settings of other files, for example of sentence-transformers.
    digest.update(json.dumps(artifact.record.to_json(), sort_keys=True).encode())
    return digest.hexdigest()
