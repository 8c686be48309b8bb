"""Blocks of a model: their configurations, and what each configuration loses."""
