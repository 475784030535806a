"""A seeded random Llama that loads at once: a folder that vLLM and transformers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


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
