"""The manifests of deploy/ are what Kubernetes and KubeRay take, fit together, and have room."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
import yamllint.config
import yamllint.linter

import raykv
from deploy import render, sizes
from raykv.base.parsing import parse_size
from raykv.base.settings import load_settings
from raykv.memory.room import PoolNeeds, monitor_limit, objection
from raykv.metrics.table import METRICS
from tests.fixtures import image
from tests.fixtures.kubelet import AGENT_PORT, all_service_links, start_command
from tests.fixtures.manifests import (
    ALL_OPTIONS,
    DEPLOY,
    KUBERAY,
    RAY_CLUSTERS,
    as_pod_template,
    changed,
    check_schema,
    container,
    only,
    port_numbers,
    quantity,
    ray_cluster,
    rendered,
    serve_config,
    settings,
    shm_bytes,
    templates,
    worker_groups,
    worker_templates,
)
from tests.house import ROOT

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None,
    reason="overlays are put together by kubectl, which is not here",
)
every_overlay = pytest.mark.parametrize("overlay", render.OVERLAYS)
every_ray_cluster = pytest.mark.parametrize("overlay", RAY_CLUSTERS)


@every_overlay
def test_manifest_has_the_schema_of_its_kind(overlay: str) -> None:
    for document in rendered(overlay):
        check_schema(document)
    for name, template in templates(overlay).items():
        check_schema(as_pod_template(name, template))


@pytest.mark.parametrize(
    ("overlay", "kind", "place", "value"),
    [
        ("cpu-trial", "RayCluster", ("workerGroupSpecs", 0, "rayStartParams", "num-cpus"), 0),
        ("cpu-trial", "RayCluster", ("workerGroupSpecs", 0, "replica"), 1),
        ("cpu-trial", "RayCluster", ("authOptions", "mode"), "none"),
        ("serve-cpu-trial", "RayService", ("serveConfigV2",), {"applications": []}),
        ("serve-cpu-trial", "RayService", ("upgradeStrategy", "type"), "Never"),
        ("serve-cpu-trial", "RayService", ("rayClusterSpec",), {}),
    ],
)
def test_schema_refuses_a_wrong_field(
    overlay: str, kind: str, place: tuple[str | int, ...], value: object
) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check_schema(changed(only(overlay, kind), ("spec", *place), value))


def test_pod_template_is_refused_with_a_misspelt_field() -> None:
    template = json.loads(json.dumps(templates("cpu-trial")["engines"]))
    container(template)["volumeMount"] = container(template).pop("volumeMounts")
    with pytest.raises(kubernetes_validate.ValidationError):
        check_schema(as_pod_template("worker", template))


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: path.name)
def test_yaml_file_is_neat_and_says_nothing_twice(path: Path) -> None:
    rules = yamllint.config.YamlLintConfig(
        "{extends: relaxed, rules: {indentation: disable, line-length: disable}}"
    )
    assert not list(yamllint.linter.run(path.read_text(), rules))


def test_rendered_overlays_were_made_of_what_is_there() -> None:
    found = {path.stem: path.read_text() for path in render.RENDERED.iterdir()}
    assert set(found) == set(render.OVERLAYS)
    for overlay, text in found.items():
        assert text.startswith(render.header(overlay)), "run: python deploy/render.py"


@every_overlay
def test_engine_takes_no_service_for_a_setting(overlay: str) -> None:
    links = all_service_links(overlay)
    assert links["RAYKV_METRICS_PORT"].startswith("tcp://")
    own = {"RAYKV_METRICS_PORT": "9470"}
    assert load_settings({}, links) == load_settings({}, {})
    assert load_settings({}, links | own) == load_settings({}, own)


@needs_kubectl
@every_overlay
def test_rendered_overlay_is_what_kubectl_makes(overlay: str) -> None:
    made = yaml.safe_load_all(render.render(KUBERAY / "overlays" / overlay))
    assert tuple(made) == rendered(overlay), "run: python deploy/render.py"


@needs_kubectl
def test_dashboard_becomes_a_config_map_for_grafana(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY / "grafana", tmp_path / "grafana")
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "kustomization.yaml").write_text("components: [../grafana]\n")
    (document,) = yaml.safe_load_all(render.render(tmp_path / "all"))
    check_schema(document)
    assert document["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(document["data"]["raykv.json"])["uid"]


@pytest.mark.parametrize("overlay", sizes.OVERLAYS)
def test_worker_has_room_for_all_that_counts_against_its_limit(overlay: str) -> None:
    expected = sizes.OVERLAYS[overlay].container
    for group in worker_groups(overlay):
        template = group["template"]
        found = sizes.ContainerMemory(
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


@pytest.mark.parametrize("overlay", sizes.OVERLAYS)
def test_pool_of_an_overlay_suits_the_model_that_it_serves(overlay: str) -> None:
    expected = sizes.OVERLAYS[overlay]
    shape = expected.shape
    if overlay in RAY_CLUSTERS:
        flags = yaml.safe_load(only(overlay, "ConfigMap", "raykv-engine")["data"]["engine.yaml"])
        serves = (settings(overlay)["MODEL"], flags["max-model-len"])
    else:
        (application,) = serve_config(overlay)["applications"]
        args = application["args"]
        serves = (args["model"], args["engine_args"]["max_model_len"])
    assert serves == (shape.model, shape.max_model_len)
    assert (expected.plan.problems, expected.plan.hints) == ([], [])


def test_every_overlay_has_its_sizes() -> None:
    assert {*sizes.OVERLAYS, *ALL_OPTIONS} == set(render.OVERLAYS)
    for all_options, plain in zip(ALL_OPTIONS, ("multi-node", "serve-disaggregated"), strict=True):
        assert settings(all_options) == settings(plain)
        assert worker_groups(all_options) == worker_groups(plain)


@pytest.mark.parametrize("pool_gib", [1, 7, 64, 128])
def test_limit_is_the_least_at_which_the_node_actor_gives_the_pool(pool_gib: int) -> None:
    memory = sizes.ContainerMemory(pool_gib << 30, 16 << 30, 1 << 30, 2 << 30)
    needs = PoolNeeds(memory.pool_bytes)

    def refusal(limit_bytes: int) -> str:
        limit = monitor_limit({}, memory.other_bytes, limit_bytes, "the container")
        assert limit is not None
        return objection(needs, [limit], None)

    assert not refusal(memory.least_limit_bytes)
    assert "does not fit" in refusal(memory.least_limit_bytes - (1 << 30))


def test_size_that_does_not_fit_is_named() -> None:
    memory = sizes.ContainerMemory(4 << 30, 2 << 30, 1 << 30, 1 << 30, ray_bytes=1 << 30)
    shm, limit, request = memory.objections(8 << 30, 4 << 30)
    assert shm.startswith("/dev/shm has 1.0 GiB: the object store of 1.0 GiB")
    assert limit.startswith("the memory limit is 8.0 GiB: raise it to 9.0 GiB")
    assert request.startswith("4.0 GiB of 8.0 GiB are requested")


@every_overlay
def test_head_has_room_for_its_shared_memory_and_no_cpu_for_others(overlay: str) -> None:
    group = ray_cluster(overlay)["headGroupSpec"]
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


@every_ray_cluster
def test_service_leads_to_the_port_of_the_engines(overlay: str) -> None:
    (template,) = worker_templates(overlay)
    flags = yaml.safe_load(only(overlay, "ConfigMap", "raykv-engine")["data"]["engine.yaml"])
    assert flags["port"] == port_numbers(template)["http"]
    service = only(overlay, "Service")["spec"]
    assert [port["targetPort"] for port in service["ports"]] == ["http"]
    cluster = only(overlay, "RayCluster")["metadata"]["name"]
    assert service["selector"] == {"ray.io/cluster": cluster, "ray.io/group": "engines"}


@every_overlay
def test_network_policy_means_all_pods_and_opens_ports_that_they_have(overlay: str) -> None:
    policy = only(overlay, "NetworkPolicy")["spec"]
    for template in templates(overlay).values():
        labels = template["metadata"]["labels"].items()
        assert policy["podSelector"]["matchLabels"].items() <= labels
    assert policy["ingress"][0] == {"from": [{"podSelector": policy["podSelector"]}]}
    names = {name for each in templates(overlay).values() for name in port_numbers(each)}
    for rule in policy["ingress"][1:]:
        assert {port["port"] for port in rule["ports"]} <= names - {"gcs-server"}


@every_overlay
def test_metrics_of_the_actors_are_at_the_port_that_is_scraped(overlay: str) -> None:
    wanted = int(settings(overlay)["RAYKV_METRICS_PORT"])
    for template in templates(overlay).values():
        ports = port_numbers(template)
        assert ports["raykv-metrics"] == wanted
        assert len(set(ports.values())) == len(ports)
    assert wanted < 10_000, "Ray gives its workers ports from 10,002 on"
    scraped = only(overlay, "NetworkPolicy")["spec"]["ingress"][2]["ports"]
    assert {"metrics", "raykv-metrics"} <= {port["port"] for port in scraped}


@pytest.mark.parametrize("overlay", ALL_OPTIONS)
def test_pod_monitor_gives_the_dashboard_the_labels_that_it_asks_for(overlay: str) -> None:
    monitor = only(overlay, "PodMonitor")["spec"]
    worker = worker_templates(overlay)[0]
    labels = worker["metadata"]["labels"].items()
    assert monitor["selector"]["matchLabels"].items() <= labels
    endpoints = {each["port"]: each for each in monitor["podMetricsEndpoints"]}
    assert set(endpoints) == {"http", "metrics", "raykv-metrics"}
    assert set(endpoints) >= set(port_numbers(worker)) - {"serve"}
    # A metric's own label wins over Prometheus' of the same name.
    assert any("namespace" in metric.labels for metric in METRICS.values())
    for port in ("http", "raykv-metrics"):
        assert endpoints[port]["honorLabels"] is True
        assert [each["targetLabel"] for each in endpoints[port]["relabelings"]] == ["cluster"]


def test_prometheus_without_the_operator_scrapes_the_same_ports() -> None:
    path = DEPLOY / "prometheus" / "kubernetes.yml"
    jobs = {job["job_name"]: job for job in yaml.safe_load(path.read_text())["scrape_configs"]}
    assert jobs["raykv"]["honor_labels"] is True
    ports = []
    for job in jobs.values():
        instance, port, cluster = job["relabel_configs"]
        labels = {
            f"__meta_kubernetes_pod_label_{re.sub(r'[^a-z]', '_', name)}": value
            for name, value in worker_templates("all-options")[0]["metadata"]["labels"].items()
        }
        assert labels[instance["source_labels"][0]] == instance["regex"]
        assert port["source_labels"] == ["__meta_kubernetes_pod_container_port_name"]
        ports += port["regex"].split("|")
        assert cluster["source_labels"] == ["__meta_kubernetes_pod_label_ray_io_cluster"]
    monitor = only("all-options", "PodMonitor")["spec"]
    assert sorted(ports) == sorted(each["port"] for each in monitor["podMetricsEndpoints"])
    assert jobs["raykv"]["relabel_configs"][2]["target_label"] == "cluster"


@pytest.mark.parametrize("overlay", ALL_OPTIONS)
def test_ray_keeps_its_state_in_redis_where_that_is_asked_for(overlay: str) -> None:
    options = ray_cluster(overlay)["gcsFaultToleranceOptions"]
    assert set(options) == {"redisAddress", "redisPassword"}
    assert "secretKeyRef" in options["redisPassword"]["valueFrom"]
    plain = "multi-node" if overlay in RAY_CLUSTERS else "serve-disaggregated"
    assert "gcsFaultToleranceOptions" not in ray_cluster(plain)


@every_overlay
def test_volumes_and_mounts_match(overlay: str) -> None:
    maps = {each["metadata"]["name"] for each in rendered(overlay) if each["kind"] == "ConfigMap"}
    for template in templates(overlay).values():
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        assert {mount["name"] for mount in container(template)["volumeMounts"]} == volumes
        named = [each.get("configMap") for each in template["spec"]["volumes"]]
        named += [each["configMapRef"] for each in container(template).get("envFrom", ())]
        assert {each["name"] for each in named if each} <= maps


@every_overlay
def test_pods_of_the_cluster_have_no_privileges(overlay: str) -> None:
    assert ray_cluster(overlay)["authOptions"] == {"mode": "token"}
    for template in templates(overlay).values():
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["automountServiceAccountToken"] is False
        assert template["spec"]["enableServiceLinks"] is False
        assert container(template)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


@every_overlay
def test_manifests_bring_no_secret_and_no_right_of_the_cluster(overlay: str) -> None:
    kinds = {document["kind"] for document in rendered(overlay)}
    made = {"RayCluster", "Service"} if overlay in RAY_CLUSTERS else {"RayService"}
    optional = {"DaemonSet", "PodMonitor"} if overlay in ALL_OPTIONS else set()
    assert kinds == {"ConfigMap", "NetworkPolicy"} | made | optional


@every_overlay
def test_versions_are_those_of_the_package(overlay: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (ray,) = (each for each in project["dependencies"] if each.startswith("ray>="))
    minor = re.findall(r"\d+\.\d+", ray)[0]
    assert ray_cluster(overlay)["rayVersion"].startswith(f"{minor}.")
    assert f'"ray[default]=={minor}.*"' in (DEPLOY / "Dockerfile").read_text()
    build = "cpu" if overlay.endswith("cpu-trial") else "gpu"
    for template in templates(overlay).values():
        assert container(template)["image"] == f"raykv:{raykv.__version__}-{build}"


def test_image_has_the_extras_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    (default,) = re.findall(r"^ARG EXTRA=(\w+)$", dockerfile, re.MULTILINE)
    (installed,) = re.findall(r'"\.\[([^]]*)\]"', dockerfile)
    assert set(installed.split(",")) == {"${EXTRA}", "serve"}
    assert {default, "cpu", "serve"} <= set(project["optional-dependencies"])


def test_image_has_what_its_builder_sees_and_ends_as_the_user_of_the_pods() -> None:
    taken = image.steps(image.DOCKERFILE.read_text())
    let_through = image.DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    for step in taken:
        if step.word == "COPY":
            *sources, _ = (word for word in step.rest.split() if not word.startswith("--"))
            assert {f"!{source}" for source in sources} <= {*let_through}
    (user,) = (step.rest for step in taken if step.word == "USER")
    after = [step.word for step in taken[taken.index(image.Step("USER", user)) :]]
    assert "RUN" not in after
    assert "COPY" not in after
    for overlay in render.OVERLAYS:
        for template in templates(overlay).values():
            security = template["spec"]["securityContext"]
            assert [security[name] for name in ("runAsUser", "runAsGroup", "fsGroup")] == [
                int(user)
            ] * 3


@every_overlay
def test_probes_ask_ports_that_the_container_has_or_rays_agent(overlay: str) -> None:
    """Liveness is the Ray node's alone: an engine that starts again must not cost the pool."""
    for template in worker_templates(overlay):
        worker = container(template)
        liveness = worker["livenessProbe"]
        assert liveness["httpGet"] == {"path": "/api/healthz", "port": AGENT_PORT}
        assert liveness["failureThreshold"] * liveness["periodSeconds"] >= 60, (
            "as long as Ray waits"
        )
        for name in {"readinessProbe", "startupProbe"} & worker.keys():
            assert worker[name]["httpGet"] == {"path": "/health", "port": "http"}
            assert worker[name]["httpGet"]["port"] in port_numbers(template)


@pytest.mark.parametrize("group", ["head", "engines"])
def test_ray_is_started_as_kuberay_would_with_the_parameters_of_the_group(group: str) -> None:
    command = start_command("cpu-trial", group)
    assert command.startswith("ray start --head" if group == "head" else "ray start --address=")
    ray = pytest.importorskip("ray.scripts.scripts")
    known = {name for each in ray.start.params for name in each.opts}
    assert {word.partition("=")[0] for word in command.split()[2:]} <= known


@every_ray_cluster
def test_worker_runs_the_script_of_the_image(overlay: str) -> None:
    (template,) = worker_templates(overlay)
    assert template["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    (command,) = container(template)["command"]
    assert f"deploy/node.sh /usr/local/bin/{command}" in (DEPLOY / "Dockerfile").read_text()
    assert container(template)["args"][:3] == ["raykv", "serve", "$(MODEL)"]
    assert settings(overlay)["MODEL"]
