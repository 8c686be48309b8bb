"""Find, compress, verify, benchmark and serve multi-head attention in ONNX models.

The functions are the commands of the same names (``verify_again`` is ``verify --again``, and
``evaluate_mteb`` is ``evaluate --mteb``). The classes are groups of options, whose fields are also
keywords of the functions: ``optimize(model, keep=0.99, calib="texts.txt")`` (``__init__.pyi`` lists
them for type checkers). Functions and classes are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "2.0.0"

_MODULES = {
    "Comparison": "attnserve.options",
    "Data": "attnserve.options",
    "Goal": "attnserve.options",
    "Rewrites": "attnserve.options",
    "Run": "attnserve.options",
    "Scoring": "attnserve.options",
    "Target": "attnserve.options",
    "Timing": "attnserve.options",
    "Training": "attnserve.options",
    "Write": "attnserve.options",
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
}
"""The module that defines each group of options and each function."""

# Type checkers read __init__.pyi.
__all__ = ["__version__", *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    if not isinstance(value, type):
        from attnserve.options import with_keywords

        value = with_keywords(value)
        value.__module__ = __name__  # where pickle finds it
    globals()[name] = value
    return value
