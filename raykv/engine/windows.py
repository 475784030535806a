"""Which chunks of sliding windows are stored, so that prompts which share a beginning find it.

A prefix can be loaded where every window that ends with it was stored. vLLM keeps the windows at
the ends of prompts, and where it has seen prompts part in its own cache; a document that is asked
about a second time parts from the first prompt somewhere before that one's end. So RayKV stores
more windows:

    prompt    ────────────────────────────────────────────────────────────────┤ answer ──►
    windows      [██]        [██]        [██]        [██]     [███████████████████]
              one that ends at each interval                  every end in the tail

The tail is what most questions fit in. The interval follows from a budget: what the windows between
take of the pool, beside the chunks of full attention. Where prompts are known to part, of all that
the cluster has stored, the next request stores the window that is missing (`EngineView.reach`).

A recurrent state is like a window of one chunk that cannot be had anywhere but where a step of the
engine ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, lcm

from raykv.protocol.descriptions import ChunkGroup

TAIL_TOKENS = 1024
"""Before and after a prompt's end: longer than most questions, and than most answers."""


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Of one KV group, in chunks; all zero: nothing beyond what vLLM keeps.

    Attributes:
        window: a prefix needs this many chunks, the last ones.
        interval: from one end of a window that is kept to the next.
        tail: so far from a prompt's end, on both sides, every chunk may be an end.
    """

    window: int = 0
    interval: int = 0
    tail: int = 0

    def keeps(self, chunk: int, prompt: int) -> bool:
        """Whether a kept window needs a chunk, in a prompt of `prompt` whole chunks."""
        if not self.interval:
            return False
        last_end = chunk + self.window
        if last_end // self.interval > chunk // self.interval:
            return True
        return max(chunk + 1, prompt - self.tail) <= min(last_end, prompt + self.tail)


def plan_windows(
    groups: Iterable[ChunkGroup], sliding: Iterable[int], share: float
) -> dict[int, WindowPlan]:
    """What is kept of each KV group with a sliding window.

    Args:
        groups: all KV groups of the engine.
        sliding: those with a sliding window that vLLM stores in part.
        share: chunks of the windows between, per chunk of full attention; without full attention,
            per chunk that all of the windows would be. 0: nothing is kept.
    """
    known = {each.group: each for each in groups}
    wanted = {number: known[number] for number in sliding}
    windows = {number: each.window for number, each in wanted.items() if each.window}
    if not windows or share <= 0:
        return dict.fromkeys(wanted, WindowPlan())
    step = _step(known.values())
    prefixes = [1 / each.tokens for each in known.values() if each.window is None]
    dense = sum(1 / each.tokens for each in wanted.values())
    interval = sum(windows.values()) / (share * (sum(prefixes) or dense))
    return {
        number: WindowPlan(
            window,
            ceil(interval / step) * step // known[number].tokens,
            ceil(TAIL_TOKENS / step) * step // known[number].tokens,
        )
        for number, window in windows.items()
    }


def parting(groups: Sequence[ChunkGroup], reach: Mapping[int, int], prompt: int) -> int:
    """Up to which token a prompt is known, where windows and states are to be stored; 0: nowhere.

    Args:
        groups: all KV groups.
        reach: by group of full attention, how many chunks are known from the beginning on.
        prompt: length in tokens; the last one is always computed.
    """
    known = [each.tokens * reach[each.group] for each in groups if each.group in reach]
    return _floored(groups, min([prompt - 1, *known])) if known else 0


def checkpoint(groups: Sequence[ChunkGroup], prompt: int) -> int:
    """Where a prompt of which nothing is known is to leave a state behind, before its end.

    A state is there only where a step of the engine ends, so this one costs a step of its own.
    """
    return _floored(groups, prompt - min(TAIL_TOKENS, prompt // 4))


def state_ends(
    groups: Sequence[ChunkGroup], prompt: int, step_tokens: int, share: float
) -> list[int]:
    """Where states of a prompt are stored of which nothing is known, and which is computed alone.

    Args:
        groups: all KV groups.
        prompt: length in tokens; the last one is always computed.
        step_tokens: how many tokens the engine computes in a step, at most.
        share: as of `plan_windows`. 0: vLLM keeps the last state alone.
    """
    last = _floored(groups, prompt - 1)
    if share <= 0:
        return [last] if last else []
    # A step ends where chunks of all groups do; one that is longer than a step takes several.
    step = max(_floored(groups, step_tokens), _step(groups))
    ends, at = [], 0
    for stop in sorted({checkpoint(groups, prompt), last}):
        while at < stop:
            at = min(stop, at + step)
            ends.append(at)
    return ends


def _floored(groups: Sequence[ChunkGroup], tokens: int) -> int:
    """The last place up to there at which chunks of all groups end."""
    step = _step(groups)
    return tokens // step * step


def _step(groups: Iterable[ChunkGroup]) -> int:
    """Tokens between places at which chunks of all groups end."""
    return lcm(*(each.tokens for each in groups))
