"""Train small models with the attention layers of the papers, to compare them with the claims."""
