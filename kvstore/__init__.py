"""What a chunk's KV is, and where it is kept."""
