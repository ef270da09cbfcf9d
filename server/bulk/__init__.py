"""Frames over TCP streams: who connects there, and what is asked of the manager."""
