"""The other nodes: who they are, what they hold, and reading it from them."""
