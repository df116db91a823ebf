"""Only on a hit: the loss that a kernel computed, written out as a program after all.

A fused kernel makes its loss and its gradient in one go, compiled or in Triton, and a tape sees neither. What it was given was held at
its door. From that the log-probs are computed, and the same formula is run once more under a tape: the framework's own Python where there
is one, uncompiled, else nanscope's objective under the settings that were found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanscope.capture.mode import TapeMode
from nanscope.capture.seal import Seal, sealed
from nanscope.capture.tape import Tape
from nanscope.frameworks.live import Glimpse, objective_of, plain
from nanscope.frameworks.losses import framework_settings
from nanscope.frameworks.rows import Kernel
from nanscope.objective.evaluate import objective
from nanscope.objective.settings import LossInputs
from nanscope.program.program import Program
from nanscope.roles import Role
from nanscope.torch_inside import running_backward


def kernel_of(glimpses: Sequence[Glimpse]) -> tuple[Kernel, Glimpse] | None:
    """Return the kernel among the loss functions that were seen, None if there is none."""
    return next(((seen.site.kernel, seen) for seen in glimpses if seen.site.kernel is not None), None)


def reopen(glimpses: Sequence[Glimpse], taken: Mapping[str, Tensor], budget: int) -> tuple[Program, dict[int, Tensor]] | None:
    """Return the program from the batch to a kernel's loss, and its leaves; None if no kernel was seen or too little of it is held.

    taken: its arguments by name. Raises whatever the formula raises.
    """
    found = kernel_of(glimpses)
    if found is None or any(name and name not in taken for name in (found[0].hidden, found[0].ids, found[0].weight)):
        return None
    kernel, seen = found
    tape = Tape(budget)
    with torch.no_grad():
        log_probs = selected_log_probs(kernel, taken, plain(seen.held.get(kernel.temperature)))
    log_probs.requires_grad_()
    tape.leaves.module_outputs = lambda tensor: "model" if tensor is log_probs else None
    with torch.enable_grad(), sealed(Seal([log_probs]), [seen.held.get(kernel.formula)]), TapeMode(tape, within=running_backward()):
        loss = (_by_formula if kernel.formula in seen.held else _by_objective)(kernel, seen, log_probs, taken, tape)
    value = tape.find(loss)
    if value is None:
        return None
    program, tensors = tape.program(value)
    return _with_roles(program, {id(tensors[leaf.id]): leaf.id for leaf in program.leaves}, kernel, taken, log_probs), tensors


def swallowed(kernel: Kernel, taken: Mapping[str, Tensor]) -> bool:
    """Is the batch of a kernel non-finite at a token that counts? What is masked, Triton kernels do not even read."""
    mask = next((taken[name].bool() for name, role in kernel.tensors if role is Role.MASK and name in taken), None)
    for name, role in kernel.tensors:
        if name in taken and role is not Role.MASK and taken[name].is_floating_point():
            bad = ~torch.isfinite(taken[name])
            counted = mask if mask is not None and mask.shape == bad.shape else torch.ones_like(bad)
            if bool((bad & counted).any()):
                return True
    return False


def selected_log_probs(kernel: Kernel, taken: Mapping[str, Tensor], temperature: object) -> Tensor:
    """Return the log-probs of the ids as float32, [B, T], one row of logits at a time."""
    hidden, ids = taken[kernel.hidden], taken[kernel.ids]
    weight, bias = (taken.get(name) for name in (kernel.weight, kernel.bias))
    width = ids.shape[1]
    rows = []
    for row, row_ids in zip(hidden[:, -width - 1 : -1] if weight is None else hidden, ids, strict=True):
        logits = row if weight is None else row @ weight.to(row.dtype).t()
        logits = (logits.float() if bias is None else logits.float() + bias.float()) / (float(str(temperature)) if temperature else 1.0)
        rows.append(torch.log_softmax(logits, -1).gather(-1, row_ids[:, None])[:, 0])
    return torch.stack(rows)


def gradients(kernel: Kernel, taken: Mapping[str, Tensor], temperature: object, log_probs: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a kernel's arguments, by name, for one of the log-probs. log_probs: that, [B, T]."""
    names = [name for name in (kernel.hidden, kernel.weight, kernel.bias) if name in taken and taken[name].requires_grad]
    own = {name: taken[name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        made = selected_log_probs(kernel, {**taken, **own}, temperature)
        found = torch.autograd.grad(made, list(own.values()), log_probs.to(made.dtype))
    return dict(zip(names, found, strict=True))


def _by_formula(kernel: Kernel, seen: Glimpse, log_probs: Tensor, taken: Mapping[str, Tensor], tape: Tape) -> Tensor:
    formula: Any = seen.held[kernel.formula]
    given = {name: taken[path] if path in taken else seen.held.get(path) for name, path in kernel.arguments}
    result = formula(log_probs, **given)
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    return loss


def _by_objective(kernel: Kernel, seen: Glimpse, log_probs: Tensor, taken: Mapping[str, Tensor], tape: Tape) -> Tensor:
    read = objective_of([seen])
    parts: dict[str, Tensor | None] = dict.fromkeys(LossInputs.__slots__)
    parts[Role.LOG_PROBS] = log_probs
    tape.tag(str(Role.LOG_PROBS), log_probs)
    for name, role in kernel.tensors:
        if name in taken and role in parts:
            parts[role] = taken[name]
            tape.tag(str(role), taken[name])
    settings = framework_settings(read["key"], **read["settings"])
    return objective(LossInputs(**parts), settings).loss  # type: ignore[arg-type]


def _with_roles(program: Program, ids: Mapping[int, int], kernel: Kernel, taken: Mapping[str, Tensor], log_probs: Tensor) -> Program:
    """Write the roles of the batch into its leaves: no line of the training code says what they mean."""
    known = {ids[id(taken[name])]: role for name, role in kernel.tensors if name in taken and id(taken[name]) in ids}
    known |= {ids[id(log_probs)]: Role.LOG_PROBS} if id(log_probs) in ids else {}
    return replace(program, leaves=tuple(replace(leaf, role=str(known.get(leaf.id, leaf.role))) for leaf in program.leaves))
