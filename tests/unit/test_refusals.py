"""What RayKV can't do yet stops the start with a sentence that names the setting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raykv.errors import SettingError, VersionError
from raykv.vllm.versions import check_vllm_version

pytest.importorskip("vllm")


def config(**fields: Any) -> Any:
    values: dict[str, Any] = {
        "canonical_layout": False,
        "extra_config": {},
        "parallel": SimpleNamespace(pp_size=1),
    }
    return SimpleNamespace(**{**values, **fields})


def test_plain_engine_is_accepted() -> None:
    from raykv.vllm.spec import refuse_several_nodes, refuse_unsupported

    refuse_unsupported(config())
    shared = SimpleNamespace(pp_size=1, tp_size=2, is_parallelism_agnostic=True)
    refuse_unsupported(config(canonical_layout=True, parallel=shared))
    refuse_several_nodes(1)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {
                "canonical_layout": True,
                "parallel": SimpleNamespace(pp_size=1, tp_size=3, is_parallelism_agnostic=False),
            },
            "canonical_layout=true can't be had: .*tensor_parallel_size=3",
        ),
        ({"parallel": SimpleNamespace(pp_size=2)}, "pipeline_parallel_size=2"),
    ],
)
def test_unsupported_setting_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    from raykv.vllm.spec import refuse_unsupported

    with pytest.raises(SettingError, match=named):
        refuse_unsupported(config(**fields))


def test_engine_on_several_nodes_is_refused() -> None:
    from raykv.vllm.spec import refuse_several_nodes

    with pytest.raises(SettingError, match="span 2 nodes"):
        refuse_several_nodes(2)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.0rc1"])
def test_supported_vllm_is_accepted(version: str) -> None:
    check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.31.4", "0.34.0", "1.32.0", "dev", "3"])
def test_other_vllm_is_refused_with_both_versions(version: str) -> None:
    with pytest.raises(VersionError, match=f"0.32 or 0.33; this is vLLM {version}"):
        check_vllm_version(version)


def test_transfer_takes_arguments_of_later_vllm() -> None:
    """vLLM 0.33 calls `submit_load(..., expedited=False)`."""
    import numpy as np

    from raykv.messages import KVLayout
    from raykv.vllm.spec import PoolSpec
    from raykv.vllm.worker import RayOffloadingWorker

    submitted: list[Any] = []
    link: Any = SimpleNamespace(submit=submitted.append, node_epoch=1, drain=list)
    worker = RayOffloadingWorker(link, KVLayout("memfd", 1, 1, [], [0], [[]]))
    blocks: Any = SimpleNamespace(
        block_ids=np.array([3], dtype=np.int32), group_sizes=[1], block_indices=[0]
    )
    assert worker.submit_load(1, PoolSpec(1, [b"k"], [0], [1]), blocks, expedited=True)
    assert [request.block_ids for request in submitted] == [[3]]


def test_start_that_is_stopped_says_why_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    from raykv.vllm.connector import logged_refusals

    with pytest.raises(SettingError), logged_refusals():
        raise SettingError("leave it out")
    assert caplog.messages == ["RayKV stops the start of the engine: leave it out"]
