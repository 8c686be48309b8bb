"""attnserve: find attention in any transformer ONNX graph, rewrite, prove, measure and serve it.

The functions here are the commands of the same names.
"""

from attnserve.checks.benchmark import bench
from attnserve.checks.compare import verify
from attnserve.checks.evaluate import evaluate
from attnserve.checks.inspect import inspect
from attnserve.models.export import export
from attnserve.planning.command import plan
from attnserve.planning.optimize import optimize
from attnserve.reports.html import analyze

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
