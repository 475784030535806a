"""What requests wish for, from their params to the message that tells it."""

from __future__ import annotations

import pytest

import raykv.engine.hints
from raykv.base.ids import Key
from raykv.engine.hints import MAX_HINT_S, MAX_TOLD, Allowed, Hint, HintBox
from raykv.protocol.columns import Keys
from raykv.protocol.engine import Hints
from raykv.protocol.sessions import MAX_PAUSE_S, SessionNews, SessionWord

BOTH = Hint(pin_s=60.0, priority=3)


def keys(count: int) -> list[Key]:
    return [Key(number.to_bytes(4, "big")) for number in range(count)]


def told(allowed: Allowed, hint: Hint, count: int = 2) -> tuple[Hints, dict[str, int]]:
    box = HintBox(allowed)
    box.begin("request", hint)
    box.add("request", keys(count))
    return box.take(), box.counters


@pytest.mark.parametrize(
    ("allowed", "pins", "priorities", "ignored", "hinted"),
    [
        (Allowed.NONE, [], [], 2, 0),
        (Allowed.PRIORITY, [], [3, 3], 1, 2),
        (Allowed.PIN, [60.0, 60.0], [3, 3], 0, 4),
    ],
    ids=str,
)
def test_hints_are_passed_on_as_far_as_the_server_allows_it(
    allowed: Allowed, pins: list[float], priorities: list[int], ignored: int, hinted: int
) -> None:
    hints, counters = told(allowed, BOTH)
    pinned, favoured = ([*keys(2)] if some else [] for some in (pins, priorities))
    assert hints == Hints(Keys.of(pinned), pins, Keys.of(favoured), priorities)
    assert (counters["hints_ignored"], counters["hinted_chunks"]) == (ignored, hinted)


def test_long_pins_and_pauses_are_cut_down() -> None:
    hints, _ = told(Allowed.PIN, Hint(pin_s=1e6))
    assert hints.pin_s == [MAX_HINT_S] * 2
    (*_, paused) = run(HintBox(Allowed.SESSION), Hint(session="agent", pause_s=1e6))
    assert paused.pause_s == MAX_PAUSE_S


def test_requests_without_hints_or_that_have_ended_queue_nothing() -> None:
    box = HintBox(Allowed.PIN)
    box.begin("plain", Hint())
    box.begin("ended", BOTH)
    box.end("ended")
    for request in ("plain", "ended", "unknown"):
        box.add(request, keys(2))
    assert not box.has_news
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


SESSION = Hint(session="agent")


def said(box: HintBox) -> list[SessionNews]:
    """All that is told of sessions, message by message."""
    told: list[SessionNews] = []
    while box.has_news:
        told += box.sessions.take()
    return told


def run(box: HintBox, hint: Hint, *columns: list[Key]) -> list[SessionNews]:
    box.begin("request", hint)
    end(box, "request", *columns)
    return said(box)


def end(box: HintBox, request_id: str, *columns: list[Key]) -> None:
    box.name_chunks(request_id, columns)
    box.end(request_id)


@pytest.mark.parametrize("allowed", [Allowed.NONE, Allowed.PRIORITY])
def test_session_is_not_told_unless_the_server_allows_it(allowed: Allowed) -> None:
    box = HintBox(allowed)
    assert run(box, Hint(session="agent", is_over=True), keys(2)) == []
    assert box.counters["hints_ignored"] == 1


def test_session_is_told_when_its_request_comes_and_when_it_ends() -> None:
    box = HintBox(Allowed.SESSION)
    assert run(box, SESSION, keys(2)) == [
        SessionNews("agent", SessionWord.CAME),
        SessionNews("agent", SessionWord.USED, Keys.of([*keys(2)])),
    ]
    assert box.counters["hints_ignored"] == 0


def test_end_and_pause_are_told_with_the_chunks_of_the_request() -> None:
    box = HintBox(Allowed.PIN)
    pauses = Hint(priority=3, session="agent", pause_s=9.0)
    assert run(box, pauses, keys(1))[-1] == SessionNews(
        "agent", SessionWord.PAUSED, Keys.of([*keys(1)]), 9.0, 3
    )
    is_over = Hint(session="agent", is_over=True, pause_s=9.0)
    assert run(box, is_over, keys(2))[-1] == SessionNews(
        "agent", SessionWord.OVER, Keys.of([*keys(2)[1:]])
    )


def test_only_what_is_new_of_a_session_is_told_until_everything_is_told_again() -> None:
    """To a scheduler actor that may have forgotten."""
    box = HintBox(Allowed.SESSION)
    run(box, SESSION, keys(3), keys(2))
    assert run(box, SESSION, keys(5), keys(4))[-1].keys == [*keys(5)[3:], *keys(4)[2:]]
    assert run(box, SESSION, keys(5), keys(4))[-1].keys == []
    box.sessions.tell_again()
    assert run(box, SESSION, keys(5), keys(4))[-1].keys == [*keys(5), *keys(4)]


def test_prompt_that_goes_on_otherwise_is_told_as_a_whole() -> None:
    box = HintBox(Allowed.SESSION)
    run(box, SESSION, keys(3))
    other = [*keys(2), Key(b"x"), Key(b"y")]
    assert run(box, SESSION, other)[-1].keys == other
    assert run(box, SESSION, keys(1))[-1].keys == keys(1)


def test_session_of_many_chunks_is_told_in_pieces_and_its_end_with_the_last() -> None:
    box = HintBox(Allowed.SESSION)
    box.begin("request", Hint(session="agent", is_over=True))
    end(box, "request", keys(MAX_TOLD + 1))
    came, piece = box.sessions.take()
    assert (came.word, piece.word, piece.keys) == (
        SessionWord.CAME,
        SessionWord.USED,
        Keys.of(keys(MAX_TOLD)),
    )
    (last,) = box.sessions.take()
    assert (last.word, last.keys) == (SessionWord.OVER, Keys.of(keys(MAX_TOLD + 1)[-1:]))
    assert not box.has_news


def test_news_of_sessions_is_bounded_and_the_rest_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.engine.hints, "MAX_SESSION_KEYS", 3)
    box = HintBox(Allowed.SESSION)
    end(box, "unknown", keys(9))
    for request in "ab":
        box.begin(request, SESSION)
        end(box, request, keys(2))
    assert box.counters["session_news_dropped"] == 1
    assert [each.keys for each in said(box)] == [[], keys(2), []]
