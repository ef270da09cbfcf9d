"""The metadata of chunks under one lock: copies, prefixes, holds, puts in flight."""
