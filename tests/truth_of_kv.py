"""KV of a prompt as transformers' own model computes it."""

from __future__ import annotations

from pathlib import Path

from raykv.inspect import ChunkKV

TOLERANCE = 1e-4


def assert_as_transformers_computes(found: ChunkKV, model: Path, tokens: list[int]) -> None:
    """K (after its rotary embedding) and V of each layer, token, head and dimension.

    Args:
        found: chunks from the beginning of a prompt on.
        model: a folder with a Llama in float32.
        tokens: the prompt.
    """
    import torch
    from transformers import LlamaForCausalLM

    truth = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        theirs = truth(torch.tensor([tokens[: found.num_tokens]]), use_cache=True).past_key_values
    assert found.num_tokens > 0
    assert len(found.layers) == len(theirs.layers)
    for ours, layer in zip(found.layers.values(), theirs.layers, strict=True):
        keys, values = layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)
        torch.testing.assert_close(ours.k, keys, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(ours.v, values, rtol=0, atol=TOLERANCE)
