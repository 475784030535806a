"""Conversations of several turns that go on at once, and what became of their requests. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from random import Random
from statistics import mean

WORDS = tuple(f"{first}{last}" for first in "bdfgklmnprst" for last in ("a", "ede", "in", "ola"))


@dataclass(frozen=True)
class ConversationLoad:
    """Sizes in words, one after the other in a text."""

    conversations: int
    turns: int
    system_words: int
    turn_words: int
    answer_tokens: int


@dataclass
class Conversation:
    """The messages so far; `say` is what the user says in each turn that is still to come."""

    messages: list[dict[str, str]]
    say: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether all turns were begun."""
        return not self.say

    def ask(self) -> list[dict[str, str]]:
        """Begin the next turn: all messages of it."""
        self.messages.append({"role": "user", "content": self.say.pop(0)})
        return list(self.messages)

    def answered(self, text: str) -> None:
        """The turn has ended."""
        self.messages.append({"role": "assistant", "content": text})


@dataclass(frozen=True)
class Answered:
    """One request: seconds to its first token, tokens of its prompt, and how many were cached."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Sums:
    """Sums over a whole load: prompt tokens computed and in all, and seconds to first tokens."""

    computed: int
    prompt_tokens: int
    mean_ttft_s: float
    p99_ttft_s: float


def conversations(load: ConversationLoad, seed: int) -> list[Conversation]:
    """All of them, with one system prompt; the same for the same arguments."""
    random = Random(seed)

    def words(count: int) -> str:
        return " ".join(random.choice(WORDS) for _ in range(count))

    system = words(load.system_words)
    return [
        Conversation(
            [{"role": "system", "content": system}],
            [words(load.turn_words) for _ in range(load.turns)],
        )
        for _ in range(load.conversations)
    ]


def pick(waiting: Sequence[Conversation], random: Random) -> int:
    """Whose turn is next: people think for different times."""
    return random.randrange(len(waiting))


def sums(answered: Sequence[Answered]) -> Sums:
    """Add up at least one request."""
    times = sorted(each.ttft_s for each in answered)
    return Sums(
        sum(each.prompt_tokens - each.cached_tokens for each in answered),
        sum(each.prompt_tokens for each in answered),
        mean(times),
        times[ceil(0.99 * len(times)) - 1],
    )
