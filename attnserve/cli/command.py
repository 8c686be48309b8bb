"""Commands whose options are the fields of types (``attnserve.options``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from attnserve.cli.display import with_options
from attnserve.cli.options import limit_threads
from attnserve.options import Options, OptionType, Run, is_group, option_type
from attnserve.options.base import Switch

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

__all__ = ["add_command"]

Function = Callable[..., None]


@dataclass(frozen=True)
class _Field:
    """A field as a parameter of a command.

    Attributes:
        switch: Its flag, if it sets the field to one value.
    """

    name: str
    parameter: Parameter
    switch: Switch | None = None


def add_command(
    app: typer.Typer,
    *,
    left_out: Collection[str] = (),
    required: Collection[str] = (),
    panels: Sequence[str] = (),
    **options: Any,
) -> Callable[[Function], Function]:
    """Decorator: a command with the options of the groups among the parameters of a function.

    Args:
        left_out: Fields without an option.
        required: Fields whose option must be given.
        panels: The order of the panels in the help; those of the groups by default.
        options: Options of ``typer.Typer.command``.
    """

    def add(function: Function) -> Function:
        hints = get_type_hints(function, include_extras=True)
        parameters: dict[str, Parameter] = {}
        groups: dict[str, tuple[type[Options], list[_Field]]] = {}
        for parameter in signature(function).parameters.values():
            kind = hints[parameter.name]
            if not is_group(kind):
                keyword = parameter.replace(annotation=kind, kind=Parameter.KEYWORD_ONLY)
                parameters[parameter.name] = keyword
                continue
            fields = [
                option
                for name, field in kind.model_fields.items()
                if name not in left_out and kind.has_option(name)
                for option in _fields(name, field, kind, parameter.default)
            ]
            groups[parameter.name] = kind, fields
            for option in fields:
                is_required = option.parameter.name in required
                parameters[option.parameter.name] = (
                    option.parameter.replace(default=Parameter.empty)
                    if is_required
                    else option.parameter
                )

        def run(**values: Any) -> None:
            arguments = {
                name: _group(kind, fields, values) for name, (kind, fields) in groups.items()
            }
            arguments |= {name: values[name] for name in hints if name in values.keys() - groups}
            function(**arguments)

        ordered_parameters = sorted(
            parameters.values(), key=lambda parameter: _place(parameter, panels)
        )
        run.__signature__ = Signature(  # type: ignore[attr-defined]
            _rename_fields_in_help(ordered_parameters)
        )
        run.__name__ = function.__name__
        run.__doc__ = function.__doc__
        app.command(**options)(run)
        return function

    return add


def _place(parameter: Parameter, panels: Sequence[str]) -> int:
    """The place of a parameter's panel; 0 if it is in none of them."""
    parts = get_args(parameter.annotation)
    panel = getattr(parts[-1], "rich_help_panel", None) if parts else None
    return panels.index(panel) + 1 if panel in panels else 0


def _fields(
    name: str, field: FieldInfo, kind: type[Options], defaults: Options | None
) -> list[_Field]:
    """The parameters of a field: an argument, or an option for each switch and one for any value.

    Args:
        defaults: A group whose values are the defaults, if the command has its own.
    """
    about = option_type(field)
    if about.cli.is_argument:
        return [_argument(name, field, about)]
    panel = (kind.panel if about.cli.panel is None else about.cli.panel) or None
    # Without a value, switches may set the field.
    default = None if about.cli.switches else getattr(defaults, name, field.get_default())
    return [
        *_switches(name, about, panel),
        _option(name, field, about, kind, default=default, panel=panel),
    ]


def _argument(name: str, field: FieldInfo, about: OptionType) -> _Field:
    """The positional argument of a field."""
    argument = typer.Argument(metavar=about.cli.metavar, help=_help(field))
    return _Field(name, _parameter(name, _shown_type(about), argument, ...))


def _switches(name: str, about: OptionType, panel: str | None) -> Iterator[_Field]:
    """A flag for each value of a field that has one."""
    for switch in about.cli.switches:
        option = typer.Option(switch.flag, metavar="", help=switch.help, rich_help_panel=panel)
        parameter_name = switch.flag.removeprefix("--").replace("-", "_")
        yield _Field(name, _parameter(parameter_name, bool, option, False), switch)


def _option(
    name: str,
    field: FieldInfo,
    about: OptionType,
    kind: type[Options],
    *,
    default: Any,
    panel: str | None,
) -> _Field:
    """The option that takes any value of a field.

    Args:
        default: The value without the option; None for no value.
    """
    value_type = _shown_type(about)
    text = _help(field)
    if about.cli.is_text and default is not None:  # the text that the field reads
        default = ",".join(map(str, default)) or None
    group_sets_default = kind.reads_environment or get_origin(value_type) is list
    if group_sets_default:  # Typer gets none, and the help names it
        text += _default_text(default)
        default = None
    option = typer.Option(
        *_flags(name, about, default),
        metavar="" if value_type is bool else about.cli.metavar,
        help=text,
        rich_help_panel=panel,
        callback=limit_threads if (kind, name) == (Run, "threads") else None,
        **_bounds(about),
    )
    return _Field(
        name,
        _parameter(name, value_type | None if default is None else value_type, option, default),
    )


def _help(field: FieldInfo) -> str:
    """The first paragraph of the docstring of a field."""
    return (field.description or "").partition("\n\n")[0]


def _default_text(default: Any) -> str:
    """The default of an option as text; empty without a default."""
    if default is None or default == ():
        return ""
    value = ("on" if default else "off") if isinstance(default, bool) else default
    return f" (default: {value})"


def _parameter(name: str, kind: Any, option: Any, default: Any) -> Parameter:
    default = Parameter.empty if default is ... else default
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _flags(name: str, about: OptionType, default: Any) -> tuple[str, ...]:
    if about.cli.flags:
        return about.cli.flags
    flag = name.replace("_", "-")
    is_switch = about.kind is bool and default is not False
    return (f"--{flag}/--no-{flag}" if is_switch else f"--{flag}",)


def _shown_type(about: OptionType) -> Any:
    """The type for Typer; the field parses other types from text."""
    members = get_args(about.kind)
    if about.cli.is_text:
        return str
    if get_origin(about.kind) is tuple and members[0] is Path:
        return list[Path]
    return about.kind


def _bounds(about: OptionType) -> dict[str, Any]:
    """The bounds of an integer, if Typer can check all of them; the type checks the others."""
    limits = {
        name: getattr(bound, name)
        for bound in about.bounds
        for name in ("gt", "ge", "lt", "le")
        if getattr(bound, name, None) is not None
    }
    names = {"ge": "min", "le": "max"}
    if about.kind is not int or about.cli.is_text or not limits.keys() <= names.keys():
        return {}
    return {names[name]: value for name, value in limits.items()}


def _group(kind: type[Options], fields: list[_Field], values: Mapping[str, Any]) -> Options:
    """Build the group from option values; missing options have the defaults."""
    arguments: dict[str, Any] = {}
    flags: dict[str, list[str]] = {}
    for field in fields:
        value = values[field.parameter.name]
        if value is None or (field.switch is not None and not value):
            continue
        arguments[field.name] = value if field.switch is None else field.switch.value
        flag = "--" + field.parameter.name.replace("_", "-")
        flags.setdefault(field.name, []).append(flag)
    for name, exclusive in flags.items():
        if len(exclusive) > 1:
            from graph_passes.errors import InvalidArgument

            raise InvalidArgument(
                f"{' and '.join(exclusive)} exclude each other",
                "give one of them",
                code=f"cli.{name}",
            )
    return kind(**arguments)


def _rename_fields_in_help(parameters: list[Parameter]) -> list[Parameter]:
    """The parameters, with the names of options in place of fields in their help."""
    options: dict[str, Any] = {}
    names: dict[str, str] = {}
    for parameter in parameters:
        parts = get_args(parameter.annotation)
        if parts and isinstance(parts[-1], OptionInfo):
            options[parameter.name] = parts[-1]
            # typer.Option takes the first flag as its parameter `default`.
            flag = parts[-1].default if isinstance(parts[-1].default, str) else parameter.name
            names[parameter.name] = "--" + flag.lstrip("-").partition("/")[0].replace("_", "-")
    for option in options.values():
        option.help = with_options(option.help or "", names)
    return parameters
