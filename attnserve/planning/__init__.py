"""Choose the rewrites of a model, apply them, and verify the result."""
