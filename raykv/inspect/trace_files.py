"""Requests to replay: a trace from a file, and seeded synthetic ones.

A request is the list of its chunks, from the head of the prompt; equal numbers mean equal prefixes.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, count, cycle
from pathlib import Path
from random import Random
from typing import Any

from raykv.base.errors import SettingError

Request = list[int]

SEED = 1


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


def read_endings(path: str, requests: Sequence[Request]) -> list[Request]:
    """For each request of a trace, what its session leaves behind if that is the last of it: the
    chunks that no other session has used so far. Lines without a `session` end none.
    """
    sessions = [row.get("session") for _, row in read_prompts(path)]
    last = {session: number for number, session in enumerate(sessions)}
    users: dict[int, Any] = {}
    own: dict[Any, dict[int, None]] = {}
    endings: list[Request] = []
    for number, (session, request) in enumerate(zip(sessions, requests, strict=True)):
        for chunk in request:
            # None once two sessions have used it.
            users[chunk] = session if users.get(chunk, session) == session else None
        if session is None:
            endings.append([])
            continue
        own.setdefault(session, {}).update(dict.fromkeys(request))
        is_over = last[session] == number
        endings.append([chunk for chunk in own[session] if is_over and users[chunk] == session])
    return endings


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


def synthetic(num_requests: int) -> dict[str, list[Request]]:
    """A trace of each kind by name."""
    kinds: dict[str, Callable[[Random, int], list[Request]]] = {
        "documents": documents,
        "chats": chats,
        "one-off prompts": one_off_prompts,
        "shifting": shifting,
        "agents": agents,
        "loops": loops,
        "tenants": tenants,
    }
    return {name: make(Random(SEED), num_requests) for name, make in kinds.items()}


def documents(random: Random, num_requests: int) -> list[Request]:
    """Questions about documents, some of which are asked about far more often than others."""
    new = count()
    files = [_chunks(new, random.randint(4, 40)) for _ in range(num_requests // 5)]
    weights = list(accumulate(1 / rank for rank in range(1, len(files) + 1)))
    chosen = random.choices(files, cum_weights=weights, k=num_requests)
    return [[*file, *_chunks(new, random.randint(1, 3))] for file in chosen]


def chats(random: Random, num_requests: int) -> list[Request]:
    """Chats under one system prompt: each turn has all earlier ones as its prefix; people think
    for about as long as it takes 200 others to speak, and half of them then say no more.
    """
    new = count()
    system = _chunks(new, 2)
    requests: list[Request] = []
    # When somebody speaks next, whose turn it is, and the chat so far.
    waiting: list[tuple[float, int, Request]] = []
    for number in range(num_requests):
        if waiting and waiting[0][0] <= number:
            _, _, chat = heapq.heappop(waiting)
            chat = [*chat, *_chunks(new, random.randint(1, 4))]
        else:
            chat = [*system, *_chunks(new, random.randint(2, 30))]
        requests.append(chat)
        if random.random() < 0.5:
            think = number + 20 + random.expovariate(1 / 200)
            heapq.heappush(waiting, (think, number, chat))
    return requests


def one_off_prompts(random: Random, num_requests: int) -> list[Request]:
    """Long prompts that never come again, between uses of a few system prompts."""
    new = count()
    systems = [_chunks(new, random.randint(5, 20)) for _ in range(max(1, num_requests // 25))]
    requests = []
    for _ in range(num_requests):
        hot = random.choice(systems) if random.random() < 0.6 else []
        requests.append([*hot, *_chunks(new, random.randint(2, 30))])
    return requests


def shifting(random: Random, num_requests: int) -> list[Request]:
    """Documents again, but those in use are others from time to time."""
    new = count()
    requests = []
    for _ in range(5):
        files = [_chunks(new, random.randint(4, 40)) for _ in range(num_requests // 40)]
        for _ in range(num_requests // 5):
            file = files[int(len(files) * random.random() ** 2)]
            requests.append([*file, *_chunks(new, random.randint(1, 3))])
    return requests


def agents(random: Random, num_requests: int) -> list[Request]:
    """Agents whose prompts grow with each call of a tool; now and then a call takes long, or a
    person reads what they did, and some then say no more.
    """
    new = count()
    requests: list[Request] = []
    waiting: list[tuple[float, int, Request]] = []
    for number in range(num_requests):
        if len(waiting) < 20 and random.random() < 0.1:
            heapq.heappush(waiting, (number, number, _chunks(new, random.randint(10, 60))))
        if not waiting:
            continue
        _, _, prompt = heapq.heappop(waiting)
        requests.append(prompt)
        fate = random.random()
        if fate < 0.98:
            pause = 5.0 if fate < 0.85 else random.expovariate(1 / 100)
            grown = [*prompt, *_chunks(new, random.randint(0, 4))]
            heapq.heappush(waiting, (number + pause, number, grown))
    return requests


def loops(random: Random, num_requests: int) -> list[Request]:
    """The same documents in turn, again and again, between questions about a few of them."""
    new = count()
    files = [_chunks(new, random.randint(4, 40)) for _ in range(num_requests // 8)]
    turns = cycle(files)
    return [
        random.choice(files[:5]) if random.random() < 0.3 else next(turns)
        for _ in range(num_requests)
    ]


def tenants(random: Random, num_requests: int) -> list[Request]:
    """Chats of tenants with prompts of their own, one of which sends one-off prompts in bulk."""
    rest = [chats(random, num_requests // 4) for _ in range(3)]
    parts = [*rest, one_off_prompts(random, num_requests // 4)]
    return [
        [len(parts) * chunk + tenant for chunk in parts[tenant][turn]]
        for turn in range(num_requests // 4)
        for tenant in range(len(parts))
    ]


def _chunks(new: count[int], number: int) -> Request:
    return [next(new) for _ in range(number)]
