"""States of hybrid models: a tree of positions that have one, and whose state goes next."""
