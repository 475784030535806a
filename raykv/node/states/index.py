"""Which hidden states a NodeActor keeps in memory: bounded in bytes and in time.

    admit ──► COMING (copied, then written) ──► KEPT ──► forgotten (time, or others need the room)
                 │
                 └── fail ──► FAILED ──► forgotten (time)

1. The bytes of all that are not FAILED never exceed the `most_bytes` of the last admission, unless
   one alone does that.
2. What is COMING is never forgotten: a thread holds its memory.
3. A request has one entry; its number of bytes does not change.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from raykv.node.states.file import HiddenStates

_APPENDED = re.compile(r"-[0-9a-f]{8}")
"""What vLLM appends to the id that a client knows, to make it unique."""

_APPENDED_TO_COMPLETION = re.compile(r"-[0-9]+(-[0-9a-f]{8})?|-[0-9a-f]{8}")
"""The completions API puts before that which of its prompts it is."""

MAX_ENTRIES = 1 << 16
"""Requests that are known, failed ones included."""


class CaptureState(Enum):
    """See the module's docstring."""

    COMING = "coming"
    KEPT = "kept"
    FAILED = "failed"


@dataclass(slots=True)
class CaptureEntry:
    """What is known of one request. `reason`: why it is FAILED, or why it has no file. `states` are
    there before they are written.
    """

    num_bytes: int
    ttl_s: float
    state: CaptureState = CaptureState.COMING
    since: float = 0.0
    reason: str = ""
    states: HiddenStates | None = None


class CaptureIndex:
    """Entries by request id. The caller locks; times are of any clock that does not go back."""

    def __init__(self) -> None:
        # In the order of their admission, so that the oldest is the first.
        self._entries: dict[str, CaptureEntry] = {}
        self.num_bytes = 0
        """Of states in memory."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __getitem__(self, request_id: str) -> CaptureEntry:
        return self._entries[request_id]

    def admit(
        self, request_id: str, num_bytes: int, most_bytes: int, ttl_s: float, now: float
    ) -> bool:
        """Begin with a request, if there is room or can be made: the oldest are forgotten for it.
        False: its states may not be copied now; nothing has changed.

        One that is larger than `most_bytes` is admitted when nothing else is in memory.
        """
        assert request_id not in self._entries, request_id
        forgotten: list[str] = []
        left = self.num_bytes
        if left + num_bytes > most_bytes:
            for other, entry in self._entries.items():
                if entry.state is CaptureState.KEPT:
                    forgotten.append(other)
                    left -= entry.num_bytes
                    if left + num_bytes <= most_bytes:
                        break
        if left and left + num_bytes > most_bytes:
            return False
        if len(self._entries) == MAX_ENTRIES and not forgotten:
            for other, entry in self._entries.items():
                if entry.state is not CaptureState.COMING:
                    forgotten.append(other)
                    break
            else:
                return False
        for other in forgotten:
            self._forget(other)
        self._entries[request_id] = CaptureEntry(num_bytes, ttl_s, since=now)
        self.num_bytes += num_bytes
        return True

    def written(self, request_id: str, now: float, problem: str = "") -> None:
        """Its file is written, or is not because of `problem`; its time begins."""
        entry = self._entries[request_id]
        assert entry.state is CaptureState.COMING, entry
        entry.state, entry.since, entry.reason = CaptureState.KEPT, now, problem

    def fail(self, request_id: str, reason: str, now: float) -> None:
        """The states will not come."""
        entry = self._entries[request_id]
        assert entry.state is CaptureState.COMING, entry
        self.num_bytes -= entry.num_bytes
        entry.state, entry.since, entry.reason = CaptureState.FAILED, now, reason
        entry.num_bytes = 0

    def refuse(self, request_id: str, ttl_s: float, reason: str, now: float) -> None:
        """Note a request that was never admitted, unless one of that name is known already, or too
        many are.
        """
        # It takes no memory, whatever is in it.
        if request_id not in self._entries and self.admit(
            request_id, 0, self.num_bytes, ttl_s, now
        ):
            self.fail(request_id, reason, now)

    def expire(self, now: float) -> None:
        """Forget what has been kept for its time."""
        old = [
            request_id
            for request_id, entry in self._entries.items()
            if entry.state is not CaptureState.COMING and now - entry.since >= entry.ttl_s
        ]
        for request_id in old:
            self._forget(request_id)

    def find(self, name: str) -> list[str]:
        """Requests with that id, or whose id vLLM has made of it by appending to it."""
        if name in self._entries:
            return [name]
        appended = _APPENDED_TO_COMPLETION if name.startswith("cmpl-") else _APPENDED
        return [
            request_id
            for request_id in self._entries
            if request_id.startswith(f"{name}-") and appended.fullmatch(request_id, len(name))
        ]

    def _forget(self, request_id: str) -> None:
        self.num_bytes -= self._entries.pop(request_id).num_bytes
        assert self.num_bytes >= 0, self.num_bytes
