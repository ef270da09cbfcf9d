"""Connectors: one engine a file, its engine imported only when it is used."""
