"""The file of targets: whole at any moment, and written again when it has to be."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest
import yaml

from raykv.metrics.discovery import FILE_NAME, TargetsFile
from tests.house import ROOT


def test_file_is_one_group_as_prometheus_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    TargetsFile(path, "10.0.0.1:6379", lambda: ["10.0.0.1:1", "10.0.0.2:2"]).look()
    assert json.loads(path.read_text()) == [
        {
            "labels": {"job": "raykv", "cluster": "10.0.0.1:6379"},
            "targets": ["10.0.0.1:1", "10.0.0.2:2"],
        }
    ]
    assert [each.name for each in tmp_path.iterdir()] == ["targets.json"]


def test_reader_never_sees_a_part(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    targets = ["first:1"]
    file = TargetsFile(path, "here", lambda: list(targets))
    file.look()
    done = threading.Event()

    def write() -> None:
        for number in range(300):
            targets[:] = [f"host-{number}:{port}" for port in range(200)]
            file.look()
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        while not done.is_set():
            (group,) = json.loads(path.read_text())
            assert len(group["targets"]) in (1, 200)
    finally:
        thread.join(20)


def test_file_follows_the_targets_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    targets = ["a:1"]
    keeper = TargetsFile(path, "here", lambda: list(targets))
    keeper.look()
    before = path.stat().st_ino
    keeper.look()
    assert path.stat().st_ino == before
    targets.append("b:2")
    keeper.look()
    assert "b:2" in path.read_text()
    path.unlink()
    keeper.look()
    assert "b:2" in path.read_text()
    path.write_bytes(b"\xff\xfe")
    keeper.look()
    assert "b:2" in path.read_text()


def test_what_fails_is_said_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "later"
    keeper = TargetsFile(folder / "targets.json", "here", lambda: ["a:1"])
    with caplog.at_level(logging.WARNING, logger="raykv.metrics"):
        keeper.look()
        keeper.look()
    assert len(caplog.records) == 1
    folder.mkdir()
    keeper.look()
    assert "a:1" in (folder / "targets.json").read_text()


def test_example_for_prometheus_names_the_file_that_is_written() -> None:
    path = ROOT / "deploy" / "prometheus" / "prometheus.yml"
    jobs = {job["job_name"]: job for job in yaml.safe_load(path.read_text())["scrape_configs"]}
    (files,) = jobs["raykv"]["file_sd_configs"]
    assert [Path(each).name for each in files["files"]] == [FILE_NAME]
