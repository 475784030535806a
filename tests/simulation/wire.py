"""The wire between the parts: messages on it get lost, come twice, late, and in another order."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

A = TypeVar("A")


@dataclass(frozen=True)
class Manners:
    """How badly the wire behaves, as probabilities for each message."""

    loss: float = 0.0
    repeat: float = 0.0
    disorder: float = 0.0


@dataclass(eq=False)
class Call(Generic[A]):
    """A request from one end to another, whose sender waits for one answer or gives up.

    `receive` runs at the receiver, once for each copy of the request that arrives, and gets a
    function that answers, at once or later. What the sender hears after it has stopped waiting
    goes nowhere.
    """

    label: str
    ends: tuple[str, str]
    receive: Callable[[Callable[[A], None]], None]
    answered: Callable[[A], None]
    given_up: Callable[[], None]
    is_open: bool = True

    def answer(self, value: A) -> None:
        """The sender hears an answer."""
        if self.is_open:
            self.is_open = False
            self.answered(value)

    def give_up(self) -> None:
        """The sender has waited long enough."""
        if self.is_open:
            self.is_open = False
            self.given_up()

    def forget(self) -> None:
        """The sender is dead."""
        self.is_open = False


@dataclass(eq=False)
class _Packet:
    """A request or an answer on its way; `lane` is what keeps its order if order is kept."""

    label: str
    ends: tuple[str, str]
    lane: str
    arrive: Callable[[], None]


@dataclass(eq=False)
class Wire:
    """Holds what is under way. `cut` are ends that nothing comes from and nothing reaches.

    Packets with the same `lane` arrive in the order in which they were sent.
    """

    rng: random.Random
    manners: Manners
    cut: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._packets: list[_Packet] = []
        self._calls: list[Call[object]] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._packets

    def send(self, call: Call[A], lane: str = "") -> None:
        """Put a request on the wire; its answers come back over it too."""

        def post(value: A) -> None:
            answer = _Packet(f"answer to {call.label}", call.ends, "", lambda: call.answer(value))
            self._packets.append(answer)

        self._packets.append(_Packet(call.label, call.ends, lane, lambda: call.receive(post)))
        self._calls.append(call)  # type: ignore[arg-type]

    def step(self) -> str | None:
        """Something happens to one packet; says what, or None if there is none."""
        if not self._packets:
            return None
        packet = self._choose()
        if not self.cut.isdisjoint(packet.ends):
            self._packets.remove(packet)
            return f"cut off: {packet.label}"
        luck = self.rng.random()
        if luck < self.manners.loss:
            self._packets.remove(packet)
            return f"lost: {packet.label}"
        if luck < self.manners.loss + self.manners.repeat:
            self.deliver(packet.label, packet.arrive)
            return f"arrives, and will again: {packet.label}"
        self._packets.remove(packet)
        self.deliver(packet.label, packet.arrive)
        return f"arrives: {packet.label}"

    def deliver(self, label: str, arrive: Callable[[], None]) -> None:
        """A packet arrives; `label` says what it is."""
        arrive()

    def _choose(self) -> _Packet:
        if self.rng.random() >= self.manners.disorder:
            return self._packets[0]
        packet = self.rng.choice(self._packets)
        same_lane = (other for other in self._packets if packet.lane and other.lane == packet.lane)
        return next(same_lane, packet)

    def lose_patience(self) -> str | None:
        """One sender stops waiting for its answer; None if nobody waits."""
        self._calls = [call for call in self._calls if call.is_open]
        if not self._calls:
            return None
        call = self.rng.choice(self._calls)
        call.give_up()
        return f"no answer in time: {call.label}"

    def lose_all_patience(self) -> None:
        """Every sender stops waiting."""
        calls, self._calls = self._calls, []
        for call in calls:
            call.give_up()
