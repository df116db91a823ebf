"""The second look into a model: a copy runs, and what keeps it from being the step again is said."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import nanscope
from nanscope.capture.modules import KEPT_FROZEN
from nanscope.verdict.incident import Incident


class Overflows(nn.Module):
    """exp of its input, with a weight so that it is a model. again: what it does first when it is run again."""

    def __init__(self, again: Callable[[], object] = int) -> None:
        super().__init__()
        self.linear, self.again = nn.Linear(3, 3), again
        self.register_buffer("table", torch.zeros(1 << 14))

    def forward(self, x: Tensor) -> Tensor:
        if _get_current_dispatch_mode() is not None:  # the tape sleeps in a model: somebody looks
            self.again()
        return torch.exp(self.linear(x.clone()) + torch.tensor([1e3, 0.0, 1.0])) + self.table[0]


def train(model: nn.Module, out: Path, after_forward: Callable[[Tensor], object] = id, **settings: Any) -> Incident:
    """One bad step."""
    x = torch.ones(2, 3)
    with nanscope.watch(model, out=out, deep_every=0, **settings) as scope:
        loss = model(x).sum()
        after_forward(x)
        loss.backward()
    return scope.verdict.incidents[0]


def slugs(incident: Incident) -> dict[str, str]:
    return {note.slug: note.text for note in incident.notes}


def test_a_model_is_looked_into_without_a_word(tmp_path: Path) -> None:
    """The origin is the call inside the model, and there is nothing to excuse."""
    incident = train(Overflows(), tmp_path)
    assert incident.origin.op == "exp" and not slugs(incident)


def test_a_hook_that_changes_the_output_is_named(tmp_path: Path) -> None:
    """Hooks are not run again: the numbers differ, the origin is found all the same, and the note says which hook it was."""
    model = Overflows()
    seen: list[int] = []

    def rescale(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seen.append(1)
        return output * 1.5

    model.linear.register_forward_hook(rescale)
    incident = train(model, tmp_path)
    assert incident.origin.op == "exp" and seen == [1]
    assert "one difference is known: hooks are not run again (" in slugs(incident)["runs_differently"]
    assert "rescale" in slugs(incident)["runs_differently"]


def test_why_a_second_run_differs_is_not_made_up(tmp_path: Path) -> None:
    """A weight that was written to between forward and backward: that the numbers differ is known, and no more."""
    model = Overflows()
    incident = train(model, tmp_path, lambda x: model.linear.weight.data.mul_(1.5))
    assert slugs(incident)["runs_differently"].endswith("than in this step; why is not known, it may read what has changed since")


def test_what_was_given_and_has_changed_since_is_not_the_step(tmp_path: Path) -> None:
    """A buffer of the loop that is filled anew before backward: no origin is told from another batch."""
    incident = train(Overflows(), tmp_path, lambda x: x.fill_(2.0))
    assert incident.origin.op != "exp" and "written to since" in slugs(incident)["not_run_again"]


def test_a_model_beyond_the_budget_is_not_copied(tmp_path: Path) -> None:
    """Buffers are copied within the budget; what is larger is not run again, and the incident says so."""
    incident = train(Overflows(), tmp_path, budget=1 << 12)
    assert incident.origin.op != "exp" and "more than" in slugs(incident)["not_run_again"]


def raises(error: type[BaseException]) -> Callable[[], object]:
    def again() -> object:
        random.random()
        torch.rand(3)
        raise error("in here")

    return again


@pytest.mark.parametrize("error", [ValueError, SystemExit, NotImplementedError, RecursionError])
def test_a_copy_that_fails_is_a_note(tmp_path: Path, error: type[BaseException]) -> None:
    """Whatever the model raises when it runs again, the step is told without it."""
    model = Overflows(raises(error))
    states = random.getstate(), torch.get_rng_state().tolist()
    incident = train(model, tmp_path)
    assert incident.origin.op != "exp" and "could not be run again" in slugs(incident)["not_run_again"]
    assert (random.getstate(), torch.get_rng_state().tolist()) == states


def test_an_interrupt_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a look ends the run as it would have, with generators and buffers where they were."""
    model = Overflows(raises(KeyboardInterrupt))
    state, drawn = random.getstate(), torch.get_rng_state()
    versions = [tensor._version for tensor in (*model.parameters(), *model.buffers())]
    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path)
    assert random.getstate() == state and torch.equal(torch.get_rng_state(), drawn)
    assert [tensor._version for tensor in (*model.parameters(), *model.buffers())] == versions


def test_a_weight_that_forward_writes_to_is_copied_after_all(tmp_path: Path) -> None:
    """It is lent at first; the write is refused, and the copy gets a weight of its own."""

    class Clamps(Overflows):
        def forward(self, x: Tensor) -> Tensor:
            self.linear.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    model = Clamps()
    version = model.linear.weight._version
    incident = train(model, tmp_path)
    assert incident.origin.op == "exp" and not slugs(incident) and model.linear.weight._version == version


class Loses(nn.Module):
    """A model that returns its loss, as those of a trainer do, and logits. how: what goes wrong inside."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(3, 3), how
        if how == "weight":
            nn.init.constant_(self.linear.weight, float("nan"))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.linear(x)
        loss = logits.pow(2).mean()
        if self.how == "forward":
            loss = loss + torch.log(logits[0, 0] * 0)
        if self.how == "backward":
            loss = loss + torch.sqrt(logits[0, 0] * 0)
        return loss, logits


IN_PLACE: list[Callable[[Tensor], object]] = [
    lambda loss: loss.mul_(1),  # what the trainer of transformers does on one device
    lambda loss: loss.mul_(2).div_(torch.tensor(4.0)),
    lambda loss: loss.add_(loss.detach()),
    lambda loss: loss.view(1).mul_(2),
]


@pytest.mark.parametrize("write", IN_PLACE)
@pytest.mark.parametrize(("how", "op"), [("weight", "parameter"), ("forward", "log"), ("backward", "sqrt")])
def test_a_loss_that_is_written_to_after_the_model_returned_it_leads_into_the_model(
    tmp_path: Path, how: str, op: str, write: Callable[[Tensor], object]
) -> None:
    """`loss *= 2` on what a module returned: the origin is in the module, and nothing says that it came out differently."""
    model = Loses(how)
    with nanscope.watch(model, out=tmp_path) as scope:
        loss, _ = model(torch.ones(2, 3))
        write(loss)
        loss.backward()
    (incident,) = scope.verdict.incidents
    assert incident.origin.op == op and not slugs(incident)


@pytest.mark.parametrize("bad", range(6))
def test_losses_that_are_written_to_are_told_apart_when_their_memory_is_used_again(tmp_path: Path, bad: int) -> None:
    """Of several losses in the same few bytes, each written to and added up, the one that is bad leads into its own call."""
    models = [Loses("forward" if n == bad else "") for n in range(6)]
    with nanscope.watch(*models, out=tmp_path) as scope:
        total = torch.zeros(())
        for n, model in enumerate(models):
            loss, _ = model(torch.full((2, 3), n + 1.0))
            loss *= 0.5
            total = total + loss
            del loss
        total.backward()
    (incident,) = scope.verdict.incidents
    assert incident.origin.op == "log" and not slugs(incident)


def test_gradients_beside_a_loss_that_was_written_to_are_not_held_against_the_replay(tmp_path: Path) -> None:
    """What the model returns beside its loss is a part of that loss as well: the gradient that came to it is no measure of a replay."""
    model = Loses("")
    with nanscope.watch(model, out=tmp_path) as scope:
        loss, logits = model(torch.ones(2, 3))
        loss *= 2
        (loss + torch.log((logits - logits.detach())[0, 0])).backward()
    (incident,) = scope.verdict.incidents
    assert incident.reproduction.words == "loss reproduces bit for bit"


class Frozen(nn.Module):
    """A reference model. how: what is wrong with it."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(3, 3), nn.Linear(3, 3), how
        self.dropout = nn.Dropout(0.3)
        if how == "weight":
            with torch.no_grad():
                self.first.weight[1, 2] = float("nan")

    def forward(self, x: Tensor, cache: object = None) -> Tensor:
        hidden = self.dropout(torch.tanh(self.first(x)))
        out: Tensor = self.last(hidden)
        return torch.log(out * 0) - torch.log(out * 0) if self.how == "forward" else out


def distil(model: nn.Module, reference: nn.Module, out: Path, *targets: nn.Module, before: int = 0, **given: object) -> Incident:
    """A loss of two models, of which one has no gradient. before: healthy backward passes between its forward pass and that loss."""
    x = torch.ones(2, 3)
    with nanscope.watch(*targets, out=out) as scope:
        with torch.no_grad():
            wanted = reference(x, **given)
        for _ in range(before):
            model(x).sum().backward()
        (model(x) - wanted).pow(2).mean().backward()
    return scope.verdict.incidents[0]


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("training", [False, True])
def test_a_weight_of_a_model_without_gradient_is_told_from_those_of_the_model(
    tmp_path: Path, watched: bool, before: int, training: bool
) -> None:
    """A reference that is NaN did not come with the batch, and its weight is not the weight of that name which is trained."""
    model, reference = Frozen(), Frozen("weight").train(training)
    incident = distil(model, reference, tmp_path, *([model, reference] if watched else [model]), before=before)
    assert (incident.phase, incident.cause, incident.origin.index) == ("weights", "poisoned_weights", (1, 2))
    assert incident.origin.variable == "first.weight of a Frozen that ran without gradient" and not slugs(incident)


class Scaled(Frozen):
    """Its first part holds a table that is no parameter. content: of that."""

    def __init__(self, content: float = 1.0) -> None:
        super().__init__()
        self.first.register_buffer("table", torch.full((3,), content), persistent=False)

    def forward(self, x: Tensor, cache: object = None) -> Tensor:
        return super().forward(x * self.first.table)


@pytest.mark.parametrize("trained", [False, True])
def test_a_buffer_that_is_bad_did_not_come_with_the_batch(tmp_path: Path, trained: bool) -> None:
    """A table of a model that never was anything but NaN is a part of the model, under its full name."""
    models = (Scaled(math.nan), Scaled()) if trained else (Scaled(), Scaled(math.nan))
    incident = distil(*models, tmp_path)
    assert (incident.phase, incident.cause, incident.origin.op, incident.origin.role) == (
        "weights",
        "poisoned_weights",
        "buffer",
        "weights",
    )
    assert incident.origin.variable == "first.table" + " of a Scaled that ran without gradient" * (not trained)
    assert all(not fix.proven for fix in incident.fixes), "nothing of the batch can be left out that would help"


def test_a_buffer_that_nobody_has_written_to_is_said_to_be_that(tmp_path: Path) -> None:
    """A checkpoint that does not hold it leaves what `to_empty` has found in memory, here as torch fills it."""
    reference = Scaled().to("meta")
    torch.use_deterministic_algorithms(True)
    try:
        reference.to_empty(device="cpu").load_state_dict(Scaled().state_dict())
        incident = distil(Scaled(), reference, tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (incident.phase, incident.cause, incident.origin.op) == ("weights", "uninitialized", "buffer")


def test_of_many_weights_that_are_bad_the_one_is_named_that_is_read_first(tmp_path: Path) -> None:
    """And not the last one that was added."""
    reference = Frozen()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.fill_(math.nan)
    incident = distil(Frozen(), reference, tmp_path)
    assert incident.origin.variable == "first.weight of a Frozen that ran without gradient"


@pytest.mark.parametrize("how", ["weight", "forward", "backward"])
def test_old_values_of_a_model_that_was_trained_since_are_data(tmp_path: Path, how: str) -> None:
    """What a policy made without gradient before an update is fine, and not asked for again: nothing has come out differently."""
    model, x = Loses(""), torch.ones(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, out=tmp_path) as scope:
        with torch.no_grad():
            old = model(x)[1]
        for step in range(2):
            if step:
                model.how = how
                if how == "weight":
                    nn.init.constant_(model.linear.weight, float("nan"))
            optimizer.zero_grad()
            loss, logits = model(x)
            (loss + (logits - old).square().mean()).backward()
            optimizer.step()
    (incident,) = scope.verdict.incidents
    assert incident.step == 2 and incident.origin.op in ("parameter", "log", "sqrt") and not slugs(incident)


def test_a_weight_that_is_trained_keeps_its_name_when_the_model_also_runs_without_gradient(tmp_path: Path) -> None:
    """A policy that also made the old log-probs is one model."""
    model = Frozen("weight")
    incident = distil(model, model, tmp_path, model)
    assert incident.origin.variable == "first.weight"


def test_the_line_inside_a_model_without_gradient_is_found(tmp_path: Path) -> None:
    """What a reference computes wrong has an origin in its own forward pass."""
    incident = distil(Frozen(), Frozen("forward"), tmp_path)
    assert (incident.phase, incident.origin.op) == ("forward", "log") and "forward" in str(incident.origin.function)


class Samples(nn.Module):
    """A policy whose temperature acts in evaluation mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x)
        return logits if self.training else logits * 0 / (logits * 0)


def test_a_model_that_was_switched_since_runs_again_in_the_mode_that_it_had(tmp_path: Path) -> None:
    """What a policy in evaluation mode made of the old log-probs is looked into as evaluation, and the policy stays in training mode."""
    model, x = Samples(), torch.ones(2, 3)
    with nanscope.watch(model, out=tmp_path) as scope:
        model.eval()
        with torch.no_grad():
            old = model(x)
        model.train()
        (model(x) - old).exp().mean().backward()
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.origin.op, incident.origin.function) == ("forward", "div", "Samples.forward"), incident.sentence
    assert model.training and not slugs(incident)


def test_a_model_without_gradient_that_cannot_run_again_is_still_the_origin(tmp_path: Path) -> None:
    """It was given something that may be large and is not ours to keep: NaN came out of it, and nobody kept the thing."""

    class Cache:
        pass

    cache = Cache()
    alive = weakref.ref(cache)
    with nanscope.watch(out=tmp_path) as scope:
        model, reference = Frozen(), Frozen("weight")
        with torch.no_grad():
            wanted = reference(torch.ones(2, 3), cache=cache)
        del cache
        assert alive() is None
        (model(torch.ones(2, 3)) - wanted).pow(2).mean().backward()
    (incident,) = scope.verdict.incidents
    assert incident.cause != "bad_input" and "came out of the model as NaN" in incident.sentence


def test_a_rollout_without_gradient_holds_little(tmp_path: Path) -> None:
    """Of thousands of calls without gradient only the last ones are remembered, and none whose results are gone."""
    reference = Frozen()
    with nanscope.watch(out=tmp_path) as scope, torch.no_grad():
        kept = [reference(torch.ones(64, 3)) for _ in range(500)]
        assert len(scope._modules._frozen) <= KEPT_FROZEN and scope._tape.account.held <= 6000 * KEPT_FROZEN
        kept.clear()
        for _ in range(KEPT_FROZEN + 1):
            reference(torch.ones(64, 3))
        assert len(scope._modules._frozen) <= 1


class Objective(nn.Module):
    """A loss that owns its networks and returns its parts, as those of torchrl do; `total` is made of another part."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), nn.Linear(4, 1)

    def log_weight(self, batch: dict[str, Tensor]) -> Tensor:
        log_probs: Tensor = self.actor(batch["obs"]).log_softmax(-1)[:, 0]
        return log_probs - batch["old"]

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        log_weight = self.log_weight(batch)
        ratio = log_weight.exp()
        gain = torch.min(ratio * batch["adv"], ratio.clamp(0.8, 1.2) * batch["adv"])
        value = self.critic(batch["obs"]).squeeze(-1)
        critic = (value - batch["ret"]).square().mean()
        return {"kl": log_weight.mean(), "critic": critic, "objective": -gain.mean(), "total": critic * 0.5 - gain.mean()}


PARTS: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "one": lambda parts: parts["objective"],
    "two": lambda parts: parts["objective"] + parts["critic"],
    "all": lambda parts: parts["kl"] * 0.1 + parts["critic"] + parts["objective"] + parts["total"],
}


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("parts", PARTS)
def test_a_loss_module_that_returns_several_losses_is_looked_into_as_one(tmp_path: Path, parts: str, advantage: float) -> None:
    """What its outputs have in common is computed once: the line in its forward is named, and not a layer of one of its networks."""
    torch.manual_seed(0)
    model = Objective()
    batch = {"obs": torch.randn(6, 4), "old": torch.full((6,), -1.0), "adv": torch.ones(6), "ret": torch.randn(6)}
    batch["old"][2], batch["adv"][2] = -200.0, advantage
    with nanscope.watch(out=tmp_path) as scope:
        PARTS[parts](model(batch)).backward()
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.origin.op, incident.origin.variable, incident.origin.index) == (
        "backward" if advantage > 0 else "forward", "exp", "ratio", (2,),
    )  # fmt: skip
    assert incident.origin.function == "Objective.forward" and not slugs(incident)
    assert incident.cause == ("where_grad_trap" if advantage > 0 else "exp_overflow")


def test_a_call_of_torchs_own_modules_has_the_line_of_the_forward_pass(tmp_path: Path) -> None:
    """Inside there is no code of the trainer's: the line is that of the call, and not of the backward pass during which we look."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x = torch.full((2, 3), float("nan"))
    with nanscope.watch(out=tmp_path) as scope:
        found = model(x)
        found.sum().backward()
    (incident,) = scope.verdict.incidents
    assert incident.phase == "input" and "found = model(x)" in dict(incident.origin.source)[incident.origin.line or 0]


class Buffered(Frozen):
    """A head that fills a buffer, as chunked heads do."""

    def forward(self, x: Tensor, cache: object = None) -> Tensor:
        tile = torch.empty(x.shape[0], 3)
        if torch.is_grad_enabled():
            return self.last(self.first(x))  # type: ignore[no-any-return]
        torch.mm(self.first(x), self.last.weight.t(), out=tile)
        return tile * 2.0


def test_what_a_call_has_written_into_a_buffer_did_not_come_with_the_batch(tmp_path: Path) -> None:
    """`out=` of a head that runs without gradient: the walk goes on to the weight that was NaN."""
    incident = distil(Frozen(), Buffered("weight"), tmp_path)
    assert (incident.phase, incident.cause, incident.origin.index) == ("weights", "poisoned_weights", (1, 2)), incident.sentence


class Decision:
    """What a policy returns: no tuple, no mapping, no dataclass."""

    def __init__(self, logits: Tensor, extras: list[object]) -> None:
        self.inner, self.policy = torch.distributions.Categorical(logits=logits, validate_args=False), extras
        self.whole = self  # goes round


class Deciding(nn.Module):
    """Zeroes the only choice that is likely, and divides by what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        with torch.no_grad():
            self.head.weight[1], self.head.bias[1] = 0.0, 300.0

    def forward(self, x: Tensor, allowed: Tensor) -> Decision:
        kept = torch.softmax(self.head(x), -1) * allowed
        return Decision(torch.log(kept / kept.sum(-1, keepdim=True)), [self, kept])


def test_what_a_module_returns_in_an_object_of_its_own_class_is_looked_into(tmp_path: Path) -> None:
    """A policy that returns a distribution inside of an object: the division in its forward is told, and the line."""
    torch.manual_seed(0)
    model, allowed = Deciding(), torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, optimizer, out=tmp_path) as scope:
        decision = model(torch.randn(2, 4), allowed)
        (-decision.inner.log_prob(torch.tensor([1, 0]))).mean().backward()
        optimizer.step()
    origin = scope.verdict.incidents[0].origin
    assert (origin.op, origin.index, scope.verdict.incidents[0].cause) == ("div", (1, 0), "zero_div_zero")


def test_a_kernel_that_came_out_bad_is_not_looked_for_behind_itself(tmp_path: Path) -> None:
    """NaN that goes through fused attention, whose result autograd saves: what came in is told, with the line that reads it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 5, 8)
    x[1, 3] = math.nan
    with nanscope.watch(model, optimizer, out=tmp_path) as scope:
        model(x * 1.5).mean().backward()
        optimizer.step()
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.origin.index, incident.notes) == ("input", (1, 3, 0), ()) and incident.origin.line is not None


@pytest.mark.parametrize("cell", [nn.GRU, nn.GRUCell, nn.LSTM, nn.LSTMCell, nn.RNN])
def test_a_fix_before_a_recurrent_layer_is_carried_through_it(tmp_path: Path, cell: type[nn.Module]) -> None:
    """Its gates are pieces of one product that are written to one by one: the others are what they were."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = cell(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x / x.norm(dim=-1, keepdim=True))
            return torch.as_tensor(self.head(out[0] if isinstance(out, tuple) else out))

    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(3, 4)
    x[1] = 0.0
    with nanscope.watch(model, out=tmp_path) as scope:
        model(x).pow(2).mean().backward()
    (incident,) = scope.verdict.incidents
    assert (incident.origin.op, incident.origin.index, incident.cause) == ("div", (1, 0), "zero_div_zero")
    assert (incident.fixes[0].id, incident.fixes[0].works, incident.notes) == ("clamp_denominator", True, ())


class Attends(nn.Module):
    """Attention by a kernel that has no calls of its own, whose result lies turned; what goes into it is NaN for one token."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.project(x)
        hidden = hidden * torch.sqrt(1 - 2 * torch.eye(5)[2, :, None])
        heads = hidden.view(3, 5, 2, 4).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads).view(3, 2, 5, 4)  # as where heads share keys
        return torch.as_tensor(self.out(mixed.transpose(1, 2).contiguous().reshape(3, 5, 8)))


def test_what_attention_was_given_is_looked_at_behind_it(tmp_path: Path) -> None:
    """Its result is NaN, and so is what autograd keeps of that: it was not made of that."""
    with nanscope.watch(out=tmp_path, deep_every=0) as scope:
        Attends()(torch.randn(3, 5, 8)).square().mean().backward()
    (incident,) = scope.verdict.incidents
    assert incident.origin.op == "sqrt" and incident.origin.index == (2, 0), scope.verdict.sentence
    assert not slugs(incident)


class Router(nn.Module):
    """Keeps a loss of its own, or puts it into a list, and returns something else."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.gate, self.fault, self.aux = nn.Linear(4, 4), fault, torch.zeros(())

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        logits = self.gate(x)
        share = logits.softmax(-1) * (torch.arange(len(x)) != 2)[:, None]
        if self.fault == "backward":
            self.aux = torch.sqrt(share.sum(-1)).mean()
        else:
            self.aux = torch.exp(logits + 100.0 * (torch.arange(len(x)) == 2)[:, None]).sum(-1).log().mean()
        losses.append(self.aux)
        return x + share


@pytest.mark.parametrize("fault", ["forward", "backward"])
@pytest.mark.parametrize("by", ["attribute", "list"])
def test_a_loss_that_a_part_of_the_model_keeps_is_looked_into(tmp_path: Path, by: str, fault: str) -> None:
    """It is none of the results of the model, and its line is in there all the same."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.routers = nn.Linear(4, 4), nn.ModuleList([Router("none"), Router(fault)])

        def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
            x = self.first(x)
            for router in self.routers:
                x = router(x, losses)
            return x

    model, losses = Experts(), list[Tensor]()
    model.routers[0].forward = lambda x, losses: x  # type: ignore[assignment]
    with nanscope.watch(out=tmp_path, deep_every=0) as scope:
        out = model(torch.randn(5, 4), losses)
        aux = losses[0] if by == "list" else model.routers[1].aux
        (out.square().mean() + 0.01 * aux).backward()  # type: ignore[operator]
    (incident,) = scope.verdict.incidents
    assert incident.origin.op == ("sqrt" if fault == "backward" else "exp"), scope.verdict.sentence
    assert incident.origin.index is not None and incident.origin.index[0] == 2
    assert any(fix.works for fix in incident.fixes) and not slugs(incident)
