"""What the scheduler actor remembers of requests that have ended, and what it knows better."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from raykv.base.errors import MessageError
from raykv.base.ids import SLOT_ALIGNMENT, EngineId, Epoch, Namespace, NodeId
from raykv.directory.actor import SchedulerActor
from raykv.directory.answers import misses
from raykv.directory.answers.misses import MAX_RECORDS, MAX_TOLD, MissLog
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.directory.members import Engine
from raykv.directory.mirror import Mirror
from raykv.engine.accounts import MAX_NAMED, TokenAccount
from raykv.protocol.columns import Leases
from raykv.protocol.engine import (
    CHUNK_NAME_BYTES,
    MAX_NAMES_BYTES,
    AttachEngine,
    EngineAttached,
    MissRecord,
    Parting,
    SyncReply,
    SyncRequest,
    checked_sync,
)
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.node import NodeReport
from raykv.protocol.reader import Explanations, RequestPage
from tests.fixtures.directory.desk import Desk as PlainDesk
from tests.fixtures.directory.tables import TABLES, use_table
from tests.fixtures.keys import chunk_names
from tests.fixtures.keys import named_key as key

EXPIRY_S = 10.0


class Desk(PlainDesk):
    """Two nodes of four slots each; the engine "e" is on the first, "far" on the second."""

    def __init__(self) -> None:
        settings = ManagerSettings(
            engine_expiry_s=EXPIRY_S, node_expiry_s=EXPIRY_S, settle_s=0.0, pin_s=0.0
        )
        super().__init__(BlockManager(Epoch(1), settings))
        for node in ("one", "two"):
            self.report(node)
        self.attach("e", "one", "model")
        self.attach("far", "two", "model")

    def key(self, letter: str) -> bytes:
        return key(letter)

    def end(self, engine: str, *records: MissRecord, **fields: Any) -> SyncReply:
        """Requests have ended."""
        return self.sync(engine, finished=list(records), **fields)

    def reason(self, name: str) -> dict[str, int]:
        """Those of a request of the engine "e" that knows nothing of a chunk."""
        missed = {"never_stored": 64, "incomplete_chunk": 5}
        self.end("e", MissRecord("r", 69, 0, 0, missed, key(name)))
        newest = self.find("r").found[0].record
        assert sum(newest.missed.values()) == 69
        return newest.missed

    def find(self, beginning: str) -> Explanations:
        """As it comes to a client."""
        return decode(encode(self.manager.why_miss(beginning, self.now)), Explanations)


@pytest.fixture(params=TABLES)
def desk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Desk:
    use_table(monkeypatch, request.param)
    return Desk()


def record(request_id: str) -> MissRecord:
    return MissRecord(request_id, 10, 2, 3, {"evicted": 5}, key("a"))


# Which requests


def test_record_is_told_as_it_came_with_where_it_came_from(desk: Desk) -> None:
    desk.end("e", record("cmpl-7-0-abcd"))
    desk.now += 3.0
    known = desk.find("cmpl-7")
    (only,) = known.found
    assert only.record == record("cmpl-7-0-abcd")
    assert (only.engine_id, only.node_id, only.namespace) == ("e", "one", "model")
    assert (only.model, only.age_s, known.num_known) == ("tiny", 3.0, 1)


def test_newest_come_first_and_only_so_many(desk: Desk) -> None:
    desk.end("e", *(record(f"cmpl-{number}") for number in range(MAX_TOLD + 5)))
    found = [each.record.request_id for each in desk.find("cmpl-").found]
    assert found == [f"cmpl-{MAX_TOLD + 4 - i}" for i in range(MAX_TOLD)]


@pytest.mark.parametrize(
    ("request_id", "beginning", "is_found"),
    [
        ("cmpl-7-0-abcd", "cmpl-7-0-abcd", True),
        ("cmpl-7-0-abcd", "mpl-7", False),
        ("2_cmpl-7-0-abcd", "cmpl-7", True),
        ("2_cmpl-7-0-abcd", "2_cmpl", True),
        ("my_own", "my_o", True),
        ("my_own", "own", False),
        # What a client has sent as X-Request-Id.
        ("cmpl-my-id-1-0-9f2c41aa", "my-id-1", True),
        ("chatcmpl-my-id-1-9f2c41aa", "my-id-1", True),
        ("1_chatcmpl-my-id-1-9f2c41aa", "my-id-1", True),
        ("generate-tokens-My.id", "My.id", True),
        ("cmpl-my-id-1", "y-id-1", False),
    ],
)
def test_ids_are_known_by_their_beginning(
    desk: Desk, request_id: str, beginning: str, is_found: bool
) -> None:
    desk.end("e", record(request_id))
    assert bool(desk.find(beginning).found) is is_found


@pytest.mark.parametrize("own", ["x" * 5000, "a\x1b[31m\n" * 50])
def test_id_that_was_cut_or_escaped_is_found_as_the_client_knows_it(desk: Desk, own: str) -> None:
    desk.end("e", TokenAccount(10, 5).record(f"cmpl-{own}-0-9f2c41aa"))
    for asked in (f"cmpl-{own}-0-9f2c41aa", f"cmpl-{own}", own, own[:9]):
        assert desk.find(asked).found, asked[:20]
    assert not desk.find("y" + own).found


def test_oldest_are_forgotten(desk: Desk) -> None:
    desk.end("e", record("first"))
    for start in range(0, MAX_RECORDS, 256):
        desk.end("e", *(record(f"later-{start + i}") for i in range(256)))
    known = desk.find("first")
    assert (known.found, known.num_known) == ([], MAX_RECORDS)


def test_message_that_comes_again_is_counted_once(desk: Desk) -> None:
    for _ in range(2):
        desk.end("e", record("r"), seq=77)
    assert len(desk.find("r").found) == 1


def test_engine_that_is_not_attached_is_not_believed(desk: Desk) -> None:
    assert desk.end("stranger", record("r")).attach
    assert desk.find("r").found == []


# What is known better


def test_chunk_that_nobody_ever_had_was_never_stored(desk: Desk) -> None:
    desk.store("two", "a", "far")
    assert desk.reason("b") == {"never_stored": 64, "incomplete_chunk": 5}


def test_chunk_that_was_given_up_on_another_node_was_evicted(desk: Desk) -> None:
    desk.store("two", "a", "far")
    desk.store("two", "bcde", "far")
    assert desk.reason("a") == {"evicted": 64, "incomplete_chunk": 5}


def test_chunk_that_was_stored_twice_was_not_evicted(desk: Desk) -> None:
    """Two engines of a node had computed it, neither of which knew of the other."""
    desk.store("one", "a", "e")
    desk.store("one", "a", "e")
    assert desk.reason("a") == {"never_stored": 64, "incomplete_chunk": 5}


def test_chunk_of_a_node_that_is_gone_was_lost_with_it(desk: Desk) -> None:
    desk.store("two", "ab", "far")
    desk.now += EXPIRY_S + 1.0
    desk.report("one")
    desk.sync("e")
    desk.manager.expire(desk.now)
    desk.attach("e", "one", "model")
    assert desk.reason("a") == {"node_lost": 64, "incomplete_chunk": 5}
    assert "never_stored" in desk.reason("c")


def test_chunk_that_an_operator_removed_was_cleared(desk: Desk) -> None:
    desk.store("two", "a", "far")
    desk.manager.clear(Namespace("model"))
    assert desk.reason("a") == {"cleared": 64, "incomplete_chunk": 5}
    assert "never_stored" in desk.reason("b")


def test_chunk_of_the_same_tokens_in_another_namespace_is_named(desk: Desk) -> None:
    desk.attach("other", "two", "other model")
    desk.store("two", "a", "other", "other model")
    assert desk.reason("a") == {"other_namespace": 64, "incomplete_chunk": 5}
    assert "never_stored" in desk.reason("b")


def test_what_went_in_another_namespace_says_nothing_of_this_one(desk: Desk) -> None:
    desk.attach("other", "two", "other model")
    desk.store("two", "a", "other", "other model")
    desk.manager.clear(Namespace("other model"))
    assert "never_stored" in desk.reason("a")


def test_nodes_that_came_to_have_the_other_namespace_are_seen_after_a_while(desk: Desk) -> None:
    assert "never_stored" in desk.reason("a")
    desk.attach("other", "two", "other model")
    desk.store("two", "a", "other", "other model")
    desk.now += misses.PLACES_S
    assert "other_namespace" in desk.reason("a")


def test_search_in_other_namespaces_is_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "MAX_PLACES", 0)
    desk.attach("other", "two", "other model")
    desk.store("two", "a", "other", "other model")
    assert "never_stored" in desk.reason("a")


def test_other_reasons_stay_as_the_engine_gave_them(desk: Desk) -> None:
    desk.store("two", "a", "far")
    desk.store("two", "bcde", "far")
    desk.end("e", MissRecord("r", 10, 0, 0, {"pool_full": 10}, key("a")))
    assert desk.find("r").found[0].record.missed == {"pool_full": 10}


def test_refined_reason_joins_tokens_that_have_it_already(desk: Desk) -> None:
    desk.store("two", "a", "far")
    desk.store("two", "bcde", "far")
    missed = {"never_stored": 6, "evicted": 4}
    desk.end("e", MissRecord("r", 10, 0, 0, missed, key("a")))
    assert desk.find("r").found[0].record.missed == {"evicted": 10}


def test_engine_is_told_what_was_known_better_once_for_each_message(desk: Desk) -> None:
    desk.store("two", "a", "far")
    desk.store("two", "bcde", "far")
    known = MissRecord("r1", 10, 0, 0, {"never_stored": 7, "incomplete_chunk": 3}, key("a"))
    unknown = MissRecord("r2", 10, 0, 0, {"never_stored": 10}, key("z"))
    for _ in range(2):
        assert desk.end("e", known, unknown, seq=77).refined == {"evicted": 7}
    assert desk.end("e", unknown, seq=78).refined == {}
    assert desk.end("e", seq=79).refined == {}


def test_chunk_that_is_here_since_is_not_taken_for_one_of_another_namespace(desk: Desk) -> None:
    desk.store("two", "a", "far")
    assert desk.reason("a") == {"never_stored": 64, "incomplete_chunk": 5}


# Pages of all requests


ENGINE = Engine(
    EngineId("e"),
    NodeId("n"),
    Namespace("space"),
    "tiny",
    1,
    {0: SLOT_ALIGNMENT},
    0.0,
    0.0,
    Mirror(None, Namespace("space")),
)


def told(number: int, num_chunks: int = 2) -> MissRecord:
    return MissRecord(f"r{number}", 64, 0, 64, {}, b"", chunk_names(*range(num_chunks)), 32)


def log_of(*records: MissRecord) -> MissLog:
    log = MissLog({})
    log.take(ENGINE, records, now=5.0)
    return log


def read(log: MissLog) -> list[str]:
    """All pages, as a client reads them."""
    found: list[str] = []
    after = 0
    while True:
        page = log.page(epoch=1, after=after, now=7.0)
        found += [each.record.request_id for each in page.found]
        after = page.first + len(page.found) - 1
        if not page.found or after >= page.last:
            return found


def test_page_has_what_followed_with_names_and_age() -> None:
    page = log_of(told(1), told(2), told(3)).page(epoch=9, after=1, now=7.0)
    assert (page.epoch, page.first, page.last) == (9, 2, 3)
    assert [each.record.request_id for each in page.found] == ["r2", "r3"]
    assert page.found[0].record.chunks == chunk_names(0, 1)
    assert page.found[0].age_s == 2.0


@pytest.mark.parametrize("after", [0, -5])
def test_pages_tell_every_request_once_in_order(after: int) -> None:
    log = log_of(*map(told, range(misses.MAX_PAGE * 2 + 3)))
    assert read(log) == [f"r{number}" for number in range(misses.MAX_PAGE * 2 + 3)]
    assert log.page(1, after, 7.0).first == 1


def test_nothing_follows_the_newest() -> None:
    page = log_of(told(1)).page(epoch=1, after=1, now=7.0)
    assert (page.found, page.first, page.last) == ([], 2, 1)
    assert log_of(told(1)).page(epoch=1, after=1 << 60, now=7.0).found == []
    assert log_of().page(epoch=1, after=0, now=7.0).found == []


def test_page_stays_small_whatever_its_requests_name() -> None:
    log = log_of(*(told(number, MAX_NAMED) for number in range(40)))
    page = log.page(epoch=1, after=0, now=7.0)
    assert 1 <= len(page.found) < 40
    assert len(encode(page)) < 100 << 10
    assert read(log) == [f"r{number}" for number in range(40)]


def test_log_forgets_the_oldest_by_number_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "MAX_RECORDS", 3)
    log = log_of(*map(told, range(5)))
    assert read(log) == ["r2", "r3", "r4"]
    assert log.page(1, 0, 7.0).first == 3
    monkeypatch.setattr(misses, "MAX_NAMES_BYTES", 5 * CHUNK_NAME_BYTES)
    log.take(ENGINE, [told(9)], now=6.0)
    assert read(log) == ["r4", "r9"]


def test_prompt_that_another_has_left_is_cached_until_its_chunk_is_gone(desk: Desk) -> None:
    desk.store("two", "a", "far")
    for name in "ab":
        left = Parting(3, key(name))
        desk.end("e", MissRecord(name, 10, 0, 0, {"never_stored": 10}, parting=left))
    assert [desk.find(name).found[0].nearest_is_cached for name in "ab"] == [True, False]
    desk.manager.clear(Namespace("model"))
    assert not desk.find("a").found[0].nearest_is_cached


@pytest.mark.parametrize(
    "bad",
    [
        MissRecord("r", 1, 0, 1, chunks=b"1234567"),
        MissRecord("r", 1, 0, 1, chunks=bytes(MAX_NAMES_BYTES + CHUNK_NAME_BYTES)),
        MissRecord("r", -1, 0, 1),
        MissRecord("r", 1, 0, 1, chunk_tokens=-1),
        MissRecord("r" * 5000, 1, 0, 1),
        MissRecord("r", 1, 0, 1, parting=Parting(-1, key("a"))),
        MissRecord("r", 1, 0, 1, parting=Parting(1, b"a" * 500)),
        MissRecord("r", 1, 0, 1, parting=Parting(1, key("a"), own=[-1])),
        MissRecord("r", 1, 0, 1, parting=Parting(1, key("a"), before=[1] * 65)),
    ],
)
def test_record_that_can_not_be_meant_is_left_out_and_refuses_nothing_else(bad: MissRecord) -> None:
    leases = Leases([0], [1], [2])
    sent = SyncRequest("e", 1, 1, released=leases, finished=[told(1), bad, told(2)])
    taken = checked_sync(sent)
    assert taken == msgspec.structs.replace(sent, finished=[told(1), told(2)])


def test_scheduler_actor_tells_requests() -> None:
    actor = SchedulerActor("here", "lru")
    epoch = actor._manager.epoch
    actor.report(encode(NodeReport(PROTOCOL_VERSION, "n", 1, 1, 1 << 20, 1 << 16, 0, 0)))
    message = AttachEngine(PROTOCOL_VERSION, "e", "n", "space", "m", 1, {0: SLOT_ALIGNMENT})
    assert not decode(actor.attach(encode(message)), EngineAttached).error
    bad = MissRecord("r" * 5000, 1, 0, 1)
    actor.sync(encode(SyncRequest("e", epoch, 1, finished=[bad, told(1)])))
    page = decode(actor.requests(0), RequestPage)
    assert [each.record for each in page.found] == [told(1)]
    with pytest.raises(MessageError):
        actor.requests("all")  # type: ignore[arg-type]
