"""What is known of chunks: where copies lie, who waits for them, what is kept."""
