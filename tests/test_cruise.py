"""Steps that are recognised: their lines, and what is found in a bad one, are what they would be if each step were written down."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from seen import told
from torch import Tensor, nn

import nanscope
from nanscope.watching.acting import OnNonFinite
from nanscope.watching.cruise import Cruise
from nanscope.watching.recording import Recording

STEPS, BAD = 12, 9  # steps of a run, and the one in which something goes wrong
ROWS, TOKENS, WIDTH = 6, 8, 5


class Policy(nn.Module):
    """Scores of tokens and a value of each, beside a parameter that the loss reads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.log_std = nn.Parameter(torch.zeros(TOKENS))

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(seen))
        return hidden.sum(-1), self.value(hidden).squeeze(-1)


class Loop:
    """A run of PPO on small tensors; a fault is a method that changes what one of its parts does in the bad step."""

    parts = 1

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.policy, self.step = Policy(), 0
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-3)
        self.seen = torch.randn(ROWS, TOKENS, WIDTH)
        self.mask = (torch.arange(TOKENS) < torch.randint(3, TOKENS, (ROWS, 1))).float()
        self.old, self.advantages, self.returns = torch.randn(3, ROWS, TOKENS) * 0.1
        self.average = torch.zeros(())
        self.coefficient, self.low, self.high = 0.01, 0.8, 1.2
        self.clipped: list[float] = []  # the part of the tokens that the clip holds back, in each step

    @property
    def is_bad(self) -> bool:
        return self.step == BAD

    def given(self) -> Tensor:
        return self.seen

    def loss(self) -> Tensor:
        log_probs, values = self.policy(self.given())
        spread = self.policy.log_std.exp()
        log_ratio = (log_probs - self.old) / spread
        ratio = torch.exp(log_ratio)
        surrogate = -torch.min(ratio * self.advantages, ratio.clamp(self.low, self.high) * self.advantages)
        value_loss = (values - self.returns) ** 2
        per_token = surrogate + 0.5 * value_loss + self.coefficient * (ratio - 1 - log_ratio)
        with torch.no_grad():
            clipped = ((ratio < self.low) | (ratio > self.high)).float() * self.mask
        self.clipped.append(clipped.sum().item() / self.mask.sum().item())
        total: Tensor = (per_token * self.mask).sum() / self.mask.sum()
        return total / self.parts

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def between(self) -> None:
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)

    def run(self) -> None:
        for self.step in range(1, STEPS + 1):
            self.optimizer.zero_grad()
            for _ in range(self.parts):
                self.backward(self.loss())
            self.between()
            self.optimizer.step()


class BadBatch(Loop):
    def given(self) -> Tensor:
        return torch.where(torch.arange(TOKENS)[:, None] == 2, math.nan, self.seen) if self.is_bad else self.seen


class MaskedOverflow(Loop):
    def loss(self) -> Tensor:
        self.old[0, TOKENS - 1] = -120.0 if self.is_bad else 0.0  # at a masked token
        return super().loss()


class BadGradient(Loop):
    """The root of a zero: its loss is finite."""

    def loss(self) -> Tensor:
        distance = (self.policy(self.given())[1] - self.returns).pow(2)
        distance = distance * 0.0 if self.is_bad else distance * 1.0
        return super().loss() + (distance * self.mask).sum().sqrt()


class BadUpdate(Loop):
    def between(self) -> None:
        super().between()
        for group in self.optimizer.param_groups:
            group["lr"] = math.inf if self.is_bad else 1e-3


class BadState(Loop):
    def between(self) -> None:
        super().between()
        if self.is_bad:
            self.optimizer.state[self.policy.log_std]["exp_avg_sq"][3] = -1.0


class Spoilt(Loop):
    """Somebody writes to a gradient between the backward pass and the update."""

    def between(self) -> None:
        if self.is_bad:
            self.policy.value.weight.grad[0, 1] = math.inf  # type: ignore[index]
        super().between()


class SpoiltWeight(Loop):
    def between(self) -> None:
        super().between()
        if self.is_bad:
            with torch.no_grad():
                self.policy.body.weight[1].mul_(math.nan)


class BadNorm(Loop):
    """Gradients whose squares overflow: the clip makes zeros of them."""

    def loss(self) -> Tensor:
        return super().loss() * (1e30 if self.is_bad else 1.0)


class Spike(Loop):
    def loss(self) -> Tensor:
        return super().loss() + (self.policy(self.given())[1] * (1e9 if self.is_bad else 1.0)).mean()


class PassedOver(Loop):
    """A loss that is not finite is not differentiated."""

    def backward(self, loss: Tensor) -> None:
        loss = loss * (math.nan if self.is_bad else 1.0)
        if torch.isfinite(loss):
            super().backward(loss)


class Accumulated(MaskedOverflow):
    parts = 3


class AccumulatedLate(Spoilt):
    parts = 2


class Normalised(Loop):
    """What the model is given is computed by code that is recorded, too."""

    def given(self) -> Tensor:
        centred = self.seen - self.seen.mean(0)
        return centred / (centred.pow(2).mean(0) * (0.0 if self.is_bad else 1.0)).sqrt()


class CarriedOn(Loop):
    """A running average of what earlier steps computed goes into the loss."""

    def loss(self) -> Tensor:
        value = super().loss()
        self.average = 0.9 * self.average + 0.1 * value.detach()
        scale = torch.log(self.average - self.average) if self.is_bad else self.average
        return value + 1e-3 * scale * value


class Whitens(Loop):
    """Advantages are normalised by a running mean and a running variance, which share what they are made of."""

    mean, var, count = torch.zeros(()), torch.ones(()), 1e-4

    def loss(self) -> Tensor:
        drawn = self.advantages + 0.01 * self.step
        delta, total = drawn.mean() - self.mean, self.count + drawn.numel()
        self.mean = self.mean + delta * drawn.numel() / total
        summed = self.var * self.count + drawn.var() * drawn.numel() + delta**2 * self.count * drawn.numel() / total
        self.var, self.count = summed / total, total
        kept, self.advantages = self.advantages, (drawn - self.mean) / (self.var * (0.0 if self.is_bad else 1.0)).sqrt()
        try:
            return super().loss()
        finally:
            self.advantages = kept


class Recursive(Loop):
    """Of one tensor there are equal views at once, and views that lie alike and are called otherwise."""

    def loss(self) -> Tensor:
        values = self.policy(self.given())[1].T
        found, last = [], values[-1]
        for k in range(TOKENS - 2, -1, -1):
            last = values[k] + 0.5 * (0.9 * values[k + 1] - values[k]) + 0.4 * (last - values[k + 1])
            found.append(last)
        held = torch.stack(found).square().mean()
        return super().loss() + (torch.log(held - held) if self.is_bad else 0.1 * held)


class Evaluates(Loop):
    """Before each loss the model is tried out, as often as it comes to; what that gave is held."""

    def loss(self) -> Tensor:
        with torch.no_grad():
            for _ in range(self.step % 3):
                self.tried = self.policy(self.seen)[1].mean() * 0.5
        return super().loss() * (math.nan if self.is_bad else 1.0)


class Simulates(Loop):
    """A state goes on from step to step, and is what the loss is about."""

    state = torch.ones(ROWS, TOKENS, WIDTH)

    def given(self) -> Tensor:
        for _ in range(3):
            self.state = 0.9 * self.state + 0.1 * self.seen
        return torch.log(self.state * 0) if self.is_bad else self.state


class Annealed(Loop):
    """Numbers of the loss are others in every step."""

    def loss(self) -> Tensor:
        self.coefficient = 0.01 * (1 - self.step / 100) if not self.is_bad else math.nan
        self.low, self.high = 1 - 0.3 / self.step, 1 + 0.3 / self.step
        return super().loss()


class AnnealedAway(MaskedOverflow):
    """What bounds a ratio bounds it no more from the middle of the run on."""

    def loss(self) -> Tensor:
        self.low, self.high = (0.8, 1.2) if self.step < BAD - 2 else (-0.2, 0.2)
        return super().loss()


class ScaledAtLast(BadGradient):
    """A loss that is multiplied, by more and more, until that is a scale against underflow."""

    def loss(self) -> Tensor:
        return super().loss() * 2.0**self.step

    def between(self) -> None:
        for parameter in self.policy.parameters():
            if parameter.grad is not None:
                parameter.grad /= 2.0**self.step
        super().between()


class ScaledInPlace(ScaledAtLast):
    def loss(self) -> Tensor:
        loss = BadGradient.loss(self)
        loss *= 2.0**self.step
        return loss


class RunningUp(Loop):
    """An exponent grows from step to step, and overflows in the bad one."""

    def loss(self) -> Tensor:
        self.old[1, 0] = -9.0 * self.step - 10.0
        return super().loss()


class SeveralModels(Loop):
    """An actor whose actions a critic is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(TOKENS, 1)
        self.optimizer = torch.optim.AdamW([*self.policy.parameters(), *self.critic.parameters()], lr=1e-3)

    def loss(self) -> Tensor:
        log_probs, _ = self.policy(self.given())
        q = self.critic(log_probs.tanh() / (0.0 if self.is_bad else 1.0))
        return super().loss() - q.mean()


class SeveralOptimizers(MaskedOverflow):
    """An actor's and a critic's, each with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(WIDTH, 1)
        self.other = torch.optim.SGD(self.critic.parameters(), lr=1e-2)

    def run(self) -> None:
        for self.step in range(1, STEPS + 1):
            self.other.zero_grad()
            error = (self.critic(self.seen).squeeze(-1) - self.returns) * (math.inf if self.step == BAD - 2 else 1.0)
            ((error.pow(2) * self.mask).sum() / self.mask.sum()).backward()
            nn.utils.clip_grad_norm_(self.critic.parameters(), 1.0)
            self.other.step()
            self.optimizer.zero_grad()
            self.backward(self.loss())
            self.between()
            self.optimizer.step()


class OneLossOfTwoOptimizers(BadUpdate):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.policy.body.parameters(), lr=1e-3)
        self.other = torch.optim.SGD([*self.policy.value.parameters(), self.policy.log_std], lr=1e-2)

    def run(self) -> None:
        for self.step in range(1, STEPS + 1):
            self.optimizer.zero_grad()
            self.other.zero_grad()
            self.backward(self.loss())
            self.between()
            self.optimizer.step()
            self.other.step()


class KeepsItsNumbers(BadBatch):
    """A loop that keeps tensors of its steps to log them later."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.kept += [loss.detach(), loss.detach() * 2, loss]


class OfATemporary(MaskedOverflow):
    """It writes to what it has just made, and makes some of nothing."""

    def loss(self) -> Tensor:
        total = super().loss()
        more = torch.zeros(ROWS, TOKENS)
        more += self.returns
        more.unsqueeze_(0).clamp_(-1, 1).squeeze_(0)
        more.mul_(math.nan if self.step == BAD + 1 else 1.0)
        scaled = total * 1.0
        scaled += 1e-3 * (more * self.mask).sum() * total
        return scaled


class Drawn(MaskedOverflow):
    """It draws rows that count twice, and looks up which tokens are among some."""

    def loss(self) -> Tensor:
        total = super().loss()
        drawn = torch.multinomial(torch.softmax(self.advantages[0], dim=-1), 3)
        named = torch.isin(torch.arange(TOKENS), drawn).float()
        weight = math.nan if self.step == BAD + 1 else 1.0
        return total + weight * ((self.policy(self.given())[1] * named)[:, drawn] ** 2).mean()


class Prepared(Loop):
    """Its batch is padded row by row, shuffled and normalised, before each step or for several: that is written down, and has no gradient."""

    lasts = 1  # steps that a batch is for

    def prepare(self) -> None:
        rewards = torch.zeros(ROWS) if self.step <= BAD < self.step + self.lasts else torch.randn(ROWS)
        rows = [torch.full((TOKENS - row % 3,), float(reward)) for row, reward in enumerate(rewards)]
        padded, mask = torch.zeros(ROWS, TOKENS), torch.zeros(ROWS, TOKENS)
        for row, content in enumerate(rows):
            padded[row, : len(content)] = content
            mask[row, : len(content)] = 1.0
        order = torch.randperm(ROWS)
        centred = padded[order] - padded.mean()
        self.advantages, self.mask = centred / centred.std(), mask[order]

    def loss(self) -> Tensor:
        if (self.step - 1) % self.lasts == 0:
            self.prepare()
        return super().loss()


class PreparedForSeveral(Prepared):
    lasts = 3


class PreparedInParts(Prepared):
    parts = 2


class Bounded(Prepared):
    """A bound in the preparation of the batch that becomes one as a ratio has it."""

    def prepare(self) -> None:
        super().prepare()
        low, high = (-5.0, 5.0) if self.step < BAD - 2 else (0.5, 1.5)
        self.advantages = self.advantages.clamp(low, high)
        self.mask[0, 0] = 1.0


class KeptForSeveral(MaskedOverflow):
    """Its batch is prepared by nothing that writes, right before a loss, and kept for the next ones, of which the last goes bad."""

    def loss(self) -> Tensor:
        if self.step % 3 == 1:
            rewards = torch.randn(ROWS)
            centred = rewards - rewards.mean()
            self.advantages = (centred / centred.std()).unsqueeze(1).expand(ROWS, TOKENS)
        return super().loss()


class OfArrays(MaskedOverflow):
    """A buffer of arrays, as samplers fill it: each step makes its tensors anew."""

    def loss(self) -> Tensor:
        old, advantages = self.old, self.advantages
        self.old, self.advantages = torch.tensor(old.tolist()), torch.tensor(advantages.numpy().copy())
        try:
            return super().loss()
        finally:
            self.old, self.advantages = old, advantages


class Remembers(Loop):
    """Metrics are kept for longer than a step, and one of long ago comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[Tensor] = []

    def measured(self) -> Tensor:
        with torch.no_grad():
            apart = self.policy(self.seen)[0] - self.old
            return (apart * (2000.0 if self.step == 3 else 1.0)).abs().exp().mean()

    def loss(self) -> Tensor:
        self.metrics.append(self.measured())
        return super().loss() + (self.metrics[2] * 0.0 if self.is_bad else 0.0)


class RemembersTheLoss(Remembers):
    """One of what the model returned with a gradient, which is differentiated in its own step alone."""

    def __init__(self) -> None:
        super().__init__()
        self.log_probs = self.old

    def loss(self) -> Tensor:
        total = super().loss()
        with torch.no_grad():
            self.metrics[-1] = (self.log_probs - self.old).mul(2000.0 if self.step == 3 else 1.0).abs().exp().mean()
        return total

    def given(self) -> Tensor:
        self.log_probs = self.policy(self.seen)[0] * 1.0
        return super().given()


class RemembersArrays(Remembers):
    """As arrays, which stand for the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays: list[Any] = []

    def measured(self) -> Tensor:
        self.arrays.append(super().measured().numpy())
        return torch.from_numpy(self.arrays[-1]) if len(self.arrays) != 3 else torch.from_numpy(self.arrays[0])

    def loss(self) -> Tensor:
        total = super().loss()
        self.metrics[:-1] = [torch.zeros(())] * (len(self.metrics) - 1)
        self.metrics[2:3] = [torch.from_numpy(self.arrays[2])] if self.step == BAD - 1 else self.metrics[2:3]
        return total


class RollsOut(Loop):
    """Many calls without autograd before each batch and after each backward pass, most of which come to nothing."""

    def rolled(self, seen: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(60):
                seen = seen * 1.0
                float((seen - seen.mean()).abs().sum())
                seen = torch.where(seen > 1e30, 0.0, seen)
        return seen

    def given(self) -> Tensor:
        seen = self.rolled(self.seen)
        return (seen - math.inf).abs() * 0.0 if self.is_bad else seen

    def between(self) -> None:
        self.rolled(self.old)
        super().between()


class Raises(Loop):
    """A backward pass raises, and training goes on without it."""

    def backward(self, loss: Tensor) -> None:
        if self.is_bad:
            handle = self.policy.value.weight.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                super().backward(loss)
            handle.remove()
        else:
            super().backward(loss)


class Dropped(Loop):
    """A trainer that drops a step whose norm is bad."""

    def loss(self) -> Tensor:
        return super().loss() * (math.inf if self.is_bad else 1.0)

    def run(self) -> None:
        for self.step in range(1, STEPS + 1):
            self.optimizer.zero_grad()
            self.backward(self.loss())
            norm = nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            if torch.isfinite(norm):
                self.optimizer.step()


class PicksByNumpy(Loop):
    """An index of numpy's picks what the model is given, and what the loss reads."""

    def given(self) -> Tensor:
        self.picked = np.random.default_rng(self.step).permutation(ROWS)
        return self.seen[self.picked]

    def loss(self) -> Tensor:
        log_probs, values = self.policy(self.given())
        old = self.old * (-1e4 if self.is_bad else 1.0)
        ratio = torch.exp(log_probs - old[self.picked])
        weighed: Tensor = ratio * self.advantages[self.picked] + (values - self.returns[self.picked]) ** 2
        return (weighed * self.mask[self.picked]).mean()


class OfOtherLengths(Loop):
    """As long as the longest answer of each step is."""

    def loss(self) -> Tensor:
        log_probs, values = self.policy(self.seen)
        longest = 3 + self.step % 4
        ratio = torch.exp(log_probs[:, :longest] * (1e4 if self.is_bad else 1.0) - self.old[:, :longest])
        weighed = (ratio * self.advantages[:, :longest]).reshape(ROWS * longest) + values[:, -longest:].reshape(-1)
        return (weighed.view(ROWS, longest) * self.mask[:, :longest]).mean()


class Sampled(Loop):
    """Of a list of tensors that is added to in each step: some of them, and others each time."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = [(torch.randn(TOKENS, WIDTH), torch.zeros(TOKENS)) for _ in range(2 * ROWS)]

    def loss(self) -> Tensor:
        for seen, target in self.memory[-2:]:
            self.memory.append((0.9 * seen + 0.1, torch.log(target - 1.0) if self.is_bad else target + 0.1))
        picked = np.random.default_rng(self.step).permutation(len(self.memory) - 2)[: 2 * ROWS].tolist()
        states, targets = (torch.stack(of) for of in zip(*[self.memory[at] for at in picked], self.memory[-1], strict=True))
        log_probs, values = self.policy(states)
        return ((values - targets) ** 2 + log_probs).mean()


LOOPS: tuple[type[Loop], ...] = (
    Loop, BadBatch, MaskedOverflow, BadGradient, BadUpdate, BadState, Spoilt, SpoiltWeight, BadNorm, Spike, PassedOver, Accumulated,
    AccumulatedLate, Normalised, CarriedOn, Annealed, AnnealedAway, ScaledAtLast, RunningUp, SeveralModels, SeveralOptimizers,
    OneLossOfTwoOptimizers, KeepsItsNumbers, OfATemporary, Drawn, Prepared, PreparedForSeveral, PreparedInParts, KeptForSeveral, Bounded, ScaledInPlace, OfArrays,
    Remembers, RemembersTheLoss, RemembersArrays, RollsOut, Raises, Dropped, PicksByNumpy, OfOtherLengths, Sampled,
    Recursive, Evaluates, Simulates, Whitens,
)  # fmt: skip
UNSTEADY = (CarriedOn, SeveralModels, Normalised, KeepsItsNumbers)  # whose steps need not be recognised


def watched(loop: type[Loop], folder: Path, on_nonfinite: OnNonFinite = "record", **options: Any) -> tuple[nanscope.Scope, list[Tensor]]:
    """Run a loop, and return its scope and its weights."""
    run = loop()
    scope = nanscope.watch(run.policy, out=folder, name="run", on_nonfinite=on_nonfinite, **options)
    try:
        with scope:
            run.run()
    except nanscope.NonFiniteError:
        assert on_nonfinite == "stop"
    return scope, [weight.detach().clone() for weight in run.policy.parameters()]


def tensors(path: Path) -> dict[str, Tensor]:
    """What a file holds, by name."""
    snapshot = nanscope.load(path)
    found: dict[str, Tensor] = {}
    for leaf in snapshot.program.leaves:
        name = f"{leaf.name} {leaf.origin} {leaf.made_by} {leaf.diff}"
        name += f" #{sum(known.startswith(name) for known in found)}"
        found[name] = snapshot.tensors[leaf.id]
        if leaf.id in snapshot.grads:
            found[f"gradient of {name}"] = snapshot.grads[leaf.id]
    return found


@pytest.fixture
def recognised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how many backward passes were recognised."""
    found: list[int] = []
    original = Recording.recognised

    def counted(*args: Any, **kwargs: Any) -> Recording:
        found.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(Recording, "recognised", staticmethod(counted))
    return found


@pytest.mark.parametrize("on_nonfinite", ["record", "skip", "stop"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_is_told_the_same_whether_or_not_its_steps_are_recognised(
    loop: type[Loop], on_nonfinite: OnNonFinite, tmp_path: Path, recognised: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines, verdict, warnings, files and weights."""
    options: dict[str, Any] = {"save_steps": [BAD - 1]}
    cruising, weights = watched(loop, tmp_path / "one", on_nonfinite, **options)
    assert len(recognised) >= (2 if on_nonfinite == "stop" else 4) or loop in UNSTEADY  # who stops has fewer steps
    monkeypatch.setattr(Cruise, "stretch", lambda self, root: None)
    before = len(recognised)
    plain, expected = watched(loop, tmp_path / "other", on_nonfinite, **options)
    assert len(recognised) == before
    assert told(cruising) == told(plain)
    for one, other in zip(weights, expected, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    files = [[path for path in (*scope.paths, *scope.saved) if path is not None] for scope in (cruising, plain)]
    assert [path.name for path in files[0]] == [path.name for path in files[1]]
    for one, other in zip(*files, strict=True):
        mine, theirs = tensors(one), tensors(other)
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert torch.equal(tensor.nan_to_num(7.0), theirs[name].nan_to_num(7.0)), name


@pytest.mark.parametrize("cruises", [True, False])
def test_the_clip_of_a_step_is_that_of_this_step(cruises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bounds may be annealed: the history counts by those that were in force."""
    if not cruises:
        monkeypatch.setattr(Cruise, "stretch", lambda self, root: None)
    run = Annealed()
    with nanscope.watch(run.policy, out=tmp_path) as scope:
        run.run()
    told = [entry.clip_fraction for entry in scope.history.entries]
    assert told == pytest.approx(run.clipped, abs=1e-6) and len({round(part, 6) for part in run.clipped}) > 3


@pytest.mark.parametrize("ago", [1, 2, 5])
def test_what_another_model_returned_some_steps_ago_is_explained(ago: int, tmp_path: Path) -> None:
    """The bad step is the first that reads it; both models are given the same."""
    torch.manual_seed(0)
    policy, critic = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    seen, values = torch.randn(ROWS, WIDTH), list[Tensor]()
    with nanscope.watch(optimizer, out=tmp_path) as scope:
        for step in range(1, STEPS):
            given = seen
            if step == BAD - ago:
                given = seen.clone()
                given[2, 1] = math.inf
            values.append(critic(given).detach())
            optimizer.zero_grad()
            loss = policy(seen).pow(2).mean()
            if step == BAD:
                loss = loss + values[-1 - ago].sum()
            loss.backward()
            optimizer.step()
    incident = scope.verdict.incidents[0]
    assert (incident.step, incident.origin.variable) == (BAD, "given"), incident
    assert "not-explained" not in [note.slug for note in scope.notes]
