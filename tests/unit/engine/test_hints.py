"""What requests wish for, from their params to the message of an exchange."""

from __future__ import annotations

import pytest

import raykv.engine.hints
from raykv.base.errors import MessageError
from raykv.base.ids import Key
from raykv.engine.hints import MAX_HINT_S, MAX_TOLD, Allowed, Hint, HintBox
from raykv.protocol.engine import Hints, SyncRequest, check_sync

BOTH = Hint(pin_s=60.0, priority=3)


def keys(count: int) -> list[Key]:
    return [Key(number.to_bytes(4, "big")) for number in range(count)]


def told(allowed: Allowed, hint: Hint, count: int = 2) -> tuple[Hints, dict[str, int]]:
    box = HintBox(allowed)
    box.begin("request", hint)
    box.add("request", keys(count))
    return box.take(), box.counter_values()


def test_nothing_is_passed_on_unless_the_server_allows_it() -> None:
    hints, counters = told(Allowed.NONE, BOTH)
    assert hints == Hints()
    assert counters == {"hints_ignored": 2, "hinted_chunks": 0, "hinted_chunks_dropped": 0}


def test_priority_is_passed_on_without_the_pin_where_only_that_is_allowed() -> None:
    hints, counters = told(Allowed.PRIORITY, BOTH)
    assert hints == Hints(favoured=[*keys(2)], priorities=[3, 3])
    assert (counters["hints_ignored"], counters["hinted_chunks"]) == (1, 2)


def test_both_are_passed_on_where_pins_are_allowed() -> None:
    hints, counters = told(Allowed.PIN, BOTH)
    assert hints == Hints([*keys(2)], [60.0, 60.0], [*keys(2)], [3, 3])
    assert counters["hints_ignored"] == 0


def test_long_pin_of_a_request_is_cut_down() -> None:
    hints, _ = told(Allowed.PIN, Hint(pin_s=1e6))
    assert hints.pin_s == [MAX_HINT_S] * 2


def test_request_without_hints_queues_nothing() -> None:
    box = HintBox(Allowed.PIN)
    box.begin("plain", Hint())
    box.add("plain", keys(2))
    box.add("unknown", keys(2))
    assert not box.has_news


def test_request_that_has_ended_hints_no_more() -> None:
    box = HintBox(Allowed.PIN)
    box.begin("request", BOTH)
    box.end("request")
    box.add("request", keys(2))
    assert box.take() == Hints()


def test_long_prompt_is_told_in_pieces_first_chunks_first() -> None:
    box = HintBox(Allowed.PIN)
    box.begin("long", Hint(pin_s=5))
    box.add("long", keys(MAX_TOLD + 1))
    assert box.take().pinned == keys(MAX_TOLD)
    assert box.has_news
    assert box.take().pinned == keys(MAX_TOLD + 1)[-1:]
    assert not box.has_news


def test_queue_is_bounded_and_the_rest_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.engine.hints, "MAX_QUEUED", 3)
    hints, counters = told(Allowed.PIN, Hint(pin_s=5), count=5)
    assert hints.pinned == keys(3)
    assert (counters["hinted_chunks"], counters["hinted_chunks_dropped"]) == (3, 2)


@pytest.mark.parametrize(
    "hints",
    [
        Hints([b"k"], []),
        Hints([b"k"], [0.0]),
        Hints([b"k"], [-1.0]),
        Hints([b"k"], [float("nan")]),
        Hints([b"a", b"b"], [1.0, float("nan")]),
        Hints([b"k"], [float("inf")]),
        Hints([b"k"], [1e9]),
        Hints([b""], [1.0]),
        Hints(favoured=[b"k"]),
        Hints(favoured=[b"k"], priorities=[0]),
        Hints(favoured=[b"k"], priorities=[10]),
        Hints(favoured=[b"k" * 129], priorities=[1]),
    ],
)
def test_hints_that_cannot_be_meant_are_refused(hints: Hints) -> None:
    check_sync(SyncRequest("engine", 1, 1, hints=Hints([b"k"], [1.0], [b"k"], [9])))
    with pytest.raises(MessageError):
        check_sync(SyncRequest("engine", 1, 1, hints=hints))
