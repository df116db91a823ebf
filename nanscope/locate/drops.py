"""Does the loss count an element? Follows it from where it stands to the loss, and says what takes it out on the way, and by which mask.

An element is out where it is multiplied by 0, not selected, replaced by a bound, or where min and max picked another value. What weighs
an element by 0 may be a mask, which says which tokens count, or a coefficient, which says how much: a token whose advantage is 0 is not
masked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanscope.locate.names import Namer
from nanscope.program.calls import Call, Ref, refs
from nanscope.program.flow import spread
from nanscope.program.numbers import at
from nanscope.program.ops import PAYLOAD, SELECTORS, Flow, base_name, carries, flow_of
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.roles import Role
from nanscope.text import unravel


@dataclass(frozen=True, slots=True)
class Drop:
    """What takes an element out of the loss on its way there.

    how: "mask" (multiplied by 0), "select" (where, indexing, masked_fill), "clip" (min or max picked another value), "clamp" (replaced by
    a bound) or "replace" (nan_to_num, nansum). The last puts another number in the place of a token that the loss counts all the same.
    by: id of the mask, None where there is none. name: what it is called.
    """

    call: int
    how: str
    by: int | None
    name: str | None


@dataclass(slots=True)
class Fate:
    """The ways of the elements of one run. producers, consumers: of the program. own_operands: of the call whose result is followed: p in
    p · log p is no mask."""

    program: Program
    run: Run
    producers: Mapping[int, int]
    consumers: Mapping[int, list[int]]
    names: Namer
    own_operands: set[int] = field(default_factory=set)

    def of(self, value: int, flat: int) -> tuple[bool | None, tuple[Drop, ...], str | None]:
        """Follow an element to the loss: is it taken out on the way, by what, and does a zero coefficient multiply it?"""
        found = self._follow(value, flat, tokens=False)
        if found[1] and all(drop.how == "replace" for drop in found[1]):  # its value is gone: is its token, too?
            return self._follow(value, flat, tokens=True)
        return found

    def own_mask(self, index: int | None, value: int, flat: int) -> Drop | None:
        """The product that is the origin multiplies an infinity by a mask."""
        if index is None or base_name(self.program.calls[index].op) != "mul" or not math.isnan(at(self.run.values[value], flat)):
            return None
        shape = self.run.values[value].shape
        here = torch.zeros(shape, dtype=torch.bool)
        here.flatten()[flat] = True
        for factor in self.program.calls[index].inputs():
            zeros = here & (self.run.values[factor] == 0).expand(shape)
            if bool(zeros.any()) and self.is_mask(factor, zeros):
                by = self._mask_behind(factor, zeros)
                return Drop(index, "mask", by, self.names.name(by))
        return None

    def _follow(self, value: int, flat: int, *, tokens: bool) -> tuple[bool | None, tuple[Drop, ...], str | None]:
        """The fate of an element. tokens: what nan_to_num puts in its place is still the same token."""
        tensor = self.run.values[value]
        mark = torch.zeros(tensor.numel(), dtype=torch.bool)
        mark[flat] = True
        marked: dict[int, Tensor] = {value: mark.reshape(tensor.shape)}
        drops: list[Drop] = []
        coefficient: str | None = None
        made = self.producers.get(value)
        self.own_operands = set(self.program.calls[made].inputs()) if made is not None else set()
        for index, call in enumerate(self.program.calls):
            touched = [v for v in dict.fromkeys(call.inputs()) if v in marked]
            if not touched or any(out in marked for out in call.outs if out is not None):
                continue
            reached = spread(call, self.run.values, marked)
            if not reached and flow_of(call.op) is Flow.MOVE:
                drops.append(Drop(index, "select", self._selector(call), self._selector_name(call)))
                continue
            for out, own in reached.items():
                kept, drop, zero = self._kept(index, call, out, own, marked)
                if tokens and drop is not None and drop.how == "replace":
                    kept = own
                coefficient = coefficient or zero
                if drop is not None:
                    drops.append(drop)
                if len(call.outs) > 1 and out != self.program.output and not self.consumers.get(out):
                    drops.append(Drop(index, "select", None, base_name(call.op)))  # a piece that nobody takes
                    continue
                if bool(kept.any()):
                    marked[out] = kept
        at_mask = self._at_mask(value, flat)
        if at_mask is not None and all(drop.how not in ("mask", "select") or drop.by is None for drop in drops):
            return True, (*drops, at_mask), coefficient
        if self.program.output not in marked and any(drop.how != "replace" for drop in drops):
            return True, tuple(drops), coefficient
        made = self.producers.get(value)
        in_model = made is not None and bool(self.program.calls[made].module)
        if not drops and tensor.dim() == 0 and not in_model and not self._meets_mask(marked):
            return (False if coefficient else None), (), coefficient
        return False, tuple(drops), coefficient

    def _meets_mask(self, marked: dict[int, Tensor]) -> bool:
        """Does a mask weigh, or an index select, what came of the marked elements?"""
        for call in self.program.calls:
            inputs = list(call.inputs())
            if not any(value in marked for value in inputs):
                continue
            if base_name(call.op) == "mul" and any(v not in marked and self.run.values[v].dim() and self.is_mask(v, None) for v in inputs):
                return True
            if base_name(call.op) in ("where", "index", "masked_fill", "masked_select"):
                return True
        return False

    def _kept(self, index: int, call: Call, out: int, mark: Tensor, marked: dict[int, Tensor]) -> tuple[Tensor, Drop | None, str | None]:
        name, values = base_name(call.op), self.run.values
        result = values[out]
        others = [v for v in call.inputs() if v not in marked]
        if name == "mul" and any(isinstance(arg, (int, float)) and arg == 0 for arg in call.args):
            return mark, None, "a coefficient"
        if name == "mul":
            for other in others:
                zero = mark & (values[other] == 0).expand(result.shape)
                if not bool(zero.any()):
                    continue
                if other not in self.own_operands and self.is_mask(other, zero):
                    by = self._mask_behind(other, zero)
                    return mark & ~zero, Drop(index, "mask", by, self.names.name(by)), None
                return mark, None, self.names.name(other) or "a coefficient"
        elif name in ("minimum", "maximum", "fmin", "fmax") and len(call.args) == 2:
            left, right = (arg.id if isinstance(arg, Ref) else -1 for arg in call.args)
            for own, other in ((left, right), (right, left)):
                if own in marked and other in values and other not in marked:
                    lost = mark & (result == values[other]) & ~(values[own] == values[other]).expand(result.shape)
                    if bool(lost.any()):
                        return mark & ~lost, Drop(index, "clip", None, name), None
                elif own in marked and other in marked:
                    # both sides descend from the element: it is out if the picked side no longer carries it
                    picked_other = mark & (result == values[other]) & ~marked[other].expand(result.shape)
                    lost = picked_other & ~(values[own] == values[other]).expand(result.shape)
                    if bool(lost.any()):
                        return mark & ~lost, Drop(index, "clip", None, name), None
        elif name in ("clamp", "clamp_min", "clamp_max"):
            source = call.args[0]
            if isinstance(source, Ref):
                lost = mark & torch.isfinite(result) & (result != values[source.id])
                if bool(lost.any()):
                    return mark & ~lost, Drop(index, "clamp", None, name), None
        elif name in ("nan_to_num", "nansum", "nanmean"):
            source = call.args[0]
            if isinstance(source, Ref):
                bad = ~torch.isfinite(values[source.id]) & marked[source.id]
                lost = mark & bool(bad.any()) & torch.isfinite(result)
                if bool(lost.any()):
                    return mark & ~lost, Drop(index, "replace", None, name), None
        return mark, None, None

    def _selector(self, call: Call) -> int | None:
        """The mask or index that a where, masked_fill or indexing call selects with."""
        payload = PAYLOAD.get(base_name(call.op), (0,))
        found = [v for position, arg in enumerate(call.args) if position not in payload for v in refs(arg)]
        return found[0] if found else None

    def _selector_name(self, call: Call) -> str | None:
        value = self._selector(call)
        return self.names.name(value) if value is not None else base_name(call.op)

    def is_mask(self, value: int, zeros: Tensor | None, *, strict: bool = False, depth: int = 0) -> bool:
        """Does a value say which elements count (a mask), as opposed to how much (an advantage, a coefficient)?"""
        tensor = self.run.values[value]
        role = self.names.named(value)
        if role is Role.MASK or tensor.dtype is torch.bool:
            return True
        if role is not None:
            return False
        index = self.producers.get(value)
        leaf = self.program.leaf(value)
        if leaf is not None and leaf.origin == "parameter":
            return False
        if self._is_label(value):
            return False
        binary = tensor.dim() > 0 and bool(((tensor == 0) | (tensor == 1)).all()) and (index is None or bool((tensor == 1).any()))
        if index is None or depth > 20 or (binary and not strict):
            return binary and (not strict or not tensor.is_floating_point())
        call = self.program.calls[index]
        name = base_name(call.op)
        if name in SELECTORS:
            return True
        inputs = list(call.inputs())
        if carries(call.op) or name in ("rsub", "neg", "sub", "add"):
            carried = PAYLOAD.get(name)
            tensors = [v for v in inputs if self.run.values[v].dim() > 0]
            if carried is not None and len(carried) > 1:  # a where or a write: a mask only if all that it is made of are masks
                parts = [v for position in carried if position < len(call.args) for v in refs(call.args[position])]
                tensors = [v for v in parts if self.run.values[v].dim() > 0]
                return bool(tensors) and all(self.is_mask(v, zeros, strict=strict, depth=depth + 1) for v in tensors)
            return bool(tensors) and self.is_mask(tensors[0], zeros, strict=strict, depth=depth + 1)
        if name == "mul":
            parts = [v for v in inputs if bool((self.run.values[v] == 0).any())] or inputs
            if zeros is not None:
                parts = [v for v in parts if bool(((self.run.values[v] == 0).expand(zeros.shape) & zeros).any())] or parts
            return any(self.is_mask(v, zeros, strict=strict, depth=depth + 1) for v in parts)
        return False

    def _is_label(self, value: int) -> bool:
        """Zeros and ones that weigh one term by themselves and another by their complement say which is right, not which counts."""
        if not self._multiplies(value):
            return False
        made = self.producers.get(value)
        calls = [self.program.calls[index] for index in self.consumers.get(value, ())]
        twins = [call.outs[0] for call in calls if base_name(call.op) in ("rsub", "sub")]
        if made is not None and base_name(self.program.calls[made].op) in ("rsub", "sub"):
            twins += list(self.program.calls[made].inputs())
        return any(self._multiplies(twin) for twin in twins)

    def _multiplies(self, value: int | None) -> bool:
        """Does a value weigh another tensor?"""
        return value is not None and any(
            base_name(call.op) == "mul" and all(isinstance(arg, Ref) and self.run.values[arg.id].dim() > 0 for arg in call.args[:2])
            for call in (self.program.calls[index] for index in self.consumers.get(value, ()))
        )

    def _mask_behind(self, value: int, zeros: Tensor) -> int:
        """A product of mask and coefficient is zero because of the mask: return the mask itself."""
        for _ in range(20):
            if self.names.named(value) is Role.MASK:
                return value
            index = self.producers.get(value)
            if index is None or base_name(self.program.calls[index].op) != "mul":
                return value
            shape = zeros.shape
            parts = [
                v
                for v in self.program.calls[index].inputs()
                if self.is_mask(v, zeros) and bool(((self.run.values[v] == 0).expand(shape) & zeros).any())
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
            if base_name(call.op) != "mul" or not (meets or before & set(call.outs)):
                continue
            for mask in inputs - beside:
                tensor = self.run.values[mask]
                rows = tensor.dim() > len(shape) and not meets
                same = meets and tensor.shape == self.run.values[value].shape
                if not (rows or same) or list(tensor.shape[: len(shape)]) != shape or not self.names.says_mask(mask):
                    continue
                inside = tensor[tuple(index)]
                if bool((inside == 0).all()) and bool((tensor != 0).any()):
                    return Drop(position, "mask", mask, self.names.name(mask))
        return self._contracted(value, flat)

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
            index = self.producers.get(value)
            if index is None or self.names.name(value) is not None:
                return value
            call = self.program.calls[index]
            if not carries(call.op):
                return value
            value = next(iter(call.inputs()), value)
        return value
