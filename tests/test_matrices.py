"""Where a decomposition divides by 0 it is told, and a matrix that is moved off that point has a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from recorded import record
from torch import Tensor

from nanscope.causes import Cause
from nanscope.locate.matrices import is_degenerate
from nanscope.replay.edits import avoid_singular_op
from nanscope.replay.patch import Patch
from nanscope.verdict.diagnose import diagnose

EQUAL = torch.eye(3)
RANK_ONE = torch.outer(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 2.0, 0.0]))
SINGULAR = torch.diag(torch.tensor([1.0, 2.0, 0.0]))


def whitened(a: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(a)
    return (vectors @ torch.diag(values.rsqrt()) @ vectors.T).square().sum()


def orthogonal(a: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(a, full_matrices=False)
    return (u @ vh - 1).square().sum()


CASES = [
    ("eigh, equal eigenvalues", whitened, EQUAL, Cause.ZERO_DIV_ZERO),
    ("svd, equal singular values", lambda a: torch.linalg.svd(a)[0][0].sum(), EQUAL, Cause.ZERO_DIV_ZERO),
    ("svd, singular values of 0", orthogonal, RANK_ONE, Cause.ZERO_DIV_ZERO),
    ("slogdet", lambda a: torch.linalg.slogdet(a)[1], SINGULAR, Cause.LOG_ZERO),
    ("inverse", lambda a: torch.linalg.inv_ex(a)[0].sum(), SINGULAR, Cause.ZERO_DENOMINATOR),
    ("solve", lambda a: torch.linalg.solve_ex(a, torch.ones(3))[0].sum(), SINGULAR, Cause.ZERO_DENOMINATOR),
    ("a triangle", lambda a: torch.linalg.solve_triangular(a, torch.ones(3, 1), upper=True).sum(), SINGULAR, Cause.ZERO_DENOMINATOR),
    ("qr", lambda a: torch.linalg.qr(a)[0][0].sum(), SINGULAR, Cause.ZERO_DENOMINATOR),
    ("cholesky", lambda a: torch.linalg.cholesky_ex(a)[0].sum(), SINGULAR, Cause.ZERO_DENOMINATOR),
]


@pytest.mark.parametrize(("loss", "matrix", "cause"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_divides_by_0_is_told_and_mended(loss: Callable[[Tensor], Tensor], matrix: Tensor, cause: Cause) -> None:
    """The cause is the division, and different numbers on the diagonal make loss and gradient finite; no element is healthy to measure them by."""
    recorded = record(loss, matrix.clone().requires_grad_())
    location = recorded.location
    assert location is not None and location.origin.call is not None
    assert is_degenerate(recorded.program.calls[location.origin.call], recorded.trace.values)
    incident = diagnose(recorded.snapshot())
    assert incident.cause is cause
    assert (incident.fixes[0].id, incident.fixes[0].works) == ("avoid_singular_op", True)


@pytest.mark.parametrize(
    ("loss", "matrix"),
    [
        (whitened, torch.diag(torch.tensor([1.0, 2.0, 3.0]))),
        (orthogonal, torch.diag(torch.tensor([1.0, 2.0, 3.0]))),
        (lambda a: torch.linalg.slogdet(a)[1], EQUAL),
        (lambda a: torch.linalg.inv_ex(a)[0].sum(), EQUAL),
    ],
)
def test_a_regular_matrix_is_not_degenerate(loss: Callable[[Tensor], Tensor], matrix: Tensor) -> None:
    """Equal eigenvalues trouble no inverse, and what is not finite was spoilt before."""
    recorded = record(loss, matrix.clone().requires_grad_())
    call = next(call for call in recorded.program.calls if "linalg" in call.name)
    assert not is_degenerate(call, recorded.trace.values)
    values = {**recorded.trace.values, next(call.inputs()): torch.full((3, 3), math.nan)}
    assert not is_degenerate(call, values)


def test_the_numbers_that_are_added_move_no_two_eigenvalues_alike() -> None:
    """The same number for all would leave equal what is equal; and they are small beside the matrix."""
    recorded = record(whitened, (1e3 * EQUAL).requires_grad_())
    assert recorded.location is not None
    variant = avoid_singular_op(Patch(recorded.trace, recorded.location.origin))
    assert variant is not None
    jitter = next(tensor for value, tensor in variant.tensors.items() if value not in recorded.tensors)
    assert jitter.diagonal().unique().numel() == 3 and float((jitter - jitter.diagonal().diag()).abs().max()) == 0
    assert 0 < float(jitter.max()) < 1e-3 * 1e3
