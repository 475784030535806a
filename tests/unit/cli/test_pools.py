"""What `raykv down --purge` removes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fixtures.commands import PlayedCluster, run


def test_purge_removes_what_is_left_on_this_host_and_no_cache(
    cluster: PlayedCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
