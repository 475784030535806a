"""From the bytes of a chunk to K and V of each layer, as its namespace's form says.

What a form claims is checked before anything is read by it: it comes from another process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raykv.protocol.worker import ElementOrder, GroupForm, KVForm

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Data types of KV that can be read, by torch's names."""

MAX_FORMS = 256
"""Namespaces whose form is remembered; the one that was reported the longest ago is forgotten."""

MAX_LAYERS = 4096
MAX_SIDE = 1 << 16
"""Heads, tokens or dimensions of a page."""
MAX_NAME = 512
MAX_PAGE_BYTES = 1 << 40

Elements = npt.NDArray[Any]


@dataclass(frozen=True)
class LayerElements:
    """K and V of a layer, [tokens, heads, dims], as unsigned integers of the element's size."""

    layer: str
    keys: Elements
    values: Elements


class Forms:
    """The forms of namespaces that were reported, at most `MAX_FORMS`."""

    def __init__(self) -> None:
        # The one that was reported the longest ago first.
        self._forms: OrderedDict[str, KVForm] = OrderedDict()

    def take(self, namespace: str, form: KVForm) -> None:
        """An engine of the namespace has attached, or goes on in it.

        A form without groups says nothing.
        """
        if form.groups:
            self._forms[namespace] = form
            self._forms.move_to_end(namespace)
        while len(self._forms) > MAX_FORMS:
            self._forms.popitem(last=False)

    def get(self, namespace: str) -> KVForm:
        """The form of a namespace; without groups if it is not known."""
        return self._forms.get(namespace, KVForm())


def objection(form: KVForm) -> str:
    """What is impossible about a form, empty if nothing is."""
    shared = (form.num_ranks, form.head_copies, form.blocks_per_chunk)
    if not all(0 < number <= MAX_SIDE for number in shared) or form.num_ranks % form.head_copies:
        return f"ranks, copies of heads and blocks per chunk: {shared}"
    if not form.groups.keys() <= form.slot_bytes.keys():
        return f"a form of KV groups {sorted(form.groups)}, slots of {sorted(form.slot_bytes)}"
    for group_id, group in form.groups.items():
        wrong = "" if group.refusal else _group_objection(group)
        if not wrong and part_bytes(form, group) * form.num_ranks > form.slot_bytes[group_id]:
            wrong = f"more than a slot of {form.slot_bytes[group_id]} bytes"
        if wrong or len(group.refusal) > MAX_NAME:
            return f"KV group {group_id}: {wrong or 'its refusal'}"
    return ""


def _group_objection(group: GroupForm) -> str:
    if group.dtype not in ELEMENT_BYTES:
        return f"elements of type {group.dtype[:MAX_NAME]!r}"
    if not 0 < len(group.layers) <= MAX_LAYERS or max(map(len, group.layers)) > MAX_NAME:
        return f"{len(group.layers)} layers"
    if not 0 < group.page_bytes <= MAX_PAGE_BYTES or group.page_bytes % ELEMENT_BYTES[group.dtype]:
        return f"pages of {group.page_bytes} bytes"
    if len(group.keys.tokens) != len(group.values.tokens):
        return "K and V of different numbers of tokens"
    num_elements = group.page_bytes // ELEMENT_BYTES[group.dtype]
    return _order_objection(group.keys, num_elements) or _order_objection(
        group.values, num_elements
    )


def _order_objection(order: ElementOrder, num_elements: int) -> str:
    sides = (order.heads, order.tokens, order.dims)
    if not all(0 < len(side) <= MAX_SIDE for side in sides):
        return f"a page of {[len(side) for side in sides]} heads, tokens and dimensions"
    if min(map(min, sides)) < 0 or sum(map(max, sides)) >= num_elements:
        return f"elements outside of a page of {num_elements}"
    return ""


def part_bytes(form: KVForm, group: GroupForm) -> int:
    """Bytes of one rank's part of a chunk."""
    return len(group.layers) * form.blocks_per_chunk * group.page_bytes


def tokens_per_chunk(form: KVForm, group: GroupForm) -> int:
    """Tokens of a chunk of the group."""
    return form.blocks_per_chunk * len(group.keys.tokens)


def layers_of(form: KVForm, group_id: int, data: npt.NDArray[np.uint8]) -> Iterator[LayerElements]:
    """The layers of a chunk in their order; heads of several ranks side by side.

    Args:
        form: one without an `objection`.
        group_id: of the chunk; its group must not be refused.
        data: the bytes of its slot, which are copied from.
    """
    group = form.groups[group_id]
    assert not group.refusal, group.refusal
    part = part_bytes(form, group)
    region = form.blocks_per_chunk * group.page_bytes
    ranks = range(0, form.num_ranks, form.head_copies)
    element = np.dtype(f"u{ELEMENT_BYTES[group.dtype]}")
    key_places, value_places = _places(group.keys), _places(group.values)
    for number, layer in enumerate(group.layers):
        begins = [rank * part + number * region for rank in ranks]
        pages = [
            data[begin : begin + region].view(element).reshape(form.blocks_per_chunk, -1)
            for begin in begins
        ]
        yield LayerElements(layer, _picked(pages, key_places), _picked(pages, value_places))


def _places(order: ElementOrder) -> npt.NDArray[np.int64]:
    """The place of each element in a page, [tokens, heads, dims]."""
    heads, tokens, dims = (
        np.asarray(side, np.int64) for side in (order.heads, order.tokens, order.dims)
    )
    places: npt.NDArray[np.int64] = tokens[:, None, None] + heads[:, None] + dims
    return places


def _picked(pages: list[Elements], places: npt.NDArray[np.int64]) -> Elements:
    """Elements of the blocks of each rank, blocks one after the other, ranks side by side."""
    shape = (-1, *places.shape[1:])
    return np.concatenate([rank[:, places].reshape(shape) for rank in pages], axis=1)
