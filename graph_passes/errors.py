"""Every error that attnserve raises on purpose.

    AttnserveError                 exit code 2: bad input or usage, nothing written
    ├── InvalidModel               the file or its graph cannot be read
    ├── InvalidArgument            an option has a value that cannot work
    ├── InvalidData                calibration or evaluation data does not fit the model
    ├── InvalidOutput              the place to write to exists, or cannot be written
    ├── MissingExtra               an optional dependency is not installed
    ├── CannotRewrite              a rewrite that was asked for does not apply
    ├── InvariantBroken            a rewritten graph breaks a law (a defect of ours)
    └── CheckFailed                exit code 1: the work was done, and its promise does not hold

A graph that merely holds no attention is not an error: finding returns ``Unmatched`` values.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

__all__ = [
    "AttnserveError",
    "CannotRewrite",
    "CheckFailed",
    "InvalidArgument",
    "InvalidData",
    "InvalidModel",
    "InvalidOutput",
    "InvariantBroken",
    "MissingExtra",
    "Refusal",
]


class AttnserveError(Exception):
    """An error with a stable code, what is wrong, and how to fix it.

    Texts name parameters of the Python API in backticks (```prune```); the command line shows its
    options in their place.

    Args:
        what: What is wrong and where, expected and actual value, in one line.
        fix: What the reader can do next, in one line.
        code: A stable name of the cause, for programs and tests: ``area.cause``.
    """

    exit_code = 2
    default_code = "error"

    def __init__(self, what: str, fix: str = "", *, code: str = "") -> None:
        super().__init__(what, fix)
        self.what = " ".join(what.split())
        self.fix = " ".join(fix.split())
        self.code = code or self.default_code

    def __str__(self) -> str:
        return f"{self.what}\n{self.fix}" if self.fix else self.what


class InvalidModel(AttnserveError):
    """The file or its graph cannot be read."""

    default_code = "model.invalid"


class InvalidArgument(AttnserveError, ir.passes.PreconditionError):
    """An option has a value that cannot work."""

    default_code = "argument.invalid"


class InvalidData(AttnserveError):
    """Calibration or evaluation data does not fit the model."""

    default_code = "data.invalid"


class InvalidOutput(AttnserveError):
    """The place to write to exists already, or cannot be written."""

    default_code = "output.invalid"


class MissingExtra(AttnserveError):
    """An optional dependency is not installed."""

    default_code = "extra.missing"


class CannotRewrite(AttnserveError, ir.passes.PreconditionError):
    """A rewrite that was asked for does not apply to this graph."""

    default_code = "rewrite.refused"


class InvariantBroken(AttnserveError, ir.passes.PostconditionError):
    """A rewritten graph breaks a law: a defect of attnserve, never of its user."""

    default_code = "internal.invariant"


class CheckFailed(AttnserveError):
    """The work was done, and what it promised does not hold."""

    default_code = "check.failed"

    exit_code = 1


@dataclass(frozen=True)
class Refusal:
    """Why a rewrite does not apply to a block.

    Attributes:
        code: A stable name of the reason.
        reason: One clause for users, whose subject is the block.
    """

    code: str
    reason: str

    def __str__(self) -> str:
        return self.reason
