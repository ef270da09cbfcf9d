"""Codecs turn a chunk's tensors into the segments of a frame and back."""
