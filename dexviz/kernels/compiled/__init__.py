"""Operators for float32 on the CPU, compiled by Numba: row by row, while a row is in the first-level cache.

Each has the signature of its eager twin. Loops release Python's global lock, so that threads run them side by side.
"""
