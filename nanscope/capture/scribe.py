"""How a call is written down: its arguments by number, what it has made or written to, and what of it no program will have."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanscope.capture import raw
from nanscope.capture.agreed import Agreed, exchange, given
from nanscope.capture.clipping import Clipping
from nanscope.capture.entries import PLAIN, Handed, Noted, Opaque, Operator, Unseen, Value, history_of, tensors_of
from nanscope.capture.jagged import Jagged
from nanscope.capture.layout import is_dense, is_turned
from nanscope.capture.leaves import Leaves
from nanscope.capture.log import LITERAL, REMEMBERED, Log
from nanscope.capture.modules import version_of
from nanscope.capture.opaques import Opaques
from nanscope.capture.raw import EACH, RawCall, Seen, each
from nanscope.capture.sites import NOWHERE, Callers, Place
from nanscope.capture.values import Fleeting, Values, key_of
from nanscope.capture.writes import Writes
from nanscope.program.attention import drops_out
from nanscope.program.calls import Arg, Call, Ref
from nanscope.program.local import is_plain, local, memory_of, refuses
from nanscope.program.numbers import same_bits
from nanscope.program.ops import ATTENTIONS, DATA_FACTORIES, UNWRITTEN_FACTORIES, base_name, flow_of
from nanscope.program.perform import perform
from nanscope.program.safety import bound

LOOKS = 8  # at memory, one through the other, that are gone back over
STATISTICS = 1 << 16  # bytes of what ranks are about to put together, and of which each keeps its own part
FILLED = 1 << 24  # bytes of a buffer that is compared with what made it


class Scribe:
    """Writes calls into a log, one that has just been made, and one that has waited."""

    def __init__(
        self,
        known: Values,
        log: Log,
        callers: Callers,
        writes: Writes,
        leaves: Leaves,
        opaques: Opaques,
        jagged: Jagged,
        clipping: Clipping,
        agreed: Agreed,
    ) -> None:
        self._known, self._log, self._callers, self._writes = known, log, callers, writes
        self._leaves, self._opaques, self._jagged = leaves, opaques, jagged
        self._clipping, self._agreed = clipping, agreed
        self._exchange: Opaque | None = None  # by which ranks are handing numbers to each other just now

    def write(self, note: RawCall) -> None:
        """Write down a call that has waited."""
        if note.operator.draws and not note.args:
            self._forget_results(note.results, note.operator.name)
            return
        seen = each(note.seen)
        try:
            noted: Noted = tuple([self._was(arg, seen) for arg in note.args]), tuple(note.kwargs.items())
        except Unseen:
            self._forget_results(note.results, note.operator.name)
            return
        if note.operator.mutable and not note.results:
            self._after_write(note.operator, noted, None, note.args, None)
            return
        if note.operator.name == LITERAL:
            noted = self._handed_on_before(noted)
        if note.destroyed is not None and note.results[0].data_ptr() != note.made[raw.ADDRESS]:
            self._known.supersede(note.made[raw.ADDRESS])  # it lies somewhere else by now, and nobody has what was made
            return
        if note.operator.gives:
            self._known.unfind(tensors_of((note.args, note.results)))
            self._forget_results(note.results, note.operator.name)
            return
        if note.operator.mutable:
            target = self._known.by_id[self._log.read[0]]
            self._writes.before(target, note.args[0], note.operator.turns)
            self._after_write(note.operator, noted, target, note.args, note.results[0])
            return
        if not note.seen or all(map(_lies_at, note.results, note.made[raw.ADDRESS :: EACH])):
            self._after_call(note.operator, noted, note.results)  # else one is other memory by now, and nobody has what was made
            if note.operator.view and note.seen and _has_missed_a_write(note):
                self._known.unfind(note.results)

    def _handed_on_before(self, noted: Noted) -> Noted:
        """Of numpy's memory, which is made a tensor anew each time that it is an index: what it was when it was handed on first, and not
        what that gave, which has no part in this."""
        entry = self._log.entries.get(self._known.made_by.get(self._log.read[0], -1)) if self._log.read else None
        if entry is None or base_name(entry.op) != LITERAL:
            return noted
        self._log.read[0] = next(iter(entry.reads()))
        return entry.args, noted[1]

    def _was(self, arg: Any, seen: Iterator[Seen]) -> Arg:
        """What an argument was when the call was made."""
        if isinstance(arg, Tensor):
            version, address, shape, wanted = next(seen)
            made = self._known.just_made.get(id(arg))
            if made is not None and self._known.by_key.get(made.key) != made.id:
                made = None  # somebody has written to it by another name, or nobody will ask for it any more
            history = PLAIN if not wanted else history_of(arg) if arg.requires_grad else id(arg)
            if made is not None and (made.version, made.key[0], made.diff) == (version, address, wanted):
                value = made
            elif arg.data_ptr() == address and arg.shape == shape:
                found = self._known.find(arg, history, version) or self._written_to(arg, version)
                value = found or self._leaves.number(arg, (history, version))
            else:  # it is other memory by now, or another part of it
                value = self._known.add(tuple(shape), arg.dtype, wanted)
                self._known.nameless.add(value.id)
            if self._was_filled(value, arg):
                value = self._leaves.number(arg, (history, version))
            self._log.read.append(value.id)
            return Ref(value.id)
        if isinstance(arg, (list, tuple)):
            return tuple([self._was(item, seen) for item in arg])
        return arg  # type: ignore[no-any-return]

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Noted:
        """Number what a call is about to read. Raises Unseen where no program can hold it."""
        self._log.read.clear()
        arg = self._arg
        return tuple([arg(a) for a in args]), tuple([(k, arg(v)) for k, v in kwargs.items()]) if kwargs else ()

    def rest(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Of a call that no program holds, because of one argument: what else it reads."""
        self._log.read.clear()
        for tensor in tensors_of((args, tuple(kwargs.values()))):
            with contextlib.suppress(Unseen):
                self._arg(tensor)

    def before_exchange(self, operator: Operator, args: tuple[Any, ...]) -> None:
        """Where ranks are about to hand numbers to each other: keep what this one gives. Follows `rest`."""
        name, read, held, written = exchange(operator), list[int](), list[Handed](), tensors_of(args[:1])
        self._exchange = None
        if name is None:
            return
        for tensor in given(operator, args) or filter(self._was_exchanged, written):
            value = self._known.find(tensor) if is_plain(tensor) and tensor.is_floating_point() else None
            if value is None:
                continue
            read.append(value.id)
            destroyed = any(tensor is one for one in written)
            if value.bytes <= (STATISTICS if destroyed else REMEMBERED):
                content = tensor.detach().clone() if destroyed else tensor.detach()
                held.append(Handed(value.id, content, version_of(content), self._is_computed(value), self._exchanged_before(value)))
        self._exchange = Opaque(name, tuple(read), self._place(), exchange=True, held=tuple(held))

    def _was_exchanged(self, tensor: Tensor) -> bool:
        """Is it what an earlier such call has written, as where a reduction to one rank is broadcast?"""
        value = self._known.find(tensor) if is_plain(tensor) else None
        return value is not None and self._exchanged_before(value) is not None

    def _exchanged_before(self, value: Value) -> Opaque | None:
        """Return that call, without what is known of those before it: a statistic may go through one in each step."""
        known = self._leaves.opaque.get(value.id)
        if known is None or not known.exchange:
            return None
        return replace(known, held=tuple(replace(one, of=None) for one in known.held))

    def _is_computed(self, value: Value) -> bool:
        """Have calls made it, and is it no data that became a tensor?"""
        made = self._log.entries.get(self._known.made_by.get(value.id, -1))
        return value.leaf is None and (made is None or base_name(made.op) != LITERAL)

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, Tensor):
            if (type(arg) is not Tensor and refuses(arg)) or (arg.layout is not torch.strided and arg.is_nested):
                raise Unseen  # torch may be making its history right now, under a lock: asking for it would wait for ever
            value = self.value_of(arg).id
            self._log.read.append(value)
            return Ref(value)
        if arg is None or isinstance(arg, (bool, int, float, str, torch.dtype, torch.device, torch.memory_format, torch.layout)):
            return arg
        if isinstance(arg, (list, tuple)):
            return tuple(self._arg(item) for item in arg)
        raise Unseen

    def value_of(self, tensor: Tensor) -> Value:
        """Return what is known of a tensor; one that is not known becomes a leaf."""
        found = self._known.find(tensor) or self._known.resolved(tensor) or self._written_to(tensor)
        return self._leaves.number(tensor) if found is None or self._was_filled(found, tensor) else found

    def _written_to(self, tensor: Tensor, version: int | None = None) -> Value | None:
        """What was written into a weight, where that is read and no gradient goes back to it. version: how often it had been then."""
        leads_back = self._log.grad() or not tensor.is_leaf
        return None if leads_back else self._known.find(tensor, PLAIN, version)

    def _was_filled(self, value: Value, tensor: Tensor) -> bool:
        """Is what a call has made of nothing something else by now, and nobody was seen to write to it? numpy writes so, and so do other
        processes, to memory that they share. What is there is data."""
        if not tensor.is_cpu or (value.key[0], value.version) != (tensor.data_ptr(), version_of(tensor)):
            return False  # asking would wait; or it is other memory by now, or was seen to be written to
        looks, one = list[Call](), value  # looks: at this memory, one through the other, the last one first; numpy's is a `detach`
        while (made := self._log.entries.get(self._known.made_by.get(one.id, -1))) is not None and len(looks) < LOOKS:
            looks.append(Call(made.op, made.args, made.kwargs, made.outs, -1))
            base = self._known.by_id.get(made.reads()[0]) if len(made.reads()) == 1 else None
            if base is None or (base.storage, base.version) != (one.storage, one.version):
                break
            one = base
        again = all(look.op.startswith("aten.") and flow_of(look.op) is not None for look in looks)  # what an extension does is done once
        if made is None or made.reads() or one.bytes > FILLED or not again:
            return False
        content: dict[int, Tensor] = {}
        for call in reversed(looks):
            found = zip(call.outs, perform(call, content, None, tensor.device, grad=False), strict=True)
            content.update({number: item for number, item in found if number is not None})
        return not same_bits(content[value.id], tensor.detach())

    def after(
        self, operator: Operator, noted: Noted | None, target: Value | None, args: tuple[Any, ...], result: Any, keywords: bool
    ) -> None:
        """Write down a call that was made. noted: its arguments, None if no program can hold them. target: what it has written to.
        keywords: it was given some."""
        if noted is None and operator.overload.startswith("c10d."):
            self._known.unfind(tensors_of((args, result)))
            self._clipping.wrote()
            self._agreed.collective(operator, args, bool(self._clipping.norms))
            of, self._exchange = self._exchange, None
            if of is not None:
                for item in tensors_of(args[:1]):
                    if is_plain(item) and item.is_floating_point():
                        self._opaques.note(item, of)
        elif noted is None:
            if not self._jagged.after(operator, args, keywords, result):
                counts = not any(item.is_floating_point() or item.is_complex() for item in tensors_of(result))  # a draw, an index
                self._forget_results(result, "" if counts else operator.name)
            if operator.norm and not torch.is_grad_enabled():
                parts = [(item, part) for item in tensors_of(result) if (part := local(item)) is not None]
                self._clipping.took([part for _, part in parts], self._callers.caller())
                for item, part in parts:
                    self._agreed.norm(item, part)
        elif operator.mutable:
            self._after_write(operator, noted, target, args, result)
        elif target is not None:
            self._known.hold_instead(target, result)
        else:
            self._after_call(operator, noted, result)

    def _after_write(self, operator: Operator, noted: Noted, target: Value | None, args: tuple[Any, ...], result: Any) -> None:
        if target is None:
            self._known.unfind(tensors_of((args, result)))
            for item in tensors_of(result):
                if is_plain(item) and not any(item is arg for arg in args):
                    self.note_opaque(item, operator.name, tuple(self._log.read))
        elif operator.turns:
            self._writes.after_turn(operator, noted, target, args[0])
        elif not self._writes.after(operator, noted, target, args[0]):
            self._known.unfind(tensors_of((args, result)))
            self._forget_results(args[0] if result is None else result, operator.name)  # of an out= the buffer, else what was written to

    def _after_call(self, operator: Operator, noted: Noted, result: Any) -> None:
        results: Sequence[Any] = result if isinstance(result, (tuple, list)) else (result,)
        if not (isinstance(result, Tensor) or any(isinstance(item, (Tensor, Fleeting)) for item in results)):
            return
        odd = not operator.listed and not all(is_plain(item) for item in results if isinstance(item, Tensor))
        drawn = operator.name in ATTENTIONS and drops_out(operator.name, bound(operator.function, list(noted[0]), dict(noted[1])))
        if not operator.replayable or odd or drawn or (operator.name == "as_strided" and not self._lies_as_numbered(noted)):
            self._forget_results(result, operator.name)  # a leaf when it is read: only then is known whether a gradient flows through
        else:
            self._log.append(operator.overload, noted, results, not operator.ends and self._log.flows(self._log.read), operator.view)
        if operator.norm and self._log.noted is None and not torch.is_grad_enabled():
            results = tensors_of(result)
            self._clipping.took(results, self._callers.caller())
            of, *rest = noted[0]
            operands = [self._known.by_id[arg.id] for arg in (of if isinstance(of, tuple) else (of,)) if isinstance(arg, Ref)]
            self._clipping.measure([(one.key[0], math.prod(one.shape), one.version) for one in operands], rest, results)

    def _lies_as_numbered(self, noted: Noted) -> bool:
        """Does the argument of `as_strided`, which counts in memory, lie in it from the first element on and without gaps?"""
        value = self._known.by_id[noted[0][0].id] if isinstance(noted[0][0], Ref) else None
        return value is not None and value.key[0] == value.storage and is_dense(value) and not is_turned(value)

    def _forget_results(self, result: Any, op: str = "") -> None:
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor) and is_plain(item):
                place = key_of(item, PLAIN)[:4]
                for value in self._known.relatives(memory_of(item)):
                    if value.key[:4] == place:
                        self._known.by_key.pop(value.key, None)
                if op and (op not in DATA_FACTORIES or op.startswith(tuple(UNWRITTEN_FACTORIES))):
                    self.note_opaque(item, op, tuple(self._log.read))

    def note_opaque(self, tensor: Tensor, op: str, read: tuple[int, ...] = ()) -> None:
        """A call has made a tensor that no program can make again. op: its name. read: by the call."""
        placed = bool(read) or op.startswith(tuple(UNWRITTEN_FACTORIES))
        self._opaques.note(tensor, Opaque(op, read, self._place() if placed else NOWHERE))

    def _place(self) -> Place:
        """Where the call is made that is being understood."""
        return self._callers.caller() if self._log.noted is None else self._log.noted.place


def _lies_at(tensor: Tensor, address: int) -> bool:
    return tensor.data_ptr() == address


def _has_missed_a_write(view: RawCall) -> bool:
    """Was a tensor written to since a view of it was made that counts its own writes, as `x.data` does? That tells nobody what it holds."""
    now, writes = version_of(view.args[0]), view.seen[raw.WRITES]
    return now != writes and any(version_of(item) != now for item in view.results)
