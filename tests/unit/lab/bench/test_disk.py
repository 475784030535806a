"""What the disk benchmark says of the system around it; that it runs is tested beside `fetch`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raykv.lab.bench import disk
from raykv.lab.bench.disk import (
    CACHED,
    DROPPED,
    FILES,
    PLAIN_READ,
    READ,
    RESTING,
    TIER,
    WRITE,
    WRITING,
)
from raykv.lab.bench.report import Result


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
    class Rounds:
        num_chunks = 2
        values = {
            (WRITE, TIER, "MiB/s"): [50.0, 300.0],
            (WRITE, TIER, "chunks/s"): [25.0, 150.0],
            (WRITE, FILES, "MiB/s"): [100.0, 300.0],
            (f"{READ}, {CACHED}", TIER, "MiB/s"): [1.0, 1.0],
            (f"{READ}, {DROPPED}", TIER, "MiB/s"): [90.0, 90.0],
            (f"{READ}, {DROPPED}", PLAIN_READ, "MiB/s"): [100.0, 100.0],
            ("a load of 16 chunks", RESTING, "ms"): [4.0, 4.0],
            ("a load of 16 chunks", WRITING, "ms"): [6.0, 6.0],
        }

    made = Result("disk", "")
    case = disk._add_rows(made, Rounds())  # type: ignore[arg-type]
    disk._add_verdicts(made, case)
    assert made.rows[0].case == "write of 4 MiB"
    assert [each.measured for each in made.verdicts] == [0.75, 0.9, 1.5]
    assert [each.is_met for each in made.verdicts] == [False, True, False]


@pytest.mark.parametrize("is_synced", [True, False])
def test_plain_files_are_as_many_bytes_as_the_chunks_and_go_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_synced: bool
) -> None:
    class Node:
        def call(self, name: str) -> int:
            assert name == "life"
            return 1

    sizes: list[int] = []
    real = disk._append

    def watched(path: Path, data: disk.Bytes, is_synced: bool) -> None:
        sizes.append(len(data))
        real(path, data, is_synced)

    monkeypatch.setattr(disk, "_append", watched)
    rounds = disk._Rounds(tmp_path, Node(), None, 20)  # type: ignore[arg-type]
    assert rounds._plain_write(is_synced=is_synced) > 0
    assert sizes == [32 << 20, 8 << 20]
    assert not list(tmp_path.iterdir())
