"""An engine and the scheduler actor: attaching, and the exchange."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import msgspec

from raykv.base.errors import MessageError
from raykv.base.ids import TokenSource
from raykv.base.tenants import is_label
from raykv.protocol.columns import (
    MAX_GROUPS,
    MAX_NUMBER,
    Handles,
    Keys,
    Leases,
    LostReplicas,
    Replicas,
    check_handles,
    check_keys,
    check_leases,
    check_lost,
    check_names,
    check_numbers,
    check_places,
    check_rows,
    check_sizes,
    require,
)
from raykv.protocol.descriptions import Descriptions, check_descriptions
from raykv.protocol.measures import BreakerReport, HistogramData, KeySketch
from raykv.protocol.operator import MAX_PIN_S, MAX_PRIORITY
from raykv.protocol.sessions import SessionNews, check_news

logger = logging.getLogger("raykv.protocol")

R = TypeVar("R")

CHUNK_NAME_BYTES = 8
"""Bytes of a chunk's key in a record. Two of a million chunks share them with a probability of
3e-8.
"""

MAX_NAMES_BYTES = 32 << 10
"""Of chunks' names in the records that wait for an exchange; further requests have none, or those
of their first chunks."""

LEASE_SHARE = 0.25
"""Of a node's pool, for the free slots that its engines hold, all of them together: what is leased
holds no chunk."""

STEP_SHARE = 0.5
"""The same, where the engines' steps may store more than they would have by `LEASE_SHARE`: what a
step finds no slot for is never stored."""


MAX_SHOWN_TOKENS = 64
"""Of each part of a prompt that a `Parting` shows."""


class Parting(msgspec.Struct, frozen=True, array_like=True):
    """A prompt shares its first `at` tokens with one that was there, and no more.

    `nearest` is the key of the other's chunk there. If `is_same`, that chunk has the same tokens:
    what differs is the salt, the adapter or the media. `before` are the last tokens that both have;
    then come `own` tokens, and in the other prompt `other` ones: none, unless the server allows it.
    """

    at: int
    nearest: bytes
    is_same: bool = False
    before: list[int] = []
    own: list[int] = []
    other: list[int] = []


def _parting(parting: Parting) -> None:
    check_numbers("a token's place", (parting.at,), 0, MAX_NUMBER)
    check_keys("a chunk of a prompt", [parting.nearest])
    for tokens in (parting.before, parting.own, parting.other):
        require(len(tokens) <= MAX_SHOWN_TOKENS, f"{len(tokens)} tokens of a prompt")
        check_numbers("tokens of a prompt", tokens, 0, MAX_NUMBER)


class MissRecord(msgspec.Struct, frozen=True, array_like=True):
    """One finished request. `prompt` = `own` + `loaded` + the sum of `missed`, all in tokens.

    `own` were in vLLM's own cache, `missed` has those that were computed, by `MissReason`.
    `missing` is the key of the chunk that decided over those behind it, empty where none did. Of
    the `loaded` ones `fetched` were on another node, and `disk` on a disk.
    `chunks` are the names of its chunks, of generated tokens too, as far as they are known: the
    first `CHUNK_NAME_BYTES` of each key. A chunk has `chunk_tokens` tokens. `parting`: where the
    prompt leaves the nearest one that was there, if that is known. `tenant`: the label of whose
    request it was, empty if it had none. `ignored`: what it asked for and was not done, with why.
    """

    request_id: str
    prompt: int
    own: int
    loaded: int
    missed: dict[str, int] = {}
    missing: bytes = b""
    chunks: bytes = b""
    chunk_tokens: int = 0
    fetched: int = 0
    disk: int = 0
    parting: Parting | None = None
    tenant: str = ""
    ignored: dict[str, str] = {}


MAX_IGNORED = 8
"""Keys of a request of which it is said that they are ignored."""


def tokens_by_source(record: MissRecord) -> dict[TokenSource, int]:
    """The prompt's tokens; the sum is the prompt's length."""
    return {
        TokenSource.COMPUTED: sum(record.missed.values()),
        TokenSource.OWN_CACHE: record.own,
        TokenSource.SAME_NODE: record.loaded - record.fetched - record.disk,
        TokenSource.OTHER_NODE: record.fetched,
        TokenSource.DISK: record.disk,
    }


def check_record(record: MissRecord) -> None:
    """Refuse what is invalid with a MessageError."""
    check_names("a request's id", (record.request_id,))
    require(len(record.ignored) <= MAX_IGNORED, f"{len(record.ignored)} ignored keys")
    check_names("what a request asked for", [*record.ignored, *record.ignored.values()])
    label = record.tenant
    require(not label or is_label(label), f"a tenant's label of {len(label)} characters")
    num_bytes = len(record.chunks)
    is_cut = num_bytes % CHUNK_NAME_BYTES == 0 and num_bytes <= MAX_NAMES_BYTES
    require(is_cut, f"{num_bytes} bytes of chunks' names")
    check_numbers("tokens of a request", (record.prompt, record.chunk_tokens), 0, MAX_NUMBER)
    if record.parting is not None:
        _parting(record.parting)


class Hints(msgspec.Struct, frozen=True, array_like=True):
    """What requests wish for their prompts' chunks: not to be evicted for so many seconds
    (`pinned`, `pin_s`), or to be evicted after those of lower priority (`favoured`, `priorities`).
    """

    pinned: Keys = Keys()
    pin_s: list[float] = []
    favoured: Keys = Keys()
    priorities: list[int] = []


def _hints(hints: Hints) -> None:
    check_keys("keys to pin", hints.pinned)
    check_rows("hints", hints.pinned, hints.pin_s)
    for pin_s in hints.pin_s:
        require(0 < pin_s <= MAX_PIN_S, f"a pin for {pin_s} s")
    check_keys("keys with a priority", hints.favoured)
    check_rows("hints", hints.favoured, hints.priorities)
    check_numbers("priorities", hints.priorities, 1, MAX_PRIORITY)


class Space(msgspec.Struct, frozen=True):
    """A namespace, and what it is a digest of: `traits` as in `AttachEngine`."""

    namespace: str
    traits: dict[str, str] = {}


class Naming(msgspec.Struct, frozen=True):
    """The user says what the weights of an engine are called."""

    order_id: str
    version: str


class Owned(msgspec.Struct, frozen=True, array_like=True):
    """Columns of leases that are stored at, and of chunks that are loaded, for tenants.

    `tenant_index` points into `tenants`, which are labels.
    """

    tenants: list[str] = []
    tenant_index: list[int] = []
    slots: list[int] = []
    generations: list[int] = []


def check_owned(owned: Owned) -> None:
    """Refuse invalid columns with a MessageError."""
    check_rows("what belongs to tenants", owned.tenant_index, owned.slots)
    check_places("what belongs to tenants", owned.slots, owned.generations)
    check_rows("tenants", owned.tenants)
    check_numbers("numbers of tenants", owned.tenant_index, 0, len(owned.tenants) - 1)
    for label in owned.tenants:
        require(is_label(label), f"a tenant's label of {len(label)} characters")


class AttachEngine(msgspec.Struct, frozen=True):
    """An engine introduces itself to the scheduler actor; also after a restart of that one.

    `slot_bytes` has the slot size of each KV group, in bytes, by group index; `node_epoch` is the
    life of the node's pool that `leases` are of; `traits` what the namespace is a digest of, in
    short texts, to say why two namespaces differ.
    """

    version: int
    engine_id: str
    node_id: str
    namespace: str
    model: str
    num_ranks: int
    slot_bytes: dict[int, int]
    leases: Leases = Leases()
    versions: str = ""
    traits: dict[str, str] = {}
    node_epoch: int = 0


def check_attach(message: AttachEngine) -> None:
    """Refuse an engine's invalid introduction with a MessageError."""
    check_names("a name", (message.engine_id, message.node_id, message.namespace, message.model))
    require(bool(message.engine_id), "an engine without an id")
    require(bool(message.namespace), "an engine without a namespace")
    require(0 < message.num_ranks <= MAX_GROUPS, f"{message.num_ranks} ranks")
    require(bool(message.slot_bytes), "an engine without KV groups")
    check_numbers("KV groups", message.slot_bytes, 0, MAX_GROUPS - 1)
    check_sizes(set(message.slot_bytes.values()))
    check_leases("leases", message.leases)


class EngineAttached(msgspec.Struct, frozen=True):
    """Answer to `AttachEngine`. With `error` set nothing was attached.

    `capacity` has the number of slots that the node's pool can hold for each KV group,
    `lease_share` the share of the pool for the engine's leases of all groups together (0: as it
    was), `step_share` how much it may be for what one step stores; `rejected` has the slots of
    declared leases that the engine does not hold. `cleared`: the generation up to which the chunks
    of its namespace are void, wherever they are.
    """

    epoch: int
    node_epoch: int = 0
    capacity: dict[int, int] = {}
    lease_share: float = 0.0
    step_share: float = 0.0
    rejected: list[int] = []
    paused: bool = False
    error: str = ""
    retry: bool = False
    cleared: int = 0


def check_attached(answer: EngineAttached) -> None:
    """The answer to an engine that attaches.

    Raises:
        MessageError: it is invalid.
    """
    _shares(answer.lease_share, answer.step_share)


class SyncRequest(msgspec.Struct, frozen=True):
    """One exchange of an engine with the scheduler actor.

    `seq` rises by one for each new message; the same `seq` again is a repetition and gets the same
    answer. `wanted` has the number of slots asked for by KV group. `touched` lists keys, least
    recently used first. `pinned` keys are about to be loaded. `dropped` names chunks that the
    NodeActor refused, `lost` those that another node's refused. `asked` keys are not on this node:
    who has them? `announced` chunks are being stored at the leases that are named. `clear` is the
    number of the engine's latest reset that is not confirmed yet (0: none): the namespace is
    emptied everywhere. With `idle` set the answer carries no changes and no grants: the engine has
    not taken in the earlier ones. `finished` requests, and what became of their tokens. `breakers`:
    whom the engine leaves alone. `hints`: what requests wish for their chunks. `latencies`: of the
    engine since its start, by what was measured. `wanted_keys`: what is new of the sketch of the
    chunks that its requests have wanted; their number is among the counters. `described`: what is
    inside of chunks. `heard`: the last `Naming` that has come. `sessions`: what requests say of
    theirs, in order. `owned`: which leases and chunks are whose.
    """

    engine_id: str
    epoch: int
    seq: int
    wanted: dict[int, int] = {}
    touched: Keys = Keys()
    pinned: Keys = Keys()
    released: Leases = Leases()
    dropped: Handles = Handles()
    lost: LostReplicas = LostReplicas()
    asked: Keys = Keys()
    announced: Handles = Handles()
    clear: int = 0
    idle: bool = False
    counters: dict[str, int] = {}
    finished: list[MissRecord] = []
    breakers: BreakerReport = BreakerReport()
    hints: Hints = Hints()
    latencies: dict[str, HistogramData] = {}
    wanted_keys: KeySketch = KeySketch()
    described: Descriptions = Descriptions()
    heard: str = ""
    sessions: list[SessionNews] = []
    owned: Owned = Owned()


def checked_sync(request: SyncRequest) -> SyncRequest:
    """An exchange that may be carried out.

    What it says of single requests, of sessions and of chunks' tokens is for people: a part of that
    which is invalid is left out, and costs neither the rest nor the engine's session.

    Raises:
        MessageError: anything else in it is invalid.
    """
    check_numbers("a message's numbers", (request.seq, request.clear, request.epoch), 0, MAX_NUMBER)
    check_rows("wanted KV groups", request.wanted)
    check_numbers("wanted leases", request.wanted.values(), 0, MAX_NUMBER)
    for what, keys in (
        ("touched keys", request.touched),
        ("pinned keys", request.pinned),
        ("asked keys", request.asked),
    ):
        check_keys(what, keys)
    check_leases("released leases", request.released)
    check_handles("dropped chunks", request.dropped)
    check_handles("announced chunks", request.announced)
    check_lost(request.lost)
    check_names("an order", (request.heard,))
    _counters(request.counters)
    _hints(request.hints)
    _measured(request)
    check_owned(request.owned)
    check_rows("sessions", request.sessions)
    check_rows("requests that have ended", request.finished)
    return msgspec.structs.replace(
        request,
        sessions=_valid(request.sessions, check_news),
        finished=_valid(request.finished, check_record),
        described=next(iter(_valid([request.described], check_descriptions)), Descriptions()),
    )


def _valid(rows: Sequence[R], check: Callable[[R], None]) -> list[R]:
    """The rows that `check` does not refuse."""
    valid: list[R] = []
    for row in rows:
        try:
            check(row)
        except MessageError as error:
            logger.warning("left out of an engine's message: %s", error)
        else:
            valid.append(row)
    return valid


def _counters(counters: Mapping[str, int]) -> None:
    check_rows("counters", counters)
    check_numbers("counters", counters.values(), 0, MAX_NUMBER)
    check_names("a counter's name", counters)


def _measured(request: SyncRequest) -> None:
    check_rows("latencies", request.latencies)
    check_names("a latency's name", request.latencies)
    for data in request.latencies.values():
        check_rows("buckets of a latency", data.counts)
        check_numbers("buckets of a latency", data.counts, 0, MAX_NUMBER)
        require(0 <= data.total < math.inf, f"a latency of {data.total} s")
    sketch = request.wanted_keys
    require(len(sketch.registers) == 2 * len(sketch.ranks), "a sketch of two sizes")
    check_rows("registers of a sketch", sketch.ranks)


class SyncReply(msgspec.Struct, frozen=True):
    """Answer to `SyncRequest`: changes of the engine's mirror, in order, then new leases.

    With `attach` set the actor does not know the engine (it restarted, or the engine's session
    expired): attach again. `reset` comes before a snapshot: forget the mirror first. `void`: the
    namespace was cleared, earlier leases and stores are worth nothing. `cleared` is the highest
    `clear` that was carried out. `more` says that further changes are waiting. `replicas` answers
    the request's `asked`. `has_peers`: another node or engine may have chunks of this namespace.
    `store_share`: one request of so many should store, since little of what is stored is loaded.
    `lease_share` and `step_share`: as in `EngineAttached`.
    `naming`: what the user calls the engine's weights, until it was `heard`.
    `refined`: tokens of `finished` requests that were missed for that reason, not for the one that
    the engine knew (`known_as`).
    """

    epoch: int
    seq: int
    node_epoch: int = 0
    attach: bool = False
    reset: bool = False
    void: bool = False
    cleared: int = 0
    more: bool = False
    paused: bool = False
    stored: Handles = Handles()
    removed: Handles = Handles()
    granted: Leases = Leases()
    replicas: Replicas = Replicas()
    has_peers: bool = False
    store_share: int = 1
    lease_share: float = 0.0
    step_share: float = 0.0
    refined: dict[str, int] = {}
    naming: Naming | None = None


def check_reply(reply: SyncReply, request: SyncRequest, groups: Collection[int]) -> None:
    """An answer to `request` of an engine that has these KV groups.

    Raises:
        MessageError: it is invalid.
    """
    check_handles("stored chunks", reply.stored)
    check_handles("removed chunks", reply.removed)
    check_leases("granted leases", reply.granted)
    require(set(reply.granted.groups).issubset(groups), "leases of a KV group that is not there")
    require(0 < reply.store_share <= MAX_NUMBER, f"one store of {reply.store_share}")
    _shares(reply.lease_share, reply.step_share)
    told = reply.replicas
    check_rows("replicas", told.key_index, told.source_index)
    check_rows("replicas", told.slots, told.key_index)
    check_places("replicas", told.slots, told.generations)
    check_rows("sources", told.sources, told.node_epochs)
    check_numbers("numbers of sources", told.source_index, 0, len(told.sources) - 1)
    for positions in (told.key_index, told.pending):
        check_numbers("numbers of keys", positions, 0, len(request.asked) - 1)


def _shares(*shares: float) -> None:
    for share in shares:
        # Comparisons with NaN are false.
        require(0 <= share <= 1, f"leases of {share} of the pool")
