"""What `raykv bench pool` measures."""

from __future__ import annotations

from raykv.lab.bench.pool import run
from raykv.lab.bench.report import Options


def test_full_pool_has_room_for_every_store_and_its_chunks_are_small() -> None:
    result = run(Options(quick=True))
    assert [row.unit for row in result.rows] == ["chunks/s", "ms", "bytes"]
    assert all(row.median > 0 for row in result.rows)
    by_name = {each.budget: each for each in result.verdicts}
    assert by_name["a full pool has room for all"].measured == 0
