"""A NodeActor whose pool does not fit; the class itself, without Ray."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._private import worker

import raykv.node.actor
import raykv.node.reports
from raykv.base.errors import SettingError
from raykv.base.settings import NodeOptions
from raykv.node.actor import NodeActor, is_draining
from raykv.node.reports import Reports
from raykv.node.service import boot_life
from raykv.protocol.columns import Keys, Numbers
from raykv.protocol.copies import Fetch
from raykv.protocol.findings import Endpoint, HostFacts, HostQuestion
from raykv.protocol.framing import decode, encode
from raykv.protocol.node import NodeDescription
from raykv.protocol.operator import PinsHere

POOL_BYTES = 1 << 60
HAS_REPORTED = threading.Event()
_numbers = itertools.count()


Make = Callable[..., NodeActor]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """NodeActors whose first report never ends: the next one would look for Ray."""
    made: list[NodeActor] = []

    def report(_: Reports) -> None:
        HAS_REPORTED.set()
        threading.Event().wait()

    monkeypatch.setattr(Reports, "_report", report)
    HAS_REPORTED.clear()

    def one(**options: Any) -> NodeActor:
        place = f"raykv/test-actor/{os.getpid()}/{next(_numbers)}"
        made.append(NodeActor("node", place, 1 << 20, 1 << 20, "", NodeOptions(**options)))
        return made[-1]

    yield one
    for actor in made:
        actor._service.stop()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> NodeActor:
    return without_a_pool(monkeypatch, POOL_BYTES)


def without_a_pool(
    monkeypatch: pytest.MonkeyPatch, pool_bytes: int = 1 << 20, path: str = ""
) -> NodeActor:
    monkeypatch.setattr(raykv.node.actor, "NODE_ROOM_GRACE_S", 0.0)
    return NodeActor("node", "raykv/test-refused", pool_bytes, 1 << 20, path)


def refusal_of(actor: NodeActor) -> str:
    return decode(actor.describe(), NodeDescription).refusal


def test_first_report_waits_for_no_heartbeat(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raykv.base.deadlines.HEARTBEAT_S", 3600.0)
    make()
    assert HAS_REPORTED.wait(10.0)


def test_life_is_not_of_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    before = boot_life()
    monkeypatch.setattr(time, "time", lambda: -1e9)
    monkeypatch.setattr(time, "time_ns", lambda: -(10**18))
    life = boot_life()
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    assert before <= life < (up_s + 1.0) * 1e6


def test_node_that_ray_drains_leaves(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raykv.base.deadlines.SELDOM_S", 0.0)
    drains = iter([False, False, True])
    monkeypatch.setattr(raykv.node.actor, "is_draining", lambda _: next(drains))
    keeper = make()._keeper
    with keeper.lock:
        assert keeper.lock.wait_for(lambda: keeper.owner.is_leaving, 10.0)


def test_ray_says_which_nodes_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    class Head:
        def get_draining_nodes(self, timeout: float) -> dict[str, int]:
            assert timeout > 0
            return {"one": 0}

    assert not is_draining("one")
    monkeypatch.setattr(worker.global_worker, "gcs_client", Head(), raising=False)
    assert is_draining("one")
    assert not is_draining("two")


def test_no_offer_is_made_while_nothing_would_end_it(make: Make) -> None:
    with pytest.raises(SettingError, match="NIXL is not open"):
        make().offer(b"")


def test_share_of_pins_is_the_one_that_was_set(make: Make) -> None:
    assert decode(make(pin_share=0.5).ask("pins"), PinsHere).node.quota_bytes == 1 << 19


def test_node_whose_pool_does_not_fit_says_why_whatever_it_is_asked(refused: NodeActor) -> None:
    told = decode(refused.describe(), NodeDescription)
    assert f"pool_bytes={POOL_BYTES}" in told.refusal
    assert "would fit" in told.refusal
    assert told.pool_bytes == POOL_BYTES
    facts = decode(refused.host(encode(HostQuestion())), HostFacts)
    assert "does not fit" in facts.refusal
    assert facts.pool_bytes == 0
    assert facts.limits
    assert facts.wall_time > 0
    order = Fetch(1, 1, "model", Keys.of([b"k"]), Numbers.of([4096]))
    with pytest.raises(SettingError, match="does not fit"):
        refused.fetch(encode(order))
    with pytest.raises(SettingError, match="does not fit"):
        refused.ask("pins")


def test_pool_file_that_cannot_be_made_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "/nowhere/pool" in refusal_of(without_a_pool(monkeypatch, path="/nowhere/pool"))


def test_journal_that_is_a_link_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pool.new").symlink_to(tmp_path / "target")
    path = str(tmp_path / "pool")
    actor = without_a_pool(monkeypatch, path=path)
    assert "is a symbolic link, which is not followed" in refusal_of(actor)
    # It is tried again and again: nothing of it is left.
    assert path not in Path("/proc/self/maps").read_text()
    assert not (tmp_path / "target").exists()


def test_facts_name_ports_that_cannot_be_reached(refused: NodeActor) -> None:
    closed = Endpoint("127.0.0.1", 1, "the port of nobody")
    facts = decode(refused.host(encode(HostQuestion([closed]))), HostFacts)
    assert facts.unreached == [(closed, "Connection refused")]
