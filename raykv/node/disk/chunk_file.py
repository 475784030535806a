"""One file of chunks, as safetensors: written whole or not at all, read chunk by chunk.

Each chunk is a tensor of bytes (U8) that is named by its key in hex. The file's metadata has the
format's version, the namespace, and by key the number of the orders that it was stored under, as
[history, number], the checksum (XXH3, 64 bit), and which of the chunk's blocks were stored, as
[first, length]; the bytes of the others are zero.

A file gets its name when all of it is on the disk: what has that name is whole, unless the disk
lies. It is read and not mapped: a file that was cut short would kill the process that had mapped
it. What is read is compared with its checksum.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from safetensors.numpy import save_file

from raykv.base.errors import ChunkFileError, OtherFormatError
from raykv.base.ids import (
    ALL_BLOCKS,
    MAX_KEY_BYTES,
    Blocks,
    Key,
    Namespace,
    Stamp,
)
from raykv.node.pool.shelf import DiskChunk
from raykv.protocol.columns import MAX_NUMBER

Bytes = npt.NDArray[np.uint8]

FORMAT = "raykv.chunks.3"
"""Version of the layout; no other is read."""

SUFFIX = ".safetensors"
PART_SUFFIX = ".part"
"""Of a file that is being written, or was when its writer died."""

MAX_HEADER_BYTES = 64 << 20

_METADATA = "__metadata__"


@dataclass(frozen=True)
class ChunkBytes:
    """A chunk to be written; `data` is [num_bytes] uint8."""

    key: Key
    stamp: Stamp
    checksum: int
    data: Bytes
    blocks: Blocks = ALL_BLOCKS


@dataclass(frozen=True)
class ChunkFile:
    """What a file's header says. `facts` is what else its writer noted."""

    path: Path
    num_bytes: int
    namespace: Namespace
    chunks: list[DiskChunk]
    facts: dict[str, str]


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    stamp: Stamp
    checksum: str
    blocks: Blocks


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def write_chunks(
    path: Path,
    namespace: Namespace,
    chunks: Sequence[ChunkBytes],
    facts: Mapping[str, str] | None = None,
) -> int:
    """Write a file; it is not there before all of it is on the disk. Returns its size in bytes.

    Raises:
        OSError: it could not be written; nothing is left of it.
    """
    sealed = {
        each.key.hex(): _Sealed(each.stamp, f"{each.checksum:016x}", each.blocks) for each in chunks
    }
    metadata = {
        **(facts or {}),
        "format": FORMAT,
        "namespace": str(namespace),
        "chunks": msgspec.json.encode(sealed).decode(),
    }
    with whole(path) as part:
        save_file({each.key.hex(): each.data for each in chunks}, part, metadata)
        num_bytes = to_disk(part)
    to_disk(path.parent)
    return num_bytes


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write a file that gets its name, whatever has it, at the end.

    Raises:
        OSError: it could not be written; nothing is left of it.
    """
    part = path.with_name(path.name + PART_SUFFIX)
    try:
        yield part
        part.rename(path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if isinstance(error, OSError) or not isinstance(error, Exception):
            raise
        # The library wraps the system's errors in one of its own.
        raise OSError(str(error)) from error


def to_disk(path: Path) -> int:
    """Flush a file, or the names in a folder, to the disk; returns its size."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def read_header(path: Path) -> ChunkFile:
    """What is in a file, and where; its chunks' bytes are not read.

    Raises:
        OtherFormatError: it is of another format.
        ChunkFileError: it is damaged, cut short, or no such file at all.
        OSError: it can't be read.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise ChunkFileError(f"{path} is no safetensors file, or is cut short")
        raw = file.read(length)
    try:
        header: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
        facts = msgspec.convert(header.pop(_METADATA, {}), dict[str, str])
        if facts.get("format") != FORMAT:
            raise OtherFormatError(
                f"{path} is of format {facts.get('format', 'unknown')!r}, and this RayKV reads "
                f"{FORMAT!r}"
            )
        sealed = msgspec.json.decode(facts.pop("chunks"), type=dict[str, _Sealed])
        tensors = msgspec.convert(header, dict[str, _Tensor])
        chunks = [
            _chunk(key, tensors[key], sealed[key], 8 + length, size) for key in sealed | tensors
        ]
        namespace = Namespace(facts.pop("namespace"))
    except (msgspec.MsgspecError, KeyError, ValueError, RecursionError) as error:
        raise ChunkFileError(f"{path} is damaged: {error}") from error
    del facts["format"]
    return ChunkFile(path, size, namespace, chunks, facts)


def _chunk(key: str, tensor: _Tensor, sealed: _Sealed, start: int, size: int) -> DiskChunk:
    first, end = tensor.data_offsets
    num_bytes = end - first
    is_whole = tensor.dtype == "U8" and tensor.shape == [num_bytes] and first >= 0 < num_bytes
    if not is_whole or start + end > size:
        raise ValueError(f"the chunk {key[:16]} is not where it should be")
    raw = bytes.fromhex(key)
    if (
        not 0 < len(raw) <= MAX_KEY_BYTES
        or not 0 <= min(sealed.stamp) <= max(sealed.stamp) <= MAX_NUMBER
    ):
        raise ValueError(f"the chunk {key[:16]} has an impossible name")
    if not sealed.blocks.is_sound:
        raise ValueError(f"the chunk {key[:16]} has impossible blocks {tuple(sealed.blocks)}")
    checksum = int(sealed.checksum, 16)
    return DiskChunk(Key(raw), sealed.stamp, start + first, num_bytes, checksum, sealed.blocks)


def read_chunk(path: Path, chunk: DiskChunk, into: Bytes) -> None:
    """Read a chunk's bytes and compare them with the checksum.

    Args:
        path: of the file.
        chunk: one that `read_header` found there.
        into: [num_bytes] uint8; has any content if this raises.

    Raises:
        ChunkFileError: the bytes are not those that were written.
        OSError: they can't be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < chunk.num_bytes:
            got = os.preadv(fd, [into[done:].data], chunk.offset + done)
            if not got:
                raise ChunkFileError(f"{path} is cut short")
            done += got
    finally:
        os.close(fd)
    if xxhash.xxh3_64_intdigest(into.data) != chunk.checksum:
        raise ChunkFileError(f"{path} is damaged: the chunk {chunk.key.hex()[:16]} has changed")
