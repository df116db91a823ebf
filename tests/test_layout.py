"""How a tensor lies in the batch: one number a row is told by its row, and no dimension is called tokens that is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from recorded import record
from torch import Tensor

from nanscope.locate.layout import Layout, layout_of

B, T, D = 6, 4, 3


def per_row(logps: Tensor, mask: Tensor) -> Tensor:
    row_loss = (logps * mask).sum(-1) / mask.sum(-1)
    return row_loss.mean()


def kept_dimension(logps: Tensor, mask: Tensor) -> Tensor:
    seq_ratio = (logps * mask).sum(-1, keepdim=True).exp()
    return (seq_ratio * mask).sum()


def without_a_batch(rewards: Tensor, baseline: Tensor) -> Tensor:
    scaled = rewards / baseline
    return scaled.mean()


def per_position(logps: Tensor, mask: Tensor) -> Tensor:
    profile = (logps * mask).sum(0)
    return profile.mean()


def per_token(logps: Tensor, mask: Tensor) -> Tensor:
    token_loss = -logps * mask
    return token_loss.sum()


def states(states: Tensor, target: Tensor) -> Tensor:
    error = (states - target).pow(2)
    return error.mean()


def actions(logits: Tensor, advantages: Tensor) -> Tensor:
    action_logps = torch.log_softmax(logits, -1)
    return (action_logps * advantages).mean()


def volume(logits: Tensor, mask: Tensor) -> Tensor:
    scaled_logits = logits / 0.7
    return (scaled_logits.amax(-1) * mask).sum()


def of_the_model(logps: Tensor, mask: Tensor, hidden_scale: Tensor) -> Tensor:
    hidden_bias = hidden_scale * 2
    return (logps * mask).sum() + hidden_bias.sum()


LOGPS, MASK = torch.randn(B, T), torch.ones(B, T)


@pytest.mark.parametrize(
    ("loss", "tensors", "name", "layout", "shape", "spot"),
    [
        (per_row, (LOGPS, MASK), "row_loss", Layout.ROWS, (B, T), "row 2"),
        (kept_dimension, (LOGPS, MASK), "seq_ratio", Layout.ROWS, (B, T), "row 2"),
        (without_a_batch, (torch.randn(B), torch.randn(B)), "scaled", Layout.ELEMENTS, (B,), "element 1"),
        (per_position, (LOGPS, MASK), "profile", Layout.ELEMENTS, (T,), "element 1"),
        (per_row, (torch.randn(T, T), torch.ones(T, T)), "row_loss", Layout.ELEMENTS, (T,), "element 1"),  # rows, or positions?
        (per_token, (LOGPS, MASK), "token_loss", Layout.TOKENS, (B, T), "row 2, token 1"),
        (states, (torch.randn(B, D), torch.randn(B, D)), "error", Layout.COLUMNS, (B, D), "row 2, column 1"),
        (actions, (torch.randn(B, D), torch.randn(B, 1)), "action_logps", Layout.COLUMNS, (B, D), "row 2, column 1"),
        (volume, (torch.randn(B, T, D), MASK), "scaled_logits", Layout.COLUMNS, (B, T, D), "row 2, column 1"),
        (of_the_model, (LOGPS, MASK, torch.randn(B)), "hidden_bias", Layout.ELEMENTS, (B,), "element 1"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_tensor_is_told_by_what_its_dimensions_are(
    loss: Callable[..., Tensor], tensors: tuple[Tensor, ...], name: str, layout: Layout, shape: tuple[int, ...], spot: str
) -> None:
    """By its row where it has one number for each, by row and token where it has one for each of these, and else by neither."""
    trace = record(loss, tensors[0].clone().requires_grad_(), *tensors[1:]).trace
    value = next(value for value in trace.values if trace.names.name(value) == name)
    assert layout_of(trace, value) == (layout, torch.Size(shape)) and layout.spot(2, 1) == spot


def test_numbers_of_a_large_batch_are_legible() -> None:
    assert Layout.TOKENS.spot(511, 8191) == "row 511, token 8,191"
