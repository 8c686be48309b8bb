"""The search for a plan that meets a goal."""
