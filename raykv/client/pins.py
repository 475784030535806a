"""Chunks that are never evicted, or later than others: pins, and the keys that people name."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raykv.base.errors import ClusterError, NotFoundError, SettingError
from raykv.base.ids import MAX_KEY_BYTES
from raykv.protocol.framing import PROTOCOL_VERSION, encode, receive
from raykv.protocol.operator import (
    MAX_ORDERED,
    MAX_PIN_S,
    MAX_PRIORITY,
    PinAnswer,
    Pinned,
    PinOrder,
    PinStatus,
)

if TYPE_CHECKING:
    from raykv.client.listing import Reader
    from raykv.client.scheduler import Scheduler

PIN_S = 3600.0
"""How long a pin lasts if nobody says it."""


@dataclass(frozen=True)
class Pinning:
    """Pins of a cluster: ordered, ended, listed."""

    scheduler: Scheduler
    reader: Reader

    def pin(
        self,
        keys: Sequence[bytes | str],
        namespace: str,
        ttl_s: float,
        priority: int | None,
        pin_id: str | None,
    ) -> PinStatus:
        check_pin(ttl_s, priority)
        order = PinOrder(
            version=PROTOCOL_VERSION,
            pin_id=pin_id or uuid.uuid4().hex[:8],
            namespace=self.reader.full_namespace(namespace),
            keys=ordered(keys),
            ttl_s=ttl_s,
            priority=priority,
        )
        answer = self.scheduler.ask_for(PinAnswer, "pin", encode(order))
        if answer.pin is None:
            raise ClusterError(f"nothing was pinned: {answer.error}")
        return answer.pin

    def unpin(self, pin_id: str) -> None:
        if not self.scheduler.ask("unpin", pin_id):
            known = ", ".join(sorted(pin.pin_id for pin in self.pins().pins))
            raise NotFoundError(f"there is no pin {pin_id!r}; there are {known or 'none'}")

    def pins(self) -> Pinned:
        return self.scheduler.ask_for(Pinned, "pins")

    def order(self, pin_id: str) -> PinOrder:
        """What a pin was ordered as.

        Raises:
            NotFoundError: there is no such pin.
            ClusterError: RayKV does not run here or does not answer.
        """
        raw = self.scheduler.ask("pin_order", pin_id)
        if not raw:
            raise NotFoundError(f"there is no pin {pin_id!r}")
        return receive(raw, PinOrder, "the scheduler actor", "this process")


def check_pin(ttl_s: float, priority: int | None) -> None:
    """Refuse a pin that no cluster would take.

    Raises:
        SettingError: one of them is not allowed.
    """
    if not 0 < ttl_s <= MAX_PIN_S:
        raise SettingError(f"ttl_s={ttl_s} must be above 0, at most {MAX_PIN_S:.0f}")
    if priority is not None and not 1 <= priority <= MAX_PRIORITY:
        raise SettingError(f"priority={priority} must be from 1 to {MAX_PRIORITY}")


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
    if not 0 < len(raw) <= MAX_ORDERED:
        raise SettingError(f"{len(raw)} keys: give 1 to {MAX_ORDERED:,} at a time")
    return list(dict.fromkeys(raw))
