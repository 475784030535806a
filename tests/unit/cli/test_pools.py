"""What `raykv down` removes, and when it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raykv.base.errors import SettingError
from raykv.cli.pools import refuse_without_place
from raykv.protocol.node import Kept
from tests.fixtures.commands import AnsweringCluster, run


def test_purge_removes_what_is_left_on_this_host_and_no_cache(
    cluster: AnsweringCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session, pool = tmp_path / "session", tmp_path / "pool"
    session.mkdir()
    pool.write_bytes(b"KV")
    (session / "a log").write_text("")
    cluster.answers["down"] = 3
    monkeypatch.setattr("raykv.metrics.discovery.session_folder", lambda: session)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache/raykv/smollm2").mkdir(parents=True)
    stopped: list[str] = []
    monkeypatch.setattr("raykv.cluster.join.stop_started", stopped.append)
    told = json.loads(run("down", "--with-ray", "--purge", "--json"))
    assert stopped == ["played:1"]
    assert told["removed"] == [str(session), str(tmp_path / "cache/raykv")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "pool"]


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (Kept("n", left=3), "neither disk_path nor pool_path"),
        (Kept("n", "/disk", 5, 3, "No space left on device"), "No space left on device"),
        (Kept("n", problem="no answer within 5 s"), "no answer within 5 s"),
    ],
)
def test_down_that_keeps_is_refused_where_chunks_would_be_lost(kept: Kept, told: str) -> None:
    with pytest.raises(SettingError, match=f"nothing was ended, since node n .*{told}"):
        refuse_without_place([Kept("other", "/disk", 5), kept])


def test_down_that_keeps_goes_on_where_nothing_is_lost() -> None:
    refuse_without_place([Kept("n"), Kept("m", "/disk", 5), Kept("o", "/disk", 5, 3)])
