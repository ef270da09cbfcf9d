"""The server's settings: flags, environment, files, and their checks."""
