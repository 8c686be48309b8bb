"""attnserve: find attention in any transformer ONNX graph, rewrite, prove, measure and serve it.

The functions here are the commands of the same names.
"""

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
