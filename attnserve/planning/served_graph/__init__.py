"""Choose the graph and the runtime that serve a model: equal to its file, and faster."""
