"""Modules of models that import torchvision, on the CPU build of vLLM too."""

from __future__ import annotations

import re

import pytest

from tests.house import ROOT

PIN = re.compile(r"torchvision==([\d.]+\d)")


def test_all_say_the_same_version() -> None:
    said = {
        name: set(PIN.findall((ROOT / name).read_text()))
        for name in ("Makefile", "deploy/install.md", "deploy/Dockerfile")
    }
    assert len(set.union(*said.values())) == 1
    assert all(said.values()), said


@pytest.mark.parametrize(
    "architecture", ["Qwen3_5ForCausalLM", "Gemma3ForConditionalGeneration", "LlamaForCausalLM"]
)
def test_module_of_a_model_can_be_imported(architecture: str) -> None:
    """vLLM imports what a model needs for images too, when it looks at one that reads text only."""
    pytest.importorskip("vllm", exc_type=ImportError)
    from vllm.model_executor.models import ModelRegistry

    if architecture not in ModelRegistry.models:
        pytest.skip(f"this vLLM has no {architecture}")
    assert ModelRegistry.models[architecture].load_model_cls().__name__ == architecture
