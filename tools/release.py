"""Build what a release uploads, with absolute links, and check it: python tools/release.py --out dist [--programs]

The address of the repository is ``[tool.release] repository`` of pyproject.toml. In a copy of the tree it goes into
README.md, whose links and pictures an index of packages could not resolve otherwise, into the package's links and into
the citation. Then: both distributions, ``twine check --strict``, README as the wheel carries it, and with --programs
its programs, run with that wheel. --trial ADDRESS takes another address, to try it. It needs build and twine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://|#)([^)\s]+)\)")
LEFT_OUT = ("docs/lab/", "tests/bench/")  # of the source distribution


def absolute(text: str, address: str, version: str) -> str:
    """A page with links to the files of a version, and pictures as files of their own."""

    def link(found: re.Match[str]) -> str:
        picture, name, path = found.groups()
        return f"{picture}{name}({address}/{'raw' if picture else 'blob'}/v{version}/{path})"

    return LINK.sub(link, text)


def with_urls(project: str, address: str) -> str:
    """The settings of the package with its links."""
    urls = {"Repository": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}
    lines = "".join(f'{name} = "{address}{path}"\n' for name, path in urls.items())
    return project.replace("[project.urls]\n", f"[project.urls]\n{lines}", 1)


def with_repository(citation: str, address: str) -> str:
    """The citation with the address of the code."""
    return citation.replace("license: ", f'repository-code: "{address}"\nlicense: ', 1)


def copy_tree(folder: Path, address: str) -> str:
    """The tracked files with the address in its places; the version."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    version = re.search(r'^__version__ = "(.*)"$', (ROOT / "pyro_l0" / "__init__.py").read_text(), re.MULTILINE)
    assert version is not None
    for name, change in (
        ("README.md", lambda text: absolute(text, address, version[1])),
        ("pyproject.toml", lambda text: with_urls(text, address)),
        ("CITATION.cff", lambda text: with_repository(text, address)),
    ):
        path = folder / name
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    return version[1]


def check(folder: Path, address: str) -> None:
    """Both distributions hold what they should, and the wheel's description has no relative link."""
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        message = message_from_string(archive.read(metadata).decode())
    description = str(message.get_payload())
    relative = [found[0] for found in LINK.finditer(description)]
    if relative or address not in description:
        raise SystemExit(f"Expected README with absolute links, but the wheel's has {relative}.")
    foreign = [name for name in names if not name.startswith(("pyro_l0/", "pyro_l0-"))]
    with tarfile.open(source) as archive:
        inside = [name.split("/", 1)[1] for name in archive.getnames() if "/" in name]
    foreign += [name for name in inside if name.startswith(LEFT_OUT)]
    if foreign:
        raise SystemExit(f"Expected neither laboratory nor benches, and in the wheel the package alone: {foreign[:5]}.")
    print(f"{len(names)} files in the wheel, {len(inside)} in the source; links: {message.get_all('Project-URL')}")
    for path in (wheel, source):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{path.name}: {path.stat().st_size:,} bytes, SHA-256 {digest}")


def main() -> None:
    """Build, check, and put the files where they are wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for both files, new or empty")
    parser.add_argument("--trial", default="", help="another address, which pyproject.toml does not have")
    parser.add_argument("--programs", action="store_true", help="run README's programs with the wheel")
    options = parser.parse_args()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["release"]
    address = (options.trial or settings["repository"]).rstrip("/")
    if not address.startswith("https://"):
        parser.error("set `repository` under [tool.release] of pyproject.toml to the address of the repository first")
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"expected a folder that is new or empty, but {options.out} has files")
    out = options.out.resolve()
    with tempfile.TemporaryDirectory() as tree:
        copy_tree(Path(tree), address)
        subprocess.run([sys.executable, "-m", "build", "--outdir", out, tree], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *sorted(out.iterdir())], check=True)
    check(out, address)
    if options.programs:
        (wheel,) = out.glob("*.whl")
        tests = [sys.executable, "-m", "pytest", "-m", "slow", "-n", "0", "tests/test_readme.py"]
        subprocess.run(tests, cwd=ROOT, env={**os.environ, "PYRO_L0_WHEEL": str(wheel)}, check=True)


if __name__ == "__main__":
    main()
