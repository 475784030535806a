"""The model that vLLM's scheduler is made for: only its configuration is read."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from raykv.lab.demo.tiny_llama import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("model"), layers=1, hidden_size=32, vocab_size=64)
