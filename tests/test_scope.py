"""`watch` around plain loops: what is found, what is left alone, what is written, and that nothing of ours can hurt a run."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.capture.modules import ModuleWatch
from nanscope.capture.tape import Tape, TapeMode
from nanscope.replay.tries import replay
from nanscope.watching import examine, narrow, recording
from nanscope.watching import step as running
from nanscope.watching.examine import Examiner
from nanscope.watching.logbook import Logbook
from nanscope.watching.recording import Recording
from nanscope.watching.step import OnNonFinite, Step


def policy(vocabulary: int = 20) -> nn.Module:
    return nn.Sequential(nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary))


def log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def clipped_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    log_ratio = logps - old_logps
    ratio = torch.exp(log_ratio)
    unclipped = ratio * advantages[:, None]
    clipped = ratio.clamp(0.8, 1.2) * advantages[:, None]
    per_token_loss = -torch.min(unclipped, clipped)
    return (per_token_loss * mask).sum() / mask.sum()


def grpo_steps(model: nn.Module, steps: int, spoil: Callable[[int, dict[str, Tensor]], None] = lambda step, batch: None) -> list[float]:
    """Run a few steps of a tiny GRPO loop; `spoil` may edit the batch. Returns the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        ids = torch.randint(0, 20, (4, 7))
        with torch.no_grad():
            old = log_probs(model(ids[:, :-1]), ids[:, 1:])
        batch = {"old_logps": old, "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5]), "mask": torch.ones(4, 6)}
        batch["mask"][2, 4:] = 0
        spoil(step, batch)
        loss = clipped_loss(log_probs(model(ids[:, :-1]), ids[:, 1:]), **batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def stale_at(row: int, column: int, step: int = 2) -> Callable[[int, dict[str, Tensor]], None]:
    def spoil(now: int, batch: dict[str, Tensor]) -> None:
        if now == step:
            batch["old_logps"][row, column] = -200.0

    return spoil


def finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_a_finite_loss_with_nan_gradients_is_found(tmp_path: Path) -> None:
    """min picks the clipped side, the loss stays finite, the gradients are NaN: backward, the right element, the right line."""
    model = policy()
    with nanscope.watch(out=tmp_path) as scope:
        losses = grpo_steps(model, 3, stale_at(0, 3))
    assert math.isfinite(losses[2])
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.phase) == (3, "backward")
    assert (incident.origin.op, incident.origin.variable, incident.origin.index) == ("exp", "ratio", (0, 3))
    assert incident.origin.masked is True and incident.origin.masked_by == "minimum picked the other side"
    assert incident.fixes[0].id == "clamp_exponent"
    assert incident.reproduces is True
    assert not finite(model)


def test_a_masked_token_with_negative_advantage_makes_the_loss_nan(tmp_path: Path) -> None:
    """inf · 0 at a masked token: forward, exp, masked by the mask."""
    model = policy()

    def spoil(step: int, batch: dict[str, Tensor]) -> None:
        if step == 1:
            batch["advantages"][2] = -1.0
            batch["old_logps"][2, 5] = -200.0

    with nanscope.watch(out=tmp_path) as scope:
        grpo_steps(model, 2, spoil)
    incident = scope.verdict.incidents[0]
    assert (incident.phase, str(incident.cause)) == ("forward", "inf_times_zero_mask")
    assert (incident.origin.index, incident.origin.masked, incident.origin.masked_by) == ((2, 5), True, "multiplied by mask = 0")
    assert incident.fixes[0].id == "mask_before_op"


@pytest.mark.parametrize("target", ["nothing", "module", "optimizer"])
def test_any_target_or_none_will_do(tmp_path: Path, target: str) -> None:
    """Everything in the block is seen, whatever is handed over."""
    model = policy()
    targets = {"nothing": (), "module": (model,), "optimizer": (torch.optim.SGD(model.parameters(), lr=0.1),)}[target]
    with nanscope.watch(*targets, out=tmp_path) as scope:
        grpo_steps(model, 3, stale_at(0, 3))
    assert scope.verdict.incidents[0].origin.variable == "ratio"


def test_record_changes_nothing_skip_protects_stop_raises(tmp_path: Path) -> None:
    """The three ways to meet a bad step."""
    results = {}
    for mode in ("record", "skip", "stop"):
        torch.manual_seed(0)
        model = policy()
        scope = nanscope.watch(out=tmp_path / mode, on_nonfinite=mode)  # type: ignore[arg-type]
        try:
            with scope:
                grpo_steps(model, 5, stale_at(0, 3))
            raised = None
        except nanscope.NonFiniteError as error:
            raised = error
        results[mode] = (finite(model), scope.steps, scope.skipped, raised)
    assert results["record"][:3] == (False, 5, 0) and results["record"][3] is None
    assert results["skip"][:3] == (True, 5, 1) and results["skip"][3] is None
    assert results["stop"][0] is True and results["stop"][1] == 2
    stopped = results["stop"][3]
    assert stopped is not None and stopped.snapshot is not None and Path(stopped.snapshot).is_file()
    assert nanscope.load(stopped.snapshot).step == 3


def test_skip_leaves_the_optimizer_state_and_the_gradients_as_they_were(tmp_path: Path) -> None:
    """A skipped step is no step: neither weights nor moments nor step counts move, and `.grad` is still there afterwards."""
    model = policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with nanscope.watch(out=tmp_path, on_nonfinite="skip") as scope:
        for bad in (False, True):
            optimizer.zero_grad()
            model(torch.tensor([1, 2])).square().sum().backward()
            if bad:
                next(model.parameters()).grad[0, 0] = math.nan  # type: ignore[index]
            before = [p.detach().clone() for p in model.parameters()], str(optimizer.state_dict())
            optimizer.step()
    after = [p.detach() for p in model.parameters()], str(optimizer.state_dict())
    assert scope.skipped == 1
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True)) and before[1] == after[1]
    assert all(p.grad is not None for p in model.parameters())


def test_a_healthy_run_writes_history_and_nothing_else(tmp_path: Path) -> None:
    """A first loss of exactly 0 with a real gradient is healthy: no incident, no snapshot, no note."""
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 20, (4, 7))
    with nanscope.watch(out=tmp_path) as scope:
        logps = log_probs(model(ids[:, :-1]), ids[:, 1:])
        loss = (torch.exp(logps - logps.detach()) * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]).mean()
        loss.backward()
        optimizer.step()
    assert loss.item() == 0.0
    assert scope.verdict.healthy and not scope.verdict.notes
    assert sorted(p.name for p in tmp_path.iterdir()) == ["history.rank0.jsonl", "run.json"]
    (entry,) = [json.loads(line) for line in (tmp_path / "history.rank0.jsonl").read_text().splitlines()]
    assert entry["loss"] == 0.0 and entry["grad_norm"] > 0


class Attention(nn.Module):
    """Causal and padding masks of -inf, every row keeps a key."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        allowed = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        scores = (h @ h.transpose(-1, -2)).masked_fill(~allowed, -math.inf)
        return self.head(scores.softmax(-1) @ h)


def additive_attention_mask(logits: Tensor, ids: Tensor) -> Tensor:
    return logits


def suppressed_vocabulary(logits: Tensor, ids: Tensor) -> Tensor:
    allowed = torch.zeros(logits.shape[-1], dtype=torch.bool)
    allowed[ids.unique()] = True
    return logits.masked_fill(~allowed, -math.inf)


def top_k(logits: Tensor, ids: Tensor) -> Tensor:
    kept = torch.topk(logits, 5, dim=-1).values[..., -1:]
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids.unsqueeze(-1), True)
    return torch.where((logits < kept) & ~chosen, torch.tensor(-math.inf), logits)


@pytest.mark.parametrize("masking", [additive_attention_mask, suppressed_vocabulary, top_k])
def test_infinities_on_purpose_are_silent(tmp_path: Path, masking: Callable[[Tensor, Tensor], Tensor]) -> None:
    """-inf in attention scores, in a vocabulary mask and in top-k filtered logits is absorbed by softmax: not a word."""
    model = Attention()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with nanscope.watch(model, out=tmp_path) as scope:
        for _ in range(3):
            ids = torch.randint(0, 20, (4, 7))
            logits = masking(model(ids[:, :-1]), ids[:, 1:])
            loss = -(torch.exp(log_probs(logits, ids[:, 1:])) * torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert scope.verdict.healthy and not scope.verdict.notes
    assert finite(model)


def test_a_grad_scaler_that_skips_is_healthy(tmp_path: Path) -> None:
    """Scaled gradients may overflow: the scaler looks at them itself and does not step."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(torch.randn(6, 8)).float(), torch.arange(6))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scope.verdict.healthy


def test_large_logits_stay_out_of_memory_and_out_of_the_file(tmp_path: Path) -> None:
    """[B, T, V] logits: the tape holds less than its budget, and nothing of that size is saved."""
    vocabulary = 4096
    head = nn.Linear(16, vocabulary)
    held = []
    hidden = torch.randn(4, 64, 16)
    ids = torch.randint(0, vocabulary, (4, 64))
    budget = 4 << 20  # the logits alone are as large
    with nanscope.watch(out=tmp_path, budget=budget) as scope:
        logits = head(hidden)
        chain = logits.float() / 0.7
        chain = chain - chain.logsumexp(-1, keepdim=True)
        logps = chain.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        old = logps.detach().clone()
        old[1, 2] = -300.0
        mask = torch.ones(4, 64)
        mask[1, 2] = 0
        loss = (torch.exp(logps - old) * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None] * mask).sum() / mask.sum()
        held.append(scope._tape.held)
        loss.backward()
    assert 0 < held[0] <= budget
    incident = scope.verdict.incidents[0]
    assert incident.origin.op == "exp" and incident.origin.index == (1, 2) and incident.origin.masked is True
    snapshot = nanscope.load(str(scope.paths[0]))
    assert max(t.numel() for t in snapshot.tensors.values()) <= 4 * 64
    assert Path(str(scope.paths[0])).stat().st_size < 1 << 17
    assert incident.fixes[0].works


def test_large_logits_within_the_budget_are_not_saved_either(tmp_path: Path) -> None:
    """What memory can afford, a file to attach to an issue cannot."""
    head = nn.Linear(16, 4096)
    ids = torch.randint(0, 4096, (4, 64))
    with nanscope.watch(out=tmp_path) as scope:
        logps = log_probs(head(torch.randn(4, 64, 16)), ids)
        old = logps.detach().clone()
        old[1, 2] = -300.0
        (torch.exp(logps - old) * -1.0).mean().backward()
    snapshot = nanscope.load(str(scope.paths[0]))
    assert max(t.numel() for t in snapshot.tensors.values()) <= 4 * 64
    assert scope.verdict.incidents[0].origin.index == (1, 2)
    assert scope.verdict.incidents[0].reproduces is True


def test_tags_name_what_the_code_does_not(tmp_path: Path) -> None:
    """`scope.tag` gives roles to tensors whose variables are called x, y and z."""
    x = torch.randn(2, 5).requires_grad_()
    y = x.detach() - 1.0
    y[1, 3] = -300.0
    z = torch.tensor([[1.0, 1, 1, 1, 1], [1, 1, 1, 0, 1]])
    with nanscope.watch(out=tmp_path) as scope:
        scope.tag(log_probs=x, old_log_probs=y, mask=z)
        (torch.exp(x - y) * -1.0 * z).sum().backward()
    origin = scope.verdict.incidents[0].origin
    assert (origin.role, origin.masked, origin.masked_by) == ("ratio", True, "multiplied by mask = 0")


@pytest.mark.parametrize(("tensors", "slug"), [({"logprobs": torch.zeros(2)}, "unknown-role"), ({"mask": [1, 0]}, "bad-argument")])
def test_a_wrong_tag_is_one_clear_error(tmp_path: Path, tensors: dict[str, Tensor], slug: str) -> None:
    """A role that does not exist, or something that is no tensor, is the caller's mistake and said at once."""
    with nanscope.watch(out=tmp_path) as scope, pytest.raises(nanscope.NanscopeError) as caught:
        scope.tag(**tensors)
    assert caught.value.slug == slug


@pytest.mark.parametrize("options", [{"on_nonfinite": "explode"}, {"budget": 0}])
def test_a_wrong_option_is_one_clear_error(tmp_path: Path, options: dict[str, object]) -> None:
    """Options are checked before the run begins."""
    with pytest.raises(nanscope.NanscopeError):
        nanscope.watch(out=tmp_path, **options)  # type: ignore[arg-type]


def test_exceptions_of_the_run_pass_through_and_nothing_stays(tmp_path: Path) -> None:
    """Errors in the loop, in a module's forward and in backward leave the block as they were raised (the fixture looks for hooks)."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("forward")

    class BrokenBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            raise ArithmeticError("backward")

    def in_loop() -> None:
        raise ValueError("loop")

    for act, kind in (
        (in_loop, ValueError),
        (lambda: Broken()(torch.ones(2)), KeyError),
        (lambda: BrokenBackward.apply(torch.ones(2, requires_grad=True)).sum().backward(), ArithmeticError),
    ):
        with pytest.raises(kind), nanscope.watch(out=tmp_path):
            act()


def test_training_goes_on_after_an_exception_that_the_loop_catches(tmp_path: Path) -> None:
    """A module that raised once (out of memory, say) does not put the tape to sleep for good."""
    model = policy()

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: Tensor, fail: bool) -> Tensor:
            if fail:
                raise MemoryError
            return self.inner(ids)

    fragile = Fragile()
    with nanscope.watch(out=tmp_path) as scope:
        with pytest.raises(MemoryError):
            fragile(torch.tensor([[1]]), True)
        grpo_steps(model, 3, stale_at(0, 3))
    assert scope.verdict.incidents[0].origin.variable == "ratio"


def test_scopes_nest_and_repeat(tmp_path: Path) -> None:
    """An inner scope and a later one see their own steps; the outer one sees all."""
    model = policy()
    with nanscope.watch(out=tmp_path / "outer") as outer:
        grpo_steps(model, 1)
        with nanscope.watch(out=tmp_path / "inner") as inner:
            grpo_steps(model, 3, stale_at(0, 3))
    with nanscope.watch(out=tmp_path / "later") as later:
        grpo_steps(policy(), 2)
    assert (outer.steps, inner.steps, later.steps) == (4, 3, 2)
    assert outer.verdict.incidents[0].step == 4 and inner.verdict.incidents[0].step == 3
    assert outer.verdict.incidents[0].origin.variable == inner.verdict.incidents[0].origin.variable == "ratio"
    with pytest.raises(nanscope.NanscopeError, match="once"), outer:
        pass


PLANTS = [
    (Tape, "_arg"),
    (Tape, "_after_call"),
    (Tape, "program"),
    (Tape, "forget"),
    (Tape, "value_of"),
    (Step, "before_backward"),
    (Step, "after_backward"),
    (Step, "before_step"),
    (Step, "after_step"),
    (Step, "_examine"),
    (Step, "_save"),
    (Step, "_close"),
    (Step, "finish"),
    (Recording, "watch"),
    (Examiner, "loss"),
    (Examiner, "snapshot"),
    (Logbook, "open"),
    (Logbook, "keep"),
    (Logbook, "close"),
    (narrow, "narrow"),
    (ModuleWatch, "_begin"),
    (ModuleWatch, "_remember"),
    (ModuleWatch, "output_of"),
    (ModuleWatch, "parameters"),
    (TapeMode, "suspend"),
    (running, "norms"),
    (running, "read_gauge"),
    (recording, "is_finite"),
]


@pytest.mark.parametrize(("owner", "name"), PLANTS, ids=[name for _, name in PLANTS])
@pytest.mark.parametrize("mode", ["record", "skip"])
def test_our_own_failure_never_stops_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: object,
    name: str,
    mode: OnNonFinite,
) -> None:
    """Whatever of ours is broken, the run ends as if it had not been watched, with a warning that names the failure."""

    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("planted")

    torch.manual_seed(0)
    model = policy()
    expected = grpo_steps(model, 4, stale_at(0, 3, step=9))
    torch.manual_seed(0)
    watched = policy()
    monkeypatch.setattr(owner, name, broken)
    with caplog.at_level(logging.WARNING, "nanscope"), nanscope.watch(out=tmp_path, on_nonfinite=mode) as scope:
        losses = grpo_steps(watched, 4, stale_at(0, 3, step=9))
    assert losses == expected
    assert scope.verdict is not None
    torch.manual_seed(0)
    with nanscope.watch(out=tmp_path, on_nonfinite="record"):
        assert len(grpo_steps(policy(), 3, stale_at(0, 3))) == 3
    if name not in ("_examine", "_save", "keep", "loss", "snapshot", "narrow", "parameters"):
        assert "planted" in caplog.text and "nanscope [" in caplog.text


def test_an_unwritable_folder_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run directory that cannot be made costs the files, not the run, nor the verdict."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with caplog.at_level(logging.WARNING, "nanscope"), nanscope.watch(out=blocked / "run") as scope:
        grpo_steps(policy(), 3, stale_at(0, 3))
    assert scope.verdict.incidents[0].origin.variable == "ratio"
    assert scope.verdict.incidents[0].snapshot is None
    assert "could not be saved" in caplog.text


def test_later_bad_steps_are_counted_not_saved(tmp_path: Path) -> None:
    """Once the weights are NaN every step is bad: a few files, then a count."""
    with nanscope.watch(out=tmp_path, limit=2) as scope:
        grpo_steps(policy(), 8, stale_at(0, 3))
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert scope.verdict.bad_steps == 6
    assert [incident.step for incident in scope.verdict.incidents] == [3, 4]


def test_a_model_side_origin_is_named_by_a_second_look(tmp_path: Path) -> None:
    """The tape sleeps inside the model; when the harm comes from there, module, op, element and line are found by running it again."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.proj(x)
            norm = torch.sqrt(h.square().sum(-1, keepdim=True) - 1e6)
            return h / norm

    model = nn.Sequential(nn.Linear(4, 4), Block(), nn.Linear(4, 2))
    with nanscope.watch(out=tmp_path) as scope:
        model(torch.randn(3, 4)).sum().backward()
    incident = scope.verdict.incidents[0]
    assert (incident.origin.op, incident.origin.index, incident.phase) == ("sqrt", (0, 0), "forward")
    assert incident.origin.module is not None and incident.origin.module.startswith("1")
    assert incident.origin.line is not None and "torch.sqrt" in dict(incident.origin.source)[incident.origin.line]


def test_a_gradient_that_the_models_own_backward_spoils_is_named(tmp_path: Path) -> None:
    """The loss and the gradient that enters the model are finite; sqrt at 0 inside the model makes the rest NaN."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.proj(x)
            length = torch.sqrt(h.square().sum(-1, keepdim=True))
            return h + 0 * length

    model = Norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(3, 4)
    inputs[1] = 0
    with nanscope.watch(out=tmp_path) as scope:
        model(inputs).square().mean().backward()
        optimizer.step()
    incident = scope.verdict.incidents[0]
    assert (incident.phase, incident.origin.op, incident.origin.index) == ("backward", "sqrt", (1, 0))
    assert str(incident.cause) == "sqrt_zero_grad"


def test_no_gradient_block_and_metrics_are_no_incident(tmp_path: Path) -> None:
    """A NaN in a metric that nobody differentiates is not the run's problem."""
    model = policy()
    with nanscope.watch(out=tmp_path) as scope:
        with torch.no_grad():
            (torch.zeros(3) / torch.zeros(3)).mean().item()
        grpo_steps(model, 2)
    assert scope.verdict.healthy


def test_two_optimizers_make_one_step(tmp_path: Path) -> None:
    """Actor and critic that step after one backward pass are one step of the run."""
    actor, critic = policy(), policy()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (actor, critic)]
    ids = torch.tensor([[1, 2, 3]])
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(3):
            (actor(ids).mean() + critic(ids).mean()).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert scope.steps == 3


def test_gradient_accumulation_names_the_micro_batch_that_did_it(tmp_path: Path) -> None:
    """Of several backward passes before one optimizer step, the bad one is described."""
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 20, (2, 5))
    with nanscope.watch(out=tmp_path) as scope:
        for micro in range(4):
            logps = log_probs(model(ids[:, :-1]), ids[:, 1:])
            old = logps.detach().clone()
            if micro == 2:
                old[1, micro] = -200.0
            loss = torch.exp(logps - old).mean() / 4
            loss.backward()
        optimizer.step()
    assert scope.steps == 1
    assert scope.verdict.incidents[0].origin.index == (1, 2)


def accumulated(steps: int, bad: set[tuple[int, int]]) -> None:
    """A few steps of two micro-batches each; in those of `bad`, (step, micro-batch), one old log-prob is far off."""
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        for micro in (1, 2):
            ids = torch.randint(0, 20, (2, 5))
            logps = log_probs(model(ids[:, :-1]), ids[:, 1:])
            old = logps.detach().clone()
            if (step, micro) in bad:
                old[1, micro] = -200.0
            (clipped_loss(logps, old, torch.tensor([1.0, 0.5]), torch.ones(2, 4)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_every_bad_micro_batch_has_a_file_of_its_own(tmp_path: Path) -> None:
    """Two bad backward passes of one step are two files, two incidents and one bad step."""
    with nanscope.watch(out=tmp_path, on_nonfinite="skip") as scope:
        accumulated(2, {(2, 1), (2, 2)})
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert names == ["step-000002.rank0.part2.safetensors", "step-000002.rank0.safetensors"]
    assert [nanscope.load(tmp_path / name).part for name in names] == [2, 1]
    assert [incident.origin.index for incident in scope.verdict.incidents] == [(1, 1), (1, 2)]
    assert scope.verdict.bad_steps == 1


def test_of_one_step_not_every_micro_batch_is_saved(tmp_path: Path) -> None:
    """A run of long accumulation does not spend its files on one step."""
    with nanscope.watch(out=tmp_path, on_nonfinite="skip", limit=1) as scope:
        accumulated(3, {(2, 1), (2, 2), (3, 1)})
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["step-000002.rank0.safetensors"]
    assert scope.verdict.bad_steps == 2


def test_healthy_steps_are_saved_on_request(tmp_path: Path) -> None:
    """Each backward pass of the step, replayable bit for bit, no incident, and the run goes as it would have gone."""

    def weights(**options: Any) -> list[Tensor]:
        torch.manual_seed(3)
        model = policy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with nanscope.watch(out=tmp_path / str(len(options)), **options) as scope:
            for _ in range(3):
                ids = torch.randint(0, 20, (2, 5))
                logps = log_probs(model(ids[:, :-1]), ids[:, 1:])
                clipped_loss(logps, logps.detach().clone(), torch.tensor([1.0, -0.5]), torch.ones(2, 4)).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert scope.verdict.healthy
        saved.append(scope.saved)
        return [parameter.detach() for parameter in model.parameters()]

    saved: list[list[Path]] = []
    plain, asked = weights(), weights(save_steps=(2, 9))
    assert all(torch.equal(a, b) for a, b in zip(plain, asked, strict=True))
    assert saved[0] == [] and [path.name for path in saved[1]] == ["batch-000002.rank0.safetensors"]
    snapshot = nanscope.load(saved[1][0])
    assert snapshot.asked and snapshot.step == 2
    replayed = replay(snapshot)
    assert replayed.reproduces is True and replayed.location is None


def test_the_story_of_the_exclamation_marks(tmp_path: Path) -> None:
    """Step 1 poisons the weights, from step 2 on every log-prob is NaN, and the model emits token 0 for ever: one verdict tells all of it."""
    torch.manual_seed(0)
    policy = nn.Linear(4, 6)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(3):
            logits = policy(torch.ones(2, 5, 4))
            response_ids = logits.detach().nan_to_num(nan=-1.0).argmax(-1) if step else torch.tensor([[1, 2, 3, 4, 5], [0, 1, 2, 3, 4]])
            scope.tag(response_ids=response_ids, mask=mask)
            log_probs = logits.log_softmax(-1).gather(-1, response_ids[..., None]).squeeze(-1)
            old_log_probs = log_probs.detach() - (200.0 if step == 0 else 0.0) * (1 - mask)
            ratio = torch.exp(log_probs - old_log_probs)
            loss = -(ratio * mask).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    first, second, *_ = scope.verdict.incidents
    assert (first.step, first.cause, first.origin.index) == (1, "inf_times_zero_mask", (0, 4))
    assert (second.step, second.cause) == (2, "poisoned_weights")
    assert "the update of step 1 wrote it there" in second.sentence
    notes = [note.text for note in scope.verdict.notes if note.slug == "repeated_tokens"]
    assert notes and "2 of 2 completions are one token over and over (id 0)" in notes[0]


def test_asking_for_the_verdict_inside_the_block_changes_nothing(tmp_path: Path) -> None:
    """Diagnosing replays the step, forward and backward: that is not mistaken for training, and the file stays as it was."""
    x = torch.tensor([1.0, 99.0], requires_grad=True)
    with nanscope.watch(out=tmp_path) as scope:
        (torch.exp(x) * torch.tensor([1.0, 0.0])).sum().backward()
        before = [path.read_bytes() for path in tmp_path.glob("*.safetensors")]
        sentence = scope.verdict.sentence
        assert [path.read_bytes() for path in tmp_path.glob("*.safetensors")] == before
        (x * 2).sum().backward()
    assert len(scope.snapshots) == 1 and scope.verdict.sentence == sentence


def test_a_loss_that_is_computed_inside_the_step_is_seen(tmp_path: Path) -> None:
    """LBFGS and its like call back for loss and gradient: steps are counted, and a bad loss in the closure is located."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    gain = torch.tensor([1.0, 1.0])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        ratio = torch.exp((model(torch.ones(2, 3)).squeeze(-1).abs() + 0.1) * gain)
        loss = ratio.square().mean()
        loss.backward()
        return loss

    with nanscope.watch(out=tmp_path) as scope:
        optimizer.step(closure)
        assert scope.steps == 1 and scope.verdict.healthy
        gain[1] = 1e4
        optimizer.step(closure)
    incident = scope.verdict.incidents[0]
    assert (incident.step, incident.origin.op, incident.origin.variable) == (2, "exp", "ratio")


@pytest.mark.parametrize("name", ["look_closely", "find_trainer", "settings", "to_save", "logged_loss", "environment"])
def test_an_incident_that_cannot_be_explained_is_still_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever fails while a bad step is described: the step is reported, with what it reached, and the file is there."""

    def broken(*args: object, **kwargs: object) -> None:
        if name != "environment" or args != (None, None):
            raise ZeroDivisionError("planted")

    real = examine.environment
    x = torch.tensor([1.0, 99.0], requires_grad=True)
    with nanscope.watch(out=tmp_path) as scope:
        monkeypatch.setattr(examine, name, broken)
        if name == "environment":
            calls: list[object] = []

            def once(*args: object) -> object:
                calls.append(args)
                return broken() if len(calls) > 1 else real(None, None)

            monkeypatch.setattr(examine, name, once)
        torch.exp(x).sum().backward()
        monkeypatch.undo()
    (incident,) = scope.verdict.incidents
    assert incident.loss == math.inf and list(tmp_path.glob("*.safetensors"))
