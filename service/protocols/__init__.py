"""One module a protocol: what it calls things, and its routes."""
