"""The command line: ``attnserve COMMAND``."""
