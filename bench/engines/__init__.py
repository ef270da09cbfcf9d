"""A real vLLM, with stores and without."""
