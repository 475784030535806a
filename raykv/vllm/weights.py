"""What becomes of an engine's use of the cache when its weights change: see `WeightNames` for where
it goes, and `weight_changes` for who tells.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from raykv.base.guard import guarded, nothing
from raykv.vllm.identity.weight_names import WeightNames
from raykv.vllm.identity.weight_watch import WeightState
from raykv.vllm.internals.offloading import SchedulerTables
from raykv.vllm.manager import RayOffloadingManager

logger = logging.getLogger("raykv")


class WeightChanges:
    """A `Listener`, on the scheduler's side; everything happens between steps.

    Requests that are there when the weights change are of two kinds of weights from then on, and
    so are those that go on from what vLLM's prefix cache, or its cache of encoders' outputs, has of
    before: they are barred.
    """

    def __init__(
        self, names: WeightNames, manager: RayOffloadingManager, tables: SchedulerTables
    ) -> None:
        self._names = names
        self._manager = manager
        self._tables = tables
        # Whether vLLM's own prefix cache may have KV, and whether of earlier weights.
        self._has_prefixes = False
        self._has_old_prefixes = False
        # The same of its cache of what encoders make of images and the like.
        self._has_encodings = False
        self._has_old_encodings = False
        self._is_said = False

    @property
    def is_asking(self) -> bool:
        return self._names.is_asking

    @property
    def seen(self) -> dict[str, int]:
        """How often the weights of each worker had changed when they were named."""
        return self._names.seen

    @guarded(nothing)
    def change(self, what: str) -> None:
        self._manager.change_weights()
        self._names.change()
        self._is_said = False
        self._manager.barred |= self._tables.requests.keys()
        self._has_old_prefixes = self._has_old_prefixes or self._has_prefixes
        self._has_old_encodings = self._has_old_encodings or self._has_encodings
        self._manager.leave(what)

    @guarded(nothing)
    def know(self, states: Sequence[WeightState | None]) -> None:
        names = self._names
        if not names.is_asking:
            if not names.is_news(states):
                return
            whats = [each.what for each in states if each is not None]
            self.change(max(whats, key=len))
        names.know(states)
        self._enter()

    @guarded(nothing)
    def listen(self) -> None:
        version = None if self._names.is_asking else self._manager.take_naming()
        if version is None:
            return
        self._names.call(version)
        self._manager.barred |= self._tables.requests.keys()
        self._manager.leave("set_weights_version")
        self._enter()

    @guarded(nothing)
    def label(self, label: str) -> None:
        if not (self._names.is_asking or self._names.is_readable):
            self._names.label(label)
            self._enter()

    @guarded(nothing)
    def drop_prefixes(self) -> None:
        self._has_prefixes = self._has_old_prefixes = False

    @guarded(nothing)
    def drop_encodings(self) -> None:
        self._has_encodings = self._has_old_encodings = False

    def hear(self, changed: Mapping[str, tuple[int, str]]) -> None:
        """Workers report that somebody has written into their models; what the weights are is
        asked when the next request comes.
        """
        if self._names.is_news_of({each: count for each, (count, _) in changed.items()}):
            self.change(next(what for _, what in changed.values()))

    def begin(self, request_id: str, num_computed_tokens: int, *, has_media: bool = False) -> None:
        """vLLM is about to compute a request behind so many tokens that it has itself."""
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
        if self._names.is_asking:
            return
        space = self._names.space
        if space is not None:
            self._manager.enter(space)
            return
        logger.warning(
            "RayKV can't tell this engine's weights from others: it neither loads nor stores until "
            "they have a name (raykv set-weights-version)"
        )
