"""The packages of the extra `inspect`, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from raykv.errors import SettingError


def pandas() -> Any:
    """The module.

    Raises:
        SettingError: it is not installed.
    """
    return _module("pandas")


def pyplot() -> Any:
    """matplotlib's, with the back end that is set.

    Raises:
        SettingError: it is not installed.
    """
    return _module("matplotlib.pyplot")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise SettingError(
            f"raykv.inspect needs {name.partition('.')[0]}, which is not installed: "
            "pip install 'raykv[inspect]'"
        ) from error
