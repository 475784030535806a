"""KV caches on a GPU, handed over and opened: addresses, refusals, and that nothing stays open."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.base.errors import HandleError, MessageError
from raykv.memory.cuda.driver import CUDAError
from raykv.memory.cuda.kv import CUDA_IPC, DeviceKV, ExportedKV, export_kv
from raykv.memory.handles import check_layout, open_kv
from raykv.protocol.framing import decode, encode
from raykv.protocol.worker import MAX_PIECES, KVLayout, TensorLayout, check_device_memory
from tests.fixtures.cuda.memory import GPU, OTHER_GPU, PAGE, FakeCuda, event_words

replace = msgspec.structs.replace


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    made = FakeCuda()
    yield made
    made.end()


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def export(cuda: FakeCuda, *tensors: TensorLayout) -> ExportedKV:
    indices = list(range(len(tensors)))
    return export_kv(cuda, tensors, 1, [0], [indices])


def opened(cuda: FakeCuda, exported: ExportedKV) -> DeviceKV:
    """As the other process does it, after a journey in a message."""
    layout = decode(encode(exported.layout), KVLayout)
    check_device_memory(layout)
    kv = open_kv(layout, [], lambda: cuda)
    assert isinstance(kv, DeviceKV)
    return kv


def page_at(kv: DeviceKV, index: int, block: int) -> bytes:
    tensor = kv.layout.tensors[index]
    return ctypes.string_at(
        kv.address + tensor.offset + block * tensor.block_stride, tensor.page_bytes
    )


def test_layers_in_one_allocation_go_by_one_handle_and_offsets(cuda: FakeCuda) -> None:
    base = cuda.allocate(8 * PAGE)
    places = [64 + layer * 2 * PAGE for layer in range(3)]
    exported = export(cuda, *(TensorLayout(base + place, 4, 512, 512) for place in places))
    layout = exported.layout
    assert (layout.kind, layout.device, layout.piece_bytes) == (CUDA_IPC, GPU, [8 * PAGE])
    assert len(layout.handles) == 1
    assert [tensor.offset for tensor in layout.tensors] == places
    kv = opened(cuda, exported)
    assert kv.address != base
    # What is loaded arrives where the worker computes.
    ctypes.memset(kv.address + places[1], 0xEE, 512)
    assert ctypes.string_at(base + places[1], 512) == b"\xee" * 512
    kv.close()
    assert cuda.num_open == 0


@st.composite
def memory(draw: st.DrawFn) -> list[list[tuple[int, int, int, int]]]:
    """Tensors (offset, blocks, stride, page) of some allocations."""
    allocations = []
    for _ in range(draw(st.integers(1, 3))):
        tensors = []
        for _ in range(draw(st.integers(1, 3))):
            page = draw(st.integers(1, 300))
            stride = page + draw(st.integers(0, 50))
            tensors.append((draw(st.integers(0, 5000)), draw(st.integers(1, 9)), stride, page))
        allocations.append(tensors)
    return allocations


@settings(max_examples=60, deadline=None)
@given(allocations=memory(), seed=st.integers(0, 99))
def test_every_page_is_found_wherever_it_was_allocated(
    allocations: list[list[tuple[int, int, int, int]]], seed: int
) -> None:
    cuda = FakeCuda()
    tensors = []
    for shapes in allocations:
        pages = -(-max(offset + blocks * stride for offset, blocks, stride, _ in shapes) // PAGE)
        base = cuda.allocate(pages * PAGE)
        # Other bytes everywhere, so that no wrong place has the right ones.
        raw = bytes((seed + i * 7 + base // PAGE) % 251 for i in range(pages * PAGE))
        ctypes.memmove(base, raw, len(raw))
        tensors += [TensorLayout(base + offset, *rest) for offset, *rest in shapes]
    exported = export(cuda, *tensors)
    check_layout(exported.layout)
    kv = opened(cuda, exported)
    for index, tensor in enumerate(tensors):
        for block in range(tensor.num_blocks):
            expected = ctypes.string_at(
                tensor.offset + block * tensor.block_stride, tensor.page_bytes
            )
            assert page_at(kv, index, block) == expected
    kv.close()
    assert cuda.num_open == 0
    cuda.end()


def test_event_is_the_workers_own(cuda: FakeCuda) -> None:
    exported = export(cuda, TensorLayout(cuda.allocate(PAGE), 4, 512, 512))
    kv = opened(cuda, exported)
    stream = cuda.stream(3)
    stream.submit(lambda: None)
    exported.record(3)
    words = event_words(kv.compute_event)
    assert list(words) == [1, 0]
    stream.run()
    assert list(words) == [1, 1]
    kv.close()


# Refusals of the worker


def test_memory_of_sleep_mode_is_refused_with_the_settings_to_change(cuda: FakeCuda) -> None:
    plain = TensorLayout(cuda.allocate(PAGE), 4, 512, 512)
    mapped = TensorLayout(cuda.allocate(PAGE, is_ordinary=False), 4, 512, 512)
    for tensors in ([mapped], [plain, mapped]):
        with pytest.raises(HandleError, match=r"enable_sleep_mode.*expandable_segments:False"):
            export(cuda, *tensors)
    assert cuda.num_open == 0


def test_memory_in_too_many_pieces_is_refused(cuda: FakeCuda) -> None:
    bases = [cuda.allocate(PAGE) for _ in range(MAX_PIECES + 1)]
    with pytest.raises(HandleError, match="more than 240 pieces"):
        export(cuda, *(TensorLayout(base, 1, PAGE, PAGE) for base in bases))


def test_memory_of_two_gpus_is_refused(cuda: FakeCuda) -> None:
    bases = (cuda.allocate(PAGE), cuda.allocate(PAGE, OTHER_GPU))
    with pytest.raises(HandleError, match="on 2 GPUs"):
        export(cuda, *(TensorLayout(base, 4, 512, 512) for base in bases))


def test_nothing_stays_open_whichever_call_of_the_export_is_refused(cuda: FakeCuda) -> None:
    tensor = TensorLayout(cuda.allocate(2 * PAGE), 4, 2048, 2048)
    export(cuda, tensor)
    before, num_calls = num_fds(), len(cuda.calls)
    assert num_calls > 4
    for number in range(1, num_calls + 1):
        cuda.fail_at = number
        with pytest.raises(HandleError):
            export(cuda, tensor)
        assert (len(cuda.events), num_fds()) == (1, before), number


# Refusals of the NodeActor


def test_nothing_stays_open_whichever_call_of_the_opening_is_refused(cuda: FakeCuda) -> None:
    bases = [cuda.allocate(PAGE) for _ in range(2)]
    exported = export(cuda, *(TensorLayout(base, 4, 512, 512) for base in bases))
    before, open_before = num_fds(), cuda.num_open
    first = len(cuda.calls)
    opened(cuda, exported).close()
    num_calls = sum(name.startswith("open") for name in cuda.calls[first:])
    assert num_calls == 3
    for number in range(1, num_calls + 1):
        cuda.fail_at = number
        with pytest.raises(HandleError):
            opened(cuda, exported)
        assert (cuda.num_open, num_fds()) == (open_before, before), number
    cuda.fail_at = None


def test_gpu_that_is_not_visible_is_refused_with_its_name(cuda: FakeCuda) -> None:
    exported = export(cuda, TensorLayout(cuda.allocate(PAGE), 4, 512, 512))
    elsewhere = FakeCuda((OTHER_GPU,))
    with pytest.raises(CUDAError, match=f"does not see GPU {GPU}"):
        opened(elsewhere, exported)


def test_memory_that_is_smaller_than_was_said_is_refused(cuda: FakeCuda) -> None:
    exported = export(cuda, TensorLayout(cuda.allocate(PAGE), 4, 512, 512))
    layout = replace(exported.layout, piece_bytes=[PAGE + 1], num_bytes=PAGE + 1)
    open_before = cuda.num_open
    with pytest.raises(HandleError, match=f"has {PAGE} bytes, not {PAGE + 1}"):
        open_kv(layout, [], lambda: cuda)
    assert cuda.num_open == open_before


def test_tensor_that_crosses_two_allocations_is_refused(cuda: FakeCuda) -> None:
    exported = export(cuda, *(TensorLayout(cuda.allocate(PAGE), 4, 512, 512) for _ in range(2)))
    tensors = [TensorLayout(PAGE - 512, 2, 512, 512)]
    layout = replace(exported.layout, tensors=tensors, groups=[[0]])
    with pytest.raises(HandleError, match="in no single piece"):
        open_kv(layout, [], lambda: cuda)


def test_descriptors_are_closed_when_there_should_be_none(cuda: FakeCuda) -> None:
    exported = export(cuda, TensorLayout(cuda.allocate(PAGE), 4, 512, 512))
    before = num_fds()
    fds = [os.memfd_create("test") for _ in range(2)]
    with pytest.raises(HandleError, match="0 descriptors, not 2"):
        open_kv(exported.layout, fds, lambda: cuda)
    assert num_fds() == before


def test_memory_is_refused_when_cuda_can_not_be_used(cuda: FakeCuda) -> None:
    exported = export(cuda, TensorLayout(cuda.allocate(PAGE), 4, 512, 512))

    def load() -> FakeCuda:
        raise CUDAError("CUDA can't be used here")

    with pytest.raises(CUDAError, match="can't be used here"):
        open_kv(exported.layout, [], load)


def test_close_goes_on_when_cuda_refuses_and_says_so(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    exported = export(cuda, TensorLayout(cuda.allocate(PAGE), 4, 512, 512))
    kv = opened(cuda, exported)
    cuda.refused = {"close_memory"}
    kv.close()
    assert len(cuda.opened) == 1
    # The worker's own event is left, not the one that was opened.
    assert len(cuda.events) == 1
    assert "close_memory was refused" in caplog.text


# What no honest worker sends

HONEST = KVLayout(
    kind=CUDA_IPC,
    num_bytes=2 * PAGE,
    blocks_per_chunk=1,
    tensors=[TensorLayout(0, 4, 512, 512)],
    group_ids=[0],
    groups=[[0]],
    device=GPU,
    piece_bytes=[PAGE, PAGE],
    handles=[b"h" * 64, b"g" * 64],
    event=b"e" * 64,
)


def test_honest_layouts_are_believed() -> None:
    check_device_memory(HONEST)
    check_device_memory(KVLayout("memfd", 64, 1, [TensorLayout(0, 1, 64, 64)], [0], [[0]]))


ABSURD = [
    {"device": ""},
    {"device": "0"},
    {"device": GPU.upper()},
    {"device": GPU + "0"},
    {"device": "x" * 100_000},
    {"piece_bytes": []},
    {"piece_bytes": [PAGE]},
    {"piece_bytes": [PAGE, PAGE + 1]},
    {"piece_bytes": [3 * PAGE, -PAGE]},
    {"piece_bytes": [0, 2 * PAGE]},
    {"piece_bytes": [1] * (MAX_PIECES + 1), "num_bytes": MAX_PIECES + 1},
    {"piece_bytes": [1 << 62, 1 << 62], "num_bytes": 1 << 63},
    {"handles": []},
    {"handles": [b"h" * 64]},
    {"handles": [b"h" * 64, b"g" * 63]},
    {"handles": [b"h" * 64, b""]},
    {"event": b""},
    {"event": b"e" * 65},
    {"kind": "memfd"},
    {"kind": ""},
]


@pytest.mark.parametrize("changed", ABSURD, ids=lambda changed: str(changed)[:60])
def test_absurd_device_memory_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(MessageError):
        check_device_memory(replace(HONEST, **changed))


NUMBERS = st.sampled_from([-1, 0, 1, 512, PAGE, 2 * PAGE, 1 << 46, 1 << 62, -(1 << 63)])
BYTES = st.sampled_from([b"", b"h" * 63, b"h" * 64, b"e" * 65])


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from([CUDA_IPC, "memfd", "cuda-"]),
    num_bytes=NUMBERS,
    tensor=st.builds(TensorLayout, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    device=st.sampled_from([GPU, OTHER_GPU, ""]),
    piece_bytes=st.lists(NUMBERS, max_size=3),
    handles=st.lists(BYTES, max_size=3),
    event=BYTES,
    num_files=st.integers(0, 3),
)
def test_layout_of_a_liar_is_refused_and_nothing_stays_open(
    kind: str,
    num_bytes: int,
    tensor: TensorLayout,
    device: str,
    piece_bytes: list[int],
    handles: list[bytes],
    event: bytes,
    num_files: int,
) -> None:
    cuda = FakeCuda()
    layout = replace(
        HONEST,
        kind=kind,
        num_bytes=num_bytes,
        tensors=[tensor],
        device=device,
        piece_bytes=piece_bytes,
        handles=handles,
        event=event,
    )
    before = num_fds()
    try:
        check_device_memory(layout)
    except MessageError:
        return
    with pytest.raises(HandleError):
        open_kv(layout, [os.memfd_create("empty") for _ in range(num_files)], lambda: cuda)
    assert (cuda.num_open, num_fds()) == (0, before)
