"""What holds when the faults have stopped and everybody has talked for a while."""

from __future__ import annotations

from collections import Counter

from raykv.base.ids import ChunkName, Epoch, Generation, Key, NodeId, Slot
from raykv.engine.cost import FetchCost
from tests.simulation.cluster import Cluster
from tests.simulation.engine import LEASE_SLOTS, Engine
from tests.simulation.node import Node
from tests.simulation.reader import Reader
from tests.simulation.wire import Manners

ROUND_S = 0.5
LONGEST_TALK_S = 60.0


def settle(cluster: Cluster, reader: Reader) -> None:
    """Stop the faults, let everybody talk, and compare what they know."""
    cluster.wire.manners = Manners()
    cluster.wire.cut.clear()
    cluster.manager.set_paused(False)
    deliver_all(cluster)
    cluster.wire.lose_all_patience()
    settings = cluster.settings
    talk_until_quiet(cluster, settings.engine_expiry_s + 2 * settings.settle_s)
    check_directory(cluster)
    check_leases(cluster)
    check_views(cluster)
    check_readers(cluster, reader)
    # No chunk is pinned any more.
    talk_until_quiet(cluster, settings.pin_s)
    for engine in cluster.engines:
        check_chunk_is_found(cluster, engine)
    check_readers(cluster, reader)
    check_rebuilt(cluster)
    check_readers(cluster, reader)


# Talking


def deliver_all(cluster: Cluster) -> None:
    """Whatever is on the wire arrives, and what is said in answer."""
    while not cluster.wire.is_idle:
        cluster.wire.step()
        for node in cluster.nodes.values():
            while node.reads:
                node.end_read(0)


def talk_until_quiet(cluster: Cluster, at_least_s: float = 0.0) -> None:
    """Rounds without faults, until nobody has news."""
    until = cluster.now + at_least_s
    give_up_at = cluster.now + at_least_s + LONGEST_TALK_S
    quiet_rounds = 0
    while cluster.now < until or quiet_rounds < 2:
        assert cluster.now < give_up_at, "there is no end of news"
        before = picture(cluster)
        talk(cluster)
        is_quiet = picture(cluster) == before and not is_telling(cluster)
        quiet_rounds = quiet_rounds + 1 if is_quiet else 0
    cluster.check()


def talk(cluster: Cluster) -> None:
    """One round: all work is done, and everybody exchanges a message."""
    cluster.now += ROUND_S
    cluster.tick += 1
    for node in cluster.nodes.values():
        while node.jobs:
            node.step_job(ok=True)
        node.report()
    for engine in cluster.engines:
        engine.find_link()
        engine.session.exchange(may_repeat=True)
    deliver_all(cluster)
    for engine in cluster.engines:
        engine.step(computes=lambda: True)
    deliver_all(cluster)


def is_telling(cluster: Cluster) -> bool:
    """Whether an engine has not been told all that happened on its node."""
    return any(engine.mirror.has_more for engine in cluster.manager._engines.values())


def picture(cluster: Cluster) -> object:
    """What changes while there is news."""
    views = [
        (engine.view.num_ready, engine.view._lease_rows(), engine.view.has_news, engine.is_busy)
        for engine in cluster.engines
    ]
    nodes = [(node.is_busy, node.num_unreported) for node in cluster.nodes.values()]
    return views, nodes, cluster.directory(), leases(cluster), cluster.manager.epoch


# Checking


Leases = set[tuple[NodeId, str, int, int]]


def leases(cluster: Cluster) -> Leases:
    """What the scheduler actor believes to be leased: node, engine, slot and generation."""
    return {
        (node.node_id, lease.engine_id, slot, lease.generation)
        for node in cluster.manager._nodes.values()
        for slot, lease in node.book.leases().items()
    }


def check_directory(cluster: Cluster) -> None:
    """All that it has is on the node at that generation."""
    ready = {
        ((node.node_id, name.namespace, name.key), (name.slot, name.generation))
        for node in cluster.nodes.values()
        for name in node.table.inventory()
    }
    wrong = set(cluster.directory().items()) - ready
    assert not wrong, f"not on their nodes: {sorted(wrong)}"


def check_leases(cluster: Cluster) -> None:
    """Each lease is known on both sides."""
    granted = leases(cluster)
    declared: Leases = {
        (engine.identity.node_id, engine.identity.engine_id, handle.slot, handle.generation)
        for engine in cluster.engines
        for _, handle in engine.view._lease_rows()
    }
    assert granted == declared, (
        f"leased but nobody has it: {sorted(granted - declared)}, "
        f"had but not leased: {sorted(declared - granted)}"
    )


def check_views(cluster: Cluster) -> None:
    """What a view has is in the directory; what the directory has of its node it finds.

    A view that stores a key overlooks that another engine has stored it too, until it asks. What
    was fetched into the lease of another engine, which has given it up, is refused when it is
    loaded; so is what was stored into a lease that another one has got before this one attached.
    """
    for engine in cluster.engines:
        identity, view = engine.identity, engine.view
        seen = {
            (name, handle.slot, handle.generation)
            for name, handle in view._ready.items()
            if handle not in engine.session.borrowed | view._declared
        }
        wrong = sorted(seen - _there(cluster, engine))
        assert not wrong, f"{identity} sees what is not in the directory: {wrong}"
    for engine in cluster.engines:
        overlooked = [
            (name, slot, generation)
            for name, slot, generation in sorted(_there(cluster, engine))
            if name not in engine.view._ready
            and not engine.view._tombstones.covers(name, generation)
        ]
        requests = [(engine.begin([chunk[0]]), chunk) for chunk in overlooked]
        if requests:
            talk_until_quiet(cluster)
        for request, chunk in requests:
            # It may have been evicted meanwhile, for leases that this engine or another one wants.
            found = request.hits == request.keys or chunk not in _there(cluster, engine)
            assert found, f"{engine.identity} does not find {request}"


def _there(cluster: Cluster, engine: Engine) -> set[tuple[Key, Slot, Generation]]:
    """What the directory has that the engine could load at once."""
    place = (engine.identity.node_id, engine.identity.namespace)
    return {
        (name, *held)
        for (node_id, namespace, name), held in cluster.directory().items()
        if (node_id, namespace) == place
    }


def check_readers(cluster: Cluster, reader: Reader) -> None:
    """Who reads all events, and who reads some and snapshots, knows the directory."""
    for _ in range(1000):
        if reader.poll(cluster.manager):
            break
    directory = cluster.directory()
    assert cluster.listener.replay.chunks == directory, "the listener is wrong"
    assert reader.replay.chunks == directory, "the reader is wrong"
    lives = {node.node_id: node.epoch for node in cluster.manager._nodes.values()}
    assert cluster.listener.replay.nodes == lives
    assert reader.replay.nodes == lives


def check_chunk_is_found(cluster: Cluster, engine: Engine) -> None:
    """A new chunk of one engine is loaded by all engines of its namespace."""
    name = store_new(cluster, engine)
    if name is None:
        assert is_shared_by_sizes(cluster, engine.identity.node_id), f"{engine.identity} stores not"
        return
    for other in cluster.engines:
        if other.identity.namespace == engine.identity.namespace:
            other.view.remote.cost = FetchCost()
            request = other.begin([name])
            talk_until_quiet(cluster)
            is_shared = is_shared_by_sizes(cluster, other.identity.node_id)
            assert request.hits == [name] or is_shared, f"{other.identity} misses {request}"


def store_new(cluster: Cluster, engine: Engine) -> Key | None:
    """Have an engine store a chunk with a new name; None if it can't.

    A lease from before a restart of the scheduler actor may be refused by the node, which has been
    further: then the next one is taken.
    """
    for number in range(LEASE_SLOTS + 1):
        name = Key(f"new {number} of {engine.identity.engine_id}".encode() + bytes(4))
        engine.begin([name])
        talk_until_quiet(cluster)
        if (engine.identity.node_id, engine.identity.namespace, name) in cluster.directory():
            return name
    return None


def is_shared_by_sizes(cluster: Cluster, node_id: NodeId) -> bool:
    """Whether a node has chunks of two sizes: leases of one may lie in every slab."""
    return len({engine.identity.slot_bytes for engine in cluster.engines_on(node_id)}) > 1


def check_rebuilt(cluster: Cluster) -> None:
    """A new scheduler actor learns of all that is on the nodes, and was not evicted for a lease.

    It is paused, so that it grants nothing and evicts nothing.
    """
    cluster.restart_manager(Epoch(cluster.manager.granting + 1), cluster.manager.cleared)
    cluster.manager.set_paused(True)
    talk_until_quiet(cluster, 2 * cluster.settings.settle_s)
    check_directory(cluster)
    for node in cluster.nodes.values():
        ready = list(node.table.inventory())
        copies = Counter((name.namespace, name.key) for name in ready)
        missing = [
            name
            for name in ready
            if copies[name.namespace, name.key] == 1 and not is_known(cluster, node, name)
        ]
        assert not missing, f"on {node.node_id}, but not in the directory: {missing}"


def is_known(cluster: Cluster, node: Node, name: ChunkName) -> bool:
    """Whether the directory has a chunk, or cannot have it since its place is leased, or was when
    the engine declared it, which has given it back.
    """
    book = cluster.manager._nodes[node.node_id].book
    if book.find(name.namespace, name.key) is not None:
        return True
    if (book.table.lowest(name.slot, name.slot_bytes) or 0) > name.generation:
        return True
    slab_of = book.geometry.slab_of
    return any(
        slot == name.slot
        or (slab_of(slot) == slab_of(name.slot) and lease.slot_bytes != name.slot_bytes)
        for slot, lease in book.leases().items()
    )
