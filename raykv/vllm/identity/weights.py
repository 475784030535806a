"""The content of a model's weight files as a digest: a few KiB of every tensor.

    file ──► tensors_of(file): name, dtype, shape, place ──► samples ──► one digest of all tensors

Every tensor is sampled, whatever file it is in: a fine-tuning or a merged adapter that changes one
tensor throughout changes the digest. Not noticed: a change of single elements between the samples
of a tensor that is larger than these (`Settings.weights_version` is for that).

Formats without a list of tensors that can be read here (`.tensors`, old `.bin` files) are sampled
at equal distances instead, so that every tensor larger than `STRIDE` is met.

No torch and no vLLM are needed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from raykv.base.errors import SettingError

SAMPLE_BYTES = 4096
MOST_SAMPLES = 16
"""Of a tensor. Models with many tensors have fewer of each: the time of a start is bounded."""

ALL_SAMPLES = 8192
"""Of all tensors together, as far as each has one: 32 MiB, a fraction of a second off a disk."""

STRIDE = 256 << 10
"""Between samples of a file whose tensors can't be told apart; larger in files above 16 GiB."""

_MOST_STRIDES = 65536
_THREADS = 8
_LONGEST_HEADER = 512 << 20

SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".tensors")

NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "tokenizer")
"""Beginnings of names of files that trainers leave beside the weights; vLLM does not load them."""

NOT_LOADED = ("original", "checkpoint-", ".", "onnx", "openvino")
"""Beginnings of names of folders that vLLM ignores."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named run of bytes in a file; `text` has all that is known of it except the bytes."""

    path: Path
    name: str
    text: str
    first: int
    num_bytes: int


def weight_files(folder: Path, load_format: str = "auto") -> list[Path]:
    """The weight files in a model's folder and below that vLLM would load, in order.

    vLLM takes those of one kind, so that two nodes may have more files of a model than they need,
    and not the same.

    Raises:
        SettingError: there are none: a digest of nothing would be the same for all models.
    """
    found = sorted(
        path
        for path in _files(folder)
        if path.suffix in SUFFIXES and not path.name.startswith(NOT_WEIGHTS)
    )
    if not found:
        raise SettingError(
            f"the folder {folder} has no weight files ({', '.join(SUFFIXES)}), so RayKV can't "
            "tell its KV from another model's: set weights_version to a name for these weights, "
            "and change it whenever they change"
        )
    consolidated = [path for path in found if path.match("consolidated*.safetensors")]
    if consolidated and load_format in ("auto", "mistral"):
        loaded = consolidated
    else:
        order = (".pt", *SUFFIXES) if load_format == "pt" else SUFFIXES
        near = {path.suffix for path in found if path.parent == folder}
        kind = min(near or {path.suffix for path in found}, key=order.index)
        loaded = [path for path in found if path.suffix == kind]
    # Some models of vLLM (Flint) take such a file rather than what all others take.
    gguf = [path for path in found if path.parent == folder and path.suffix == ".gguf"]
    return sorted({*loaded, *gguf})


def _files(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.is_file():
            yield entry
        elif entry.is_dir() and not entry.name.startswith(NOT_LOADED):
            yield from _files(entry)


def weights_digest(paths: Sequence[Path]) -> str:
    """Digest of names, types, shapes and samples of all tensors in the files.

    How the tensors are spread over files does not matter, but for those that have the same name.

    Raises:
        SettingError: a file is damaged or can't be read.
    """
    path = None
    try:
        tensors = []
        for path in paths:
            tensors += tensors_of(path)
        if not any(each.num_bytes for each in tensors):
            raise ValueError("it has no tensors")
        path = None
        tensors.sort(key=lambda each: (each.name, each.path.name, each.first))
        samples = min(MOST_SAMPLES, max(1, ALL_SAMPLES // max(1, len(tensors))))
        with ThreadPoolExecutor(_THREADS, "raykv-weights") as threads:
            parts = threads.map(lambda some: _digests(some, samples), _batches(tensors))
            digests = [digest for part in parts for digest in part]
    except (OSError, ValueError, KeyError, TypeError, struct.error, zipfile.BadZipFile) as error:
        where = f"the weight file {path}" if path else "a weight file"
        raise SettingError(
            f"{where} can't be read ({type(error).__name__}: {error}), so RayKV can't tell its KV "
            "from another model's: mend it, or set weights_version to a name for these weights"
        ) from error
    whole = hashlib.sha256()
    for tensor, digest in zip(tensors, digests, strict=True):
        whole.update(json.dumps([tensor.name, tensor.text, tensor.num_bytes]).encode() + digest)
    return whole.hexdigest()


def texts_digest(paths: Iterable[Path]) -> str:
    """Digest of names and contents of small files; empty if there are none."""
    parts = [
        json.dumps([path.name, hashlib.sha256(path.read_bytes()).hexdigest()])
        for path in sorted(paths)
    ]
    return hashlib.sha256("".join(parts).encode()).hexdigest() if parts else ""


def _batches(tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    size = max(1, math.ceil(len(tensors) / (4 * _THREADS)))
    return [tensors[at : at + size] for at in range(0, len(tensors), size)]


def _digests(tensors: Sequence[Tensor], samples: int) -> list[bytes]:
    """Of each tensor's samples; whole tensors where they are no larger than these."""
    found = []
    with ExitStack() as opened:
        files = {path: opened.enter_context(path.open("rb")) for path in {t.path for t in tensors}}
        for tensor in tensors:
            digest = hashlib.sha256()
            for first, size in _samples(tensor, samples):
                data = os.pread(files[tensor.path].fileno(), size, first)
                if len(data) != size:
                    raise ValueError(f"{tensor.path} ends within {tensor.name}")
                digest.update(data)
            found.append(digest.digest())
    return found


def _samples(tensor: Tensor, samples: int) -> Iterator[tuple[int, int]]:
    """Where they begin, and how long they are: at the middle of equal parts of the tensor."""
    if tensor.num_bytes <= samples * SAMPLE_BYTES:
        yield tensor.first, tensor.num_bytes
        return
    for number in range(samples):
        middle = tensor.num_bytes * (2 * number + 1) // (2 * samples)
        yield tensor.first + middle - SAMPLE_BYTES // 2, SAMPLE_BYTES


def tensors_of(path: Path) -> list[Tensor]:
    """All tensors of a file, in whatever format it is."""
    with path.open("rb") as file:
        beginning = file.read(8)
        if beginning.startswith(b"GGUF"):
            return list(_of_gguf(path, file))
        if path.suffix == ".safetensors":
            return list(_of_safetensors(path, file, beginning))
    if beginning.startswith(b"PK"):
        return list(_of_torch_zip(path))
    return list(_of_any(path))


def _of_safetensors(path: Path, file: BinaryIO, beginning: bytes) -> Iterator[Tensor]:
    (length,) = struct.unpack("<Q", beginning)
    if length > _LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    for name, entry in json.loads(file.read(length)).items():
        if name == "__metadata__":
            continue
        first, end = entry["data_offsets"]
        text = f"{entry['dtype']} {entry['shape']}"
        yield Tensor(path, name, text, 8 + length + first, end - first)


def _of_torch_zip(path: Path) -> Iterator[Tensor]:
    """What `torch.save` writes: a pickle that names types and shapes, and a record per storage.

    Zip's own checksums are useless: torch may leave them out.
    """
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for record in archive.infolist():
            # The first part of the name is that of the file it was saved as.
            name = record.filename.partition("/")[2] or record.filename
            file.seek(record.header_offset + 26)
            name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
            first = record.header_offset + 30 + name_bytes + extra_bytes
            if name.endswith(".pkl"):
                # All of it: it alone says which storage is which tensor.
                text = hashlib.sha256(archive.read(record)).hexdigest()
                yield Tensor(path, name, text, first, 0)
            elif name.startswith("data/"):
                yield Tensor(path, name, str(record.compress_type), first, record.compress_size)


def _of_any(path: Path) -> Iterator[Tensor]:
    size = path.stat().st_size
    stride = max(STRIDE, -(-size // _MOST_STRIDES))
    for first in range(0, size, stride):
        yield Tensor(
            path, f"{path.name}@{first}", str(size), first, min(SAMPLE_BYTES, size - first)
        )


_GGUF_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of each type of value; 8 is a string, 9 an array. Source: ggml's `docs/gguf.md`."""

_GGUF_STRING, _GGUF_ARRAY = 8, 9
_GGUF_DEEPEST = 4


class _Gguf:
    """A cursor over a GGUF header of version 2 or 3, whose numbers are little-endian."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def number(self, form: str) -> int:
        """The next one; `form` as in `struct`."""
        (value,) = struct.unpack("<" + form, self._file.read(struct.calcsize(form)))
        return int(value)

    def string(self) -> str:
        """The next one."""
        length = self.number("Q")
        if length > _LONGEST_HEADER:
            raise ValueError(f"a name of {length} bytes")
        return self._file.read(length).decode("utf-8", "replace")

    def skip(self, kind: int, depth: int = 0) -> None:
        """Skip a value of that type."""
        if kind == _GGUF_STRING:
            self._file.seek(self.number("Q"), os.SEEK_CUR)
        elif kind == _GGUF_ARRAY and depth < _GGUF_DEEPEST:
            inner, count = self.number("I"), self.number("Q")
            if inner in _GGUF_SCALARS:
                self._file.seek(_GGUF_SCALARS[inner] * count, os.SEEK_CUR)
                return
            for _ in range(count):
                self.skip(inner, depth + 1)
        else:
            self._file.seek(_GGUF_SCALARS[kind], os.SEEK_CUR)


def _of_gguf(path: Path, file: BinaryIO) -> Iterator[Tensor]:
    """The tensors, and all that stands before them as one more: it has the model's settings."""
    file.seek(4)
    header = _Gguf(file)
    version, count, num_settings = header.number("I"), header.number("Q"), header.number("Q")
    if version not in (2, 3):
        raise ValueError(f"GGUF of version {version}")
    alignment = 32
    for _ in range(num_settings):
        name, kind = header.string(), header.number("I")
        if name == "general.alignment":
            alignment = max(1, header.number("I"))
        else:
            header.skip(kind)
    found = []
    for _ in range(count):
        name = header.string()
        shape = [header.number("Q") for _ in range(header.number("I"))]
        found.append((header.number("I"), header.number("Q"), name, shape))
    end_of_header = file.tell()
    data = -(-end_of_header // alignment) * alignment
    file.seek(0)
    text = hashlib.sha256(file.read(end_of_header)).hexdigest()
    yield Tensor(path, "the header", text, 0, 0)
    found.sort(key=lambda each: each[1])
    ends = [first for _, first, _, _ in found[1:]] + [path.stat().st_size - data]
    for (kind, first, name, shape), end in zip(found, ends, strict=True):
        yield Tensor(path, name, f"{kind} {shape}", data + first, max(0, end - first))
