"""Chunks that are not prefixes: their contents, variants, and the gate before them."""
