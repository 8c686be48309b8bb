"""attnserve: find attention in any transformer ONNX graph, rewrite, prove, measure and serve it.

The functions here are the commands of the same names. Each is imported on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnserve.evaluate import evaluate
    from attnserve.export import export
    from attnserve.inspection import inspect
    from attnserve.measure import bench
    from attnserve.plan import plan
    from attnserve.report import analyze
    from attnserve.rewrite import optimize
    from attnserve.verify import verify

__all__ = [
    "__version__",
    "analyze",
    "bench",
    "evaluate",
    "export",
    "inspect",
    "optimize",
    "plan",
    "verify",
]

__version__ = "0.1.0"

_MODULES = {
    "analyze": "attnserve.report",
    "bench": "attnserve.measure",
    "evaluate": "attnserve.evaluate",
    "export": "attnserve.export",
    "inspect": "attnserve.inspection",
    "optimize": "attnserve.rewrite",
    "plan": "attnserve.plan",
    "verify": "attnserve.verify",
}
"""The module that defines each function."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


class _Package(ModuleType):
    """A package whose functions are not hidden by submodules of the same name (plan, verify).

    Python sets a submodule as an attribute of its package once it is imported.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
