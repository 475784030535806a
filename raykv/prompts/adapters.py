"""A LoRA adapter's name by content: a digest of the files that vLLM would load from its folder.

vLLM tells adapters apart by name and path, and both stay when the files are written anew. A digest
is remembered as long as the files' inodes, sizes and times stay, and only once those times are old
enough: a file that has just been written may be written again without a sign.
"""

from __future__ import annotations

import hashlib
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from raykv.base.errors import SettingError
from raykv.prompts.block_hashes import PromptTraits

CONFIG = "adapter_config.json"
WEIGHTS = frozenset({".safetensors", ".bin", ".pt"})

MAX_BYTES = 4 << 30
"""Bytes of an adapter whose files are read: some seconds. A larger one has no name."""

SETTLED_NS = 2_000_000_000
"""The coarsest times of a file system are those of FAT, in steps of 2 s."""

MOST_KEPT = 1024
"""Adapters whose digests are remembered."""


@dataclass(frozen=True, slots=True)
class FileState:
    """What changes when a file is replaced or written; `times_ns`: when its content changed, and
    when its inode did.
    """

    name: str
    device: int
    inode: int
    size: int
    times_ns: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Content:
    """What is in an adapter's folder; `digest` is empty if it can't be read."""

    digest: str = ""
    files: tuple[FileState, ...] = ()


UNKNOWN = Content()


def content(path: str, clock: Callable[[], float] = time.time) -> Content:
    """What is in the folder that vLLM is given as an adapter's path; `UNKNOWN` if it is not a local
    one, can't be read, is too large, or changes meanwhile. Any thread may ask.

    Args:
        path: the folder.
        clock: the time of day, as the file system has it.
    """
    settled_ns = int(clock() * 1e9) - SETTLED_NS
    try:
        files = _files(path)
        if not _is_adapter(files):
            return UNKNOWN
        is_settled = all(max(each.times_ns) < settled_ns for each in files)
        return Content((_remembered if is_settled else _checked)(path, files), files)
    except (OSError, ValueError):
        return UNKNOWN


def is_unchanged(path: str, content: Content) -> bool:
    """Whether the files are still those; a few microseconds, nothing is read."""
    try:
        return bool(content.digest) and _files(path) == content.files
    except (OSError, ValueError):
        return False


def _files(folder: str) -> tuple[FileState, ...]:
    states = []
    for path in sorted(Path(folder).expanduser().iterdir()):
        if path.name == CONFIG or path.suffix in WEIGHTS:
            found = path.stat()
            times_ns = found.st_mtime_ns, found.st_ctime_ns
            state = FileState(path.name, found.st_dev, found.st_ino, found.st_size, times_ns)
            if stat.S_ISREG(found.st_mode):
                states.append(state)
    return tuple(states)


def _is_adapter(files: tuple[FileState, ...]) -> bool:
    has_config = any(file.name == CONFIG for file in files)
    is_small = sum(file.size for file in files) <= MAX_BYTES
    return has_config and len(files) > 1 and is_small


def _digest(folder: str, files: tuple[FileState, ...]) -> str:
    whole = hashlib.sha256()
    for each in files:
        with (Path(folder).expanduser() / each.name).open("rb") as file:
            part = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{len(each.name)}:{each.name}:{part}\n".encode())
    return whole.hexdigest()


def _checked(folder: str, files: tuple[FileState, ...]) -> str:
    digest = _digest(folder, files)
    if _files(folder) != files:
        raise OSError(f"{folder} has changed while it was read")
    return digest


_remembered = lru_cache(MOST_KEPT)(_checked)


def named(traits: PromptTraits) -> PromptTraits:
    """`traits` with the digest of the adapter's files, if it has an adapter and no digest.

    Raises:
        SettingError: the files can't be read here.
    """
    if not traits.lora_name or traits.lora_digest:
        return traits
    digest = content(traits.lora_path).digest
    if not digest:
        raise SettingError(
            f"the adapter {traits.lora_name} goes by the content of its files, and {CONFIG} and "
            f"weights can't be read in {traits.lora_path!r} here: ask on a node that has them, or "
            "give lora_digest"
        )
    return replace(traits, lora_digest=digest)
