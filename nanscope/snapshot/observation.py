"""The observation: what is known of a bad step, as plain data. It travels in the file, and every report reads it.

An origin that the file's program holds is found again by running it. One that it does not hold (inside the model, in an update, in a
clip, on another rank) is kept as it was seen in the process, with its chain, its facts, and the fixes that were tried there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from nanscope.plain import checked, read, show
from nanscope.program.ops import BOUNDS, DIVISORS, GAMMAS, LOGARITHMS, TAKEN_OF
from nanscope.roles import Role
from nanscope.text import is_spared

STOOD_IN = "a usual weight"  # an operand whose number is of about the size of the real one, which nobody kept
LONGEST = 200  # links of a chain, operands of a value, lines of a source


class Phase(StrEnum):
    """Where the harm was made."""

    INPUT = "input"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    WEIGHTS = "weights"


class Kind(StrEnum):
    """What happened to the step."""

    NONFINITE = "nonfinite"
    SPIKE = "spike"  # everything is finite, and far out of the size that the run is used to
    SWALLOWED = "swallowed"  # a kernel dropped a NaN of its batch: finite, and wrong
    ABSORBED = "absorbed"  # an overflow was made a finite number of, and a wrong one
    CLIP = "clip"  # a clip divided the gradients by an infinite norm
    ARRIVED = "arrived"  # a gradient is bad, and what this rank made is finite as far as can be seen: it came from the ranks together


REDUCED = "all_reduce"  # what made a gradient bad: another rank, since this one's own backward, made once more, is finite
SPREAD = "backward"  # the backward of a model that is spread over ranks, which one of them cannot make once more
WRITTEN = "written"  # whoever wrote to it after backward was over
CHANGED = "changed"  # a hook, or whoever wrote to it unseen: backward itself, made again, is finite
COMPILED = "compiled"  # what torch has compiled: run as it is written, it gives finite numbers
COMPILED_BACKWARD = "compiled_backward"  # and so does its backward
HOOKED = "hook"  # a hook that somebody has put on a tensor
UNTRACED = "untraced"  # the backward of a model that could not be made again, or what came after it
WRITTEN_LATE = "write"  # whoever wrote to it after the ranks had put theirs together
UNMADE = "unmade"  # whoever set it: no backward pass that was watched made it
HANDED = "handed"  # whoever called backward with it
RECEIVED = "received"  # another rank, which sent it

FROZEN = "that ran without gradient"  # how the name of a weight ends which nothing that was watched updates


MODULE = "module"  # a part of the model, in which nobody could look further
FED = frozenset({MODULE, "unknown"})  # an origin that nobody could look into: it came out of the model
UNOPENED = FED | {"opaque", "cut"}  # or out of other code that was not recorded


class Came(StrEnum):
    """How a bad step came to a rank."""

    MADE = "made"  # here
    EXCHANGED = "exchange"  # by what ranks put together for the loss
    REDUCED = "all-reduce"  # by a gradient that another rank made
    SCATTERED = "reduce-scatter"  # by that of a shard of which this rank holds the weight
    SENT = "sent"  # by the stage before or after, in a pipeline
    WEIGHTS = "weights"  # by weights that an earlier step had spoilt
    MODEL = "model"  # out of the model, and nobody could look into it

    @property
    def arrived(self) -> bool:
        """Is it another rank's?"""
        return self in (Came.EXCHANGED, Came.REDUCED, Came.SCATTERED, Came.SENT)


@dataclass(frozen=True, slots=True)
class Origin:
    """The first harmful value.

    op: the bare operator. index, shape: of the element. value: what it is. variable, expression: what the code calls it. role: what it
    means (`nanscope.roles.Role`). masked: outside the loss, None where nothing selects; masked_by: what takes it out, in words.
    operands: (name, value) of what it was made from. source: (line number, text) around the line. headroom: bits left to the end of the
    dtype, negative beyond it. limit: for an exponential, the largest exponent that its dtype can take, in nats. sharded: the rank held a
    part of the tensor; index and shape are those in the whole. batch: row and token in the batch, also where the tensor is
    a piece of that, or lies otherwise; the row alone of one number a row, () of what is no token, None where that is not known.
    """

    op: str = "unknown"
    index: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    value: float = math.nan
    dtype: str = ""
    variable: str | None = None
    expression: str | None = None
    role: str | None = None
    masked: bool | None = None
    masked_by: str | None = None
    file: str | None = None
    line: int | None = None
    function: str | None = None
    module: str | None = None
    operands: tuple[tuple[str, float], ...] = ()
    source: tuple[tuple[int, str], ...] = ()
    headroom: float | None = None
    limit: float | None = None
    sharded: bool = False
    batch: tuple[int, ...] | None = None

    def number(self, position: int) -> float:
        """Return the value of an operand, NaN if there is none."""
        return self.operands[position][1] if position < len(self.operands) else math.nan

    @property
    def divided(self) -> float:
        """Return what it was divided by, NaN if by nothing: an infinite power of 0 is one by 0."""
        divides = self.op in DIVISORS and (self.op != "pow" or math.isinf(self.value))
        return self.number(DIVISORS[self.op]) if divides else math.nan

    @property
    def is_pole(self) -> bool:
        """Is it infinite because the operation is, there, in whatever dtype? That is no overflow."""
        read = self.number(TAKEN_OF.get(self.op, 0))
        if not math.isinf(self.value) or not math.isfinite(read):
            return False
        low, high = BOUNDS.get(self.op, (-math.inf, math.inf))
        return not low < read < high or self.op in LOGARITHMS or (self.op in GAMMAS and read <= 0)

    @property
    def is_frozen(self) -> bool:
        """Is it a weight of a model that is not trained?"""
        return (self.variable or "").endswith(FROZEN)

    def to_json(self) -> dict[str, Any]:
        """Return the origin as JSON data; units stand in the names."""
        data: dict[str, Any] = show(asdict(self))
        data["headroom_bits"], data["limit_nats"] = data.pop("headroom"), data.pop("limit")
        return data

    @staticmethod
    def from_json(data: dict[str, Any]) -> Origin:
        """Read what `to_json` wrote. Raises TypeError or ValueError for anything else."""
        known = {"headroom": data.get("headroom_bits"), "limit": data.get("limit_nats")}
        lists: dict[str, object] = {name: _first(data[name]) for name in ("operands", "source") if name in data}
        return Origin(**checked(Origin, {**data, **lists, **known}))


@dataclass(frozen=True, slots=True)
class Link:
    """One link of the chain from the origin to the harm, in words and numbers. backward: the value is a gradient."""

    text: str
    line: int | None
    value: float
    backward: bool
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules ask of the program around an origin, kept apart so that it can travel without the program.

    coefficient: a zero advantage or coefficient multiplies the origin. ancestors: operators that made its first operand.
    mask_denominator: it divides by a sum over a mask. literal_denominator: by a number of the code. setting: by such a number, or by a
    scalar that came in. eps_underflow: an epsilon of the code rounds to nothing on the way. whole: no element is finite.
    unwritten: memory that nobody wrote. multiplied: a mask is multiplied onto it. plogp: a logarithm that is multiplied by what it was
    taken of. dropped: forward takes its value out. zero_is_mask: the origin itself is a product with a mask that is 0.
    extent: how much of a tensor that came in is bad. selects_nothing: it divides a sum over what a mask lets through, and that is nothing.
    cancelled: what it divides by, or takes the root of, is a difference of much larger numbers, as small as their rounding errors.
    exponential: it is a power whose exponent varies, and is what made it large. filled: the −inf that it was made from are a number of the
    code, written by another call than the origin's. number: a number that the code gave is NaN, or infinite. leaves_half: its
    gradient is beyond the range of half precision, in which it was computed, and within that of float32. degenerate: a decomposition of a
    matrix, or its backward, divides by 0: two eigenvalues are equal, or a pivot is 0; or a normalisation does. opposed: it is an infinity,
    and where it becomes NaN another one is taken from it. beyond: a finite number that the code gave is none of the dtype. put: the line
    of the code that put the number into what is read as data, "" if none did.
    """

    coefficient: bool = False
    ancestors: tuple[str, ...] = ()
    mask_denominator: bool = False
    literal_denominator: bool = False
    setting: bool = False
    computed: bool = False  # what divides came of a call, and did not come in as it is
    whole: bool = False
    eps_underflow: bool = False
    unwritten: bool = False
    multiplied: bool = False
    plogp: bool = False
    dropped: bool = False
    zero_is_mask: bool = False
    extent: str = ""
    selects_nothing: bool = False
    cancelled: bool = False
    exponential: bool = False
    filled: bool = False
    number: bool = False
    leaves_half: bool = False
    degenerate: bool = False
    opposed: bool = False
    put: str = ""
    beyond: bool = False


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of a bad weight from before it was found bad.

    fine_at: the last step in which it was seen to be finite, None if it never was. by, file, line: the code of the training that has
    written to it since. unwritten: nobody had written to its memory when it was first seen. found: when it was found, "" in a step that
    began with it. came: it was bad when it was first seen, or was told to be before.
    """

    fine_at: int | None = None
    by: str = ""
    file: str | None = None
    line: int | None = None
    unwritten: bool = False
    found: str = ""
    came: bool = False


NO_PAST = Past()


TEST = "cause"  # the kind of a row that tests one
FOLK = "setting"  # of a row: a setting that people advise to each other, tried


@dataclass(frozen=True, slots=True)
class Diff:
    """A change of the source at one place. file: whose; line: the number of the first line that is other, or that something is put before.

    removed, added: lines as they are and as they are to be. above, below: lines around them that stay.
    """

    file: str
    line: int
    removed: tuple[str, ...]
    added: tuple[str, ...]
    above: tuple[str, ...] = ()
    below: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One way of running the step.

    kind: "recorded", "float64", "fix", "control" (a tempting wrong one), "asked" (by --edit), "setting" (what people advise) or "cause"
    (what a cause says to be different, where `works` says that this origin is gone, whatever may go wrong elsewhere).
    loss: what came out. bad, total: leaf gradients that are non-finite, of how many. distortion: largest change of a healthy element's
    gradient, relative to the largest healthy gradient; 0 where it is within the rounding of the recorded dtype, None where it cannot be
    measured.
    works: loss and gradients are finite, and of a spike no longer huge. largest: magnitude of the largest gradient element.
    note: why it could not be run, or what is remarkable. then: where it goes wrong next, if that is another place ("div at line 12").
    diffs: of a fix that works, what it changes in the source; () where that cannot be written. rest: what it does at places of which that
    cannot be written, in words, where there are diffs of others. cost: why a fix that works is not to be called proven all the same.
    """

    id: str
    label: str
    kind: str
    loss: float | None
    bad: int
    total: int
    distortion: float | None
    works: bool
    note: str = ""
    largest: float | None = None
    then: str = ""
    diffs: tuple[Diff, ...] = ()
    rest: tuple[str, ...] = ()
    cost: str = ""

    @property
    def proven(self) -> bool:
        """Does it work, was it measured that it leaves the healthy elements alone, and is nothing else to be said against it?"""
        return self.works and is_spared(self.distortion) and not self.cost


@dataclass(frozen=True, slots=True)
class Blame:
    """The element of a tensor that came in which is far out of that tensor's own range, and which an overflow goes back to.

    name, role: of the tensor. index, value: of the element; row: of a row that is far out as a whole, the value being its median. median,
    low, high: of the other elements, those that the loss counts where a mask is known; low and high at 5 % and at 95 %.
    """

    name: str | None
    role: str | None
    index: tuple[int, ...]
    value: float
    median: float
    low: float
    high: float
    row: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known of a bad step.

    outside: the origin lies outside the file's program. phase, origin, chain, facts: empty in a file whose program holds them.
    masked: whether the loss counts the element, where only the process could tell. scale: of a spike, how far out of scale it is; of
    what was absorbed, what was made of it. optimizer: class of the one whose update did it. weight: name of what it updated. settings: of
    the optimizer, those that are not finite, in words. tried: how the step ran under edits in the process. past: of a weight. born: where
    the infinity was made that the origin makes NaN of, in words. blame: what came in far out of its own range, and made the origin
    overflow. poisoned_at: the earlier step whose update made weights non-finite. source: rank and sentence of the incident of another rank
    in the same step. Both are known when the steps of a run are told together, and stand in no file.
    """

    kind: Kind = Kind.NONFINITE
    phase: Phase | None = None
    origin: Origin = Origin()
    chain: tuple[Link, ...] = ()
    facts: Facts = Facts()
    outside: bool = False
    masked: bool | None = None
    scale: str = ""
    optimizer: str = ""
    weight: str = ""
    settings: str = ""
    tried: tuple[Row, ...] = ()
    past: Past = NO_PAST
    born: str = ""
    blame: Blame | None = None
    poisoned_at: int | None = None
    source: str = ""

    @property
    def suspect(self) -> bool:
        """Everything is finite, and the step is ruined all the same."""
        return self.kind in (Kind.SPIKE, Kind.SWALLOWED, Kind.ABSORBED)

    @property
    def exchanged(self) -> bool:
        """Is it what the loss read of other ranks, and what this one gave them was finite?"""
        return self.kind is Kind.ARRIVED and self.phase is Phase.INPUT and self.origin.op != RECEIVED

    @property
    def came(self) -> Came:
        """How it came to this rank, as far as this rank can tell."""
        if self.kind is Kind.ARRIVED:
            if self.origin.op in (HANDED, RECEIVED):
                return Came.SENT
            if self.exchanged:
                return Came.EXCHANGED
            return Came.SCATTERED if self.origin.op == SPREAD and self.origin.sharded else Came.REDUCED
        if self.phase is Phase.WEIGHTS:
            return Came.WEIGHTS
        return Came.MODEL if self.origin.op in FED else Came.MADE

    def joined(self, seen: Observation) -> Observation:
        """Return this with what only the process could see: what happened to the step, and what stood around it."""
        kind = self.kind if seen.kind is Kind.NONFINITE else seen.kind
        masked = self.masked if seen.masked is None else seen.masked
        role = str(Role.GRAD) if kind is Kind.CLIP else self.origin.role  # what a clip divides is a gradient
        return replace(
            self,
            kind=kind,
            origin=replace(self.origin, masked=self.origin.masked if masked is None else masked, role=role),
            masked=masked,
            scale=seen.scale or self.scale,
            optimizer=seen.optimizer or self.optimizer,
            weight=seen.weight or self.weight,
            settings=seen.settings or self.settings,
            tried=seen.tried or self.tried,
            past=self.past if seen.past == NO_PAST else seen.past,
            born=seen.born or self.born,
            blame=self.blame or seen.blame,
        )

    def to_json(self) -> dict[str, Any]:
        """Return what a file keeps: of an observation that says nothing, nothing."""
        written = _Written(
            outside=self.outside,
            suspect=self.suspect,
            spike=self.scale,
            swallowed=self.kind is Kind.SWALLOWED,
            absorbed=self.kind is Kind.ABSORBED,
            clip="inf" if self.kind is Kind.CLIP else "",
            allreduce=self.kind is Kind.ARRIVED,
            optimizer=self.optimizer,
            weight=self.weight,
            settings=self.settings,
            masked=self.masked,
            rows=self.tried,
            past=None if self.past == NO_PAST else self.past,
            born=self.born,
        )
        found = {key: show(value) for key, value in asdict(written).items() if value or (key == "masked" and value is not None)}
        if self.phase is not None:
            found["location"] = {
                "phase": str(self.phase),
                "origin": self.origin.to_json(),
                "chain": [[link.text, link.line, show(link.value), link.backward, link.file] for link in self.chain],
                "facts": show(asdict(self.facts)),
                **({"blame": show(asdict(self.blame))} if self.blame is not None else {}),
            }
        return found

    @staticmethod
    def from_json(data: dict[str, Any]) -> Observation:
        """Read what `to_json` wrote, in any release. Raises TypeError, ValueError or AttributeError for anything else."""
        written = _Written(**checked(_Written, data))
        where = data.get("location") or {}
        facts = where.get("facts") or {}
        kind = next((kind for kind, sign in _SIGNS if sign(written)), Kind.NONFINITE)
        links = read(tuple[tuple[str, int | None, float, bool, str | None], ...], _first(where.get("chain") or []))
        return Observation(
            kind=kind,
            phase=read(Phase | None, where.get("phase")),
            origin=Origin.from_json(where.get("origin") or {}),
            chain=tuple(Link(*link) for link in links),
            facts=Facts(**checked(Facts, facts)),
            outside=written.outside,
            masked=written.masked,
            scale=written.spike,
            optimizer=written.optimizer or read(str, facts.get("optimizer", "")),
            weight=written.weight,
            settings=written.settings,
            tried=written.rows,
            past=written.past or NO_PAST,
            born=written.born,
            blame=read(Blame | None, where.get("blame")),
        )


UNSEEN = Observation()


def _first(data: object) -> object:
    """Return as much of a list as anybody writes: a file may hold any number of things."""
    return data[:LONGEST] if isinstance(data, list) else data


@dataclass(frozen=True, slots=True)
class _Written:
    """What stands beside the location in a file, under the names that it has had since schema 1."""

    outside: bool = False
    suspect: bool = False
    spike: str = ""
    swallowed: bool = False
    absorbed: bool = False
    clip: str = ""
    allreduce: bool = False
    optimizer: str = ""
    weight: str = ""
    settings: str = ""
    masked: bool | None = None
    rows: tuple[Row, ...] = ()
    past: Past | None = None
    born: str = ""


_SIGNS: tuple[tuple[Kind, Callable[[_Written], bool]], ...] = (
    (Kind.SWALLOWED, lambda w: w.swallowed),
    (Kind.ABSORBED, lambda w: w.absorbed),
    (Kind.SPIKE, lambda w: w.suspect),
    (Kind.CLIP, lambda w: w.clip == "inf"),
    (Kind.ARRIVED, lambda w: w.allreduce),
)
