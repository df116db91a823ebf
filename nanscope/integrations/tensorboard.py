"""TensorBoard: the numbers of each step as scalars, what was found and the page of a bad step as text.

with nanscope.watch(trainer, trackers=[nanscope.integrations.TensorBoard("runs/nanscope")]): ...
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from nanscope.snapshot.scalars import PREFIX


class TensorBoard:
    """A tracker of `nanscope.watch`. writer: a SummaryWriter, or the folder of one that is made."""

    def __init__(self, writer: SummaryWriter | str | os.PathLike[str]) -> None:
        self._given, self._step = writer, 0
        self._writer: Any = None

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the scalars of a step."""
        self._step = step
        for name, value in scalars.items():
            self._open().add_scalar(name, value, step)

    def alert(self, title: str, text: str) -> None:
        """Add what was found as text."""
        self._open().add_text(f"{PREFIX}{title.removeprefix('nanscope: ')}", text, self._step)
        self._open().flush()

    def artifact(self, path: Path) -> None:
        """Say where the page is: TensorBoard keeps no files."""
        self._open().add_text(f"{PREFIX}page", str(path), self._step)
        self._open().flush()

    def _open(self) -> Any:
        if self._writer is None:
            made = isinstance(self._given, (str, os.PathLike))
            self._writer = SummaryWriter(os.fspath(self._given)) if made else self._given  # type: ignore[arg-type]
        return self._writer
