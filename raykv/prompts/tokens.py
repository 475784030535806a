"""A prompt's tokens, as vLLM's server makes them of a text or of messages; needs transformers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from raykv.base.errors import SettingError, first_line
from raykv.base.extras import load


def tokens_of_text(tokenizer: str, text: str) -> list[int]:
    """Tokens of a text, special ones included, as `/v1/completions` has them.

    Args:
        tokenizer: a model's name or folder.
        text: the prompt.

    Raises:
        SettingError: there is no such tokenizer here, or transformers is not installed.
    """
    return list(load_tokenizer(tokenizer).encode(text))


def tokens_of_chat(tokenizer: str, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Tokens of messages with the model's template, up to where it would answer, as
    `/v1/chat/completions` has them.

    Raises:
        SettingError: there is no such tokenizer here, or it has no template for such messages.
    """
    loaded = load_tokenizer(tokenizer)
    try:
        text = loaded.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
    except Exception as error:
        raise SettingError(
            f"the chat template of {tokenizer!r} can't take these messages: {first_line(error)}"
        ) from error
    return list(loaded.encode(text, add_special_tokens=False))


def text_of_tokens(tokenizer: str, tokens: Sequence[int]) -> str:
    """The text that tokens stand for, special ones included; nothing is downloaded for it.

    Raises:
        SettingError: there is no such tokenizer here, or transformers is not installed.
    """
    return str(load_tokenizer(tokenizer, local_files_only=True).decode(list(tokens)))


def load_tokenizer(tokenizer: str, **options: bool) -> Any:
    """A model's tokenizer, of transformers.

    Raises:
        SettingError: there is no such tokenizer here, or transformers is not installed.
    """
    try:
        with warnings.catch_warnings():
            # What torchvision lacks is for images; transformers looks for it all the same.
            warnings.filterwarnings("ignore", module=r"torchvision(\..*)?")
            transformers = load("transformers", "a prompt that is given as text")
            return transformers.AutoTokenizer.from_pretrained(tokenizer, **options)
    except SettingError:
        raise
    except Exception as error:
        raise SettingError(
            f"there is no tokenizer {tokenizer!r} here ({first_line(error)}): name the model's "
            "folder, or give the tokens"
        ) from error
