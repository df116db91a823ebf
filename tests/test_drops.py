"""Does the loss count an element: what takes it out on the way, by which mask, and what only weighs it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import Recorded, leaf, record
from torch import Tensor

import nanscope
from nanscope.locate.drops import Drops
from nanscope.locate.names import Names
from nanscope.locate.observe import observe
from nanscope.roles import Role

INF, NAN = math.inf, math.nan


def made_by(recorded: Recorded, op: str) -> int:
    """The result of the first call of an operator."""
    return next(out for call in recorded.program.calls if call.name == op for out in call.outs if out is not None)


def made_by_last(recorded: Recorded, op: str) -> int:
    """The result of the last one."""
    return next(out for call in reversed(recorded.program.calls) if call.name == op for out in call.outs if out is not None)


def hole() -> Tensor:
    """A mask of [2, 3] in which the last element does not count."""
    return torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])


def spike() -> Tensor:
    """Exponents of [2, 3], the last of which is large."""
    return torch.tensor([[0.1, -0.2, 0.3], [0.0, 0.2, 9.0]], requires_grad=True)


@dataclass(frozen=True)
class Case:
    """A loss whose first exp is followed at its last element. how: of the drops. by: what the first one is called. zero: a coefficient."""

    name: str
    loss: Callable[..., Tensor]
    args: Callable[[], tuple[Tensor, ...]]
    masked: bool | None
    how: tuple[str, ...] = ()
    by: str | None = None
    zero: str | None = None


def weighed(x: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    weights = mask * advantages
    return (x.exp() * weights).sum()


def clipped(x: Tensor, advantages: Tensor) -> Tensor:
    ratio = x.exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def in_pieces(x: Tensor, advantages: Tensor) -> Tensor:
    ratio = x.exp()
    return torch.stack([clipped_ratio(ratio[row : row + 1], advantages[row : row + 1]) for row in range(2)]).sum()


def clipped_ratio(ratio: Tensor, advantages: Tensor) -> Tensor:
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def cross_entropy(x: Tensor, y: Tensor) -> Tensor:
    return -(y * x.exp() + (1 - y) * x.exp().log()).sum()


def contracted(x: Tensor, mask: Tensor) -> Tensor:
    ratio = x.exp()
    return torch.einsum("bt,bt->", ratio, mask) / mask.sum()


def lengths_mask(x: Tensor, lengths: Tensor) -> Tensor:
    keep = torch.arange(3)[None, :] < lengths[:, None]
    return (x.exp() * keep).sum()


CASES = [
    Case("counted", lambda x, mask: (x.exp() * mask).sum(), lambda: (spike(), torch.ones(2, 3)), False),
    Case("multiplied", lambda x, mask: (x.exp() * mask).sum(), lambda: (spike(), hole()), True, ("mask",), "mask"),
    Case("multiplied by an unnamed mask", lambda x, z: (x.exp() * z).sum(), lambda: (spike(), hole()), True, ("mask",), "z"),
    Case("multiplied by a comparison", lengths_mask, lambda: (spike(), torch.tensor([3, 2])), True, ("mask",), "keep"),
    Case("multiplied by mask and coefficient", weighed, lambda: (spike(), hole(), torch.full((2, 1), 2.0)), True, ("mask",), "mask"),
    Case("multiplied by a row", lambda x, mask: (x.exp() * mask).sum(), lambda: (spike(), torch.tensor([[1.0], [0.0]])), True, ("mask",), "mask"),
    Case("contracted", contracted, lambda: (spike(), hole()), True, ("mask",), "mask"),
    Case("where", lambda x, mask: torch.where(mask.bool(), x.exp(), 0.0).sum(), lambda: (spike(), hole()), True, ("select",)),
    Case("masked_fill", lambda x, mask: x.exp().masked_fill(mask == 0, 0.0).sum(), lambda: (spike(), hole()), True, ("select",)),
    Case("index", lambda x, mask: x.exp()[mask.bool()].sum(), lambda: (spike(), hole()), True, ("select",)),
    Case("slice", lambda x: x.exp()[:, :2].sum(), lambda: (spike(),), True, ("select",)),
    Case("a piece that nobody takes", lambda x: x.exp().split(1)[0].sum(), lambda: (spike(),), True, ("select",)),
    Case("minimum", clipped, lambda: (spike(), torch.ones(2, 1)), True, ("clamp", "clip")),
    Case("minimum, row by row", in_pieces, lambda: (spike(), torch.ones(2, 1)), True, ("clamp", "clip")),
    Case("a row that nobody takes", lambda x: x.exp()[0:1].sum(), lambda: (spike(),), True, ("select",), "slice"),
    Case("minimum that picks it", clipped, lambda: (spike(), -torch.ones(2, 1)), False, ("clamp",)),
    Case("clamp", lambda x: x.exp().clamp(max=100.0).sum(), lambda: (spike(),), True, ("clamp",)),
    Case("a coefficient", lambda x, advantages: (x.exp() * advantages).sum(), lambda: (spike(), torch.tensor([[1.5], [0.0]])), False, (), None, "advantages"),
    Case("a 0 of the code", lambda x: (x.exp() * 0.0).sum() + x.mean(), lambda: (spike(),), False, (), None, "a coefficient"),
    Case("labels", cross_entropy, lambda: (spike(), hole()), False, (), None, "y"),
    Case("a scalar", lambda x: x.sum().exp() * 2, lambda: (torch.tensor(1.0, requires_grad=True),), None),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_an_element_is_followed_to_the_loss(case: Case) -> None:
    """Masks, selections, bounds and the other side of a minimum take it out; a coefficient that is 0 does not."""
    recorded = record(case.loss, *case.args())
    value = made_by(recorded, "exp")
    masked, drops, zero = recorded.trace.drops.of(value, recorded.trace.values[value].numel() - 1)
    assert (masked, tuple(drop.how for drop in drops), zero) == (case.masked, case.how, case.zero)
    if case.by is not None:
        assert drops[0].name == case.by


def test_a_number_in_the_place_of_nan_is_still_the_same_token() -> None:
    """nan_to_num replaces the value; the token counts, unless a mask takes that out, too."""

    def loss(x: Tensor, mask: Tensor) -> Tensor:
        return (torch.nan_to_num(x.exp() * 1.0, 0.0, 0.0, 0.0) * mask).sum()

    for mask, out in ((torch.ones(2, 3), False), (hole(), True)):
        x = spike().detach()
        x[1, 2] = 200.0
        recorded = record(loss, x.requires_grad_(), mask)
        masked, drops, _ = recorded.trace.drops.of(made_by(recorded, "exp"), 5)
        assert masked is out and drops[0].how == "replace"


def test_p_in_p_log_p_is_no_mask() -> None:
    """A probability of 0 weighs its own logarithm: that is a coefficient, however much it looks like a mask."""

    def loss(p: Tensor) -> Tensor:
        return -(p * p.log()).sum()

    recorded = record(loss, torch.tensor([1.0, 0.0, 1.0], requires_grad=True))
    masked, drops, _ = recorded.trace.drops.of(made_by(recorded, "log"), 1)
    assert masked is False and not drops


@pytest.mark.parametrize("number", [-INF, torch.tensor(-INF)])
def test_a_bias_that_is_made_of_a_mask_takes_nothing_out(number: float | Tensor) -> None:
    """(1 − mask) · −inf is to be added: where its factor is 0 the element counts."""
    attended = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    recorded = record(lambda x, mask: (x + (1.0 - mask) * number).softmax(-1).square().sum(), spike().requires_grad_(), attended)
    value = made_by(recorded, "mul")
    assert recorded.trace.drops.own_mask(recorded.program.producers[value], value, 0) is None
    assert recorded.location is not None and not recorded.location.origin.masked


@pytest.mark.parametrize(("mask", "found"), [(hole(), True), (torch.full((2, 3), 0.5), False)], ids=["a mask", "no zeros"])
def test_the_product_that_is_the_origin_names_its_mask(mask: Tensor, found: bool) -> None:
    """0 · inf is made by the product itself: the drop is at that call."""
    x = spike().detach()
    x[1, 2] = INF if found else NAN
    recorded = record(lambda x, mask: (x * mask).sum(), x.requires_grad_(), mask)
    value = made_by(recorded, "mul")
    drop = recorded.trace.drops.own_mask(recorded.program.producers[value], value, 5)
    assert (drop is not None) is found
    if drop is not None:
        assert (drop.how, drop.name, drop.call) == ("mask", "mask", recorded.program.producers[value])


IS_MASK: list[tuple[str, Callable[[Tensor, Tensor], Tensor], bool]] = [
    ("zeros and ones", lambda x, z: x * z, True),
    ("a comparison", lambda x, z: x * (z > 0.5), True),
    ("its complement", lambda x, z: x * (1 - (z > 0.5).float()), True),
    ("a product of masks", lambda x, z: x * ((z > 0.5).float() * (z < 2)), True),
    ("masks together", lambda x, z: x * ((z > 0.5).float() + (z > 2)), True),
    ("other numbers", lambda x, z: x * z.cumsum(-1), False),
    ("zeros alone", lambda x, z: x * (z * 0.0), False),
    ("zeros of a comparison", lambda x, z: x * (z > 2), True),
    ("a mask less a quantity", lambda x, z: x * ((z > 0.5).float() - z.sigmoid()), False),
    ("a soft weight", lambda x, z: x * z.sigmoid(), False),
]


@pytest.mark.parametrize(("weigh", "says"), [row[1:] for row in IS_MASK], ids=[row[0] for row in IS_MASK])
def test_a_mask_says_which_elements_count_and_not_how_much(weigh: Callable[[Tensor, Tensor], Tensor], says: bool) -> None:
    """Zeros and ones, comparisons, and what is made of these alone."""
    recorded = record(lambda x, z: weigh(x, z).sum(), spike(), hole())
    product = next(call for call in reversed(recorded.program.calls) if call.name == "mul")
    assert recorded.trace.drops.is_mask(list(product.inputs())[-1], None) is says


def test_what_has_a_gradient_is_no_mask_whatever_it_is_called() -> None:
    """A loss may be called `keep`: it says how much, and an infinity that is made of it is nobody's intention."""

    def loss(x: Tensor, temperature: float = 0.0) -> Tensor:
        keep = -torch.nn.functional.logsigmoid(x)
        scaled = (keep * 0.5 - x) / temperature
        return scaled.mean()

    recorded = record(loss, torch.tensor([2.0, -2.0], requires_grad=True))
    assert not recorded.trace.names.says_mask(made_by(recorded, "neg"))
    location = recorded.location
    assert location is not None and (location.origin.op, location.origin.variable, location.origin.index) == ("div", "scaled", (0,))


def test_zeros_that_came_in_are_a_mask_only_by_their_name() -> None:
    """A batch in which nobody scored, and one in which nothing counts."""
    x = torch.ones(2, 3, requires_grad=True)
    scored = record(lambda x, bonus: (x * bonus).sum(), x, torch.zeros(2, 3))
    counted = record(lambda x, mask: (x * mask).sum(), x, torch.zeros(2, 3))
    says = [one.trace.drops.is_mask(one.program.leaves[-1].id, torch.ones(2, 3, dtype=torch.bool)) for one in (scored, counted)]
    assert says == [False, True]


TURNED: list[tuple[str, Callable[[Tensor, Tensor], Tensor]]] = [
    ("in another shape", lambda mask, gain: (mask * gain).flatten()[:, None].expand(6, 4)),
    ("a row of it", lambda mask, gain: (mask * gain)[0].expand(5, 3)),
    ("turned and put together", lambda mask, gain: torch.stack([(mask * gain).t(), (mask * gain).t()])),
]


@pytest.mark.parametrize("turn", [row[1] for row in TURNED], ids=[row[0] for row in TURNED])
@pytest.mark.parametrize("by_mask", [True, False])
def test_what_makes_a_factor_0_is_found_where_it_came_from(turn: Callable[[Tensor, Tensor], Tensor], by_mask: bool) -> None:
    """A factor of 0 may have been moved and widened on its way: it is a mask only if the mask was 0 at that element."""
    mask, gain = torch.ones(2, 3), torch.full((2, 3), 1.5)
    mask[1, 2] = 0  # another element, if that is not it
    (mask if by_mask else gain)[0, 1] = 0
    shape = turn(mask, gain).shape
    recorded = record(lambda x, mask, gain: (x * turn(mask, gain)).sum(), torch.ones(shape, requires_grad=True), mask, gain)
    product = next(call for call in reversed(recorded.program.calls) if call.name == "mul")
    factor = list(product.inputs())[-1]
    widened = turn(torch.arange(6).reshape(2, 3), torch.ones(2, 3, dtype=torch.int64)) == 1
    assert recorded.trace.drops.is_mask(factor, widened) is by_mask


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=6, max_size=6), st.sampled_from(["mul", "where", "index", "fill"]))
def test_every_element_of_every_mask(kept: list[bool], masking: str) -> None:
    """Counted is exactly what the mask keeps, however it is applied."""
    mask = torch.tensor(kept).reshape(2, 3)
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "mul": lambda x, mask: (x.exp() * mask).sum(),
        "where": lambda x, mask: torch.where(mask, x.exp(), 0.0).sum(),
        "index": lambda x, mask: x.exp()[mask].sum(),
        "fill": lambda x, mask: x.exp().masked_fill(~mask, 0.0).sum(),
    }
    recorded = record(losses[masking], leaf(2, 3), mask)
    value = made_by(recorded, "exp")
    assert [recorded.trace.drops.of(value, flat)[0] for flat in range(6)] == [not keep for keep in kept]


class Counting(Names):
    """Names that know how often they were asked."""

    asked = 0

    def named(self, value: int) -> Role | None:
        self.asked += 1
        return super().named(value)


def test_what_a_mask_is_made_of_is_asked_once() -> None:
    """Both sides of a choice may be the same mask, at every call: 2^18 ways lead back, and one question is asked of each value."""

    def loss(x: Tensor, mask: Tensor) -> Tensor:
        low = mask - 3.0
        for _ in range(18):
            low = torch.where(x > 0, low, low)
        return ((x * 100).exp() * low).sum()

    recorded = record(loss, spike(), hole())
    names = Counting(recorded.program)
    assert Drops(recorded.program, recorded.run, names).is_mask(made_by_last(recorded, "where"), None)
    assert names.asked < 50


def test_a_key_that_attention_gives_no_weight_is_left_out() -> None:
    """Of a padded row in a product with the weights of a softmax nothing comes to the queries that mask it."""

    def loss(hidden: Tensor, keep: Tensor, mask: Tensor) -> Tensor:
        bad = hidden.log()
        scores = (bad @ bad.t()).masked_fill(~keep, -INF)
        return ((scores.softmax(-1) @ bad) * mask).sum() / mask.sum()

    hidden = torch.rand(3, 4) + 0.5
    hidden[2] = -1.0
    keep = torch.tensor([[True, False, False], [True, True, False], [True, True, True]])
    location = record(loss, hidden.requires_grad_(), keep, torch.tensor([[1.0], [1.0], [0.0]])).location
    assert location is not None
    assert (location.origin.op, location.origin.index, location.origin.masked) == ("log", (2, 0), True)
    counted = record(loss, hidden, keep, torch.ones(3, 1)).location
    assert counted is not None
    assert counted.origin.masked is False


def attended(x: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """Two layers of attention in which nobody looks at the first position, and a loss that leaves it out."""
    for _ in range(2):
        scores = (x @ x.transpose(-1, -2)).masked_fill(~keys, -INF)
        x = x + scores.softmax(-1) @ x
    return (x.sum(-1) * mask).sum()


def test_who_is_looked_at_with_a_weight_of_0_is_not_read() -> None:
    """A row of padding goes into what is around it with attention weights of 0, and into the loss not at all."""
    keys = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    keys[:, :, 0] = False
    x = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    location = record(attended, x, keys, torch.tensor([[0.0, 1.0, 1.0, 1.0]])).location
    assert location is not None
    assert (location.origin.op, location.origin.index, location.origin.masked) == ("_softmax", (0, 0, 0), True)
    counted = record(attended, x, keys, torch.ones(1, 4)).location
    assert counted is not None and counted.origin.masked is False


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_what_a_loss_of_classes_ignores_is_left_out_by_its_labels(reduction: str) -> None:
    """All logits of a token that is ignored, and of none that counts."""
    targets = torch.tensor([1, -100, 0])

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        found = torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)
        return found if reduction != "none" else found.mean()

    recorded = record(loss, torch.randn(3, 4, requires_grad=True), targets)
    logits = next(one.id for one in recorded.program.leaves if one.diff)
    for row, out in enumerate((False, True, False)):
        for column in range(4):
            found, taken, _ = recorded.trace.drops.of(logits, 4 * row + column)
            assert found is out
            assert [(drop.how, drop.name) for drop in taken] == ([("select", "labels")] if out else [])


def test_what_counts_on_another_way_is_taken_out_by_nothing() -> None:
    """An element that one product leaves out and another reads counts, and no name is given of what takes it out."""
    recorded = record(
        lambda x, mask: (x.exp() * mask).sum() + x.exp().sum() + x[:, :2].sum(), spike().detach().add(90).requires_grad_(), hole()
    )
    location = recorded.location
    assert location is not None
    told = observe(location, recorded.trace).origin
    assert told.masked in (False, None) and told.masked_by is None


def test_a_weight_is_no_token(tmp_path: Path) -> None:
    """Whether the loss counts it is no question, though a mask of its shape is 0 there."""
    model = torch.nn.Linear(3, 2, bias=False)
    model.weight.data[1, 2] = NAN
    with nanscope.watch(model, out=tmp_path) as scope:
        (model.weight * hole()).sum().backward()  # type: ignore[no-untyped-call]
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.origin.masked, incident.origin.masked_by) == ("weights", None, None)


@pytest.mark.parametrize(("hidden", "tokens", "padding"), [(True, 0.0, True), (True, 1.0, False), (False, 0.0, False)])
def test_a_query_that_is_hidden_from_all_as_a_key_is_padding(hidden: bool, tokens: float, padding: bool) -> None:
    """Its own row is hidden from it in every case; and a mask says that it is no token. What it spoils may reach the others all the same."""

    def loss(scores: Tensor, mask: Tensor, token_mask: Tensor) -> Tensor:
        looked = (scores + mask).softmax(-1).sum((1, 3))
        return looked.sum() + (looked * token_mask).sum()

    mask = torch.full((1, 2, 3, 3), -INF).triu(1)
    mask[..., 0, :] = -INF
    if hidden:
        mask[..., 0] = -INF
    location = record(loss, torch.randn(1, 2, 3, 3, requires_grad=True), mask, torch.tensor([[tokens, 1.0, 1.0]])).location
    assert location is not None
    assert (location.origin.op, location.origin.index) == ("_softmax", (0, 0, 0, 0))
    assert (location.origin.masked, "padding" in [drop.how for drop in location.origin.drops]) == (padding, padding)


def gathered(lps: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    return -torch.where(mask.bool(), (lps.exp() - 1.0).gather(-1, ids)[..., 0], 0.0).sum()


@pytest.mark.parametrize("column", [0, 2])
def test_which_number_of_a_token_is_read_is_no_mask(column: int) -> None:
    """Whether the element is the one that is gathered or another of its token: the mask leaves both out."""
    ids = torch.zeros(2, 3, 1, dtype=torch.int64)
    recorded = record(gathered, leaf(2, 3, 4), ids, hole())
    masked, drops, _ = recorded.trace.drops.of(made_by(recorded, "exp"), (1 * 3 + 2) * 4 + column)
    assert masked is True and [(drop.how, drop.name) for drop in drops][:1] == [("select", "mask")], drops


def filled_in(pg: Tensor, mask: Tensor) -> Tensor:
    return pg.masked_fill(mask == 0, 0.0)


def taken(pg: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), pg, 0.0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("choose", [filled_in, taken])
def test_a_choice_by_the_mask_wins_over_a_clip(choose: Callable[[Tensor, Tensor], Tensor], sign: float) -> None:
    """Which side the minimum took of a masked token says nothing."""

    def loss(x: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        ratio = x.exp()
        pg = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return choose(pg, mask).sum()

    recorded = record(loss, spike(), hole(), torch.full((2, 1), sign))
    masked, drops, _ = recorded.trace.drops.of(made_by(recorded, "exp"), 5)
    assert masked is True and any((drop.how, drop.name) == ("select", "mask") for drop in drops), drops


def test_the_first_that_counts_is_found_among_all_that_are_bad() -> None:
    """By one pass where each element stays in its place, and by halves where it does not."""
    mask = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
    for loss in (lambda x, mask: (x.exp() * mask).sum(), lambda x, mask: (x.exp().flip(0) * mask.flip(0)).sum()):
        recorded = record(loss, torch.full((2, 3), 100.0, requires_grad=True), mask)
        value = made_by(recorded, "exp")
        drops, every = recorded.trace.drops, torch.ones(2, 3, dtype=torch.bool)
        assert drops.first_that_counts(value, every) == 4
        every[1] = False
        assert drops.first_that_counts(value, every) is None
