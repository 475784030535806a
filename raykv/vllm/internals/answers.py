"""vLLM's way from the scheduler's outputs to the usage in a client's answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from raykv.vllm.internals.engine import Wrapper, wrap


def first_outputs(outputs: Mapping[int, Any]) -> Iterator[tuple[Any, int]]:
    """Of what a step has made: the first output of each request, and how many tokens of its prompt
    vLLM expected of its connector.
    """
    for front_end in outputs.values():
        for output in front_end.outputs:
            stats = output.prefill_stats
            if stats is not None:
                yield output, stats.num_external_cached_tokens


def wrap_front_ends(wrapper: Wrapper) -> bool:
    """`start(processor, …)`, which is called in processes alone that make answers of outputs."""
    from vllm.v1.engine.input_processor import InputProcessor

    return wrap(InputProcessor, "__init__", wrapper)


def wrap_answers(making: Wrapper, detailing: Wrapper) -> None:
    """`make(state, tokens, pooled, reason, stop, params, …)` of an answer, and `detail(details,
    cached_tokens=…)` of its usage.

    Raises:
        AttributeError, ImportError: this vLLM makes answers in another way; nothing is changed.
    """
    from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo
    from vllm.v1.engine.output_processor import RequestState

    if not wrap(RequestState, "make_request_output", making):
        raise AttributeError("no RequestState.make_request_output")
    wrap(PromptTokenUsageInfo, "__init__", detailing)


def cached_tokens_of(state: Any) -> int:
    """What vLLM counts as cached of a request's prompt, once it has an output."""
    return int(state.num_cached_tokens)


def prompt_tokens_of(state: Any) -> int:
    """How many tokens a request's prompt has."""
    return int(state.prompt_len)


def count_cached_tokens(state: Any, count: int) -> None:
    """From now on the request's answers have that count."""
    state.num_cached_tokens = count
