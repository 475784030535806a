"""Answers that say where their prompt's tokens came from.

    EngineCore                            the front end: API server, LLM, AsyncLLM
    MissReporter ──► a request's first ──► its count of ──► the usage of its answer,
                     output                cached tokens    `prompt_tokens_details`

vLLM shows a client how many tokens of a prompt were cached, if `--enable-prompt-tokens-details` is
set. RayKV adds `raykv_sources` there: all of the prompt's tokens, by `TokenSource`. A connector may
add something to a request's last output alone, and there is none of a request that the front end
ends, for example at a stop string. So it is added to the first one. From there it goes with the
number that it explains, through all of vLLM's code that passes this on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from raykv.base.guard import guarded, nothing
from raykv.vllm.internals import answers, engine
from raykv.vllm.misses import SOURCES_PARAM

logger = logging.getLogger("raykv")

SOURCES_FIELD = "raykv_sources"
"""In `prompt_tokens_details` of an answer's usage."""


class CountedTokens(int):
    """vLLM's count of a prompt's cached tokens, which knows where all of the prompt's came from."""

    sources: Mapping[str, int]

    def __new__(cls, count: int, sources: Mapping[str, int]) -> CountedTokens:
        made = super().__new__(cls, count)
        made.sources = sources
        return made

    def __getnewargs__(self) -> tuple[int, Mapping[str, int]]:  # type: ignore[override]
        return int(self), self.sources


# In the front end


def watch_front_ends() -> None:
    """Answers that are made in this process have in their usage what EngineCore says.

    Raises:
        ImportError: this vLLM has no front end where it was.
    """
    answers.wrap_front_ends(_starting)


@engine.around
def _starting(start: Any, /, *args: Any, **kwargs: Any) -> None:
    start(*args, **kwargs)
    _watch_answers()


@guarded(nothing)
def _watch_answers() -> None:
    try:
        answers.wrap_answers(_making, _detailing)
    except (AttributeError, ImportError) as error:
        logger.debug("this vLLM makes answers in an unknown way: %s", error)


@engine.around
def _making(
    make: Any,
    state: Any,
    new_token_ids: Any,
    pooling_output: Any,
    finish_reason: Any,
    stop_reason: Any,
    kv_transfer_params: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    params = kv_transfer_params
    if params and SOURCES_PARAM in params:
        params = _taken(state, params)
    return make(
        state,
        new_token_ids,
        pooling_output,
        finish_reason,
        stop_reason,
        params,
        *args,
        **kwargs,
    )


def _taken(state: Any, params: Mapping[str, Any]) -> dict[str, Any] | None:
    """The params without ours, which the request's count of cached tokens has from now on.

    In a continued answer the sources have the tokens that were already answered, too; the count
    stays within the prompt.
    """
    cached = min(answers.cached_tokens_of(state), answers.prompt_tokens_of(state))
    answers.count_cached_tokens(state, CountedTokens(cached, params[SOURCES_PARAM]))
    return {name: value for name, value in params.items() if name != SOURCES_PARAM} or None


@engine.around
def _detailing(detail: Any, details: Any, /, **fields: Any) -> None:
    count = fields.get("cached_tokens")
    if isinstance(count, CountedTokens):
        fields[SOURCES_FIELD] = dict(count.sources)
    detail(details, **fields)
