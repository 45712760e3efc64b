"""The format and the store of chunks' KV."""
