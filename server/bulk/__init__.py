"""Bytes over zmq: the ROUTER socket and what it asks of the manager."""
