"""Write ``attnserve/__init__.pyi``: ``python -m tests.attnserve.options.make_stub``."""

from __future__ import annotations

import collections.abc
import os
import pathlib
import re
import typing
from collections.abc import Callable
from inspect import Parameter, signature, unwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator

import attnserve
from attnserve import context, literals, options, paths
from attnserve.options import fields, is_group
from graph_passes.analysis import workload

FILE = Path(attnserve.__file__).with_suffix(".pyi")

MODULES = (
    collections.abc,
    os,
    pathlib,
    typing,
    context,
    literals,
    paths,
    fields,
    workload,
    options,
)
"""Modules that name the types of parameters."""

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(attnserve, name)
    for name in attnserve.__all__
    if name.islower() and not name.startswith("_")
}

LITERALS = {
    value: name
    for module in MODULES
    for name, value in vars(module).items()
    if get_origin(value) is Literal
}
"""The names of the types with a fixed set of values."""

TEMPLATE = '''"""The functions with all their keywords, for type checkers.

Written by ``python -m tests.attnserve.options.make_stub``.
"""

{imports}

__all__ = [
{names}]

__version__: str

{functions}
'''


def accepted(kind: Any) -> str:
    """The type of the values that a field takes: what its reader reads, or else its own type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        readers = [item for item in arguments if isinstance(item, BeforeValidator)]
        return accepted(readers[0].json_schema_input_type if readers else arguments[0])
    if origin is Literal:
        return LITERALS[kind]
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(accepted, arguments)))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(accepted, arguments))}]"
    return {NoneType: "None", ...: "..."}.get(kind) or kind.__name__


def declaration(name: str, function: Callable[..., Any]) -> str:
    """A function with the types of all its parameters."""
    types = {
        field: accepted(hint)
        for group in filter(is_group, get_type_hints(function).values())
        for field, hint in get_type_hints(group, include_extras=True).items()
    }
    lines = [f"def {name}("]
    for parameter in signature(function).parameters.values():
        if parameter.kind is Parameter.KEYWORD_ONLY and "    *," not in lines:
            lines.append("    *,")
        kind = types.get(parameter.name, parameter.annotation)
        default = "" if parameter.default is Parameter.empty else " = ..."
        lines.append(f"    {parameter.name}: {kind}{default},")
    return "\n".join([*lines, f") -> {signature(function).return_annotation}: ..."])


def imports(text: str) -> str:
    """The imports of the names in the text."""
    sources = {name: module.__name__ for module in reversed(MODULES) for name in vars(module)}
    for function in FUNCTIONS.values():
        own = unwrap(function)
        for name in re.findall(r"[A-Z]\w+", signature(function).return_annotation):
            kind = own.__globals__[name]
            sources[name] = kind.__module__ if isinstance(kind, type) else own.__module__
    names: dict[str, list[str]] = {}
    for name in sorted(set(re.findall(r"[A-Z]\w+", text)) & sources.keys()):
        names.setdefault(sources[name], []).append(name)
    lines: list[str] = []
    for source, found in sorted(names.items()):
        line = f"from {source} import {', '.join(found)}"
        many = "".join(f"    {name},\n" for name in found)
        lines.append(line if len(line) <= 100 else f"from {source} import (\n{many})")
    ours = [line for line in lines if re.match("from (attnserve|graph_passes)", line)]
    return "\n".join([*(line for line in lines if line not in ours), "", *ours])


def module() -> str:
    """The content of the file."""
    text = "\n".join(declaration(name, function) for name, function in FUNCTIONS.items())
    names = "".join(f'    "{name}",\n' for name in sorted(attnserve.__all__))
    return TEMPLATE.format(imports=imports(f"{names}{text}"), names=names, functions=text)


if __name__ == "__main__":
    FILE.write_text(module(), encoding="utf-8")
