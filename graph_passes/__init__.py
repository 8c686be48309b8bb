"""Find multi-head attention and feed-forward blocks in ONNX graphs, and rewrite them.

>>> from graph_passes import PruneHeads, find_attention
>>> blocks, unmatched = find_attention(model)  # model: onnx_ir.Model
>>> [(block.num_heads, block.head_size) for block in blocks]
[(3, 4)]
>>> result = PruneHeads({blocks[0].name: [1, 0, 1]})(model)
>>> find_attention(result.model).blocks[0].num_heads
2

A block is invalid once its graph has changed: find again after each rewrite. The module ``public``
lists the names. It is imported on first use, because its dependencies take long to import.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graph_passes.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if find_spec(f"{__name__}.{name}") is None:  # also called for `from graph_passes import errors`
        public = import_module(f"{__name__}.public")
        if name == "__all__" or name in public.__all__:
            return getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
