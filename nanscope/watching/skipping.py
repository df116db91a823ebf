"""Keeps bad steps from the weights. Where several ranks train, one that skips alone parts from the others: it may only where all surely do.

Nobody is asked: what all of them see is what a reduction has brought to all. That are the gradients of replicas as DDP, or the trainer's
own all-reduce, left them, and the norm that the ranks have taken of theirs together. Whatever came later may be on one rank alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nanscope.capture.alone import has_peers
from nanscope.capture.tape import Tape
from nanscope.errors import ProgramError
from nanscope.program.numbers import count_bad, is_finite
from nanscope.torch_inside import count_collectives, reduction_hooks
from nanscope.watching.logbook import Logbook

HOOKS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")  # of DDP: those that leave all ranks with the same
REFUSED = (
    "the step was not skipped but taken as it was: nothing shows that all ranks saw the same non-finite gradients, "
    "and a rank that skips alone parts from the others"
)

BY_HAND = "the step was not skipped but taken as it was: the loop writes to its weights itself, and calls no optimizer"
IN_A_CLOSURE = "the step was not skipped but taken as it was: its optimizer has it differentiated by a closure, amid the step"


class Skipping:
    """Holds the gradients of a bad step back while its optimizer steps over nothing, which leaves weights and state as they are.

    Notes what DDP left when its reduction was over; that costs nothing in a process that trains alone.
    """

    def __init__(self, tape: Tape, logbook: Logbook) -> None:
        self._tape, self._logbook = tape, logbook
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        self._issued: dict[int, int] = {}  # id of a model → collectives of its ranks, before a backward pass
        self._left: dict[int, tuple[int, int]] = {}  # id of a parameter → address and version of its gradient, reduced

    def before_backward(self, modules: Iterable[nn.Module]) -> None:
        """A backward pass begins. modules: outermost ones."""
        self._left.clear()
        self._issued = {id(model): _issued(model) for model in modules if _brings_to_all(model)} if has_peers() else {}

    def after_backward(self, modules: Iterable[nn.Module]) -> None:
        """It has ended, and with it what a model of replicas does to make their gradients one."""
        for model in modules if self._issued else ():
            if isinstance(model, DistributedDataParallel) and id(model) in self._issued and self._issued[id(model)] < _issued(model):
                for name, parameter in model.module.named_parameters():
                    if type(parameter.grad) is Tensor and name not in model.parameters_to_ignore:
                        self._left[id(parameter)] = parameter.grad.data_ptr(), parameter.grad._version

    def before_step(self, number: int, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor], total: float) -> None:
        """Hold the gradients of a bad step back, first of all: nothing that fails later may let it through. number: of the step.

        total: the norm of the gradients.
        """
        if not self._norm_is_bad() and (math.isfinite(total) or not count_bad(grads)):
            return
        if not self._all_see(parameters, grads):
            self._logbook.refuse_to_skip(number, REFUSED)
            return
        self._held = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter, _ in self._held:
            parameter.grad = None
        self._logbook.skip(number)

    def after_step(self) -> None:
        """Give back what was held."""
        for parameter, grad in self._held:
            parameter.grad = grad
        self._held.clear()

    @property
    def skips(self) -> bool:
        """Is the step that runs kept from the weights?"""
        return bool(self._held)

    def _norm_is_bad(self) -> bool:
        """Is a norm of this step's gradients bad of which all ranks hold the same?"""
        return has_peers() and any(not bool(is_finite(norm)) for norm in self._tape.agreed.norms)

    def _all_see(self, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> bool:
        """Do all ranks see that these gradients are bad? True where there is no other rank."""
        if not has_peers() or self._norm_is_bad():
            return True
        bad = ((parameter, grad) for parameter, grad in zip(parameters, grads, strict=True) if not bool(is_finite(grad)))
        return any(self._was_bad(parameter, grad) for parameter, grad in bad)

    def _was_bad(self, parameter: nn.Parameter, grad: Tensor) -> bool:
        """Was a gradient bad already when the ranks had made theirs one? It is bad now."""
        left = self._left.get(id(parameter))
        if left == (grad.data_ptr(), grad._version):
            return True  # nobody has written to it since
        place, clipping = (grad.data_ptr(), grad.numel()), self._tape.clipping
        if left is not None and left == (place[0], clipping.measured_at.get(place)):  # what was measured then is what backward left
            return not bool(is_finite(clipping.measured[place]))
        with contextlib.suppress(ProgramError, LookupError):
            program, tensors = self._tape.program(self._tape.value_of(grad))
            came = [tensors[leaf.id] for leaf in program.leaves if self._tape.is_of_all(leaf.id)]
            return any(not bool(is_finite(tensor)) for tensor in came)
        return False


def _brings_to_all(model: nn.Module) -> bool:
    """Does a model make the gradients of all ranks of the run one when its next backward pass ends?"""
    if not isinstance(model, DistributedDataParallel) or not model.require_backward_grad_sync:
        return False
    hooks = reduction_hooks(model)
    return model.process_group.size() == torch.distributed.get_world_size() and hooks is not None and all(name in HOOKS for name in hooks)


def _issued(model: nn.Module) -> int:
    """How many collectives the ranks of a model have issued."""
    if isinstance(model, DistributedDataParallel):
        with contextlib.suppress(RuntimeError):  # a backend that does not count
            return int(count_collectives(model.process_group))
    return 0
