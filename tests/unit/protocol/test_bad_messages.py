"""Messages that no honest peer of this version sends: refused, with both versions where it is one.

After each the directory's invariants hold, and honest nodes and engines are served as before.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.base.errors import MessageError, RayKVError, VersionError
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    ALL_BLOCKS,
    LAST_EPOCH,
    MAX_EPOCH,
    MAX_GENERATION,
    SLOT_ALIGNMENT,
    Blocks,
    Epoch,
    Refusal,
)
from raykv.directory.actor import SchedulerActor
from raykv.directory.table.policies import DEFAULT_POLICY
from raykv.node.fetch import FetchService, _bounded
from raykv.node.keeper import PoolKeeper
from raykv.node.peers import PeerError
from raykv.node.read import ReadService
from raykv.protocol.columns import (
    Handles,
    Keys,
    Leases,
    LostReplicas,
    Numbers,
    Replicas,
    Source,
    SourceKind,
)
from raykv.protocol.engine import (
    AttachEngine,
    EngineAttached,
    SyncReply,
    SyncRequest,
    check_attached,
    check_reply,
    checked_sync,
)
from raykv.protocol.events import EventPage, SnapshotPage
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode, receive
from raykv.protocol.measures import HistogramData, KeySketch
from raykv.protocol.node import (
    FailedStores,
    Inventory,
    NodeDescription,
    NodeReport,
    NodeReportReply,
    NodeStats,
)
from raykv.protocol.peer import (
    FetchRequest,
    FetchResult,
    ReadReply,
    ReadRequest,
    check_fetched,
    check_read_reply,
)
from raykv.protocol.worker import AttachWorker, JobBatch
from tests.fixtures.directory.tables import TABLES, use_table_in_actors

PAGE = SLOT_ALIGNMENT
BIG = (1 << 64) - 1
VERSIONED: tuple[type[msgspec.Struct], ...] = (
    AttachEngine,
    NodeReport,
    AttachWorker,
    FetchRequest,
    ReadRequest,
    NodeDescription,
    EventPage,
    SnapshotPage,
)
OTHERS: tuple[type[msgspec.Struct], ...] = (SyncRequest, SyncReply, JobBatch, NodeReportReply)

replace = msgspec.structs.replace


class OtherVersion(msgspec.Struct):
    """A message of another version, of which nothing else can be read."""

    version: int
    slots: str = "in another form"
    handles: str = "in another form"
    stored: str = "in another form"


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
        receive(raw, SyncRequest, "the sender", "the receiver")


class AnyColumn(msgspec.Struct, array_like=True):
    """Like `Keys`, of whatever length."""

    raw: bytes
    lengths: bytes


class AnyQuestion(msgspec.Struct):
    """Like a `SyncRequest` that asks."""

    engine_id: str
    epoch: int
    seq: int
    asked: AnyColumn


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
    ],
)
def test_column_of_keys_that_is_not_as_long_as_it_says_is_refused(
    raw: bytes, lengths: bytes, why: str
) -> None:
    message = encode(AnyQuestion("engine", 1, 1, AnyColumn(raw, lengths)))
    with pytest.raises(MessageError, match=f"an engine sent the actor no SyncRequest: {why}"):
        receive(message, SyncRequest, "an engine", "the actor")


def test_column_of_keys_that_are_too_long_is_refused() -> None:
    with pytest.raises(MessageError, match="lengths of asked keys from 129 to 129"):
        checked_sync(SyncRequest("engine", 1, 1, asked=Keys(bytes(2 * 129), b"\x81")))


# The scheduler actor


class Desk:
    """A scheduler actor without Ray, with an honest node and an honest engine."""

    def __init__(self, table: str) -> None:
        with pytest.MonkeyPatch.context() as patches:
            use_table_in_actors(patches, table)
            self.actor = SchedulerActor("here", DEFAULT_POLICY)
            self.actor._compiler.join(5.0)
        self.epoch = self.actor._manager.epoch
        self.seq = 0
        self.report()
        self.attach()
        assert len(self.sync({0: 4}).granted.slots) == 4

    def report(self) -> None:
        self.seq += 1
        decode(self.actor.report(encode(replace(REPORT, seq=self.seq))), NodeReportReply)

    def attach(self) -> None:
        answer = decode(self.actor.attach(encode(ATTACH)), EngineAttached)
        assert not answer.error

    def sync(self, wanted: dict[int, int]) -> SyncReply:
        self.seq += 1
        request = SyncRequest("engine", self.actor._manager.epoch, self.seq, wanted)
        return decode(self.actor.sync(encode(request)), SyncReply)

    def check(self) -> None:
        self.actor._manager.check()

    def check_service(self) -> None:
        """An honest engine can still store, and hears of it."""
        self.check()
        self.report()
        # They may have taken all slots.
        for engine_id in list(self.actor._manager._engines):
            self.actor.detach(engine_id)
        self.attach()
        granted = self.sync({0: 1}).granted
        assert len(granted.slots) == 1
        self.seq += 1
        key = b"honest %d" % self.seq
        stored = Inventory(
            ["honest"], [0], Keys.of([key]), granted.slots, granted.generations, [PAGE]
        )
        self.actor.report(encode(replace(REPORT, seq=self.seq, stored=stored)))
        assert key in self.sync({}).stored.keys
        self.check()


REPORT = NodeReport(PROTOCOL_VERSION, "node", 7, 1, 64 * PAGE, 8 * PAGE, 0, 0)
ATTACH = AttachEngine(PROTOCOL_VERSION, "engine", "node", "honest", "tiny", 1, {0: PAGE})


@pytest.fixture(scope="module", params=TABLES)
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    """With each table."""
    made = Desk(request.param)
    yield made
    made.check_service()


NUMBER = st.one_of(
    st.integers(0, 5),
    st.sampled_from([-1, 7, 8, 63, 64, PAGE, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, BIG]),
    st.sampled_from([MAX_GENERATION, MAX_GENERATION + 1, -(1 << 63)]),
)
KEY = st.sampled_from([b"k", b"key1", b"key2", b"\0" * 36, b"x" * 129, b"y" * 255])
NAME = st.sampled_from(["", "node", "engine", "honest", "other", "\0", "n" * 5000])


def column(what: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(what, max_size=3)


NUMBERS = column(NUMBER)


@st.composite
def any_columns(draw: st.DrawFn, *kinds: st.SearchStrategy[Any]) -> list[list[Any]]:
    """Of one length, but for one time in four."""
    count = draw(st.integers(0, 3))
    is_ragged = draw(st.integers(0, 3)) == 0
    return [
        draw(column(kind) if is_ragged else st.lists(kind, min_size=count, max_size=count))
        for kind in kinds
    ]


PLACE = st.one_of(st.integers(0, 63), NUMBER)
AGE = st.one_of(st.integers(1, 9), NUMBER)
HANDLES = any_columns(KEY, PLACE, AGE).map(
    lambda columns: Handles(Keys.of(columns[0]), *columns[1:])
)
LEASES = any_columns(st.one_of(st.just(0), NUMBER), PLACE, AGE).map(lambda c: Leases(*c))
SOURCE = st.builds(Source, NAME, st.sampled_from(SourceKind))
LOST = any_columns(SOURCE, KEY, AGE).map(
    lambda columns: LostReplicas(columns[0], Keys.of(columns[1]), columns[2])
)
SIZE = st.one_of(st.sampled_from([PAGE, PAGE, 2 * PAGE, 8 * PAGE]), NUMBER)
INVENTORY = st.tuples(
    st.lists(NAME, min_size=1, max_size=2),
    any_columns(st.one_of(st.just(0), NUMBER), KEY, PLACE, AGE, SIZE),
).map(lambda parts: Inventory(parts[0], parts[1][0], Keys.of(parts[1][1]), *parts[1][2:]))
FAILED = any_columns(PLACE, AGE, SIZE).map(lambda columns: FailedStores(*columns))


def sometimes(usual: Any, other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly what is usual, so that what is absurd is looked at and not refused for the rest."""
    return st.one_of(st.just(usual), st.just(usual), st.just(usual), other)


REPORTS = st.builds(
    NodeReport,
    version=st.just(PROTOCOL_VERSION),
    # Who claims to be the honest node's next life is believed.
    node_id=sometimes("bad", NAME.filter(lambda name: name != "node")),
    epoch=sometimes(7, NUMBER),
    seq=NUMBER,
    pool_bytes=sometimes(64 * PAGE, NUMBER),
    slab_bytes=sometimes(8 * PAGE, NUMBER),
    highest_generation=sometimes(1, AGE),
    scheduler_epoch=sometimes(0, NUMBER),
    stored=sometimes(Inventory(), INVENTORY),
    failed=sometimes(FailedStores(), FAILED),
    page=sometimes(0, NUMBER),
    last_page=st.booleans(),
    cleared=sometimes({}, st.dictionaries(NAME, AGE, max_size=2)),
    stats=sometimes(NodeStats(), st.builds(NodeStats, metrics_address=NAME, metrics_problem=NAME)),
)
ATTACHES = st.builds(
    AttachEngine,
    version=st.just(PROTOCOL_VERSION),
    engine_id=sometimes("bad", NAME),
    node_id=sometimes("node", NAME),
    namespace=sometimes("bad", NAME),
    model=st.just("tiny"),
    num_ranks=sometimes(1, NUMBER),
    slot_bytes=sometimes({0: PAGE}, st.dictionaries(NUMBER, SIZE, max_size=2)),
    leases=sometimes(Leases(), LEASES),
)


LATENCY = st.one_of(st.just("lookup"), NAME)
HISTOGRAM = st.builds(
    HistogramData,
    counts=st.one_of(st.lists(NUMBER, max_size=3), st.lists(NUMBER, min_size=18, max_size=18)),
    total=st.floats(),
)
SKETCH = st.builds(KeySketch, registers=st.binary(max_size=8), ranks=st.binary(max_size=4))


@st.composite
def any_sync(draw: st.DrawFn) -> dict[str, Any]:
    keys = st.lists(KEY, max_size=3).map(Keys.of)
    return {
        "seq": draw(sometimes(1 << 40, NUMBER)),
        "wanted": draw(sometimes({}, st.dictionaries(NUMBER, NUMBER, max_size=2))),
        "touched": draw(sometimes(Keys(), keys)),
        "pinned": draw(sometimes(Keys(), keys)),
        "released": draw(sometimes(Leases(), LEASES)),
        "dropped": draw(sometimes(Handles(), HANDLES)),
        "lost": draw(sometimes(LostReplicas(), LOST)),
        "asked": draw(sometimes(Keys(), keys)),
        "announced": draw(sometimes(Handles(), HANDLES)),
        "clear": draw(sometimes(0, NUMBER)),
        "idle": draw(st.booleans()),
        "counters": draw(sometimes({}, st.dictionaries(NAME, NUMBER, max_size=2))),
        "latencies": draw(sometimes({}, st.dictionaries(LATENCY, HISTOGRAM, max_size=2))),
        "wanted_keys": draw(sometimes(KeySketch(), SKETCH)),
    }


def refused_or_done(desk: Desk, call: Any, message: msgspec.Struct) -> None:
    """Refused by `MessageError`, or carried out; nothing else, and the books are right."""
    with contextlib.suppress(MessageError):
        call(encode(message))
    desk.check()
    desk.actor.metrics()


@settings(max_examples=100, deadline=None)
@given(report=REPORTS)
def test_absurd_reports_are_refused_or_do_no_harm(desk: Desk, report: NodeReport) -> None:
    refused_or_done(desk, desk.actor.report, report)


@settings(max_examples=100, deadline=None)
@given(message=ATTACHES)
def test_absurd_engines_are_refused_or_do_no_harm(desk: Desk, message: AttachEngine) -> None:
    refused_or_done(desk, desk.actor.attach, message)


@settings(max_examples=100, deadline=None)
@given(fields=any_sync())
def test_absurd_exchanges_are_refused_or_do_no_harm(desk: Desk, fields: dict[str, Any]) -> None:
    desk.actor.attach(encode(replace(ATTACH, engine_id="bad")))
    request = SyncRequest("bad", desk.actor._manager.epoch, **fields)
    refused_or_done(desk, desk.actor.sync, request)


def test_refused_exchange_changes_nothing() -> None:
    """Its first half is right: that must not be carried out either."""
    desk = Desk("dict")
    desk.actor.attach(encode(replace(ATTACH, engine_id="bad")))
    epoch = desk.actor._manager.epoch
    granted = decode(
        desk.actor.sync(encode(SyncRequest("bad", epoch, 1, {0: 2}))), SyncReply
    ).granted
    assert len(granted.slots) == 2
    ragged = SyncRequest(
        "bad", epoch, 2, released=granted, announced=Handles(Keys.of([b"k"]), [1], [])
    )
    with pytest.raises(MessageError, match="columns of 1 and 0 rows"):
        desk.actor.sync(encode(ragged))
    leased = desk.actor._manager._nodes[next(iter(desk.actor._manager._nodes))].book.leases()
    assert set(granted.slots) <= set(leased)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"latencies": {"lookup": HistogramData([-1], 0.0)}}, "buckets of a latency from -1"),
        ({"latencies": {"lookup": HistogramData([1], math.nan)}}, "a latency of nan s"),
        ({"latencies": {"lookup": HistogramData([1], -1.0)}}, "a latency of -1.0 s"),
        ({"latencies": {"n" * 5000: HistogramData()}}, "5000 characters"),
        ({"wanted_keys": KeySketch(b"abc", b"a")}, "a sketch of two sizes"),
    ],
)
def test_measurement_that_can_not_be_is_refused(
    desk: Desk, fields: dict[str, Any], why: str
) -> None:
    request = SyncRequest("engine", desk.epoch, desk.seq + 1, **fields)
    with pytest.raises(MessageError, match=why):
        desk.actor.sync(encode(request))


def test_report_of_another_version_is_refused_with_both_versions(desk: Desk) -> None:
    for raw in (
        encode(replace(REPORT, node_id="new", version=PROTOCOL_VERSION + 1)),
        encode(OtherVersion(PROTOCOL_VERSION + 1)),
    ):
        with pytest.raises(VersionError) as caught:
            desk.actor.report(raw)
        assert f"protocol {PROTOCOL_VERSION + 1}" in str(caught.value)
        assert f"scheduler actor {PROTOCOL_VERSION}" in str(caught.value)
    assert "new" not in desk.actor._manager._nodes


def test_engine_of_another_version_hears_both_versions(desk: Desk) -> None:
    raw = desk.actor.attach(encode(OtherVersion(PROTOCOL_VERSION + 1)))
    error = decode(raw, EngineAttached).error
    assert f"protocol {PROTOCOL_VERSION + 1}" in error
    assert f"scheduler actor {PROTOCOL_VERSION}" in error


def test_report_that_would_use_up_all_generations_is_refused(desk: Desk) -> None:
    before = desk.actor._manager.epoch
    for fields in (
        {"scheduler_epoch": LAST_EPOCH + 1},
        {"highest_generation": MAX_GENERATION + 1},
        {"cleared": {"honest": MAX_GENERATION + 1}},
    ):
        with pytest.raises(MessageError):
            desk.actor.report(encode(replace(REPORT, node_id="new", **fields)))
    assert desk.actor._manager.epoch == before


def test_report_of_an_epoch_that_nobody_can_have_heard_of_changes_no_other(desk: Desk) -> None:
    """Neither does one of the highest that is believed: there are later ones."""
    for fields in (
        {"scheduler_epoch": LAST_EPOCH},
        {"highest_generation": MAX_GENERATION},
        {"cleared": {"honest": MAX_GENERATION, "": MAX_GENERATION}},
        {"scheduler_epoch": MAX_EPOCH},
    ):
        heard = decode(
            desk.actor.report(encode(replace(REPORT, node_id="new", **fields))), NodeReportReply
        )
        assert max(heard.cleared.values(), default=0) < MAX_GENERATION
        assert heard.epoch <= MAX_EPOCH + 1
        # Who has heard that says so, and is believed.
        desk.actor.report(encode(replace(REPORT, node_id="later", scheduler_epoch=heard.epoch)))
        desk.check_service()


@pytest.mark.parametrize("wrong", [None, 1.5, "1", 1 << 80, -(1 << 80), [1], math.nan])
def test_place_that_is_no_number_is_refused(desk: Desk, wrong: Any) -> None:
    for place in ((1, wrong), (wrong, 1)):
        with pytest.raises(MessageError):
            desk.actor.events(*place)
    with pytest.raises(MessageError):
        desk.actor.snapshot(wrong)


def test_operators_calls_with_wrong_types_are_refused(desk: Desk) -> None:
    wrong: Any = ["x"]
    for call in (desk.actor.clear, desk.actor.set_paused, desk.actor.detach):
        with pytest.raises(MessageError):
            call(wrong)
    assert desk.actor._manager.paused is False


def test_honest_peers_are_served_after_all_that(desk: Desk) -> None:
    desk.check_service()


# The NodeActor


class Nobody:
    """A `PeerTransport` without any node."""

    def start_read(self, source: Source, request: ReadRequest) -> Any:
        raise PeerError(f"node {source.node_id}: there is none")


@pytest.fixture(scope="module")
def keeper() -> Iterator[PoolKeeper]:
    made = PoolKeeper(PoolGeometry(16 * PAGE, 4 * PAGE), "")
    yield made
    made.pool._region.close()


def packed(numbers: list[int]) -> Numbers:
    """What is too large comes as something else that is absurd."""
    return Numbers(b"".join((number % (1 << 64)).to_bytes(8, "little") for number in numbers))


def replicas_of(sources: list[list[Any]], columns: list[list[int]], pending: list[int]) -> Replicas:
    names, epochs = sources
    keys, index, slots, generations = map(packed, columns)
    return Replicas(names, epochs, keys, index, slots, generations, pending)


REPLICAS = st.tuples(
    any_columns(SOURCE, NUMBER), any_columns(NUMBER, NUMBER, PLACE, AGE), NUMBERS
).map(lambda parts: replicas_of(*parts))
FETCHES = st.builds(
    FetchRequest,
    version=st.just(PROTOCOL_VERSION),
    namespace=NAME,
    node_epoch=sometimes(7, NUMBER),
    handles=HANDLES,
    slot_bytes=column(SIZE),
    sources=sometimes(Replicas(), REPLICAS),
    deadline_s=st.one_of(st.floats(max_value=0.01), st.sampled_from([math.inf, math.nan, 1e300])),
)


@settings(max_examples=80, deadline=None)
@given(request=FETCHES)
def test_absurd_fetches_are_refused_and_leave_no_slot_behind(
    keeper: PoolKeeper, request: FetchRequest
) -> None:
    result = FetchService(keeper, Epoch(7), Nobody()).fetch(request)
    assert len(result.refusals) == len(request.handles)
    assert Refusal.NONE not in result.refusals
    keeper.table.check()
    assert not keeper.table._writing
    assert keeper.highest_generation <= MAX_GENERATION


@settings(max_examples=100, deadline=None)
@given(handles=HANDLES, slot_bytes=column(SIZE), epoch=sometimes(7, NUMBER))
def test_absurd_reads_give_no_bytes(
    keeper: PoolKeeper, handles: Handles, slot_bytes: list[int], epoch: int
) -> None:
    service = ReadService(keeper, Epoch(7))
    request = ReadRequest(PROTOCOL_VERSION, "model", epoch, handles, slot_bytes)
    try:
        reply, data = service.read(request)
    except MessageError:
        return
    finally:
        assert service.reading == 0
    assert len(data) == 0
    assert Refusal.NONE not in reply.refusals


# Answers to an engine


@settings(max_examples=100, deadline=None)
@given(
    stored=sometimes(Handles(), HANDLES),
    granted=sometimes(Leases(), LEASES),
    replicas=sometimes(Replicas(), REPLICAS),
    asked=st.lists(KEY, max_size=2).map(Keys.of),
)
def test_answer_that_passes_can_be_applied(
    stored: Handles, granted: Leases, replicas: Replicas, asked: Keys
) -> None:
    from raykv.base.ids import EngineId
    from raykv.engine.view import EngineView

    request = SyncRequest("engine", 1, 1, asked=asked)
    reply = SyncReply(1, 1, 7, stored=stored, granted=granted, replicas=replicas)
    try:
        check_reply(reply, request, [0])
    except MessageError:
        return
    view = EngineView(EngineId("engine"), [0], 1.0, 8)
    view.attached(EngineAttached(1, 7))
    view.apply(reply, request)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), float("inf")])
def test_share_of_the_pool_that_can_not_be_is_refused(share: float) -> None:
    with pytest.raises(MessageError, match="of the pool"):
        check_attached(EngineAttached(1, lease_share=share))
    with pytest.raises(MessageError, match="of the pool"):
        check_reply(SyncReply(1, 1, lease_share=share), SyncRequest("engine", 1, 1), [0])


@pytest.mark.parametrize(
    "partial",
    [
        {2: Blocks(0, 1)},
        {-1: Blocks(0, 1)},
        {0: Blocks(0, 0)},
        {0: Blocks(-1, 3)},
        {0: Blocks(3, -1)},
        {0: Blocks(1, 1 << 32)},
        {1: ALL_BLOCKS, 0: Blocks(BIG, BIG)},
    ],
)
def test_blocks_that_no_chunk_of_the_question_can_have_are_refused(
    partial: dict[int, Blocks],
) -> None:
    reply = decode(encode(ReadReply(7, [0, 0], [], partial)), ReadReply)
    with pytest.raises(MessageError, match="invalid"):
        check_read_reply(reply, 2, [1, 1], with_checksums=False)
    valid = ReadReply(7, [0, 0], [], {0: Blocks(2, 2), 1: ALL_BLOCKS})
    check_read_reply(valid, 2, [1, 1], with_checksums=False)


@settings(max_examples=60, deadline=None)
@given(columns=any_columns(NUMBER, PLACE, AGE), lost=sometimes(LostReplicas(), LOST))
def test_result_of_a_fetch_that_passes_has_a_row_for_each_chunk(
    columns: list[list[int]], lost: LostReplicas
) -> None:
    refusals, slots, generations = columns
    result = FetchResult(7, refusals, slots, generations, lost=lost)
    try:
        check_fetched(result, 2)
    except RayKVError:
        return
    assert [len(each) for each in (result.refusals, result.slots, result.generations)] == [2] * 3
    assert len(lost.sources) == len(lost.keys) == len(lost.generations)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (math.nan, 0.0),
        (-1.0, 0.0),
        (-math.inf, 0.0),
        (2.0, 2.0),
        (math.inf, 3600.0),
        (1e300, 3600.0),
    ],
)
def test_deadline_of_a_fetch_is_bounded(said: float, meant: float) -> None:
    assert _bounded(said) == meant
