"""Frames over TCP streams between hosts and between servers."""
