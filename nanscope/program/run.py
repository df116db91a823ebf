"""Runs the calls of a program in order, and backward from the value that they end in."""

from __future__ import annotations

import contextlib
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.program.calls import Call, Leaf
from nanscope.program.cost import Allowance
from nanscope.program.numbers import dtype_name, first_nonfinite
from nanscope.program.perform import Performer, perform
from nanscope.program.shelf import Put, Shelf, Shelved, took


@dataclass(frozen=True, slots=True)
class Run:
    """What executing a program gave.

    values: every value by id. grads: the gradient of the output with respect to every differentiable value, where backward reached it.
    returned: for each call index that backward visited, the gradients that its autograd node returned, in argument order.
    order: the call indices in the order in which backward visited them. lean: of gradients only those of the leaves were kept.
    What is large stands in a file and is mapped when it is read: do not write to it.
    """

    values: Mapping[int, Tensor]
    grads: Mapping[int, Tensor] = field(default_factory=dict)
    returned: Mapping[int, tuple[Tensor | None, ...]] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    lean: bool = False


def _keep(grads: Shelved, value: int, grad: Tensor | None) -> None:
    if grad is not None:
        grads[value] = _dense(grad)


def _dense(grad: Tensor) -> Tensor:
    """A gradient of an embedding may be sparse, and few questions can be put to it."""
    return grad if grad.layout is torch.strided else grad.to_dense()


class _Back(Mapping[int, tuple[Tensor | None, ...]]):
    """What the autograd node of each call returned; order: as backward visited them. wanted: will somebody ask?"""

    def __init__(self, shelf: Shelf) -> None:
        self.wanted = True
        self._shelf = shelf
        self._held: dict[int, tuple[Tensor | Put | None, ...]] = {}
        self.order: list[int] = []

    def keep_gradient(self, grads: Shelved, value: int, grad: Tensor | None) -> None:
        """Hook of a value inside the program."""
        if self.wanted:
            _keep(grads, value, grad)

    def keep(self, index: int, returned: tuple[Tensor | None, ...], received: tuple[Tensor | None, ...]) -> None:
        """Hook of a call's node."""
        if not self.wanted:
            return
        self._held[index] = tuple(None if grad is None else self._shelf.put(_dense(grad)) for grad in returned)
        self.order.append(index)

    def __getitem__(self, index: int) -> tuple[Tensor | None, ...]:
        return tuple(None if held is None else took(held) for held in self._held[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def _saving(shelf: Shelf, leaves: Iterable[Tensor]) -> torch.autograd.graph.saved_tensors_hooks:
    """Put away what autograd saves for backward, except the leaves, which are in memory all the time."""
    held = {leaf.data_ptr() for leaf in leaves}
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor if tensor.data_ptr() in held else shelf.put(tensor), took)


def run_calls(
    leaves: Sequence[Leaf],
    calls: Sequence[Call],
    output: int,
    contents: Mapping[int, Tensor],
    *,
    dtype: torch.dtype | None,
    backward: bool,
    trace: bool,
    ends: bool,
    foreign: bool,
    lean: bool = False,
    kept: Collection[int] | None = None,
    hooks: Mapping[int, Callable[[Tensor], Tensor]] | None = None,
    performer: Performer = perform,
) -> Run:
    """Run calls on the contents of their leaves, as `Program.execute` describes. foreign: they come from a file, and are bounded."""
    hooks = hooks or {}
    shelf = Shelf()
    values: dict[int, Tensor] = {}  # what a later call reads; the rest is put away
    away, grads, back = Shelved(shelf), Shelved(shelf), _Back(shelf)
    for leaf in leaves:
        values[leaf.id] = tensor = _content(leaf, contents, dtype)
        if leaf.diff and backward and tensor.is_floating_point():
            tensor.requires_grad_()
            if leaf.id in hooks:
                tensor.register_hook(hooks[leaf.id])  # type: ignore[no-untyped-call]
            tensor.register_hook(partial(_keep, grads, leaf.id))  # type: ignore[no-untyped-call]

    last_uses = _last_uses(calls, {output, *(leaf.id for leaf in leaves)})
    device = next((tensor.device for tensor in values.values()), torch.device("cpu"))
    allowance = Allowance.of(values.values(), len(calls)) if foreign else None
    with contextlib.ExitStack() as stack:
        for kind in {tensor.device.type for tensor in values.values()} | {"cpu"}:
            stack.enter_context(torch.autocast(kind, enabled=False))  # the recorded calls hold the casts already
        stack.enter_context(_saving(shelf, values.values()))
        for index, call in enumerate(calls):
            results = performer(call, values, dtype, device, call.grad and backward, allowance, index)
            node = None
            for out, tensor in zip(call.outs, results, strict=False):
                if out is None or not isinstance(tensor, Tensor):
                    continue
                values[out] = tensor
                if backward and tensor.requires_grad:
                    if out in hooks:
                        tensor.register_hook(hooks[out])  # type: ignore[no-untyped-call]
                    if not ends and (kept is None or out in kept):
                        tensor.register_hook(partial(back.keep_gradient, grads, out))  # type: ignore[no-untyped-call]
                    node = tensor.grad_fn
            if trace and node is not None:
                node.register_hook(partial(back.keep, index))
            del results, node
            for value in last_uses.get(index, ()):
                if value in values and not ends and (kept is None or value in kept):
                    away[value] = values[value]
                values.pop(value, None)
        if output not in values:
            raise ProgramError("the program does not make its output", slug="program-missing-value")
        root = values[output]
        if foreign and not (root.is_floating_point() or root.is_complex()):
            raise ProgramError(f"the program ends in {dtype_name(root.dtype)}, which is no loss and no update", slug="program-output")
        kept = {value: tensor.detach() for value, tensor in values.items()}
        values.clear()
        back.wanted = not lean or first_nonfinite(root) is None
        if backward and root.requires_grad:
            try:
                begin_at_one(root)
            except RuntimeError as error:
                raise ProgramError(f"backward failed: {str(error).splitlines()[0]}", slug="program-backward-failed") from error
    shelf.settle()
    return Run(ChainMap(kept, away), grads, back, tuple(back.order), not back.wanted)


def begin_at(root: Tensor, weight: Tensor) -> None:
    """Differentiate something by the sum of its elements with such weights, as `begin_at_one` does without."""
    if root.is_complex():
        torch.autograd.backward([root], [weight])
    else:
        torch.autograd.backward([(root * weight).sum()])


def begin_at_one(root: Tensor) -> None:
    """Differentiate what a program ends in, by the sum of its elements. torch makes the weight of one number itself; where one is given it
    loads sympy to compare shapes."""
    made = root.numel() == 1 and not root.is_complex()
    torch.autograd.backward([root], None if made else [torch.ones_like(root)])


def _content(leaf: Leaf, leaves: Mapping[int, Tensor], dtype: torch.dtype | None) -> Tensor:
    if leaf.id not in leaves:
        raise ProgramError(f"the tensor of leaf {leaf.id} ({leaf.name}) is missing", slug="program-missing-leaf")
    tensor = leaves[leaf.id].detach()
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _last_uses(calls: Sequence[Call], kept: set[int]) -> dict[int, list[int]]:
    """Index of a call → results that nobody reads after it."""
    last = {value: index for index, call in enumerate(calls) for value in (*call.inputs(), *(o for o in call.outs if o is not None))}
    found: dict[int, list[int]] = {}
    for value, index in last.items():
        if value not in kept:
            found.setdefault(index, []).append(value)
    return found
