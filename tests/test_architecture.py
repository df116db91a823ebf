"""The floors of the house: who may import whom, and what a training process must not pay for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "nanscope"

FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "roles", "ops", "indices", "causes", "files", "shelf"),
    ("program", "ledger", "header", "advantages", "objective", "frameworks", "summary", "explanations"),
    ("elements", "snapshot", "names", "native"),
    ("fate", "rowwise", "atlas"),
    ("locate",),
    ("variants", "capture", "inputs"),
    ("replay", "case"),
    ("rules", "alternatives", "catalogue"),
    ("words",),
    ("diagnose", "audit", "sweep"),
    ("report",),
    ("hit",),
    ("scope", "demo"),
    ("launch", "cli", "__main__"),
)  # lowest first; a folder stands for all files in it
FLOOR = {name: number for number, names in enumerate(FLOORS, start=1) for name in names}
FOLDERS = ("capture", "report", "frameworks", "native", "audit")  # files of one folder may import each other
SAME_FLOOR = {
    ("cli", "launch"), ("__main__", "cli"),  # the entrance: `python -m nanscope` is the command line, which starts `run`
    ("frameworks", "objective"),  # the rows say what a framework's settings mean; the objective knows no framework
}  # fmt: skip
NEVER = {("capture", "replay"), ("capture", "diagnose"), ("replay", "capture")}  # the two wings meet in the file only


def room(path: Path) -> str:
    """`nanscope/capture/tape.py` is in the room `capture`, `nanscope/program.py` in `program`."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, int]]:
    """Return (dotted module of nanscope, line) of every import in a file, also inside functions, but not for the type checker."""
    found: list[tuple[str, int]] = []
    stack: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            stack.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(name if node.module == "nanscope" or is_file(name) else str(node.module), node.lineno) for name in names]
        stack.extend(ast.iter_child_nodes(node))
    return [(name, line) for name, line in found if name.split(".")[0] == "nanscope"]


def is_file(dotted: str) -> bool:
    path = ROOT.parent.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_from_lower_floors_only(path: Path) -> None:
    """A file may use what stands below it; what stands beside or above it does not exist for it."""
    own = room(path)
    assert own in FLOOR, f"{own} has no floor: put it into the table"
    for name, line in imports(path):
        parts = name.split(".")
        if len(parts) == 1 or not is_file(".".join(parts[:2])):
            continue  # `from nanscope import __version__`
        other = parts[1]
        where = f"{path.relative_to(ROOT.parent)}:{line} imports {name}"
        assert other in FLOOR, f"{where}, which has no floor"
        assert (own, other) not in NEVER, f"{where}: these two wings never import each other"
        if other == own and own in FOLDERS:
            continue
        assert FLOOR[other] < FLOOR[own] or (own, other) in SAME_FLOOR, f"{where}: floor {FLOOR[own]} must not look at floor {FLOOR[other]}"


def test_every_room_of_the_table_is_built() -> None:
    """A row of the table that names no file guards nothing."""
    rooms = {room(path) for path in FILES}
    assert rooms == set(FLOOR), f"built and without a floor: {rooms - set(FLOOR)}; a floor and not built: {set(FLOOR) - rooms}"


def test_the_reader_of_imports_sees_them_all(tmp_path: Path) -> None:
    """A forbidden import is found wherever it hides, and what only the type checker reads does not count."""
    file = tmp_path / "planted.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nimport torch\nfrom nanscope import diagnose\n"
        "if TYPE_CHECKING:\n    from nanscope.scope import Scope\nelse:\n    import nanscope.cli\n"
        "def f():\n    from nanscope.capture import tape\n    class A:\n        import nanscope.report.terminal as t\n"
    )
    assert sorted(imports(file)) == [
        ("nanscope.capture.tape", 9),
        ("nanscope.cli", 7),
        ("nanscope.diagnose", 3),
        ("nanscope.report.terminal", 11),
    ]


def loaded_by(code: str) -> set[str]:
    """Run code in a fresh interpreter and return the top-level packages that it loaded."""
    shown = code + "\nimport sys\nprint(' '.join(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["cli", "header", "ledger", "errors", "roles", "ops", "indices", "causes", "files", "__init__"])
def test_help_and_inspect_do_not_load_torch(module: str) -> None:
    """`nanscope --help` and `nanscope inspect` answer at once: the files they need do not import torch."""
    if not (ROOT / f"{module}.py").exists():
        pytest.skip(f"{module}.py is not there")
    name = "nanscope" if module == "__init__" else f"nanscope.{module}"
    loaded = loaded_by(f"import {name}")
    assert "nanscope" in loaded
    assert not loaded & {"torch", "numpy", "safetensors", "pandas", "matplotlib", "transformers"}


def test_a_training_process_loads_no_renderer() -> None:
    """Watching a run costs torch and safetensors; everything that draws or parses a command line is loaded where it is used."""
    loaded = loaded_by("import nanscope, nanscope.scope\nassert nanscope.watch is nanscope.scope.watch")
    assert "torch" in loaded
    assert not loaded & {"typer", "rich", "pandas", "matplotlib", "transformers", "trl"}


def test_watching_loads_no_framework() -> None:
    """Frameworks are named by string and never imported, not even by their own table."""
    for path in (ROOT / "frameworks").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {name.split(".")[0] for name in names} <= {"nanscope", *sys.stdlib_module_names}, path.name


def test_everything_in_all_can_be_looked_up() -> None:
    """The names that the package promises are there, and a wrong one is an AttributeError as everywhere."""
    import nanscope

    for name in nanscope.__all__:
        assert getattr(nanscope, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = nanscope.nothing
