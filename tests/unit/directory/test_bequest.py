"""What a scheduler actor leaves to its next life, with Ray's store played by a dictionary."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raykv.base.errors import ClusterError, MessageError
from raykv.base.ids import EVERY_NAMESPACE, Epoch, make_generation
from raykv.directory import bequest, steward
from raykv.directory.actor import SchedulerActor
from raykv.directory.steward import Steward
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.node import NodeReport, NodeReportReply
from raykv.protocol.operator import KeptLife, PinOrder, Quota, QuotaAnswer, TenantPage
from tests.fixtures.waiting import wait_until

FAR = (1 << 30) + 5
"""An epoch that no clock of this century gives."""


class Store(dict[str, bytes]):
    """What was left, and who leaves something there."""

    def __init__(self) -> None:
        super().__init__()
        self.stewards: list[Steward] = []


def start() -> SchedulerActor:
    return SchedulerActor("here", "lru")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    kept = Store()

    def leave(name: str, value: bytes | None) -> None:
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = value

    begin, write = Steward.start, Steward._write_all

    def begun(steward: Steward) -> list[PinOrder]:
        kept.stewards.append(steward)
        return begin(steward)

    def write_all(steward: Steward) -> None:
        # Those of other tests' actors go on trying, and may not come into this store.
        if steward in kept.stewards:
            write(steward)

    monkeypatch.setattr(Steward, "start", begun)
    monkeypatch.setattr(Steward, "_write_all", write_all)
    monkeypatch.setattr(bequest, "leave", leave)
    monkeypatch.setattr(
        bequest, "entries", lambda: [bequest.Entry(name, value) for name, value in kept.items()]
    )
    yield kept
    # Else it comes into the next one's store.
    wait_until(lambda: not any(each._unwritten for each in kept.stewards), 10.0, "all is left")


def life(store: Store) -> KeptLife:
    return decode(store.get(bequest.LIFE, encode(KeptLife())), KeptLife)


def report(actor: SchedulerActor) -> NodeReportReply:
    message = NodeReport(
        version=PROTOCOL_VERSION,
        node_id="node",
        epoch=1,
        seq=1,
        pool_bytes=1 << 20,
        slab_bytes=1 << 20,
        highest_generation=0,
        scheduler_epoch=0,
    )
    return decode(actor.report(encode(message)), NodeReportReply)


def test_clearing_is_known_to_the_next_life_once_it_is_said_to_be_kept(
    store: Store,
) -> None:
    first = start()
    cleared = first.clear(None)
    wait_until(first.has_kept_clearings, 10.0, "it is kept")
    assert life(store).cleared == cleared
    assert cleared.keys() == {EVERY_NAMESPACE}
    told = report(start())
    assert told.cleared == cleared
    assert make_generation(Epoch(told.epoch), 0) > cleared[EVERY_NAMESPACE]


def test_next_life_grants_above_a_counter_that_has_risen_past_the_clock(
    store: Store,
) -> None:
    store[bequest.LIFE] = encode(KeptLife(FAR))
    assert report(start()).epoch == FAR + 1
    wait_until(lambda: life(store).epoch == FAR + 1, 10.0, "it is left to the one after")
    assert report(start()).epoch == FAR + 2


def test_next_life_begins_with_the_clock_when_what_is_left_can_not_be_read(
    store: Store,
) -> None:
    store[bequest.LIFE] = b"no struct"
    assert 0 < report(start()).epoch < FAR


def test_life_does_not_begin_without_what_is_left_while_the_head_node_is_slow(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what was cleared could come back, and the next life would not know of it either."""
    monkeypatch.setattr(steward, "RECONCILE_PAUSES_S", (0.01, 0.01))
    cleared = {"model": int(make_generation(Epoch(FAR), 7))}
    store[bequest.LIFE] = encode(KeptLife(FAR, cleared))
    entries, failures = bequest.entries, iter(range(3))

    def slow() -> Iterator[bequest.Entry]:
        if next(failures, None) is not None:
            raise TimeoutError("the head node is busy")
        return iter(entries())

    monkeypatch.setattr(bequest, "entries", slow)
    assert report(start()).cleared == cleared
    assert life(store).cleared == cleared


def test_actor_does_not_begin_where_what_is_left_can_not_be_had(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> Iterator[bequest.Entry]:
        raise TimeoutError("the head node is away")

    monkeypatch.setattr(bequest, "entries", away)
    monkeypatch.setattr(steward, "INHERIT_S", 0.0)
    monkeypatch.setattr(steward, "RECONCILE_PAUSES_S", (0.01, 0.01))
    with pytest.raises(ClusterError, match="what an earlier life has left can't be read"):
        start()


def test_nobody_clears_the_namespace_without_a_name(store: Store) -> None:
    with pytest.raises(MessageError, match="the namespace ''"):
        start().clear(EVERY_NAMESPACE)


def quota(name: str) -> bytes:
    return encode(Quota(PROTOCOL_VERSION, name, name, 0.2, 0.5))


def test_quotas_are_known_to_the_next_life_until_they_are_removed(store: Store) -> None:
    first = start()
    for name in ("acme", "other"):
        assert not decode(first.set_quota(quota(name)), QuotaAnswer).error
    assert first.remove_quota("other")
    wait_until(lambda: "quota:acme" in store and "quota:other" not in store, 10.0, "it is kept")
    tenants = decode(start().tenants(), TenantPage).tenants
    assert [(each.name, each.guaranteed, each.most) for each in tenants if each.has_quota] == [
        ("acme", 0.2, 0.5)
    ]


def test_quota_that_is_invalid_is_refused_and_not_kept(store: Store) -> None:
    first = start()
    wrong = Quota(PROTOCOL_VERSION, "acme", "acme", 0.5, 0.2)
    with pytest.raises(MessageError, match="a share that is not from 0 to 1"):
        first.set_quota(encode(wrong))
    too_much = Quota(PROTOCOL_VERSION, "acme", "acme", 0.8)
    assert "can't be guaranteed" in decode(first.set_quota(encode(too_much)), QuotaAnswer).error
    assert decode(first.tenants(), TenantPage).tenants == []
    assert "quota:acme" not in store
