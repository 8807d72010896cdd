"""
Constants for the hash of eight-byte words. Torch's operations and the kernel use the same
constants.

The factors are signed 64-bit integers, because torch and the kernel multiply such integers.
"""

__all__ = ["FIRST", "LOW", "PLACE", "SECOND", "SHIFT"]

PLACE = 0x9E3779B97F4A7C15 - 2**64
"""Factor for a word's index, derived from the golden ratio."""
FIRST = 0xFF51AFD7ED558CCD - 2**64
"""First factor of MurmurHash3's finalizer."""
SECOND = 0xC4CEB9FE1A85EC53 - 2**64
"""Second factor of MurmurHash3's finalizer."""
SHIFT = 33
"""By how many bits the finalizer shifts."""
LOW = (1 << (64 - SHIFT)) - 1
"""Mask of the bits that remain after a shift by `SHIFT`."""
