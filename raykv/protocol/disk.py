"""Chunks on the nodes' disks: structs that cross processes, as in `messages.py`.

A chunk on a disk is named by its key and its *place*: a number that the node gives once. The same
numbers count the node's changes, so that a page of changes is "what came after number n".
"""

from __future__ import annotations

import msgspec

DISK_SUFFIX = "/disk"
"""Behind a node's id it names that node's disk, where a replica's node is named."""


def disk_of(node_id: str) -> str:
    """The name of a node's disk as the source of a fetch."""
    return node_id + DISK_SUFFIX


def is_disk(source: str) -> bool:
    """Whether the source of a fetch is a disk."""
    return source.endswith(DISK_SUFFIX)


def node_of(source: str) -> str:
    """The node of a source, be it its pool or its disk."""
    return source.removesuffix(DISK_SUFFIX)


class DiskChunks(msgspec.Struct, frozen=True, array_like=True):
    """Columns of chunks that came to a disk; `namespace_index` points into `namespaces`."""

    namespaces: list[str] = []
    namespace_index: list[int] = []
    keys: list[bytes] = []
    places: list[int] = []
    generations: list[int] = []
    slot_bytes: list[int] = []

    def __len__(self) -> int:
        return len(self.keys)


class DiskStats(msgspec.Struct, frozen=True):
    """A disk tier since the NodeActor's start; sizes in bytes. `path` empty: there is none.

    `problem`: why nothing is written, in a sentence. `is_full`: it gives up old files for new ones,
    so that only what was used is worth a place. `room`: chunks that it takes to be written now.
    """

    path: str = ""
    problem: str = ""
    most_bytes: int = 0
    used_bytes: int = 0
    num_files: int = 0
    num_chunks: int = 0
    bytes_written: int = 0
    chunks_written: int = 0
    bytes_read: int = 0
    chunks_read: int = 0
    files_evicted: int = 0
    files_damaged: int = 0
    chunks_damaged: int = 0
    writes_failed: int = 0
    is_full: bool = False
    room: int = 0


class DiskNews(msgspec.Struct, frozen=True):
    """What changed on a disk after number `after` of a listing, up to number `upto`.

    `gone` are places. `is_last`: nothing has changed since. Another `listing` begins anew at 0;
    listing 0 is that of a node without a disk.
    """

    listing: int = 0
    after: int = 0
    upto: int = 0
    came: DiskChunks = DiskChunks()
    gone: list[int] = []
    is_last: bool = True


class Kept(msgspec.Struct, frozen=True):
    """What of a node's pool outlives its NodeActor, in chunks.

    `place`: the folder or file that has it, empty if there is none. `left` chunks are not there;
    `problem` may say why.
    """

    node_id: str
    place: str = ""
    kept: int = 0
    left: int = 0
    problem: str = ""


class Demotions(msgspec.Struct, frozen=True, array_like=True):
    """Columns of chunks that a node's pool gives up."""

    namespaces: list[str] = []
    namespace_index: list[int] = []
    keys: list[bytes] = []
    slots: list[int] = []
    generations: list[int] = []

    def __len__(self) -> int:
        return len(self.keys)


class DiskOrder(msgspec.Struct, frozen=True):
    """What the directory says to a disk: how much of `listing` it knows, and what to write."""

    listing: int = 0
    heard: int = 0
    demoted: Demotions = Demotions()
