"""`nanscope.watch`: installs the instruments, closes each step, and keeps what went wrong.

    with nanscope.watch(trainer) as scope:
        trainer.train()
    print(scope.verdict.sentence)

While all is well a step costs one line of history. When a loss or a gradient is non-finite, the recorded program is run once more,
in place, to see what was harmed, and the step is saved.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nanscope.capture import custom as functions
from nanscope.capture.failsafe import Quiet
from nanscope.capture.gates import Guard
from nanscope.capture.gauge import Plan, Pulse, read_pulse
from nanscope.capture.modules import ModuleWatch
from nanscope.capture.tape import BUDGET, Tape, TapeMode
from nanscope.errors import NanscopeError
from nanscope.frameworks.live import objective_of
from nanscope.frameworks.table import recognise
from nanscope.locate.location import Phase, spotted
from nanscope.program.numbers import count_bad, is_finite, norms
from nanscope.program.program import Program
from nanscope.snapshot.file import save
from nanscope.snapshot.history import Entry, Ledger
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.verdict.diagnose import verdict
from nanscope.verdict.incident import NonFiniteError, Note, Verdict
from nanscope.verdict.sentence import absorbed
from nanscope.watching.logbook import arrived, has_peers, of_other_ranks
from nanscope.watching.look import NOTHING, Look, deeper_look, gradient_look, look_closely, swallowed_look, update_look, update_seen
from nanscope.watching.narrow import to_save
from nanscope.watching.oddities import Usual, look_for_spike, overflowing_clip, overflowing_norm, repeated_tokens
from nanscope.watching.recording import HIDDEN, Recording, finite_batch, scaled_by_hand
from nanscope.watching.surroundings import environment, find_trainer, logged_loss, sampled, settings

log = logging.getLogger("nanscope")


OnNonFinite = Literal["record", "skip", "stop"]

LIMIT = 3  # steps saved per run; once the weights are NaN every step is bad

CLIPPED = 8  # gradients that are asked how they became 0; a clip treats all alike

NOTES = 32  # notes kept per run


class Scope:
    """One watched run. Made by `watch`; use it as a context manager.

    out: the run directory. steps: optimizer steps seen. skipped: steps that were skipped to protect the weights.
    saved: the files of healthy steps that were asked for.
    """

    def __init__(
        self,
        targets: tuple[Any, ...] = (),
        *,
        out: str | os.PathLike[str] = "nanscope-runs",
        on_nonfinite: OnNonFinite = "record",
        budget: int = BUDGET,
        save_tokens: bool = False,
        limit: int = LIMIT,
        save_steps: Iterable[int] = (),
    ) -> None:
        if on_nonfinite not in ("record", "skip", "stop"):
            raise NanscopeError(f'on_nonfinite must be "record", "skip" or "stop", not {on_nonfinite!r}', slug="bad-argument")
        if budget <= 0:
            raise NanscopeError(f"budget is a number of bytes above 0, not {budget!r}", slug="bad-argument")
        self.out = Path(out)
        self.on_nonfinite = on_nonfinite
        self.steps = 0
        self.skipped = 0
        self.snapshots: list[Snapshot] = []
        self.paths: list[Path | None] = []
        self.saved: list[Path] = []
        self.notes: list[Note] = []
        self.bad_steps = 0
        self.ledger = Ledger()
        self._targets = targets
        self._save_tokens = save_tokens
        self._limit = limit
        self._save_steps = frozenset(save_steps)
        self._rank = int(os.environ.get("RANK", "0") or 0)
        # The tape of a running step holds nothing that would double the peak: logits over the vocabulary are the largest tensor there is.
        self._tape = Tape(budget, wide=budget // 32)
        self._mode = TapeMode(self._tape)
        self._quietly = Quiet()
        self._modules = ModuleWatch(self._mode.suspend, self._mode.resume, self._quietly)
        self._guard = Guard(self, self._mode.suspend, self._mode.resume, self._quietly)
        self._tape.module_outputs = self._modules.output_of
        self._tape.is_parameter = self._modules.parameter_name
        self._recordings: list[Recording] = []
        self._current: Recording | None = None
        self._hooks: list[Any] = []
        self._plans: dict[Any, Plan] = {}
        self._pulse: Pulse | None = None
        self._loss: float | None = None
        self._began: float | None = None
        self._closed_step = True
        self._hit = False  # this step is known to be bad
        self._foreign = False  # weights were already spoilt by gradients that were not made here
        self._norm: float | None = None
        self._first = False  # the optimizer that steps has no state yet
        self._usual_loss, self._usual_norm = Usual(), Usual()
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        self._quiet_sites: set[tuple[str, int]] = set()
        self._verdict: tuple[int, Verdict] | None = None
        self._entered = False
        self._finished = False
        self._had_peers = False

    # -- the block -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Scope:
        if self._entered:
            raise NanscopeError("a scope can be entered once; call nanscope.watch again", slug="scope-reused")
        self._entered = True
        self._quietly("open-run", self._open_run)
        self._began = time.perf_counter()
        for target in self._targets:
            for module in _modules_of(target):
                self._modules.seen.add(module)
        self._modules.install()
        self._guard.install()
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._modules.remove()
        while self._mode.suspended:
            self._mode.resume()
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._guard.remove()
        self._quietly("finish", self._finish)
        self._quietly("finish", self._let_go)

    def _let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._recordings.clear()
        self._tape.forget(everything=True)

    def tag(self, **tensors: Tensor) -> None:
        """Name tensors where the code's own names do not tell: `scope.tag(log_probs=lp, mask=m)`.

        The names are those of `nanscope.roles.Role`. Raises NanscopeError for another name or for something that is not a tensor.
        """
        from nanscope.roles import Role

        for name, tensor in tensors.items():
            if name not in set(Role):
                raise NanscopeError(f"no role is called {name!r}; known are {', '.join(Role)}", slug="unknown-role")
            if not isinstance(tensor, Tensor):
                raise NanscopeError(f"tag({name}=…) takes a tensor, not {type(tensor).__name__}", slug="bad-argument")
            self._quietly("tag", self._tape.tag, name, tensor)
        if "response_ids" in tensors:
            self._quietly("tag", self._look_at_tokens, tensors["response_ids"], tensors.get("mask"))

    def _look_at_tokens(self, ids: Tensor, mask: Tensor | None) -> None:
        words = repeated_tokens(ids, mask)
        if words:
            self._note("repeated_tokens", f"step {self._step_number()}: {words}")

    @property
    def verdict(self) -> Verdict:
        """What was found so far; complete after the block. Diagnosing runs when it is first asked for."""
        if self._verdict is None or self._verdict[0] != len(self.snapshots) or not self._finished:
            paths = [str(path) if path else None for path in self.paths]
            others = of_other_ranks(self.out, self.snapshots, wait=self._finished) if has_peers() or self._had_peers else {}
            with self._guard.aside():
                found = verdict(
                    [*self.snapshots, *others.values()],
                    [*paths, *others],
                    notes=self.notes,
                    steps=self.steps,
                    skipped=self.skipped,
                    bad_steps=self.bad_steps,
                )
            self._verdict = (len(self.snapshots), found)
        return self._verdict[1]

    # -- the gates (called by Guard) ---------------------------------------------------------------------------------------

    def before_backward(self, roots: list[Tensor], seeds: list[Tensor | None]) -> None:
        """A backward pass begins: take the program of its loss from the tape, and watch the gradients at its leaves."""
        self._modules.reset()
        self._modules.busy = True
        if self._closed_step:
            self._recordings.clear()
            self._closed_step = False
            self._hit = False
        program: Program | None = None
        tensors: dict[int, Tensor] = {}
        root = roots[0]
        if len(roots) == 1 and seeds[0] is None and not self._tape.broken:
            with contextlib.suppress(LookupError):
                program, tensors = self._tape.program(self._tape.value_of(root))
        scaled = self._tape.scaled or scaled_by_hand(program, tensors)
        recording = Recording(
            program,
            tensors,
            root.detach(),
            self._modules.finish(),
            scaled,
            glimpses=tuple(self._tape.glimpses.values()),
            taken=dict(self._tape.taken),
        )
        self._current = recording
        recording.flags.append(is_finite(recording.loss))
        self._quietly("kernel", self._watch_kernel, recording)
        if program is not None:
            self._pulse_of(program, tensors)
            for leaf in program.leaves:
                tensor = tensors[leaf.id]
                if leaf.diff and tensor.requires_grad:
                    self._hooks.append(tensor.register_hook(self._watch(recording, leaf.id)))  # type: ignore[no-untyped-call]
                    node = tensor.grad_fn
                    if node is not None and functions.is_custom(node):
                        self._hooks.append(node.register_hook(self._watch_function(recording, leaf.id, node)))

    def _watch_kernel(self, recording: Recording) -> None:
        """Watch what goes into a kernel that nothing inside can be seen of, and the gradient that comes out of it."""
        hidden = recording.hidden()
        if hidden is not None and hidden.requires_grad:
            self._hooks.append(hidden.register_hook(self._watch(recording, HIDDEN)))  # type: ignore[no-untyped-call]
        recording.given = finite_batch(recording)

    def _watch(self, recording: Recording, leaf: int) -> Any:
        limit = self._tape.budget // 64

        def look(grad: Tensor) -> None:
            recording.flags.append(is_finite(grad))
            if grad.numel() * grad.element_size() <= limit:
                recording.grads[leaf] = grad.detach()

        def hook(grad: Tensor) -> None:
            if self._current is recording:
                self._quietly("gradient-hook", look, grad)

        return hook

    def _watch_function(self, recording: Recording, leaf: int, node: Any) -> Any:
        limit = self._tape.budget // 64

        def look(returned: tuple[Tensor | None, ...], received: tuple[Tensor | None, ...]) -> None:
            flags = [is_finite(grad) for grad in returned if grad is not None]
            recording.flags += flags
            on_cpu = all(flag.is_cpu for flag in flags)
            if on_cpu and all(bool(flag) for flag in flags):
                return
            found = functions.seen(node, leaf, returned, received)
            if on_cpu or found.bytes() <= limit:
                recording.backwards.append(found)

        def hook(returned: tuple[Tensor | None, ...], received: tuple[Tensor | None, ...]) -> None:
            if self._current is recording:
                self._quietly("function-hook", look, returned, received)

        return hook

    def after_backward(self) -> None:
        """A backward pass has ended: on a CPU look at once, elsewhere when the optimizer is about to step."""
        recording, self._current = self._current, None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._modules.busy = False
        self._tape.forget()
        if recording is None:
            return
        self._recordings.append(recording)
        if recording.loss.device.type == "cpu":
            self._add_loss(recording)
            if not all(bool(flag) for flag in recording.flags):
                self._examine(recording, None)
            elif not all(bool(flag) for flag in recording.given):
                self._swallowed(recording)
            elif self._pulse is not None and self._pulse.headroom is not None and self._pulse.headroom < 0:
                self._absorbed(recording)
        if self._save_steps and not recording.examined and self._step_number() in self._save_steps:
            self._quietly("save-step", self._save_asked, recording)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to step: one look at everything that is still on the device, then at the gradients."""
        self._first = not optimizer.state
        waiting = [r for r in self._recordings if not r.examined and r.loss.device.type != "cpu"]
        if waiting:
            flags = [torch.stack(r.flags).all() for r in waiting]
            given = [torch.stack(r.given).all() if r.given else flag for r, flag in zip(waiting, flags, strict=True)]
            losses = torch.stack([r.loss.float() for r in waiting])
            answers = torch.stack([torch.stack(flags).float(), torch.stack(given).float(), losses]).tolist()  # the one transfer of a step
            for recording, fine, clean, loss in zip(waiting, *answers, strict=True):
                self._loss = (self._loss or 0.0) + loss
                if not fine:
                    self._examine(recording, optimizer)
                elif not clean:
                    self._swallowed(recording)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads = [p.grad if not p.grad.is_sparse else p.grad.coalesce().values() for p in parameters if p.grad is not None]
        total = float(torch.linalg.vector_norm(norms(grads))) if grads else None
        self._norm = total
        if total is None:
            return
        if (math.isfinite(total) and (total or self._hit)) or (not math.isfinite(total) and not count_bad(grads)):
            if not self._hit:
                self._quietly("spike", self._watch_for_spikes, total)  # finite elements may have an infinite norm
            return
        if not total:
            self._quietly("clip-hit", self._clip_hit, parameters, grads)
            return
        if self.on_nonfinite == "skip":
            self._hold_back(parameters)  # first of all: nothing that fails below may let this step through
        if not self._recordings:
            # Nobody differentiated anything here: gradients set by hand, or by a backward pass before the block.
            self._foreign = True
            self._note("foreign_gradients", "an optimizer stepped on non-finite gradients that no backward pass in the watched block made")
        elif not self._hit:
            self._quietly("gradient-hit", self._gradient_hit, parameters, grads)
        self._quietly("mark", self._mark_gradients, len(grads), count_bad(grads))
        if self.on_nonfinite == "stop":
            self._stop()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has stepped: are the weights still finite? Then close the step."""
        held = bool(self._held)
        for parameter, grad in self._held:
            parameter.grad = grad
        self._held.clear()
        weights = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        bad = count_bad(weights)
        if held:
            self._mark(stepped="skipped", weights=len(weights), bad_weights=bad)
        elif bad and not self._hit and not self._foreign:
            self._weights_hit(optimizer, len(weights), bad)
        elif self._hit:
            self._mark(stepped="taken", weights=len(weights), bad_weights=bad)
        if not self._closed_step:
            self._close_step()

    # -- a hit -------------------------------------------------------------------------------------------------------------

    def _examine(self, recording: Recording, optimizer: torch.optim.Optimizer | None) -> None:
        """Something at the edge of the loss was non-finite: was anything harmed, and what did it?"""
        recording.examined = True
        loss_bad = not bool(is_finite(recording.loss)) and not (recording.scaled and not math.isnan(recording.value or 0.0))
        named = self._modules.parameters()
        grads = [p.grad for _, p in named.values() if p.grad is not None]
        if recording.program is not None:
            own = [t for leaf in recording.program.leaves if leaf.diff and (t := recording.tensors[leaf.id]).is_leaf and id(t) not in named]
            grads += [t.grad for t in own if t.grad is not None]
        bad = count_bad(grads)
        if recording.scaled and not loss_bad and optimizer is None:
            return  # a GradScaler looks at these gradients itself; if it steps all the same, before_step sees them
        if not loss_bad and not bad:
            self._absorbed(recording)
            return
        self._found(recording, Reached(recording.value, len(grads), bad, scaled=recording.scaled), loss_bad)
        if self.on_nonfinite == "stop":
            self._stop()

    def _gradient_hit(self, parameters: list[nn.Parameter], grads: list[Tensor]) -> None:
        """Gradients are non-finite although nothing was seen at the edge of the loss: the model's own backward made it, or whoever
        changed the gradients after backward."""
        candidates = [r for r in self._recordings if r.program is not None or r.calls]
        if not candidates:
            return
        recording = candidates[-1]
        reached = Reached(recording.value, len(grads), count_bad(grads), scaled=recording.scaled)
        for found in candidates:
            look = look_closely(found, functools.partial(self._second_look, found, backward=True))
            if look.location is not None or look.seen is not None:
                self._found(found, replace(reached, loss=found.value), loss_bad=False, look=look, clip=self._clip(look))
                return
        bad = next((p for p, grad in zip(parameters, grads, strict=True) if not bool(is_finite(grad))), None)
        if bad is None or bad.grad is None:
            return
        if self._norm_overflowed():
            overflowed = overflowing_norm(self._second_look(recording), self._tape.norm_site())
            if overflowed is not None:
                self._found(recording, reached, loss_bad=False, look=NOTHING, seen=overflowed)
                return
        changed = gradient_look(self._tape, bad.grad)
        seen: dict[str, Any] | None = None
        made_here = changed is not None and changed.location is not None and changed.location.origin.born
        if not made_here and has_peers():
            changed = None
            seen = arrived(self._modules.parameters().get(id(bad), ("a weight", bad))[0], bad.grad)
        self._found(recording, reached, loss_bad=False, look=changed or NOTHING, seen=seen)

    def _watch_for_spikes(self, total: float) -> None:
        """Everything is finite: is it also of the size that this run is used to?"""
        before_clip = (
            self._tape.norms[-1] if self._tape.norms and self._tape.norms[-1].numel() == 1 and self._tape.norms[-1].is_cpu else None
        )
        norm = max(total, float(before_clip)) if before_clip is not None else total
        found = [
            f"{size / usual.largest:.2g} times the largest {name} of the {usual.count} steps before"
            for name, size, usual in (("loss", abs(self._loss or 0.0), self._usual_loss), ("gradient norm", norm, self._usual_norm))
            if usual.exceeded(size)
        ]
        if found and self._recordings:
            recording = max(self._recordings, key=lambda r: abs(r.value or 0.0))
            look = look_for_spike(recording, functools.partial(self._second_look, recording))
            if look is not None:
                grads = [p.grad for _, p in self._modules.parameters().values() if p.grad is not None]
                self._found(recording, Reached(recording.value, len(grads), 0), False, look=look, seen={"suspect": True, "spike": found[0]})
                return
        self._usual_loss.add(abs(self._loss or 0.0))
        self._usual_norm.add(norm)

    def _norm_overflowed(self) -> bool:
        """Was a norm of this step's gradients, taken to clip them, not finite?"""
        return any(not bool(torch.isfinite(norm).all()) for norm in self._tape.norms)

    def _clip(self, look: Look) -> str:
        """What a clip by norm made of the gradients that backward had made: "", "inf" if it was their norm that ruined them, "nan"."""
        if look.run is None or not self._norm_overflowed():
            return ""
        raw = [look.run.grads[leaf.id] for leaf in look.program.leaves if leaf.origin == "parameter" and leaf.id in look.run.grads]
        return "nan" if any(bool(torch.isnan(grad).any()) for grad in raw) else "inf"

    def _clip_hit(self, parameters: list[nn.Parameter], grads: list[Tensor]) -> None:
        """All gradients are exactly 0: were they, or did a clip divide them by an infinite norm?"""
        recording = self._recordings[-1] if self._recordings else None
        if recording is None:
            return
        if self._norm_overflowed():
            seen = overflowing_norm(self._second_look(recording), self._tape.norm_site())
        else:
            seen = next((found for grad in grads[:CLIPPED] if (found := overflowing_clip(self._tape, grad)) is not None), None)
        if seen is not None:
            reached = Reached(recording.value, len(grads), 0, scaled=recording.scaled)
            self._found(recording, reached, loss_bad=False, look=NOTHING, seen=seen)

    def _second_look(self, recording: Recording, backward: bool = False) -> Look | None:
        return deeper_look(recording, self._tape.budget * 4, self._modules, backward)

    def _found(
        self,
        recording: Recording,
        reached: Reached,
        loss_bad: bool,
        look: Look | None = None,
        clip: str = "",
        seen: dict[str, Any] | None = None,
    ) -> None:
        """An incident: locate it, save the step. look: where it was located already. seen: what was observed instead."""
        if not self._count_hit():
            return
        snapshot = replace(self._blank(recording.loss, None), reached=reached, observed=dict(seen or {}), part=self._part(recording))
        try:
            if look is None:
                look = look_closely(recording, lambda: self._second_look(recording, backward=not loss_bad))
            snapshot = self._described(snapshot, look, recording, loss_bad, {**({"clip": clip} if clip else {}), **(seen or {})})
        except Exception as error:  # noqa: BLE001 - an incident that cannot be explained is still one
            log.warning("nanscope [not-explained]: step %d: %s: %s", snapshot.step, type(error).__name__, error)
        self._keep(snapshot)

    def _described(self, snapshot: Snapshot, look: Look, recording: Recording, loss_bad: bool, seen: dict[str, Any]) -> Snapshot:
        """Put into a snapshot what a look at the step has shown, and what is known around it."""
        trainer = find_trainer(self._targets)
        objective = objective_of(recording.glimpses)
        framework = recognise({site.file for site in look.program.sites} | {f"/{objective.get('site', '')}"})
        if look.location is not None and look.location.phase is Phase.WEIGHTS and (tokens := sampled(framework)) is not None:
            self._look_at_tokens(*tokens)
        described = replace(
            snapshot,
            program=look.program,
            tensors=look.tensors,
            grads={} if look.second else recording.grads,
            environment=environment(recording.loss, framework.package if framework else None),
            settings=settings(trainer, framework.settings if framework else ()),
            objective=objective,
            opaque=tuple(sorted({leaf.made_by for leaf in look.program.leaves if leaf.origin == "opaque"})),
            notes=(*logged_loss(trainer, snapshot.reached.loss, loss_bad), *look.notes),
            observed={**(look.seen or {}), **seen},
        )
        if look.kernel:
            described = replace(described, loss=None)  # the sum of another order of additions is not the recorded loss, bit for bit
        return to_save(described, look, self._save_tokens)

    def _weights_hit(self, optimizer: torch.optim.Optimizer, total: int, bad: int) -> None:
        """Loss and gradients were finite, the update was not."""
        if not self._count_hit():
            return
        recording = self._recordings[-1] if self._recordings else None
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        reached = Reached(recording.value if recording else None, len(grads), count_bad(grads), total, bad, "taken")
        named = {key: name for key, (name, _) in self._modules.parameters().items()}
        snapshot = replace(self._blank(recording.loss if recording else None, None), reached=reached)
        parameter = next(p for group in optimizer.param_groups for p in group["params"] if not bool(is_finite(p.detach())))
        look = update_look(optimizer, parameter, named.get(id(parameter), "weight"), self._tape.budget, self._first)
        if look is None:
            self._keep(replace(snapshot, observed=update_seen(optimizer, named)))
        elif look.seen is not None:
            self._keep(replace(snapshot, observed=look.seen))
        else:
            seen = {"optimizer": type(optimizer).__name__, "weight": named.get(id(parameter), "a weight")}
            snapshot = replace(snapshot, program=look.program, tensors=look.tensors, observed=seen)
            self._keep(to_save(snapshot, look, self._save_tokens))

    def _part(self, recording: Recording) -> int:
        """Which backward pass of this step a recording is, from 1."""
        return next((number for number, known in enumerate(self._recordings, start=1) if known is recording), 1)

    def _save_asked(self, recording: Recording) -> None:
        """Save a step that nothing is wrong with."""
        if recording.program is None:
            return
        look = Look(recording.program, recording.tensors, None, None)
        blank = replace(self._blank(recording.loss, None), reached=Reached(recording.value), part=self._part(recording), asked=True)
        self.saved.append(save(self._described(blank, look, recording, False, {}), self.out))

    def _count_hit(self) -> bool:
        """Count a bad step; should it be saved, too? Of one step as many backward passes as of a run steps."""
        self.bad_steps += not self._hit
        self._hit = True
        saved = [snapshot.step for snapshot in self.snapshots]
        known = {*saved, self._step_number()}
        return len(known) <= self._limit and saved.count(self._step_number()) < self._limit

    def _blank(self, loss: Tensor | None, package: str | None) -> Snapshot:
        return Snapshot(
            step=self._step_number(),
            rank=self._rank,
            program=Program((), (), -1),
            tensors={},
            loss=None if loss is None else loss.detach().clone(),
            grads={},
            reached=Reached(),
            history=tuple(self.ledger.entries),
            environment=environment(loss, package),
        )

    def _keep(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)
        self.paths.append(None)
        self._write(len(self.snapshots) - 1)

    def _absorbed(self, recording: Recording) -> None:
        """A value overflowed and did no harm: worth a word, once for each line."""
        if recording.program is None or len(self.notes) >= NOTES:
            return
        run = recording.program.execute(recording.tensors, trace=True, backward=False)
        location = spotted(recording.program, run)
        if location is None or location.origin.site is None:
            return
        place = (location.origin.site.file, location.origin.site.line)
        if place in self._quiet_sites:
            return
        self._quiet_sites.add(place)
        self._note("nonfinite_absorbed", absorbed(location, self._step_number()))

    def _swallowed(self, recording: Recording) -> None:
        """A kernel dropped a NaN of its batch: all stayed finite, and the step taught something else than it should have."""
        look = swallowed_look(recording, self._tape.budget * 4, self._modules)
        if look is not None and look.location is not None:
            grads = [p.grad for _, p in self._modules.parameters().values() if p.grad is not None]
            self._found(recording, Reached(recording.value, len(grads), 0), False, look=look, seen={"suspect": True, "swallowed": True})

    def _note(self, slug: str, text: str) -> None:
        if len(self.notes) < NOTES and not any(note.slug == slug and note.text == text for note in self.notes):
            self.notes.append(Note(slug, text, self._step_number()))

    def _mark_gradients(self, total: int, bad: int) -> None:
        if self.snapshots and self._hit:
            reached = self.snapshots[-1].reached
            self._mark(gradients=max(total, reached.gradients or 0), bad_gradients=max(bad, reached.bad_gradients or 0))

    def _mark(self, **changes: Any) -> None:
        """Add to what the last incident reached, in memory and in its file."""
        if not self.snapshots or self.snapshots[-1].step != self._step_number():
            return
        snapshot = self.snapshots[-1]
        changed = replace(snapshot, reached=replace(snapshot.reached, **changes))
        if changed.reached != snapshot.reached:
            self.snapshots[-1] = changed
            self._verdict = None
            self._write(len(self.snapshots) - 1)

    def _write(self, index: int) -> None:
        try:
            self.paths[index] = save(self.snapshots[index], self.out)
        except OSError as error:
            log.warning("nanscope [snapshot-unwritten]: step %d could not be saved: %s", self.snapshots[index].step, error)

    def _hold_back(self, parameters: list[nn.Parameter]) -> None:
        """Let the optimizer step over nothing: without gradients it leaves weights and state as they are."""
        self._held = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter, _ in self._held:
            parameter.grad = None
        self.skipped += 1

    def _stop(self) -> None:
        self._mark(stepped="stopped")
        verdict = self.verdict
        path = self.paths[-1] if self.paths else None
        raise NonFiniteError(
            f"{verdict.sentence}\nsnapshot: {path or 'not written'}", verdict=verdict, snapshot=str(path) if path else None
        )

    # -- a step ------------------------------------------------------------------------------------------------------------

    def _step_number(self) -> int:
        """Steps are counted from 1, as trainers log them; a resumed trainer's own count goes on."""
        for target in self._targets:
            count = getattr(getattr(target, "state", None), "global_step", None)
            if isinstance(count, int):
                return count + 1
        return self.steps + 1

    def _close_step(self) -> None:
        now = time.perf_counter()
        pulse = self._pulse
        entry = Entry(
            step=self._step_number(),
            rank=self._rank,
            time=round(time.time(), 3),
            seconds=round(now - self._began, 6) if self._began is not None else None,
            loss=self._loss,
            grad_norm=self._norm,
            log_ratio_max=pulse.highest if pulse else None,
            log_ratio_max_masked=pulse.highest_masked if pulse else None,
            headroom=pulse.headroom if pulse else None,
            clip_fraction=pulse.clipped if pulse else None,
            nonfinite=self._hit,
        )
        self._began, self._loss, self._norm, self._pulse = now, None, None, None
        self._closed_step = True
        self.steps += 1
        self.ledger.append(entry)

    def _add_loss(self, recording: Recording) -> None:
        if recording.value is not None:
            self._loss = (self._loss or 0.0) + recording.value

    def _pulse_of(self, program: Program, tensors: dict[int, Tensor]) -> None:
        key = tuple((call.op, call.site) for call in program.calls)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = Plan.of(program)
        values = {i: v.tensor for i, v in self._tape.values.items() if v.tensor is not None}
        pulse = read_pulse(plan, program, values)
        self._pulse = pulse if self._pulse is None else self._pulse.joined(pulse)

    # -- around the run ----------------------------------------------------------------------------------------------------

    def _open_run(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        from nanscope.version import __version__

        about = {
            "nanscope": __version__,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "on_nonfinite": self.on_nonfinite,
            "targets": [type(target).__qualname__ for target in self._targets],
            "environment": environment(None, None),
        }
        (self.out / "run.json").write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        history = self.out / f"history.rank{self._rank}.jsonl"
        history.unlink(missing_ok=True)
        self.ledger.path = history

    def _finish(self) -> None:
        self._had_peers = has_peers()
        if not self._closed_step and self._recordings:
            waiting = [r for r in self._recordings if not r.examined and r.loss.device.type != "cpu"]
            for recording in waiting:
                if not all(bool(flag) for flag in recording.flags):
                    self._examine(recording, None)
            if not self._hit and not any(recording.scaled for recording in self._recordings):
                self._unstepped()
        self._logged()
        self._finished = True
        self.ledger.close()

    def _unstepped(self) -> None:
        """No optimizer looked at the last gradients: do it now."""
        parameters = [p for _, p in self._modules.parameters().values() if p.grad is not None]
        grads = [p.grad for p in parameters if p.grad is not None]
        if count_bad(grads):
            self._gradient_hit(parameters, grads)

    def _logged(self) -> None:
        """Compare with what the trainer logged at the bad step."""
        trainer = find_trainer(self._targets)
        entries = getattr(getattr(trainer, "state", None), "log_history", None)
        if not isinstance(entries, list):
            return
        for index, snapshot in enumerate(self.snapshots):
            logged = [e["loss"] for e in entries if isinstance(e, dict) and e.get("step") == snapshot.step and "loss" in e]
            loss = snapshot.reached.loss
            if logged and loss is not None and isinstance(logged[0], (int, float)):
                snapshot.settings["logged_loss"] = float(logged[0])
                if not math.isfinite(loss) and math.isfinite(logged[0]):
                    notes = [n for n in snapshot.notes if n[0] != "logged_loss"]
                    notes.append(("logged_loss", f"the trainer logged {logged[0]} for this step; the true loss was {loss}"))
                    self.snapshots[index] = replace(snapshot, notes=tuple(notes))
                    self._verdict = None
                    self._write(index)


def watch(
    *targets: Any,
    out: str | os.PathLike[str] = "nanscope-runs",
    on_nonfinite: OnNonFinite = "record",
    budget: int = BUDGET,
    save_tokens: bool = False,
    limit: int = LIMIT,
    save_steps: Iterable[int] = (),
) -> Scope:
    """Return a scope that watches a training run.

    targets:      a TRL or transformers trainer, an nn.Module, an optimizer, or nothing at all: everything in the block is seen anyway.
    out:          the run directory: run.json, history.rank0.jsonl, and a snapshot of each bad step.
    on_nonfinite: "record" changes nothing; "skip" keeps a step with bad gradients from the weights; "stop" raises NonFiniteError, after
                  the snapshot is on disk.
    budget:       bytes of tensors that may be held by reference until a step is over.
    save_tokens:  put integer tensors that look like token ids into snapshots.
    limit:        bad steps saved per run; later ones are counted.
    save_steps:   numbers of steps to save although nothing is wrong with them, one file a backward pass, to be audited or replayed.
    Raises NanscopeError for an argument that is not one of these.
    """
    return Scope(targets, out=out, on_nonfinite=on_nonfinite, budget=budget, save_tokens=save_tokens, limit=limit, save_steps=save_steps)


def _modules_of(target: Any) -> Iterator[nn.Module]:
    if isinstance(target, nn.Module):
        yield target
    elif isinstance(getattr(target, "model", None), nn.Module):
        yield target.model
