"""Only on a hit: the second look into the model, and what of it goes into a file.

The tape sleeps while a module with weights runs. If the harm came out of one, that module is run again on the inputs it had, with
the generators as they were and the tape awake, and the two programs are joined into one. What the second look does not reproduce was
transient.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode

from nanscope.capture.follow import Follower, Made, MadeBackward, kinds_of, made_backward, part_of
from nanscope.capture.modules import Address, ModuleCall, ModuleWatch, address, tensors_in
from nanscope.capture.tape import Tape, TapeMode
from nanscope.program.calls import Arg, Computes, substitute
from nanscope.program.numbers import same_bits
from nanscope.program.program import Program, join


def second_look(
    program: Program | None, tensors: Mapping[int, Tensor], calls: list[ModuleCall], budget: int, watch: ModuleWatch
) -> tuple[Program, dict[int, Tensor]] | None:
    """Return the program from the model's inputs and parameters to the loss, and its leaves; None if nothing can be run again.

    Raises RuntimeError if the module itself fails.
    """
    if program is None or not any(call.args is not None for call in calls):
        return None
    parts: list[Program] = []
    leaves: dict[int, Tensor] = dict(tensors)
    wanted = {address(tensor): value for value, tensor in tensors.items() if tensor.is_floating_point()}
    offset = program.new_id()
    for call in reversed(calls):  # the last call first: what it reads may be what an earlier one made
        if call.args is None or not any(place in wanted for place in call.outputs):
            continue
        tape = Tape(budget)
        tape.is_parameter = watch.parameter_name
        outputs = _run_again(call, TapeMode(tape), tape, watch)
        mapping: dict[int, int] = {}
        for place, tensor in zip(call.outputs, outputs, strict=False):
            target, value = wanted.get(place), tape.find(tensor)
            if target is None or value is None or not same_bits(tensor, leaves[target]):
                continue  # not read by the loss, or transient: it does not come out again
            try:
                part, own = tape.program(value)
            except LookupError:
                continue
            for old in [leaf.id for leaf in part.leaves] + [out for c in part.calls for out in c.outs if out is not None]:
                mapping.setdefault(old, offset + old)
            for leaf in part.leaves:
                known = wanted.get(address(own[leaf.id]))
                if known is not None and leaf.origin != "parameter":
                    mapping[leaf.id] = known
                leaves[mapping[leaf.id]] = own[leaf.id]
                if leaf.origin not in ("parameter", "data"):
                    wanted.setdefault(address(own[leaf.id]), mapping[leaf.id])
            mapping[part.output] = target
            parts.insert(0, _renumber(part, mapping))
        offset += tape.length
    if not parts:
        return None
    whole = join([*parts, program]).slice()
    return whole, {leaf.id: leaves[leaf.id] for leaf in whole.leaves}


SMALL_GROUP = 64 << 20  # bytes of the weights of a group that are copied to make their update once more


def update_again(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, budget: int, first: bool
) -> tuple[Program, dict[int, Tensor]] | None:
    """Return the program of the update that an optimizer made to one parameter, and its leaves; None if it does not come out again.

    The update is made once more on copies, with the state that it left behind: what was non-finite in weight and state counts as 0, as
    the best that is still known of what was there before. first: it was the optimizer's first step, before which there was no state. The
    whole group is copied if it is small: an optimizer may stack its weights.
    """
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    members = group["params"] if sum(p.numel() * p.element_size() for p in group["params"]) <= SMALL_GROUP else [parameter]
    twins = {id(member): _twin(member) for member in members}
    twin = twins[id(parameter)]
    plain: dict[str, Any] = {key: False for key in ("foreach", "fused", "capturable") if key in group}
    copied = object.__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    copied.param_groups = [{**group, **plain, "params": list(twins.values())}]
    copied.state = defaultdict(dict, {} if first else {twins[id(member)]: _copied(optimizer.state.get(member, {})) for member in members})
    tape = Tape(budget)
    tape.is_parameter = lambda tensor: name if tensor is twin else None
    for key, value in (("gradient", twin.grad), *copied.state[twin].items()):
        if isinstance(value, Tensor):
            tape.tag(key, value)
    step = type(optimizer).step
    with torch.random.fork_rng(devices=[]), TapeMode(tape):
        getattr(step, "__wrapped__", step)(copied)  # without the hooks that people have put on the real one
    value = tape.find(twin)
    if value is None:
        return None
    program, tensors = tape.program(value)
    return replace(program, computes=Computes.UPDATE), tensors


def _twin(parameter: nn.Parameter) -> nn.Parameter:
    twin = nn.Parameter(_finite(parameter), requires_grad=False)
    twin.grad = None if parameter.grad is None else parameter.grad.detach().clone()
    return twin


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: _finite(value) if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in state.items()}


def _finite(tensor: Tensor) -> Tensor:
    content = tensor.detach().clone()
    return content.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0) if content.is_floating_point() else content


def _without_others(module: nn.Module) -> nn.Module | None:
    """The module as it can be run by this process alone, None if every run of it needs the other ranks, too.

    One rank runs a module again because of what only it has seen: a collective in there would wait for ever.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module = module.module
    kinds = {type(part).__name__ for part in module.modules()}
    sharded = any(type(parameter).__name__ == "DTensor" for parameter in module.parameters())
    return None if sharded or any(name.startswith(("FSDP", "FullySharded", "DistributedDataParallel")) for name in kinds) else module


def _run_again(call: ModuleCall, mode: TorchDispatchMode, follower: Tape | Follower, watch: ModuleWatch) -> list[Tensor]:
    module = _without_others(call.module)
    if module is None:
        raise LookupError(f"{type(call.module).__name__} is spread over several ranks and cannot be run again by one of them")
    devices = list(range(torch.cuda.device_count())) if len(call.rng) > 1 else []
    watch.busy = True
    paths = {part: f"{path} ({type(part).__name__})" if path else type(part).__name__ for path, part in module.named_modules()}
    with torch.random.fork_rng(devices=devices), contextlib.ExitStack() as stack:
        torch.set_rng_state(call.rng[0])
        if len(call.rng) > 1:
            torch.cuda.set_rng_state(call.rng[1])
        for device, dtype in call.autocast.items():
            stack.enter_context(torch.autocast(device, dtype=dtype))
        stack.enter_context(_buffers_kept(module))
        stack.enter_context(_following(follower, paths))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(mode)
        try:
            output = module(*(call.args or ()), **call.kwargs)
        finally:
            watch.busy = False
    return [tensor for tensor in tensors_in(output) if tensor.layout is torch.strided]


@contextlib.contextmanager
def _buffers_kept(module: torch.nn.Module) -> Iterator[None]:
    """Running statistics and the like must not move because we looked."""
    saved = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, content in saved:
                if not same_bits(buffer, content):
                    buffer.copy_(content)


@contextlib.contextmanager
def _following(follower: Tape | Follower, paths: Mapping[torch.nn.Module, str]) -> Iterator[None]:
    """Tell who follows which part of the model each call is made in."""
    before: list[tuple[str, int]] = []

    def enter(module: torch.nn.Module, args: object) -> None:
        before.append((follower.current_module, torch._C._autograd._get_sequence_nr()))
        follower.current_module = paths.get(module, follower.current_module)

    def leave(module: torch.nn.Module, args: object, output: object) -> None:
        outer, begin = before.pop() if before else ("", 0)
        if isinstance(follower, Follower):
            follower.spans.append((begin, torch._C._autograd._get_sequence_nr(), follower.current_module))
        follower.current_module = outer

    handles = [hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in reversed(handles):
            handle.remove()


def output_again(place: Address, calls: list[ModuleCall], watch: ModuleWatch) -> Tensor | None:
    """Return an output of the model once more, by the address that it had; None if no remembered call made it."""
    for call in reversed(calls):
        if call.args is not None and place in call.outputs:
            tape = Tape(1)
            outputs = _run_again(call, TapeMode(tape), tape, watch)
            return dict(zip(call.outputs, outputs, strict=False)).get(place)
    return None


def follow(tensors: Mapping[int, Tensor], calls: list[ModuleCall], watch: ModuleWatch) -> Made | None:
    """Run the modules once more whose outputs are bad, and return the call in there that made it; None if it does not come out again.

    tensors: leaves of the recorded program, by id.
    """
    bad = {address(tensor) for tensor in tensors.values() if kinds_of(tensor)}
    for call in reversed(calls):
        if call.args is None or not any(place in bad for place in call.outputs):
            continue
        follower = Follower()
        outputs = _run_again(call, follower, follower, watch)
        for place, tensor in zip(call.outputs, outputs, strict=False):
            made = follower.made(tensor) if place in bad and kinds_of(tensor) else None
            if made is not None:
                return made
    return None


def follow_back(
    tensors: Mapping[int, Tensor], grads: Mapping[int, Tensor], calls: list[ModuleCall], watch: ModuleWatch
) -> tuple[MadeBackward, str] | None:
    """Differentiate the modules once more and return the autograd node that made a bad gradient, and the part of the model it is in.

    tensors, grads: leaves of the recorded program and the gradients that came to them, by id.
    """
    for call in reversed(calls):
        seeds = {address(tensor): grads[value] for value, tensor in tensors.items() if value in grads}
        if call.args is None or not any(place in seeds for place in call.outputs):
            continue
        follower = Follower()
        outputs = _run_again(call, follower, follower, watch)
        pairs = [(t, seeds[place]) for place, t in zip(call.outputs, outputs, strict=False) if place in seeds and t.requires_grad]
        wanted = [parameter for parameter in call.module.parameters() if parameter.requires_grad]
        if not pairs or not wanted:
            continue
        watch.busy = True
        try:
            made = made_backward([tensor for tensor, _ in pairs], [seed for _, seed in pairs], wanted)
        finally:
            watch.busy = False
        if made is not None:
            return made, part_of(made.number, follower.spans)
    return None


def _renumber(program: Program, mapping: Mapping[int, int]) -> Program:
    def moved(args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        return tuple(substitute(arg, mapping) for arg in args)

    return Program(
        tuple(replace(leaf, id=mapping[leaf.id]) for leaf in program.leaves),
        tuple(
            replace(
                call,
                args=moved(call.args),
                kwargs=tuple((name, substitute(arg, mapping)) for name, arg in call.kwargs),
                outs=tuple(None if out is None else mapping[out] for out in call.outs),
            )
            for call in program.calls
        ),
        mapping.get(program.output, program.output),
        program.sites,
    )
