"""The benchmark of the copies runs, and measures copies that are right."""

from __future__ import annotations

import numpy as np
import pytest

from raykv.base.ids import Direction
from raykv.copy.rows import RowCopier
from raykv.lab.bench.copy import (
    KIB,
    LEAST_OF_MEMCPY,
    MEMMOVE,
    OURS,
    STREAMED,
    Case,
    PagedCopy,
    Sides,
    cases,
    judge,
    run,
)
from raykv.lab.bench.report import Options, Result, Row


def test_quick_run_measures_every_case_and_judges_the_budget() -> None:
    options = Options(quick=True, repeats=1)
    result = run(options)
    ours = [row.case for row in result.rows if row.subject == OURS]
    assert ours == [case.name for case in cases(options)]
    assert len(set(ours)) == 4
    assert all(row.median > 0 for row in result.rows)
    assert [verdict.limit for verdict in result.verdicts] == [LEAST_OF_MEMCPY]


@pytest.mark.parametrize("direction", Direction)
def test_each_page_is_copied_once(direction: Direction) -> None:
    sides = Sides(8 << 20, 4 << 20, RowCopier())
    kv, pool = (np.ctypeslib.as_array(side.array()) for side in (sides.kv, sides.pool))
    source, target = (kv, pool) if direction is Direction.STORE else (pool, kv)
    source[:] = np.random.default_rng(1).integers(0, 256, len(source), np.uint8)
    target[:] = 0
    paged = PagedCopy(sides, Case(64 * KIB, direction))
    assert all(paged.ours() > 0 for _ in range(sides.num_slices))
    pages = [sorted(map(bytes, side.reshape(-1, 64 * KIB))) for side in (source, target)]
    assert pages[0] == pages[1]
    del kv, pool, source, target
    sides.close()


def test_worst_page_size_is_that_with_the_least_median_beside_the_faster_memcpy() -> None:
    result = Result("copy")
    for page, speeds in ((4, (1.0, 1.0)), (64, (8.0, 9.0)), (256, (6.0, 8.0))):
        for direction, speed in zip(Direction, speeds, strict=True):
            case = Case(page * KIB, direction).name
            result.rows.append(Row(case, OURS, "GB/s", (speed,)))
            result.rows.append(Row(case, MEMMOVE, "GB/s", (5.0,)))
            result.rows.append(Row(case, STREAMED, "GB/s", (10.0,)))
    judge(result)
    assert [each.measured for each in result.verdicts] == [0.7]
    assert result.notes == ["The least is 0.7, with pages of 256 KiB."]
