"""Which namespace an engine's weights put it in, from its start on.

                weights_change          known, or named by the user
    (named) ───────────────────► (nameless) ───────────────────────► (named)

Invariants:
1. The weights of the start, and those that are the same, are in the namespace of the start.
2. Others are named by what lies in the workers' memory, so that engines that were given the same
   weights share, and old ones are found again. Where that can't be told, they have no name until
   the user, or vLLM, gives them one; a name from before the change is none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from raykv.protocol.engine import Space
from raykv.vllm.identity.facts import namespace_of, traits_of
from raykv.vllm.identity.weight_watch import WeightState


class WeightNames:
    """See the module's docstring; `facts` are those of the start."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self._facts = facts
        # How often the weights of each worker have changed, as far as that is known.
        self.seen: dict[str, int] = {}
        # Whether the workers are to be asked what their weights are.
        self.is_asking = False
        # Empty: those of the start. None: it can't be told.
        self._content: str | None = ""
        # What the user calls them, and vLLM; None: nothing since the last change.
        self._version: str | None = None
        self._label: str | None = None

    def change(self) -> None:
        """The weights are about to change, or have: what is known of them is void."""
        self.is_asking = True
        self._content = None
        self._label = None
        self._version = None

    def is_news(self, states: Sequence[WeightState | None]) -> bool:
        """Whether weights have changed since they were known the last time."""
        return self.is_news_of({each.watch: each.count for each in states if each is not None})

    def is_news_of(self, counts: Mapping[str, int]) -> bool:
        """The same, of how often each worker's have changed; what comes late is none."""
        return any(count > self.seen.get(watch, 0) for watch, count in counts.items())

    def know(self, states: Sequence[WeightState | None]) -> None:
        """What all workers say of their weights."""
        said = [each for each in states if each is not None]
        self.is_asking = any(each.is_open for each in said)
        self.seen = {each.watch: each.count for each in said}
        self._content = _content(said) if len(said) == len(states) else None

    def label(self, label: str) -> None:
        """vLLM was given a name for the weights: it counts where nothing else tells them apart."""
        self._label = label

    def call(self, version: str) -> None:
        """The user gives the weights a name: it tells them apart beside their content."""
        self._version = version

    @property
    def is_readable(self) -> bool:
        """Whether it is known what lies in the workers' memory."""
        return self._content is not None

    @property
    def space(self) -> Space | None:
        """None: the weights have no name, so that nothing may be loaded or stored."""
        if self.is_asking:
            return None
        facts = dict(self._facts)
        if self._content is None:
            if self._version is None and self._label is None:
                return None
            facts["weights"] = f"named by vLLM: {self._label}" if self._version is None else "named"
        elif self._content:
            facts["weights"] = f"in memory: {self._content}"
        if self._version is not None:
            facts["weights_version"] = self._version
        return Space(namespace_of(facts), traits_of(facts))


def _content(states: Sequence[WeightState]) -> str | None:
    """Of all workers together; empty: what it was at the start, None: it can't be told."""
    contents = [each.content for each in states]
    if any(each is None for each in contents):
        return None
    if all(each.content == each.first or not each.count for each in states):
        return ""
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:32]
