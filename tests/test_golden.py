"""Golden outputs: what people and programs see, to the letter. A change that is meant is accepted with

    pytest tests/test_golden.py --accept

and read in the diff of tests/golden before it is committed. Versions, machines and paths are not in them.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import json
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from verdicts import ENVIRONMENT, KINDS, ppo_step, still, still_verdict, verdict_of

from nanscope.atlas import atlas
from nanscope.audit import audit
from nanscope.causes import Cause
from nanscope.objective.settings import LossInputs
from nanscope.plain import show
from nanscope.replay.sweep import sweep_clamp
from nanscope.replay.under import replay_under
from nanscope.replay.variants import variants
from nanscope.report.atlas import print_atlas
from nanscope.report.audit import print_audit
from nanscope.report.explain import print_causes, print_explanation
from nanscope.report.inspect import print_header
from nanscope.report.markdown import render_markdown
from nanscope.report.page import build
from nanscope.report.replay import print_others, print_replay, print_sweep
from nanscope.report.terminal import print_verdict
from nanscope.report.tried import tried_json
from nanscope.report.variants import print_variants
from nanscope.snapshot.file import load, save
from nanscope.snapshot.header import read_header

GOLDEN = Path(__file__).parent / "golden"


def printed(function: Callable[..., None], *args: Any) -> str:
    stream = io.StringIO()
    function(*args, file=stream)
    return stream.getvalue()


def terminal(kind: str) -> str:
    return printed(print_verdict, still_verdict(verdict_of(kind)), ["nanscope-runs/report.html"])


def markdown(kind: str) -> str:
    return render_markdown(still_verdict(verdict_of(kind)), "report.png")


def page(kind: str) -> str:
    return as_json(dataclasses.asdict(build(still_verdict(verdict_of(kind)))))


def verdict_json(kind: str) -> str:
    return as_json(still_verdict(verdict_of(kind)).to_json())


def as_json(data: object) -> str:
    return json.dumps(show(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def replayed(kind: str, failing: bool) -> str:
    return printed(print_replay, still(verdict_of(kind).incidents[0]), failing)


def alternatives() -> str:
    return printed(
        print_others, replay_under(ppo_step(ENVIRONMENT), ["verl.vanilla", "trl.grpo:log_ratio_clamp_value=20", "nemo_rl.clipped_pg"])
    )


def sweep() -> str:
    return printed(print_sweep, sweep_clamp(ppo_step(ENVIRONMENT), "trl.grpo"))


def inspected(program: bool, values: bool) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = save(ppo_step(ENVIRONMENT), folder)
        return printed(print_header, read_header(path), path.name, program, load(path) if values else None)


def audited(key: str) -> str:
    """Two micro-batches of unequal length."""
    parts = []
    for rows in (((100, 0.5),), ((10, 0.3), (890, 0.3))):
        log_probs = torch.full((len(rows), 900), -1.0, dtype=torch.float64)
        mask = (torch.arange(900) < torch.tensor([length for length, _ in rows])[:, None]).double()
        advantages = torch.tensor([-loss for _, loss in rows]).double()
        parts.append(LossInputs(log_probs, log_probs - 1e-9, None, None, advantages, mask))
    return printed(print_audit, audit(parts, key))


PAGES = ("forward masked", "backward, finite loss", "optimizer", "observed only", "absorbed")

CASES: dict[str, Callable[[], str]] = {
    **{f"terminal {kind}.txt": partial(terminal, kind) for kind in KINDS},
    **{f"page {kind}.json": partial(page, kind) for kind in PAGES},
    **{f"markdown {kind}.md": partial(markdown, kind) for kind in PAGES},
    "verdict forward masked.json": partial(verdict_json, "forward masked"),
    "replay forward masked.txt": partial(replayed, "forward masked", True),
    "replay that stays finite.txt": partial(replayed, "forward masked", False),
    "replay of nothing.txt": partial(replayed, "observed only", True),
    "replay rows.json": lambda: as_json(tried_json(verdict_of("forward masked").incidents[0])),
    "replay as.txt": alternatives,
    "replay sweep.txt": sweep,
    "inspect.txt": partial(inspected, True, False),
    "inspect values.txt": partial(inspected, False, True),
    "audit trl.bnpo.txt": partial(audited, "trl.bnpo"),
    "audit trl.grpo.txt": partial(audited, "trl.grpo"),
    "explain.txt": partial(printed, print_causes),
    "explain where_grad_trap.txt": partial(printed, print_explanation, Cause.WHERE_GRAD_TRAP),
    "variants trl.grpo.txt": lambda: printed(print_variants, variants("trl.grpo"), True),
    "variants.txt": lambda: printed(print_variants, variants(), False),
    "atlas trl.grpo.txt": lambda: printed(print_atlas, atlas(["trl.grpo"]), None),
}  # name of the golden file: what makes it
CASES = {name.replace(",", "").replace(" ", "-"): make for name, make in CASES.items()}


def normalised(text: str) -> str:
    """Text without folders, and without the size of a file that holds the names of folders."""
    return re.sub(r"· [\d,]+ bytes", "· 1,234 bytes", text.replace(str(Path(__file__).parent), "tests"))


@pytest.mark.parametrize("name", CASES)
def test_the_output_is_the_accepted_one(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody changes what people see without seeing it."""
    monkeypatch.delenv("COLUMNS", raising=False)
    text, path = normalised(CASES[name]()), GOLDEN / name
    if request.config.getoption("--accept"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    accepted = path.read_text(encoding="utf-8") if path.exists() else ""
    if text != accepted:
        diff = difflib.unified_diff(accepted.splitlines(), text.splitlines(), f"golden/{name}", "now", n=2, lineterm="")
        shown = "\n".join(diff)
        pytest.fail(f"{shown}\n\nThe output has changed. If that is meant: pytest tests/test_golden.py --accept", pytrace=False)


def test_no_golden_file_is_left_over() -> None:
    """A file that nothing is compared with guards nothing."""
    assert {path.name for path in GOLDEN.iterdir() if path.suffix != ".png"} == set(CASES)  # pictures: test_screenshots.py


def test_folders_and_sizes_are_normalised() -> None:
    """Another checkout, with a longer name, gives the same text."""
    assert normalised(f"{Path(__file__)}   step 7 · 9,876 bytes") == "tests/test_golden.py   step 7 · 1,234 bytes"
