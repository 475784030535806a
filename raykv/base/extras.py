"""What is imported late: optional packages, and the names of packages that import nothing at once.

Where an optional package is needed and missing, a sentence says what to install.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from raykv.base.errors import SettingError


def with_extra(*names: str) -> str:
    """How to install RayKV with one of some extras: no index has it."""
    extra = names[0]
    return (
        f"install RayKV with its extra {' or '.join(names)}: pip install '.[{extra}]' in a clone "
        f"of it, or pip install 'raykv-….whl[{extra}]'"
    )


_VLLM = with_extra("gpu", "cpu")
_INSTALL = {
    "cbor2": "pip install cbor2",
    "fastapi": with_extra("serve"),
    "gguf": with_extra("demo"),
    "matplotlib": with_extra("inspect"),
    "pandas": with_extra("inspect"),
    "starlette": with_extra("serve"),
    "tokenizers": with_extra("demo"),
    "torch": f"pip install torch, or, since vLLM brings it, {_VLLM}",
    "transformers": with_extra("demo"),
    "triton": "pip install triton",
    "vllm": _VLLM,
    "zmq": with_extra("events"),
}
"""How to install it, by the name of the module."""


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
    return f"{purpose} needs {package}, which is not installed: {_INSTALL[package]}"
