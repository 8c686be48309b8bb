"""Markdown reference pages: command line, HTTP interface, settings and metrics."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import tempfile
from collections import ChainMap
from collections.abc import Iterator
from inspect import getdoc, unwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin
from unittest.mock import patch

import onnx_ir as ir
from typer.main import get_command

import attnserve
import graph_passes.passes
from attnserve.cli.app import app
from attnserve.models.settings_files import FILES, SettingsFile
from attnserve.options import GROUPS, Options
from attnserve.options.base import field_docstrings
from service.app import create_app
from service.metrics import Metrics
from service.present_state import PresentState
from service.settings import EnvironmentOptions, RaySettings, Settings


def commands() -> dict[str, Any]:
    """Every command by its full name without the program: ``optimize``, ``deploy triton``."""

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield " ".join(path), command
            return
        for name, each in inner.items():
            yield from walk(each, (*path, name))

    return dict(walk(get_command(app), ()))


def cli() -> str:
    """One section per command: usage, description, arguments and options."""
    return "\n\n".join(_command(name, command) for name, command in commands().items())


def _command(name: str, command: Any) -> str:
    arguments = [each.name.upper() for each in command.params if _is_argument(each)]
    usage = " ".join(["attnserve", name, *arguments, "[OPTIONS]"])
    parts = [f"## {name}", f"```text\n{usage}\n```", _paragraphs(command.help or "")]
    if command.epilog:
        parts.append(command.epilog.replace("Example: ", "Example:\n\n```sh\n") + "\n```")
    panels: dict[str, list[Any]] = {}
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        panel = "Arguments" if _is_argument(parameter) else parameter.rich_help_panel or "Options"
        panels.setdefault(panel, []).append(parameter)
    for panel, parameters in panels.items():
        rows = [
            f"| {_names(parameter)} | {_cell(parameter.help or '')} | {_default(parameter)} |"
            for parameter in parameters
        ]
        parts.append(
            "\n".join([f"**{panel}**", "", "| name | meaning | default |", "|---|---|---|", *rows])
        )
    return "\n\n".join(parts)


def _is_argument(parameter: Any) -> bool:
    return not parameter.opts[0].startswith("-")


def _names(parameter: Any) -> str:
    if _is_argument(parameter):
        return f"`{parameter.name.upper()}`"
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    choices = [
        each for each in get_args(parameter.type_descriptor.annotation) if isinstance(each, str)
    ]
    return names + (f"<br>{', '.join(choices)}" if choices else "")


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if callable(value) or value is None or isinstance(value, bool):
        return ""
    return f"`{value}`"


def options() -> str:
    """One table of fields per group of options."""
    return "\n\n".join(map(_group, GROUPS))


def _group(kind: type[Options]) -> str:
    types = _accepted(kind)
    rows: list[str] = []
    for name, field in kind.model_fields.items():
        values = kind.option(name).kind
        choices = get_args(values) if get_origin(values) is Literal else ()
        text = ", ".join(map(repr, choices)) or f"`{types[name]}`"
        default = _setting_default(field.default)
        meaning = _cell(field.description or "")
        rows.append(f"| `{name}` | {_cell(text)} | {default} | {meaning} |")
    header = ["| field | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join(
        [f"### {kind.__name__}", "", _paragraphs(getdoc(kind) or ""), "", *header, *rows]
    )


def _accepted(kind: type[Options]) -> dict[str, str]:
    """The types of the fields of a group, from a function that takes them as keywords."""
    stub = ast.parse(Path(attnserve.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    types: list[dict[str, str]] = [
        {each.arg: ast.unparse(each.annotation) for each in node.args.kwonlyargs if each.annotation}
        for node in stub.body
        if isinstance(node, ast.FunctionDef)
    ]
    return next(each for each in types if kind.__name__ in each.values())


def http() -> str:
    """One table of routes per tag, then the fields of every request."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(model=Path(folder), probe=False)
        schema = create_app(settings).openapi()
    by_tag: dict[str, list[tuple[str, str, Any]]] = {}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            tag = (operation.get("tags") or ["Other"])[0]
            by_tag.setdefault(tag, []).append((method.upper(), path, operation))
    parts: list[str] = []
    for tag, operations in by_tag.items():
        rows = [
            f"| {method} | `{path}` | {_summary(operation)} | {_model_name(operation)} |"
            for method, path, operation in operations
        ]
        header = ["| method | path | description | request |", "|---|---|---|---|"]
        parts += [f"## {tag}", "\n".join([*header, *rows])]
    parts.append("## Requests")
    for name, model in schema["components"]["schemas"].items():
        if name.endswith(("Request", "InputTensor", "RequestedOutput")):
            parts.append(_schema(name, model))
    return "\n\n".join(parts)


def _summary(operation: dict[str, Any]) -> str:
    return _cell(_first(operation.get("description", "")) or operation["summary"])


def _schema(name: str, model: dict[str, Any]) -> str:
    required = set(model.get("required", ()))
    rows: list[str] = []
    for field, about in model.get("properties", {}).items():
        default = "required" if field in required else _json_default(about)
        meaning = _cell(about.get("description", ""))
        rows.append(f"| `{field}` | {_cell(_type(about))} | {default} | {meaning} |")
    text = [f"### {name}", _paragraphs(model.get("description", ""))]
    if rows:
        text.append("\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(part for part in text if part)


def _json_default(about: dict[str, Any]) -> str:
    value = about.get("default")
    return "" if value is None or isinstance(value, list | dict) else f"`{value}`"


def _type(about: dict[str, Any]) -> str:
    if "$ref" in about:
        return about["$ref"].rsplit("/", 1)[-1]
    if "const" in about:
        return repr(about["const"])
    if "anyOf" in about:
        return " or ".join(_type(each) for each in about["anyOf"])
    if about.get("type") == "array":
        return f"list of {_type(about.get('items', {}))}"
    if "enum" in about:
        return ", ".join(map(repr, about["enum"]))
    return about.get("type", "any")


def _model_name(operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    name = _type(content.get("application/json", {}).get("schema", {})) if content else ""
    return f"[{name}](#{name.lower()})" if name and name != "any" else ""


def settings() -> str:
    """Every setting of the service and of its Ray deployment, with its environment variable."""
    return "\n\n".join([_settings(Settings), "## Ray Serve", _settings(RaySettings)])


def _settings(kind: type[EnvironmentOptions]) -> str:
    prefix = kind.prefix
    rows = [
        f"| `{prefix}{name.upper()}` | {_cell(field.description or '')}"
        f" | {'required' if field.is_required() else _setting_default(field.default)} |"
        for name, field in kind.model_fields.items()
    ]
    return "\n".join(["| variable | meaning | default |", "|---|---|---|", *rows])


def _setting_default(value: Any) -> str:
    return "" if value is None or value == () else f"`{value}`"


def model_folders() -> str:
    """The keys of every file of a model folder: used keys, and keys without effect."""
    return "\n\n".join(map(_settings_file, FILES))


def _settings_file(kind: type[SettingsFile]) -> str:
    about = _paragraphs(kind.__doc__ or "")
    docstrings = field_docstrings(kind.__module__)
    texts = ChainMap(*(docstrings.get(base.__name__, {}) for base in kind.__mro__))
    rows = [
        f"| `{name}` | {_cell(texts.get(name, ''))} |"
        for name, field in kind.model_fields.items()
        if not field.exclude
    ]
    rows += [f"| `{name}` | changes nothing: {_cell(why)} |" for name, why in kind.ignored.items()]
    return "\n".join(
        [f"## {kind.__name__}", "", about, "", "| key | meaning |", "|---|---|", *rows]
    )


def metrics() -> str:
    """Every series of ``/metrics``, with its labels."""
    series = Metrics()
    # All series of the present state, also those of other machines and settings.
    state: Any = SimpleNamespace(
        states=list, rss_bytes=lambda: 0, workers=(2, 2), shadow=SimpleNamespace(reports=dict)
    )
    with patch("service.present_state.gpu_bytes", return_value=0):
        families = [*series.collect(), *PresentState(state).collect()]
    collectors = (*series.histograms.values(), *series.counters.values(), *series.gauges.values())
    labels = {
        next(iter(collector.describe())).name: getattr(collector, "_labelnames", ())
        for collector in (series.requests, *collectors)
    }
    rows = [
        f"| `{family.name}{'_total' if family.type == 'counter' else ''}` | {family.type}"
        f" | {', '.join(labels.get(family.name, getattr(family, '_labelnames', ())))}"
        f" | {_cell(family.documentation)} |"
        for family in sorted(families, key=lambda family: family.name)
    ]
    return "\n".join(["| series | type | labels | meaning |", "|---|---|---|---|", *rows])


def functions() -> str:
    """The public functions of ``attnserve``, for mkdocstrings."""
    names = [name for name in attnserve.__all__ if name.islower() and not name.startswith("_")]
    # The package imports them on use, so their docstrings are found in their modules only.
    paths = {name: unwrap(getattr(attnserve, name)).__module__ for name in names}
    return "\n\n".join(
        f"::: {path}.{name}\n    options:\n      heading: attnserve.{name}"
        for name, path in paths.items()
    )


def passes() -> str:
    """The passes of ``graph_passes``, for mkdocstrings."""
    classes = {
        f"{module.__name__}.{name}": None
        for found in pkgutil.iter_modules(graph_passes.passes.__path__)
        for module in [importlib.import_module(f"graph_passes.passes.{found.name}")]
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, ir.passes.PassBase)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }
    return "\n\n".join(f"::: {name}" for name in classes)


def _first(text: str) -> str:
    return text.strip().split("\n\n")[0]


def _paragraphs(text: str) -> str:
    """Help text as Markdown; the paragraphs stay, the markup of a terminal does not."""
    return text.replace("\b", "").replace("``", "`").strip()


def _cell(text: str) -> str:
    return " ".join(_paragraphs(text).replace("|", "\\|").split()).replace("<", "&lt;")
