"""The command line: ``attnserve COMMAND``."""

INTERRUPTED = "interrupted: no partial output was written"
"""The message after Ctrl-C."""
