"""One model on one device: encode chunks, fuse their KV, decode. Start in `engine.py`."""
