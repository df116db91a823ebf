"""What the decompositions of matrices divide by: where that is 0, they or their gradients have no number.

eigh       the distances of its eigenvalues           solve, inverse, qr, slogdet     the pivots
svd        those of its squared singular values, and the values themselves      cholesky     its diagonal
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nanscope.program.calls import Call, Ref
from nanscope.program.ops import MATRIX_OF


def is_degenerate(call: Call, values: Mapping[int, Tensor]) -> bool:
    """Does a decomposition, or its backward, divide by 0? As 0 counts what has no finite reciprocal."""
    divisors = _DIVISORS.get(call.name)
    matrix = call.args[MATRIX_OF.get(call.name, 0)] if call.args else None
    given = values[matrix.id] if isinstance(matrix, Ref) else None
    if divisors is None or given is None or given.dim() < 2 or not bool(torch.isfinite(given).all()):
        return False
    found = divisors(given, [values[out] if out is not None and out in values else None for out in call.outs])
    return bool((found.abs() < torch.finfo(found.dtype).tiny).any())


def _gaps(given: Tensor, outs: list[Tensor | None]) -> Tensor:
    return torch.diff(torch.linalg.eigvalsh(given) if outs[0] is None else outs[0])


def _singular(given: Tensor, outs: list[Tensor | None]) -> Tensor:
    found = torch.linalg.svdvals(given) if len(outs) < 2 or outs[1] is None else outs[1]
    return torch.cat([found, torch.diff(found)], -1)


def _pivots(given: Tensor, outs: list[Tensor | None]) -> Tensor:
    return _triangle(torch.linalg.lu_factor_ex(given)[0], outs)


def _triangle(given: Tensor, outs: list[Tensor | None]) -> Tensor:
    return given.diagonal(dim1=-2, dim2=-1)


def _root(given: Tensor, outs: list[Tensor | None]) -> Tensor:
    return _triangle(torch.linalg.cholesky_ex(given)[0], outs)


def _of_qr(given: Tensor, outs: list[Tensor | None]) -> Tensor:
    upper = torch.linalg.qr(given, mode="r")[1] if len(outs) < 2 or outs[1] is None else outs[1]
    return _triangle(upper, outs)


_DIVISORS: Mapping[str, Callable[[Tensor, list[Tensor | None]], Tensor]] = {
    "_linalg_eigh": _gaps,
    "_linalg_svd": _singular,
    "linalg_cholesky_ex": _root,
    "_linalg_slogdet": _pivots,
    "_linalg_solve_ex": _pivots,
    "linalg_inv_ex": _pivots,
    "linalg_qr": _of_qr,
    "linalg_solve_triangular": _triangle,
    "cholesky_solve": _triangle,
}
