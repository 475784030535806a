"""Writes support.md, what works with which kind of model: `python deploy/support.py`.

A test that proves it carries the marker `support` with the name of what it proves, and is played
with models of `tests/fixtures/zoo.py`: by a parameter that is the name of one, or by the marker's
`models`. A test that is marked `versions` too runs on both versions of vLLM. Nothing is run here:
pytest collects the tests, and what it collects is the page.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.fixtures.zoo import ZOO  # noqa: E402

TARGET = Path(__file__).with_name("support.md")

VERSIONS = ("0.32", "0.33")
"""Of vLLM: all tests run on the first, those that are marked `versions` on the other too."""

FEATURES = {
    "load": "a prompt is loaded, and goes on as after a hit in vLLM's own prefix cache",
    "document + question": "a second question about a document finds the document",
    "conversation": "the next turn finds the one before, and the answer to it",
    "another engine": "another engine on the node loads what the first has stored",
    "restart": "a restarted engine loads it, too",
    "small pool": "a pool with room for some of the documents serves those",
    "pre-emption": "requests whose KV does not fit into vLLM's cache",
    "chunks of blocks": "`blocks_per_chunk` above 1",
    "fetch": "from another node's pool",
    "disk": "from a disk, after it was evicted",
    "layer-wise": "`layerwise_loads`",
    "hidden states": "`RayKVHiddenStatesConnector`",
    "canonical layout": "`canonical_layout`",
    "ranks on two nodes": "tensor parallelism over two Ray nodes: each keeps its ranks' part",
    "pipeline stages": "`pipeline_parallel_size` above 1, on one node or on two",
    "events": "`raykv events` reports the chunks of every KV group",
    "listing": "`raykv chunk ls`, `raykv chunk show` and `raykv status` have them, too",
    "lookup": "`raykv chunk lookup` says what an engine then loads",
    "routing": "a router of Ray Serve gets the same answer",
    "prefetch": "`raykv prefetch` brings all that a prompt needs",
    "pin": "`raykv pin add` keeps all that a prompt needs",
    "sessions": "a session's end and its pause decide what is evicted",
    "explain": "`raykv explain` says why a prompt was computed",
    "inspect": "`raykv.inspect`: frames, and K and V of chunks as tensors",
}
"""What can be proven, in the order of the page."""

TOP = """\
# What works with which model

`python deploy/support.py` writes this page from the tests that prove it: those with the marker
`support`. A cell names the versions of vLLM on which its test runs; "both" means 0.32 and 0.33. An
empty cell has no test: the combination may work. RayKV refuses at the start, in one sentence, what
it knows it cannot do.

Tests run on vLLM's CPU build, with tiny models of random weights. There is no CPU build of 0.33:
its Python sources run over the compiled part of 0.32, which lacks what experts and KV caches in FP8
need.

## Models
"""


class Proof(NamedTuple):
    """A test proves a feature for a model of the zoo, on one version of vLLM or on both."""

    feature: str
    model: str
    on_both: bool


class Collector:
    """Plugin of pytest: what the collected tests prove."""

    def __init__(self) -> None:
        self.proofs: set[Proof] = set()

    def pytest_collection_finish(self, session: Any) -> None:
        """See pytest."""
        for item in session.items:
            for marker in item.iter_markers("support"):
                on_both = item.get_closest_marker("versions") is not None
                models = marker.kwargs.get("models") or models_of(item)
                self.proofs |= {Proof(marker.args[0], each, on_both) for each in models}


def models_of(item: Any) -> list[str]:
    """The models of the zoo that a collected test is played with."""
    params = getattr(item, "callspec", None)
    values = [] if params is None else params.params.values()
    return [each for each in values if isinstance(each, str) and each in ZOO]


def collect() -> list[Proof]:
    """What the tests prove, in a process of its own; it runs none.

    Raises:
        RuntimeError: pytest could not collect them.
    """
    done = subprocess.run(
        [sys.executable, __file__, "--collect"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )
    if done.returncode:
        raise RuntimeError(f"tests could not be collected: {done.stdout}{done.stderr}")
    return [Proof(*row) for row in json.loads(done.stdout.splitlines()[-1])]


def _collect_here() -> int:
    import pytest

    plugin = Collector()
    files = [
        str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.support(" in _text(path)
    ]
    wanted = ["--collect-only", "-q", "-m", "support", "-p", "no:cacheprovider"]
    code = int(pytest.main([*wanted, *sorted(files)], plugins=[plugin]))
    print(json.dumps(sorted(plugin.proofs)))
    return code


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def page(proofs: Iterable[Proof]) -> str:
    """The whole page.

    Raises:
        ValueError: a test proves what is not in FEATURES, or for no model of the zoo.
    """
    known = sorted(proofs)
    strange = {each.feature for each in known} - FEATURES.keys()
    strange |= {each.model for each in known} - ZOO.keys()
    if strange:
        raise ValueError(f"neither in FEATURES nor in the zoo: {', '.join(sorted(strange))}")
    return "\n".join([TOP, *_models(), "", "## Features", "", *_matrix(known), "", *_meanings()])


def _models() -> list[str]:
    rows = [
        [f"`{name}`", model.kind, model.config.removesuffix("Config").removesuffix("Text")]
        for name, model in ZOO.items()
    ]
    return _table(["model", "its KV", "made as"], rows)


def _matrix(proofs: Sequence[Proof]) -> list[str]:
    cells: dict[tuple[str, str], set[bool]] = {}
    for each in proofs:
        cells.setdefault((each.feature, each.model), set()).add(each.on_both)
    rows = [
        [feature, *(_cell(cells.get((feature, model))) for model in ZOO)] for feature in FEATURES
    ]
    return _table(["", *(f"`{name}`" for name in ZOO)], rows)


def _cell(on_both: set[bool] | None) -> str:
    if on_both is None:
        return ""
    return "both" if True in on_both else VERSIONS[0]


def _meanings() -> list[str]:
    lines = [f"* **{feature}**: {meaning}." for feature, meaning in FEATURES.items()]
    return ["## What that means", "", *lines, ""]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(line)} |".replace("  |", " |") for line in lines]


if __name__ == "__main__":
    if "--collect" in sys.argv:
        sys.exit(_collect_here())
    TARGET.write_text(page(collect()), encoding="utf-8")
