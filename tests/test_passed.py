"""A loss that is not finite and that nobody differentiates: the guard of a loop is believed, and a metric is left alone."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.capture import doubts
from nanscope.snapshot.coverage import Status
from nanscope.watching.acting import OnNonFinite

BY_TRAINER = "skipped by the trainer"


@pytest.fixture(params=["at once", "late"])
def read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are read when they are asked about, or, as on a GPU, not before somebody has to know."""
    if request.param == "late":
        monkeypatch.setattr(doubts, "at_hand", lambda tensor: False)


GUARDS: dict[str, Callable[[Tensor], bool]] = {
    "isfinite": lambda loss: not torch.isfinite(loss),
    "isfinite all": lambda loss: not torch.isfinite(loss.detach()).all(),
    "isnan or isinf": lambda loss: bool(torch.isnan(loss) | torch.isinf(loss)),
    "isnan item": lambda loss: bool(torch.isnan(loss).any().item()),
    "isinf or isnan": lambda loss: bool(torch.isinf(loss)) or bool(torch.isnan(loss)),
    "printed": lambda loss: not math.isfinite(loss.item()) and f"{loss.item():.3f}" != "",
    "of copies": lambda loss: math.isinf(loss.double().item()) or bool(torch.isnan(loss.double())),
    "unequal": lambda loss: bool(loss != loss),
    "math": lambda loss: math.isnan(loss.item()),
    "detached": lambda loss: not math.isfinite(float(loss.detach().float())),
    "stacked": lambda loss: bool(torch.stack([loss, loss]).mean().isnan()),
}


def train(guard: Callable[[Tensor], bool], bad: tuple[int, ...] = (3,), steps: int = 5) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        loss = model(torch.randn(6, 4)).pow(2).mean()
        if step in bad:
            loss = torch.log(loss * 0) * 0
        if guard(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.usefixtures("read")
@pytest.mark.parametrize("name", GUARDS)
def test_a_loss_that_a_guard_passes_over_is_an_incident(tmp_path: Path, name: str) -> None:
    """It is a step of its own that the trainer dropped, located like any other."""
    with nanscope.watch(out=tmp_path) as scope:
        train(GUARDS[name])
    incident = scope.verdict.incidents[0]
    assert scope.verdict.status is Status.NONFINITE and len(scope.verdict.incidents) == 1
    assert (incident.step, incident.origin.op, incident.reached["stepped"]) == (3, "log", BY_TRAINER)
    assert incident.origin.expression == "torch.log(loss * 0)" and math.isnan(incident.loss or 0.0)
    assert [(entry.step, entry.nonfinite, entry.stepped) for entry in scope.history.entries] == [
        (1, False, None), (2, False, None), (3, True, BY_TRAINER), (4, False, None), (5, False, None),
    ]  # fmt: skip


@pytest.mark.usefixtures("read")
def test_every_loss_that_is_passed_over_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where no backward pass follows any more; it is told when the loop comes round, and not when the run is over."""
    told: list[int] = []
    with nanscope.watch(out=tmp_path, limit=2) as scope:
        train(lambda loss: told.append(caplog.text.count("bad-step")) or GUARDS["isfinite"](loss), bad=tuple(range(3, 100)), steps=90)
    assert (scope.bad_steps, scope.steps) == (88, 90) and told[-1] >= 1
    assert [incident.step for incident in scope.verdict.incidents] == [3, 4]


@pytest.mark.usefixtures("read")
def test_a_guard_that_raises(tmp_path: Path) -> None:
    """The run ends there, and the verdict says why."""

    def guard(loss: Tensor) -> bool:
        if torch.isnan(loss):
            raise FloatingPointError("the loss is NaN")
        return False

    with pytest.raises(FloatingPointError), nanscope.watch(out=tmp_path) as scope:
        train(guard)
    assert scope.verdict.incidents[0].origin.op == "log" and scope.verdict.incidents[0].step == 3


@pytest.mark.usefixtures("read")
def test_a_micro_batch_that_is_passed_over_belongs_to_its_step(tmp_path: Path) -> None:
    """The optimizer steps on what the others have left."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for step in (1, 2):
            for part in (1, 2, 3):
                loss = model(torch.randn(6, 4)).pow(2).mean() * (math.nan if (step, part) == (2, 2) else 1.0)
                if torch.isfinite(loss):
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    incident = scope.verdict.incidents[0]
    assert (incident.step, incident.micro_batch, incident.micro_batches, incident.reached["stepped"]) == (2, 2, 3, "taken")
    assert scope.steps == 2 and scope.bad_steps == 1


@pytest.mark.usefixtures("read")
def test_a_micro_batch_that_is_passed_over_and_read_after_the_step_is_counted_once(tmp_path: Path) -> None:
    """The log asks about what the optimizer has been told of."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for step in (1, 2):
            for part in (1, 2):
                loss = model(torch.randn(6, 4)).pow(2).mean() * (math.nan if (step, part) == (1, 2) else 1.0)
                if math.isfinite(loss.item()):
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert math.isnan(loss.item()) == (step == 1)
    assert (scope.steps, scope.bad_steps, len(scope.verdict.incidents)) == (2, 1, 1)


@pytest.mark.usefixtures("read")
@pytest.mark.parametrize("replaced", [True, False])
def test_a_second_loss_that_is_left_out_belongs_to_the_step(tmp_path: Path, replaced: bool) -> None:
    """It has a forward pass of its own; the step is taken on the other loss, which was begun before."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 6):
            x = torch.randn(6, 4)
            loss = model(x).pow(2).mean()
            aux = torch.log(model(x + 1).pow(2) * (step != 3)).mean()
            if torch.isfinite(aux):
                loss = loss + 0.1 * aux
            elif replaced:
                loss = loss + 0.1 * torch.zeros(())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    incident = scope.verdict.incidents[0]
    assert (incident.step, incident.origin.op, incident.reached["stepped"]) == (3, "log", "taken")
    assert (scope.steps, scope.bad_steps, len(scope.verdict.incidents)) == (5, 1, 1)


@pytest.mark.usefixtures("read")
@pytest.mark.parametrize("kind", ["of a module", "bare"])
def test_every_one_of_several_losses_that_are_passed_over_is_a_step(tmp_path: Path, kind: str) -> None:
    """They read the same weights, be those of a module or not, and are not the same."""
    weights = nn.Linear(4, 1).weight if kind == "of a module" else nn.Parameter(torch.ones(1, 4))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 6):
            loss = (weights * torch.randn(6, 4)).sum(-1).pow(2).mean() * (math.nan if step in (2, 3) else 1.0)
            if torch.isnan(loss) or torch.isinf(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert (scope.steps, [incident.step for incident in scope.verdict.incidents]) == (5, [2, 3])


@pytest.mark.usefixtures("read")
@pytest.mark.parametrize(
    "asks", [lambda value: value.item(), lambda value: math.isinf(value.item()), lambda value: bool(torch.isinf(value))]
)
def test_what_is_computed_of_a_loss_after_it_was_differentiated_is_no_loss(tmp_path: Path, asks: Callable[[Tensor], object]) -> None:
    """A perplexity that overflows, in a loop that tests its loss: the graph of the loss is gone, nobody can differentiate it."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(3):
            losses = (model(torch.randn(6, 4)) - 50).pow(2)
            loss = losses.sum() / 6
            assert math.isfinite(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            asks(torch.exp(loss))
            asks(torch.exp(losses).mean())
    assert scope.verdict.healthy and (scope.steps, scope.bad_steps, scope.notes) == (3, 0, []), scope.verdict.sentence


@pytest.mark.usefixtures("read")
def test_what_waited_through_another_backward_pass_is_a_loss(tmp_path: Path) -> None:
    """A generator's output is made before the discriminator is trained, and judged after."""
    generator, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for step in (1, 2, 3):
            made = generator(torch.randn(6, 4)).tanh()
            optimizer.zero_grad()
            judge(made.detach()).pow(2).mean().backward()
            optimizer.step()
            loss = torch.log(judge(made).pow(2) * (step != 2)).mean()
            if torch.isfinite(loss):
                loss.backward()
                generator.zero_grad()
    assert scope.bad_steps == 1 and scope.verdict.incidents[0].origin.op == "log", scope.verdict.sentence


def test_stop_stops_at_a_loss_that_is_passed_over(tmp_path: Path) -> None:
    """As soon as it is known that nobody will differentiate it."""
    with pytest.raises(nanscope.NonFiniteError) as raised, nanscope.watch(out=tmp_path, on_nonfinite="stop"):
        train(GUARDS["isfinite"])
    assert raised.value.verdict.incidents[0].step == 3


def metric(loss: Tensor, out: Tensor) -> Tensor:
    assert torch.exp(loss.abs() * 1e6 + 1e6).item() == math.inf
    return loss


def without_gradient(loss: Tensor, out: Tensor) -> Tensor:
    with torch.no_grad():
        assert torch.isnan(torch.log(out * 0 - 1).mean())
    return loss


def of_data(loss: Tensor, out: Tensor) -> Tensor:
    assert torch.isnan(torch.full((3,), math.nan)).any() and math.isinf(torch.tensor(math.inf).item())
    return loss


def weights_asked(loss: Tensor, out: Tensor) -> Tensor:
    assert not torch.isnan(nn.Parameter(torch.ones(3))).any()
    return loss


def masked(loss: Tensor, out: Tensor) -> Tensor:
    scores = out.masked_fill(torch.arange(6)[:, None] < 2, -math.inf)
    assert torch.isinf(scores).any()
    return loss + scores.softmax(0)[2:].pow(2).mean()


def alike(loss: Tensor, out: Tensor) -> Tensor:
    torch.testing.assert_close(torch.log(out * 0 - 1).sum(), torch.log(out * 0 - 2).sum(), equal_nan=True)
    return loss


def as_expected(loss: Tensor, out: Tensor) -> Tensor:
    torch.testing.assert_close(torch.log(out.detach().requires_grad_() * 0), torch.full((6, 1), -math.inf))
    return loss


QUIET = [metric, without_gradient, of_data, weights_asked, masked, alike, as_expected]


@pytest.mark.usefixtures("read")
@pytest.mark.parametrize("asks", QUIET, ids=lambda asks: asks.__name__)
def test_what_is_asked_and_harms_nothing_is_quiet(tmp_path: Path, asks: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A metric beside the loss, what has no gradient, and what goes into the loss and does no harm there."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(3):
            out = model(torch.randn(6, 4))
            loss = asks(out.pow(2).mean(), out)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert scope.verdict.healthy and (scope.steps, scope.bad_steps) == (3, 0), scope.verdict.sentence


@pytest.mark.usefixtures("read")
@pytest.mark.parametrize("asks", [alike, as_expected], ids=lambda asks: asks.__name__)
def test_results_that_are_compared_are_no_losses(tmp_path: Path, asks: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A test of code that has NaN in it, on purpose, and differentiates nothing."""
    out = nn.Linear(4, 1)(torch.randn(6, 4))
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(3):
            asks(out.mean(), out)
    assert not (scope.verdict.incidents or scope.verdict.gaps or scope.verdict.notes), scope.verdict.sentence


@pytest.mark.usefixtures("read")
def test_a_loss_beside_the_one_that_is_differentiated(tmp_path: Path) -> None:
    """Of one forward pass one loss is differentiated and one is not: nobody knows what it would have done, so not all was watched."""
    model = nn.Linear(4, 8)
    with nanscope.watch(out=tmp_path) as scope:
        for step in (1, 2, 3):
            shared = model(torch.randn(6, 4))
            value_loss = shared[:, :4].pow(2).mean() * (math.inf if step == 2 else 1.0)
            loss = shared[:, 4:].pow(2).mean()
            if torch.isfinite(value_loss):
                loss = loss + value_loss
            loss.backward()
    verdict = scope.verdict
    assert verdict.status is Status.PARTLY and [gap.slug for gap in verdict.gaps] == ["not-differentiated"], verdict.sentence
    assert "value_loss (test_passed.py:" in verdict.sentence


@pytest.mark.usefixtures("read")
def test_a_number_that_is_read_and_not_tested_is_worth_a_word(tmp_path: Path) -> None:
    """It is logged, and dropped for a reason of the loop's own: nobody takes it for harm."""
    model = nn.Linear(4, 1)
    with nanscope.watch(out=tmp_path) as scope:
        for tokens in (3, 0, 2):
            loss = model(torch.randn(6, 4))[:tokens].pow(2).mean()
            loss.item()
            if tokens:
                loss.backward()
    assert scope.verdict.healthy and [note.slug for note in scope.notes] == ["nonfinite_absorbed"]
    assert "was NaN, and nothing was differentiated that it went into" in scope.verdict.sentence


TOKENS: dict[str, Callable[[Tensor], bool]] = {
    "isfinite": lambda losses: not torch.isfinite(losses).all(),
    "isnan": lambda losses: bool((torch.isnan(losses) | torch.isinf(losses)).any().item()),
}


@pytest.mark.usefixtures("read")
@pytest.mark.parametrize("name", TOKENS)
def test_a_loss_whose_tokens_are_asked_about(tmp_path: Path, name: str) -> None:
    """What the guard asks of each token it asks of the mean that it then throws away."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 6):
            losses = torch.log(model(torch.randn(6, 4)).pow(2) * (step != 3))
            loss = (losses * torch.tensor([1.0, 1, 1, 1, 1, 0])[:, None]).sum() / 5
            if TOKENS[name](losses):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    incident = scope.verdict.incidents[0]
    assert (incident.step, incident.origin.op, incident.reached["stepped"]) == (3, "log", BY_TRAINER), scope.verdict.sentence
    assert (scope.steps, scope.bad_steps, scope.verdict.gaps, scope.notes) == (5, 1, (), [])


UNHEARD: dict[str, Callable[[Tensor], bool]] = {  # no call tells of it, or of a metric it looks the same
    "counted": lambda loss: int(torch.isfinite(loss).sum()) < loss.numel(),
    "how many": lambda loss: torch.isfinite(loss).float().mean().item() < 1.0,
    "chosen": lambda loss: bool([1, 0][torch.isfinite(loss).long()]),
    "numpy": lambda loss: not np.isfinite(loss.detach().numpy()),
    "numpy of the answer": lambda loss: not torch.isfinite(loss).numpy(),
    "a list": lambda loss: not torch.isfinite(loss).tolist(),
    "printed": lambda loss: "inf" in repr(loss) or "nan" in repr(loss),
    "compared": lambda loss: not torch.allclose(loss, loss.detach().clamp(-100, 100)),
    "a threshold": lambda loss: not abs(loss.item()) < 1e4,
}


@pytest.mark.usefixtures("read")
@pytest.mark.parametrize(("many", "elsewhere"), [(1, False), (400, False), (400, True)])
@pytest.mark.parametrize("name", UNHEARD)
def test_a_loss_that_is_thrown_away_is_worth_a_word(tmp_path: Path, name: str, many: int, elsewhere: bool) -> None:
    """However the loop came to know of it: nobody calls such a run healthy and says no more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 9):
            loss = torch.log(model(torch.randn(many, 4)).pow(2).mean() * (step != 6 or elsewhere))
            if step == 6 and elsewhere:
                loss = loss * math.nan
            if UNHEARD[name](loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert scope.verdict.healthy and scope.bad_steps == 0
    assert "loss (test_passed.py:" in scope.verdict.sentence, scope.verdict.sentence
    assert f"was {'NaN' if elsewhere else '−inf'}, and nothing was differentiated that it went into" in scope.verdict.sentence


@pytest.mark.parametrize("calls", [60, 400])
def test_a_rollout_that_follows_leaves_what_was_thrown_away(tmp_path: Path, calls: int) -> None:
    """It is gone through many times meanwhile what of it has come to nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = torch.randn(6, 4)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 9):
            loss = torch.log(model(torch.randn(6, 4)).pow(2).mean() * (step != 6))
            if not np.isfinite(loss.detach().numpy()):
                del loss
                with torch.no_grad():
                    for _ in range(calls):
                        (seen * 2).sum()
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert scope.verdict.healthy and [note.slug for note in scope.notes] == ["nonfinite_absorbed"], scope.verdict.sentence


class ReturnsItsLoss(nn.Module):
    """As models of transformers do. at: the call whose loss is infinite."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.inner, self.at, self.calls = nn.Linear(4, 1), at, 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        logits = self.inner(x)
        return {"loss": torch.log(logits.pow(2).mean() * (self.calls != self.at)), "logits": logits}


@pytest.mark.parametrize("at", [3, 6, 8])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_loss_that_a_model_returns_and_that_is_thrown_away(tmp_path: Path, scaled: bool, at: int) -> None:
    """There is no call outside of the model that made it."""
    model = ReturnsItsLoss(at)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(8):
            loss = model(torch.randn(6, 4))["loss"]
            if scaled:
                loss = loss / 2
            if not np.isfinite(loss.detach().numpy()):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert scope.verdict.healthy and [note.slug for note in scope.notes] == ["nonfinite_absorbed"], scope.verdict.sentence
    assert ("loss (test" if scaled else "what ReturnsItsLoss returned (test_passed.py:") in scope.verdict.sentence


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_loss_that_a_model_returns_for_the_log(tmp_path: Path, evaluates: bool) -> None:
    """At a line of its own, or in an evaluation: nobody would have differentiated it."""
    model = ReturnsItsLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss_of(x: Tensor) -> Tensor:
        return model(x)["loss"]

    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(6):
            loss = loss_of(torch.randn(6, 4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if evaluates:
                model.eval()
                loss_of(torch.full((6, 4), math.inf))
                model.train()
            else:
                model(torch.full((6, 4), math.inf))
    assert scope.verdict.healthy and scope.notes == [], scope.verdict.sentence


def evaluated(model: nn.Module, loss: Tensor) -> None:
    model.eval()
    torch.log(model(torch.randn(6, 4)).pow(2) * -1).mean()
    model.train()


def beside(model: nn.Module, loss: Tensor) -> None:
    torch.log(loss * -1)


def beside_the_model(model: nn.Module, loss: Tensor) -> None:
    torch.log(model.out * -1 - model.out.pow(2)).mean()  # type: ignore[operator, union-attr]


def fine(model: nn.Module, loss: Tensor) -> None:
    model(torch.randn(6, 4)).pow(2).mean()


def of_weights(model: nn.Module, loss: Tensor) -> None:
    torch.log(torch.stack([parameter.pow(2).sum() for parameter in model.parameters()]).sum() * -1)


BARE = nn.Parameter(torch.tensor(-1.0))


def of_a_bare_weight(model: nn.Module, loss: Tensor) -> None:
    torch.log(BARE)


def without(model: nn.Module, loss: Tensor) -> None:
    with torch.no_grad():
        torch.log(model(torch.randn(6, 4)).pow(2) * -1).mean()


def of_classes(model: nn.Module, loss: Tensor) -> None:
    out = model(torch.randn(6, 4))
    means = [out[torch.arange(6) < many].mean() for many in (0, 3)]
    assert sum(torch.isfinite(mean).float().item() for mean in means) == 1


def of_masked_actions(model: nn.Module, loss: Tensor) -> None:
    logits = model(torch.randn(6, 4)).masked_fill(torch.arange(6)[:, None] < 2, -math.inf)
    assert int(torch.isfinite(logits).sum()) == 4


def never_looked_at(model: nn.Module, loss: Tensor) -> None:
    torch.log(model(torch.randn(6, 4)) * 0 - 1).mean()


THROWN = [of_classes, of_masked_actions, never_looked_at, evaluated, beside, beside_the_model, fine, of_weights, of_a_bare_weight, without]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("does", THROWN, ids=lambda does: does.__name__)
def test_what_is_thrown_away_and_is_no_loss_is_quiet(tmp_path: Path, does: Callable[[nn.Module, Tensor], None], late: bool) -> None:
    """A metric of what is differentiated, of an evaluation, or of the weights; and a forward pass in which nothing is wrong."""
    model = nn.Linear(4, 1)
    model.register_forward_hook(lambda module, _, out: setattr(module, "out", out))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(6):
            loss = model(torch.randn(6, 4)).pow(2).mean()
            if not late:
                does(model, loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if late:
                does(model, loss)
    assert scope.verdict.healthy and (scope.steps, scope.notes) == (6, []), scope.verdict.sentence


class Doubles(torch.autograd.Function):
    """Its result is opaque, and holds the graph before it."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


@pytest.mark.parametrize("bad", [False, True])
def test_what_is_thrown_away_is_not_held(tmp_path: Path, bad: bool) -> None:
    """Forward passes without end: from time to time it is looked which of them somebody may still come back for."""
    model, gone = nn.Linear(4, 1), []
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(600):
            hidden = model(torch.randn(6, 4))
            gone.append(weakref.ref(hidden))
            torch.log(Doubles.apply(hidden).pow(2).mean() * (not bad))  # type: ignore[no-untyped-call]
            del hidden
        assert sum(one() is not None for one in gone) < 300
    assert not scope.verdict.incidents


def test_a_loss_that_is_differentiated_after_another_one_is_not_thrown_away(tmp_path: Path) -> None:
    """It waits while the first is differentiated, and is told once when it is."""
    actor, critic = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 6):
            value_loss = torch.log(critic(torch.randn(6, 4)).pow(2) * (step != 3)).mean() * 0.1
            loss = actor(torch.randn(6, 4)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            value_loss.backward()
            optimizer.step()
            critic.load_state_dict({name: torch.ones_like(weight) for name, weight in critic.state_dict().items()})
    assert [incident.step for incident in scope.verdict.incidents] == [3] and scope.notes == [], scope.verdict.sentence


@pytest.mark.usefixtures("read")
@pytest.mark.parametrize("name", GUARDS)
def test_a_loss_that_is_asked_about_after_it_was_differentiated(tmp_path: Path, name: str) -> None:
    """It is one bad step, found by the backward pass."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for step in (1, 2, 3):
            loss = model(torch.randn(6, 4)).pow(2).mean()
            part = torch.log(loss * 0) * 0 if step == 2 else loss
            optimizer.zero_grad()
            (loss + part * 0).backward()
            if not GUARDS[name](part):
                optimizer.step()
    assert [incident.step for incident in scope.verdict.incidents] == [2]
    assert (scope.steps, scope.bad_steps, scope.notes, scope.verdict.gaps) == (3, 1, [], ())


@pytest.mark.usefixtures("read")
def test_a_loss_that_a_model_computes_is_believed_as_well(tmp_path: Path) -> None:
    """It comes out of the model, as the trainers of transformers have it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor, bad: bool) -> Tensor:
            loss = self.layer(x).pow(2).mean()
            return torch.log(loss * 0) * 0 if bad else loss

    model = Model()
    with nanscope.watch(out=tmp_path) as scope:
        for step in (1, 2, 3):
            loss = model(torch.randn(6, 4), step == 2)
            if loss.isfinite():
                loss.backward()
    incident = scope.verdict.incidents[0]
    assert incident.origin.op == "log" and incident.origin.expression == "torch.log(loss * 0)"


def five_steps(out: Path, step: Callable[[nn.Module, torch.optim.Optimizer, int], None]) -> nanscope.Scope:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with nanscope.watch(out=out) as scope:
        for number in range(1, 6):
            step(model, optimizer, number)
            optimizer.zero_grad()
    return scope


@pytest.mark.usefixtures("read")
def test_zeros_in_the_place_of_a_bad_loss_make_nothing_of_it(tmp_path: Path) -> None:
    """`zeros_like` reads its shape: that what it gives is differentiated says nothing of the loss that was left out."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        loss = model(torch.randn(6, 4)).pow(2).mean()
        extra = torch.log(model(torch.randn(6, 4)).pow(2) * (number != 3)).mean()
        if not torch.isfinite(extra):
            extra = torch.zeros_like(extra)
        (loss + 0.1 * extra).backward()
        optimizer.step()

    scope = five_steps(tmp_path, step)
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.origin.op, incident.reached["stepped"], scope.steps) == (3, "log", "taken", 5)


@pytest.mark.usefixtures("read")
@pytest.mark.parametrize("after", [False, True])
def test_a_perplexity_of_a_loss_whose_graph_stays_is_no_loss(tmp_path: Path, after: bool) -> None:
    """It is made of what was differentiated, before or after the optimizer's step."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        loss = (model(torch.randn(8, 4)) - 50).pow(2).sum()
        loss.backward(retain_graph=True)
        if after:
            optimizer.step()
        assert not math.isfinite(torch.exp(loss).item())
        if not after:
            optimizer.step()

    scope = five_steps(tmp_path, step)
    assert scope.verdict.healthy and scope.steps == 5


@pytest.mark.usefixtures("read")
def test_a_view_of_a_weight_is_shared_by_losses_that_have_nothing_else_in_common(tmp_path: Path) -> None:
    """It is made once, before the loop; a loss that a guard passes over is one all the same."""
    weight = nn.Parameter(torch.randn(8, 4))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    with nanscope.watch(out=tmp_path) as scope:
        turned = weight.t()
        for number in range(1, 6):
            loss = (torch.randn(6, 4) @ turned).pow(2).mean()
            if number == 3:
                loss = torch.log(loss * 0)
            if not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [(incident.step, incident.origin.op, incident.reached["stepped"]) for incident in scope.verdict.incidents] == [
        (3, "log", BY_TRAINER)
    ]


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_what_a_check_has_refused_and_the_run_has_ended_by_is_an_incident(tmp_path: Path, bad: bool, validates: bool) -> None:
    """A distribution validates its logits, and raises: nothing was differentiated, and the line is told that made them NaN. An exception
    that ends a run of which nothing was bad is none of ours."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = nanscope.watch(model, out=tmp_path)
    with pytest.raises(ValueError), scope:
        for step in (1, 2):
            hidden = model(torch.ones(4, 3))
            if step == 2 and bad:
                steep = torch.exp(hidden + 1e3)
                hidden = hidden * steep - hidden * steep
            if validates or step == 1:
                chosen = torch.distributions.Categorical(logits=hidden, validate_args=True).log_prob(torch.zeros(4))
            if step == 2 and (not bad or hidden.isnan().any()):
                raise ValueError("this run ends here")
            optimizer.zero_grad()
            chosen.mean().backward()
            optimizer.step()
    if not bad:
        assert scope.verdict.healthy and scope.steps == 1
        return
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.phase, incident.cause, incident.origin.variable) == (2, "forward", "exp_overflow", "steep")
    assert "trainer" not in f"{incident.headline} {incident.sentence}"  # it has dropped nothing: it did not come to it
    assert not scope.verdict.gaps


@pytest.mark.usefixtures("read")
def test_stop_lets_a_term_pass_that_was_left_out(tmp_path: Path) -> None:
    """The loss that it was left out of is finite, and nothing says that it is not."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path, on_nonfinite="stop") as scope:
        for step in range(1, 6):
            x = torch.randn(6, 4)
            loss = model(x).pow(2).mean()
            aux = torch.log(model(x + 1).pow(2) * (step != 3)).mean()
            if torch.isfinite(aux):
                loss = loss + 0.1 * aux
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.micro_batch, incident.micro_batches, incident.loss) == (3, 1, None, None)
    assert "The loss" not in incident.sentence and any("left it out" in note.text for note in incident.notes), incident.notes


@pytest.mark.usefixtures("read")
def test_another_number_in_the_place_of_a_bad_loss_is_the_same_step(tmp_path: Path) -> None:
    """What a guard returns so that all ranks differentiate something: the optimizer steps, and the step is counted once."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 6):
            loss = torch.log(model(torch.randn(6, 4)).pow(2) * (step != 3)).mean()
            if not torch.isfinite(loss):
                loss = sum(weight.sum() for weight in model.parameters()) * 0.0
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (incident,) = scope.verdict.incidents
    assert (scope.steps, incident.step, incident.micro_batch, incident.reached["stepped"]) == (5, 3, 1, "taken")
    assert incident.origin.op == "log" and any("another number in its place" in note.text for note in incident.notes), incident.notes


@pytest.mark.usefixtures("read")
@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("on_nonfinite", ["record", "stop"])
def test_what_a_call_has_refused_is_told_although_the_loop_catches_it(tmp_path: Path, goes_on: bool, on_nonfinite: OnNonFinite) -> None:
    """A loop that ends by `break`, or that goes on with the next batch, when sampling raises: nothing else of it is bad."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path, on_nonfinite=on_nonfinite) as scope:
        for step in range(1, 6):
            with torch.no_grad():
                cooled = model(torch.randn(6, 4)) / (0.0 if step == 3 else 1.0)
                try:
                    chosen = torch.multinomial(cooled.softmax(-1), 1)
                except RuntimeError:
                    if goes_on:
                        continue
                    break
            x = torch.randn(6, 4)
            optimizer.zero_grad()
            (-torch.log_softmax(model(x), -1).gather(1, chosen).mean()).backward()
            optimizer.step()
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.origin.op, incident.origin.variable) == (3, "div", "cooled"), incident
    assert any(note.slug == "call_refused" and "RuntimeError" in note.text for note in incident.notes), incident.notes
    assert scope.verdict.status != Status.HEALTHY and scope.steps == (4 if goes_on else 3)


REFUSALS: dict[str, Callable[[Tensor], Tensor]] = {
    "multinomial": lambda p: torch.multinomial(p.softmax(-1), 1),
    "bernoulli": lambda p: torch.bernoulli(p.sigmoid()),
    "cholesky": lambda p: torch.linalg.cholesky(p.T @ p + torch.eye(4)),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_step_that_goes_on_with_something_else_is_counted_once(tmp_path: Path, name: str) -> None:
    """Where the loop has another number in the place of what could not be had, the step is that of the loss which it goes on to."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 6):
            with torch.no_grad():
                scaled = torch.randn(6, 4) * (step != 2) / (step != 2)
                with contextlib.suppress(RuntimeError):
                    REFUSALS[name](scaled)
            loss = model(torch.randn(6, 4)).square().mean()
            optimizer.zero_grad()
            (torch.log(loss * 0) if step == 4 else loss).backward()
            optimizer.step()
    told = [(incident.step, incident.origin.op, incident.origin.variable) for incident in scope.verdict.incidents]
    assert scope.steps == 5 and told[:2] == [(2, "div", "scaled"), (4, "log", None)], told


def test_what_a_call_refuses_that_is_finite_is_none_of_ours(tmp_path: Path) -> None:
    """A loop that tries whether a matrix can be factored, and adds to its diagonal until it can; one that asks for what is not there."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(3):
            matrix = -torch.eye(4)
            while True:
                try:
                    torch.linalg.cholesky(matrix)
                    break
                except RuntimeError:
                    matrix = matrix + torch.eye(4)
            with contextlib.suppress(RuntimeError):
                torch.full((4,), torch.nan).view(3)
            optimizer.zero_grad()
            model(torch.randn(2, 4)).pow(2).mean().backward()
            optimizer.step()
    assert scope.verdict.healthy and scope.steps == 3


@pytest.mark.parametrize("ends", ["goes_on", "break", "raise"])
def test_what_a_distribution_has_refused_is_told_although_the_loop_catches_it(tmp_path: Path, ends: str) -> None:
    """Its validation is Python of torch's own, which asks whether all of a parameter is valid; it is told once."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raised = pytest.raises(ValueError, match="invalid values") if ends == "raise" else contextlib.nullcontext()
    with raised, nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 6):
            with torch.no_grad():
                cooled = model(torch.randn(6, 4)) / (0.0 if step == 3 else 1.0)
                try:
                    chosen = torch.distributions.Categorical(logits=cooled - cooled.max(), validate_args=True).sample()
                except ValueError:
                    if ends == "goes_on":
                        continue
                    if ends == "break":
                        break
                    raise
            optimizer.zero_grad()
            (-torch.log_softmax(model(torch.randn(6, 4)), -1).gather(1, chosen[:, None]).mean()).backward()
            optimizer.step()
    (incident,) = scope.verdict.incidents
    assert incident.step == 3 and incident.origin.variable in ("cooled", "cooled - cooled.max()"), incident
    if ends != "raise":
        assert any(note.slug == "call_refused" and "its parameter logits" in note.text for note in incident.notes), incident.notes


def test_a_scale_that_is_only_negative_is_the_loops_own_affair(tmp_path: Path) -> None:
    """What is refused is a number, and nothing is non-finite."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(3):
            with contextlib.suppress(ValueError):
                torch.distributions.Normal(torch.zeros(3), -torch.ones(3), validate_args=True)
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
    assert scope.verdict.healthy
