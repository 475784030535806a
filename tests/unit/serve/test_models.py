"""Names of models: what they stand for, and how soon a wrong one is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from raykv.base.errors import SettingError
from raykv.serve.models import SMALL_MODEL, FoundModel, find_model, shapes_of

pytest.importorskip("huggingface_hub")

ASK = "import sys; from raykv.serve.models import find_model; print(find_model(sys.argv[1]).path)"
NOWHERE = "http://127.0.0.1:9"
KNOWN = "org/known"


class Hub(BaseHTTPRequestHandler):
    """Knows one repository."""

    def do_GET(self) -> None:
        known = self.path.startswith(f"/api/models/{KNOWN}")
        body = json.dumps({"id": KNOWN} if known else {"error": "Repository not found"}).encode()
        self.send_response(200 if known else 404)
        if not known:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Tests read standard error."""


@contextmanager
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def asked(name: str, home: Path, endpoint: str, **variables: str) -> str:
    """The path of a model, or the last line of the error; in a process that reads `variables`."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), **variables}
    if "HF_HUB_OFFLINE" not in variables:
        environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-c", ASK, name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return (done.stdout or done.stderr).strip().splitlines()[-1]


def test_small_models_shapes_need_no_download() -> None:
    with shapes_of(SMALL_MODEL) as folder:
        assert json.loads((Path(folder) / "config.json").read_text())["num_hidden_layers"] == 30
    assert not Path(folder).exists()


def test_folders_and_object_stores_are_left_to_vllm(tmp_path: Path) -> None:
    for name in (str(tmp_path), "s3://bucket/model"):
        assert find_model(name) == FoundModel(name)


@pytest.mark.parametrize("path", ["{}/nothing", "./nothing", "../nothing", "~/nothing"])
def test_path_of_nothing_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(SettingError, match="there is no model at"):
        find_model(path.format(tmp_path))


def test_hub_is_asked_about_repositories(tmp_path: Path) -> None:
    with hub() as endpoint:
        assert asked(KNOWN, tmp_path, endpoint) == KNOWN
        said = asked("org/unknown", tmp_path, endpoint)
        assert "there is no model 'org/unknown' here" in said
        assert f"{endpoint} shows no such repository" in said
        assert "did you mean 'smollm2'?" in asked("smolm2", tmp_path, endpoint)
    assert "it can't be the name of a repository" in asked("models/of/mine", tmp_path, NOWHERE)


def test_name_is_refused_in_a_sentence_where_there_is_no_network(tmp_path: Path) -> None:
    began = time.monotonic()
    said = asked("gpt-nothing", tmp_path, NOWHERE)
    assert time.monotonic() - began < 30
    assert said.startswith("raykv.base.errors.SettingError: there is no model 'gpt-nothing' here")
    assert f"{NOWHERE} can't be reached" in said
    offline = asked("gpt-nothing", tmp_path, NOWHERE, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in offline


def test_repository_in_the_cache_needs_no_network(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--cached" / "snapshots" / "1f0e"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert asked("org/cached", tmp_path, NOWHERE) == "org/cached"
