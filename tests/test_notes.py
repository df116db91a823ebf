"""Calls that wait to be understood: the program is what it would be without waiting, and what nobody holds is never understood."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from test_tape import PLAIN, UNSEEN, WRITES, fresh, replayed
from torch import Tensor, nn

import nanscope
from nanscope.capture import notes, tape, weighing
from nanscope.capture.mode import TapeMode
from nanscope.capture.raw import RawCall
from nanscope.capture.scribe import Scribe
from nanscope.capture.tape import Tape
from nanscope.capture.unseen import unseen
from nanscope.program.calls import Arg, Ref
from nanscope.program.program import Program
from nanscope.torch_inside import DETACH_IS_SEEN_TWICE, drop_storage_handle, storage_gone, storage_handle

Loss = Callable[[TapeMode], Tensor]


def described(program: Program) -> tuple[object, ...]:
    """A program with its values numbered as they come: two tapes that number other things, too, agree on it."""
    numbers: dict[int, int] = {}

    def number(value: int) -> int:
        return numbers.setdefault(value, len(numbers))

    def plain(arg: Arg) -> object:
        return number(arg.id) if isinstance(arg, Ref) else tuple(map(plain, arg)) if isinstance(arg, tuple) else arg

    calls = [
        (
            call.op, tuple(map(plain, call.args)), tuple((name, plain(arg)) for name, arg in call.kwargs), call.grad,
            [None if out is None else number(out) for out in call.outs], program.site_of(call), call.module,
        )
        for call in program.calls
    ]  # fmt: skip
    leaves = sorted((number(leaf.id), leaf.name, leaf.origin, leaf.diff, leaf.made_by) for leaf in program.leaves)
    return calls, leaves, number(program.output)


def recorded(loss: Loss, kind: type[TapeMode] = TapeMode) -> tuple[object, ...]:
    torch.manual_seed(0)
    tape = Tape()
    mode = kind(tape)
    with mode:
        live = loss(mode)
    assert not tape.broken
    value = tape.find(live)
    if value is None:
        return ("unknown",)
    try:
        program, tensors = tape.program(value)
    except LookupError:
        return ("not kept",)
    return (*described(program), [tensors[leaf.id].tolist() for leaf in program.leaves])


def wants_a_gradient_later(mode: TapeMode) -> Tensor:
    """An attack begins where something was computed without gradient."""
    start = fresh(3, grad=False)
    moved = start * 2
    before = moved.exp()
    moved.requires_grad_()
    return (moved * before).sum()


def wants_none_any_more(mode: TapeMode) -> Tensor:
    weight, x = fresh(3), fresh(3, seed=2)
    product = weight.exp() * x
    weight.requires_grad_(False)
    return (product + weight.detach()).sum()


def given_other_memory(mode: TapeMode) -> Tensor:
    x, y = fresh(3, grad=False), fresh(3, seed=2)
    product = x * y
    x.data = torch.zeros(3)
    return (product * x).sum()


def made_and_given_other_memory(mode: TapeMode) -> Tensor:
    other, x = torch.zeros(4), fresh(4, grad=False)
    doubled = x * 2
    doubled.data = other
    return (doubled * fresh(4, seed=2)).sum()


def given_a_part_of_its_memory(mode: TapeMode) -> Tensor:
    x, y = fresh(4, grad=False), fresh(2, seed=2)
    grown = x.exp()
    x.data = x.data[:2]
    return (x * y).sum() * grown.sum()


def written_to_unseen(mode: TapeMode) -> Tensor:
    x, y = fresh(3, grad=False), fresh(3, seed=2)
    product = x.exp() * y
    mode.sleep("model")
    x.mul_(3)
    mode.wake("model")
    return (product * x).sum()


def written_to_by_data(mode: TapeMode) -> Tensor:
    """`.data` counts its writes by itself."""
    x, y = fresh(3, grad=False), fresh(3, seed=2)
    doubled = x * 2
    mode.sleep("model")
    doubled.data.mul_(3)
    mode.wake("model")
    return (doubled * y).sum()


def held_as_data_only(mode: TapeMode) -> Tensor:
    advantages = (fresh(4, grad=False) * 2).data
    return (fresh(4, seed=2) * advantages).sum()


def pieces(mode: TapeMode) -> Tensor:
    low, high = fresh(6).split(3)
    values, indices = high.sort()
    return (low * values).sum() + indices.float().mean() * low.sum()


def stacked(mode: TapeMode) -> Tensor:
    rows = [fresh(3, seed=n) for n in range(3)]
    return torch.stack([torch.cat([row, row.detach()]) for row in rows]).logsumexp(-1).sum()


def inference(mode: TapeMode) -> Tensor:
    with torch.inference_mode():
        scale = fresh(3, grad=False) * 2
    return (fresh(3, seed=2) * scale.clone()).sum()


def complex_numbers(mode: TapeMode) -> Tensor:
    z = torch.view_as_complex(fresh(3, 2))
    return (z.conj() * z).abs().sum()


OWN = [
    wants_a_gradient_later, wants_none_any_more, given_other_memory, made_and_given_other_memory,
    written_to_unseen, written_to_by_data, held_as_data_only, pieces, stacked, inference, complex_numbers,
]  # fmt: skip


def writing(write: Callable[[Tensor], Tensor]) -> Loss:
    def loss(mode: TapeMode) -> Tensor:
        return write(fresh(3, 4) * 1).exp().sum()

    return functools.wraps(write)(loss)


OF_ROWS = frozenset(("grpo", "write_into_data", "write_before_first_reader"))  # these write to rows of what they have made


@pytest.mark.parametrize("loss", [*PLAIN, *map(writing, WRITES), *UNSEEN, *OWN], ids=lambda loss: loss.__name__)
def test_the_program_is_what_it_is_without_waiting(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call by call: operators, arguments, places in the code, leaves and what they hold."""
    if loss.__name__ in OF_ROWS:
        pytest.skip("where such a write waits, a row is known by how it was taken: see the next test")
    waited = recorded(loss)
    monkeypatch.setattr(notes.Notes, "add", lambda *args: False)
    assert waited == recorded(loss)


@pytest.mark.parametrize(
    "loss", [one for one in (*PLAIN, *map(writing, WRITES)) if one.__name__ in OF_ROWS], ids=lambda loss: loss.__name__
)
def test_a_row_that_is_written_to_is_taken_from_what_it_is_a_row_of(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no leaf of its own, and the loss comes out again."""
    waited = replayed(loss, gradients=False).program
    monkeypatch.setattr(notes.Notes, "add", lambda *args: False)
    at_once = replayed(loss, gradients=False).program
    assert len(waited.leaves) <= len(at_once.leaves)
    assert sum(call.name == "scatter" for call in waited.calls) == sum(call.name == "scatter" for call in at_once.calls)


class ShownTwice(TapeMode):
    """As torch before 2.10 shows it to a mode: a `detach`, then that of what it has made, which is what the caller is given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        return super().__torch_dispatch__(func, types, (made,), {}) if func is torch.ops.aten.detach.default else made


def detached_again(mode: TapeMode) -> Tensor:
    """By the loop itself, which holds both."""
    x = fresh(3) * 2
    kept = x.detach()
    again = kept.detach()
    return (x.exp() * kept).sum() + (again * x).sum() + (x.detach() * again).sum()


def detached_and_written_to(mode: TapeMode) -> Tensor:
    x = fresh(3) * 2
    x.mul_(3)
    kept = x.detach()
    kept.add_(1)
    return (kept * fresh(3, seed=2)).sum()


def detached_of_a_large_one(mode: TapeMode) -> Tensor:
    """Which does not wait."""
    return (fresh(1 << 20)[:3].detach() * fresh(3, seed=2)).sum()


@pytest.mark.skipif(DETACH_IS_SEEN_TWICE, reason="here torch shows it twice by itself")
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(
    "loss", [stacked, detached_again, detached_and_written_to, detached_of_a_large_one], ids=lambda loss: loss.__name__
)
def test_a_detach_that_is_shown_twice_is_one_call(loss: Loss, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown_once = recorded(loss)
    for module in (notes, tape):
        monkeypatch.setattr(module, "DETACH_IS_SEEN_TWICE", True)
    if not waits:
        monkeypatch.setattr(notes.Notes, "add", lambda *args: False)
    assert recorded(loss, ShownTwice) == shown_once


def test_what_was_read_of_a_tensor_is_not_what_it_has_become() -> None:
    """It has another shape by then, in the same memory."""
    replayed(given_a_part_of_its_memory, gradients=False)


def test_what_nobody_holds_is_never_understood() -> None:
    """Metrics: whoever logs a number has no tensor any more."""
    tape, x = Tape(), fresh(4, 5)
    mask = torch.ones(4, 5)
    with TapeMode(tape):
        loss = (x.exp() * mask).sum()
        numbers = []
        for _ in range(20):
            with torch.no_grad():
                numbers.append(float((x.exp() * mask).sum() / mask.sum()))
    value = tape.find(loss)
    assert value is not None and len(set(numbers)) == 1
    assert len(tape.entries) == 4 and not tape.notes.pending  # those of the loss, and the mask


def test_what_hands_on_its_argument_is_never_understood_if_nobody_holds_that() -> None:
    tape, held = Tape(), []
    with TapeMode(tape):
        for _ in range(8):
            torch.tensor([1.0, 2.0]).mul(2).sum().item()  # for torch, `lift_fresh` returns what it was given
        held.append(torch.tensor([3.0]))
    assert [entry.op for entry in tape.entries.values()] == ["aten.lift_fresh.default"]


def test_what_a_draw_was_made_of_is_never_understood() -> None:
    """Tokens that are sampled live on; the scores that each was drawn from do not, however many there are."""
    tape, read = Tape(), WeakSet[Tensor]()
    with TapeMode(tape):
        ids = torch.zeros(4, 1, dtype=torch.int64)
        for _ in range(50):
            scores = torch.softmax(torch.rand(4, 16) + ids[:, -1:], dim=-1)
            read.add(scores)
            ids = torch.cat([ids, torch.multinomial(scores, 1)], dim=1)
    del scores
    (value,) = tape.known_as([ids]) or (None,)
    assert value is not None and not read
    program, _ = tape.program(tape.values[value])
    assert {call.name for call in program.calls} == {"cat", "zeros"}
    assert [leaf.made_by for leaf in program.leaves if leaf.origin == "opaque"] == ["multinomial"] * 50


def test_a_draw_of_numbers_that_may_be_bad_is_known_by_what_it_was_drawn_from() -> None:
    """Whole numbers alone are never the first that is not finite."""
    tape = Tape()
    with TapeMode(tape):
        scale = torch.rand(3).log()
        noise = torch.normal(torch.zeros(3), scale.exp())
        assert len(tape.notes.pending) > 0
        total = noise * 2
    value = tape.find(total)
    assert value is not None
    program, _ = tape.program(value)
    (leaf,) = program.leaves
    assert leaf.made_by == "normal"
    made = tape.leaves.opaque[leaf.id]
    assert [tape.values[read].shape for read in made.read] == [(3,), (3,)]


def test_large_gradients_that_a_clip_reads_and_writes_are_let_go_with_the_step(tmp_path: Path) -> None:
    """They are there until the trainer drops them, and no longer."""
    policy = nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    assert policy.weight.nbytes > weighing.LIGHT
    norms = []  # that are to be logged
    with nanscope.watch(policy, out=tmp_path):
        for step in range(8):
            policy(torch.randn(2, 1024)).square().mean().backward()
            norms.append(nn.utils.clip_grad_norm_(policy.parameters(), 1.0))
            kept = storage_handle(policy.weight.grad.untyped_storage())  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            assert storage_gone(kept) or not step  # in the first step nobody knows whether another optimizer comes
            drop_storage_handle(kept)


def test_large_tensors_in_lists_do_not_wait_for_ever() -> None:
    """Where no step comes, somebody may keep norms of ever new ones."""
    tape, norms = Tape(BUDGET), []
    with TapeMode(tape):
        for _ in range(100):
            large = torch.rand(weighing.LIGHT // 2)  # 4 MB
            norms.append(torch._foreach_norm([large]))
            assert len(tape.notes.pending) <= weighing.ANYWAY * tape.notes.most // large.nbytes + 1


def test_what_something_was_made_of_stays_with_it() -> None:
    """Nobody holds what is between, and so it is only reached from what is held."""
    tape = Tape()
    with TapeMode(tape):
        rewards = torch.tensor([1.0, 2.0, 4.0])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        loss = (fresh(3) * advantages).sum()
    program, _ = tape.program(tape.value_of(loss))
    assert {leaf.name for leaf in program.leaves} >= {"rewards"} and [call.name for call in program.calls][-2:] == ["mul", "sum"]


def test_what_is_large_does_not_wait() -> None:
    """It is held for no longer than it is needed, and neither is what it is a view of."""
    tape = Tape()
    with TapeMode(tape):
        large, small = torch.ones(weighing.LIGHT // 4 + 1), torch.ones(3)
        kept = [large * 2, small * 2]
        assert len(tape.notes.pending) == 1
        kept.append(torch.ones(weighing.WHOLE // 4, 2)[:, 0][:3] * 2)
        assert len(tape.notes.pending) == 0
    assert all(tape.find(one) is not None for one in kept)


def test_of_what_does_not_wait_nothing_is_remembered() -> None:
    """Its arguments may be gone, and others have their identities."""
    tape, large = Tape(), torch.ones(weighing.LIGHT // 4 + 1)
    with TapeMode(tape):
        made = torch.ones(1) * large
        assert not tape.notes.pending and not tape.notes._makers.light
    assert tape.find(made) is not None


def test_not_many_graphs_wait() -> None:
    """What reads something with a gradient may keep the activations of a model; calls that follow it keep the same ones."""
    tape, weight, graphs = Tape(), fresh(3), WeakSet[Tensor]()
    mode = TapeMode(tape)
    with mode:
        for _ in range(200):
            mode.sleep("model")
            hidden = weight.exp()
            graphs.add(hidden)
            out = hidden.sin()  # whose gradient is made of that
            mode.wake("model")
            last = (out * 2).add(1).mul(3).sum()
            del hidden, out
            assert len(graphs) <= tape.notes.most // weighing.GRAPH + 1
    assert tape.find(last) is not None
    with TapeMode(tape):
        long = weight * 1.0
        for _ in range(100):
            long = long * 1.0
    assert len(tape.notes.pending) > 100


def test_a_graph_that_was_freed_weighs_nothing() -> None:
    """However many micro-batches a step has, what waits of those that were differentiated holds no activations."""
    tape, weight = Tape(), fresh(3)
    mode = TapeMode(tape)
    with mode:
        for number in range(3 * tape.notes.most // weighing.GRAPH):
            mode.sleep("model")
            out = weight.exp()
            mode.wake("model")
            loss = (out * 2).add(1).mul(3).sum()
            assert tape.notes.weight >= weighing.GRAPH
            mode.sleep("backward")
            loss.backward()
            mode.wake("backward")
            tape.has_passed(lambda: None)
            assert tape.notes.weight <= 5 * (number + 1) * weighing.CALL
        assert len(waiting(tape)) >= 4 * 3 * tape.notes.most // weighing.GRAPH


def test_a_view_weighs_as_the_memory_that_it_is_a_part_of() -> None:
    """Also when it has been looked what has come to nothing, and when a step was closed."""
    tape, kept = Tape(), list[Tensor]()
    with TapeMode(tape):
        for number in range(notes.IDLE // 2):
            kept.append(unseen_view(3 << 20) * 2)
            if number % 4 == 3:
                tape.notes.sift()
            held = [call.args[0].untyped_storage().nbytes() for call in waiting(tape)]
            assert sum(held) <= tape.notes.weight <= tape.notes.most


def unseen_view(size: int) -> Tensor:
    """Return a view of so many bytes, as a model returns it, whose calls are not noted."""
    with unseen():
        return torch.ones(size // 4)[:3]


def waiting(tape: Tape) -> list[RawCall]:
    return [RawCall._make(call) for call in tape.notes.pending if type(call) is tuple]


BUDGET = 64 << 20


def alive_at_most(make: Callable[[], Tensor], steps: int) -> int:
    """Bytes that are held of what something like a model makes for calls outside of it, which keep nothing of it."""
    made: list[weakref.ref[torch.UntypedStorage]] = []
    most = 0
    tape = Tape(BUDGET)
    mode = TapeMode(tape)
    with mode:
        for _ in range(steps):
            mode.sleep("model")
            logits = make()
            mode.wake("model")
            made.append(weakref.ref(logits.untyped_storage()))
            chosen = logits.argmax(-1)
            most = max(most, sum(there.nbytes() for one in made if (there := one()) is not None))
    assert chosen.numel()
    return most


@pytest.mark.parametrize(
    "make", [lambda: torch.rand(1, 400_000), lambda: torch.rand(2, 500_000)[:, :400_000]], ids=["whole", "a part of it"]
)
def test_what_waits_holds_little_of_a_model(make: Callable[[], Tensor]) -> None:
    """Logits of a sampled token: what they hold counts, and not only what was made of them."""
    with torch.no_grad():
        assert alive_at_most(make, 60) <= 1.25 * BUDGET


def test_a_tensor_that_was_given_other_memory_leaves_nothing_behind() -> None:
    """What it was is read by a call that waited, and goes with it."""
    tape, other = Tape(), torch.ones(3)
    with TapeMode(tape):
        for step in range(300):
            x = torch.zeros(3)
            kept = x + 1
            x.data = other
            float(kept.sum())
            if step % 10 == 9:
                tape.forget(over=None)
    del x, kept
    tape.forget(over=None)
    tape.collect()
    assert len(tape.known.by_id) < 20


def test_threads_that_ask_change_no_program() -> None:
    """One records, and another one asks all the time what is known: each program is what it is without that."""
    tape, over, wrong = Tape(), threading.Event(), 0
    probe = torch.zeros(1)

    def ask() -> None:
        while not over.is_set():
            tape.find(probe)

    def record() -> tuple[object, ...]:
        x = fresh(3)
        with torch.no_grad():
            weight = torch.zeros(3) + 2
        weight.add_(1)
        loss = (x.exp() * weight).sum() + torch.ones(3).sum()
        value = tape.find(loss)
        assert value is not None
        calls, leaves, output = described(tape.program(value)[0])
        tape.forget(over=[value.id])
        return calls, leaves, output

    asking, before = threading.Thread(target=ask), sys.getswitchinterval()
    with TapeMode(tape):
        usual = record()
        sys.setswitchinterval(1e-5)
        asking.start()
        try:
            for _ in range(600):
                wrong += record() != usual
        finally:
            over.set()
            asking.join()
            sys.setswitchinterval(before)
    assert not wrong and not tape.broken


def test_what_cannot_be_understood_is_forgotten_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one step that is not recorded, and the next one is."""
    tape = Tape()
    with TapeMode(tape):
        kept = fresh(3) * 2
        with monkeypatch.context() as patched:
            patched.setattr(Scribe, "_after_call", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                tape.forget(over=None)
        assert not tape.broken and not tape.notes.pending
        loss = (kept * 3).sum()
    assert tape.find(loss) is not None


def test_another_thread_may_ask() -> None:
    """A backward pass asks where it runs."""
    tape = Tape()
    with TapeMode(tape):
        loss = (fresh(3) * 2).sum()
        found: list[object] = []
        asking = threading.Thread(target=lambda: found.append(tape.find(loss)))
        asking.start()
        asking.join()
    assert found[0] is not None and found[0] is tape.find(loss)


def test_what_cannot_be_understood_stops_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is found out where nobody of ours has called."""

    def fail(*args: object) -> None:
        raise ValueError("a bug of ours")

    policy = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    monkeypatch.setattr(Scribe, "_after_call", fail)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(3):
            policy(torch.ones(2, 3)).mul(2).sum().backward()
            optimizer.step()
    assert scope.steps == 3 and sum("a bug of ours" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("settled", [False, True], ids=["waiting", "understood"])
@pytest.mark.parametrize("whole", ["whole", "part", "view", "pieces"])
@pytest.mark.parametrize("big", [True, False], ids=["large", "small"])
def test_a_buffer_that_numpy_has_filled_is_data(settled: bool, whole: str, big: bool) -> None:
    """It was made of nothing, as zeros; what is read in it is what is there. One that nobody has filled still is what made it."""
    shape = (1 << 10, 1 << 10) if big else (4, 3)
    tape = Tape()
    with TapeMode(tape):
        rewards, mask = torch.zeros(shape), torch.ones(shape)
        array, view = rewards.numpy(), rewards[1:, 1:]
        if settled:
            tape.settle()
        array[...] = 2.0
        read = {"whole": rewards, "part": rewards[0], "view": view.T[0, 0], "pieces": rewards.unbind()[1]}[whole]
        loss = (read * (mask if whole == "whole" else mask[0]) * torch.ones(3 if not big else shape[1], requires_grad=True)).sum()
    program, tensors = tape.program(tape.value_of(loss))
    assert float(program.execute(tensors).values[program.output].detach()) == float(loss.detach())
    assert [float(tensor.max()) for leaf, tensor in tensors.items() if not tensor.requires_grad] == [2.0]


def test_what_an_extension_makes_of_nothing_is_made_once() -> None:
    """Nobody knows what it does besides."""
    made: list[int] = []
    with torch.library._scoped_library("nanscope_made", "FRAGMENT") as library:
        library.define("noise(int n) -> Tensor")

        def noise(n: int) -> Tensor:
            made.append(n)
            return torch.full((n,), float(len(made)))

        library.impl("noise", noise, "CompositeExplicitAutograd")
        tape = Tape()
        with TapeMode(tape):
            given = torch.ops.nanscope_made.noise(3)
            loss = (given * torch.ones(3, requires_grad=True)).sum()
            tape.settle()
            assert float(loss.detach()) == 3.0
        tape.value_of(loss)
    assert made == [3]
