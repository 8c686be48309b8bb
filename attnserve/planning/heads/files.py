"""Read head masks and reuse edges from .json files or objects, and validate them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    Strict,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)

from attnserve.paths import StrPath
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import InvalidArgument, InvalidData
from graph_passes.passes.prune_heads import check_mask
from graph_passes.passes.reuse_attention import SourceHead, check_edges

__all__ = ["Masks", "MutableEdges", "layer_name", "parse_count", "read_edges", "read_masks"]

Masks = dict[str, list[int]]
"""Head masks by layer: 1 for each kept head, 0 for each removed one."""

MutableEdges = dict[str, dict[int, SourceHead]]
"""Mutable ``graph_passes.passes.reuse_attention.Edges``: layer, head -> (source layer, head)."""

MASK_FORM = '{"layer": [1, 0, ...]}: 1 for each head to keep and 0 for each head to remove'
EDGE_FORM = '{"layer": {"head": ["earlier layer", head]}}; count heads from 0'


def _as_tuple(value: Any) -> Any:
    """A list or an array as a tuple; other values are left to be refused."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return tuple(value) if isinstance(value, list) else value


Integer = Annotated[int, Strict()]
Bit = Annotated[float, Strict(), Field(ge=0, le=1, multiple_of=1), AfterValidator(int)]
Mask = Annotated[tuple[Bit, ...], Strict(), BeforeValidator(_as_tuple)]
Layer = Annotated[Integer | Annotated[str, Strict()], AfterValidator(str)]
Source = Annotated[tuple[Layer, Integer], Strict(), BeforeValidator(_as_tuple)]
Head = Annotated[str, BeforeValidator(str), StringConstraints(pattern=r"^\d{1,99}$")]

MASKS: TypeAdapter[Any] = TypeAdapter(dict[str, Mask])
EDGES: TypeAdapter[Any] = TypeAdapter(dict[str, dict[Head, Source]])


def layer_name(layer: str, names: Sequence[str], parameter: str = "layers") -> str:
    """Resolve the name of a layer, or its index from 0.

    Args:
        parameter: The Python parameter that holds the layer, for errors.

    Raises:
        InvalidArgument: No layer has this name or index.
    """
    if layer in names:
        return layer
    index = parse_count(layer)
    if index is not None and index < len(names):
        return names[index]
    raise InvalidArgument(
        f"`{parameter}` names the unknown layer {layer[:100]!r}; the model has {len(names)} "
        f"attention layers, the first is {names[0]!r}",
        "use names or indices (from 0) as `attnserve inspect` lists them",
        code="request.unknown_layer",
    )


def parse_count(text: str) -> int | None:
    """Parse a decimal number; None if the text is not a number, or is too long."""
    return int(text) if text.isdecimal() and len(text) < 100 else None


def read_masks(source: StrPath | Mapping[str, Any], blocks: Sequence[AttentionBlock]) -> Masks:
    """Read {"layer name or index": [0 or 1 for each head]}, and check it against the model.

    Raises:
        InvalidData: The file cannot be read, or has another structure.
        InvalidArgument: A layer is unknown or named twice, a mask has another length or entries
            other than 0 and 1, or no head of the model is left.
    """
    content = _read(source, MASKS, "prune_heads", MASK_FORM, "masks.entries")
    heads = {block.name: block.num_heads for block in blocks}
    masks: Masks = {}
    for layer, mask in content.items():
        name = layer_name(layer, list(heads), "prune_heads")
        if name in masks:
            raise InvalidArgument(
                f"`prune_heads` has two masks for {name}", "give each layer one", code="masks.twice"
            )
        try:
            check_mask(name, mask, heads[name])
        except InvalidArgument as error:
            raise InvalidArgument(
                f"`prune_heads`: {error.what}", error.fix, code="masks.length"
            ) from error
        masks[name] = list(mask)
    if not any(sum(masks.get(name, [1])) for name in heads):
        raise InvalidArgument(
            "`prune_heads` removes every head of the model",
            "keep at least one head of one layer",
            code="masks.empty",
        )
    return masks


def read_edges(
    source: StrPath | Mapping[str, Any], blocks: Sequence[AttentionBlock]
) -> MutableEdges:
    """Read {"layer": {"head": ["source layer", head]}}: layers by name or index, heads from 0.

    Raises:
        InvalidData: The file cannot be read, or has another structure.
        InvalidArgument: An edge is malformed or impossible.
    """
    content = _read(source, EDGES, "reuse", EDGE_FORM, "edges.format")
    names = [block.name for block in blocks]
    edges: MutableEdges = {}
    for layer, heads in content.items():
        name = layer_name(layer, names, "reuse")
        taken = edges.setdefault(name, {})
        for head, (source_layer, source_head) in heads.items():
            if int(head) in taken:
                raise InvalidArgument(
                    f"`reuse`: head {int(head)} of {name} has two sources",
                    "give each head one",
                    code="edges.twice",
                )
            taken[int(head)] = layer_name(source_layer, names, "reuse"), source_head
    try:
        check_edges(edges, blocks)
    except InvalidArgument as error:
        raise InvalidArgument(f"`reuse`: {error.what}", error.fix, code="edges.invalid") from error
    return {name: taken for name, taken in edges.items() if taken}


def _read(
    source: StrPath | Mapping[str, Any],
    adapter: TypeAdapter[Any],
    parameter: str,
    form: str,
    code: str,
) -> dict[str, Any]:
    """The content as the adapter's type; an error shows the first layer that does not fit."""
    content = source if isinstance(source, Mapping) else _read_object(source, parameter, form)
    content = {str(key): value for key, value in content.items()}
    try:
        return adapter.validate_python(content)
    except ValidationError as error:
        layer = str(error.errors(include_url=False)[0]["loc"][0])
        shown = json.dumps(content[layer], default=repr)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise InvalidArgument(
            f"`{parameter}`: {layer[:100]} has the invalid value {shown}",
            f"write {form}",
            code=code,
        ) from error


def _read_object(path: StrPath, parameter: str, form: str) -> Mapping[str, Any]:
    where = f"`{parameter}` {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
        content: Any = json.loads(text, object_pairs_hook=_unique_keys)
    except FileNotFoundError as error:
        what = f"{where}: no such file"
        raise InvalidData(what, "check the path", code="request.no_file") from error
    except OSError as error:
        what = f"{where}: cannot be read: {error.strerror}"
        raise InvalidData(what, "check the path", code="request.unreadable_file") from error
    except (ValueError, RecursionError) as error:
        what = f"{where}: not JSON: {error}"
        raise InvalidData(what, f"write {form}", code="request.not_json") from error
    if not isinstance(content, dict) or not content:
        what = f"{where}: expected an object with entries"
        raise InvalidData(what, f"write {form}", code="request.not_object")
    return cast("dict[str, Any]", content)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, and reject repeated keys."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key is repeated")
    return content
