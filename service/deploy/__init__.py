"""Deployment of models on Triton, and of the application on Ray Serve."""
