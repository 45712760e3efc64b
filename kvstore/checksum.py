"""CRC-32 by ISA-L if it is installed, else by zlib, which takes ten times as long; the results are equal."""

try:
    from isal.isal_zlib import crc32
except ImportError:  # optional: the store works without it
    from zlib import crc32

__all__ = ["crc32"]
