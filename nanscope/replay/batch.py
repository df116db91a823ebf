"""The recorded batch by role: what a loss of any framework would have been given at this step.

    batch = recorded_batch(snapshot)
    batch.inputs      LossInputs: log-probs, advantages, mask … as [B, T]
    batch.sources     (('log_probs', 'per_token_logps'), ('old_log_probs', 'old_per_token_logps'), …)

A role is told by names, tags and by what the program does: the policy log-probs are what carries the gradient, their anchors are what
is subtracted from them, the mask is what multiplies or selects the loss of a token. Taken is what goes into those calls, followed back
to before the loss clamped it, and to before it masked it where the loss masks all log-probs alike.

Shapes: B rows, T tokens, N tokens of a packed batch in one line. G: the values that carry a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.locate.names import LOG_PROBS, Namer
from nanscope.objective.settings import LossInputs
from nanscope.program.calls import Call, Computes, Ref
from nanscope.program.ops import base_name
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.roles import ROLES, Role, role_of
from nanscope.snapshot.step import Snapshot

ANCHORS = (Role.OLD_LOG_PROBS, Role.REF_LOG_PROBS, Role.ROLLOUT_LOG_PROBS)

LONGEST_WALK = 60  # calls that a value is followed back


_MOVES = frozenset(
    ("alias", "clone", "contiguous", "_to_copy", "lift_fresh", "reshape", "view", "_unsafe_view", "squeeze", "unsqueeze", "cat", "detach")
)

_CLAMPS = frozenset(("clamp", "clamp_min", "clamp_max", "nan_to_num"))

_SUMS = frozenset(("sum", "mean"))

_MASKS = frozenset(("mul", "where", "masked_fill"))

_PICKS = frozenset(("index", "masked_select"))

_RATES = frozenset((Role.ADVANTAGES, Role.REWARDS))


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """The batch, and where each part of it was found: (field of LossInputs, what the training code calls it)."""

    inputs: LossInputs
    sources: tuple[tuple[str, str], ...]


def loss_inputs(snapshot: Snapshot, run: Run | None = None) -> LossInputs:
    """Return the recorded batch by role, each [B, T], advantages also [B] or [B, 1].

    run: the executed program, if it is at hand.
    Raises NanscopeError with the slug "missing-role" if the file lacks the policy log-probs, the advantages or the mask, or if their
    shapes do not fit each other; it says what the file holds. A packed batch, [1, N] or [N], is one row.
    """
    return recorded_batch(snapshot, run).inputs


def recorded_batch(snapshot: Snapshot, run: Run | None = None) -> RecordedBatch:
    """Return the batch as `loss_inputs` does, and what each part of it is called in the training code."""
    program = snapshot.program
    if not program.calls or program.computes is not Computes.LOSS:
        raise NanscopeError("the file holds no program of the step's loss, so no batch can be read from it", slug="missing-role")
    return _Search(program, run or program.execute(snapshot.tensors, backward=False)).batch()


@dataclass(frozen=True, slots=True)
class _Found:
    """A part of the batch: a tensor, and what it is called."""

    tensor: Tensor
    name: str


@dataclass(frozen=True)
class _Search:
    """One program with all its values, asked for the parts of a batch."""

    program: Program
    run: Run

    @cached_property
    def namer(self) -> Namer:
        return Namer(self.program)

    @cached_property
    def carries(self) -> frozenset[int]:
        """G: the values through which the loss has a gradient."""
        found = {leaf.id for leaf in self.program.leaves if leaf.diff}
        for call in self.program.calls:
            if call.grad and base_name(call.op) != "detach" and any(value in found for value in call.inputs()):
                found.update(out for out in call.outs if out is not None and self.run.values[out].is_floating_point())
        return frozenset(found)

    @cached_property
    def roles(self) -> dict[int, Role | None]:
        """The role of every value that is more than a bare number."""
        return {value: self.namer.role(value) for value, tensor in self.run.values.items() if tensor.dim() > 0}

    # -- the parts ---------------------------------------------------------------------------------------------------------------

    def batch(self) -> RecordedBatch:
        policies = self._policies()
        if not policies:
            raise self._missing(Role.LOG_PROBS, "no value with a gradient is known as the log-probs of the policy")
        return _joined([self._part(policy) for policy in policies])

    def _policies(self) -> list[int]:
        """The values of the policy log-probs that the loss reads, before masks and clamps: one, or one a chunk."""
        ends = [value for value in self._ends(Role.LOG_PROBS) if value in self.carries]
        bases = list(dict.fromkeys(self._back(value, masks=True, deep=True)[-1] for value in ends))
        compared = [base for base in bases if self._partners(self._forms(base), "sub", "rsub")]
        bases = compared or bases
        sites = {self._readers(base)[0].site for base in bases}
        if len(bases) > 1 and (len(sites) > 1 or -1 in sites):
            names = ", ".join(dict.fromkeys(self._called(base) for base in bases))
            raise self._missing(Role.LOG_PROBS, f"several values may be the log-probs of the policy ({names})")
        return bases

    def _part(self, policy: int) -> dict[str, _Found]:
        """What belongs to one value of policy log-probs, by field of LossInputs."""
        last, compared = self._anchors(policy)
        last["log_probs"] = compared
        masked = all(len(self._back(v, masks=True, deep=False)) > len(self._back(v, masks=False, deep=False)) for v in last.values())
        for deep in (True, False):
            bases = {field: self._back(value, masks=masked, deep=deep)[-1] for field, value in last.items()}
            if len({self._width(value) for value in bases.values()}) == 1:
                break
        wide = self._rows(compared if self._width(compared) == self._width(bases["log_probs"]) else bases["log_probs"])
        parts = {field: _Found(self._shaped(value, wide, field), self._called(last[field], value)) for field, value in bases.items()}
        parts["mask"] = self._mask(policy, wide)
        parts["advantages"] = self._advantages(policy, wide, parts["mask"].tensor)
        entropy = next(
            (v for v, role in self.roles.items() if role is Role.ENTROPY and self._says(v, role) and self._width(v) == wide.numel()), None
        )
        if entropy is not None:
            parts["entropy"] = _Found(self._shaped(entropy, wide, "entropy"), self._called(entropy))
        return parts

    def _anchors(self, policy: int) -> tuple[dict[str, int], int]:
        """What the policy log-probs are compared with, by role, and by what the difference is used for where no name tells; and the form
        of the policy log-probs that meets it."""
        forms = self._forms(policy)
        partners = self._partners(forms, "sub", "rsub")
        widths = {self._width(form) for form in forms}
        found: dict[str, int] = {}
        for role in ANCHORS:
            ends = self._ends(role)
            near = [value for value in partners if value in ends] or [value for value in ends if self._width(value) in widths]
            if near:
                found[role] = near[0]
        taken = set(found.values())
        for value in partners:
            named = role_of(self.namer.name(value))  # by itself: what it is computed for says that it is subtracted, not what it is
            if value not in taken and named in (Role.LOG_PROBS, None) and self._width(value) in widths:
                found.setdefault("ref_log_probs" if self._compares_by_kl(forms, value) else "old_log_probs", value)
        met = [form for form in forms if set(self._partners((form,), "sub", "rsub")) & set(found.values())]
        return found, met[-1] if met else policy

    def _forms(self, policy: int) -> tuple[int, ...]:
        """The policy log-probs and what moves, clamps, masks, picks and sums make of them, in order."""
        found = [policy]
        for call in self.program.calls:
            if base_name(call.op) in _MOVES | _CLAMPS | _MASKS | _PICKS | _SUMS and any(value in found for value in call.inputs()):
                found += [out for out in call.outs if out in self.carries and self._source(call, out) in found]
        return tuple(found)

    def _mask(self, policy: int, wide: torch.Size) -> _Found:
        """The 0 or 1 that multiplies or selects the loss of a token; the one applied last. Nothing drops a token: all count."""
        cone = self._cone(policy)
        found = [(value, keep) for value, keep in self._drops(cone) if value not in cone and self._binary(value, wide)]
        best = next(((v, keep) for v, keep in reversed(found) if self.namer.says_mask(v) or self.roles.get(v) is Role.MASK), None)
        best = best or (found[-1] if found else None)
        if best is None:
            named = [value for value, role in self.roles.items() if role is Role.MASK and self._binary(value, wide)]
            named = [value for value in named if not any(value in call.inputs() for call in self._makers(named))] or named
            best = (named[-1], True) if named else None
        if best is None:
            unfit = [value for value, _ in self._drops(cone) if value not in cone and self.roles.get(value) is Role.MASK]
            if unfit:
                shape = list(self.run.values[unfit[-1]].shape)
                raise self._missing(Role.MASK, f"{self._called(unfit[-1])} has the shape {shape}, the log-probs have {list(wide)}")
            return _Found(torch.ones(wide), "every token counts: nothing drops one")
        value, keep = best
        content = self._shaped(value, wide, "mask") != 0
        return _Found((content if keep else ~content).float(), self._called(value) if keep else f"not {self._called(value)}")

    def _advantages(self, policy: int, wide: torch.Size, mask: Tensor) -> _Found:
        """What multiplies the ratio or the log-probs, by its role, also inside a product with weights."""
        factors = [(factor, value) for factor in self._partners(self._cone(policy), "mul") for value in self._product(factor)]
        rated = [pair for pair in factors if self.roles.get(pair[1]) in _RATES]
        rated = [pair for pair in rated if self.roles[pair[1]] is Role.ADVANTAGES] or rated
        if not rated:
            raise self._missing(Role.ADVANTAGES, "no factor of the ratio or of the log-probs is known as the advantages")
        factor, value = rated[0]
        source = self._before_sign(value)
        content = self.run.values[source]
        name = self._called(source, value, factor)
        for found in (content, self.run.values[value]):
            if (fitted := _as_rows(found, wide, mask)) is not None:
                return _Found(fitted, name)
        raise self._missing(Role.ADVANTAGES, f"{name} has the shape {list(content.shape)}, the log-probs have {list(wide)}")

    def _product(self, value: int) -> list[int]:
        """A value and the factors that it is a product of, nearest first."""
        found: list[int] = []
        stack = [value]
        while stack and len(found) < LONGEST_WALK:
            current = stack.pop(0)
            found.append(current)
            for call in self._makers([current]):
                if base_name(call.op) in ("mul", "neg"):
                    stack += [v for v in call.inputs() if v in self.roles]
        return found

    # -- the walks ---------------------------------------------------------------------------------------------------------------

    def _ends(self, role: Role) -> list[int]:
        """The values of a role that something else is made of, in the order of the program."""
        found = []
        for value, own in self.roles.items():
            if own is not role or not self.run.values[value].is_floating_point():
                continue
            readers = self._readers(value)
            if any(self.roles.get(out) is not role for call in readers for out in call.outs if out is not None):
                found.append(value)
        return found

    def _back(self, value: int, *, masks: bool, deep: bool) -> list[int]:
        """Return the values that a value was before moves and clamps, itself first; with `masks` also before masks, with `deep` before
        tokens were picked out or summed up."""
        chain = [value]
        carried = value in self.carries
        through = _MOVES | _CLAMPS | (_MASKS if masks else frozenset()) | (_PICKS | _SUMS if deep else frozenset())
        for _ in range(LONGEST_WALK):
            index = self.namer.producers.get(chain[-1])
            call = self.program.calls[index] if index is not None else None
            if call is None or base_name(call.op) not in through:
                break
            source = self._source(call, chain[-1])
            if source is None or (source in self.carries) is not carried or self.roles.get(source) not in LOG_PROBS:
                break
            chain.append(source)
        return chain

    def _source(self, call: Call, out: int) -> int | None:
        """The operand that a call only moves, clamps, masks, picks from or sums over the tokens; None if it does something else."""
        name, inputs = base_name(call.op), list(call.inputs())
        content, made = self.run.values, self.run.values[out]
        if name in _MASKS:
            sources = [v for v in inputs if self.roles.get(v) in LOG_PROBS and content[v].is_floating_point() and not self._is_binary(v)]
            masks = [v for v in inputs if v not in sources and content[v].numel() > 1]
            fits = len(sources) == 1 and len(masks) == 1 and self._is_binary(masks[0])
            return sources[0] if fits and content[sources[0]].shape == made.shape else None
        if not inputs or (name == "cat" and len(inputs) != 1):
            return None
        source = content[inputs[0]]
        if name in _PICKS:
            return (
                inputs[0]
                if len(inputs) == 2 and content[inputs[1]].dtype is torch.bool and content[inputs[1]].shape == source.shape
                else None
            )
        if name in _SUMS:
            return inputs[0] if source.dim() == 2 and made.numel() == source.shape[0] and source.shape[1] > 1 else None
        return inputs[0] if source.numel() == made.numel() else None

    def _readers(self, value: int) -> list[Call]:
        return [self.program.calls[index] for index in self.namer.consumers.get(value, ())]

    def _makers(self, values: list[int]) -> Iterator[Call]:
        for value in values:
            if (index := self.namer.producers.get(value)) is not None:
                yield self.program.calls[index]

    def _cone(self, policy: int) -> tuple[int, ...]:
        """The values that are made of the policy log-probs, those included."""
        found = {policy}
        for call in self.program.calls:
            if any(value in found for value in call.inputs()):
                found.update(out for out in call.outs if out is not None)
        return tuple(found)

    def _partners(self, cone: tuple[int, ...], *ops: str) -> list[int]:
        """What meets the gradient-carrying values of a cone in the given operators, and has no gradient itself."""
        own = set(cone) & self.carries
        found: list[int] = []
        for call in self.program.calls:
            inputs = list(call.inputs())
            if base_name(call.op) in ops and any(value in own for value in inputs):
                found += [value for value in inputs if value not in self.carries and self.run.values[value].is_floating_point()]
        return list(dict.fromkeys(value for value in found if self.run.values[value].numel() > 1 or value in self.roles))

    def _drops(self, cone: tuple[int, ...]) -> Iterator[tuple[int, bool]]:
        """Yield (mask, whether it is true for what is kept) of every call that takes elements out of a cone."""
        own = set(cone)
        for call in self.program.calls:
            arms = _ARMS.get(base_name(call.op))
            if arms is None or not any(value in own for value in call.inputs()):
                continue
            for mask, keep in arms(call, own):
                if mask in self.run.values:
                    yield mask, keep

    def _compares_by_kl(self, forms: tuple[int, ...], anchor: int) -> bool:
        """Is the difference of these two an estimate of a KL divergence?"""
        differences = [call for call in self._readers(anchor) if set(forms) & set(call.inputs()) and base_name(call.op) in ("sub", "rsub")]
        outs = [call.outs[0] for call in differences if call.outs[0] is not None]
        further = [out for value in outs for call in self._readers(value) for out in call.outs if out is not None]
        return any(self.roles.get(value) is Role.KL for value in (*outs, *further))

    def _before_sign(self, value: int) -> int:
        """The advantages before a minus sign, a change of shape or a mask."""
        for _ in range(LONGEST_WALK):
            index = self.namer.producers.get(value)
            call = self.program.calls[index] if index is not None else None
            name = base_name(call.op) if call is not None else ""
            inputs = list(call.inputs()) if call is not None else []
            if name == "mul":
                inputs = [v for v in inputs if not (self._is_binary(v) and self.roles.get(v) is Role.MASK)]
            elif name not in _MOVES | {"neg", "expand"}:
                break
            if len(inputs) != 1 or self.roles.get(inputs[0]) not in _RATES:
                break
            if self.roles.get(value) is Role.ADVANTAGES and self.roles[inputs[0]] is Role.REWARDS:
                break
            value = inputs[0]
        return value

    # -- shapes and words --------------------------------------------------------------------------------------------------------

    def _width(self, value: int) -> int:
        return self.run.values[value].numel()

    def _rows(self, value: int) -> torch.Size:
        """[B, T] of the policy log-probs. Raises NanscopeError if they are not per token."""
        shape = list(self.run.values[value].shape)
        while len(shape) > 2 and shape[-1] == 1:
            shape.pop()  # gathered, and not squeezed
        if len(shape) >= 2:
            return torch.Size((math.prod(shape[:-1]), shape[-1]))
        if self._summed(value) or not self._told_per_token(value):
            raise self._missing(Role.LOG_PROBS, f"{self._called(value)} has the shape {shape}: one number a sequence, not one a token")
        return torch.Size((1, shape[0]))

    def _summed(self, value: int) -> bool:
        return any(base_name(call.op) in (*_SUMS, "cumsum") for call in self._makers([value]))

    def _told_per_token(self, value: int) -> bool:
        """Is a line of log-probs one of tokens? It is where a mask drops some of them, or where it was picked out of rows."""
        size = self._width(value)
        cone = self._cone(value)
        dropped = any(self._width(mask) == size and self._is_binary(mask) for mask, _ in self._drops(cone) if mask not in cone)
        return dropped or any(base_name(call.op) in _PICKS for call in self._makers([value]))

    def _shaped(self, value: int, wide: torch.Size, field: str) -> Tensor:
        content = self.run.values[value]
        if content.numel() == wide.numel():
            return content.detach().reshape(wide)
        per = " (one number a sequence, not one a token)" if content.numel() == wide[0] else ""
        raise self._missing(Role(field), f"{self._called(value)} has the shape {list(content.shape)}{per}, the log-probs have {list(wide)}")

    def _is_binary(self, value: int) -> bool:
        content = self.run.values[value]
        return content.dtype is torch.bool or bool(((content == 0) | (content == 1)).all())

    def _binary(self, value: int, wide: torch.Size) -> bool:
        return self._width(value) == wide.numel() and self._is_binary(value) and self.roles.get(value) not in _RATES

    def _says(self, value: int, role: Role) -> bool:
        """Does the value's own name or tag tell this role?"""
        leaf = self.program.leaf(value)
        return role_of(self.namer.name(value)) is role or (leaf is not None and leaf.role == role)

    def _called(self, *values: int) -> str:
        """What the training code calls a value: its first name, else the expression that made it."""
        names = [name for value in values if (name := self.namer.name(value))]
        sites = [site for call in self._makers(list(values)) if (site := self.program.site_of(call)) is not None and site.expression]
        roles = [role for value in values if (role := self.roles.get(value)) is not None]
        return next(
            iter((*names, *(_short(site.expression) for site in sites), *(f"unnamed {role}" for role in roles), "an unnamed value"))
        )

    def _missing(self, role: Role, why: str) -> NanscopeError:
        held: dict[Role, list[str]] = {}
        for value, own in self.roles.items():
            if own in (*LOG_PROBS, Role.ADVANTAGES, Role.MASK):
                held.setdefault(own, []).append(f"{list(self.run.values[value].shape)}")
        words = ", ".join(f"{own} {shapes[-1]}" for own, shapes in sorted(held.items())) or "no role that a loss is computed from"
        advice = "name them in the training code: scope.tag(log_probs=…, old_log_probs=…, advantages=…, mask=…)"
        return NanscopeError(
            f"the batch has no {role} ({ROLES[role].meaning}): {why}. The file holds {words}; {advice}", slug="missing-role"
        )


def _short(expression: str) -> str:
    text = " ".join(expression.split())
    return text if len(text) <= 40 else text[:39] + "…"


def _ids(arg: object) -> list[int]:
    if isinstance(arg, Ref):
        return [arg.id]
    return [value for item in arg for value in _ids(item)] if isinstance(arg, tuple) else []


def _where(call: Call, own: set[int]) -> list[tuple[int, bool]]:
    condition, kept = _ids(call.args[0]), [any(value in own for value in _ids(arg)) for arg in call.args[1:3]]
    return [(value, kept[0]) for value in condition] if len(kept) == 2 and kept[0] != kept[1] else []


# How a call says which elements it keeps: (mask, true for the kept ones).
_ARMS: dict[str, Callable[[Call, set[int]], list[tuple[int, bool]]]] = {
    "mul": lambda call, own: [(value, True) for value in call.inputs() if value not in own],
    "where": _where,
    "masked_fill": lambda call, own: [(value, False) for value in _ids(call.args[1])],
    "index": lambda call, own: [(value, True) for value in _ids(call.args[1])],
    "masked_select": lambda call, own: [(value, True) for value in _ids(call.args[1])],
}


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
    return RecordedBatch(inputs, sources)


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
