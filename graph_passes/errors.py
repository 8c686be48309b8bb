"""Exceptions of attnserve, and the refusals of rewrites.

The exit code is 2 for bad input or usage, and 1 for a check that failed. A graph without attention
is not an error: ``find_attention`` returns ``Unmatched`` values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

__all__ = [
    "IMPOSSIBLE",
    "MALFORMED_NODE",
    "AttnserveError",
    "CannotRewrite",
    "CheckFailed",
    "InvalidArgument",
    "InvalidData",
    "InvalidModel",
    "InvalidOutput",
    "InvariantBroken",
    "MissingExtra",
    "OutdatedExtra",
    "Refusal",
]


MALFORMED_NODE = (ArithmeticError, IndexError, KeyError, TypeError, ValueError)
"""Raised for a node whose attributes, inputs or shapes its operator does not allow."""


class AttnserveError(Exception):
    """Base class of all errors, with a stable code, the problem, and the fix.

    Texts name parameters of the Python API in backticks (```prune```). The command line replaces
    them with its options.

    Args:
        what: The problem and its place, with expected and actual values; one line.
        fix: The fix; one line.
        code: Stable identifier of the cause for programs and tests: ``area.cause``.
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
    """An argument has an invalid value."""

    default_code = "argument.invalid"


class InvalidData(AttnserveError):
    """Calibration or evaluation data does not fit the model."""

    default_code = "data.invalid"


class InvalidOutput(AttnserveError):
    """The output path exists already, or cannot be written."""

    default_code = "output.invalid"


class MissingExtra(AttnserveError):
    """An optional dependency is not installed."""

    default_code = "extra.missing"


class OutdatedExtra(MissingExtra):
    """An optional dependency is installed in a version that is too old."""


class CannotRewrite(AttnserveError, ir.passes.PreconditionError):
    """A requested rewrite does not apply to the graph."""

    default_code = "rewrite.refused"


class InvariantBroken(AttnserveError, ir.passes.PostconditionError):
    """A rewritten graph breaks an invariant: a defect of attnserve."""

    default_code = "internal.invariant"


IMPOSSIBLE = (CannotRewrite, InvalidArgument, InvalidData, InvalidModel)
"""Raised if a pass or a runtime refuses a rewrite; a defect raises ``InvariantBroken`` instead."""


class CheckFailed(AttnserveError):
    """The command finished, and a check of its result failed."""

    default_code = "check.failed"

    exit_code = 1


@dataclass(frozen=True)
class Refusal:
    """The reason why something does not apply, such as a rewrite to a block.

    Functions that return ``Refusal | None`` return None if it applies.

    Attributes:
        code: Stable identifier of the reason, such as ``quantized``; an error adds the area.
        reason: One clause for users; the subject of a refused rewrite is the block.
        fix: The alternative for users, if the reason determines it.
    """

    code: str
    reason: str
    fix: str = ""

    def __str__(self) -> str:
        return self.reason

    @classmethod
    def of(
        cls,
        check: Callable[[], object],
        errors: tuple[type[AttnserveError], ...] = (AttnserveError,),
    ) -> Refusal | None:
        """The reason of the error that a check raises, one of ``errors``; None if it passes."""
        try:
            check()
        except errors as error:
            return cls(error.code.rpartition(".")[2], error.what, error.fix)
        return None

    def error(
        self,
        subject: str,
        fix: str = "",
        *,
        area: str = "rewrite",
        kind: type[AttnserveError] = CannotRewrite,
    ) -> AttnserveError:
        """Return the error for a required ``subject``, which may be empty; its code is AREA.CODE.

        Args:
            fix: The alternative, instead of that of the refusal.
        """
        what = f"{subject}: {self}" if subject else self.reason
        return kind(what, fix or self.fix, code=f"{area}.{self.code}")
