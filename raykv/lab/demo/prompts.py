"""What the demo asks: long documents that are installed anyway, or random ids, and in which order.

Every question is asked in rounds. Round 1: computed from nothing, then asked again at once, so
that vLLM's own prefix cache answers. Then vLLM's cache is dropped, and in every later round the
prompt comes out of RayKV. The first question about a document stores it; a second one is first
asked when only RayKV knows the document. At the end an engine on another node may be asked, which
knows no document itself.
"""

from __future__ import annotations

import importlib.metadata
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raykv.base.errors import SettingError
from raykv.lab.demo.report import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Prompt:
    """One question about one document, as the token ids that the model sees."""

    document: str
    question: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class DocumentSource:
    """A long text that is on every machine with vLLM: a package's description."""

    title: str
    package: str
    max_tokens: int
    questions: tuple[str, str]


_SOURCES = (
    DocumentSource(
        "PyTorch README",
        "torch",
        4096,
        (
            "Which two high-level features does PyTorch provide?",
            "What does the README say about memory usage in PyTorch?",
        ),
    ),
    DocumentSource(
        "FastAPI README",
        "fastapi",
        3072,
        (
            "What is FastAPI, in one sentence?",
            "Which two libraries does FastAPI stand on, and for which parts?",
        ),
    ),
    DocumentSource(
        "Transformers README",
        "transformers",
        3072,
        ("What is the Transformers library for?", "How do I install Transformers with pip?"),
    ),
)
_MIN_CHARACTERS = 7000  # about 2000 tokens of English
_SYSTEM = "You answer questions about a document. Answer briefly, from the document only."


def plain_text(markdown: str) -> str:
    """Drop what a small model stumbles over: HTML, images, badges, link targets, empty lines."""
    text = re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL)
    text = re.sub(r"</?[a-zA-Z][^<>]*>", "", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\[\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\n\s*\n", "\n\n", text).strip()


def documents() -> list[tuple[DocumentSource, str]]:
    """The sources that are installed here and long enough, as plain text."""
    found = ((source, plain_text(_text_of(source.package))) for source in _SOURCES)
    long_enough = [(source, text) for source, text in found if len(text) >= _MIN_CHARACTERS]
    if not long_enough:
        names = ", ".join(source.package for source in _SOURCES)
        raise SettingError(f"no long document found in the metadata of {names}; try --tiny")
    return long_enough


def _text_of(package: str) -> str:
    """Its description, or an empty text where it is not installed."""
    try:
        metadata = importlib.metadata.distribution(package).metadata
    except importlib.metadata.PackageNotFoundError:
        return ""
    return str(metadata.json.get("description", ""))


def document_prompts(tokenizer: Any) -> list[Prompt]:
    """Two questions about each document, through the chat template of `tokenizer`.

    The question comes after the document, so that both prompts about it share a long prefix.
    """
    prompts = []
    for source, text in documents():
        ids = tokenizer.encode(text, add_special_tokens=False)[: source.max_tokens]
        document = tokenizer.decode(ids)
        for question in source.questions:
            messages = [
                {"role": "system", "content": _SYSTEM},
                {"role": "user", "content": f"{document}\n\nQuestion: {question}"},
            ]
            chat = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
            token_ids = tuple(tokenizer.encode(chat, add_special_tokens=False))
            prompts.append(Prompt(source.title, question, token_ids))
    return prompts


@dataclass(frozen=True)
class Step:
    """One ask to be made."""

    phase: Phase
    round: int
    prompt: Prompt


def schedule(prompts: Sequence[Prompt], rounds: int) -> list[Step]:
    """All asks in order: round 1 computes, every later round loads from RayKV."""
    steps = []
    known: set[str] = set()
    for prompt in prompts:
        phases = [Phase.RECOMPUTE, Phase.PREFIX_HIT]
        if prompt.document in known:
            phases.insert(0, Phase.NEW_QUESTION)
        known.add(prompt.document)
        steps += [Step(phase, 1, prompt) for phase in phases]
    for round_ in range(2, rounds + 1):
        steps += [Step(Phase.RAYKV, round_, prompt) for prompt in prompts]
    return steps


def other_node_steps(prompts: Sequence[Prompt], round_: int) -> list[Step]:
    """The asks on another node that has no document yet: the first question about each.

    A second question would find most of its prompt there, since the first one has fetched it.
    """
    firsts: dict[str, Prompt] = {}
    for prompt in prompts:
        firsts.setdefault(prompt.document, prompt)
    return [Step(Phase.REMOTE, round_, prompt) for prompt in firsts.values()]


def random_prompts(vocab_size: int, seed: int) -> list[Prompt]:
    """Two questions about each of two documents, all of random token ids."""
    rng = random.Random(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, vocab_size) for _ in range(count))

    prompts = []
    for number in (1, 2):
        document = draw(1500)
        for letter in "ab":
            question = f"question {number}{letter}"
            prompts.append(Prompt(f"random ids {number}", question, document + draw(90)))
    return prompts
