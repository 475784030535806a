"""Files of chunks as the source of fetches: an actor that answers as a NodeActor does, and no more.

It lives on the node where the files can be read, as long as an import runs. NodeActors fetch from
it, so that all that holds for fetches holds here: deadlines, checksums, and nothing is READY before
all of it is there. What it brings counts as stored when it was fetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv.base.errors import ChunkFileError, ClusterError, cause_of, first_line
from raykv.base.ids import Key, Refusal
from raykv.cluster import logs, names
from raykv.node.disk.chunk_file import read_chunk, read_header
from raykv.node.peers import Bytes
from raykv.node.pool.shelf import DiskChunk
from raykv.node.read import ChunkRead, answer
from raykv.protocol import columns, copies, framing

# For the process that reads the files: Ray starts it, and it reads their headers.
IMPORT_START_S = 60.0


MAX_SLAB_BYTES = 1 << 40


class ImportSource:
    """Runs as the Ray actor `import:<id>`; it ends with the process that has made it."""

    def __init__(self, paths: list[str]) -> None:
        logs.set_up_logging()
        self._chunks: dict[Key, tuple[Path, DiskChunk]] = {}
        for path in map(Path, paths):
            for chunk in read_header(path).chunks:
                self._chunks[chunk.key] = (path, chunk)

    def read(self, raw: bytes) -> tuple[bytes, Bytes]:
        """`Read` → `ReadReply` and the bytes, as of a NodeActor."""
        request = framing.receive(raw, copies.Read, "a NodeActor", "the import")
        columns.check_numbers("slot sizes", request.slot_bytes, 1, MAX_SLAB_BYTES)
        reply, data = answer(request, self._read_one)
        return framing.encode(reply), data

    def _read_one(self, key: Key, into: Bytes) -> ChunkRead:
        path, chunk = self._chunks.get(key, (None, None))
        if path is None or chunk is None or chunk.num_bytes != len(into):
            return ChunkRead(Refusal.NOT_HERE)
        try:
            read_chunk(path, chunk, into)
        except ChunkFileError:
            return ChunkRead(Refusal.CORRUPT)
        except OSError:
            return ChunkRead(Refusal.COPY_FAILED)
        return ChunkRead(Refusal.NONE, chunk.stamp, chunk.checksum, chunk.blocks)


@contextmanager
def import_source(name: str, paths: Sequence[Path], node_id: str) -> Iterator[columns.Source]:
    """An `ImportSource` on a node, which is this process's; gives it as a source of fetches.

    Raises:
        ClusterError: it does not start, or can't read the files.
    """
    source = columns.Source(name, columns.SourceKind.IMPORT)
    actor: Any = (
        ray.remote(ImportSource)
        .options(
            name=names.source_actor(source),
            namespace=names.RAY_NAMESPACE,
            num_cpus=0,
            runtime_env={"env_vars": logs.level_for_actors()},
            max_concurrency=4,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote([str(path.resolve()) for path in paths])
    )
    try:
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=IMPORT_START_S)
        except Exception as error:
            raise ClusterError(f"the files can't be read: {first_line(cause_of(error))}") from error
        yield source
    finally:
        ray.kill(actor)  # bounded: Ray's own deadline; for a person
