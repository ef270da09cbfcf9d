"""What security costs and what it holds."""
