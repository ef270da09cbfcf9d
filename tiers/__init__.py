"""Tiers hold frames on one medium each."""
