"""Eviction policies on the traces of the checkout."""
