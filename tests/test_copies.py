"""Copies share parameters' memory and nothing else; what cannot be copied is said."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.capture import copies as module_under_test
from nanscope.capture.alone import NotIsolated
from nanscope.capture.copies import Copies, belongs, lent


def copied(thing: Any, budget: int = 1 << 20) -> Any:
    return Copies(budget, lent).of(thing)


class Tangled(nn.Module):
    """Holds everything that models hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(4.0))
        self.rng, self.lock, self.me, self.calls = torch.Generator().manual_seed(3), threading.Lock(), weakref.ref(self), [0]
        self.last = self.first(torch.ones(2))  # with a history
        self.method = self.count
        own = self

        def forward(x: Tensor) -> Tensor:
            own.calls[0] += 1
            return own.first(x)

        self.forward = forward

    def count(self) -> None:
        self.calls.append(1)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("not for files")


def test_a_copy_holds_together_by_itself() -> None:
    """Ties, closures, methods, weak references and generators of a copy lead to the copy; its weights are lent, its buffers are not."""
    model = Tangled()
    model.first.weight.grad = torch.ones(2, 2)
    model.first.weight.register_hook(lambda grad: pytest.fail("the original was differentiated"))
    version = model.first.weight._version
    twin = copied(model)
    assert twin.first.weight is twin.second.weight and twin.first.weight is not model.first.weight
    assert twin.first.weight.data_ptr() == model.first.weight.data_ptr() and twin.table.data_ptr() != model.table.data_ptr()
    assert twin.first.weight.grad is None and twin.me() is twin and twin.last.requires_grad
    twin(torch.ones(2)).sum().backward()
    twin.method()
    torch.rand((), generator=twin.rng)
    assert (model.calls, twin.calls) == ([0], [1, 1])
    assert torch.equal(model.rng.get_state(), torch.Generator().manual_seed(3).get_state())
    assert model.first.weight._version == version and torch.equal(model.first.weight.grad, torch.ones(2, 2))


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("kind", [nn.Linear, Twice])
@pytest.mark.parametrize("wrap", [torch.no_grad(), torch.compile(backend="eager"), torch.enable_grad()])
def test_a_forward_that_was_wrapped_is_that_of_the_copy(kind: type[nn.Module], wrap: Callable[[Any], Any]) -> None:
    """What wraps a bound method, torch's compiler or a decorator, holds the original: its copy does not."""
    model = kind(2, 2)
    model.forward = wrap(model.forward)
    twin = copied(model)
    with torch.no_grad():
        twin.weight = nn.Parameter(torch.zeros(2, 2))
        twin.bias = nn.Parameter(torch.ones(2))
        assert torch.equal(twin(torch.ones(2)), torch.ones(2) * (2 if kind is Twice else 1))


def test_a_compiled_module_is_copied_as_it_was_written() -> None:
    """Nothing is compiled for the copy."""
    model = nn.Linear(2, 2)
    twin = copied(torch.compile(model, backend="eager"))
    assert type(twin) is nn.Linear and twin.weight.data_ptr() == model.weight.data_ptr()


def test_attributes_of_a_tensor_are_copied() -> None:
    """What a framework keeps on a parameter, a gradient in float32, is not the original's."""
    weight = nn.Parameter(torch.ones(2))
    weight.main_grad = torch.zeros(2)
    twin = copied([weight])[0]
    twin.main_grad += 1
    assert torch.equal(weight.main_grad, torch.zeros(2)) and twin.data_ptr() == weight.data_ptr()


def test_what_an_engine_has_hung_on_a_weight_stays_behind_where_it_cannot_be_copied() -> None:
    """As the group of ranks that ZeRO gathers it by; the model does without."""
    model = nn.Linear(2, 2)
    model.weight.gathered_by = (n for n in range(3))  # type: ignore[attr-defined]
    twin = copied([model])[0]
    assert not hasattr(twin.weight, "gathered_by") and torch.equal(twin(torch.ones(2)), model(torch.ones(2)))


class Own(nn.Linear):
    def scale(self, module: nn.Module, args: Any) -> Any:
        return (args[0] * 2,)


OWN = Own(2, 2)
HOOKS: dict[str, tuple[Callable[..., Any], bool]] = {
    "torch's own": (next(iter(nn.utils.weight_norm(nn.Linear(2, 2))._forward_pre_hooks.values())), True),
    "a module's": (OWN.scale, True),
    "only its arguments": (lambda module, args, output: output.requires_grad_(), True),
    "a print": (lambda module, args, output: print(output), False),
    "a global": (lambda module, args, output: HOOKS.clear(), False),
    "a closure": ((lambda seen: lambda *args: seen.append(1))([]), False),
    "somebody's method": ([].append, False),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_those_who_watch_stay_behind(name: str) -> None:
    """A hook that is part of what a module computes is run again, one that may tell somebody is not."""
    hook, stays = HOOKS[name]
    assert belongs(hook, OWN) is stays


def test_a_library_that_collects_what_its_parts_give_is_run_as_it_is(tmp_path: Path) -> None:
    """Mixtures of experts of transformers add a loss of what hooks have collected from their routers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 19, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.MixtralConfig(num_key_value_heads=1, num_local_experts=4, output_router_logits=True, **sizes)
    model = transformers.MixtralForCausalLM(config)

    class Steep(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.exp(x * 1e6) * 0

    model.model.layers[1].input_layernorm = Steep()
    ids = torch.randint(0, 19, (2, 6))
    with nanscope.watch(model, out=tmp_path) as scope:
        model(input_ids=ids, labels=ids).loss.backward()
    (incident,) = scope.verdict.incidents
    assert (incident.origin.op, incident.origin.file) == ("exp", __file__), incident.sentence


def test_hooks_left_behind_are_named() -> None:
    """So that a verdict can say why numbers differ."""
    model = nn.Linear(2, 2)
    model.register_forward_hook(HOOKS["a closure"][0])
    copies = Copies(1 << 20, lent)
    assert not copies.of(model)._forward_hooks and "<lambda>" in copies.dropped[0] and model._forward_hooks


class Wraps(Tensor):
    """Somebody's own class of tensor, around another one."""

    @staticmethod
    def __new__(cls, inside: Tensor) -> Wraps:
        wrapper: Wraps = Tensor._make_wrapper_subclass(cls, inside.shape)  # type: ignore[attr-defined]
        wrapper.inside = inside
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.inside if isinstance(arg, Wraps) else arg for arg in args), **(kwargs or {}))


def released(start: int = 0) -> Tensor:
    """As a sharded model leaves its gathered weights: with a shape, and without memory. To read it would end the process."""
    tensor = torch.ones(1 << 20)
    part = tensor[start:]
    tensor.untyped_storage().resize_(0)
    return part


IMPOSSIBLE: dict[str, tuple[Callable[[], Any], str]] = {
    "a stream": (lambda: (n for n in range(3)), "generator"),
    "too large": (lambda: torch.zeros(1 << 20), "more than 1 MB"),
    "too much else": (lambda: "x" * (65 << 20), "beside its tensors"),
    "a wrapper": (lambda: Wraps(torch.ones(2)), "Wraps, which is more than the memory"),
    "released": (released, "let go of"),
    "a view of what was released": (lambda: released(1), "let go of"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "more than the memory"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_copied_is_said(name: str) -> None:
    """No half of a copy is used: the message says what stands in the way."""
    make, words = IMPOSSIBLE[name]
    with pytest.raises(NotIsolated, match=words):
        copied({"here": make()})


def test_copying_leaves_pickle_as_it_is() -> None:
    """Nothing is registered with Python for everybody."""
    import copyreg

    before = dict(copyreg.dispatch_table)
    with contextlib.suppress(NotIsolated):
        copied(Tangled())
    assert copyreg.dispatch_table == before and module_under_test.Copies is Copies


class Loop:
    """A trainer in the midst of its epoch: it holds the model, and the batches that are to come."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.batches, self.logged = model, (torch.ones(2) for _ in range(3)), [0]


class Held(nn.Module):
    """A model that knows who trains it. needs: it cannot do without."""

    def __init__(self, needs: bool) -> None:
        super().__init__()
        self.inner, self.scale, self.needs = nn.Linear(2, 2), {"of": 2.0}, needs
        self.loop = Loop(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.needs:
            self.loop.logged[0] += 1
        made: Tensor = torch.exp(self.inner(x) * 1e4) * self.scale["of"]
        return made


def test_what_a_module_holds_of_its_trainer_stays_behind() -> None:
    """It cannot be copied, and the forward does without; all else is there."""
    model = Held(False)
    copy = copied(model)
    assert not hasattr(copy, "loop") and copy.scale == {"of": 2.0} and copy.scale is not model.scale
    assert torch.equal(copy(torch.zeros(2)), model(torch.zeros(2)))
    assert next(model.loop.batches).sum() == 2


@pytest.mark.parametrize("needs", [False, True])
def test_a_model_that_holds_its_trainer_is_looked_into(tmp_path: Path, needs: bool) -> None:
    """Unless its forward asks the trainer, which nobody may do a second time."""
    torch.manual_seed(0)
    model = Held(needs)
    with nanscope.watch(model, out=tmp_path) as scope:
        model(torch.ones(3, 2)).mean().backward()
    (incident,) = scope.verdict.incidents
    assert (incident.origin.op == "exp") is not needs, incident.sentence
    assert model.loop.logged == [int(needs)]
