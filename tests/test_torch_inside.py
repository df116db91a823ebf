"""What nanscope takes from inside torch: named in one file, there in the release that is installed, and told where it is not."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from nanscope import torch_inside
from nanscope.capture.mode import TapeMode
from nanscope.capture.tape import Tape
from nanscope.errors import NanscopeError
from nanscope.torch_inside import (
    COMPILED_CODE_SEES_MODES,
    DETACH_IS_SEEN_TWICE,
    LACKS,
    OLDEST,
    TorchDispatchMode,
    number_of,
    references,
    storage_uses,
)

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "nanscope").rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
INSIDE = ROOT / "nanscope" / "torch_inside.py"

OTHERS = {  # private names of others than torch
    "_getframe", "_lru_cache_wrapper", "_current_frames", "_run_exitfuncs", "_shutdown", "_threads_queues", "_worker", "_exit",  # Python
    "_cells",  # rich
    "_hp_mapping",  # DeepSpeed
    "_get_latest_active_run",  # MLflow
    "_names_to_collectors",  # prometheus_client
    "torch._safe_softmax",  # as the source of a fix says it
    "_compute_loss", "_entropy_bonus_enabled", "_metrics", "_get_per_token_logps_and_entropies",  # TRL
}  # fmt: skip
PRIVATE = re.compile(r"torch(\.\w+)*\._[a-zA-Z]\w*")  # as a name in a string


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def own_names() -> frozenset[str]:
    """The private names that nanscope gives to things of its own."""
    found = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
    return frozenset(name for name in found if is_private(name))


def private_names(tree: ast.AST) -> Iterator[str]:
    """The private names of others that a source asks for: as attributes, in imports, and in strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
            yield from (part for alias in node.names for part in (*str(node.module).split("."), alias.name) if is_private(part))
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split(".") if is_private(part))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and is_private(str(arg.value)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE.fullmatch(node.value):
            yield node.value


@pytest.mark.parametrize("path", [path for path in FILES if path != INSIDE], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_private_names_of_torch_stand_in_one_file(path: Path) -> None:
    """Whoever wants to know what a new release of torch may break reads one file."""
    assert set(private_names(TREES[path])) - own_names() - OTHERS == set()


@pytest.mark.parametrize(
    "source",
    [
        "torch._C._len_torch_dispatch_stack()",
        "from torch._C import _WeakTensorRef",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "import torch._dynamo.callback",
        "tensor._base",
        "getattr(node, '_forward_cls', None)",
        "'torch._dynamo' in sys.modules",
    ],
)
def test_the_reader_of_names_sees_them_all(source: str) -> None:
    """A private name is found wherever it hides."""
    assert set(private_names(ast.parse(source))) - own_names() - OTHERS


def test_this_release_of_torch_lacks_nothing() -> None:
    """What a new release has renamed is read off here: each name, and what comes of it until it is found again."""
    assert LACKS == []
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    assert torch_inside.loss_scale(scaler) is not None
    assert {*torch_inside.RUN_HOOKS, *torch_inside.OTHER_HOOKS, "_buffers"} <= set(vars(nn.Linear(1, 1)))
    hooked = nn.Linear(1, 1)
    hooked.register_full_backward_pre_hook(lambda module, grads: None)
    hooked.weight.register_hook(lambda grad: None)
    assert all(map(torch_inside.has_backward_hooks, (hooked, hooked.weight))) and not torch_inside.has_backward_hooks(hooked.bias)
    assert torch_inside.uncompiled(torch.compile(model := nn.Linear(1, 1))) is model
    assert torch_inside.COMPILED in vars(torch.compile(lambda x: x + 1))
    assert torch_inside.compiler_callbacks() is not None and LACKS == []


class Counted(TorchDispatchMode):
    """Counts the calls that it sees, and leaves compiled code alone."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_what_is_said_of_this_release_is_so() -> None:
    """Whether a mode is shown `detach` twice, and whether one on the stack has code compiled anew, is what torch does."""
    with Counted() as mode:
        torch.ones(2, requires_grad=True).detach()
    assert mode.calls == (3 if DETACH_IS_SEEN_TWICE else 2)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda x: x.exp() + 1, backend=counter)
    x = torch.ones(2)
    with Counted():
        compiled(x)
        compiled(x)
    assert counter.frame_count == (2 if COMPILED_CODE_SEES_MODES else 1)


def test_the_node_of_a_custom_function_has_a_number() -> None:
    """Before torch 2.13 it does not tell its own: it lies behind that of what it was given, and before what was made of it."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 2

    weight = torch.ones(1, requires_grad=True)
    first, given = Twice.apply(weight), weight.exp().sin()
    made = Twice.apply(Twice.apply(given))
    assert torch_inside.function_of(made.grad_fn) is Twice
    assert number_of(first.grad_fn) >= 0
    assert number_of(given.grad_fn) < number_of(made.grad_fn) < number_of(made.exp().grad_fn) < torch_inside.NEVER


def test_a_tape_sees_again_what_follows_compiled_code() -> None:
    """Where the tape steps aside for compiled code, it is back when that is over, and however it ends; in other threads it stays."""
    import contextlib

    def stops(x: Tensor) -> Tensor:
        raise ValueError

    tape = Tape()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.exp(), backend="eager")
    with contextlib.ExitStack() as undo:
        TapeMode(tape).install(undo)
        x = torch.ones(2)
        inner = compiled(x)
        with contextlib.suppress(ValueError):
            torch.compile(stops, backend="eager")(x)
        loss = (inner * 2).sum()
        value = tape.find(loss)
    assert value is not None
    assert [call.name for call in tape.program(value)[0].calls][-2:] == ["mul", "sum"]


# -- releases that are not installed ------------------------------------------------------------------------------------------


def test_the_oldest_release_is_the_one_that_is_declared() -> None:
    """pip keeps older ones away, and says the same as we do."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch>={OLDEST[0]}.{OLDEST[1]}" in project["dependencies"]


@pytest.mark.parametrize("version", ["2.9.0", "2.9.1+cu128", "2.10.0", "2.13.0a0+git1234567", "3.0.0"])
def test_a_release_that_is_new_enough_is_taken(version: str) -> None:
    """However its version is spelled."""
    torch_inside.refuse_too_old(version)


def test_what_is_needed_and_gone_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the release and the name; what can be spared is put on the list once, and its stand-in is taken."""
    with pytest.raises(NanscopeError, match=rf"torch {re.escape(torch.__version__)} has no torch\._C\._gone") as raised:
        torch_inside.needed("torch._C._gone")
    assert raised.value.slug == "torch-unknown"
    monkeypatch.setattr(torch_inside, "LACKS", [])
    assert [torch_inside.spared("torch._C._gone", 7, "nothing") for _ in range(2)] == [7, 7]
    assert torch_inside.LACKS == [("torch._C._gone", "nothing")]


def python(code: str, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code, *args], capture_output=True, text=True, timeout=300, cwd=cwd)


OLD = "import sys, torch\ntorch.__version__ = '2.8.0+cu128'\n"
BAD_RUN = """
import torch, nanscope
with nanscope.watch(out="run") as scope:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    loss = torch.log(x).sum()
    loss.backward()
print(scope.verdict.sentence)
"""
LACKING = """
import pkgutil
there = pkgutil.resolve_name
def resolve_name(name):
    if name in {names!r}:
        raise AttributeError(name)
    return there(name)
pkgutil.resolve_name = resolve_name
"""


def test_an_older_torch_is_refused_in_one_line(tmp_path: Path) -> None:
    """`nanscope run` says which torch there is and which is needed, before the script runs; `nanscope.watch` raises the same."""
    (tmp_path / "train.py").write_text("print('ran')")
    main = OLD + "from nanscope.__main__ import main\nsys.argv[0] = 'nanscope'\nmain()"
    done = python(main, tmp_path, "run", "train.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "nanscope: nanscope needs torch 2.9 or newer, and this is torch 2.8.0+cu128: upgrade torch\n"
    raised = python(
        OLD + "import nanscope\ntry:\n    nanscope.watch()\nexcept nanscope.NanscopeError as error:\n    print(error.slug)", tmp_path
    )
    assert raised.stdout == "torch-too-old\n"


def test_a_run_goes_on_without_all_that_can_be_spared(tmp_path: Path) -> None:
    """Each stand-in does its work: the origin is found, and the log says what comes of what is lacking."""
    names = {text(node.args[0]) for node in ast.walk(TREES[INSIDE]) if isinstance(node, ast.Call) and ast.unparse(node.func) == "spared"}
    assert len(names) > 10
    done = python(LACKING.format(names=names) + BAD_RUN, tmp_path)
    assert "log gave −inf" in done.stdout, done
    said = [line for line in done.stderr.splitlines() if line.startswith("nanscope [")]
    assert {line.split("]")[0] for line in said} == {"nanscope [torch-lacks", "nanscope [bad-step"}
    assert all(any(name in line for line in said) for name in names)


def text(node: ast.expr) -> str:
    assert isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value


def test_holders_of_memory_are_counted_alike_in_every_release() -> None:
    """A tensor and who asks are two; a view is one more, and so is what `x.data` was given."""
    tensor, other = torch.ones(3), torch.zeros(3)
    assert storage_uses(tensor) == 2
    view = tensor.view(3)
    assert storage_uses(tensor) == 3 == storage_uses(view)
    other.data = tensor
    assert storage_uses(tensor) == 4


def test_what_a_graph_holds_of_a_tensor_is_one_reference() -> None:
    weight = torch.ones(3, requires_grad=True)
    tensor = weight * 1
    alone = references(tensor)
    squared = tensor * tensor
    assert references(tensor) == alone + 1 and squared.requires_grad
    del squared
    assert references(tensor) == alone
