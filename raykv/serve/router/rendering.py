"""Prompts' tokens in the process of a router, on a thread of its own.

The event loop never tokenises, nor waits for the tokenizer to be loaded, which takes the seconds in
which the engines start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum

from raykv.base.errors import first_line
from raykv.prompts.prompt_keys import PromptTokens
from raykv.serve.http.exchange import CHAT, COMPLETIONS, MESSAGES, RESPONSES, HttpRequest

logger = logging.getLogger("ray.serve")

# For a prompt's tokens, 1 to 3 ms for 1,000 of them: with more prompts waiting than that, to send
# one anywhere is better than to let it wait.
ROUTE_RENDER_S = 0.25

PATHS = (COMPLETIONS, CHAT, MESSAGES, RESPONSES)
MOST_WAITING = 64
"""Requests that wait for the thread; any further one is refused."""

MOST_BODY_BYTES = 1 << 20
"""Of a request that is looked into: while a longer one is parsed no other thread runs."""

Render = Callable[[str, bytes], list[PromptTokens] | None]
"""Given a path and a body: the prompts of the request, or None if it is not understood."""


def has_prompt(request: HttpRequest) -> bool:
    """Whether the request is one of `PATHS`, which have prompts."""
    return request.method == "POST" and request.path in PATHS


class PromptRenderer:
    """Has a thread that loads, then renders one request after the other.

    Args:
        load: called on that thread first, and at once; may take long, may raise.
    """

    def __init__(self, load: Callable[[], Render]) -> None:
        # watched: a request takes its answer, or what failed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raykv-render")
        self._render: Render | None = None
        self._waiting: set[Future[list[PromptTokens] | None]] = set()
        self._thread.submit(self._start, load)

    def _start(self, load: Callable[[], Render]) -> None:
        try:
            self._render = load()
        except BaseException as error:  # noqa: BLE001 - vLLM's parser of flags exits
            logger.error(
                "requests are not placed by their prompts: the model's tokenizer can't be loaded "
                "here (%s)",
                first_line(error),
            )

    async def render(self, request: HttpRequest) -> list[PromptTokens] | Fallback:
        """The prompts of a request, within a deadline."""
        if not has_prompt(request):
            return Fallback.NO_PROMPT
        if self._render is None:
            return Fallback.NOT_LOADED
        if len(request.body) > MOST_BODY_BYTES:
            return Fallback.NOT_UNDERSTOOD
        if len(self._waiting) >= MOST_WAITING:
            return Fallback.BUSY
        work = self._thread.submit(self._render, request.path, request.body)
        self._waiting.add(work)
        work.add_done_callback(self._waiting.discard)
        try:
            found = await asyncio.wait_for(asyncio.wrap_future(work), ROUTE_RENDER_S)
        except TimeoutError:
            return Fallback.BUSY
        except Exception as error:  # noqa: BLE001 - vLLM will say what is wrong with the request
            logger.debug("a request is not understood: %s", first_line(error))
            return Fallback.NOT_UNDERSTOOD
        return Fallback.NOT_UNDERSTOOD if found is None else found


class Fallback(Enum):
    """Why the directory has not said where a request's prompts are.

    The value is what the metric `raykv_routed_requests` calls it.
    """

    NO_PROMPT = "no prompt"
    """Of a route without prompts: Ray chooses."""

    NOT_LOADED = "tokenizer not loaded yet"
    NOT_UNDERSTOOD = "not understood"
    """Images and other media, embeddings, a template of its own, a `previous_response_id`, too many
    prompts or too long ones, a model that is not served, or what vLLM will refuse."""

    BUSY = "tokenizer busy"
    NO_NAMESPACE = "namespace not known"
    NO_ANSWER = "directory did not answer"
