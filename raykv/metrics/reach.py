"""What an endless pool would hit: chunks that prompts want, and how many different ones.

Of a chunk that is wanted several times an endless pool computes the first and loads the others: it
hits 1 - different / wanted of them. Chunks of answers are stored too, and wanted for the first time
by the next turn of a conversation: that a pool may hit those even so is not counted.

    engine's thread: note ──► waiting ──► the line's thread: take ──► NodeActor: `Reach.add`

An engine counts anew for each life of its NodeActor, so that both numbers begin with that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from raykv.metrics.hyperloglog import HyperLogLog
from raykv.protocol.measures import KeySketch

MAX_WAITING = 4096
"""Requests whose keys were not counted yet; beyond it the oldest are left out of both numbers."""

MAX_REGISTERS = 4096
"""Registers in one message: 12 KiB. What has changed beyond it comes with the next one."""


MAX_AT_ONCE = 4096
"""Keys after which the rest waits for the next message: the engine's thread waits for Python's lock
meanwhile, a third of a millisecond."""


class WantedKeys:
    """The keys that one engine wants. `note` is for its own thread, `take` for one other thread."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence[bytes]] = deque(maxlen=MAX_WAITING)
        self._life = 0
        self.num_wanted = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._sketch = HyperLogLog()
        self._sent = HyperLogLog()

    def note(self, keys: Sequence[bytes]) -> None:
        """A request wants these chunks; the caller changes `keys` no more."""
        self._waiting.append(keys)

    def tell_all_again(self) -> None:
        """A message may have been lost: send the whole sketch next time."""
        self._sent = HyperLogLog()

    def take(self, life: int) -> KeySketch:
        """Count what was noted, and give what is new of the sketch for the NodeActor of that life.

        `num_wanted` has the count since the engine's start.
        """
        if life != self._life:
            self._life = life
            self._begin_anew()
        keys: list[bytes] = []
        while self._waiting and len(keys) < MAX_AT_ONCE:
            keys += self._waiting.popleft()
        self.num_wanted += len(keys)
        self._sketch.add(keys)
        return self._sketch.changed_since(self._sent.registers, MAX_REGISTERS)


@dataclass(slots=True)
class Reach:
    """How many chunks the engines of one namespace want, and how many different ones."""

    num_wanted: int = 0
    _sketch: HyperLogLog = field(default_factory=HyperLogLog)

    def add(self, num_wanted: int, sketch: KeySketch) -> None:
        """Add what an engine reports as new."""
        self.num_wanted += num_wanted
        self._sketch.merge(sketch)

    @property
    def num_distinct(self) -> float:
        """Estimate, never above what was wanted: no key is new twice."""
        return min(self._sketch.estimate(), float(self.num_wanted))

    @property
    def hit_ratio(self) -> float:
        """Share of the wanted chunks; 0 before any was wanted."""
        return 1.0 - self.num_distinct / self.num_wanted if self.num_wanted else 0.0
