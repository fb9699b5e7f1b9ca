"""What a release is made of: absolute links, one address, and the same versions wherever they stand."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

import pyro_l0

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import release

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ADDRESS = "https://code.example/pyro_l0"


def test_links_and_pictures_become_absolute():
    text = "[a](docs/a.md#b) ![c](docs/c.svg) [d](https://example.org/d) [e](#e)"
    assert release.absolute(text, ADDRESS, "1.0") == (
        f"[a]({ADDRESS}/blob/v1.0/docs/a.md#b) ![c]({ADDRESS}/raw/v1.0/docs/c.svg) [d](https://example.org/d) [e](#e)"
    )


def test_a_release_sets_the_address_everywhere(tmp_path):
    """And what it copies is what git tracks."""
    version = release.copy_tree(tmp_path, ADDRESS)
    assert version == pyro_l0.__version__
    readme = (tmp_path / "README.md").read_text()
    assert f"{ADDRESS}/blob/v{version}/docs/results.md" in readme
    assert all(found[3].startswith("#") for found in release.LINK.finditer(readme))
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Issues"] == f"{ADDRESS}/issues"
    assert f'repository-code: "{ADDRESS}"' in (tmp_path / "CITATION.cff").read_text()
    assert not (tmp_path / ".git").exists()


def test_without_an_address_there_is_no_release(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["release.py", "--out", str(tmp_path / "dist"), "--trial", "repository"])
    with pytest.raises(SystemExit):
        release.main()
    assert "set `repository` under [tool.release]" in capsys.readouterr().err
    assert not (tmp_path / "dist").exists()


def test_the_recipe_and_the_citation_have_the_versions_of_the_package():
    recipe = (ROOT / ".conda" / "recipe.yaml").read_text()
    wanted = {text.replace("torch>", "pytorch>") for text in PROJECT["project"]["dependencies"]}
    wanted |= {"python" + PROJECT["project"]["requires-python"]}
    run = recipe.split("  run:\n")[1].split("\n\n")[0]
    assert {line.strip(" -").replace(" ", "") for line in run.splitlines()} == wanted
    assert f'version: "{pyro_l0.__version__}"' in recipe
    assert f"version: {pyro_l0.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {pyro_l0.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_pages_at_the_root_name_files_that_exist():
    for name in ("llms.txt", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md"):
        text = (ROOT / name).read_text()
        paths = [found[3] for found in release.LINK.finditer(text)]
        paths += re.findall(r"`((?:tests|tools|docs|pyro_l0)/[\w./]+)`", text)
        assert [path for path in paths if not (ROOT / path).exists()] == [], name
