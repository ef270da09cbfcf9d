"""The ground floor: the words that the server and its clients share."""

__version__ = "0.1.0"
