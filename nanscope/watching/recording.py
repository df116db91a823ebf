"""One backward pass as it was recorded: its program, its edge to the model, and flags that stay on the device until somebody asks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nanscope.capture import custom, kernels
from nanscope.capture.account import Balance, Holding
from nanscope.capture.custom import Backward
from nanscope.capture.depth import Heard
from nanscope.capture.differentiated import Part
from nanscope.capture.entries import Taken
from nanscope.capture.failsafe import Failsafe
from nanscope.capture.feeding import feeding
from nanscope.capture.gauge import Gauged
from nanscope.capture.glue import Behind, Between, Glue, behind, betweens, glue_before, glue_within, with_gradients
from nanscope.capture.hooks import Hook, hooks_of
from nanscope.capture.modules import Address, ModuleCall, place_of, tensors_in
from nanscope.capture.parts import Parts
from nanscope.capture.reading import Reading
from nanscope.capture.recomputing import is_checkpoint
from nanscope.capture.tape import Tape
from nanscope.capture.unseen import unseen
from nanscope.frameworks.live import Glimpse
from nanscope.program.local import is_plain, local
from nanscope.program.numbers import is_finite
from nanscope.program.program import Program, join
from nanscope.roles import Role
from nanscope.torch_inside import compiles_backward
from nanscope.watching.mending import Gradients, Mends
from nanscope.watching.scale import LossScale
from nanscope.watching.within import Seen, is_known, seen_within


def finite_batch(recording: Recording) -> list[Tensor]:
    """Return, for a kernel that drops NaN, whether each part of its batch is finite: bool scalars, still on the device."""
    found = kernels.kernel_of(recording.glimpses)
    if found is None or not found[0].drops_nan:
        return []
    parts = [recording.taken[name].content() for name, _ in found[0].tensors if name in recording.taken]
    return [is_finite(part) for part in parts if part is not None and part.is_floating_point()]


HIDDEN = -1  # stands among the leaves for what a kernel was given of the model
WRITTEN_DOWN = frozenset({"program", "tensors", "places", "others", "glue", "behind", "made_within", "numbers", "opaque", "led"})


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A loss that is not written down so far. root: what is differentiated. leaves: what its program reads; edges: those that have a
    gradient. been: where it lies what the pass goes through, and that. still_read: where it lies what another one may come to. made: calls
    of its program, by identity. ask: has it written down."""

    root: Tensor
    leaves: tuple[Tensor, ...]
    edges: tuple[Tensor, ...]
    been: dict[Address, Tensor]
    still_read: Set[Address]
    made: frozenset[int]
    ask: Callable[[], None]


@dataclass(slots=True)
class Recording:
    """One backward pass: the program that led to it, and what is needed to look closer.

    program: None if the loss was not recorded. flags: bool scalars, true where the loss or a gradient at its edge is finite; they stay on
    the device until somebody asks. grads: leaf id → gradient. scale: what the loss was multiplied by. glimpses: what was seen of the
    frameworks' loss functions. backwards: of custom autograd functions, where they may have spoilt a gradient. taken: arguments of a kernel
    among the functions, by name. given: as `flags`, of a batch that a kernel was given which drops NaN. hooks: none once it is over.
    looked: somebody has asked. holding: what is on the account for it. micro_batch: which one of its step, from 1. places: where the leaves
    lay when they were read. frozen: calls of models without gradient, which outlast this. seeds: gradients that backward was given to begin
    with; handed: what made a bad one of these, where that was seen. within: what was seen of the model before its graph was differentiated.
    others: hooks of the trainer's on gradients of the loss program and of the glue, by value. glue: what led to the arguments of the
    models. aside: where it was given some, what leads to the value that it began at: of no use unless that is bad itself. behind: leaf id →
    what was differentiated for it, where it is a gradient that the code of the trainer took itself. heard: what was heard inside its
    models, in a deep step. made_within: what the forwards of custom functions did, by where their results lie and what they saved, and what
    made those that were asked for a gradient after that. numbers: what made those that went to the host before it and were not finite.
    opaque: what is known of the calls that opaque leaves came out of. led: leaf id → what led to the arguments of the custom function that
    returned it; returned: the gradients that its backward gave for them. left_out: what the code did without it, where it is a term or a
    loss that was not differentiated while another was. tape: until backward has ended. beside: tensors of the batch that stood beside the
    loss, by role. gauged: what the gauge computed of it; reading: what that says, once it is on the host. mends: who says what goes on in
    the place of a bad gradient, None where nobody is to. unwritten: its loss is not written down so far; whoever reads what tells of it has
    that done.
    """

    program: Program | None
    tensors: dict[int, Tensor]
    loss: Tensor
    calls: list[ModuleCall]
    scale: LossScale | None
    flags: list[Tensor] = field(default_factory=list)
    grads: dict[int, Tensor] = field(default_factory=dict)
    examined: bool = False
    given: list[Tensor] = field(default_factory=list)
    glimpses: tuple[Glimpse, ...] = ()
    taken: dict[str, Taken] = field(default_factory=dict)
    backwards: list[Backward] = field(default_factory=list)
    hooks: list[RemovableHandle] = field(default_factory=list)
    looked: bool = False
    holding: Holding | None = None
    micro_batch: int = 1
    places: dict[int, Address] = field(default_factory=dict)
    frozen: list[ModuleCall] = field(default_factory=list)
    seeds: tuple[Tensor, ...] = ()
    handed: Recording | None = None
    within: Seen | None = None
    others: dict[int, list[Hook]] = field(default_factory=dict)
    glue: tuple[Glue, ...] = ()
    aside: tuple[Program | None, dict[int, Tensor]] = (None, {})
    behind: dict[int, Part] = field(default_factory=dict)
    heard: Heard | None = None
    made_within: dict[Address, Glue] = field(default_factory=dict)
    numbers: tuple[tuple[Program, dict[int, Tensor]], ...] = ()
    opaque: dict[int, Behind] = field(default_factory=dict)
    led: dict[int, tuple[Part | None, ...]] = field(default_factory=dict)
    left_out: str = ""
    returned: dict[int, Gradients] = field(default_factory=dict)
    tape: Tape | None = None
    mends: Mends | None = None
    beside: dict[Role, Tensor] = field(default_factory=dict)
    gauged: Gauged | None = None
    reading: Reading | None = None
    unwritten: Unwritten | None = None
    _leaves: dict[int, int] = field(default_factory=dict)  # number of an edge that was watched before it was written down → leaf

    @staticmethod
    def recognised(loss: Tensor, calls: list[ModuleCall], unwritten: Unwritten, **known: Any) -> Recording:
        """Return one whose loss is not written down: it will be when somebody asks. known: its other fields."""
        recording = Recording(None, {}, loss, calls, None, **known)
        recording.unwritten = unwritten
        for name in WRITTEN_DOWN:
            delattr(recording, name)
        return recording

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in WRITTEN_DOWN:
                raise AttributeError(name)
            self._write_down_now()
            return getattr(self, name)

    def _write_down_now(self) -> None:
        if self.unwritten is not None:
            self.unwritten.ask()
        self.lose()

    def lose(self) -> None:
        """What was noted of its loss is gone, if it was not written down."""
        if self.unwritten is not None:
            self._fill(None, {}, {})

    def write_down(self, tape: Tape, failsafe: Failsafe) -> None:
        """All that was called before it is known now: take its program, and what lies between its models."""
        unwritten = self.unwritten
        if unwritten is None:
            return
        self._fill(None, {}, {})
        with tape.as_read(unwritten.leaves):
            with contextlib.suppress(LookupError):
                program, tensors = tape.program(tape.value_of(unwritten.root))
                self._fill(program, tensors, tape.places(tensors))
            mine, self.tape = self.tape, tape
            failsafe("glue", self.look_between, tape)
            self.tape, self.numbers = mine, ()
        if self.holding is not None:
            self.holding.add(*self.tensors.values(), needed=True)
            self._hold_between()
        leaves = {id(tensor): leaf for leaf, tensor in self.tensors.items()}
        edges = enumerate(unwritten.edges)
        self._leaves = {HIDDEN - 1 - n: leaves[id(tensor)] for n, tensor in edges if id(tensor) in leaves}
        self.grads = {self._leaves.get(number, number): grad for number, grad in self.grads.items()}
        self.returned = {self._leaves.get(number, number): grads for number, grads in self.returned.items()}

    def _fill(self, program: Program | None, tensors: dict[int, Tensor], places: dict[int, Address]) -> None:
        self.unwritten = None
        self.program, self.tensors, self.places = program, tensors, places
        self.others, self.glue, self.behind, self.made_within, self.numbers, self.opaque, self.led = {}, (), {}, {}, (), {}, {}

    def is_plain(self) -> bool:
        """Is there nothing about it but a loss, its program, the models that it comes from, and calls that cannot be made again?"""
        more = (self.behind, self.made_within, self.numbers, self.taken, self.given, self.seeds)
        return not any(more) and self.aside[0] is None and self.within is None and self.scale is None and self.loss.numel() == 1

    @property
    def leaves(self) -> list[Tensor]:
        """What its program reads, where there is one; to ask has nothing written down."""
        if self.unwritten is not None:
            return list(self.unwritten.leaves)
        return list(self.tensors.values()) if self.program is not None else []

    def look_between(self, tape: Tape) -> None:
        """Take from the tape what lies between the models, and note the hooks on the tensors of the loss."""
        self.glue = glue_before(tape, self.all_calls())
        parts = betweens(self.glue)
        programs = [*([] if self.program is None else [self.program]), *(part.program for part in parts)]
        values = (out for program in programs for call in program.calls for out in call.outs if out is not None)
        held = {value: tensor for value in values if (tensor := tape.tensor(value)) is not None}
        held |= {value: tensor for own in (*(part.tensors for part in parts), self.tensors) for value, tensor in own.items()}
        self.others = {value: found for value, tensor in held.items() if (found := hooks_of(tensor))}
        self.behind = tape.behind(self.program.leaves) if self.program is not None else {}
        self.tape = tape
        functions = dict(self._of_functions())
        self.made_within = glue_within(tape, (*functions.values(), *self._begun()))
        self.led = {leaf: tape.led_to(tensor.grad_fn) for leaf, tensor in functions.items()}
        self.numbers = tuple(tape.numbers)
        read = [self.program] if self.program is not None else []
        read += [glue.program for glue in self.made_within.values()]
        leaves = dict.fromkeys(leaf.id for program in read for leaf in program.leaves if leaf.id in tape.leaves.opaque)
        self.opaque = {leaf: behind(tape, tape.leaves.opaque[leaf]) for leaf in leaves}

    def look_at_seeds(self, tape: Tape) -> None:
        """Take from the tape what made a gradient that backward is given to begin with, and that may be bad: the trainer's code may have
        differentiated its loss by itself."""
        for seed in self.seeds:
            value = None if self.handed is not None or (seed.is_cpu and bool(is_finite(seed))) else tape.find(seed)
            with contextlib.suppress(LookupError):
                if value is not None:
                    self.handed = Recording(*tape.program(value), seed, self.calls, None, frozen=self.frozen)
                    self.handed.look_between(tape)
                    self.handed.tape = None

    def _of_functions(self) -> Iterator[tuple[int, Tensor]]:
        """What custom functions have returned to the loss, by leaf."""
        for leaf in self.program.leaves if self.program is not None else ():
            node = self.tensors[leaf.id].grad_fn if leaf.origin == "opaque" and leaf.diff else None
            if node is not None and (custom.is_custom(node) or custom.is_of_ranks(node)):
                yield leaf.id, self.tensors[leaf.id]

    def _begun(self) -> Iterator[Tensor]:
        """What a gradient begins at that is no weight: an attack on a model has computed it, out of earlier gradients."""
        parts = [(between.program, between.tensors) for between in betweens(self.glue)]
        parts += [] if self.program is None else [(self.program, self.tensors)]
        for program, tensors in parts:
            yield from (tensors[leaf.id] for leaf in program.leaves if leaf.origin == "data" and leaf.diff)
        given = (tensor for call in self.calls for tensor in tensors_in([call.args, call.kwargs]))
        yield from (tensor for tensor in given if is_plain(tensor) and tensor.requires_grad and tensor.is_leaf)

    def opened(self, leaf: int) -> bool:
        """Let the program go on into what a leaf was made by, a custom function or what nobody wanted a gradient of; False if that was not
        seen."""
        glue = self.made_within.get(self.places.get(leaf) or place_of(self.tensors[leaf]))
        if glue is None or self.program is None or not glue.is_whole() or glue.program.leaf(leaf) is not None:
            return False  # what it was made by may begin at it: both lie in the same place
        made = glue.leading_to(leaf)
        if is_checkpoint(self.tensors[leaf].grad_fn):  # what it called without a gradient, it calls once more with one
            given = max((part[0].output for part in self.led.get(leaf, ()) if part is not None), default=-1)
            made = with_gradients(made, given)
        joined = join([made, self.program]).slice()
        held = {**glue.tensors, **self.tensors}
        self.program, self.tensors = joined, {one.id: held[one.id] for one in joined.leaves}
        self.places = {**glue.places, **self.places}
        return True

    def all_glue(self) -> tuple[Glue, ...]:
        """Return what led to the arguments of the models, gone on from what is bad there and was made before a gradient was asked of it."""
        read = (tensor for call in self.all_calls() for tensor in tensors_in([call.args, call.kwargs]))
        given = {place_of(tensor): tensor for tensor in read if is_plain(tensor)}
        known = {glue.place for glue in self.glue}
        begun = (one for place, one in self.made_within.items() if place in given and place not in known and one.is_whole())
        return (*map(self._gone_on, self.glue), *(one for one in begun if not bool(is_finite(given[one.place]))))

    def _gone_on(self, glue: Glue) -> Glue:
        if self.made_within.keys().isdisjoint(glue.between.places.values()):
            return glue
        data = [leaf.id for leaf in glue.program.leaves if leaf.origin == "data" and leaf.diff and glue.places[leaf.id] in self.made_within]
        bad = [leaf for leaf in data if glue.is_whole() and not bool(is_finite(glue.tensors[leaf]))]
        for leaf in bad:
            within = self.made_within[glue.places[leaf]]
            if within.is_whole() and within.program.leaf(leaf) is None:
                program = join([within.leading_to(leaf), glue.program]).slice()
                held = {**within.tensors, **glue.tensors}
                tensors = {one.id: held[one.id] for one in program.leaves}
                glue = replace(glue, between=Between(program, tensors, {**within.places, **glue.places}))
        return glue

    def watch(self, failsafe: Failsafe, account: Balance, parts: Parts | None = None) -> None:
        """Hook the edge: the gradient of every leaf, what a kernel was given, custom functions. account: of what is held for it.

        parts: of a model that trains on several ranks.
        """
        known = parts is not None and is_known(self.loss, parts)
        self.holding, limit = Holding(account), account.budget // 64  # bytes of a gradient that is kept
        taken = [one.tensor for one in self.taken.values() if one.tensor is not None]
        handed = () if self.handed is None else self.handed.tensors.values()
        self.holding.add(self.loss, *self.leaves, *self.aside[1].values(), *self.seeds, *handed, *taken, needed=True)
        self.beside = {role: tensor for role, tensor in self.beside.items() if self._holds(tensor)}
        if self.unwritten is None:
            self._hold_between()
        self.flags += [is_finite(self.loss), *map(is_finite, self.seeds)]
        if parts is not None:
            failsafe("within", self._look_within, parts, known)
        if compiles_backward():
            return  # what comes out of it is looked at when the optimizer steps
        failsafe("kernel", self._watch_kernel, failsafe, limit)
        for leaf, tensor in self._edges():
            self._watch_leaf(tensor, leaf, failsafe, limit)
            node = tensor.grad_fn
            if node is not None and custom.is_custom(node):
                self._watch_custom(node, leaf, failsafe, limit)
            elif node is not None and custom.is_of_ranks(node):
                self._watch_ranks(node, leaf, failsafe, limit)

    def _edges(self) -> list[tuple[int, Tensor]]:
        """The leaves that have a gradient; of what is not written down they have numbers of their own."""
        if self.unwritten is not None:
            return [(HIDDEN - 1 - n, tensor) for n, tensor in enumerate(self.unwritten.edges)]
        leaves = self.program.leaves if self.program is not None else ()
        return [(leaf.id, self.tensors[leaf.id]) for leaf in leaves if leaf.diff and self.tensors[leaf.id].requires_grad]

    def _hold_between(self) -> None:
        """Take on account what lies between the models; what has no room is let go of."""
        whole = {id(one) for one in betweens(self.glue) if self._holds(*one.tensors.values())}
        alone = (glue if id(glue.between) in whole else glue.apart() for glue in self.glue)
        self.glue = tuple(glue for glue in alone if id(glue.between) in whole or self._holds(*glue.tensors.values()))
        self.behind = {leaf: part for leaf, part in self.behind.items() if self._holds(*part[1].values())}
        held = self.opaque.items()
        self.opaque = {leaf: one for leaf, one in held if self._holds(*(t for glue in one.given for t in glue.tensors.values()))}
        self.made_within = {place: one for place, one in self.made_within.items() if self._holds(*one.tensors.values())}
        led = self.led.items()
        self.led = {leaf: parts for leaf, parts in led if self._holds(*(t for part in parts if part is not None for t in part[1].values()))}

    def _look_within(self, parts: Parts, known: bool) -> None:
        spans = parts.take()
        if known and not bool(self.flags[0]):
            leaves = {leaf.id for leaf in self.program.leaves if leaf.diff} if self.program is not None else set()
            outputs = [tensor for number, tensor in self.edge().items() if number in (*leaves, HIDDEN)]
            self.within = seen_within(outputs if self.program is not None else [self.loss], self.calls, spans)

    def open_forward(self) -> None:
        """Take up the program of a value that is bad and that backward was given a gradient for: its forward pass tells why."""
        program, tensors = self.aside
        if program is not None and not bool(is_finite(self.loss)) and all(local(tensor) is not None for tensor in tensors.values()):
            self.program, self.tensors = program, tensors

    def all_calls(self) -> list[ModuleCall]:
        """Return all calls of models that it may have come of, in order."""
        return sorted([*self.frozen, *self.calls], key=lambda call: call.number)

    def inputs(self) -> list[Tensor]:
        """Return what the pass differentiates for and is no weight, as it is for an attack on a model, or a penalty."""
        given = [tensor for call in self.calls for tensor in tensors_in([call.args, call.kwargs])]
        if self.unwritten is not None:
            read = [*self.unwritten.been.values(), *given]
        else:
            read = [*self.tensors.values(), *given, *(tensor for one in betweens(self.glue) for tensor in one.tensors.values())]
        others = [one for one in read if not isinstance(one, nn.Parameter)]
        return [one for one in others if is_plain(one) and one.requires_grad and one.is_leaf]

    def been_through(self) -> tuple[set[Address], list[int]]:
        """Return where it lies what the pass goes through: what the loss reads, and what led to the models behind that; and its values."""
        found, values = set(self.places.values()), []
        for call in reversed(self.calls):
            if not found.isdisjoint(call.outputs):
                given = {place_of(tensor) for tensor in tensors_in([call.args, call.kwargs])}
                between = [glue for glue in self.glue if glue.place in given]
                found |= given.union(*(glue.places.values() for glue in between))
                values += [glue.value for glue in between]
        return found, values

    def close(self) -> None:
        """Take the hooks off: what comes later belongs to another backward pass."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.tape = None
        if self.mends is not None:
            self.mends.mending.close()

    def let_go(self) -> None:
        """Take everything off the account: nobody will ask any more."""
        self.close()
        for call in self.calls:
            call.let_go()
        if self.holding is not None:
            self.holding.close()

    def is_whole(self) -> bool:
        """Is all that the program reads still there? A sharded model lets go of the memory of its weights when backward is over."""
        return all(local(tensor) is not None for tensor in self.leaves)

    def forget_program(self) -> None:
        """What it reads is gone."""
        self.program, self.tensors = None, {}
        self.backwards.clear()

    def _holds(self, *tensors: Tensor | None) -> bool:
        return self.holding is not None and self.holding.add(*(tensor for tensor in tensors if tensor is not None))

    def _watch_leaf(self, tensor: Tensor, leaf: int, failsafe: Failsafe, limit: int) -> None:
        def look(grad: Tensor | None) -> None:
            if grad is None or not self.hooks:  # None: nothing flows through there
                return
            with unseen():
                self.flags.append(is_finite(grad))
                part = local(grad)
                if part is not None and part.numel() * part.element_size() <= limit and self._holds(part):
                    # a tensor that is held is not taken over by the parameter, but copied
                    self.grads[self._leaves.get(leaf, leaf)] = part.detach()

        told = failsafe.door("gradient-hook", look)

        def answer(grad: Tensor) -> Tensor | None:
            told(grad)
            return None if self.mends is None or not self.hooks else self.mends.edge(leaf, grad)

        self.hooks.append(tensor.register_hook(told if self.mends is None else answer))  # type: ignore[no-untyped-call]

    def _watch_custom(self, node: Any, leaf: int, failsafe: Failsafe, limit: int) -> None:
        def look(returned: Gradients, received: Gradients) -> None:
            if self.hooks:
                with unseen():
                    self._look_at_custom(node, leaf, limit, returned, received)

        told = failsafe.door("function-hook", look)

        def answer(returned: Gradients, received: Gradients) -> Gradients | None:
            told(returned, received)
            return None if self.mends is None or not self.hooks else self.mends.function(node, returned, received)

        self.hooks.append(node.register_hook(told if self.mends is None else answer))

    def _look_at_custom(self, node: Any, leaf: int, limit: int, returned: Gradients, received: Gradients) -> None:
        flags = [is_finite(grad) for grad in returned if grad is not None]
        self.flags += flags
        on_cpu = all(flag.is_cpu for flag in flags)
        fine = on_cpu and all(bool(flag) for flag in flags)
        if fine or not on_cpu:
            self._keep_returned(leaf, limit, returned)
        if fine:
            return
        found = custom.seen(node, returned, received, self._leaves.get(leaf, leaf), 0 if self.tape is None else self.tape.length)
        if (on_cpu or found.bytes() <= limit) and self._holds(*found.saved, *found.received, *found.returned):
            self.backwards.append(found)
            saved = [tensor for tensor in found.saved if tensor is not None]  # asked for earlier, a checkpoint would compute it again
            glue = glue_within(self.tape, saved) if self.tape is not None else {}
            self.made_within |= {place: one for place, one in glue.items() if self._holds(*one.tensors.values())}

    def _watch_ranks(self, node: Any, leaf: int, failsafe: Failsafe, limit: int) -> None:
        """A backward that waits for the other ranks is not made once more: all that is asked of it is what it gave."""

        def look(returned: Gradients, _: Gradients) -> None:
            if self.hooks:
                self._keep_returned(leaf, limit, returned)

        self.hooks.append(node.register_hook(failsafe.door("function-hook", look)))

    def _keep_returned(self, leaf: int, limit: int, returned: Gradients) -> None:
        small = tuple(grad if grad is not None and grad.nbytes <= limit and self._holds(grad) else None for grad in returned)
        self.returned[self._leaves.get(leaf, leaf)] = small

    def _watch_kernel(self, failsafe: Failsafe, limit: int) -> None:
        """Watch what goes into a kernel that nothing inside can be seen of, and the gradient that comes out of it."""
        hidden = self.hidden()
        if hidden is not None and hidden.requires_grad:
            self._watch_leaf(hidden, HIDDEN, failsafe, limit)
        self.given = finite_batch(self)

    def hidden(self) -> Tensor | None:
        """What a kernel was given of the model, None if there was no kernel or it was not held."""
        found = kernels.kernel_of(self.glimpses)
        taken = self.taken.get(found[0].hidden) if found is not None else None
        return taken.content() if taken is not None else None

    def edge(self) -> dict[int, Tensor]:
        """Return what the loss reads: the leaves of the program, and what a kernel was given of the model, as HIDDEN."""
        hidden = self.hidden()
        return self.tensors if hidden is None else {**self.tensors, HIDDEN: hidden}

    def own_grads(self) -> dict[int, Tensor]:
        """Return the kept gradients that the program makes by itself: not of what other leaves were computed from."""
        edge = {leaf.id: self.tensors[leaf.id] for leaf in self.program.leaves if leaf.diff} if self.program is not None else {}
        if not all(tensor.requires_grad for tensor in edge.values()):
            return {}  # a copy of what was written to since has no history: it may have been computed from any of the others
        fed = feeding(edge)
        return {leaf: grad for leaf, grad in self.grads.items() if leaf not in fed}

    @property
    def waits(self) -> bool:
        """Do its flags stay on the device until an optimizer steps? Where they are at hand, they are looked at when backward has ended."""
        return self.loss.device.type != "cpu"

    @property
    def scaled(self) -> bool:
        """Was the loss multiplied against underflow?"""
        return self.scale is not None

    @property
    def unscaled(self) -> Tensor:
        """The loss as it was before that, still on the device."""
        return self.loss if self.scale is None else self.loss.float() / self.scale.factor

    @property
    def value(self) -> float | None:
        """The loss as a number, None if it is not a scalar."""
        return float(self.loss) if self.loss.numel() == 1 else None
