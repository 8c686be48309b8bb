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

A graph that merely holds no attention is not an error: finding returns ``Miss`` values.
"""

from __future__ import annotations

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
]


class AttnserveError(Exception):
    """One line that says what, expected, got and where; a second that says what to do.

    Args:
        what: What is wrong and where, in one line.
        fix: What the reader can do next, in one line.
    """

    exit_code = 2

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what, fix)
        self.what = " ".join(what.split())
        self.fix = " ".join(fix.split())

    def __str__(self) -> str:
        return f"{self.what}\n{self.fix}" if self.fix else self.what


class InvalidModel(AttnserveError):
    """The file or its graph cannot be read."""


class InvalidArgument(AttnserveError, ir.passes.PreconditionError):
    """An option has a value that cannot work."""


class InvalidData(AttnserveError):
    """Calibration or evaluation data does not fit the model."""


class InvalidOutput(AttnserveError):
    """The place to write to exists already, or cannot be written."""


class MissingExtra(AttnserveError):
    """An optional dependency is not installed."""


class CannotRewrite(AttnserveError, ir.passes.PreconditionError):
    """A rewrite that was asked for does not apply to this graph."""


class InvariantBroken(AttnserveError, ir.passes.PostconditionError):
    """A rewritten graph breaks a law: a defect of attnserve, never of its user."""


class CheckFailed(AttnserveError):
    """The work was done, and what it promised does not hold."""

    exit_code = 1
