"""The other nodes: which there are, what they hold, and reading it from them."""
