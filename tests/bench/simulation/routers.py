"""The routers that are compared; each decides with the code that Serve uses.

"kv" is RayKV's own planner, driven as its event loop would drive it, with a directory that answers
late; "prefix" has Ray's own prefix tree, with Ray's rules around it, written down again since Ray
has them in an actor's client. Ray's other two are a line each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import numpy as np

from raykv.base.ids import Key
from raykv.cluster.breaker import Breakers, Pauses
from raykv.prompts.block_hashes import PLAIN
from raykv.prompts.prompt_keys import PromptHasher, PromptKeys, PromptTokens
from raykv.protocol.descriptions import ChunkGroup
from raykv.serve.http.exchange import HttpRequest
from raykv.serve.router.directory import ROUTE_ANSWER_S, ROUTE_PAUSES_S, FoundPrompt
from raykv.serve.router.planner import PlacedRequest, RoutePlanner
from raykv.serve.router.rank import Candidate
from raykv.serve.router.rendering import Fallback
from raykv.serve.router.settings import RouteSettings
from raykv.serve.router.trail import BYTES_PER_TOKEN, Trail, stretches
from tests.bench.simulation.chunk_cache import Chunks
from tests.bench.simulation.hardware import TOKENS
from tests.bench.simulation.workload import SimRequest

MATCH_RATE = 0.1
"""Ray's default of `match_rate_threshold`."""

GROUP = ChunkGroup(0, TOKENS)


@dataclass(frozen=True)
class Pause:
    """Waits in virtual time: `await Pause(0.01)`."""

    seconds: float

    def __await__(self) -> Generator[Pause, None, None]:
        yield self


class SimRouter(ABC):
    """Chooses a replica for each request. By default it takes no notice of anything else."""

    @abstractmethod
    async def route(self, number: int, request: SimRequest, replicas: Replicas) -> str:
        """Return the name of one of the current replicas."""

    def began(self, number: int) -> None:  # noqa: B027
        """Note that a request has its first token."""

    def ended(self, number: int) -> None:  # noqa: B027
        """Note that a request or its replica has ended."""

    def keep(self, names: Collection[str]) -> None:  # noqa: B027
        """Note which replicas take requests from now on."""


Replicas = Callable[[], Sequence[Candidate]]
"""Returns the replicas that take requests now, with their loads."""


class SimRoundRobin(SimRouter):
    """Replicas take turns."""

    def __init__(self) -> None:
        self._turn = 0

    async def route(self, number: int, request: SimRequest, replicas: Replicas) -> str:
        """See `SimRouter`."""
        names = sorted(each.name for each in replicas())
        self._turn += 1
        return names[self._turn % len(names)]


class SimPowerOfTwo(SimRoundRobin):
    """The less loaded one of two that are drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)

    async def route(self, number: int, request: SimRequest, replicas: Replicas) -> str:
        """See `SimRouter`."""
        return self._of_two(replicas())

    def _of_two(self, there: Sequence[Candidate]) -> str:
        drawn = self._random.sample(there, min(2, len(there)))
        return min(drawn, key=lambda each: each.load).name


class SimPrefixTree(SimPowerOfTwo):
    """Ray's prefix-aware router; a chunk is a letter of its texts.

    Args:
        seed: of what is drawn.
        imbalance: `imbalanced_threshold`; Ray's default is never.
    """

    def __init__(self, seed: int, imbalance: float = float("inf")) -> None:
        from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

        super().__init__(seed)
        self._imbalance = imbalance
        self._tree: Any = PrefixTree()
        self._clock = 0.0

    def keep(self, names: Collection[str]) -> None:
        """See `SimRouter`."""
        known = set(self._tree.tenant_to_char_count)
        self._tree.add_tenants(sorted(set(names) - known), self._tick())
        self._tree.remove_tenants(sorted(known - set(names)))

    async def route(self, number: int, request: SimRequest, replicas: Replicas) -> str:
        """See `SimRouter`."""
        there, text = replicas(), text_of(request)
        name = self._choose(text, there)
        self._tree.insert(text, name, self._tick())
        return name

    def _choose(self, text: str, there: Sequence[Candidate]) -> str:
        loads = {each.name: each.load for each in there}
        if not text or max(loads.values()) - min(loads.values()) > self._imbalance:
            return self._of_two(there)
        matched, tenants = self._tree.prefix_match(text, list(loads))
        if len(matched) / len(text) < MATCH_RATE:
            tenants = self._tree.get_smallest_tenants()
        if not tenants:
            return self._of_two(there)
        return str(min(tenants, key=lambda name: loads[name]))

    def _tick(self) -> float:
        self._clock += 1.0
        return self._clock


def text_of(request: SimRequest) -> str:
    """A letter for each chunk; none of them is half of a pair."""
    return "".join(chr(each + 0x10000) for each in request.chunks.tolist())


@dataclass(frozen=True, slots=True)
class SimKeys(PromptKeys):
    """With the chunks' numbers."""

    chunks: Chunks


class SimHasher:
    """Makes keys of chunks' numbers, given as if they were tokens."""

    def keys(self, prompt: PromptTokens, most_keys: int) -> PromptKeys:
        """See `PromptHasher.keys`."""
        chunks = np.asarray(prompt.tokens)[1:]
        keys = [Key(b"%d" % each) for each in chunks[:most_keys].tolist()]
        return SimKeys(int(prompt.tokens[0]), {GROUP: keys}, chunks)


class SimDirectory:
    """Answers after a delay, with the state at the time of the question, behind a router's deadline
    and breaker.
    """

    def __init__(
        self, find: Callable[[Chunks], FoundPrompt], delay_s: float, clock: Callable[[], float]
    ) -> None:
        self.hasher: PromptHasher | None = cast(PromptHasher, SimHasher())
        self._find, self._delay_s, self._clock = find, delay_s, clock
        self._breakers = Breakers(Pauses(*ROUTE_PAUSES_S))

    async def find(self, prompts: Sequence[PromptKeys]) -> list[FoundPrompt] | None:
        """See `raykv.serve.router.planner.Finder`."""
        call = self._breakers.begin("directory", self._clock())
        if call is None:
            return None
        found = [self._find(each.chunks) for each in prompts if isinstance(each, SimKeys)]
        await Pause(min(self._delay_s, ROUTE_ANSWER_S))
        if self._delay_s > ROUTE_ANSWER_S:
            self._breakers.failed("directory", call, self._clock(), "late")
            return None
        self._breakers.worked("directory")
        return found


class SimKVRouter(SimRouter):
    """The policy "kv"."""

    def __init__(
        self,
        requests: Sequence[SimRequest],
        directory: SimDirectory,
        clock: Callable[[], float],
    ) -> None:
        trails = [_trail(each) for each in requests]

        async def render(request: HttpRequest) -> list[PromptTokens] | Fallback:
            """Return the prompt of the request that a body names by its number."""
            asked = requests[int(request.body)]
            return [PromptTokens([asked.num_tokens, *asked.chunks.tolist()], PLAIN)]

        self._planner = RoutePlanner(
            render,
            directory,
            RouteSettings(),
            clock,
            lambda body, _path: trails[int(body)],
        )
        self._placed: dict[int, PlacedRequest] = {}

    async def route(self, number: int, request: SimRequest, replicas: Replicas) -> str:
        """See `SimRouter`."""
        asked = HttpRequest("POST", "/v1/completions", b"", [], b"%d" % number)
        placed = await self._planner.place(asked)
        assert isinstance(placed, PlacedRequest), placed
        there = {each.name: each for each in replicas()}
        name = self._planner.choose(placed, list(there.values()))[0].name
        self._planner.went(placed, there[name])
        self._placed[number] = placed
        return name

    def began(self, number: int) -> None:
        """See `SimRouter`."""
        self._planner.began(self._placed[number])

    def ended(self, number: int) -> None:
        """See `SimRouter`."""
        self._planner.ended(self._placed.pop(number))

    def keep(self, names: Collection[str]) -> None:
        """See `SimRouter`."""
        self._planner.keep(names)


def _trail(request: SimRequest) -> Trail:
    """As that of its text would be: no finer than chunks, and than a sixteenth of the way."""
    digests: list[Hashable] = []
    ends: list[float] = []
    for _, end in stretches(int(request.num_tokens * BYTES_PER_TOKEN)):
        tokens = end / BYTES_PER_TOKEN
        if tokens % TOKENS == 0 and tokens // TOKENS <= len(request.chunks):
            digests.append(int(request.chunks[int(tokens) // TOKENS - 1]))
            ends.append(tokens)
    return Trail(digests, ends, float(request.num_tokens))
