"""The floors of the house: who may import whom, and what a training process must not pay for."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "nanscope"

FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "roles", "causes", "text", "plain", "exact", "shown", "version", "demo"),
    ("torch_inside", "given"),
    ("program", "objective"),
    ("snapshot", "frameworks"),
    ("locate", "native"),
    ("capture", "replay", "atlas"),
    ("verdict", "audit", "compare"),
    ("foresight", "reproduce"),
    ("watching", "report"),
    ("integrations",),
    ("bench",),
    ("commands",),
    ("__init__", "__main__"),
)  # lowest first; a folder imports from lower floors only
FLOOR = {name: number for number, names in enumerate(FLOORS, start=1) for name in names}


def module_of(path: Path) -> str:
    """`nanscope/capture/tape.py` is the module `nanscope.capture.tape`."""
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def room(module: str) -> str:
    """`nanscope.capture.tape` is in the room `capture`, `nanscope.errors` in `errors`."""
    return [*module.split("."), "__init__"][1]


def imports(source: str) -> set[str]:
    """Return the modules of nanscope that a source imports anywhere in it, for the type checker, too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            found |= {name if (name := f"{node.module}.{alias.name}") in FILES else str(node.module) for alias in node.names}
    return found & set(FILES)


ARROWS = {module: imports(path.read_text(encoding="utf-8")) - {module} for module, path in FILES.items()}


@pytest.mark.parametrize("module", ARROWS)
def test_a_file_imports_from_lower_floors_only(module: str) -> None:
    """A file may use what stands below its folder, and its own folder; what stands beside or above does not exist for it."""
    up = {other for other in ARROWS[module] if room(other) != room(module) and FLOOR[room(other)] >= FLOOR[room(module)]}
    assert up == set()


def test_files_are_layered_inside_a_folder_too() -> None:
    """There is no circle, not even one that only the type checker sees."""
    try:
        TopologicalSorter(ARROWS).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_two_classes_never_share_a_name() -> None:
    """One word for one thing: a reader who looks a class up finds one. The demo is a trainer, and not part of the house."""
    trees = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in FILES.items() if module != "nanscope.demo"}
    found = [(node.name, module) for module, tree in trees.items() for node in tree.body if isinstance(node, ast.ClassDef)]
    names = [name for name, _ in found]
    assert {(name, module) for name, module in found if names.count(name) > 1} == set()


def test_what_is_private_to_a_file_stays_there() -> None:
    """No file imports a name with an underscore from another one."""
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in FILES:
                assert not [alias.name for alias in node.names if alias.name.startswith("_") and alias.name != "__version__"], module


def test_every_room_of_the_table_is_built() -> None:
    """A row of the table that names no file guards nothing."""
    assert {room(module) for module in FILES} == set(FLOOR)


def test_the_reader_of_imports_sees_them_all() -> None:
    """An import is found wherever it hides."""
    source = (
        "from typing import TYPE_CHECKING\nimport torch\nfrom nanscope import errors\n"
        "if TYPE_CHECKING:\n    from nanscope.watching.scope import Scope\nelse:\n    import nanscope.__main__\n"
        "def f():\n    from nanscope.capture import tape\n    class A:\n        import nanscope.report.terminal as t\n"
    )
    found = {"nanscope.errors", "nanscope.watching.scope", "nanscope.__main__", "nanscope.capture.tape", "nanscope.report.terminal"}
    assert imports(source) == found


def loaded_by(code: str) -> set[str]:
    """Run code in a fresh interpreter and return the top-level packages that it loaded."""
    shown = code + "\nimport sys\nprint(' '.join(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "nanscope",
        "nanscope.__main__",
        "nanscope.commands.application",
        "nanscope.snapshot.header",
        "nanscope.snapshot.history",
        "nanscope.snapshot.files",
        "nanscope.program.ops",
        "nanscope.plain",
        "nanscope.text",
        "nanscope.roles",
        "nanscope.causes",
        "nanscope.errors",
    ],
)
def test_help_and_inspect_do_not_load_torch(module: str) -> None:
    """`nanscope --help` and `nanscope inspect` answer at once: the files they need do not import torch."""
    loaded = loaded_by(f"import {module}")
    assert "nanscope" in loaded
    assert not loaded & {"torch", "numpy", "safetensors", "pandas", "matplotlib", "transformers"}


def test_a_training_process_loads_no_renderer() -> None:
    """Watching a run costs torch and safetensors; what draws, measures or parses a command line is loaded where it is used."""
    code = "import nanscope, nanscope.watching.scope, sys\nassert nanscope.watch is nanscope.watching.scope.watch\n"
    loaded = loaded_by(f"{code}assert not [name for name in sys.modules if name.startswith('nanscope.bench')]")
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
