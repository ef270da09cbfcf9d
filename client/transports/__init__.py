"""How frames travel between a client and its server."""
