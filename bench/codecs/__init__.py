"""Codecs on the same KV tensors."""
