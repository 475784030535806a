"""Which way small pages take, and the file that remembers it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.base.ids import Direction
from raykv.copy.cuda.calibration import (
    MAX_FILE_BYTES,
    USUAL,
    Point,
    Route,
    Table,
    always,
    cache_folder,
    file_of,
    load,
    save,
)
from raykv.copy.cuda.driver import DeviceName

STORE, LOAD = Direction.STORE, Direction.LOAD
KIB = 1 << 10
NAME = DeviceName("NVIDIA H100 80GB HBM3", "580.95.05")

TABLE = Table(
    (
        Point(LOAD, 4 * KIB, 8, 3e9, 2e9),
        Point(LOAD, 4 * KIB, 512, 3e9, 20e9),
        Point(LOAD, 64 * KIB, 8, 20e9, 10e9),
        Point(LOAD, 64 * KIB, 512, 24e9, 25e9),
    )
)


@pytest.mark.parametrize(
    ("page_kib", "num_runs", "route"),
    [
        (4, 8, Route.BATCH),
        (4, 512, Route.GATHER),
        (4, 100, Route.GATHER),
        (4, 50, Route.BATCH),
        (1, 100_000, Route.GATHER),
        (8, 512, Route.GATHER),
        (64, 512, Route.BATCH),  # faster, but not by so much that it were worth it
        (32, 512, Route.BATCH),
        (100, 512, Route.BATCH),
    ],
)
def test_way_is_that_of_the_next_measured_point(page_kib: int, num_runs: int, route: Route) -> None:
    assert TABLE.route(LOAD, page_kib * KIB * num_runs, num_runs) is route


def test_pages_larger_than_any_that_was_measured_are_not_gathered() -> None:
    table = Table((Point(LOAD, 4 * KIB, 8, 1e9, 9e9),))
    assert table.route(LOAD, 4 * KIB * 8, 8) is Route.GATHER
    assert table.route(LOAD, 4 * KIB * 8 + 1, 8) is Route.BATCH


def test_direction_that_was_not_measured_takes_the_usual_way() -> None:
    assert TABLE.route(STORE, 512 * KIB, 512) is Route.BATCH


@pytest.mark.parametrize(
    ("direction", "page_bytes", "num_runs", "route"),
    [
        (LOAD, 28 * KIB, 1000, Route.BATCH),
        (LOAD, 28 * KIB - 1, 16, Route.GATHER),
        (LOAD, 28 * KIB - 1, 15, Route.BATCH),
        (STORE, 4 * KIB, 1000, Route.BATCH),
    ],
)
def test_usual_way_without_a_calibration(
    direction: Direction, page_bytes: int, num_runs: int, route: Route
) -> None:
    assert USUAL.route(direction, page_bytes * num_runs, num_runs) is route


@pytest.mark.parametrize("route", Route)
def test_a_table_with_one_way_has_it_for_everything(route: Route) -> None:
    for direction in Direction:
        for num_bytes, num_runs in ((8, 1), (1 << 40, 1), (1 << 30, 100_000)):
            assert always(route).route(direction, num_bytes, num_runs) is route


def test_file_brings_back_what_was_measured(tmp_path: Path) -> None:
    path = file_of(tmp_path / "cache", NAME, "Triton")
    assert load(path, NAME, "Triton") is None
    save(path, NAME, "Triton", TABLE)
    assert load(path, NAME, "Triton") == TABLE
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert path.name == "cuda-copy-NVIDIA-H100-80GB-HBM3-580.95.05-Triton.json"


@pytest.mark.parametrize(
    ("name", "mover"),
    [
        (DeviceName("other", NAME.driver_version), "Triton"),
        (DeviceName(NAME.model, "590.1"), "Triton"),
        (NAME, "torch"),
    ],
)
def test_file_for_something_else_is_ignored_with_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: DeviceName, mover: str
) -> None:
    path = tmp_path / "it.json"
    save(path, name, mover, TABLE)
    with caplog.at_level(logging.WARNING):
        assert load(path, NAME, "Triton") is None
    assert "is ignored and measured again" in caplog.text


def document(**changes: Any) -> dict[str, Any]:
    point = {
        "direction": 1,
        "page_bytes": 4096,
        "num_runs": 8,
        "batch_rate": 1e9,
        "gather_rate": 2e9,
    }
    return {
        "version": 3,
        "model": NAME.model,
        "driver_version": NAME.driver_version,
        "mover": "Triton",
        "points": [{**point, **changes}],
    }


def loaded(path: Path, content: bytes | str) -> Table | None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return load(path, NAME, "Triton")


def test_valid_document_is_read(tmp_path: Path) -> None:
    """The counterpart of the refusals."""
    assert loaded(tmp_path / "it.json", json.dumps(document())) == Table(
        (Point(LOAD, 4096, 8, 1e9, 2e9),)
    )


@pytest.mark.parametrize(
    "change",
    [
        {"direction": 7},
        {"direction": True},
        {"direction": 1.0},
        {"page_bytes": 0},
        {"page_bytes": 1 << 46},
        {"page_bytes": 4096.5},
        {"num_runs": -1},
        {"num_runs": "8"},
        {"batch_rate": 0},
        {"batch_rate": float("nan")},
        {"gather_rate": float("inf")},
        {"gather_rate": None},
        {"unknown": 1},
    ],
)
def test_point_that_cant_be_meant_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    assert loaded(tmp_path / "it.json", json.dumps(document(**change))) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b"{",
        b"[" * 100_000,
        b" " * (MAX_FILE_BYTES + 1),
        json.dumps({**document(), "version": 1}).encode(),
        json.dumps({**document(), "points": []}).encode(),
        json.dumps({**document(), "points": {}}).encode(),
        json.dumps({**document(), "points": [[]]}).encode(),
        json.dumps({**document(), "points": document()["points"] * 1001}).encode(),
    ],
)
def test_malformed_file_is_ignored_with_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    with caplog.at_level(logging.WARNING):
        assert loaded(tmp_path / "it.json", content) is None
    assert "is ignored and measured again" in caplog.text


@given(
    cut=st.integers(0, 400),
    at=st.integers(0, 400),
    instead=st.sampled_from(['"', "0", "}", "e9", "null"]),
)
def test_damaged_file_is_read_as_a_table_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, cut: int, at: int, instead: str
) -> None:
    text = json.dumps(document())
    path = tmp_path_factory.mktemp("cache") / "it.json"
    for damaged in (text[:cut], text[:at] + instead + text[at + 1 :]):
        table = loaded(path, damaged)
        assert table is None or isinstance(table.route(LOAD, 1 << 20, 7), Route)


def test_folder_that_cant_be_written_costs_a_warning_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    path = file_of(tmp_path / "file" / "cache", NAME, "Triton")
    with caplog.at_level(logging.WARNING):
        save(path, NAME, "Triton", TABLE)
    assert "can't be kept" in caplog.text
    (tmp_path / "folder").mkdir()
    assert load(tmp_path / "folder", NAME, "Triton") is None


def test_cache_is_in_the_users_folder() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/raykv")
    assert cache_folder({"HOME": "/home/x"}) == Path.home() / ".cache/raykv"
