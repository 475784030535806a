"""The RayServices of deploy/ start what Ray Serve and vLLM take, on nodes that there are."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import raykv.serve
from deploy import render
from raykv.base.errors import SettingError
from raykv.base.settings import load_settings
from raykv.serve.arguments import AppArguments, parse
from tests.fixtures.manifests import (
    DEPLOY,
    KUBERAY,
    RAY_SERVICES,
    Document,
    changed,
    check_schema,
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


def check_serve(overlay: str, config: Document) -> None:
    """Raises if Ray Serve would refuse the configuration, or not look at a part of it."""
    schema = pytest.importorskip("ray.serve.schema")
    schema.ServeDeploySchema.model_validate(config)
    known = {
        schema.ServeDeploySchema: [config],
        schema.HTTPOptionsSchema: [config["http_options"]],
        schema.ServeApplicationSchema: config["applications"],
    }
    for model, parts in known.items():
        for part in parts:
            assert set(part) <= set(model.model_fields)
    for options in deployments(overlay):
        check_deployment(options)


def check_deployment(options: Document) -> None:
    """Raises if `@serve.deployment` would not take the options."""
    schema = pytest.importorskip("ray.serve.schema")
    schema.DeploymentSchema(name="engine", **options)
    assert set(options) <= set(schema.DeploymentSchema.model_fields)
    assert set(options["ray_actor_options"]) <= set(schema.RayActorOptionsSchema.model_fields)


@every_ray_service
def test_ray_serve_takes_the_configuration(overlay: str) -> None:
    check_serve(overlay, serve_config(overlay))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_replica": 2},
        {"num_replicas": "many"},
        {"ray_actor_options": {"num_gpu": 1}},
        {"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}},
    ],
    ids=str,
)
def test_ray_serve_refuses_a_deployment_with_a_wrong_option(wrong: dict[str, Any]) -> None:
    options = deployments("serve-cpu-trial")[0]
    check_deployment(options)
    with pytest.raises((AssertionError, ValueError)):
        check_deployment(options | wrong)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("applications", 0, "import_path"), "raykv"),
        (("applications", 0, "args"), []),
        (("applications", 0, "arguments"), {}),
        (("proxy_location",), "Everywhere"),
        (("http_options", "prt"), 8000),
    ],
    ids=str,
)
def test_ray_serve_refuses_a_wrong_configuration(
    place: tuple[str | int, ...], value: object
) -> None:
    config = changed(serve_config("serve-cpu-trial"), place, value)
    with pytest.raises((AssertionError, ValueError)):
        check_serve("serve-cpu-trial", config)


@every_ray_service
def test_application_takes_its_arguments(overlay: str) -> None:
    for args in app_arguments(overlay):
        found = parse(AppArguments, args)
        assert found.ingress.deployment
        (model,) = found.models
        assert load_settings(model.raykv or {}, settings(overlay)).pool_bytes


def test_application_refuses_an_argument_that_it_does_not_know() -> None:
    (args,) = app_arguments("serve-cpu-trial")
    with pytest.raises(SettingError, match="deploymnt"):
        parse(AppArguments, args | {"deploymnt": {}})


@every_ray_service
def test_import_path_leads_to_a_builder(overlay: str) -> None:
    module, _, name = application(overlay)["import_path"].partition(":")
    assert module == raykv.serve.__name__
    if not hasattr(raykv.serve, name):
        pytest.skip(f"there is no {name}")
    assert callable(getattr(raykv.serve, name))


@every_ray_service
def test_engine_arguments_are_vllms(overlay: str) -> None:
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        pytest.skip("no vLLM")
    source = Path(vllm.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    (cls,) = (
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    )
    fields = {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for args in app_arguments(overlay):
        assert set(args["engine_args"]) <= fields


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
def test_upgrade_that_would_empty_the_pools_is_asked_for(overlay: str) -> None:
    assert only(overlay, "RayService")["spec"]["upgradeStrategy"] == {"type": "None"}


@every_ray_service
def test_http_is_where_kuberay_looks_for_it(overlay: str) -> None:
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
    ("place", "value"),
    [
        (("spec", "serveConfigV2"), {"applications": []}),
        (("spec", "serveConfigV2"), ""),
        (("spec", "upgradeStrategy", "type"), "Never"),
        (("spec", "upgradeStrategy"), "NewCluster"),
        (("spec", "rayClusterSpec"), {}),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "replica"), 1),
        (("spec", "excludeHeadPodFromServeSvc"), "true"),
        (("metadata", "name"), "RayKV"),
    ],
    ids=str,
)
def test_ray_service_is_refused_with_a_wrong_field(
    place: tuple[str | int, ...], value: object
) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check_schema(changed(only("serve-cpu-trial", "RayService"), place, value))


@pytest.mark.parametrize("overlay", ["serve-one-node-gpu", "serve-disaggregated"])
def test_configuration_is_the_file_of_the_overlay(overlay: str) -> None:
    text = (KUBERAY / "overlays" / overlay / "serve.yaml").read_text()
    assert only(overlay, "RayService")["spec"]["serveConfigV2"] == text
    assert yaml.safe_load(text) == serve_config(overlay)


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


def test_overlay_without_a_file_has_that_of_the_base() -> None:
    text = (KUBERAY / "base-serve" / "serve.yaml").read_text()
    assert only("serve-cpu-trial", "RayService")["spec"]["serveConfigV2"] == text
    assert "base-serve" in render.SOURCES
