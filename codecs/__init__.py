"""Codecs encode a chunk's tensors into the segments of a frame and decode them."""
