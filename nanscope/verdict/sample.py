"""Which sample of the batch an origin belongs to: its row, its token, and where completions were grouped by prompt, whose completion it is.

    rewards.view(-1, 8).mean(1)      row 10 is completion 2 of prompt 1
    num_generations=8                the same, if the advantages of each eight rows come to 0

Notable: a trainer may put a batch in another order than its groups had, so a setting alone tells nothing: the advantages have to agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nanscope.locate.layout import Layout
from nanscope.locate.trace import Trace
from nanscope.objective.advantages import group_size
from nanscope.program.flow import dims_of, element_flow
from nanscope.program.ops import SIZED, Flow
from nanscope.roles import SCORES, Role
from nanscope.text import row_token
from nanscope.verdict.tokens import TokenMap

BALANCED = 1e-3  # of the largest advantage of a group: their mean


@dataclass(frozen=True, slots=True)
class BatchRow:
    """What an origin belongs to, counted from 0. token: None where the origin is one number a row. prompt, completion: None where
    nothing tells how rows are grouped."""

    row: int
    token: int | None = None
    prompt: int | None = None
    completion: int | None = None

    @property
    def place(self) -> str:
        """Row and token, in words."""
        return row_token(self.row, self.token)

    @property
    def group(self) -> str:
        """Whose completion it is, in words; "" if unknown."""
        return "" if self.prompt is None else f"completion {self.completion:,} of prompt {self.prompt:,}"


def sample_of(
    tokens: TokenMap | None, trace: Trace | None, settings: Mapping[str, Any], batch: tuple[int, ...] | None = None
) -> BatchRow | None:
    """Return the sample that an origin belongs to, None where it lies in no tensor of rows and tokens. batch: see `Origin`."""
    if tokens is None or trace is None or tokens.layout not in (Layout.TOKENS, Layout.ROWS):
        return BatchRow(*batch) if batch else None
    token = None if tokens.layout is Layout.ROWS else tokens.column
    prompt, completion = _group(trace, tokens.row, tokens.rows, group_size(settings))
    return BatchRow(tokens.row, token, prompt, completion)


def _group(trace: Trace, row: int, rows: int, size: int | None) -> tuple[int, int] | tuple[None, None]:
    """The prompt of a row, and which of its completions it is."""
    for side_by_side, many in _grouped(trace, rows):
        return divmod(row, many) if side_by_side else (row % many, row // many)
    return divmod(row, size) if size and _balanced(trace, rows, size) else (None, None)


def _grouped(trace: Trace, rows: int) -> Iterator[tuple[bool, int]]:
    """Yield how the program lays one score a row out to reduce it by group: are the rows of a group side by side, and in lines how long."""
    for call in trace.program.calls:
        out, source = call.outs[0], next(call.inputs(), None)
        if call.name not in SIZED or out is None or source is None or trace.values[source].shape not in ((rows,), (rows, 1)):
            continue
        shape = trace.values[out].shape
        if len(shape) != 2 or 1 in shape or shape.numel() != rows or not SCORES & {trace.names.role(source), trace.names.role(out)}:
            continue
        over = {dims_of(reader, trace.values[out]) for reader in trace.program.readers(out) if element_flow(reader) is Flow.REDUCE}
        if len(over) == 1 and (found := over.pop()) in ((0,), (1,)):
            yield found == (1,), shape[1]


def _balanced(trace: Trace, rows: int, size: int) -> bool:
    """Do the advantages of each so many rows come to 0, as those of one prompt do?"""
    for value, content in trace.values.items():
        if content.dim() in (1, 2) and len(content) == rows and not rows % size and trace.names.role(value) is Role.ADVANTAGES:
            groups = content.reshape(rows, -1)[:, 0].double().reshape(-1, size)
            groups = groups[torch.isfinite(groups).all(1) & (groups != 0).any(1)]
            return bool(len(groups)) and bool((groups.mean(1).abs() <= BALANCED * groups.abs().amax(1)).all())
    return False
