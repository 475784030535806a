"""The manifests of deploy/ are what Kubernetes and KubeRay take, fit together, and have room."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
import yamllint.config
import yamllint.linter

import raykv
from deploy import render, sizes
from raykv.config import load_settings
from raykv.parsing import parse_size

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERAY = DEPLOY / "kuberay"

KUBERNETES = ("1.29", "1.37")
OWN_SCHEMAS = ("RayCluster", "PodMonitor")

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
every_overlay = pytest.mark.parametrize("overlay", render.OVERLAYS)

Document = dict[str, Any]


@cache
def rendered(overlay: str) -> tuple[Document, ...]:
    return tuple(yaml.safe_load_all((render.RENDERED / f"{overlay}.yaml").read_text()))


def only(overlay: str, kind: str, name: str | None = None) -> Document:
    found = [
        document
        for document in rendered(overlay)
        if document["kind"] == kind and name in (None, document["metadata"]["name"])
    ]
    assert len(found) == 1, (overlay, kind, name)
    return found[0]


def settings(overlay: str) -> dict[str, str]:
    data: dict[str, str] = only(overlay, "ConfigMap", "raykv-settings")["data"]
    return data


def worker_group(overlay: str) -> Document:
    (group,) = only(overlay, "RayCluster")["spec"]["workerGroupSpecs"]
    assert isinstance(group, dict)
    return group


def templates(overlay: str) -> dict[str, Document]:
    """Pod templates of the Ray cluster."""
    head = only(overlay, "RayCluster")["spec"]["headGroupSpec"]["template"]
    return {"head": head, "worker": worker_group(overlay)["template"]}


def container(template: Document) -> Document:
    (found,) = template["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def quantity(text: str) -> int:
    """Bytes of a quantity as these manifests write it."""
    number, unit = re.fullmatch(r"(\d+)(Gi|Mi)", text).groups()  # type: ignore[union-attr]
    return int(number) << {"Gi": 30, "Mi": 20}[unit]


def shm_bytes(template: Document) -> int:
    """Size limit of the volume at /dev/shm."""
    (name,) = (
        mount["name"]
        for mount in container(template)["volumeMounts"]
        if mount["mountPath"] == "/dev/shm"
    )
    (volume,) = (volume for volume in template["spec"]["volumes"] if volume["name"] == name)
    assert volume["emptyDir"]["medium"] == "Memory"
    return quantity(volume["emptyDir"]["sizeLimit"])


def check_schema(document: Document) -> None:
    """Raises if an API server would refuse it."""
    kind = document["kind"]
    if kind in OWN_SCHEMAS:
        schema = json.loads((KUBERAY / "schemas" / f"{kind}.json").read_text())
        jsonschema.validate(document, schema)
    else:
        for version in KUBERNETES:
            kubernetes_validate.validate(document, version, strict=True)


def as_pod_template(name: str, template: Document) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": name},
        "template": template,
    }


@every_overlay
def test_manifest_has_the_schema_of_its_kind(overlay: str) -> None:
    for document in rendered(overlay):
        check_schema(document)
    for name, template in templates(overlay).items():
        check_schema(as_pod_template(name, template))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("spec", "workerGroupSpecs", 0, "rayStartParams", "num-cpus"), 0),
        (("spec", "workerGroupSpecs", 0, "replica"), 1),
        (("spec", "workerGroupSpecs", 0, "minReplicas"), "1"),
        (("spec", "authOptions", "mode"), "none"),
        (("spec", "headGroupSpec", "template"), None),
    ],
    ids=str,
)
def test_ray_cluster_is_refused_with_a_wrong_field(
    place: tuple[str | int, ...], value: object
) -> None:
    document = json.loads(json.dumps(only("cpu-trial", "RayCluster")))
    *path, last = place
    target = document
    for step in path:
        target = target[step]
    target[last] = value
    with pytest.raises(jsonschema.ValidationError):
        check_schema(document)


def test_pod_template_is_refused_with_a_misspelt_field() -> None:
    template = json.loads(json.dumps(templates("cpu-trial")["worker"]))
    container(template)["volumeMount"] = container(template).pop("volumeMounts")
    with pytest.raises(kubernetes_validate.ValidationError):
        check_schema(as_pod_template("worker", template))


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: path.name)
def test_yaml_file_says_nothing_twice(path: Path) -> None:
    rules = yamllint.config.YamlLintConfig(
        "{extends: relaxed, rules: {indentation: disable, line-length: disable}}"
    )
    assert not list(yamllint.linter.run(path.read_text(), rules))


@every_overlay
def test_rendered_overlay_was_made_of_what_is_there(overlay: str) -> None:
    path = render.RENDERED / f"{overlay}.yaml"
    assert path.read_text().startswith(render.header(overlay)), "run: python deploy/render.py"


def test_every_rendered_file_has_an_overlay() -> None:
    names = {path.stem for path in render.RENDERED.iterdir()}
    assert names == set(render.OVERLAYS)


@needs_kubectl
@every_overlay
def test_rendered_overlay_is_what_kubectl_makes(overlay: str) -> None:
    made = yaml.safe_load_all(render.render(KUBERAY / "overlays" / overlay))
    assert tuple(made) == rendered(overlay), "run: python deploy/render.py"


@needs_kubectl
def test_dashboard_becomes_a_config_map_for_grafana(tmp_path: Path) -> None:
    if not (DEPLOY / "grafana" / "raykv.json").exists():
        pytest.skip("no dashboard")
    shutil.copytree(DEPLOY / "grafana", tmp_path / "grafana")
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "kustomization.yaml").write_text("components: [../grafana]\n")
    (document,) = yaml.safe_load_all(render.render(tmp_path / "all"))
    check_schema(document)
    assert document["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(document["data"]["raykv.json"])["uid"]


@pytest.mark.parametrize("overlay", sizes.OVERLAYS)
def test_worker_has_room_for_all_that_counts_against_its_limit(overlay: str) -> None:
    expected = sizes.OVERLAYS[overlay]
    group = worker_group(overlay)
    template = group["template"]
    found = sizes.WorkerMemory(
        pool_bytes=parse_size("RAYKV_POOL_BYTES", settings(overlay)["RAYKV_POOL_BYTES"]),
        engine_bytes=expected.engine_bytes,
        object_store_bytes=int(group["rayStartParams"]["object-store-memory"]),
        shm_bytes=shm_bytes(template),
    )
    assert found == expected
    resources = container(template)["resources"]
    limit = quantity(resources["limits"]["memory"])
    assert not found.objections(limit, quantity(resources["requests"]["memory"]))
    assert limit == found.least_limit_bytes, "more than is needed"


def test_every_overlay_has_its_sizes() -> None:
    assert {*sizes.OVERLAYS, "all-options"} == set(render.OVERLAYS)
    assert settings("all-options") == settings("multi-node")
    assert worker_group("all-options") == worker_group("multi-node")


def test_limit_bears_the_pool_where_ray_begins_to_kill() -> None:
    memory = sizes.WorkerMemory(4 << 30, 2 << 30, 1 << 30, 2 << 30, ray_bytes=1 << 30)
    # 4 + 2 + 2 + 1 and a quarter GiB; of 10 GiB Ray gives 9.5.
    assert memory.least_limit_bytes == 10 << 30
    assert not memory.objections(10 << 30, 10 << 30)


def test_size_that_does_not_fit_is_named() -> None:
    memory = sizes.WorkerMemory(4 << 30, 2 << 30, 1 << 30, 1 << 30, ray_bytes=1 << 30)
    shm, limit, request = memory.objections(8 << 30, 4 << 30)
    assert shm.startswith("/dev/shm has 1 GiB")
    assert limit.startswith("the memory limit is 8 GiB: raise it to 9 GiB")
    assert request.startswith("4 GiB of 8 GiB are requested")


@every_overlay
def test_head_has_room_for_its_shared_memory_and_no_cpu_for_others(overlay: str) -> None:
    group = only(overlay, "RayCluster")["spec"]["headGroupSpec"]
    template = group["template"]
    store = int(group["rayStartParams"]["object-store-memory"])
    limit = quantity(container(template)["resources"]["limits"]["memory"])
    assert store <= shm_bytes(template) <= limit // 4
    assert group["rayStartParams"]["num-cpus"] == "0"


@every_overlay
def test_settings_are_known_to_raykv(overlay: str) -> None:
    assert load_settings({}, settings(overlay)).pool_bytes


def test_page_of_sizes_has_the_table() -> None:
    assert sizes.table() in (DEPLOY / "README.md").read_text(), "run: python deploy/sizes.py"


def test_page_names_only_files_that_exist() -> None:
    named = set(re.findall(r"\bdeploy/[\w./-]*\w", (DEPLOY / "README.md").read_text()))
    assert len(named) > 5
    made_elsewhere = {"deploy/grafana/raykv.json", "deploy/prometheus/prometheus.yml"}
    missing = {name for name in named if not (ROOT / name).exists()}
    assert missing <= made_elsewhere


@every_overlay
def test_ports_that_are_named_are_there(overlay: str) -> None:
    worker = container(templates(overlay)["worker"])
    names = {port["name"]: port["containerPort"] for port in worker["ports"]}
    flags = yaml.safe_load(only(overlay, "ConfigMap", "raykv-engine")["data"]["engine.yaml"])
    assert flags["port"] == names["http"]
    (service,) = only(overlay, "Service")["spec"]["ports"]
    assert service["targetPort"] in names
    for rule in only(overlay, "NetworkPolicy")["spec"]["ingress"]:
        assert {port["port"] for port in rule.get("ports", ())} <= set(names)
    for document in rendered(overlay):
        if document["kind"] == "PodMonitor":
            assert {each["port"] for each in document["spec"]["podMetricsEndpoints"]} == set(names)


@every_overlay
def test_selectors_mean_the_pods_of_the_cluster(overlay: str) -> None:
    cluster = only(overlay, "RayCluster")["metadata"]["name"]
    labels = {"ray.io/cluster": cluster, "ray.io/group": worker_group(overlay)["groupName"]}
    assert only(overlay, "Service")["spec"]["selector"] == labels
    policy = only(overlay, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == {"ray.io/cluster": cluster}
    assert policy["ingress"][0] == {"from": [{"podSelector": policy["podSelector"]}]}


@every_overlay
def test_volumes_and_mounts_match(overlay: str) -> None:
    maps = {each["metadata"]["name"] for each in rendered(overlay) if each["kind"] == "ConfigMap"}
    for template in templates(overlay).values():
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        assert {mount["name"] for mount in container(template)["volumeMounts"]} == volumes
        for volume in template["spec"]["volumes"]:
            assert volume.get("configMap", {}).get("name", "raykv-engine") in maps


@every_overlay
def test_pods_of_the_cluster_have_no_privileges(overlay: str) -> None:
    assert only(overlay, "RayCluster")["spec"]["authOptions"] == {"mode": "token"}
    for template in templates(overlay).values():
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["automountServiceAccountToken"] is False
        assert container(template)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


@every_overlay
def test_manifests_bring_no_secret_and_no_right_of_the_cluster(overlay: str) -> None:
    kinds = {document["kind"] for document in rendered(overlay)}
    allowed = {"ConfigMap", "NetworkPolicy", "RayCluster", "Service"}
    optional = {"DaemonSet", "PodMonitor"} if overlay == "all-options" else set()
    assert kinds == allowed | optional


@every_overlay
def test_versions_are_those_of_the_package(overlay: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (ray,) = (each for each in project["dependencies"] if each.startswith("ray>="))
    minor = re.findall(r"\d+\.\d+", ray)[0]
    assert only(overlay, "RayCluster")["spec"]["rayVersion"].startswith(f"{minor}.")
    assert f'"ray[default]=={minor}.*"' in (DEPLOY / "Dockerfile").read_text()
    build = "cpu" if overlay == "cpu-trial" else "gpu"
    for template in templates(overlay).values():
        assert container(template)["image"] == f"raykv:{raykv.__version__}-{build}"


@every_overlay
def test_worker_runs_the_script_of_the_image(overlay: str) -> None:
    template = templates(overlay)["worker"]
    assert template["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    (command,) = container(template)["command"]
    assert f"deploy/node.sh /usr/local/bin/{command}" in (DEPLOY / "Dockerfile").read_text()
    assert container(template)["args"][:3] == ["raykv", "serve", "$(MODEL)"]
    assert settings(overlay)["MODEL"]
