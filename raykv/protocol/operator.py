"""What operators order of the cache, and what they get to know: pins, quotas, transfers, pools
ahead of time.

Orders repeat harmlessly: each names itself, and comes to the same when it comes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from raykv.base.ids import SLOT_ALIGNMENT, Stamp
from raykv.base.tenants import MAX_LABEL, OTHERS, is_label
from raykv.protocol.columns import (
    MAX_NAME,
    MAX_NUMBER,
    MAX_POOL_BYTES,
    Handles,
    LostReplicas,
    Replicas,
    check_keys,
    check_lost,
    check_names,
    check_rows,
    check_sizes,
    require,
)
from raykv.protocol.node import Demotions

MAX_ORDERED = 4096
"""Chunks that one order names, at most."""

MAX_PIN_S = 30 * 86_400.0
"""Longest duration of a pin: a forgotten one must not hold a pool for ever."""

MAX_PRIORITY = 9
"""The highest that a pin may have which gives way; the lowest is 1."""

MAX_QUOTAS = 64
"""Quotas: each has its own eviction orders on all nodes."""

MAX_GUARANTEED = 0.75
"""Of a pool, for all guarantees together: free slots that engines lease may take the rest."""


class PinOrder(msgspec.Struct, frozen=True):
    """Keep chunks for `ttl_s` seconds, those too that are not stored yet.

    Without a `priority` they are never evicted; with one, only after all chunks that have none or
    a lower one. An order of a known `pin_id` takes the place of the earlier one.
    """

    version: int
    pin_id: str
    namespace: str
    keys: list[bytes]
    ttl_s: float
    priority: int | None = None


def check_pin(order: PinOrder) -> None:
    """Refuse an invalid order to pin with a MessageError."""
    _ordered("a pin", order.pin_id, order.namespace, order.keys)
    require(0 < order.ttl_s <= MAX_PIN_S, f"a pin for {order.ttl_s} s")
    require(order.priority is None or 1 <= order.priority <= MAX_PRIORITY, "a pin's priority")


class PinStatus(msgspec.Struct, frozen=True):
    """A pin: `held_chunks` of its `chunks` are stored on some node and kept there.

    `kept_bytes` counts every replica of them, `waiting_chunks` are stored but not kept, since the
    pins of their node have no room left.
    """

    pin_id: str
    namespace: str
    chunks: int
    held_chunks: int
    kept_bytes: int
    left_s: float
    priority: int | None = None
    waiting_chunks: int = 0


class PinAnswer(msgspec.Struct, frozen=True):
    """Answer to `PinOrder`: the pin, or why nothing was pinned."""

    version: int
    pin: PinStatus | None = None
    error: str = ""


class NodePins(msgspec.Struct, frozen=True):
    """What pins keep on a node, in bytes, and how much they may; `client_bytes` is the part that
    only requests have asked for.
    """

    node_id: str
    kept_bytes: int
    kept_chunks: int
    client_bytes: int
    quota_bytes: int
    waiting_chunks: int = 0


class Pinned(msgspec.Struct, frozen=True):
    """All pins. `client_chunks` are those that requests have asked for, `hints_refused` how many
    of such wishes were left out for lack of room since the scheduler actor began.
    """

    version: int
    pins: list[PinStatus] = []
    nodes: list[NodePins] = []
    client_chunks: int = 0
    hints_refused: int = 0


class Exported(msgspec.Struct, frozen=True):
    """What an export has written; `asked` chunks were asked for, or found."""

    path: str
    namespace: str
    asked: int
    files: int = 0
    chunks: int = 0
    num_bytes: int = 0


class TransferOrder(msgspec.Struct, frozen=True):
    """Lend slots of a node for chunks that others have.

    With `slot_bytes`, a size for each key, they come from outside of the cluster. Orders with the
    same `series_id` are pages of one whole: none makes room by giving up what another has brought.
    """

    version: int
    transfer_id: str
    namespace: str
    node_id: str
    keys: list[bytes]
    slot_bytes: list[int] = []
    series_id: str = ""


def check_transfer(order: TransferOrder) -> None:
    """Refuse an invalid order to lend slots with a MessageError."""
    _ordered("a transfer", order.transfer_id, order.namespace, order.keys)
    check_names("a node", [order.node_id, order.series_id])
    check_sizes(set(order.slot_bytes))
    require(len(order.slot_bytes) in (0, len(set(order.keys))), "sizes that don't fit the chunks")


class TransferGrant(msgspec.Struct, frozen=True):
    """Answer to `TransferOrder`: what `FetchRequest` needs. With `error` set nothing was lent.

    `there` chunks are on the node already, `nowhere` on none; for `no_room` the node has no slot.
    `is_early`: the error is over within seconds. `demoted` chunks were evicted, and are to be
    copied for the node's disk before others are stored.
    """

    version: int
    node_epoch: int = 0
    handles: Handles = Handles()
    slot_bytes: list[int] = []
    sources: Replicas = Replicas()
    there: int = 0
    nowhere: int = 0
    no_room: int = 0
    error: str = ""
    is_early: bool = False
    demoted: Demotions = Demotions()


class TransferEnd(msgspec.Struct, frozen=True):
    """A transfer is over: what was lent and not used is free again.

    In the slots `came` there are chunks now, which will be reported. `lost` as sources said.
    """

    version: int
    transfer_id: str
    namespace: str
    came: list[int] = []
    lost: LostReplicas = LostReplicas()


def check_end(message: TransferEnd) -> None:
    """Refuse an invalid end of a transfer with a MessageError."""
    check_names("a name", [message.transfer_id, message.namespace])
    check_rows("slots", message.came)
    check_lost(message.lost)


class ReleaseOrder(msgspec.Struct, frozen=True):
    """Give up the replicas of chunks that one node has on all other nodes."""

    version: int
    namespace: str
    node_id: str
    keys: list[bytes]


def check_release(order: ReleaseOrder) -> None:
    """Refuse an invalid order to give chunks up with a MessageError."""
    _ordered("a release", order.node_id, order.namespace, order.keys)


class Released(msgspec.Struct, frozen=True):
    """Answer to `ReleaseOrder`, in replicas: `kept` are pinned where they are, `absent` stay since
    the node that should have them does not.
    """

    version: int
    dropped: int = 0
    kept: int = 0
    absent: int = 0


class TransferResult(msgspec.Struct, frozen=True):
    """What became of a prefetch or a move, in chunks; `num_bytes` have come to the node.

    `refusals` says how often a fetch failed for which reason. `dropped` replicas were given up
    elsewhere, `kept` ones are pinned there.
    """

    asked: int
    came: int = 0
    num_bytes: int = 0
    there: int = 0
    nowhere: int = 0
    no_room: int = 0
    refusals: dict[str, int] = {}
    seconds: float = 0.0
    dropped: int = 0
    kept: int = 0

    @property
    def failed(self) -> int:
        """Chunks that are not on the node now."""
        return self.asked - self.came - self.there


class PoolWish(msgspec.Struct, frozen=True):
    """Which nodes are to have a NodeActor, also those that join later, and with what pool.

    `on`: "all", a Ray resource like "GPU", or a label as "key=value". `node_ids` names nodes
    instead. `pool_bytes` None: a quarter of what the node has free. `slab_bytes` None: of the size
    that fits the pool. `metrics`: port, address and file, as the settings of these names; `disk`:
    path, bytes, and bytes that stay free; `transport`: as the setting.
    """

    version: int
    on: str = "all"
    node_ids: list[str] = []
    pool_bytes: int | None = None
    pool_path: str = ""
    slab_bytes: int | None = None
    metrics: tuple[str, str, str] = ("auto", "", "")
    disk: tuple[str, int | None, int] = ("", None, 0)
    transport: str = "ray"


def check_wish(wish: PoolWish) -> None:
    """Refuse an invalid wish for pools with a MessageError."""
    check_names("a name", (wish.on, wish.pool_path, *wish.node_ids, *wish.metrics, wish.transport))
    check_rows("nodes", wish.node_ids)
    for size in (wish.pool_bytes, wish.slab_bytes):
        if size is not None:
            require(SLOT_ALIGNMENT <= size <= MAX_POOL_BYTES, f"a pool or a slab of {size} bytes")


class Quota(msgspec.Struct, frozen=True):
    """A tenant's share of every pool and disk, from 0 to 1: `guaranteed` at least, and `most`.

    `name` is for people; `tenant` the label of its requests, empty for that of all others.
    """

    version: int
    name: str
    tenant: str
    guaranteed: float = 0.0
    most: float = 1.0


def check_quota(quota: Quota) -> None:
    """Refuse an invalid quota with a MessageError."""
    require(0 < len(quota.name) <= MAX_LABEL, f"a quota's name of {len(quota.name)} characters")
    require(quota.name.isprintable(), "a quota's name that can't be shown")
    is_others = quota.name == OTHERS and not quota.tenant
    require(is_others or is_label(quota.tenant), f"a tenant's label {quota.tenant!r}")
    # Comparisons with NaN are false.
    require(0 <= quota.guaranteed <= quota.most <= 1, "a share that is not from 0 to 1")


class QuotaAnswer(msgspec.Struct, frozen=True):
    """Answer to `Quota`: why it was refused; empty: it holds from now on."""

    version: int
    error: str = ""


class TenantStatus(msgspec.Struct, frozen=True):
    """A tenant that has a quota, or chunks in pools; `pool_bytes` are those, replicas counted, and
    `disk_bytes` its files on disks.

    `has_quota`: it has a quota; else the shares are those of everybody without one.
    """

    name: str
    tenant: str
    pool_bytes: int = 0
    disk_bytes: int = 0
    has_quota: bool = False
    guaranteed: float = 0.0
    most: float = 1.0


class TenantPage(msgspec.Struct, frozen=True):
    """All tenants that are known."""

    version: int
    tenants: list[TenantStatus] = []


class KeptPin(msgspec.Struct, frozen=True):
    """A pin as it outlives the scheduler actor; it ends at a Unix time."""

    order: PinOrder
    ends_at: float


class KeptLife(msgspec.Struct, frozen=True):
    """What a scheduler actor's next life begins with: the last epoch of its generations, and by
    namespace the generation up to which chunks were cleared.
    """

    epoch: int = 0
    cleared: dict[str, int] = {}


class NodeUp(msgspec.Struct, frozen=True):
    """What `up` found, or made, on a node; `error` says why it has no pool, `note` what is odd."""

    node_id: str
    hostname: str
    is_new: bool = False
    pool_bytes: int = 0
    prefaulted_bytes: int = 0
    error: str = ""
    note: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether there is nothing left to do."""
        return bool(self.error) or 0 < self.pool_bytes <= self.prefaulted_bytes


def _ordered(what: str, name: str, namespace: str, keys: Sequence[bytes]) -> None:
    check_names(what, [name, namespace])
    require(bool(name and namespace), f"{what} without a name, or a namespace")
    check_keys(f"keys of {what}", keys)
    require(0 < len(keys) <= MAX_ORDERED, f"{what} of {len(keys)} chunks")


# The document of all orders: messages carry its number, and who is behind asks for it. It is small:
# a pin is told by a digest of its keys, which are an entry of their own.

MAX_DOCUMENT_BYTES = 64 << 10
MAX_TOLD_PINS = 256
MAX_TOLD_NAMINGS = 256
MAX_TOLD_DONE = 64

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
Part = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
"""Of a whole."""


class OrderedPin(msgspec.Struct, frozen=True):
    """Keep some chunks of a namespace for as long; `digest` names the entry with their keys."""

    namespace: Name
    digest: Annotated[bytes, msgspec.Meta(max_length=64)]
    num_keys: Number
    left_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_PIN_S)]
    priority: Annotated[int, msgspec.Meta(ge=1, le=MAX_PRIORITY)] | None = None


class OrderedShare(msgspec.Struct, frozen=True):
    """A tenant's share of every pool and disk; `name` is for people."""

    name: Name
    guaranteed: Part = 0.0
    most: Part = 1.0


class OrdersDocument(msgspec.Struct, frozen=True):
    """All orders that are in force.

    Args:
        stamp: its number.
        floors: by namespace; copies with a lower number are void. The empty name: of all.
        is_paused: nothing is stored or loaded.
        shares: by the label of a tenant's requests.
        namings: what the weights of engines are called, by the beginning of a namespace or engine.
        pins: by id.
        done: ids of the latest orders, with the number at which each came into force.
    """

    stamp: Stamp
    floors: dict[Name, Number] = {}
    is_paused: bool = False
    shares: Annotated[dict[Name, OrderedShare], msgspec.Meta(max_length=MAX_QUOTAS)] = {}
    namings: Annotated[dict[Name, Name], msgspec.Meta(max_length=MAX_TOLD_NAMINGS)] = {}
    pins: Annotated[dict[Name, OrderedPin], msgspec.Meta(max_length=MAX_TOLD_PINS)] = {}
    done: Annotated[dict[Name, Stamp], msgspec.Meta(max_length=MAX_TOLD_DONE)] = {}

    def __post_init__(self) -> None:
        for stamp in (self.stamp, *self.done.values()):
            if not 0 <= min(stamp) <= max(stamp) <= MAX_NUMBER:
                raise ValueError(f"number {stamp}")
