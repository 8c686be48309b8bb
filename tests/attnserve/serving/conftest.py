"""Fixtures of the isolation check, and a small encoder for runners."""

from tests.attnserve.runtime.recording import encoder
from tests.fixtures.checked_child import bert, child

__all__ = ["bert", "child", "encoder"]
