"""A worker with a KV cache on a real GPU, in a process of its own.

Usage: python gpu_worker.py SOCKET_FD NUM_BLOCKS whole|split. Sends its layout over the
socket, then answers one line to each command on standard input: "check VALUE" says whether
block 1 of all layers is full of VALUE, "delayed VALUE" queues a long computation that ends by
filling block 0 with VALUE, and records the event. Needs torch and cuda.bindings, no vLLM, no Ray.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
from typing import Any

import torch

from raykv.memory.cuda.driver import load
from raykv.memory.cuda.kv import ExportedKV, export_kv
from raykv.protocol.framing import encode
from raykv.protocol.worker import TensorLayout

NUM_LAYERS = 32
PAGE_BYTES = 16 * 2 * 8 * 128 * 2
"""Of Llama 8B: 16 tokens, K and V, 8 heads of 128 bfloat16."""


def allocate(num_blocks: int, is_split: bool) -> list[torch.Tensor]:
    """One tensor for each layer, in one buffer as vLLM has them, or in one each."""
    shape = (num_blocks, PAGE_BYTES)
    if is_split:
        return [torch.zeros(shape, dtype=torch.int8, device="cuda") for _ in range(NUM_LAYERS)]
    # Not at the beginning of its allocation: something else is there.
    buffer = torch.zeros((NUM_LAYERS + 1, *shape), dtype=torch.int8, device="cuda")
    return [buffer[1 + layer] for layer in range(NUM_LAYERS)]


def export(layers: list[torch.Tensor]) -> ExportedKV:
    """As `raykv.worker.handover` does it, without vLLM."""
    tensors = [
        TensorLayout(each.data_ptr(), each.shape[0], each.stride(0), each.shape[1])
        for each in layers
    ]
    return export_kv(load(), tensors, 1, [0], [list(range(len(layers)))])


def delay(layers: list[torch.Tensor], value: int, exported: ExportedKV) -> None:
    """Queue about a second of computation, then a write, then the event; returns at once."""
    torch.cuda._sleep(2_000_000_000)
    for layer in layers:
        layer[0] = value
    exported.record(torch.cuda.current_stream().cuda_stream)


def main() -> None:
    """See the module's docstring."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    num_blocks, is_split = int(sys.argv[2]), sys.argv[3] == "split"
    layers = allocate(num_blocks, is_split)
    for number, layer in enumerate(layers):
        layer.fill_(number + 1)
    torch.cuda.synchronize()
    exported = export(layers)
    raw = base64.b64encode(encode(exported.layout)) + b"\n"
    channel.sendall(raw)
    for line in sys.stdin:
        command, value = line.split()
        answer: Any = True
        if command == "delayed":
            delay(layers, int(value), exported)
        elif command == "check":
            torch.cuda.synchronize()
            answer = all(bool((layer[1] == int(value)).all()) for layer in layers)
        print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
