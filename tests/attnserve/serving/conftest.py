"""Fixtures of the isolation check, and a small encoder for runners."""

from tests.attnserve.runtime.recording import encoder
from tests.fixtures.checked_child import bert, child, gate

__all__ = ["bert", "child", "encoder", "gate"]
