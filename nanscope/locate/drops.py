"""Does the loss count an element? Follows it from where it stands to the loss, and says what takes it out on the way, and by which mask.

An element is out where it is multiplied by 0, not selected, replaced by a bound, or where min and max picked another value. What weighs
an element by 0 may be a mask, which says which tokens count, or a coefficient, which says how much: a token whose advantage is 0 is not
masked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from nanscope.locate.names import Names
from nanscope.program.calls import Call, Ref, refs
from nanscope.program.flow import behind, narrowed, spread
from nanscope.program.numbers import at, is_binary
from nanscope.program.ops import (
    ALL_SOFTMAXES,
    CHOICES,
    CLAMPS,
    COMPARISONS,
    DIFFERENCES,
    EXTREMA,
    FILLS,
    NEGATIONS,
    NLL_LOSSES,
    PAYLOAD,
    PLAIN_MATMULS,
    REPLACEMENTS,
    SELECTIONS,
    SELECTORS,
    SHARES,
    SHIFTS,
    Flow,
    carries,
    flow_of,
)
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.roles import Role
from nanscope.text import unravel

QUICK = 1 << 18  # elements of which one is looked for by halves


@dataclass(frozen=True, slots=True)
class Drop:
    """What takes an element out of the loss on its way there.

    how: "mask" (multiplied by 0), "select" (where, indexing, masked_fill), "clip" (min or max picked another value), "share" (−inf has no
    part in a softmax), "padding" (of a token that attention hides from all), "other" (where took the other number), "clamp" (replaced by a
    bound) or "replace" (nan_to_num, nansum). The last three put another number in the place of a token that the loss counts all the same.
    by: id of the mask, None where there is none. name: what it is called. before: it is what the element was made of that is taken out, all
    tokens of a row whose mean it is, and the loss counts the element.
    """

    call: int
    how: str
    by: int | None
    name: str | None
    before: bool = False


_Fate: TypeAlias = tuple[bool | None, tuple[Drop, ...], str | None]


@dataclass(frozen=True, slots=True)
class Drops:
    """What of one run the loss does not count. names: of the program's values."""

    program: Program
    run: Run
    names: Names
    _known: dict[tuple[int, int], _Fate] = field(default_factory=dict, compare=False, repr=False)

    def of(self, value: int, flat: int) -> _Fate:
        """Follow an element to the loss: is it taken out on the way, by what, and does a zero coefficient multiply it?"""
        if (value, flat) not in self._known:
            found = self._follow(value, flat, tokens=False)
            if found[1] and all(drop.how == "replace" for drop in found[1]):  # its value is gone: is its token, too?
                found = self._follow(value, flat, tokens=True)
            self._known[value, flat] = found
        return self._known[value, flat]

    def says_which(self, drop: Drop) -> bool:
        """Does a mask take an element out, and not an index, which says of each token which of its numbers is read?"""
        return drop.how in ("mask", "select") and drop.by is not None and self.is_mask(drop.by, None)

    def own_mask(self, index: int | None, value: int, flat: int) -> Drop | None:
        """The product that is the origin multiplies an infinity by a mask, each element its own."""
        return None if self._is_of_one_number(index) else self.mask_factor(index, value, flat)

    def is_bias(self, index: int | None, value: int, flat: int) -> bool:
        """Is it a mask times one number for all, which is to be added where that is 1? Where it is 0 nothing is meant to be left out."""
        return self._is_of_one_number(index) and self.mask_factor(index, value, flat) is not None

    def _is_of_one_number(self, index: int | None) -> bool:
        factors = [] if index is None else list(self.program.calls[index].inputs())
        return len(factors) < 2 or any(self.run.values[factor].numel() == 1 for factor in factors)

    def mask_factor(self, index: int | None, value: int, flat: int) -> Drop | None:
        """The mask that is 0 where the product that is the origin multiplies an infinity by it."""
        factor = self._factor(index, value, flat)
        if index is None or factor is None:
            return None
        here = marked_at(self.run.values[value], flat)
        return self._by_mask(index, factor, here & (self.run.values[factor] == 0).expand(here.shape))

    def beside_mask(self, index: int | None, value: int, flat: int) -> Tensor:
        """Where the mask of `own_mask` is not 0: everywhere if there is none."""
        everywhere = torch.ones_like(self.run.values[value], dtype=torch.bool)
        factor = None if self._is_of_one_number(index) else self._factor(index, value, flat)
        return everywhere if factor is None else everywhere & (self.run.values[factor] != 0)

    def _factor(self, index: int | None, value: int, flat: int) -> int | None:
        if index is None or self.program.calls[index].name != "mul" or not math.isnan(at(self.run.values[value], flat)):
            return None
        here = marked_at(self.run.values[value], flat)
        for factor in self.program.calls[index].inputs():
            zeros = here & (self.run.values[factor] == 0).expand(here.shape)
            if bool(zeros.any()) and self.run.values[factor].dim() and self.is_mask(factor, zeros):  # one number selects nothing
                return factor
        return None

    def own_padding(self, index: int | None, value: int, flat: int) -> Drop | None:
        """The softmax that is the origin weighs what a token looks at that is hidden from all as a key, itself included, and that a mask
        of tokens leaves out."""
        if index is None or self.program.calls[index].name not in ALL_SOFTMAXES or not math.isnan(at(self.run.values[value], flat)):
            return None
        call = self.program.calls[index]
        scores = self.run.values[next(call.inputs())]
        over = call.args[1] if len(call.args) > 1 else None
        if scores.dim() < 3 or scores.shape[-1] != scores.shape[-2] or over not in (-1, scores.dim() - 1):
            return None
        *row, query, _ = unravel(flat, tuple(scores.shape))
        hidden = torch.isneginf(scores[tuple(row)][:, query])
        return Drop(index, "padding", None, None) if bool(hidden.all()) and self._is_no_token(row[0], query) else None

    def _is_no_token(self, row: int, position: int) -> bool:
        """Does a mask, or do the labels of a loss of classes, leave a position of a row out?"""
        losses = (call.args for call in self.program.calls if call.name in NLL_LOSSES and len(call.args) > 4)
        labels = [(self.program.source_of(args[1].id), args[4]) for args in losses if isinstance(args[1], Ref) and isinstance(args[4], int)]
        masks = [(leaf.id, 0) for leaf in self.program.leaves if self.names.says_mask(leaf.id)]
        for value, ignored in (*labels, *masks):
            tensor = self.run.values.get(value)
            if tensor is None or tensor.dim() != 2 or not (row < tensor.shape[0] and position < tensor.shape[1]):
                continue
            if bool(tensor[row, position] == ignored):
                return True
        return False

    def first_that_counts(self, value: int, among: Tensor) -> int | None:
        """Return the first of some elements that the loss counts, None if it counts none, or finding it takes long. among: bool, of the
        value's shape."""
        marked = self._marked(value, among, tokens=False)[0]
        if self.program.output not in marked:
            return None
        *_, last = (mark for mark in marked.values() if mark.shape == among.shape)  # where most often each is still in its place
        left = (among & last).flatten().nonzero().flatten()
        if left.numel() and self._count(value, among, left[:1]):
            return int(left[0])
        left = among.flatten().nonzero().flatten()
        while left.numel() > 1 and among.numel() <= QUICK:
            first, second = left.tensor_split(2)
            left = first if self._count(value, among, first) else second
        return int(left) if left.numel() == 1 and self._count(value, among, left) else None

    def _count(self, value: int, like: Tensor, flats: Tensor) -> bool:
        """Does the loss count one of some elements at least?"""
        return self.program.output in self._marked(value, marked_at(like, flats), tokens=False)[0]

    def _follow(self, value: int, flat: int, *, tokens: bool) -> tuple[bool | None, tuple[Drop, ...], str | None]:
        """Say of an element what `of` does. tokens: what nan_to_num puts in its place is still the same token."""
        tensor, made = self.run.values[value], self.program.maker(value)
        marked, drops, coefficient = self._marked(value, marked_at(tensor, flat), tokens)
        at_mask = self._at_mask(value, flat)
        if at_mask is not None and not any(map(self.says_which, drops)):
            return True, (*(drop for drop in drops if drop.by is None), at_mask), coefficient
        if self.program.output not in marked and any(drop.how != "replace" for drop in drops):
            return True, self._of_its_token(value, marked[value], drops), coefficient
        in_model = made is not None and bool(made.module)
        if not drops and tensor.dim() == 0 and not in_model and not self._meets_mask(marked):
            return (False if coefficient else None), (), coefficient
        return False, tuple(drops), coefficient

    def _of_its_token(self, value: int, mark: Tensor, drops: Sequence[Drop]) -> tuple[Drop, ...]:
        """What takes an element out: of one of many numbers that a token has, and that is not read, what takes out those that are."""
        if mark.dim() < 2 or any(map(self.says_which, drops)) or all(drop.how != "select" or drop.by is None for drop in drops):
            return tuple(drops)
        marked, of_token, _ = self._marked(value, mark.any(-1, keepdim=True).expand(mark.shape), tokens=False)
        masks = [drop for drop in of_token if self.says_which(drop)]
        return tuple(masks) if masks and self.program.output not in marked else tuple(drops)

    def _marked(self, value: int, mark: Tensor, tokens: bool) -> tuple[dict[int, Tensor], list[Drop], str | None]:
        """Follow elements to the loss: return what of each value came of them and still counts, what took the others out, and the name of
        a coefficient that is 0."""
        made = self.program.maker(value)
        marked: dict[int, Tensor] = {value: mark}
        drops: list[Drop] = []
        cut: list[tuple[Drop, int]] = []  # pieces of a tensor that do not hold the element, and of which one
        carried: set[int] = set()  # tensors of which the element went on
        coefficient: str | None = None
        own_operands = set(made.inputs()) if made is not None else set()  # p in p · log p is no mask
        for index, call in enumerate(self.program.calls):
            touched = [v for v in dict.fromkeys(call.inputs()) if v in marked]
            if not touched or any(out in marked for out in call.outs if out is not None):
                continue
            reached = spread(call, self.run.values, marked)
            if not reached and (flow_of(call.op) is Flow.MOVE or call.name in NLL_LOSSES):
                stands = self._in_its_place(index, call, touched, marked)
                drops += stands or [Drop(index, "select", self._selector(call), self._selector_name(call))]
                cut += [(drops[-1], touched[0])] if drops[-1].by is None and not stands else []
                continue
            carried.update(touched)
            for out, own in reached.items():
                kept, drop, zero = self._kept(index, call, out, own, marked, own_operands)
                if tokens and drop is not None and drop.how == "replace":
                    kept = own
                coefficient = coefficient or zero
                if drop is not None:
                    drops.append(drop)
                if (
                    len(call.outs) > 1
                    and flow_of(call.op) is Flow.MOVE
                    and out != self.program.output
                    and not self.program.consumers.get(out)
                ):
                    drops.append(Drop(index, "select", None, call.name))  # a piece that nobody takes
                    continue
                if bool(kept.any()):
                    marked[out] = kept
        pieces = [drop for drop, whole in cut if whole in carried]  # sequence by sequence: each is in one of them
        drops = [drop for drop in drops if drop not in pieces] or drops
        return marked, drops, coefficient

    def _meets_mask(self, marked: Mapping[int, Tensor]) -> bool:
        """Does a mask weigh, or an index select, what came of the marked elements?"""
        for call in self.program.calls:
            inputs = list(call.inputs())
            if not any(value in marked for value in inputs):
                continue
            if call.name == "mul" and any(v not in marked and self.run.values[v].dim() and self.is_mask(v, None) for v in inputs):
                return True
            if call.name in SELECTIONS:
                return True
        return False

    def _kept(
        self, index: int, call: Call, out: int, mark: Tensor, marked: Mapping[int, Tensor], own_operands: set[int]
    ) -> tuple[Tensor, Drop | None, str | None]:
        """Return which marked elements of a result still count, what took the others out, and the name of a coefficient that is 0."""
        if call.name == "mul":
            return self._multiplied(index, call, mark, marked, own_operands)
        if call.name in PLAIN_MATMULS:
            lost, weights = self._not_attended(call, mark, marked)
            return (mark & ~lost, Drop(index, "mask", None, weights), None) if bool(lost.any()) else (mark, None, None)
        if call.name in EXTREMA and len(call.args) == 2:
            lost, how = self._outdone(call, out, mark, marked), "clip"
        elif call.name in CLAMPS and isinstance(source := call.args[0], Ref):
            result = self.run.values[out]
            lost, how = mark & torch.isfinite(result) & (result != self.run.values[source.id]), "clamp"
        elif call.name in SHARES and isinstance(source := call.args[0], Ref):
            nothing = bool((self.run.values[source.id][marked[source.id]] == -math.inf).all())
            lost, how = mark & nothing & torch.isfinite(self.run.values[out]), "share"
        elif call.name in REPLACEMENTS and isinstance(source := call.args[0], Ref):
            bad = ~torch.isfinite(self.run.values[source.id]) & marked[source.id]
            lost, how = mark & bool(bad.any()) & torch.isfinite(self.run.values[out]), "replace"
        else:
            return mark, None, None
        return (mark & ~lost, Drop(index, how, None, call.name), None) if bool(lost.any()) else (mark, None, None)

    def _multiplied(
        self, index: int, call: Call, mark: Tensor, marked: Mapping[int, Tensor], own_operands: set[int]
    ) -> tuple[Tensor, Drop | None, str | None]:
        """What a factor of 0 does: a mask takes an element out, a coefficient does not."""
        if is_times_nothing(call):
            return mark, None, "a coefficient"
        for other in (v for v in call.inputs() if v not in marked):
            zero = mark & (self.run.values[other] == 0).expand(mark.shape)
            if not bool(zero.any()):
                continue
            selects = self.run.values[other].dim() > 0  # one number selects nothing
            if selects and other not in own_operands and self.is_mask(other, zero):
                return mark & ~zero, self._by_mask(index, other, zero), None
            own = [self.run.values[v].expand(mark.shape) for v in call.inputs() if v in marked]
            if any(bool((zero & ~torch.isnan(one)).any()) for one in own):  # what is NaN already it makes nothing of
                return mark, None, self.names.name(other) or "a coefficient"
        return mark, None, None

    def _not_attended(self, call: Call, mark: Tensor, marked: Mapping[int, Tensor]) -> tuple[Tensor, str | None]:
        """The marked elements of a product with the weights of a softmax that give what is marked a weight of exactly 0, and the name of
        the weights: a key that a mask takes out of attention."""
        weights, content = (arg.id if isinstance(arg, Ref) else -1 for arg in call.args[:2])
        if content not in marked or weights not in self.run.values or not self._is_attention(weights):
            return mark & False, None
        reached = (self.run.values[weights] != 0).float() @ marked[content].float() > 0
        if weights in marked:
            reached |= marked[weights].any(-1, keepdim=True)
        return mark & ~reached, self.names.name(weights) or "the attention weights"

    def _is_attention(self, value: int) -> bool:
        """Is it what a softmax has made, moved and copied as it may be?"""
        call = self.program.maker_behind(value)
        return call is not None and call.name in ALL_SOFTMAXES

    def _outdone(self, call: Call, out: int, mark: Tensor, marked: Mapping[int, Tensor]) -> Tensor:
        """The marked elements of a minimum or maximum that come from the other side.

        Where both sides descend from the element, it is out if the picked side no longer carries it.
        """
        values, result = self.run.values, self.run.values[out]
        left, right = (arg.id if isinstance(arg, Ref) else -1 for arg in call.args)
        for own, other in ((left, right), (right, left)):
            if own in marked and other in values:
                picked = mark & (result == values[other])
                if other in marked:
                    picked &= ~marked[other].expand(result.shape)
                lost = picked & ~(values[own] == values[other]).expand(result.shape)
                if bool(lost.any()):
                    return lost
        return mark & False

    def _by_mask(self, index: int, factor: int, zeros: Tensor) -> Drop:
        by = self._mask_behind(factor, zeros)
        return Drop(index, "mask", by, self.names.name(by))

    def _selector(self, call: Call) -> int | None:
        """The mask or index that a where, masked_fill or indexing call selects with."""
        payload = PAYLOAD.get(call.name, (0,))
        found = [v for position, arg in enumerate(call.args) if position not in payload for v in refs(arg)]
        return found[0] if found else None

    def _selector_name(self, call: Call) -> str | None:
        value = self._selector(call)
        if value is None:
            return call.name
        for _ in range(12):
            made = self.program.maker(value)
            if self.names.name(value) is not None or made is None:
                break
            if not (carries(made.op) or made.name in NEGATIONS or any(map(self.names.says_mask, made.inputs()))):
                break
            value = next(made.inputs(), value)
        return self.names.name(value) or ("a condition" if call.name in CHOICES else None)

    def _in_its_place(self, index: int, call: Call, touched: Sequence[int], marked: Mapping[int, Tensor]) -> list[Drop]:
        """What a choice between two numbers does with a marked element that it does not take: the loss counts the other number, unless
        that is 0, or is left out itself."""
        out = call.outs[0] if call.outs else None
        if call.name not in CHOICES or out is None:
            return []
        result = self.run.values[out]
        place = functools.reduce(torch.logical_or, [marked[value].expand(result.shape) for value in touched])
        where = place & torch.isfinite(result) & (result != 0)
        if not result.is_floating_point() or not bool(where.any()):
            return []
        masked, drops, _ = self.of(out, int(where.flatten().int().argmax()))
        return (
            list(drops)
            if masked and any(drop.how in ("mask", "select") for drop in drops)
            else [Drop(index, "other", self._selector(call), call.name)]
        )

    def is_mask(self, value: int, zeros: Tensor | None, *, strict: bool = False) -> bool:
        """Does a value say which elements count (a mask), as opposed to how much (an advantage, a coefficient)?

        zeros: where it is 0 and matters, of it or of the product that it is broadcast to. strict: zeros and ones are not enough, it has to
        be made of masks.
        """
        own = None if zeros is None else narrowed(zeros, self.run.values[value].shape)
        return self._is_mask(value, own, strict, 0, {})

    def _is_mask(self, value: int, zeros: Tensor | None, strict: bool, depth: int, known: dict[int, bool]) -> bool:
        """`is_mask`, of what a value is made of, too. known: answers so far; two ways may lead to the same value, at every call."""
        if value not in known:
            known[value] = self._says_which(value, zeros, strict, depth, known)
        return known[value]

    def _says_which(self, value: int, zeros: Tensor | None, strict: bool, depth: int, known: dict[int, bool]) -> bool:
        tensor = self.run.values[value]
        role, leaf = self.names.named(value), self.program.leaf(value)
        if role is Role.MASK or tensor.dtype is torch.bool:
            return True
        if role is not None or (leaf is not None and leaf.is_of_model) or self._is_label(value):
            return False
        call = self.program.maker(value)
        binary = tensor.dim() > 0 and is_binary(tensor) and bool((tensor == 1).any())  # of zeros only is anything
        if call is None or depth > 20 or (binary and not strict):
            return binary and (not strict or not tensor.is_floating_point())
        if call.name in SELECTORS:
            return True

        before = {} if zeros is None else behind(call, self.run.values, value, zeros)

        def masks(values: Iterable[int]) -> Iterable[bool]:
            return (self._is_mask(v, before.get(v), strict, depth + 1, known) for v in values)

        if call.name in SHIFTS and any(self.run.values[v].dim() == 0 and self.program.maker(v) is not None for v in call.inputs()):
            return False  # how far each is from what was computed of all of them
        if carries(call.op) or call.name == "neg" or call.name in SHIFTS:
            # of a sum, a where or a write it is one only if all that it is made of are masks
            carried = range(2) if call.name in SHIFTS else PAYLOAD.get(call.name, (0,))
            parts = self._tensors(v for position in carried if position < len(call.args) for v in refs(call.args[position]))
            return bool(parts) and all(masks(parts))
        if call.name != "mul" or 0 in call.args:
            return False
        return all(masks(self._tensors(call.inputs()))) if strict else any(masks(self._zero_factors(call, before)))

    def _tensors(self, values: Iterable[int]) -> list[int]:
        return [v for v in values if self.run.values[v].dim() > 0]

    def _zero_factors(self, call: Call, zeros: Mapping[int, Tensor]) -> list[int]:
        """The factors that make a product 0, where it matters if that can be told; otherwise all. zeros: where it matters, by factor."""
        parts = [v for v in call.inputs() if bool((self.run.values[v] == 0).any())] or list(call.inputs())
        return [v for v in parts if v in zeros and bool(((self.run.values[v] == 0) & zeros[v]).any())] or parts

    def _is_label(self, value: int) -> bool:
        """Zeros and ones that weigh one term by themselves and another by their complement say which is right, not which counts, unless
        they are called a mask."""
        if not self._multiplies(value):
            return False
        made = self.program.maker(value)
        twins = [call.outs[0] for call in self.program.readers(value) if call.name in DIFFERENCES]
        if made is not None and made.name in DIFFERENCES:
            twins += list(made.inputs())
        return any(self._multiplies(twin) and not self.names.says_mask(twin) for twin in twins if twin is not None)

    def _multiplies(self, value: int | None) -> bool:
        """Does a value weigh another tensor?"""
        return value is not None and any(
            call.name == "mul" and all(isinstance(arg, Ref) and self.run.values[arg.id].dim() > 0 for arg in call.args[:2])
            for call in self.program.readers(value)
        )

    def _mask_behind(self, value: int, zeros: Tensor) -> int:
        """A product of mask and coefficient is zero because of the mask: return the mask itself."""
        for _ in range(20):
            if self.names.named(value) is Role.MASK:
                return value
            made = self.program.maker(value)
            if made is None or made.name != "mul":
                return value
            parts = [
                v for v in made.inputs() if self.is_mask(v, zeros) and bool(((self.run.values[v] == 0).expand(zeros.shape) & zeros).any())
            ]
            if not parts:
                return value
            value = parts[0]
        return value

    def _at_mask(self, value: int, flat: int) -> Drop | None:
        """A mask is 0 at the element, though something else took it out before, or in all tokens of the row that it is made of."""
        shape = list(self.run.values[value].shape)
        index = list(unravel(flat, tuple(shape)))
        while shape and shape[-1] == 1:
            shape.pop()
            index.pop()
        if not shape:
            return None
        before = {out for call in self.program.slice(value).calls for out in call.outs}
        beside = {value}  # values of which every element comes from the same position of this one
        for position, call in enumerate(self.program.calls):
            inputs = set(call.inputs())
            meets = bool(inputs & beside)
            if meets and flow_of(call.op) is Flow.POINTWISE:
                beside |= {out for out in call.outs if out is not None and self.run.values[out].shape == self.run.values[value].shape}
            if meets and (chosen := self._chosen_out(call, beside, tuple(index), value)) is not None:
                return Drop(position, "select", chosen, self._selector_name(call))
            if call.name != "mul" or not (meets or before & set(call.outs)):
                continue
            for mask in inputs - beside:
                tensor = self.run.values[mask]
                rows = tensor.dim() > len(shape) and not meets
                same = meets and tensor.shape == self.run.values[value].shape
                if not (rows or same) or list(tensor.shape[: len(shape)]) != shape or not self.names.says_mask(mask):
                    continue
                inside = tensor[tuple(index)]
                if bool((inside == 0).all()) and bool((tensor != 0).any()):
                    return Drop(position, "mask", mask, self.names.name(mask), before=rows)
        return self._contracted(value, flat)

    def _chosen_out(self, call: Call, beside: Set[int], index: tuple[int, ...], value: int) -> int | None:
        """The mask by which a choice takes another number than that of an element, None if none does. beside: values of which each element
        comes from the same position of the one that it is of."""
        if call.name not in CHOICES or len(call.args) < 2:
            return None
        fills = call.name in FILLS
        ours, mask = call.args[0 if fills else 1], self._selector(call)
        if mask is None or not (isinstance(ours, Ref) and ours.id in beside and self._asks_a_mask(mask)):
            return None
        tensor = self.run.values[mask]
        if tensor.shape != self.run.values[value].shape or bool(tensor.flatten().eq(tensor.flatten()[0]).all()):
            return None
        taken = bool(tensor[(*index, *(0,) * (tensor.dim() - len(index)))]) != fills
        return None if taken else mask

    def _asks_a_mask(self, value: int) -> bool:
        """Is it a mask, or whether one is 0?"""
        made = self.program.maker(value)
        asks = made is not None and made.name in COMPARISONS | NEGATIONS
        return self.names.says_mask(value) or (asks and made is not None and any(map(self.names.says_mask, made.inputs())))

    def _contracted(self, value: int, flat: int) -> Drop | None:
        """The element is weighed by a mask in a matrix product (`einsum("bt,bt->", ratio, mask)`)."""
        shape = self.run.values[value].shape
        for position, call in enumerate(self.program.calls):
            if flow_of(call.op) is not Flow.MATMUL:
                continue
            origins = [self._unmoved(operand) for operand in call.inputs()]
            masks = [v for v in origins if self.run.values[v].shape == shape and self.names.says_mask(v)]
            weighed = [v for v in origins if v not in masks and self.run.values[v].shape == shape]
            if not masks or not weighed or self.run.values[masks[0]].flatten()[flat]:
                continue
            if weighed[0] == value or value in {out for made in self.program.slice(weighed[0]).calls for out in made.outs}:
                return Drop(position, "mask", masks[0], self.names.name(masks[0]))
        return None

    def _unmoved(self, value: int) -> int:
        """What a value was before it was reshaped, permuted or cast."""
        for _ in range(12):
            call = self.program.maker(value)
            if call is None or self.names.name(value) is not None or not carries(call.op):
                return value
            value = next(iter(call.inputs()), value)
        return value


def is_times_nothing(call: Call) -> bool:
    """Does a call multiply by a 0 that stands in the code?"""
    return call.name == "mul" and any(isinstance(arg, (int, float)) and arg == 0 for arg in call.args)


def marked_at(tensor: Tensor, flats: int | Tensor) -> Tensor:
    """Return a bool tensor of a tensor's shape in which some elements are marked."""
    mark = torch.zeros(tensor.numel(), dtype=torch.bool)
    mark[flats] = True
    return mark.reshape(tensor.shape)
