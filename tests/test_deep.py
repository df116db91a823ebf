"""Deep looks: damage that stays finite is told with its line, healthy runs are silent, and training does not notice."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import nanscope
from nanscope.replay.tries import replay


class Norm(nn.Module):
    """As in many models, in the dtype of what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Lengths(nn.Module):
    """Every row by its length."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        length = (x * x).sum(-1, keepdim=True).sqrt()
        return self.scale * (x / length)


def loss_of(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(x).float().flatten(0, 1), labels.flatten())


def batch(outlier: float = 1.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(3, 4, 8)
    x[1, 2, 5] = outlier
    return x.half(), torch.randint(0, 12, (3, 4))


FOUND = {"the mean of squares": (Norm, "pow"), "a length": (Lengths, "mul")}


@pytest.mark.parametrize("name", FOUND)
def test_a_row_that_an_overflow_has_made_0_is_found_inside_a_model(name: str, tmp_path: Path) -> None:
    """With the line and element that overflowed, what became of it, and a fix that brings the loss to that of float64; once a run."""
    norm, op = FOUND[name]
    torch.manual_seed(2)
    model = nn.Sequential(norm(8), nn.Linear(8, 12, bias=False)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, labels = batch(outlier=400.0)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, x, labels).backward()
            optimizer.step()
    assert scope.verdict.status == "suspect" and not scope.verdict.gaps
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.phase, incident.origin.op, incident.origin.index) == (1, "forward", op, (1, 2, 5))
    assert (incident.cause, incident.origin.masked, incident.origin.value) == ("fp16_overflow", False, math.inf)
    assert Path(str(incident.origin.file)) == Path(__file__) and "[1, 2]" in incident.sentence and "float64 gives" in incident.sentence
    assert incident.fixes[0].id == "upcast_fp32" and incident.fixes[0].executed
    (snapshot,) = scope.snapshots
    again = nanscope.load(scope.paths[0])
    assert again.observation.suspect and again.observation.kind == snapshot.observation.kind
    works = {row.id: row.works for row in replay(again).rows}
    assert works["upcast_fp32"] and not works["nan_to_num_after_op"]


def test_a_huge_first_loss_of_nothing_but_rounding_is_found(tmp_path: Path) -> None:
    """Without an optimizer, and without a step before that says what is usual."""
    verdicts = []
    for value in range(15, 100):
        rewards = torch.tensor([0.0, *[value / 100] * 7])
        others = (1.0 - torch.eye(8)) / 7
        log_probs = (-torch.rand(8, 5)).requires_grad_()
        with nanscope.watch(out=tmp_path / str(value)) as scope:
            mean = others @ rewards
            std = (others @ rewards.square() - mean.square()).sqrt().nan_to_num(0)
            advantages = torch.where(std > 0, (rewards - mean) / (std + 1e-6), rewards - mean)
            loss = -(advantages[:, None] * (log_probs - log_probs.detach()).exp()).mean()
            loss.backward()
        verdicts.append((abs(float(loss.detach())) > 10, scope.verdict))
        if len({huge for huge, _ in verdicts}) > 1:
            break
    for huge, verdict in verdicts:
        assert verdict.status == ("suspect" if huge else "healthy"), verdict.sentence
        if huge:
            (incident,) = verdict.incidents
            assert (incident.cause, incident.origin.op, incident.fixes[0].id) == ("cancellation_spike", "div", "clamp_denominator")


class Capped(nn.Module):
    """Attention with a soft cap, a causal mask and experts, in half precision, some of it infinite on purpose or on its way."""

    def __init__(self, width: int = 16, vocabulary: int = 18) -> None:
        super().__init__()
        self.tokens, self.share = nn.Embedding(vocabulary, width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.down.weight)  # as in LoRA
        self.router, self.norm, self.head = nn.Linear(width, 4), nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.tokens(ids)
        shared = self.share(hidden)
        scores = 50 * torch.tanh(shared @ shared.mT / 50)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -math.inf) + mask[:, None].log()
        hidden = self.norm(hidden + scores.float().softmax(-1).nan_to_num(0).to(hidden.dtype) @ shared)
        gates = self.router(hidden)
        best = gates.topk(2, dim=-1)
        weights = torch.full_like(gates, -math.inf).scatter(-1, best.indices, best.values).softmax(-1)
        up = self.up(hidden) * 60
        gelu = 0.5 * up * (1 + torch.tanh(0.8 * (up + 0.0447 * up.pow(3))))
        hidden = hidden + functional.dropout(self.down(gelu), 0.1) * weights[..., :1] + functional.relu(self.down(gelu))
        return self.head(self.norm(hidden * mask[..., None]))  # type: ignore[no-any-return]


def run(around: AbstractContextManager[object], *, again: bool = False, steps: int = 5) -> tuple[list[Tensor], list[int]]:
    """Train, and return weights, random numbers and results, and how often everything was written to."""
    torch.manual_seed(5)
    model = Capped()
    with torch.no_grad():
        model.tokens.weight[0] *= 260.0
    model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    ids, mask = torch.randint(1, 18, (2, 8)), torch.ones(2, 8, dtype=torch.float16)
    ids[1, 2], mask[0, 6:] = 0, 0
    losses, versions = [], []
    with around:
        for _ in range(steps):
            logits = checkpoint(model, ids[:, :-1], mask[:, :-1], use_reentrant=False) if again else model(ids[:, :-1], mask[:, :-1])
            log_probs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            advantages = torch.tensor([[0.7], [-0.7]])
            loss = -((log_probs - log_probs.detach()).exp() * advantages * mask[:, 1:]).sum() / mask[:, 1:].sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
            versions += [tensor._version for tensor in (ids, mask, logits, loss, *model.parameters())]
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*losses, *grads, *model.parameters(), torch.get_rng_state(), torch.rand(3)], versions


@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("every", [1, 4])
def test_training_is_bit_identical_in_deep_steps_and_in_others(every: int, again: bool, tmp_path: Path) -> None:
    """Weights, gradients, losses, generators and the counts of writes; and nothing is said of infinities that are meant or harmless."""
    bare, before = run(nullcontext(), again=again)
    scope = nanscope.watch(out=tmp_path, deep_every=every)
    watched, after = run(scope, again=again)
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True)) and before == after
    assert all(bool(torch.isfinite(one.float()).all()) for one in bare)
    assert scope.verdict.healthy, scope.verdict.sentence


ABSENT: dict[str, Callable[[Tensor], Tensor]] = {
    "a row that does not count": lambda logits: logits[torch.tensor([0, 2])],
    "a loss of 0": lambda logits: logits * 0.0,
}


@pytest.mark.parametrize("name", ABSENT)
def test_what_the_loss_does_not_depend_on_is_no_incident(name: str, tmp_path: Path) -> None:
    """The same overflow, in a row that nobody reads."""
    torch.manual_seed(2)
    model = nn.Sequential(Norm(8), nn.Linear(8, 12, bias=False)).half()
    x, _ = batch(outlier=400.0)
    with nanscope.watch(out=tmp_path, deep_every=1) as scope:
        for _ in range(2):
            ABSENT[name](model(x).float()).square().mean().backward()
    assert scope.verdict.healthy, scope.verdict.sentence


class Alone(nn.Module):
    """Cannot be copied, and so not run again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lines = Norm(8), (line for line in "endless")

    def forward(self, x: Tensor) -> Tensor:
        next(self.lines)
        normed: Tensor = self.norm(x)
        return normed


def test_what_cannot_be_held_against_float64_is_noted(tmp_path: Path) -> None:
    """An overflow of which nobody knows what it did is no incident."""
    model = Alone().half()
    x, _ = batch(outlier=400.0)
    with nanscope.watch(out=tmp_path) as scope:
        model(x).float().square().mean().backward()
    assert scope.verdict.healthy
    (note,) = [note for note in scope.notes if note.slug == "nonfinite_absorbed"]
    assert "pow overflowed inside the model (test_deep.py:" in note.text and "could not be held against float64" in note.text


def test_without_deep_looks_nothing_is_heard(tmp_path: Path) -> None:
    """They can be switched off."""
    torch.manual_seed(2)
    model = nn.Sequential(Norm(8), nn.Linear(8, 12, bias=False)).half()
    with nanscope.watch(out=tmp_path, deep_every=0) as scope:
        loss_of(model, *batch(outlier=400.0)).backward()
    assert scope.verdict.healthy and not scope.notes


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_a_state_of_the_optimizer_that_is_infinite_is_worth_a_word(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    """What it belongs to trains no more, and everything else is finite; once a run."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12))
    optimizer = kind(model.parameters(), lr=1e-3)
    x, labels = torch.randn(3, 4, 8), torch.randint(0, 12, (3, 4))

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, x, labels).backward()
        optimizer.step()

    step()
    squares = "exp_avg_sq" if kind is torch.optim.AdamW else "square_avg"
    with nanscope.watch(model, out=tmp_path / "healthy") as scope:
        step()
    assert scope.verdict.status == "healthy" and not scope.verdict.notes
    optimizer.state[model[2].weight][squares][3, 4] = math.inf
    with nanscope.watch(model, out=tmp_path / "infinite") as scope:
        step()
        step()
    (note,) = scope.verdict.notes
    assert (
        note.slug == "infinite_state"
        and f"{squares} of 2.weight is infinite at [3, 4]" in note.text
        and note.text in scope.verdict.sentence
    )
