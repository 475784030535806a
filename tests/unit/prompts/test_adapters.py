"""Adapters by content: digests, the hashes of their requests, and what workers let through."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import raykv.prompts.adapters as adapters_module
from raykv.base.errors import SettingError
from raykv.prompts.adapters import UNKNOWN, Content, content, is_unchanged, named
from raykv.prompts.block_hashes import HashScheme, PromptTraits, block_hashes

LONG_AGO_S = 1_000_000_000


def write(folder: Path, weights: bytes = b"weights", *, touched_s: float = LONG_AGO_S) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    for path in folder.iterdir():
        os.utime(path, (touched_s, touched_s))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of an adapter that nobody has written to for hours."""
    return write(tmp_path / "a")


class Clock:
    """The time of day, hours after whatever the test has written."""

    def __init__(self) -> None:
        self.ahead_s = 10_000.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


def settled(folder: Path | str) -> Content:
    """What is in a folder that nobody has written to for hours."""
    return content(str(folder), Clock())


def test_digest_is_of_the_content_wherever_it_is(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    digest = settled(first).digest
    assert len(digest) == 64
    assert settled(second).digest == digest
    (first / "README.md").write_text("nothing that is loaded")
    assert settled(first).digest == digest


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "more.bin"])
def test_digest_depends_on_each_file_that_is_loaded(folder: Path, name: str) -> None:
    known = settled(folder)
    old = (folder / name).read_bytes() if (folder / name).exists() else b"none"
    (folder / name).write_bytes(old[::-1])
    os.utime(folder / name, (LONG_AGO_S, LONG_AGO_S))
    # Size and time may be the same.
    assert not is_unchanged(str(folder), known)
    assert settled(folder).digest not in ("", known.digest)


def test_file_that_has_just_been_written_is_read_again_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    folder, reads = write(tmp_path / "a"), []
    around_reading(monkeypatch, before=lambda: reads.append(1))
    for clock.ahead_s, times in ((0.0, 2), (10.0, 3)):
        assert content(str(folder), clock) == content(str(folder), clock)
        assert len(reads) == times


def around_reading(
    patches: pytest.MonkeyPatch,
    before: Callable[[], Any] = lambda: None,
    after: Callable[[], Any] = lambda: None,
) -> None:
    """Have something happen whenever files are read."""
    read = adapters_module._digest

    def read_meanwhile(*arguments: Any) -> str:
        before()
        digest = read(*arguments)
        after()
        return digest

    patches.setattr(adapters_module, "_digest", read_meanwhile)


def test_content_that_changes_while_it_is_read_is_unknown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around_reading(monkeypatch, after=lambda: write(folder, b"later"))
    assert settled(folder) is UNKNOWN


def test_digest_of_files_that_were_others_meanwhile_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b", b"others!")
    link = tmp_path / "link"

    def lead_to(folder: Path) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(folder)

    lead_to(first)
    with monkeypatch.context() as patches:
        around_reading(patches, before=lambda: lead_to(second))
        assert settled(link) is UNKNOWN
    lead_to(first)
    assert settled(link).digest == settled(first).digest


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_folder_without_a_whole_adapter_is_unknown(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    assert settled(folder) is UNKNOWN


@pytest.mark.parametrize("path", ["organisation/adapter", "s3://bucket/adapter", "/gone", "", "\0"])
def test_path_that_is_no_local_folder_is_unknown(path: str) -> None:
    assert settled(path) is UNKNOWN
    assert not is_unchanged(path, UNKNOWN)


def test_traits_are_named_by_the_files_that_are_here(folder: Path) -> None:
    given = PromptTraits("salt", "french", str(folder))
    digest = content(str(folder)).digest
    assert named(given) == PromptTraits("salt", "french", str(folder), digest)
    assert named(PromptTraits("salt")) == PromptTraits("salt")
    assert named(PromptTraits("", "french", "/gone", "told")).lora_digest == "told"
    with pytest.raises(SettingError, match="'/gone'"):
        named(PromptTraits("", "french", "/gone"))


# In EngineCore


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, whose wrappers are taken off again."""
    pytest.importorskip("vllm", exc_type=ImportError)
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.core import kv_cache_utils

    from raykv.vllm.identity import adapters
    from raykv.vllm.internals import engine

    hashed = getattr(kv_cache_utils, engine.HASHED)
    monkeypatch.setattr(kv_cache_utils, engine.HASHED, getattr(hashed, "__wrapped__", hashed))
    loads = getattr(WorkerLoRAManager, engine.LOADS)
    monkeypatch.setattr(WorkerLoRAManager, engine.LOADS, getattr(loads, "__wrapped__", loads))
    monkeypatch.setattr(adapters, "_loaded", {})
    return adapters


def vllm_request(name: str, path: Path | str, *, load_inplace: bool = False) -> Any:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    return Request(
        request_id=name,
        prompt_token_ids=list(range(48)),
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        lora_request=LoRARequest("french", 1, str(path), load_inplace=load_inplace),
        block_hasher=get_request_block_hasher(16, sha256),
    )


def test_hashes_of_a_request_follow_its_adapters_files(adapters: Any, folder: Path) -> None:
    uses = adapters.AdapterUses()
    first = vllm_request("r", folder)
    assert vllm_request("r", folder).block_hashes == first.block_hashes
    write(folder, b"other weights")
    second = vllm_request("s", folder)
    assert not {*first.block_hashes} & {*second.block_hashes}
    assert uses.begin(first)
    assert uses.begin(second)
    # What is generated hashes as the prompt did, whatever becomes of the files.
    first.append_output_token_ids(list(range(16)))
    write(folder, b"first")
    assert uses.of({"r", "s"})["r"].digest != uses.of({"r", "s"})["s"].digest


def test_hashes_made_outside_are_those_of_vllm_with_the_adapters_digest(
    adapters: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    adapters.AdapterUses()
    traits = named(PromptTraits("", "french", str(write(tmp_path / "a"))))
    made = block_hashes(list(range(48)), HashScheme("sha256", "7", 16), traits)
    assert made == list(vllm_request("r", traits.lora_path).block_hashes)


def test_request_whose_adapter_cannot_be_read_hashes_as_ever_and_is_refused(adapters: Any) -> None:
    before = vllm_request("r", "/gone").block_hashes
    uses = adapters.AdapterUses()
    request = vllm_request("r", "/gone")
    assert request.block_hashes == before
    assert not uses.begin(request)
    assert uses.of({"r"}) == {}


def test_request_is_refused_while_the_engine_has_loaded_other_files(
    adapters: Any, tmp_path: Path
) -> None:
    uses, folder = adapters.AdapterUses(), write(tmp_path / "a")
    request = vllm_request("r", folder)
    uses.take_loaded({1: "other"})
    assert not uses.begin(request)
    assert uses.begin(vllm_request("s", folder, load_inplace=True))
    uses.take_loaded({1: uses.of({"s"})["s"].digest})
    assert uses.begin(vllm_request("t", folder))
    uses.end({"s"})
    assert uses.of({"s", "t"}).keys() == {"t"}


def test_vllm_that_hashes_adapters_otherwise_has_their_requests_refused(
    adapters: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raykv.vllm.internals.engine.HASHED", "gone")
    uses = adapters.AdapterUses()
    assert not uses.begin(vllm_request("r", write(tmp_path / "a")))
    assert uses.begin(SimpleNamespace(request_id="s", lora_request=None))


# In a worker


@pytest.fixture
def worker(adapters: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a worker has loaded, and vLLM's manager that loads into it."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    from raykv.vllm.internals import engine

    def load(manager: Any, request: Any) -> str:
        manager.on_load()
        return "adapter"

    monkeypatch.setattr(WorkerLoRAManager, engine.LOADS, load)
    config = SimpleNamespace()
    loaded = adapters.watch_loads(config)
    manager: Any = WorkerLoRAManager.__new__(WorkerLoRAManager)
    manager.lora_config = config
    manager.on_load = lambda: None
    return SimpleNamespace(loaded=loaded, manager=manager, module=adapters)


def load(worker: Any, folder: Path) -> None:
    request = SimpleNamespace(lora_int_id=1, lora_path=str(folder))
    assert worker.manager._load_adapter(request) == "adapter"


def use(folder: Path, *, reloads: bool = False) -> Any:
    from raykv.vllm.identity.adapters import AdapterUse

    return AdapterUse(1, str(folder), content(str(folder)).digest, reloads)


def test_request_is_stored_that_was_computed_with_its_adapter(worker: Any, folder: Path) -> None:
    used = use(folder)
    assert worker.loaded.may_load(used)
    load(worker, folder)
    assert worker.loaded.take_news() == {1: used.digest}
    assert worker.loaded.take_news() == {}
    assert not worker.loaded.may_store("r", used)
    worker.loaded.begin({"r": used})
    assert worker.loaded.may_store("r", used)
    load(worker, folder)
    assert worker.loaded.may_store("r", used)
    worker.loaded.end({"r"})
    assert not worker.loaded.may_store("r", used)


def test_nothing_is_stored_that_began_with_another_adapter(worker: Any, folder: Path) -> None:
    load(worker, folder)
    write(folder, b"new")
    used = use(folder)
    assert not worker.loaded.may_load(used)
    worker.loaded.begin({"r": used})
    load(worker, folder)
    worker.loaded.begin({"r": used, "s": used})
    assert not worker.loaded.may_store("r", used)
    assert worker.loaded.may_store("s", used)


def test_nothing_is_stored_whose_adapter_changed_meanwhile_and_back(
    worker: Any, folder: Path
) -> None:
    used = use(folder)
    load(worker, folder)
    worker.loaded.begin({"r": used})
    write(folder, b"new")
    assert not worker.loaded.may_store("r", used)
    load(worker, folder)
    write(folder)
    load(worker, folder)
    assert not worker.loaded.may_store("r", used)
    assert worker.loaded.may_load(used)


def test_adapter_whose_files_change_while_it_is_loaded_is_unknown(
    worker: Any, folder: Path
) -> None:
    worker.manager.on_load = lambda: write(folder, b"late")
    load(worker, folder)
    assert worker.loaded.take_news() == {1: ""}
    used = use(folder)
    worker.loaded.begin({"r": used})
    assert not worker.loaded.may_load(used)
    assert not worker.loaded.may_store("r", used)


def test_adapter_that_vllm_reads_with_each_step_may_load_what_its_files_name(
    worker: Any, folder: Path
) -> None:
    load(worker, folder)
    write(folder, b"new")
    assert worker.loaded.may_load(use(folder, reloads=True))
    assert not worker.loaded.may_load(use(folder))
