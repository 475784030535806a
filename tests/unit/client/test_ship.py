"""Which files of chunks a cluster takes, and what it says of the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from raykv.base.errors import ChunkFileError, SettingError
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import SLOT_ALIGNMENT, Key, Namespace, Stamp
from raykv.client import listing, ship
from raykv.client.ship import _chosen, first_that_fit, refuse_foreign
from raykv.node.disk.chunk_file import ChunkBytes, ChunkFile, read_header
from raykv.node.pool.shelf import DiskChunk
from raykv.protocol.framing import encode
from raykv.protocol.status import NamespaceStatus
from tests.fixtures.listed import chunk
from tests.fixtures.played_cluster import play, status

TRAITS = {"model": "x", "dtype": "float32", "weights_version": "", "kv_layout": "a"}


def file(namespace: str = "ours", **traits: str) -> ChunkFile:
    facts = {"model": "theirs", "traits": msgspec.json.encode({**TRAITS, **traits}).decode()}
    return ChunkFile(Path("/x.safetensors"), 1, Namespace(namespace), [], facts)


def space(namespace: str = "ours", **traits: str) -> NamespaceStatus:
    return NamespaceStatus(namespace, model="mine", traits={**TRAITS, **traits})


@pytest.mark.parametrize(
    "spaces", [[space("other", dtype="float16"), space()], [], [NamespaceStatus("other")]]
)
def test_files_are_taken_if_their_namespace_is_here_or_none_is_known(
    spaces: list[NamespaceStatus],
) -> None:
    refuse_foreign([file()], spaces)


@pytest.mark.parametrize("name", ["model", "dtype", "weights_version", "kv_layout"])
def test_files_of_other_kv_are_refused_by_what_differs(name: str) -> None:
    with pytest.raises(SettingError) as refused:
        refuse_foreign([file("theirs", **{name: "1"})], [space()])
    told = str(refused.value)
    assert "/x.safetensors has KV of theirs" in told
    assert f"differs in {name} (1, here {TRAITS[name]})" in told
    assert told.count("here") == 2


def test_refusal_names_the_nearest_engine_or_what_is_unknown_or_mixed() -> None:
    far = space("far", dtype="float16", kv_layout="b", model="y")
    with pytest.raises(SettingError, match=r"differs in weights_version \(1, here \)$"):
        refuse_foreign([file("theirs", weights_version="1")], [far, space()])
    bare = replace(file("theirs"), facts={"traits": "nonsense"})
    with pytest.raises(SettingError, match="an unknown model"):
        refuse_foreign([bare], [space()])
    with pytest.raises(ChunkFileError, match="2 namespaces"):
        refuse_foreign([file(), file("theirs")], [])


def test_no_more_is_imported_than_a_pool_holds() -> None:
    page = SLOT_ALIGNMENT
    sizes = [[page] * 5, [3 * page] * 3, [page] * 9]
    files = [
        replace(file(), chunks=[DiskChunk(Key(b"k"), Stamp(0, 0), 0, size, 0) for size in each])
        for each in sizes
    ]

    def counts(num_slabs: int) -> list[int]:
        geometry = PoolGeometry(num_slabs * 4 * page + 1, 4 * page)
        return [len(each.chunks) for each in first_that_fit(files, geometry)]

    # Four small ones or one large one to a slab; the small ones at the end fill up a slab first.
    assert counts(1) == [4, 0, 0]
    assert counts(4) == [5, 2, 0]
    assert counts(5) == [5, 3, 3]
    assert counts(6) == [5, 3, 7]
    assert counts(7) == [5, 3, 9]
    assert first_that_fit(files, None) == files


def test_chunk_that_is_larger_than_a_slab_does_not_fit() -> None:
    geometry = PoolGeometry(8 * SLOT_ALIGNMENT, 2 * SLOT_ALIGNMENT)
    assert geometry.num_that_fit([SLOT_ALIGNMENT, 3 * SLOT_ALIGNMENT, SLOT_ALIGNMENT]) == 1


@pytest.mark.parametrize(
    ("keys", "told"), [([], "no keys"), (["xyz"], "no hexadecimal number"), (iter(()), "no keys")]
)
def test_keys_that_name_nothing_do_not_mean_everything(keys: Any, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        _chosen(keys)


def test_export_writes_all_chunks_and_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = SLOT_ALIGNMENT
    keys = [Key(name * 32 + bytes(4)) for name in (b"a", b"b", b"c")]
    chunks = [chunk(key, "n", "ours", num_bytes=page) for key in keys]

    def read_from(_node: str, _space: str, sizes: dict[Key, int], *, from_disk: bool) -> Any:
        data = np.zeros(page, np.uint8)
        return {key: ChunkBytes(key, Stamp(0, 0), 0, data) for key in sizes}, {}

    monkeypatch.setattr(listing, "chunks", lambda *_, **__: chunks)
    monkeypatch.setattr(ship, "read_from", read_from)
    monkeypatch.setattr(ship, "PIECE_BYTES", 2 * page)
    told: list[tuple[int, int]] = []
    known = status(namespaces={"ours": 3})
    scheduler = play(monkeypatch, {"status": lambda: encode(known)})
    path = tmp_path / "all.safetensors"
    found = ship.export_chunks(scheduler, path, watch=lambda *so_far: told.append(so_far))
    assert (found.chunks, found.asked, found.files) == (3, 3, 1)
    assert {chunk.key for chunk in read_header(path).chunks} == set(keys)
    assert told == [(2, 3), (3, 3)]
