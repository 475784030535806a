"""Names of models: what they stand for, and how soon a wrong one is refused."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from raykv.base.errors import SettingError
from raykv.serve.models import SMALL_MODEL, FoundModel, find_model, shapes_of

pytest.importorskip("huggingface_hub")
from huggingface_hub import constants

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


Ask = Callable[[str, str], str]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ask:
    """The path of a model, or the error, with the hub at an address and an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def ask(name: str, endpoint: str) -> str:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        try:
            return find_model(name).path
        except SettingError as error:
            return str(error)

    return ask


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


def test_hub_is_asked_about_repositories(asked: Ask) -> None:
    with hub() as endpoint:
        assert asked(KNOWN, endpoint) == KNOWN
        said = asked("org/unknown", endpoint)
        assert "there is no model 'org/unknown' here" in said
        assert f"{endpoint} shows no such repository" in said
        assert "did you mean 'smollm2'?" in asked("smolm2", endpoint)
    assert "it can't be the name of a repository" in asked("models/of/mine", NOWHERE)


def test_name_is_refused_in_a_sentence_where_there_is_no_network(
    asked: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    said = asked("gpt-nothing", NOWHERE)
    assert time.monotonic() - began < 30
    assert said.startswith("there is no model 'gpt-nothing' here")
    assert f"{NOWHERE} can't be reached" in said
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in asked("gpt-nothing", NOWHERE)


def test_repository_in_the_cache_needs_no_network(asked: Ask, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--cached" / "snapshots" / "1f0e"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert asked("org/cached", NOWHERE) == "org/cached"
