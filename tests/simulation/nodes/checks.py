"""What holds when the faults have stopped and everybody has talked for a while."""

from __future__ import annotations

import random
from collections import defaultdict

import raykv.node.pool.reporting
from raykv.base.ids import SLOT_ALIGNMENT, Key, Namespace, NodeId, Stamp, group_of
from raykv.node.pool.records import ChunkState, Standing
from raykv.protocol.listing import Where
from tests.fixtures.directory.reporting import sizes
from tests.fixtures.node.owned_pool import num_open_jobs
from tests.simulation.nodes.cluster import Cluster
from tests.simulation.nodes.engine import PlayedEngine
from tests.simulation.nodes.models import WHOLE, Prompt
from tests.simulation.nodes.reader import FoldingReader
from tests.simulation.wire import Manners

ROUND_S = 0.5
LONGEST_TALK_S = 60.0

MOST_ROUNDS = 30
"""Of a request that nothing befalls."""

LEAST_MET = 1.0

MOST_FILLED = 3
"""Prompts that an engine has at a time while it fills its pools."""

MOST_FILLS = 20
"""More than the largest pool takes, but for that of a calm world."""

AWAY_S = 75.0
"""So long the scheduler actor is away: longer than anything that it has said counts."""

MOST_AGAIN = 2
"""Requests for a chunk after the first one, until it is found in a pool that is full."""

PAUSE_ROUNDS = 12
"""Of two seconds, in which nobody asks for anything meanwhile."""

NEW_DOCUMENT = 1000
"""No document of the world has this number, nor one after it."""


def check_calm(cluster: Cluster) -> None:
    """In a world without faults, what was stored long ago was found."""
    for engine in cluster.engines:
        met, expected = engine.num_met, engine.num_expected
        assert met >= LEAST_MET * expected, f"{engine} has found {met} of {expected} chunks"


def settle(cluster: Cluster, reader: FoldingReader) -> None:
    """Stop the faults, let everybody talk, and compare what they know."""
    rng = random.Random(0)
    end_faults(cluster)
    talk_until_quiet(cluster, rng, 12.0)
    check_copies_end(cluster)
    let_time_pass(cluster)
    talk_until_quiet(cluster, rng)
    check_orders(cluster)
    check_nodes(cluster)
    check_directory(cluster)
    check_reader(cluster, reader)
    check_views(cluster)
    check_spares(cluster)
    check_prompts_are_found(cluster, rng)
    talk_until_quiet(cluster, rng)
    check_directory(cluster)
    check_reader(cluster, reader)
    if not cluster.is_calm:
        check_stores_go_on(cluster, rng, reader)


# Talking


def end_faults(cluster: Cluster) -> None:
    """Nothing is cut, frozen or down any more, nor leaves, and nobody waits for what was lost."""
    cluster.wire.manners = Manners()
    cluster.sockets.manners = Manners(disorder=1.0)
    cluster.wire.cut.clear()
    for node in cluster.nodes.values():
        node.pool.is_leaving = False
        if node.is_frozen:
            node.thaw()
    while cluster.ghosts:
        cluster.ghosts.pop().thaw()
    for engine in cluster.engines:
        engine.is_frozen = False
    if cluster.head.is_down:
        cluster.head.begin()
    cluster.head.thaw()
    deliver_all(cluster)
    cluster.wire.lose_all_patience()


def deliver_all(cluster: Cluster) -> None:
    """Whatever is on the wires arrives, and what is said in answer."""
    while not (cluster.wire.is_idle and cluster.sockets.is_idle):
        cluster.wire.step()
        cluster.sockets.step()


def talk_until_quiet(cluster: Cluster, rng: random.Random, at_least_s: float = 0.0) -> None:
    """Rounds without faults, until nobody has news."""
    until = cluster.now + at_least_s
    give_up_at = cluster.now + at_least_s + LONGEST_TALK_S
    quiet_rounds = 0
    while cluster.now < until or quiet_rounds < 3:
        assert cluster.now < give_up_at, f"there is no end of news: {_who_is_busy(cluster)}"
        before = picture(cluster)
        talk(cluster, rng)
        is_quiet = picture(cluster) == before and not _who_is_busy(cluster)
        quiet_rounds = quiet_rounds + 1 if is_quiet else 0
    cluster.check()


def talk(cluster: Cluster, rng: random.Random, *, with_head: bool = True) -> None:
    """One round: all work is done, and everybody exchanges some messages."""
    cluster.now += ROUND_S
    cluster.tick += 1
    for engine in cluster.engines:
        if engine.view.has_left and not engine.view.is_clearing:
            engine.enter()
    connect(cluster)
    for _ in range(3):
        for engine in cluster.engines:
            engine.step(rng, is_calm=True)
            engine.talk.talk()
        exchange(cluster)
        if with_head:
            head_works(cluster)
        deliver_all(cluster)
    for node in cluster.nodes.values():
        node.pool.expire(node.clock)
        node.look_for_pins()
        if with_head:
            node.report()
    if with_head:
        cluster.head.directory.expire(cluster.head.clock)
    deliver_all(cluster)
    cluster.wire.lose_all_patience()


def head_works(cluster: Cluster) -> None:
    while cluster.head.work() is not None:
        pass


def connect(cluster: Cluster) -> None:
    """Broken lines are noticed at both ends, and ranks connect anew."""
    for engine, line in cluster.broken_lines():
        engine.line_broke(line)
        line.lose_all()
    for line in cluster.closed_lines():
        line.node.end_line(line, is_first=True)
    for engine in cluster.engines:
        for place, rank in engine.ranks():
            has_line = (place, rank) in engine.lines
            if not has_line or not engine.lines[place, rank].is_open:
                engine.connect(place, rank)


def exchange(cluster: Cluster) -> None:
    """All that is under way arrives, and all copies are made."""
    deliver_all(cluster)
    for node in cluster.nodes.values():
        while node.copies:
            node.copy(node.copies[0], 100)
        deliver_all(cluster)
        for read in list(node.fetches.reads):
            node.fetches.send(read, 100)
        deliver_all(cluster)
        for fetch, landing in list(node.fetches.writing()):
            node.fetches.write(fetch, landing, 100, ok=True)
        node.answer_changes(is_late=True)
    deliver_all(cluster)


def picture(cluster: Cluster) -> object:
    """What changes while there is news."""
    views = [(dict(engine.view.loadable), engine.is_busy) for engine in cluster.engines]
    nodes = [
        (node.pool.index.listing.number, node.read_up_to, node.pool.orders.stamp, node.is_busy)
        for node in cluster.nodes.values()
    ]
    return views, nodes, cluster.head.orders.stamp, _who_is_busy(cluster)


def _who_is_busy(cluster: Cluster) -> list[str]:
    engines = [str(engine) for engine in cluster.engines if engine.is_busy]
    return engines + [str(node) for node in cluster.nodes.values() if node.is_busy]


# What nodes have


Places = dict[tuple[Namespace, Key], dict[NodeId, Where]]


def truth(cluster: Cluster) -> Places:
    """What is where."""
    found: Places = defaultdict(dict)
    for node_id in cluster.nodes:
        for record in cluster.ready(node_id):
            found[record.namespace, record.key][node_id] = Where.RAM
    return found


def check_orders(cluster: Cluster) -> None:
    """All nodes have the orders that are in force, and nothing that was cleared is anywhere."""
    stamp = cluster.head.orders.stamp
    for node in cluster.nodes.values():
        assert stamp is not None
        assert node.pool.orders.stamp == stamp, (
            f"{node} has {node.pool.orders.stamp}, in force is {stamp}"
        )
        for record in cluster.ready(node.node_id):
            _check_not_cleared(cluster, node.node_id, record.namespace, record.key, stamp)


def _check_not_cleared(
    cluster: Cluster, node_id: NodeId, namespace: Namespace, key: Key, stamp: Stamp
) -> None:
    node = cluster.nodes[node_id]
    record = node.pool.index.find(namespace, key)
    assert record is not None
    rank = 0
    content = node.memory.read(record, rank, record.blocks.first)
    assert content is not None, f"{record} of {node} has rubbish"
    if content.is_damaged:
        return
    assert not cluster.was_cleared(content, stamp), (
        f"{content} of {node} was cleared, as {stamp} says"
    )


def check_copies_end(cluster: Cluster) -> None:
    """Nobody reads, and only engines that are there may still write."""
    lives = {engine.life for engine in cluster.engines}
    for node in cluster.nodes.values():
        for record in node.pool.index.places:
            if record.state is not ChunkState.READY:
                life = node.pool.index._parts[record].part.life
                assert life in lives, f"{record} of {node} is a dead engine's"
            assert not record.is_busy, f"{record} of {node} has {record.readers} readers"


def let_time_pass(cluster: Cluster) -> None:
    """Nodes end what waits for ranks that will never come."""
    for node_id, node in cluster.nodes.items():
        node.pool.expire(node.clock)
        cluster.jump(node_id, 61.0)
        node.pool.expire(node.clock)


def check_nodes(cluster: Cluster) -> None:
    """Nobody copies, so nothing is being written or read."""
    for node in cluster.nodes.values():
        for record in node.pool.index.places:
            assert record.state is ChunkState.READY, f"{record} of {node}"
            assert not record.is_busy, f"{record} of {node} has {record.readers} readers"
        assert not num_open_jobs(node.pool.index), node


def check_directory(cluster: Cluster) -> None:
    """It knows all that there is, and nothing else."""
    directory, there = cluster.head.directory, truth(cluster)
    for (namespace, key), nodes in there.items():
        held = {each.node_id: each.where for each in directory.where(namespace, [key])[0]}
        assert held == nodes, f"{key!r} of {namespace} is at {nodes}, known at {held}"
    known = {namespace: count for namespace, count in sizes(directory._holdings).items() if count}
    expected: dict[Namespace, int] = defaultdict(int)
    for namespace, _ in there:
        expected[namespace] += 1
    assert known == expected


def check_reader(cluster: Cluster, reader: FoldingReader) -> None:
    """Who reads all events knows the directory."""
    directory = cluster.head.directory
    for _ in range(100_000):
        if reader.poll(directory):
            break
    if not reader.is_whole:
        return
    lives = {node.node_id: node.life for node in cluster.nodes.values()}
    assert reader.nodes == lives, f"the reader knows {reader.nodes}, there are {lives}"
    expected = {(node_id, *name) for name, nodes in truth(cluster).items() for node_id in nodes}
    wrong = expected ^ reader.chunks
    assert not wrong, f"the reader is wrong about {sorted(wrong)}"


def check_views(cluster: Cluster) -> None:
    """What is READY for an engine is what all its places have."""
    for engine in cluster.engines:
        believed = engine.view.loadable
        first, *others = (
            {
                record.key: record.blocks
                for record in cluster.ready(node_id)
                if record.namespace == engine.namespace_at(place)
            }
            for place, node_id in enumerate(engine.seats.node_ids)
        )
        common = {key: blocks for key, blocks in first.items() if all(key in o for o in others)}
        document = cluster.nodes[engine.seats.node_ids[0]].document
        if document is not None and document.is_paused:
            assert not believed, engine
            continue
        wrong = {key for key in believed if key not in common}
        assert not wrong, f"{engine} believes in {sorted(wrong)}"
        overlooked = common.keys() - believed.keys() - engine.distrusted.keys()
        assert not overlooked, f"{engine} overlooks {sorted(overlooked)}"


def check_spares(cluster: Cluster) -> None:
    """Of the nodes that have a chunk in RAM one keeps it."""
    for (namespace, key), nodes in truth(cluster).items():
        records = [cluster.nodes[node_id].pool.index.find(namespace, key) for node_id in nodes]
        standings = [record.standing for record in records if record is not None]
        assert any(each is not Standing.SPARE for each in standings), f"{key!r} is spare everywhere"


# What engines find


def check_prompts_are_found(cluster: Cluster, rng: random.Random) -> None:
    """What one engine stores is found by all of its namespace, and what was barred is stored
    anew.
    """
    cluster.head.change("resume at last", lambda _: None, is_paused=False)
    talk_until_quiet(cluster, rng, 4.0)
    spaces = {engine.namespace: engine for engine in cluster.engines}
    for number, (namespace, engine) in enumerate(spaces.items()):
        prompt = Prompt.of(NEW_DOCUMENT + 2 * number, 1)
        play(cluster, rng, engine, prompt)
        for other in cluster.engines:
            if other.namespace == namespace:
                found = play(cluster, rng, other, prompt)
                assert found, f"{other} does not find what {engine} has stored"
    for engine in cluster.engines:
        for key, asked in list(engine.distrusted.items()):
            # A prompt that ends with it needs it, unless it lacks another chunk: then the next one.
            at = engine.model.keys(group_of(key), asked).index(key)
            for _ in range(2):
                if not _is_overlooked(cluster, engine, key):
                    break
                play(cluster, rng, engine, Prompt.of(asked.document, at + 1))
            assert not _is_overlooked(cluster, engine, key), f"{engine} overlooks {key!r} for ever"


def _is_overlooked(cluster: Cluster, engine: PlayedEngine, key: Key) -> bool:
    """Whether a chunk is there of which an engine has wanted other blocks."""
    record = cluster.nodes[engine.seats.node_ids[0]].find(engine.namespace_at(0), key)
    return record is not None and not (record.blocks == WHOLE and key in engine.view.loadable)


def play(cluster: Cluster, rng: random.Random, engine: PlayedEngine, prompt: Prompt) -> int:
    """A request from its begin to its end; returns how many chunks it has found."""
    # What was found lately does not go for a store.
    cluster.now += 4.0
    request = engine.begin(prompt, "")
    for _ in range(MOST_ROUNDS):
        talk(cluster, rng)
        if not engine.is_busy:
            break
    assert request.is_over, f"{request} of {engine} waits for ever"
    talk(cluster, rng)
    return request.found or 0


def check_stores_go_on(cluster: Cluster, rng: random.Random, reader: FoldingReader) -> None:
    """With the scheduler actor away for long, pools that are full take what is new; it knows all
    of it soon after it is back.
    """
    cluster.wire.cut.add("head")
    cluster.head.die()
    places = {engine.seats.node_ids: engine for engine in cluster.engines}
    engines = list(places.values())
    number = fill(cluster, rng, engines)
    until = cluster.now + AWAY_S
    while cluster.now < until:
        number += 2
        found = play_all(cluster, rng, engines, [Prompt.of(number, 1)])
        # A chunk that goes before any request has found it is remembered: stored again, it stays.
        for _ in range(MOST_AGAIN):
            if not all(found):
                found = play_all(cluster, rng, engines, [Prompt.of(number, 1)])
        for engine, each in zip(engines, found, strict=True):
            assert each, f"{engine} does not find the chunk that it has stored"
        for _ in range(PAUSE_ROUNDS):
            cluster.now += 1.5
            talk(cluster, rng)
    cluster.wire.cut.clear()
    cluster.head.begin()
    for _ in range(_reports_of_all(cluster)):
        talk(cluster, rng)
    check_directory(cluster)
    check_reader(cluster, reader)


def fill(cluster: Cluster, rng: random.Random, engines: list[PlayedEngine]) -> int:
    """Engines store prompts until all their pools have evicted; returns the last document."""
    number = NEW_DOCUMENT + 1000
    nodes = [cluster.nodes[node_id] for each in engines for node_id in each.seats.node_ids]
    before = [node.num_evicted for node in nodes]
    for _ in range(MOST_FILLS):
        prompts = [Prompt.of(number + 2 * at, 4) for at in range(MOST_FILLED)]
        number += 2 * MOST_FILLED
        play_all(cluster, rng, engines, prompts)
        if all(node.num_evicted > count for node, count in zip(nodes, before, strict=True)):
            return number
    raise AssertionError(f"pools are not full: {[node.num_evicted for node in nodes]}")


def play_all(
    cluster: Cluster, rng: random.Random, engines: list[PlayedEngine], prompts: list[Prompt]
) -> list[int]:
    """All engines have all these requests at a time; returns how many chunks each has found."""
    cluster.now += 4.0
    requests = [[engine.begin(prompt, "") for prompt in prompts] for engine in engines]
    for _ in range(MOST_ROUNDS):
        talk(cluster, rng)
        # What they ask a scheduler actor that is away has no end.
        if not any(engine.has_requests for engine in engines):
            break
    for some in requests:
        assert all(request.is_over for request in some), f"{some} wait for ever"
    talk(cluster, rng)
    return [sum(request.found or 0 for request in some) for some in requests]


def _reports_of_all(cluster: Cluster) -> int:
    """How many reports tell a directory that has just begun all that a node has, and some more."""
    pages = max(node.geometry.pool_bytes // SLOT_ALIGNMENT for node in cluster.nodes.values())
    return pages // raykv.node.pool.reporting.MOST_ROWS + 10
