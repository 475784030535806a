"""LoRA adapters of random weights for the tiny model, in the files that PEFT writes."""

from __future__ import annotations

import json
from pathlib import Path

RANK = 8


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """An adapter that changes what the model says; files that are there are replaced."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // heads
    sizes = {
        "q_proj": heads * head_size,
        "k_proj": config["num_key_value_heads"] * head_size,
        "v_proj": config["num_key_value_heads"] * head_size,
    }
    made = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in sizes.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(RANK, hidden, generator=made) * 0.3
            tensors[f"{place}.lora_B.weight"] = torch.randn(size, RANK, generator=made) * 0.3
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "new")
    # An engine may still map the old file.
    (folder / "new").replace(folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 16,
        "target_modules": sorted(sizes),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
