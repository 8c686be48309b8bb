"""Parts of the product that other packages may add: runtimes, precisions and kinds of training.

A package names a module in the entry point group ``attnserve``. That module adds its parts to
the registries when it is imported, which happens when an unknown name is looked up::

    [project.entry-points.attnserve]
    fast = "fast_runtime"
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from typing import Generic, Protocol, TypeVar

from graph_passes.errors import InvalidArgument

__all__ = ["Registry", "load_plugins"]

GROUP = "attnserve"


class Named(Protocol):
    """A part of the product that options, plans and records name."""

    @property
    def name(self) -> str: ...


Part = TypeVar("Part", bound=Named)


@cache
def load_plugins() -> None:
    """Import the modules that installed packages name, once.

    Raises:
        InvalidArgument: A module cannot be imported.
    """
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:  # a foreign package may raise anything
            raise InvalidArgument(
                f"the plugin {entry.name} ({entry.value}) cannot be imported: "
                f"{type(error).__name__}: {error}",
                "update or remove the package that names it",
                code="plugin.import",
            ) from error


class Registry(Generic[Part]):
    """The parts of one kind, by name.

    Args:
        option: Name of the option that selects a part, for errors.
    """

    def __init__(self, option: str, *parts: Part) -> None:
        self._option = option
        self._parts = {part.name: part for part in parts}

    def add(self, part: Part) -> Part:
        """Add a part; one of the same name is replaced."""
        self._parts[part.name] = part
        return part

    def __getitem__(self, name: str) -> Part:
        """The part of this name, of this package or of a plugin.

        Raises:
            InvalidArgument: There is no such part, or a plugin cannot be imported.
        """
        if name not in self._parts:
            load_plugins()
        if name not in self._parts:
            *others, last = self._parts
            expected = f"{', '.join(others)} or {last}" if others else last
            raise InvalidArgument(
                f"`{self._option}` is {name!r}: expected {expected}",
                "choose one, or install the package that adds it",
                code=f"{self._option}.unknown",
            )
        return self._parts[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._parts:
            load_plugins()
        return name in self._parts

    def __iter__(self) -> Iterator[Part]:
        """Iterate over the parts; parts of plugins come last."""
        load_plugins()
        return iter(self._parts.values())
