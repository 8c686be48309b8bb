"""Parts of the product that other packages may add: passes, runtimes, precisions and trainings.

A package names a module in the entry point group ``attnserve``. That module adds its parts to
the registries (``Registry.add``) when it is imported, which happens when an unknown name is looked
up, or when all parts of a kind are listed::

    [project.entry-points.attnserve]
    fast = "fast_runtime"
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, Protocol, TypeVar

from graph_passes.errors import InvalidArgument

__all__ = ["Registry", "failed_plugins", "load_plugins"]

log = logging.getLogger(__name__)

GROUP = "attnserve"


class Named(Protocol):
    """A part of the product that options, plans and records name."""

    @property
    def name(self) -> str: ...


Part = TypeVar("Part", bound=Named)


def load_plugins() -> None:
    """Import the modules that installed packages name, once.

    Raises:
        InvalidArgument: A module cannot be imported.
    """
    for entry, error in failed_plugins():
        raise InvalidArgument(
            _failure(entry, error),
            "update or remove the package that names it",
            code="plugin.import",
        ) from error


@cache  # a second import of the module would add its parts a second time
def failed_plugins() -> list[tuple[EntryPoint, Exception]]:
    """Import the plugins once; return those that cannot be imported, with their errors."""
    failed: list[tuple[EntryPoint, Exception]] = []
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:  # a foreign package may raise anything
            failed.append((entry, error))
            log.warning(_failure(entry, error))
    return failed


def _failure(entry: EntryPoint, error: Exception) -> str:
    return (
        f"the plugin {entry.name} ({entry.value}) cannot be imported: "
        f"{type(error).__name__}: {error}"
    )


class Registry(Generic[Part]):
    """The parts of one kind, by name.

    Args:
        option: Name of the option that selects a part, for errors.
        parts: Parts of this package.
        other_values: Further values that the option accepts, for errors.
    """

    def __init__(self, option: str, *parts: Part, other_values: Sequence[str] = ()) -> None:
        self._option = option
        self._other_values = other_values
        self._parts: dict[str, Part] = {}
        for part in parts:
            self.add(part)

    def add(self, part: Part, *, replace: bool = False) -> Part:
        """Add a part.

        Args:
            replace: Replace the part of the same name.

        Raises:
            InvalidArgument: Another part has the same name.
        """
        if part.name in self._parts and not replace:
            raise InvalidArgument(
                f"`{self._option}` {part.name!r} exists already",
                "choose another name, or add it with replace=True",
                code=f"{self._option}.duplicate",
            )
        self._parts[part.name] = part
        return part

    @contextmanager
    def restored(self) -> Generator[None]:
        """Restore the present parts at the end of the context, as tests of added parts need."""
        parts = {part.name: part for part in self}
        try:
            yield
        finally:
            self._parts = parts

    def __getitem__(self, name: str) -> Part:
        """The part of this name, of this package or of a plugin.

        Raises:
            InvalidArgument: No part has this name, or a plugin cannot be imported.
        """
        if name not in self:
            *others, last = (*self._parts, *self._other_values)
            expected = f"{', '.join(others)} or {last}" if others else last
            raise InvalidArgument(
                f"`{self._option}` is {name[:100]!r}: expected {expected}",
                "choose one, or install the package that adds it",
                code=f"{self._option}.unknown",
            )
        return self._parts[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._parts:
            load_plugins()
        return name in self._parts

    def __iter__(self) -> Iterator[Part]:
        """Iterate over the parts; parts of plugins come last.

        A plugin that cannot be imported is logged: a command that does not name one of its parts
        does not need it.
        """
        failed_plugins()
        return iter(self._parts.values())
