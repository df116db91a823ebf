"""One sentence for a finding, with the numbers of this step: what happened, why, and how far it got."""

from __future__ import annotations

import math
from collections.abc import Callable

from nanscope.causes import CAUSES, Cause
from nanscope.locate.observe import BACKWARD_OF, CLIPPED, REPLACED, TOKENS
from nanscope.locate.origin import Location
from nanscope.program.ops import DIVISORS, GROWING, NORMALISATIONS, PRODUCTS, ROOTS, SETS, STEEP, UNWRITTEN_FACTORIES
from nanscope.roles import LOG_PROBS, OF_MODEL, Role, last_word, role_of
from nanscope.snapshot.observation import (
    CHANGED,
    COMPILED,
    COMPILED_BACKWARD,
    FED,
    HANDED,
    HOOKED,
    RECEIVED,
    REDUCED,
    SPREAD,
    UNMADE,
    UNTRACED,
    WRITTEN,
    WRITTEN_LATE,
    Blame,
    Kind,
    Observation,
    Origin,
    Phase,
)
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.text import line_in, number, row_token, show_index
from nanscope.verdict.arithmetic import calculation
from nanscope.verdict.grounds import LITTLE, is_infinite, is_masked, logarithm_of, of_setting


def sentence(snapshot: Snapshot, seen: Observation, cause: Cause) -> str:
    """Return what is to be said of a bad step."""
    why = "" if cause is Cause.UNKNOWN or seen.origin.op == UNMADE else reason(seen, cause)
    end = _END.get(seen.kind, _reached)(seen, snapshot.reached)
    behind = f"Behind it: {blamed(seen.blame)}" if seen.blame is not None else f"The infinity: {seen.born}" if seen.born else ""
    told = _unseen(snapshot) if _is_unseen(seen) else what(seen)
    runs_away = cause in (Cause.UNKNOWN, Cause.MAGNITUDE_OVERFLOW) and not behind
    jump = next((text for slug, text in snapshot.notes if slug == "rate_jumped" and runs_away), "")
    parts = (told, behind, _not_looked_into(snapshot, seen), _capital(why), _capital(jump), _capital(end))
    return ". ".join(part for part in parts if part) + "."


def blamed(blame: Blame) -> str:
    """Return what came in far out of its own range, and what that is."""
    name, value, median = blame.name or blame.role or "what came in", number(blame.value), number(blame.median)
    what, its = f"{name}{show_index(blame.index)} = {value}", "its median"
    if blame.row:
        what, its = f"row {show_index(blame.index)} of {name} is around {value}", "the median of the others"
    if blame.low == blame.high:
        return f"{what}, where nearly all others are {median}"
    return f"{what}, where {its} is {median} (5 % to 95 %: {number(blame.low)} … {number(blame.high)})"


def _is_unseen(seen: Observation) -> bool:
    return seen.phase in (Phase.FORWARD, Phase.BACKWARD) and seen.origin.op == "unknown" and not seen.origin.dtype


def _unseen(snapshot: Snapshot) -> str:
    """That nothing is known of where it went bad, and why."""
    slugs = {slug for slug, _ in snapshot.notes}
    if slugs & {"not_looked_into", "not_replayed"}:
        return "it is not known where it went bad: looking into what was recorded failed"
    if "not_kept" in slugs:
        return "nobody saw where it went bad: what the loss was made of was not kept, and a larger budget= may keep it"
    again = "what was recorded of the loss is fine when it is run again: numpy or another process may have written to what it read"
    why = again if snapshot.program.calls else "the loss was not recorded"
    return f"nobody saw where it went bad: {why}"


def _not_looked_into(snapshot: Snapshot, seen: Observation) -> str:
    """Why nothing is told of the inside of a model, or of what was too large, "" where something is, or nobody knows."""
    if seen.origin.op == "cut" and any(slug == "not_kept" for slug, _ in snapshot.notes):
        return "A larger budget= may keep them"
    note = next((text for slug, text in snapshot.notes if slug == "not_run_again"), "")
    reason = note.partition("the model could not be run again on a copy: ")[2].partition("; what is told")[0]
    return f"The model was not run again: {reason}" if reason and seen.origin.op in FED else ""


def reason(seen: Observation, cause: Cause) -> str:
    """The title of a cause, or the first of its varieties that the numbers ask for."""
    info = CAUSES[cause]
    return next((words for words, holds in zip(info.varieties, _VARIETIES.get(cause, ()), strict=True) if holds(seen)), info.title)


def _is_spike(seen: Observation) -> bool:
    """Is it finite, and far too large? Nothing has overflowed."""
    return seen.kind is Kind.SPIKE and math.isfinite(seen.origin.value)


_VARIETIES: dict[Cause, tuple[Callable[[Observation], bool], ...]] = {
    Cause.ALLREDUCE_NAN: (lambda seen: seen.exchanged and math.isinf(seen.origin.value),),
    Cause.LOG_ZERO: (
        lambda seen: not seen.facts.degenerate and logarithm_of(seen) < 0,
        lambda seen: not seen.facts.degenerate and logarithm_of(seen) > 0,
        lambda seen: seen.facts.degenerate,
    ),
    Cause.INF_TIMES_ZERO_MASK: (
        lambda seen: seen.phase is Phase.INPUT and any(link.backward for link in seen.chain),
        lambda seen: seen.phase is Phase.INPUT,
        lambda seen: seen.facts.number and seen.origin.op in PRODUCTS,
        lambda seen: seen.origin.op in PRODUCTS or seen.origin.is_pole,
    ),
    Cause.ZERO_DIV_ZERO: (lambda seen: seen.origin.op in NORMALISATIONS, lambda seen: seen.facts.degenerate),
    Cause.ZERO_DENOMINATOR: (lambda seen: seen.facts.degenerate, lambda seen: seen.facts.computed),
    Cause.EXP_OVERFLOW: (_is_spike, lambda seen: seen.origin.op == "pow", is_masked, lambda seen: seen.origin.masked is None),
    Cause.SEQ_RATIO_OVERFLOW: (_is_spike,),
    Cause.SQRT_NEGATIVE: (lambda seen: seen.facts.cancelled,),
    Cause.SQRT_ZERO_GRAD: (lambda seen: seen.origin.op in STEEP - ROOTS or not abs(seen.origin.value) < LITTLE,),
    Cause.MAGNITUDE_OVERFLOW: (lambda seen: seen.origin.op in DIVISORS.keys() - {"pow"}, lambda seen: seen.origin.op not in GROWING),
    Cause.BAD_INPUT: (
        of_setting,
        lambda seen: seen.facts.beyond,
        lambda seen: seen.facts.number and not is_infinite(seen),
        lambda seen: seen.facts.number,
        lambda seen: bool(seen.facts.put),
    ),
    Cause.INF_TIMES_ZERO_COEF: (lambda seen: seen.facts.number,),
    Cause.FP16_OVERFLOW: (lambda seen: seen.facts.leaves_half,),
    Cause.EPS_UNDERFLOW: (lambda seen: seen.phase is Phase.OPTIMIZER,),
}


def what(seen: Observation) -> str:
    """Return what happened, without why and how far it got."""
    late = seen.origin.op in _AFTER_THE_LOSS and not seen.exchanged
    tell = _after_the_loss if late else _BY_PHASE.get(seen.phase, _made_here)
    return tell(seen)


_BY_ANOTHER_NUMBER = ("clamp", "clip", "other", "replace")  # of an element that is dropped so, the token counts


def absorbed(location: Location, step: int) -> str:
    """Return what is worth saying of a value that overflowed and did no harm."""
    o = location.origin
    site = o.site
    name = last_word(o.variable) if o.variable else (site.expression if site else "") or o.op
    bounded = bool(o.drops) and all(drop.how in _BY_ANOTHER_NUMBER for drop in o.drops)
    outside = (
        "" if not o.masked else ", for which the loss counts another number" if bounded else " at a position that the loss does not count"
    )
    where = _where(site.file, site.line) if site else _where(None, None)
    if location.phase is Phase.INPUT:
        bound = number(location.chain[0].value)
        came = f"{name} came in as {number(o.value)} at {show_index(o.index)} ({where}, step {step})"
        return f"{came}, and a clamp made {bound} of it: that is what its token trains with"
    return (
        f"{name} was {number(o.value)} at {show_index(o.index)}{outside} ({where}, step {step}), "
        "and it was absorbed: loss is finite, weights and gradients stayed clean"
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# What happened.


_AFTER_THE_LOSS = {
    REDUCED: "while this rank's own backward gives finite numbers: it came by all-reduce",
    SPREAD: "while this rank's loss and what it hands to the model are finite: it came later, in the backward of a model over all ranks",
    WRITTEN: "and it was finite when backward was over: it was written between backward and the optimizer's step",
    CHANGED: (
        "while backward, made once more, gives finite numbers: a hook, or code between backward and the optimizer's step, wrote it, "
        "several passes add up to it, or the model was in another state then"
    ),
    COMPILED_BACKWARD: (
        "while backward, made once more with what is compiled run as it is written, gives finite numbers: "
        "the compiled code made it, or code between backward and the optimizer's step wrote it"
    ),
    HOOKED: "while backward, made once more, gives finite numbers: a hook on a tensor changed it",
    UNTRACED: (
        "while the loss and what it hands to the model are finite: "
        "it came in the backward of the model or of compiled code, or was written after it"
    ),
    UNMADE: (
        "and no backward pass that was watched made it: "
        "it was set by hand, by a transform of torch.func, or by a backward pass before the block"
    ),
    HANDED: "when the backward pass began: who called backward handed it in, in a pipeline from the next stage",
    WRITTEN_LATE: "and it was finite when backward and the ranks had done with it: it was written afterwards",
}

_SCATTERED = "while this rank's loss and what it hands to the model are finite: the reduce-scatter of its shard's gradient brought it"


def _after_the_loss(seen: Observation) -> str:
    p = seen.origin
    what = f"the gradient of {p.variable or ('an output' if p.op == HANDED else 'a weight')} is {number(p.value)}{_at(p)}"
    source = f". {seen.source.rstrip('.')}" if seen.source.rstrip(".") else ""
    where = f", {_where(p.file, p.line)}" if p.op in (HOOKED, WRITTEN, WRITTEN_LATE) and p.file else ""
    how = _SCATTERED if p.op == SPREAD and p.sharded and source else _AFTER_THE_LOSS[p.op]
    return f"{what}, {how}{where}{source}"


def _came_in(seen: Observation) -> str:
    p = seen.origin
    source = f". {seen.source.rstrip('.')}" if seen.source.rstrip(".") else ""
    if seen.exchanged:
        gave = "by which another rank gave it" if p.op in FROM_ONE else "to which this rank gave finite numbers"
        own = f"{p.op} at {_where(p.file, p.line)}, {gave}"
        return f"{p.variable or 'a tensor'} came as {number(p.value)}{_at(p)} out of {own}{source}"
    if p.op == RECEIVED:
        return f"what another rank sent to this one came in as {number(p.value)}{_at(p)}{source}"
    if seen.facts.number:
        given = next((name for name, value in p.operands if math.isnan(value)), "a number")
        return f"{_made(p)}: {'a number of Python' if given == 'a number' else f'{given}, a number of Python,'} came in as NaN"
    extent = f" ({seen.facts.extent})" if seen.facts.extent and not seen.facts.unwritten else ""
    where = _where(p.file, p.line)
    name = p.variable or "a tensor of the batch"
    if role_of(p.variable) is None and p.role in _OF_A_BATCH:
        name += f" ({p.role})"  # it was read by code that handles anything
    if seen.facts.put:
        read = f", and is read at {where}" if where != seen.facts.put else ""
        name = name if p.variable else "a tensor"
        return f"{name} was set to {number(p.value)}{_at(p)}{extent}{_inside(p)}, {seen.facts.put}{read}"
    allocated = seen.facts.unwritten and any(f"{made}(" in (p.expression or "") for made in UNWRITTEN_FACTORIES)
    return f"{name} came in as {number(p.value)}{_at(p)}{extent}{_inside(p)}, {'allocated' if allocated else 'read'} at {where}"


FROM_ONE = ("broadcast", "scatter")  # of the ranks
_OF_A_BATCH = {Role.OLD_LOG_PROBS, Role.REF_LOG_PROBS, Role.ROLLOUT_LOG_PROBS, Role.ADVANTAGES, Role.REWARDS}


def _weight(seen: Observation) -> str:
    p = seen.origin
    kind = "buffer" if p.op == "buffer" else "weight"
    name = f"the {kind} {p.variable}" if p.variable and p.variable != kind else f"a {kind}"
    if math.isfinite(p.value):
        return f"{name} is {number(p.value)}{_at(p)}, many orders of magnitude beyond every other element of it"
    past = seen.past
    is_bad = f"is {number(p.value)}{_at(p)} {past.found}" if past.found else f"was already {number(p.value)}{_at(p)}"
    before = "" if past.found else " before the step"
    since = "" if past.fine_at is None else f"it was finite in step {past.fine_at}"
    if seen.poisoned_at is not None and not p.is_frozen:
        if past.came:
            return f"{name} {is_bad}{before}, as in step {seen.poisoned_at}"
        return f"{name} {is_bad}: the update of step {seen.poisoned_at} wrote it there"
    if past.by:
        after = f", and {since}" if since else ""
        return f"{name} {is_bad}{before}: {past.by} wrote it there, {_where(past.file, past.line)}{after}"
    return f"{name} {is_bad}{before}" + (f": {since}, and what wrote it since was not seen" if since else "")


AVERAGES = frozenset(("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "momentum_buffer", "sum"))


def _update(seen: Observation) -> str:
    p = seen.origin
    settings = f" ({seen.settings})" if seen.settings else ""
    if seen.suspect:
        return f"the update of {seen.optimizer} moved {p.variable or 'a weight'} by {number(p.value)}{_at(p)}"
    if p.op in ("empty", "state") and seen.optimizer:
        kept = p.variable in AVERAGES  # of gradients: from a finite one no update makes such a state
        since = "it was not finite before the update" if kept else "it was so before the update, or that made it so"
        since = "no gradient makes a mean of squares that is below 0, so it was that before the update" if math.isfinite(p.value) else since
        since = "memory that nobody had written to" if p.op == "empty" else since
        whose = f"of which {seen.optimizer} makes the update of {seen.weight or 'a weight'}"
        return f"{p.variable}, {whose}, is {number(p.value)}{_at(p)}: {since}"
    if p.operands and p.op != "unknown" and seen.weight:
        return f"the update of {seen.optimizer}{settings} made {seen.weight} non-finite: {_made(p)}"
    name = seen.optimizer or "the optimizer"
    where = f", in a hook on its gradient, {_where(p.file, p.line)}" if p.op == "opaque" and p.file else ""
    where = f", {_where(p.file, p.line)}" if p.op == "unknown" and p.file else where
    return f"the update of {name}{settings} made {p.variable or seen.weight or 'a weight'} {number(p.value)}{_at(p)}{where}"


def _made_here(seen: Observation) -> str:
    p = seen.origin
    if p.op == "unknown" and not p.dtype:
        return "nobody saw where it went bad"
    if p.op == COMPILED:
        name, instead = p.operands[0] if p.operands else ("a function", math.nan)
        subject = f"{p.variable} = {p.expression}" if p.variable and p.expression else (p.expression or "a value")
        where = _where(p.file, p.line)
        return f"{subject} gave {number(p.value)}{_at(p)}, {where}: {name} is compiled, and run as it is written it gives {number(instead)}"
    if p.op in ("opaque", "cut"):
        code = "code that was not recorded" if p.op == "opaque" else "calls that were not kept"
        where = f", read at {_where(p.file, p.line)}" if p.file else ""
        return f"{p.variable or 'a value'} was {number(p.value)}{_at(p)}{_inside(p)} when it came out of {code}{where}"
    if seen.kind is Kind.CLIP and math.isfinite(p.value):
        is_large = f"the gradient of {p.variable or 'a weight'} is {number(p.value)}{_at(p)}"
        return f"{is_large}, and the norm of all gradients overflows, {_where(p.file, p.line)}"
    if p.op in ("unknown", "module"):
        return f"{p.variable or 'a value'} came out of {p.module or 'the model'} as {number(p.value)}{_at(p)}"
    extent = f" ({seen.facts.extent})" if seen.facts.unwritten and seen.facts.extent else ""
    return _made(p, extent + _inside(p), seen.suspect)


_BY_PHASE: dict[Phase | None, Callable[[Observation], str]] = {
    Phase.INPUT: _came_in,
    Phase.WEIGHTS: _weight,
    Phase.OPTIMIZER: _update,
}


def _made(p: Origin, inside: str = "", suspect: bool = False) -> str:
    """What a call made, where, and the numbers that it was made from."""
    result = number(p.value)
    limit = f", {p.dtype} ends at exp({p.limit})" if p.limit is not None and math.isinf(p.value) else ""
    function = p.expression == f"{p.op}.backward"  # one that is custom, of which nothing more is known
    back = (p.expression or "").startswith(BACKWARD_OF)
    part = p.op in SETS and (p.expression or "").startswith(f"{p.variable}[")  # that something is put into
    subject = f"{p.variable} = {p.expression}" if p.variable and p.expression and not (function or part or back) else ""
    subject = subject or p.expression or p.variable or p.op
    inside = f" in the gradient of {p.variable}{inside}" if function and p.variable else inside
    if not math.isfinite(p.value):
        overflowed = p.value == math.inf and p.divided != 0 and not p.is_pole and all(math.isfinite(value) for _, value in p.operands)
        head = f"{subject} overflowed to +inf" if overflowed else f"{subject} gave {result}"
    else:
        head = f"{subject} became {result}" if suspect else f"the gradient of {subject} is not finite"
    numbers = f": {calculation(p)}" if p.operands else ""
    where = f"in {p.module}" if p.module and not p.file else _where(p.file, p.line)
    return f"{head}{_at(p)}{inside}, {where}{numbers}{limit}"


def _where(file: str | None, line: int | None) -> str:
    return line_in(file, line) if file and line else "an unknown line"


def _at(p: Origin) -> str:
    """Where in its tensor an element stands; a scalar has no index."""
    return f" at {'global index ' if p.sharded else ''}{show_index(p.index)} of {show_index(p.shape)}" if p.shape else ""


_OF_TOKENS = LOG_PROBS | {Role.MASK}


def token_of(snapshot: Snapshot, p: Origin) -> str:
    """Return where in the batch an element stands, as one says it: "row 16, token 31", or "row 57" of one number a row; "" where that is no
    tensor of rows and tokens."""
    of_tokens = len(p.shape) in (1, 2) and len(p.index) == len(p.shape) and p.role not in (Role.WEIGHTS, Role.OPTIMIZER, Role.GRAD)
    if p.sharded or snapshot.observation.suspect or not (p.batch or of_tokens):
        return ""
    if p.batch is not None:
        return row_token(*p.batch) if p.batch else ""
    leaves = [leaf for leaf in snapshot.program.leaves if (leaf.role or role_of(leaf.name)) in _OF_TOKENS and leaf.id in snapshot.tensors]
    batches = {shape for leaf in leaves if len(shape := tuple(snapshot.tensors[leaf.id].shape)) == 2 and shape[1] > 1}
    if p.shape[1:] in ((), (1,)) and not p.module and p.role not in OF_MODEL:
        per_row = any(p.shape[0] == rows > 1 for rows, _ in batches) and all(p.shape[0] != columns for _, columns in batches)
        return row_token(p.index[0]) if per_row else ""
    counted = p.masked is not None and not p.module  # inside of a model a matrix may be a weight, or states
    return row_token(*p.index) if len(p.shape) == 2 and (counted or p.shape in batches) else ""


def what_and_where(snapshot: Snapshot) -> str:
    """Return what happened, its place in words before its index: for a line that has no picture beside it."""
    told, at, token = what(snapshot.found), _at(snapshot.found.origin), token_of(snapshot, snapshot.found.origin)
    return told.replace(at, f" at {token} ({at.removeprefix(' at ')})", 1) if token else told


def _inside(p: Origin) -> str:
    """That the loss does not count an element, and why."""
    if not p.masked:
        return ""
    token = "a token" if len(p.shape if p.batch is None else p.batch) == 2 else "an element"
    if not p.masked_by:
        return f" at {token} outside the loss"
    if p.masked_by.endswith(CLIPPED):
        return f" at {token} where {p.masked_by}"
    if p.masked_by.startswith(TOKENS):
        return f", made of tokens that the loss does not count ({p.masked_by.removeprefix(TOKENS)})"
    if p.masked_by.startswith(REPLACED):
        return f" at {token} that the loss counts with another number ({p.masked_by})"
    return f" at {token} that the loss does not count ({p.masked_by})"


# How far it got.


def _was_in_it(seen: Observation, r: Reached) -> bool:
    """Is the one weight that is bad after the step the one that was bad before it?"""
    return seen.phase is Phase.WEIGHTS and not seen.optimizer and r.bad_weights == 1


def _reached(seen: Observation, r: Reached) -> str:
    parts = []
    if r.loss is not None:
        parts.append(f"the loss stays finite ({number(r.loss)})" if math.isfinite(r.loss) else f"the loss is {number(r.loss)}")
    if r.bad_gradients and r.gradients:
        parts.append(_gradients(r.bad_gradients, r.gradients))
    elif r.bad_gradients == 0 and r.gradients and not r.bad_weights:
        parts.append("gradients stayed clean" if seen.phase is Phase.WEIGHTS else "weights and gradients stayed clean")
    if seen.weight and not seen.optimizer and seen.phase is not Phase.OPTIMIZER:
        parts.append(f"{seen.weight} keeps it")
    if r.bad_weights and not _was_in_it(seen, r):
        parts.append(f"the update wrote it into {r.bad_weights} weight{'' if r.bad_weights == 1 else 's'}")
    if r.stepped == "skipped":
        parts.append("the optimizer step was skipped and the weights stayed clean")
    elif r.stepped == "repaired":
        parts.append("the step was taken on the gradient of a proven fix")
    elif r.stepped == "replaced":
        parts.append("the training loop replaced them before the optimizer stepped")
    elif r.stepped == "skipped by the trainer":
        parts.append("the trainer dropped the step")
    return ", ".join(parts)


def _gradients(bad: int, total: int) -> str:
    if total == 1:
        return "its gradient is non-finite"
    return f"all {total} gradients are non-finite" if bad == total else f"{bad} of {total} gradients are non-finite"


def _clipped(seen: Observation, r: Reached) -> str:
    if r.bad_gradients:
        return _reached(seen, r)
    return "the clip made every gradient exactly 0: nothing is non-finite any more, and the step is lost"


def _swallowed(seen: Observation, r: Reached) -> str:
    return f"the kernel drops it: the loss stays finite ({number(r.loss)}), and the step learnt from the wrong ratio"


def _spiked(seen: Observation, r: Reached) -> str:
    if seen.phase is Phase.OPTIMIZER:
        return f"loss and gradients are finite and fine, and this is {seen.scale}"
    return f"everything is finite, but the loss is {number(r.loss)} and the step is {seen.scale or 'out of scale'}"


def _absorbed(seen: Observation, r: Reached) -> str:
    return f"everything is finite, and wrong: {seen.scale}, and the loss of {number(r.loss)} does not show it"


_END: dict[Kind, Callable[[Observation, Reached], str]] = {
    Kind.ABSORBED: _absorbed,
    Kind.CLIP: _clipped,
    Kind.SWALLOWED: _swallowed,
    Kind.SPIKE: _spiked,
}
