"""Tokens of texts and messages are those that a model's own tokenizer gives."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from raykv.base.errors import SettingError
from raykv.prompts.tokens import tokens_of_chat, tokens_of_text
from tests.fixtures.tiny_tokenizer import SPECIAL_TOKENS, write_tiny_tokenizer

transformers = pytest.importorskip("transformers")

USER, ASSISTANT, END = (
    SPECIAL_TOKENS.index(name) for name in ("<|user|>", "<|assistant|>", "</s>")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer with one token for each byte, and a chat template."""
    return str(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_text_has_a_token_for_each_byte(folder: str) -> None:
    tokens = tokens_of_text(folder, "aab")
    assert len(tokens) == 3
    assert tokens[0] == tokens[1] != tokens[2]
    assert all(type(token) is int for token in tokens)


def test_nothing_is_said_of_what_torchvision_lacks_for_images(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = transformers.AutoTokenizer.from_pretrained

    def warn_and_read(*arguments: Any, **options: Any) -> Any:
        warnings.warn_explicit(
            "Failed to load image Python extension",
            UserWarning,
            filename="image.py",
            lineno=13,
            module="torchvision.io.image",
        )
        return read(*arguments, **options)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", warn_and_read)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tokens_of_text(folder, "a")
    assert not said


def test_chat_ends_where_the_model_would_answer(folder: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = tokens_of_chat(folder, messages)
    assert tokens == [USER, *tokens_of_text(folder, "hi"), END, ASSISTANT]


def test_model_without_a_chat_template_takes_no_messages(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(SettingError, match="can't take these messages: ValueError"):
        tokens_of_chat(str(tmp_path), [{"role": "user", "content": "hi"}])


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"there is no tokenizer '/.*name the model's folder"):
        tokens_of_text(str(tmp_path), "text")
