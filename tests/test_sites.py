"""Who has made a call: the line of the trainer's, and not what stands between it and torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import nanscope
from nanscope.capture.depth import Depth
from nanscope.capture.mode import TapeMode
from nanscope.capture.tape import Tape
from nanscope.program.calls import Site, is_within
from nanscope.program.program import Program
from nanscope.verdict.incident import Incident


class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands each call on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """The same, one storey up."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def handed(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **(kwargs or {}))


class Asks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves it to a function."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return handed(func, args, kwargs)


class Named(Tensor):
    """A tensor of a class of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@contextmanager
def both() -> Iterator[None]:
    with Counts(), Functions(), Asks():
        yield


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "dispatch": Counts,
    "function": Functions,
    "by way of a function": Asks,
    "several": both,
    "torch's own": lambda: FlopCounterMode(display=False),
}


def incident_of(out: Path, mode: Callable[[], AbstractContextManager[Any]], model: nn.Module, line: Callable[[Tensor], Tensor]) -> Incident:
    with nanscope.watch(out=out) as scope, mode():
        line(model(torch.ones(2, 4))).mean().backward()
    return scope.verdict.incidents[0]


@pytest.mark.parametrize("name", MODES)
def test_a_mode_that_hands_calls_on_is_not_who_made_them(tmp_path: Path, name: str) -> None:
    """The line that it was made in is told."""
    incident = incident_of(tmp_path, MODES[name], nn.Linear(4, 1), lambda y: torch.log(y * 0))
    assert incident.origin.expression == "torch.log(y * 0)" and incident.origin.file == __file__


def test_a_tensor_of_a_class_of_its_own(tmp_path: Path) -> None:
    """Neither is it."""
    incident = incident_of(tmp_path, nullcontext, nn.Linear(4, 1), lambda y: torch.log(y.as_subclass(Named) * 0).as_subclass(Tensor))
    assert incident.origin.expression == "torch.log(y.as_subclass(Named) * 0)"


class Logs(nn.Module):
    """Goes wrong inside, by way of a function that takes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.layer(x) * 0)


@pytest.mark.parametrize("name", MODES)
def test_inside_a_model(tmp_path: Path, name: str) -> None:
    """The second look does not see those modes; nor does it take a function that hands on what it is given for one."""
    incident = incident_of(tmp_path, MODES[name], Logs(), lambda y: y)
    assert incident.origin.expression == "torch.log(self.layer(x) * 0)"


def test_a_function_that_hands_on_what_it_is_given_makes_calls_of_its_own(tmp_path: Path) -> None:
    """Where no mode has asked it."""
    incident = incident_of(tmp_path, nullcontext, nn.Linear(4, 1), lambda y: handed(torch.log, (y * 0,), None))
    assert incident.origin.expression == "func(*args, **kwargs or {})"


def twins(body: str, *files: str, name: str = "term") -> list[Callable[..., Any]]:
    """The same function, at the same line of each of several files: in Python their code is equal."""
    found = []
    for file in files:
        space: dict[str, Any] = {"torch": torch}
        exec(compile(f"def {name}(x):\n{body}", file, "exec"), space)
        found.append(space[name])
    assert len({function.__code__ for function in found}) == 1
    return found


def recorded(function: Callable[[Tensor], Tensor], tape: Tape) -> Program:
    with TapeMode(tape):
        loss = function(torch.ones(2, requires_grad=True))
    return tape.program(tape.value_of(loss))[0]


def test_equal_functions_of_two_files_are_two(tmp_path: Path) -> None:
    """A policy's loss and its copy, at the same line of another file: each call is told where it was made."""
    one, other = twins("    return torch.log(x)\n", *(str(tmp_path / name) for name in ("one.py", "other.py")))
    program = recorded(lambda x: (one(x) + other(x)).sum(), Tape())
    assert [Path(site.file).name for site in program.sites if site.function == "term"] == ["one.py", "other.py"]


def test_a_copy_of_a_function_of_torchs_is_the_trainers(tmp_path: Path) -> None:
    """Whoever has taken it over, with its line, answers for it; what torch itself calls is still the caller's."""
    theirs, copy = twins("    return torch.log(x)\n", functional.__file__, str(tmp_path / "copy.py"))
    program = recorded(lambda x: (theirs(x) + copy(x)).sum(), Tape())
    assert [Path(program.sites[call.site].file).name for call in program.calls if call.name == "log"] == [Path(__file__).name, "copy.py"]


def test_inside_a_model_equal_functions_of_two_files_are_two(tmp_path: Path) -> None:
    """Both have overflowed."""
    mode = TapeMode(Tape())
    mode.depth = Depth()
    with mode:
        for term in twins("    return torch.exp(x * 1e3)\n", *(str(tmp_path / name) for name in ("one.py", "other.py"))):
            term(torch.ones(2))
    overflows = mode.depth.take().ask().overflows
    assert [Path(code.co_filename).name for _, (code, _) in overflows if code is not None] == ["one.py", "other.py"]


def test_equal_functions_of_two_files_ask_about_a_value_each(tmp_path: Path) -> None:
    """Each has a loss of its own in doubt, and neither has gone on from the other's."""
    tape, again = Tape(), list[bool]()
    tape.doubts.again = lambda: again.append(True)
    with TapeMode(tape):
        for ask in twins("    return bool(torch.isnan(x))\n", *(str(tmp_path / name) for name in ("one.py", "other.py"))):
            ask(torch.tensor([torch.nan], requires_grad=True).sum())
    assert len(tape.doubts.take()) == 2 and not again


def test_a_copy_of_a_loss_of_a_framework_is_not_the_frameworks(tmp_path: Path) -> None:
    """Only in the framework's own are its settings looked for, whichever was called first."""
    files = str(tmp_path / "my_losses.py"), str(tmp_path / "verl/trainer/ppo/core_algos.py")
    copy, own = twins("    return torch.exp(x)\n", *files, name="compute_policy_loss_gpg")
    tape = Tape()
    for function, seen in ((copy, 0), (own, 1), (copy, 0)):
        recorded(lambda x, function=function: function(x).sum(), tape)
        assert len(tape.glimpses) == seen
        tape.callers.forget()


@pytest.mark.parametrize(
    ("expression", "op", "within"),
    [
        ("F.kl_div(p, q, log_target=True)", "mul", True),
        ("F.normalize(h, eps=0.0)", "div", True),
        ("q.log_prob(x)", "sub", True),
        ("net(obs)", "addmm", True),
        ("self.norm(x)", "native_layer_norm", False),
        ("torch.exp(x)", "exp", False),
        ("F.softmax(x, -1)", "_softmax", False),
        ("F.layer_norm(x, (4,))", "native_layer_norm", False),
        ("F.cross_entropy(x, y)", "_log_softmax", False),
        ("a * b", "mul", False),
        ("x.float()", "_to_copy", False),
        ("self.lstm(x, h)", "select", True),
    ],
)
def test_arguments_of_a_function_are_not_those_of_what_it_is_made_of(expression: str, op: str, within: bool) -> None:
    """The product in a divergence is of neither of the two; what a function of the trainer's does has lines of its own."""
    assert is_within(Site("loss.py", 1, "loss", expression=expression, args=("a", "b")), op) is within


def test_what_only_moves_elements_has_the_one_argument_there_is() -> None:
    for args, within in {("x",): False, ("x", "-1"): False, ("x", "'b t -> t b'"): False, ("x", "h"): True}.items():
        assert is_within(Site("loss.py", 1, "loss", expression=f"f({', '.join(args)})", args=args), "permute") is within


def test_a_fix_within_a_function_names_no_argument_of_it(tmp_path: Path) -> None:
    """Typed into the source, the words would be another edit than the one that was tried."""
    student, teacher = torch.randn(2, 5, requires_grad=True), torch.randn(2, 5)
    with nanscope.watch(out=tmp_path) as scope:
        masked = student.masked_fill(torch.tensor([False, False, False, False, True]), -torch.inf)
        functional.kl_div(teacher.log_softmax(-1), masked.log_softmax(-1), reduction="sum", log_target=True).backward()
    (incident,) = scope.verdict.incidents
    assert incident.fixes and not any("teacher" in fix.label or "masked" in fix.label for fix in incident.fixes if not fix.diffs)
