"""What passes through a jagged tensor on its way to the loss is followed: the origin lies in the line that made it, and not where it came out."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanscope
import nanscope.verdict.diagnose

OFFSETS = torch.tensor([0, 2, 6])
OLD = torch.tensor([0.0, 0.0, 0.0, 0.0, -200.0, 0.0])  # one log-prob out of six is far off


def rows_of(packed: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(packed, OFFSETS)


def padded(packed: Tensor, width: int = 4) -> Tensor:
    return torch.nested.to_padded_tensor(rows_of(packed), 0.0, output_size=(2, width))


def element_by_element(log_probs: Tensor) -> Tensor:
    rows = rows_of(log_probs)
    old = torch.nested.nested_tensor_from_jagged(OLD, rows.offsets())
    return torch.exp(rows - old)


# what is made of log-probs, and the index of the exponential that overflows
PATHS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "values": (lambda x: torch.exp(rows_of(x).values() - OLD), (4,)),
    "packed once more": (lambda x: rows_of(torch.exp(x - OLD)).values(), (4,)),
    "rows": (lambda x: torch.cat([torch.exp(a - b) for a, b in zip(rows_of(x).unbind(), rows_of(OLD).unbind(), strict=True)]), (2,)),
    "padded": (lambda x: padded(torch.exp(x - OLD)), (4,)),
    "padded, as wide as it is": (lambda x: torch.nested.to_padded_tensor(rows_of(torch.exp(x - OLD)), 0.0), (4,)),
    "padded before": (lambda x: torch.exp(padded(x) - padded(OLD)), (1, 2)),
    "element by element": (lambda x: element_by_element(x).values(), (4,)),
    "added up": (lambda x: element_by_element(x).sum(), (4,)),
    "a list": (lambda x: torch.exp(torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged).values() - OLD), (4,)),
    "rolled": (lambda x: padded(torch.roll(torch.exp(rows_of(x).values() - OLD), -1)), (4,)),
}


def train(make: Callable[[Tensor], Tensor], folder: Path | None) -> tuple[nanscope.Verdict | None, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def step() -> None:
        log_probs = F.logsigmoid(model(torch.randn(6, 3))).squeeze(-1)
        make(log_probs).square().sum().backward()  # type: ignore[no-untyped-call]

    if folder is None:
        step()
        return None, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with nanscope.watch(model, out=folder) as scope:
        step()
    return scope.verdict, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("path", PATHS)
def test_the_line_is_named_wherever_the_values_have_been(tmp_path: Path, path: str) -> None:
    """Line, element, cause, a fix that was run; from the file as in the process; and the gradients are those of an unwatched step."""
    make, index = PATHS[path]
    verdict, grads = train(make, tmp_path)
    assert verdict is not None
    (incident,) = verdict.incidents
    assert (incident.origin.op, incident.origin.index, str(incident.cause)) == ("exp", index, "exp_overflow")
    assert incident.fixes[0].id == "clamp_exponent" and incident.fixes[0].works
    again = nanscope.verdict.diagnose.verdict([nanscope.load(incident.snapshot)])
    assert again.incidents[0].origin == incident.origin
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(grads, train(make, None)[1], strict=True))


def test_an_overflow_that_padding_carries_to_a_minimum_is_found_in_backward(tmp_path: Path) -> None:
    """The loss is finite: min takes the other side, and its gradient of 0 meets the infinity behind the padding."""

    def loss(log_probs: Tensor) -> Tensor:
        ratio = torch.nested.to_padded_tensor(rows_of(torch.exp(log_probs - OLD)), 1.0, output_size=(2, 4))
        return torch.min(ratio, ratio.clamp(0.8, 1.2))

    verdict, _ = train(loss, tmp_path)
    assert verdict is not None
    (incident,) = verdict.incidents
    assert (incident.phase, str(incident.cause), incident.origin.index) == ("backward", "where_grad_trap", (4,))


@pytest.mark.parametrize("width", [3, 4, 5])
def test_a_bad_number_of_the_batch_is_found_behind_its_padding(tmp_path: Path, width: int) -> None:
    """Where it is cut short, too: what does not fit is in no loss."""
    old = OLD.clone()
    old[4] = math.nan
    with torch.no_grad():
        short = padded(old, width)

    def loss(log_probs: Tensor) -> Tensor:
        return torch.exp(torch.stack([row[:2] for row in padded(log_probs)]) - short[:, 1:3])

    verdict, _ = train(loss, tmp_path)
    assert verdict is not None
    assert [str(incident.cause) for incident in verdict.incidents] == ["bad_input"] and verdict.incidents[0].origin.value != 0


def test_a_healthy_step_stays_healthy(tmp_path: Path) -> None:
    """Padding that would overflow, and does not count, is none of the loss's."""
    verdict, _ = train(lambda x: padded(torch.exp(x)) * torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 1]]), tmp_path)
    assert verdict is not None and verdict.healthy
