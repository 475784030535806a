"""Pins, which keep chunks from being evicted; and the keys that people give."""

from __future__ import annotations

import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

from raykv.base import deadlines
from raykv.base.errors import ClusterError, NotFoundError, SettingError
from raykv.base.ids import MAX_KEY_BYTES, family_of, name_of_part, wholes
from raykv.client.scheduler import Scheduler
from raykv.cluster import ask
from raykv.cluster.ask import ask_each, warn_of
from raykv.memory.room import human_bytes
from raykv.protocol import columns, operator

PIN_S = 3600.0
"""How long a pin lasts by default."""


def pin(
    scheduler: Scheduler,
    keys: Sequence[bytes | str],
    *,
    namespace: str = "",
    ttl_s: float = PIN_S,
    priority: int | None = None,
    pin_id: str | None = None,
) -> operator.PinStatus:
    """Keep chunks from being evicted on every node that has or gets them, also chunks that are
    not stored yet. Atomic: an error means that nothing was pinned.

    Args:
        keys: offload keys as bytes or hex, in the order of the prefix; those of a prompt are
            `cluster.lookup(text=…).keys`.
        namespace: as `status` shows it, or its beginning. Default: the only namespace.
        ttl_s: how many seconds the pin lasts, at most 30 days.
        priority: None: never evict these chunks. 1 to 9: evict them only when no chunk without a
            priority, or with a lower one, is left.
        pin_id: name of the pin, which replaces an earlier pin of that name. Default: a new name.

    Raises:
        ClusterError: RayKV does not run here, or does not answer; or pins would exceed pin_share.
        SettingError: an argument is not allowed.
    """
    check_pin(ttl_s, priority)
    order = operator.PinOrder(
        order_id=uuid.uuid4().hex,
        pin_id=pin_id or uuid.uuid4().hex[:8],
        namespace=scheduler.full_namespace(namespace),
        keys=columns.Keys.of(ordered(keys)),
        ttl_s=ttl_s,
        priority=priority,
    )
    if priority is None:
        _check_room(scheduler, order)
    scheduler.order(order, refused="nothing was pinned")
    return _made(scheduler, order)


def _made(scheduler: Scheduler, order: operator.PinOrder) -> operator.PinStatus:
    """Return the pin once all nodes have its keys, or what they keep of it after some seconds."""
    give_up_at = time.monotonic() + deadlines.PROBE_S
    asked: Collection[str] | None = None
    while True:
        nodes, silent = ask.ask_nodes(
            operator.PinsHere, ask.asking("pins"), asked, deadlines.PROBE_S
        )
        warn_of(silent)
        asked = nodes.keys()
        is_done = all(order.pin_id in node.held for node in nodes.values())
        # What the others said before a silent node was given up may be old.
        if not silent and (is_done or time.monotonic() > give_up_at):
            num_keys = len(order.keys)
            pin = operator.OrderedPin(order.namespace, b"", num_keys, order.ttl_s, order.priority)
            return _status(order.pin_id, pin, nodes.values())
        time.sleep(deadlines.LOOK_S)


def _check_room(scheduler: Scheduler, order: operator.PinOrder) -> None:
    """Refuse a pin for which a node's pins have no room, as far as its chunks are there and the
    node answers.

    Raises:
        ClusterError: it names the node.
    """
    spaces = [s for s in scheduler.status().spaces if s.chunks and s.num_bytes]
    mine = [s for s in spaces if order.namespace in (s.namespace, family_of(s.namespace))]
    space = next(iter(mine), None)
    if space is None or not space.chunks or not space.num_bytes:
        return
    chunk_bytes = space.num_bytes // space.chunks
    pinned = _pinned(scheduler, order)
    needed: Counter[str] = Counter()
    found = scheduler.sources_of(order.namespace, list(order.keys))
    for key, sources in zip(order.keys, found, strict=True):
        if key not in pinned:
            needed.update(source.node_id for source in sources if not source.is_disk)
    nodes, silent = ask.ask_nodes(operator.PinsHere, ask.asking("pins"), needed, deadlines.PROBE_S)
    warn_of(silent)
    for node_id, node in nodes.items():
        earlier = node.held.get(order.pin_id, {}).values()
        kept = node.node.kept_bytes - sum(each.num_bytes for each in earlier)
        wanted = needed[node_id] * chunk_bytes
        if kept + wanted > node.node.quota_bytes:
            raise ClusterError(
                f"nothing was pinned: that takes {human_bytes(wanted)} more of node "
                f"{node_id[:12]}, where pins take {human_bytes(kept)} of the "
                f"{human_bytes(node.node.quota_bytes)} that they may (pin_share): pin fewer "
                "chunks, unpin something, or set a larger pin_share"
            )


def _pinned(scheduler: Scheduler, order: operator.PinOrder) -> set[bytes]:
    """Chunks that other pins keep already."""
    return {
        key
        for pin_id, pin in _told(scheduler).items()
        if (pin.namespace, pin.priority) == (order.namespace, None)
        if pin_id != order.pin_id
        for key in _keys_of(scheduler, pin)
    }


def unpin(scheduler: Scheduler, pin_id: str) -> None:
    """End a pin; its chunks can be evicted again.

    Raises:
        ClusterError: RayKV does not run here, or does not answer, or there is no such pin.
    """
    known = sorted(_told(scheduler))
    if pin_id not in known:
        raise NotFoundError(f"there is no pin {pin_id!r}; there are {', '.join(known) or 'none'}")
    scheduler.order(operator.UnpinOrder(uuid.uuid4().hex, pin_id))


def pins(scheduler: Scheduler) -> operator.Pinned:
    """List all pins, and how much of each node's pool they keep.

    Raises:
        ClusterError: RayKV does not run here, or does not answer.
    """
    told = _told(scheduler)
    nodes = list(ask_each(operator.PinsHere, ask.asking("pins")).values())
    return operator.Pinned(
        [_status(pin_id, pin, nodes) for pin_id, pin in told.items()],
        [node.node for node in nodes],
        client_chunks=sum(node.client_chunks for node in nodes),
        hints_refused=sum(node.hints_refused for node in nodes),
    )


def chunks_of(scheduler: Scheduler, pin_id: str) -> tuple[str, list[bytes]]:
    """Return the namespace and the keys of a pin.

    Raises:
        NotFoundError: there is no such pin.
        ClusterError: its keys are not known, or RayKV does not run here or does not answer.
    """
    pin = _told(scheduler).get(pin_id)
    if pin is None:
        raise NotFoundError(f"there is no pin {pin_id!r}")
    if not (keys := _keys_of(scheduler, pin)):
        raise ClusterError(f"the keys of the pin {pin_id!r} are not known: pin them again")
    return pin.namespace, keys


def pinned_on(scheduler: Scheduler, node_id: str, namespace: str) -> set[bytes]:
    """Return the chunks of a namespace that pins without a priority keep on a node."""
    nodes = ask_each(operator.PinsHere, ask.asking("pins"), [node_id]).values()
    return {
        keys[at]
        for pin_id, pin in _told(scheduler).items()
        if (pin.namespace, pin.priority) == (family_of(namespace), None)
        for node in nodes
        if pin_id in node.held and (keys := _keys_of(scheduler, pin))
        for at in node.held[pin_id].get(name_of_part(namespace), operator.PinHere()).kept
    }


def _told(scheduler: Scheduler) -> dict[str, operator.OrderedPin]:
    raw = scheduler.ask("orders")
    return ask.received(operator.OrdersDocument, raw).pins if raw else {}


def _keys_of(scheduler: Scheduler, pin: operator.OrderedPin) -> list[bytes]:
    raw = scheduler.ask("pin_keys", pin.digest)
    return [key for _, key in ask.received(columns.NamedKeys, raw)] if raw else []


def _status(
    pin_id: str, pin: operator.OrderedPin, nodes: Iterable[operator.PinsHere]
) -> operator.PinStatus:
    """Merge what nodes keep of a pin."""
    kept: defaultdict[str, set[int]] = defaultdict(set)
    waiting: set[int] = set()
    num_bytes = 0
    for node in nodes:
        for part, here in node.held.get(pin_id, {}).items():
            kept[part].update(here.kept)
            waiting.update(here.waiting)
            num_bytes += here.num_bytes
    whole = [set.intersection(*(kept[part] for part in parts)) for parts in wholes(kept)]
    held = set().union(*whole)
    return operator.PinStatus(
        pin_id,
        pin.namespace,
        chunks=pin.num_keys,
        held_chunks=len(held),
        kept_bytes=num_bytes,
        left_s=pin.left_s,
        priority=pin.priority,
        waiting_chunks=len(waiting - held),
    )


def check_pin(ttl_s: float, priority: int | None) -> None:
    """Refuse a pin that no cluster would take.

    Raises:
        SettingError: one of them is not allowed.
    """
    if not 0 < ttl_s <= operator.MAX_PIN_S:
        raise SettingError(f"ttl_s={ttl_s} must be above 0, at most {operator.MAX_PIN_S:.0f}")
    check_priority(priority)


def check_priority(priority: int | None) -> None:
    """Refuse a priority that chunks can't have, with a SettingError."""
    if priority is not None and not 1 <= priority <= columns.MAX_PRIORITY:
        raise SettingError(f"priority={priority} must be from 1 to {columns.MAX_PRIORITY}")


def raw_keys(keys: Sequence[bytes | str]) -> list[bytes]:
    """Offload keys as bytes.

    Raises:
        SettingError: one is invalid.
    """
    raw: list[bytes] = []
    for key in keys:
        try:
            raw.append(bytes.fromhex(key) if isinstance(key, str) else bytes(key))
        except ValueError:
            raise SettingError(f"the key {key!r} is no hexadecimal number") from None
        if not 0 < len(raw[-1]) <= MAX_KEY_BYTES:
            raise SettingError(f"the key {key!r} has {len(raw[-1])} bytes, not 1 to 128")
    return raw


def ordered(keys: Sequence[bytes | str]) -> list[bytes]:
    """The offload keys of one order, each once.

    Raises:
        SettingError: one is invalid, or there are none, or too many.
    """
    raw = raw_keys(keys)
    if not 0 < len(raw) <= operator.MAX_ORDERED:
        raise SettingError(f"{len(raw)} keys: give 1 to {operator.MAX_ORDERED:,} at a time")
    return list(dict.fromkeys(raw))
