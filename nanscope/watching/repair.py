"""Keeps a run alive: where a loss hands a bad gradient to its model, the gradient of the proven fix goes in its place.

nanscope [repaired]: step 60: took the gradient of a proven fix, fill ref_log_ratio with 0 where completion_mask excludes it, before exp at
demo.py:206: 24 of 2048 elements of torch.exp(ref_log_ratio) did the harm, distortion 0.0; the trainer logs NaN for this step; the repaired
loss is 0.05304 (19 ms)

It happens inside the backward pass, at the tensors that the loss reads, before a gradient reaches a weight or another rank: each rank mends
its own loss and asks nobody. What no edit is proven on, what lies in the model, and whatever fails in here is skipped, as "skip" does.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from nanscope.capture import kernels
from nanscope.capture.alone import alone
from nanscope.capture.failsafe import Failsafe
from nanscope.capture.feeding import feeding
from nanscope.capture.hooks import acts
from nanscope.capture.unseen import is_traced, unseen
from nanscope.errors import ProgramError
from nanscope.frameworks.live import plain
from nanscope.program.local import is_plain, local
from nanscope.program.numbers import is_finite
from nanscope.program.program import Program
from nanscope.snapshot.step import Reached, Snapshot, place
from nanscope.text import count, line_in, number
from nanscope.verdict.proof import Proof, Site, prove
from nanscope.watching.deeper import AGREES
from nanscope.watching.examine import Examiner, Hit
from nanscope.watching.keeping import Keeper
from nanscope.watching.logbook import Logbook
from nanscope.watching.mending import Gradients, Mending
from nanscope.watching.recording import Recording

log = logging.getLogger("nanscope")

Answer = TypeVar("Answer")


class Repair:
    """Mends the gradients of one thread's steps. most: backward passes of the run that are mended; a further one ends it. budget: bytes
    that may be held to write a kernel's loss out."""

    def __init__(self, keeper: Keeper, examiner: Examiner, logbook: Logbook, failsafe: Failsafe, most: int, budget: int) -> None:
        self._keeper, self._examiner, self._logbook, self.failsafe = keeper, examiner, logbook, failsafe
        self._most, self.budget = most, budget
        self._known: dict[Site, str] = {}  # edits that were proven
        self._kept: set[Site] = set()

    def watch(self, recording: Recording) -> None:
        """A backward pass begins."""
        recording.mends = _Pass(self, recording)

    def may(self) -> bool:
        """May another backward pass be mended? Where not, its step ends training."""
        self._keeper.stops = self._keeper.stops or self._logbook.repaired >= self._most
        return not self._keeper.stops

    def is_of_scale(self, recording: Recording) -> bool:
        """Is it only what a loss was multiplied by that makes it overflow? A scaler sees to that."""
        return recording.scaled and not self._examiner.at_any_scale(recording)

    def prove(self, program: Program, tensors: dict[int, Tensor], loss: Tensor | None, grads: dict[int, Tensor]) -> Proof | None:
        """Return the proven edit of the running step, None if there is none. loss, grads: as they were, where they are known."""
        with contextlib.suppress(ProgramError):  # a program that cannot be run again
            proof = prove(Snapshot(self._keeper.course.counts.number, 0, program, tensors, loss, grads, Reached()), self._known)
            if proof is not None:
                self._known[proof.site] = proof.row.id
            return proof
        return None

    def keep(self, recording: Recording, mending: Mending, proof: Proof) -> None:
        """A backward pass that was mended has ended: count it, tell it, and keep the first of its origin."""
        course, first = self._keeper.course, proof.site not in self._kept
        another = not course.bad
        if not first:
            course.spoilt("")
        self._logbook.repair(another=another and not first)
        self._kept.add(proof.site)
        told = _Told(proof)
        course.line.repair(told.short, mending.loss, float(recording.unscaled))
        text = told.whole
        if recording.value is not None and not math.isfinite(recording.value):
            text += f"; the trainer logs {number(recording.value)} for this step; the repaired loss is {number(mending.loss)}"
        step = place(course.counts.number, course.counts.update, recording.micro_batch)
        log.warning("nanscope [repaired]: %s: %s (%.0f ms)", step, text, 1000 * mending.seconds)
        if first:
            hit = self._examiner.mended(recording)
            self._keeper.save(recording, hit.reached, partial(self._described, hit, text))

    def _described(self, hit: Hit, text: str, blank: Snapshot) -> Snapshot:
        found = self._examiner.snapshot(hit, blank)
        return replace(found, notes=(*found.notes, ("gradient_repaired", text)))


class _Pass:
    """Says what goes on in the place of the gradients of one backward pass."""

    def __init__(self, repair: Repair, recording: Recording) -> None:
        self._repair, self._recording = repair, recording
        self.mending = Mending()

    def edge(self, leaf: int, gradient: Tensor) -> Tensor | None:
        """Of a tensor that the loss reads. What is finite goes on, until something is not."""
        return self._safely(lambda: self._mended(leaf, gradient))

    def function(self, node: Any, returned: Gradients, received: Gradients) -> Gradients | None:
        """Of a kernel that computes its loss: the gradients of its arguments."""
        return self._safely(lambda: self._of_kernel(node, returned, received))

    def _safely(self, answer: Callable[[], Answer | None]) -> Answer | None:
        """Return an answer; None, and no further one, if it fails."""
        given: list[Answer | None] = []

        def ask() -> None:
            if not is_traced():
                with unseen():
                    given.append(answer())

        if not torch.compiler.is_compiling():
            self._repair.failsafe("repair", ask)
        if not given:
            self.mending.decided = True
        return given[0] if given else None

    def _mended(self, leaf: int, gradient: Tensor) -> Tensor | None:
        mending = self.mending
        if mending.proof is None and not mending.decided:
            if bool(is_finite(gradient)):
                mending.passed.add(leaf)
                return None
            mending.decided = True
            self._decide(leaf, gradient)
        if mending.proof is None or leaf not in mending.own:
            return None
        mended = mending.proof.grads.get(leaf)
        return torch.zeros_like(gradient) if mended is None else mended.to(gradient.dtype)

    def _decide(self, leaf: int, gradient: Tensor) -> None:
        """Find the edit whose gradients are taken, if there is one."""
        recording, began = self._recording, time.perf_counter()
        program = recording.program
        if program is None or not _is_within_reach(recording, gradient) or self._repair.is_of_scale(recording) or not self._repair.may():
            return
        edge = _edge(recording)
        fed = feeding(edge)
        came = {} if leaf in fed else {leaf: gradient.detach()}
        proof = self._repair.prove(program, recording.tensors, recording.loss.detach(), came)
        if proof is not None and all(_goes_along(proof, one) for one in self.mending.passed | fed):
            self.mending.own = edge.keys() - fed
            self._take(proof, self._unscaled(proof.row.loss or 0.0), began)

    def _take(self, proof: Proof, loss: float, began: float) -> None:
        self.mending.proof, self.mending.loss, self.mending.seconds = proof, loss, time.perf_counter() - began

    def _of_kernel(self, node: Any, returned: Gradients, received: Gradients) -> Gradients | None:
        recording, began = self._recording, time.perf_counter()
        found = kernels.kernel_of(recording.glimpses)
        if found is None or self.mending.decided or all(bool(is_finite(grad)) for grad in returned if grad is not None):
            return None
        self.mending.decided = True
        kernel, seen = found
        taken = {name: content for name, one in recording.taken.items() if (content := one.content()) is not None}
        places = {edge: name for name in (kernel.hidden, kernel.weight, kernel.bias) if (edge := _edge_of(taken.get(name))) is not None}
        into = [places.get(edge) for edge in node.next_functions]
        known = len(into) == len(returned) and all(name or grad is None for name, grad in zip(into, returned, strict=False))
        given = next((grad for grad in received if grad is not None), None)
        if not known or recording.seeds or given is None or given.dim() or not bool(is_finite(given)) or not self._repair.may():
            return None
        with alone():
            opened = kernels.reopen(recording.glimpses, taken, self._repair.budget)
        proof = None if opened is None else self._repair.prove(*opened, None, {})
        if opened is None or proof is None or not self._is_formula_of(node, proof):
            return None
        log_probs = next(opened[1][leaf.id] for leaf in opened[0].leaves if leaf.diff)
        made = kernels.gradients(
            kernel, taken, plain(seen.held.get(kernel.temperature)), given * next(iter(proof.grads.values()), torch.zeros_like(log_probs))
        )
        gradients = tuple(None if grad is None else made[name or ""].to(grad.dtype) for name, grad in zip(into, returned, strict=True))
        if not all(bool(is_finite(grad)) for grad in gradients if grad is not None):
            return None
        self._take(proof, self._loss_with(node, proof), began)
        return gradients

    def _out_of(self, node: Any) -> int:
        """Return which leaf a custom function has made."""
        return next(leaf for leaf, tensor in _edge(self._recording).items() if tensor.grad_fn is node)

    def _is_formula_of(self, node: Any, proof: Proof) -> bool:
        """Is the loss of a kernel, but for rounding, that of the formula on which an edit was proven?"""
        theirs, ours = float(self._recording.tensors[self._out_of(node)].detach()), proof.was
        return math.isclose(theirs, ours, rel_tol=AGREES, abs_tol=AGREES**2) or not (math.isfinite(theirs) or math.isfinite(ours))

    def _loss_with(self, node: Any, proof: Proof) -> float:
        """Return the loss with that of an edit in the place of a kernel's."""
        recording, leaf = self._recording, self._out_of(node)
        assert recording.program is not None and proof.row.loss is not None
        tensors = {**recording.tensors, leaf: torch.full_like(recording.tensors[leaf].detach(), proof.row.loss)}
        run = recording.program.execute(tensors, backward=False, ends=True)
        return self._unscaled(float(run.values[recording.program.output]))

    def _unscaled(self, loss: float) -> float:
        scale = self._recording.scale
        return loss if scale is None else loss / float(scale.factor)


def _edge_of(tensor: Tensor | None) -> tuple[Any, int] | None:
    """Where autograd brings the gradient of a tensor, None if nowhere, or if it is not whole in here."""
    if tensor is None or not tensor.requires_grad or not is_plain(tensor) or local(tensor) is None:
        return None
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _edge(recording: Recording) -> dict[int, Tensor]:
    """The tensors between the loss and its model."""
    program = recording.program
    return {} if program is None else {leaf.id: recording.tensors[leaf.id] for leaf in program.leaves if leaf.diff}


def _is_within_reach(recording: Recording, gradient: Tensor) -> bool:
    """Is the gradient at the edge of a loss what its program makes, and nothing more, and nothing bad what it was handed?"""
    if recording.seeds or gradient.requires_grad or not is_plain(gradient):  # requires_grad: it is differentiated once more
        return False
    edge = _edge(recording)
    hooks = [hook.function for own in recording.others.values() for hook in own if acts(hook)]
    plain = all(tensor.requires_grad and is_plain(tensor) and not bool(tensor.isnan().any()) for tensor in edge.values())
    return bool(edge) and plain and all(map(_is_of_ranks, hooks))


def _is_of_ranks(hook: object) -> bool:
    """Is a hook one of torch's own, which gathers weights and changes no gradient?"""
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.")


ROUNDING = 32  # units in the last place of the largest element


def _goes_along(proof: Proof, leaf: int) -> bool:
    """Does an edit leave the gradient of a leaf as it was? That one went on, or others are added to it."""
    before, after = proof.recorded.get(leaf), proof.grads.get(leaf)
    if before is None or after is None:
        return before is after
    most = ROUNDING * torch.finfo(before.dtype).eps * before.abs().amax()
    return bool(is_finite(before)) and bool(((before - after).abs() <= most).all())


@dataclass(frozen=True, slots=True)
class _Told:
    """What was done, in words."""

    proof: Proof

    @property
    def short(self) -> str:
        """For the history."""
        return f"{self.proof.row.id}{self._where}: {self._elements}, {self._distortion}"

    @property
    def whole(self) -> str:
        """For the log and the report."""
        fix, what = self.proof.row.label, self.proof.what
        return f"took the gradient of a proven fix, {fix}{self._where}: {self._elements} of {what} did the harm, {self._distortion}"

    @property
    def _where(self) -> str:
        file, line, _ = self.proof.site
        return "" if file is None else f" at {line_in(file, line)}"

    @property
    def _elements(self) -> str:
        return f"{self.proof.bad} of {count(self.proof.size, 'element')}"

    @property
    def _distortion(self) -> str:
        found = self.proof.row.distortion
        return "no element is healthy" if found is None else f"distortion {found:.1g}" if found else "distortion 0.0"
