"""`watch` around plain loops: what is found, what is left alone, what is written, and that nothing of ours can hurt a run."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loops import finite, grpo_steps, log_probs, policy, stale_at
from torch import Tensor, nn

import nanscope
from nanscope.capture import gauge
from nanscope.capture.log import RING
from nanscope.capture.mode import TapeMode
from nanscope.capture.modules import ModuleWatch
from nanscope.capture.scribe import Scribe
from nanscope.capture.tape import Tape
from nanscope.watching import line, narrow, recording
from nanscope.watching.acting import OnNonFinite
from nanscope.watching.counts import Counts
from nanscope.watching.examine import Examiner
from nanscope.watching.keeping import Keeper
from nanscope.watching.left import Leavings
from nanscope.watching.line import Line
from nanscope.watching.logbook import Logbook
from nanscope.watching.recording import Recording
from nanscope.watching.step import Step


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
    assert sorted(p.name for p in scope.out.iterdir()) == ["history.rank0.jsonl", "run.json"]
    (entry,) = [json.loads(line) for line in (scope.out / "history.rank0.jsonl").read_text().splitlines()]
    assert entry["loss"] == 0.0 and entry["grad_norm"] > 0
    record = json.loads((scope.out / "run.json").read_text())
    assert (record["status"], record["steps"], record["run"]) == ("healthy", 1, entry["run"]) and record["held_peak"] > 0


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


def forward_fault(model: nn.Module, loss: Tensor) -> Tensor:
    return torch.log(loss * 0)


def backward_fault(model: nn.Module, loss: Tensor) -> Tensor:
    return loss + torch.sqrt(loss - loss.detach())


def model_fault(model: nn.Module, loss: Tensor) -> Tensor:
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    return loss * math.nan


def update_fault(model: nn.Module, loss: Tensor) -> Tensor:
    return loss * 1e30


def late_fault(model: nn.Module, loss: Tensor) -> Tensor:
    list(model.parameters())[-1].register_hook(lambda grad: grad * math.nan)
    return loss


FAULTS = [forward_fault, backward_fault, model_fault, update_fault, late_fault]


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_of_two_scopes_neither_takes_the_work_of_the_other_for_the_trainers(
    tmp_path: Path, fault: Callable[[nn.Module, Tensor], Tensor], closure: bool
) -> None:
    """Looking closer differentiates, runs the model and the optimizer again: the other scope sees none of it, and both tell the same."""

    def train(*folders: str) -> list[nanscope.Scope]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), 1e10 if fault is update_fault else 0.1)
        with contextlib.ExitStack() as stack:
            scopes = [stack.enter_context(nanscope.watch(out=tmp_path / folder)) for folder in folders]
            for step in range(3):

                def loss_of(step: int = step) -> Tensor:
                    optimizer.zero_grad()
                    loss = model(torch.ones(3, 4)).pow(2).mean()
                    loss = fault(model, loss) if step == 1 else loss
                    loss.backward()
                    return loss

                optimizer.step(loss_of) if closure else (loss_of(), optimizer.step())
        return scopes

    def told(scope: nanscope.Scope) -> object:
        found = [(i.step, i.micro_batch, i.micro_batches, i.phase, i.cause, i.origin.op, i.sentence) for i in scope.verdict.incidents]
        files = sorted(path.name for path in scope.out.glob("*.safetensors"))
        return scope.steps, scope.backwards, scope.bad_steps, found, files, [(n.slug, n.text) for n in scope.verdict.notes]

    (alone,) = train("alone")
    outer, inner = train("outer", "inner")
    assert alone.backwards == 3 and told(outer) == told(alone) and told(inner) == told(alone)


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
    (Scribe, "_arg"),
    (Scribe, "_after_call"),
    (Tape, "program"),
    (Tape, "forget"),
    (Tape, "value_of"),
    (Step, "before_backward"),
    (Step, "after_backward"),
    (Step, "before_step"),
    (Step, "after_step"),
    (Step, "_examine"),
    (Keeper, "save"),
    (Step, "_close"),
    (Leavings, "take"),
    (Counts, "begin"),
    (Line, "entry"),
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
    (TapeMode, "sleep"),
    (line, "norms"),
    (gauge, "read_gauge"),
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
    if name not in ("_examine", "save", "keep", "loss", "snapshot", "narrow", "parameters"):
        assert "planted" in caplog.text and "nanscope [" in caplog.text


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


def test_asking_for_the_verdict_inside_the_block_changes_nothing(tmp_path: Path) -> None:
    """Diagnosing replays the step, forward and backward: that is not mistaken for training, and the file stays as it was."""
    x = torch.tensor([1.0, 99.0], requires_grad=True)
    with nanscope.watch(out=tmp_path) as scope:
        (torch.exp(x) * torch.tensor([1.0, 0.0])).sum().backward()
        before = [path.read_bytes() for path in scope.out.glob("*.safetensors")]
        sentence = scope.verdict.sentence
        assert [path.read_bytes() for path in scope.out.glob("*.safetensors")] == before
        (x * 2).sum().backward()
    assert len(scope.snapshots) == 1 and scope.verdict.sentence == sentence


def test_what_had_to_make_room_on_the_tape_did_not_come_with_the_batch(tmp_path: Path) -> None:
    """Advantages that thousands of calls came after were computed here all the same, though nobody knows any more how."""
    model, rewards = nn.Linear(3, 1), torch.ones(4)
    with nanscope.watch(model, out=tmp_path) as scope:
        advantages = (rewards - rewards.mean()) / rewards.std()
        counter = torch.zeros(3)
        for _ in range(RING + 10):
            counter = counter + 1
        (model(torch.ones(4, 3)).squeeze(-1) * advantages).mean().backward()
    (incident,) = scope.verdict.incidents
    assert incident.phase == "forward" and incident.origin.variable == "advantages" and "came in" not in incident.sentence
