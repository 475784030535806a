"""The file that a command's `--json` names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raykv.base.errors import SettingError


def json_file(json_path: str | Path | None) -> Path | None:
    """Check the argument of `--json`, and return the file; None if it names none, or is "-".

    Raises:
        SettingError: the file can't be written.
    """
    path = None if json_path in (None, "-") else Path(str(json_path))
    if path is not None and not path.parent.is_dir():
        raise SettingError(f"--json {path}: there is no folder {path.parent}")
    return path


def json_text(value: Any) -> str:
    """Format a value as the file has it."""
    return json.dumps(value, indent=2) + "\n"


def write_json(path: Path | None, value: Any) -> None:
    """Write a value to the file, if there is one."""
    if path is not None:
        path.write_text(json_text(value), encoding="utf-8")
