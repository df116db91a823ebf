"""A bad step, looked at while it is still in memory: what is needed to explain it later, and what of that goes into the file."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanscope import diagnose
from nanscope.capture import autopsy, functions, kernels
from nanscope.capture.functions import Backward
from nanscope.capture.modules import ModuleCall, ModuleWatch
from nanscope.capture.source import variables
from nanscope.capture.tape import Taken, Tape
from nanscope.case import gradient_observation, made_observation, observation, weight_observation
from nanscope.elements import at, first_nonfinite
from nanscope.errors import NanscopeError, ProgramError
from nanscope.frameworks import Framework
from nanscope.frameworks.live import Glimpse
from nanscope.locate import Location, Phase, came_in, is_masked, locate, spike, spotted
from nanscope.ops import base_name
from nanscope.program import Computes, Program, Ref, Run, Site
from nanscope.replay import replay
from nanscope.snapshot import Snapshot, load, tensor_bytes
from nanscope.summary import is_finite, norms

log = logging.getLogger("nanscope")


def finite_batch(recording: Recording) -> list[Tensor]:
    """Return, for a kernel that drops NaN, whether each part of its batch is finite: bool scalars, still on the device."""
    found = kernels.kernel_of(recording.glimpses)
    if found is None or not found[0].drops_nan:
        return []
    parts = [recording.taken[name].content() for name, _ in found[0].tensors if name in recording.taken]
    return [is_finite(part) for part in parts if part is not None and part.is_floating_point()]


HIDDEN = -1  # stands among the leaves for what a kernel was given of the model


@dataclass(slots=True)
class Recording:
    """One backward pass: the program that led to it, and what is needed to look closer.

    program: None if the loss was not recorded. flags: bool scalars, true where the loss or a gradient at its edge is finite; they stay on
    the device until somebody asks. grads: leaf id → gradient. scaled: a GradScaler multiplied the loss. glimpses: what was seen of the
    frameworks' loss functions. backwards: of custom autograd functions, where they may have spoilt a gradient. taken: arguments of a kernel
    among the functions, by name. given: as `flags`, of a batch that a kernel was given
    which drops NaN.
    """

    program: Program | None
    tensors: dict[int, Tensor]
    loss: Tensor
    calls: list[ModuleCall]
    scaled: bool
    flags: list[Tensor] = field(default_factory=list)
    grads: dict[int, Tensor] = field(default_factory=dict)
    examined: bool = False
    given: list[Tensor] = field(default_factory=list)
    glimpses: tuple[Glimpse, ...] = ()
    taken: dict[str, Taken] = field(default_factory=dict)
    backwards: list[Backward] = field(default_factory=list)

    def hidden(self) -> Tensor | None:
        """What a kernel was given of the model, None if there was no kernel or it was not held."""
        found = kernels.kernel_of(self.glimpses)
        taken = self.taken.get(found[0].hidden) if found is not None else None
        return taken.content() if taken is not None else None

    def edge(self) -> dict[int, Tensor]:
        """Return what the loss reads: the leaves of the program, and what a kernel was given of the model, as HIDDEN."""
        hidden = self.hidden()
        return self.tensors if hidden is None else {**self.tensors, HIDDEN: hidden}

    @property
    def value(self) -> float | None:
        """The loss as a number, None if it is not a scalar."""
        return float(self.loss) if self.loss.numel() == 1 else None


@dataclass(frozen=True, slots=True)
class Look:
    """A program with a run of it and what went wrong in it. second: the model's forward is part of the program. seen: where there is no
    program, what a snapshot keeps of the origin. kernel: the program is what a kernel's loss was written out as. notes: slug and text."""

    program: Program
    tensors: dict[int, Tensor]
    run: Run | None
    location: Location | None
    second: bool = False
    seen: dict[str, Any] | None = None
    kernel: bool = False
    notes: tuple[tuple[str, str], ...] = ()


BY_HAND = 256.0  # a loss multiplied by this or more is scaled against underflow; whoever does that also skips steps that overflow


def scaled_by_hand(program: Program | None, tensors: Mapping[int, Tensor]) -> bool:
    """Is the last thing done to the loss a multiplication by a large constant?"""
    if program is None or not program.calls or base_name(program.calls[-1].op) != "mul":
        return False
    for arg in program.calls[-1].args:
        factor: object = arg
        if isinstance(arg, Ref) and arg.id in tensors and tensors[arg.id].numel() == 1 and tensors[arg.id].is_cpu:
            factor = float(tensors[arg.id])  # elsewhere reading it would wait for the device in every step
        if isinstance(factor, (int, float)) and factor >= BY_HAND:
            return True
    return False


LARGEST_CALL = 8 << 20  # bytes of the operands of a single call inside the model that are saved
NOTHING = Look(Program((), (), -1), {}, None, None)


def second_look(recording: Recording, budget: int, watch: ModuleWatch) -> Look | None:
    """Run the model's forward once more under a tape and walk through it; None if that is not possible."""
    try:
        looked = autopsy.second_look(recording.program, recording.tensors, recording.calls, budget, watch)
        if looked is None:
            return None
        program, tensors = looked
        run = program.execute(tensors, trace=True)
        return Look(program, tensors, run, locate(program, run), second=True)
    except (ProgramError, LookupError, RuntimeError) as error:
        log.warning("nanscope [second-look-failed]: %s", error)
        return None


def kernel_look(recording: Recording, budget: int, watch: ModuleWatch) -> Look | None:
    """Look into a kernel that computed the loss, by running its formula on what it was given; None if there was none."""
    try:
        opened = kernels.reopen(recording.glimpses, _given(recording, watch), budget)
        if opened is None:
            return None
        program, tensors = opened
        run = program.execute(tensors, trace=True)
        return Look(program, tensors, run, locate(program, run), True, kernel=True, notes=(_kernel_note(recording, run, program),))
    except Exception as error:  # noqa: BLE001 - the formula is the framework's, and what it needs may not all be here
        log.warning("nanscope [kernel-unopened]: %s: %s", type(error).__name__, error)
        return None


def swallowed_look(recording: Recording, budget: int, watch: ModuleWatch) -> Look | None:
    """Look at a step that stayed finite because a kernel dropped a NaN of its batch; None if it harmed no token that counts."""
    found = kernels.kernel_of(recording.glimpses)
    taken = {name: content for name, taken in recording.taken.items() if (content := taken.content()) is not None}
    if found is None or not kernels.swallowed(found[0], taken):
        return None
    return kernel_look(recording, budget, watch)


def _given(recording: Recording, watch: ModuleWatch) -> dict[str, Tensor]:
    """Return the arguments of a kernel. What was not held, or what its backward has overwritten, is made again by the model."""
    given = {name: content for name, taken in recording.taken.items() if (content := taken.content()) is not None}
    found = kernels.kernel_of(recording.glimpses)
    if found is not None and found[0].hidden in recording.taken and (not found[0].weight or found[0].hidden not in given):
        given.pop(found[0].hidden, None)
        again = autopsy.output_again(recording.taken[found[0].hidden].address, recording.calls, watch)
        given |= {} if again is None else {found[0].hidden: again}
    return given


AGREES = 1e-3  # relative; a kernel adds in another order, and in lower precision


def _kernel_note(recording: Recording, run: Run, program: Program) -> tuple[str, str]:
    """Say what a kernel's loss is beside that of its formula."""
    found = kernels.kernel_of(recording.glimpses)
    name = found[1].site.function.split(".")[0] if found is not None else "a kernel"
    theirs, ours = recording.value, float(run.values[program.output].double().sum())
    if theirs is None or (math.isfinite(theirs) == math.isfinite(ours) and not abs(theirs - ours) > AGREES * max(abs(ours), 1e-3)):
        return ("kernel_opened", f"{name} computes the loss inside one kernel; its formula was run again on the same batch")
    if math.isfinite(theirs) and not math.isfinite(ours):
        text = f"{name} hides it: its loss is {theirs:.6g}, the same formula gives {ours}; min and max of a Triton kernel drop a NaN"
        return ("kernel_swallows", text)
    return ("kernel_differs", f"{name} gives {theirs:.6g}, its formula on the same batch {ours:.6g}")


def deeper_look(recording: Recording, budget: int, watch: ModuleWatch, backward: bool = False) -> Look | None:
    """Look into a kernel, then into the model: by running it as a program, and where that does not reach the origin, by following its
    calls.

    backward: the loss is finite, a gradient is not.
    """
    opened = kernel_look(recording, budget, watch)
    if opened is not None and opened.location is not None and is_settled(opened.location):
        return opened
    own = function_look(recording, budget) if backward else None
    if own is not None:
        return own
    look = second_look(recording, budget, watch) or opened
    if look is not None and look.location is not None and is_settled(look.location):
        return look
    if recording.program is None:
        return look
    try:
        return (_followed_back(recording, watch) if backward else _followed(recording, watch)) or look
    except Exception as error:  # noqa: BLE001 - the model is anybody's code, and may not like to be run again
        log.warning("nanscope [second-look-failed]: %s: %s", type(error).__name__, error)
        return look


def function_look(recording: Recording, budget: int) -> Look | None:
    """Run the backward of a custom autograd function once more that made NaN out of finite gradients; None if none did."""
    for found in recording.backwards:
        if not found.spoilt():
            continue
        if not bool(is_finite(recording.tensors[found.leaf])):
            return _of_forward(recording, found)
        try:
            again = functions.run_again(found, budget)
            look = _walked(*again) if again is not None else None
            if look is not None and look.location is not None and look.location.origin.born:
                return replace(look, seen=_counted(recording, found.leaf, look.location))
        except Exception as error:  # noqa: BLE001 - the function is anybody's code
            log.warning("nanscope [second-look-failed]: %s: %s", type(error).__name__, error)
        gradient = next(grad for grad in found.returned if grad is not None and not bool(is_finite(grad)))
        name = found.node._forward_cls.__name__
        return _seen(made_observation(name, gradient, first_nonfinite(gradient) or 0, None, "", Phase.BACKWARD))
    return None


def _of_forward(recording: Recording, found: Backward) -> Look:
    """The result of a function overflowed, the loss dropped it, and the function's own backward multiplied it by a zero gradient."""
    assert recording.program is not None
    result = recording.tensors[found.leaf].detach()
    bad = ~torch.isfinite(result)
    alike = [~torch.isfinite(grad) for grad in found.returned if grad is not None and grad.shape == result.shape]
    both = next((bad & other for other in alike if bool((bad & other).any())), bad)
    run = recording.program.execute(recording.tensors, backward=False)
    location = came_in(recording.program, run, found.leaf, int(both.flatten().int().argmax()))
    location = replace(location, origin=replace(location.origin, op=found.node._forward_cls.__name__))
    return _seen({"outside": True, "location": observation(location, recording.program, run)})


def _counted(recording: Recording, leaf: int, location: Location) -> dict[str, Any]:
    """Return, as a snapshot keeps it, whether the loss counts the element of a function's result whose gradient went bad."""
    assert recording.program is not None
    if recording.tensors[leaf].numel() != math.prod(location.origin.shape):
        return {}
    run = recording.program.execute(recording.tensors, backward=False)
    return {"masked": is_masked(recording.program, run, leaf, location.origin.flat)}


def is_settled(location: Location) -> bool:
    """Does a location name the operation, or data, that made the harm, and not only something that hides it?"""
    return location.origin.leaf is None or location.origin.leaf.origin not in ("module", "opaque", "cut")


def _followed(recording: Recording, watch: ModuleWatch) -> Look | None:
    made = autopsy.follow(recording.edge(), recording.calls, watch)
    if made is None:
        return None
    if made.program is not None:
        with contextlib.suppress(ProgramError):
            look = _walked(made.program, made.tensors)
            if look is not None:
                return look
    phase, op, name = Phase.FORWARD, made.op, None
    if made.foreign:
        name = watch.parameter_name(made.result)
        phase, op = (Phase.INPUT, "input") if name is None else (Phase.WEIGHTS, "parameter")
    return _seen(made_observation(op, made.result, made.flat, made.site, made.module, phase, name))


def _seen(observed: dict[str, Any]) -> Look:
    return replace(NOTHING, second=True, seen=observed)


def _followed_back(recording: Recording, watch: ModuleWatch) -> Look | None:
    assert recording.program is not None
    grads: Mapping[int, Tensor] = recording.grads
    if any(leaf.diff and leaf.id not in grads for leaf in recording.program.leaves):
        grads = recording.program.execute(recording.tensors, ends=True).grads
    found = autopsy.follow_back(recording.edge(), grads, recording.calls, watch)
    if found is None:
        return None
    made, module = found
    return _seen(made_observation(made.op, made.gradient, made.flat, None, module, Phase.BACKWARD))


def update_look(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, budget: int, first: bool) -> Look | None:
    """Make the update of one parameter once more and walk through it; None if it cannot be made again. first: the optimizer's first step.

    An update that makes a finite weight out of a finite one was not to blame: the weight was bad before it.
    """
    try:
        again = autopsy.update_again(optimizer, parameter, name, budget, first)
        if again is None:
            return None
        look = _walked(*again)
        if look is None and first_nonfinite(again[0].execute(again[1], ends=True).values[again[0].output]) is None:
            flat = first_nonfinite(parameter.detach()) or 0
            return _seen(made_observation("parameter", parameter.detach(), flat, None, "", Phase.WEIGHTS, name))
        return look
    except Exception as error:  # noqa: BLE001 - an optimizer is anybody's code
        log.warning("nanscope [second-look-failed]: %s: %s", type(error).__name__, error)
        return None


def gradient_look(tape: Tape, gradient: Tensor) -> Look | None:
    """Walk through what the trainer did to a gradient between backward and the optimizer; None if the tape did not see it made."""
    try:
        program, tensors = tape.program(tape.value_of(gradient))
        return _walked(replace(program, computes=Computes.GRADIENT), tensors) if program.calls else None
    except (ProgramError, LookupError):
        return None


def _walked(program: Program, tensors: dict[int, Tensor]) -> Look | None:
    run = program.execute(tensors, trace=True)
    location = locate(program, run)
    return None if location is None else Look(program, tensors, run, location, second=True)


SPIKE = 1e3  # times the largest that a run has seen: more than any healthy change of scale
SETTLED = 3  # steps before a run's own scale is known


@dataclass(slots=True)
class Usual:
    """The largest that a number has been in the healthy steps so far, at least 1. count: of these steps."""

    largest: float = 1.0
    count: int = 0

    def add(self, size: float) -> None:
        """Take a healthy step into account."""
        self.largest, self.count = max(self.largest, size), self.count + 1

    def exceeded(self, size: float) -> bool:
        """Is this out of all proportion? Never in the first steps: a large first loss is no finding."""
        return self.count >= SETTLED and size > SPIKE * self.largest


def look_for_spike(recording: Recording, again: Callable[[], Look | None]) -> Look | None:
    """Find what made a step huge, in the loss or, by `again`, in the model; None if nothing stands out."""
    if recording.program is None:
        return None
    look: Look | None = Look(recording.program, recording.tensors, recording.program.execute(recording.tensors, trace=True), None)
    for _ in range(2):
        if look is None or look.run is None:
            return None
        location = spike(look.program, look.run)
        if location is not None and is_settled(location):
            return replace(look, location=location)
        look = again()
    return None


def look_closely(recording: Recording, again: Callable[[], Look | None]) -> Look:
    """Locate the origin in the recorded loss, and inside the model, by `again`, where it does not lie in the loss."""
    if recording.program is None:
        return NOTHING
    run = recording.program.execute(recording.tensors, trace=True)
    first = Look(recording.program, recording.tensors, run, locate(recording.program, run))
    if first.location is not None and is_settled(first.location):
        return first
    deeper = again()
    return deeper if deeper is not None and (deeper.location is not None or deeper.seen is not None) else first


def to_save(snapshot: Snapshot, look: Look, save_tokens: bool) -> Snapshot:
    """Return what of a snapshot is saved. Where that loses the origin, what was seen of it, and the fixes tried, are written down."""
    program, tensors, grads = autopsy.narrow(snapshot.program, snapshot.tensors, snapshot.grads, save_tokens, look.run)
    if program.computes is Computes.ACTIVATION and tensor_bytes(tensors) > LARGEST_CALL:
        program, tensors, grads = Program((), (), -1), {}, {}  # weights of a real model are not for a file that is attached to an issue
    observed: dict[str, Any] = dict(snapshot.observed)
    narrowed = program is not snapshot.program
    if look.location is not None and look.run is not None and narrowed and not _same_origin(look.location, program, tensors):
        observed |= {"outside": True, "location": observation(look.location, snapshot.program, look.run)}
        with contextlib.suppress(ProgramError):
            observed["rows"] = diagnose.rows_json(replay(snapshot).rows)
    return replace(
        snapshot,
        program=program,
        tensors={value: tensor.detach().clone() for value, tensor in tensors.items()},
        grads={value: grad.detach().clone() for value, grad in grads.items()},
        observed=observed,
    )


def _same_origin(location: Location, program: Program, tensors: Mapping[int, Tensor]) -> bool:
    """Does a program of which parts were cut away still lead to the same origin?"""
    try:
        again = locate(program, program.execute(tensors, trace=True))
    except ProgramError:
        return False
    return again is not None and (again.origin.value_id, again.origin.flat, again.origin.op) == (
        location.origin.value_id,
        location.origin.flat,
        location.origin.op,
    )


def update_seen(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return what an update did to the first weight that it made non-finite, as a snapshot keeps it. names: by id of the parameter."""
    location: dict[str, Any] = {"phase": str(Phase.OPTIMIZER)}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            flat = first_nonfinite(parameter.detach())
            if flat is not None:
                seen = weight_observation(names.get(id(parameter)), parameter, flat, group)
                seen["facts"]["optimizer"] = type(optimizer).__name__
                return {"outside": True, "location": {**location, **seen}}
    return {"outside": True, "location": location}


def overflowing_norm(look: Look | None, site: Site | None) -> dict[str, Any] | None:
    """Return, as a snapshot keeps it, the largest element of the gradients whose norm overflowed; None if all of them are 0.

    look: with the gradients that backward made, before they were clipped.
    """
    grads = look.run.grads if look is not None and look.run is not None else {}
    leaves = [leaf for leaf in look.program.leaves if leaf.origin == "parameter" and leaf.id in grads] if look is not None else []
    if leaves and bool(torch.isfinite(torch.linalg.vector_norm(norms([grads[leaf.id] for leaf in leaves])))):
        return None  # their norm is fine: what the clip saw had gone bad in another way
    largest = max(leaves, key=lambda leaf: float(grads[leaf.id].double().abs().max()), default=None)
    if largest is None:
        return None
    gradient = grads[largest.id].detach()
    flat = int(gradient.double().abs().argmax())
    if not at(gradient, flat):
        return None
    return {"outside": True, "clip": "inf", "location": gradient_observation("linalg_vector_norm", largest.name, gradient, flat, site)}


def overflowing_clip(tape: Tape, gradient: Tensor) -> dict[str, Any] | None:
    """Return, as a snapshot keeps it, what overflowed while the trainer's own code turned a gradient into zeros; None if nothing did."""
    try:
        program, tensors = tape.program(tape.value_of(gradient))
        run = program.execute(tensors, trace=True)
    except (ProgramError, LookupError):
        return None
    location = spotted(program, run)
    if location is None or not any(bool(tensor.any()) for tensor in tensors.values()):
        return None
    return {
        "outside": True,
        "clip": "inf",
        "location": {**observation(location, program, run), "phase": str(Phase.BACKWARD)},
    }


# -- other ranks -------------------------------------------------------------------------------------------------------------------

PATIENCE = 3.0  # seconds that a finished rank waits for the file of the one that made a NaN


def has_peers() -> bool:
    """Is this process one of several that train together?"""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def arrived(name: str, gradient: Tensor) -> dict[str, Any]:
    """Return, as a snapshot keeps it, a gradient that is bad although this rank's own backward, made once more, is not."""
    flat = first_nonfinite(gradient.detach()) or 0
    return {"outside": True, "allreduce": True, "location": gradient_observation("all_reduce", name, gradient, flat, None)}


def of_other_ranks(folder: Path, own: Sequence[Snapshot], *, wait: bool) -> dict[str, Snapshot]:
    """Return the snapshots that other ranks wrote into the same folder for the steps at which a NaN arrived from elsewhere, by path.

    Ranks tell each other through files: a collective here could be one that only some ranks enter.
    """
    steps = {snapshot.step for snapshot in own if snapshot.observed.get("allreduce")}
    ranks = {snapshot.rank for snapshot in own}
    found: dict[str, Snapshot] = {}
    until = time.monotonic() + (PATIENCE if wait else 0.0)
    while steps:
        for path in sorted(path for step in steps for path in folder.glob(f"step-{step:06d}.rank*.safetensors")):
            if str(path) not in found:
                with contextlib.suppress(NanscopeError):
                    snapshot = load(path)
                    if snapshot.rank not in ranks:
                        found[str(path)] = snapshot
        if any(not snapshot.observed.get("allreduce") for snapshot in found.values()) or time.monotonic() >= until:
            break
        time.sleep(0.1)
    return {path: snapshot for path, snapshot in found.items() if not snapshot.observed.get("allreduce")}


# -- around the step ---------------------------------------------------------------------------------------------------------------


def find_trainer(targets: Iterable[Any]) -> Any:
    """Return the trainer: one of the targets, or found as `self` of a calling frame; None if there is none."""
    for target in targets:
        if hasattr(target, "args") and hasattr(target, "state"):
            return target
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        found = variables(frame).get("self")
        if hasattr(getattr(found, "args", None), "logging_nan_inf_filter"):
            return found
        frame = frame.f_back
    return None


REPEATED = 4  # counted tokens of a completion that are all the same


def repeated_tokens(ids: Tensor, mask: Tensor | None = None) -> str:
    """Return what to say if most completions are one token over and over, "" otherwise.

    ids: token ids, [B, T]. mask: [B, T], which tokens count; by default all. A model whose weights are NaN emits token id 0 for ever.
    """
    if ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        return ""
    counted = torch.ones_like(ids, dtype=torch.bool) if mask is None or mask.shape != ids.shape else mask.bool()
    low = torch.where(counted, ids, ids.max()).amin(1)
    high = torch.where(counted, ids, ids.min()).amax(1)
    same = (low == high) & (counted.sum(1) >= REPEATED)
    rows = int(same.sum())
    if 2 * rows <= len(ids):
        return ""
    tokens = ", ".join(str(token) for token in sorted(set(low[same].tolist()))[:3])
    return f"{rows} of {len(ids)} completions are one token over and over (id {tokens}): what a model with NaN weights generates"


def sampled(framework: Framework | None) -> tuple[Tensor, Tensor | None] | None:
    """Return ids and mask of the sampled tokens, [B, T], from the local variable in which the framework keeps its batch."""
    if framework is None or framework.batch is None:
        return None
    local, ids, mask = framework.batch
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        held = variables(frame).get(local)
        if isinstance(held, Mapping) and isinstance(held.get(ids), Tensor):
            return held[ids], held.get(mask) if isinstance(held.get(mask), Tensor) else None
        frame = frame.f_back
    return None


def logged_loss(trainer: Any, loss: float | None, loss_bad: bool) -> list[tuple[str, str]]:
    """Return the note on what the trainer's log shows instead of the truth, if it filters."""
    if trainer is None or loss is None or not getattr(getattr(trainer, "args", None), "logging_nan_inf_filter", False):
        return []
    if loss_bad:
        text = f"the true loss is {loss}; the trainer's logging_nan_inf_filter keeps it out of the log, which shows a finite number"
    else:
        text = (
            f"the logged loss ({loss:.6g}) is finite and does not show that the gradients are not; "
            "once the weights are NaN, logging_nan_inf_filter logs 0.0 for every further step"
        )
    return [("logged_loss", text)]


def settings(trainer: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the trainer's settings of these names, as JSON holds them."""
    args = getattr(trainer, "args", None)
    found = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return {name: value if isinstance(value, (int, float, str, bool, type(None))) else str(value) for name, value in found.items()}


def environment(loss: Tensor | None, package: str | None) -> dict[str, Any]:
    """Return versions, device and dtype of a run. package: the framework's distribution."""
    like = torch.zeros(()) if loss is None else loss
    packages = ("torch", "nanscope", "transformers", "accelerate", *((package,) if package else ()))
    versions = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "versions": versions,
        "python": sys.version.split()[0],
        "device": like.device.type if like.device.type == "cpu" else torch.cuda.get_device_name(like.device),
        "dtype": str(like.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
