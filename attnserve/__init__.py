"""Find, compress, verify, benchmark and serve multi-head attention in ONNX models.

The functions here are the commands of the same names (``verify_again`` is ``verify --again``, and
``evaluate_mteb`` is ``evaluate --mteb``), and the classes are groups of their options. Each is
imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnserve.checks.benchmark import bench
    from attnserve.checks.compare import verify
    from attnserve.checks.evaluate import evaluate
    from attnserve.checks.inspect import inspect
    from attnserve.exporters.hugging_face import export
    from attnserve.integrations.mteb import evaluate_mteb
    from attnserve.options import (
        Comparison,
        Data,
        Goal,
        Rewrites,
        Run,
        Scoring,
        Target,
        Timing,
        Training,
        Write,
    )
    from attnserve.planning.optimize import optimize
    from attnserve.planning.plan_command import plan
    from attnserve.planning.recover_command import recover
    from attnserve.planning.verify_again import verify_again
    from attnserve.reports.analyze import analyze
    from attnserve.reports.model_report import report

__all__ = [
    "Comparison",
    "Data",
    "Goal",
    "Rewrites",
    "Run",
    "Scoring",
    "Target",
    "Timing",
    "Training",
    "Write",
    "__version__",
    "analyze",
    "bench",
    "evaluate",
    "evaluate_mteb",
    "export",
    "inspect",
    "optimize",
    "plan",
    "recover",
    "report",
    "verify",
    "verify_again",
]

__version__ = "2.0.0"

_MODULES = {
    "analyze": "attnserve.reports.analyze",
    "bench": "attnserve.checks.benchmark",
    "evaluate": "attnserve.checks.evaluate",
    "evaluate_mteb": "attnserve.integrations.mteb",
    "export": "attnserve.exporters.hugging_face",
    "inspect": "attnserve.checks.inspect",
    "optimize": "attnserve.planning.optimize",
    "plan": "attnserve.planning.plan_command",
    "recover": "attnserve.planning.recover_command",
    "report": "attnserve.reports.model_report",
    "verify": "attnserve.checks.compare",
    "verify_again": "attnserve.planning.verify_again",
    **{name: "attnserve.options" for name in __all__ if name[0].isupper()},
}
"""The module that defines each function and each group of options."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
