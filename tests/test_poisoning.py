"""Which bad steps are only consequences of weights that an earlier one had spoilt, and which have a cause of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import clipped_loss, grpo_steps, log_probs, policy, stale_at
from seen import NAN, seen
from torch import Tensor, nn

import nanscope
from nanscope.snapshot.observation import UNSEEN, Observation, Phase
from nanscope.snapshot.record import Aftermath
from nanscope.watching.poisoning import Poisoning

WEIGHT = seen("parameter", NAN, phase=Phase.WEIGHTS)
OF_THE_MODEL = seen("module", NAN)
OWN = seen("exp", NAN, 99.0)


@pytest.mark.parametrize(
    ("told", "observation", "of"),
    [
        ([(3, 2)], WEIGHT, 3),
        ([(3, 2)], OF_THE_MODEL, 3),
        ([(3, 2)], UNSEEN, 3),
        ([(3, 2)], OWN, None),  # weights that this loss does not use may be bad for ever
        ([(2, 1), (3, 2)], WEIGHT, 2),
        ([], WEIGHT, None),  # they were bad before the run began
        ([(3, 2), (4, 0)], WEIGHT, None),  # somebody went back to a checkpoint
        ([(5, 2)], WEIGHT, None),  # the step itself
    ],
)
def test_a_step_is_a_consequence_where_it_was_fed_by_spoilt_weights(
    told: list[tuple[int, int]], observation: Observation, of: int | None
) -> None:
    """Spoilt by an earlier step of this run, which is named. told: step, and weights that were bad after it."""
    poisoning = Poisoning()
    for step, bad in told:
        poisoning.weights(step, bad)
    assert poisoning.of(5, observation) == of


def test_nobody_looks_at_the_steps_that_follow() -> None:
    """Until one was looked at they are, while there is room; then all that the model feeds are taken for what they are."""
    poisoning = Poisoning()
    poisoning.weights(3, 2)
    assert poisoning.explains(4, None, True) is None
    assert poisoning.of(4, WEIGHT) == 3


def test_consequences_are_counted_by_their_cause() -> None:
    """First and last, and how many between them."""
    poisoning = Poisoning()
    for step, of in ((4, 3), (5, 3), (9, 3), (20, 12)):
        poisoning.add(step, of)
    assert poisoning.aftermath == [Aftermath(3, 4, 9, 3), Aftermath(12, 20, 20, 1)]


def test_sixty_bad_steps_are_one_cause_and_a_line(tmp_path: Path) -> None:
    """The consequences take none of the places: of them the first is saved."""
    with nanscope.watch(out=tmp_path, limit=1) as scope:
        grpo_steps(policy(), 60, stale_at(0, 3, step=49))
    verdict = scope.verdict
    assert [(i.step, i.consequence_of) for i in verdict.incidents] == [(50, None), (51, 50)] and verdict.bad_steps == 11
    assert [incident.step for incident in verdict.causes] == [50]
    assert verdict.aftermath == (Aftermath(50, 51, 60, 10),)
    assert sorted(path.name for path in scope.out.glob("*.safetensors")) == [f"step-0000{n}.rank0.safetensors" for n in (50, 51)]


def test_a_later_cause_still_has_its_place(tmp_path: Path) -> None:
    """Back at healthy weights after a poisoned stretch that was longer than the limit, the next fault is saved, and named first of its own."""
    model = policy()
    healthy = {name: value.clone() for name, value in model.state_dict().items()}
    with nanscope.watch(out=tmp_path, limit=2) as scope:
        grpo_steps(model, 6, stale_at(0, 3, step=1))
        model.load_state_dict(healthy)
        grpo_steps(model, 3, stale_at(0, 3, step=0))
    assert [(i.step, i.consequence_of) for i in scope.verdict.incidents] == [(2, None), (3, 2), (7, None), (8, 7)]
    assert scope.verdict.aftermath == (Aftermath(2, 3, 6, 4), Aftermath(7, 8, 9, 2))


class TwoHeads(nn.Module):
    """Of which the loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = policy(), policy()

    def forward(self, ids: Tensor, other: bool) -> Tensor:
        found: Tensor = (self.other if other else self.one)(ids)
        return found


def test_bad_weights_that_a_loss_does_not_use_explain_nothing(tmp_path: Path) -> None:
    """One head is spoilt in step 1; what goes wrong on the other one afterwards is a cause, each time."""
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(3):
            optimizer.zero_grad()
            ids = torch.randint(0, 20, (4, 7))
            logps = log_probs(model(ids[:, :-1], other=step > 0), ids[:, 1:])
            old = logps.detach().clone()
            old[0, step] = -200.0
            if step != 1:
                (clipped_loss(logps, old, torch.tensor([1.0, -1.0, 0.5, -0.5]), torch.ones(4, 6))).backward()
                optimizer.step()
    assert [(i.step, i.origin.variable, i.consequence_of) for i in scope.verdict.incidents] == [(1, "ratio", None), (2, "ratio", None)]


class Plain:
    """An optimizer that is none of torch's."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)

    def step(self, loss_of: Callable[[], Tensor]) -> None:
        loss_of()
        with torch.no_grad():
            for parameter in self.parameters:
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "torch": lambda model: torch.optim.SGD(model.parameters(), 0.1),
    "closures": lambda model: torch.optim.LBFGS(model.parameters(), 0.1, max_iter=4),
    "foreign": lambda model: Plain(model.parameters()),
}


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_nan_is_one_origin_and_one_line_of_consequences_with_any_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, wants: bool
) -> None:
    """On the log, in the history and in the verdict, also where nobody sees the update, or it asks for the loss several times.

    wants: the input has a gradient of its own, which nobody zeroes.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = OPTIMIZERS[kind](model)
    with nanscope.watch(model, out=tmp_path) as scope:
        for step in range(1, 7):

            def loss_of(step: int = step) -> Tensor:
                model.zero_grad()
                loss = model(torch.ones(3, 4, requires_grad=wants)).pow(2).mean()
                loss = torch.log(loss * 0) if step == 3 else loss
                loss.backward()
                return loss

            optimizer.step(loss_of)
    verdict = scope.verdict
    assert [incident.step for incident in verdict.causes] == [3] and (scope.steps, verdict.bad_steps) == (6, 4)
    assert [(entry.step, entry.nonfinite) for entry in scope.history.entries] == [(step, step > 2) for step in range(1, 7)]
    assert verdict.aftermath == (Aftermath(3, 4, 6, 3),)
    lines = [record.getMessage() for record in caplog.records if "bad-step" in record.getMessage()]
    assert len(lines) == 2 and "log(0)" in lines[0] and "the weights are non-finite since step 3" in lines[1]


def test_a_good_step_ends_what_nobody_saw_begin(tmp_path: Path) -> None:
    """Weights that are bad later on were not spoilt by what came before it."""
    model = nn.Linear(2, 1)
    optimizer = Plain(model.parameters())
    with nanscope.watch(model, out=tmp_path) as scope:
        for step in range(1, 7):
            if step == 5:
                nn.init.constant_(model.weight, NAN)

            def loss_of(step: int = step) -> Tensor:
                model.zero_grad()
                loss = model(torch.ones(3, 2)).pow(2).mean()
                (torch.log(loss * 0) if step == 2 else loss).backward()
                if step == 2:
                    for parameter in model.parameters():
                        parameter.grad = torch.zeros_like(parameter)
                return loss

            optimizer.step(loss_of)
    assert [(incident.step, incident.consequence_of) for incident in scope.verdict.incidents] == [(2, None), (5, None), (6, 5)]


@pytest.mark.parametrize("signs", [(1.0, 1.0), (-1.0, -1.0), (1.0, -1.0)])
@pytest.mark.parametrize("target", [False, True])
def test_weights_that_an_update_made_infinite_spoilt_the_next_step(tmp_path: Path, signs: tuple[float, float], target: bool) -> None:
    """An infinity of a weight is no mask, whatever its sign, though no element of the weight is finite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    nn.init.ones_(model[2].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=float("inf"))
    with nanscope.watch(*([model] if target else []), out=tmp_path) as scope:
        for x in (signs, (1.0, 1.0)):  # where the signs differ, infinities meet in the product
            optimizer.zero_grad()
            loss = model(torch.tensor([x])).sum()
            loss.backward()
            optimizer.step()
    first, second = scope.verdict.incidents
    assert (first.step, first.phase, second.step, second.consequence_of) == (1, "optimizer", 2, 1), second.sentence
    assert second.cause == "poisoned_weights" and second.origin.role == "weights"


def test_what_nothing_updates_was_not_spoilt_by_an_update(tmp_path: Path) -> None:
    """A reference that is NaN: each step that it spoils follows from the first, and none is said to have written the NaN."""
    model, reference = nn.Linear(2, 2), nn.Linear(2, 2)
    nn.init.constant_(reference.weight, NAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(1, 2)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(2):
            with torch.no_grad():
                wanted = reference(x)
            optimizer.zero_grad()
            (wanted - model(x)).square().sum().backward()
            optimizer.step()
    first, second = scope.verdict.incidents
    assert (first.consequence_of, second.consequence_of) == (None, 1)
    assert all("already NaN at [0, 0] of [2, 2] before the step" in incident.sentence for incident in (first, second)), second.sentence


def test_a_weight_that_came_bad_was_written_by_no_update_and_the_step_that_dies_of_it_is_told(tmp_path: Path) -> None:
    """A row of an embedding that no token reads before the fourth step: its loss is not finite, and all weights are spoilt there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    nn.init.constant_(model[0].weight[0], NAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for number in range(1, 7):
            optimizer.zero_grad()
            model(torch.tensor([1, 2, 3, 0 if number == 4 else 4])).square().mean().backward()
            optimizer.step()
    told = [(incident.step, incident.consequence_of, incident.loss) for incident in scope.verdict.incidents]
    assert [one[:2] for one in told] == [(1, None), (2, 1), (4, 1)] and math.isnan(told[-1][2] or 0.0), told
    first, second, last = (incident.sentence for incident in scope.verdict.incidents)
    assert "the update of step 1" not in f"{first} {second} {last}" and "NaN at [0, 0] of [5, 4] before the step, as in step 1" in last, (
        last
    )
    assert "The loss is NaN" in last and "into 3 weights" in last, last


def row_by_hand(weight: Tensor) -> None:
    weight[0] /= 0


def row_of_data(weight: Tensor) -> None:
    weight.data[0].fill_(math.inf)


def rows_copied(weight: Tensor) -> None:
    weight[:1].copy_(torch.full((1, 4), NAN))


@pytest.mark.parametrize("optimize", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("write", [row_by_hand, row_of_data, rows_copied])
def test_a_row_that_the_loop_spoils_and_no_loss_reads_is_not_the_optimizers(
    tmp_path: Path, write: Callable[[Tensor], None], optimize: Callable[..., torch.optim.Optimizer]
) -> None:
    """The row of a token that comes later: an update keeps what the loop has written there, each step begins with it, and one dies of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    optimizer = optimize(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for number in range(1, 13):
            optimizer.zero_grad()
            model(torch.tensor([1, 2, 3, 0 if number == 9 else 4])).square().mean().backward()
            optimizer.step()
            if number == 3:
                with torch.no_grad():
                    write(model[0].weight)
    told = [(incident.step, incident.phase, incident.consequence_of) for incident in scope.verdict.incidents]
    assert told == [(4, "weights", None), (5, "weights", 4), (9, "weights", 4)], told
    first, *others = (incident.sentence for incident in scope.verdict.incidents)
    assert "wrote it there, test_poisoning.py:" in first and "it was finite in step 3" in first, first
    assert all("before the step, as in step 4" in one for one in others) and "The loss is" in others[-1], others


def test_the_second_micro_batch_of_a_step_does_not_follow_from_its_update(tmp_path: Path) -> None:
    """A weight that somebody made NaN spoils both: the step's update comes after them, and what follows from it is the next step."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, out=tmp_path) as scope:
        for step in (1, 2, 3):
            if step == 2:
                with torch.no_grad():
                    model.weight[1, 0] = NAN
            for _ in range(2):
                model(torch.ones(1, 2)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    told = [(incident.step, incident.consequence_of) for incident in scope.verdict.incidents]
    assert told[0] == (2, None) and (2, 2) not in told and (3, 2) in told, told


def two_optimizers(steps: int, spoil: Callable[[int, nn.Module], None] = lambda number, one: None) -> None:
    """An actor and a critic, each with an optimizer and a step of its own, by turns. spoil: is called before each step, with the actor."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for number in range(1, steps + 1):
        model, optimizer = models[(number + 1) % 2], optimizers[(number + 1) % 2]
        spoil(number, models[0])
        values = model(torch.ones(3, 4))
        loss = (values * 0 if number == 3 else values.square() + 1).log().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_good_weights_of_one_optimizer_do_not_heal_those_of_another(tmp_path: Path) -> None:
    """Both step by turns: all that follows in the spoilt model is a consequence."""
    with nanscope.watch(out=tmp_path) as scope:
        two_optimizers(9)
    verdict = scope.verdict
    assert [(i.step, i.consequence_of) for i in verdict.incidents] == [(3, None), (5, 3)]
    assert verdict.aftermath == (Aftermath(3, 5, 9, 3),)


def test_what_code_that_was_not_recorded_makes_of_spoilt_weights_is_a_consequence(tmp_path: Path) -> None:
    """A model that runs in a transform, and gradients that nobody was seen to make."""
    torch.manual_seed(0)
    weights = {"weight": nn.Parameter(torch.randn(3, 4)), "bias": nn.Parameter(torch.randn(3))}
    base, optimizer = nn.Linear(4, 3), torch.optim.SGD(weights.values(), lr=0.01)
    for by_hand in False, True:
        with nanscope.watch(out=tmp_path) as scope:
            for step in range(1, 6):
                values = torch.func.vmap(lambda x: torch.func.functional_call(base, weights, (x,)))(torch.ones(2, 4))
                loss = (values * 0 if step == 2 else values.square() + 1).log().mean()
                grads = torch.autograd.grad(loss, list(weights.values())) if by_hand else None
                optimizer.zero_grad()
                if grads is None:
                    loss.backward()
                for weight, grad in zip(weights.values(), grads or (), strict=False):
                    weight.grad = grad
                optimizer.step()
        assert [(i.step, i.consequence_of) for i in scope.verdict.incidents] == [(2, None), (3, 2)]
        for weight in weights.values():
            nn.init.normal_(weight)


def test_old_values_that_spoilt_weights_have_made_do_not_hide_them(tmp_path: Path) -> None:
    """They come with the batch and are read first: it is the weights, and the step that wrote them, that are told."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, out=tmp_path) as scope:
        for step in (1, 2, 3):
            optimizer.param_groups[0]["lr"] = float("inf") if step == 2 else 0.1
            with torch.no_grad():
                old = torch.tensor(model(torch.ones(1, 2)).tolist())  # as another process hands them over
            optimizer.zero_grad()
            (old - model(torch.ones(1, 2)) + 1.0).exp().sum().backward()
            optimizer.step()
    incident = scope.verdict.incidents[1]
    assert (incident.step, incident.cause, incident.consequence_of) == (3, "poisoned_weights", 2), incident.sentence


AVERAGED: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {  # an average of weights, by somebody's decay
    "lerp_": lambda mean, weight, decay: mean.lerp_(weight, 1 - decay),
    "copy_": lambda mean, weight, decay: mean.copy_(decay * mean + (1 - decay) * weight),
    "mul_, add_": lambda mean, weight, decay: mean.mul_(decay).add_(weight * (1 - decay)),
}


@pytest.mark.parametrize("by", AVERAGED)
def test_an_average_of_weights_that_goes_bad_is_told_where_it_does(by: str, tmp_path: Path) -> None:
    """Nobody trains it; the loss that reads it is bad in the step after."""
    model, mean = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 24):
            x = torch.randn(4, 3)
            with torch.no_grad():
                wanted = mean(x)
            optimizer.zero_grad()
            (model(x) - wanted).square().mean().backward()
            optimizer.step()
            count = torch.tensor(float(step != 20))
            with torch.no_grad():
                decay = count * 0.9 / count
                for averaged, weight in zip(mean.parameters(), model.parameters(), strict=True):
                    AVERAGED[by](averaged, weight, decay)
    first = scope.verdict.incidents[0]
    assert first.step == 21 and first.origin.op == "div" and first.origin.variable == "decay", first.sentence


@pytest.mark.parametrize("read", [lambda value: value.exp().item(), lambda value: value.exp().detach()], ids=["a number", "detached"])
def test_a_temperature_that_its_own_update_has_spoilt_is_no_data(tmp_path: Path, read: Callable[[Tensor], float | Tensor]) -> None:
    """A weight that is no part of a model, and that the other loss reads without a gradient: its steps are consequences."""
    policy, log_alpha = nn.Linear(4, 6), torch.zeros(1, requires_grad=True)
    optimizers = torch.optim.Adam(policy.parameters()), torch.optim.Adam([log_alpha], 1e-2)

    def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with nanscope.watch(out=tmp_path) as scope:
        for number in range(3):
            alpha = read(log_alpha)
            log_probs = torch.log_softmax(policy(torch.randn(8, 4)), 1)
            step(optimizers[0], (log_probs.exp() * (alpha * log_probs)).sum(1).mean())
            entropy = -(log_alpha.exp() * log_probs.detach().mean()).mean()
            step(optimizers[1], entropy * torch.log(torch.tensor(0.0 if number == 1 else 2.0)))
    found = scope.verdict
    assert found.incidents[0].cause == "log_zero" and {one.cause for one in found.incidents[1:]} <= {"poisoned_weights"}, found.sentence
    assert [one.of for one in found.aftermath] == [found.incidents[0].step]


def test_what_goes_wrong_once_more_after_it_has_spoilt_the_weights_is_a_consequence(tmp_path: Path) -> None:
    """A deviation of 0 that stays 0: the second step would die of the weights as well, and has nothing new to tell."""
    linear = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 7):
            deviation = torch.tensor([5.0, 1.0]).std() if step < 3 else torch.tensor(0.0)
            advantages = (torch.ones(4) - 1) / deviation
            loss = (advantages * linear(torch.randn(4, 3)).squeeze(-1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    verdict = scope.verdict
    assert [incident.step for incident in verdict.causes] == [3]
    assert verdict.aftermath == (Aftermath(3, 4, 6, 3),)


def test_what_a_state_has_kept_is_not_met_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A running mean that has met a NaN is NaN from there on, and the rewards of later steps have nothing to do with it."""
    torch.manual_seed(0)
    policy, mean = nn.Linear(4, 3), torch.zeros(())
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
    with nanscope.watch(policy, optimizer, out=tmp_path, on_nonfinite="skip") as scope:
        for step in range(1, 7):
            rewards = torch.randn(5)
            rewards[2] = float("nan") if step == 3 else 1.0
            mean = 0.9 * mean + 0.1 * rewards.mean()
            loss = -(policy(torch.randn(5, 4)).log_softmax(-1)[:, 0] * (rewards - mean)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = {incident.step: incident for incident in scope.verdict.incidents}
    assert found[3].consequence_of is None and found[4].consequence_of == 3
    (kept,) = [note.text for note in found[4].notes if note.slug == "carried_on"]
    assert kept.startswith("mean (test_poisoning.py:") and "since step 3" in kept
    assert [step for step, incident in found.items() if incident.consequence_of is None] == [3]
    assert "the weights" not in caplog.text and all(bool(weight.isfinite().all()) for weight in policy.parameters())
