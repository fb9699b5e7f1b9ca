"""The script that runs the programs of README.md and of the docs, and how long the pages are in all."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import run_code

PAGE = """# A page

```{code-cell} ipython3
:tags: [remove-input]
x = 3
```

```python
assert x == 3
```

<!-- not run: it never ends -->
```python
while True: pass
```

- In a list:

  ```python
  if x:
      raise ValueError("too large")
  ```

<!-- after: other.md -->
```python
assert y == 4 and "x" not in globals()
```

```text
assert False
```
"""


def write(folder: Path) -> Path:
    (folder / "other.md").write_text("```{code-cell} ipython3\ny = 4\n```\n\n```{code-cell} ipython3\ny = 5\n```\n")
    page = folder / "page.md"
    page.write_text(PAGE)
    return page


def test_programs_of_a_page(tmp_path):
    found = list(run_code.programs(write(tmp_path)))
    assert [program.left_out for program in found] == [None, "it never ends", None, None]
    lines = PAGE.splitlines()
    assert all(lines[program.line - 1].strip() == "```python" for program in found)
    assert found[0].code.split() == ["x", "=", "3", "assert", "x", "==", "3"]
    assert "\nif x:\n    raise" in found[2].code


def test_failures_are_named_and_counted(tmp_path, capsys):
    page = write(tmp_path)
    lines = [program.line for program in run_code.programs(page)]
    assert run_code.main([str(page)]) == 1
    printed = capsys.readouterr().out
    assert f"{page}, line {lines[2]}: failed" in printed
    assert "ValueError: too large" in printed
    assert f"line {lines[1]}: not run, it never ends" in printed
    assert printed.count(": ok") == 2


def test_cells_of_a_named_page_run(tmp_path, capsys):
    write(tmp_path)
    cells = tmp_path / "other.md"
    assert list(run_code.programs(cells)) == []
    assert [program.code for program in run_code.programs(cells, with_cells=True)] == ["y = 4\ny = 5\n"]
    assert run_code.main([str(cells)]) == 0
    cells.write_text(cells.read_text().replace("y = 5", "y[5]"))
    assert run_code.main([str(cells)]) == 1
    assert "not subscriptable" in capsys.readouterr().out


def test_every_page_can_be_read():
    pages = run_code.pages()
    assert len([program for page in pages for program in run_code.programs(page)]) > 10
    assert not any("lab" in page.relative_to(run_code.ROOT).parts for page in pages)


def test_programs_that_need_an_optional_library_are_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(run_code.OPTIONAL, "no_such_library", "no_such_library")
    page = tmp_path / "page.md"
    page.write_text("```python\nimport no_such_library\n```\n\n```python\nassert True\n```\n")
    assert run_code.main([str(page)]) == 0
    printed = capsys.readouterr().out
    assert "line 1: not run, it needs no_such_library" in printed
    assert printed.count(": ok") == 1


def test_a_library_that_is_installed_and_can_not_be_imported_is_missing(tmp_path, monkeypatch, capsys):
    """One that was built for another torch; what it leaves behind does not hide Sphinx's mock."""
    for name in ("breaks", "breaks_later"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part.py").write_text("")
    (tmp_path / "breaks" / "__init__.py").write_text("import breaks.part\nraise RuntimeError('no operator')")
    late = "def __getattr__(name):\n    raise RuntimeError(f'no {name}')"
    (tmp_path / "breaks_later" / "__init__.py").write_text(late)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(run_code.LATE, "breaks_later", "Trainer")
    assert not run_code.can_import("breaks")
    assert not run_code.can_import("breaks_later")
    assert "breaks is installed, but can't be imported" in capsys.readouterr().err
    assert not [name for name in sys.modules if name.startswith("breaks")]


LIMIT = 150_000  # characters of Markdown


def test_the_site_is_short():
    pages = [page for page in run_code.pages() if page.name != "architecture.md"]  # a file beside the site
    sizes = {str(page): len(page.read_text(encoding="utf-8")) for page in pages}
    assert len(sizes) > 50
    assert sum(sizes.values()) <= LIMIT, f"longest: {sorted(sizes, key=sizes.__getitem__)[-8:]}"
