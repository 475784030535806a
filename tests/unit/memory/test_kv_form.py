"""From the bytes of a chunk to K and V: the order of elements, ranks, and forms that can't be."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from raykv.base.errors import HandleError
from raykv.memory import kv_form
from raykv.memory.handles import MEMFD, check_layout
from raykv.protocol.framing import decode, encode
from raykv.protocol.worker import ElementOrder, GroupForm, KVForm, KVLayout, TensorLayout

TOKENS, HEADS, DIMS = 4, 2, 3
LAYERS = ["layer.0", "layer.1", "layer.2"]
PAGE_ELEMENTS = 2 * TOKENS * HEADS * DIMS
HEAD_ELEMENTS = 2 * TOKENS * DIMS

# As vLLM's CPU attention does it: a head's K, transposed, then its V.
GROUP = GroupForm(
    layers=LAYERS,
    dtype="float16",
    page_bytes=2 * PAGE_ELEMENTS,
    keys=ElementOrder(
        [0, HEAD_ELEMENTS], list(range(TOKENS)), [TOKENS * dim for dim in range(DIMS)]
    ),
    values=ElementOrder(
        [HEAD_ELEMENTS // 2, HEAD_ELEMENTS + HEAD_ELEMENTS // 2],
        [DIMS * token for token in range(TOKENS)],
        list(range(DIMS)),
    ),
)

LAYOUT = KVLayout(MEMFD, 4096, 1, [TensorLayout(0, 4, 1024, 96)], [0], [[0]])

replace = msgspec.structs.replace


def form(num_ranks: int = 1, head_copies: int = 1, blocks_per_chunk: int = 1) -> KVForm:
    return KVForm(num_ranks, head_copies, blocks_per_chunk, {0: 4096}, {0: GROUP})


def element(layer: int, side: int, token: int, head: int, dim: int) -> int:
    """A number that says which element it is."""
    return (((layer * 2 + side) * 16 + token) * 8 + head) * 4 + dim


def chunk(known: KVForm, heads_of_rank: list[list[int]]) -> npt.NDArray[np.uint8]:
    """The bytes of a slot that were laid out by hand, element by element."""
    slot = np.zeros(4096 // 2, np.uint16)
    at = 0
    for heads in heads_of_rank:
        for layer in range(len(LAYERS)):
            for block in range(known.blocks_per_chunk):
                for head in heads:
                    for dim in range(DIMS):
                        for token in range(TOKENS):
                            slot[at] = element(layer, 0, block * TOKENS + token, head, dim)
                            at += 1
                    for token in range(TOKENS):
                        for dim in range(DIMS):
                            slot[at] = element(layer, 1, block * TOKENS + token, head, dim)
                            at += 1
    return slot.view(np.uint8)


def expected(layer: int, side: int, num_tokens: int, num_heads: int) -> Any:
    return [
        [
            [element(layer, side, token, head, dim) for dim in range(DIMS)]
            for head in range(num_heads)
        ]
        for token in range(num_tokens)
    ]


@pytest.mark.parametrize(
    ("known", "heads_of_rank", "num_heads"),
    [
        (form(), [[0, 1]], 2),
        (form(blocks_per_chunk=3), [[0, 1]], 2),
        (form(num_ranks=2, blocks_per_chunk=2), [[0, 1], [2, 3]], 4),
        (form(num_ranks=4, head_copies=2), [[0, 1], [0, 1], [2, 3], [2, 3]], 4),
    ],
    ids=["one block", "three blocks", "two ranks", "heads on two ranks each"],
)
def test_elements_come_out_where_they_went_in(
    known: KVForm, heads_of_rank: list[list[int]], num_heads: int
) -> None:
    assert kv_form.objection(known) == ""
    num_tokens = kv_form.tokens_per_chunk(known, GROUP)
    assert num_tokens == TOKENS * known.blocks_per_chunk
    found = list(kv_form.layers_of(known, 0, chunk(known, heads_of_rank)))
    assert [each.layer for each in found] == LAYERS
    for number, each in enumerate(found):
        assert each.keys.tolist() == expected(number, 0, num_tokens, num_heads)
        assert each.values.tolist() == expected(number, 1, num_tokens, num_heads)


def test_what_comes_out_is_a_copy() -> None:
    data = chunk(form(), [[0, 1]])
    (first, *_) = kv_form.layers_of(form(), 0, data)
    data[:] = 0
    assert first.keys.tolist() == expected(0, 0, TOKENS, 2)


def bad_group(**changes: Any) -> KVForm:
    return replace(form(), groups={0: replace(GROUP, **changes)})


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (replace(form(), num_ranks=0), "ranks"),
        (replace(form(), num_ranks=3, head_copies=2), "ranks"),
        (replace(form(), blocks_per_chunk=1 << 40), "ranks"),
        (replace(form(), slot_bytes={}), "slots of"),
        (replace(form(), num_ranks=16), "more than a slot"),
        (bad_group(dtype="os.system"), "elements of type"),
        (bad_group(layers=[]), "0 layers"),
        (bad_group(layers=["x" * 1000]), "layers"),
        (bad_group(page_bytes=0), "pages of 0"),
        (bad_group(page_bytes=95), "pages of 95"),
        (bad_group(page_bytes=94), "outside of a page"),
        (bad_group(keys=ElementOrder()), "numbers of tokens"),
        (bad_group(keys=replace(GROUP.keys, heads=[])), "heads"),
        (bad_group(keys=replace(GROUP.keys, heads=[-1])), "outside of a page"),
        (bad_group(values=replace(GROUP.values, dims=[1 << 30])), "outside of a page"),
        (replace(form(), groups={0: GroupForm(refusal="x" * 1000)}), "refusal"),
    ],
)
def test_form_that_can_not_be_is_refused_with_the_message_it_is_in(bad: KVForm, what: str) -> None:
    with pytest.raises(HandleError, match=what):
        check_layout(decode(encode(replace(LAYOUT, form=bad)), KVLayout))


def test_honest_forms_pass() -> None:
    refused = KVForm(slot_bytes={0: 4096}, groups={0: GroupForm(refusal="has no K and V")})
    for known in (KVForm(), form(), form(num_ranks=2), refused):
        check_layout(decode(encode(replace(LAYOUT, form=known)), KVLayout))


def test_part_of_a_rank_has_all_layers_and_blocks() -> None:
    assert kv_form.part_bytes(form(blocks_per_chunk=3), GROUP) == 3 * 3 * GROUP.page_bytes


def test_forms_are_remembered_by_namespace_up_to_a_bound() -> None:
    forms = kv_form.Forms()
    for number in range(kv_form.MAX_FORMS + 1):
        forms.take(f"space {number}", form(num_ranks=number + 1))
    assert forms.get("space 0") == KVForm()
    assert forms.get(f"space {kv_form.MAX_FORMS}").num_ranks == kv_form.MAX_FORMS + 1
    # An engine that can't say does not wipe out what another has said.
    forms.take("space 1", KVForm())
    assert forms.get("space 1").num_ranks == 2
