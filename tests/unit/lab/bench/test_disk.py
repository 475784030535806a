"""The disk benchmark runs, and what it says of the system around it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raykv.lab.bench import disk
from raykv.lab.bench.disk import FILES, PLAIN_READ, READ, TIER, WRITE
from raykv.lab.bench.report import Options, Result, Row


def test_quick_run_writes_and_reads_beside_plain_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYKV_DISK_PATH", str(tmp_path))
    result = disk.run(Options(quick=True, repeats=1))
    subjects = [(row.case, row.subject) for row in result.rows]
    assert subjects == [(WRITE, FILES), (WRITE, TIER), (READ, PLAIN_READ), (READ, TIER)]
    assert all(row.median > 0 for row in result.rows)
    assert len(result.verdicts) == 2
    assert not list(tmp_path.iterdir())


def written(path: Path) -> Path:
    path.write_bytes(os.urandom(1 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


def test_what_was_just_written_is_in_the_page_cache(tmp_path: Path) -> None:
    assert disk.cached_share(written(tmp_path / "file")) == 1.0


def test_file_counts_as_cached_where_the_system_does_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> int:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "preadv", unsupported)
    assert disk.cached_share(written(tmp_path / "file")) == 1.0


def test_part_that_is_not_in_the_page_cache_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_half(fd: int, buffers: list[bytearray], offset: int, flags: int) -> int:
        assert flags == disk.RWF_NOWAIT
        if offset >= 1 << 19:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", first_half)
    assert disk.cached_share(written(tmp_path / "file")) == 0.5


def test_budgets_are_of_the_ratios_within_each_repeat() -> None:
    speeds = {
        (WRITE, TIER): (50.0, 300.0),
        (WRITE, FILES): (100.0, 300.0),
        (READ, TIER): (90.0, 90.0),
        (READ, PLAIN_READ): (100.0, 100.0),
    }
    made = Result("disk", rows=[Row(*names, "MiB/s", some) for names, some in speeds.items()])
    disk.judge(made)
    assert [each.measured for each in made.verdicts] == [0.75, 0.9]
    assert [each.is_met for each in made.verdicts] == [False, True]
