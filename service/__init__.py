"""The server: an artifact behind HTTP, in the protocols that clients already speak."""
