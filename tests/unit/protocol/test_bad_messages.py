"""Messages that no honest peer of this version sends: refused, with both versions where it is one.

What passes does no harm: after each the receiver's invariants hold, and honest peers are served as
before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from raykv.base.errors import MessageError, VersionError
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import SLOT_ALIGNMENT, Direction, Key, NodeId, Refusal, Stamp
from raykv.directory.known.directory import Directory
from raykv.directory.known.document import Orders
from raykv.node.fetch import FetchService
from raykv.node.keeper import PoolKeeper
from raykv.node.peers import PeerError
from raykv.node.read import ReadService
from raykv.protocol import engine
from raykv.protocol.columns import Keys, NamedKeys, Numbers, Source, SourceKind, SourceRows, Texts
from raykv.protocol.copies import CopyJob, Fetch, Read, ReadReply, check_read_reply
from raykv.protocol.events import EventPage, ListingQuery
from raykv.protocol.framing import PROTOCOL_VERSION, Versioned, encode, receive
from raykv.protocol.listing import ALL_READ, ListingPart, Position
from raykv.protocol.measures import HistogramData
from raykv.protocol.node import (
    NodeDescription,
    Report,
    ReportAnswer,
)
from raykv.protocol.operator import DropOrder, OrdersDocument
from raykv.protocol.reader import ChunkQuery
from raykv.protocol.sessions import SessionNews, SessionWord
from raykv.protocol.worker import AttachWorker, JobBatch
from tests.fixtures.directory.reporting import ReportingNode, key_of, row_of
from tests.fixtures.node.owned_pool import PAGE, A, OwnedPool

BIG = (1 << 63) - 1
VERSIONED: tuple[type[msgspec.Struct], ...] = (
    engine.Ask,
    AttachWorker,
    ChunkQuery,
    DropOrder,
    engine.EngineHello,
    EventPage,
    Fetch,
    ListingQuery,
    NodeDescription,
    Read,
    Report,
)
OTHERS: tuple[type[msgspec.Struct], ...] = (JobBatch, OrdersDocument, ReportAnswer, engine.Tell)


class OtherVersion(msgspec.Struct):
    """A message of another version, of which nothing else can be read."""

    version: int
    keys: str = "in another form"
    part: str = "in another form"


# Versions


@pytest.mark.parametrize("kind", VERSIONED)
@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, 1 << 40])
def test_message_of_another_version_is_refused_with_both_versions(
    kind: type[msgspec.Struct], version: int
) -> None:
    with pytest.raises(VersionError) as caught:
        receive(encode(OtherVersion(version)), kind, "the sender", "the receiver")
    assert f"the sender speaks protocol {version} of RayKV" in str(caught.value)
    assert f"the receiver {PROTOCOL_VERSION}:" in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(VERSIONED + OTHERS), raw=st.binary(max_size=60))
def test_bytes_that_are_no_message_are_refused(kind: type[msgspec.Struct], raw: bytes) -> None:
    with pytest.raises((MessageError, VersionError)):
        receive(raw, kind, "the sender", "the receiver")


@pytest.mark.parametrize(
    "raw", [None, 5, "text", [], b"", b"\x91" * 100_000, b"\xd9\x04\xff\xff\xff\xff"]
)
def test_what_is_not_even_bytes_is_refused(raw: Any) -> None:
    with pytest.raises(MessageError):
        receive(raw, Report, "the sender", "the receiver")


class AnyColumn(msgspec.Struct, array_like=True):
    """Like `Keys`, of whatever length."""

    raw: bytes
    lengths: bytes


class AnyQuestion(msgspec.Struct):
    """Like an `Ask`."""

    version: int
    engine_id: str
    life: int
    namespace: str
    places: list[str]
    keys: AnyColumn


@pytest.mark.parametrize(
    ("raw", "lengths", "why"),
    [
        (bytes(71), b"\x24", "keys of 36 bytes each in 71 bytes"),
        (bytes(35), b"\x24", "keys of 36 bytes each in 35 bytes"),
        (bytes(72), b"\0", "keys of 0 bytes each in 72 bytes"),
        (b"", b"\0", "keys of 0 bytes each in 0 bytes"),
        (bytes(36), b"", "keys in 36 bytes that should have 0 in all"),
        (bytes(36), b"\x24\x01", "keys in 36 bytes that should have 37 in all"),
        (bytes(38), b"\x24\x01", "keys in 38 bytes that should have 37 in all"),
        (bytes(2 * 129), b"\x81", "invalid message: lengths of keys from 129 to 129"),
    ],
)
def test_column_of_keys_that_is_not_as_long_as_it_says_is_refused(
    raw: bytes, lengths: bytes, why: str
) -> None:
    question = AnyQuestion(PROTOCOL_VERSION, "e", 1, "n", ["p"], AnyColumn(raw, lengths))
    with pytest.raises(MessageError, match=f"an engine sent the actor no Ask: {why}"):
        receive(encode(question), engine.Ask, "an engine", "the actor")


# What peers may say

NUMBER = st.one_of(st.integers(0, 5), st.sampled_from([7, 63, PAGE, 1 << 32, BIG]))
SIZES = [0, 1, PAGE, 1 << 32, BIG, -1, -BIG]
NAME = st.sampled_from(["", "a", "b", "\n", "n" * 4000])
KEY = st.sampled_from([b"k", b"key1key1", bytes(36), b"x" * 128])
KEYS = st.lists(KEY, max_size=4).map(Keys.of)


@st.composite
def any_found(draw: st.DrawFn) -> engine.FoundKeys:
    keys = draw(KEYS)
    return engine.FoundKeys(keys, Texts.of(draw(st.sampled_from(["", "t"])) for _ in keys))


NAMES = st.sampled_from(["a", "b", "\n"])
GOES_ON = st.sampled_from([SessionWord.CAME, SessionWord.USED, SessionWord.OVER])
PAUSES = st.just(SessionWord.PAUSED), KEYS, st.sampled_from([0.1, 60.0, 3600.0]), st.integers(0, 9)

COLUMNS: dict[type, st.SearchStrategy[Any]] = {
    Keys: KEYS,
    NamedKeys: KEYS.map(lambda keys: NamedKeys.of((A, Key(key)) for key in keys)),
    engine.FoundKeys: any_found(),
    SessionNews: st.one_of(
        st.builds(SessionNews, NAMES, GOES_ON, KEYS), st.builds(SessionNews, NAMES, *PAUSES)
    ),
}
"""What is seldom accepted if it is made field by field."""


SIMPLE: dict[type, st.SearchStrategy[Any]] = {
    inspect.FloatType: st.one_of(st.floats(), st.sampled_from([0.0, 0.5, 1.0, 60.0])),
    inspect.BytesType: st.binary(max_size=40),
    inspect.BoolType: st.booleans(),
    inspect.NoneType: st.none(),
}


def any_value(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Honest and absurd values of a field, as its declaration allows them."""
    match kind:
        case inspect.IntType(ge=least, le=most):
            allowed = (-BIG if least is None else least, BIG if most is None else most)
            return st.one_of(NUMBER, st.sampled_from(SIZES)).filter(
                lambda number: allowed[0] <= number <= allowed[1]
            )
        case inspect.StrType(min_length=least):
            return NAME.filter(lambda name: len(name) >= (least or 0))
        case inspect.EnumType(cls=cls):
            return st.sampled_from(cls)
        case inspect.ListType(item_type=item, min_length=least):
            return st.lists(any_value(item), min_size=least or 0, max_size=3)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(any_value(key), any_value(value), max_size=2)
        case inspect.UnionType(types=types):
            return st.one_of(*map(any_value, types))
        case inspect.NamedTupleType():
            return st.builds(Stamp, NUMBER, NUMBER)
        case inspect.StructType(cls=cls):
            return COLUMNS[cls] if cls in COLUMNS else any_of(cls)
    return SIMPLE[type(kind)]


def any_of(kind: Any, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Messages of a kind, whose fields are what is given or anything that may be."""
    if issubclass(kind, Versioned):
        given.setdefault("version", st.just(PROTOCOL_VERSION))
    declared: Any = inspect.type_info(kind)
    others = {each.name: any_value(each.type) for each in declared.fields if each.name not in given}
    return st.builds(kind, **others, **given)


HISTOGRAMS = st.dictionaries(st.sampled_from(["lookup", "x"]), any_of(HistogramData), max_size=2)
TELLS = any_of(
    engine.Tell,
    life=st.sampled_from([1, 2]),
    seq=st.just(0),
    counters=st.dictionaries(st.sampled_from(["prompt_tokens", "wanted_chunks", "x"]), NUMBER),
    latencies=HISTOGRAMS,
)


@st.composite
def any_job(draw: st.DrawFn) -> CopyJob:
    keys = draw(KEYS)
    return CopyJob(
        draw(st.integers(0, 50)),
        draw(st.sampled_from(Direction)),
        draw(st.sampled_from([A, "b"])),
        keys,
        Numbers.of(draw(NUMBER) >> 1 for _ in keys),
        Numbers.of(draw(NUMBER) >> 1 for _ in keys),
        orders=Stamp(draw(NUMBER), draw(NUMBER)),
        tenant=draw(NAME),
    )


def passed(message: msgspec.Struct) -> Any:
    """What arrives of a message; None if it is refused."""
    with contextlib.suppress(MessageError):
        return receive(encode(message), type(message), "a peer", "this one")


# A node's pool


@pytest.fixture(scope="module")
def pool() -> OwnedPool:
    made = OwnedPool()
    made.hello()
    return made


def check_service(pool: OwnedPool) -> None:
    """An honest engine can still store and load."""
    pool.node.check()
    pool.now += 100.0
    pool.node.expire(pool.now)
    pool.hello(9)
    pool.job += 100
    number = pool.job
    (job,) = pool.admit(pool.storing(number, orders=pool.node.orders.stamp), life=9)
    assert not pool.end(job).failed_chunks
    (job,) = pool.admit(pool.loading(number), life=9)
    assert not pool.end(job).failed_chunks
    pool.node.bye(9)
    pool.hello()


@settings(max_examples=100, deadline=None)
@given(told=TELLS)
def test_absurd_words_of_engines_do_no_harm(pool: OwnedPool, told: engine.Tell) -> None:
    pool.seq += 1
    message = passed(msgspec.structs.replace(told, seq=pool.seq))
    if message is not None:
        pool.node.tell(message, pool.now)
        pool.node.follow(pool.now)
    check_service(pool)


@settings(max_examples=100, deadline=None)
@given(job=any_job())
def test_absurd_jobs_do_no_harm(pool: OwnedPool, job: CopyJob) -> None:
    message = passed(job)
    if message is not None:
        (admitted,) = pool.admit(message)
        pool.end(admitted)
    check_service(pool)


@settings(max_examples=100, deadline=None)
@given(query=any_of(engine.ChangesQuery))
def test_absurd_position_is_that_of_who_has_read_nothing(
    pool: OwnedPool, query: engine.ChangesQuery
) -> None:
    message = passed(query)
    if message is not None:
        pool.node.has_changes(message)
        pool.changes(message)
    check_service(pool)


@settings(max_examples=100, deadline=None)
@given(
    answer=any_of(ReportAnswer),
    document=any_of(OrdersDocument, stamp=st.builds(Stamp, st.integers(0, 3), NUMBER)),
)
def test_absurd_answers_of_the_directory_do_no_harm(
    pool: OwnedPool, answer: ReportAnswer, document: OrdersDocument
) -> None:
    report = pool.report()
    message, orders = passed(answer), passed(document)
    if message is None:
        pool.node.reporting.give_up()
    else:
        pool.node.answered(message, pool.now, report.seq)
    if orders is not None:
        pool.node.take_orders(orders, pool.now)
    for digest in pool.node.orders.wanted():
        pool.node.orders.pin_keys(digest, A, [Key(b"k")])
    pool.node.check()
    # An honest document clears and lifts what that one said.
    latest = pool.node.orders.stamp
    pool.node.take_orders(OrdersDocument(Stamp(latest.history + 1, 1)), pool.now)
    check_service(pool)


# The directory


@pytest.fixture(scope="module")
def directory() -> Directory:
    return Directory(5, Orders(None, 1, 0.0))


REPORTS = any_of(
    Report,
    node_id=st.sampled_from(["bad", "worse"]),
    life=st.sampled_from([1, 2, BIG]),
    part=st.none(),
)


@settings(max_examples=100, deadline=None)
@given(report=REPORTS, position=any_of(Position), ends_at=NUMBER)
def test_absurd_reports_are_refused_or_do_no_harm(
    directory: Directory, report: Report, position: Position, ends_at: int
) -> None:
    honest = ReportingNode(directory, "honest", life=max(1, ends_at % 1000))
    with contextlib.suppress(ValueError):
        start = msgspec.structs.replace(position, life=report.life)
        end = Position(report.life, ends_at, ALL_READ, position.reader)
        part = ListingPart(start.number == 0, start, end)
        report = msgspec.structs.replace(report, part=part)
    message = passed(report)
    if message is not None:
        directory.report(message, 1.0)
    directory.check()
    honest.report(1.0)
    honest.report(1.0, row_of(1))
    answer = directory.ask(engine.Ask("e", 1, "n", ["p"], Keys.of([key_of(1)])), 1.0)
    assert [source.node_id for source in answer.sources.by_key(1)[0]]


@settings(max_examples=60, deadline=None)
@given(ask=any_of(engine.Ask))
def test_absurd_questions_do_no_harm(directory: Directory, ask: engine.Ask) -> None:
    message = passed(ask)
    if message is not None:
        directory.ask(message, 1.0)
    directory.check()


# Bytes for other nodes


class Nobody:
    """A `PeerTransport` without any node."""

    def start_read(self, source: Source, request: Read) -> Any:
        del request
        raise PeerError(f"node {source.node_id}: there is none")


@pytest.fixture(scope="module")
def keeper() -> Iterator[PoolKeeper]:
    made = PoolKeeper(NodeId("n"), 7, PoolGeometry(16 * SLOT_ALIGNMENT, 4 * SLOT_ALIGNMENT))
    yield made
    made.pool.stop()


@st.composite
def any_fetch(draw: st.DrawFn) -> Fetch:
    keys = draw(KEYS)
    num_rows = draw(st.integers(0, 3)) if keys else 0
    return Fetch(
        draw(NUMBER),
        draw(NUMBER),
        draw(st.sampled_from([A, "b"])),
        keys,
        Numbers.of(draw(st.sampled_from(SIZES)) for _ in keys),
        SourceRows(
            [Source(NodeId("x"), SourceKind.POOL)],
            Numbers.of(draw(st.integers(0, len(keys) - 1)) for _ in range(num_rows)),
            Numbers.of([0] * num_rows),
        ),
        deadline_s=draw(st.sampled_from([0.0, 0.001, 0.01])),
    )


@settings(max_examples=80, deadline=None)
@given(order=any_fetch())
def test_absurd_fetches_are_refused_and_leave_no_slot_behind(
    keeper: PoolKeeper, order: Fetch
) -> None:
    message = passed(order)
    if message is None:
        return
    result = FetchService(keeper, Nobody()).fetch(message)
    assert len(result.failed_chunks) == len(order.keys)
    assert Refusal.NONE not in result.refusals
    with keeper.lock:
        keeper.owner.check()
        assert not any(keeper.owner.index.contents())


@settings(max_examples=100, deadline=None)
@given(keys=KEYS, data=st.data())
def test_absurd_reads_give_no_bytes(keeper: PoolKeeper, keys: Keys, data: st.DataObject) -> None:
    service = ReadService(keeper)
    sizes = Numbers.of(data.draw(st.sampled_from(SIZES)) for _ in keys)
    message = passed(Read("a", keys, sizes))
    if message is None:
        return
    try:
        reply, found = service.read(message)
    except MessageError:
        return
    finally:
        assert service.reading == 0
    assert len(found) == 0
    assert Refusal.NONE not in reply.refusals


@pytest.mark.parametrize(
    ("fields", "num_bytes"),
    [
        ({"refusals": bytes(1)}, 1),
        ({"refusals": bytes([0, 99])}, 1),
        ({}, 3),
        ({"histories": Numbers()}, 2),
        ({"stamps": Numbers.of([1, -1])}, 2),
        ({"checksums": [1]}, 2),
    ],
)
def test_answer_to_a_read_that_does_not_fit_together_is_refused(
    fields: dict[str, Any], num_bytes: int
) -> None:
    two = Numbers.of([1, 1])
    valid = ReadReply(7, 1, bytes(2), checksums=[1, 2], histories=two, stamps=two)
    check_read_reply(valid, 2, [1, 1])
    with pytest.raises(MessageError):
        check_read_reply(msgspec.structs.replace(valid, **fields), num_bytes, [1, 1])
