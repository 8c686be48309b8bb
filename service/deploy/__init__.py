"""Beyond one process: the same models under Triton, the same application under Ray Serve."""
