"""A mapping that can be handed to another process: the pool, a KV cache, a page of words.

Anonymous regions are memfds: nothing in `/dev/shm` or any folder, and the memory dies with the
last process that has it open or mapped, however that process ends.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from raykv.base import deadlines
from raykv.base.errors import HandleError
from raykv.base.ownership import open_own
from raykv.memory.limits import is_in_memory

PREFAULT_PIECE_BYTES = 4 << 20
"""A millisecond or two of page faults: how long others that map or close something wait for it. On
a busy machine a thread that yields to all others takes a hundred times as long.
"""

ROOM_CHECK_BYTES = 16 * PREFAULT_PIECE_BYTES
"""Between two looks at how much memory is left, each some files to read."""

_LOWEST_PRIORITY = 19

_MADV_POPULATE_WRITE = 23
"""Linux 5.14; from the kernel's include/uapi/asm-generic/mman-common.h."""

_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_MAP_FAILED = ctypes.c_void_p(-1).value


def close_all(fds: list[int]) -> None:
    """Close descriptors that nothing has taken over."""
    for fd in fds:
        os.close(fd)


def yield_to_others() -> None:
    """Give the calling thread only processor time that hardly any other thread wants."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def _reserve(fd: int, num_bytes: int) -> None:
    """Allocate all blocks of a file, whose contents stay. Does nothing where the file system can't.

    Raises:
        OSError: there is no room.
    """
    if _libc.fallocate(fd, 0, 0, num_bytes):
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
            raise OSError(code, os.strerror(code))


def _claim(fd: int, path: Path) -> None:
    """Take the file for this process, until it closes it or ends.

    Raises:
        HandleError: another process has it.
    """
    give_up_at = time.monotonic() + deadlines.PREDECESSOR_S
    while not _lock(fd):
        if time.monotonic() > give_up_at:
            raise HandleError(
                f"the pool file {path} is in use by another process: each NodeActor needs a "
                "pool_path of its own, also where two Ray nodes are on one machine"
            )
        time.sleep(deadlines.LOOK_S)


def _lock(fd: int) -> bool:
    """Whether it is this process's now, or its file system can't say."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


class Region:
    """Shared memory of a fixed size; `address` is valid until `close`."""

    def __init__(self, fd: int, num_bytes: int, what: str) -> None:
        """Map all of `fd`, which the region owns from now on."""
        assert num_bytes > 0, num_bytes
        self.fd = fd
        self.num_bytes = num_bytes
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, num_bytes, protection, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            error = os.strerror(ctypes.get_errno())
            os.close(fd)
            raise HandleError(f"cannot map {num_bytes} bytes of {what}: {error}")
        self.address: int = address

    @classmethod
    def anonymous(cls, num_bytes: int, name: str) -> Region:
        """New memory, zero, without a page behind it until it is touched."""
        fd = os.memfd_create(f"raykv-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        return cls(fd, num_bytes, f"a memfd for {name}")

    @classmethod
    def huge(cls, num_bytes: int, name: str) -> Region:
        """New memory in pages of 2 MiB that the machine has reserved: they are its own from now on.

        `num_bytes` is a multiple of their size.

        Raises:
            HandleError: there are not enough.
        """
        flags, fd = os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_HUGE_2MB, -1
        try:
            fd = os.memfd_create(f"raykv-{name}", flags)
            os.ftruncate(fd, num_bytes)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise HandleError(f"no huge pages for {name}: {error.strerror}") from error
        return cls(fd, num_bytes, f"huge pages for {name}")

    @classmethod
    def in_file(cls, path: Path, num_bytes: int) -> Region:
        """A file of exactly `num_bytes`, created when missing; its contents are kept.

        Where the file system can, all of it has its place on the disk from now on: a page of a
        mapped file that finds no place kills the process that touches it.

        Raises:
            HandleError: it can't be opened, belongs to another user, another process has it, or
                there is no room for it.
        """
        fd = -1
        try:
            fd = open_own(path, os.O_RDWR | os.O_CREAT)
            _claim(fd, path)
            if os.fstat(fd).st_size != num_bytes:
                os.ftruncate(fd, num_bytes)
            if not is_in_memory(path):
                _reserve(fd, num_bytes)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            what = f"cannot open the pool file {path}: {error.strerror}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                what = (
                    f"the pool file {path} can't have {num_bytes} bytes: {error.strerror}. Free "
                    "some space there, or set a smaller pool_bytes or another pool_path"
                )
            raise HandleError(what) from error
        except HandleError:
            os.close(fd)
            raise
        return cls(fd, num_bytes, f"the pool file {path}")

    @classmethod
    def received(cls, fd: int, num_bytes: int) -> Region:
        """Memory of another process that came as a file descriptor.

        Raises:
            HandleError: the descriptor has fewer bytes than was said.
        """
        if os.fstat(fd).st_size < num_bytes:
            size = os.fstat(fd).st_size
            os.close(fd)
            raise HandleError(f"the peer's memory has {size} bytes, not {num_bytes} as it said")
        region = cls(fd, num_bytes, "the peer's memory")
        # A child that this process forks must not keep it after we have released it.
        _libc.madvise(region.address, num_bytes, _MADV_DONTFORK)
        return region

    def array(self) -> ctypes.Array[ctypes.c_ubyte]:
        """The bytes as a ctypes array: a writable buffer without a copy, valid until `close`."""
        return (ctypes.c_ubyte * self.num_bytes).from_address(self.address)

    def advise_huge(self) -> bool:
        """Ask for transparent huge pages where none was touched yet; False: there are none."""
        return not _libc.madvise(self.address, self.num_bytes, _MADV_HUGEPAGE)

    def prefault(self, progress: Callable[[int], bool], start: int = 0) -> None:
        """Touch the pages from `start` on, piece by piece.

        `progress` gets the bytes done, False stops it. It also stops where there is no memory, or
        no room in the region's file, for a page.
        """
        done = start
        while done < self.num_bytes:
            size = min(PREFAULT_PIECE_BYTES, self.num_bytes - done)
            if _libc.madvise(self.address + done, size, _MADV_POPULATE_WRITE):
                if ctypes.get_errno() in (errno.ENOMEM, errno.EFAULT, errno.ENOSPC):
                    return
                self._touch(done, size)
            done += size
            if not progress(done):
                return

    def _touch(self, offset: int, size: int) -> None:
        """Read one byte of each page, where the kernel has no MADV_POPULATE_WRITE.

        A read fault of shared memory allocates the page as well, and changes nothing in it.
        """
        view = self.array()
        for page in range(offset, offset + size, mmap.PAGESIZE):
            _ = view[page]

    def close(self) -> None:
        """Unmap and close; a second call does nothing. Views of the region must be gone."""
        if self.fd < 0:
            return
        _libc.munmap(self.address, self.num_bytes)
        os.close(self.fd)
        self.fd = -1
