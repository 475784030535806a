"""A LoRA adapter's name by content: a digest of the files that vLLM would load from its folder.

vLLM tells adapters apart by name and path, and both stay when the files are written anew. A digest
is remembered as long as the files' inodes, sizes and times stay, and only once those times are old
enough: a file that has just been written may be written again without a sign.
"""

from __future__ import annotations

import hashlib
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    """What changes when a file is replaced or written."""

    name: str
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @property
    def newest_ns(self) -> int:
        """When it was touched last."""
        return max(self.modified_ns, self.changed_ns)


@dataclass(frozen=True, slots=True)
class Content:
    """What is in an adapter's folder; `digest` is empty where that can't be told."""

    digest: str = ""
    files: tuple[FileState, ...] = ()


UNKNOWN = Content()


class AdapterFiles:
    """Digests of adapters, by the path that vLLM is given. Any thread may ask.

    Args:
        clock: the time of day, as the file system has it.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Content] = OrderedDict()

    def content(self, path: str) -> Content:
        """What is in the folder now; `UNKNOWN` if it is not a local one, can't be read, is too
        large, or changes meanwhile.
        """
        try:
            return self._content(path)
        except (OSError, ValueError):
            return UNKNOWN

    def _content(self, path: str) -> Content:
        folder = Path(path).expanduser()
        now_ns = int(self._clock() * 1e9)
        files = tuple(_files(folder))
        with self._lock:
            known = self._known.get(path)
        if known is not None and known.files == files:
            return known
        if not _is_adapter(files):
            return UNKNOWN
        content = Content(_digest(folder, files), files)
        if tuple(_files(folder)) != files:
            return UNKNOWN
        if all(file.newest_ns < now_ns - SETTLED_NS for file in files):
            self._keep(path, content)
        return content

    def _keep(self, path: str, content: Content) -> None:
        with self._lock:
            self._known[path] = content
            self._known.move_to_end(path)
            if len(self._known) > MOST_KEPT:
                self._known.popitem(last=False)

    def is_unchanged(self, path: str, content: Content) -> bool:
        """Whether the files are still those; a few microseconds, nothing is read."""
        try:
            return bool(content.digest) and tuple(_files(Path(path).expanduser())) == content.files
        except (OSError, ValueError):
            return False


def _files(folder: Path) -> Iterator[FileState]:
    for path in sorted(folder.iterdir()):
        if path.name == CONFIG or path.suffix in WEIGHTS:
            found = path.stat()
            if stat.S_ISREG(found.st_mode):
                yield FileState(
                    path.name,
                    found.st_dev,
                    found.st_ino,
                    found.st_size,
                    found.st_mtime_ns,
                    found.st_ctime_ns,
                )


def _is_adapter(files: tuple[FileState, ...]) -> bool:
    has_config = any(file.name == CONFIG for file in files)
    is_small = sum(file.size for file in files) <= MAX_BYTES
    return has_config and len(files) > 1 and is_small


def _digest(folder: Path, files: tuple[FileState, ...]) -> str:
    whole = hashlib.sha256()
    for each in files:
        with (folder / each.name).open("rb") as file:
            part = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{len(each.name)}:{each.name}:{part}\n".encode())
    return whole.hexdigest()


def named(traits: PromptTraits) -> PromptTraits:
    """`traits` with the digest of the adapter's files, if it has an adapter and no digest.

    Raises:
        SettingError: the files can't be read here.
    """
    if not traits.lora_name or traits.lora_digest:
        return traits
    digest = AdapterFiles().content(traits.lora_path).digest
    if not digest:
        raise SettingError(
            f"the adapter {traits.lora_name} goes by the content of its files, and {CONFIG} and "
            f"weights can't be read in {traits.lora_path!r} here: ask on a node that has them, or "
            "give lora_digest"
        )
    return replace(traits, lora_digest=digest)
