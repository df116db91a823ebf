"""Two steps beside each other: where they part is where they were made to."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from recorded import record
from torch import Tensor

from nanscope.compare.steps import apart, compare, histories, replayed
from nanscope.errors import NanscopeError
from nanscope.program.calls import Computes
from nanscope.program.program import Program
from nanscope.report.compare import print_comparison
from nanscope.snapshot.history import Entry
from nanscope.snapshot.step import Reached, Snapshot


def loss(logps: Tensor, old_logps: Tensor, mask: Tensor, clip: float = 0.2) -> Tensor:
    ratio = torch.exp(logps - old_logps)
    clipped = torch.clamp(ratio, 1 - clip, 1 + clip)
    per_token = -torch.min(ratio, clipped) * mask
    return per_token.sum() / mask.sum()


def given(**changes: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(0)
    old = -torch.rand(3, 4)
    found = {"logps": (old + 0.01).requires_grad_(), "old_logps": old, "mask": torch.ones(3, 4)}
    return {**found, **changes}


def step(function: Callable[..., Tensor] = loss, **changes: Tensor) -> Snapshot:
    """A recorded step of a loss."""
    recorded = record(function, *given(**changes).values())
    grads = recorded.program.execute(recorded.tensors).grads
    kept = {leaf.id: grads[leaf.id] for leaf in recorded.program.leaves if leaf.id in grads}
    return Snapshot(1, 0, recorded.program, recorded.tensors, recorded.loss, kept, Reached())


def test_a_step_is_the_same_as_itself() -> None:
    """Every call gives the same bits, and that is said."""
    found = compare(step(), step())
    assert found.same and found.alike == found.calls > 4 and "the same" in found.sentence


def test_a_batch_that_differs_is_followed_to_the_first_call() -> None:
    """What came in is named, with how far it is apart, and the call is said to be fed."""
    old = given()["old_logps"].clone()
    old[1, 2] -= 200.0
    found = compare(step(), step(old_logps=old))
    (leaf,) = [leaf for leaf in found.leaves if leaf.apart is not None]
    assert leaf.name == "old_logps" and leaf.apart is not None and leaf.apart.index == (1, 2) and leaf.apart.elements == 1
    assert math.isclose(leaf.apart.largest, 200.0, rel_tol=1e-5)
    assert found.first is not None and found.first.fed and found.first.op == "sub" and found.born is None
    assert found.parted is not None and found.parted.op == "exp" and found.parted.apart is not None and found.parted.apart.bad_b == 1
    assert "old_logps" in found.sentence and "one side only" in found.sentence


def test_a_setting_that_differs_is_born_at_its_call() -> None:
    """On the same operands another result: the numbers that the code gives are told."""
    found = compare(step(), step(lambda logps, old_logps, mask: loss(logps, old_logps, mask, 0.005)))
    assert found.born is not None and found.born.op == "clamp" and not found.born.fed
    assert "0.8" in found.born.settings and "0.995" in found.born.settings


def test_calls_that_one_alone_has_are_listed() -> None:
    """Another loss is another loss, and is not compared as if it were the same."""

    def other(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
        ratio = torch.exp(logps - old_logps)
        return -(ratio * mask).sum() / mask.sum()

    found = compare(step(), step(other))
    assert found.only_a and not found.same and "not the same code" in found.sentence


def test_what_was_recorded_against_what_comes_out() -> None:
    """The same machine gives the same bits; a loss that was recorded otherwise is told with its distance."""
    one = step()
    assert replayed(one).same
    assert one.loss is not None
    found = replayed(replace(one, loss=one.loss + 0.5))
    (leaf,) = [leaf for leaf in found.leaves if leaf.apart is not None]
    assert leaf.name == "loss" and leaf.apart is not None and math.isclose(leaf.apart.largest, 0.5, rel_tol=1e-5)


def test_histories_part_at_a_step() -> None:
    """Each column is told by the first step at which it differs, and at how many it does."""
    a = [Entry(n, 0, 0.0, loss=1.0 / n, grad_norm=1.0) for n in range(1, 9)]
    b = [replace(entry, time=5.0, loss=entry.loss if entry.step < 5 else math.nan) for entry in a]
    (line,) = histories(a, b)
    assert (line.name, line.step, line.a, line.b, line.differ, line.steps) == ("loss", 5, 0.2, "nan", 4, 8)
    assert histories(a, [entry for entry in a if entry.step > 3]) == ()


@pytest.mark.parametrize(
    ("a", "b", "elements"),
    [
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), None),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf]), 1),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), 1),
        (torch.tensor([True, False]), torch.tensor([False, False]), 1),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]), None),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), 1),
        (torch.empty(0), torch.empty(0), None),
        (torch.tensor(3.0), torch.tensor(4.0), 1),
        (torch.tensor([0.0]), torch.tensor([-0.0]), None),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.5], dtype=torch.bfloat16), 1),
    ],
    ids=str,
)
def test_how_far_two_tensors_are_apart(a: Tensor, b: Tensor, elements: int | None) -> None:
    """Of any dtype and shape; a NaN is one like the other."""
    found = apart(a, b)
    assert (None if found is None else found.elements) == elements


def test_it_is_said_on_a_terminal_and_as_json() -> None:
    """The sentence first; nothing of it is no JSON."""
    old = given()["old_logps"].clone()
    old[0, 0] = -300.0
    found = compare(step(), step(old_logps=old), ("rank 0", "rank 1"))
    stream = io.StringIO()
    print_comparison(found, file=stream)
    text = stream.getvalue()
    assert text.startswith("● what came in differs (old_logps") and "rank 1" in text and "[0, 0]" in text
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["same"] is False


def test_what_computes_no_loss_is_not_compared_with_one() -> None:
    """The update of an optimizer is no loss; it is told that there is nothing to compare, in one line."""
    one = step()
    for other in (replace(one.program, computes=Computes.UPDATE), Program((), (), -1)):
        with pytest.raises(NanscopeError) as caught:
            replayed(replace(one, program=other, tensors={} if not other.calls else one.tensors))
        assert caught.value.slug == "nothing-to-compare"


def test_a_result_of_another_shape_is_a_difference() -> None:
    """A file can keep anything beside its program."""
    one = step()
    leaf = next(iter(one.grads))
    for other in (replace(one, loss=torch.zeros(3)), replace(one, grads={leaf: torch.zeros(2)})):
        found = replayed(other)
        assert not found.same and any("in the file" in leaf.note for leaf in found.leaves)
