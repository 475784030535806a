"""What operators want of the whole cache: one document, with one number.

Messages carry the number alone, and who is behind asks for the document. It is small: a pin is told
by a digest of its keys, which are an entry of their own.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from raykv.base.ids import Stamp
from raykv.protocol.columns import MAX_NAME, MAX_NUMBER
from raykv.protocol.operator import MAX_PIN_S, MAX_PRIORITY, MAX_QUOTAS

MAX_DOCUMENT_BYTES = 64 << 10
MAX_PINS = 256
MAX_NAMINGS = 256
MAX_DONE = 64

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
        done: ids of the latest orders, with the number at which each was in force first.
    """

    stamp: Stamp
    floors: dict[Name, Number] = {}
    is_paused: bool = False
    shares: Annotated[dict[Name, OrderedShare], msgspec.Meta(max_length=MAX_QUOTAS)] = {}
    namings: Annotated[dict[Name, Name], msgspec.Meta(max_length=MAX_NAMINGS)] = {}
    pins: Annotated[dict[Name, OrderedPin], msgspec.Meta(max_length=MAX_PINS)] = {}
    done: Annotated[dict[Name, Number], msgspec.Meta(max_length=MAX_DONE)] = {}
