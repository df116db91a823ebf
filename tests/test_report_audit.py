"""The audit in a terminal: read it aloud, and a stranger understands it."""

from __future__ import annotations

import io

import pytest
import torch

from nanscope.audit import audit
from nanscope.objective.settings import LossInputs
from nanscope.report.audit import print_audit, render_audit

HEALTHY = "● 6 tokens in 2 rows   the loss is the token mean: 0.4; nothing changes it, and every token weighs the same\n"
SPLIT = """\
● 2 micro-batches · 1000 tokens in 3 rows   the loss is the token mean: 0.4; 1 finding changes it

  changes the loss  The token means of 2 micro-batches (100 and 900 tokens), averaged, are 0.4; with one weight for
                    each of the 1000 tokens of the step it is 0.32 (1.25 times that). A token of one micro-batch
                    weighs up to 9 times one of another. Divide the sum of every micro-batch by 1000, the count of
                    the whole step (num_items_in_batch in TRL, batch_num_tokens in verl and OpenRLHF,
                    global_valid_toks in NeMo-RL), and add them up.
"""


def batch(*rows: tuple[int, float]) -> LossInputs:
    """Tokens of the given loss, row by row, one update after the first."""
    log_probs = torch.full((len(rows), max(max(length for length, _ in rows), 1)), -1.0, dtype=torch.float64)
    mask = (torch.arange(log_probs.shape[1]) < torch.tensor([length for length, _ in rows])[:, None]).double()
    return LossInputs(log_probs, log_probs - 1e-9, None, None, torch.tensor([-loss for _, loss in rows]).double(), mask)


def test_a_healthy_batch_is_one_line() -> None:
    """What the loss is, and that nothing changes it."""
    assert render_audit(audit([batch((4, 0.5), (2, 0.2))], "trl.bnpo")) == HEALTHY


def test_a_finding_comes_before_the_table_and_the_table_marks_the_loss() -> None:
    """The sentence, what mends it, and the same tokens under every reduction."""
    shown = render_audit(audit([batch((100, 0.5)), batch((10, 0.3), (890, 0.3))], "trl.bnpo"))
    assert shown.startswith(SPLIT)
    table = [line.split() for line in shown.splitlines() if line.startswith(("  → ", "    ")) and "mean" in line]
    assert table[1][:4] == ["→", "token", "mean", "0.4"]
    assert "no" in table[1]


@pytest.mark.parametrize("width", [80, 100, 118])
def test_no_line_is_wider_than_asked(width: int) -> None:
    """Sentences and tables fold."""
    result = audit([batch((3, 0.5), (0, 0.1), (7, -0.2)), batch((2, 0.1))], "openrlhf.ppo", token_level_loss=False)
    shown = render_audit(result, width)
    assert max(map(len, shown.splitlines())) <= width
    assert "row mean without empty rows" in shown


def test_what_stands_in_a_file_cannot_command_the_terminal() -> None:
    """Words are printed without control characters."""
    stream = io.StringIO()
    print_audit(audit([batch((3, 0.5), (1, 0.1))], "trl.grpo"), file=stream)
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue() == render_audit(audit([batch((3, 0.5), (1, 0.1))], "trl.grpo"))


def test_frameworks_are_named_where_a_denominator_is_a_finding() -> None:
    """One line says where nothing valid is 0/0, and it is not there otherwise."""
    assert "With nothing valid the losses of openrlhf, verl are 0/0" in render_audit(audit([batch((3, 0.5), (3, 0.1))], "verl.vanilla"))
    assert "With nothing valid" not in render_audit(audit([batch((3, 0.5), (1, 0.1))], "trl.grpo"))
