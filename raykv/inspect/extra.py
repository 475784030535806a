"""The packages of the extra `inspect`, imported when they are needed."""

from __future__ import annotations

from typing import Any

from raykv.base.extras import load


def pandas() -> Any:
    """The module.

    Raises:
        SettingError: it is not installed.
    """
    return load("pandas", "raykv.inspect")


def pyplot() -> Any:
    """matplotlib's, with the back end that is set.

    Raises:
        SettingError: it is not installed.
    """
    return load("matplotlib.pyplot", "raykv.inspect")
