"""The direction of imports that docs/architecture.md draws."""

import ast
import re
from pathlib import Path

import pyro_l0

ROOT = Path(pyro_l0.__file__).parent
COMMON = {"expect"}  # which imports nothing
MAY_IMPORT = {
    "fast": set(),
    "maths": {"fast"},
    "distributions": {"maths"},
    "infer": {"maths", "fast", "distributions"},
    "nn": {"fast", "distributions", "infer"},
    "compaction": {"nn"},
    "bayes": {"distributions", "nn", "compaction"},
    "diagnostics": {"maths", "fast", "distributions", "infer", "nn"},
    "plots": {"distributions"},
    "training": {"compaction"},
    "pruning": {"infer", "nn", "compaction", "diagnostics", "callbacks", "training"},
    "selection": {"maths", "fast", "distributions", "infer", "nn", "diagnostics"},
    "callbacks": {"infer", "nn", "compaction", "training"},
}
# Folders of infer, and which of its other folders they may import.
INFER_MAY_IMPORT = {"elbo": {"guides"}, "guides": set(), "control": {"guides"}, "posterior": {"elbo", "guides"}}
# Extras, and what takes seconds to import, which are imported where they are used; and the one call against the
# direction: nn tries the gates that it suggests.
OPTIONAL = {
    "pyro_l0.compaction.compact.first_refusal",
    "arviz",
    "pandas",
    "matplotlib.pyplot",
    "safetensors.safe_open",
    "safetensors.torch",
    "safetensors.torch.save",
    "tqdm.tqdm",
}


def imports(path):
    """Absolute names imported by a file, and those that are imported inside a function."""
    tree = ast.parse(path.read_text())
    outside = {*tree.body, *(node for block in tree.body if isinstance(block, ast.If) for node in block.body)}
    top, nested = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
        else:
            continue
        (top if node in outside else nested).update(names)
    return top, nested


def test_imports_run_one_way():
    """Each part imports itself and what stands before it; only extras are imported inside a function."""
    for path in sorted(ROOT.rglob("*.py")):
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        top, nested = imports(path)
        assert nested <= OPTIONAL, path
        own = {name.split(".")[1] for name in top if name.startswith("pyro_l0.")} - COMMON
        assert part in {"__init__", *COMMON} or own <= MAY_IMPORT[part] | {part}, path


def test_folders_of_infer_run_one_way():
    for path in (ROOT / "infer").glob("*/*.py"):
        part = path.parent.name
        top, _ = imports(path)
        own = {name.split(".")[2] for name in top if name.startswith("pyro_l0.infer.")}
        assert own & {*INFER_MAY_IMPORT} <= INFER_MAY_IMPORT[part] | {part}, path


def test_numerics_know_no_pyro():
    for path in (ROOT / "maths").rglob("*.py"):
        top, _ = imports(path)
        assert not any(name.startswith("pyro.") for name in top), path
        own = [name for name in top if name.startswith("pyro_l0")]
        assert all(name.startswith(("pyro_l0.maths", "pyro_l0.fast.switch")) for name in own), path


def test_tests_import_arviz_through_the_library():
    """A bare import stops the collection by the warning that arviz gives at its first import of a day."""
    for path in Path(__file__).parent.rglob("*.py"):
        top, _ = imports(path)
        assert not any(name.split(".")[0] == "arviz" for name in top), path


def test_the_map_names_files_that_exist():
    """Every file and folder in docs/architecture.md is there, inside the package or beside it."""
    page = Path(__file__).parents[1] / "docs" / "architecture.md"
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", page.read_text()))
    assert len(named) > 60
    missing = [name for name in sorted(named) if not ((ROOT / name).exists() or (ROOT.parent / name).exists())]
    assert not missing


def test_folders_stay_few():
    """A folder of the package has at most 12 files."""
    for folder in {path.parent for path in ROOT.rglob("*.py")}:
        assert len(list(folder.glob("*.py"))) <= 12, folder


def test_a_family_of_responses_is_named_in_one_place():
    """No module outside of its folder asks which one there is."""
    for path in (ROOT / "selection").rglob("*.py"):
        lines = path.read_text().splitlines() if path.parent.name != "families" else []
        asking = [line for line in lines if re.search(r"family (==|!=|in|is) (?!sampled)|isinstance\(.*family", line)]
        assert not asking, path


NAMES_OPERATIONS = {"compaction/layers.py": 2}  # its modules' index_select and index_copy, whose rules it replaces


def test_an_operation_is_named_by_its_rule_alone():
    """Strings that name operations of torch; all else that is known of one stands in its entry."""
    for path in sorted(ROOT.rglob("*.py")):
        texts = [x.value for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Constant)]
        names = [x for x in texts if isinstance(x, str) and re.fullmatch(r"aten::\w+", x)]
        if path.parent != ROOT / "nn" / "engine" / "rules":
            assert len(names) == NAMES_OPERATIONS.get(str(path.relative_to(ROOT)), 0), (path, names)
