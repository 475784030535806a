"""Which namespace an engine's weights put it in, from its start on, and what becomes of requests
when they change. `identity.weight_changes` has who tells.

                weights_change          known, or named by the user
    (named) ───────────────────► (nameless) ───────────────────────► (named)

Invariants:
1. The weights of the start, and those that are the same, are in the namespace of the start.
2. Others are named by what lies in the workers' memory, so that engines that were given the same
   weights share, and old ones are found again. Where that can't be told, they have no name until
   the user, or vLLM, gives them one; a name from before the change is none.
3. Requests that are there when the weights change are of two kinds of weights from then on, and so
   are those that go on from what vLLM's prefix cache, or its cache of encoders' outputs, has of
   before: they are barred.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from raykv.base.guard import guarded, nothing
from raykv.protocol.engine import Space
from raykv.vllm.identity.facts import namespace_of, traits_of
from raykv.vllm.identity.weight_watch import WeightState
from raykv.vllm.internals.offloading import SchedulerTables
from raykv.vllm.manager import RayOffloadingManager

logger = logging.getLogger("raykv")


class WeightChanges:
    """On the scheduler's side; everything happens between steps. `facts` are those of the start."""

    def __init__(
        self, facts: dict[str, Any], manager: RayOffloadingManager, tables: SchedulerTables
    ) -> None:
        self._facts = facts
        self._manager = manager
        self._tables = tables
        # How often the weights of each worker had changed when they were named.
        self.seen: dict[str, int] = {}
        # Whether the workers are to be asked what their weights are, before the next request.
        self.is_asking = False
        # Empty: those of the start. None: it can't be told.
        self._content: str | None = ""
        # What the user calls them, and vLLM; None: nothing since the last change.
        self._version: str | None = None
        self._label: str | None = None
        # Whether vLLM's own prefix cache may have KV, and whether of earlier weights.
        self._has_prefixes = False
        self._has_old_prefixes = False
        # The same of its cache of what encoders make of images and the like.
        self._has_encodings = False
        self._has_old_encodings = False
        self._is_said = False

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

    @guarded(nothing)
    def change(self, what: str) -> None:
        """A call of that name is about to change the weights, or has: what is known is void."""
        self._manager.session.change_weights()
        self.is_asking = True
        self._content = self._label = self._version = None
        self._is_said = False
        self._manager.barred |= self._tables.requests.keys()
        self._has_old_prefixes = self._has_old_prefixes or self._has_prefixes
        self._has_old_encodings = self._has_old_encodings or self._has_encodings
        self._manager.leave(what)

    @guarded(nothing)
    def know(self, states: Sequence[WeightState | None]) -> None:
        """What all workers say of their weights; None: a worker can't tell."""
        said = [each for each in states if each is not None]
        counts = {each.watch: each.count for each in said}
        if not self.is_asking:
            if not self._is_news(counts):
                return
            self.change(max((each.what for each in said), key=len))
        self.is_asking = any(each.is_open for each in said)
        self.seen = counts
        self._content = _content(said) if len(said) == len(states) else None
        self._enter()

    def hear(self, changed: Mapping[str, tuple[int, str]]) -> None:
        """Workers report that something has written into their models; what the weights are is
        asked when the next request comes.
        """
        if self._is_news({each: count for each, (count, _) in changed.items()}):
            self.change(next(what for _, what in changed.values()))

    def _is_news(self, counts: Mapping[str, int]) -> bool:
        """Whether weights have changed since they were known the last time, by how often each
        worker's have; what comes late is no news.
        """
        return any(count > self.seen.get(watch, 0) for watch, count in counts.items())

    @guarded(nothing)
    def listen(self) -> None:
        """Hear what the user calls the weights that there are now: it tells them apart beside their
        content.
        """
        naming = None if self.is_asking else self._manager.session.take_naming()
        if naming is None:
            return
        self._version = naming.version
        self._manager.barred |= self._tables.requests.keys()
        self._manager.leave("set_weights_version")
        self._enter()

    @guarded(nothing)
    def label(self, label: str) -> None:
        """vLLM was given a name for the weights: it counts where nothing else tells them apart."""
        if self._content is None and not self.is_asking:
            self._label = label
            self._enter()

    @guarded(nothing)
    def drop_prefixes(self) -> None:
        """vLLM uses no KV any more that was computed before."""
        self._has_prefixes = self._has_old_prefixes = False

    @guarded(nothing)
    def drop_encodings(self) -> None:
        """vLLM uses no outputs of encoders any more that were computed before."""
        self._has_encodings = self._has_old_encodings = False

    def begin(self, request_id: str, num_computed_tokens: int, *, has_media: bool = False) -> None:
        """vLLM is about to compute a request behind tokens that it has itself."""
        self._has_prefixes = True
        self._has_encodings = self._has_encodings or has_media
        if self._has_old_prefixes and num_computed_tokens:
            self._bar(request_id, "KV that vLLM's own prefix cache", "reset_prefix_cache")
        elif self._has_old_encodings and has_media:
            self._bar(request_id, "an image that vLLM's encoder cache", "reset_encoder_cache")

    def _bar(self, request_id: str, origin: str, reset: str) -> None:
        self._manager.barred.add(request_id)
        if not self._is_said:
            self._is_said = True
            logger.warning(
                "a request goes on from %s may have of other weights, so it neither loads nor "
                "stores: call %s after weights have changed",
                origin,
                reset,
            )

    def _enter(self) -> None:
        """Go on in the namespace of the weights, if they have a name."""
        if self.is_asking:
            return
        space = self.space
        if space is not None:
            self._manager.session.enter(space)
            return
        logger.warning(
            "RayKV can't tell this engine's weights from others: it neither loads nor stores until "
            "they have a name (raykv engine weights)"
        )


def _content(states: Sequence[WeightState]) -> str | None:
    """Of all workers together; empty: what it was at the start, None: it can't be told."""
    contents = [each.content for each in states]
    if any(each is None for each in contents):
        return None
    if all(each.content == each.first or not each.count for each in states):
        return ""
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:32]
