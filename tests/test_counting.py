"""Every write is counted as it is without us: by a tensor's version autograd notices that what it saved was changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import nanscope
from nanscope.capture.counting import counts_inside
from nanscope.capture.mode import TapeMode
from nanscope.capture.tape import Tape


def ours() -> TapeMode:
    return TapeMode(Tape())


# What a sample is given, by the type of the argument; where that will not do, by its name, too.
BY_NAME: dict[str, Callable[[], Any]] = {
    **{f"Tensor {name}": lambda: torch.ones(()) for name in ("found_inf", "inv_scale", "lr", "grad_scale", "other")},
    "Tensor scalars": lambda: torch.ones(2),
    "List[Tensor] state_steps": lambda: [torch.ones(()), torch.ones(())],
    "List[Tensor] max_exp_avg_sqs": list,
    "int split_size": lambda: 2,
    "List[int] split_sizes": lambda: [2, 1],
}
BY_TYPE: dict[str, Callable[[], Any]] = {
    "Tensor": lambda: torch.full((3,), 0.5),
    "List[Tensor]": lambda: [torch.full((3,), 0.5), torch.full((3,), 0.5)],
    "number": lambda: 1.5,
    "List[number]": lambda: [1.5, 2.5],
    "float": lambda: 0.5,
    "List[float]": lambda: [0.5, 0.5],
    "int": lambda: 0,
    "List[int]": lambda: [3],
    "bool": lambda: False,
}
OTHERS = ("sobol", "resize", "set_", "record_stream", "rename")  # what a sample of this kind is none of


def overloads() -> Iterator[Any]:
    """Every overload of aten that writes, and is counted inside."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        base, _, overload = name.removeprefix("aten::").partition(".")
        packet = getattr(torch.ops.aten, base, None) if name.startswith("aten::") else None
        func = getattr(packet, overload or "default", None)
        if func is not None and func._schema.is_mutable and counts_inside(func) and not any(word in name for word in OTHERS):
            yield func


def of_lists(func: Any) -> bool:
    return any("List[Tensor]" in str(arg.type) for arg in func._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write)


def sample(func: Any) -> tuple[list[Any], dict[str, Any]] | None:
    """Arguments to call an overload with, None if nobody here knows any."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for arg in func._schema.arguments:
        make = BY_NAME.get(f"{arg.type} {arg.name}") or BY_TYPE.get(str(arg.type))
        if make is None and not str(arg.type).startswith("Optional"):
            return None
        if not arg.kwarg_only:
            args.append(make() if make is not None and not str(arg.type).startswith("Optional") else None)
        elif arg.is_out or not arg.has_default_value():
            kwargs[arg.name] = make() if make is not None else None
    return args, kwargs


def versions(func: Any, given: tuple[list[Any], dict[str, Any]], *around: AbstractContextManager[Any]) -> list[int] | str:
    """The counts of what a call was given after it, or how it failed."""
    args, kwargs = given
    every = (item for arg in (*args, *kwargs.values()) for item in (arg if isinstance(arg, list) else [arg]))
    tensors = [item for item in every if isinstance(item, Tensor)]
    with ExitStack() as stack:
        for context in around:
            stack.enter_context(context)
        try:
            func(*args, **kwargs)
        except Exception as error:
            return type(error).__name__
    return [tensor._version for tensor in tensors]


@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_each_operator_counts_as_without_us(grad: Callable[[], AbstractContextManager[Any]]) -> None:
    """Whatever of aten writes to the tensors of a list raises their versions as it does bare.

    In inference mode that holds for those that are made of others, too: only there they come to us whole.
    """
    counted = 0
    for func in overloads():
        given = [sample(func) for _ in range(2)]
        if given[0] is not None and given[1] is not None and (of_lists(func) or grad is torch.inference_mode):
            bare = versions(func, given[0], grad())
            assert versions(func, given[1], grad(), ours()) == bare, func
            counted += isinstance(bare, list) and any(bare)
    assert counted > (250 if grad is torch.inference_mode else 150)


def multiplied(weight: nn.Parameter) -> None:
    torch._foreach_mul_([weight.grad], 5.0)


def clipped(weight: nn.Parameter) -> None:
    nn.utils.clip_grad_norm_([weight], 0.1)


def clipped_by_value(weight: nn.Parameter) -> None:
    nn.utils.clip_grad_value_([weight], 0.1)


def updated(weight: nn.Parameter) -> None:
    torch._fused_sgd_([weight.grad], [weight.grad.clone()], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0,
                      nesterov=False, maximize=False, is_first_step=False)  # fmt: skip


@pytest.mark.parametrize("write", [multiplied, clipped, clipped_by_value, updated])
def test_what_autograd_saved_and_is_written_to_raises_as_without_us(tmp_path: Path, write: Callable[[nn.Parameter], None]) -> None:
    """A gradient that a pending backward pass needs is changed on a list: both raise, or both do not."""
    results = []
    for around in (nullcontext(), nanscope.watch(out=tmp_path)):
        weight, x = nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
        weight.grad = torch.ones(3)
        with around:
            loss = (x * weight.grad).sum()
            write(weight)
            try:
                loss.backward()
                results.append(("", x.grad.tolist(), weight.grad._version))  # type: ignore[union-attr]
            except RuntimeError as error:
                results.append((str(error), [], weight.grad._version))
    assert results[0] == results[1]
    assert "inplace operation" in results[0][0] or write is updated


def test_a_hook_of_backward_counts_as_without_us(tmp_path: Path) -> None:
    """Clipping and stepping inside backward, where nothing is recorded, is counted."""
    results = []
    for around in (nullcontext(), nanscope.watch(out=tmp_path)):
        layer = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(layer.parameters(), foreach=True)

        def step(weight: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            nn.utils.clip_grad_norm_([weight], 0.1)
            optimizer.step()

        layer.weight.register_post_accumulate_grad_hook(step)
        with around:
            for _ in range(2):
                layer(torch.ones(2, 3)).exp().sum().backward()
        results.append([tensor._version for p in layer.parameters() for tensor in (p, p.grad) if tensor is not None])
    assert results[0] == results[1]


class Passes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Somebody's mode, which hands every call on: torch's own behaviour under a mode is then the bare one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("modes", "count"),
    [((ours,), 1), ((ours, ours), 1), ((Passes,), 0), ((Passes, ours), 0), ((ours, Passes), 0), ((ours, Passes, ours), 0)],
)
def test_under_a_mode_of_somebody_else_it_is_counted_as_by_that_alone(modes: tuple[Callable[[], Any], ...], count: int) -> None:
    """Ours above or below another mode adds no count to what that one leaves."""
    tensor = torch.ones(3)
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        torch._foreach_mul_([tensor], 2.0)
    assert tensor._version == count


def test_an_operator_of_an_extension_counts_as_without_us() -> None:
    """An operator that somebody has defined is counted by what its kernel calls, and a view that it makes is one."""
    library = torch.library.Library("nanscope_counting", "DEF")
    library.define("double_(Tensor(a!) x) -> ()")
    library.define("first(Tensor(a) x) -> Tensor(a)")
    library.impl("double_", _double, "CPU")
    library.impl("first", lambda x: x[:1], "CPU")
    results = []
    for around in (nullcontext(), ours()):
        tensor = torch.ones(3)
        with around:
            torch.ops.nanscope_counting.double_(tensor)
            view = torch.ops.nanscope_counting.first(tensor)
            view.add_(1.0)
        results.append((tensor._version, view._version, view._is_view()))
    assert results[0] == results[1] == (2, 2, True)


def _double(x: Tensor) -> None:
    x.mul_(2.0)


@pytest.fixture(scope="module")
def extension() -> Iterator[Any]:
    """An extension that says nothing of a derivative, and nothing of autocast."""
    library = torch.library.Library("nanscope_inside", "DEF")
    library.define("waves(Tensor x) -> Tensor")
    library.define("product(Tensor x, Tensor y) -> Tensor")
    library.impl("waves", lambda x: x.sin().cos(), "CPU")
    library.impl("product", lambda x, y: x @ y, "CPU")
    yield torch.ops.nanscope_inside
    library._destroy()


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize("modes", [(), (Passes,)], ids=["alone", "with somebody's mode"])
def test_the_gradient_of_an_extension_is_that_of_its_calls(extension: Any, tmp_path: Path, modes: tuple[Callable[[], Any], ...]) -> None:
    """A kernel made of calls that have derivatives, and no word about its own: it has a gradient, and keeps it."""
    results = []
    for around in (nullcontext(), nanscope.watch(out=tmp_path)):
        x = torch.ones(3, requires_grad=True)
        with around, ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            (extension.waves(x) + x).sum().backward()
        results.append(x.grad.tolist())  # type: ignore[union-attr]
    assert results[0] == results[1]
    assert (results[0] == [1.0] * 3) is bool(modes)


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_autocast_casts_what_it_casts_without_us(extension: Any, tmp_path: Path, grad: Callable[[], AbstractContextManager[Any]]) -> None:
    """What a call is made of is cast where the call itself is not, and stays where the call is."""
    one, other = torch.linspace(-1, 1, 16).reshape(4, 4), torch.linspace(0.1, 3, 16).reshape(4, 4)
    weight = torch.linspace(-2, 1, 32).reshape(2, 4, 4)
    calls: dict[str, Callable[[], Tensor]] = {
        "an extension": lambda: extension.product(one, other),
        "bilinear": lambda: nn.functional.bilinear(one, other, weight),
        "tensordot": lambda: torch.tensordot(one, other, 1),
        "inner": lambda: torch.inner(one, other),
        "cov": lambda: torch.cov(one),
        "cdist": lambda: torch.cdist(one, other, compute_mode="use_mm_for_euclid_dist"),
        "matmul": lambda: one @ other,
        "sum": lambda: (one * other).sum(),
    }
    results: list[dict[str, Tensor]] = []
    for around in (nullcontext(), nanscope.watch(out=tmp_path)):
        with around, grad(), torch.autocast("cpu", torch.bfloat16):
            results.append({name: call() for name, call in calls.items()})
    for name in calls:
        bare, watched = results[0][name], results[1][name]
        assert bare.dtype is watched.dtype and torch.equal(bare, watched), name
    assert results[0]["an extension"].dtype is torch.bfloat16 and results[0]["cdist"].dtype is torch.float32
