"""vLLM's own tests of its offloading connector hold with RayKV's subclasses.

RayKV's worker side and its events tracker take the places of vLLM's. The manager cannot: vLLM's
tests play it themselves, around the offloading scheduler, which RayKV uses as it is.
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

from raykv.serve.models import tiny_llama
from raykv.vllm.internals.names import vllm_version
from tests.house import ROOT
from tests.overlay import download

TESTS = "tests/v1/kv_connector/unit/offloading_connector"
OTHERS = {
    "test_load_completion": "RayKV's worker reports what has failed, in results of its own class",
}
"""Tests that must fail with RayKV, and why."""


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


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_vllms_tests_of_its_connector_hold_with_raykvs_classes(model: Path, tmp_path: Path) -> None:
    version = vllm_version().partition("+")[0]
    cache = ROOT / "build" / "vllm-sources"
    sources = download(Path(sys.prefix), version, cache, tmp_path)
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
    assert int(found[2]) > 300
