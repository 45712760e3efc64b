"""CRC-32, the same number by whichever is there: ISA-L's takes a tenth of the time that zlib's takes."""

try:
    from isal.isal_zlib import crc32
except ImportError:  # the store needs five libraries, and this is none of them
    from zlib import crc32

__all__ = ["crc32"]
