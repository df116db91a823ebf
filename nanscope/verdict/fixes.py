"""Which of the edits that were tried are fixes, best first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nanscope.causes import ADVICE, ADVICE_AGAINST, ADVICE_OF_COMPUTED, CAUSES, OF_A_BATCH, Cause
from nanscope.program.ops import DIVISIONS, GATHERS, LITERALS, LOG_SOFTMAXES, WRITES
from nanscope.snapshot.observation import Observation, Phase, Row
from nanscope.text import line_in
from nanscope.verdict.grounds import divisor, of_setting, overflows
from nanscope.verdict.incident import Fix


def fixes_of(seen: Observation, cause: Cause, rows: Sequence[Row]) -> tuple[tuple[Fix, ...], tuple[Fix, ...]]:
    """Return the fixes that work, best first, and what was tried and does not."""
    where = line_in(seen.origin.file, seen.origin.line) if seen.origin.file and seen.origin.line else None
    wanted = _wanted(seen, cause)
    tried = [_as_fix(row, where) for row in rows if row.kind in ("fix", "control", "asked") and (row.total or row.loss is not None)]
    working = [fix for fix in tried if _is_fix(fix)]
    if cause is Cause.EXP_OVERFLOW and any(fix.id == "stable_function" for fix in working):
        wanted = ("stable_function", *wanted)  # a logarithm takes it back: nothing has to be bounded
    if cause is Cause.BAD_INPUT and seen.facts.number and any(fix.id == "stable_function" for fix in working):
        wanted = (*wanted, "stable_function")  # it leaves out of a product what is infinite
    natural = {name: position for position, name in enumerate(wanted)}
    exact = next((row.loss for row in rows if row.id == "float64" and row.works), None)
    if any(fix.id == "stable_function" and fix.proven and fix.diffs and _agrees(fix.loss, exact) for fix in working):
        natural.setdefault("stable_function", len(natural))  # it gives back what was lost, whatever is natural
    working.sort(
        key=lambda fix: (
            not fix.proven,
            fix.id not in natural,
            _bucket(fix.distortion),
            not _agrees(fix.loss, exact),
            natural.get(fix.id, 0),
        )
    )
    untried = [name for name in wanted if name not in {fix.id for fix in tried} and _may_be_advised(name, seen, bool(tried))]
    names = [name for name in untried if name in _NO_EDIT] or ([] if working else untried)
    against = ADVICE_OF_COMPUTED if seen.facts.computed else ADVICE_AGAINST
    advised = [Fix(name, against.get((cause, name), ADVICE[name]), where, False, None) for name in names]
    # What cannot be tried on one step is the better answer, but who divides by a number of the batch has no setting to check.
    ordered = [*working, *advised] if cause is Cause.ZERO_DENOMINATOR and not seen.facts.setting else [*advised, *working]
    return tuple(ordered), tuple(fix for fix in tried if not _is_fix(fix))


_NO_EDIT = ("validate_config", "fix_upstream", "initialise_memory", "skip_bad_step")  # what no edit of the step can show to work


def _may_be_advised(name: str, seen: Observation, tried: bool) -> bool:
    """Does the advice fit what was found? tried: the step could be replayed, and this was no edit of it."""
    if name == "skip_disabled_term":
        return not tried  # the 0 is no single number, but of some rows
    return name != "finite_mask_fill" or not overflows(seen) or seen.origin.op in LITERALS  # nobody has filled in what overflowed


def _wanted(seen: Observation, cause: Cause) -> tuple[str, ...]:
    """The fixes that answer a cause here, the most natural first."""
    if cause is Cause.EPS_UNDERFLOW and seen.phase is Phase.OPTIMIZER:
        return ("representable_eps", "upcast_fp32")  # eps is the setting that people can change
    wanted = CAUSES[cause].fixes
    if cause is Cause.UNINITIALIZED:
        return wanted  # whatever a mask takes out, the memory has to be written
    if cause is Cause.BAD_INPUT and of_setting(seen):
        return ("validate_config",)
    if cause is Cause.BAD_INPUT and seen.facts.number:  # no sample has brought it
        return ("finite_mask_fill",) if seen.origin.op in WRITES | LITERALS else ("validate_config", "finite_mask_fill")
    if cause is Cause.INF_MINUS_INF and _over_vocabulary(seen):
        wanted = ("finite_mask_fill", "mask_before_op", "drop_invalid_sample")  # there are no samples to drop
    elif cause is Cause.FULLY_MASKED_SOFTMAX and seen.facts.whole and math.prod(seen.origin.shape[:-1]) > 1:
        wanted = ("validate_config", "safe_softmax")  # no row was left anything: a window of 0, or a mask the wrong way round
    elif cause is Cause.FULLY_MASKED_SOFTMAX and seen.facts.filled:
        wanted = ("finite_mask_fill", "safe_softmax")  # the code's own −inf is what people can change
    elif cause is Cause.FP16_OVERFLOW and seen.origin.op in DIVISIONS and seen.facts.setting and abs(divisor(seen)) < 1:
        wanted = ("validate_config", *wanted)  # what divides a number of half precision out of its range
    elif seen.facts.degenerate:
        wanted = ("avoid_singular_op",)
    elif cause is Cause.LOG_ZERO and seen.origin.dtype in ("float16", "bfloat16"):
        wanted = ("stable_function", "upcast_fp32", "clamp_input")
    if seen.phase is Phase.OPTIMIZER:
        return tuple(name for name in wanted if name not in OF_A_BATCH)
    if seen.origin.masked is False and not seen.facts.multiplied:  # whatever a mask takes out, it is not this
        return tuple(sorted(wanted, key=lambda name: name == "mask_before_op"))
    return ("mask_before_op", *wanted) if seen.facts.multiplied and "mask_before_op" not in wanted else wanted


def _over_vocabulary(seen: Observation) -> bool:
    made_by = set(seen.facts.ancestors)
    return len(seen.origin.shape) > 2 or bool(LOG_SOFTMAXES & made_by and not GATHERS & made_by)


def _is_fix(fix: Fix) -> bool:
    """Works, and not by chance: what is done after the op comes too late for backward."""
    return bool(fix.works) and not fix.id.endswith("_after_op")


def _bucket(distortion: float | None) -> float:
    """Distortions below the noise of the dtype are the same."""
    if distortion is None:
        return 1.0
    return 0.0 if distortion < 1e-4 else distortion


def _agrees(loss: float | None, exact: float | None) -> bool:
    """Is it what float64, to which nothing is lost, makes of the step? Then the edit gives back what was lost, and silences nothing."""
    return loss is not None and exact is not None and math.isclose(loss, exact, rel_tol=1e-3, abs_tol=1e-6)


def _as_fix(row: Row, where: str | None) -> Fix:
    return Fix(row.id, row.label, where, True, row.works, row.loss, row.bad, row.total, row.distortion, row.diffs, row.rest, row.cost)
