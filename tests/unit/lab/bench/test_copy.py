"""The benchmark of the copies runs, and measures copies that are right."""

from __future__ import annotations

import numpy as np
import pytest

from raykv.base.ids import Direction
from raykv.copy.rows import RowCopier
from raykv.lab.bench.copy import KIB, LEAST_OF_MEMCPY, OURS, Case, PagedCopy, Sides, cases, run
from raykv.lab.bench.report import Options


def test_quick_run_measures_every_case_and_judges_the_budgets() -> None:
    options = Options(quick=True, repeats=1)
    result = run(options)
    ours = [row.case for row in result.rows if row.subject == OURS]
    assert ours == [case.name for case in cases(options)]
    assert len(set(ours)) == 16
    assert all(row.median > 0 for row in result.rows)
    assert result.verdicts[0].limit == LEAST_OF_MEMCPY
    assert not any(verdict.is_most for verdict in result.verdicts)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_all_subjects_copy_the_same_bytes_to_the_same_places(
    direction: Direction, is_scattered: bool, num_threads: int
) -> None:
    torch = pytest.importorskip("torch")
    sides = Sides(8 << 20, 4 << 20, RowCopier())
    kv, pool = (np.ctypeslib.as_array(side.array()) for side in (sides.kv, sides.pool))
    source, target = (kv, pool) if direction is Direction.STORE else (pool, kv)
    source[:] = np.random.default_rng(1).integers(0, 256, len(source), np.uint8)
    paged = PagedCopy(sides, Case(64 * KIB, direction, is_scattered, num_threads))
    copies = []
    for measure in (paged.ours, paged.torch(torch)):
        target[:] = 0
        assert all(measure() > 0 for _ in range(sides.num_slices))
        copies.append(target.copy())
    assert np.array_equal(np.sort(copies[0]), np.sort(source))
    assert np.array_equal(copies[0], copies[1])
    del kv, pool, source, target
    sides.close()
