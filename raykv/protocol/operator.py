"""What operators order of the cache, and what they get to know: orders, pins, quotas, transfers,
pools ahead of time.

Orders repeat harmlessly: each has an id, and comes to the same when it comes again. All that are in
force are one numbered document.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from raykv.base.ids import SLOT_ALIGNMENT, Stamp
from raykv.base.tenants import MAX_LABEL, OTHERS, is_label
from raykv.protocol import columns, framing
from raykv.protocol.engine import Naming

MAX_ORDERED = 4096
"""Chunks that one order names, at most."""

MAX_PIN_S = 30 * 86_400.0
"""Longest duration of a pin: a forgotten one must not hold a pool for ever."""

MAX_QUOTAS = 64
"""Quotas: each has its own eviction orders on all nodes."""

MAX_GUARANTEED = 0.75
"""Of a pool, for all guarantees together."""

MAX_ORDER_ID = 128
"""Characters: the document has the last ones."""

ShortName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ORDER_ID)]
Priority = Annotated[int, msgspec.Meta(ge=1, le=columns.MAX_PRIORITY)]
PoolBytes = Annotated[int, msgspec.Meta(ge=SLOT_ALIGNMENT, le=columns.MAX_POOL_BYTES)]
Part = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
"""Of a whole."""


class Order(framing.Versioned, frozen=True):
    """What all orders have. One of a known `order_id` is that order once more."""

    order_id: ShortName


class PauseOrder(Order, frozen=True, tag="pause"):
    """Switch the cache off for all engines, or on."""

    paused: bool


class ClearOrder(Order, frozen=True, tag="clear"):
    """Empty a namespace, by its whole name; with an empty one, all."""

    namespace: columns.Text = ""


class PinOrder(Order, frozen=True, tag="pin"):
    """Keep chunks for `ttl_s` seconds, those too that are not stored yet.

    Without a `priority` they are never evicted; with one, only after all chunks that have none. An
    order of a known `pin_id` takes the place of the earlier one.
    """

    pin_id: ShortName
    namespace: columns.Named
    keys: columns.Keys
    ttl_s: Annotated[float, msgspec.Meta(gt=0.0, le=MAX_PIN_S)]
    priority: Priority | None = None

    def __post_init__(self) -> None:
        _check_ordered(self.keys)


class UnpinOrder(Order, frozen=True, tag="unpin"):
    """End a pin."""

    pin_id: ShortName


class Quota(Order, frozen=True, tag="quota"):
    """A tenant's share of every pool and disk, from 0 to 1: `guaranteed` at least, and `most`.

    `name` is for people; `tenant` the label of its requests, empty for that of all others.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_LABEL)]
    tenant: Annotated[str, msgspec.Meta(max_length=MAX_LABEL)]
    guaranteed: Part = 0.0
    most: Part = 1.0

    def __post_init__(self) -> None:
        is_others = self.name == OTHERS and not self.tenant
        is_named = self.name.isprintable() and (is_others or is_label(self.tenant))
        columns.require(is_named, f"a quota named {self.name!r} of the tenant {self.tenant!r}")
        columns.require(self.guaranteed <= self.most, "a quota that guarantees more than it allows")


class EndQuota(Order, frozen=True, tag="end_quota"):
    """End the quota of that name."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_LABEL)]


class NameWeights(Order, frozen=True, tag="name_weights"):
    """What the weights are called that engines have now whose ids begin so."""

    beginning: columns.Named
    weights_version: columns.Text


OperatorOrder = PauseOrder | ClearOrder | PinOrder | UnpinOrder | Quota | EndQuota | NameWeights


class OrderAnswer(msgspec.Struct, frozen=True):
    """Answer to an order, which will be carried out, or why not."""

    error: str = ""


class OrderState(msgspec.Struct, frozen=True):
    """What has become of an order.

    `orders`: the number of the document at which it came into force; None: it has not yet, is not
    known, or was refused: then `error` says why. `behind`: nodes that report and have not shown
    that number; it is done where there is none. `is_known`: it is under way, or was carried out or
    refused lately. `told`: ids of the engines that a naming of weights is for.
    """

    orders: Stamp | None = None
    error: str = ""
    behind: list[str] = []
    is_known: bool = True
    told: list[str] = []


# Pins


class PinHere(msgspec.Struct, frozen=True):
    """A pin at one node, or what is there of one part, by the numbers of its chunks in the order:
    those that are kept here, and those that are here and not kept, since pins have no room left.
    `num_bytes` are kept.
    """

    kept: columns.Numbers = columns.Numbers()
    waiting: columns.Numbers = columns.Numbers()
    num_bytes: int = 0


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


class PinsHere(framing.Versioned, frozen=True):
    """What one node says of pins: of each, by its id and the part that is here, and in all.

    `client_chunks` are those that requests have asked for, `hints_refused` how many such wishes
    were left out for lack of room since its start.
    """

    node: NodePins
    held: dict[str, dict[str, PinHere]] = {}
    client_chunks: int = 0
    hints_refused: int = 0


class PinStatus(msgspec.Struct, frozen=True):
    """A pin: `held_chunks` of its `chunks` are stored on some node and kept there, or all their
    parts of one shape of engine are on several.

    `kept_bytes` counts every copy of them, `waiting_chunks` are stored but not kept, since the
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


class Pinned(framing.Versioned, frozen=True):
    """All pins, put together from what nodes say. `client_chunks` are those that requests have
    asked for, `hints_refused` how many such wishes were left out for lack of room since the
    NodeActors began.
    """

    pins: list[PinStatus] = []
    nodes: list[NodePins] = []
    client_chunks: int = 0
    hints_refused: int = 0


# Chunks elsewhere


class DropOrder(framing.Versioned, frozen=True):
    """Give up the copies of chunks that one node has in its pool, if they have no more blocks than
    these, which are elsewhere; those that are pinned only `with_pinned`.
    """

    namespace: columns.Named
    keys: columns.Keys
    first_block: columns.Numbers
    num_blocks: columns.Numbers
    with_pinned: bool = False

    def __post_init__(self) -> None:
        _check_ordered(self.keys)
        columns.check_column(self.keys, self.first_block, self.num_blocks)


class Released(framing.Versioned, frozen=True):
    """Answer to `DropOrder`, in copies: `kept` are pinned, or have more blocks; `absent` are not
    there.
    """

    dropped: int = 0
    kept: int = 0
    absent: int = 0


class TransferResult(msgspec.Struct, frozen=True):
    """What became of a prefetch or a move, in chunks; `num_bytes` have come to the node.

    `refusals` says how often a fetch failed for which reason. `dropped` copies were given up
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


class Exported(msgspec.Struct, frozen=True):
    """What an export has written; `asked` chunks were asked for, or found."""

    path: str
    namespace: str
    asked: int
    files: int = 0
    chunks: int = 0
    num_bytes: int = 0


# Pools


class PoolWish(framing.Versioned, frozen=True):
    """Which nodes are to have a NodeActor, also those that join later, and with what pool.

    `on`: "all", a Ray resource like "GPU", or a label as "key=value". `node_ids` names nodes
    instead. `pool_bytes` None: a quarter of what the node has free. `slab_bytes` None: of the size
    that fits the pool. `metrics`: port and address, as the settings of these names; `disk`:
    path, bytes, and bytes that stay free; `transport` and `pin_share`: as the settings.
    """

    on: columns.Text = "all"
    node_ids: Annotated[list[columns.Text], msgspec.Meta(max_length=columns.MAX_ROWS)] = []
    pool_bytes: PoolBytes | None = None
    pool_path: columns.Text = ""
    slab_bytes: PoolBytes | None = None
    metrics: tuple[columns.Text, columns.Text] = ("auto", "")
    disk: tuple[str, int | None, int] = ("", None, 0)
    transport: columns.Text = "ray"
    pin_share: Part = 0.25


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


# Tenants


class TenantStatus(msgspec.Struct, frozen=True):
    """A tenant with a quota, or with chunks: `pool_bytes` in pools, every copy counted, and
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


def _check_ordered(keys: columns.Keys) -> None:
    columns.check_column(keys, most=MAX_ORDERED)
    columns.require(bool(keys), "an order of no chunks")


# The document of all orders: messages carry its number, and who is behind asks for it. It is small:
# it names a pin's keys by a digest, and they are an entry of their own.

MAX_DOCUMENT_BYTES = 64 << 10

MAX_WANTED_BYTES = 48 << 10
"""Of it, without floors and ids of orders: the cache can be cleared however many pins there are."""

MAX_TOLD_PINS = 256
"""A pin takes 140 bytes: more than these would take the room of quotas and names of weights."""

MAX_TOLD_NAMINGS = 256
MAX_TOLD_DONE = 64


class OrderedPin(msgspec.Struct, frozen=True):
    """Keep some chunks of a namespace for as long; `digest` names the entry with their keys."""

    namespace: columns.Text
    digest: Annotated[bytes, msgspec.Meta(max_length=64)]
    num_keys: columns.Count
    left_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_PIN_S)]
    priority: Priority | None = None


class OrderedShare(msgspec.Struct, frozen=True):
    """A tenant's share of every pool and disk; `name` is for people."""

    name: columns.Text
    guaranteed: Part = 0.0
    most: Part = 1.0


class OrdersDocument(msgspec.Struct, frozen=True):
    """All orders that are in force.

    Args:
        stamp: its number.
        floors: by namespace; copies with a lower number are void. The empty name: of all.
        is_paused: nothing is stored or loaded.
        shares: by the label of a tenant's requests.
        namings: what weights are called, by the life of the EngineCore that had them.
        pins: by id.
        done: ids of the latest orders, with the number at which each came into force.
    """

    stamp: Stamp
    floors: dict[columns.Text, columns.Count] = {}
    is_paused: bool = False
    shares: Annotated[dict[columns.Text, OrderedShare], msgspec.Meta(max_length=MAX_QUOTAS)] = {}
    namings: Annotated[dict[columns.Count, Naming], msgspec.Meta(max_length=MAX_TOLD_NAMINGS)] = {}
    pins: Annotated[dict[columns.Text, OrderedPin], msgspec.Meta(max_length=MAX_TOLD_PINS)] = {}
    done: Annotated[dict[columns.Text, Stamp], msgspec.Meta(max_length=MAX_TOLD_DONE)] = {}

    def __post_init__(self) -> None:
        names = (each.stamp for each in self.namings.values())
        columns.check_stamps(self.stamp, *self.done.values(), *names)

    def later(self, passed_s: float) -> OrdersDocument:
        """The same some seconds later: pins have less time left, or are over."""
        pins = {
            pin_id: msgspec.structs.replace(pin, left_s=pin.left_s - passed_s)
            for pin_id, pin in self.pins.items()
            if pin.left_s > passed_s
        }
        return msgspec.structs.replace(self, pins=pins)
