"""`on_nonfinite="repair"`: a faulty loss trains as the mended one does, and what cannot be mended is skipped."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.watching.acting import OnNonFinite
from nanscope.watching.repair import Repair

pytestmark = pytest.mark.filterwarnings("ignore:std")  # of a group of one, which is what the test is about

NAN = math.nan
BAD = 2  # steps from here on are bad, counted from 0
STEPS = 5

Batch = dict[str, Tensor]
Loss = Callable[[Tensor, Batch], Tensor]


def clipped(ratio: Tensor, batch: Batch) -> Tensor:
    per_token = -torch.min(ratio * batch["advantages"][:, None], ratio.clamp(0.8, 1.2) * batch["advantages"][:, None])
    return (per_token * batch["mask"]).sum() / batch["mask"].sum()


def masked_exp(log_probs: Tensor, batch: Batch) -> Tensor:
    log_ratio = log_probs - batch["old"]
    ratio = torch.exp(log_ratio)
    return clipped(ratio, batch)


def masked_exp_mended(log_probs: Tensor, batch: Batch) -> Tensor:
    log_ratio = log_probs - batch["old"]
    ratio = torch.exp(torch.where(batch["mask"] != 0, log_ratio, 0.0))
    return clipped(ratio, batch)


def k3(log_probs: Tensor, batch: Batch) -> Tensor:
    gap = batch["ref"] - log_probs
    kl = torch.exp(gap) - gap - 1
    return ((0.1 * kl - log_probs * batch["advantages"][:, None]) * batch["mask"]).sum() / batch["mask"].sum()


def k3_mended(log_probs: Tensor, batch: Batch) -> Tensor:
    gap = batch["ref"] - log_probs
    kl = torch.exp(torch.where(batch["mask"] != 0, gap, 0.0)) - gap - 1
    return ((0.1 * kl - log_probs * batch["advantages"][:, None]) * batch["mask"]).sum() / batch["mask"].sum()


def sequence_ratio(log_probs: Tensor, batch: Batch) -> Tensor:
    length = batch["mask"].sum(-1)
    ratio = torch.exp(((log_probs - batch["old"]) * batch["mask"]).sum(-1) / length)
    return -(ratio * batch["advantages"] * (length > 0)).mean()


def sequence_ratio_mended(log_probs: Tensor, batch: Batch) -> Tensor:
    length = batch["mask"].sum(-1)
    ratio = torch.exp(((log_probs - batch["old"]) * batch["mask"]).sum(-1) / length.clamp_min(1.0))
    return -(ratio * batch["advantages"] * (length > 0)).mean()


def mean_over_mask(log_probs: Tensor, batch: Batch) -> Tensor:
    return -(log_probs * batch["advantages"][:, None] * batch["mask"]).sum() / batch["mask"].sum()


def mean_over_mask_mended(log_probs: Tensor, batch: Batch) -> Tensor:
    return -(log_probs * batch["advantages"][:, None] * batch["mask"]).sum() / batch["mask"].sum().clamp_min(1.0)


def grouped(log_probs: Tensor, batch: Batch, correction: Callable[[Tensor], int] = lambda group: 1) -> Tensor:
    groups = [batch["rewards"][:3], batch["rewards"][3:]]
    advantages = torch.cat([(group - group.mean()) / (group.std(correction=correction(group)) + 1e-4) for group in groups])
    return -(log_probs * advantages[:, None] * batch["mask"]).sum() / batch["mask"].sum()


def grouped_mended(log_probs: Tensor, batch: Batch) -> Tensor:
    return grouped(log_probs, batch, lambda group: int(len(group) > 1))


def both(log_probs: Tensor, batch: Batch) -> Tensor:
    return masked_exp(log_probs, batch) + k3(log_probs, batch)


def both_mended(log_probs: Tensor, batch: Batch) -> Tensor:
    return masked_exp_mended(log_probs, batch) + k3_mended(log_probs, batch)


def root_of_counts(log_probs: Tensor, batch: Batch) -> Tensor:
    spread = torch.sqrt((log_probs.detach() * batch["mask"]).var(-1, correction=0))
    return masked_exp(log_probs, batch) + ((log_probs * batch["mask"]).sum(-1) / batch["mask"].sum(-1) * spread).mean()


def root_of_counts_mended(log_probs: Tensor, batch: Batch) -> Tensor:
    spread = torch.sqrt((log_probs.detach() * batch["mask"]).var(-1, correction=0))
    return (
        masked_exp_mended(log_probs, batch) + ((log_probs * batch["mask"]).sum(-1) / batch["mask"].sum(-1).clamp_min(1.0) * spread).mean()
    )


def stale(batch: Batch) -> None:
    batch["old"][2, 4] = -200.0


def stale_reference(batch: Batch) -> None:
    batch["ref"][2, 5] = 150.0


def stale_both(batch: Batch) -> None:
    stale(batch)
    stale_reference(batch)


def stale_and_empty(batch: Batch) -> None:
    stale(batch)
    batch["mask"][0] = 0.0


def empty_row(batch: Batch) -> None:
    batch["mask"][2] = 0.0


def empty(batch: Batch) -> None:
    batch["mask"].zero_()


def nothing(batch: Batch) -> None:
    """The group of one is there in every step."""


FAULTS: dict[str, tuple[Loss, Loss, Callable[[Batch], None], str]] = {  # as it is, mended in its source, what makes it go wrong, which fix
    "exp at a masked token": (masked_exp, masked_exp_mended, stale, "mask_before_op"),
    "k3 at a masked token": (k3, k3_mended, stale_reference, "mask_before_op"),
    "a sequence without tokens": (sequence_ratio, sequence_ratio_mended, empty_row, "clamp_denominator"),
    "a batch without tokens": (mean_over_mask, mean_over_mask_mended, empty, "clamp_denominator"),
    "two of one kind": (both, both_mended, stale_both, "mask_before_op"),
    "two of two kinds": (root_of_counts, root_of_counts_mended, stale_and_empty, ""),
    "a group of one": (grouped, grouped_mended, nothing, "guard_small_group"),
}


class Policy(nn.Module):
    """Log-probs from outside, logits from inside; `overflows` lets it go wrong within."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.overflows = nn.Embedding(20, 8), nn.Linear(8, 20), False

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(ids))
        return out * (NAN if self.overflows else 1.0)


def log_probs_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def batch_of(model: nn.Module, ids: Tensor) -> Batch:
    with torch.no_grad():
        old = log_probs_of(model, ids)
    mask = torch.ones_like(old)
    mask[2, 4:] = 0
    return {
        "old": old + 0.1 * torch.randn_like(old),
        "ref": old + 0.1 * torch.randn_like(old),
        "mask": mask,
        "advantages": torch.tensor([1.0, -1.0, -0.5, 0.5]),
        "rewards": torch.tensor([1.0, 0.0, 0.5, 0.7]),
    }


class Loop:
    """Trains a policy; `backward` and `update` are what a kind of loop does in its own way."""

    parts = 1
    model_class: type[Any] = Policy

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.model_class()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def precision(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def train(self, loss_of: Loss, spoil: Callable[[Batch], None], around: AbstractContextManager[Any]) -> list[Tensor]:
        """Train and return the weights. The first part of each step is spoilt."""
        with around:
            for step in range(STEPS):
                self.optimizer.zero_grad()
                for part in range(self.parts):
                    ids = torch.randint(0, 20, (4, 7))
                    batch = batch_of(self.model, ids)
                    if step >= BAD and part == 0:
                        spoil(batch)
                    with self.precision():
                        loss = loss_of(log_probs_of(self.model, ids), batch) / self.parts
                    self.backward(loss)
                self.update()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


class Bare:
    """A policy that is no module: the loss reads its weights themselves."""

    def __init__(self) -> None:
        self.embed, self.head = torch.randn(20, 8, requires_grad=True), torch.randn(8, 20, requires_grad=True)

    def __call__(self, ids: Tensor) -> Tensor:
        return self.embed[ids] @ self.head

    def parameters(self) -> list[Tensor]:
        return [self.embed, self.head]


class Direct(Loop):
    model_class = Bare


class Accumulating(Loop):
    parts = 3


class Scaled(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Mixed(Scaled):
    """Matrix products in half precision."""

    def precision(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16)


class Inside(Loop):
    """Its weights are updated in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizers = {p: torch.optim.AdamW([p], lr=1e-2, foreach=False) for p in self.model.parameters()}
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._step)

    def _step(self, parameter: Tensor) -> None:
        self.optimizers[parameter].step()  # type: ignore[index]
        parameter.grad = None

    def update(self) -> None:
        """It is done."""


def watch(path: Path, mode: OnNonFinite = "repair", **options: Any) -> nanscope.Scope:
    return nanscope.watch(out=path, on_nonfinite=mode, **options)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("loop", [Loop, Direct, Accumulating, Scaled, Mixed, Inside])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_loss_trains_as_the_mended_one(tmp_path: Path, fault: str, loop: type[Loop]) -> None:
    """To the bit: weights after five steps of which three are bad, also with several micro-batches a step, with a scaled loss, in mixed
    precision, where optimizers step inside the backward pass, and where the loss reads the weights themselves."""
    faulty, mended, spoil, fix = FAULTS[fault]
    wanted = loop().train(mended, spoil, nullcontext())
    scope = watch(tmp_path)
    got = loop().train(faulty, spoil, scope)
    assert same(got, wanted)
    bad = STEPS * loop.parts if spoil is nothing else STEPS - BAD
    assert (scope.repaired, scope.skipped, scope.bad_steps) == (bad, 0, STEPS if spoil is nothing else bad)
    entries = scope.history.entries[-(STEPS - BAD) :]
    assert all(entry.stepped == "repaired" and (entry.repaired or "").startswith(fix) for entry in entries)
    assert all(entry.repaired_loss is not None and math.isfinite(entry.repaired_loss) for entry in entries)
    assert not scope.verdict.gaps
    (incident,) = scope.verdict.incidents
    assert incident.reached["stepped"] == "repaired" and incident.reached["weights"][0] == 0


def test_a_repair_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What, where, how many elements, how far healthy ones are off, and what the trainer's own log will show; the first with a snapshot."""
    with caplog.at_level(logging.WARNING, "nanscope"):
        scope = watch(tmp_path)
        Loop().train(masked_exp, stale, scope)
    told = [record.getMessage() for record in caplog.records if "[repaired]" in record.getMessage()]
    assert len(told) == 3 and told[0].startswith("nanscope [repaired]: step 3: took the gradient of a proven fix, fill log_ratio with 0")
    for words in ("test_repair.py:", "1 of 24 elements", "distortion 0.0", "the trainer logs NaN for this step; the repaired loss is"):
        assert words in told[0]
    assert len(list(scope.out.glob("step-*.safetensors"))) == 1
    assert [note.slug for note in scope.verdict.notes] == ["gradient_repaired"]
    assert "the step was taken on the gradient of a proven fix" in scope.verdict.sentence
    assert nanscope.load(scope.paths[0]).reached.stepped == "repaired"  # type: ignore[arg-type]


@pytest.mark.parametrize("loop", [Loop, Accumulating, Scaled])
def test_a_healthy_run_is_untouched(tmp_path: Path, loop: type[Loop]) -> None:
    """To the bit."""
    assert same(loop().train(masked_exp, nothing, nullcontext()), loop().train(masked_exp, nothing, watch(tmp_path)))


def unmendable(log_probs: Tensor, batch: Batch) -> Tensor:
    bad = batch["mask"].sum() == 0
    return mean_over_mask_mended(log_probs, batch) * (NAN if bad else 1.0)


class Within(Loop):
    """Its model goes wrong."""

    def train(self, loss_of: Loss, spoil: Callable[[Batch], None], around: AbstractContextManager[Any]) -> list[Tensor]:
        self.steps = 0
        self.model.register_forward_pre_hook(self._count)
        return super().train(loss_of, nothing, around)

    def _count(self, model: nn.Module, args: object) -> None:
        self.steps += torch.is_grad_enabled()
        self.model.overflows = torch.is_grad_enabled() and self.steps == BAD + 1


@pytest.mark.parametrize(("loop", "loss_of"), [(Loop, unmendable), (Within, masked_exp)])
def test_what_has_no_proven_fix_is_skipped(tmp_path: Path, loop: type[Loop], loss_of: Loss) -> None:
    """As under "skip", to the bit and to the line of history: a fault that no edit mends, and one inside the model."""
    runs = {}
    for mode in ("skip", "repair"):
        scope = watch(tmp_path / mode, mode)  # type: ignore[arg-type]
        weights = loop().train(loss_of, empty, scope)
        runs[mode] = weights, scope
    assert same(runs["skip"][0], runs["repair"][0])
    skip, repair = (runs[mode][1] for mode in ("skip", "repair"))
    assert repair.skipped == skip.skipped > 0 and repair.repaired == 0
    assert [e.stepped for e in repair.history.entries] == [e.stepped for e in skip.history.entries]
    assert repair.verdict.sentence == skip.verdict.sentence


def bad_entry(batch: Batch) -> None:
    batch["old"][1, 2] = NAN


def test_a_bad_entry_of_the_batch_loses_its_own_part(tmp_path: Path) -> None:
    """A NaN among the old log-probs, at a token that counts: nobody knows its ratio, so it has no gradient, and the others keep theirs."""

    def without(log_probs: Tensor, batch: Batch) -> Tensor:
        known = ~batch["old"].isnan()
        log_ratio = torch.where(known, log_probs - batch["old"].nan_to_num(), 0.0)
        return clipped(torch.where(known, torch.exp(log_ratio), 0.0), batch)

    wanted = Loop().train(without, bad_entry, nullcontext())
    scope = watch(tmp_path)
    got = Loop().train(masked_exp, bad_entry, scope)
    assert scope.repaired == STEPS - BAD and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, wanted, strict=True))


def test_after_so_many_repairs_training_stops(tmp_path: Path) -> None:
    """The backward pass after the last one that may be mended raises, with the weights of the step before it."""
    scope = watch(tmp_path, max_repairs=2)
    loop = Loop()
    with pytest.raises(nanscope.NonFiniteError):
        loop.train(masked_exp, stale, scope)
    assert (scope.repaired, scope.steps) == (2, BAD + 2)
    assert all(bool(parameter.isfinite().all()) for parameter in loop.model.parameters())


def large(log_probs: Tensor, batch: Batch) -> Tensor:
    return mean_over_mask(log_probs, batch) * 1e6


def test_what_a_scale_alone_makes_overflow_is_the_scalers(tmp_path: Path) -> None:
    """A loss that overflows only because it was multiplied is left to its scaler, which lowers the scale: to the bit as without us."""

    class Huge(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)

    bare, loop, scope = Huge(), Huge(), watch(tmp_path)
    wanted = bare.train(large, nothing, nullcontext())
    assert same(loop.train(large, nothing, scope), wanted)
    assert loop.scaler.get_scale() == bare.scaler.get_scale() == 2.0 ** (127 - STEPS)
    assert (scope.repaired, scope.bad_steps) == (0, 0)


@pytest.mark.parametrize("name", ["may", "prove", "is_of_scale"])
def test_our_own_failure_skips_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """And never raises into the backward pass: the weights are those of "skip", and the failure is told."""
    wanted = Loop().train(masked_exp, stale, watch(tmp_path / "skip", "skip"))

    def fails(*args: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(Repair, name, fails)
    scope = watch(tmp_path / "repair")
    assert same(Loop().train(masked_exp, stale, scope), wanted)
    assert (scope.repaired, scope.skipped) == (0, STEPS - BAD)
    assert [gap.slug for gap in scope.verdict.gaps] == ["repair-failed"]


def test_a_failure_to_tell_does_not_hide_a_bad_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are the mended ones, and the step is counted as bad."""
    wanted = Loop().train(masked_exp_mended, stale, nullcontext())
    monkeypatch.setattr("nanscope.watching.repair._Told", None)
    scope = watch(tmp_path)
    assert same(Loop().train(masked_exp, stale, scope), wanted)
    assert scope.repaired == STEPS - BAD and not scope.verdict.healthy


def doubled(gradient: Tensor) -> Tensor:
    return gradient * 2


def test_a_hook_of_the_trainers_is_not_passed_over(tmp_path: Path) -> None:
    """It would have changed the gradient that we put in: such a step is skipped."""

    def hooked(log_probs: Tensor, batch: Batch) -> Tensor:
        log_probs.register_hook(doubled)
        return masked_exp(log_probs, batch)

    scope = watch(tmp_path)
    Loop().train(hooked, stale, scope)
    assert (scope.repaired, scope.skipped) == (0, STEPS - BAD)


class Twice(Policy):
    """Gives its hidden states and logits made of them: the gradient of the first is more than what the loss itself makes."""

    def forward(self, ids: Tensor) -> Any:
        hidden = self.embed(ids)
        return hidden, self.head(hidden)


def train_twice(at: str, mends: bool, around: AbstractContextManager[Any]) -> list[Tensor]:
    torch.manual_seed(0)
    mask, model = torch.ones(4, 6), Twice()
    mask[2, 4:] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with around:
        for _ in range(3):
            hidden, logits = model(torch.randint(0, 20, (4, 6)))
            shifted = (logits if at == "logits" else hidden).sum(-1) + torch.where(mask == 0, 200.0, 0.0)
            shifted = torch.where(mask != 0, shifted, 0.0) if mends else shifted
            loss = torch.where(mask != 0, torch.exp(shifted), 0.0).mean() + 0.1 * hidden.square().mean() + 0.1 * logits.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(("at", "repaired"), [("logits", 3), ("hidden", 0)])
def test_a_tensor_that_feeds_another_keeps_what_comes_through_that(tmp_path: Path, at: str, repaired: int) -> None:
    """Of two outputs, one made of the other, the second is mended; where the first has a bad part of its own, the step is skipped."""
    wanted, scope = train_twice(at, True, nullcontext()), watch(tmp_path)
    got = train_twice(at, False, scope)
    assert (scope.repaired, scope.skipped) == (repaired, 3 - repaired)
    assert same(got, wanted) is bool(repaired) and all(bool(weight.isfinite().all()) for weight in got)


def train_liger(tied: bool, settings: dict[str, Any], fault: bool, around: AbstractContextManager[Any], scale: float = 1.0) -> list[Tensor]:
    """Two micro-batches a step, the first with a stale log-prob at a masked token; what is mended has none."""
    chunked = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss")
    torch.manual_seed(0)
    words, head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=not tied)
    if tied:
        head.weight = words.weight
    body = nn.Sequential(words, nn.Linear(8, 8), nn.Tanh())
    model = nn.ModuleList([body, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = chunked.LigerFusedLinearGRPOLoss(compiled=False, use_ref_model=False, beta=0.0, **settings)
    with around:
        for _ in range(3):
            optimizer.zero_grad()
            for part in range(2):
                ids, mask = torch.randint(0, 11, (2, 5)), torch.ones(2, 5, dtype=torch.long)
                mask[0, 4] = 0
                with torch.no_grad():
                    old = torch.log_softmax(head(body(ids)), -1).gather(-1, ids[..., None])[..., 0] + 0.1 * torch.randn(2, 5)
                if fault and part == 0:
                    old[0, 4] -= 200.0
                given = (body(ids), head.weight, ids, mask, torch.tensor([1.0, -0.5]), head.bias)
                (loss(*given, old_per_token_logps=old)[0] / 2 * scale).backward()
            for parameter in model.parameters():
                parameter.grad /= scale  # type: ignore[operator]
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(("settings", "scale"), [({}, 1.0), ({"loss_type": "grpo", "temperature": 0.7}, 1.0), ({}, 512.0)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_fused_loss_is_mended_from_its_arguments(tmp_path: Path, tied: bool, settings: dict[str, Any], scale: float) -> None:
    """Liger's, which computes its gradients in its forward: hidden states, head and bias get those of the formula, also where the head is
    the embedding; within rounding, since the kernel adds up in another order."""
    wanted = train_liger(tied, settings, False, nullcontext(), scale)
    scope = watch(tmp_path)
    got = train_liger(tied, settings, True, scope, scale)
    assert (scope.repaired, scope.skipped, scope.verdict.gaps) == (3, 0, ())
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(got, wanted, strict=True))
    assert all(math.isfinite(entry.repaired_loss or NAN) for entry in scope.history.entries)


@pytest.mark.parametrize("options", [{"max_repairs": -1}, {"max_repairs": 1.5}])
def test_a_limit_is_a_whole_number(tmp_path: Path, options: dict[str, Any]) -> None:
    """Said where it is given."""
    with pytest.raises(nanscope.NanscopeError, match="max_repairs"):
        watch(tmp_path, **options)


def test_a_gradient_that_is_differentiated_again_is_left_alone(tmp_path: Path) -> None:
    """What goes in its place would have no history, and the penalty on it no gradient."""
    torch.manual_seed(0)
    model, scope = Policy(), watch(tmp_path)
    ids = torch.randint(0, 20, (4, 7))
    batch = batch_of(model, ids)
    stale(batch)
    with scope:
        masked_exp(log_probs_of(model, ids), batch).backward(create_graph=True)  # type: ignore[no-untyped-call]
    assert scope.repaired == 0 and all(bool(p.grad.isnan().any()) for p in model.parameters() if p.grad is not None)
