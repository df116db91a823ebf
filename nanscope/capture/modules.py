"""Where the model is: suspends the tape inside modules that have weights, and remembers their outermost calls.

Global forward hooks, so nothing walks over the model and nothing is left on it. Modules without weights (a `PolicyLoss`, a
`CrossEntropyLoss`) are loss code and stay on the tape. Checkpointing runs forward again during backward, without the closing hook:
nothing here keeps a stack of open modules, and nothing happens during a backward pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from nanscope.capture import generators
from nanscope.capture.account import Balance, Holding
from nanscope.capture.alone import has_peers
from nanscope.capture.compiler import hide, never_compile
from nanscope.capture.failsafe import Failsafe
from nanscope.capture.generators import Drawn
from nanscope.capture.parts import Parts
from nanscope.capture.unseen import is_ours, is_traced, unseen
from nanscope.program.calls import NAMELESS
from nanscope.program.local import is_plain, refuses, unwrapped
from nanscope.snapshot.observation import FROZEN
from nanscope.torch_inside import (
    Returned,
    forward_hooks,
    forward_hooks_always_called,
    forward_hooks_with_kwargs,
    keywords_of,
    pre_hooks,
    transform,
    weak_tensor,
    writes_counted,
)

KEPT_CALLS = 64  # outermost calls with gradient that are remembered for a second look
KEPT_FROZEN = 16  # outermost calls without gradient that are
KEPT_BYTES = 32 << 20  # arguments of one call larger than this are not held
WIDE = 32  # of the budget, what one argument of a function may take that has three dimensions or more: logits are not kept from being freed

HELD = 16  # objects that are looked into, among what one module returns
NOT_HELD = (nn.Module, type, FunctionType, MethodType, ModuleType)  # no result of a call

WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module")  # parts of names: of a compiled model, and of one that is spread over ranks

_HOOK_WARNING = ("ignore", re.compile(r"Using `torch\.compile\(module\)` when there are global hooks", re.IGNORECASE), Warning, None, 0)

Address = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
Began = tuple[tuple[Tensor, ...], dict[str, torch.dtype], bool, bool | None, tuple[Drawn, ...]]  # rng, autocast, …: see `ModuleCall`


class Compiled(nn.Module):
    """A function that torch has compiled, as it is written, so that it can be called again as a module can. models: that it reaches."""

    def __init__(self, function: Callable[..., Any], models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.function, self.models = function, nn.ModuleList(models)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(slots=True)
class ModuleCall:
    """An outermost module call, or one of a function that torch has compiled, and what is needed to run it again.

    args, kwargs: None where they were too large to hold, or may hold on to more than tensors. outputs: addresses of its output tensors, in
    order; the tensors themselves are not held. versions: of the tensors among the arguments, when it was over. rng: states of the CPU
    generator and of the CUDA generators in use when it began, none if it drew from none. autocast: device type → dtype, where on. grad:
    were gradients enabled? training: was it in training mode? None for a function. drawn: generators that it was given, or that its module
    holds, as they stood. number: of all calls. holding: what is on the account for it. made: weak handles on its output tensors. caller:
    the trainer's function that made it, and its instruction. roots: addresses of those outputs that have a gradient. numbers: copies of
    those of them that are one: a model may return its loss. told: is it known what it returned? Before torch 2.13 torch does not
    tell that of a function: its outputs are looked for when it is made again.
    """

    module: nn.Module
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any]
    outputs: list[Address]
    versions: list[int]
    rng: tuple[Tensor, ...]
    autocast: dict[str, torch.dtype] = field(default_factory=dict)
    grad: bool = True
    training: bool | None = None
    drawn: tuple[Drawn, ...] = ()
    number: int = 0
    holding: Holding | None = None
    made: list[Any] = field(default_factory=list)
    caller: tuple[CodeType | None, int] = (None, -1)
    roots: frozenset[Address] = frozenset()
    numbers: tuple[Tensor, ...] = ()
    told: bool = True

    @property
    def name(self) -> str:
        """What is called: the class of a module, or a function."""
        if not isinstance(self.module, Compiled):
            return type(self.module).__name__
        function = inspect.unwrap(self.module.function)
        return str(getattr(function, "__qualname__", type(function).__name__)).removeprefix("<locals>.")

    @property
    def models(self) -> list[nn.Module]:
        """The module, or those that a function reaches."""
        return list(self.module.models) if isinstance(self.module, Compiled) else [self.module]

    def let_go(self) -> None:
        """Let go of the arguments: it cannot be run again."""
        self.args, self.kwargs, self.versions, self.drawn = None, {}, [], ()
        if self.holding is not None:
            self.holding.close()

    def is_gone(self) -> bool:
        """Is nothing left of what it has made?"""
        return self.told and all(made.expired() for made in self.made)

    def roots_left(self) -> set[Address]:
        """Return where those outputs lie that are still there and have a gradient."""
        return {place for place, made in zip(self.outputs, self.made, strict=False) if place in self.roots and not made.expired()}


def _numbers_in(output: Any) -> tuple[Tensor, ...]:
    """Return a copy of each single number with a gradient that a model has returned."""
    found = (tensor for tensor in made_in(output) if tensor.requires_grad and is_plain(tensor) and tensor.numel() == 1)
    return tuple(tensor.detach().clone() for tensor in found)


def address(tensor: Tensor) -> Address:
    """Return what identifies a live tensor: where it lies and how it is laid out."""
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


NOWHERE: Address = (0, (), (), torch.uint8)


def place_of(tensor: Tensor) -> Address:
    """Return the address of a tensor; of a wrapped one, that of what is inside, which is what is left when the wrapper is taken off."""
    inside = tensor if is_plain(tensor) else unwrapped(tensor)
    return address(inside) if inside is not None and is_plain(inside) else NOWHERE


def tensors_in(tree: Any, depth: int = 0, held: list[Any] | None = None) -> Iterator[Tensor]:
    """Yield the tensors inside arguments or outputs, in a fixed order. held: takes the objects of other classes, which hold attributes."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping) and depth < 6:
        for item in tree.values():
            yield from tensors_in(item, depth + 1, held)
    elif isinstance(tree, (list, tuple)) and depth < 6:
        for item in tree:
            yield from tensors_in(item, depth + 1, held)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type) and depth < 6:
        for member in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, member.name, None), depth + 1, held)
    elif held is not None and _may_hold(tree) and len(held) < HELD and not any(tree is known for known in held):
        held.append(tree)


def _may_hold(tree: Any) -> bool:
    return hasattr(tree, "__dict__") and not isinstance(tree, NOT_HELD)


def made_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors that a module returned, also as attributes of an object of another class: a distribution, say, that a policy
    returns."""
    held: list[Any] = []
    yield from tensors_in(output, held=held)
    for thing in held:  # which grows while it is gone through
        yield from tensors_in(list(vars(thing).values()), held=held)


def is_simple(tree: Any, depth: int = 0) -> bool:
    """Are arguments nothing but tensors and plain values? A cache among them would be kept alive by whoever holds them."""
    if isinstance(tree, dict):
        return depth < 6 and all(is_simple(item, depth + 1) for item in tree.values())
    if isinstance(tree, (list, tuple)):
        return depth < 6 and all(is_simple(item, depth + 1) for item in tree)
    return tree is None or isinstance(tree, (Tensor, bool, int, float, str, torch.dtype, torch.device, torch.Generator))


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to; a tensor of inference mode does not count."""
    try:
        return writes_counted(tensor)
    except RuntimeError:
        return 0


def versions_in(tree: Any) -> list[int]:
    """Return how often the tensors inside arguments were written to."""
    return [version_of(tensor) for tensor in tensors_in(tree) if not refuses(tensor)]


def rng_state() -> tuple[Tensor, ...]:
    """Return the states of the generators that a forward pass may draw from."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return tuple(states)


def autocast_state() -> dict[str, torch.dtype]:
    """Return the device types for which autocast is on, with its dtype."""
    return {device: torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)}


def has_weights(module: nn.Module) -> bool:
    """Is a module a part of the model, and not of a loss?"""
    return next(module.parameters(), None) is not None


class Met(weakref.WeakKeyDictionary[nn.Module, None]):
    """Modules that are not held, in the order in which they were met: who is told of the first one is told of the same one in each run."""

    def add(self, module: nn.Module) -> None:
        """Meet one."""
        self.setdefault(module, None)


class ModuleWatch:
    """The modules that one thread calls; `suspend` and `resume` are called around every outermost call of one that has weights."""

    def __init__(self, suspend: Callable[[nn.Module], None], resume: Callable[[], None], failsafe: Failsafe) -> None:
        self.calls: list[ModuleCall] = []
        self.gone: deque[ModuleCall] = deque(maxlen=KEPT_CALLS)  # of which nothing is left but that they have returned a number
        self.seen = Met()
        self._met: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # and all that were called
        self.busy = False  # during a backward pass, and work of our own
        self.account = Balance(KEPT_CALLS * KEPT_BYTES)
        self.still_read: Callable[[], set[Address] | None] = set  # see `Tape.still_read`
        self.caller: Callable[[], tuple[CodeType | None, int]] = lambda: (None, -1)
        self.came_out: Callable[[str, Iterable[Tensor]], bool] = lambda name, tensors: True  # see `Tape.came_out`
        self.spoilt: Callable[[], list[Tensor]] = list  # see `Remains.spoilt`
        self.meets: Callable[[nn.Module], None] = lambda module: None  # see `Remains.meet`
        self.failsafe = failsafe
        self._suspend, self._resume = suspend, resume
        self.noting: Parts | None = None  # `parts`, while a model is called with gradients enabled
        self.parts: Parts | None = None  # where there are other ranks, without which the model may not be run again
        self._open: nn.Module | None = None
        self._depth = 0
        self._began: Began | None = None
        self._outputs: dict[Address, str] = {}
        self._count = 0  # calls so far
        self._waiting: list[ModuleCall] = []  # from before the last backward pass, which has not differentiated them
        self._beside: list[ModuleCall] = []  # of which it has differentiated one output, and not another one
        self._frozen: list[ModuleCall] = []  # without gradient: of a reference model, or before the epochs over a batch
        self._frozen_outputs: dict[Address, tuple[str, Any]] = {}  # class, and weak handle on the tensor
        self._outputs_due = KEPT_CALLS  # with more of them it is time to look which are gone
        self._without = Met()  # modules that made them
        self._with = Met()  # modules that were called with gradients enabled
        self._due = 2  # with more calls than these it is time to look for those of which nothing is left
        self._weighted: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._holds: weakref.WeakKeyDictionary[nn.Module, tuple[generators.Path, ...]] = weakref.WeakKeyDictionary()
        self._before: dict[Address, tuple[str, Any]] = {}  # outputs that losses read which are not written down: class, and weak handle
        self._names: dict[int, str] = {}  # id of a parameter → its name, until the next backward pass

    def forget(self) -> None:
        """Let go of the calls that are remembered."""
        self.reset()
        self.let_go()

    def let_go(self) -> None:
        """Hold nothing of the calls that are over."""
        for call in self.finish()[0]:
            call.let_go()
        self._let_go_of_frozen(())

    def reset(self) -> None:
        """Close what an exception left open."""
        self._open, self._depth, self._began = None, 0, None
        self._resume()

    def _begin(self, module: nn.Module, args: Any, frame: FrameType) -> None:
        if self.busy or is_traced() or is_ours():
            return
        weighted = self._weighted.get(module)
        if weighted is None:
            weighted = self._weighted[module] = has_weights(module)
            self._holds[module] = generators.paths_in(module) if weighted else ()
        if weighted and transform() is not None:  # it cannot be run again outside of that: what it computes is recorded as a loss is
            (self._with if torch.is_grad_enabled() else self._without).add(module)
            self._meet(module)
        elif weighted:
            self._suspend(module)  # before our own calls, which nobody else may be there to see
            self._open, self._depth = module, 1
            with unseen():
                if module not in self._met:
                    self._met.add(module)
                    self.failsafe("remains", self.meets, module)
                found = (*generators.given([args, keywords_of(frame)]), *generators.held(self._holds.get(module, ())))
                self._began = _began(module.training, found)
                self._note_parts(torch.is_grad_enabled())

    def _note_parts(self, grad: bool) -> None:
        """Note what autograd makes in which part of a model that is called now, or nothing."""
        if self.parts is None and has_peers():
            self.parts = Parts()
        self.noting = self.parts if grad else None
        if self.noting is not None:
            self.noting.begin()

    def _end(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self._open = None
        began, self._began = self._began, None
        try:
            if began is not None and output is not None:
                with unseen():
                    call = self._call_of(module, began, args, kwargs, output)
                    if call is not None:
                        call.numbers = _numbers_in(output) if call.roots else ()
                        self._remember(call)
        finally:
            self._resume()

    def begin_function(self, given: Iterable[Any]) -> Began | None:
        """A function that torch has compiled is called: return what `end_function` is told; None where it is a part of something else.

        given: generators among its arguments.
        """
        return None if self.busy or self._open is not None or is_traced() or is_ours() else _began(None, given)

    def end_function(self, function: Compiled, began: Began, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Returned) -> None:
        """It has returned."""
        call = self._call_of(function, began, args, kwargs, returned.value)
        if call is None:
            return
        call.told = returned.known
        given = {id(tensor) for tensor in tensors_in([args, kwargs])}
        if self.came_out(call.name, (tensor for tensor in tensors_in(returned.value) if id(tensor) not in given)) or not call.told:
            self._remember(call)

    def _call_of(self, module: nn.Module, began: Began, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> ModuleCall | None:
        outputs = [tensor for tensor in made_in(output) if not refuses(tensor) and tensor.layout is torch.strided]
        try:
            places, versions = [place_of(tensor) for tensor in outputs], versions_in([args, kwargs])
        except RuntimeError:  # what torch.func wraps has no memory of its own, and cannot be run again outside of it
            return None
        self._count += 1
        call = ModuleCall(module, args, kwargs, places, versions, *began, self._count)
        call.made, call.caller = [weak_tensor(tensor) for tensor in outputs], self.caller()
        call.roots = frozenset(place for place, tensor in zip(places, outputs, strict=True) if tensor.requires_grad)
        return call

    def _meet(self, module: nn.Module) -> None:
        """A module is called for the first time: what had no name before may be one of its weights."""
        self.seen.add(module)
        self._names = {}

    def _remember(self, call: ModuleCall) -> None:
        if not call.grad:
            self._remember_frozen(call, call.name)
            return
        for model in call.models:
            if model not in self.seen:
                self._meet(model)
            self._with.add(model)
        self._hold(call, self.calls, KEPT_BYTES)
        self.calls.append(call)
        if len(self.calls) > self._due:
            self._collect()
        self._outputs = _outputs_of((*self._beside, *self._waiting, *self.calls))

    def _remember_frozen(self, call: ModuleCall, name: str) -> None:
        """Remember a call without gradient while something that it made is alive: no backward pass says that it is over."""
        for model in call.models:
            self._without.add(model)
        self._hold(call, [], self.account.budget // KEPT_CALLS if is_simple([call.args, call.kwargs]) else -1)
        self._frozen.append(call)
        if not isinstance(call.module, Compiled):
            self._frozen_outputs.update((place, (name, made)) for place, made in zip(call.outputs, call.made, strict=True))
        if len(self._frozen) > KEPT_FROZEN:
            kept = [known for known in self._frozen if not known.is_gone()][-KEPT_FROZEN:]
            self._let_go_of_frozen({known.number for known in kept})

    def _let_go_of_frozen(self, but: Collection[int]) -> None:
        for call in self._frozen:
            if call.number not in but:
                call.let_go()
        self._frozen = [call for call in self._frozen if call.number in but]
        if not but:
            self._frozen_outputs = {}
        elif len(self._frozen_outputs) > self._outputs_due:  # a rollout may hold them all
            self._frozen_outputs = {place: known for place, known in self._frozen_outputs.items() if not known[1].expired()}
            self._outputs_due = max(KEPT_CALLS, 2 * len(self._frozen_outputs))

    def _hold(self, call: ModuleCall, older: list[ModuleCall], limit: int) -> None:
        """Hold the arguments of a call if they are small enough; older calls that nobody has differentiated so far make room."""
        given = list(tensors_in([call.args, call.kwargs]))
        call.holding = Holding(self.account)
        waiting = (known for known in older if known.args is not None)
        if any(map(refuses, given)) or sum(map(_bytes, given)) > limit:
            call.let_go()
        if isinstance(call.module, Compiled) and any(tensor.dim() > 2 and _bytes(tensor) > self.account.budget // WIDE for tensor in given):
            call.let_go()
        while call.args is not None and not (call.holding.add(*given, *call.rng) or call.holding.add(*given)):
            next(waiting, call).let_go()

    def _collect(self) -> None:
        """Let go of calls whose outputs are gone, together with all that was made of them: nobody will differentiate those."""
        read = self.still_read()
        for call in reversed(self.calls):  # what one was given may be what an earlier one made
            if read is not None and call.is_gone() and read.isdisjoint(call.outputs):
                call.let_go()
                call.outputs.clear()
                if call.numbers:
                    self.gone.append(call)
        self.calls = [call for call in self.calls if call.outputs or not call.told][-KEPT_CALLS:]
        self._due = min(KEPT_CALLS, max(2, 2 * len(self.calls)))

    def output_of(self, tensor: Tensor) -> str | None:
        """Return the class of the outermost module that a tensor is an output of, None if it is none's."""
        if not (self._outputs or self._frozen_outputs or self._before):
            return None
        place = address(tensor)
        name, made = self._before.get(place) or self._frozen_outputs.get(place, ("", None))
        return self._outputs.get(place) or (name if made is not None and not made.expired() else None)

    def parameter_name(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter of the modules seen, None if the tensor is not one."""
        if not isinstance(tensor, nn.Parameter):
            return None
        if not self._names:
            self._names = {key: name for key, (name, _) in self.parameters().items()}
        if id(tensor) not in self._names:
            self._names = {key: name for key, (name, _) in self._parameters_of(self._without).items()} | self._names
        return self._names.setdefault(id(tensor), NAMELESS)

    def weight_at(self, tensor: Tensor) -> str | None:
        """Return the name of the weight that lies where a tensor does, None if none does: what a model has detached is none to torch."""
        return self.weight_there(place_of(tensor))

    def weight_there(self, place: Address) -> str | None:
        """Return the name of the weight that lies at an address."""
        return next((name for name, parameter in (self.weights() if place != NOWHERE else ()) if place_of(parameter) == place), None)

    def buffer_at(self, tensor: Tensor) -> str | None:
        """Return the name of the buffer of a model that lies where a tensor does, None if none does."""
        return self.buffer_there(place_of(tensor))

    def buffer_there(self, place: Address) -> str | None:
        """Return the name of the buffer that lies at an address."""
        known = self.buffers() if place != NOWHERE else ()
        return next((name for name, buffer in known if place_of(buffer) == place), None)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of all outermost modules seen, with their names."""
        for model in self.outermost():
            of = "" if model in self._with else self._ending(model)
            yield from ((name + of, buffer) for name, buffer in model.named_buffers())

    def outermost(self) -> list[nn.Module]:
        """Return the outermost modules seen, with gradients enabled or without."""
        return [*self.seen, *self._without]

    def parameters(self) -> dict[int, tuple[str, nn.Parameter]]:
        """Return the parameters of all outermost modules seen with gradients enabled: id → name, parameter."""
        return self._parameters_of(self.seen)

    def weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all outermost modules seen, with gradients enabled or without, with their names."""
        yield from self.parameters().values()
        yield from self._parameters_of(self._without).values()

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the modules seen; where none has one, of those that ran without: a reentrant checkpoint."""
        for modules in (self.seen, self._without):
            weights = {id(weight): weight for module in list(modules) for weight in module.parameters()}
            found = [weight.grad for weight in weights.values() if weight.grad is not None]
            if found:
                return found
        return []

    def memory(self) -> Iterator[Tensor]:
        """Yield the weights, buffers and gradients of all models that were called."""
        for module in self.outermost():
            yield from (*module.parameters(), *module.buffers(), *(one.grad for one in module.parameters() if one.grad is not None))

    def untrained(self) -> Iterator[Tensor]:
        """Yield the weights and buffers of the models that were called without gradient alone."""
        trained = {id(one) for module in list(self._with) for one in (*module.parameters(), *module.buffers())} if self._without else set()
        for module in list(self._without):
            yield from (one for one in (*module.parameters(), *module.buffers()) if id(one) not in trained)

    def _parameters_of(self, modules: Iterable[nn.Module]) -> dict[int, tuple[str, nn.Parameter]]:
        """The parameters of modules; a frozen copy of a model has the names of the model itself, and is told apart."""
        trained = {id(parameter) for module in list(self._with) for parameter in module.parameters()} if self._without else set()
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for module in list(modules):
            of = self._ending(module)
            for name, parameter in module.named_parameters():
                known = found.get(id(parameter), ("", parameter))[0]
                if not known or _is_fuller(name, known.removesuffix(of)):
                    found[id(parameter)] = (name if id(parameter) in trained else name + of, parameter)
        return found

    def _ending(self, module: nn.Module) -> str:
        """How the names end in a model that ran without gradient."""
        return f" of a {type(module).__name__} {FROZEN}" if module in self._without else ""

    def so_far(self) -> tuple[list[ModuleCall], list[ModuleCall]]:
        """Return what `finish` would, and forget nothing."""
        return list(self.calls), [call for call in self._frozen if not call.is_gone()]

    def finish(self) -> tuple[list[ModuleCall], list[ModuleCall]]:
        """Return the calls with gradient remembered since the last time, and forget them; and those without of which something is left."""
        beside = []
        for call in self._beside:
            if call.roots_left():
                beside.append(call)
            else:
                call.let_go()
        calls, self.calls, self._outputs, self._names = [*self._waiting, *beside, *self.calls], [], {}, {}
        self._waiting, self._beside = [], []
        self.gone.clear()
        self._due = min(KEPT_CALLS, max(2, 2 * len(calls), self._due - 1))  # of several losses by turns each has calls of its own
        self._let_go_of_frozen({call.number for call in self._frozen if not call.is_gone()})
        return calls, list(self._frozen)

    def came_before(self, calls: Sequence[ModuleCall]) -> None:
        """Remember the outputs of calls which a loss reads that is written down later, if at all; none: all of them are forgotten."""
        outputs = ((place, (call.name, made)) for call in calls for place, made in zip(call.outputs, call.made, strict=False))
        self._before = {**self._before, **dict(outputs)} if calls else {}

    def wait(self, calls: Iterable[ModuleCall], read: Set[Address], own: Set[Address]) -> None:
        """A backward pass was, and its graph is gone: remember those of its calls that another one may come to. read: outputs of which
        something is left that it may begin at. own: those that it has been through."""
        for call in calls:
            waits = not read.isdisjoint(place for place in call.outputs if place not in own) or own.isdisjoint(call.outputs)
            if not call.told:  # whether another one comes to it nobody knows
                waits = bool(read) and len(self._waiting) < KEPT_FROZEN
            if not call.is_gone() and (waits or call.roots_left() - own):
                holding = Holding(self.account)
                holding.add(*tensors_in([call.args, call.kwargs]), *call.rng, needed=True)
                (self._waiting if waits else self._beside).append(replace(call, holding=holding))
        self._outputs = _outputs_of((*self._beside, *self._waiting))


def _began(training: bool | None, found: Iterable[Any]) -> Began | None:
    """What a call begins with; None for a function in a transform (vmap, grad), which hands over tensors that stand for others. found:
    generators."""
    grad = torch.is_grad_enabled()
    if transform() is not None:
        return None
    return rng_state() if grad or training else (), autocast_state(), grad, training, generators.standing(found)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _outputs_of(calls: Iterable[ModuleCall]) -> dict[Address, str]:
    """The outputs of modules; of those of functions the tape is told when they come out."""
    return {place: call.name for call in calls if not isinstance(call.module, Compiled) for place in call.outputs}


def _is_fuller(name: str, other: str) -> bool:
    """Of two names of one weight, is it that in the larger module? What a wrapper puts before all names says nothing."""
    one, two = ([part for part in found.split(".") if part not in WRAPPERS] for found in (name, other))
    return (len(one), other.count(".")) > (len(two), name.count("."))


class Own(threading.local):
    """What a thread has of its own. modules: where it is in the model, None while nobody watches it."""

    modules: ModuleWatch | None = None


def install(own: Own, begin: Callable[[], None], failsafe: Failsafe, undo: contextlib.ExitStack) -> None:
    """Register the hooks. begin: called in a thread that is not watched so far and calls a part of the model. undo: takes them off."""

    def before(module: nn.Module, args: Any) -> None:
        watch = own.modules
        if watch is not None and watch._open is not None and module is not watch._open and watch.noting is None:
            return  # a part of the model: most calls are of those
        if torch.compiler.is_compiling():
            return
        if watch is None:
            failsafe("thread", _meet, module, begin)
            watch = own.modules
        if watch is None:
            return
        if watch._open is None:
            failsafe("module-begins", watch._begin, module, args, sys._getframe(1))
        elif module is watch._open:
            watch._depth += 1
        elif watch.noting is not None:
            watch.noting.enter(module)

    def after(module: nn.Module, args: Any, *rest: Any) -> None:
        watch = own.modules
        if watch is None or watch._open is None or (module is not watch._open and watch.noting is None) or torch.compiler.is_compiling():
            return
        if module is watch._open:
            watch._depth -= 1
            if not watch._depth:
                # torch hands over (kwargs, output), but after an exception only None
                failsafe("module-ends", watch._end, module, args, *(rest if len(rest) == 2 else ({}, None)))
        elif watch.noting is not None:
            watch.noting.leave(module)

    first = hooks.register_module_forward_pre_hook(before)
    undo.callback(first.remove)
    second = hooks.register_module_forward_hook(after, with_kwargs=True, always_call=True)
    undo.callback(forward_hooks_with_kwargs.pop, second.id, None)  # torch's handle forgets this one
    undo.callback(second.remove)
    # torch warns whoever compiles a module that hooks like ours fire once more for it; they are made for that.
    if _HOOK_WARNING not in warnings.filters:
        warnings.filterwarnings("ignore", message=_HOOK_WARNING[1].pattern)
        undo.enter_context(contextlib.suppress(ValueError))  # somebody may have put other filters there
        undo.callback(warnings.filters.remove, _HOOK_WARNING)  # type: ignore[attr-defined]
    for function in (before, after, Failsafe.__call__, failsafe.door("", print)):
        never_compile(function)
    registers: list[dict[int, Any]] = [
        pre_hooks,
        forward_hooks,
        forward_hooks_with_kwargs,
        forward_hooks_always_called,
    ]
    failsafe("compiler", hide, registers, {first.id, second.id}, failsafe, undo)


def _meet(module: nn.Module, begin: Callable[[], None]) -> None:
    if has_weights(module) and not torch.is_inference_mode_enabled():  # whoever trains does not sample like that
        begin()
