"""Which replica a request should go to: where the fewest bytes have to move and least work waits.

Costs are in tokens: 1 is what it costs to compute one. A token of the prompt is, for a replica, one
of these, and the bytes to move are in proportion to the tokens:

   believed in vLLM's own cache there   0
   in the pool of its node              `load`
   in another node's pool               `fetch`
   nowhere                              1

and each request that is waiting or running there adds `request`. The lowest cost comes first; equal
ones in the order of the requests there, then of the requests that were ever sent there, so that new
prompts are spread, then of the names. Replicas on one node share its pool, not vLLM's own cache.

What was sent to a replica a moment ago is being computed and in no directory yet. `RecentPrompts`
remembers it, or each request of a burst that begins alike would go somewhere else and be computed
there. The memory only says what a replica need not compute: the burst stays together until the
requests that wait there cost more than to compute the prefix once more, then it spreads to one more
replica, and the next ones balance between the two.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raykv.base.errors import SettingError
from raykv.base.ids import Key

MOST_REMEMBERED = 65_536
"""Chunks that were sent somewhere lately: some 20 MiB."""

_MANY_REPLICAS = 8
"""Replicas of a chunk, above which the expired ones are looked for and removed."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What things cost, in tokens to compute; see the module's docstring.

    The defaults: a token came from the own node's pool in 0.03 of the time that it takes to compute
    it, and from another node's in 0.1, on a CPU with a small model. GPUs compute faster and links
    differ, hence the reserve. One request is as a short prompt.

    Raises:
        SettingError: a weight is invalid.
    """

    load: float = 0.05
    fetch: float = 0.25
    request: float = 256.0

    def __post_init__(self) -> None:
        if not 0 <= self.load <= self.fetch <= 1:
            raise SettingError(
                f"routing weights load={self.load:g} and fetch={self.fetch:g} are shares of what a "
                "token costs to compute: 0 <= load <= fetch <= 1"
            )
        if not 0 <= self.request < float("inf"):
            raise SettingError(
                f"the routing weight request={self.request:g} is a number of tokens, 0 or more"
            )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that could take a request.

    `load`: requests that wait or run there; `sent`: requests ever sent there by this router.
    """

    name: str
    node_id: str
    load: int = 0
    sent: int = 0


@dataclass(frozen=True, slots=True)
class PromptPlace:
    """Where a prompt of `num_tokens` is, in tokens from its beginning on.

    `on_nodes`: what each node's pool has; `anywhere`: what can be loaded if the rest is fetched;
    `held`: by replica, what it is believed to have in vLLM's own cache, or to compute just now.
    """

    num_tokens: int
    on_nodes: Mapping[str, int]
    anywhere: int
    held: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica and what the request costs there."""

    name: str
    cost: float


def rank(
    replicas: Sequence[Candidate], prompts: Sequence[PromptPlace], weights: Weights
) -> list[Choice]:
    """All replicas, the best one first; a request may have several prompts."""
    costs = {each.name: _cost(each, prompts, weights) for each in replicas}
    ordered = sorted(replicas, key=lambda r: (costs[r.name], r.load, r.sent, r.name))
    return [Choice(each.name, costs[each.name]) for each in ordered]


def _cost(replica: Candidate, prompts: Sequence[PromptPlace], weights: Weights) -> float:
    moved = 0.0
    for prompt in prompts:
        held = min(prompt.held.get(replica.name, 0), prompt.num_tokens)
        here = max(held, min(prompt.on_nodes.get(replica.node_id, 0), prompt.num_tokens))
        found = max(here, min(prompt.anywhere, prompt.num_tokens))
        moved += weights.load * (here - held) + weights.fetch * (found - here)
        moved += prompt.num_tokens - found
    return moved + weights.request * replica.load


class RecentPrompts:
    """The chunks of prompts that were sent to replicas lately.

    Invariant: at most `most` chunks; the ones that were sent longest ago go first.

    Args:
        lifetime_s: how long they are remembered; computing and storing them takes seconds.
        most: see above.
    """

    def __init__(self, lifetime_s: float, most: int = MOST_REMEMBERED) -> None:
        self._lifetime_s = lifetime_s
        self._most = most
        # Until when each replica is believed to have a chunk.
        self._sent: OrderedDict[Key, dict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sent)

    def remember(self, replica: str, keys: Sequence[Key], now: float) -> None:
        """A prompt whose chunks have these keys, in its order, is being sent there."""
        until = now + self._lifetime_s
        sent = self._sent
        # From the last one on: what is forgotten first is then the end of a prompt.
        for key in reversed(keys):
            ends = sent.get(key)
            if ends is None:
                sent[key] = {replica: until}
                continue
            if len(ends) >= _MANY_REPLICAS:
                for name in [name for name, end in ends.items() if end <= now]:
                    del ends[name]
            ends[replica] = until
            sent.move_to_end(key)
        while len(sent) > self._most:
            sent.popitem(last=False)

    def num_held(self, keys: Sequence[Key], now: float) -> dict[str, int]:
        """How many of the first chunks were sent to each replica lately."""
        found: dict[str, int] = {}
        for number, key in enumerate(keys):
            ends = self._sent.get(key)
            if ends is None:
                break
            goes_on = False
            for name, until in ends.items():
                if until > now and found.get(name, 0) == number:
                    found[name] = number + 1
                    goes_on = True
            if not goes_on:
                break
        return found
