"""Eviction policies: pure decisions without I/O, clock or tier."""
