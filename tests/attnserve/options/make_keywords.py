"""Write the fields of the groups as types: ``python -m tests.attnserve.options.make_keywords``."""

from __future__ import annotations

import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator

from attnserve import context, literals
from attnserve.options import GROUPS, Options, fields
from graph_passes.analysis import workload

FILE = Path(fields.__file__).with_name("keywords.py")

MODULES = (context, literals, fields, workload)
"""Modules that name the types with a fixed set of values."""

LITERALS = {
    value: (module.__name__, name)
    for module in reversed(MODULES)
    for name, value in vars(module).items()
    if get_origin(value) is Literal
}
"""The module and the name of each of them; ``fields`` imports some from the others."""

TEMPLATE = '''"""The fields of the groups as keywords, for type checkers.

Written by ``python -m tests.attnserve.options.make_keywords``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, TypedDict

{imports}

__all__ = [
{names}
]


{classes}
'''


def accepted(kind: Any) -> str:
    """The type of the values that a field takes: what its reader reads, or else its own type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        readers = [item for item in arguments if isinstance(item, BeforeValidator)]
        return accepted(readers[0].json_schema_input_type if readers else arguments[0])
    if origin is Literal:
        return LITERALS[kind][1]
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(accepted, arguments)))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(accepted, arguments))}]"
    return {NoneType: "None", ...: "..."}.get(kind) or kind.__name__


def keywords(group: type[Options]) -> str:
    """The type of the fields of a group."""
    types = get_type_hints(group, include_extras=True)
    lines = [f"    {name}: {accepted(types[name])}" for name in group.model_fields]
    return (
        f"class {group.__name__}Keywords(TypedDict, total=False):\n"
        f'    """The fields of ``{group.__name__}``."""\n\n' + "\n".join(lines)
    )


def module() -> str:
    """The content of the file."""
    classes = "\n\n\n".join(map(keywords, GROUPS))
    words = set(re.findall(r"\w+", classes))
    used: dict[str, list[str]] = {}
    for source, name in sorted(LITERALS.values()):
        if name in words:
            used.setdefault(source, []).append(f"    {name},\n")
    return TEMPLATE.format(
        imports="\n".join(f"from {source} import (\n{''.join(used[source])})" for source in used),
        names="\n".join(f'    "{name}",' for name in sorted(re.findall(r"class (\w+)", classes))),
        classes=classes,
    )


if __name__ == "__main__":
    FILE.write_text(module(), encoding="utf-8")
