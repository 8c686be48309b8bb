"""HTTP server for artifacts, with standard inference protocols."""
