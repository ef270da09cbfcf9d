"""A simulated cluster, and what it costs."""
