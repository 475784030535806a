"""Which replica a request should go to: where it and those behind it wait for the shortest time.

Costs are in tokens: 1 is what it costs to compute one. A token of the prompt is, for a replica, one
of these, and the bytes to move are in proportion to the tokens:

   believed in vLLM's own cache there   0
   in the pool of its node              `load`
   in another node's pool               `fetch`
   nowhere                              1

The sum is the *work* of the request there. To it come `waiting`, for each token of work that was
sent there before and of which no first token has come yet, and `request` for each request that
waits or runs there. The lowest cost comes first; equal ones in the order of the requests there,
then of the work that was ever sent there, so that new prompts are spread, then of the names.
Replicas on one node share its pool, not vLLM's own cache.

A request waits for all the work before it, but its own work counts three times as much: it delays
the request, and then all that come behind it. So nothing is computed again only to be there a
little earlier.

What was sent to a replica a moment ago is being computed and in no directory yet. `RecentPrompts`
remembers it, or each request of a burst that begins alike would go somewhere else and be computed
there. The memory only says what a replica need not compute: the burst stays together until what
waits there costs more than to compute the prefix once more, then it spreads to one more replica,
and the next ones balance between the two.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, model_validator

from raykv.base.errors import SettingError

MOST_REMEMBERED = 131_072
"""Stretches of prompts that were sent somewhere lately: some 50 MiB."""

_MANY_REPLICAS = 8
"""Places of a stretch, above which the expired ones are looked for and removed."""


class Weights(BaseModel):
    """What things cost, in tokens to compute; see the module's docstring.

    The defaults: a token came from the own node's pool in 0.03 of the time that it takes to compute
    it, and from another node's in 0.1, on a CPU with a small model. A GPU computes faster: 0.04 and
    0.15 to 0.4, by the prompt's length, with 7 billion parameters on an H100 and links of 5 GB/s. A
    request takes a little of each step, and room.

    Attributes:
        load: A token that comes from the pool of the replica's node.
        fetch: A token that comes from another node's pool.
        request: Each request that waits or runs at the replica.
        waiting: A token of work that was sent to the replica before, while its first token has not
            come.

    Raises:
        SettingError: a weight is invalid.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    load: float = 0.05
    fetch: float = 0.25
    request: float = 64.0
    waiting: float = 0.35

    @model_validator(mode="after")
    def _meant(self) -> Weights:
        if not 0 <= self.load <= self.fetch <= 1:
            raise SettingError(
                f"routing weights load={self.load:g} and fetch={self.fetch:g} are shares of what a "
                "token costs to compute: 0 <= load <= fetch <= 1"
            )
        if not 0 <= self.request < float("inf"):
            raise SettingError(
                f"the routing weight request={self.request:g} is a number of tokens, 0 or more"
            )
        if not 0 <= self.waiting < float("inf"):
            raise SettingError(
                f"the routing weight waiting={self.waiting:g} is a share of work, 0 or more"
            )
        return self


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that could take a request.

    `load`: requests that wait or run there; `sent`: work ever sent there by this router; `waiting`:
    work of which no first token has come yet.
    """

    name: str
    node_id: str
    load: int = 0
    sent: float = 0.0
    waiting: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptPlace:
    """Where a request's prompts are, in tokens from their beginnings on; all may be estimates.

    `num_tokens`: of all; `on_nodes`: what each node's pool has; `anywhere`: what can be loaded if
    the rest is fetched; `held`: by replica, what it is believed to have in vLLM's own cache, or to
    compute just now.
    """

    num_tokens: float
    on_nodes: Mapping[str, float]
    anywhere: float
    held: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica, what the request costs there, and how much of that is work."""

    name: str
    cost: float
    work: float


def rank(replicas: Sequence[Candidate], prompt: PromptPlace, weights: Weights) -> list[Choice]:
    """All replicas, the best one first."""
    works = {each.name: _work(each, prompt, weights) for each in replicas}
    costs = {
        each.name: works[each.name] + weights.waiting * each.waiting + weights.request * each.load
        for each in replicas
    }
    ordered = sorted(replicas, key=lambda r: (costs[r.name], r.load, r.sent, r.name))
    return [Choice(each.name, costs[each.name], works[each.name]) for each in ordered]


def _work(replica: Candidate, prompt: PromptPlace, weights: Weights) -> float:
    held = min(prompt.held.get(replica.name, 0), prompt.num_tokens)
    here = max(held, min(prompt.on_nodes.get(replica.node_id, 0), prompt.num_tokens))
    found = max(here, min(prompt.anywhere, prompt.num_tokens))
    moved = weights.load * (here - held) + weights.fetch * (found - here)
    return moved + prompt.num_tokens - found


class RecentPrompts:
    """The stretches of prompts that were brought to places lately: to replicas, or to nodes.

    A stretch's key names all that comes before it.

    Invariant: at most `most` stretches; the ones that were brought longest ago go first.

    Args:
        lifetime_s: how long they are remembered.
        most: see above.
    """

    def __init__(self, lifetime_s: float, most: int = MOST_REMEMBERED) -> None:
        self._lifetime_s = lifetime_s
        self._most = most
        # Until when each place is believed to have a stretch.
        self._sent: OrderedDict[Hashable, dict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sent)

    def remember(self, place: str, keys: Sequence[Hashable], now: float) -> None:
        """A prompt whose stretches have these keys, in its order, is being brought there."""
        until = now + self._lifetime_s
        sent = self._sent
        # From the last one on: what is forgotten first is then the end of a prompt.
        for key in reversed(keys):
            ends = sent.get(key)
            if ends is None:
                sent[key] = {place: until}
                continue
            if len(ends) >= _MANY_REPLICAS:
                for name in [name for name, end in ends.items() if end <= now]:
                    del ends[name]
            ends[place] = until
            sent.move_to_end(key)
        while len(sent) > self._most:
            sent.popitem(last=False)

    def num_held(self, keys: Sequence[Hashable], now: float) -> dict[str, int]:
        """How many of the first stretches were brought to each place lately."""
        found: dict[str, int] = {}
        # Who has a stretch has all before it, so that the last one says it all.
        for number in range(len(keys), 0, -1):
            ends = self._sent.get(keys[number - 1], {})
            if len(ends) > len(found):
                for name, until in ends.items():
                    if until > now and name not in found:
                        found[name] = number
        return found
