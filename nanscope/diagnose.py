"""From observations to a verdict: what happened, why, how far it got, and which fix was seen to work.

    step 412 · backward: coef_1 = torch.exp(log_importance_weights) overflowed at [2, 27] …

Rules name the cause, replay tries the fixes, and the words are written here, so that every report tells the same story.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanscope.causes import ADVICE, CAUSES, Cause
from nanscope.elements import at
from nanscope.errors import ProgramError
from nanscope.frameworks import Framework, recognise
from nanscope.indices import show_index, unravel
from nanscope.ledger import Entry, parse, show
from nanscope.locate import Location, Namer, Origin, Phase, Step
from nanscope.ops import Flow, base_name, flow_of
from nanscope.program import Call, Program, Run, Site
from nanscope.replay import Replay, Row, replay
from nanscope.roles import ROLES, Role, last_word, role_of
from nanscope.snapshot import Snapshot
from nanscope.summary import exponent_limit, headroom_bits
from nanscope.variants import vanishing_eps


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth a word that is no incident. slug: its kind."""

    slug: str
    text: str
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that was tried on the recorded step, or, with executed=False, that can only be advised.

    id: class of the fix. where: file:line. label: the edit. loss, bad gradients, distortion: see `replay.Row`.
    """

    id: str
    label: str
    where: str | None
    executed: bool
    works: bool | None
    loss: float | None = None
    bad: int = 0
    total: int = 0
    distortion: float | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """The origin as reports show it. See `locate.Origin`; headroom in bits, negative beyond the dtype's range.

    limit: for an exponential, the largest exponent that its dtype can take, in nats.
    """

    op: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    value: float
    dtype: str
    variable: str | None
    expression: str | None
    role: str | None
    masked: bool | None
    masked_by: str | None
    file: str | None
    line: int | None
    function: str | None
    module: str | None
    operands: tuple[tuple[str, float], ...]
    source: tuple[tuple[int, str], ...]
    headroom: float | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """One step of the chain, in words and numbers."""

    text: str
    line: int | None
    value: float
    backward: bool


@dataclass(frozen=True, slots=True)
class Incident:
    """One bad step, explained."""

    step: int
    rank: int
    phase: str
    cause: Cause
    headline: str
    sentence: str
    origin: Place
    chain: tuple[Link, ...]
    loss: float | None
    reached: dict[str, Any]
    fixes: tuple[Fix, ...]
    rejected: tuple[Fix, ...]
    framework: str | None
    remedies: tuple[str, ...]
    notes: tuple[Note, ...]
    snapshot: str | None
    rows: tuple[Row, ...]
    reproduces: bool | None
    suspect: bool
    history: tuple[Entry, ...]
    environment: dict[str, Any]
    settings: dict[str, Any]
    opaque: tuple[str, ...]
    picture: Picture | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """The offending tensor as a map of rows and tokens, cut to a readable size.

    values: [rows][columns], None outside the tensor. masked: the same, True where the loss does not count. row, column: the bad element
    within the cut. first_row, first_column: where the cut begins. rows, columns: size of the whole. what: what is shown.
    """

    what: str
    values: tuple[tuple[float, ...], ...]
    masked: tuple[tuple[bool, ...], ...] | None
    row: int
    column: int
    first_row: int
    first_column: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one run came to. incidents: the first harmful one first."""

    incidents: tuple[Incident, ...]
    notes: tuple[Note, ...] = ()
    steps: int = 0
    skipped: int = 0
    bad_steps: int = 0
    version: str = field(default="")

    @property
    def healthy(self) -> bool:
        """Nothing harmful was seen."""
        return not self.incidents

    @property
    def status(self) -> str:
        """ "healthy", "non-finite", or "suspect" where everything stayed finite and a step was ruined all the same."""
        if self.healthy:
            return "healthy"
        return "suspect" if all(incident.suspect for incident in self.incidents) else "non-finite"

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        if self.incidents:
            return self.incidents[0].sentence
        words = f"{self.steps} step{'' if self.steps == 1 else 's'} watched, no non-finite loss, gradient or weight"
        absorbed = [note for note in self.notes if note.slug == "nonfinite_absorbed"]
        return f"{words}; {absorbed[0].text}" if absorbed else words

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON data; non-finite numbers are text."""
        return {
            "schema": 1,
            "nanscope": self.version,
            "status": self.status,
            "sentence": self.sentence,
            "steps": self.steps,
            "bad_steps": self.bad_steps,
            "skipped": self.skipped,
            "incidents": [_incident_json(incident) for incident in self.incidents],
            "notes": [_note_json(note) for note in self.notes],
        }


def verdict(
    snapshots: Sequence[Snapshot],
    paths: Sequence[str | None] = (),
    *,
    notes: Sequence[Note] = (),
    steps: int = 0,
    skipped: int = 0,
    bad_steps: int = 0,
) -> Verdict:
    """Diagnose the snapshots of one run, in order.

    paths: where each was saved. notes: what else the run noticed. steps, skipped, bad_steps: its counts.
    """
    from nanscope import __version__

    incidents = []
    poisoned: int | None = None
    for index, snapshot in enumerate(snapshots):
        incidents.append(diagnose(snapshot, paths[index] if index < len(paths) else None, poisoned_at=poisoned))
        if poisoned is None and snapshot.reached.bad_weights:
            poisoned = snapshot.step
    everything = [*notes, *(note for incident in incidents for note in incident.notes)]
    return Verdict(tuple(incidents), tuple(dict.fromkeys(everything)), steps, skipped, max(bad_steps, len(incidents)), __version__)


def diagnose(snapshot: Snapshot, path: str | None = None, replayed: Replay | None = None, *, poisoned_at: int | None = None) -> Incident:
    """Explain one snapshot.

    replayed: a replay that was already run, to save a second one. poisoned_at: the earlier step that made weights non-finite, if the
    run saw one.
    """
    if replayed is None:
        try:
            replayed = replay(snapshot)
        except ProgramError as error:
            replayed = Replay((), None, None, None, None)
            snapshot = replace(snapshot, notes=(*snapshot.notes, ("not_replayed", str(error))))
    location, seen = replayed.location, snapshot.observed
    if location is not None and replayed.run is not None and not seen.get("outside"):
        case = _Case.of(location, snapshot.program, replayed.run)
    else:
        # The origin lies outside the file's program (in the model, in an update): told as it was seen.
        case = _Case.observed(snapshot, seen.get("location") or {})
        if seen.get("rows"):
            replayed = replace(replayed, rows=tuple(_row_from_json(row) for row in seen["rows"]))
    case = case.with_seen(seen, poisoned_at)
    cause = _cause(case)
    framework = recognise({site.file for site in snapshot.program.sites})
    fixes, rejected = _fixes(case, cause, replayed.rows)
    phase = str(case.phase)
    reached = {
        "loss": snapshot.reached.loss is not None and not math.isfinite(snapshot.reached.loss),
        "gradients": [snapshot.reached.bad_gradients, snapshot.reached.gradients],
        "weights": [snapshot.reached.bad_weights, snapshot.reached.weights],
        "stepped": snapshot.reached.stepped,
    }
    found = [Note(slug, text, snapshot.step) for slug, text in snapshot.notes]
    return Incident(
        step=snapshot.step,
        rank=snapshot.rank,
        phase=phase,
        cause=cause,
        headline=_headline(snapshot, phase),
        sentence=_sentence(snapshot, case, cause),
        origin=case.place,
        chain=case.chain,
        loss=snapshot.reached.loss,
        reached=reached,
        fixes=fixes,
        rejected=rejected,
        framework=framework.name if framework else None,
        remedies=_remedies(framework, cause),
        notes=tuple(found),
        snapshot=path,
        rows=replayed.rows,
        reproduces=replayed.reproduces,
        suspect=case.facts.suspect,
        history=snapshot.history,
        environment=snapshot.environment,
        settings=snapshot.settings,
        opaque=snapshot.opaque,
        picture=_picture(snapshot.program, location, replayed.run)
        if location is not None and replayed.run is not None and not seen.get("outside")
        else None,
    )


# -- the case: one view on an origin, whether it was replayed or only observed -------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the rules ask of the program around an origin, kept apart so that it can travel without the program.

    coefficient: a zero advantage or coefficient multiplies the origin. ancestors: operators that made its first operand.
    mask_denominator: it divides by a sum over a mask. literal_denominator: by a number of the code.
    eps_underflow: an epsilon of the code rounds to nothing on the way. whole: no element is finite. unwritten: memory that nobody wrote.
    multiplied: a mask is multiplied onto it. plogp: a logarithm that is multiplied by what it was taken of. setting: it divides by a
    number of the code or by a scalar that came in.
    clip: what a clip by norm made of it, "inf" or "nan". optimizer: its class, of an update. weight: what was updated.
    suspect: everything is finite and the step is ruined. poisoned_at: the earlier step that wrote non-finite numbers into the weights.
    """

    coefficient: bool = False
    ancestors: tuple[str, ...] = ()
    mask_denominator: bool = False
    literal_denominator: bool = False
    setting: bool = False
    whole: bool = False
    eps_underflow: bool = False
    unwritten: bool = False
    multiplied: bool = False
    plogp: bool = False
    optimizer: str = ""
    weight: str = ""
    clip: str = ""
    poisoned_at: int | None = None
    suspect: bool = False

    @staticmethod
    def of(location: Location, program: Program, run: Run) -> _Facts:
        origin = location.origin
        call = program.calls[origin.call] if origin.call is not None else None
        literal = call is not None and base_name(call.op) == "div" and len(call.args) > 1 and isinstance(call.args[1], (int, float))
        return _Facts(
            coefficient=origin.coefficient is not None,
            ancestors=tuple(sorted(_ancestors(program, origin.operands[0].id))) if origin.operands else (),
            mask_denominator=len(origin.operands) > 1 and _from_mask(program, run, origin.operands[1].id),
            literal_denominator=literal,
            setting=literal or (len(origin.operands) > 1 and _came_in(program, origin.operands[1].id)),
            whole=not bool(torch.isfinite(run.values[origin.value_id]).any()),
            multiplied=any(drop.how == "mask" for drop in origin.drops),
            plogp=origin.op in _LOGS and call is not None and _times_own_operand(program, call),
            unwritten=origin.leaf is not None and origin.leaf.made_by == "empty",
            eps_underflow=origin.call is not None and bool(vanishing_eps(program, run.values, origin.call)),
        )


@dataclass(frozen=True, slots=True)
class _Case:
    phase: Phase
    place: Place
    chain: tuple[Link, ...]
    facts: _Facts

    @staticmethod
    def of(location: Location, program: Program, run: Run) -> _Case:
        """The case of an origin that was replayed."""
        chain = tuple(Link(_link_words(s), s.line, s.value, s.backward) for s in location.chain)
        first = next((position for position, link in enumerate(chain) if link.backward), None)
        if first is not None and location.origin.born:
            link = chain[first]
            if math.isinf(location.origin.value) and location.origin.op in _EXPS:
                words = f"{link.text} (0 · inf in {location.origin.op}'s backward)"
                chain = (*chain[:first], replace(link, text=words), *chain[first + 1 :])
        return _Case(location.phase, _place(location.origin, program), chain, _Facts.of(location, program, run))

    @staticmethod
    def observed(snapshot: Snapshot, seen: dict[str, Any]) -> _Case:
        """The case of an origin that was seen in the process and is not in the file's program."""
        origin = dict(seen.get("origin") or {})
        default = Phase.FORWARD if snapshot.reached.loss is not None and not math.isfinite(snapshot.reached.loss) else Phase.BACKWARD
        phase = Phase(seen["phase"]) if seen.get("phase") in set(Phase) else default
        chain = tuple(Link(str(t), line, float(v), bool(b)) for t, line, v, b in seen.get("chain") or ())
        known = {name: value for name, value in (seen.get("facts") or {}).items() if name in _Facts.__slots__}
        facts = _Facts(**{**known, "ancestors": tuple(known.get("ancestors") or ())})
        return _Case(phase, _place_from_json(origin), chain, facts)

    def with_seen(self, seen: dict[str, Any], poisoned_at: int | None) -> _Case:
        """The case with what only the process could see: a clip by norm, the optimizer's class, what an earlier step did."""
        known = {key: str(seen.get(key) or getattr(self.facts, key)) for key in ("clip", "optimizer", "weight")}
        facts = replace(self.facts, poisoned_at=poisoned_at, suspect=bool(seen.get("suspect")), **known)  # type: ignore[arg-type]
        place = replace(self.place, role=str(Role.GRAD)) if facts.clip == "inf" else self.place
        return replace(self, facts=facts, place=place)

    def number(self, position: int) -> float:
        """The value of an operand, NaN if there is none."""
        return self.place.operands[position][1] if position < len(self.place.operands) else math.nan


def _link_words(step: Step) -> str:
    return f"{last_word(step.variable) if step.variable else step.op}{show_index(step.index)}"


def _ancestors(program: Program, value: int) -> set[str]:
    """The operators that a value was made by, a few steps back."""
    producers = program.producers()
    found: set[str] = set()
    stack = [(value, 0)]
    while stack:
        current, depth = stack.pop()
        index = producers.get(current)
        if index is None or depth > 4:
            continue
        found.add(base_name(program.calls[index].op))
        stack += [(v, depth + 1) for v in program.calls[index].inputs()]
    return found


def _times_own_operand(program: Program, call: Call) -> bool:
    """Is the logarithm multiplied by the number it was taken of, p · log p?"""
    consumers = program.consumers()
    operand = next(iter(call.inputs()), None)
    value = call.outs[0]
    for _ in range(6):
        readers = [program.calls[index] for index in consumers.get(value, ())] if value is not None else []
        if any(base_name(reader.op) == "mul" and operand in set(reader.inputs()) for reader in readers):
            return True
        following = [r for r in readers if flow_of(r.op) in (Flow.POINTWISE, Flow.MOVE)]
        if not following:
            return False
        value = following[0].outs[0]
    return False


def _came_in(program: Program, value: int) -> bool:
    """Is a value one that came in as it is, a temperature for instance, and was at most reshaped?"""
    producers = program.producers()
    for _ in range(12):
        index = producers.get(value)
        if index is None:
            return True
        call = program.calls[index]
        if flow_of(call.op) is not Flow.MOVE and base_name(call.op) not in ("_to_copy", "clone", "detach", "alias"):
            return False
        value = next(iter(call.inputs()), value)
    return False


def _from_mask(program: Program, run: Run, value: int) -> bool:
    """Is a value a sum over a mask?"""
    producers, namer = program.producers(), Namer(program)
    if "sum" not in _ancestors(program, value):
        return False
    for _ in range(12):
        if role_of(namer.name(value)) is Role.MASK or namer.says_mask(value):
            return True
        index = producers.get(value)
        if index is None:
            tensor = run.values[value]
            return tensor.dim() > 0 and bool(((tensor == 0) | (tensor == 1)).all())
        following = next(iter(program.calls[index].inputs()), None)
        if following is None:
            return False
        value = following
    return False


# -- causes: rules, the first that fits ------------------------------------------------------------------------------------------


def _is_half(case: _Case) -> bool:
    return case.place.dtype == "float16"


def _zero(number: float) -> bool:
    return number == 0


def _sequence(case: _Case) -> bool:
    return bool({"sum", "mean", "cumsum"} & set(case.facts.ancestors)) and case.place.role in (
        Role.RATIO,
        Role.IS_WEIGHT,
        Role.KL,
        Role.LOG_RATIO,
        None,
        Role.LOSS,
    )


_EXPS = ("exp", "expm1", "exp2")
_LOGS = ("log", "log2", "log10", "log1p", "xlogy")
_DOMAIN = ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "pow", "asin", "acos", "atanh", "acosh")  # NaN outside their domain
_DIVISORS = {"div": 1, "true_divide": 1, "addcdiv": 2, "reciprocal": 0, "rsqrt": 0}  # which argument an op divides by
_HALF_OPS = ("sum", "mul", "add", "sub", "mm", "bmm", "addmm", "pow", "square", "mean", "matmul", "linear", "_to_copy", "div", "baddbmm")
# (op names or None for any, condition, cause)
_RULES: tuple[tuple[tuple[str, ...] | None, Callable[[_Case], bool], Cause], ...] = (
    # An update spoils the elements it touches; memory that was never written is bad from end to end.
    (None, lambda c: c.phase is Phase.WEIGHTS and math.isfinite(c.place.value), Cause.HW_BITFLIP),
    (tuple(_DIVISORS), lambda c: c.facts.suspect, Cause.CANCELLATION_SPIKE),
    (None, lambda c: c.phase is Phase.WEIGHTS and c.facts.poisoned_at is not None, Cause.POISONED_WEIGHTS),
    (None, lambda c: c.phase is Phase.WEIGHTS and c.facts.whole and math.prod(c.place.shape) > 1, Cause.UNINITIALIZED),
    (None, lambda c: c.phase is Phase.WEIGHTS, Cause.POISONED_WEIGHTS),
    (None, lambda c: c.facts.clip == "inf", Cause.INF_GRAD_NORM_CLIP),
    (None, lambda c: c.facts.unwritten, Cause.UNINITIALIZED),
    (None, lambda c: c.phase is Phase.INPUT and c.place.masked is True, Cause.NAN_TIMES_ZERO_MASK),
    (None, lambda c: c.phase is Phase.INPUT, Cause.BAD_INPUT),
    (_LOGS, lambda c: c.facts.plogp, Cause.PLOGP_ZERO),
    (None, lambda c: c.phase is Phase.FORWARD and c.facts.multiplied and math.isinf(c.place.value), Cause.INF_TIMES_ZERO_MASK),
    (_DOMAIN, lambda c: c.phase is Phase.FORWARD and c.facts.multiplied and math.isnan(c.place.value), Cause.NAN_TIMES_ZERO_MASK),
    (("_softmax", "softmax", "_safe_softmax"), lambda c: math.isnan(c.place.value), Cause.FULLY_MASKED_SOFTMAX),
    (("logsumexp", "_log_softmax", "log_softmax"), lambda c: not math.isfinite(c.place.value), Cause.INF_MINUS_INF),
    (("std", "var"), lambda c: math.isnan(c.place.value), Cause.STD_SINGLE),
    ((*_DIVISORS, "log"), lambda c: c.facts.eps_underflow and _zero(_divisor(c)), Cause.EPS_UNDERFLOW),
    (("sqrt", "rsqrt", "pow"), lambda c: c.number(0) < 0 and math.isnan(c.place.value), Cause.SQRT_NEGATIVE),
    (
        ("sqrt", "linalg_vector_norm", "norm", "std", "pow", "rsqrt", "cdist", "acos", "asin"),
        lambda c: c.phase is Phase.BACKWARD and math.isfinite(c.place.value),
        Cause.SQRT_ZERO_GRAD,
    ),
    (_EXPS, lambda c: c.phase is Phase.BACKWARD, Cause.WHERE_GRAD_TRAP),
    (_EXPS, lambda c: c.place.masked is True, Cause.INF_TIMES_ZERO_MASK),
    (_EXPS, lambda c: c.facts.coefficient, Cause.INF_TIMES_ZERO_COEF),
    (_EXPS, _sequence, Cause.SEQ_RATIO_OVERFLOW),
    (_EXPS, lambda c: True, Cause.EXP_OVERFLOW),
    (_LOGS, lambda c: True, Cause.LOG_ZERO),
    (("mul",), lambda c: _zero_times_infinity(c) and c.phase is Phase.BACKWARD, Cause.WHERE_GRAD_TRAP),
    (("mul",), lambda c: _zero_times_infinity(c), Cause.PLOGP_ZERO),
    (("sub", "add", "rsub"), lambda c: math.isinf(c.number(0)) and math.isinf(c.number(1)), Cause.INF_MINUS_INF),
    (("div",), lambda c: c.phase is Phase.BACKWARD and _zero(c.number(1)), Cause.WHERE_GRAD_TRAP),
    (("div",), lambda c: _zero(c.number(1)) and c.facts.mask_denominator, Cause.EMPTY_MASK_MEAN),
    (("div",), lambda c: c.facts.literal_denominator, Cause.ZERO_DENOMINATOR),
    (("div",), lambda c: _zero(c.number(0)) and _zero(c.number(1)), Cause.ZERO_DIV_ZERO),
    (("addcdiv",), lambda c: _zero(c.number(1)) and _zero(c.number(2)), Cause.ZERO_DIV_ZERO),
    (tuple(_DIVISORS), lambda c: _zero(_divisor(c)), Cause.ZERO_DENOMINATOR),
    (("mean", "nanmean", "nll_loss_forward", "nll_loss2d_forward"), lambda c: math.isnan(c.place.value), Cause.EMPTY_MASK_MEAN),
    (_HALF_OPS, _is_half, Cause.FP16_OVERFLOW),
    (None, lambda c: math.isinf(c.place.value) and _is_half(c), Cause.FP16_OVERFLOW),
    (None, lambda c: math.isinf(c.place.value), Cause.MAGNITUDE_OVERFLOW),
    (None, lambda c: c.phase is Phase.OPTIMIZER and c.facts.eps_underflow, Cause.EPS_UNDERFLOW),
    (None, lambda c: c.phase is Phase.OPTIMIZER, Cause.ZERO_DIV_ZERO),
)


def _divisor(case: _Case) -> float:
    """What the origin divides by (of a logarithm: its operand)."""
    return case.number(_DIVISORS.get(case.place.op, 0))


def _zero_times_infinity(case: _Case) -> bool:
    numbers = [value for _, value in case.place.operands[:2]]
    return any(_zero(n) for n in numbers) and any(math.isinf(n) for n in numbers)


def _cause(case: _Case) -> Cause:
    for ops, condition, cause in _RULES:
        if (ops is None or case.place.op in ops) and condition(case):
            return cause
    return Cause.UNKNOWN


# -- fixes -----------------------------------------------------------------------------------------------------------------------


def _fixes(case: _Case, cause: Cause, rows: Sequence[Row]) -> tuple[tuple[Fix, ...], tuple[Fix, ...]]:
    """Return the fixes that work, best first, and what was tried and does not."""
    where = f"{Path(case.place.file).name}:{case.place.line}" if case.place.file and case.place.line else None
    wanted = CAUSES[cause].fixes
    if cause is Cause.INF_MINUS_INF and len(case.place.shape) > 2:
        wanted = ("finite_mask_fill", "mask_before_op", "drop_invalid_sample")  # over a vocabulary there are no samples to drop
    if case.facts.multiplied and "mask_before_op" not in wanted[:1]:
        wanted = ("mask_before_op", *wanted)
    if case.phase is Phase.OPTIMIZER and cause is Cause.EPS_UNDERFLOW:
        wanted = ("representable_eps", "upcast_fp32")  # eps is the setting that people can change
    natural = {name: position for position, name in enumerate(wanted)}
    tried = [_as_fix(row, where) for row in rows if row.kind in ("fix", "control", "asked") and (row.total or row.loss is not None)]
    working = [fix for fix in tried if fix.works and not fix.id.endswith("_after_op")]
    working.sort(key=lambda fix: (fix.id not in natural, _bucket(fix.distortion), natural.get(fix.id, 99)))
    advised = [
        Fix(name, ADVICE[name], where, False, None)
        for name in wanted
        if name not in {fix.id for fix in tried} and name in ("validate_config", "fix_upstream", "initialise_memory", "skip_bad_step")
    ]
    rejected = tuple(fix for fix in tried if not fix.works or fix.id.endswith("_after_op"))
    if not working and not advised:
        advised = [Fix(name, ADVICE[name], where, False, None) for name in wanted if name not in {fix.id for fix in rejected}]
    first = advised if cause is not Cause.ZERO_DENOMINATOR or case.facts.setting else []
    return (*first, *working, *(fix for fix in advised if fix not in first)), rejected


def _bucket(distortion: float | None) -> float:
    """Distortions below the noise of the dtype are the same."""
    if distortion is None:
        return 1.0
    return 0.0 if distortion < 1e-4 else distortion


def _as_fix(row: Row, where: str | None) -> Fix:
    return Fix(row.id, row.label, where, True, row.works, row.loss, row.bad, row.total, row.distortion)


def _remedies(framework: Framework | None, cause: Cause) -> tuple[str, ...]:
    if framework is None:
        return ()
    return tuple(f"{r.setting}: {r.text}" if r.setting else r.text for r in framework.remedies if str(cause) in r.causes)


# -- words -----------------------------------------------------------------------------------------------------------------------


def _place(origin: Origin, program: Program) -> Place:
    site = origin.site
    masked_by = next((_drop_words(drop.how, drop.name) for drop in origin.drops if drop.how in ("mask", "select")), None)
    if masked_by is None and origin.masked and origin.drops:
        masked_by = _drop_words(origin.drops[-1].how, origin.drops[-1].name)
    operands = tuple((_operand_name(origin, position), operand.value) for position, operand in enumerate(origin.operands))
    call = program.calls[origin.call] if origin.call is not None else None
    headroom = limit = None
    if origin.op in _EXPS and operands:
        limit = round(exponent_limit(_dtype(origin.dtype)), 2)
        headroom = round((exponent_limit(_dtype(origin.dtype)) - operands[0][1]) / math.log(2), 1)
    elif math.isfinite(origin.value) and origin.value:
        headroom = round(headroom_bits(abs(origin.value), _dtype(origin.dtype)), 1)
    return Place(
        op=origin.op,
        index=origin.index,
        shape=origin.shape,
        value=origin.value,
        dtype=origin.dtype,
        variable=last_word(origin.variable) if origin.variable else None,
        expression=site.expression or None if site else None,
        role=str(origin.role) if origin.role else None,
        masked=origin.masked,
        masked_by=masked_by,
        file=site.file if site else None,
        line=site.line if site else None,
        function=site.function if site else None,
        module=call.module or None if call else None,
        operands=operands,
        source=site.source if site else (),
        headroom=headroom,
        limit=limit,
    )


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, torch.float32)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.float32


_OPERANDS = {"addcdiv": ("weight", "numerator", "denominator"), "addcmul": ("value", "factor", "factor")}  # no source names these


def _operand_name(origin: Origin, position: int) -> str:
    operand = origin.operands[position]
    if operand.name:
        return last_word(operand.name)
    words = origin.site.args if origin.site else ()
    known = _OPERANDS.get(origin.op, ())
    if position < len(known):
        return known[position]
    return words[position] if position < len(words) else f"operand {position + 1}"


def _drop_words(how: str, name: str | None) -> str:
    return {
        "mask": f"multiplied by {name or 'a mask'} = 0",
        "select": f"not selected by {name or 'an index'}",
        "clip": f"{name} {_CLIPPED}",
        "replace": f"replaced by {name}",
    }[how]


def number(value: float | None) -> str:
    """Return a number as reports write it."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+inf" if value > 0 else "−inf"
    return f"{value:.4g}".replace("-", "−")


def _headline(snapshot: Snapshot, phase: str) -> str:
    r = snapshot.reached
    parts = []
    if r.loss is not None:
        parts.append(f"loss {number(r.loss)}" + (" (finite)" if math.isfinite(r.loss) else ""))
    if r.bad_gradients is not None and r.gradients:
        parts.append(f"{r.bad_gradients} of {r.gradients} gradients non-finite" if r.bad_gradients else "gradients clean")
    if r.bad_weights is not None:
        parts.append(f"{r.bad_weights} of {r.weights} weights non-finite" if r.bad_weights else "weights clean")
    parts.append(
        {"taken": "optimizer stepped", "skipped": "optimizer step skipped", "stopped": "run stopped before the optimizer step"}.get(
            r.stepped, ""
        )
    )
    return f"step {snapshot.step} · rank {snapshot.rank} · {phase}   " + " · ".join(part for part in parts if part)


_CLIPPED = "picked the other side"
_BORN: dict[str, str] = {"+inf": "overflowed to +inf", "−inf": "gave −inf", "NaN": "gave NaN"}


def _sentence(snapshot: Snapshot, case: _Case, cause: Cause) -> str:
    p, r = case.place, snapshot.reached
    where = f"{Path(p.file).name}:{p.line}" if p.file and p.line else "an unknown line"
    token = "an element" if len(p.shape) != 2 else "a token"
    inside = ""
    if p.masked and p.masked_by and p.masked_by.endswith(_CLIPPED):
        inside = f" at {token} where {p.masked_by}"
    elif p.masked:
        inside = f" at {token} that the loss does not count ({p.masked_by})" if p.masked_by else f" at {token} outside the loss"
    index = f"{show_index(p.index)} of {show_index(p.shape)}" if p.shape else ""
    if case.phase is Phase.INPUT:
        what = f"{p.variable or 'a tensor of the batch'} came in as {number(p.value)} at {index}{inside}, read at {where}"
    elif case.phase is Phase.WEIGHTS:
        name = f"the weight {p.variable}" if p.variable and p.variable != "weight" else "a weight"
        if cause is Cause.HW_BITFLIP:
            what = f"{name} is {number(p.value)} at {index}, many orders of magnitude beyond every other element of it"
        elif case.facts.poisoned_at is not None:
            what = f"{name} was already {number(p.value)} at {index}: the update of step {case.facts.poisoned_at} wrote it there"
        else:
            what = f"{name} was already {number(p.value)} at {index} before the step"
    elif case.phase is Phase.OPTIMIZER and p.operands and p.op != "unknown" and case.facts.weight:
        head, numbers = _made(p)
        at = f" at {index}" if index else ""
        what = f"the update of {case.facts.optimizer} made {case.facts.weight} non-finite: {head}{at}, {where}: {numbers}"
    elif case.phase is Phase.OPTIMIZER:
        what = f"the update of {case.facts.optimizer or 'the optimizer'} made {p.variable or 'a weight'} {number(p.value)} at {index}"
    elif p.op in ("unknown", "module"):
        what = f"{p.variable or 'a value'} came out of the model as {number(p.value)} {('at ' + index) if index else ''}".rstrip()
    else:
        head, numbers = _made(p)
        what = f"{head}{(' at ' + index) if index else ''}{inside}, {where}: {numbers}"
    why = CAUSES[cause].title if cause is not Cause.UNKNOWN else ""
    end = _end(r.loss, r.bad_gradients, r.gradients, r.bad_weights, r.stepped)
    if case.facts.suspect:
        end = f"Everything is finite, but the loss is {number(r.loss)} and the step is {snapshot.observed.get('spike') or 'out of scale'}"
    return ". ".join(part for part in (what, why[:1].upper() + why[1:], end) if part) + "."


def _made(p: Place) -> tuple[str, str]:
    """What was made, in words, and the numbers that it was made from."""
    many = p.op in ("sum", "mean", "std", "var", "_softmax", "logsumexp", "_log_softmax")
    args = "…" if many else ", ".join(number(value) for _, value in p.operands[:2])
    result = number(p.value)
    subject = f"{p.variable} = {p.expression}" if p.variable and p.expression else (p.expression or p.variable or p.op)
    if math.isfinite(p.value):
        return f"the gradient of {subject} is not finite", f"{p.op}({args}) = {result}"
    numbers = f"{p.op}({args}) = {result}"
    if p.limit is not None and math.isinf(p.value):
        numbers += f", {p.dtype} ends at exp({p.limit})"
    return f"{subject} {_BORN.get(result, 'gave ' + result)}", numbers


def _end(loss: float | None, bad: int | None, total: int | None, weights: int | None, stepped: str) -> str:
    parts = []
    if loss is not None:
        parts.append(f"the loss is {number(loss)}" if not math.isfinite(loss) else f"the loss stays finite ({number(loss)})")
    if bad is not None and total:
        clean = not bad
        if clean and not weights:
            parts.append("weights and gradients stayed clean")
        elif bad:
            parts.append(_of(bad, total, "gradient"))
    if weights:
        parts.append(f"the update wrote it into {weights} weight{'' if weights == 1 else 's'}")
    if stepped == "skipped":
        parts.append("the optimizer step was skipped and the weights stayed clean")
    text = ", ".join(parts)
    return text[:1].upper() + text[1:]


def _of(bad: int, total: int, what: str) -> str:
    if total == 1:
        return f"its {what} is non-finite"
    return f"all {total} {what}s are non-finite" if bad == total else f"{bad} of {total} {what}s are non-finite"


def absorbed(location: Location, step: int) -> Note:
    """Return the note for a value that overflowed and did no harm."""
    o = location.origin
    site = o.site
    where = f"{Path(site.file).name}:{site.line}" if site else "an unknown line"
    name = o.variable or (site.expression if site else o.op) or o.op
    outside = " at a position that the loss does not count" if o.masked else ""
    text = (
        f"{last_word(name) if o.variable else name} was {number(o.value)} at {show_index(o.index)}{outside} ({where}, step {step}), "
        "and it was absorbed: loss is finite, weights and gradients stayed clean"
    )
    return Note("nonfinite_absorbed", text, step)


# -- observations that travel in a snapshot ----------------------------------------------------------------------------------------


def observation(location: Location, program: Program, run: Run) -> dict[str, Any]:
    """Return a location as JSON data: what a file keeps of an origin that its program does not hold."""
    case = _Case.of(location, program, run)
    return {
        "phase": str(case.phase),
        "origin": _place_json(case.place),
        "chain": [[link.text, link.line, show(link.value), link.backward] for link in case.chain[:200]],
        "facts": asdict(case.facts),
    }


def rows_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows of a replay as JSON data."""
    return [{name: show(value) for name, value in asdict(row).items()} for row in rows]


def _row_from_json(data: dict[str, Any]) -> Row:
    return Row(**{field.name: parse(data.get(field.name)) for field in fields(Row)})


def weight_observation(name: str | None, parameter: Tensor, flat: int, group: dict[str, Any]) -> dict[str, Any]:
    """Return what an update did to a weight, as JSON data."""
    eps = group.get("eps")
    small = isinstance(eps, float) and float(torch.tensor(eps, dtype=parameter.dtype)) == 0.0
    grad = parameter.grad
    operands = [] if grad is None else [["gradient", show(at(grad.detach(), flat))]]
    origin = {
        "op": "addcdiv" if eps is not None else "add",
        "index": list(unravel(flat, parameter.shape)),
        "shape": list(parameter.shape),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "value": show(at(parameter.detach(), flat)),
        "variable": name,
        "role": "optimizer",
        "masked": None,
        "operands": operands,
    }
    return {"origin": origin, "facts": {"eps_underflow": small}}


def norm_observation(name: str | None, gradient: Tensor, flat: int, site: Site | None) -> dict[str, Any]:
    """Return the largest element of a gradient whose norm overflowed, as JSON data. site: where the norm was taken."""
    origin = {
        "op": "linalg_vector_norm",
        "index": list(unravel(flat, gradient.shape)),
        "shape": list(gradient.shape),
        "dtype": str(gradient.dtype).removeprefix("torch."),
        "value": show(at(gradient, flat)),
        "variable": name,
        "role": str(Role.GRAD),
        "masked": None,
        "operands": [["gradient", show(at(gradient, flat))]],
    }
    if site is not None:
        origin |= {"file": site.file, "line": site.line, "function": site.function, "source": [list(line) for line in site.source]}
    return {"phase": str(Phase.BACKWARD), "origin": origin}


# -- JSON ----------------------------------------------------------------------------------------------------------------------------


def _place_json(p: Place) -> dict[str, Any]:
    return {
        "op": p.op,
        "variable": p.variable,
        "expression": p.expression,
        "role": p.role,
        "index": list(p.index),
        "shape": list(p.shape),
        "dtype": p.dtype,
        "value": show(p.value),
        "masked": p.masked,
        "masked_by": p.masked_by,
        "file": p.file,
        "line": p.line,
        "function": p.function,
        "module": p.module,
        "operands": [[name, show(value)] for name, value in p.operands],
        "source": [[line, text] for line, text in p.source],
        "headroom_bits": p.headroom,
        "limit_nats": p.limit,
    }


def _place_from_json(data: dict[str, Any]) -> Place:
    known: dict[str, Any] = {field.name: data.get(field.name) for field in fields(Place)}
    read: dict[str, Any] = {
        "op": str(data.get("op") or "unknown"),
        "index": tuple(data.get("index") or ()),
        "shape": tuple(data.get("shape") or ()),
        "value": float(data.get("value", math.nan)),
        "dtype": str(data.get("dtype") or ""),
        "operands": tuple((str(name), float(value)) for name, value in data.get("operands") or ()),
        "source": tuple((int(number), str(text)) for number, text in data.get("source") or ()),
        "headroom": data.get("headroom_bits"),
        "limit": data.get("limit_nats"),
    }
    return Place(**{**known, **read})


def _fix_json(fix: Fix) -> dict[str, Any]:
    return {
        "id": fix.id,
        "label": fix.label,
        "where": fix.where,
        "executed": fix.executed,
        "works": fix.works,
        "loss": show(fix.loss),
        "bad_gradients": [fix.bad, fix.total] if fix.executed else None,
        "distortion": show(fix.distortion),
    }


def _note_json(note: Note) -> dict[str, Any]:
    return {"slug": note.slug, "text": note.text, "step": note.step}


def _incident_json(i: Incident) -> dict[str, Any]:
    return {
        "step": i.step,
        "rank": i.rank,
        "phase": i.phase,
        "cause": str(i.cause),
        "status": "suspect" if i.suspect else "non-finite",
        "headline": i.headline,
        "sentence": i.sentence,
        "origin": _place_json(i.origin),
        "chain": [{"text": link.text, "line": link.line, "value": show(link.value), "backward": link.backward} for link in i.chain],
        "loss": show(i.loss),
        "reached": i.reached,
        "fixes": [_fix_json(fix) for fix in i.fixes],
        "rejected": [_fix_json(fix) for fix in i.rejected],
        "framework": i.framework,
        "remedies": list(i.remedies),
        "notes": [_note_json(note) for note in i.notes],
        "snapshot": i.snapshot,
        "reproduces": i.reproduces,
        "settings": i.settings,
        "environment": i.environment,
    }


# -- the map -------------------------------------------------------------------------------------------------------------------------

MAP_ROWS, MAP_COLUMNS = 24, 64


def _picture(program: Program, location: Location, run: Run) -> Picture | None:
    """Cut the offending tensor, or the exponent that made it, to a map around the bad element."""
    origin = location.origin
    shown, what = run.values[origin.value_id], origin.variable or origin.op
    if origin.op in _EXPS and origin.operands:
        shown, what = run.values[origin.operands[0].id], _operand_name(origin, 0)
    if shown.dim() == 0 or not shown.is_floating_point() or shown.shape != run.values[origin.value_id].shape:
        return None
    flat = shown.reshape(-1, shown.shape[-1]) if shown.dim() > 1 else shown.reshape(1, -1)
    row, column = divmod(origin.flat, flat.shape[1])
    top = max(0, min(row - MAP_ROWS // 2, flat.shape[0] - MAP_ROWS))
    left = max(0, min(column - MAP_COLUMNS // 2, flat.shape[1] - MAP_COLUMNS))
    window = flat[top : top + MAP_ROWS, left : left + MAP_COLUMNS]
    masked = None
    for drop in origin.drops:
        if drop.by is None or drop.how not in ("mask", "select"):
            continue
        mask = run.values[drop.by]
        try:
            whole = mask.expand(shown.shape).reshape(flat.shape)
        except RuntimeError:
            continue
        excluded = whole == whole[row, column]
        masked = tuple(tuple(bool(x) for x in line) for line in excluded[top : top + MAP_ROWS, left : left + MAP_COLUMNS].tolist())
        break
    values = tuple(tuple(float(x) for x in line) for line in window.double().tolist())
    return Picture(last_word(what), values, masked, row - top, column - left, top, left, flat.shape[0], flat.shape[1])


def is_exact(distortion: float | None) -> bool:
    """Is a distortion nothing but rounding?"""
    return distortion is not None and distortion <= 1e-6


def role_words(role: str | None) -> str:
    """Return what a role means, in one line."""
    return ROLES[Role(role)].meaning if role in set(Role) else ""
