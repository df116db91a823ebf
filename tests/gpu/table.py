"""Asks all questions of this folder on a GPU, and writes the page of the answers: `python tests/gpu/table.py docs/gpu.md`.

With `--device cpu` the answers are printed, and no page is written: its figures are those of a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from checks import CHECKS, LARGE, MEASURED, Answer, Size

HEAD = """# On a GPU

Written by `python tests/gpu/table.py docs/gpu.md` on {day}: {device}, torch {torch}, CUDA {cuda}. A row holds if the watched run ends with the bare
run's weights and generators, bit for bit, and what is said of it is true: silent where nothing was planted, the step, the cause and the operator where
the tape can see it. Times are medians of 24 steps, bare and watched in turns, of a model of {layers} layers of {width} with {tokens:,} tokens a step.

| question | holds | what came out |
| --- | --- | --- |
"""


def asked(check: Callable[[], Answer]) -> Answer:
    """One that raises does not hold."""
    try:
        return check()
    except Exception as error:
        return Answer(False, f"{type(error).__name__}: {error}")


def main() -> int:
    """The exit status says whether all hold."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("page", type=Path, nargs="?")
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = options.parse_args()
    on_gpu = given.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("there is no GPU: --device cpu asks what can be asked without one, and writes no page")
        return 2
    size = LARGE if on_gpu else Size()
    checks: dict[str, Callable[[], Answer]] = {name: partial(check, given.device) for name, check in CHECKS.items()}
    checks |= {name: partial(check, given.device, size) for name, check in MEASURED.items()}
    rows, holds = [], True
    for name, check in checks.items():
        answer = asked(check)
        holds &= answer.holds
        rows.append(f"| {name} | {'yes' if answer.holds else 'no'} | {answer.told.replace('|', '/').splitlines()[0]} |")
        print(rows[-1], flush=True)
    if given.page is not None and on_gpu:
        about = {"day": f"{datetime.date.today():%Y-%m-%d}", "device": torch.cuda.get_device_name(), "torch": torch.__version__}
        shape = {"cuda": torch.version.cuda, "layers": size.layers, "width": size.width, "tokens": size.rows * size.tokens}
        given.page.write_text(HEAD.format(**about, **shape) + "\n".join(rows) + "\n", encoding="utf-8")
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
