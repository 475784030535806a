"""Hidden states of a request, once they have been captured: in memory, and as a safetensors file.

Beside a file lies its lock, `<path>.lock`, made before anybody knows the path:

    promise ──► held by the future writer of the file ──► let go
                  │ reader: sleeps                        └─► reader: what the lock's text says
                  └ the writer's process dies: the kernel lets go, the text says nothing

A file gets its name when all of it is written, so what has that name is whole. The lock is a
`flock`, which vLLM's own loader of hidden states waits for too.

Where there can be no lock, since the folder can't be made or written to, the reason is noted in the
temporary folder, one note for each such folder, for readers of the same user on the same host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import TensorSpec, deserialize, serialize_file

from raykv.base.errors import HiddenStatesError
from raykv.base.ownership import make_own_folder, open_own, require_own_folder, require_settled
from raykv.base.threads import start_thread
from raykv.node.disk.chunk_file import whole

# For a file of states to be written, for a reader that does not say otherwise: the promise is as
# old as the request, which may be computed for minutes.
STATES_LOAD_S = 600.0


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a folder in which nothing can be created now."""

LOCK_SUFFIX = ".lock"

_HEAD = b"RayKV hidden states\n"
_WHOLE = b"whole\n"
_MOST_TEXT = 4096
_MOST_NOTES = 64
"""One per folder; existing ones stay, since a reader may look for them."""

_NUMBERS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I64": "int64"}
"""Kinds of numbers in the files, as the format calls them and as we do."""

Raw = npt.NDArray[Any]


class HiddenStates:
    """The hidden states of one request; what `raykv.hidden_states` gives.

    Handed over by Ray without a copy on the node where they are: then the memory can't be written
    to, and `states["hidden_states"].clone()` is what to train on.

    Args:
        request_id: as the engine names the request.
        raw: their bytes, as whole numbers of the width of `dtype`, shape [num_tokens,
            num_hidden_states, hidden_size].
        dtype: float32, float16 or bfloat16.
        token_ids: of the tokens, shape [num_tokens], int64.
    """

    def __init__(self, request_id: str, raw: Raw, dtype: str, token_ids: Raw) -> None:
        self.request_id = request_id
        self.dtype = dtype
        self._raw = raw
        self._token_ids = token_ids

    @property
    def shape(self) -> tuple[int, ...]:
        """[num_tokens, num_hidden_states, hidden_size]."""
        return self._raw.shape

    @property
    def num_bytes(self) -> int:
        """Bytes of the states."""
        return int(self._raw.nbytes)

    def __getitem__(self, name: str) -> Any:
        """The torch tensor `hidden_states` or `token_ids`, as in a file's dictionary.

        Without torch it is a numpy array, as `load_hidden_states` gives it.

        Raises:
            KeyError: there is no other.
        """
        raw, dtype = self.columns[name]
        torch = _torch()
        if torch is None:
            return _values(raw, dtype)
        if name == "token_ids":
            return torch.from_numpy(raw.copy())
        numbers = raw.reshape(-1).view(np.uint8)
        with warnings.catch_warnings():
            # Torch has no read-only memory and warns each time.
            warnings.filterwarnings("ignore", ".*not writable.*", UserWarning)
            flat = torch.from_numpy(numbers)
        return flat.view(getattr(torch, dtype)).reshape(self.shape)

    @property
    def columns(self) -> dict[str, tuple[Raw, str]]:
        """A file's contents by name: the bytes and the kind of numbers."""
        return {
            "hidden_states": (self._raw, self.dtype),
            "token_ids": (self._token_ids, "int64"),
        }

    def __repr__(self) -> str:
        return f"HiddenStates({self.request_id!r}, {self.dtype}, {list(self.shape)})"


def _torch() -> Any | None:
    """The module, or None where it is not installed, as on a node that computes nothing."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    return torch


def _values(raw: Raw, dtype: str) -> Raw:
    """Numbers as numpy has them; it has no bfloat16, all of whose values float32 has too."""
    if dtype != "bfloat16":
        return raw.view(dtype)
    wide: Raw = raw.astype(np.uint32)
    return (wide << 16).view(np.float32)


# Files


def promise(path: str, *, own_folder: bool = False) -> int:
    """Make the lock of a file that is to come, and its folder; returns the lock's descriptor.

    The process that holds the descriptor, or a copy of it, is the writer; `settle` and closing it
    let go.

    Args:
        path: of the file.
        own_folder: its folder has a name that anybody can guess, so it must be this user's alone.

    Raises:
        OSError: the folder can't be made or written to, which readers will learn; or the file is
            being written, or read, now; or there is something else about this file only.
    """
    parent = Path(path).parent
    try:
        if own_folder:
            make_own_folder(parent)
        else:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            require_settled(parent)
    except OSError as error:
        _note(path, error)
        raise
    try:
        fd = open_own(path + LOCK_SUFFIX, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        if error.errno in FULL or not os.access(parent, os.W_OK | os.X_OK):
            _note(path, error)
        raise
    try:
        with contextlib.suppress(OSError):
            _note_of(path).unlink(missing_ok=True)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, _HEAD, 0)
        # The file of an earlier request with the same path.
        Path(path).unlink(missing_ok=True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def problems_folder() -> Path:
    """Where this user's notes of it are."""
    return Path(tempfile.gettempdir()) / f"raykv_hidden_states_problems_{os.getuid()}"


def _note_of(path: str) -> Path:
    """Where it is noted why a file's folder can't be written to."""
    return (
        problems_folder()
        / hashlib.sha256(os.fsencode(Path(path).absolute().parent)).hexdigest()[:32]
    )


def _note(path: str, error: OSError) -> None:
    """Note it; if that fails, or there are too many notes, the server's log has it."""
    reason = " ".join((error.strerror or str(error)).split())[: _MOST_TEXT // 8]
    with contextlib.suppress(OSError):
        note = _note_of(path)
        note.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        if not _is_own(note.parent):
            return
        if not note.exists() and sum(1 for _ in note.parent.iterdir()) >= _MOST_NOTES:
            return
        fd = os.open(note, flags, 0o600)
        try:
            os.write(fd, reason.encode())
        finally:
            os.close(fd)


def _noted(path: str) -> str:
    """What is noted, or an empty text."""
    with contextlib.suppress(OSError):
        note = _note_of(path)
        if _is_own(note.parent):
            return note.read_text(errors="replace")[:_MOST_TEXT]
    return ""


def _is_own(folder: Path) -> bool:
    """Whether only this user can have written to the folder."""
    try:
        require_own_folder(folder)
    except PermissionError:
        return False
    return True


def settle(fd: int, reason: str = "") -> None:
    """Write the outcome into a lock: the `reason` why there is no file, or nothing if there is one.
    The first outcome stays. Nothing is raised: without an outcome the reader concludes that the
    writer has died.
    """
    with contextlib.suppress(OSError):
        if _said(os.pread(fd, _MOST_TEXT, 0)) is None:
            line = " ".join(reason.split())[: _MOST_TEXT // 8]
            text = f"failed: {line}\n".encode() if line else _WHOLE
            os.pwrite(fd, text, len(_HEAD))


def write_states(path: str, states: HiddenStates) -> None:
    """Write the file; it has its name when it is whole.

    Raises:
        OSError: it can't be written; then nothing of it is left.
    """
    specs = {
        name: TensorSpec(
            dtype=dtype, shape=raw.shape, data_ptr=raw.ctypes.data, data_len=raw.nbytes
        )
        for name, (raw, dtype) in states.columns.items()
    }
    with whole(Path(path)) as part:
        serialize_file(specs, part, {"request_id": states.request_id})


def load_hidden_states(path: str, timeout_s: float = STATES_LOAD_S) -> dict[str, Any]:
    """The tensors of a file; sleeps until it is written, however early it is asked for.

    Args:
        path: as the request's answer has it, `kv_transfer_params["hidden_states_path"]`.
        timeout_s: longest wait.

    Returns:
        `hidden_states`, [num_tokens, num_hidden_states, hidden_size], and `token_ids`,
        [num_tokens], as torch tensors in memory of the CPU. Where torch is not installed they are
        numpy arrays, and bfloat16 is float32, of the same values.

    Raises:
        HiddenStatesError: there will be no such file, and why; or it took too long.
    """
    gone = _await_writer(path, timeout_s)
    try:
        tensors = _read_tensors(path)
    except FileNotFoundError:
        raise HiddenStatesError(f"no hidden states at {path}: {gone}") from None
    except Exception as error:
        # Such as a file that another process has cut short.
        raise HiddenStatesError(f"the hidden states at {path} can't be read: {error}") from error
    return tensors


def _read_tensors(path: str) -> dict[str, Any]:
    if _torch() is not None:
        from safetensors.torch import load_file

        return dict(load_file(path, device="cpu"))
    tensors = {}
    views: list[tuple[str, dict[str, Any]]] = deserialize(Path(path).read_bytes())  # type: ignore[no-untyped-call]
    for name, found in views:
        dtype = _NUMBERS[found["dtype"]]
        stored = np.uint16 if dtype == "bfloat16" else dtype
        # Into memory of its own that can be written to, as torch's tensors have.
        raw = np.frombuffer(found["data"], stored).reshape(found["shape"]).copy()
        tensors[name] = _values(raw, dtype)
    return tensors


def cleanup_hidden_states(path: str, keep_hidden_states: bool = False) -> None:  # noqa: FBT002 - as vLLM has it
    """Delete a file and its lock; what is not there is no error.

    Args:
        path: of the file.
        keep_hidden_states: delete only the lock: the file is yours then, and never expires.
    """
    Path(path + LOCK_SUFFIX).unlink(missing_ok=True)
    if not keep_hidden_states:
        Path(path).unlink(missing_ok=True)


def is_expired(lock: Path, now: float, ttl_s: float) -> bool:
    """Whether a lock is one of ours, older than `ttl_s`, and its file is neither written nor read.

    Args:
        lock: a path that ends in `LOCK_SUFFIX`.
        now: seconds since 1970, as files have it.
        ttl_s: how long files are kept.
    """
    try:
        with lock.open("rb") as file:
            if now - os.fstat(file.fileno()).st_mtime < ttl_s or file.read(len(_HEAD)) != _HEAD:
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False


def _said(text: bytes) -> str | None:
    """What the writer has said: empty if the file is whole, None if it has said nothing."""
    rest = text.removeprefix(_HEAD)
    if not rest.endswith(b"\n") or rest == text:
        return None
    said = rest.decode(errors="replace").strip()
    return "" if rest == _WHOLE else said.removeprefix("failed: ")


def _await_writer(path: str, timeout_s: float) -> str:
    """Sleep until the writer has let go of the file; returns why it might not be there.

    Raises:
        HiddenStatesError: it took too long, or the writer has said why there is none.
    """
    try:
        lock = Path(path + LOCK_SUFFIX).open("rb")  # noqa: SIM115 - the thread below closes it
    except FileNotFoundError:
        if problem := _noted(path):
            return f"their folder could not be written to: {problem}"
        return "no request has promised any, or they have expired or been cleaned up"
    except OSError as error:
        raise HiddenStatesError(f"the hidden states at {path} can't be waited for: {error}") from (
            error
        )
    texts: list[bytes] = []

    def wait() -> None:
        with lock:
            # bounded: a thread for it, which is waited for with a deadline
            fcntl.flock(lock, fcntl.LOCK_SH)
            texts.append(os.pread(lock.fileno(), _MOST_TEXT, 0))

    # A wait for a lock has no timeout, so it is tried again and again.
    thread = start_thread("raykv-states", wait)
    thread.join(timeout_s)
    if thread.is_alive():
        raise HiddenStatesError(
            f"the hidden states at {path} are still not written after {timeout_s:g} s"
        )
    said = _said(texts[0]) if texts else None
    if said is None:
        return "their writer died, or was ended, before it had written them"
    if said:
        raise HiddenStatesError(f"no hidden states at {path}: {said}")
    return "they have expired or been cleaned up"
