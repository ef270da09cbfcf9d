"""Fixtures every room shares."""
