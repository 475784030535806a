"""The manifests of deploy/kuberay as an API server would get them, and what is in them."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from referencing import Registry, Resource

from deploy import render

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
KUBERAY = DEPLOY / "kuberay"

RAY_SERVICES = tuple(name for name in render.OVERLAYS if name.startswith("serve-"))
RAY_CLUSTERS = tuple(name for name in render.OVERLAYS if name not in RAY_SERVICES)
ALL_OPTIONS = ("all-options", "serve-all-options")

KUBERNETES = ("1.29", "1.37")
OWN_SCHEMAS = {path.stem: json.loads(path.read_text()) for path in KUBERAY.glob("schemas/*.json")}

_REGISTRY: Registry[Any] = Registry().with_resources(
    (f"{kind}.json", Resource.from_contents(schema)) for kind, schema in OWN_SCHEMAS.items()
)

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


def ray_cluster(overlay: str) -> Document:
    """The specification of the Ray cluster, whichever kind makes it."""
    if overlay in RAY_CLUSTERS:
        spec = only(overlay, "RayCluster")["spec"]
    else:
        spec = only(overlay, "RayService")["spec"]["rayClusterConfig"]
    assert isinstance(spec, dict)
    return spec


def serve_config(overlay: str) -> Document:
    """What KubeRay gives to Ray Serve."""
    config = yaml.safe_load(only(overlay, "RayService")["spec"]["serveConfigV2"])
    assert isinstance(config, dict)
    return config


def worker_groups(overlay: str) -> list[Document]:
    groups = ray_cluster(overlay)["workerGroupSpecs"]
    assert isinstance(groups, list)
    return groups


def templates(overlay: str) -> dict[str, Document]:
    """Pod templates of the Ray cluster, by group."""
    head = ray_cluster(overlay)["headGroupSpec"]["template"]
    return {"head": head} | {each["groupName"]: each["template"] for each in worker_groups(overlay)}


def worker_templates(overlay: str) -> list[Document]:
    return [group["template"] for group in worker_groups(overlay)]


def container(template: Document) -> Document:
    (found,) = template["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def port_numbers(template: Document) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(template)["ports"]}


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
        checker = jsonschema.Draft202012Validator(OWN_SCHEMAS[kind], registry=_REGISTRY)
        checker.validate(document)
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


def changed(document: Document, place: tuple[str | int, ...], value: object) -> Document:
    """A copy with another value at one place."""
    copy: Document = json.loads(json.dumps(document))
    *path, last = place
    target: Any = copy
    for step in path:
        target = target[step]
    target[last] = value
    return copy
