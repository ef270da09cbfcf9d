"""The server's edge: RPCs and calls of the host, checked, scheduled and answered."""
