"""An answer's tokens as its front end has read them: what another engine needs to continue it.

Pure. A front end reads tokens in deltas, one or some at a time. If it reads the same deltas, it
sends the same pieces: whoever has passed on five pieces then passes on the sixth.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

_GREEDY = 1e-5
"""vLLM samples nothing at a temperature below it."""

_GOES_ON = {
    "allowed_token_ids",
    "detokenize",
    "extra_args",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "max_tokens",
    "min_p",
    "min_tokens",
    "output_kind",
    "output_text_buffer_length",
    "repetition_penalty",
    "skip_clone",
    "skip_reading_prefix_cache",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop",
    "stop_token_ids",
    "stream_interval",
    "temperature",
    "top_k",
    "top_p",
    "_all_stop_token_ids",
    "_eos_token_id",
    "_watermarking_skipped",
}
"""Fields of vLLM's `SamplingParams` that mean the same when the answer's beginning is part of the
prompt; `max_tokens` and `min_tokens` with less. A repetition penalty counts prompt and answer
alike."""

_OURS = {"kv_transfer_params"}
"""Of `extra_args`: all else there is for other samplers, which may count the answer's tokens."""


class Delta(NamedTuple):
    """What a front end has read at once."""

    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Deltas:
    """An answer's deltas, in eight bytes a token or less."""

    def __init__(self) -> None:
        self.token_ids = array("i")
        self._ends = array("i")
        self._reasons: tuple[str | None, int | str | None] = (None, None)

    def add(self, deltas: Sequence[Delta]) -> None:
        """What came after those before."""
        for delta in deltas:
            self.token_ids.extend(delta.token_ids)
            self._ends.append(len(self.token_ids))
            self._reasons = delta.finish_reason, delta.stop_reason

    def __iter__(self) -> Iterator[Delta]:
        start, last = 0, len(self._ends) - 1
        for at, end in enumerate(self._ends):
            reasons = self._reasons if at == last else (None, None)
            yield Delta(tuple(self.token_ids[start:end]), *reasons)
            start = end


class Transcript:
    """What has been made of one answer, in the process that makes it.

    Args:
        known: what another engine has made of it; this one makes what comes behind.
    """

    def __init__(self, known: Sequence[Delta] = ()) -> None:
        self.known = known
        self.why_not: str = ""
        """Why no other engine can continue this answer, if none can."""
        self.replayed: list[Any] = []
        """vLLM's outputs of what is known, until they are read."""
        self.is_over = False
        """What is known is the whole answer."""
        self._has_begun = False
        self._news: list[Delta] = []

    def begin(self, why_not: str) -> None:
        """An engine is asked for tokens."""
        if self._has_begun:
            why_not = "it takes more than one answer of an engine"
        self._has_begun = True
        self.refuse(why_not)

    def refuse(self, why_not: str) -> None:
        """If there is a reason: no other engine can continue it."""
        self.why_not = self.why_not or why_not

    def replayed_outputs(self) -> list[Any]:
        """Those that were not read yet."""
        outputs, self.replayed = self.replayed, []
        return outputs

    def add(self, delta: Delta) -> None:
        """The engine has made it."""
        if not self.is_over:
            self._news.append(delta)

    def taken(self) -> tuple[Delta, ...]:
        """The deltas since the last call."""
        deltas, self._news = tuple(self._news), []
        return deltas


CURRENT: ContextVar[Transcript | None] = ContextVar("raykv_transcript", default=None)
"""Of the answer that is made in this context; without one, no other engine can continue it."""


def why_not(params: Any) -> str:
    """Why no other engine can continue an answer with these `SamplingParams` of vLLM's; empty if
    one can.
    """
    plain = type(params)()
    rest = [
        name.lstrip("_")
        for name in params.__struct_fields__
        if name not in _GOES_ON and getattr(params, name) != getattr(plain, name)
    ]
    if params.temperature < _GREEDY and "seed" in rest:
        rest.remove("seed")
    if not (params.extra_args or {}).keys() <= _OURS:
        rest.append("extra_args")
    if not rest:
        return ""
    return f"one engine has to make all of it because of {', '.join(sorted(rest))}"
