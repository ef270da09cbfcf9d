"""Moves of copies between tiers: admission, eviction, codecs, work queues."""
