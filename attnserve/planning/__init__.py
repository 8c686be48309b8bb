"""Choose the rewrites of a model, apply them, and prove the result."""
