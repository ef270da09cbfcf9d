"""What operators may set, where it may come from, and what is wrong with it."""
