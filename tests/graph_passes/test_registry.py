"""Registry: look-up, duplicates, and parts that are added later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from graph_passes import registry
from graph_passes.errors import InvalidArgument
from graph_passes.registry import Registry
from tests.errors import raises


@dataclass(frozen=True)
class Part:
    name: str
    value: int = 0


class Entry:
    """An entry point whose module adds a part and then fails."""

    name, value = "fake", "fake_plugin"

    def __init__(self, parts: Registry[Part]) -> None:
        self.parts = parts

    def load(self) -> None:
        self.parts.add(Part("added"))
        raise ImportError("no numpy")


@pytest.fixture
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No package with plugins is installed."""
    monkeypatch.setattr(registry, "entry_points", lambda group: [])  # pyright: ignore
    registry.failed_plugins.cache_clear()
    yield monkeypatch
    registry.failed_plugins.cache_clear()


def test_registry_equal_name_is_refused_unless_it_replaces(no_plugins: object) -> None:
    parts = Registry("kind", Part("one"))
    with raises(InvalidArgument, "kind.duplicate", "`kind`", "'one'"):
        parts.add(Part("one", 2))
    assert parts["one"] == Part("one")
    with parts.restored():
        parts.add(Part("one", 2), replace=True)
        parts.add(Part("two"))
        assert list(parts) == [Part("one", 2), Part("two")]
    assert list(parts) == [Part("one")]
    with raises(InvalidArgument, "kind.duplicate"):
        Registry("kind", Part("one"), Part("one"))


def test_registry_unknown_name_is_refused_with_the_known_ones(no_plugins: object) -> None:
    parts = Registry("kind", Part("one"), Part("two"))
    with raises(InvalidArgument, "kind.unknown", "expected one or two") as caught:
        _ = parts["x" * 9999]
    assert len(caught.value.what) < 200
    parts = Registry("kind", Part("one"), other_values=("all",))
    with raises(InvalidArgument, "kind.unknown", "expected one or all"):
        _ = parts["two"]


def test_registry_loads_no_plugins_for_its_own_parts(no_plugins: pytest.MonkeyPatch) -> None:
    parts = Registry("kind", Part("one"))
    no_plugins.setattr(registry, "load_plugins", lambda: pytest.fail("plugins are not needed"))
    assert parts["one"] == Part("one") and "one" in parts


def test_registry_broken_plugin_is_reported_at_each_look_up(
    no_plugins: pytest.MonkeyPatch,
) -> None:
    parts = Registry("kind", Part("one"))
    no_plugins.setattr(registry, "entry_points", lambda group: [Entry(parts)])  # pyright: ignore
    assert parts["one"] == Part("one")
    for _ in range(2):
        with raises(InvalidArgument, "plugin.import", "fake_plugin", "no numpy"):
            _ = parts["two"]
    assert list(parts) == [Part("one"), Part("added")]
