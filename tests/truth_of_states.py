"""Hidden states as transformers computes them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

STATES_TOLERANCE = 2e-5
"""Of the largest number: both compute in float32, and add up in another order."""


@cache
def _model(path: Path) -> Any:
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def hidden_states_by_transformers(path: Path, tokens: list[int], layers: list[int]) -> Any:
    """[tokens, layers, numbers]: what goes into each of the layers of the model in a folder."""
    import torch

    with torch.inference_mode():
        outputs = _model(path)(torch.tensor([tokens]), output_hidden_states=True)
    return torch.stack([outputs.hidden_states[layer][0] for layer in layers], dim=1)
