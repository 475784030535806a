"""vLLM's own tests of its offloading connector hold with RayKV's subclasses.

RayKV's worker side, events tracker and metadata take the places of vLLM's in all of `TESTS`:

* `test_scheduler.py` (whole steps of an engine), `test_worker.py`, `test_events.py` and
  `test_worker_metadata.py` meet them.
* `test_config.py`, `test_metrics.py` and `test_canonical_mapping.py` are of what RayKV uses as it
  is.

What can't be pointed at RayKV's classes:

* In these files the connector and the manager. The tests play the manager themselves, with a mock
  that answers as each test wants; RayKV's connector takes no manager but its own, and joins a Ray
  cluster when it is made. `tests/simulation` has both around the real scheduler.
* `OTHERS`, tests that contradict what RayKV does.
* `test_register_kv_caches` and `test_register_kv_caches_uniform_type` of `test_worker.py`: vLLM
  skips them without a GPU.
* Whole files, which are in `APART` with their reasons. A test goes through all of vLLM's tests and
  wants each that names the offloading connector, or what is below it, to be in one of these places.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from raykv.lab.demo.tiny_llama import tiny_llama
from raykv.vllm.internals.names import vllm_version
from tests.house import ROOT
from tests.overlay import download

TESTS = "tests/v1/kv_connector/unit/offloading_connector"
OTHERS = {
    "test_load_completion": "a result that is not of RayKV's own class counts as a failed transfer",
}
"""Tests that must fail with RayKV, and why. This one is of 0.33."""

APART = {
    "tests/v1/kv_connector/unit/test_offloading_connector.py": (
        "engines with vLLM's own pool in CPU memory and its tiers, on a GPU, of models from the hub"
    ),
    "tests/v1/kv_connector/unit/test_config.py": "vLLM's flags for its own pool, made a connector",
    "tests/v1/kv_connector/unit/test_hma_auto_config.py": "a connector's name in a configuration",
    "tests/v1/kv_connector/nixl_integration/": "servers with NIXL that somebody has started",
    "tests/v1/kv_offload/cpu/": "vLLM's own manager, its eviction, and its worker on a GPU",
    "tests/v1/kv_offload/tiering/": "vLLM's own disks, object stores and peers",
    "tests/v1/kv_offload/test_factory.py": "names of vLLM's own specs",
    "tests/v1/kv_offload/test_file_mapper.py": "names of vLLM's own files",
    "tests/v1/kv_offload/conftest.py": "configurations for the files beside it",
    "tests/v1/core/test_prefix_caching.py": (
        "two tests make the connector without its constructor; RayKV's hooks need what that makes"
    ),
    "tests/v1/e2e/general/test_hisparse.py": "an engine on a GPU, with a model from the hub",
    "tests/evals/gsm8k/test_gsm8k_offloading.py": "the same",
    "tests/config/test_aux_output_config.py": "a connector's name in a configuration",
    "tests/test_config.py": "the same",
    "tests/platforms/test_cpu.py": "the same",
}
"""Files and folders of vLLM's tests that name the connector and can't meet RayKV's, and why."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer, which vLLM's scheduler makes for structured outputs."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    made = tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=1)
    words = Tokenizer(WordLevel({"a": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(str(made))
    return made


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's, with its tests."""
    version = vllm_version().partition("+")[0]
    cache = ROOT / "build" / "vllm-sources"
    return download(Path(sys.prefix), version, cache, tmp_path_factory.mktemp("sources"))


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_every_file_of_vllms_tests_that_names_its_connector_runs_or_is_known_not_to(
    sources: Path,
) -> None:
    named = re.compile(r"\bOffloadingConnector|vllm\.v1\.kv_offload|kv_connector\.v1\.offloading")
    files = {
        path.relative_to(sources).as_posix()
        for path in (sources / "tests").rglob("*.py")
        if named.search(path.read_text(encoding="utf-8"))
    }
    assert any(name.startswith(TESTS) for name in files)
    assert not {name for name in files if not name.startswith((TESTS, *APART))}


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_vllms_tests_of_its_connector_hold_with_raykvs_classes(
    sources: Path, model: Path, tmp_path: Path
) -> None:
    here = tmp_path / "vllms"
    shutil.copytree(sources / "tests" / "v1", here / "tests" / "v1")
    (here / "tests" / "__init__.py").touch()
    shutil.copy(ROOT / "tests" / "children" / "vllms_tests.py", here / "raykv_plugin.py")
    command = [
        str(Path(sys.prefix) / "bin/pytest"),
        "-q",
        "-rf",
        "--noconftest",
        "-p",
        "raykv_plugin",
    ]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(here), "-W", "ignore"]
    done = subprocess.run(
        [*command, TESTS],
        cwd=here,
        env=os.environ
        | {
            "PYTHONPATH": f"{here}{os.pathsep}{ROOT}",
            "RAYKV_TEST_MODEL": str(model),
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    found = re.search(r"(?:(\d+) failed, )?(\d+) passed", done.stdout)
    assert found, done.stdout[-4000:] + done.stderr[-2000:]
    failed = set(re.findall(r"^FAILED \S+::(\w+)", done.stdout, flags=re.MULTILINE))
    assert failed <= OTHERS.keys(), done.stdout[-6000:]
    assert int(found[2]) > 500
