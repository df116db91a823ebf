"""What goes into the file: nothing over the vocabulary, no token ids unless asked for, and still the same origin."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loops import log_probs
from recorded import Recorded, leaf, record
from torch import Tensor, nn

import nanscope
import nanscope.verdict.diagnose
from nanscope.locate.location import locate
from nanscope.locate.trace import Trace
from nanscope.program.calls import Computes
from nanscope.program.ops import flow_of
from nanscope.program.program import Program
from nanscope.snapshot.observation import UNSEEN
from nanscope.watching import narrow
from nanscope.watching.look import Look


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


def wide_loss(logits: Tensor, ids: Tensor, old_log_probs: Tensor) -> Tensor:
    """Log-probs of the sampled tokens, out of a vocabulary."""
    log_probs = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(log_probs - old_log_probs)
    return ratio.mean()


def wide(old: float = -300.0) -> Recorded:
    """A loss over a vocabulary of 4096, [4, 64], that overflows at one token."""
    ids = torch.randint(2, 4096, (4, 64))
    old_log_probs = torch.full((4, 64), -8.0)
    old_log_probs[1, 2] = old
    return record(wide_loss, torch.randn(4, 64, 4096).requires_grad_(), ids, old_log_probs)


def test_nothing_over_the_vocabulary_stays() -> None:
    """The program begins behind it, with the gradient that arrives there, and goes to the same origin."""
    recorded = wide()
    before = recorded.location
    program, tensors, grads = narrow.narrow(recorded.program, recorded.tensors, {}, save_tokens=False)
    assert max(tensor.numel() for tensor in tensors.values()) == 4 * 64
    assert {leaf.origin for leaf in program.leaves} == {"cut", "data"} and set(tensors) == {leaf.id for leaf in program.leaves}
    assert set(grads) <= set(tensors) and grads
    after = locate(Trace.of(program, tensors))
    assert before is not None and after is not None
    assert (after.origin.op, after.origin.index, after.origin.value) == (before.origin.op, before.origin.index, math.inf)


@pytest.mark.parametrize("save_tokens", [False, True])
def test_token_ids_stay_only_where_they_are_asked_for(save_tokens: bool) -> None:
    """Integers beyond 0 and 1 are somebody's text; a mask and a count are not."""

    def loss(logits: Tensor, ids: Tensor, mask: Tensor, count: Tensor) -> Tensor:
        log_probs = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        return (torch.exp(log_probs) * mask).sum() / count

    recorded = record(
        loss,
        torch.randn(2, 3, 5).requires_grad_(),
        torch.tensor([[1, 2, 3], [4, 0, 1]]),
        torch.tensor([[1, 1, 0], [1, 1, 1]]),
        torch.tensor(5),
    )
    program, tensors, _ = narrow.narrow(recorded.program, recorded.tensors, {}, save_tokens)
    kept = [tuple(tensor.shape) for tensor in tensors.values() if not tensor.is_floating_point()]
    assert kept.count((2, 3)) == (2 if save_tokens else 1) and () in kept
    assert (program is recorded.program) == save_tokens


def test_what_needs_no_narrowing_is_left_as_it_is() -> None:
    """A small loss, and a program without calls."""
    recorded = record(lambda x: torch.exp(x).mean(), leaf(2, 3))
    assert narrow.narrow(recorded.program, recorded.tensors, {}, False)[0] is recorded.program
    assert narrow.narrow(Program((), (), -1), {}, {}, False)[0].calls == ()


def test_weights_go_where_all_together_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is small enough alone."""
    recorded = record(lambda x, weight: torch.exp(x * weight).mean(), leaf(2, 3), leaf(2, 3))
    leaves = tuple(replace(known, origin="parameter") if known.id == 1 else known for known in recorded.program.leaves)
    program = replace(recorded.program, leaves=leaves)
    assert narrow.narrow(program, recorded.tensors, {}, False)[0] is program
    monkeypatch.setattr(narrow, "SNAPSHOT_BYTES", 8)
    smaller, tensors, _ = narrow.narrow(program, recorded.tensors, {}, False)
    assert [known.origin for known in smaller.leaves] == ["cut"] and len(tensors) == 1


def test_where_nothing_would_be_left_everything_stays() -> None:
    """A loss that is a single call over the vocabulary."""
    recorded = record(lambda x: x.sum(), torch.randn(64, 8192).requires_grad_())
    assert narrow.narrow(recorded.program, recorded.tensors, {}, False)[0] is recorded.program


def look(recorded: Recorded) -> Look:
    return Look(Trace(recorded.program, recorded.run), recorded.location)


def test_a_file_that_leads_to_the_same_origin_says_nothing_of_it() -> None:
    """What the program shows need not be written down; and the tensors are copies."""
    recorded = wide()
    saved = narrow.to_save(recorded.snapshot(), look(recorded), save_tokens=False)
    assert saved.observation == UNSEEN and saved.program is not recorded.program
    assert not {tensor.data_ptr() for tensor in saved.tensors.values()} & {tensor.data_ptr() for tensor in recorded.tensors.values()}


def test_an_origin_that_narrowing_loses_is_written_down_with_what_was_tried() -> None:
    """It lay in the part that is too large: seen in the process, told from the file."""

    def loss(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        probabilities = torch.exp(logits)
        return (probabilities.gather(-1, ids.unsqueeze(-1)).squeeze(-1) * mask).sum()

    logits = torch.zeros(4, 64, 4096)
    logits[1, 2, 7] = 99.0
    ids = torch.full((4, 64), 7)
    recorded = record(loss, logits.requires_grad_(), ids, torch.ones(4, 64))
    saved = narrow.to_save(recorded.snapshot(), look(recorded), save_tokens=False)
    assert saved.observation.outside and saved.observation.origin.op == "exp" and saved.observation.origin.index == (1, 2, 7)
    assert any(row.kind == "fix" for row in saved.observation.tried)
    assert max(tensor.numel() for tensor in saved.tensors.values()) <= 4 * 64


def test_a_call_inside_the_model_is_saved_only_if_it_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a real model are not for a file that is attached to an issue."""
    recorded = record(lambda x: torch.exp(x), torch.tensor([99.0]))
    program = replace(recorded.program, computes=Computes.ACTIVATION)
    snapshot = recorded.snapshot(program=program)
    seen = Look(Trace(program, recorded.run), locate(Trace.of(program, recorded.tensors)))
    assert narrow.to_save(snapshot, seen, False).program is program
    monkeypatch.setattr(narrow, "LARGEST_CALL", 3)
    saved = narrow.to_save(snapshot, seen, False)
    assert saved.program.calls == () and saved.tensors == {} and saved.observation.outside and saved.observation.origin.op == "exp"


@pytest.mark.parametrize("where", ["before it", "behind it", "at the end"])
def test_what_no_file_may_hold_is_cut_out_of_it(tmp_path: Path, where: str) -> None:
    """A Bessel function is part of the loss in the process; the file holds calls of the table alone, and tells the same origin."""
    x = torch.eye(3).requires_grad_()
    with nanscope.watch(out=tmp_path) as scope:
        made = torch.log(x - 1.0) if where == "before it" else x * 1.0
        bessel = torch.i0(made)
        loss = torch.log(bessel - bessel).sum() if where == "behind it" else torch.i0(bessel * 0.0 + 1e3).sum()
        loss.backward()
    (incident,) = scope.verdict.incidents
    saved = nanscope.load(incident.snapshot)
    assert all(flow_of(call.op) is not None for call in saved.program.calls)
    assert incident.origin.op == {"before it": "log", "behind it": "log"}.get(where, "i0")
    again = nanscope.verdict.diagnose.verdict([saved])
    assert (again.incidents[0].origin.op, again.incidents[0].origin.index) == (incident.origin.op, incident.origin.index)


def test_a_fix_before_a_choice_by_token_ids_is_tried_while_these_are_there(tmp_path: Path) -> None:
    """The ids stay out of the file, and with them what was chosen: a fix of the logits was run on all of the step."""
    torch.manual_seed(0)
    model, ids = nn.Linear(4, 6).half(), torch.tensor([[1], [2], [5]])
    hidden = torch.randn(3, 4).half()
    hidden[1] = 200.0
    with torch.no_grad():
        model.weight[2] = 100.0
    with nanscope.watch(model, out=tmp_path) as scope:
        logits = hidden @ model.weight.t() / 64.0
        loss = -(logits.float() - logits.float().logsumexp(-1, keepdim=True)).gather(-1, ids).mean()
        loss.backward()
    (incident,) = scope.verdict.incidents
    assert (incident.cause, incident.origin.op, incident.origin.index) == ("fp16_overflow", "mm", (1, 2))
    assert (incident.fixes[0].id, incident.fixes[0].works) == ("upcast_fp32", True)
    snapshot = nanscope.load(incident.snapshot or "")
    assert not any(tensor.dtype is torch.int64 for tensor in snapshot.tensors.values())
    replayed = nanscope.verdict.diagnose.diagnose(snapshot)
    assert [(fix.id, fix.works) for fix in replayed.fixes] == [(fix.id, fix.works) for fix in incident.fixes]
