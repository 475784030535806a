"""Why chunks stay longer than others, or go first."""

from __future__ import annotations

import pytest

from raykv.base.ids import Key, Namespace, Stamp
from raykv.node.pool import claims as module
from raykv.node.pool.claims import MOST_CLAIMS, Claims, Name, Owner, OwnerKind
from raykv.node.pool.records import ChunkRecord, Standing

A = Namespace("a")
PIN = Owner(OwnerKind.OPERATOR, "pin")
REQUEST = Owner(OwnerKind.REQUEST, "request")
SESSION, OTHER = Owner(OwnerKind.SESSION, "s"), Owner(OwnerKind.SESSION, "t")


class Pool:
    """Chunks of ten bytes in a pool of a thousand, of which pins may take a quarter."""

    def __init__(self, names: str) -> None:
        self.records = {
            name(each): ChunkRecord(A, name(each)[1], 10, Stamp(1, 1)) for each in names
        }
        self.claims = Claims(1000, lambda *key: self.records.get(key), self.stand)
        self.stood: list[str] = []

    def stand(self, record: ChunkRecord, standing: Standing) -> None:
        record.standing = standing
        self.stood.append(record.key.decode())

    def claim(self, owner: Owner, names: str, standing: Standing, until: float = 100.0) -> None:
        self.claims.claim(owner, list(map(name, names)), standing, until)
        self.claims.check()

    def standing(self, each: str) -> Standing:
        return self.records[name(each)].standing


def name(each: str) -> Name:
    return A, Key(each.encode())


def test_highest_claim_counts_and_each_ends_alone() -> None:
    pool = Pool("ab")
    pool.claim(REQUEST, "a", Standing.KEPT)
    pool.claim(PIN, "a", Standing.PINNED)
    pool.claim(SESSION, "a", Standing.NORMAL)
    assert (pool.standing("a"), pool.standing("b")) == (Standing.PINNED, Standing.NORMAL)
    pool.claims.end(PIN)
    assert pool.standing("a") is Standing.KEPT
    pool.claims.end(REQUEST)
    assert pool.standing("a") is Standing.NORMAL
    pool.claims.end(SESSION)
    assert pool.standing("a") is Standing.NORMAL
    pool.claims.check()


@pytest.mark.parametrize("priority", [1, 9])
def test_priority_of_a_request_ends_with_its_session(priority: int) -> None:
    pool = Pool("ab")
    pool.claim(SESSION, "ab", Standing.NORMAL)
    pool.claim(REQUEST, "ab", Standing.kept(priority))
    pool.claim(REQUEST, "b", Standing.PINNED)
    assert pool.standing("a") is Standing.kept(priority)
    pool.claim(SESSION, "ab", Standing.RELEASED)
    assert (pool.standing("a"), pool.standing("b")) == (Standing.RELEASED, Standing.PINNED)
    pool.claims.end(REQUEST)
    assert pool.standing("b") is Standing.RELEASED


def test_what_an_operator_has_brought_or_pinned_is_released_when_that_is_over() -> None:
    pool = Pool("ab")
    for owner in (PIN, Owner(OwnerKind.SERIES, "prefetch")):
        pool.claim(SESSION, "a", Standing.NORMAL)
        pool.claim(owner, "a", Standing.KEPT)
        pool.claim(SESSION, "a", Standing.RELEASED)
        assert pool.standing("a") is Standing.KEPT
        pool.claims.end(owner)
        assert pool.standing("a") is Standing.RELEASED


def test_chunk_that_takes_the_place_of_another_keeps_its_pin() -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    pool = Pool(names)
    pool.claim(PIN, names, Standing.PINNED)
    newer = ChunkRecord(A, name("a")[1], 10, Stamp(1, 2))
    pool.records[name("a")] = newer
    pool.claims.came(newer)
    assert (newer.standing, pool.standing("z")) == (Standing.PINNED, Standing.NORMAL)
    pool.claims.check()


def test_pins_beyond_their_share_wait_until_there_is_room() -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    pool = Pool(names)
    pool.claim(PIN, names, Standing.PINNED)
    assert (pool.claims.pinned_bytes, pool.claims.num_waiting) == (250, 1)
    assert pool.standing("z") is Standing.NORMAL
    pool.claims.end(PIN, [name("a")])
    assert (pool.standing("a"), pool.standing("z")) == (Standing.NORMAL, Standing.PINNED)
    pool.claims.check()


def test_requests_pin_half_of_the_share_at_most() -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    pool = Pool(names)
    pool.claim(REQUEST, names, Standing.PINNED)
    assert pool.claims.pinned_bytes == 120
    pool.claim(PIN, names[:10], Standing.PINNED)
    # Of what only requests want there is as much as before, and the rest of it waits.
    assert pool.claims.pinned_bytes == 220
    assert all(pool.standing(each) is Standing.PINNED for each in names[:22])


@pytest.mark.parametrize("owner", [REQUEST, SESSION])
def test_what_requests_and_sessions_keep_takes_half_of_the_share_of_pins(owner: Owner) -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    pool = Pool(names)
    pool.claim(owner, names, Standing.KEPT)
    assert (pool.claims.requests_bytes, pool.claims.pinned_bytes) == (120, 0)
    # The head of the prompt, which goes last of it.
    assert [pool.standing(each) for each in names[:13]] == [Standing.KEPT] * 12 + [Standing.NORMAL]
    assert pool.stood[-12:] == list(reversed(names[:12]))
    pool.claims.went(pool.records[name("c")])
    assert pool.standing("m") is Standing.KEPT
    # What an operator keeps with a priority does not count.
    pool.claim(PIN, names, Standing.kept(2))
    assert all(pool.standing(each) is Standing.kept(2) for each in names if each != "c")
    assert pool.claims.requests_bytes == 0


def test_claims_of_requests_are_bounded_and_operators_are_not_kept_out() -> None:
    pool = Pool("")
    most = MOST_CLAIMS[OwnerKind.REQUEST]
    many = [(A, Key(str(number).encode())) for number in range(most + 5)]
    pool.claims.claim(REQUEST, many, Standing.KEPT, 100.0)
    assert pool.claims.num_refused == 5
    pool.claims.claim(PIN, many, Standing.PINNED, 100.0)
    assert len(pool.claims.names_of(PIN)) == len(many)
    pool.claims.end(REQUEST)
    pool.claims.claim(REQUEST, many[-5:], Standing.KEPT, 100.0)
    assert pool.claims.num_refused == 5


def test_claims_that_are_made_again_and_again_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEW_ENDS", 4)
    pool = Pool("abc")
    for until in range(100, 200):
        pool.claim(SESSION, "abc", Standing.NORMAL, until)
    pool.claims.expire(198)
    assert len(pool.claims.names_of(SESSION)) == 3
    pool.claims.expire(199)
    assert not pool.claims.names_of(SESSION)
