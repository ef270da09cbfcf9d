"""Our store beside LMCache, Mooncake Store and plain Redis."""
