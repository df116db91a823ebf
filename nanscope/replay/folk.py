"""Settings that people advise to each other when a run has died, tried on the recorded step: which would have helped, and which not.

    actor.use_kl_loss=False          −0.0912   finite         ✓ would have helped
    a tenth of actor.kl_loss_coef    NaN       1 of 1 bad     ✗ does not help
    actor.kl_loss_coef=0             NaN       1 of 1 bad     ✗ does not help: 0 still multiplies: 0 · NaN is NaN

Where the recorded program has the KL term in it, that is edited, so what ran is what is tried, whichever release it was. Where it has not,
the framework's loss is run on the recorded batch under the recorded settings, if it fails there as it did in the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nanscope.errors import NanscopeError, ProgramError
from nanscope.frameworks.losses import LOSSES, framework_settings
from nanscope.frameworks.rows import Folk, Framework, Setting, Tries
from nanscope.locate.trace import Trace
from nanscope.objective.evaluate import objective
from nanscope.program.by_rows import execute_ends
from nanscope.program.calls import Arg, Call, Ref
from nanscope.program.numbers import is_finite
from nanscope.program.ops import PRODUCTS
from nanscope.program.program import Program
from nanscope.replay.batch import RecordedBatch, batch_of
from nanscope.replay.own_loss import Objective
from nanscope.replay.under import Outcome, evaluate
from nanscope.roles import Role
from nanscope.snapshot.observation import FOLK, Row
from nanscope.snapshot.step import Snapshot


def folk_rows(snapshot: Snapshot, framework: Framework | None, trace: Trace | None) -> tuple[Row, ...]:
    """Return what came out under each setting that people advise with this framework; nothing where nothing can be run.

    trace: of the step as recorded.
    """
    if framework is None or not framework.folk or trace is None:
        return ()
    bench = _Folks(snapshot, framework, trace)
    return tuple(bench.row(one) for one in framework.folk)


@dataclass(frozen=True)  # without slots: what is derived is kept
class _Folks:
    """A recorded step of a framework."""

    snapshot: Snapshot
    framework: Framework
    trace: Trace

    def row(self, one: Folk) -> Row:
        """Try one of them."""
        if one.option in self._settings and self._settings[one.option] == self._wanted(one) and one.does is not Tries.NOTHING:
            return _not_run(one, "it is so already")
        if one.does is Tries.NOTHING:
            return self._ran(one, self.trace.program, recorded=True)
        return self._edited(one) or self._under(one) or _not_run(one, "the file shows no KL term, and no loss whose settings are known")

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        found = self.snapshot.objective.get("settings")
        return {**self.snapshot.settings, **(found if isinstance(found, Mapping) else {})}

    def _wanted(self, one: Folk) -> Setting:
        if one.does is not Tries.SCALES:
            return one.value
        now = self._settings.get(one.option)
        known = isinstance(now, (int, float)) and isinstance(one.value, (int, float))
        return now * one.value if known else None  # type: ignore[operator]

    # -- the program -----------------------------------------------------------------------------------------------------------------

    @cached_property
    def _term(self) -> tuple[int, int, float] | None:
        """The call that multiplies the KL term by its coefficient: its place, that of the number in it, and the number."""
        program, names = self.trace.program, self.trace.names
        for index, call in reversed(list(enumerate(program.calls))):
            numbers = [(place, arg) for place, arg in enumerate(call.args) if isinstance(arg, (int, float)) and not isinstance(arg, bool)]
            value = next(call.inputs(), None)
            if call.name not in PRODUCTS or len(numbers) != 1 or value is None:
                continue
            roles = {names.role(out) for made in program.slice(value).calls for out in made.outs if out is not None}
            if Role.KL in roles and Role.ADVANTAGES not in roles and not self._is_pushed(value):
                return index, numbers[0][0], float(numbers[0][1])
        return None

    def _is_pushed(self, value: int) -> bool:
        """Do the advantages have a part in a value?"""
        return any(self.trace.names.role(leaf.id) is Role.ADVANTAGES for leaf in self.trace.program.slice(value).leaves)

    def _edited(self, one: Folk) -> Row | None:
        if self._term is None:
            return None
        index, place, number = self._term
        program = self.trace.program
        call = program.calls[index]
        if one.does is Tries.SCALES and isinstance(one.value, (int, float)):
            if number * one.value == number:
                return _not_run(one, "it is so already")
            scaled: tuple[Arg, ...] = tuple(number * one.value if at == place else arg for at, arg in enumerate(call.args))
            return self._ran(one, _with(program, index, replace(call, args=scaled)))
        term = next(arg for arg in call.args if isinstance(arg, Ref))
        without = _with(program, index, replace(call, op="aten.zeros_like.default", args=(term,), kwargs=(), grad=False))
        if one.does is Tries.LEAVES_OUT:
            return self._ran(one, without)
        return self._chosen(one, self._ran(one, without), number)

    def _chosen(self, one: Folk, rest: Row, coefficient: float) -> Row | None:
        """The rest of the loss as recorded, and the KL term as the framework writes it today with another estimator."""
        key = f"{self.framework.name}.kl_loss"
        if key not in LOSSES or self._batch is None:
            return None
        kl = self._outcome(key, {one.option: one.value}, self._batch)
        if kl is None or kl.loss is None:
            return None
        bad = kl.bad_counted + kl.bad_masked > 0
        loss = None if rest.loss is None else rest.loss + coefficient * kl.loss
        return replace(
            rest, loss=loss, bad=max(rest.bad, int(bad)), works=rest.works and kl.works, note=f"as {LOSSES[key].version} writes it"
        )

    def _ran(self, one: Folk, program: Program, *, recorded: bool = False) -> Row:
        try:
            run = execute_ends(program, self.trace.tensors)
        except ProgramError as error:
            return _not_run(one, str(error))
        grads = [run.grads[leaf.id] for leaf in program.leaves if leaf.diff and leaf.id in run.grads]
        bad = sum(not bool(is_finite(grad)) for grad in grads)
        loss = float(run.values[program.output].double().sum())
        works = math.isfinite(loss) and not bad and not recorded
        return Row(one.option, one.setting, FOLK, loss, bad, len(grads), None, works, "" if works else one.text)

    # -- the framework's loss ----------------------------------------------------------------------------------------------------------

    @cached_property
    def _batch(self) -> RecordedBatch | None:
        try:
            return batch_of(self.trace)
        except NanscopeError:
            return None

    def _under(self, one: Folk) -> Row | None:
        key, value = str(self.snapshot.objective.get("key", "")), self._wanted(one)
        if self._batch is None or key not in LOSSES or one.option not in LOSSES[key].names() or value is None:
            return None
        given = {name: self._settings[name] for name in LOSSES[key].names() if name in self._settings}
        before = self._outcome(key, given, self._batch)
        if before is None or before.works or before.loss is None:
            return None  # it is not this that failed
        after = self._outcome(key, {**given, one.option: value}, self._batch)
        if after is None:
            return None
        note = "" if after.works else one.text
        return replace(after.row, id=one.option, label=one.setting, kind=FOLK, distortion=None, note=note)

    @staticmethod
    def _outcome(key: str, settings: Mapping[str, Setting], batch: RecordedBatch) -> Outcome | None:
        try:
            how = framework_settings(key, **settings)
            return evaluate(Objective(key, key, lambda inputs: objective(inputs, how).loss), batch.inputs)
        except NanscopeError:
            return None


def _with(program: Program, index: int, call: Call) -> Program:
    calls = list(program.calls)
    calls[index] = call
    return replace(program, calls=tuple(calls))


def _not_run(one: Folk, why: str) -> Row:
    return Row(one.option, one.setting, FOLK, None, 0, 0, None, False, why)
