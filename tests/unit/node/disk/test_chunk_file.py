"""Files of chunks: whole or not there, right bytes or an error, whatever happens to them."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from safetensors import safe_open

import raykv.node.disk.chunk_file as chunk_file
import raykv.node.disk.folder
from raykv.base.errors import ChunkFileError, DiskError
from raykv.base.ids import Blocks, Key, Namespace, Stamp
from raykv.node.disk.chunk_file import Bytes, ChunkBytes, read_chunk, read_header, write_chunks
from raykv.node.disk.folder import MAX_DAMAGED, TierFolder, unowned_folders
from raykv.node.pool.shelf import DiskChunk

SPACE = Namespace("a" * 32)


class PowerCut(BaseException):
    """The process ends here."""


def chunks(count: int = 3, num_bytes: int = 4096) -> list[ChunkBytes]:
    made = []
    for number in range(count):
        data = np.random.default_rng(number).integers(0, 256, num_bytes, np.uint8)
        key = Key(number.to_bytes(32, "big") + bytes(4))
        checksum = xxhash.xxh3_64_intdigest(data.data)
        made.append(ChunkBytes(key, Stamp(3, number), checksum, data))
    return made


def read(path: Path, chunk: DiskChunk) -> Bytes:
    into = np.empty(chunk.num_bytes, np.uint8)
    read_chunk(path, chunk, into)
    return into


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


def test_chunks_read_back_equal_what_was_written_by_the_safetensors_library_too(path: Path) -> None:
    written = chunks()
    written[1] = replace(written[1], blocks=Blocks(2, 5))
    size = write_chunks(path, SPACE, written, {"model": "m"})
    assert size == path.stat().st_size
    header = read_header(path)
    assert (header.namespace, header.facts, header.num_bytes) == (SPACE, {"model": "m"}, size)
    found = {chunk.key: chunk for chunk in header.chunks}
    for each in written:
        chunk = found[each.key]
        stored = each.stamp, each.checksum, each.blocks
        assert (chunk.stamp, chunk.checksum, chunk.blocks) == stored
        assert np.array_equal(read(path, chunk), each.data)
    assert len(found) == len(written)
    with safe_open(path, framework="np") as opened:
        assert opened.metadata()["namespace"] == SPACE
        for each in written:
            assert np.array_equal(opened.get_tensor(each.key.hex()), each.data)


def crash(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it come there."""

    def raising(*_: object) -> None:
        raise PowerCut

    def half(tensors: dict[str, Bytes], to: Path, _: dict[str, str]) -> None:
        to.write_bytes(next(iter(tensors.values())).tobytes()[:100])
        raise PowerCut

    fsync, num_synced = os.fsync, 0

    def second_sync(fd: int) -> None:
        nonlocal num_synced
        num_synced += 1
        if num_synced == 2:
            raise PowerCut
        fsync(fd)

    match step:
        case "in the middle of the write":
            monkeypatch.setattr(chunk_file, "save_file", half)
        case "before it has its name":
            monkeypatch.setattr(Path, "rename", raising)
        case "before it is on the disk":
            monkeypatch.setattr(os, "fsync", raising)
        case "before its name is on the disk":
            monkeypatch.setattr(os, "fsync", second_sync)


@pytest.mark.parametrize(
    "step",
    [
        "in the middle of the write",
        "before it is on the disk",
        "before it has its name",
        "before its name is on the disk",
    ],
)
def test_crash_while_a_file_is_written_leaves_a_whole_one_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    folder = TierFolder(tmp_path)
    before = folder.new_path()
    write_chunks(before, SPACE, chunks(1))
    # A process that is killed clears nothing up.
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    crash(step, monkeypatch)
    written = chunks()
    path = folder.new_path()
    with pytest.raises(PowerCut):
        write_chunks(path, SPACE, written)
    monkeypatch.undo()
    folder.close()
    again = TierFolder(tmp_path)
    found = again.scan()
    assert [file.path.name for file in found][:1] == [before.name]
    for file in found[1:]:
        # Its name had not been made durable, but is there: then it is whole.
        assert step == "before its name is on the disk"
        for chunk, each in zip(file.chunks, written, strict=True):
            assert np.array_equal(read(file.path, chunk), each.data)
    assert not list(again.path.glob("*.part"))
    assert again.num_damaged == 0


@pytest.mark.parametrize("seed", range(60))
def test_file_that_is_cut_short_or_has_flipped_bits_gives_no_wrong_byte(
    path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    written = {each.key: each.data for each in chunks()}
    write_chunks(path, SPACE, chunks())
    raw = bytearray(path.read_bytes())
    if seed % 3 == 0:
        raw = raw[: chance.randrange(len(raw))]
    else:
        # Of these some hit the header, some the bytes.
        end = len(raw) - 3 * 4096 if seed % 3 == 1 else len(raw)
        raw[chance.randrange(end)] ^= 1 << chance.randrange(8)
    path.write_bytes(raw)
    damaged = 0
    try:
        found = read_header(path).chunks
    except ChunkFileError:
        return
    for chunk in found:
        try:
            data = read(path, chunk)
        except ChunkFileError:
            damaged += 1
            continue
        # A changed name is no chunk of anybody's, and a changed stamp is compared elsewhere.
        if chunk.key in written:
            assert np.array_equal(data, written[chunk.key])
    if seed % 3 == 2 and len(found) == 3:
        assert damaged <= 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"short",
        bytes(8),
        b"\xff" * 8,
        (2).to_bytes(8, "little") + b"{}",
        bytes(5000),
        (100_005).to_bytes(8, "little") + b'{"a":' + b"[" * 100_000,
    ],
    ids=["empty", "short", "no header", "endless header", "no metadata", "zeros", "nested"],
)
def test_other_files_are_refused_by_name(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    with pytest.raises(ChunkFileError, match=str(path)):
        read_header(path)


def test_other_format_is_refused_with_both_formats(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_file, "FORMAT", "raykv.chunks.99")
    write_chunks(path, SPACE, chunks())
    monkeypatch.undo()
    with pytest.raises(ChunkFileError, match=r"raykv\.chunks\.99.*raykv\.chunks\.3"):
        read_header(path)


@pytest.mark.parametrize("blocks", [Blocks(0, 0), Blocks(-1, 3), Blocks(4, -1), Blocks(1, 1 << 32)])
def test_file_with_impossible_blocks_is_damaged(path: Path, blocks: Blocks) -> None:
    write_chunks(path, SPACE, [replace(chunks(1)[0], blocks=blocks)])
    with pytest.raises(ChunkFileError, match="impossible blocks"):
        read_header(path)


@pytest.fixture
def small_files() -> Iterator[None]:
    """The system refuses files over 8 KiB, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_write_that_the_system_refuses_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        write_chunks(tmp_path / "x.safetensors", SPACE, chunks())
    assert list(tmp_path.iterdir()) == []


# Folders


def test_folder_belongs_to_one_at_a_time(tmp_path: Path) -> None:
    one, two = TierFolder(tmp_path), TierFolder(tmp_path)
    assert (one.path.name, two.path.name) == ("raykv-0", "raykv-1")
    write_chunks(one.new_path(), SPACE, chunks())
    one.close()
    again = TierFolder(tmp_path)
    assert again.path == one.path
    assert [len(file.chunks) for file in again.scan()] == [3]


def of_another_format(folder: TierFolder, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that another version of RayKV has written there."""
    path = folder.new_path()
    with monkeypatch.context() as patches:
        patches.setattr(chunk_file, "FORMAT", "raykv.chunks.99")
        write_chunks(path, SPACE, chunks())
    return path


def test_folder_of_another_format_is_left_to_the_version_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = TierFolder(tmp_path)
    kept = [of_another_format(other, monkeypatch) for _ in range(MAX_DAMAGED + 2)]
    other.close()
    own = TierFolder(tmp_path)
    assert own.path != other.path
    assert own.scan() == []
    assert all(path.exists() for path in kept)
    assert f"{other.path} has files of another version of RayKV" in caplog.text
    assert "raykv.chunks.99" in caplog.text
    (unowned,) = unowned_folders(tmp_path, 0.0)
    assert unowned.path == str(other.path)
    own.close()
    with monkeypatch.context() as patches:
        patches.setattr(chunk_file, "FORMAT", "raykv.chunks.99")
        again = TierFolder(tmp_path)
        assert again.path == other.path
        assert [found.path for found in again.scan()] == kept


def test_file_of_another_format_among_others_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = TierFolder(tmp_path)
    foreign = of_another_format(folder, monkeypatch)
    own = folder.new_path()
    write_chunks(own, SPACE, chunks())
    folder.close()
    again = TierFolder(tmp_path)
    assert again.path == folder.path
    assert [found.path for found in again.scan()] == [own]
    assert foreign.exists()
    assert again.num_damaged == 0


def test_damaged_files_are_set_aside_and_few_are_kept(tmp_path: Path) -> None:
    folder = TierFolder(tmp_path)
    for _ in range(MAX_DAMAGED + 2):
        folder.new_path().write_bytes(b"nothing")
    write_chunks(folder.new_path(), SPACE, chunks(1))
    assert [len(file.chunks) for file in folder.scan()] == [1]
    assert folder.num_damaged == MAX_DAMAGED + 2
    assert len(list(folder.path.glob("*.damaged"))) == MAX_DAMAGED


def test_place_that_is_no_folder_is_named(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_bytes(b"")
    with pytest.raises(DiskError, match=f"disk_path='{place}'"):
        TierFolder(place)


def test_clearings_survive_and_unreadable_ones_are_not_taken_for_none(tmp_path: Path) -> None:
    folder = TierFolder(tmp_path)
    assert folder.read_floors() == {}
    folder.write_floors({7: {}, 3: {"a": 5}})
    assert list(folder.read_floors().items()) == [(7, {}), (3, {"a": 5})]
    (folder.path / "floors.json").write_bytes(b"{")
    with pytest.raises(DiskError, match=r"floors\.json"):
        folder.read_floors()


def test_folders_that_nobody_holds_are_named_with_what_is_in_them(tmp_path: Path) -> None:
    held, left, empty = TierFolder(tmp_path), TierFolder(tmp_path), TierFolder(tmp_path)
    for folder in (held, left):
        write_chunks(folder.new_path(), SPACE, chunks(1))
    left.close()
    empty.close()
    size = sum(each.stat().st_size for each in left.path.glob("*.safetensors"))
    now = time.time() + 100.0
    (found,) = unowned_folders(tmp_path, now)
    assert (found.path, found.num_bytes) == (str(left.path), size)
    assert 100.0 <= found.age_s < 130.0
    # It was held until now, however long ago its files were written.
    for each in left.path.iterdir():
        if each.name != "lock":
            os.utime(each, (now - 90_000, now - 90_000))
    (found,) = unowned_folders(tmp_path, now)
    assert 100.0 <= found.age_s < 130.0
    os.utime(left.path / "lock", (now - 80_000, now - 80_000))
    (found,) = unowned_folders(tmp_path, now)
    assert found.age_s == pytest.approx(80_000, abs=1)
    # To look holds nothing: the next node takes it over with what is in it.
    again = TierFolder(tmp_path)
    assert again.path == left.path
    assert (left.path / "lock").stat().st_mtime > now - 1000
    assert unowned_folders(tmp_path, now) == []
    assert unowned_folders(tmp_path / "nothing", now) == []


def test_folder_that_somebody_looks_at_is_taken_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = TierFolder(tmp_path)
    left.close()
    with (left.path / "lock").open("rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        waits: list[float] = []

        def wait(seconds: float) -> None:
            waits.append(seconds)
            fcntl.flock(looking, fcntl.LOCK_UN)

        monkeypatch.setattr(raykv.node.disk.folder, "time", SimpleNamespace(sleep=wait))
        assert TierFolder(tmp_path).path == left.path
    assert len(waits) == 1
