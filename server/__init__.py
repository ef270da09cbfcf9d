"""The server composes tiers, codecs and policies; only the manager moves chunks."""
