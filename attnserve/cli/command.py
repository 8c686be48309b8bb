"""Commands whose options are the fields of types (``attnserve.options``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import typer

from attnserve.cli.display import with_options
from attnserve.cli.options import limit_threads
from attnserve.options import Options, OptionType, is_group, option_name, option_type

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

__all__ = ["add_command"]

Function = Callable[..., None]


class _Option(NamedTuple):
    """An option or argument that sets a field of a group.

    Attributes:
        value: The value that a switch sets; None for an option that takes a value.
    """

    field: str
    parameter: Parameter
    value: str | None = None


def add_command(
    app: typer.Typer,
    *,
    required: Collection[str] = (),
    panels: Sequence[str] = (),
    **options: Any,
) -> Callable[[Function], Function]:
    """Return a decorator that makes a command of a function.

    Each parameter that is a group adds its fields as options; ``Annotated[GROUP, NAME, ...]`` adds
    the named fields only. Parameters of other types are options and arguments of Typer.

    Args:
        required: Fields whose option must be given.
        panels: The order of the panels in the help; by default the order of the groups.
        options: Arguments of ``typer.Typer.command``.
    """

    def add(function: Function) -> Function:
        hints = get_type_hints(function, include_extras=True)
        parameters: list[Parameter] = []
        names = {name: f"--{name}".replace("_", "-") for name in hints}
        groups: dict[str, tuple[type[Options], list[_Option]]] = {}
        for parameter in signature(function).parameters.values():
            hint = hints[parameter.name]
            kind, *chosen = get_args(hint) if get_origin(hint) is Annotated else [hint]
            if not is_group(kind):
                parameters.append(parameter.replace(annotation=hint, kind=Parameter.KEYWORD_ONLY))
                continue
            fields = {
                name: field
                for name, field in kind.model_fields.items()
                if name in (chosen or kind.model_fields) and kind.has_option(name)
            }
            names |= {name: option_name(name, field) for name, field in fields.items()}
            made = [
                option
                for name, field in fields.items()
                for option in _options(name, field, kind, parameter.default)
            ]
            groups[parameter.name] = kind, made
            parameters += [
                option.parameter.replace(default=Parameter.empty)
                if option.parameter.name in required
                else option.parameter
                for option in made
            ]

        def run(context: typer.Context, **values: Any) -> None:
            given = [name for name in values if _is_given(context, name)]
            arguments = {
                name: _group(kind, made, values, given) for name, (kind, made) in groups.items()
            }
            arguments |= {name: values[name] for name in hints if name in values.keys() - groups}
            function(**arguments)

        for parameter in parameters:
            about = _about(parameter)
            about.help = with_options(about.help or "", names)
        parameters.sort(key=lambda parameter: _place(parameter, panels))
        context = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)
        run.__signature__ = Signature([context, *parameters])  # type: ignore[attr-defined]
        run.__name__ = function.__name__
        run.__doc__ = function.__doc__
        app.command(**options)(run)
        return function

    return add


def _about(parameter: Parameter) -> Any:
    """The description of an option or argument for Typer."""
    return get_args(parameter.annotation)[-1]


def _place(parameter: Parameter, panels: Sequence[str]) -> int:
    """The place of a parameter's panel among ``panels``; 0 if it is not one of them."""
    panel = _about(parameter).rich_help_panel
    return panels.index(panel) + 1 if panel in panels else 0


def _options(
    name: str, field: FieldInfo, kind: type[Options], defaults: Options | None
) -> Iterator[_Option]:
    """The options of a field: one for each switch, and one for any value; or an argument.

    Args:
        defaults: A group whose values are the defaults, if the command has its own.
    """
    about = option_type(field)
    cli, value_type = about.cli, _shown_type(about)
    text = (field.description or "").partition("\n\n")[0]
    if cli.is_argument:
        argument = typer.Argument(metavar=cli.metavar, help=text)
        yield _Option(name, _parameter(name, value_type, argument))
        return
    panel = (kind.panel if cli.panel is None else cli.panel) or None
    for switch in cli.switches:
        option = typer.Option(switch.flag, metavar="", help=switch.help, rich_help_panel=panel)
        own_name = switch.flag.removeprefix("--").replace("-", "_")
        yield _Option(name, _parameter(own_name, bool, option, False), switch.value)
    # A field with switches has no default here: a switch may set it.
    default = None if cli.switches else getattr(defaults, name, field.get_default())
    if cli.is_text and default is not None:  # the text that the field reads
        default = ",".join(map(str, default)) or None
    if kind.reads_environment or get_origin(value_type) is list:
        # The group sets the default: Typer gets none, and the help names it.
        text += _default_text(default)
        default = None
    option = typer.Option(
        *_flags(name, about, default),
        metavar="" if value_type is bool else cli.metavar,
        help=text,
        rich_help_panel=panel,
        callback=limit_threads if cli.limits_threads else None,
        **_bounds(about),
    )
    shown_type = value_type | None if default is None else value_type
    yield _Option(name, _parameter(name, shown_type, option, default))


def _default_text(default: Any) -> str:
    """The default of an option as text; empty without a default."""
    if default is None or default == ():
        return ""
    value = ("on" if default else "off") if isinstance(default, bool) else default
    return f" (default: {value})"


def _parameter(name: str, kind: Any, about: Any, default: Any = Parameter.empty) -> Parameter:
    annotation = Annotated[kind, about]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


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
    """The bounds of an integer, if Typer can check all of them; else the type checks them."""
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


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line has an option: its value may be the default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _group(
    kind: type[Options],
    options: Sequence[_Option],
    values: Mapping[str, Any],
    given: Collection[str],
) -> Options:
    """Build a group from option values.

    Args:
        given: The names of the options in the command line. Others are set if the command has
            another default than the group.
    """
    arguments: dict[str, Any] = {}
    flags: dict[str, list[str]] = {}
    for option in options:
        name = option.parameter.name
        value = values[name]
        if value is None or (option.value is not None and not value):
            continue
        if name not in given and value == kind.model_fields[option.field].get_default():
            continue
        arguments[option.field] = option.value or value
        flag = "--" + name.replace("_", "-")
        flags.setdefault(option.field, []).append(flag)
    for name, exclusive in flags.items():
        if len(exclusive) > 1:
            from graph_passes.errors import InvalidArgument

            raise InvalidArgument(
                f"{' and '.join(exclusive)} exclude each other",
                "give one of them",
                code=f"cli.{name}",
            )
    return kind(**arguments)
