"""The recorded batch by role: what a loss of any framework would have been given at this step.

    batch = recorded_batch(snapshot)
    batch.inputs      LossInputs: log-probs, advantages, mask … as [B, T]
    batch.sources     (('log_probs', 'per_token_logps'), ('old_log_probs', 'old_per_token_logps'), …)

A role is told by names, tags and by what the program does: the policy log-probs are what carries the gradient, their anchors are what
is subtracted from them, the mask is what multiplies or selects the loss of a token. Taken is what goes into those calls, followed back
to before the loss clamped it, and to before it masked it where the loss masks all log-probs alike.

Shapes: B rows, T tokens, N tokens of a packed batch in one line.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.given import an
from nanscope.locate.trace import Trace
from nanscope.objective.settings import LossInputs
from nanscope.program.calls import Computes
from nanscope.program.ops import DIFFERENCES, PICKS, PRODUCTS, TOKEN_SUMS
from nanscope.program.run import Run
from nanscope.replay.lineage import RATES, Lineage
from nanscope.roles import LOG_PROBS, ROLES, Role, role_of
from nanscope.snapshot.anywhere import loaded
from nanscope.snapshot.step import Snapshot

ANCHORS = (Role.OLD_LOG_PROBS, Role.REF_LOG_PROBS, Role.ROLLOUT_LOG_PROBS)


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """The batch, and where each part of it was found: (field of LossInputs, what the training code calls it).

    pushed_by: the values of the program that are the advantages: one, or one a chunk.
    """

    inputs: LossInputs
    sources: tuple[tuple[str, str], ...]
    pushed_by: tuple[int, ...] = ()


def loss_inputs(snapshot: Snapshot | str | os.PathLike[str], run: Run | None = None) -> LossInputs:
    """Return the recorded batch by role, each [B, T], advantages also [B] or [B, 1].

    snapshot: a saved step, its path or address. run: the executed program, if it is at hand.
    Raises NanscopeError with the slug "missing-role" if the file lacks the policy log-probs, the advantages or the mask, or if their
    shapes do not fit each other; it says what the file holds. A packed batch, [1, N] or [N], is one row.
    """
    if run is not None:
        an("run", run, Run, "the executed program, or None")
    return recorded_batch(loaded(snapshot, "loss_inputs(…)"), run).inputs


def recorded_batch(snapshot: Snapshot, run: Run | None = None) -> RecordedBatch:
    """Return the batch as `loss_inputs` does, and what each part of it is called in the training code."""
    program = snapshot.program
    run = run or (program.execute(snapshot.tensors, backward=False) if program.calls else Run({}))
    return batch_of(Trace(program, run))


def batch_of(trace: Trace) -> RecordedBatch:
    """Return the batch of a loss that was run, as `recorded_batch` does."""
    if not trace.program.calls or trace.program.computes is not Computes.LOSS:
        raise NanscopeError("the file holds no program of the step's loss, so no batch can be read from it", slug="missing-role")
    return _Search(trace, Lineage(trace)).batch()


@dataclass(frozen=True, slots=True)
class _Found:
    """A part of the batch: a tensor, what it is called, and which value of the program it is, where that is asked for."""

    tensor: Tensor
    name: str
    value: int = -1


@dataclass(frozen=True, slots=True)
class _Search:
    """One run, asked for the parts of a batch."""

    trace: Trace
    kin: Lineage

    def batch(self) -> RecordedBatch:
        policies = self._policies()
        if not policies:
            raise self._missing(Role.LOG_PROBS, "no value with a gradient is known as the log-probs of the policy")
        return _joined([self._part(policy) for policy in policies])

    def _policies(self) -> list[int]:
        """The values of the policy log-probs that the loss reads, before masks and clamps: one, or one a chunk."""
        ends = [value for value in self.kin.ends(Role.LOG_PROBS) if value in self.kin.carries]
        bases = list(dict.fromkeys(self.kin.back(value, masks=True, deep=True)[-1] for value in ends))
        compared = [base for base in bases if self.kin.partners(self.kin.forms(base), DIFFERENCES)]
        bases = compared or bases
        sites = {self.trace.program.readers(base)[0].site for base in bases}
        if len(bases) > 1 and (len(sites) > 1 or -1 in sites):
            names = ", ".join(dict.fromkeys(self._called(base) for base in bases))
            raise self._missing(Role.LOG_PROBS, f"several values may be the log-probs of the policy ({names})")
        return bases

    def _part(self, policy: int) -> dict[str, _Found]:
        """What belongs to one value of policy log-probs, by field of LossInputs."""
        last, compared = self._anchors(policy)
        last["log_probs"] = compared
        masked = all(len(self.kin.back(v, masks=True, deep=False)) > len(self.kin.back(v, masks=False, deep=False)) for v in last.values())
        for deep in (True, False):
            bases = {field: self.kin.back(value, masks=masked, deep=deep)[-1] for field, value in last.items()}
            if len({self.kin.width(value) for value in bases.values()}) == 1:
                break
        wide = self._rows(compared if self.kin.width(compared) == self.kin.width(bases["log_probs"]) else bases["log_probs"])
        parts = {field: _Found(self._shaped(value, wide, field), self._called(last[field], value)) for field, value in bases.items()}
        parts |= self._beside(parts, wide)
        parts["mask"] = self._mask(policy, wide)
        parts["advantages"] = self._advantages(policy, wide, parts["mask"].tensor)
        entropy = next(
            (v for v, role in self.kin.roles.items() if role is Role.ENTROPY and self._says(v, role) and self.kin.width(v) == wide.numel()),
            None,
        )
        if entropy is not None:
            parts["entropy"] = _Found(self._shaped(entropy, wide, "entropy"), self._called(entropy))
        return parts

    def _beside(self, known: Mapping[str, _Found], wide: torch.Size) -> dict[str, _Found]:
        """Log-probs that stood beside the loss, and that it did not read."""
        program, found = self.trace.program, dict[str, _Found]()
        for leaf in program.leaves:
            if leaf.role in ANCHORS and leaf.role not in known and leaf.id not in program.consumers and leaf.id in self.trace.values:
                content = self.trace.values[leaf.id]
                if content.numel() == wide.numel():
                    found[str(leaf.role)] = _Found(content.detach().reshape(wide), leaf.name or str(leaf.role))
        return found

    def _anchors(self, policy: int) -> tuple[dict[str, int], int]:
        """What the policy log-probs are compared with, by role, and by what the difference is used for where no name tells; and the form
        of the policy log-probs that meets it."""
        forms = self.kin.forms(policy)
        partners = self.kin.partners(forms, DIFFERENCES)
        widths = {self.kin.width(form) for form in forms}
        found: dict[str, int] = {}
        for role in ANCHORS:
            ends = self.kin.ends(role)
            near = [value for value in partners if value in ends] or [value for value in ends if self.kin.width(value) in widths]
            if near:
                found[role] = near[0]
        taken = set(found.values())
        for value in partners:
            named = role_of(self.trace.names.name(value))  # by itself: what it is computed for says that it is subtracted, not what it is
            if value not in taken and named in (Role.LOG_PROBS, None) and self.kin.width(value) in widths:
                found.setdefault("ref_log_probs" if self.kin.compares_by_kl(forms, value) else "old_log_probs", value)
        met = [form for form in forms if set(self.kin.partners((form,), DIFFERENCES)) & set(found.values())]
        return found, met[-1] if met else policy

    def _mask(self, policy: int, wide: torch.Size) -> _Found:
        """The 0 or 1 that multiplies or selects the loss of a token; the one applied last. Nothing drops a token: all count."""
        cone = self.kin.cone(policy)
        found = [
            (value, keep) for value, keep in self.kin.selected(cone) if value not in cone and self.kin.is_token_mask(value, wide.numel())
        ]
        best = next(((v, keep) for v, keep in reversed(found) if self.trace.names.says_mask(v) or self.kin.roles.get(v) is Role.MASK), None)
        best = best or (found[-1] if found else None)
        if best is None:
            named = [value for value, role in self.kin.roles.items() if role is Role.MASK and self.kin.is_token_mask(value, wide.numel())]
            named = [value for value in named if not any(value in call.inputs() for call in self.kin.makers(named))] or named
            best = (named[-1], True) if named else None
        if best is None:
            unfit = [value for value, _ in self.kin.selected(cone) if value not in cone and self.kin.roles.get(value) is Role.MASK]
            if unfit:
                shape = list(self.trace.values[unfit[-1]].shape)
                raise self._missing(Role.MASK, f"{self._called(unfit[-1])} has the shape {shape}, the log-probs have {list(wide)}")
            return _Found(torch.ones(wide), "every token counts: nothing drops one")
        value, keep = best
        content = self._shaped(value, wide, "mask") != 0
        return _Found((content if keep else ~content).float(), self._called(value) if keep else f"not {self._called(value)}")

    def _advantages(self, policy: int, wide: torch.Size, mask: Tensor) -> _Found:
        """What multiplies the ratio or the log-probs, by its role, also inside a product with weights."""
        factors = [(factor, value) for factor in self.kin.partners(self.kin.cone(policy), PRODUCTS) for value in self.kin.factors(factor)]
        rated = [pair for pair in factors if self.kin.roles.get(pair[1]) in RATES]
        rated = [pair for pair in rated if self.kin.roles[pair[1]] is Role.ADVANTAGES] or rated
        if not rated:
            raise self._missing(Role.ADVANTAGES, "no factor of the ratio or of the log-probs is known as the advantages")
        known = {value for _, value in rated}
        # a product of them with a weight pushes the tokens as they do, and is told as they are
        factor, value = next(pair for pair in rated if known.isdisjoint(self.kin.factors(pair[1])[1:]))
        source = self.kin.before_sign(value)
        content = self.trace.values[source]
        name = self._called(source, value, factor)
        for at in (source, value):
            if (fitted := _as_rows(self.trace.values[at], wide, mask)) is not None:
                return _Found(fitted, name, at)
        raise self._missing(Role.ADVANTAGES, f"{name} has the shape {list(content.shape)}, the log-probs have {list(wide)}")

    def _rows(self, value: int) -> torch.Size:
        """[B, T] of the policy log-probs. Raises NanscopeError if they are not per token."""
        shape = list(self.trace.values[value].shape)
        while len(shape) > 2 and shape[-1] == 1:
            shape.pop()  # gathered, and not squeezed
        if len(shape) >= 2:
            return torch.Size((math.prod(shape[:-1]), shape[-1]))
        if self._summed(value) or not self._told_per_token(value):
            raise self._missing(Role.LOG_PROBS, f"{self._called(value)} has the shape {shape}: one number a sequence, not one a token")
        return torch.Size((1, shape[0]))

    def _summed(self, value: int) -> bool:
        return any(call.name in TOKEN_SUMS for call in self.kin.makers([value]))

    def _told_per_token(self, value: int) -> bool:
        """Is a line of log-probs one of tokens? It is where a mask drops some of them, or where it was picked out of rows."""
        size = self.kin.width(value)
        cone = self.kin.cone(value)
        dropped = any(self.kin.width(mask) == size and self.kin.is_binary(mask) for mask, _ in self.kin.selected(cone) if mask not in cone)
        return dropped or any(call.name in PICKS for call in self.kin.makers([value]))

    def _shaped(self, value: int, wide: torch.Size, field: str) -> Tensor:
        content = self.trace.values[value]
        if content.numel() == wide.numel():
            return content.detach().reshape(wide)
        per = " (one number a sequence, not one a token)" if content.numel() == wide[0] else ""
        raise self._missing(Role(field), f"{self._called(value)} has the shape {list(content.shape)}{per}, the log-probs have {list(wide)}")

    def _says(self, value: int, role: Role) -> bool:
        """Does the value's own name or tag tell this role?"""
        leaf = self.trace.program.leaf(value)
        return role_of(self.trace.names.name(value)) is role or (leaf is not None and leaf.role == role)

    def _called(self, *values: int) -> str:
        """What the training code calls a value: its first name, else the expression that made it."""
        names = [name for value in values if (name := self.trace.names.name(value))]
        sites = [
            site for call in self.kin.makers(list(values)) if (site := self.trace.program.site_of(call)) is not None and site.expression
        ]
        roles = [role for value in values if (role := self.kin.roles.get(value)) is not None]
        return next(
            iter((*names, *(_short(site.expression) for site in sites), *(f"unnamed {role}" for role in roles), "an unnamed value"))
        )

    def _missing(self, role: Role, why: str) -> NanscopeError:
        held: dict[Role, list[str]] = {}
        for value, own in self.kin.roles.items():
            if own in (*LOG_PROBS, Role.ADVANTAGES, Role.MASK):
                held.setdefault(own, []).append(f"{list(self.trace.values[value].shape)}")
        words = ", ".join(f"{own} {shapes[-1]}" for own, shapes in sorted(held.items())) or "no role that a loss is computed from"
        advice = "name them in the training code: scope.tag(log_probs=…, old_log_probs=…, advantages=…, mask=…)"
        return NanscopeError(
            f"the batch has no {role} ({ROLES[role].meaning}): {why}. The file holds {words}; {advice}", slug="missing-role"
        )


def _short(expression: str) -> str:
    text = " ".join(expression.split())
    return text if len(text) <= 40 else text[:39] + "…"


def _joined(parts: list[dict[str, _Found]]) -> RecordedBatch:
    """One batch of all chunks, row under row. Raises NanscopeError if they do not fit under each other."""
    shared = [field for field in parts[0] if all(field in part for part in parts)]
    if any(set(part) != set(shared) for part in parts) or len({part["log_probs"].tensor.shape[1] for part in parts}) > 1:
        message = "the loss was computed in chunks that do not fit under each other: tag the whole batch with scope.tag(log_probs=…)"
        raise NanscopeError(message, slug="missing-role")
    tensors = {field: _cat([part[field].tensor for part in parts]) for field in shared}
    sources = tuple((field, parts[0][field].name) for field in shared)
    if "old_log_probs" not in tensors and "rollout_log_probs" in tensors:
        # A loss whose only anchor is the sampler takes its log-probs for those of the old policy.
        tensors["old_log_probs"] = tensors["rollout_log_probs"]
        sources = (*sources, ("old_log_probs", dict(sources)["rollout_log_probs"]))
    sources = tuple(sorted(sources, key=lambda source: LossInputs.__slots__.index(source[0])))
    dtype = tensors["log_probs"].dtype
    inputs = LossInputs(
        log_probs=tensors["log_probs"].detach().clone().requires_grad_(),
        old_log_probs=tensors.get("old_log_probs"),
        ref_log_probs=tensors.get("ref_log_probs"),
        rollout_log_probs=tensors.get("rollout_log_probs"),
        advantages=tensors["advantages"].detach().to(dtype),
        mask=tensors["mask"].to(dtype),
        entropy=tensors.get("entropy"),
    )
    return RecordedBatch(inputs, sources, tuple(dict.fromkeys(part["advantages"].value for part in parts)))


def _as_rows(content: Tensor, wide: torch.Size, mask: Tensor) -> Tensor | None:
    """Return one number a row as [B, 1], or one a token as [B, T]; None if it is neither. One a counted token is put where they are."""
    if content.numel() == wide.numel():
        return content.reshape(wide)
    if content.numel() == wide[0]:
        return content.reshape(-1, 1)
    if content.dim() == 1 and content.numel() == int(mask.sum()):
        return torch.zeros(wide, dtype=content.dtype).masked_scatter(mask > 0, content)
    return None


def _cat(tensors: list[Tensor]) -> Tensor:
    wide = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([tensor.expand(-1, wide) if tensor.shape[1] == 1 else tensor for tensor in tensors])
