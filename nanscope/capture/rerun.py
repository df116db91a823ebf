"""Only on a hit: the second look into the model.

The tape sleeps while a module with weights runs. If the harm came out of one, a copy of that module is run on copies of the inputs it
had, with the generators as they were and the tape awake, and the two programs are joined into one. What the second look does not
reproduce was transient.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from nanscope.capture import generators
from nanscope.capture.alone import NotIsolated
from nanscope.capture.copies import Copies, cloned, lent, mended
from nanscope.capture.custom import is_custom
from nanscope.capture.follow import FINE, Follower, LeftBehind, Made, MadeBackward, kinds_of, made_backward, part_of
from nanscope.capture.glue import Glue, betweens, opened
from nanscope.capture.hooks import Hook, hooks_of, hooks_of_module
from nanscope.capture.mode import TapeMode
from nanscope.capture.modules import (
    NOWHERE,
    Address,
    Compiled,
    ModuleCall,
    ModuleWatch,
    address,
    made_in,
    place_of,
    tensors_in,
    versions_in,
)
from nanscope.capture.reach import Reach
from nanscope.capture.recomputing import run_through
from nanscope.capture.seal import Seal, Written, sealed
from nanscope.capture.tape import Tape
from nanscope.program.calls import Arg, Computes, Leaf, substitute
from nanscope.program.local import memory_of
from nanscope.program.numbers import is_near, same_bits
from nanscope.program.program import Program, join
from nanscope.torch_inside import buffer_of, has_backward_hooks, sequence_number, take_off_backward_hooks, weak_tensor

Eye = TypeVar("Eye", Tape, Follower)


@dataclass(frozen=True, slots=True)
class Edge:
    """A part of a module that was given one tensor and made one, by ids of a tape. inside: ids of what was made between."""

    module: nn.Module
    given: int
    made: int
    inside: range


@dataclass(frozen=True, slots=True)
class Again(Generic[Eye]):
    """A call of a module made again.

    eye: what has followed it. module: the copy that ran. given: copies of what a function was given. outputs: in order. seeds: copies of
    what was asked for. edges: of the parts with hooks on their gradients. stale: why it cannot be the call that was recorded, "" if nothing
    speaks against it. mended: it began with finite numbers in buffers that the calls of the step have spoilt.
    """

    eye: Eye
    module: nn.Module
    given: list[Tensor]
    copies: Copies
    outputs: list[Tensor]
    seeds: Mapping[Address, Tensor]
    stale: str
    mended: bool
    edges: Sequence[Edge] = ()

    def original(self, value: int, tensor: Tensor) -> Tensor:
        """Return what a leaf is the copy of. tensor: its content, which is held somewhere else where the module has written to it since."""
        found = self.copies.original(tensor)
        if found is not tensor or not isinstance(self.eye, Tape):
            return found
        place = self.eye.places([value])[value]
        return next((original for original, copy in self.copies.pairs() if place_of(copy) == place), tensor)

    def twin_of(self, module: nn.Module, owner: nn.Module, name: str) -> Tensor | None:
        """Return what a buffer of a part of the module has become in the copy."""
        path = next(path for path, part in module.named_modules() if part is owner)
        return buffer_of(self.module.get_submodule(path), name)


@dataclass(frozen=True, slots=True)
class Apart:
    """What only compiled code has made bad. call: of the function. recorded: what came out of it. made: what does as it is written."""

    call: ModuleCall
    recorded: Tensor
    made: Tensor


@dataclass(frozen=True, slots=True)
class Reruns:
    """The calls of a model in one step, to be made again. budget: bytes of tensors that are copied, and recorded.

    places: where the leaves of the recorded program lay, by id: what was written to since is held as a copy, somewhere else. glue: what led
    to their arguments. notes: slug and text of what did not come out as it was. hooks: of the trainer's on gradients inside of what has
    come out again, by value. apart: what does not come out bad. through: is what functions of autograd compute anew in
    their backward run through also where calls are followed?
    """

    calls: list[ModuleCall]
    watch: ModuleWatch
    budget: int
    places: Mapping[int, Address] = field(default_factory=dict)
    glue: tuple[Glue, ...] = ()
    notes: list[tuple[str, str]] = field(default_factory=list)
    hooks: dict[int, list[Hook]] = field(default_factory=dict)
    apart: list[Apart] = field(default_factory=list)
    through: bool = False

    def of_functions(self) -> Reruns | None:
        """Return those of compiled functions alone, None if there are none: a loss ends where the model begins."""
        calls = [call for call in self.calls if isinstance(call.module, Compiled)]
        return replace(self, calls=calls) if calls else None

    def note_not_held(self) -> None:
        """Say which functions were not run again because what they were given was too large to be held."""
        for name in dict.fromkeys(call.name for call in self.calls if call.args is None and isinstance(call.module, Compiled)):
            text = f"{name}, which is compiled, could not be run again as it is written: what it was given was too large to be held"
            self.note("not_run_again", text)

    def second_look(self, program: Program | None, tensors: Mapping[int, Tensor]) -> tuple[Program, dict[int, Tensor]] | None:
        """Return the program from the model's inputs and parameters to the loss, and its leaves; None if nothing can be run again.

        Raises LookupError if a module cannot be run again, and what the module itself raises.
        """
        if program is None or not any(call.args is not None for call in self.calls):
            return None
        parts: list[Program] = []
        leaves: dict[int, Tensor] = dict(tensors)
        floating = {value: tensor for value, tensor in tensors.items() if tensor.is_floating_point()}
        wanted, current = self._wanted(floating), {address(tensor): value for value, tensor in floating.items()}
        left = self._left_behind(program, tensors)
        offset = max(known.new_id() for known in (program, *(one.program for one in betweens(self.glue))))
        for call in reversed(self.calls):  # the last call first: what it reads may be what an earlier one made
            values = [*left, *(value for place in call.outputs for value in wanted.get(place, ()))]
            if call.args is None or not values or not (call.grad or any(kinds_of(leaves[value]) for value in values)):
                continue  # what came out fine, and has no gradient, is data; its weights may have been updated since
            with self._again(call, self._tape) as again:
                tape = again.eye
            made: list[tuple[int, Program, dict[int, Tensor]]] = []
            for place, tensor in zip(call.outputs, again.outputs, strict=False):
                target = self._comes_out(call, again, place, tensor, wanted, leaves)
                value = tape.value_of(tensor) if is_custom(tensor.grad_fn) else tape.find(tensor)
                if target is not None and value is not None:  # else not read by the loss, or transient: it does not come out again
                    with contextlib.suppress(LookupError):
                        made.append((target, *opened(tape, value)))
            for leaf_id, original in list(left.items()):
                value = tape.storages.like(original)
                if value is not None:
                    del left[leaf_id]
                    made.append((leaf_id, *opened(tape, value)))
            outputs = {part.output: target for target, part, _ in made}
            mapping = dict(outputs)  # one output may be made of another: all of them have their places first
            between: dict[int, Glue] = {}  # leaf → what led to it
            for _, part, own in made:
                for old in [leaf.id for leaf in part.leaves] + [out for c in part.calls for out in c.outs if out is not None]:
                    mapping.setdefault(old, offset + old)
                for leaf in part.leaves:
                    original = again.original(leaf.id, own[leaf.id])
                    origin = address(original)
                    known, glue = current.get(origin), None if again.stale else self.glue_of(origin, leaf.diff)
                    if glue is not None and leaf.origin != "parameter" and leaf.id not in outputs:
                        between[leaf.id] = glue
                        if own[leaf.id].stride() == original.stride():
                            mapping[leaf.id] = glue.value
                        continue
                    if known is not None and leaf.origin != "parameter" and leaf.id not in outputs:
                        mapping[leaf.id] = known
                    leaves[mapping[leaf.id]] = own[leaf.id]
                    if leaf.origin not in ("parameter", "data") or self.maker(origin):
                        wanted.setdefault(origin, [mapping[leaf.id]])
                        current.setdefault(origin, mapping[leaf.id])
            for _, part, own in made:
                own_leaves = (leaf for leaf in part.leaves if leaf.id not in between)
                leaves_of = tuple(self._as_made(leaf, again.original(leaf.id, own[leaf.id])) for leaf in own_leaves)
                parts.insert(0, _renumber(replace(part, leaves=leaves_of), mapping))
            for leaf_id, glue in between.items():
                parts.insert(0, glue.leading_to(mapping[leaf_id]))
                leaves.update(glue.tensors)
                _go_on(glue, wanted, current)
            self._note_hooks(again, mapping)
            offset += tape.length
            if made and isinstance(call.module, Compiled):
                self.note("run_as_written", f"{call.name} is compiled: what is told of its inside is from running it as it is written")
        if not parts:
            return None
        whole = join([*parts, program]).slice()
        return whole, {leaf.id: leaves[leaf.id] for leaf in whole.leaves}

    def _left_behind(self, program: Program, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the leaves that no call has returned, by id: what a module keeps, as the loss of a router, or puts into a list. What a
        custom function of the trainer's has made is none of these."""
        returned = {place for call in self.calls for place in call.outputs}
        made = ((leaf.id, tensors[leaf.id]) for leaf in program.leaves if leaf.origin == "opaque" and leaf.diff)
        left = ((leaf, tensor) for leaf, tensor in made if tensor.grad_fn is not None and not is_custom(tensor.grad_fn))
        return {leaf: tensor for leaf, tensor in left if place_of(tensor) not in returned}

    def _note_hooks(self, again: Again[Tape], mapping: Mapping[int, int]) -> None:
        """Note the hooks of the values that a tape has seen: a copy of a weight has none, and its original does."""
        for old, new in mapping.items():
            tensor = again.eye.tensor(old)
            if tensor is not None and (hooks := hooks_of(again.copies.original(tensor))):
                self.hooks[new] = hooks
        for edge in again.edges:
            inside = frozenset(mapping[old] for old in edge.inside if old in mapping)
            if edge.given in mapping and edge.made in mapping:
                for value, hook in hooks_of_module(edge.module, mapping[edge.given], mapping[edge.made], inside):
                    self.hooks.setdefault(value, []).append(hook)

    def found(self, recorded: Collection[Tensor]) -> Reruns:
        """Return the same with what functions have returned, where torch has not told that: which of these tensors comes out of them again.

        recorded: that the loss read, or what led to it, and that nobody has made otherwise.
        """
        made = {place for call in self.calls for place in call.outputs}
        loose = [tensor for tensor in recorded if place_of(tensor) not in made]
        calls: list[ModuleCall] = []
        for call in reversed(self.calls):
            if not call.told and call.args is not None:
                with self._again(call, Follower) as again:
                    outputs = again.outputs
                given = {place_of(tensor) for tensor in tensors_in([call.args, call.kwargs])}
                own: list[Tensor | None] = []
                for tensor in outputs:
                    alike = [one for one in loose if one.shape == tensor.shape and one.dtype == tensor.dtype and place_of(one) not in given]
                    alike = [one for one in alike if one.requires_grad == tensor.requires_grad]
                    same = [one for one in alike if _is_same(call, tensor, one)]
                    own.append(next(iter(same or alike), None))
                    loose = [one for one in loose if one is not own[-1]]
                places = [NOWHERE if one is None else place_of(one) for one in own]
                call = replace(call, told=True, outputs=places, made=[weak_tensor(one) for one in own if one is not None])
            calls.insert(0, call)
        return replace(self, calls=calls)

    def output(self, place: Address) -> Tensor | None:
        """Return an output of the model once more, by the address that it had; None if no remembered call made it."""
        for call in reversed(self.calls):
            if call.args is not None and place in call.outputs:
                with self._again(call, Follower) as again:
                    _must_be_the_same(again)
                return dict(zip(call.outputs, again.outputs, strict=False)).get(place)
        return None

    def follow(self, tensors: Mapping[int, Tensor]) -> Made | None:
        """Run the modules once more whose outputs are bad, and return the call in there that made it; None if it does not come out again.

        tensors: leaves of the recorded program, by id.
        """
        bad = self._wanted({value: tensor for value, tensor in tensors.items() if kinds_of(tensor)})
        for call in reversed(self.calls):
            if call.args is None or not any(place in bad for place in call.outputs):
                continue
            with self._again(call, Follower) as again:
                _must_be_the_same(again)
            for place, tensor in zip(call.outputs, again.outputs, strict=False):
                if place not in bad:
                    continue
                self._comes_out(call, again, place, tensor, bad, tensors)
                made = again.eye.made(tensor) if kinds_of(tensor) else None
                if made is not None:
                    return replace(made, result=again.copies.original(made.result))
        return None

    def follow_back(self, tensors: Mapping[int, Tensor], grads: Mapping[int, Tensor]) -> tuple[MadeBackward, str, LeftBehind | None] | None:
        """Differentiate the modules once more and return the autograd node that made a bad gradient, and the part of the model it is in;
        and the call of the forward pass that had made something bad for it, if one did.

        tensors, grads: leaves of the recorded program and the gradients that came to them, by id.
        """
        read = self._wanted({value: tensor for value, tensor in tensors.items() if value in grads})
        for call in reversed(self.calls):
            seeds = {place: grads[values[-1]] for place, values in read.items() if values}
            if call.args is None or not any(place in seeds for place in call.outputs):
                continue
            with self._again(call, Follower, seeds) as again:
                _must_be_the_same(again)
                both = zip(call.outputs, again.outputs, strict=False)
                pairs = [(tensor, again.seeds[place]) for place, tensor in both if place in seeds and tensor.requires_grad]
                wanted = [tensor for tensor in (*again.module.parameters(), *again.given) if tensor.requires_grad]
                made = None
                if pairs and wanted:
                    made = made_backward([tensor for tensor, _ in pairs], [seed for _, seed in pairs], wanted)
            if made is not None:
                found = replace(made, site=made.site or again.eye.site_of(made.number))
                return found, part_of(made.number, again.eye.spans), again.eye.left(made)
        return None

    def written(self, owner: nn.Module, name: str) -> tuple[Program, dict[int, Tensor]] | Made | None:
        """Run the modules once more that may have written to a buffer, as if it were finite, and return how they made it bad, as a program
        or as the call that did; None if none of them does."""
        original = buffer_of(owner, name)
        for call in reversed(self.calls if any(buffer is original for buffer in self.watch.spoilt()) else []):
            if call.args is None or not any(part is owner for model in call.models for part in model.modules()):
                continue
            with self._again(call, self._tape) as taped:
                buffer = taped.twin_of(_without_others(call.module), owner, name)
                value = taped.eye.find(buffer) if buffer is not None and kinds_of(buffer) else None
                if value is not None and value.leaf is None:
                    program, tensors = taped.eye.program(value)
                    leaves = tuple(self._as_made(leaf, taped.original(leaf.id, tensors[leaf.id])) for leaf in program.leaves)
                    return replace(program, leaves=leaves, computes=Computes.ACTIVATION), tensors
            with self._again(call, Follower) as followed:
                buffer = followed.twin_of(_without_others(call.module), owner, name)
                made = followed.eye.made(buffer) if buffer is not None and kinds_of(buffer) else None
                if made is not None and not made.foreign:
                    return replace(made, result=followed.copies.original(made.result))
        return None

    def _tape(self) -> Tape:
        return Tape(self.budget)

    def _wanted(self, tensors: Mapping[int, Tensor]) -> dict[Address, list[int]]:
        """Return where tensors that the loss read lay when it did, as ids; memory is used again once what lay there is gone."""
        found: dict[Address, list[int]] = {}
        for value, tensor in sorted(tensors.items()):
            found.setdefault(self.places.get(value) or address(tensor), []).append(value)
        return found

    def _comes_out(
        self,
        call: ModuleCall,
        again: Again[Eye],
        place: Address,
        tensor: Tensor,
        wanted: Mapping[Address, list[int]],
        recorded: Mapping[int, Tensor],
    ) -> int | None:
        """Return what of the step an output that was made again is, bit by bit; None, and a note, if it is nothing that is wanted."""
        waiting = wanted.get(place, [])
        for value in reversed(waiting):
            if _is_same(call, tensor, recorded[value]) or (again.mended and _is_as_bad(tensor, recorded[value])):
                waiting.remove(value)
                return value
        if not waiting or sum(place in other.outputs for other in self.calls) > 1:  # it may be what another call has made there
            return None
        if isinstance(call.module, Compiled) and not again.stale and kinds_of(recorded[waiting[-1]]) and not kinds_of(tensor):
            self.apart.append(Apart(call, recorded[waiting[-1]], tensor))
            return None
        left = list(dict.fromkeys(again.copies.dropped))
        known = again.stale or (f"hooks are not run again ({', '.join(left[:3])})" if left else "")
        why = f"one difference is known: {known}" if known else "why is not known, it may read what has changed since"
        self.note("runs_differently", f"{call.name}, run again on a copy, gives other numbers than in this step; {why}")
        return None

    def glue_of(self, place: Address, diff: bool | None = None) -> Glue | None:
        """Return what led to an argument, by where that lies; None if it came in, or out of a module. diff: of two, with a gradient."""
        found = [glue for glue in self.glue if glue.place == place and glue.is_whole()]
        return next((glue for glue in found if glue.diff is diff), next(iter(found), None))

    def maker(self, place: Address) -> str:
        """Return the class of the module that an argument is an output of, "" if it is none's."""
        made = ((call, *one) for call in self.calls for one in zip(call.outputs, call.made, strict=False))
        return next((call.name for call, lay, tensor in made if lay == place and not tensor.expired()), "")

    def _as_made(self, leaf: Leaf, original: Tensor) -> Leaf:
        """A copy has no history: what made its original did."""
        node = original.grad_fn
        maker = self.maker(address(original)) if leaf.origin != "parameter" else ""
        if maker:
            return replace(leaf, origin="module", made_by=maker)
        weight = self.watch.weight_at(original) if leaf.origin == "data" else None
        if weight is not None:
            return replace(leaf, origin="parameter", name=weight, made_by=weight)
        kinds = kinds_of(original) if leaf.origin == "data" else FINE
        buffer = self.watch.buffer_at(original) if kinds.nan or kinds.posinf else None  # a mask is what the code calls it
        if buffer is not None:
            return replace(leaf, origin="buffer", name=buffer, made_by=buffer)
        return leaf if leaf.origin != "opaque" or node is None else replace(leaf, made_by=type(node).__name__.removesuffix("Backward"))

    def _parameter_name(self, copies: Copies, tensor: Tensor) -> str | None:
        return self.watch.parameter_name(copies.original(tensor))

    def note(self, slug: str, text: str) -> None:
        """Note something, once."""
        if (slug, text) not in self.notes:
            self.notes.append((slug, text))

    @contextlib.contextmanager
    def _again(self, call: ModuleCall, eye: Callable[[], Eye], seeds: Mapping[Address, Tensor] | None = None) -> Iterator[Again[Eye]]:
        """Make a call again on copies, and let the block differentiate it: all that is disturbed by it is put back afterwards.

        A module that writes to a parameter of its own is given a copy of that, too, instead of the memory of the original.
        """
        module = _without_others(call.module)
        copied: set[int] = set()  # storages of parameters
        # a function may belong to a trainer, of which it reads little: loaders and optimizers are not copied for it
        names = Reach([module.function]).names if isinstance(module, Compiled) else None
        spoilt = {id(buffer) for buffer in self.watch.spoilt()}
        while True:
            copies = Copies(
                self.budget,
                lambda parameter: cloned(parameter) if memory_of(parameter) in copied else lent(parameter),
                lambda tensor: mended(tensor) if id(tensor) in spoilt else cloned(tensor),
                names=names,
            )
            twin, args, kwargs, own_seeds = copies.of((module, call.args or (), call.kwargs, dict(seeds or {})))
            if call.training not in (None, twin.training):
                twin.train(call.training)  # it has been switched since, as between a rollout and an update
            seen = eye()
            if isinstance(seen, Tape):
                take_off_backward_hooks(twin)
                seen.leaves.is_parameter = functools.partial(self._parameter_name, copies)
            seal = Seal(copies.own())
            with sealed(seal, copies.code), run_through() if self.through or isinstance(seen, Tape) else contextlib.nullcontext():
                try:
                    outputs, edges = _called(call, twin, args, kwargs, seen, copies)
                except Written as error:
                    if error.storage in copied or not any(memory_of(p) == error.storage for p in module.parameters()):
                        raise
                    copied.add(error.storage)
                    continue
                except AttributeError:
                    if names is None:
                        raise
                    names = None  # it gets attributes by names that it makes up
                    continue
                given = {memory_of(tensor) for tensor in tensors_in([args, kwargs])}
                stale = "what it was given has been written to since" if versions_in([call.args, call.kwargs]) != call.versions else ""
                stale = stale or ("it writes to what it is given" if given & seal.written else "")
                own = list(tensors_in([args, kwargs])) if isinstance(twin, Compiled) else []
                is_mended = any(id(original) in spoilt for original, _ in copies.pairs())
                yield Again(seen, twin, own, copies, outputs, own_seeds, stale, is_mended, edges)
                return


def _is_same(call: ModuleCall, made: Tensor, recorded: Tensor) -> bool:
    """Is it what came out in the step? What a compiler has put together it rounds otherwise, and overflows earlier or later."""
    if same_bits(made, recorded) or not isinstance(call.module, Compiled):
        return same_bits(made, recorded)
    return made.shape == recorded.shape and (is_near(made, recorded) or bool(kinds_of(made) and kinds_of(recorded)))


def _is_as_bad(made: Tensor, recorded: Tensor) -> bool:
    """Are the same elements bad?"""
    return made.shape == recorded.shape and bool(kinds_of(made)) and torch.equal(torch.isfinite(made), torch.isfinite(recorded))


def _must_be_the_same(again: Again[Eye]) -> None:
    if again.stale:
        raise NotIsolated(again.stale)


def _without_others(module: nn.Module) -> nn.Module:
    """The module as it can be run by this process alone. Raises NotIsolated if every run of it needs the other ranks, too.

    One rank runs a module again because of what only it has seen: a collective in there would wait for ever.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel) or type(module).__name__ == "DeepSpeedEngine":
        module = module.module  # type: ignore[assignment]
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):  # ZeRO-3, which holds a part of each here
        raise NotIsolated("its weights are spread over several ranks, and one of them alone cannot run it")
    kinds = {type(part).__name__ for part in module.modules()}
    if any(name.startswith(("FSDP", "FullySharded", "DistributedDataParallel")) for name in kinds):
        raise NotIsolated("it is spread over several ranks, and one of them alone cannot run it")
    return module


def _called(
    call: ModuleCall, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], eye: Tape | Follower, copies: Copies
) -> tuple[list[Tensor], list[Edge]]:
    """Call a copy of a module as it was called, and return its outputs, and the edges of its parts that have hooks on gradients."""
    if call.rng:
        torch.set_rng_state(call.rng[0])
    if len(call.rng) > 1:
        torch.cuda.set_rng_state(call.rng[1])
    for drawn in call.drawn:
        generators.set_back(copies.stand_in_of(drawn.generator), drawn.state)
    seer = eye.callers if isinstance(eye, Tape) else eye
    seer.end = _called.__code__, call.caller  # above this is whoever looks
    outermost = module.models if isinstance(module, Compiled) else [module]
    parts = [(path, part) for model in outermost for path, part in model.named_modules()]
    paths = {part: f"{path} ({type(part).__name__})" if path else type(part).__name__ for path, part in parts}
    with contextlib.ExitStack() as stack:
        for device, dtype in call.autocast.items():
            stack.enter_context(torch.autocast(device, dtype=dtype))
        edges = stack.enter_context(_following(eye, paths, _hooked(_without_others(call.module), module)))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # nothing is compiled because we looked
        stack.enter_context(torch.set_grad_enabled(call.grad))
        stack.enter_context(TapeMode(eye) if isinstance(eye, Tape) else eye)
        output = module(*args, **kwargs)
    return [tensor for tensor in made_in(output) if tensor.layout is torch.strided], edges


def _hooked(module: nn.Module, twin: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the parts of a module that have hooks on their gradients, by their copies."""
    both = zip(module.modules(), twin.modules(), strict=False)
    return {copy: part for part, copy in both if has_backward_hooks(part) and type(part) is type(copy)}


@contextlib.contextmanager
def _following(follower: Tape | Follower, paths: Mapping[nn.Module, str], hooked: Mapping[nn.Module, nn.Module]) -> Iterator[list[Edge]]:
    """Tell who follows which part of the model each call is made in, and note the edges of those that have hooks on their gradients."""
    before: list[tuple[str, int]] = []
    edges: list[Edge] = []
    begun: list[tuple[int | None, int]] = []

    def enter(module: nn.Module, args: object) -> None:
        if module in hooked and isinstance(follower, Tape):
            begun.append((_only(follower, args), follower.length))
        before.append((follower.current_module, sequence_number()))
        follower.current_module = paths.get(module, follower.current_module)

    def leave(module: nn.Module, args: object, output: object) -> None:
        outer, begin = before.pop() if before else ("", 0)
        if module in hooked and isinstance(follower, Tape) and begun:
            given, first = begun.pop()
            made = _only(follower, output)
            if given is not None and made is not None:
                edges.append(Edge(hooked[module], given, made, range(first, follower.length)))
        if isinstance(follower, Follower):
            follower.spans.append((begin, sequence_number(), follower.current_module))
        follower.current_module = outer

    handles = [hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave, always_call=True)]
    try:
        yield edges
    finally:
        for handle in reversed(handles):
            handle.remove()


def _only(tape: Tape, tree: object) -> int | None:
    """The id of the tensor in there, if it is one."""
    tensors = list(tensors_in(tree))
    return tape.value_of(tensors[0]).id if len(tensors) == 1 else None


def _go_on(glue: Glue, wanted: dict[Address, list[int]], current: dict[Address, int]) -> None:
    """Look for what the trainer's own lines have read among the outputs of the modules before them."""
    for leaf in glue.program.leaves:
        if leaf.origin not in ("parameter", "data"):
            waiting = wanted.setdefault(glue.places[leaf.id], [])
            waiting += [leaf.id] if leaf.id not in waiting else []
            current.setdefault(glue.places[leaf.id], leaf.id)


def _renumber(program: Program, mapping: Mapping[int, int]) -> Program:
    def moved(args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        return tuple(substitute(arg, mapping) for arg in args)

    return Program(
        tuple(replace(leaf, id=mapping[leaf.id]) for leaf in program.leaves),
        tuple(
            replace(
                call,
                args=moved(call.args),
                kwargs=tuple((name, substitute(arg, mapping)) for name, arg in call.kwargs),
                outs=tuple(None if out is None else mapping[out] for out in call.outs),
            )
            for call in program.calls
        ),
        mapping.get(program.output, program.output),
        program.sites,
    )
