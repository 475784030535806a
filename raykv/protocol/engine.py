"""What an EngineCore says to its places and to the scheduler actor, and their answers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from raykv.base.ids import MAX_KEY_BYTES, Stamp, TokenSource
from raykv.base.tenants import is_label
from raykv.protocol import columns, copies, framing, listing, measures
from raykv.protocol.descriptions import Description
from raykv.protocol.sessions import SessionNews

CHUNK_NAME_BYTES = 8
"""Bytes of a chunk's key in a record. Two of a million chunks share them with a probability of
3e-8.
"""

MAX_NAMES_BYTES = 32 << 10
"""Of chunks' names in the records that wait to be told; further requests have none, or those
of their first chunks."""

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
    columns.check_numbers("a token's place", (parting.at,), 0, columns.MAX_NUMBER)
    columns.check_numbers("lengths of keys", [len(parting.nearest)], 1, MAX_KEY_BYTES)
    for tokens in (parting.before, parting.own, parting.other):
        columns.require(len(tokens) <= MAX_SHOWN_TOKENS, f"{len(tokens)} tokens of a prompt")
        columns.check_numbers("tokens of a prompt", tokens, 0, columns.MAX_NUMBER)


class MissRecord(msgspec.Struct, frozen=True, array_like=True):
    """One finished request. `prompt` = `own` + `loaded` + the sum of `missed`, all in tokens.

    `own` were in vLLM's own cache, `missed` has those that were computed, by `MissReason`.
    `missing` is the key of the chunk that decided over those behind it, empty where none did. Of
    the `loaded` ones `fetched` were on another node, and `disk` on a disk.
    `chunks` are the names of its chunks, of generated tokens too, as far as they are known: the
    first `CHUNK_NAME_BYTES` of each key. A chunk has `chunk_tokens` tokens. `parting`: where the
    prompt leaves the nearest one that was there, if that is known. `tenant`: the label of whose
    request it was, empty if it had none. `ignored`: what it asked for and was not done, with why.
    `places`: numbers of those of the engine's places, from 1 on, that had not got the missing chunk
    while others had.
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
    places: list[int] = []


MAX_IGNORED = 8
"""Ignored keys of a request that its record names."""


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
    columns.check_names("a request's id", (record.request_id,))
    columns.require(len(record.ignored) <= MAX_IGNORED, f"{len(record.ignored)} ignored keys")
    columns.check_names("what a request asked for", [*record.ignored, *record.ignored.values()])
    label = record.tenant
    columns.require(not label or is_label(label), f"a tenant's label of {len(label)} characters")
    num_bytes = len(record.chunks)
    is_cut = num_bytes % CHUNK_NAME_BYTES == 0 and num_bytes <= MAX_NAMES_BYTES
    columns.require(is_cut, f"{num_bytes} bytes of chunks' names")
    columns.require(len(record.places) <= columns.MAX_GROUPS, f"{len(record.places)} places")
    columns.check_numbers(
        "tokens of a request", (record.prompt, record.chunk_tokens), 0, columns.MAX_NUMBER
    )
    if record.parting is not None:
        _parting(record.parting)


class Hints(msgspec.Struct, frozen=True, array_like=True):
    """What requests wish for their prompts' chunks: not to be evicted for some seconds
    (`pinned`, `pin_s`), or to be evicted after those of lower priority (`favoured`, `priorities`).
    """

    pinned: columns.Keys = columns.Keys()
    pin_s: list[float] = []
    favoured: columns.Keys = columns.Keys()
    priorities: list[int] = []


class Space(msgspec.Struct, frozen=True):
    """A namespace, and what it is a digest of: `traits` as in `EngineHello`."""

    namespace: str
    traits: dict[str, str] = {}


class Naming(msgspec.Struct, frozen=True, array_like=True):
    """What the user calls the weights of an EngineCore, by the order of that number: those that it
    has had since they changed for the `weights`-th time.
    """

    stamp: Stamp
    version: columns.Text
    weights: columns.Count = 0


NOTHING_ORDERED = Stamp(0, 0)
"""The number that a node or engine shows that has seen no document of orders."""


class EngineHello(framing.Versioned, frozen=True, tag="engine"):
    """An EngineCore introduces itself at one of its places.

    Args:
        version: of the protocol.
        engine_id: vLLM's, or the user's: another life may have the same.
        life: drawn at random by each EngineCore.
        namespace: of its chunks; in another one it introduces itself again.
        model: for people.
        num_ranks: that run at this place.
        slot_bytes: of the chunks of each KV group, by its index.
        versions: for people.
        traits: what the namespace is a digest of, in short texts.
        place: which of the engine's `num_places` this is, from 1 on.
    """

    engine_id: columns.Named
    life: columns.Life
    namespace: columns.Named
    model: columns.Text = ""
    num_ranks: columns.NumRanks = 1
    slot_bytes: columns.SlotSizes = {}
    versions: columns.Text = ""
    traits: Annotated[dict[columns.Text, columns.Text], msgspec.Meta(max_length=256)] = {}
    place: columns.NumRanks = 1
    num_places: columns.NumRanks = 1


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to `EngineHello` and `AttachWorker`, by a life of the NodeActor and its listing. With
    `error` set it refuses, and closes the connection; `unsuited`: it can't open the worker's
    memory, now or later.
    """

    life: int
    error: str = ""
    unsuited: bool = False


class FoundKeys(msgspec.Struct, frozen=True, array_like=True):
    """Chunks that requests have found, or go on storing behind, from heads of prompts to tails.

    What was found does not go for a store for some seconds. `tenants` are labels of whose requests
    those were, empty for nobody's.
    """

    keys: columns.Keys = columns.Keys()
    tenants: columns.Texts = columns.Texts()

    def __post_init__(self) -> None:
        columns.check_column(self.keys, self.tenants)


class Tell(msgspec.Struct, frozen=True, tag="tell"):
    """What an EngineCore says to a place: it repeats harmlessly, and nothing depends on it.

    Args:
        life: of the EngineCore.
        seq: rises by one with each; the same again is a repetition.
        namespace: of the keys.
        found: see there.
        hints: what requests wish for their prompts' chunks.
        sessions: what requests say of theirs, in order.
        finished: requests, and what became of their tokens.
        counters: of the engine since its start.
        latencies: likewise, by what was measured.
        wanted_keys: what is new of the sketch of the chunks that its requests have wanted: hashes
            of 8 bytes, little endian.
        breakers: whom the engine leaves alone.
        described: what is inside of chunks.
        heard: the number of the latest naming that it has taken.
        weights: how often its weights have changed, as far as it knows.
        orders: the number of the latest orders that it knows of; the place may be behind.
    """

    life: columns.Count
    seq: columns.Count
    namespace: columns.Named
    found: FoundKeys = FoundKeys()
    hints: Hints = Hints()
    sessions: Annotated[list[SessionNews], msgspec.Meta(max_length=columns.MAX_ROWS)] = []
    finished: Annotated[list[MissRecord], msgspec.Meta(max_length=columns.MAX_ROWS)] = []
    counters: columns.Counts = {}
    latencies: dict[columns.Text, measures.HistogramData] = {}
    wanted_keys: bytes = b""
    breakers: measures.BreakerReport = measures.BreakerReport()
    described: Annotated[list[Description], msgspec.Meta(max_length=columns.MAX_ROWS)] = []
    heard: Stamp = NOTHING_ORDERED
    weights: columns.Count = 0
    orders: Stamp = NOTHING_ORDERED


class ChangesQuery(msgspec.Struct, frozen=True, tag="changes"):
    """What has changed at a place, for an EngineCore that has read its listing so far.

    It takes `most` rows; with 0 it only hears that the place is there.
    """

    life: columns.Count
    namespace: columns.Named
    position: listing.Position = listing.Position()
    most: Annotated[int, msgspec.Meta(ge=0, le=columns.MAX_KEYS)] = columns.MAX_KEYS // 2


class PlaceFacts(msgspec.Struct, frozen=True, array_like=True):
    """What holds for an engine at a place, besides the listing.

    Args:
        orders: the number of the orders that the place knows.
        is_paused: nothing is stored or loaded.
        is_leaving: the node drains: nothing is stored.
        store_share: one request in this many should store, since little of it is loaded.
        has_peers: other nodes have engines or chunks of the namespace, or it is not known.
        naming: what the user calls the engine's weights, until it was `heard`.
    """

    orders: Stamp = NOTHING_ORDERED
    is_paused: bool = False
    is_leaving: bool = False
    store_share: Annotated[int, msgspec.Meta(ge=1, le=columns.MAX_NAME)] = 1
    has_peers: bool = True
    naming: Naming | None = None


class ChangesAnswer(msgspec.Struct, frozen=True, tag="changed"):
    """Answer to `ChangesQuery`: the next part of the listing, and what holds now.

    `is_known`: the place has been introduced to this life of the engine. `has_more`: there may be
    more to read at once.
    """

    part: listing.ListingPart
    facts: PlaceFacts = PlaceFacts()
    is_known: bool = True
    has_more: bool = False


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """How the `Fetch` with the result's number has ended."""

    result: copies.CopyResult


EngineMessage = EngineHello | Tell | ChangesQuery | copies.Fetch
"""From an EngineCore, over the socket of its host."""

PlaceMessage = Welcome | ChangesAnswer | Fetched
"""From its NodeActor, the same way."""


MOST_ASKED = 16_384
"""Keys of one question: of a prompt of 262,144 tokens, in chunks of 16."""

MOST_SOURCES = 2
"""Of one chunk, that an answer names: the second for when the first has lost it."""


class Ask(framing.Versioned, frozen=True):
    """Which nodes have keys that an engine's places do not have?

    Args:
        version: of the protocol.
        engine_id: who asks.
        life: of the EngineCore.
        namespace: of the keys.
        places: nodes that the engine is at, which are not named in the answer.
        keys: of a prompt, from its head on.
        coming: keys that the engine has begun to store.
    """

    engine_id: columns.Named
    life: columns.Count
    namespace: columns.Named
    places: Annotated[list[columns.Text], msgspec.Meta(min_length=1, max_length=columns.MAX_GROUPS)]
    keys: columns.Keys = columns.Keys()
    coming: columns.Keys = columns.Keys()

    def __post_init__(self) -> None:
        columns.check_column(self.keys, most=MOST_ASKED)
        columns.check_column(self.coming, most=MOST_ASKED)


class AskAnswer(msgspec.Struct, frozen=True):
    """Answer to `Ask`; numbers of keys are those in the question.

    Args:
        life: of the scheduler actor.
        sources: of keys that other nodes have, the best one first.
        coming: numbers of keys that another engine stores now.
        gone: numbers of keys that were somewhere, and `reasons` why they are not there any more.
        other: numbers of keys that only another namespace has.
    """

    life: int
    sources: columns.SourceRows = columns.SourceRows()
    coming: columns.Numbers = columns.Numbers()
    gone: columns.Numbers = columns.Numbers()
    reasons: bytes = b""
    other: columns.Numbers = columns.Numbers()

    def __post_init__(self) -> None:
        kinds = [source.kind for source in self.sources.sources]
        columns.check_numbers("kinds of sources", kinds, 0, columns.SourceKind.DISK)
        columns.check_rows("keys that are gone", self.gone, self.reasons)
        columns.check_numbers("reasons", self.reasons, 0, max(listing.Reason))
