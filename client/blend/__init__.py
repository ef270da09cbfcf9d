"""Reuse of chunks that are not prefixes: their KV moved to new places, some rows computed anew."""
