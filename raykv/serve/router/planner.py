"""Places requests: from a request to an order of replicas, or to why there is no order.

What a request's text begins with is remembered: where it went, and on which node it has been
computed since. If that is most of it, it decides. Otherwise the text's tokens are made, and the
directory is asked, which knows what other routers have sent and what was stored long ago. Where
that can't be, what is remembered decides alone.

    place ─► choose ─► went ─► began ─► ended

Invariant: what waits at a replica is the work of the requests that went there and neither began nor
ended.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from raykv.prompts.prompt_keys import PromptHasher, PromptKeys, PromptTokens
from raykv.serve.http.exchange import HttpRequest
from raykv.serve.router.directory import MOST_KEYS, FoundPrompt
from raykv.serve.router.rank import Candidate, Choice, PromptPlace, RecentPrompts, rank
from raykv.serve.router.rendering import Fallback, has_prompt
from raykv.serve.router.settings import RouteSettings
from raykv.serve.router.trail import Trail, read_trail

MOST_UNKNOWN = 0.25
"""Of a text whose beginning is remembered, for that to decide. A conversation's turn adds less."""

MOST_UNANSWERED = 4096
"""Requests that went somewhere and have not begun; the oldest ones are no longer counted."""


class Finder(Protocol):
    """Knows where prompts are."""

    hasher: PromptHasher | None

    async def find(self, prompts: Sequence[PromptKeys]) -> list[FoundPrompt] | None:
        """Where they are, soon; None: there was no answer."""
        ...


@dataclass(eq=False)
class PlacedRequest:
    """A request with what is known of it.

    `found`: what the directory says of each prompt, if it has answered, and `num_tokens` is then
    the length of all. `silence`: why the directory has not answered; None: it has, or what is
    remembered was enough. `choices`: what was chosen last, by replica. `sent_to`: the replica that
    it is believed to go to, or none.
    """

    trail: Trail
    found: Sequence[FoundPrompt] = ()
    num_tokens: int = 0
    silence: Fallback | None = None
    choices: Mapping[str, Choice] = field(default_factory=dict)
    sent_to: Candidate | None = None


class RoutePlanner:
    """Decides for one router; see `raykv.serve.router.rank`. Lives on the router's event loop.

    Args:
        render: makes the tokens of a request's prompts, soon, or says why it does not.
        directory: see `Finder`.
        settings: of the router.
        clock: of a monotonic clock, in seconds.
        read: makes the trail of a body that was sent to a path.
    """

    def __init__(
        self,
        render: Callable[[HttpRequest], Awaitable[list[PromptTokens] | Fallback]],
        directory: Finder,
        settings: RouteSettings,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[bytes, str], Trail] = read_trail,
    ) -> None:
        self._render = render
        self._directory = directory
        self._weights = settings
        self._clock = clock
        self._read = read
        # By replica, what is in vLLM's own cache or being computed; by node, what is stored.
        self._sent = RecentPrompts(settings.recent_s)
        self._stored = RecentPrompts(settings.recent_s)
        self._replicas: dict[str, _Account] = {}
        # The replica's account, and the work in it.
        self._unanswered: OrderedDict[PlacedRequest, tuple[_Account, float]] = OrderedDict()

    async def place(self, request: HttpRequest) -> PlacedRequest | Fallback:
        """Where the prompts of a request are; the fallback is that it has none."""
        if not has_prompt(request):
            return Fallback.NO_PROMPT
        trail = self._read(request.body, request.path)
        return PlacedRequest(trail) if self._decides(trail) else await self._asked(request, trail)

    async def _asked(self, request: HttpRequest, trail: Trail) -> PlacedRequest:
        """With what the directory says of each of its prompts, or why it says nothing."""
        rendered = await self._render(request)
        if isinstance(rendered, Fallback):
            return PlacedRequest(trail, silence=rendered)
        hasher = self._directory.hasher
        if hasher is None:
            return PlacedRequest(trail, silence=Fallback.NO_NAMESPACE)
        most = MOST_KEYS // max(1, len(rendered))
        prompts = [hasher.keys(prompt, most) for prompt in rendered]
        found = await self._directory.find(prompts)
        if found is None:
            return PlacedRequest(trail, silence=Fallback.NO_ANSWER)
        return PlacedRequest(trail, found, sum(each.num_tokens for each in prompts))

    def remembers(self, request: PlacedRequest) -> bool:
        """Whether something of its text was sent to a replica lately."""
        return bool(self._sent.num_held(request.trail.digests[:1], self._clock()))

    def choose(self, request: PlacedRequest, replicas: Sequence[Candidate]) -> list[Choice]:
        """All replicas, the best one first: it is remembered that the prompts go there."""
        now = self._clock()
        counted = [self._counted(each) for each in replicas]
        choices = rank(counted, self._place_of(request, now), self._weights)
        request.choices = {each.name: each for each in choices}
        if choices:
            best = next(each for each in replicas if each.name == choices[0].name)
            self._send(request, best, now)
        return choices

    def went(self, request: PlacedRequest, replica: Candidate) -> None:
        """Note that this replica took the request; it need not be the best one."""
        if request.sent_to is None or request.sent_to.name != replica.name:
            self._send(request, replica, self._clock())
        choice = request.choices.get(replica.name)
        work = choice.work if choice else request.trail.num_tokens
        account = self._replicas.setdefault(replica.name, _Account())
        account.sent += work
        self.ended(request)
        account.waiting += work
        self._unanswered[request] = (account, work)
        if len(self._unanswered) > MOST_UNANSWERED:
            self.ended(next(iter(self._unanswered)))

    def began(self, request: PlacedRequest) -> None:
        """Note that its first token has come: its prompts are stored on the replica's node."""
        if request in self._unanswered and request.sent_to is not None:
            node_id = request.sent_to.node_id
            self._stored.remember(node_id, request.trail.digests, self._clock())
        self.ended(request)

    def ended(self, request: PlacedRequest) -> None:
        """Note that nothing waits for it any more, however it has ended."""
        entry = self._unanswered.pop(request, None)
        if entry is not None:
            account, work = entry
            account.waiting -= work

    def keep(self, names: Collection[str]) -> None:
        """Forget all replicas but these."""
        self._replicas = {name: self._replicas.get(name, _Account()) for name in names}

    def _decides(self, trail: Trail) -> bool:
        """Whether what is remembered is enough."""
        now = self._clock()
        held = self._sent.num_held(trail.digests, now)
        number = max((held[name] for name in held if name in self._replicas), default=0)
        return number > 0 and trail.unknown(number) <= MOST_UNKNOWN * trail.num_tokens

    def _counted(self, replica: Candidate) -> Candidate:
        account = self._replicas.get(replica.name) or _Account()
        return replace(replica, sent=account.sent, waiting=account.waiting)

    def _send(self, request: PlacedRequest, replica: Candidate, now: float) -> None:
        request.sent_to = replica
        self._sent.remember(replica.name, request.trail.digests, now)

    def _place_of(self, request: PlacedRequest, now: float) -> PromptPlace:
        """All its prompts as one: what is known of each is added up."""
        trail = request.trail
        num_tokens = request.num_tokens or trail.num_tokens
        held = trail.tokens(self._sent.num_held(trail.digests, now), num_tokens)
        on_nodes = trail.tokens(self._stored.num_held(trail.digests, now), num_tokens)
        anywhere = max(on_nodes.values(), default=0.0)
        answered: dict[str, float] = {}
        for each in request.found:
            for node, tokens in each.on_nodes.items():
                answered[node] = answered.get(node, 0.0) + tokens
        for node, total in answered.items():
            on_nodes[node] = max(total, on_nodes.get(node, 0.0))
        found = sum(each.anywhere for each in request.found)
        return PromptPlace(num_tokens, on_nodes, max(anywhere, found), held)


@dataclass
class _Account:
    """Of a replica: work that was ever sent there, and that of no first token yet."""

    sent: float = 0.0
    waiting: float = 0.0
