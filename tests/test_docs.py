"""What README and docs name exists: files, folders, commands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "kvledger"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FILE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|toml|json|svg|md|html))`|\]\(((?:[\w.-]+/)*[\w.-]+)\)")


def named_files(page):
    return {a or b for a, b in _FILE.findall(page.read_text(encoding="utf-8"))}


def exists(page, name):
    """Beside the page, in the checkout or anywhere in the package: pages on one folder name its files alone."""
    return any((folder / name).exists() for folder in (page.parent, ROOT)) or any(PACKAGE.rglob(name))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    assert [name for name in sorted(named_files(page)) if not exists(page, name)] == []


def test_the_tree_of_the_readme():
    """Every path of the annotated tree exists, and every folder and module of the package stands in it."""
    tree = re.search(r"```\n(src/kvledger/\n.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    paths = [re.match(r"((?: ?[\w./]+[/.]\w*)+)", line.strip())[1].split() for line in tree.splitlines()]
    inside = {path for line, paths in zip(tree.splitlines(), paths, strict=True) if line[0] == " " for path in paths}
    assert [p for p in inside if not (PACKAGE / p).exists()] == []
    folders = {f"{p.name}/" for p in PACKAGE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    modules = {p.name for p in PACKAGE.glob("*.py") if not p.name.startswith("__")}
    assert (folders | modules) - inside == set()


def test_commands_in_code_blocks_are_known():
    from click import Context
    from typer.main import get_command

    from kvledger.cli.main import app

    group = get_command(app)
    known = set(group.list_commands(Context(group)))
    blocks = "".join(b for p in PAGES for b in re.findall(r"```\n(.*?)```", p.read_text(encoding="utf-8"), re.DOTALL))
    assert set(re.findall(r"^(?:.*&& )?kvledger (\w+)", blocks, re.MULTILINE)) - known == set()


def test_the_paths_that_need_no_key_are_listed():
    from kvledger.server.auth import OPEN_PATHS

    row = next(line for line in (ROOT / "docs/serving.md").read_text().splitlines() if line.startswith("| `--api-key`"))
    listed = row[: row.index("stay open")].rpartition(". ")[2]
    assert set(re.findall(r"`(/\w*)`", listed)) == OPEN_PATHS
