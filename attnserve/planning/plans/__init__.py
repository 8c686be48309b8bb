"""Plans: the steps from a model to the one that is served, and the state that they change."""
