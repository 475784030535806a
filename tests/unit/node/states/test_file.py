"""Files of hidden states: their locks, their writers and their readers, across processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import raykv
from raykv.base.errors import HiddenStatesError
from raykv.node.states.file import (
    LOCK_SUFFIX,
    HiddenStates,
    cleanup_hidden_states,
    is_expired,
    load_hidden_states,
    promise,
    settle,
    write_states,
)
from tests.fixtures.node.states_reader import DisappointedReader

torch = pytest.importorskip("torch")

WRITER = """
import sys, time
from raykv.node.states.file import promise
fd = promise(sys.argv[1])
print("promised", flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "r.safetensors")


def some_states(dtype: str = "float32") -> HiddenStates:
    numbers = torch.arange(24, dtype=torch.float32).reshape(4, 2, 3).to(getattr(torch, dtype))
    width = torch.finfo(getattr(torch, dtype)).bits // 8
    raw = numbers.view(torch.uint8).numpy().view(f"u{width}").reshape(4, 2, 3)
    return HiddenStates("r", raw, dtype, np.arange(4))


def error_of(path: str) -> str:
    """Why there are no states."""
    with pytest.raises(HiddenStatesError) as error:
        load_hidden_states(path, 5.0)
    return str(error.value)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_file_has_what_was_captured(tmp_path: Path, dtype: str) -> None:
    path = str(tmp_path / "new" / "r.safetensors")
    fd = promise(path)
    write_states(path, some_states(dtype))
    settle(fd)
    os.close(fd)
    loaded = load_hidden_states(path, 5.0)
    assert loaded["hidden_states"].dtype == getattr(torch, dtype)
    assert loaded["hidden_states"].flatten().tolist() == list(range(24))
    assert loaded["hidden_states"].shape == (4, 2, 3)
    assert loaded["token_ids"].tolist() == [0, 1, 2, 3]
    assert [each.name for each in (tmp_path / "new").iterdir() if "part" in each.name] == []


def test_states_are_tensors_without_a_copy_even_where_memory_is_read_only() -> None:
    states = some_states("bfloat16")
    numbers = np.arange(24, dtype=np.uint16).reshape(4, 2, 3)
    numbers.flags.writeable = False
    shared = HiddenStates("r", numbers, "bfloat16", np.arange(4))
    assert shared["hidden_states"].data_ptr() == numbers.ctypes.data
    assert shared["hidden_states"].shape == states.shape == (4, 2, 3)
    with pytest.raises(KeyError):
        states["logits"]


def test_reader_that_comes_early_sleeps_until_the_file_is_whole(path: str) -> None:
    fd = promise(path)
    found: list[dict[str, object]] = []
    reader = threading.Thread(target=lambda: found.append(load_hidden_states(path, 30.0)))
    reader.start()
    reader.join(0.2)
    assert reader.is_alive()
    write_states(path, some_states())
    settle(fd)
    reader.join(0.2)
    assert reader.is_alive()
    os.close(fd)
    reader.join(10.0)
    assert found


def test_vllms_own_loader_waits_too_and_reads_the_file(path: str) -> None:
    theirs = pytest.importorskip(
        "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
    )
    fd = promise(path)
    found: list[dict[str, object]] = []
    reader = threading.Thread(target=lambda: found.append(theirs.load_hidden_states(path)))
    reader.start()
    reader.join(0.2)
    assert reader.is_alive()
    write_states(path, some_states())
    settle(fd)
    os.close(fd)
    reader.join(10.0)
    assert found[0]["token_ids"].tolist() == [0, 1, 2, 3]  # type: ignore[attr-defined]


def test_failure_of_the_writer_reaches_the_reader_with_its_reason(path: str) -> None:
    fd = promise(path)
    settle(fd, "No space left\n" * 3000)
    settle(fd, "a later word, which does not count")
    os.close(fd)
    assert "No space left No space left" in error_of(path)


def test_death_of_the_writer_wakes_the_reader(path: str) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "promised\n"
    reader = DisappointedReader(path)
    assert reader.waits_for(0.2)
    writer.send_signal(signal.SIGKILL)
    assert not reader.waits_for(10.0)
    writer.wait(10)
    writer.stdout.close()
    assert "died" in reader.errors[0]


def test_reader_gives_up_after_its_time(path: str) -> None:
    fd = promise(path)
    with pytest.raises(HiddenStatesError, match=r"0\.1 s"):
        load_hidden_states(path, 0.1)
    os.close(fd)


@pytest.mark.parametrize("spoil", ["truncate", "flip", "junk"])
def test_damaged_file_is_an_error_that_says_so(tmp_path: Path, spoil: str) -> None:
    path = tmp_path / "r.safetensors"
    write_states(str(path), some_states())
    whole = path.read_bytes()
    damaged = {"truncate": whole[:-20], "flip": b"\xff" + whole[1:], "junk": b"no file"}[spoil]
    path.write_bytes(damaged)
    assert "can't be read" in error_of(str(path))


def test_what_nobody_has_promised_is_an_error_and_a_file_without_lock_is_read(
    path: str,
) -> None:
    assert "no request has promised" in error_of(path)
    write_states(path, some_states())
    assert load_hidden_states(path, 5.0)["token_ids"].tolist() == [0, 1, 2, 3]


NO_FOLDER = "/proc/raykv-test/r.safetensors"
"""Nobody can make a folder there, not even root."""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_reader_hears_why_there_can_be_no_file(temporary: Path) -> None:
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            promise(NO_FOLDER)
    told = "r.safetensors: their folder could not be written to: No such file or directory"
    assert told in error_of(NO_FOLDER)
    # One note for the folder, however many files there were to be.
    (notes,) = temporary.iterdir()
    assert len(list(notes.iterdir())) == 1
    assert "no request has promised any" in error_of(str(temporary / "elsewhere" / "r.safetensors"))


def test_note_goes_when_the_folder_can_be_written_to(temporary: Path) -> None:
    path = temporary / "states" / "r.safetensors"
    path.parent.write_bytes(b"")
    with pytest.raises(FileExistsError):
        promise(str(path))
    path.parent.unlink()
    assert "could not be written to: File exists" in error_of(str(path))
    os.close(promise(str(path)))
    cleanup_hidden_states(str(path))
    assert "no request has promised any" in error_of(str(path))


def test_only_a_folder_that_is_the_problem_is_noted(temporary: Path) -> None:
    folder = temporary / "states"
    folder.mkdir()
    # The name is too long, or taken, for this file only.
    with pytest.raises(OSError, match="too long"):
        promise(str(folder / f"{'r' * 300}.safetensors"))
    (folder / f"r.safetensors{LOCK_SUFFIX}").mkdir()
    with pytest.raises(IsADirectoryError):
        promise(str(folder / "r.safetensors"))
    assert "no request has promised any" in error_of(str(folder / "other.safetensors"))
    assert list(temporary.iterdir()) == [folder]


def test_folder_that_can_not_be_written_to_is_noted(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = temporary / "states"
    folder.mkdir()
    # Root may write to any folder, whatever its mode says.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OSError, match="too long"):
        promise(str(folder / f"{'r' * 300}.safetensors"))
    assert "could not be written to: File name too long" in error_of(
        str(folder / "other.safetensors")
    )


def test_notes_are_bounded_and_what_is_there_stays(temporary: Path) -> None:
    folders = [f"/proc/raykv-test-{number}/r.safetensors" for number in range(70)]
    for path in [*folders, folders[0]]:
        with pytest.raises(FileNotFoundError):
            promise(path)
    (notes,) = temporary.iterdir()
    assert len(list(notes.iterdir())) == 64
    assert "could not be written to" in error_of(folders[0])


def test_reader_without_a_temporary_folder_hears_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    assert "no request has promised any" in error_of(NO_FOLDER)
    with pytest.raises(FileNotFoundError, match="No such file"):
        promise(NO_FOLDER)


def test_note_that_others_could_have_written_is_not_believed(temporary: Path) -> None:
    with pytest.raises(FileNotFoundError):
        promise(NO_FOLDER)
    (notes,) = temporary.iterdir()
    notes.chmod(0o777)
    assert "no request has promised any" in error_of(NO_FOLDER)


def test_path_that_is_being_written_or_read_is_promised_to_nobody_else(path: str) -> None:
    fd = promise(path)
    with pytest.raises(BlockingIOError):
        promise(path)
    os.close(fd)
    os.close(promise(path))


def test_earlier_file_of_a_path_is_gone_once_it_is_promised_anew(path: str) -> None:
    write_states(path, some_states())
    os.close(promise(path))
    assert "died" in error_of(path)


def test_cleanup_deletes_all_or_only_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    for keep in (True, False):
        os.close(promise(str(path)))
        write_states(str(path), some_states())
        cleanup_hidden_states(str(path), keep_hidden_states=keep)
        assert [each.name for each in tmp_path.iterdir()] == ["r.safetensors"] * keep
    cleanup_hidden_states(str(path))


def test_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_states(str(tmp_path / "nowhere" / "r.safetensors"), some_states())
    (tmp_path / "r.safetensors").mkdir()
    (tmp_path / "r.safetensors" / "x").touch()
    with pytest.raises(OSError, match="irectory"):
        write_states(str(tmp_path / "r.safetensors"), some_states())
    assert [each.name for each in tmp_path.iterdir()] == ["r.safetensors"]


def test_only_our_own_old_and_unused_locks_expire(tmp_path: Path, path: str) -> None:
    lock = Path(path + ".lock")
    fd = promise(path)
    later = time.time() + 100
    assert not is_expired(lock, later, 50.0)
    os.close(fd)
    assert is_expired(lock, later, 50.0)
    assert not is_expired(lock, later, 200.0)
    other = tmp_path / "other.lock"
    other.write_text("of somebody else")
    assert not is_expired(other, later, 50.0)
    assert not is_expired(tmp_path / "gone.lock", later, 50.0)


def test_readers_find_all_of_it_in_the_package() -> None:
    assert raykv.load_hidden_states is load_hidden_states
    assert raykv.cleanup_hidden_states is cleanup_hidden_states
    assert raykv.HiddenStates is HiddenStates
    assert callable(raykv.hidden_states)
