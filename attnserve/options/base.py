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
    "Option",
    "Options",
    "Switch",
    "field_docstrings",
    "is_group",
    "with_keywords",
    "without_prefixes",
]


class Switch(NamedTuple):
    """A flag without a value, which sets a field to ``value``."""

    flag: str
    value: str
    help: str

    @property
    def name(self) -> str:
        """The name of its parameter."""
        return self.flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Cli:
    """Presentation of a field on the command line.

    Attributes:
        metavar: The name of the value.
        panel: The panel of the help; "" for the first one.
        flags: The names, if they do not follow from the field's name.
        switches: Flags for single values, before the option that takes any value.
        limits_threads: Whether the value is a number of threads of numpy and PyTorch too.
    """

    metavar: str | None = None
    panel: str | None = None
    flags: tuple[str, ...] = ()
    switches: tuple[Switch, ...] = ()
    limits_threads: bool = False


@dataclass(frozen=True)
class Option:
    """An option: a field of a group, for the command line, errors and the reference.

    Attributes:
        kind: The type of the value, without None; text for a union of types.
        bounds: The bounds (``annotated_types``); for a tuple, those of its items.
        default: The default; None without one.
        is_required: Whether the field has no default: it is a positional argument.
        reads_text: Whether the field reads its value from the text of the option.
        example: A valid value, or several in words; None without one.
    """

    name: str
    kind: Any
    bounds: tuple[Any, ...]
    default: Any
    is_required: bool
    reads_text: bool
    example: object
    cli: Cli

    @property
    def flag(self) -> str:
        """The first name on the command line.

        For a switch that is on by default, only the option that turns it off has an effect.
        """
        own_flag = f"--{'no-' * (self.default is True)}{self.name.replace('_', '-')}"
        return self.cli.flags[0] if self.cli.flags else own_flag


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
    """Whether environment variables set fields that are not given.

    Fields without ``Cli`` then have no option on the command line.
    """

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
        if cls.option(str(field.field_name)).kind is not bool:
            raise PydanticCustomError("boolean", "another type than a boolean")
        return value

    @classmethod
    def option(cls, name: str) -> Option:
        """The option of a field."""
        field = cls.model_fields[name]
        kind, annotations = _unwrap(field.annotation)
        fields = [*(part for part in annotations if isinstance(part, FieldInfo)), field]
        metadata = [
            item
            for part in (*annotations, field)
            for item in (part.metadata if isinstance(part, FieldInfo) else [part])
        ]
        has_reader = any(isinstance(item, BeforeValidator) for item in metadata)
        return Option(
            name,
            kind,
            tuple(item for item in metadata if not isinstance(item, Cli | BeforeValidator)),
            None if field.is_required() else field.get_default(),
            field.is_required(),
            has_reader and Path not in (kind, *get_args(kind)),
            next((part.examples[0] for part in reversed(fields) if part.examples), None),
            next((item for item in reversed(metadata) if isinstance(item, Cli)), Cli()),
        )

    @classmethod
    def refuse(cls, error: ValidationError, values: Mapping[str, Any]) -> NoReturn:
        """Raise the first error of a validation, with the name of the field and its bounds.

        Args:
            values: All given values by name.
        """
        from graph_passes.errors import InvalidArgument

        problem = error.errors(include_url=False)[0]
        name, *parts = map(str, problem["loc"] or ("options",))
        if name not in cls.model_fields:
            raise InvalidArgument(
                f"`{name}`: no such option",
                f"{cls.__name__} has {', '.join(cls.model_fields)}",
                code=f"{cls.area}.unknown",
            ) from error
        option = cls.option(name)
        subject, value = f"`{name}`", problem["input"]
        if parts and get_origin(option.kind) is Mapping:
            subject += f" ({'.'.join(parts)})"
        if "Secret" not in str(option.kind):
            subject += f" is {reprlib.repr(value) if isinstance(value, str) else value}"
        what = f"{subject}: expected {expected_values(option, problem['msg'])}"
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
        example = cls.option(name).example
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


def _unwrap(kind: Any) -> tuple[Any, list[Any]]:
    """(a type without None and annotations, the annotations of it and its items)."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        inner, annotations = _unwrap(arguments[0])
        return inner, [*annotations, *arguments[1:]]
    if origin in (Union, UnionType):
        members = [member for member in arguments if member is not NoneType]
        return _unwrap(members[0]) if len(members) == 1 else (str, [])
    if origin is tuple:
        item, annotations = _unwrap(arguments[0])
        return tuple[item, ...], annotations
    return kind, []


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


def expected_values(option: Option, message: str) -> str:
    """The valid values of an option, in words, for an error.

    Args:
        message: The message of the failed validation, for options without choices and bounds.
    """
    if message.startswith("Extra inputs"):
        return "another name"
    text = without_prefixes(message).removeprefix("expected ")
    if message.startswith(VALUE_ERROR):  # raised by the field's reader
        return text
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
