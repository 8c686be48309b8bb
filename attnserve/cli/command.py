"""Commands whose options are the fields of types (``attnserve.options``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from attnserve.cli.display import with_options
from attnserve.cli.options import limit_threads
from attnserve.options import Cli, Option, Options, is_group

__all__ = ["add_command"]

Function = Callable[..., None]


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
        groups: dict[str, tuple[type[Options], list[Option]]] = {}
        for parameter in signature(function).parameters.values():
            hint = hints[parameter.name]
            kind, *chosen = get_args(hint) if get_origin(hint) is Annotated else [hint]
            if not is_group(kind):
                parameters.append(parameter.replace(annotation=hint, kind=Parameter.KEYWORD_ONLY))
                continue
            fields = [
                option
                for option in map(kind.option, chosen or kind.model_fields)
                if not kind.reads_environment or option.cli != Cli()
            ]
            groups[parameter.name] = kind, fields
            names |= {option.name: option.flag for option in fields}
            parameters += [
                made.replace(default=Parameter.empty) if made.name in required else made
                for option in fields
                for made in _parameters(option, kind, parameter.default)
            ]

        def run(context: typer.Context, **values: Any) -> None:
            given = [name for name in values if _is_given(context, name)]
            arguments = {
                name: _group(kind, fields, values, given) for name, (kind, fields) in groups.items()
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


def _parameters(
    option: Option, kind: type[Options], defaults: Options | None
) -> Iterator[Parameter]:
    """Typer's parameters for an option: one for each switch, and one for any value.

    Args:
        defaults: A group whose values are the defaults, if the command has its own.
    """
    cli, name = option.cli, option.name
    text = (kind.model_fields[name].description or "").partition("\n\n")[0]
    if option.is_required:
        yield _parameter(name, option.kind, typer.Argument(metavar=cli.metavar, help=text))
        return
    panel = (kind.panel if cli.panel is None else cli.panel) or None
    for switch in cli.switches:
        about = typer.Option(switch.flag, metavar="", help=switch.help, rich_help_panel=panel)
        yield _parameter(switch.name, bool, about, False)
    # A field with switches has no default here: a switch may set it.
    default = None if cli.switches else getattr(defaults, name, option.default)
    if option.reads_text and default is not None:
        default = ",".join(map(str, default)) or None
    is_list = get_origin(option.kind) is tuple and not option.reads_text
    if kind.reads_environment or is_list:
        # The group sets the default: Typer gets none, and the help names it.
        text += _default_text(default)
        default = None
    flag = name.replace("_", "-")
    is_switch = option.kind is bool and default is not False
    about = typer.Option(
        *(cli.flags or (f"--{flag}/--no-{flag}" if is_switch else f"--{flag}",)),
        metavar="" if option.kind is bool else cli.metavar,
        help=text,
        rich_help_panel=panel,
        callback=limit_threads if cli.limits_threads else None,
        **_bounds(option),
    )
    value_type = str if option.reads_text else list[Path] if is_list else option.kind
    yield _parameter(name, value_type | None if default is None else value_type, about, default)


def _default_text(default: Any) -> str:
    """The default of an option as text; empty without a default."""
    if default is None or default == ():
        return ""
    value = ("on" if default else "off") if isinstance(default, bool) else default
    return f" (default: {value})"


def _parameter(name: str, kind: Any, about: Any, default: Any = Parameter.empty) -> Parameter:
    annotation = Annotated[kind, about]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _bounds(option: Option) -> dict[str, Any]:
    """The bounds of an integer, if Typer can check all of them; else the type checks them."""
    limits = {
        name: getattr(bound, name)
        for bound in option.bounds
        for name in ("gt", "ge", "lt", "le")
        if getattr(bound, name, None) is not None
    }
    names = {"ge": "min", "le": "max"}
    if option.kind is not int or option.reads_text or not limits.keys() <= names.keys():
        return {}
    return {names[name]: value for name, value in limits.items()}


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line has an option: its value may be the default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _group(
    kind: type[Options],
    options: Sequence[Option],
    values: Mapping[str, Any],
    given: Collection[str],
) -> Options:
    """Build a group from the values of its options and switches.

    Args:
        given: The names of the options in the command line. Others are set if the command has
            another default than the group.
    """
    arguments: dict[str, Any] = {}
    for option in options:
        name, value = option.name, values[option.name]
        by_flag = {each.flag: each.value for each in option.cli.switches if values[each.name]}
        if value is not None and (name in given or value != option.default):
            by_flag[f"--{name.replace('_', '-')}"] = value
        if len(by_flag) > 1:
            from graph_passes.errors import InvalidArgument

            raise InvalidArgument(
                f"{' and '.join(by_flag)} exclude each other",
                "give one of them",
                code=f"cli.{name}",
            )
        for value in by_flag.values():
            arguments[name] = value
    return kind(**arguments)
