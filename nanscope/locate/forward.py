"""The walk over values: from a bad element back to where it was born, was fed in, or was put on purpose.

An infinity that was put there on purpose (an -inf mask) is no origin: the origin is the call that turned it into harm. What softmax,
where or indexing absorb never leads to harm, so the walk never meets it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from nanscope.locate.drops import marked_at
from nanscope.locate.left_out import left_out, made_finite
from nanscope.locate.trace import Spot, Trace
from nanscope.program.calls import Call, Computes
from nanscope.program.flow import Source, sources, spread
from nanscope.program.numbers import at
from nanscope.program.ops import (
    COMPARISONS,
    EXPONENTIALS,
    EXTREMA,
    FILLS,
    LITERALS,
    MASK_ARITHMETIC,
    MASK_FREE,
    MOVES_OF_WRITES,
    SCATTERS,
    SETS,
    SHRINKING,
    SPREADS,
    WRITES,
    Flow,
    flow_of,
)
from nanscope.roles import Role

ENOUGH = 256  # elements beside the first way, among which other births are looked for

ALIKE = 64  # elements of one result that are looked at to find the first that did harm

FLIPPED = 1e6  # a flipped exponent bit makes a weight at least this much larger than any other of its tensor

ZEROS = 12  # calls that are gone through from a zero to what it came of
SMALL = 1e30  # a sum of products of numbers that come to less than this does not overflow, in no dtype as wide as bfloat16

SEVERAL = 4  # bad elements of one tensor that are followed: one may be a mask and the next an overflow, or made by another call

_REPORTED = (Role.OLD_LOG_PROBS, Role.REF_LOG_PROBS, Role.ROLLOUT_LOG_PROBS)


class Birth(StrEnum):
    """How a bad element came to be."""

    BORN = "born"  # a call made it of good operands
    FED = "fed"  # it came in
    INTENDED = "intended"  # the code wants it so: a mask


@dataclass(frozen=True, slots=True)
class Root:
    """Where a walk ended, and the path that led there (harm first). other: the path to where another call made something bad that the same
    harm came of; () if none did."""

    birth: Birth
    path: tuple[Spot, ...]
    other: tuple[Spot, ...] = ()

    @property
    def value(self) -> int:
        """The value that holds the element."""
        return self.path[-1][0]

    @property
    def flat(self) -> int:
        """Its flat position there."""
        return self.path[-1][1]


def walk_back(trace: Trace, value: int, flat: int, depth: int = 0) -> Root:
    """Follow a bad element to where it comes from.

    At every call the same questions in the same order: does nobody make it (then it came in); is no operand bad (then it was written
    as a constant, is arithmetic on masks, hides an x / inf, is a mean over nothing but numbers that were left out as bad, or was born
    here); did infinities meet and become NaN (then the fault is an infinity's, if one is an overflow); otherwise the bad operands go on,
    NaN before infinity, since NaN explains NaN. Where these lead to several births, it was the first one in the program.
    """
    ways, roots, spare = [_Trail((value, flat))], list[Root](), ENOUGH
    seen = defaultdict[int, set[int]](set)  # elements by value: of each a few are enough
    while ways and spare:
        way = ways.pop()
        spare -= bool(roots)
        value, flat = way.spot
        if flat in seen[value] or len(seen[value]) == SEVERAL:
            continue
        seen[value].add(flat)
        further = _further(trace, way, depth)
        if isinstance(further, Root):
            roots.append(further)
        else:
            ways += [_Trail(spot, way) for spot in reversed(further)]
    first, *later = sorted(roots, key=lambda root: _rank(trace, root))
    return replace(first, other=next((root.path for root in later if _is_another(trace, root, first)), ()))


@dataclass(frozen=True, slots=True)
class _Trail:
    """A bad element, and what was made of it."""

    spot: Spot
    after: _Trail | None = None

    @property
    def path(self) -> list[Spot]:
        """All of them, from the harm to this one."""
        way, path = self.after, [self.spot]
        while way is not None:
            path.append(way.spot)
            way = way.after
        return path[::-1]


def _further(trace: Trace, way: _Trail, depth: int) -> Root | list[Spot]:
    """Return what a bad element was made of that is bad, too, or that the walk has come to its end."""
    value, flat = way.spot
    call = trace.program.maker(value)
    if call is None:
        return _root_of_leaf(trace, way.path)
    bad = bad_sources(trace, call, value, flat)
    nan = [spot for spot in bad if math.isnan(_number(trace, spot))]
    if bad and not nan and math.isnan(_number(trace, (value, flat))):
        return _where_infinities_met(trace, way.path, bad, depth)
    if bad:
        return nan or bad
    if call.name in LITERALS or _times_nan(trace, call, value):
        return _root_of_literal(trace, way.path)
    intended = is_intended(trace, call)
    hidden = None if intended else _hidden(trace, call, value, flat)
    if hidden is None:
        return Root(Birth.INTENDED if intended else Birth.BORN, tuple(way.path))
    return [hidden]


def _rank(trace: Trace, root: Root) -> tuple[int, int, int]:
    """What came first in the program; what came with the batch was there before. An infinity that came in may be meant, and is told later;
    so is a weight, since what was bad before it was read came first (a bias after its matrix); then what the code writes out in numbers,
    which may well be meant; and last what is."""
    leaf, made = trace.program.leaf(root.value), trace.program.producers.get(root.value)
    readers = trace.program.consumers.get(root.value, ())
    at = next(iter(readers), -1) if made is None else made
    if root.birth is Birth.INTENDED:
        return 4, at, 0
    if any(trace.program.calls[reader].name == "lift_fresh" for reader in readers):
        return 3, at, 0
    if leaf is not None and leaf.is_of_model:
        return 2, at, -trace.values[root.value].dim()
    came = leaf is not None and leaf.origin == "data" and not leaf.made_by
    return int(root.birth is Birth.FED and math.isinf(_number(trace, root.path[-1]))), -1 if came else at, 0


def _is_another(trace: Trace, root: Root, first: Root) -> bool:
    """Was something born there by another line of the code? The turns of a loop are one fault."""
    made, known = trace.program.maker(root.value), trace.program.maker(first.value)
    return root.birth is Birth.BORN and made is not None and (known is None or made.site != known.site or made.site < 0)


def first_alike(trace: Trace, root: Root) -> Root:
    """Of several elements that a call made bad, return the first one that did harm."""
    call = trace.program.maker(root.value)
    if root.birth is not Birth.BORN or call is None:
        return root
    bad = (~torch.isfinite(trace.values[root.value].flatten())).nonzero().flatten()[:ALIKE].tolist()
    for flat in bad:
        if flat == root.flat:
            break
        if _made_here(trace, call, root.value, flat) and _goes_on(trace, root, flat) and not _harmless(trace, root.value, flat):
            return replace(root, path=_path_from(trace, root.path, flat))
    return root


def first_that_counts(trace: Trace, root: Root) -> Root:
    """Of elements that a call has made bad, the first of which the loss does not count, return the first that it counts, if any: no mask
    would have saved that. It may be an infinity that went into the call, and that comes from further behind."""
    tensor, made = trace.values[root.value], trace.program.producers.get(root.value)
    if root.birth is not Birth.BORN or tensor.numel() == 1:
        return root
    if trace.drops.of(*root.path[-1])[0] is not True and trace.drops.own_mask(made, *root.path[-1]) is None:
        return root
    beside, number = trace.drops.beside_mask(made, *root.path[-1]), at(tensor, root.flat)
    flat = trace.drops.first_that_counts(root.value, ~torch.isfinite(tensor) & beside)
    if flat is not None and not _goes_on(trace, root, flat):  # it is meant, as the mask of a softmax by hand is
        alike = torch.isnan(tensor) if math.isnan(number) else tensor == number
        flat = trace.drops.first_that_counts(root.value, alike & beside)
    if flat is None or trace.drops.of(root.value, flat)[0] is True:
        return root
    further = walk_back(trace, root.value, flat)
    path = (*_path_from(trace, root.path, flat)[:-1], *further.path)
    return replace(further, path=path, other=further.other and (*path[: len(root.path) - 1], *further.other))


def where_it_was_put(trace: Trace, root: Root) -> Root:
    """Of an infinity that the code writes into a part of a tensor and means, `logits[~allowed] = -inf`, return the tensor, which is what
    the code made: the number by itself says nothing."""
    if root.birth is not Birth.INTENDED or not _is_literal(trace, root.value) or trace.values[root.value].numel() > 1:
        return root
    writes = [depth for depth, (value, _) in enumerate(root.path) if trace.values[value].numel() > 1 and _is_write(trace, value)]
    return replace(root, path=root.path[: _last_write(trace, root.path, writes[-1]) + 1]) if writes else root


def _path_from(trace: Trace, path: Sequence[Spot], flat: int) -> tuple[Spot, ...]:
    """Return a path that begins at another element of the same value, as far as that goes another way."""
    values = [value for value, _ in reversed(path)]
    marks = [marked_at(trace.values[values[0]], flat)]  # what is bad of each value, and came of the element
    for (following, before), value in zip(path[-2::-1], values, strict=False):
        call = trace.program.maker(following)
        reached = spread(call, trace.values, {value: marks[-1]}).get(following) if call is not None else None
        bad = None if reached is None else reached & ~torch.isfinite(trace.values[following])
        if bad is None or not bool(bad.any()) or bool(bad.flatten()[before]):
            break  # from there on the way is that of the other element
        marks.append(bad)
    met = len(path) - len(marks)  # links that both have
    onward, found = path[met - 1] if met else None, list[Spot]()
    for value, mark in zip(values[len(marks) - 1 :: -1], reversed(marks), strict=False):
        onward = value, _leading_to(trace, onward, value, mark)
        found.append(onward)
    return (*path[:met], *found)


def _leading_to(trace: Trace, onward: Spot | None, value: int, mark: Tensor) -> int:
    """Return the first of some marked elements that another one was made of, or the first of all."""
    call = trace.program.maker(onward[0]) if onward is not None else None
    read = sources(call, trace.values, *onward) if call is not None and onward is not None else []
    own = [source.flat[mark.flatten()[source.flat]] for source in read if source.value == value]
    return next((int(flats[0]) for flats in own if flats.numel()), int(mark.flatten().int().argmax()))


def flipped_weight(trace: Trace, root: Root) -> Root | None:
    """An overflow may come of one weight that is many orders beyond all others: return that weight, where the harm was born."""
    if root.birth is Birth.FED:
        return None
    for leaf in trace.program.slice(root.value).leaves:
        flat = _outlier(trace.values[leaf.id]) if leaf.origin == "parameter" else None
        if flat is not None:
            return Root(Birth.FED, (*root.path, (leaf.id, flat)), root.other)
    return None


def _outlier(tensor: Tensor) -> int | None:
    """Return the flat position of the one element that is many orders of magnitude beyond all others, None if there is none."""
    if not tensor.is_floating_point() or tensor.numel() < 4:
        return None
    sizes = tensor.detach().flatten().double().abs()
    top = sizes.topk(2)
    first, second = top.values.tolist()
    if not (math.isfinite(first) and second > 0 and first > 1 and first > FLIPPED * second):
        return None
    return int(top.indices[0])


def bad_sources(trace: Trace, call: Call, out: int, flat: int) -> list[Spot]:
    """Return the non-finite elements that an element came from; for softmax and its like its own position first."""
    found: list[Spot] = []
    number = at(trace.values[out], flat)
    along = flow_of(call.op) is Flow.ALONG
    for source in sources(call, trace.values, out, flat):
        tensor = trace.values[source.value]
        bad = _bad_part(call, source, tensor) if tensor.is_floating_point() or tensor.is_complex() else source.flat[:0]
        if bad.numel() and along:
            same = bad[bad == flat]
            if not math.isnan(number) and same.numel():
                bad = same
            elif math.isnan(number):
                numbers = tensor.flatten()[bad]
                worst = bad[torch.isnan(numbers)] if bool(torch.isnan(numbers).any()) else bad[numbers == math.inf]
                bad = worst if worst.numel() else bad
        if not bad.numel():
            continue
        numbers = tensor.flatten()[bad]
        nan = bad[torch.isnan(numbers)]
        alike = bad[numbers == number]  # of a maximum over +inf and −inf, the one that it is
        if not nan.numel() and alike.numel():
            bad = alike
        every = nan if nan.numel() else bad
        found += [(source.value, int(position)) for position in every[: SEVERAL if along or nan.numel() else 1]]
    if call.name in EXTREMA:  # of two, the one that was picked
        return [spot for spot in found if _number(trace, spot) == number] or found
    return found


def is_intended(trace: Trace, call: Call) -> bool:
    """Is an infinity that no operand of its call explains there on purpose: written as a constant, or the logarithm of a mask?"""
    if flow_of(call.op) in (Flow.MOVE, Flow.CREATE):
        return True
    if call.name not in MASK_ARITHMETIC:
        return False
    # (1 - mask) * -inf, mask.log(), (~mask).to(float) / 0: arithmetic on masks and constants only
    inputs = [v for v in call.inputs() if trace.values[v].dim() > 0]
    return bool(inputs) and all(trace.drops.is_mask(v, None, strict=True) for v in inputs)


def _number(trace: Trace, spot: Spot) -> float:
    value, flat = spot
    return at(trace.values[value], flat)


def _bad_part(call: Call, source: Source, tensor: Tensor) -> Tensor:
    part = tensor.flatten()[source.flat]
    # a nansum takes a NaN for 0: only an infinity goes on
    return source.flat[torch.isinf(part) if call.name == "nansum" else ~torch.isfinite(part)]


def _where_infinities_met(trace: Trace, path: Sequence[Spot], bad: Sequence[Spot], depth: int) -> Root:
    """Infinities met here and became NaN. Whose fault: an overflow's, of several the first that was made; on purpose: this call's."""
    roots = [walk_back(trace, v, f, depth + 1) for v, f in bad[:4]] if depth < 4 else []
    roots.sort(key=lambda root: trace.program.producers.get(root.value, -1))
    wanted = [Birth.BORN] if any(root.birth is Birth.INTENDED for root in roots) else [Birth.BORN, Birth.FED]
    for birth in wanted:
        for root in roots:
            if root.birth is birth or (root.birth is Birth.FED and _is_weight(trace, root.value)):
                return Root(root.birth, (*path, *root.path))
    call = trace.program.maker(path[-1][0])
    if call is not None and call.name in SPREADS and roots:  # a mean and a deviation take all that there is
        return Root(roots[0].birth, (*path, *roots[0].path))
    written = [root for root in roots if call is not None and call.name in MASK_FREE and _is_literal(trace, root.value)]
    if written:  # no mask of infinities goes into a product of matrices: it is bad data, in the tensor that it was written into
        return Root(Birth.FED, (*path, *written[0].path[: _last_write(trace, written[0].path, len(written[0].path) - 1) + 1]))
    return Root(Birth.BORN, tuple(path))


def _is_literal(trace: Trace, value: int) -> bool:
    """Is it a number of the code, or data?"""
    made = trace.program.maker(value)
    return made is None or made.name in LITERALS


def _is_weight(trace: Trace, value: int) -> bool:
    leaf = trace.program.leaf(value)
    return leaf is not None and leaf.is_of_model  # no mask: an infinity there is never meant


def _made_here(trace: Trace, call: Call, value: int, flat: int) -> bool:
    """Is an element bad although nothing that it was made of is, or a NaN although that is only infinite?"""
    found = [_number(trace, spot) for spot in bad_sources(trace, call, value, flat)]
    return not found or (math.isnan(_number(trace, (value, flat))) and not any(math.isnan(number) for number in found))


def _goes_on(trace: Trace, root: Root, flat: int) -> bool:
    """Does an element spoil the next value on the way to the harm, or does that absorb it, as softmax does with an −inf?"""
    if len(root.path) < 2:
        return True
    following, _ = root.path[-2]
    call = trace.program.maker(following)
    reached = spread(call, trace.values, {root.value: marked_at(trace.values[root.value], flat)}) if call is not None else {}
    return following not in reached or bool((reached[following] & ~torch.isfinite(trace.values[following])).any())


def _harmless(trace: Trace, value: int, flat: int) -> bool:
    """Is an element taken out on its way to the loss by something that stops infinities, which a mask of zeros does not?"""
    masked, drops, _ = trace.drops.of(value, flat)
    return masked is True and bool(drops) and all(drop.how != "mask" for drop in drops)


def _hidden(trace: Trace, call: Call, value: int, flat: int) -> Spot | None:
    """The bad element that finite numbers were made of, before these became something bad."""
    found = _divided_by(trace, call, value, flat) or left_out(trace, call, value, flat) or _beside(trace, call, value, flat)
    return found or (made_finite(trace, value, flat) if math.isinf(_number(trace, (value, flat))) else None)


def _beside(trace: Trace, call: Call, value: int, flat: int) -> Spot | None:
    """A product of matrices cannot make NaN of small numbers, but a kernel that reads beyond the end of a row multiplies the next one by
    its zeros: then the bad element that is nearest in memory is where to look."""
    if flow_of(call.op) is not Flow.MATMUL or not math.isnan(_number(trace, (value, flat))):
        return None
    read = [(source, trace.values[source.value].flatten()) for source in sources(call, trace.values, value, flat)]
    read = [(source, tensor) for source, tensor in read if tensor.is_floating_point() and source.flat.numel()]
    sizes = [float(tensor[source.flat].double().abs().max()) for source, tensor in read]
    if math.prod(max(size, 1.0) for size in sizes) * max((source.flat.numel() for source, _ in read), default=1) > SMALL:
        return None
    for source, tensor in read:
        bad = (~torch.isfinite(tensor)).nonzero().flatten()
        if bad.numel():
            return source.value, int(bad[(bad - source.flat[-1]).abs().argmin()])
    return None


def _divided_by(trace: Trace, call: Call, value: int, flat: int) -> Spot | None:
    """A zero that ruins a logarithm or a quotient may be what became of x / inf, or of exp(−inf) where that is a weight, which no mask is:
    then the infinity is where to look."""
    waiting = [(call, value, flat)]
    for _ in range(ZEROS):
        if not waiting:
            return None
        call, out, position = waiting.pop()
        for source in sources(call, trace.values, out, position):
            tensor = trace.values[source.value]
            if not tensor.is_floating_point() or source.flat.numel() != 1:
                continue
            spot = (source.value, int(source.flat[0]))
            number, made = _number(trace, spot), trace.program.maker(source.value)
            leaf = trace.program.leaf(source.value)
            of_weight = number == -math.inf and call.name in EXPONENTIALS and leaf is not None and leaf.is_of_model
            if of_weight or (math.isinf(number) and call.name in SHRINKING):
                return spot
            if number == 0 and made is not None:
                waiting.append((made, *spot))
    return None


def _times_nan(trace: Trace, call: Call, value: int) -> bool:
    """Does the code make data of NaN, by calculating with the number? Where it calculates with data, or what has a gradient, the number
    came in: a mean of the rewards before, say."""
    written = any(isinstance(arg, float) and math.isnan(arg) for arg in call.args)
    leaves = trace.program.slice(value).leaves
    return written and not (leaves if trace.program.computes is Computes.LOSS else any(leaf.diff for leaf in leaves))


def _root_of_literal(trace: Trace, path: Sequence[Spot]) -> Root:
    """An infinity that the code writes is meant; a NaN that it writes is bad data, in the tensor that it was written into."""
    number = _number(trace, path[-1])
    if math.isnan(number):
        return _written(trace, path, len(path) - 1, _last_write(trace, path, len(path) - 1))
    made = trace.program.maker(path[-1][0])
    birth = Birth.FED if number > 0 else Birth.INTENDED
    alone = made is not None and made.name == "fill"  # how torch 2.15 sets an element; 2.13 copies a tensor that holds the number
    return (_root_of_element(trace, path, birth, path[:-1]) if alone else None) or Root(Birth.INTENDED, tuple(path))


def _root_of_leaf(trace: Trace, path: Sequence[Spot]) -> Root:
    birth = _came(trace, *path[-1])
    return _root_of_element(trace, path, birth, path) or Root(birth, tuple(path))


def _root_of_element(trace: Trace, path: Sequence[Spot], birth: Birth, moves: Sequence[Spot]) -> Root | None:
    """A number that was put into an element is not where the data went bad: the tensor is. moves: on the way there."""
    if trace.values[path[-1][0]].numel() == 1 and len(path) > 1 and _is_write(trace, path[-2][0]):
        tensors = [depth for depth, (value, _) in enumerate(path) if trace.values[value].numel() > 1]
        depth = _last_write(trace, path, tensors[-1]) if tensors and _is_write(trace, path[tensors[-1]][0]) else None
        if depth is not None and (birth is Birth.FED or _is_record(trace, moves[depth:])):
            return _written(trace, path, len(path) - 1, depth)
    return None


def _written(trace: Trace, path: Sequence[Spot], first: int, last: int) -> Root:
    """A number was put into a tensor. first, last: how deep on the path the writes stand.

    One that has a gradient is none of the batch's: the call that put it there is where it was made. So it is where the code decides by
    numbers that it has computed. Else it came in.
    """
    sets = [depth for depth in range(last, first + 1) if (made := trace.program.maker(path[depth][0])) is not None and made.name in SETS]
    updates = trace.program.computes is Computes.UPDATE  # of weights: whoever writes to one spoils it
    if sets and not updates and trace.names.carried(path[sets[-1]][0]):
        return Root(Birth.BORN, tuple(path[: sets[-1] + 1]))
    return Root(Birth.BORN if _is_decided(trace, path[last][0]) else Birth.FED, tuple(path[: last + 1]))


def _is_decided(trace: Trace, written: int) -> bool:
    """Was it a comparison of computed numbers that chose where to write? `kl[q.probs == 0] = inf` made that, and no batch brought it."""
    write = trace.program.maker(written)
    waiting = [value for value in write.inputs() if trace.values[value].dtype is torch.bool] if write is not None else []
    while waiting:
        made = trace.program.maker(waiting.pop())
        if made is not None and made.name in COMPARISONS:
            compared = trace.program.maker(next(iter(made.inputs())))
            return compared is not None and flow_of(compared.op) not in (Flow.MOVE, Flow.CREATE)
        waiting += [] if made is None else [value for value in made.inputs() if trace.values[value].dtype is torch.bool]
    return False


def _last_write(trace: Trace, path: Sequence[Spot], depth: int) -> int:
    """Return how deep on a path the last of the writes stands that filled the tensor there."""
    while depth > 0:
        (value, _), (following, _) = path[depth - 1], path[max(depth - 2, 0)]
        if not (_is_write(trace, value) or _is_written_to(trace, value, following)):
            break
        depth -= 1
    return depth


def _is_written_to(trace: Trace, value: int, written: int) -> bool:
    """Is it the copy of what a tensor was before a write to a part of it, and nobody's copy else?"""
    made, write = trace.program.maker(value), trace.program.maker(written)
    if made is None or write is None or made.name != "clone" or made.site != write.site:
        return False
    before = trace.program.maker(next(made.inputs()))  # of a view, whose memory lies otherwise once more when it is written to
    return write.name in SETS or (write.name in MOVES_OF_WRITES and before is not None and before.site == made.site)


def _is_write(trace: Trace, value: int) -> bool:
    made = trace.program.maker(value)
    return made is not None and made.name in WRITES


def _is_record(trace: Trace, written: Sequence[Spot]) -> bool:
    """Is a single −inf, among log-probs that somebody reported or among other numbers of the batch, one that came in? Masks are filled, or
    stand beside nothing but 0; whoever sets an element notes down what came in."""
    made = {call.name for value, _ in written if (call := trace.program.maker(value)) is not None}
    value = written[0][0]
    if not made & SCATTERS or made & FILLS:
        return False
    role = trace.names.role(value)
    of_data = not any(leaf.diff for leaf in trace.program.slice(value).leaves)
    return role in _REPORTED or (of_data and role not in _MASKED and not _only_zeros(trace.values[value]))


_MASKED = (Role.LOGITS, Role.ATTENTION, Role.ROUTER, Role.MASK)  # where −inf says that something does not count


def _only_zeros(tensor: Tensor) -> bool:
    finite = tensor[torch.isfinite(tensor)]
    return finite.numel() == 0 or bool((finite == 0).all())


def _came(trace: Trace, value: int, flat: int) -> Birth:
    """Did an element of a leaf go bad outside, or is it a mask that came in?"""
    leaf = trace.program.leaf(value)
    if _number(trace, (value, flat)) != -math.inf or leaf is None or _is_weight(trace, value):
        return Birth.FED
    if leaf.origin == "opaque" or (leaf.diff and leaf.origin in ("cut", "module")):
        return Birth.INTENDED  # the model masks its own logits
    role = trace.names.role(value)
    return Birth.INTENDED if role not in _REPORTED and (_only_zeros(trace.values[value]) or role is Role.LOGITS) else Birth.FED
