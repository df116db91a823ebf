"""What is asked of several backward passes at once, brought to the host in the one transfer of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanscope.watching.recording import Recording


class Answer(NamedTuple):
    """Of one backward pass. fine, clean: all flags are true, of its edge and of what its kernel was given. numbers: of the gauge."""

    recording: Recording
    fine: float
    clean: float
    loss: float
    numbers: Sequence[float]


def fetched(waiting: Sequence[Recording], asked: Tensor) -> Iterator[Answer]:
    """Yield the answers of some backward passes. asked: fine, clean and loss of each, [3, n], on the device where the numbers are, too."""
    gauged = [None if one.reading is not None else one.gauged for one in waiting]
    flat = [asked.flatten(), *(one.numbers for one in gauged if one is not None and one.numbers is not None)]
    told, start, n = torch.cat(flat).tolist(), asked.numel(), len(waiting)
    for index, (recording, one) in enumerate(zip(waiting, gauged, strict=True)):
        size = 0 if one is None or one.numbers is None else one.size
        yield Answer(recording, told[index], told[n + index], told[2 * n + index], told[start : start + size])
        start += size
