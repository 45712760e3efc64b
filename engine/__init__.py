"""One model on one device: encode chunks, fuse their KV, decode. Start in `engine.py`."""

from ragblend.engine.openmp import set_thread_spinning

set_thread_spinning()  # before any module of the engine imports torch
