"""Places requests: from a request to an order of replicas, or to why there is no order."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from raykv.prompts.prompt_keys import PromptHasher, PromptKeys, PromptTokens
from raykv.serve.http.exchange import HttpRequest
from raykv.serve.router.directory import MOST_KEYS, FoundPrompt
from raykv.serve.router.rank import Candidate, Choice, PromptPlace, RecentPrompts, rank
from raykv.serve.router.rendering import Fallback
from raykv.serve.router.settings import RouteSettings


class Renderer(Protocol):
    """Renders the prompts of a request."""

    async def render(self, request: HttpRequest) -> list[PromptTokens] | Fallback:
        """Their tokens, soon."""
        ...


class Finder(Protocol):
    """Knows where prompts are."""

    hasher: PromptHasher | None

    async def find(self, prompts: Sequence[PromptKeys]) -> list[FoundPrompt] | None:
        """Where they are, soon; None: there was no answer."""
        ...


@dataclass(frozen=True)
class PlacedPrompt:
    """A prompt, and which nodes have how much of it."""

    keys: PromptKeys
    found: FoundPrompt


@dataclass
class PlacedRequest:
    """A request with its prompts. `sent_to`: the replica that it is believed to go to; or none.

    Not `is_answered`: the directory is silent, and all that can be known is what was sent where.
    """

    prompts: Sequence[PlacedPrompt]
    sent_to: str | None = None
    is_answered: bool = True


class RoutePlanner:
    """Decides for one router; see `raykv.serve.router.rank`. Lives on the router's event loop.

    Args:
        renderer: see there.
        directory: see `Finder`.
        settings: of the router.
        clock: of a monotonic clock, in seconds.
    """

    def __init__(
        self,
        renderer: Renderer,
        directory: Finder,
        settings: RouteSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._renderer = renderer
        self._directory = directory
        self._weights = settings.weights
        self._recent = RecentPrompts(settings.recent_s)
        self._sent: Counter[str] = Counter()
        self._clock = clock

    async def place(self, request: HttpRequest) -> PlacedRequest | Fallback:
        """Where the prompts of a request are."""
        rendered = await self._renderer.render(request)
        if isinstance(rendered, Fallback):
            return rendered
        hasher = self._directory.hasher
        if hasher is None:
            return Fallback.NO_NAMESPACE
        most = MOST_KEYS // max(1, len(rendered))
        prompts = [hasher.keys(prompt, most) for prompt in rendered]
        found = await self._directory.find(prompts)
        if found is None:
            nowhere = FoundPrompt({}, 0)
            unknown = [PlacedPrompt(each, nowhere) for each in prompts]
            return PlacedRequest(unknown, is_answered=False)
        return PlacedRequest([PlacedPrompt(*pair) for pair in zip(prompts, found, strict=True)])

    def remembers(self, request: PlacedRequest) -> bool:
        """Whether something of its prompts was sent to a replica lately."""
        now = self._clock()
        firsts = (each.keys.first[:1] for each in request.prompts)
        return any(self._recent.num_held(first, now) for first in firsts)

    def choose(self, request: PlacedRequest, replicas: Sequence[Candidate]) -> list[Choice]:
        """All replicas, the best one first: it is remembered that the prompts go there."""
        now = self._clock()
        prompts = [self._place_of(each, now) for each in request.prompts]
        counted = [replace(each, sent=self._sent[each.name]) for each in replicas]
        choices = rank(counted, prompts, self._weights)
        if choices:
            self._remember(request, choices[0].name, now)
        return choices

    def went(self, request: PlacedRequest, name: str) -> None:
        """Note that this replica took the request; it need not be the best one."""
        self._sent[name] += 1
        if request.sent_to != name:
            self._remember(request, name, self._clock())

    def keep(self, names: Collection[str]) -> None:
        """Forget all replicas but these."""
        self._sent = Counter({name: self._sent[name] for name in names})

    def _remember(self, request: PlacedRequest, name: str, now: float) -> None:
        request.sent_to = name
        for each in request.prompts:
            self._recent.remember(name, each.keys.first, now)

    def _place_of(self, placed: PlacedPrompt, now: float) -> PromptPlace:
        held = self._recent.num_held(placed.keys.first, now)
        return PromptPlace(
            placed.keys.num_tokens,
            placed.found.on_nodes,
            placed.found.anywhere,
            {name: number * placed.keys.followed.tokens for name, number in held.items()},
        )
