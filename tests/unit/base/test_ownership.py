"""What another user of the machine has prepared is not used, and not changed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from raykv.base.errors import ClusterError, DiskError, HandleError, HiddenStatesError
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import SLOT_ALIGNMENT, Stamp
from raykv.base.ownership import make_own_folder, open_own, write_own
from raykv.cluster import join as cluster
from raykv.memory.pool import Pool, PoolEntry
from raykv.memory.region import Region
from raykv.metrics.discovery import TargetsFile
from raykv.node.disk.folder import TierFolder, unowned_folders
from raykv.node.states import file as captured

STRANGER = 12_345

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def link(path: Path) -> None:
    target = path.with_name("target")
    target.write_bytes(b"precious")
    path.symlink_to(target)


def foreign(path: Path) -> None:
    path.write_bytes(b"precious")
    path.chmod(0o600)
    os.chown(path, STRANGER, STRANGER)


def writable(path: Path) -> None:
    path.write_bytes(b"precious")
    path.chmod(0o666)


TRAPS = [
    pytest.param(link, "symbolic link", id="link"),
    pytest.param(foreign, f"another user (uid {STRANGER})", id="foreign", marks=needs_root),
    pytest.param(writable, "others can write to it (mode 666)", id="writable"),
]
Trap = Callable[[Path], None]

each_trap = pytest.mark.parametrize(("trap", "why"), TRAPS)


@each_trap
def test_file_is_refused_and_keeps_its_content_when_it_may_be_anothers(
    tmp_path: Path, trap: Trap, why: str
) -> None:
    path = tmp_path / "file"
    trap(path)
    with pytest.raises(PermissionError) as raised:
        open_own(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    sentence = str(raised.value.strerror)
    assert sentence.startswith(f"{path} is not used: ")
    assert why in sentence
    assert path.read_bytes() == b"precious"


def test_file_is_made_for_this_user_alone_and_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for _ in range(2):
        os.close(open_own(path, os.O_RDWR | os.O_CREAT))
    assert path.stat().st_mode & 0o777 == 0o600


def test_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(PermissionError, match="not a plain file"):
        open_own(tmp_path / "fifo", os.O_RDWR)


@each_trap
def test_new_file_takes_the_place_of_what_has_its_name(
    tmp_path: Path, trap: Trap, why: str
) -> None:
    del why
    path = tmp_path / "file"
    trap(path)
    write_own(path, b"mine")
    assert path.read_bytes() == b"mine"
    assert not path.is_symlink()
    assert path.stat().st_uid == os.geteuid()
    target = tmp_path / "target"
    assert not target.exists() or target.read_bytes() == b"precious"


def spoil(folder: Path, how: str) -> None:
    """A folder of that name, as somebody else may have left it."""
    match how:
        case "link":
            other = folder.with_name("elsewhere")
            other.mkdir(0o700)
            folder.symlink_to(other)
        case "dangling link":
            folder.symlink_to(folder.with_name("nowhere"))
        case "file":
            folder.write_bytes(b"")
        case "foreign":
            folder.mkdir(0o700)
            os.chown(folder, STRANGER, STRANGER)
        case "writable":
            folder.mkdir()
            folder.chmod(0o777)


FOLDERS = [
    "link",
    "dangling link",
    "file",
    pytest.param("foreign", marks=needs_root),
    "writable",
]

each_folder = pytest.mark.parametrize("how", FOLDERS)


@each_folder
def test_folder_is_refused_when_it_may_be_anothers(tmp_path: Path, how: str) -> None:
    spoil(tmp_path / "folder", how)
    with pytest.raises(PermissionError, match="folder is not used"):
        make_own_folder(tmp_path / "folder")


def test_folder_is_refused_where_everybody_can_put_another_in_its_place(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="everybody can rename"):
        make_own_folder(tmp_path / "folder")
    tmp_path.chmod(0o1777)
    make_own_folder(tmp_path / "folder")


def test_folder_that_a_group_has_been_given_with_its_volume_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    make_own_folder(folder)
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="mode 770"):
        make_own_folder(folder)
    tmp_path.chmod(0o770)
    make_own_folder(folder)


# Those who open something


@each_folder
def test_disk_tier_passes_by_a_folder_of_somebody_else(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(tmp_path / "raykv-0", how)
    folder = TierFolder(tmp_path)
    assert folder.path == tmp_path / "raykv-1"
    assert f"{tmp_path / 'raykv-0'} is not used" in caplog.text
    folder.close()
    again = TierFolder(tmp_path)
    assert again.path == folder.path
    again.close()


def test_disk_tier_is_refused_in_a_folder_whose_entries_everybody_can_rename(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(DiskError, match="everybody can rename"):
        TierFolder(tmp_path)
    assert not list(tmp_path.iterdir())


@each_trap
def test_disk_tier_passes_by_a_folder_whose_lock_is_somebody_elses(
    tmp_path: Path, trap: Trap, why: str
) -> None:
    del why
    (tmp_path / "raykv-0").mkdir(0o700)
    trap(tmp_path / "raykv-0" / "lock")
    folder = TierFolder(tmp_path)
    assert folder.path == tmp_path / "raykv-1"
    folder.close()


@needs_root
def test_folder_of_another_user_is_not_told_as_left_behind(tmp_path: Path) -> None:
    folder = TierFolder(tmp_path)
    (folder.path / "file").write_bytes(bytes(100))
    folder.close()
    assert len(unowned_folders(tmp_path, 0.0)) == 1
    os.chown(folder.path, STRANGER, STRANGER)
    assert unowned_folders(tmp_path, 0.0) == []


def pool_in(folder: Path) -> Pool:
    return Pool(PoolGeometry(8 * SLOT_ALIGNMENT, 4 * SLOT_ALIGNMENT), str(folder / "pool"))


START_LOCK = f"raykv-start-{os.getuid()}.lock"
OPENERS: list[tuple[str, type[Exception], Callable[[Path], object]]] = [
    ("pool", HandleError, lambda folder: Region.in_file(folder / "pool", 8 * SLOT_ALIGNMENT)),
    ("pool.new", HandleError, lambda folder: pool_in(folder).recover()),
    ("states.lock", PermissionError, lambda folder: captured.promise(str(folder / "states"))),
    (START_LOCK, ClusterError, lambda _: cluster.ensure_cluster("10.0.0.1:6379")),
]


@each_trap
@pytest.mark.parametrize(("name", "error", "opens"), OPENERS, ids=lambda value: str(value)[:12])
def test_who_opens_a_file_refuses_what_may_be_anothers_and_leaves_it_as_it_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trap: Trap,
    why: str,
    name: str,
    error: type[Exception],
    opens: Callable[[Path], object],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trap(tmp_path / name)
    with pytest.raises(error) as raised:
        opens(tmp_path)
    assert why in str(raised.value)
    assert (tmp_path / name).read_bytes() == b"precious"


@pytest.mark.parametrize("how", ["link", pytest.param("foreign", marks=needs_root), "writable"])
def test_journal_of_a_pool_file_is_set_aside_when_it_may_be_anothers(
    tmp_path: Path, how: str
) -> None:
    """One that is whole, and of this pool."""
    pool = pool_in(tmp_path)
    pool.recover()
    pool.journal.enter(PoolEntry(0, SLOT_ALIGNMENT, "model", b"k", 1, Stamp(1, 5)))
    journal = tmp_path / "pool.journal"
    content = journal.read_bytes()
    match how:
        case "link":
            journal.rename(tmp_path / "target")
            journal.symlink_to(tmp_path / "target")
        case "foreign":
            os.chown(journal, STRANGER, STRANGER)
        case "writable":
            journal.chmod(0o666)
    again = pool_in(tmp_path)
    assert again.recover() == []
    assert again.journal.num_set_aside == 1
    assert (tmp_path / "pool.journal.quarantined-1").read_bytes() == content


@each_folder
def test_folder_of_hidden_states_that_anybody_can_guess_is_this_users_alone(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spoil(tmp_path / "folder", how)
    path = tmp_path / "folder" / "states"
    with pytest.raises(PermissionError, match="folder is not used"):
        captured.promise(str(path), own_folder=True)
    with pytest.raises(HiddenStatesError, match=r"folder is not used|Not a directory"):
        captured.load_hidden_states(str(path), timeout_s=0.0)


def test_hidden_states_are_not_written_through_a_link(tmp_path: Path) -> None:
    link(tmp_path / "states.part")
    numbers = np.zeros((1, 1, 1), "float32")
    states = captured.HiddenStates("request", numbers, "float32", np.zeros(1, "int64"))
    captured.write_states(str(tmp_path / "states"), states)
    assert (tmp_path / "target").read_bytes() == b"precious"
    assert not (tmp_path / "states").is_symlink()
    assert captured.load_hidden_states(str(tmp_path / "states"))["token_ids"].shape == (1,)


def test_file_for_prometheus_is_not_written_through_a_link(tmp_path: Path) -> None:
    link(tmp_path / f".targets.{os.getpid()}")
    TargetsFile(tmp_path / "targets", "10.0.0.1:6379", lambda: ["10.0.0.2:9000"]).look()
    assert (tmp_path / "target").read_bytes() == b"precious"
    assert not (tmp_path / "targets").is_symlink()
