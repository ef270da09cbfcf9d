"""Counters, KV events, traces and request ids."""
