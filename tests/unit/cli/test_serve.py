"""`raykv files` writes what is in deploy/, from a clone and from a wheel alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from raykv.base.errors import SettingError
from tests.fixtures.commands import run
from tests.house import ROOT

DEPLOY = ROOT / "deploy"
FILES = {
    str(path.relative_to(DEPLOY))
    for folder, pattern in (("serve", "*.yaml"), ("prometheus", "*.yml"), ("grafana", "*.json"))
    for path in (DEPLOY / folder).glob(pattern)
}


def written(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def theirs() -> dict[str, str]:
    return {name: (DEPLOY / name).read_text() for name in FILES}


def test_files_are_those_of_deploy(tmp_path: Path) -> None:
    assert {"serve/cpu-trial.yaml", "prometheus/rules.yml", "grafana/raykv.json"} <= FILES
    said = run("files", tmp_path / "new" / "folder")
    assert written(tmp_path / "new" / "folder") == theirs()
    assert said.startswith(f"wrote {len(FILES)} files under {tmp_path / 'new' / 'folder'}")


def test_json_names_what_was_written_and_what_was_there(tmp_path: Path) -> None:
    first = json.loads(run("files", tmp_path, "--json"))
    assert first == {"folder": str(tmp_path), "written": sorted(FILES), "unchanged": []}
    again = json.loads(run("files", tmp_path, "--json"))
    assert again == {"folder": str(tmp_path), "written": [], "unchanged": sorted(FILES)}


def test_changed_file_is_overwritten_only_if_asked(tmp_path: Path) -> None:
    (tmp_path / "prometheus").mkdir()
    mine = tmp_path / "prometheus" / "rules.yml"
    mine.write_text("groups: []\n")
    with pytest.raises(SettingError, match=r"prometheus/rules\.yml .*--overwrite"):
        run("files", tmp_path)
    assert written(tmp_path) == {"prometheus/rules.yml": "groups: []\n"}
    assert "wrote" in run("files", tmp_path, "--overwrite")
    assert written(tmp_path) == theirs()


@pytest.mark.parametrize("place", ["taken", "taken/below"])
def test_folder_that_can_not_be_made_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(SettingError, match=f"{tmp_path / place}.*name another folder"):
        run("files", tmp_path / place)


def test_wheel_brings_the_files(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, *options, "--wheel-dir", tmp_path, ROOT], check=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {
            each.removeprefix("raykv/files/"): archive.read(each).decode()
            for each in archive.namelist()
            if each.startswith("raykv/files/") and not each.endswith(".md")
        }
        archive.extractall(tmp_path / "installed")
    assert inside == theirs()
    command = [sys.executable, "-c", "from raykv.cli import main; main()", "files", "out"]
    there = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    subprocess.run(command, cwd=tmp_path, env=there, check=True, timeout=100, capture_output=True)
    assert written(tmp_path / "out") == theirs()
