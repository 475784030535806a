"""The digest of a model's weight files: of every tensor, in every format."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from raykv.base.errors import SettingError
from raykv.vllm.identity.weights import (
    ALL_SAMPLES,
    MOST_SAMPLES,
    SAMPLE_BYTES,
    STRIDE,
    tensors_of,
    texts_digest,
    weight_files,
    weights_digest,
)
from tests.fixtures.gguf import Arrays, gguf

LAYERS = 8
MERGED = ("q_proj", "k_proj", "v_proj", "o_proj")


def model() -> dict[str, npt.NDArray[np.float32]]:
    """A model of many tensors, most of its bytes in those that an adapter does not change."""
    random = np.random.default_rng(0)
    shapes = dict.fromkeys(MERGED, (64, 64)) | {"up_proj": (256, 1024), "norm": (64,)}
    arrays = {
        f"layers.{layer}.{name}": random.standard_normal(shape, dtype=np.float32)
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }
    return {**arrays, "embed": random.standard_normal((4096, 64), dtype=np.float32)}


def safetensors(path: Path, arrays: Arrays) -> None:
    save_file(dict(arrays), path)


def torch_zip(path: Path, arrays: Arrays) -> None:
    """As `torch.save` writes it: the name of the file it was saved as comes first."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("saved_as/data.pkl", json.dumps({n: a.shape for n, a in arrays.items()}))
        for number, array in enumerate(arrays.values()):
            archive.writestr(f"saved_as/data/{number}", array.tobytes())
        archive.writestr("saved_as/version", "3\n")


def plain(path: Path, arrays: Arrays) -> None:
    path.write_bytes(b"any" + b"".join(array.tobytes() for array in arrays.values()))


WRITERS: dict[str, Callable[[Path, Arrays], None]] = {
    "model.safetensors": safetensors,
    "model.gguf": gguf,
    "pytorch_model.bin": torch_zip,
}


def digest(path: Path, arrays: Arrays) -> str:
    WRITERS[path.name](path, arrays)
    return weights_digest([path])


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("changed", [f"layers.{LAYERS - 1}.{each}" for each in MERGED] + ["embed"])
def test_digest_changes_if_one_tensor_changes_a_little(
    tmp_path: Path, name: str, changed: str
) -> None:
    arrays = model()
    before = digest(tmp_path / name, arrays)
    arrays[changed] = arrays[changed] + np.float32(1e-3)
    assert digest(tmp_path / name, arrays) != before


@pytest.mark.parametrize("name", WRITERS)
def test_digest_is_that_of_the_content_wherever_the_file_lies(tmp_path: Path, name: str) -> None:
    before = digest(tmp_path / name, model())
    (tmp_path / "other").mkdir()
    assert digest(tmp_path / "other" / name, model()) == before


@pytest.mark.parametrize("name", WRITERS)
def test_every_tensor_is_found_with_its_bytes(tmp_path: Path, name: str) -> None:
    arrays = model()
    WRITERS[name](tmp_path / name, arrays)
    found = [each.first for each in tensors_of(tmp_path / name) if each.num_bytes]
    raw = (tmp_path / name).read_bytes()
    # The writer of safetensors sorts them.
    written = sorted(arrays) if name == "model.safetensors" else list(arrays)
    for first, array in zip(found, map(arrays.__getitem__, written), strict=True):
        assert raw[first : first + array.nbytes] == array.tobytes()


def test_digest_changes_with_name_type_and_shape(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    weights = {"a": np.arange(64, dtype=np.float32)}
    before = digest(file, weights)
    renamed = digest(file, {"b": weights["a"]})
    reshaped = digest(file, {"a": weights["a"].reshape(8, 8)})
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"'))
    assert len({before, renamed, reshaped, weights_digest([file])}) == 4


def test_digest_does_not_depend_on_how_tensors_are_spread_over_files(tmp_path: Path) -> None:
    arrays = list(model().items())
    whole = digest(tmp_path / "model.safetensors", dict(arrays))
    parts = [tmp_path / f"model-{number}.safetensors" for number in range(2)]
    for part, some in zip(parts, (arrays[:7], arrays[7:]), strict=True):
        safetensors(part, dict(some))
    assert weights_digest(parts) == whole


def test_shards_of_ranks_that_change_places_are_other_weights(tmp_path: Path) -> None:
    shards = [{"w": np.full(64, value, dtype=np.float32)} for value in (1, 2)]
    paths = [tmp_path / f"model-rank-{rank}-part-0.safetensors" for rank in range(2)]
    digests = []
    for order in (shards, shards[::-1]):
        for path, shard in zip(paths, order, strict=True):
            safetensors(path, shard)
        digests.append(weights_digest(paths))
    assert digests[0] != digests[1]


@pytest.mark.parametrize("suffix", [".tensors", ".bin"])
def test_file_without_a_list_of_tensors_is_met_at_equal_distances(
    tmp_path: Path, suffix: str
) -> None:
    file = tmp_path / f"model{suffix}"
    plain(file, model())
    before = weights_digest([file])
    raw = bytearray(file.read_bytes())
    at = len(raw) // 2
    raw[at : at + STRIDE] = bytes(STRIDE)
    file.write_bytes(raw)
    assert weights_digest([file]) != before


def test_change_between_the_samples_of_a_large_tensor_is_not_seen(tmp_path: Path) -> None:
    """The known limit, which `weights_version` is for."""
    file = tmp_path / "model.safetensors"
    weights = np.zeros(2 * MOST_SAMPLES * SAMPLE_BYTES, dtype=np.float32)
    before = digest(file, {"w": weights})
    weights[0] = 1.0
    assert digest(file, {"w": weights}) == before


def test_models_of_very_many_tensors_have_a_sample_of_each(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    arrays = {f"w{number}": np.zeros(2048, dtype=np.float32) for number in range(ALL_SAMPLES + 1)}
    before = digest(file, arrays)
    arrays[f"w{ALL_SAMPLES}"] += 1
    assert digest(file, arrays) != before


def lay_out(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()


def names_of(folder: Path, load_format: str = "auto") -> list[str]:
    return [str(path.relative_to(folder)) for path in weight_files(folder, load_format)]


def test_weight_files_are_those_that_vllm_loads(tmp_path: Path) -> None:
    lay_out(tmp_path, "model.safetensors", "config.json", "optimizer.pt", "training_args.bin")
    lay_out(tmp_path, "original/consolidated.00.pth", "checkpoint-5/model.safetensors")
    lay_out(tmp_path, ".cache/x.bin", "whisper-large-v3/model.safetensors")
    assert names_of(tmp_path) == ["model.safetensors", "whisper-large-v3/model.safetensors"]


@pytest.mark.parametrize(
    ("load_format", "expected"),
    [("auto", "consolidated.safetensors"), ("hf", "model.safetensors"), ("pt", "model.pt")],
)
def test_weight_files_are_of_the_kind_that_vllm_prefers(
    tmp_path: Path, load_format: str, expected: str
) -> None:
    lay_out(tmp_path, "consolidated.safetensors", "model.bin", "model.pt", "model.safetensors")
    assert expected in names_of(tmp_path, load_format)
    assert len(names_of(tmp_path, load_format)) == (2 if load_format == "hf" else 1)


def test_gguf_file_beside_other_weights_counts_since_some_models_take_it(tmp_path: Path) -> None:
    lay_out(tmp_path, "consolidated.safetensors", "model.safetensors", "model.gguf", "x/other.gguf")
    assert names_of(tmp_path) == ["consolidated.safetensors", "model.gguf"]
    assert "model.gguf" in names_of(tmp_path, "hf")


def test_folder_without_weight_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(SettingError, match=r"no weight files .* set weights_version"):
        weight_files(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.5], ids=["empty", "damaged"])
@pytest.mark.parametrize("name", WRITERS)
def test_damaged_file_is_refused_with_its_name(tmp_path: Path, name: str, share: float) -> None:
    WRITERS[name](tmp_path / name, model())
    raw = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(SettingError, match=rf"{re.escape(name)}.* weights_version") as refused:
        weights_digest([tmp_path / name])
    assert "can't be read" in str(refused.value)


def test_torch_file_that_torch_has_written_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    files = []
    for number, value in enumerate((1.0, 1.0, 1.001)):
        path = tmp_path / f"{number}.pt"
        buffer = io.BytesIO()
        torch.save({"a": torch.zeros(100_000), "b": torch.full((1000,), value)}, buffer)
        path.write_bytes(buffer.getvalue())
        files.append(weights_digest([path]))
    assert files[0] == files[1] != files[2]


def test_texts_are_told_apart_by_name_and_content(tmp_path: Path) -> None:
    digests = set()
    for name, text in (("a.py", "x"), ("a.py", "y"), ("b.py", "x")):
        folder = tmp_path / f"{name}{text}"
        folder.mkdir()
        (folder / name).write_text(text)
        digests.add(texts_digest(folder.glob("*.py")))
    assert len(digests) == 3
    assert texts_digest([]) == ""
