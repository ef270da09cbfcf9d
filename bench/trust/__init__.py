"""Cost and effect of security."""
