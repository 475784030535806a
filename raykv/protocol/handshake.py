"""Messages as they come in: first whether the sender speaks our version, then whether it is one.

The version is read on its own, because a message of another version need not have the fields of
ours. All structs that have one are maps with the field `version`, and stay so.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from raykv.base.errors import MessageError, VersionError
from raykv.protocol.messages import PROTOCOL_VERSION


class Introduction(msgspec.Struct, frozen=True):
    """What messages of all versions have that have a version, as far as it can be read."""

    version: int | None = None
    raykv_version: str = "of another version"
    num_workers: int = 1


def introduction(raw: bytes) -> Introduction:
    """Of a message that may be of any version, or none at all."""
    try:
        return msgspec.msgpack.decode(raw, type=Introduction)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return Introduction()


def version_objection(sender: str, version: int, here: str) -> str:
    """Why a message of another version is refused."""
    return (
        f"{sender} speaks protocol {version} of RayKV, {here} {PROTOCOL_VERSION}: install the same "
        "version of RayKV on both"
    )


def receive(raw: Any, kind: type[S], sender: str, here: str) -> S:
    """The struct in `raw`, from `sender` to `here` (words for a sentence).

    Raises:
        VersionError: it is of another version; both are named.
        MessageError: it is not such a struct.
    """
    if "version" in kind.__struct_fields__ and isinstance(raw, bytes):
        version = introduction(raw).version
        if version is not None and version != PROTOCOL_VERSION:
            raise VersionError(version_objection(sender, version, here))
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise MessageError(f"{sender} sent {here} no {kind.__name__}: {error}") from error
