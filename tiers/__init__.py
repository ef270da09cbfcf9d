"""Tiers: each stores frames on one medium."""
