"""What the README says of settings and commands is what the code has."""

from __future__ import annotations

import dataclasses
import re

from typer.main import get_command

from raykv.base.settings import Settings
from raykv.cli import app
from tests.house import ROOT

README = (ROOT / "README.md").read_text()


def default_text(value: object) -> str:
    if value is None or value == "":
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_readme_lists_every_setting_with_its_default_and_meaning() -> None:
    rows = [
        f"| `{f.name}` | {default_text(f.default)} | {f.metadata['text']} |"
        for f in dataclasses.fields(Settings)
    ]
    missing = [row for row in rows if row not in README]
    assert not missing, "\n".join(missing)


def test_readme_names_only_commands_that_exist() -> None:
    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"`raykv ([a-z-]+)", README)) | set(
        re.findall(r"^\$ raykv ([a-z-]+)", README, flags=re.MULTILINE)
    )
    assert named
    assert named <= known, named - known


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200
