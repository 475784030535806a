"""Requests to replay: a trace from a file.

A request is the list of its chunks, from the head of the prompt; equal numbers mean equal prefixes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raykv.base.errors import SettingError

Request = list[int]


def read_trace(path: str) -> list[Request]:
    """The `hash_ids` of each prompt, from a file of JSON objects; empty lines are skipped.

    Raises:
        SettingError: the file can't be read, has no requests, or a line is not a request.
    """
    numbers: dict[Hashable, int] = {}
    requests = []
    for place, row in read_prompts(path):
        names = _hash_ids(row, place)
        requests.append([numbers.setdefault(name, len(numbers)) for name in names])
    if not numbers:
        raise SettingError(f"--trace {path}: there are no requests in it")
    return requests


def read_prompts(path: str) -> list[tuple[str, Any]]:
    """The rows of `read_rows`, each with its whole prompt, and its session as `session`.

    Some traces, whose sessions are named `session_id`, have only what a turn adds to its prompt,
    without the answers: `hash_ids`, `input_length`, and for later turns a `delay` in milliseconds
    instead of a `timestamp`. No later turn begins as its session does, which tells them from traces
    of whole prompts. Their turns are put together, and come in the order of time.

    Raises:
        SettingError: the file can't be read, a line is not JSON, or it is unclear whose turn it is.
    """
    rows = list(read_rows(path))
    sessions: dict[Hashable, list[dict[str, Any]]] = defaultdict(list)
    for place, row in rows:
        name = _session(row, place)
        if name is not None and row.get("session") is None:
            row["session"] = name
            sessions[name].append(row)
    if not _has_only_what_is_new(list(sessions.values())):
        return rows
    for place, row in rows:
        _hash_ids(row, place)
    for turns in sessions.values():
        _put_together(turns)
    if all(_is_number(row.get("timestamp")) for _, row in rows):
        rows.sort(key=lambda each: each[1]["timestamp"])
    return rows


def read_timed_prompts(path: str) -> list[dict[str, Any]]:
    """The requests of a trace with times and lengths.

    Raises:
        SettingError: see `read_prompts`, or a line has no time or no length.
    """
    rows = read_prompts(path)
    numbers = ("input_length", "output_length", "timestamp")
    for place, row in rows:
        names = row if isinstance(row, dict) else {}
        if not all(_is_number(names.get(name)) for name in numbers):
            raise SettingError(
                f"{place}: must have `hash_ids`, a list, and the numbers {', '.join(numbers)}"
            )
        _hash_ids(row, place)
    return [row for _, row in rows]


def _session(row: Any, place: str) -> Hashable | None:
    if not isinstance(row, dict):
        return None
    name = row.get("session", row.get("session_id"))
    if name is None and row.get("delay") is not None:
        raise SettingError(f"{place}: has a `delay` and no `session_id`: whose turn is it?")
    if not isinstance(name, int | str | None):
        raise SettingError(f"{place}: a session must be a number or a string, not {name!r:.50}")
    return name


def _has_only_what_is_new(sessions: Sequence[Sequence[Mapping[str, Any]]]) -> bool:
    """Whether later turns have no chunks of those before them."""
    heads = [
        [names[:1] for row in turns if isinstance(names := row.get("hash_ids"), list) and names]
        for turns in sessions
    ]
    later = [(each[0], head) for each in heads if each for head in each[1:]]
    return bool(later) and all(first != head for first, head in later)


def _put_together(turns: Sequence[dict[str, Any]]) -> None:
    """Make whole prompts of a session's turns, and times of delays."""
    before = turns[0]
    for row in turns[1:]:
        row["hash_ids"] = [*before["hash_ids"], *row["hash_ids"]]
        if _is_number(row.get("input_length")) and _is_number(before.get("input_length")):
            row["input_length"] += before["input_length"]
        if not _is_number(row.get("timestamp")) and _is_number(before.get("timestamp")):
            delay = row.get("delay")
            row["timestamp"] = before["timestamp"] + (delay if _is_number(delay) else 0)
        before = row


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def read_rows(path: str) -> Iterator[tuple[str, Any]]:
    """What each line has as JSON, and where it is, for messages; empty lines are skipped.

    Raises:
        SettingError: the file can't be read, or a line is not JSON.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--trace {path}: can't be read: {error}") from None
    for number, line in enumerate(lines, 1):
        place = f"--trace {path}, line {number}"
        try:
            if line.strip():
                yield place, json.loads(line)
        except ValueError as error:
            raise SettingError(f"{place}: is not JSON: {error}") from None


def _hash_ids(row: Any, place: str) -> list[Hashable]:
    """The chunks in order, each once: a chunk that is there twice is one chunk."""
    names = row.get("hash_ids") if isinstance(row, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, int | str) for name in names):
        raise SettingError(f"{place}: must have `hash_ids`, a list of numbers or strings")
    return list(dict.fromkeys(names))
