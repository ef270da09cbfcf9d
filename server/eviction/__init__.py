"""Whom to evict."""
