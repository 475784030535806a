"""What a router asks the scheduler actor: its replicas' namespace, and which nodes have prompts.

One question at a time is under way; prompts that come meanwhile go out together in the next one.
All of it runs on the router's event loop, which nothing here blocks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from raykv.base import deadlines
from raykv.base.errors import ClusterError, first_line
from raykv.cluster import ask, breaker
from raykv.prompts import lookup, prompt_keys
from raykv.protocol import columns, descriptions
from raykv.protocol.framing import encode, receive
from raykv.protocol.reader import PrefixPage, PrefixQuery, SpacePage, check_prefix_page
from raykv.protocol.status import NamespaceStatus

logger = logging.getLogger("ray.serve")

# For the directory to say where a prompt is, which takes 1 to 3 ms: less than what it saves.
ROUTE_ANSWER_S = 0.05

# How long a directory that did not answer is not asked, first and longest: each failed question
# costs a request its deadline.
ROUTE_PAUSES_S = (0.5, 30.0)

# Between two looks at what the namespaces are: until the replicas' is known, and after that, since
# an update of the application may give them another one.
ROUTE_LEARN_PAUSES_S = (1.0, 60.0)


MOST_KEYS = 1024
"""Of one request; `PromptHasher` says which."""

MOST_WAITING = 256
"""Prompts whose question is not out yet; at this limit no further request is asked about."""


@dataclass(frozen=True)
class FoundPrompt:
    """Tokens that can be loaded: from each node's pool, and with the help of others."""

    on_nodes: dict[str, int]
    anywhere: int


class _Question:
    """About one prompt. `groups`: what its chunks are, as a question says it."""

    def __init__(self, prompt: prompt_keys.PromptKeys) -> None:
        self.groups = descriptions.groups_text(list(prompt.keys))
        self.counts = [len(keys) for keys in prompt.keys.values()]
        self.keys: list[bytes] = [key for keys in prompt.keys.values() for key in keys]
        self.answer = asyncio.get_running_loop().create_future()


class AskedDirectory:
    """The scheduler actor, asked about one model's replicas.

    Args:
        model: as its engines call it.
        namespace: the beginning of theirs, if there are several of the model.
    """

    def __init__(self, model: str, namespace: str = "") -> None:
        self._model = model
        self._namespace = namespace
        self._space: NamespaceStatus | None = None
        self.hasher: prompt_keys.PromptHasher | None = None
        """Makes keys of prompts as the replicas' engines do; None until they are known."""
        self._actor: Any = None
        self._breakers = breaker.Breakers(breaker.Pauses(*ROUTE_PAUSES_S))
        self._waiting: deque[_Question] = deque()
        self._asking: asyncio.Task[None] | None = None
        self._learning: asyncio.Task[None] | None = None
        self._learn_at = 0.0
        self._logged = ""

    # Which namespace

    def learn(self, nodes: Iterable[str]) -> None:
        """Look in the background which namespace the replicas on these nodes have, if it is time
        for that.
        """
        is_busy = self._learning is not None and not self._learning.done()
        if not is_busy and time.monotonic() >= self._learn_at:
            # watched: begun again by the next question when it is done
            self._learning = asyncio.create_task(self._learn(set(nodes)))

    async def _learn(self, nodes: set[str]) -> None:
        try:
            page = await asyncio.wait_for(self._spaces(), deadlines.ANSWER_S)
            self._take(_space_of(page, nodes, self._model, self._namespace))
            pause_s = ROUTE_LEARN_PAUSES_S[1]
        except Exception as error:  # noqa: BLE001 - the request may not fail
            self._say(first_line(error))
            pause_s = ROUTE_LEARN_PAUSES_S[0 if self.hasher is None else 1]
        self._learn_at = time.monotonic() + pause_s

    async def _spaces(self) -> SpacePage:
        # Looking for it takes up to 200 ms, and it may be another one than the last time.
        self._actor = await asyncio.to_thread(_look_up)
        page = receive(await self._actor.spaces.remote(), SpacePage, ask.SCHEDULER, "the router")
        columns.require(len(page.engine_nodes) == len(page.spaces), "spaces without their nodes")
        return page

    def _take(self, space: NamespaceStatus) -> None:
        seed = os.environ.get("PYTHONHASHSEED")
        scheme = lookup.scheme_of(space, [] if seed is None else [seed])
        if self.hasher is None or self.hasher.scheme != scheme:
            self.hasher = prompt_keys.PromptHasher(scheme)
        self._space = space

    def _say(self, problem: str) -> None:
        """Log a problem, unless it was the last thing that was said."""
        if problem != self._logged and self.hasher is None:
            self._logged = problem
            logger.warning("requests for %s are not placed yet: %s", self._model, problem)

    # Which nodes have prompts

    async def find(self, prompts: Sequence[prompt_keys.PromptKeys]) -> list[FoundPrompt] | None:
        """Where prompts are; None: the directory has not answered in time."""
        if self._space is None or len(self._waiting) >= MOST_WAITING:
            return None
        questions = [_Question(prompt) for prompt in prompts]
        for question in questions:
            if not question.keys:
                question.answer.set_result(FoundPrompt({}, 0))
        self._waiting += [question for question in questions if question.keys]
        if self._waiting and (self._asking is None or self._asking.done()):
            # watched: begun again by the next question when it is done
            self._asking = asyncio.create_task(self._ask_all())
        answers = asyncio.gather(*(question.answer for question in questions))
        try:
            found = await asyncio.wait_for(answers, ROUTE_ANSWER_S)
        except TimeoutError:
            return None
        known = [each for each in found if each is not None]
        return known if len(known) == len(found) else None

    async def _ask_all(self) -> None:
        while self._waiting:
            batch = self._take_batch()
            found = await self._ask(batch) if batch else None
            for at, question in enumerate(batch):
                if not question.answer.done():
                    question.answer.set_result(None if found is None else found[at])

    def _take_batch(self) -> list[_Question]:
        """The next ones that fit into one message, of chunks of one kind."""
        batch: list[_Question] = []
        num_keys = 0
        while self._waiting:
            following = self._waiting[0]
            num_keys += len(following.keys)
            if batch and (num_keys > columns.MAX_KEYS or following.groups != batch[0].groups):
                break
            batch.append(self._waiting.popleft())
        return [question for question in batch if not question.answer.done()]

    async def _ask(self, batch: Sequence[_Question]) -> list[FoundPrompt] | None:
        """Answers to all questions of a batch, in order."""
        call = self._breakers.begin(ask.SCHEDULER, time.monotonic())
        if call is None:
            return None
        try:
            found = await asyncio.wait_for(self._prefixes(batch), ROUTE_ANSWER_S)
        except Exception as error:  # noqa: BLE001 - the request may not fail
            self._learn_at = 0.0
            if self._breakers.failed(ask.SCHEDULER, call, time.monotonic(), first_line(error)):
                logger.warning("the directory is not asked for a while: %s", first_line(error))
            return None
        if self._breakers.worked(ask.SCHEDULER):
            logger.info("the directory answers again")
        return found

    async def _prefixes(self, batch: Sequence[_Question]) -> list[FoundPrompt]:
        space = self._space
        assert space is not None, batch
        query = PrefixQuery(
            space.namespace,
            batch[0].groups,
            [key for question in batch for key in question.keys],
            [count for question in batch for count in question.counts],
        )
        raw = await self._actor.prefixes.remote(encode(query))
        page = receive(raw, PrefixPage, ask.SCHEDULER, "the router")
        check_prefix_page(page, len(batch))
        width = len(page.nodes)
        return [
            FoundPrompt(dict(zip(page.nodes, page.tokens[row * width :], strict=False)), anywhere)
            for row, anywhere in enumerate(page.anywhere)
        ]


def _space_of(page: SpacePage, nodes: set[str], model: str, beginning: str) -> NamespaceStatus:
    """The namespace of a model's engines on these nodes.

    Raises:
        ClusterError: they have no namespace, or several.
    """
    here = [
        space
        for space, where in zip(page.spaces, page.engine_nodes, strict=True)
        if not nodes.isdisjoint(where) and space.namespace.startswith(beginning)
    ]
    return lookup.choose_namespace(here, model, None)


def _look_up() -> Any:
    actor = ask.find_scheduler_actor()
    if actor is None:
        raise ClusterError("RayKV does not run in this cluster yet")
    return actor
