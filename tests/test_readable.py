"""What of gradients and weights can be read, and what is told where they cannot."""

from __future__ import annotations

from pathlib import Path

import torch
from test_local import Opaque
from torch import Tensor, nn

import nanscope
from nanscope.snapshot.coverage import Status
from nanscope.watching.readable import readable


def test_what_cannot_be_read_is_told_with_its_class() -> None:
    """Once for all of a kind, and it counts as empty; what can be read is handed on as it lies."""
    told: list[tuple[str, str]] = []
    seen = torch.ones(3)
    parts = readable([seen, Opaque(torch.ones(2)), Opaque(torch.ones(2))], "gradients", lambda *said: told.append(said))
    assert [part.numel() for part in parts] == [3, 0, 0] and parts[0].data_ptr() == seen.data_ptr()
    assert told == [("unreadable-tensors", "2 of 3 gradients, which cannot be read (Opaque)")]
    readable([seen], "gradients", lambda *said: told.append(said))
    assert len(told) == 1


def train(weight: nn.Parameter, out: Path, *, releases: bool, counted: bool) -> nanscope.watching.scope.Scope:
    """Two steps of a loss that reads a weight directly. releases: its memory is gone between two uses. counted: the mask selects something."""

    def release(parameter: Tensor) -> None:
        if releases:
            parameter.untyped_storage().resize_(0)

    weight.register_post_accumulate_grad_hook(release)
    optimizer = torch.optim.SGD([weight], lr=1e-2)
    with nanscope.watch(out=out) as scope:
        for step in range(2):
            mask = torch.ones(2) * (step == 0 or counted)
            loss = ((torch.ones(2, 8) @ weight.t()).mean(1) * mask).sum() / mask.sum()
            loss.backward()
            weight.untyped_storage().resize_(weight.numel() * 4)
            weight.data.fill_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return scope


def test_a_loss_that_reads_what_is_gone_is_not_run_again(tmp_path: Path) -> None:
    """A sharded model lets go of its weights when backward is over: nothing reads that memory, and the verdict says what it did not see."""
    found = train(nn.Parameter(torch.ones(8, 8)), tmp_path / "bad", releases=True, counted=False).verdict
    assert (found.status, found.incidents[0].step, found.incidents[0].reached["loss"]) == (Status.NONFINITE, 2, True)
    assert "nobody saw where it went bad" in found.sentence
    found = train(nn.Parameter(torch.ones(8, 8)), tmp_path / "good", releases=True, counted=True).verdict
    assert found.status is Status.PARTLY and "weights which their sharded model has let go of" in found.sentence
    found = train(nn.Parameter(torch.ones(8, 8)), tmp_path / "kept", releases=False, counted=False).verdict
    assert found.incidents[0].origin.op == "div" and found.gaps == ()
