"""`buffer_utils`: write rows of request state that the host has changed into their tensors."""

from __future__ import annotations

from typing import Any

from outrider_cpu.arrays import compiled, row_at, view

Array = Any


def apply_write(
    grid: tuple[int],
    output: Array,
    output_stride: Any,
    write_indices: Array,
    write_starts: Array,
    write_contents: Array,
    write_cu_lens: Array,
    write_group_ids: Array,
    MULTI_GROUP: bool,  # noqa: N803
) -> None:
    """`_apply_write_kernel`: write i copies its piece of `write_contents` into a row, from a column on.

    With several groups `output` holds a pointer to each group's table, and `output_stride` each table's row length.
    """
    pieces = [view(column)[: grid[0]] for column in (write_indices, write_starts, write_cu_lens)]
    if MULTI_GROUP:
        _write_groups(view(output), view(output_stride), *pieces, view(write_contents), view(write_group_ids))
    else:
        _write_rows(view(output).reshape(-1), output_stride, *pieces, view(write_contents))


@compiled
def _write_rows(output: Array, stride: int, rows: Array, starts: Array, ends: Array, contents: Array) -> None:
    first = 0
    for i in range(len(rows)):
        place = rows[i] * stride + starts[i]
        for j in range(ends[i] - first):
            output[place + j] = contents[first + j]
        first = ends[i]


@compiled
def _write_groups(
    tables: Array, strides: Array, rows: Array, starts: Array, ends: Array, contents: Array, groups: Array
) -> None:
    first = 0
    for i in range(len(rows)):
        row = row_at(tables[groups[i]], rows[i], strides[groups[i]])
        for j in range(ends[i] - first):
            row[starts[i] + j] = contents[first + j]
        first = ends[i]
