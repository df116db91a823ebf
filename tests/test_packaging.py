"""What is installed: the declared dependencies are the imported ones, and a watched run needs two of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nanscope"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

WATCHING = {"nanscope", "torch", "safetensors"}
OF_TORCH = {"torchgen", "functorch", "typing_extensions", "filelock", "fsspec", "sympy", "mpmath", "networkx", "triton", "nvidia", "cuda"}

HOOK = """
import sys
names = {names!r}

class Blind:  # a finder that does not see some packages, as if they were not installed
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        return None if {rule} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Blind(finder) if hasattr(finder, "find_spec") else finder for finder in sys.meta_path]
"""
ONLY = "package not in names and package not in sys.stdlib_module_names and not package.startswith('_')"
WITHOUT = "package in names"

BAD_RUN = """
import torch, nanscope
with nanscope.watch(out="run") as scope:
    log_probs = torch.zeros(1024, 1025, requires_grad=True)  # large enough to be put away in a file while it is searched
    old_log_probs = torch.zeros(1024, 1025)
    mask = torch.ones(1024, 1025)
    old_log_probs[0, 1], mask[0, 1] = -200.0, 0.0
    ratio = torch.exp(log_probs - old_log_probs)
    loss = -(ratio * mask).sum() / mask.sum()
    loss.backward()
print(scope.verdict.sentence)
print(nanscope.load(scope.paths[0]).file_name)
"""

SMALL_BAD_RUN = """
import torch
x = torch.tensor([0.0, 1.0], requires_grad=True)
torch.log(x).sum().backward()
"""


def python(code: str, rule: str, names: set[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter where some packages cannot be imported."""
    code = HOOK.format(names=names, rule=rule) + code
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300, cwd=cwd)


def nanscope(*args: str, without: set[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    code = f"sys.argv = ['nanscope', *{args!r}]\nfrom nanscope.__main__ import main\nmain()\n"
    return python(code, WITHOUT, without, cwd)


def third_party(source: str) -> set[str]:
    """The packages of others that a source imports, for the type checker, too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"nanscope"}


def test_the_declared_dependencies_are_the_imported_ones() -> None:
    """Nothing is used that only happens to be installed, and nothing is installed that is not used."""
    declared = {re.split(r"[^\w-]", line)[0] for line in PROJECT["dependencies"]}
    inside = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "integrations"]
    assert declared == set().union(*(third_party(path.read_text(encoding="utf-8")) for path in inside))


def test_what_the_doors_lead_into_is_tried() -> None:
    """Each of them imports only what the test extra or tests/native/doors.txt installs, beside what nanscope needs itself."""
    doors = [*(ROOT / "tests" / "native" / "doors.txt").read_text(encoding="utf-8").splitlines()]
    installed = {re.split(r"[^\w-]", line)[0] for line in (*doors, *PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"])}
    installed |= {"mlflow", "opentelemetry"}  # whose distributions are called mlflow-skinny and opentelemetry-sdk
    for path in (PACKAGE / "integrations").glob("*.py"):
        assert third_party(path.read_text(encoding="utf-8")) <= installed, path.name


def test_the_types_are_published() -> None:
    """A type checker reads the annotations of an installed nanscope."""
    assert (PACKAGE / "py.typed").is_file() and "Typing :: Typed" in PROJECT["classifiers"]


def test_a_watched_run_needs_torch_and_safetensors_only(tmp_path: Path) -> None:
    """Found, explained, saved and read again, large tensors too, with no other package in reach and without a word about it."""
    done = python(BAD_RUN, ONLY, WATCHING | OF_TORCH, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "overflowed to +inf at [0, 1]" in done.stdout and "step-000001.rank0.safetensors" in done.stdout
    (line,) = done.stderr.splitlines()  # what was found, and no other word
    assert line.startswith("nanscope [bad-step]: step 1: exp overflowed to +inf at row 0, token 1 ([0, 1] of [")


def test_a_watched_script_keeps_its_verdict_where_nothing_can_be_drawn(tmp_path: Path) -> None:
    """`nanscope run` shows the verdict, with its status, and then says which file is missing and why."""
    (tmp_path / "train.py").write_text(SMALL_BAD_RUN)
    done = nanscope("run", "train.py", without={"jinja2", "markupsafe", "matplotlib", "numpy", "pandas"}, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert done.stderr.endswith(
        "nanscope: report.html needs jinja2, which is not installed: pip install jinja2\n"
        "nanscope: report.png needs matplotlib, which is not installed: pip install matplotlib\n"
    )
    assert "torch.log" in done.stderr


@pytest.mark.parametrize(
    ("args", "without", "line"),
    [
        (("--help",), {"typer"}, "nanscope: the command line needs typer and rich: pip install typer rich"),
        (("run", "train.py"), {"rich"}, "nanscope: the command line needs typer and rich: pip install typer rich"),
        (("variants",), {"torch"}, "nanscope: this needs torch, which is not installed: pip install torch"),
        (("atlas", "trl.rloo", "-o", "a.html"), {"jinja2"}, "nanscope: this needs jinja2, which is not installed: pip install jinja2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, (tuple, set)) else "",
)
def test_a_missing_package_is_one_line_and_1(args: tuple[str, ...], without: set[str], line: str, tmp_path: Path) -> None:
    """The command line says what to install, without a traceback."""
    done = nanscope(*args, without=without, cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines(), done.stdout) == (1, [line], "")
