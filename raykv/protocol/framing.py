"""Messages as bytes; one of another version is refused, with a sentence about both.

Every struct that crosses a process is MessagePack: columns where there may be many thousand rows.
"""

from __future__ import annotations

from types import UnionType
from typing import Any, TypeVar, overload

import msgspec

from raykv.base.errors import MessageError, VersionError

PROTOCOL_VERSION = 21
"""Raised with every change of a message. Both ends compare it when they meet."""

S = TypeVar("S", bound=msgspec.Struct)


class Versioned(msgspec.Struct, frozen=True, kw_only=True):
    """A message that says which `version` of the protocol its sender speaks; see `receive`.

    None leaves it out: that would pass for ours.
    """

    version: int = PROTOCOL_VERSION


def encode(message: msgspec.Struct) -> bytes:
    """MessagePack bytes of `message`."""
    return msgspec.msgpack.encode(message)


def decode(raw: bytes, kind: type[S]) -> S:
    """The struct in `raw`.

    Raises:
        msgspec.DecodeError: `raw` is not such a struct (`ValidationError` for a wrong type).
    """
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None


class Introduction(msgspec.Struct, frozen=True):
    """What can be read of a message of any version that has one."""

    type: str = ""
    version: int | None = None
    raykv_version: str = "of another version"
    num_workers: int = 1


def introduction(raw: bytes) -> Introduction:
    """The beginning of a message that may be of any version, or no message at all."""
    try:
        return msgspec.msgpack.decode(raw, type=Introduction)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return Introduction()


@overload
def receive(raw: Any, kind: type[S], sender: str, here: str) -> S: ...


@overload
def receive(raw: Any, kind: UnionType, sender: str, here: str) -> Any: ...


def receive(raw: Any, kind: Any, sender: str, here: str) -> Any:
    """The struct in `raw`, one of `kind`, from `sender` to `here` (words for a sentence).

    Raises:
        VersionError: it is of another version; both are named.
        MessageError: it is not such a struct.
    """
    try:
        message = msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        _check_version(introduction(raw).version, sender, here)
        name = kind.__name__ if isinstance(kind, type) else "message"
        raise MessageError(f"{sender} sent {here} no {name}: {error}") from error
    _check_version(getattr(message, "version", None), sender, here)
    return message


def _check_version(version: int | None, sender: str, here: str) -> None:
    if version is not None and version != PROTOCOL_VERSION:
        raise VersionError(
            f"{sender} speaks protocol {version} of RayKV, {here} {PROTOCOL_VERSION}: install the "
            "same version of RayKV on both"
        )
