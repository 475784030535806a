"""What people are told of a node's pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raykv.base.errors import MessageError
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import ALL_BLOCKS, NodeId, Stamp, part_of
from raykv.base.tenants import salt_label
from raykv.node.accounts.desk import MOST_PIECES, Desk
from raykv.node.keeper import PoolKeeper
from raykv.protocol.columns import Keys, Numbers
from raykv.protocol.engine import Hints, MissRecord
from raykv.protocol.events import ListingQuery
from raykv.protocol.framing import decode, encode, receive
from raykv.protocol.listing import ALL_READ, Position, Where
from raykv.protocol.operator import DropOrder, OrderedPin, OrderedShare, OrdersDocument
from raykv.protocol.reader import ChunkPage, ChunkQuery
from raykv.protocol.sessions import SessionNews, SessionQuery, SessionStage, SessionWord
from tests.fixtures.node.owned_pool import LIFE, PAGE, SLAB, A, OwnedPool, begun, key, land


class AskedPool(OwnedPool):
    """A pool, its desk, and an engine that stores at once."""

    def __init__(self, num_slabs: int = 2) -> None:
        geometry = PoolGeometry(num_slabs * SLAB * PAGE, SLAB * PAGE)
        self.keeper = PoolKeeper(NodeId("n"), LIFE, geometry)
        super().__init__(node=self.keeper.owner)
        self.now = self.keeper.now()
        self.desk = Desk("n", self.keeper)
        assert not self.hello(model="model")

    def chunks(self, cursor: str = "", **fields: object) -> ChunkPage:
        query = ChunkQuery(cursor=cursor, **fields)  # type: ignore[arg-type]
        query = receive(encode(query), ChunkQuery, "a reader", "this node")
        return decode(encode(self.desk.chunks(query)), ChunkPage)


def keys_of(page: ChunkPage) -> list[bytes]:
    return [row.key for row in page.chunks]


def tenants_of(page: ChunkPage) -> list[str]:
    return [row.tenant for row in page.chunks]


@pytest.fixture
def asked(request: pytest.FixtureRequest) -> Iterator[AskedPool]:
    made = AskedPool(getattr(request, "param", 2))
    yield made
    made.keeper.pool.stop()


def test_chunks_come_page_by_page(asked: AskedPool) -> None:
    asked.store(1, 2, 3, tenant="lisa")
    asked.store(4)
    pages = [asked.chunks(limit=2)]
    while pages[-1].cursor:
        pages.append(asked.chunks(pages[-1].cursor, limit=2))
    assert max(len(page.chunks) for page in pages) <= 2
    found = sorted((row.key, row.tenant, row.where) for page in pages for row in page.chunks)
    owners = {1: "lisa", 2: "lisa", 3: "lisa", 4: ""}
    assert found == [(key(number), tenant, Where.RAM) for number, tenant in owners.items()]


@pytest.mark.parametrize("asked", [MOST_PIECES // 2], indirect=True)
def test_order_looks_at_whole_stretches_of_the_pool(asked: AskedPool) -> None:
    for number in range(2 * MOST_PIECES):
        asked.store(number)
    page = asked.chunks(order="age", limit=1)
    assert (keys_of(page), page.cursor) == ([key(0)], "")
    assert not asked.chunks(tier="disk").chunks


def test_tenant_with_a_quota_is_shown_by_its_name(asked: AskedPool) -> None:
    asked.store(1, tenant=salt_label("secret"))
    asked.store(2, tenant="lisa")
    shares = {salt_label("secret"): OrderedShare("acme")}
    asked.keeper.take_orders(OrdersDocument(Stamp(1, 1), shares=shares), 1.0)
    page = asked.chunks()
    assert tenants_of(page) == ["acme", "lisa"]
    asked.tell(finished=[MissRecord("one", 5, 2, 3, tenant=salt_label("secret"))])
    (told,) = asked.desk.why_miss("one").found
    assert told.record.tenant == "acme"


@pytest.mark.parametrize("text", ["ram", "-1", "7 8", "1" * 30, "\u0663", "\n"])
def test_cursor_that_nobody_has_given_out_is_refused(asked: AskedPool, text: str) -> None:
    with pytest.raises(MessageError, match="cursor"):
        asked.chunks(text)


def test_listing_takes_a_reader_to_its_end(asked: AskedPool) -> None:
    asked.store(1, 2)
    position, rows = Position(), []
    while position.place != ALL_READ:
        part = asked.desk.listing(ListingQuery(position))
        rows += [row.key for row in part.rows]
        position = part.end
    assert sorted(rows) == [key(1), key(2)]
    assert (position.life, position.number) == (LIFE, asked.keeper.owner.index.listing.number)


def test_each_part_of_a_pin_says_what_is_kept_of_it(asked: AskedPool) -> None:
    owner = asked.keeper.owner
    parts = [part_of(A, name) for name in ("one", "two")]
    for part, number in ((parts[0], 1), (parts[1], 1), (parts[0], 2)):
        facts = (part, key(number), PAGE, owner.orders.stamp, ALL_BLOCKS, "", 1.0)
        owner.landings.landed(begun(land(owner, *facts)), ok=True)
    pins = {"p": OrderedPin(A, b"d", 2, 60.0, priority=4)}
    asked.keeper.take_orders(OrdersDocument(Stamp(1, 1), pins=pins), 1.0)
    owner.orders.pin_keys(b"d", A, [key(1), key(2)])
    held = asked.desk.pins().held["p"]
    assert {part: list(here.kept) for part, here in held.items()} == {"one": [0, 1], "two": [0]}


def test_pins_say_by_number_what_is_kept(asked: AskedPool) -> None:
    asked.store(1, 2, 3)
    pins = {"p": OrderedPin(A, b"d", 4, 60.0)}
    asked.keeper.take_orders(OrdersDocument(Stamp(1, 1), pins=pins), 1.0)
    assert not asked.desk.pins().held
    asked.keeper.owner.orders.pin_keys(b"d", A, [key(number) for number in (9, 1, 2, 3)])
    pauses = SessionNews("s", SessionWord.PAUSED, Keys.of([key(7), key(8)]), 60.0)
    asked.tell(hints=Hints(Keys.of([key(8)]), [5.0]), sessions=[pauses])
    told = asked.desk.pins()
    firm = told.held["p"][""]
    # A quarter of eight slots.
    assert (list(firm.kept), list(firm.waiting)) == ([1, 2], [3])
    assert firm.num_bytes == told.node.kept_bytes == told.node.quota_bytes == 2 * PAGE
    assert (told.node.kept_chunks, told.node.waiting_chunks, told.client_chunks) == (2, 1, 2)
    # What another one keeps by preference waits to be pinned all the same.
    pins["q"] = OrderedPin(A, b"d", 4, 60.0, priority=4)
    asked.keeper.take_orders(OrdersDocument(Stamp(1, 2), pins=pins), 1.0)
    asked.keeper.owner.orders.pin_keys(b"d", A, [key(number) for number in (9, 1, 2, 3)])
    held = asked.desk.pins().held
    assert held["p"] == told.held["p"]
    assert (list(held["q"][""].kept), held["q"][""].num_bytes) == ([1, 2, 3], 3 * PAGE)
    keys, zeros = Keys.of([key(1), key(3), key(9)]), Numbers.of([0] * 3)
    gone = asked.desk.drop(DropOrder(A, keys, zeros, Numbers.of([2] * 3)))
    assert (gone.dropped, gone.kept, gone.absent) == (1, 1, 1)


def test_requests_are_told_by_number_and_by_id(asked: AskedPool) -> None:
    asked.tell(finished=[MissRecord("one", 5, 2, 3), MissRecord("two", 5, 2, 3)])
    page = asked.desk.requests(1)
    assert (page.life, page.first, page.last) == (LIFE, 2, 2)
    assert [each.record.request_id for each in page.found] == ["two"]
    told = asked.desk.why_miss("on")
    assert told.num_known == 2
    (one,) = told.found
    assert (one.engine_id, one.node_id, one.namespace, one.model) == ("e1", "n", A, "model")
    assert asked.desk.more_room().prompt_tokens == 0
    with asked.keeper.lock:
        asked.keeper.owner.follow(asked.keeper.now())
    assert asked.desk.more_room().prompt_tokens == 10


def test_sessions_are_told_with_their_chunks(asked: AskedPool) -> None:
    news = [
        SessionNews("s", SessionWord.CAME, Keys.of([key(1), key(2)])),
        SessionNews("t", SessionWord.CAME, Keys.of([key(1)])),
        SessionNews("t", SessionWord.PAUSED, pause_s=60.0),
    ]
    asked.now = asked.keeper.now()
    asked.tell(sessions=news)
    page = asked.desk.sessions(SessionQuery())
    assert [each.session for each in page.sessions] == ["t", "s"]
    assert [each.private_chunks for each in page.sessions] == [0, 1]
    assert page.sessions[0].stage is SessionStage.PAUSED
    assert 59.0 < page.sessions[0].left_s <= 60.0
    page = asked.desk.sessions(SessionQuery(session="s", first=1))
    assert page.keys == [key(2)]
    assert not asked.desk.sessions(SessionQuery(namespace="b")).sessions


def test_nobody_describes_what_is_no_key(asked: AskedPool) -> None:
    assert not asked.desk.descriptions([key(1)], None).rows
    with pytest.raises(MessageError):
        asked.desk.descriptions(["key"], None)
