"""The base class of groups of options, and their use on the command line, in Python and errors."""

from __future__ import annotations

import ast
import reprlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from inspect import Parameter, cleandoc, signature
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    NoReturn,
    TypeGuard,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

__all__ = [
    "Cli",
    "OptionType",
    "Options",
    "Switch",
    "field_docstrings",
    "is_group",
    "option_name",
    "option_type",
    "with_keywords",
    "without_prefixes",
]


class Switch(NamedTuple):
    """A flag without a value, which sets a field to ``value``."""

    flag: str
    value: str
    help: str


@dataclass(frozen=True)
class Cli:
    """Presentation of a field on the command line.

    Attributes:
        metavar: The name of the value.
        panel: The panel of the help; "" for the first one.
        flags: The names, if they do not follow from the field's name.
        switches: Flags for single values, before the option that takes any value.
        is_text: Whether the field parses the text of the option.
        is_argument: Whether the value is a positional argument.
        limits_threads: Whether the value is a number of threads of numpy and PyTorch too.
    """

    metavar: str | None = None
    panel: str | None = None
    flags: tuple[str, ...] = ()
    switches: tuple[Switch, ...] = ()
    is_text: bool = False
    is_argument: bool = False
    limits_threads: bool = False


@dataclass(frozen=True)
class OptionType:
    """The type of a field without None, its bounds (``annotated_types``), and its presentation."""

    kind: Any
    bounds: tuple[Any, ...]
    cli: Cli
    example: object


class Options(BaseModel):
    """A group of options.

    Raises:
        InvalidArgument: A value is out of its bounds, or options exclude each other.
    """

    # Validators are built on first use: `--help` needs none.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    panel: ClassVar[str] = ""
    """Default help panel of the fields."""
    area: ClassVar[str] = "options"
    """First part of error codes."""
    invalid: ClassVar[str] = "range"
    """Last part of the error code of an invalid value."""
    codes: ClassVar[Mapping[str, str]] = {}
    """Error codes of the fields whose code is not ``AREA.INVALID``."""
    reads_environment: ClassVar[bool] = False
    """Whether environment variables set fields that are not given."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        for name, text in field_docstrings(cls.__module__).get(cls.__qualname__, {}).items():
            if name in cls.model_fields:
                cls.model_fields[name].description = text

    if not TYPE_CHECKING:  # type checkers see pydantic's constructor, with the fields

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                self.refuse(error, values)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_boolean(cls, value: Any, field: ValidationInfo) -> Any:
        """Refuse a boolean in place of a number: ``collab_dk=True`` is not one dimension."""
        if not isinstance(value, bool):
            return value
        if option_type(cls.model_fields[str(field.field_name)]).kind is not bool:
            raise PydanticCustomError("boolean", "another type than a boolean")
        return value

    @classmethod
    def has_option(cls, name: str) -> bool:
        """Whether a field has an option on the command line."""
        return name in cls.model_fields

    @classmethod
    def refuse(cls, error: ValidationError, values: Mapping[str, Any]) -> NoReturn:
        """Raise the first error of a validation, with the name of the field and its bounds.

        Args:
            values: All given values by name.
        """
        from graph_passes.errors import InvalidArgument

        problem = error.errors(include_url=False)[0]
        name, *parts = map(str, problem["loc"] or ("options",))
        field = cls.model_fields.get(name)
        if field is None:
            raise InvalidArgument(
                f"`{name}`: no such option",
                f"{cls.__name__} has {', '.join(cls.model_fields)}",
                code=f"{cls.area}.unknown",
            ) from error
        subject, value = f"`{name}`", problem["input"]
        if parts and get_origin(option_type(field).kind) is Mapping:
            subject += f" ({'.'.join(parts)})"
        if "Secret" not in str(field.annotation):
            subject += f" is {reprlib.repr(value) if isinstance(value, str) else value}"
        what = f"{subject}: expected {expected_values(field, problem['msg'])}"
        raise InvalidArgument(
            f"`{name}` is not given" if problem["type"] == "missing" else what,
            cls.advice(name, values),
            code=cls.codes.get(name, f"{cls.area}.{cls.invalid}"),
        ) from error

    @classmethod
    def advice(cls, name: str, values: Mapping[str, Any]) -> str:
        """How to fix the value of a field, for an error.

        Args:
            values: All given values by name.
        """
        example = option_type(cls.model_fields[name]).example
        return "give another value" if example is None else f"for example `{name}` {example}"

    def changed(self, *but: str) -> Iterator[tuple[str, Any]]:
        """The fields whose values are not the defaults, except the named ones."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in but and value != field.default:
                yield name, value


@cache
def field_docstrings(module: str) -> dict[str, dict[str, str]]:
    """Read the docstrings of the fields of each class of a module.

    ``use_attribute_docstrings`` of pydantic reads the module once for each class, which would slow
    down ``attnserve --help``.
    """
    file = getattr(sys.modules[module], "__file__", None)
    try:
        source = ast.parse(Path(file or "").read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):  # no source: compiled, in an archive, or interactive
        return {}
    docstrings: dict[str, dict[str, str]] = {}
    for kind in source.body:
        if not isinstance(kind, ast.ClassDef):
            continue
        fields = docstrings.setdefault(kind.name, {})
        for field, text in pairwise(kind.body):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(name)),
                    ast.Expr(value=ast.Constant(value=str(docstring))),
                ):
                    fields[name] = cleandoc(docstring)
                case _:
                    pass
    return docstrings


def option_type(field: FieldInfo) -> OptionType:
    """Split the type of a field into its kind, bounds, presentation and example.

    For a tuple, the bounds of the items are the bounds of the field.
    """
    kind: Any = field.annotation
    parts: list[Any] = [field]
    while True:
        if get_origin(kind) is Annotated:
            kind, *annotations = get_args(kind)
            parts = [*annotations, *parts]
        elif get_origin(kind) in (Union, UnionType):
            members = [member for member in get_args(kind) if member is not NoneType]
            kind = members[0] if len(members) == 1 else str  # a union of types is read from text
        elif get_origin(kind) is tuple and get_origin(get_args(kind)[0]) is Annotated:
            item, *annotations = get_args(get_args(kind)[0])
            kind, parts = tuple[item, ...], [*annotations, *parts]
        else:
            break
    metadata: list[Any] = []
    for part in parts:
        metadata += part.metadata if isinstance(part, FieldInfo) else [part]
    presentations = [item for item in metadata if isinstance(item, Cli)]
    examples = [part.examples for part in parts if isinstance(part, FieldInfo) and part.examples]
    return OptionType(
        kind,
        tuple(item for item in metadata if not isinstance(item, Cli | BeforeValidator)),
        presentations[-1] if presentations else Cli(),
        examples[-1][0] if examples else None,
    )


def option_name(name: str, field: FieldInfo) -> str:
    """The name of a field's option on the command line."""
    flags = option_type(field).cli.flags
    # For a switch that is on by default, only the option that turns it off has an effect.
    return flags[0] if flags else f"--{'no-' * (field.default is True)}{name.replace('_', '-')}"


def with_keywords(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the fields of its groups of options as additional keywords.

    ``optimize(model, keep=0.99)`` is ``optimize(model, goal=Goal(keep=0.99))``. No two groups of a
    function have a field of the same name.
    """
    shown, hints = signature(function), get_type_hints(function)
    parameters = shown.parameters
    groups: dict[str, type[Options]] = {
        name: hints[name] for name in parameters if is_group(hints.get(name))
    }

    @wraps(function)
    def call(*args: Any, **values: Any) -> Any:
        for name, kind in groups.items():
            fields = {field: values.pop(field) for field in kind.model_fields if field in values}
            group = values.get(name, parameters[name].default)
            _check_group(name, kind, group, fields if name in values else {})
            group_fields = {field: getattr(group, field) for field in group.model_fields_set}
            values[name] = kind(**group_fields | fields) if fields else group
        return function(*args, **values)

    keywords = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=field.get_default())
        for kind in groups.values()
        for name, field in kind.model_fields.items()
    ]
    call.__signature__ = shown.replace(  # type: ignore[attr-defined]
        parameters=[*parameters.values(), *keywords]
    )
    return call


def _check_group(name: str, kind: type[Options], group: object, fields: Collection[str]) -> None:
    """Check the value of a parameter that is a group of options.

    Args:
        fields: Names of the group's fields that were given as keywords.

    Raises:
        InvalidArgument: The value has another type, or sets a field that is given as a keyword too.
    """
    from graph_passes.errors import InvalidArgument

    if not isinstance(group, kind):
        raise InvalidArgument(
            f"`{name}` is a {type(group).__name__}: expected {kind.__name__}",
            f"for example {name}={kind.__name__}({next(iter(kind.model_fields))}=...)",
            code="options.group",
        )
    for field in fields:
        if field in group.model_fields_set:
            raise InvalidArgument(
                f"`{field}` is given twice: as a keyword, and in `{name}`",
                "leave one of them out",
                code="options.conflict",
            )


def is_group(hint: Any) -> TypeGuard[type[Options]]:
    """Whether a type is a group of options."""
    return isinstance(hint, type) and issubclass(hint, Options)


VALUE_ERROR = "Value error, "


def without_prefixes(message: str) -> str:
    """Strip the prefixes of pydantic from a message, or from a text that contains it."""
    return message.replace(VALUE_ERROR, "").replace("Input should be ", "expected ")


BOUNDS = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}


def expected_values(field: FieldInfo, message: str) -> str:
    """The valid values of a field, in words, for an error.

    Args:
        message: The message of the failed validation, for fields without choices and bounds.
    """
    if message.startswith("Extra inputs"):
        return "another name"
    text = without_prefixes(message).removeprefix("expected ")
    if message.startswith(VALUE_ERROR):  # raised by the field's reader
        return text
    option = option_type(field)
    kind = get_args(option.kind)[0] if get_origin(option.kind) is tuple else option.kind
    names = [member for member in get_args(kind) if isinstance(member, str)]
    if names:
        return ", ".join(names)
    limits = [
        f"{words} {getattr(bound, name):g}"
        for name, words in BOUNDS.items()
        for bound in option.bounds
        if getattr(bound, name, None) is not None
    ]
    if limits and kind in (int, float):
        return f"{'an integer' if kind is int else 'a number'}, {' and '.join(limits)}"
    return text
