"""The lowest layer: types, formats and protocols shared by the server and its clients."""

__version__ = "0.1.0"
