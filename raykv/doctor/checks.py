"""What is wrong with a cluster, and how to mend it: facts in, findings out.

Each check looks at one thing and says at least one line about it: what is wrong, with the values,
or that all is well. Nothing here asks anybody; `raykv/doctor/gather.py` gathers the facts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from raykv.base.ids import MissReason, family_of
from raykv.doctor.facts import ActorFacts, ClusterFacts, NodeFacts
from raykv.memory import room
from raykv.memory.room import RESERVE_BYTES, human_bytes
from raykv.protocol.findings import Finding, HostFacts, MemoryLimit, Severity
from raykv.protocol.status import ClusterStatus, EngineStatus

MAX_SKEW_S = (2.0, 30.0)
"""Clocks that differ by more are a warning, or a failure: then logs of two nodes can't be laid side
by side, and what sorts by time (Ray's own dashboards, tokens that expire) goes wrong."""

SILENT_S = 3.0
"""A NodeActor reports every second."""

SMALL_SHM_BYTES = 400 << 20
"""What vLLM 0.32 takes there for an engine of one worker process: message queues of 160 and 240
MiB. RayKV's pools are not in `/dev/shm`."""

MANY_STORED = 1024
"""Of this many stored chunks in each KV group one would have been loaded if prompts had anything in
common."""

MANY_MISSED = 65_536
"""Tokens of known prefixes that were not loaded; fewer may be of prompts that part in new
places."""

MEANT = ("weights_version", "weights", "config", "quantization", "draft", "code")
"""Traits that differ when two engines serve two models under one name."""


def diagnose(facts: ClusterFacts) -> list[Finding]:
    """All findings, in the order of `CHECKS`."""
    findings = []
    for name, check in CHECKS.items():
        complaints = list(check.look(facts))
        missing = _missing(name, facts)
        if missing and not any(each.severity is Severity.FAIL for each in complaints):
            complaints.append(_warn(f"incomplete: {missing}", "mend that first"))
        found = [Finding(name, *each) for each in complaints]
        findings += found or [Finding(name, Severity.OK, check.fine)]
    return findings


def _missing(check: str, facts: ClusterFacts) -> str:
    """Why a check can't be complete: who has not answered; empty if everybody has."""
    if check in ("placement", "orders", "hashes") and facts.scheduler and facts.scheduler.why:
        return "the scheduler actor does not answer"
    silent = [
        _node(node)
        for node in facts.nodes
        if node.is_alive and node.actor is not None and node.host is None
    ]
    if check in ("memory", "shm", "ports", "clocks", "threads") and silent:
        return f"the NodeActor of {_some(silent)} does not describe its host"
    return ""


class Complaint(NamedTuple):
    """What a check has found wrong, and how to mend it."""

    severity: Severity
    what: str
    mend: str


def _fail(what: str, mend: str) -> Complaint:
    return Complaint(Severity.FAIL, what, mend)


def _warn(what: str, mend: str) -> Complaint:
    return Complaint(Severity.WARN, what, mend)


# Actors


def _scheduler(facts: ClusterFacts) -> Iterator[Complaint]:
    actor = facts.scheduler
    if actor is None:
        if any(node.actor is not None for node in facts.nodes):
            yield _fail(
                "there are NodeActors, but no scheduler actor",
                "running engines make a new one within seconds; if none does, their logs say why, "
                "or end the rest with `raykv down`",
            )
        else:
            yield _warn(
                "RayKV does not run in this cluster",
                "start an engine with RayKVConnector: it starts the actors",
            )
    elif actor.why and actor.ray_state in _UNPLACED:
        yield _fail(
            f"the scheduler actor is not placed{_state(actor)}: {actor.why}",
            "check that Ray's head node, where it runs, is alive; `ray list actors` says why Ray "
            "does not start it",
        )
    elif actor.why:
        yield _fail(
            f"the scheduler actor does not answer{_state(actor)}: {actor.why}",
            "engines go on with what their own nodes hold; if its process hangs, end it: Ray "
            "starts another, which asks all nodes what they have",
        )
    if facts.status is not None and facts.status.paused:
        yield _warn(
            "the cache is paused: engines neither load nor store",
            "`raykv resume` switches it on",
        )


_UNPLACED = frozenset({"DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING"})


def _placement(facts: ClusterFacts) -> Iterator[Complaint]:
    known = {node.node_id: node for node in facts.nodes}
    for node in facts.nodes:
        yield from _placed(node, facts)
    for engine in facts.engines:
        at = known.get(engine.node_id)
        if at is None or at.actor is None:
            yield _fail(
                f"{_engine(engine)} is attached at node {_short(engine.node_id)}, which has no "
                "NodeActor: it can neither load nor store",
                "the engine makes one within seconds; if it does not, read its log and check that "
                "Ray can start an actor on that node",
            )
    for engine_id, node_id in facts.status.waiting.items() if facts.status else ():
        yield _waiting(engine_id, node_id, facts)
    for engine in facts.engines:
        if engine.node_id not in facts.reports:
            yield _fail(
                f"{_engine(engine)} is attached, but the NodeActor of its node "
                f"{_short(engine.node_id)} does not report",
                "read the log of that node's NodeActor (`raykv logs NODE`)",
            )


def _waiting(engine_id: str, node_id: str, facts: ClusterFacts) -> Complaint:
    """An engine is not attached: nothing is heard of its node."""
    node = _at(node_id, facts.hostnames.get(node_id, ""))
    if any(each.node_id == node_id and each.is_alive for each in facts.nodes):
        return _fail(
            f"engine {_short(engine_id)} has no cache: the NodeActor of its {node} does not report",
            "a new one reports within seconds; if it does not, read the engine's log and check "
            "that Ray can start an actor on that node",
        )
    return _fail(
        f"engine {_short(engine_id)} has no cache: its Ray {node} is gone",
        "start Ray on that host again (`ray start --address=...`): the engine goes on there by "
        "itself; or end the engine",
    )


def _placed(node: NodeFacts, facts: ClusterFacts) -> Iterator[Complaint]:
    """What is wrong with a node's NodeActor as such."""
    actor = node.actor
    if actor is None:
        return
    if not node.is_alive:
        yield _warn(
            f"a NodeActor waits for node {_short(node.node_id)}, which is gone",
            "ending it loses nothing: `raykv down` ends all, and the engines make theirs again",
        )
    elif actor.why:
        yield _fail(
            f"the NodeActor of {_node(node)} does not answer{_state(actor)}: {actor.why}",
            "engines there compute everything; if its process hangs, end it (Ray starts another); "
            "if Ray has not placed it, `ray list actors` says why",
        )
    elif facts.status is not None and not (node.description and node.description.refusal):
        report = facts.reports.get(node.node_id)
        if report is None or report.age_s > SILENT_S:
            since = "has never reported" if report is None else f"last did {report.age_s:.0f} s ago"
            yield _fail(
                f"the NodeActor of {_node(node)} answers, but does not report to the scheduler "
                f"actor: it {since}",
                "look in its log for 'no report to the scheduler actor'; the two can't reach each "
                "other, or have different versions",
            )


def _orders(facts: ClusterFacts) -> Iterator[Complaint]:
    status = facts.status
    for node in facts.reports.values():
        if status and node.orders < status.orders and node.age_s <= SILENT_S:
            yield _warn(
                f"node {_short(node.node_id)} follows orders number {node.orders.number} of "
                f"operators, and number {status.orders.number} is in force: what was cleared, "
                "pinned or switched since does not hold there yet",
                "a node hears of orders within a second; if this lasts, read its log and check "
                "that its disk can be written: a node shows an order once its disk has noted it",
            )


# Versions, hashes


def _versions(facts: ClusterFacts) -> Iterator[Complaint]:
    for node in facts.nodes:
        told = node.description
        if told is not None and told.version != facts.protocol:
            yield _fail(
                f"the NodeActor of {_node(node)} runs RayKV {told.raykv_version} (protocol "
                f"{told.version}); this is RayKV {facts.raykv_version} (protocol "
                f"{facts.protocol}): engines of one can't use the other",
                "install the same RayKV on all nodes, then `raykv down`: the engines start the "
                "actors anew",
            )
    yield from _several(
        "RayKV",
        {
            "this process": facts.raykv_version,
            **({"the scheduler actor": facts.status.raykv_version} if facts.status else {}),
            **{
                f"the NodeActor of {_node(node)}": node.description.raykv_version
                for node in facts.nodes
                if node.description is not None and node.description.version == facts.protocol
            },
        },
    )
    yield from _several("Ray", {_node(at): host.ray_version for at, host in facts.hosts})
    yield from _several("Python", {_node(at): host.python_version for at, host in facts.hosts})
    yield from _several("engines'", {_engine(each): each.versions for each in facts.engines})


def _several(of_what: str, versions: dict[str, str]) -> Iterator[Complaint]:
    """One line if not all have one version; those without a version do not count."""
    known = {who: version for who, version in versions.items() if version}
    if len(set(known.values())) > 1:
        yield _warn(
            f"{of_what} versions differ: {_who_has_what(known.items())}",
            "install the same version everywhere, or wait for an upgrade that is under way",
        )


def _hashes(facts: ClusterFacts) -> Iterator[Complaint]:
    by_model: dict[str, list[EngineStatus]] = {}
    for engine in facts.engines:
        by_model.setdefault(engine.model, []).append(engine)
    for model, engines in sorted(by_model.items()):
        yield from _shared(model, engines)


def _shared(model: str, engines: list[EngineStatus]) -> Iterator[Complaint]:
    """Why engines of one model don't share their chunks."""
    random = [engine for engine in engines if engine.traits.get("hash_seed") == "random"]
    if random:
        yield _fail(
            f"{_some([_engine(each) for each in random])} (model {model}) uses "
            f"{random[0].traits.get('hash_algorithm', 'a hash')} with a random seed: no other "
            "engine can use its chunks, nor can it after a restart",
            "set PYTHONHASHSEED to the same number in the environment of every engine, or choose "
            "vLLM's --prefix-caching-hash-algo sha256",
        )
    if len({family_of(engine.namespace) for engine in engines}) < 2:
        return
    told = [engine for engine in engines if engine.traits]
    differing = sorted(
        name
        for name in {name for engine in told for name in engine.traits}
        if len({engine.traits.get(name, "") for engine in told}) > 1
    )
    for name in differing:
        if name == "hash_seed" and random:
            continue
        yield _difference(model, name, told)
    if not differing:
        yield _warn(
            f"the {len(engines)} engines of model {model} are in several namespaces, and do not "
            "say why",
            "give all engines the same RayKV",
        )


def _difference(model: str, name: str, engines: list[EngineStatus]) -> Complaint:
    values = _who_has_what((_engine(each), each.traits.get(name, "unknown")) for each in engines)
    what = f"engines of model {model} share nothing, since their {name} differs: {values}"
    if name == "hash_seed":
        return _fail(what, "set PYTHONHASHSEED to the same number for every engine")
    if name == "hash_algorithm":
        return _fail(what, "give every engine the same --prefix-caching-hash-algo")
    if name in MEANT:
        mend = "they serve different weights, and must not share; otherwise start them alike"
        return _warn(what, mend)
    return _warn(what, "give every engine the same configuration, if they should share")


# Memory


def _memory(facts: ClusterFacts) -> Iterator[Complaint]:
    for node in facts.nodes:
        refusal = (node.description.refusal if node.description else "") or (
            node.host.refusal if node.host else ""
        )
        if refusal:
            yield _fail(
                f"{_node(node)} gives no pool: {refusal}",
                "free the memory (the NodeActor tries again every few seconds), or name a size "
                "that fits with `raykv up --pool-bytes`",
            )
        elif node.host is not None:
            yield from _room(node, node.host)


def _room(node: NodeFacts, host: HostFacts) -> Iterator[Complaint]:
    """Whether the rest of a pool that is there can still be touched."""
    if host.is_short:
        yield _fail(
            f"{_node(node)} is short of memory: {human_bytes(host.left_bytes)} of its pool of "
            f"{human_bytes(host.pool_bytes)} are not touched, and nothing is stored there; "
            f"{_limits(host)}",
            "free memory on that node, raise the limit, or start with a smaller pool_bytes",
        )
        return
    if not host.pool_bytes:
        return
    needs = room.PoolNeeds(host.pool_bytes, host.pool_bytes - host.left_bytes, host.is_memory)
    # The reserve was kept when the pool was made; only what would run out is wrong now.
    limits = [
        MemoryLimit(each.free_bytes + RESERVE_BYTES, each.total_bytes, each.source)
        for each in host.limits
    ]
    wrong = room.objection(needs, limits, None)
    if wrong:
        yield _fail(
            f"{_node(node)} can't give what is left of its pool: {human_bytes(host.left_bytes)} "
            f"of {human_bytes(host.pool_bytes)} are not touched yet, but {_limits(host)}",
            "free memory on that node, raise the limit, or start with a smaller pool_bytes",
        )
    elif host.is_memory and any(each.free_bytes < room.NEAR_BYTES for each in host.limits):
        yield _warn(
            f"{_node(node)} has hardly any memory left: {_limits(host)}",
            "Ray or the kernel will end processes there, perhaps the NodeActor, and with it the "
            "pool: free memory on that node, or start with a smaller pool_bytes",
        )


def _limits(host: HostFacts) -> str:
    """The tightest limit, in words."""
    if not host.limits:
        return "no limit is known"
    limit = room.tightest(host.limits)
    return (
        f"{limit.source} allows {human_bytes(limit.total_bytes)} and has "
        f"{human_bytes(limit.free_bytes)} free"
    )


def _shared_memory(facts: ClusterFacts) -> Iterator[Complaint]:
    for node, host in facts.hosts:
        if 0 < host.shm_bytes < SMALL_SHM_BYTES:
            yield _warn(
                f"/dev/shm of {_node(node)} has {human_bytes(host.shm_bytes)}: vLLM starts no "
                f"engine with worker processes below about {human_bytes(SMALL_SHM_BYTES)} (its CPU "
                "build always has them)",
                "give the container a larger /dev/shm (docker: --shm-size); RayKV needs none",
            )
    if sum(node.is_alive for node in facts.nodes) < 2:
        return
    for node, host in facts.hosts:
        if not host.plasma_folder or host.plasma_folder.startswith("/dev/shm"):
            continue
        yield _warn(
            f"Ray keeps the objects of {_node(node)} in {host.plasma_folder}, not in /dev/shm, "
            f"which has {human_bytes(host.shm_bytes)}: fetched chunks go through a disk",
            "give the container a larger /dev/shm (docker: --shm-size), or start Ray there with an "
            "--object-store-memory below it: 512 MiB are plenty for RayKV",
        )


# Disks

LONG_UNOWNED_S = 3600.0
"""A folder that was unowned for less time may belong to a cluster that is just starting."""


def _disks(facts: ClusterFacts) -> Iterator[Complaint]:
    for status in facts.reports.values():
        if status.disk.path and status.disk.problem:
            yield _warn(
                f"node {_short(status.node_id)} writes nothing to {status.disk.path}: "
                f"{status.disk.problem}",
                "it tries again every 15 s; what its pool evicts meanwhile is lost",
            )
    # Nodes that share a disk see the same.
    seen: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for node, host in facts.hosts:
        old = [(each.path, each.num_bytes) for each in host.unowned if each.age_s > LONG_UNOWNED_S]
        if old:
            seen.setdefault(tuple(old), []).append(_node(node))
    for folders, nodes in seen.items():
        num_bytes = sum(size for _, size in folders)
        yield _warn(
            f"{_some(nodes)} sees {human_bytes(num_bytes)} that no node holds, in "
            f"{_some([path for path, _ in folders])}",
            "a node that starts takes over the first one; delete them, unless a cluster should "
            "find its chunks there again",
        )


# Between the nodes


def _ports(facts: ClusterFacts) -> Iterator[Complaint]:
    for node, host in facts.hosts:
        for place, why in host.unreached:
            yield _fail(
                f"{_node(node)} can't reach {place.what} at {place.host}:{place.port}: {why}",
                "open that port between the nodes, or fix Ray's ports with --node-manager-port "
                "and --object-manager-port: without it nothing is fetched",
            )


def _clocks(facts: ClusterFacts) -> Iterator[Complaint]:
    for node, _ in facts.hosts:
        skew = max(0.0, abs(node.skew_s) - node.skew_error_s)
        if skew > MAX_SKEW_S[0]:
            way = "ahead of" if node.skew_s > 0 else "behind"
            yield Complaint(
                Severity.FAIL if skew > MAX_SKEW_S[1] else Severity.WARN,
                f"the clock of {_node(node)} is {abs(node.skew_s):.1f} s {way} this host's",
                "set both by NTP (chrony, systemd-timesyncd)",
            )


def _breakers(facts: ClusterFacts) -> Iterator[Complaint]:
    if facts.status is not None:
        yield from breakers(facts.status)


def breakers(known: ClusterStatus) -> Iterator[Complaint]:
    """What is left alone since it does not answer."""
    owners = [(f"node {_short(each.node_id)}", each.breakers) for each in known.nodes]
    owners += [(_engine(each), each.breakers) for each in known.engines]
    for owner, told in owners:
        for row in told.rows:
            why = f": {row.reason}" if row.reason else ""
            yield Complaint(
                Severity.FAIL if row.state == "open" else Severity.WARN,
                f"{owner} does not ask {row.peer}, its breaker is {row.state} for "
                f"{row.seconds:.0f} s, {row.failures} failures in a row{why}",
                "find out what is wrong with the peer; the breaker closes by itself when it "
                "answers again",
            )


def _threads(facts: ClusterFacts) -> Iterator[Complaint]:
    for node, host in facts.hosts:
        if host.threads_failed:
            yield _warn(
                f"threads of the NodeActor of {_node(node)} have failed, or could not be started, "
                f"{host.threads_failed} times; they were restarted",
                "its log says why. If it is the limit of processes (`ulimit -u`, pids.max of the "
                "container), raise it; report any other cause as a defect",
            )


def _use(facts: ClusterFacts) -> Iterator[Complaint]:
    """Judge a namespace as a whole: an engine that only prefills stores for others to load."""
    spaces: dict[str, list[EngineStatus]] = {}
    for engine in facts.engines:
        spaces.setdefault(engine.namespace, []).append(engine)
    for engines in spaces.values():
        counters: Counter[str] = Counter()
        for engine in engines:
            counters.update(engine.counters)
        names = f"{_some([_engine(each) for each in engines])} (model {engines[0].model})"
        missed = counters[_MISSED + MissReason.WINDOW_MISSING]
        stored, loaded = counters["chunks_stored"], counters["chunks_loaded"]
        many = MANY_STORED * max(map(_num_groups, engines))
        if stored >= many and not loaded:
            yield _never_loaded(names, stored, counters)
        elif missed >= MANY_MISSED and missed > counters["loaded_tokens"]:
            yield _warn(
                f"{names} have loaded {counters['loaded_tokens']:,} prompt tokens, and {missed:,} "
                "known ones were computed, because no window or state to go on from was stored",
                _MORE_WINDOWS,
            )


_MISSED = "missed_tokens_"
"""Of prompt tokens that were computed, before the reason."""

_MORE_WINDOWS = (
    "a larger window_share stores more windows and states, each for more of the pool: `raykv plan` "
    "says how much; evicted ones need a larger pool_bytes"
)


def _num_groups(engine: EngineStatus) -> int:
    return max(1, len(engine.traits.get("chunks", "").split()))


def _never_loaded(names: str, stored: int, counters: Counter[str]) -> Complaint:
    reasons = {
        name.removeprefix(_MISSED): count
        for name, count in counters.items()
        if name.startswith(_MISSED) and name != _MISSED + MissReason.INCOMPLETE_CHUNK
    }
    most = max(reasons, key=lambda each: reasons[each], default="")
    why = f"; {reasons[most]:,} prompt tokens were computed for the reason {most}" if most else ""
    mend = (
        "`raykv explain` of a request says why its tokens were computed: evicted or "
        "pool_full need a larger pool_bytes; never_stored means that no two prompts begin alike"
    )
    what = f"{names} have stored {stored:,} chunks and loaded none{why}"
    return _warn(what, _MORE_WINDOWS if most == MissReason.WINDOW_MISSING else mend)


class Check(NamedTuple):
    """What looks for complaints, and what is said if it finds none."""

    look: Callable[[ClusterFacts], Iterator[Complaint]]
    fine: str


CHECKS = {
    "scheduler": Check(_scheduler, "the scheduler actor answers"),
    "placement": Check(_placement, "every engine has its NodeActor, and all of them report"),
    "orders": Check(_orders, "every node follows the operators' latest orders"),
    "versions": Check(_versions, "all parts have one version"),
    "hashes": Check(_hashes, "engines of the same model share their chunks"),
    "memory": Check(_memory, "every pool fits into what limits its node"),
    "shm": Check(
        _shared_memory,
        "/dev/shm is large enough for vLLM, and no fetch goes through a disk for want of it",
    ),
    "disks": Check(_disks, "every disk tier can be written, and nodes hold all of its folders"),
    "ports": Check(_ports, "every node reaches the others"),
    "clocks": Check(_clocks, "all clocks agree"),
    "breakers": Check(_breakers, "no breaker is open"),
    "threads": Check(_threads, "no thread of a NodeActor has failed"),
    "use": Check(_use, "stored chunks are loaded again, or are too few to tell"),
}
"""Each by its name, in the order in which they are said."""


def _short(name: str) -> str:
    return name[:12]


def _node(node: NodeFacts) -> str:
    return _at(node.node_id, node.hostname)


def _at(node_id: str, hostname: str) -> str:
    host = f" ({hostname})" if hostname else ""
    return f"node {_short(node_id)}{host}"


def _state(actor: ActorFacts) -> str:
    return f" (Ray says {actor.ray_state})" if actor.ray_state else ""


def _engine(engine: EngineStatus) -> str:
    return f"engine {_short(engine.engine_id)}"


def _who_has_what(values: Iterable[tuple[str, str]]) -> str:
    """Each value, with a few of those that have it."""
    who: dict[str, list[str]] = {}
    for name, value in values:
        who.setdefault(value, []).append(name)
    return "; ".join(f"{value}: {_some(names)}" for value, names in sorted(who.items()))


def _some(names: Sequence[str]) -> str:
    """A few of them."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
