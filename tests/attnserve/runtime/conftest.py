"""A small encoder for tests of sessions."""

from tests.attnserve.runtime.recording import encoder

__all__ = ["encoder"]
