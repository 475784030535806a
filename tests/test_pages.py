"""The pages say what is so: settings, commands, metrics, files and links are those that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from deploy import settings
from raykv.base.settings import ENV_PREFIX, INSTEAD
from raykv.cli import parser
from raykv.metrics.table import METRICS
from raykv.vllm.params import HINTS, PARAMS, TENANT
from tests.house import HOUSE, ROOT, SOURCES

MAX_README_LINES, MAX_README_CHARACTERS = 110, 9_000
MAX_ROW = 200
"""Characters of a table's row."""

FOLDERS = ("deploy", "notebooks", "raykv", "tests")

PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for each in FOLDERS for page in (ROOT / each).rglob("*.md"))]
)

NOT_IN_AN_INDEX = ("pip install raykv", "pip install 'raykv[", 'pip install "raykv[')
"""What a reader can't do: no index has RayKV."""

YAML = sorted(path for end in ("yaml", "yml") for path in (ROOT / "deploy").rglob(f"*.{end}"))

OPERATING = sorted((ROOT / "deploy" / "operating").glob("*.md"))

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@dataclass(frozen=True)
class Link:
    """A link to a file here; `anchor` may be empty."""

    target: Path
    anchor: str


def links(page: Path, text: str) -> Iterator[Link]:
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield Link((page.parent / path).resolve() if path else page, anchor)


def anchors(text: str) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") for each in headings}


def long_rows(text: str) -> list[str]:
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if len(row) > MAX_ROW]


def settings_gone(text: str) -> list[str]:
    """Those that a text names, also as variables."""
    return [n for n in INSTEAD if re.search(rf"\b({ENV_PREFIX}{n.upper()}|{n})\b", text)]


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= MAX_README_LINES
    assert len(text) <= MAX_README_CHARACTERS


@every_page
def test_tables_have_rows_that_one_can_read(page: Path) -> None:
    assert not long_rows(page.read_text())


def test_long_row_is_found() -> None:
    assert long_rows(f"| {'a' * MAX_ROW} |\nshort") == [f"| {'a' * MAX_ROW} |"]


@every_page
def test_page_tells_to_install_what_exists(page: Path) -> None:
    text = page.read_text()
    assert not [each for each in NOT_IN_AN_INDEX if each in text]


def test_other_files_tell_to_install_what_exists() -> None:
    files = [path for each in ("deploy", "notebooks") for path in (ROOT / each).rglob("*.*")]
    files += SOURCES
    texts = {str(path): path.read_text() for path in files if path.is_file()}
    assert not [path for path, text in texts.items() for each in NOT_IN_AN_INDEX if each in text]
    assert not [path for path, text in texts.items() if re.search(r"raykv\[[a-z,]+\]", text)]


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page, page.read_text()):
        assert link.target.exists(), link
        if link.anchor:
            assert link.anchor in anchors(link.target.read_text()), link


def test_links_and_anchors_are_found() -> None:
    text = "# What it does\n[a](b/c.md#d-e) [f](https://g) [h](#i)"
    page = ROOT / "page.md"
    assert list(links(page, text)) == [Link(ROOT / "b" / "c.md", "d-e"), Link(page, "i")]
    assert anchors(text) == {"what-it-does"}


@every_page
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = set(re.findall(r"`((?:deploy|notebooks|raykv|tests)/[\w./-]*\w/?)`", page.read_text()))
    assert not {name for name in named if not (ROOT / name).exists()}


@pytest.mark.parametrize("name", ["Makefile", "pyproject.toml"])
def test_files_and_names_of_the_build_are_there(name: str) -> None:
    text = (ROOT / name).read_text()
    files = re.findall(r"\b(?:raykv|tests)/[\w/]*\w\.py\b", text)
    assert not [each for each in files if not (ROOT / each).exists()]
    for module, attribute in re.findall(r'^ +"(raykv[\w.]*)\.(\w+)",$', text, flags=re.MULTILINE):
        assert hasattr(import_module(module), attribute), attribute


@every_page
def test_commands_that_a_page_names_exist(page: Path) -> None:
    known = parser().commands
    text = page.read_text()
    named = re.findall(r"`raykv\s+([a-z-]+)(?:\s+([a-z-]+))?", text)
    named += re.findall(r"^\$ (?:.*-- )?raykv ([a-z-]+)(?: ([a-z-]+))?", text, flags=re.MULTILINE)
    for name, inner in named:
        assert name in known
        if inner and (group := getattr(known[name], "commands", None)):
            assert inner in group, name
            assert not group[inner].hidden, name


@pytest.mark.parametrize("path", [*PAGES, *YAML], ids=lambda path: str(path.relative_to(ROOT)))
def test_page_names_no_setting_that_is_gone(path: Path) -> None:
    """The page of changes may."""
    text = "" if path.name == "CHANGELOG.md" else path.read_text()
    assert settings_gone(text) == []


def test_setting_that_is_gone_is_found() -> None:
    text = "RAYKV_FETCH_DEADLINE_S=1 `lookup_deadline_s` {attach_deadline_s: 2} not_events_topic"
    assert settings_gone(text) == ["fetch_deadline_s", "lookup_deadline_s", "attach_deadline_s"]


def test_design_page_has_every_package_on_its_floor() -> None:
    text = (ROOT / "raykv" / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, flags=re.MULTILINE)
    assert {package: int(floor) for floor, package in rows} == {
        package: room.floor for package, room in HOUSE.items()
    }


def test_design_page_points_to_functions_that_exist() -> None:
    text = (ROOT / "raykv" / "README.md").read_text()
    rows = re.findall(r"^\| .* \| `(raykv/[\w/]+\.py)` \| (`.*`) \|$", text, flags=re.MULTILINE)
    assert len(rows) > 8
    for path, named in rows:
        source = (ROOT / path).read_text()
        for name in re.findall(r"`(\w+)`", named):
            assert f"def {name}(" in source, (path, name)


def test_readme_names_commands() -> None:
    assert "`raykv " in (ROOT / "README.md").read_text()


def test_page_of_settings_is_what_the_script_makes() -> None:
    assert settings.TARGET.read_text() == settings.page(), "run: python deploy/settings.py"


def test_setting_without_a_topic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = {name: names.replace("pool_path", "") for name, names in settings.TOPICS.items()}
    monkeypatch.setattr(settings, "TOPICS", topics)
    with pytest.raises(ValueError, match="pool_path"):
        settings.page()


def test_pages_of_operators_name_only_metrics_that_exist() -> None:
    text = "\n".join(page.read_text() for page in OPERATING)
    named = set(re.findall(r"raykv_[a-z_]+", " ".join(re.findall(r"`([^`]*)`", text))))
    assert len(named) > 10
    others = {"raykv_metrics_sd", "raykv_sources", TENANT, *PARAMS, *HINTS}
    assert named - others <= set(METRICS)
