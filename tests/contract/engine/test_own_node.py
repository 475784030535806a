"""At which Ray node an engine is when raylets end and begin on its host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import pytest

from raykv.base.errors import ClusterError
from raykv.cluster.join import Raylet
from raykv.engine.own_node import OwnNode, RayHere

LONG_S = 10.0
HEAD = "head:1"


class PlayedRay(RayHere):
    """A host with raylets, and the one that this process is connected to."""

    def __init__(self, *names: str, driver: str) -> None:
        self.there: list[Raylet] = []
        self._num_begun = 0
        for name in names:
            self.begin(name)
        self.driver = driver
        self.num_joined = 0
        self.trouble = ""
        self.meanwhile = threading.Event()
        self.meanwhile.set()
        self.joining = threading.Event()

    def raylets(self) -> list[Raylet]:
        return list(self.there)

    def driver_node(self) -> str:
        return self.driver

    def rejoin(self, address: str) -> None:
        assert address == HEAD
        self.driver = ""
        self.joining.set()
        assert self.meanwhile.wait(LONG_S)
        if self.trouble:
            raise ClusterError(self.trouble)
        self.num_joined += 1
        self.driver = self.there[-1].node_id

    def end(self, name: str) -> None:
        self.there = [each for each in self.there if each.node_id != name]

    def begin(self, name: str, address: str = HEAD) -> None:
        self._num_begun += 1
        self.there.append(Raylet(name, address, 10.0 * self._num_begun))


def alone() -> tuple[PlayedRay, OwnNode]:
    """The only raylet of a host, to which the engine is connected."""
    here = PlayedRay("one", driver="one")
    return here, OwnNode(HEAD, "one", is_ours=True, here=here)


class Handle:
    """Stands for the handle of an actor with one method."""

    def __init__(self, reply: Callable[[], bytes] = lambda: b"answer") -> None:
        self.asked: list[bytes] = []
        self.reply = reply

    @property
    def ask(self) -> Handle:
        return self

    def remote(self, raw: bytes) -> Handle:
        self.asked.append(raw)
        return self

    def future(self) -> Future[bytes]:
        future: Future[bytes] = Future()
        if (answer := self.reply()) != b"silence":
            future.set_result(answer)
        return future


def connection_of(here: PlayedRay, place: OwnNode) -> int:
    """A call; the number of the connection that its handle is of."""

    def find() -> Handle:
        number = b"%d" % (here.num_joined + 1)
        return Handle(lambda: number)

    return int(place.call(find, LONG_S, "ask", b""))


def test_calls_do_not_wait_for_each_other_and_a_new_connection_waits_for_all() -> None:
    """The asking thread looks for an actor while Ray's head is away, and lines go on."""
    here, place = alone()
    has_begun, goes_on = threading.Event(), threading.Event()

    def found_late() -> Handle:
        has_begun.set()
        goes_on.wait(LONG_S)
        return Handle()

    calling = threading.Thread(target=place.call, args=(found_late, LONG_S, "ask", b""))
    calling.start()
    assert has_begun.wait(LONG_S)
    assert place.call(Handle, LONG_S, "ask", b"") == b"answer"
    here.end("one")
    here.begin("two")
    following = threading.Thread(target=place.follow)
    following.start()
    following.join(0.2)
    assert following.is_alive()
    assert here.num_joined == 0
    goes_on.set()
    following.join(LONG_S)
    calling.join(LONG_S)
    assert here.num_joined == 1


def test_engine_stays_while_its_raylet_runs() -> None:
    here, place = alone()
    here.begin("two")
    assert place.follow()
    assert (place.node_id, here.num_joined) == ("one", 0)


def test_engine_waits_while_no_raylet_of_its_cluster_has_begun(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, place = alone()
    here.end("one")
    here.begin("of-others", "others:1")
    for _ in range(3):
        assert not place.follow()
    assert place.is_gone
    assert (place.node_id, here.driver) == ("one", "one")
    assert caplog.text.count("start Ray on this host again") == 1
    assert connection_of(here, place) == 1


def test_engine_joins_again_at_the_next_raylet_of_its_host() -> None:
    here, place = alone()
    here.end("one")
    assert not place.follow()
    here.begin("two")
    assert place.follow()
    assert not place.is_gone
    assert (place.node_id, here.driver, here.num_joined) == ("two", "two", 1)
    assert connection_of(here, place) == 2
    assert place.follow()
    assert here.num_joined == 1


def test_engine_that_could_not_join_tries_again_and_nobody_calls_ray_meanwhile() -> None:
    here, place = alone()
    here.end("one")
    here.begin("two")
    here.trouble = "the head does not answer"
    with pytest.raises(ClusterError, match="the head does not answer"):
        place.follow()
    with pytest.raises(ClusterError, match="not connected"):
        connection_of(here, place)
    here.trouble = ""
    assert place.follow()
    assert place.node_id == "two"


def test_nobody_calls_ray_while_the_connection_is_made_anew() -> None:
    here, place = alone()
    here.end("one")
    here.begin("two")
    here.meanwhile.clear()
    follower = threading.Thread(target=place.follow)
    follower.start()
    assert here.joining.wait(LONG_S)
    called: list[int] = []

    def call() -> None:
        called.append(connection_of(here, place))

    caller = threading.Thread(target=call)
    caller.start()
    caller.join(0.2)
    assert called == []
    here.meanwhile.set()
    for thread in (follower, caller):
        thread.join(LONG_S)
    assert called == [2]


def test_engine_at_another_raylet_than_its_connection_moves_without_a_new_one() -> None:
    here = PlayedRay("head", "one", driver="head")
    place = OwnNode(HEAD, "one", is_ours=True, here=here)
    here.end("one")
    assert not place.follow()
    here.begin("two")
    assert place.follow()
    assert (place.node_id, here.driver, here.num_joined) == ("two", "head", 0)


def test_connection_is_made_anew_where_only_its_raylet_has_ended() -> None:
    here = PlayedRay("head", "one", driver="head")
    place = OwnNode(HEAD, "one", is_ours=True, here=here)
    here.end("head")
    assert place.follow()
    assert (place.node_id, here.driver, here.num_joined) == ("one", "one", 1)


def test_connection_of_somebody_else_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    here = PlayedRay("one", driver="one")
    place = OwnNode(HEAD, "one", is_ours=False, here=here)
    here.end("one")
    here.begin("two")
    assert not place.follow()
    assert not place.follow()
    assert (place.node_id, here.num_joined) == ("one", 0)
    assert caplog.text.count("start this process again") == 1
    assert place.leave(LONG_S)
    assert here.driver == "one"


def test_raylets_that_cannot_be_seen_count_as_there() -> None:
    here = PlayedRay(driver="hidden")
    place = OwnNode(HEAD, "hidden", is_ours=True, here=here)
    here.begin("two")
    assert place.follow()
    assert place.node_id == "hidden"


# Calls


def test_handle_of_an_earlier_connection_is_not_used() -> None:
    here, place = alone()
    handles = [Handle()]
    call = partial(place.call, lambda: handles[-1], LONG_S)
    assert call("ask", b"1") == b"answer"
    here.end("one")
    here.begin("two")
    assert place.follow()
    handles.append(Handle())
    assert call("ask", b"2") == b"answer"
    assert [handle.asked for handle in handles] == [[b"1"], [b"2"]]
    here.driver = ""
    with pytest.raises(ClusterError, match="not connected"):
        call("ask", b"3")


@pytest.mark.parametrize("reply", [b"silence", b""])
def test_actor_that_failed_is_looked_for_again(reply: bytes) -> None:
    def fail() -> bytes:
        if reply:
            return reply
        raise ConnectionError("the actor died")

    handles = [Handle(fail)]
    _, place = alone()
    call = partial(place.call, lambda: handles[-1], 0.05)
    with pytest.raises((ConnectionError, TimeoutError)):
        call("ask", b"1")
    handles.append(Handle())
    assert [call("ask", b"2"), call("ask", b"3")] == [b"answer", b"answer"]
    assert handles[1].asked == [b"2", b"3"]
