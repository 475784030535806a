"""Logs: one form and one level for every process, and the end of an actor's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raykv.base.errors import SettingError
from raykv.base.settings import load_settings, log_level
from raykv.cluster.logs import MAX_PIECE, level_for_actors, read_log

ACTORS = {
    "raykv.directory.actor": "SchedulerActor",
    "raykv.node.actor": "NodeActor",
    "raykv.stream.publisher": "PublisherActor",
    "raykv.client.import_source": "ImportSource",
}

WRITES = """
import logging
from raykv.cluster.logs import set_up_logging
set_up_logging()
logging.getLogger("raykv.node").info("a line")
logging.getLogger("raykv.node").debug("a detail")
"""


def written(level: str | None) -> str:
    variables = {} if level is None else {"RAYKV_LOG_LEVEL": level}
    done = subprocess.run(
        [sys.executable, "-c", WRITES],
        env={"PYTHONPATH": str(Path(__file__).parents[3]), **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stderr


def test_line_has_level_time_and_process() -> None:
    (line,) = written(None).splitlines()
    words = line.split()
    assert words[0] == "INFO"
    assert words[3:4] == ["[raykv"]
    assert line.endswith("a line")


def test_level_is_what_the_variable_says() -> None:
    assert "a detail" in written("debug")
    assert written("WARNING") == ""


def test_level_that_does_not_exist_is_one_sentence() -> None:
    loud = written("loud")
    assert "RAYKV_LOG_LEVEL='loud' is no level: choose one of DEBUG" in loud
    assert "a line" in loud
    with pytest.raises(SettingError, match="RAYKV_LOG_LEVEL='loud' is no level"):
        load_settings({}, {"RAYKV_LOG_LEVEL": "loud"})
    assert log_level("INFO", {}) == "INFO"


def test_actors_have_the_level_of_who_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert level_for_actors() == {}
    monkeypatch.setenv("RAYKV_LOG_LEVEL", "debug")
    assert level_for_actors() == {"RAYKV_LOG_LEVEL": "debug"}


@pytest.mark.parametrize("module", ACTORS)
def test_every_actor_sets_up_its_log(module: str) -> None:
    source = (Path(__file__).parents[3] / f"{module.replace('.', '/')}.py").read_text()
    _, _, body = source.partition(f"class {ACTORS[module]}")
    assert "set_up_logging()" in body


def test_end_of_a_log_is_read_and_then_what_follows(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb", buffering=0) as file:
        file.write(b"x" * MAX_PIECE + b"the end")
        place, piece = read_log(None, file.fileno())
        assert piece.endswith(b"the end")
        assert len(piece) == MAX_PIECE
        assert read_log(place, file.fileno()) == (place, b"")
        file.write(b", and more")
        assert read_log(place, file.fileno())[1] == b", and more"


def test_lines_by_which_ray_knows_a_log_are_left_out(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb", buffering=0) as file:
        file.write(b":job_id:01000000\n:actor_name:SchedulerActor\nours\n a :job_id: in it\n")
        place, piece = read_log(0, file.fileno())
        assert piece == b"ours\n a :job_id: in it\n"
        assert read_log(place, file.fileno()) == (place, b"")
