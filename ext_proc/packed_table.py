"""A table of unsigned 64-bit integers in little memory: rows of a key and a few values, found by the key.

A Python dictionary of such rows takes well over 100 bytes each; this takes about ten for each number, and a
look-up a fraction of a microsecond. Keys must be spread evenly, as hashes are: their remainder says in which
of many small sorted arrays they stand. Pure.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left

ROWS_PER_BUCKET = 64
"""Rows of a bucket when the table is full: few enough to insert in the middle, many beside what an array
takes by itself."""


class PackedTable:
    """Rows found by their key."""

    __slots__ = ("_buckets", "_columns", "_keys", "_values")

    def __init__(self, columns: int, expected_rows: int) -> None:
        """A table whose rows have `columns` values; it may hold more rows than expected, but slower."""
        self._columns = columns
        self._buckets = max(1, expected_rows // ROWS_PER_BUCKET)
        self._keys: list[array[int]] = []
        self._values: list[array[int]] = []
        self.clear()

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    def __contains__(self, key: int) -> bool:
        keys = self._keys[key % self._buckets]
        position = bisect_left(keys, key)
        return position < len(keys) and keys[position] == key

    def get(self, key: int) -> tuple[int, ...] | None:
        """The values of a row; `None`: there is none."""
        bucket = key % self._buckets
        keys = self._keys[bucket]
        position = bisect_left(keys, key)
        if position == len(keys) or keys[position] != key:
            return None
        start = position * self._columns
        return tuple(self._values[bucket][start : start + self._columns])

    def put(self, key: int, *values: int) -> None:
        """Add a row, or give it other values."""
        bucket = key % self._buckets
        keys, all_values = self._keys[bucket], self._values[bucket]
        position = bisect_left(keys, key)
        start = position * self._columns
        if position < len(keys) and keys[position] == key:
            all_values[start : start + self._columns] = array("Q", values)
        else:
            keys.insert(position, key)
            all_values[start:start] = array("Q", values)

    def remove(self, key: int) -> None:
        """Take a row out; nothing happens if there is none."""
        bucket = key % self._buckets
        keys = self._keys[bucket]
        position = bisect_left(keys, key)
        if position < len(keys) and keys[position] == key:
            del keys[position]
            start = position * self._columns
            del self._values[bucket][start : start + self._columns]

    def clear(self) -> None:
        """Take all rows out."""
        self._keys = [array("Q") for _ in range(self._buckets)]
        self._values = [array("Q") for _ in range(self._buckets)]

    def memory_bytes(self) -> int:
        """Memory the table occupies."""
        lists = sys.getsizeof(self._keys) + sys.getsizeof(self._values)
        return lists + sum(map(sys.getsizeof, self._keys)) + sum(map(sys.getsizeof, self._values))
