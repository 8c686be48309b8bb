"""Blocks of a model: their configurations, and the loss of each configuration."""
