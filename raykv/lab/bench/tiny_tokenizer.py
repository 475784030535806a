"""A tokenizer that needs no download: one token per byte, so any text encodes.

Together with `tiny_llama(folder, vocab_size=VOCAB_SIZE)` of `raykv.lab.demo.tiny_llama` a model
that vLLM serves over HTTP, with text and chat.
"""

from __future__ import annotations

from pathlib import Path

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>")
"""Ids 0 to 6. Padding, begin and end of text have the ids that `tiny_llama` writes down."""

VOCAB_SIZE = 264
"""7 special tokens and 256 bytes, rounded up to a multiple of eight."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny_tokenizer(folder: Path) -> Path:
    """Write the tokenizer's files into `folder`, which exists, and return `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *letters))}
    assert len(vocab) <= VOCAB_SIZE, len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL_TOKENS[4:]),
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return folder
