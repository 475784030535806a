"""An EngineCore and the NodeActors of its places: what they have, and what it says of it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from raykv.base.ids import Stamp
from raykv.protocol.columns import MAX_GROUPS, MAX_KEYS, MAX_NAME, MAX_ROWS, Keys, Numbers
from raykv.protocol.descriptions import Descriptions
from raykv.protocol.engine import Hints, MissRecord, Naming
from raykv.protocol.listing import ListingPart, Position
from raykv.protocol.measures import BreakerReport, HistogramData, KeySketch
from raykv.protocol.named.columns import Count, Named, Text, check_column, check_index
from raykv.protocol.sessions import SessionNews

NOTHING_ORDERED = Stamp(0, 0)
"""The number that is shown by who has seen no document of orders."""


class EngineHello(msgspec.Struct, frozen=True, tag="engine"):
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
    """

    version: int
    engine_id: Named
    life: Count
    namespace: Named
    model: Text = ""
    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_GROUPS)] = 1
    slot_bytes: Annotated[dict[int, Count], msgspec.Meta(max_length=MAX_GROUPS)] = {}
    versions: Text = ""
    traits: Annotated[dict[Text, Text], msgspec.Meta(max_length=256)] = {}


class EngineWelcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to `EngineHello`, by the life of a place's listing. With `error` set it is refused."""

    life: int
    error: str = ""


class FoundKeys(msgspec.Struct, frozen=True, array_like=True):
    """Chunks that requests have found, or go on storing behind, from heads of prompts to tails.

    What was found does not go for a store for some seconds. `tenants` are labels of whose requests
    those were, empty for nobody's; `index` points into them.
    """

    keys: Keys = Keys()
    tenants: list[str] = []
    index: Numbers = Numbers()

    def __post_init__(self) -> None:
        check_column(self.keys, self.index)
        check_index(self.index, self.tenants)


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
        wanted_keys: what is new of the sketch of the chunks that its requests have wanted.
        breakers: whom the engine leaves alone.
        described: what is inside of chunks.
        heard: the number of the latest naming that it has taken.
        weights: how often its weights have changed, as far as it knows.
        orders: the number of the latest orders that it knows of; the place may be behind.
    """

    life: Count
    seq: Count
    namespace: Named
    found: FoundKeys = FoundKeys()
    hints: Hints = Hints()
    sessions: Annotated[list[SessionNews], msgspec.Meta(max_length=MAX_ROWS)] = []
    finished: Annotated[list[MissRecord], msgspec.Meta(max_length=MAX_ROWS)] = []
    counters: Annotated[dict[Text, Count], msgspec.Meta(max_length=MAX_ROWS)] = {}
    latencies: dict[Text, HistogramData] = {}
    wanted_keys: KeySketch = KeySketch()
    breakers: BreakerReport = BreakerReport()
    described: Descriptions = Descriptions()
    heard: Stamp = NOTHING_ORDERED
    weights: Count = 0
    orders: Stamp = NOTHING_ORDERED


class ChangesQuery(msgspec.Struct, frozen=True, tag="changes"):
    """What has changed at a place, for an EngineCore that has read its listing so far.

    It takes so many rows at `most`; with none it only hears that the place is there.
    """

    life: Count
    namespace: Named
    position: Position = Position()
    most: Annotated[int, msgspec.Meta(ge=0, le=MAX_KEYS)] = MAX_KEYS // 2


class ChangesAnswer(msgspec.Struct, frozen=True, tag="changed"):
    """Answer to `ChangesQuery`: the next part of the listing, and what holds at this place now.

    Args:
        part: of the listing.
        orders: the number of the orders that the place knows.
        is_known: it has been introduced to this life of the engine.
        is_paused: nothing is stored or loaded.
        is_leaving: the node drains: nothing is stored.
        store_share: one request of so many should store, since little of what is stored is loaded.
        has_peers: other nodes have engines or chunks of the namespace, or it is not known.
        naming: what the user calls the engine's weights, until it was `heard`.
        has_more: there may be more to read at once.
    """

    part: ListingPart
    orders: Stamp = NOTHING_ORDERED
    is_known: bool = True
    is_paused: bool = False
    is_leaving: bool = False
    store_share: Annotated[int, msgspec.Meta(ge=1, le=MAX_NAME)] = 1
    has_peers: bool = True
    naming: Naming | None = None
    has_more: bool = False


EngineMessage = EngineHello | Tell | ChangesQuery
"""From an EngineCore, over the socket of its host."""

PlaceMessage = EngineWelcome | ChangesAnswer
"""From its NodeActor, the same way."""
