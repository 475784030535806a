"""Messages: what is received is sound, whatever was sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.base.errors import MessageError, VersionError
from raykv.base.ids import ALL_BLOCKS, MAX_KEY_BYTES, NO_BLOCKS, Blocks, Key, Namespace, Stamp
from raykv.protocol import copies, engine, framing, operator, wire
from raykv.protocol.columns import (
    MAX_KEYS,
    MAX_NAME,
    MAX_ROWS,
    Keys,
    NamedKeys,
    Numbers,
    Source,
    SourceKind,
    SourceRows,
    Texts,
)
from raykv.protocol.framing import encode, receive
from raykv.protocol.listing import (
    ListedRow,
    ListedRows,
    ListingPart,
    Position,
    Reason,
    Where,
)
from raykv.protocol.node import Marks, Report, ReportAnswer
from raykv.protocol.reader import PrefixQuery
from raykv.protocol.sessions import SessionNews, SessionOrder, SessionWord
from raykv.protocol.worker import JobResults

BIG = (1 << 63) - 1
ONE, TWO = Numbers.of([0]), Numbers.of([0, 1])
KEYS = Keys.of([b"one", b"two"])
NAMED = NamedKeys(Texts.of("ab"), KEYS)
ROWS = [
    ListedRow(Namespace("a"), Key(b"one"), Where.RAM, ALL_BLOCKS, Reason.STORED),
    ListedRow(Namespace("b"), Key(b"two"), Where.NOWHERE, NO_BLOCKS, Reason.EVICTED),
    ListedRow(
        Namespace("a"), Key(b"x" * 36), Where.RAM | Where.COMING, Blocks(2, 3), Reason.COMING
    ),
]
PART = ListingPart(False, Position(1, 2, 0), Position(1, 3, 0), ListedRows.of(ROWS[:1]))

FAR = Source("far", SourceKind.DISK)
SOURCES = SourceRows.of([[FAR], [FAR]])

PIN: dict[str, Any] = {"namespace": "n", "digest": b"", "num_keys": 1, "left_s": 1.0}

SOUND: list[msgspec.Struct] = [
    engine.EngineHello("engine", 7, "a", slot_bytes={0: 4096}, traits={"model": "m"}),
    engine.Welcome(3, "no room"),
    engine.Tell(7, 1, "a", engine.FoundKeys(KEYS, Texts.of(["", "t"])), counters={"hits": 3}),
    engine.ChangesQuery(7, "a", Position(1, 2, 0), 5),
    engine.ChangesAnswer(PART, engine.PlaceFacts(Stamp(1, 2), store_share=16)),
    engine.Ask("engine", 7, "a", ["here"], KEYS, Keys.of([b"three"])),
    engine.AskAnswer(3, SOURCES, TWO, ONE, b"\3", ONE),
    Report("here", 1, 4, PART, Stamp(1, 2), spaces={"a": 3}),
    ReportAnswer(3, Position(1, 2, 0), Stamp(1, 2), marks=Marks(1, 2, NAMED, NAMED)),
    copies.CopyJob(1, 0, "a", KEYS, TWO, TWO, TWO, Stamp(1, 2), "t"),
    copies.CopyResult(1, 2, 3, PART.rows, TWO, b"\1\2"),
    engine.Fetched(copies.CopyResult(1, 2, 3, PART.rows, TWO, b"\1\2")),
    copies.Fetch(1, 7, "a", KEYS, TWO, SOURCES),
    copies.Read("a", KEYS, TWO),
    copies.ReadReply(1, 2, b"\0\1", PART.rows, [5], ONE, ONE),
    ListedRows.of(ROWS),
    PART,
    SessionNews("s", SessionWord.PAUSED, Keys.of([b"k"]), 1.0, 9),
    operator.PinOrder("o", "p", "space", Keys.of([b"k"]), 1.0, 9),
    operator.PoolWish(pool_bytes=1 << 30),
    operator.OrdersDocument(Stamp(1, 1), shares={"t": operator.OrderedShare("t")}),
    PrefixQuery("space", "0:16 1:32/8", [b"k"] * 5, [2, 1, 1, 1]),
    NAMED,
]


@pytest.mark.parametrize("message", SOUND, ids=lambda each: type(each).__name__)
def test_message_is_the_same_on_the_other_side(message: msgspec.Struct) -> None:
    assert receive(encode(message), type(message), "a peer", "this test") == message


def test_rows_of_a_listing_are_read_as_they_were_made() -> None:
    assert list(ListedRows.of(ROWS)) == ROWS
    assert list(ListedRows.of([])) == []


def of(kind: type[msgspec.Struct]) -> msgspec.Struct:
    return next(each for each in SOUND if type(each) is kind)


WRONG: list[tuple[type[msgspec.Struct], dict[str, Any]]] = [
    (engine.EngineHello, {"namespace": ""}),
    (engine.EngineHello, {"life": -1}),
    (engine.EngineHello, {"life": 0}),
    (engine.EngineHello, {"slot_bytes": {-1: 4096}}),
    (engine.EngineHello, {"slot_bytes": {1 << 32: 4096}}),
    (engine.EngineHello, {"num_ranks": 0}),
    (engine.EngineHello, {"slot_bytes": {0: -1}}),
    (engine.EngineHello, {"engine_id": "e" * 5000}),
    (engine.Tell, {"seq": 1 << 63}),
    (engine.Tell, {"counters": {"hits": -1}}),
    (engine.ChangesQuery, {"most": MAX_KEYS + 1}),
    (engine.ChangesQuery, {"most": -1}),
    (engine.ChangesAnswer, {"facts": engine.PlaceFacts(store_share=0)}),
    (engine.Ask, {"places": []}),
    (engine.Ask, {"keys": Keys.of([b"x"] * (engine.MOST_ASKED + 1))}),
    (engine.Ask, {"coming": Keys.of([b"x" * 200])}),
    (engine.Ask, {"keys": (bytes(71), b"\x24")}),
    (engine.Ask, {"keys": (bytes(35), b"\x24")}),
    (engine.Ask, {"keys": (bytes(72), b"\0")}),
    (engine.Ask, {"keys": (b"", b"\0")}),
    (engine.Ask, {"keys": (bytes(36), b"")}),
    (engine.Ask, {"keys": (bytes(36), b"\x24\x01")}),
    (engine.Ask, {"keys": (bytes(38), b"\x24\x01")}),
    (engine.Ask, {"keys": (bytes(2 * 129), b"\x81")}),
    (engine.AskAnswer, {"sources": ([("far", 3)], ONE, ONE)}),
    (engine.AskAnswer, {"sources": ([FAR], TWO, ONE)}),
    (engine.AskAnswer, {"sources": ([FAR], ONE, Numbers.of([1]))}),
    (engine.AskAnswer, {"sources": ([FAR], ONE, Numbers.of([-1]))}),
    (engine.AskAnswer, {"reasons": b"\x09"}),
    (engine.AskAnswer, {"reasons": b""}),
    (Report, {"life": 2}),
    (Report, {"life": 0}),
    (Report, {"node_id": ""}),
    (Report, {"orders": Stamp(-1, 0)}),
    (ReportAnswer, {"pause_ms": -1}),
    (ReportAnswer, {"pause_ms": 5000}),
    (ReportAnswer, {"left": ["a"] * 300}),
    (copies.CopyJob, {"direction": 2}),
    (copies.CopyJob, {"num_blocks": Numbers.of([1, -1])}),
    (copies.CopyJob, {"first_block": Numbers.of([1, 1 << 62])}),
    (copies.CopyJob, {"first_block": ONE}),
    (copies.CopyJob, {"namespace": ""}),
    (copies.CopyJob, {"orders": Stamp(0, -5)}),
    (
        copies.CopyJob,
        {"capture": copies.Capture("r", bytes(8), 1, 1, "float32", 1, [1, 1, 1], 1, 1.0)},
    ),
    (copies.CopyResult, {"refusals": b""}),
    (copies.Fetch, {"sources": ([FAR], Numbers.of([0, 2]), Numbers.of([0, 0]))}),
    (copies.Fetch, {"sources": ([FAR], TWO, Numbers.of([0, 1]))}),
    (copies.Fetch, {"sources": ([FAR], TWO, ONE)}),
    (copies.Fetch, {"deadline_s": -1.0}),
    (copies.Fetch, {"slot_bytes": ONE}),
    (copies.Read, {"keys": Keys.of([b"one", b""])}),
    (ListedRows, {"where": b"\x01\x00"}),
    (ListedRows, {"where": b"\x01\x00\x08"}),
    (ListedRows, {"reasons": b"\x01\x03\x08"}),
    (ListedRows, {"namespaces": (["a", "b"], Numbers.of([0, 1, 2]))}),
    (ListedRows, {"namespaces": (["a", "b"], Numbers.of([0, 1, -1]))}),
    (ListedRows, {"namespaces": (["a", "b" * 5000], Numbers.of([0, 1, 0]))}),
    (ListedRows, {"num_blocks": Numbers.of([1, 0, -1])}),
    (ListedRows, {"num_blocks": Numbers.of([1, 0, 1 << 40])}),
    (ListedRows, {"first_block": Numbers.of([-1, 0, 0])}),
    (ListedRows, {"keys": Keys.of([b"one", b"two", b"x" * 200])}),
    (ListedRows, {"keys": Keys.of([b"one", b"two", b""])}),
    (ListedRows, {"keys": KEYS}),
    (ListingPart, {"start": Position(), "end": Position()}),
    (ListingPart, {"end": Position(2, 3)}),
    (ListingPart, {"end": Position(1, 3, 0, 2)}),
    (SessionNews, {"session": ""}),
    (SessionNews, {"session": "s" * 129}),
    (SessionNews, {"keys": Keys.of([bytes(MAX_KEY_BYTES + 1)])}),
    (SessionNews, {"keys": Keys.of([b"k"] * (MAX_ROWS + 1))}),
    (SessionNews, {"word": SessionWord.USED}),
    (SessionNews, {"word": 9}),
    (SessionNews, {"pause_s": 0.0}),
    (SessionNews, {"pause_s": -1.0}),
    (SessionNews, {"pause_s": float("nan")}),
    (SessionNews, {"pause_s": 1e9}),
    (SessionNews, {"priority": 10}),
    (SessionNews, {"priority": -1}),
    (operator.PinOrder, {"order_id": ""}),
    (operator.PinOrder, {"order_id": "x" * 200}),
    (operator.PinOrder, {"pin_id": ""}),
    (operator.PinOrder, {"pin_id": "p" * 5000}),
    (operator.PinOrder, {"namespace": ""}),
    (operator.PinOrder, {"keys": Keys()}),
    (operator.PinOrder, {"keys": Keys.of([b"k"] * (operator.MAX_ORDERED + 1))}),
    (operator.PinOrder, {"ttl_s": 0.0}),
    (operator.PinOrder, {"ttl_s": 1e9}),
    (operator.PinOrder, {"ttl_s": float("nan")}),
    (operator.PinOrder, {"priority": 0}),
    (operator.PinOrder, {"priority": 10}),
    (operator.PoolWish, {"on": "x" * 5000}),
    (operator.PoolWish, {"pool_bytes": -1}),
    (operator.PoolWish, {"slab_bytes": 0}),
    (operator.PoolWish, {"metrics": ("auto", "x" * 5000)}),
    (operator.OrdersDocument, {"stamp": [1]}),
    (operator.OrdersDocument, {"stamp": [(1 << 64) - 1, 1]}),
    (operator.OrdersDocument, {"floors": {"a": -1}}),
    (operator.OrdersDocument, {"floors": {"a": 1 << 63}}),
    (operator.OrdersDocument, {"shares": {"t": {"name": "t", "most": 1.5}}}),
    (operator.OrdersDocument, {"pins": {"p": {**PIN, "left_s": -1.0}}}),
    (operator.OrdersDocument, {"pins": {str(at): PIN for at in range(257)}}),
    (operator.OrdersDocument, {"done": {"x": [1, -1]}}),
    (operator.OrdersDocument, {"done": {str(at): [1, 1] for at in range(65)}}),
    (operator.OrdersDocument, {"namings": {1: [[1, 1], "b" * 5000]}}),
    (operator.OrdersDocument, {"namings": {1: [[1, -1], "b"]}}),
    (operator.OrdersDocument, {"namings": {"a": [[1, 1], "b"]}}),
    (PrefixQuery, {"namespace": ""}),
    (PrefixQuery, {"namespace": "x" * 1000}),
    (PrefixQuery, {"keys": [b""] * 5}),
    (PrefixQuery, {"keys": [b"x" * 1000] * 5}),
    (PrefixQuery, {"keys": [b"k"] * (MAX_KEYS + 1), "counts": [MAX_KEYS + 1, 0]}),
    (PrefixQuery, {"chunks": ""}),
    (PrefixQuery, {"chunks": "0:0"}),
    (PrefixQuery, {"chunks": "no"}),
    (PrefixQuery, {"chunks": "0:16 " * 1000}),
    (PrefixQuery, {"chunks": "0:16 0:32"}),
    (PrefixQuery, {"chunks": f"0:{10**30} 1:1"}),
    (PrefixQuery, {"counts": [5]}),
    (PrefixQuery, {"counts": [2, 1, 1]}),
    (PrefixQuery, {"counts": [2, 1, 1, 2]}),
    (PrefixQuery, {"counts": [7, -1, -1, 0]}),
    (NamedKeys, {"namespaces": (["a", "b"], ONE)}),
    (NamedKeys, {"namespaces": (["a", "b"], Numbers.of([0, 2]))}),
    (NamedKeys, {"namespaces": ["a", "b" * 5000]}),
]


@pytest.mark.parametrize(("kind", "fields"), WRONG, ids=lambda value: str(value)[:60])
def test_what_no_honest_peer_sends_is_refused(
    kind: type[msgspec.Struct], fields: dict[str, Any]
) -> None:
    sound = of(kind)
    told = {name: getattr(sound, name) for name in kind.__struct_fields__} | fields
    is_array = kind.__struct_config__.array_like
    raw = msgspec.msgpack.encode([*told.values()] if is_array else told)
    with pytest.raises(MessageError):
        receive(raw, kind, "a peer", "this test")


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-1, (1 << 64) - 1),
        st.floats(),
        st.binary(max_size=40),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=6), st.dictionaries(st.text(max_size=8), inner, max_size=6)
    ),
    max_leaves=12,
)


@given(data=st.data(), message=st.sampled_from(SOUND))
def test_one_field_of_anything_is_refused_or_can_be_read(
    data: Any, message: msgspec.Struct
) -> None:
    """Nothing but a MessageError comes of what was sent, and what passes can be read."""
    kind = type(message)
    told = msgspec.to_builtins(message, builtin_types=(bytes,))
    columns = told if isinstance(told, list) else list(told)
    at = data.draw(st.sampled_from(range(len(columns))))
    told[at if isinstance(told, list) else columns[at]] = data.draw(anything)
    try:
        found = receive(msgspec.msgpack.encode(told), kind, "a peer", "this test")
    except (MessageError, VersionError):
        return
    readers: dict[type, Callable[[Any], object]] = {
        NamedKeys: list,
        engine.AskAnswer: lambda answer: list(answer.sources.key_index),
        copies.CopyResult: lambda result: list(result.rows),
    }
    readers.get(kind, encode)(found)


def test_message_of_this_version_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "introduction", None)
    for kind in (engine.EngineHello, engine.Tell, engine.ChangesQuery):
        message = of(kind)
        assert receive(encode(message), engine.EngineMessage, "an engine", "this test") == message


def test_order_that_contradicts_itself_is_no_message() -> None:
    raw = msgspec.msgpack.encode({"namespace": "a", "news": ["s", 2]})
    with pytest.raises(msgspec.ValidationError, match="a pause of 0"):
        framing.decode(raw, SessionOrder)
    with pytest.raises(MessageError, match="an operator sent this test no SessionOrder"):
        receive(raw, SessionOrder, "an operator", "this test")
    news = SessionNews("s", SessionWord.OVER, Keys.of([b"k"]))
    with pytest.raises(MessageError, match="names keys"):
        SessionOrder("a", news)


@pytest.mark.parametrize("width", [1, 36, MAX_KEY_BYTES])
def test_result_of_the_largest_job_fits_into_a_frame(width: int) -> None:
    # Keys of two lengths need a byte more each.
    last = bytes(2 if width == 1 else 1)
    most = min(MAX_ROWS, (copies.MOST_RESULT_BYTES - len(last)) // (width + copies.MOST_ROW_BYTES))
    keys = [*[b"k" * width] * (most - 1), last]
    assert isinstance(passed_job(keys), copies.CopyJob)
    if most < MAX_ROWS:
        with pytest.raises(MessageError, match="chunks in one job"):
            passed_job([keys[0], keys[0], *keys])
    failed = Numbers.of(range(most))
    result = copies.CopyResult(BIG, BIG, BIG, rows_of(keys), failed, bytes([1]) * most, BIG, 1.0)
    assert len(wire.frame(JobResults([result], {BIG: BIG}))) <= wire.MAX_FRAME_BYTES


def test_more_rows_than_a_message_has_are_refused() -> None:
    assert len(rows_of([b"k"] * MAX_ROWS).keys) == MAX_ROWS
    with pytest.raises(ValueError, match="keys"):
        rows_of([b"k"] * (MAX_ROWS + 1))


def rows_of(keys: list[bytes]) -> ListedRows:
    """Whole chunks in RAM, of the longest namespace."""
    count = len(keys)
    nothing = Numbers(bytes(8 * count))
    whole = Numbers.of([ALL_BLOCKS.length] * count)
    where, why = bytes([Where.RAM]) * count, bytes([Reason.STORED]) * count
    return ListedRows(Texts(["n" * MAX_NAME], nothing), Keys.of(keys), where, nothing, whole, why)


def passed_job(keys: list[bytes]) -> copies.CopyJob:
    """What arrives of a job of these."""
    count = Numbers(bytes(8 * len(keys)))
    job = copies.CopyJob(1, 0, "a", Keys.of(keys), count, count)
    return receive(encode(job), copies.CopyJob, "a worker", "this test")
