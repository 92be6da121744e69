"""A packed table is a dictionary in less memory."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from ext_proc.packed_table import PackedTable

KEYS = st.integers(0, 40) | st.integers((1 << 64) - 3, (1 << 64) - 1)
STEPS = st.lists(st.tuples(KEYS, st.none() | st.tuples(KEYS, KEYS)), max_size=200)


@given(STEPS, st.sampled_from([0, 200, 1000]))
def test_after_any_changes_it_holds_what_a_dictionary_would(
    steps: list[tuple[int, tuple[int, int] | None]], expected_rows: int
) -> None:
    table, model = PackedTable(2, expected_rows), dict[int, tuple[int, ...]]()
    for key, values in steps:
        if values is None:
            table.remove(key)
            model.pop(key, None)
        else:
            table.put(key, *values)
            model[key] = values
        assert len(table) == len(model)
    for key in (*range(41), (1 << 64) - 1):
        assert table.get(key) == model.get(key)
        assert (key in table) == (key in model)
    table.clear()
    assert len(table) == 0


def test_a_row_takes_little_more_than_its_numbers() -> None:
    table, rng = PackedTable(2, 20_000), random.Random(0)
    for _ in range(20_000):
        table.put(rng.getrandbits(64), 1, 2)
    assert table.memory_bytes() <= 1.5 * 3 * 8 * len(table)
