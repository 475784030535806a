"""Files and folders where others can write: their owner is checked, not only their name.

Another user of the machine may have made a file, a folder or a link of a name that is known
beforehand. So links are not followed, and what is opened belongs to this process's user or to root,
and nobody else can write to it. What differs raises a `PermissionError` whose `strerror` is a
sentence; nothing of it is changed.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

_EVERYBODY = stat.S_IWOTH
_GROUP = stat.S_IWGRP


def open_own(path: Path | str, flags: int, mode: int = 0o600) -> int:
    """Open a plain file that no other user can have written; `O_TRUNC` is applied after the check.

    Raises:
        OSError: as `os.open`, and for a file that is another's.
    """
    fd = -1
    rest = flags & ~os.O_TRUNC
    try:
        fd = os.open(path, rest | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise refusal(path, "it is not a plain file")
        _require_own(path, found)
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        elif why := _why_not(path, error):
            raise refusal(path, why) from error
        raise
    return fd


def _why_not(path: Path | str, error: OSError) -> str:
    """Why the system opened no file."""
    if error.errno == errno.ELOOP:
        return "it is a symbolic link, which is not followed"
    if error.errno in (errno.EACCES, errno.EPERM):
        # In a folder like /tmp the system protects others' files, links and all.
        try:
            found = Path(path).lstat()
        except OSError:
            return ""
        if found.st_uid not in (os.geteuid(), 0):
            return f"it belongs to another user (uid {found.st_uid})"
    return ""


def make_own_folder(path: Path) -> None:
    """Ensure a folder that no other user can have written to; create it for this user alone if it
    is missing.

    Raises:
        OSError: as `os.mkdir`, and for a folder that is another's.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    require_own_folder(path)


def require_own_folder(path: Path) -> None:
    """Refuse a folder that is not there, or is another's, with an OSError."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        is_link = stat.S_ISLNK(found.st_mode)
        raise refusal(path, "it is a symbolic link" if is_link else "it is not a folder")
    parent = path.parent.stat()
    # A whole volume that belongs to a group does so on purpose.
    is_groups = bool(parent.st_mode & _GROUP) and parent.st_gid == found.st_gid
    _require_own(path, found, may_group=is_groups)
    require_settled(path.parent)


def require_settled(folder: Path) -> None:
    """What is in a folder stays what it is: not everybody may put something else in its place.

    Raises:
        OSError: everybody may.
    """
    mode = folder.stat().st_mode
    if mode & _EVERYBODY and not mode & stat.S_ISVTX:
        raise refusal(folder, "everybody can rename what is in it: `chmod +t` or `chmod o-w` it")


def _require_own(path: Path | str, found: os.stat_result, *, may_group: bool = False) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise refusal(path, f"it belongs to another user (uid {found.st_uid})")
    if found.st_mode & (_EVERYBODY if may_group else _EVERYBODY | _GROUP):
        mode = stat.S_IMODE(found.st_mode)
        raise refusal(path, f"others can write to it (mode {mode:o}): `chmod go-w` it")


def refusal(path: Path | str, why: str) -> PermissionError:
    """The error that names why something is not used."""
    return PermissionError(errno.EACCES, f"{path} is not used: {why}")


def write_own(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Make a new file in the place of whatever has its name, also of a link.

    Raises:
        OSError: it can't be written.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        file.write(content)
