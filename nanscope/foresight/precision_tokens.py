"""Log-probs on a grid: how many nats rounding moves each token, and at how many the clip then decides differently.

float32     24 bits: −2.5 is off by at most 1e-7 nat
bfloat16    8 bits:  −2.5 is off by at most 0.008 nat, and −20 by 0.06, where a clip is 0.2 wide
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.foresight.precision_run import Become, Change, change, replaced
from nanscope.locate.trace import Trace
from nanscope.program.numbers import dtype_name
from nanscope.program.ops import CLAMPS, EXPONENTIALS
from nanscope.program.run import Run
from nanscope.replay.batch import batch_of
from nanscope.replay.lineage import Lineage
from nanscope.roles import LOG_PROBS, Role

NARROW = (torch.bfloat16, torch.float16)
TOLD, SEEN = 8, 1024  # different numbers that have to lie on a grid before it is one, and among how many they are looked for


@dataclass(frozen=True, slots=True)
class Nats:
    """Of some numbers: mean, median, the one that 1 % exceed, and the largest."""

    mean: float
    median: float
    most: float
    largest: float

    @staticmethod
    def of(numbers: Tensor) -> Nats | None:
        """Of the finite ones; None if there are none."""
        ordered = numbers[torch.isfinite(numbers)].double().flatten().sort().values
        if not len(ordered):
            return None
        last = len(ordered) - 1
        return Nats(*(float(x) for x in (ordered.mean(), ordered[last // 2], ordered[round(0.99 * last)], ordered[-1])))


@dataclass(frozen=True, slots=True)
class HeldLogProbs:
    """The log-probs of one policy at the counted tokens.

    dtype: as the loss reads them. grid: the narrowest dtype that holds every one of them. off: nats that the program itself rounded off
    each, None where they came in. unit: half a unit in the last place of the grid, in nats: so far a true one may be off.
    """

    role: Role
    name: str | None
    dtype: str
    grid: str
    tokens: int
    off: Nats | None
    unit: Nats | None

    @property
    def coarse(self) -> bool:
        """Do they lie on the grid of a half precision?"""
        return self.grid in map(dtype_name, NARROW)


@dataclass(frozen=True, slots=True)
class Coarser:
    """The step in float64 with its log-probs moved, and what came of it.

    off: nats by which those of the policy were moved. decided, of: tokens at which the clip decides differently, and of how many; None
    without a clip.
    """

    label: str
    off: Nats | None
    change: Change
    decided: int | None
    of: int | None


@dataclass(frozen=True)  # without slots: what is derived is kept
class LogProbsOf:
    """The log-probs of a step, found in its program. exact: the same step in float64."""

    trace: Trace
    exact: Run

    @cached_property
    def _chains(self) -> Mapping[Role, list[list[int]]]:
        """The values of each policy's log-probs, from what the loss reads back to before it moved or clamped them."""
        lineage = Lineage(self.trace)
        found: dict[Role, list[list[int]]] = {}
        for role in (role for role in Role if role in LOG_PROBS):
            ends = [value for value in lineage.ends(role) if (value in lineage.carries) is (role is Role.LOG_PROBS)]
            if ends:
                found[role] = [lineage.back(value, masks=False, deep=False) for value in ends]
        return found

    @cached_property
    def values(self) -> Mapping[Role, list[int]]:
        """What each policy's log-probs were before the loss did anything to them: one value, or one a chunk."""
        return {role: list(dict.fromkeys(chain[-1] for chain in chains)) for role, chains in self._chains.items()}

    @cached_property
    def _counted(self) -> Tensor | None:
        try:
            return batch_of(self.trace).inputs.mask.flatten() > 0
        except NanscopeError:
            return None

    def of(self, content: Mapping[int, Tensor], role: Role) -> Tensor:
        """Return the log-probs of the counted tokens, [N], out of the values of a run."""
        return self._of_counted(torch.cat([content[value].detach().flatten() for value in self.values[role]]))

    def _of_counted(self, together: Tensor) -> Tensor:
        counted = self._counted
        return together[counted.to(together.device)] if counted is not None and len(counted) == len(together) else together

    def held(self) -> tuple[HeldLogProbs, ...]:
        """Return how those of each policy are held."""
        return tuple(self._held(role) for role in self.values)

    def _held(self, role: Role) -> HeldLogProbs:
        here, exact = self.of(self.trace.values, role), self.of(self.exact.values, role)
        made = any(self.trace.program.maker_behind(value) is not None for value in self.values[role])
        grid = grid_of(here)
        known = (self.trace.names.name(value) for chain in self._chains[role] for value in reversed(chain))
        off = Nats.of((here.double() - exact.double()).abs()) if made else None
        return HeldLogProbs(
            role,
            next(filter(None, known), None),
            dtype_name(here.dtype),
            dtype_name(grid),
            len(here),
            off,
            Nats.of(half_unit(here, grid)),
        )

    def moved(self) -> tuple[Coarser, ...]:
        """Run the step with all log-probs in half precision; and, where they came so, with those of the policy half a unit up and down."""
        if Role.LOG_PROBS not in self.values:
            return ()
        grid = grid_of(self.of(self.trace.values, Role.LOG_PROBS))
        every = [value for values in self.values.values() for value in values]
        policy = self.values[Role.LOG_PROBS]
        tries: dict[str, dict[int, Become]] = {}
        if grid in NARROW:
            half = f"true log-probs half a unit of {dtype_name(grid)}"
            tries |= {f"{half} {way}": dict.fromkeys(policy, _shifted(grid, sign)) for way, sign in _WAYS}
        else:
            tries |= {f"all log-probs in {dtype_name(dtype)}": dict.fromkeys(every, _narrowed(dtype)) for dtype in NARROW}
        return tuple(self._moved(label, becomes) for label, becomes in tries.items())

    def _moved(self, label: str, becomes: Mapping[int, Become]) -> Coarser:
        run = replaced(self.trace, becomes)
        off = (self.of(run.values, Role.LOG_PROBS).double() - self.of(self.exact.values, Role.LOG_PROBS).double()).abs()
        return Coarser(label, Nats.of(off), change(self.trace, run, self.exact), *self.decided(run))

    def decided(self, run: Run) -> tuple[int | None, int | None]:
        """Return at how many elements the clip decides differently than in float64, and of how many; None where no clip is known."""
        ours, theirs = self._decisions(run), self._decisions(self.exact)
        if not ours or len(ours) != len(theirs):
            return None, None
        apart = self._of_counted(torch.cat([(a != b).flatten() for a, b in zip(ours, theirs, strict=True)]))
        return int(apart.sum()), len(apart)

    @cached_property
    def _ratios(self) -> list[int]:
        """The ratio of the policy, one value or one a chunk: of several things that e is raised to, that which a clamp reads."""
        program, names = self.trace.program, self.trace.names
        by_site: dict[int, list[int]] = {}
        for call in program.calls:
            made = [out for out in call.outs if out is not None and call.name in EXPONENTIALS and names.role(out) is Role.RATIO]
            by_site.setdefault(call.site, []).extend(made)
        found = [values for values in by_site.values() if values]
        clamped = [values for values in found if any(reader.name in CLAMPS for value in values for reader in program.readers(value))]
        return next(iter(clamped or found), [])

    def _decisions(self, run: Run) -> list[Tensor]:
        """Which elements pass: a clip is where no gradient goes back to the ratio; where none does at all, where a clamp changes it."""
        passing = [run.grads[value] != 0 for value in self._ratios if value in run.grads]
        if passing:
            return passing
        names = self.trace.names
        clamps = [call for call in self.trace.program.calls if call.name in CLAMPS]
        pairs = [(next(call.inputs()), call.outs[0]) for call in clamps]
        return [run.values[out] == run.values[value] for value, out in pairs if out is not None and names.role(value) is Role.RATIO]


_WAYS = (("above", 1.0), ("below", -1.0))


def grid_of(numbers: Tensor) -> torch.dtype:
    """Return the narrowest dtype that holds all of these numbers exactly; their own where too few differ to tell."""
    finite = numbers[torch.isfinite(numbers)].detach()
    if numbers.dtype in NARROW or len(set(finite[:SEEN].tolist())) < TOLD:
        return numbers.dtype
    return next((dtype for dtype in NARROW if bool((finite.to(dtype).to(finite.dtype) == finite).all())), numbers.dtype)


def half_unit(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half a unit in the last place of each number in a dtype: the most that rounding to it may take off or add."""
    _, exponent = torch.frexp(numbers.double())
    return torch.ldexp(torch.full_like(numbers, torch.finfo(dtype).eps / 4, dtype=torch.float64), exponent)


def _narrowed(dtype: torch.dtype) -> Become:
    return lambda tensor: tensor.to(dtype).double()


def _shifted(dtype: torch.dtype, sign: float) -> Become:
    """Half a unit further; a log-prob does not rise above 0."""
    return lambda tensor: torch.minimum(tensor.double() + sign * half_unit(tensor, dtype), tensor.double().clamp(min=0.0))
