"""torch compiles as often with us as without, and what torch can trace it can trace in the block."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import nanscope
from nanscope.capture.compiler import hide
from nanscope.capture.failsafe import Failsafe

Watch = Callable[[], AbstractContextManager[object]]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def train(call: Callable[[Tensor], Tensor], model: nn.Module, steps: int = 2, scale: float = 1.0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        call(torch.ones(2, 4) * scale).sum().backward()
        optimizer.step()


def before_the_block(watch: Watch, backend: Any) -> nn.Module:
    model = network()
    compiled = torch.compile(model, backend=backend)
    train(compiled, model)
    with watch():
        train(compiled, model)
    return model


def after_the_block(watch: Watch, backend: Any) -> nn.Module:
    model = network()
    compiled = torch.compile(model, backend=backend)
    with watch():
        train(compiled, model)
    train(compiled, model)
    return model


def many_blocks(watch: Watch, backend: Any) -> nn.Module:
    model = network()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(10):  # more than torch compiles one thing anew
        with watch():
            train(compiled, model)
    return model


def nested_blocks(watch: Watch, backend: Any) -> nn.Module:
    model = network()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with watch():
        train(compiled, model)
        with watch():
            train(compiled, model)
        train(compiled, model)
    train(compiled, model)
    return model


def a_function_of_the_model(watch: Watch, backend: Any) -> nn.Module:
    model = network()
    compiled = torch.compile(lambda x: model(x).exp(), backend=backend)
    for around in (watch, nullcontext, watch):
        with around():
            train(compiled, model)
    return model


def a_loss(watch: Watch, backend: Any) -> nn.Module:
    model = network()
    loss = torch.compile(lambda y: y.exp().mean(), backend=backend)
    for around in (watch, watch, nullcontext):
        with around():
            train(lambda x: loss(model(x)), model)
    return model


def a_broken_graph(watch: Watch, backend: Any) -> nn.Module:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    torch.manual_seed(0)
    model = nn.Sequential(Broken(), Broken())
    compiled = torch.compile(model, backend=backend)
    for around in (watch, nullcontext, watch):
        with around():
            train(compiled, model)
    return model


def an_optimizer(watch: Watch, backend: Any) -> nn.Module:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    step = torch.compile(optimizer.step, backend=backend)
    for around in (watch, watch, nullcontext):
        with around():
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                step()
    return model


def a_whole_step(watch: Watch, backend: Any) -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend=backend)
    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    for around in (watch, watch, nullcontext):
        with around():
            step(torch.ones(2, 4))
            step(torch.ones(2, 4))
    return model


def the_backward_pass(watch: Watch, backend: Any) -> nn.Module:
    model = network()
    with torch._dynamo.compiled_autograd._enable(lambda graph: torch.compile(graph, backend=backend, fullgraph=True)):
        for around in (nullcontext, watch, watch, nullcontext):
            with around():
                train(model, model)
    return model


def bad_steps(watch: Watch, backend: Any) -> nn.Module:
    model = network()
    compiled = torch.compile(model, backend=backend)
    for scale in (1.0, float("inf"), 1.0):
        with watch():
            compiled(torch.ones(2, 4) * scale).sum().backward()
            train(compiled, model)
    return model


COMPILED = (
    before_the_block,
    after_the_block,
    many_blocks,
    nested_blocks,
    a_function_of_the_model,
    a_loss,
    a_broken_graph,
    an_optimizer,
    a_whole_step,
    the_backward_pass,
    bad_steps,
)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.__name__)
def test_graphs_are_as_many_as_without_us(tmp_path: Path, case: Callable[[Watch, Any], nn.Module], backend: str) -> None:
    """As many graphs of as many operators, and the same weights, whatever is compiled, and whenever."""
    results = []
    for watch in (nullcontext, lambda: nanscope.watch(out=tmp_path)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        model = case(watch, counter)
        results.append((counter.frame_count, counter.op_count, [p.detach().numpy().tobytes() for p in model.parameters()]))
    assert results[0] == results[1]
    assert results[0][0] > 0


@pytest.mark.parametrize("case", [an_optimizer, a_whole_step], ids=lambda case: case.__name__)
def test_the_step_of_a_compiled_optimizer_is_seen(tmp_path: Path, case: Callable[[Watch, Any], nn.Module]) -> None:
    """torch leaves its hooks out of what it compiles; ours is called all the same."""
    torch._dynamo.reset()
    scopes = []

    def watch() -> nanscope.Scope:
        scopes.append(nanscope.watch(out=tmp_path))
        return scopes[-1]

    case(watch, "eager")
    assert [scope.steps for scope in scopes] == [2, 2]


def test_hooks_of_others_stay_while_torch_compiles(tmp_path: Path) -> None:
    """Where there are other global hooks ours are not hidden: the compiled code would never find again what it was made with."""
    import contextlib

    from torch._dynamo.callback import callback_handler

    def ours(module: object, args: object) -> None: ...

    ours.__module__ = "nanscope.capture.modules"
    mine, both = {1: ours}, {1: ours, 2: print}
    with contextlib.ExitStack() as undo:
        for register in (mine, both):
            hide([register], {1}, Failsafe(), undo)
        for begin in callback_handler.start_callbacks:
            begin(None)  # type: ignore[arg-type]
        assert (list(mine), list(both)) == ([], [1, 2])
        for end in callback_handler.end_callbacks:
            end(None)  # type: ignore[arg-type]
        assert (list(mine), list(both)) == ([1], [1, 2])
    assert not callback_handler.start_callbacks and not callback_handler.end_callbacks


# -- what is traced, transformed, or has no content ---------------------------------------------------------------------------


def squares(x: Tensor) -> Tensor:
    return (x.exp() * x).sum()


def of_parameters(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda parameters, x: torch.func.functional_call(model, parameters, (x,)).square().sum()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def fake_step() -> str:
    with torch._subclasses.FakeTensorMode():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4)).exp().sum().backward()
        optimizer.step()
        return str(model.weight)


def jagged() -> Tensor:
    tensor = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged, requires_grad=True)
    (tensor * 2).sum().backward()
    assert tensor.grad is not None
    return tensor.grad.values()


def scripted() -> list[Tensor]:
    model = torch.jit.script(network())
    model(torch.ones(2, 4)).sum().backward()
    return [p.grad for p in model.parameters()]


def backward_in_a_transform() -> Tensor:
    def inner(x: Tensor) -> Tensor:
        x.sum().backward()
        return x.sum()

    return torch.func.grad(inner)(torch.ones(3, requires_grad=True))


def logdet() -> Tensor | None:
    matrices = torch.eye(3).repeat(2, 1, 1).mul(2).requires_grad_()
    torch.logdet(matrices).sum().backward()
    return matrices.grad


def forward_mode() -> Tensor | None:
    import torch.autograd.forward_ad as forward

    with forward.dual_level():
        return forward.unpack_dual(network()(forward.make_dual(torch.ones(2, 4), torch.ones(2, 4))).exp()).tangent


TRACED: dict[str, Callable[[], object]] = {
    "trace": lambda: str(torch.jit.trace(squares, (torch.ones(4),)).graph),
    "trace a model": lambda: torch.jit.trace(network(), (torch.ones(2, 4),))(torch.ones(2, 4)),
    "script a model": scripted,
    "export": lambda: str(torch.export.export(network(), (torch.ones(2, 4),)).graph),
    "make_fx": lambda: make_fx(squares)(torch.ones(4)).code,
    "make_fx fake": lambda: make_fx(squares, tracing_mode="fake")(torch.ones(4)).code,
    "make_fx symbolic": lambda: make_fx(squares, tracing_mode="symbolic")(torch.ones(4)).code,
    "make_fx before dispatch": lambda: make_fx(squares, pre_dispatch=True)(torch.ones(4)).code,
    "make_fx a model": lambda: make_fx(of_parameters(model := network()))(weights_of(model), torch.ones(2, 4)).code,
    "make_fx a bare model, refused": lambda: make_fx(nn.Linear(4, 4), tracing_mode="fake")(torch.ones(2, 4)).code,
    "fake tensors": fake_step,
    "jagged": jagged,
    "vmap": lambda: torch.func.vmap(squares)(torch.ones(3, 4)),
    "vmap a model": lambda: torch.func.vmap(network())(torch.ones(3, 4)),
    "grad": lambda: torch.func.grad(squares)(torch.ones(4)),
    "grad a model": lambda: torch.func.grad(of_parameters(model := network()))(weights_of(model), torch.ones(2, 4)),
    "per sample": lambda: torch.func.vmap(torch.func.grad(of_parameters(model := network())), in_dims=(None, 0))(
        weights_of(model), torch.ones(3, 4)
    ),
    "jvp": lambda: torch.func.jvp(squares, (torch.ones(4),), (torch.ones(4),)),
    "jacrev": lambda: torch.func.jacrev(network())(torch.ones(4)),
    "hessian": lambda: torch.func.hessian(squares)(torch.ones(4)),
    "forward mode": forward_mode,
    "backward in a transform, refused": backward_in_a_transform,
    "a gradient of None": logdet,
}


def shown(result: object) -> object:
    """Tensors bit by bit."""
    if isinstance(result, Tensor):
        return result.detach().numpy().tobytes()
    if isinstance(result, (list, tuple)):
        return [shown(item) for item in result]
    return {name: shown(item) for name, item in result.items()} if isinstance(result, dict) else str(result)


@pytest.mark.parametrize("name", TRACED)
def test_what_torch_traces_it_traces_in_the_block(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """The same graph, the same numbers or the same refusal, and not a word from us: nothing of ours failed."""

    def run(around: AbstractContextManager[object]) -> object:
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings(), around:
                warnings.simplefilter("ignore")
                return shown(TRACED[name]())
        except Exception as error:
            return type(error), str(error)

    assert run(nullcontext()) == run(nanscope.watch(out=tmp_path))
    assert "nanscope [" not in caplog.text
