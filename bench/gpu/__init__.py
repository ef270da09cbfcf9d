"""KV in GPU memory."""
