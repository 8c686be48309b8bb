"""Choose the graph and the runtime that serve a model: equal to the file, and faster."""
