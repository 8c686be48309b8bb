"""Rewrites by hand: from a request to a plan."""
