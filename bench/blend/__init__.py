"""Blending: quality and time."""
