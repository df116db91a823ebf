"""The trainer's own modes and hooks see the calls that they would see without us, on healthy and on bad steps."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import nanscope
from nanscope.capture.mode import TapeMode
from nanscope.capture.tape import Tape
from nanscope.capture.unseen import is_traced, unseen
from nanscope.torch_inside import DETACH_IS_SEEN_TWICE


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner = getattr(getattr(func, "__self__", None), "__name__", "")  # the property that a __get__ belongs to
        self.seen.append(f"{getattr(func, '__qualname__', func)} {owner} {func is WRAPPABLE}")
        return func(*args, **(kwargs or {}))


WRAPPABLE = torch.autograd.backward


class Saved(saved_tensors_hooks):
    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

        def pack(tensor: Tensor) -> Tensor:
            self.seen["pack"] += 1
            return tensor

        def unpack(tensor: Tensor) -> Tensor:
            self.seen["unpack"] += 1
            return tensor

        super().__init__(pack, unpack)


class Flops(FlopCounterMode):
    def __init__(self) -> None:
        super().__init__(display=False)

    @property
    def seen(self) -> dict[str, dict[Any, int]]:
        return self.get_flop_counts()


def train(bad: str) -> list[bytes]:
    """Three steps, the second one of which is bad: nowhere, in the loss or in the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, mask = torch.randn(3, 4), torch.zeros(3, 4)
        mask[:, 1:] += 1.0
        if bad == "model" and step == 1:
            x[0, 0] = float("inf")
        logps = model(x).log_softmax(-1)
        ratio = torch.exp(logps - logps.detach() + mask.new_full((1,), 200.0 if bad == "loss" and step == 1 else 0.0) * (1 - mask))
        optimizer.zero_grad()
        torch.autograd.backward((ratio * mask * logps).sum())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [p.detach().numpy().tobytes() for p in model.parameters()]


@pytest.mark.parametrize("bad", ["", "loss", "model"])
@pytest.mark.parametrize("kind", [Calls, Functions, Saved, Flops])
def test_who_looks_on_sees_what_he_would_see_without_us(tmp_path: Path, kind: Callable[[], Any], bad: str) -> None:
    """Call by call the same, whether it is entered before our block or in it; and what we find is found."""
    seen, weights = [], []
    for order in ("bare", "inside", "around"):
        mode, scope = kind(), nanscope.watch(out=tmp_path)
        with contextlib.ExitStack() as stack:
            for one in {"bare": (mode,), "inside": (scope, mode), "around": (mode, scope)}[order]:
                stack.enter_context(one)
            weights.append(train(bad))
        seen.append(mode.seen)
        assert order == "bare" or scope.verdict.status == ("non-finite" if bad else "healthy")
    if DETACH_IS_SEEN_TWICE and kind is Calls:  # and three times by a mode that is not alone, whoever else is there
        seen = [[call for call in calls if call != "aten.detach.default"] for calls in seen]
    assert seen[0] == seen[1] == seen[2]
    assert seen[0]
    assert weights[0] == weights[1] == weights[2]


def overflow() -> None:
    x = torch.tensor([1.0, 99.0], requires_grad=True)
    (x.exp() * torch.tensor([1.0, 0.0])).sum().backward()


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
        lambda: disable_saved_tensors_hooks("not here"),
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
    ids=["anomaly mode", "no saved-tensor hooks", "another default device", "autocast"],
)
def test_a_bad_step_is_explained_whatever_is_switched_on(tmp_path: Path, around: Callable[[], Any]) -> None:
    """What the trainer has switched on for its own code does not change what ours computes."""
    with nanscope.watch(out=tmp_path) as scope:
        x, mask = torch.tensor([1.0, 99.0], requires_grad=True), torch.tensor([1.0, 0.0])
        with around():
            (x.exp() * mask).sum().backward()
    (incident,) = scope.verdict.incidents
    assert (incident.origin.op, incident.origin.index, incident.reproduces) == ("exp", (1,), True)


def test_the_profiler_does_not_see_our_own_work() -> None:
    """What runs unseen is not in the trainer's profile; what runs afterwards is."""
    with torch.profiler.profile() as profile:
        with unseen():
            torch.ones(2).exp()
        torch.ones(2).sin()
    names = {event.key for event in profile.key_averages()}
    assert "aten::sin" in names and "aten::exp" not in names


def test_a_mode_that_outlives_a_module_keeps_its_place(tmp_path: Path) -> None:
    """A mode that a module's hook enters, and another hook leaves, is the one that is left then, and not ours."""
    model, mode = nn.Linear(2, 2), Calls()
    model.register_forward_pre_hook(lambda module, args: mode.__enter__() and None)  # type: ignore[no-untyped-call]
    model.register_forward_hook(lambda module, args, output: mode.__exit__(None, None, None))  # type: ignore[no-untyped-call,func-returns-value]
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(2):
            model(torch.ones(1, 2)).exp().sum().backward()
        assert [type(known) for known in _get_current_dispatch_mode_stack()] == [TapeMode]
    assert mode.seen and not _get_current_dispatch_mode_stack()
    assert scope.verdict.healthy


def test_a_mode_that_outlives_the_block_stays(tmp_path: Path) -> None:
    """Whoever is still on the stack above us when the block is left stays there."""
    mode, scope = Calls(), nanscope.watch(out=tmp_path)
    scope.__enter__()
    with mode:
        scope.__exit__(None, None, None)
        assert _get_current_dispatch_mode_stack() == [mode]
    assert not _get_current_dispatch_mode_stack()


def test_an_error_of_the_trainers_call_passes_the_tape_as_it_was_raised() -> None:
    """No failure of ours is told as its reason, even where the tape has failed just before."""

    class Failing(Tape):
        def before(self, *args: Any) -> Any:
            raise MemoryError

    from nanscope.capture.failsafe import Failsafe

    failsafe, given = Failsafe(), torch.ones(2)
    with TapeMode(Failing(), failsafe), pytest.raises(RuntimeError, match="size") as caught:
        given.add_(1)
        given @ torch.ones(3)
    assert caught.value.__context__ is None
    assert failsafe.failures == ["tape-failed"]


def test_what_goes_into_a_cuda_graph_is_written_down_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it holds anything yet; a process without a GPU asks nobody."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not is_traced()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert is_traced()


def test_a_gradient_is_no_data_of_the_batch(tmp_path: Path) -> None:
    """An attack reads the gradient of its own input: whoever made that, it did not come with the batch."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for lies in "in the loss", "before the model":
        with nanscope.watch(out=tmp_path) as scope:
            for step in range(1, 4):
                batch = torch.ones(2, 4)
                noise = (batch.clone() if lies == "before the model" else torch.zeros(2, 4)).requires_grad_()
                if lies == "before the model":
                    loss = (model(noise) * 0 + (step != 2)).sqrt().sum()
                else:
                    loss = model(batch).sum() + (noise * 0 + (step != 2)).sqrt().sum()
                loss.backward()
                assert noise.grad is not None
                attacked = batch + 0.1 * noise.grad
                optimizer.zero_grad()
                model(attacked).sum().backward()
                optimizer.step()
                nn.init.normal_(model.weight)
                nn.init.normal_(model.bias)
        first, second = scope.verdict.incidents[:2]
        assert (first.origin.op, second.origin.op, second.phase) == ("sqrt", "opaque", "forward")
        assert "came with the batch" not in second.sentence
