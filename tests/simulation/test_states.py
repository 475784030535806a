"""Models with recurrent states beside attention, or alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from raykv.serve.models import tiny_llama
from tests.fixtures.vllm import CHUNK, FULL
from tests.simulation.hook_world import HookWorld
from tests.simulation.test_layered_scheduler import prompt

STATE = MambaSpec(
    block_size=CHUNK, shapes=((2, 2),), dtypes=(torch.float32,), mamba_cache_mode="align"
)
INSIDE = replace(STATE, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)

KINDS = {
    "qwen3-next": (FULL, STATE),
    "three": (FULL, STATE, STATE, STATE),
    "alone": (STATE,),
    "mamba2": (INSIDE,),
    "granite": (FULL, INSIDE),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=1, hidden_size=32, vocab_size=64)


DOCUMENT = prompt(1, 14 * CHUNK + 3)


@pytest.mark.parametrize("share", [None, 0.5, 0.0])
@pytest.mark.parametrize("name", KINDS)
def test_doc(model, name, share):
    world = HookWorld(model, 1, num_blocks=160, kinds=KINDS[name], share=share)
    world.windows_on = True
    world.evicting = 0.0
    r = world.add(DOCUMENT)
    world.run()
    world.check()
    world.check_rest()
    print(name, share, len(world.line.slots))
    world.scheduler.reset_prefix_cache()
    r = world.add(DOCUMENT)
    world.run()
    world.check()
    print(
        "again",
        [
            (x.own, x.loaded, dict(x.missed))
            for x in world.view.accounts.take_records()
            if x.request_id == r
        ],
        world.line.num_loaded,
    )
    for q in range(3):
        world.scheduler.reset_prefix_cache()
        r = world.add(DOCUMENT[: 8 * CHUNK + 5] + prompt(q + 20, 30))
        world.run()
        world.check()
        print(
            "q",
            q,
            [
                (x.own, x.loaded, dict(x.missed))
                for x in world.view.accounts.take_records()
                if x.request_id == r
            ],
        )
    world.check_rest()
