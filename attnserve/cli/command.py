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

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

__all__ = ["add_command"]

Function = Callable[..., None]

CALLBACKS: Mapping[tuple[type[Options], str], Callable[[int], int]] = {
    (Run, "threads"): limit_threads,
}
"""Called with the value of an option when it is read."""


@dataclass(frozen=True)
class _Field:
    """A field as a parameter of a command.

    Attributes:
        choice: The value that its flag stands for; None for the field's own value.
    """

    name: str
    parameter: Parameter
    choice: str | None = None


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
                each
                for name, field in kind.model_fields.items()
                if name not in left_out and kind.has_option(name)
                for each in _fields(name, field, kind, parameter.default)
            ]
            groups[parameter.name] = kind, fields
            for each in fields:
                is_required = each.parameter.name in required
                parameters[each.parameter.name] = (
                    each.parameter.replace(default=Parameter.empty)
                    if is_required
                    else each.parameter
                )

        def run(**values: Any) -> None:
            made = {name: _made(kind, fields, values) for name, (kind, fields) in groups.items()}
            own = {name: values[name] for name in hints if name in values and name not in made}
            function(**own, **made)

        shown = sorted(parameters.values(), key=lambda parameter: _place(parameter, panels))
        run.__signature__ = Signature(_rename_fields_in_help(shown))  # type: ignore[attr-defined]
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        app.command(**options)(run)
        return function

    return add


def _place(parameter: Parameter, panels: Sequence[str]) -> int:
    """The place of a parameter's panel; 0 if it is in none of them."""
    parts = get_args(parameter.annotation)
    panel = getattr(parts[-1], "rich_help_panel", None) if parts else None
    return panels.index(panel) + 1 if panel in panels else 0


def _fields(
    name: str,
    field: FieldInfo,
    kind: type[Options],
    defaults: Any,
) -> Iterator[_Field]:
    """The options of a field: one, and one for each choice.

    Args:
        defaults: A group whose values are the defaults, if the command has its own.
    """
    about = option_type(field)
    panel = kind.panel if about.cli.panel is None else about.cli.panel
    text = (field.description or "").partition("\n\n")[0]
    if about.cli.choices is not None:
        for flag, (value, each) in about.cli.choices.items():
            option = typer.Option(flag, metavar="", help=each, rich_help_panel=panel or None)
            own = flag.removeprefix("--").replace("-", "_")
            yield _Field(name, _parameter(own, bool, option, False), value)
        option = typer.Option(
            metavar="NAME", help=about.cli.choice_help, rich_help_panel=panel or None
        )
        yield _Field(name, _parameter(name, str | None, option, None))
        return
    shown: Any = _shown_type(about)
    if about.cli.is_argument:
        argument = typer.Argument(metavar=about.cli.metavar, help=text)
        yield _Field(name, _parameter(name, shown, argument, ...))
        return
    default = getattr(defaults, name, field.get_default())
    is_left = kind.reads_environment or about.cli.is_text or get_origin(shown) is list
    option = typer.Option(
        *_flags(name, about, None if is_left else default),
        metavar="" if shown is bool else about.cli.metavar,
        help=text + (_default_text(default) if is_left else ""),
        rich_help_panel=panel or None,
        callback=CALLBACKS.get((kind, name)),
        **_bounds(about),
    )
    default = None if is_left else default
    if default is None:
        shown |= None
    yield _Field(name, _parameter(name, shown, option, default))


def _default_text(default: Any) -> str:
    """The default of an option as text; empty without a default."""
    if default is None or default == ():
        return ""
    shown = ("on" if default else "off") if isinstance(default, bool) else default
    return f" (default: {shown})"


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
    given = {
        name: getattr(bound, name)
        for bound in about.bounds
        for name in ("gt", "ge", "lt", "le")
        if getattr(bound, name, None) is not None
    }
    names = {"ge": "min", "le": "max"}
    if about.kind is not int or about.cli.is_text or not given.keys() <= names.keys():
        return {}
    return {names[name]: value for name, value in given.items()}


def _made(kind: type[Options], fields: list[_Field], values: Mapping[str, Any]) -> Any:
    """Build the group from option values; missing options have the defaults."""
    fields_given: dict[str, Any] = {}
    flags: dict[str, list[str]] = {}
    with_choices = {field.name for field in fields if field.choice is not None}
    for field in fields:
        value = values[field.parameter.name]
        if value is None or (field.choice is not None and not value):
            continue
        fields_given[field.name] = value if field.choice is None else field.choice
        if field.name in with_choices:
            flag = "--" + field.parameter.name.replace("_", "-")
            flags.setdefault(field.name, []).append(flag)
    for name, several in flags.items():
        if len(several) > 1:
            from graph_passes.errors import InvalidArgument

            raise InvalidArgument(
                f"{' and '.join(several)} exclude each other",
                "give one of them",
                code=option_type(kind.model_fields[name]).cli.choice_conflict,
            )
    return kind(**fields_given)


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
