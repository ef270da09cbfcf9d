"""A simulated cluster and its costs."""
