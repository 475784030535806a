"""vLLM's options out of a mapping, as a configuration file has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from raykv.base.errors import SettingError


def to_flags(options: Mapping[str, Any]) -> list[str]:
    """Flags of `vllm serve` for options named with underscores.

    A true value is a flag alone, a false one its `--no-` form; a list gives several values, a
    mapping is JSON, and None leaves the option out.

    Raises:
        SettingError: a name is no option's, or a value is of another kind.
    """
    flags: list[str] = []
    for name, value in options.items():
        if not name.replace("_", "").replace("-", "").isalnum():
            raise SettingError(f"engine_args: {name!r} is no option of vLLM")
        flag = f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if value is True:
            flags.append(flag)
        elif value is False:
            flags.append(f"--no-{flag[2:]}")
        elif isinstance(value, Mapping):
            flags += [flag, json.dumps(value)]
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            flags += [flag, *map(_text, value)]
        else:
            # One word, so that a value may begin with a hyphen.
            flags.append(f"{flag}={_text(value)}")
    return flags


def _text(value: Any) -> str:
    if isinstance(value, str | int | float):
        return str(value)
    raise SettingError(f"engine_args: {value!r} is no value of an option of vLLM")
