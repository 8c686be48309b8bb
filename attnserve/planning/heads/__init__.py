"""Heads of attention: which to remove or to reuse, by their measured importance and similarity."""
