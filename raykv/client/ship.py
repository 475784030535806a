"""Export chunks of a cluster to files, and import them into another one.

The files are those of the disk tier (`raykv/node/disk/chunk_file.py`), and say what KV they have: a
cluster whose engines can't use it refuses them by name.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from raykv.base import deadlines, version
from raykv.base.errors import ChunkFileError, ClusterError, NotFoundError, SettingError
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import Key, Namespace
from raykv.client import listing, pins, transfers
from raykv.client.chunks import read_from
from raykv.client.import_source import import_source
from raykv.client.scheduler import Scheduler, refuse_parts
from raykv.cluster import ask
from raykv.cluster import join as cluster
from raykv.node.disk.chunk_file import SUFFIX, ChunkBytes, ChunkFile, read_header, write_chunks
from raykv.protocol import operator, status
from raykv.protocol.reader import DISK, Chunk

FILE_BYTES = 256 << 20
"""Bytes of chunks in one file of a folder."""

PIECE_BYTES = 16 << 20
"""Bytes of one read."""

logger = logging.getLogger("raykv")

T = TypeVar("T")

WatchRead = Callable[[int, int], None]
"""Called with the numbers of chunks that have been read, and that are wanted."""


def export_chunks(
    scheduler: Scheduler,
    path: str | Path,
    *,
    keys: Sequence[bytes | str] | None = None,
    pin_id: str = "",
    namespace: str = "",
    most_bytes: int | None = None,
    watch: WatchRead = lambda _read, _wanted: None,
) -> operator.Exported:
    """Write chunks of one namespace, in pools and on disks, to files that another cluster can
    import.

    Args:
        path: a folder, which must be new or empty; or one file, if it ends in `.safetensors`:
            then all of it is in memory for a while.
        keys: these chunks; those of a prompt are `cluster.lookup(text=…).keys`.
        pin_id: those of a pin instead. Default: all of the namespace.
        namespace: as `status` shows it, or its beginning. Default: the only namespace.
        most_bytes: export at most this many, the most used chunks first.
        watch: called after every read.

    Raises:
        ClusterError: RayKV does not run here, or does not answer, or there is no such pin.
        SettingError: the path is in use or can't be written (the files that are there are
            whole), a key is invalid, or no chunk was found.
    """
    target = Path(path)
    if pin_id:
        space, keys = pins.chunks_of(scheduler, pin_id)
        refuse_parts(space, scheduler.status())
    else:
        space = scheduler.full_namespace(namespace, is_whole=True)
    wanted = None if keys is None else _chosen(keys)
    found = _found(scheduler, space, wanted, most_bytes)
    if not found:
        raise NotFoundError(f"no chunk of that kind is in namespace {space[:12]}")
    facts = _facts(scheduler, space)
    is_file = target.suffix == SUFFIX
    refuse_used(target)
    written = operator.Exported(str(target), space, asked=len(wanted or found))
    limit = sum(each[0].num_bytes for each in found) if is_file else FILE_BYTES
    num_read = 0

    def count(came: int) -> None:
        nonlocal num_read
        num_read += came
        watch(num_read, len(found))

    for part in _parts(found, lambda copies: copies[0].num_bytes, limit):
        chunks = _read(space, part, count)
        if not chunks:
            continue
        name = target if is_file else target / f"{written.files:06d}{SUFFIX}"
        try:
            name.parent.mkdir(parents=True, exist_ok=True)
            num_bytes = write_chunks(name, Namespace(space), chunks, facts)
        except OSError as error:
            why = error.strerror or error
            raise SettingError(f"{name} can't be written: {why}") from error
        written = msgspec.structs.replace(
            written,
            files=written.files + 1,
            chunks=written.chunks + len(chunks),
            num_bytes=written.num_bytes + num_bytes,
        )
    return written


def _found(
    scheduler: Scheduler, space: str, wanted: set[Key] | None, most_bytes: int | None
) -> list[list[Chunk]]:
    """Copies of each chunk that is wanted (None: of all), those in pools first; the most used
    chunks first.
    """
    copies: dict[bytes, list[Chunk]] = {}
    for chunk in listing.chunks(scheduler, namespace=space):
        if wanted is None or chunk.key in wanted:
            copies.setdefault(chunk.key, []).append(chunk)
    for each in copies.values():
        each.sort(key=lambda chunk: chunk.tier == DISK)
    found = sorted(
        copies.values(),
        key=lambda each: (-sum(one.hits for one in each), min(one.idle_s for one in each)),
    )
    if most_bytes is None:
        return found
    taken, left = [], most_bytes
    for each in found:
        left -= each[0].num_bytes
        if left < 0:
            break
        taken.append(each)
    return taken


def _facts(scheduler: Scheduler, space: str) -> dict[str, str]:
    """Return the facts about their KV that the files carry."""
    known = next((each for each in scheduler.status().spaces if each.namespace == space), None)
    known = known or status.NamespaceStatus(space)
    return {
        "raykv_version": version.__version__,
        "model": known.model,
        "traits": msgspec.json.encode(known.traits).decode(),
    }


def _read(
    space: str, part: Iterable[list[Chunk]], count: Callable[[int], None]
) -> list[ChunkBytes]:
    """The bytes of chunks, from whichever node still has them; `count` hears of each piece."""
    read: list[ChunkBytes] = []
    waiting = [list(each) for each in part]
    while waiting:
        by_source: dict[tuple[str, str], list[list[Chunk]]] = {}
        for each in waiting:
            by_source.setdefault((each[0].node_id, each[0].tier), []).append(each)
        waiting = []
        for (node_id, tier), chunks in by_source.items():
            sizes = {Key(copies[0].key): copies[0].num_bytes for copies in chunks}
            came = _read_from(node_id, space, sizes, count, is_disk=tier == DISK)
            read += came.values()
            missed = [copies[1:] for copies in chunks if copies[0].key not in came]
            waiting += [copies for copies in missed if copies]
    return read


# In


def import_chunks(
    scheduler: Scheduler,
    path: str | Path,
    node_id: str = "",
    *,
    deadline_s: float = deadlines.BULK_S,
    watch: transfers.Watch = lambda _: None,
) -> operator.TransferResult:
    """Bring chunks of files into a node's pool: the first ones, as many as fit next to chunks that
    are pinned or in use. Other chunks are evicted for them. Imported chunks are not evicted until
    a minute after the import, so other stores may find no room meanwhile. Chunks that do not come
    are no error: the result counts them, and as `no_room` those that did not fit.

    Args:
        path: what `export_chunks` has written, where this process can read it.
        node_id: Ray's, or the beginning of it. Default: the node with the most room.
        deadline_s: for all of them.
        watch: called after every page with the result so far.

    Raises:
        ChunkFileError: a file is damaged, or none of these.
        ClusterError: RayKV does not run here, or does not answer.
        SettingError: there are no files, or the engines here can't use such KV.
    """
    files = files_at(path)
    refuse_foreign(files, scheduler.status().spaces)
    target = scheduler.node(node_id) if node_id else _roomiest(scheduler)
    asked = sum(len(file.chunks) for file in files)
    # More can't come, and need not be asked for.
    files = first_that_fit(files, _geometry(scheduler, target))
    no_room = asked - sum(len(file.chunks) for file in files)
    space = str(files[0].namespace)
    here = ask.ask_ray(cluster.resolve_node_id, "")
    with import_source(uuid.uuid4().hex, [file.path for file in files], here) as source:
        give_up_at = time.monotonic() + deadline_s
        transfer = transfers.Transfer(
            target, space, give_up_at, watch, asked=asked, no_room=no_room
        )
        for sizes in _pages(files):
            transfer.fetch_from(source, sizes, scheduler)
    return transfer.result


def _geometry(scheduler: Scheduler, node_id: str) -> PoolGeometry | None:
    """Geometry of a node's pool, if it is known."""
    known = [node for node in scheduler.status().nodes if node.node_id == node_id]
    if not known or not 0 < known[0].slab_bytes <= known[0].pool_bytes:
        return None
    return PoolGeometry(known[0].pool_bytes, known[0].slab_bytes)


def _roomiest(scheduler: Scheduler) -> str:
    give_up_at = time.monotonic() + deadlines.PROBE_S
    while not (nodes := scheduler.status().nodes):
        if time.monotonic() > give_up_at:
            raise ClusterError("no node has a pool: `raykv up` makes them")
        time.sleep(deadlines.LOOK_S)
    return max(nodes, key=lambda node: node.pool_bytes - node.used_bytes).node_id


def _pages(files: Iterable[ChunkFile]) -> Iterator[dict[bytes, int]]:
    for file in files:
        for start in range(0, len(file.chunks), transfers.PAGE_CHUNKS):
            page = file.chunks[start : start + transfers.PAGE_CHUNKS]
            yield {chunk.key: chunk.num_bytes for chunk in page}


def _chosen(keys: Sequence[bytes | str]) -> set[Key]:
    """The keys, each once; none at all, or one that is invalid, is a SettingError."""
    if not (chosen := set(map(Key, pins.raw_keys(keys)))):
        raise SettingError("no keys: a prompt that is shorter than a chunk has none")
    return chosen


def refuse_used(path: Path) -> None:
    """Refuse what an export would write over, with a SettingError."""
    is_file = path.suffix == SUFFIX
    if is_file and path.exists():
        raise SettingError(f"{path} is there already: export to another place")
    if not is_file and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise SettingError(f"{path} is no empty folder: export to another place")


def _parts(found: Iterable[T], size_of: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """Split into parts of at most this many bytes, in order; a larger item is a part of its own."""
    part: list[T] = []
    num_bytes = 0
    for each in found:
        if part and num_bytes + size_of(each) > most_bytes:
            yield part
            part, num_bytes = [], 0
        part.append(each)
        num_bytes += size_of(each)
    if part:
        yield part


def _read_from(
    node_id: str,
    space: str,
    sizes: dict[Key, int],
    count: Callable[[int], None],
    *,
    is_disk: bool,
) -> dict[Key, ChunkBytes]:
    """Read the chunks that a node still has, all in its pool or all on its disk."""
    came: dict[Key, ChunkBytes] = {}
    try:
        for piece in _parts(sizes.items(), lambda each: each[1], PIECE_BYTES):
            read = read_from(node_id, space, dict(piece), from_disk=is_disk)[0]
            count(len(read))
            came |= read
    except ClusterError as error:
        # Another node may have them.
        logger.warning("node %s can't be read: %s", node_id[:12], error)
    return came


def files_at(path: str | Path) -> list[ChunkFile]:
    """Read the headers of the files that an import finds there.

    Raises:
        SettingError: there are no files of chunks.
        ChunkFileError: one is damaged, or none of these.
    """
    place = Path(path)
    paths = sorted(place.glob(f"*{SUFFIX}")) if place.is_dir() else [place]
    if not paths or not paths[0].is_file():
        raise SettingError(f"{path} is no file of chunks, and no folder of such files")
    return [read_header(each) for each in paths]


def first_that_fit(files: Sequence[ChunkFile], geometry: PoolGeometry | None) -> list[ChunkFile]:
    """Keep the first chunks of the files, as many as an empty pool holds."""
    if geometry is None:
        return list(files)
    sizes = (chunk.num_bytes for file in files for chunk in file.chunks)
    left = geometry.num_that_fit(sizes)
    found = []
    for file in files:
        found.append(replace(file, chunks=file.chunks[:left]))
        left -= len(found[-1].chunks)
    return found


def refuse_foreign(files: Sequence[ChunkFile], spaces: Sequence[status.NamespaceStatus]) -> None:
    """Refuse KV that no engine here can use, as far as engines are known here.

    Raises:
        SettingError: it says in what it differs from that of the engine that is the nearest.
        ChunkFileError: the files are of several namespaces.
    """
    names = sorted({str(file.namespace) for file in files})
    if len(names) > 1:
        raise ChunkFileError(f"the files are of {len(names)} namespaces: import one at a time")
    known = [space for space in spaces if space.traits]
    if not known or names[0] in {space.namespace for space in known}:
        return
    facts = files[0].facts
    try:
        traits = msgspec.json.decode(facts.get("traits", "{}"), type=dict[str, str])
    except msgspec.MsgspecError:
        traits = {}
    differences = {space.namespace: _differences(traits, space.traits) for space in known}
    nearest = min(known, key=lambda space: len(differences[space.namespace]))
    listed = "; ".join(differences[nearest.namespace]) or "what their traits do not say"
    raise SettingError(
        f"{files[0].path} has KV of {facts.get('model') or 'an unknown model'} that no engine here "
        f"can use: from that of {nearest.model} it differs in {listed}"
    )


def _differences(theirs: dict[str, str], ours: dict[str, str]) -> list[str]:
    return [
        f"{name} ({theirs.get(name, 'unknown')}, here {ours.get(name, 'unknown')})"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]
