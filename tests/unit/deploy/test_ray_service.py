"""The RayServices of deploy/ start what Ray Serve and vLLM take, on nodes that there are."""

from __future__ import annotations

import dataclasses
import json
import pkgutil
import re
import shlex
import shutil
from collections import Counter
from pathlib import Path

import pytest
import yaml

from deploy import render
from raykv.base.settings import load_settings
from raykv.serve.arguments import AppArguments, parse
from tests.fixtures.manifests import (
    DEPLOY,
    KUBERAY,
    RAY_SERVICES,
    Document,
    container,
    only,
    port_numbers,
    ray_cluster,
    serve_config,
    settings,
    worker_groups,
    worker_templates,
)

every_ray_service = pytest.mark.parametrize("overlay", RAY_SERVICES)


def application(overlay: str) -> Document:
    (found,) = serve_config(overlay)["applications"]
    assert isinstance(found, dict)
    return found


def app_arguments(overlay: str) -> list[Document]:
    """Arguments of `build_app`: those of the application, or for each of its roles alone."""
    args = dict(application(overlay)["args"])
    roles = [args.pop(role) for role in ("prefill", "decode") if role in args]
    return [args | role for role in roles] or [args]


def deployments(overlay: str) -> list[Document]:
    """Options of the engines' deployments, then those of the ingress."""
    parts = app_arguments(overlay)
    return [*(part["deployment"] for part in parts), parts[0]["ingress"]["deployment"]]


def node_resources(group: Document) -> Counter[str]:
    """What Ray may give of one node of a group, by `ray_actor_options`' names."""
    params = group["rayStartParams"]
    (custom,) = shlex.split(params.get("resources", "{}"))
    found = Counter({"num_cpus": int(params["num-cpus"]), "num_gpus": int(params["num-gpus"])})
    return found + Counter(json.loads(custom))


def replica_resources(options: Document) -> Counter[str]:
    """What one replica takes."""
    actor = dict(options["ray_actor_options"])
    custom = actor.pop("resources", {})
    return Counter(actor) + Counter(custom)


def test_there_is_one_for_each_purpose() -> None:
    paths = {overlay: application(overlay)["import_path"] for overlay in RAY_SERVICES}
    assert paths == {
        "serve-all-options": "raykv.serve:build_disaggregated_app",
        "serve-cpu-trial": "raykv.serve:build_app",
        "serve-disaggregated": "raykv.serve:build_disaggregated_app",
        "serve-one-node-gpu": "raykv.serve:build_app",
    }
    assert all(callable(pkgutil.resolve_name(path)) for path in paths.values())


@every_ray_service
def test_ray_serve_takes_the_configuration_and_looks_at_all_of_it(overlay: str) -> None:
    schema = pytest.importorskip("ray.serve.schema")
    config, options = serve_config(overlay), deployments(overlay)
    schema.ServeDeploySchema.model_validate(config)
    for each in options:
        schema.DeploymentSchema(name="engine", **each)
    for model, parts in {
        schema.ServeDeploySchema: [config],
        schema.HTTPOptionsSchema: [config["http_options"]],
        schema.ServeApplicationSchema: config["applications"],
        schema.DeploymentSchema: options,
        schema.RayActorOptionsSchema: [each["ray_actor_options"] for each in options],
    }.items():
        assert {name for part in parts for name in part} <= set(model.model_fields)


@every_ray_service
def test_application_takes_its_arguments(overlay: str) -> None:
    for args in app_arguments(overlay):
        found = parse(AppArguments, args)
        assert found.ingress.deployment
        (model,) = found.models
        assert load_settings(model.raykv or {}, settings(overlay)).pool_bytes


@every_ray_service
def test_engine_arguments_are_vllms(overlay: str) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for args in app_arguments(overlay):
        assert set(args["engine_args"]) <= known


@every_ray_service
def test_all_replicas_find_a_node(overlay: str) -> None:
    nodes = [
        node_resources(group) for group in worker_groups(overlay) for _ in range(group["replicas"])
    ]
    for options in deployments(overlay):
        needs = replica_resources(options)
        assert needs["num_cpus"], "what needs no CPU may go to the head"
        for _ in range(options["num_replicas"]):
            fitting = [node for node in nodes if needs <= node]
            assert fitting, f"no node has {dict(needs)} left: {nodes}"
            fitting[0].subtract(needs)
    assert all(not node["num_gpus"] for node in nodes), "a GPU is left over"


@every_ray_service
def test_ray_gives_what_the_container_has(overlay: str) -> None:
    for group in worker_groups(overlay):
        resources = container(group["template"])["resources"]
        node = node_resources(group)
        assert node["num_cpus"] == int(resources["requests"]["cpu"])
        assert node["num_gpus"] == int(resources["limits"].get("nvidia.com/gpu", 0))


@pytest.mark.parametrize("overlay", ["serve-disaggregated", "serve-all-options"])
def test_prefill_and_decode_have_nodes_of_their_own(overlay: str) -> None:
    args = application(overlay)["args"]
    for group, other in zip(worker_groups(overlay), ("decode", "prefill"), strict=True):
        role = group["groupName"]
        node = node_resources(group)
        assert replica_resources(args[role]["deployment"]) <= node
        assert not replica_resources(args[other]["deployment"]) <= node
    prefill, decode = worker_templates(overlay)
    assert prefill == decode
    (rule,) = prefill["spec"]["affinity"]["podAntiAffinity"].values()
    (term,) = rule
    own = prefill["metadata"]["labels"] | {"ray.io/node-type": "worker"}
    assert term["labelSelector"]["matchLabels"].items() <= own.items()


@every_ray_service
def test_http_is_where_kuberay_looks_for_it_and_no_upgrade_empties_the_pools(overlay: str) -> None:
    assert only(overlay, "RayService")["spec"]["upgradeStrategy"] == {"type": "None"}
    config = serve_config(overlay)
    assert config["proxy_location"] == "EveryNode"
    assert config["http_options"]["host"] == "0.0.0.0"
    for template in (ray_cluster(overlay)["headGroupSpec"]["template"], *worker_templates(overlay)):
        assert port_numbers(template)["serve"] == config["http_options"]["port"]


@every_ray_service
def test_operator_reaches_the_dashboard_and_the_proxies(overlay: str) -> None:
    (rule,) = (
        rule
        for rule in only(overlay, "NetworkPolicy")["spec"]["ingress"]
        if rule["from"][0].get("podSelector", {}).get("matchLabels")
        == {"app.kubernetes.io/component": "kuberay-operator"}
    )
    assert rule["from"][0]["namespaceSelector"] == {}
    assert {port["port"] for port in rule["ports"]} == {"dashboard", "serve"}


@every_ray_service
def test_kuberay_adds_the_readiness_of_the_proxy(overlay: str) -> None:
    for template in worker_templates(overlay):
        worker = container(template)
        # A readiness probe of ours would stand in place of KubeRay's.
        assert {"readinessProbe", "startupProbe", "command", "args"}.isdisjoint(worker)
        assert worker["livenessProbe"]["httpGet"]["port"] == 52365
        assert "ray.io/overwrite-container-cmd" not in template["metadata"].get("annotations", {})


@pytest.mark.parametrize(
    ("overlay", "folder"),
    [
        ("serve-cpu-trial", "base-serve"),
        ("serve-one-node-gpu", "overlays/serve-one-node-gpu"),
        ("serve-disaggregated", "overlays/serve-disaggregated"),
        ("serve-all-options", "overlays/serve-disaggregated"),
    ],
)
def test_configuration_is_the_file_of_the_overlay_or_of_its_base(overlay: str, folder: str) -> None:
    text = (KUBERAY / folder / "serve.yaml").read_text()
    assert only(overlay, "RayService")["spec"]["serveConfigV2"] == text


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_overlay_of_the_page_changes_image_settings_and_application(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (DEPLOY / "README.md").read_text(), re.DOTALL)
    shutil.copytree(KUBERAY, tmp_path / "kuberay")
    mine = tmp_path / "kuberay" / "overlays" / "mine"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(example)
    (mine / "serve.yaml").write_text("applications: []\n")
    found = {each["kind"]: each for each in yaml.safe_load_all(render.render(mine))}
    assert found["RayService"]["spec"]["serveConfigV2"] == "applications: []\n"
    (group,) = found["RayService"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert container(group["template"])["image"] == "registry.example/raykv:0.1.0-gpu"
    changes = found["ConfigMap"]["data"].items() - settings("serve-one-node-gpu").items()
    assert changes == {("RAYKV_POOL_BYTES", "96GiB")}
