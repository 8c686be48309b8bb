"""Fixtures of the isolation check."""

from tests.fixtures.checked_child import bert, child, gate

__all__ = ["bert", "child", "gate"]
