"""Optional packages: where one is needed and missing, a sentence says what to install."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from raykv.base.errors import SettingError

_VLLM = "'raykv[gpu]', or 'raykv[cpu]'"
_INSTALL = {
    "cbor2": "cbor2",
    "fastapi": "'raykv[serve]'",
    "gguf": "'raykv[demo]'",
    "matplotlib": "'raykv[inspect]'",
    "pandas": "'raykv[inspect]'",
    "starlette": "'raykv[serve]'",
    "tokenizers": "'raykv[demo]'",
    "torch": f"torch (vLLM brings it: {_VLLM})",
    "transformers": "'raykv[demo]'",
    "triton": "triton",
    "vllm": _VLLM,
    "zmq": "'raykv[events]'",
}
"""What to install with pip, by the name of the module."""


def load(module: str, purpose: str) -> Any:
    """Import a module of one of the packages.

    Args:
        module: may lie in a package, as `matplotlib.pyplot` does.
        purpose: who needs it, as the subject of a sentence.

    Raises:
        SettingError: it is not installed; an import that fails otherwise raises what it raises.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _INSTALL:
            raise
        raise SettingError(complaint(error, purpose)) from error


def require(purpose: str, *packages: str) -> None:
    """Refuse at once what would fail later; imports nothing.

    Raises:
        SettingError: one of them is not installed.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise SettingError(complaint(ModuleNotFoundError(name=package), purpose))


def complaint(error: ModuleNotFoundError, purpose: str) -> str:
    """What is missing and what to install; empty for other modules."""
    package = (error.name or "").partition(".")[0]
    if package not in _INSTALL:
        return ""
    return f"{purpose} needs {package}, which is not installed: pip install {_INSTALL[package]}"
