"""What an engine tells vLLM's subscribers: chunks that came, and, in time, those that went."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raykv.base.ids import Key
from raykv.engine.announcements import EXPECTED_S, MAX_LOOKS, Announcements

KEYS = [Key(b"key %d" % number) for number in range(2 * MAX_LOOKS + 50)]


def test_stored_chunk_is_told_once_when_it_is_there() -> None:
    announcements, loadable = Announcements(), {KEYS[0]}
    announcements.expect(KEYS[0], 0.0)
    announcements.came([KEYS[0], KEYS[1]], loadable)
    assert announcements.take(loadable, 0.0).stored == [KEYS[0]]
    announcements.came([KEYS[0]], loadable)
    announcements.expect(KEYS[0], 0.0)
    news = announcements.take(loadable, 0.0)
    assert not news.stored
    assert not news.removed
    assert len(announcements) == 1


def test_chunk_that_was_found_is_told_with_the_next_look() -> None:
    announcements = Announcements()
    announcements.expect(KEYS[0], 0.0)
    assert announcements.take({KEYS[0]}, 0.0).stored == [KEYS[0]]


def test_chunk_whose_store_has_failed_is_given_up_in_time() -> None:
    announcements = Announcements()
    announcements.expect(KEYS[0], 0.0)
    assert not announcements.take(set(), EXPECTED_S).missing
    news = announcements.take(set(), EXPECTED_S + 1.0)
    # It was never announced, so that nobody has to hear that it went.
    assert (news.stored, news.removed, news.missing) == ([], [], [KEYS[0]])
    assert len(announcements) == 0


def test_chunks_that_went_are_told_within_some_steps_however_many_there_are() -> None:
    announcements = Announcements()
    announcements.came(KEYS, set(KEYS))
    announcements.take(set(KEYS), 0.0)
    kept = set(KEYS[:50])
    removed: list[Key] = []
    for _ in range(3):
        news = announcements.take(kept, 0.0)
        assert len(news.removed) <= MAX_LOOKS
        removed += news.removed
    assert set(removed) == set(KEYS) - kept
    assert len(announcements) == 50


def test_nothing_is_known_after_the_cache_was_emptied() -> None:
    announcements = Announcements()
    announcements.came(KEYS, set(KEYS))
    announcements.clear()
    news = announcements.take(set(), 0.0)
    assert (news.stored, news.removed, len(announcements)) == ([], [], 0)


def test_chunk_that_came_and_went_in_between_is_not_told() -> None:
    announcements = Announcements()
    announcements.came(KEYS[:1], set(KEYS))
    assert announcements.take(set(), 0.0).stored == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["expect", "came", "there", "gone", "take"]), st.integers(0, 5))
    )
)
def test_subscribers_know_in_the_end_what_is_there(steps: list[tuple[str, int]]) -> None:
    announcements, loadable = Announcements(), set[Key]()
    told: set[Key] = set()
    touched: set[Key] = set()
    now = 0.0
    for what, number in [*steps, ("take", 0), ("late", 0), ("take", 0)]:
        key = KEYS[number]
        match what:
            case "expect":
                announcements.expect(key, now)
                touched.add(key)
            case "came":
                announcements.came([key], loadable)
                touched |= {key} & loadable
            case "there":
                loadable.add(key)
            case "gone":
                loadable.discard(key)
            case "late":
                now += 2 * EXPECTED_S
            case _:
                news = announcements.take(loadable, now)
                assert len(set(news.stored)) == len(news.stored)
                told = (told - set(news.removed)) | set(news.stored)
                touched -= {*news.removed, *news.missing}
    assert told == touched & loadable
