"""The tape: sees every aten call outside `nn.Module.forward` and writes it down as a program.

Below autograd a call is seen with real tensors, so nothing about the run changes: the call is made, then noted. What is kept of it is
the operator, references to its arguments, a reference to its result (up to a byte budget; autograd holds most of them anyway) and the
code position: a note, which waits until somebody asks. Which variable a result was bound to is worked out from the source even later.

Values are told apart by memory: address, shape, stride, dtype, and the history that a gradient takes (`x`, `x.detach()` and
`x.detach().requires_grad_()` share the rest). In-place writes are noted in their functional form, so the recorded program is pure; what
has no faithful one, and a write that the tape did not see, which the tensor's version tells, makes a new leaf of what was changed.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from functools import partial
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor

from nanscope.capture.account import Balance
from nanscope.capture.agreed import Agreed
from nanscope.capture.before import Before
from nanscope.capture.chains import Chains
from nanscope.capture.clipping import Clipping
from nanscope.capture.differentiated import Differentiated, Part, Pass, program_of
from nanscope.capture.doubts import Doubts, Sliced, is_doubtful
from nanscope.capture.entries import (
    ANSWER,
    Noted,
    Operator,
    Record,
    Taken,
    Unseen,
    Value,
    node_of,
    tensors_of,
)
from nanscope.capture.jagged import Jagged
from nanscope.capture.leaves import Leaves
from nanscope.capture.log import REMEMBERED, RING, Log
from nanscope.capture.modules import Address, version_of
from nanscope.capture.notes import Notes
from nanscope.capture.opaques import Opaques
from nanscope.capture.questions import Questions
from nanscope.capture.raw import Later, Raw, RawCall, SoFar
from nanscope.capture.replacing import Replacing
from nanscope.capture.rows import Rows
from nanscope.capture.scribe import Scribe
from nanscope.capture.sieve import OURS, is_row
from nanscope.capture.sites import Callers
from nanscope.capture.slicing import Slicing
from nanscope.capture.spans import Spans
from nanscope.capture.storages import Storages
from nanscope.capture.trailing import Trailing, besides_out
from nanscope.capture.validation import refused_parameter
from nanscope.capture.values import Values
from nanscope.capture.writes import Writes
from nanscope.frameworks.live import Glimpse
from nanscope.program.calls import Leaf
from nanscope.program.local import is_plain, local, memory_of, refuses
from nanscope.program.numbers import first_nonfinite, tensor_bytes
from nanscope.program.ops import ASKS_BY_ITSELF, DATA_FACTORIES
from nanscope.program.program import Program
from nanscope.roles import Role
from nanscope.torch_inside import (
    DETACH_IS_SEEN_TWICE,
    base_of,
    has_schema,
    sequence_number,
    uses,
)

Answer = TypeVar("Answer")

Destroyed = tuple[Tensor, ...]  # by a write: a copy of it, or nothing
Noting = tuple[Operator, Noted | None, Value | None]  # a call between `before` and `after`, its arguments, and what it writes to

BUDGET = 256 << 20  # bytes of tensors held by reference
PATIENCE = 64  # values, by default
REACH = 4  # calls that are gone through for each value that has been numbered since the last time
NUMBERS = 4  # that went to the host, of which it is remembered what made them


class Tape:
    """What was recorded since the last `forget`.

    budget: bytes of tensors that may be held by reference, or the account of who else holds some. `held` says how many are. A single one
    may take an eighth of it; a larger one cuts the program. wide: bytes of a single one of three dimensions and more, by default the same.
    patience: values that are numbered, at least, before it looks for what nobody can ask for any more.
    broken: why nothing is recorded any more, "" while all is well. gave_gradients: some were taken by `torch.autograd.grad`.
    clipping, questions, replacing: what was measured of gradients, asked, and asked of each element.
    refused: is called with the arguments of a call that raises, or is about to, and with what it raises.
    agreed: by the ranks of the run. doubts: of the trainer's code about its losses. numbers: what made the last that went to the host and
    were not finite. leaves: what came from outside. notes: calls that wait; whoever asks for what is known, for the log, for doubts or for
    passes, and whoever writes to memory that others know, has them understood first. chains: what tensors came of.
    """

    def __init__(self, budget: int | Balance = BUDGET, wide: int | None = None, patience: int = PATIENCE) -> None:
        self.account = budget if isinstance(budget, Balance) else Balance(budget)
        self._known = Values(self.account, wide)
        self.callers = Callers(self.account)
        self._log = Log(self._known, self.callers)
        self.notes = Notes(self.callers, self.account.budget)
        self.operators: dict[int, Operator] = {}  # by the identity of an overload, which an operator holds
        self.broken = ""
        self.refused: Callable[[tuple[object, ...], Exception], None] = lambda args, error: None
        self.gave_gradients = False
        self._lock = threading.RLock()  # a backward pass in another thread asks, too
        self._understands = False  # what waited has been taken, and is not all written down
        self.tags: dict[str, int] = {}
        self.clipping = Clipping()
        self.agreed = Agreed()
        self.numbers: deque[Sliced] = deque(maxlen=NUMBERS)
        self._writes = Writes(self._log, self._known)
        self.trailing = Trailing(self.notes, self._writes)
        self.rows = Rows(self.notes, self._known, self._writes)
        self.chains = Chains(self.notes, self._known, self._log, self.rows)
        self._slicing = Slicing(self._log, self._known)
        self.questions = Questions(self._known, self._log, self.notes.maker)
        self.replacing = Replacing(lambda: self._known.gradients())
        self._doubts = Doubts(self._known, self._log, self.account, self.program)
        self._differentiated = Differentiated(self.find)
        self.begun = {False: 0, True: 0}
        self._opaques = Opaques(PATIENCE)
        self._log.lost = self._opaques.lose
        self.leaves = Leaves(self._known, self._opaques, self._differentiated)
        jagged = Jagged(self._log, self._known, self.find, self.leaves.number)
        self._scribe = Scribe(
            self._known, self._log, self.callers, self._writes, self.leaves, self._opaques, jagged, self.clipping, self.agreed
        )
        self._storages = Storages(self._known, self._log, self.operators, self._opaques)
        self._keywords = False  # the call that could not be noted had keyword arguments
        self._patience = self._due = patience  # when so many values have been numbered, the log is gone through
        self._lasting = 4 * PATIENCE  # with so many calls left over by backward passes it is looked which are still asked for
        self._gone_through = 0  # values numbered when it last was
        self._over = self._usual = 0  # values numbered at the last `forget`, and how many usually are until the next

    # -- recording -------------------------------------------------------------------------------------------------------

    def look_up(self, func: Any) -> Operator | None:
        """Add what there is to know of an overload to `operators`; None if it is not one."""
        if not has_schema(func):  # a higher-order operator
            return None
        if len(self.operators) >= RING:
            self.operators.clear()  # somebody makes operators as he goes
        operator = self.operators[id(func)] = Operator.of(func)
        return operator

    def may_write(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Destroyed | None:
        """A call is about to write to one tensor: return what it destroys that nobody could make again; None if it may not wait."""
        with self._lock:
            if not operator.gives and self.notes.own(args[0]):
                made = self.notes.maker(args[0])
                if made is None or made.destroyed is None:
                    return () if self.notes.can_wait(args, kwargs, operator.lasting) else None
                content = self.trailing.copy_of(operator, args, kwargs)  # as of the write before
                return None if content is None else (content,)
            content = self.trailing.destroyed(operator, args, kwargs)
            if content is None:
                content = self.rows.destroyed(operator, args, kwargs)
            if content is None and self._is_only_returned(args[0]):
                content = self.trailing.copy_of(operator, args, kwargs)
            return None if content is None else (content,)

    def _is_only_returned(self, tensor: object) -> bool:
        """Has a model returned a tensor, and nobody that is seen read it, or made anything in its memory?"""
        if type(tensor) is not Tensor or not is_plain(tensor) or not self.leaves.module_outputs(tensor):
            return False
        return memory_of(tensor) not in self._known.by_storage and self.notes.is_new(tensor)

    def note(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, destroyed: Tensor | None = None) -> None:
        """Write down a call that was made, as it came if it can wait to be understood. destroyed: a copy of that, see `may_write`."""
        if operator.gives:
            kwargs = besides_out(kwargs)
        with self._lock:  # another thread that asks takes what waits
            if not self.notes.add(operator, args, kwargs, result, destroyed):
                noting = self.before(operator, args, kwargs)
                if noting is not None:
                    self.after(noting, args, result)
                return
            if destroyed is not None:
                self.rows.wrote(self.notes.pending[-1])
            if operator.mutable or (operator.norm and not torch.is_grad_enabled()):
                self.clipping.noted(self.notes.last())
            elif operator.asks:
                self._asks(operator, args)
            if self.notes.weight > self.notes.most or self.notes.idle > self.notes.due:
                self._make_room()

    def settle(self) -> None:
        """Have all calls so far understood: whatever asks, or changes something, does this first."""
        if self.notes.pending or self._understands:
            self._understand()

    def _make_room(self) -> None:
        """Let go of calls that have come to nothing, and understand the others if they still weigh much."""
        if not self._understands:
            self.notes.sift()
            if self.notes.weight > self.notes.most // 2 and not self._let_go():
                self._understand()

    def _let_go(self) -> bool:
        """Let go of the older rows of what is gathered, and of what they were made of; what somebody holds of it is known to be lost."""
        gone = self.notes.let_go()
        found = gone is not None
        while gone:
            row = is_row(gone[-1])
            operator, _, _, results, seen, *_ = gone.pop()  # and no other call of these refers to its results
            if row:
                buffer = base_of(results[0])
                self._opaques.lose(results[0] if buffer is None else buffer, operator.overload)
            elif seen and not (operator.view or operator.mutable):
                for item in results:
                    if sys.getrefcount(item) > OURS or uses(item) > 1:
                        self._opaques.lose(item, operator.overload)
        return found

    def _understand(self, notes: Sequence[RawCall | Later] | None = None) -> None:
        """Write down what waits, or some calls that have waited, the last first. Of what another thread is writing down just now, its end
        is waited for."""
        log = self._log
        with self._lock:
            if self._understands:
                return  # this thread asks in the midst of it
            self._understands, read = True, log.read[:]
            try:
                notes = list(self.notes.take(ends=True, begins=self._begins()) if notes is None else notes)
                self.leaves.before = Before(notes, self._known.limits[0])
                while notes:
                    note = notes.pop()
                    log.read.clear()
                    if isinstance(note, Later):
                        log.noted = None
                        note.act()
                        continue
                    log.noted = note
                    self._scribe.write(note)
                    if note.destroyed is not None:
                        self.leaves.before.understood(note)
                    if self._known.length > self._due:
                        self.collect()
            except Exception as error:
                self.broken = type(error).__name__
                raise
            finally:
                self._understands, log.noted, log.read[:] = False, None, read
                self.leaves.before = Before()
                self._known.just_made.clear()

    @property
    def known(self) -> Values:
        """The values, with those of all calls so far."""
        self.settle()
        return self._known

    @property
    def log(self) -> Log:
        """The calls, all that were made so far."""
        self.settle()
        return self._log

    @property
    def doubts(self) -> Doubts:
        """Those of the trainer's code about its losses."""
        self.settle()
        return self._doubts

    @property
    def in_doubt(self) -> bool:
        """Is there such a doubt? No call that waits to be understood can raise one."""
        return self._doubts.is_open

    @property
    def storages(self) -> Storages:
        """What lies where, of all calls so far."""
        self.settle()
        return self._storages

    @property
    def differentiated(self) -> Differentiated:
        """The passes in which the trainer's code took gradients itself."""
        self.settle()
        return self._differentiated

    def inside(self, task: int, result: Any) -> None:
        """A call was made in a backward pass that the trainer's code makes itself. task: its number."""
        self.gave_gradients = True
        self.differentiated.inside(task, result)

    def before(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Noting | None:
        """Note what a call is about to read; None if it is not one to be written down."""
        if operator.name == ANSWER:
            return operator, None, None
        if operator.silent:
            return None
        with self._lock:
            if operator.name in DATA_FACTORIES and operator.mutable and self._fills_what_nobody_knows(args):
                return None
            if operator.asks:
                self._asks(operator, args)
            if operator.mutable:
                self.clipping.wrote()
            if operator.replayable or operator.mutable or tensors_of((args, *kwargs.values())):
                self.settle()  # what makes no value, and of nothing, has no place among the others
                self.notes.begin_stretch()
            try:
                again = DETACH_IS_SEEN_TWICE and operator.name == "detach" and id(args[0]) == self.notes.shown
                if again and (value := self._known.held_as(args[0])) is not None:
                    return operator, ((), ()), value
                noted = self._scribe.arguments(args, kwargs)
                target: Value | None = None
                if operator.mutable and args and isinstance(args[0], Tensor):
                    target = self.value_of(args[0])
                    self._writes.before(target, args[0], operator.turns)
            except Unseen:
                self._keywords = bool(kwargs)
                self._scribe.rest(args, kwargs)
                self._scribe.before_exchange(operator, args)
                return operator, None, None
            return operator, noted, target

    def _asks(self, operator: Operator, args: tuple[Any, ...]) -> None:
        if operator.name not in ASKS_BY_ITSELF or args[1] is args[0]:
            self.replacing.asked(args[0])

    def _fills_what_nobody_knows(self, args: tuple[Any, ...]) -> bool:
        """Does a call fill memory with random numbers that nobody has read so far? What is there is data, and that is all."""
        tensor = args[0] if args and type(args[0]) is Tensor else None
        if tensor is None or not is_plain(tensor) or self._known.by_storage.get(memory_of(tensor)) or not self.notes.is_new(tensor):
            return False
        self._opaques.take(tensor)
        return True

    def after(self, noting: Noting, args: tuple[Any, ...], result: Any) -> None:
        """Write down the call that `before` was told of."""
        if noting[0].name == ANSWER and not is_doubtful(result):
            return
        if result is False and (invalid := refused_parameter()) is not None:
            self.refused(invalid[1:], ValueError(f"invalid values in its parameter {invalid[0]}"))
        with self._lock:
            operator, noted, target = noting
            if DETACH_IS_SEEN_TWICE and operator.name == "detach":
                self.notes.shown = id(result) if target is None else 0
            if operator.name != ANSWER:
                self._scribe.after(operator, noted, target, args, result, self._keywords)
            else:
                self._has_gone_to_the_host(args[0], result)
            if self._known.length > self._due:
                self.collect()

    def _has_gone_to_the_host(self, tensor: Tensor, answer: object) -> None:
        self.questions.answered(tensor)
        if not (type(answer) is bool and self._doubts.is_about_finite(tensor, self.notes.maker)):
            self.settle()
            self.notes.begin_stretch()
            self._answered(tensor, answer)

    def _answered(self, tensor: Tensor, answer: object) -> None:
        with contextlib.suppress(Unseen):
            if refuses(tensor):
                return
            value = self.value_of(tensor) if node_of(tensor) is not None else self.find(tensor)
            if value is not None and type(answer) is float:
                self._note_number(value)
            if value is not None:
                self._doubts.answered(value, answer, self.callers.caller)

    def _note_number(self, value: Value) -> None:
        """A number that is not finite goes to the host: who calculates with it later calculates with what made this."""
        with contextlib.suppress(LookupError):
            program, tensors = self.program(value)
            if program.calls and tensor_bytes(tensors) <= REMEMBERED:
                self.numbers.append((program, tensors))

    def came_out(self, name: str, tensors: Iterable[Tensor]) -> bool:
        """Note what code has made that is compiled, and that nobody recorded; False if all of it was. name: of the code."""
        unknown = [tensor for tensor in tensors if is_plain(tensor) and self.known.find(tensor) is None]
        for tensor in unknown:
            self._scribe.note_opaque(tensor, name)
        return bool(unknown)

    # -- tensors ---------------------------------------------------------------------------------------------------------

    def find(self, tensor: Tensor) -> Value | None:
        """Return what the tape knows of a tensor, None if it never saw it or something else has written to it since."""
        return self.known.find(tensor) if is_plain(tensor) else None

    def computed(self, tensor: Tensor) -> Value | None:
        """Return what the tape knows of a tensor that was computed outside of a module; None for one that came in, or out of a module."""
        value = self.find(tensor)
        if value is None and self._opaques.has(tensor):
            value = self.leaves.number(tensor)
        return None if value is None or (value.leaf is not None and value.leaf.origin != "opaque") else value

    def value_of(self, tensor: Tensor) -> Value:
        """Return what the tape knows of a tensor; a tensor that it does not know becomes a leaf."""
        self.settle()
        return self._scribe.value_of(tensor)

    def made_by_backward(self, tensors: Iterable[Tensor]) -> None:
        """A backward pass has ended: the gradients of these are none of the batch's data, whoever reads them."""
        for tensor in tensors:
            if (grad := tensor.grad) is not None and is_plain(grad) and grad.layout is torch.strided:
                self._scribe.note_opaque(grad, "backward")

    def updated(self, weights: Iterable[Tensor]) -> None:
        """An optimizer has written to these, unseen: under no name is what lies there what was known of it. `p.data` counts no write to p,
        nor does what else a trainer has laid in the memory of its weights."""
        with self._lock:
            if not (self._known.by_storage or self.notes.pending):
                return
            ends: dict[int, int] = {}
            for weight in weights:
                if weight.requires_grad and is_plain(weight):
                    memory = weight.untyped_storage()
                    ends[memory.data_ptr()] = memory.data_ptr() + memory.nbytes()
            for storage in self._known.by_storage.keys() & ends.keys():
                self._known.supersede(storage)
            self.notes.overwritten(Spans(ends))

    def known_as(self, tensors: Iterable[Tensor]) -> list[int] | None:
        """Return the ids of values, None if one of them is not known."""
        found = [self.find(tensor) for tensor in tensors]
        return None if None in found else [value.id for value in found if value is not None]

    # -- reading ---------------------------------------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        """Bytes that may be held."""
        return self.account.budget

    @property
    def limits(self) -> tuple[int, int]:
        """The bytes of the largest tensor that may be held, and of the largest of three dimensions and more."""
        return self._known.limits

    @property
    def held(self) -> int:
        """Bytes that are held by reference."""
        return self.account.held

    def tensor(self, value: int) -> Tensor | None:
        """Return the tensor of a value, by its id, if it is held."""
        known = self.known.by_id.get(value)
        return known.tensor if known is not None else None

    def read_for(self, tensor: Tensor) -> list[Tensor]:
        """Return what the call has read that made a tensor, as far as that is held."""
        value = self.find(tensor)
        entry = None if value is None else self.entries.get(self.known.made_by.get(value.id, -1))
        return [held for one in (entry.reads() if entry is not None else ()) if (held := self.tensor(one)) is not None]

    @property
    def values(self) -> dict[int, Value]:
        """What is known of values, by id."""
        return self.known.by_id

    def places(self, values: Iterable[int]) -> dict[int, Address]:
        """Return where values lay when they were read; what was written to since is held as a copy, somewhere else."""
        return {value: self.known.by_id[value].key[:4] for value in values}

    @property
    def length(self) -> int:
        """How many values were numbered so far."""
        return self.known.length

    @property
    def entries(self) -> dict[int, Record]:
        """The calls by number, in order."""
        return self.log.entries

    @property
    def glimpses(self) -> dict[tuple[str, CodeType], Glimpse]:
        """What was seen of loss functions since the last `forget`."""
        return self.callers.glimpses

    @property
    def taken(self) -> dict[str, Taken]:
        """What their kernels were given, by argument."""
        return self.callers.taken

    @property
    def beside(self) -> dict[Role, Tensor]:
        """What stood beside these functions that they need not read, by role, where nobody is known to have written to it."""
        return {role: tensor for role, taken in self.callers.beside.items() if (tensor := taken.content()) is not None}

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """A GradScaler that multiplied something since the last `forget`."""
        return self.callers.scaler

    @property
    def current_module(self) -> str:
        """The part of the model that calls are made in, set by a second look while it runs inside a module."""
        return self.notes.module

    @current_module.setter
    def current_module(self, path: str) -> None:
        self.notes.module = self._log.module = path

    def is_of_ranks(self, leaf: int, gradient: Tensor) -> bool:
        """Is a leaf the memory of a gradient, as backward left it, or what a collective has written to?"""
        value, part = self.values.get(leaf), local(gradient)
        return value is not None and (self.agreed.holds(value.storage) or (part is not None and value.storage == memory_of(part)))

    def is_of_all(self, leaf: int) -> bool:
        """Is a leaf what a collective over all ranks of the run has written?"""
        value = self.values.get(leaf)
        return value is not None and self.agreed.holds(value.storage, by_all=True)

    def tag(self, name: str, tensor: Tensor) -> None:
        """Name a tensor where its variable does not tell what it means."""
        value = self.value_of(tensor)
        self.tags[name] = value.id

    def program(self, output: Value) -> tuple[Program, dict[int, Tensor]]:
        """Return the slice that makes `output`, cut where tensors are missing, and the tensors of its leaves.

        Raises LookupError if the output itself was not kept and cannot be recomputed.
        """
        self.settle()
        return self._slicing.program(output, self.tags)

    def together(self, outputs: Iterable[Value]) -> Part:
        """Return the same of several, but for those of which it would raise; its output is the last of them."""
        self.settle()
        return self._slicing.together(list(outputs), self.tags)

    def behind(self, leaves: Iterable[Leaf]) -> dict[int, Part]:
        """Return what was differentiated for gradients that the trainer's code took itself. leaves: of a program that read them."""
        read = ((leaf.id, self.differentiated.read.get(leaf.id)) for leaf in leaves)
        parts = ((leaf, self._part_of(found)) for leaf, found in read if found is not None)
        return {leaf: part for leaf, part in parts if part is not None}

    def seeds_behind(self, leaves: Iterable[Leaf]) -> dict[int, Part]:
        """Return what made the first bad number by which such a gradient was weighted, where there is one. leaves: as above."""
        found: dict[int, Part] = {}
        for leaf in leaves:
            made = self.differentiated.read.get(leaf.id)
            for seed in made.seeds if made is not None else ():
                content = None if seed is None else self.tensor(seed)
                if seed is not None and content is not None and first_nonfinite(content) is not None:
                    with contextlib.suppress(LookupError):
                        found.setdefault(leaf.id, self._slicing.program(self.values[seed], self.tags))
        return found

    def led_to(self, node: Any) -> tuple[Part | None, ...]:
        """Return what the trainer's calls did to make each argument of a custom function. node: of its backward."""
        found = (self.storages.made_by(*edge) for edge in node.next_functions)
        return tuple(None if value is None else self._led_to(value) for value in found)

    def _led_to(self, value: Value) -> Part | None:
        with contextlib.suppress(LookupError):
            return self._slicing.program(value, self.tags)
        return None

    def behind_gradient(self, gradient: Tensor) -> Part | None:
        """Return the same for one that nobody has read."""
        found = self.differentiated.of(gradient) if is_plain(gradient) else None
        return None if found is None else self._part_of(found)

    def _part_of(self, found: Pass) -> Part | None:
        return program_of(found, lambda value: self._slicing.program(self.values[value], self.tags), self.tensor)

    def forget(self, everything: bool = False, over: Collection[int] | None = None, roots: Collection[int] = ()) -> set[Address]:
        """Drop what belongs to a finished backward pass; small values without gradient stay, so that a batch prepared once
        (rewards, advantages) is still explained in its later micro-batches, and so does what waits for a backward pass of its own.

        over: the values that were differentiated, and cannot be again; None if they are not known, and nothing waits. roots: those that
        can be. Returns where the leaves lie that what waits reads.
        """
        try:
            if not (everything or self.broken):
                self.settle()
        finally:
            left = self._forget(everything or bool(self.broken), over, roots)
        return left

    def _forget(self, everything: bool, over: Collection[int] | None, roots: Collection[int]) -> set[Address]:
        if everything:
            self.notes.forget()  # nobody will ask for that any more
        self._pass_by()
        return self._forget_values(over, roots, everything, sequence_number())

    def _pass_by(self) -> None:
        """A backward pass is over: what was seen beside the calls before it belongs to that."""
        self.callers.forget()
        self._differentiated.forget()
        self.broken = ""
        self.clipping.forget()
        self.questions.forget()
        self.replacing.has_passed()
        self._opaques.forget()
        self.agreed.forget()
        self.trailing.forget()
        self.notes.has_passed()

    def _forget_values(self, over: Collection[int] | None, roots: Collection[int], everything: bool, number: int) -> set[Address]:
        # where nothing was differentiated, what went into calls that cannot be made again is still behind the next loss
        read = self._log.forget(self.tags.values(), over, self._read_outside() if over is not None and not over else ())
        if everything:
            self._log.clear()
        self._went_through(over=True, waiting=bool(read))
        self._doubts.settle(over is not None and not everything, roots, number)
        if len(self._log.entries) > self._lasting:
            self.collect()  # between two large tensors, small ones that nobody needs keep the allocator from using their memory again
            self._lasting = 4 * PATIENCE + 2 * len(self._log.entries)
        return {value.key[:4] for i in read if (value := self._known.by_id.get(i)) is not None and value.leaf is not None}

    def stretch(self, whole: bool = False) -> list[Raw] | None:
        """Return the calls since the last backward pass, if all of them wait to be understood, and nothing else is known of them.

        whole: with those that are left of the step before.
        """
        quiet = not (self.broken or self.tags or self.numbers or self.in_doubt or self.callers.scaler or self.callers.taken)
        return self.notes.stretch(whole) if quiet and not self._differentiated.any else None

    @property
    def numbered(self) -> int:
        """How many values were numbered, calls that wait left out."""
        return self._known.length

    def _begins(self) -> Sequence[Later]:
        """Note how many are when the calls of the running stretch are written down, without and with those of the step before."""

        def begin(whole: bool) -> None:
            self.begun[whole] = self._known.length

        return [Later(partial(begin, whole), lambda: None) for whole in (False, True)]

    @contextlib.contextmanager
    def as_read(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Take tensors for what they were when they were read, although they were written to since: they were that when it was needed."""
        known = [(value, tensor) for tensor in tensors if (value := self._known.at(tensor)) is not None and value.tensor is tensor]
        versions = [value.version for value, _ in known]
        for value, tensor in known:
            value.version = version_of(tensor)
        try:
            yield
        finally:
            for (value, _), version in zip(known, versions, strict=True):
                value.version = version

    def later(self, act: Callable[[], None], void: Callable[[], None], holds: Sequence[Tensor]) -> None:
        """Have something done once all calls so far are written down, or something else if they never will be. holds: tensors that it asks
        about."""
        self.notes.later(Later(act, void, holds))

    def has_passed(self, over: Callable[[], Collection[int] | None]) -> None:
        """A backward pass is over whose loss was not written down, and may be later, by whoever asks for it. over: the values that it has
        differentiated then, as in `forget`."""
        self._pass_by()
        self.notes.graphs_are_freed()
        number = sequence_number()
        self.notes.later(Later(lambda: self._forget_values(over(), (), False, number), lambda: self._doubts.settle(True, (), number)))

    def mark(self) -> SoFar:
        """Return how many calls there were so far, for whoever asks later."""
        if not self.notes.pending:
            return SoFar(self._log.count)
        mark = SoFar(None, self.settle)
        count = partial(self._resolve, mark)
        self.notes.later(Later(count, count))
        return mark

    def _resolve(self, mark: SoFar) -> None:
        mark.number = self._log.count

    def begin_stretch(self) -> None:
        """What is called from now on belongs to the next loss."""
        self.notes.begin_stretch()

    def close(self, done: Set[int]) -> None:
        """A step is over in which nothing was wrong: forget what was recorded in it that nobody has asked for, and may come back for. What
        was called since the last stretch began stays.

        done: calls that it has differentiated and not written down, by their `identity`.
        """
        with self._lock:
            if self._understands or not self.notes.pending:
                return
            self.clipping.forget()
            self.questions.forget()
            left = self.notes.close(done)
            if left.stuck:
                self._understand()
            for address in left.trailed:
                self._known.supersede(address)
            if left.before:
                self._understand(left.before)
            if self._known.by_storage:
                self._known.unfind(left.written)
            if self._known.length > self._over:  # some did not wait
                self._forget_values((), (), False, sequence_number())
            for one in left.later:
                one.void()

    def let_go_of_gradients(self) -> None:
        """The first step is over: what a clip has read in it need not be held until the next."""
        with self._lock:
            if not self._understands and self.notes.pending:
                self._known.unfind(self.notes.let_go_of_lasting())

    def leave_room(self) -> None:
        """Drop everything if half of the budget is not free: the next loss matters more than what prepared the last one."""
        if self.held > self.budget // 2:
            self.log.clear()
            self.doubts.settle(kept=False)

    def collect(self) -> None:
        """Drop what nobody can ask for any more, where no backward pass says that it is over."""
        self._log.collect(self._named(), self._read_outside(), max(self._patience, self._usual), self._log.count)
        self._went_through(over=False)

    def still_read(self) -> set[Address] | None:
        """Return where the leaves lie of all that somebody may still ask for; None if finding out is not worth the time."""
        reach = self.log.reach()
        if reach > REACH * (self.length - self._gone_through):
            return None
        self._gone_through = self.length
        self.log.collect(self._named(), self._read_outside(), max(self._patience, self._usual), reach)
        return {value.key[:4] for value in self.values.values() if value.leaf is not None}

    def _named(self) -> list[int]:
        return [*self.tags.values(), *self._differentiated.roots()]

    def _read_outside(self) -> list[int]:
        """What calls have read that cannot be made again, what custom functions have made, and what was written to the weights of models
        that nobody trains."""
        calls = (*self._opaques.calls(), *self.leaves.opaque.values())
        return [*self.leaves.forward.values(), *(value for call in calls for value in call.read), *self.trailing.written(self._known)]

    def _went_through(self, over: bool, waiting: bool = False) -> None:
        """Decide when to look again. over: a backward pass was, and what came since the one before is what may come until the next.
        waiting: there is something that it has not taken with it."""
        self._known.forget_histories(over and not waiting)
        self._slicing.forget()
        self.tags = {name: i for name, i in self.tags.items() if i in self._known.by_id}
        self.leaves.sweep()
        self._differentiated.keep(self._known.by_id)
        self._opaques.sweep()
        if over:
            self._usual = max(self._known.length - self._over, self._usual - self._usual // 8)
            self._over = self._known.length
        self._gone_through = self._known.length
        self._due = self._known.length + max(self._patience, 2 * len(self._known.by_id), 2 * self._usual if over else 0)
