"""Comparison, verification and measurement of models."""
