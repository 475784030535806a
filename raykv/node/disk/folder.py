"""The folder of one disk tier: claimed by one process, found again by the next.

    <disk_path>/raykv-<n>/lock                  held by who owns the folder, as long as it lives
                         /<number>-<any>.safetensors chunks; see `chunk_file.py`
                         /floors.json                below which orders chunks are void
                         /….part                    being written, or left by who died meanwhile
                         /….damaged not trusted; the latest few are kept

A folder of another user, one that others can write to, or a link is ignored: it may contain
anything.

Several nodes, and several clusters, may share `disk_path`, also over a network: each takes a folder
of its own. One that nobody holds is taken over with what is in it, so that a restart of everything,
with other node ids and other host names, finds its chunks. A folder whose files are of another
format is left to the version of RayKV that reads them.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from raykv.base import deadlines, errors, ownership
from raykv.node.disk.chunk_file import PART_SUFFIX, SUFFIX, ChunkFile, read_header, to_disk, whole
from raykv.protocol import columns, findings

logger = logging.getLogger("raykv.disk")

DAMAGED_SUFFIX = ".damaged"

MAX_DAMAGED = 4
"""Damaged files that are kept to find out what happened; beyond it the oldest is deleted."""

MAX_FOLDERS = 1024

MAX_FOREIGN = 64
"""Number of folders that may be ignored because other users own them or can write to them."""

_FLOORS = "floors.json"


class TierFolder:
    """A folder that this process owns until it ends.

    Raises:
        DiskError: there is no place for it, or no lock can be had there.
    """

    def __init__(self, root: Path) -> None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            ownership.require_settled(root)
            self.path, self._lock = _claim(root)
        except OSError as error:
            raise errors.DiskError(f"disk_path={str(root)!r}: {error.strerror or error}") from error
        self._next = 0
        self.num_damaged = 0

    def scan(self) -> list[ChunkFile]:
        """The files that are whole, the oldest first; removes what was never finished.

        Raises:
            OSError: the folder, or a file in it, can't be read now.
        """
        found = []
        for path in self.path.iterdir():
            if path.name.endswith(PART_SUFFIX):
                path.unlink(missing_ok=True)
            elif path.suffix == SUFFIX and _number_of(path) is not None:
                found.append(path)
        found.sort(key=lambda path: path.name)
        self._next = (_number_of(found[-1]) or 0) + 1 if found else 0
        whole = []
        for path in found:
            try:
                whole.append(read_header(path))
            except errors.OtherFormatError as error:
                logger.warning("a file of the disk tier is left as it is: %s", error)
            except errors.ChunkFileError as error:
                self.set_aside(path, str(error))
            except FileNotFoundError:
                continue
        return whole

    def read_floors(self) -> dict[int, dict[str, int]]:
        """What was cleared when a node had this folder, by history, the latest last; of each by
        namespace.

        Raises:
            DiskError: that is not known, so that nothing here may be trusted.
        """
        path = self.path / _FLOORS
        try:
            floors = msgspec.json.decode(path.read_bytes(), type=dict[int, dict[str, int]])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            raise errors.DiskError(f"{path} can't be read: {error}") from error
        numbers = [*floors, *(each for some in floors.values() for each in some.values())]
        if not all(0 <= number <= columns.MAX_NUMBER for number in numbers):
            raise errors.DiskError(f"{path} can't be read: it has numbers that no orders have")
        return floors

    def write_floors(self, floors: Mapping[int, Mapping[str, int]]) -> None:
        """Flush that to the disk before any file is deleted: a crash must not bring chunks back.

        Raises:
            OSError: it can't be written; what was there stays.
        """
        with whole(self.path / _FLOORS) as part:
            part.write_bytes(msgspec.json.encode(floors))
            to_disk(part)
        to_disk(self.path)

    def new_path(self) -> Path:
        """Path of the next file. Where locks do not work, no other process writes it either."""
        self._next += 1
        return self.path / f"{self._next - 1:012d}-{secrets.token_hex(4)}{SUFFIX}"

    def delete(self, *names: str) -> None:
        """Files are not needed any more; a failure to delete one is only logged."""
        for path in [self.path / name for name in names]:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s can't be deleted: %s", path, error.strerror)

    def set_aside(self, path: Path, reason: str) -> None:
        """A file is not trusted: it gets another name, or is deleted if it cannot."""
        self.num_damaged += 1
        logger.warning("a file of the disk tier is not trusted: %s", reason)
        try:
            path.rename(path.with_name(path.name + DAMAGED_SUFFIX))
            kept = sorted(self.path.glob(f"*{DAMAGED_SUFFIX}"), key=lambda old: old.name)
            for old in kept[:-MAX_DAMAGED]:
                old.unlink(missing_ok=True)
        except OSError:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Of the file system.

        Raises:
            OSError: it does not say.
        """
        return shutil.disk_usage(self.path).free

    def close(self) -> None:
        """Another process may have the folder now."""
        _note_held(self._lock)
        os.close(self._lock)


def unowned_folders(root: Path, now: float) -> list[findings.UnownedFolder]:
    """Folders with something in them that no process holds: a node that starts takes over the
    first.

    Nothing is changed. Each is held for an instant; a node that starts in it waits for that.

    Args:
        root: where tiers have their folders.
        now: seconds since 1970.

    Raises:
        OSError: it can't be read.
    """
    found = []
    for lock in sorted(root.glob("raykv-*/lock")):
        with suppress(FileNotFoundError):
            try:
                ownership.require_own_folder(lock.parent)
            except PermissionError:
                # No node of this user's takes it over.
                continue
            if _is_held(lock):
                continue
            files = [each.stat() for each in lock.parent.iterdir() if each != lock]
            if num_bytes := sum(each.st_size for each in files):
                # The holder notes it in the lock, and may have nothing to write for days.
                since = max(each.st_mtime for each in [lock.stat(), *files])
                age_s = max(0.0, now - since)
                found.append(findings.UnownedFolder(str(lock.parent), num_bytes, age_s))
    return found


def _is_held(lock: Path) -> bool:
    fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        # Held, or locks do not work here: then nothing can be said.
        return True
    finally:
        os.close(fd)
    return False


def _number_of(path: Path) -> int | None:
    number, dash, _ = path.stem.partition("-")
    return int(number) if dash and number.isdecimal() else None


def _claim(root: Path) -> tuple[Path, int]:
    """Take a free folder; returns it with the descriptor that holds it from now on.

    Folders of other users are skipped.
    """
    refusals: list[OSError] = []
    for number in itertools.islice(itertools.count(), MAX_FOLDERS):
        path = root / f"raykv-{number}"
        try:
            ownership.make_own_folder(path)
            fd = ownership.open_own(path / "lock", os.O_RDWR | os.O_CREAT)
        except PermissionError as error:
            refusals.append(error)
            if len(refusals) < MAX_FOREIGN:
                continue
            raise
        try:
            is_ours = _try_lock(fd)
            if not is_ours:
                # Perhaps another process only looks; its chunks are worth the wait.
                time.sleep(deadlines.BRIEF_S)
                is_ours = _try_lock(fd)
        except OSError:
            os.close(fd)
            raise
        if is_ours and (other := _other_format(path)):
            logger.warning(
                "%s has files of another version of RayKV (%s), and is left to it: delete the "
                "folder if that one is not used any more",
                path,
                other,
            )
        elif is_ours:
            _note_held(fd)
            for refused in refusals:
                logger.warning("a folder of disk_path: %s", refused.strerror)
            return path, fd
        os.close(fd)
    raise errors.DiskError(f"disk_path={str(root)!r} has {MAX_FOLDERS} folders, all of them in use")


def _other_format(folder: Path) -> str:
    """What is wrong with the latest file of a folder if it is of another format; else empty."""
    names = [path for path in folder.glob(f"*{SUFFIX}") if _number_of(path) is not None]
    if names:
        try:
            read_header(max(names, key=lambda path: path.name))
        except errors.OtherFormatError as error:
            return str(error)
        except (errors.ChunkFileError, OSError):
            # The scan says so.
            return ""
    return ""


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _note_held(lock: int) -> None:
    """The folder is held now: it counts as left from then on only."""
    with suppress(OSError):
        os.utime(lock)
