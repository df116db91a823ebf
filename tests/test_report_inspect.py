"""`nanscope inspect`: what is in a file, what its tensors hold, and nothing that a file says can command the terminal."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recorded import Recorded, leaf, record
from torch import Tensor

from nanscope.report.console import WIDTH
from nanscope.report.inspect import print_header
from nanscope.snapshot.file import load, save
from nanscope.snapshot.header import Header, TensorHead, read_header


def masked(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(logps - old_logps)
    return -(ratio * mask).sum() / mask.sum()


def step() -> Recorded:
    old_logps, mask = torch.full((2, 3), -1.0), torch.ones(2, 3)
    old_logps[1, 2], mask[1, 2] = -200.0, 0.0
    return record(masked, leaf(2, 3), old_logps, mask)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    recorded = step()
    (logps,) = (known.id for known in recorded.program.leaves if known.name == "logps")
    grad = torch.zeros(2, 3)
    grad[1, 2] = torch.nan
    return save(recorded.snapshot(grads={logps: grad}, environment={"versions": {"torch": "2"}}), tmp_path)


def shown(path: Path, program: bool = False, values: bool = False) -> list[str]:
    stream = io.StringIO()
    print_header(read_header(path), path.name, program, load(path) if values else None, file=stream)
    return stream.getvalue().splitlines()


def test_the_head_is_told_without_the_values(path: Path) -> None:
    """Every tensor with dtype, shape and bytes; the program, its sources, and what is known of the run."""
    lines = shown(path)
    assert lines[0].startswith(f"{path.name}   step 7 · rank 0 · ")
    assert [line.split() for line in lines if "old_logps" in line] == [["old_logps", "F32", "[2,", "3]", "24"]]
    text = "\n".join(lines)
    for words in ("calls from 3 tensors", "test_report_inspect.py", "versions (torch 2)", "1 step"):
        assert words in text, words
    assert "aten.exp" not in text and "aten.exp.default" in "\n".join(shown(path, program=True))


def test_the_values_are_a_line_each(path: Path) -> None:
    """Role, size, extremes; what is bad is told last, and whether the mask of the step leaves it out."""
    lines = {line.split()[0]: line.split(maxsplit=3)[1:] for line in shown(path, values=True)[1:7] if line.strip()}
    assert lines["old_logps"] == ["old_log_probs", "24", "[2, 3] float32, −200 … −1"]
    assert lines["mask"] == ["mask", "24", "[2, 3] float32, 0 … 1"]
    assert lines["grad/logps"] == ["grad", "24", "[2, 3] float32, 0, 1 of 6 bad, first at [1, 2], 1 masked, NaN!"]
    assert lines["loss"] == ["loss", "4", "[] float32, NaN!"]


def test_a_tensor_that_is_not_of_the_step_is_listed_too(path: Path) -> None:
    """Whoever attaches a file wants to know of everything that is in it."""
    header = read_header(path)
    more = replace(header, tensors=(*header.tensors, TensorHead("stray", "F32", (1,), 4)))
    stream = io.StringIO()
    print_header(more, path.name, False, load(path), file=stream)
    assert "stray" in stream.getvalue() and "not part of the step" in stream.getvalue()


def test_the_text_of_tokens_is_named_first(tmp_path: Path) -> None:
    """Whoever attaches the file gives it away; a file without it says nothing of it."""
    texts = {1: " the", 2: "\x1b[31m\u202e", 3: "x" * 64}
    lines = shown(save(step().snapshot(texts=texts), tmp_path))
    assert "token ids and their text (3 tokens)" in lines[1] and "“␣the”" in " ".join(lines[1:3])
    assert not set("".join(lines)) & set("\x1b\u202e")
    assert "token" not in "".join(shown(save(step().snapshot(), tmp_path))[1:2])


HOSTILE = "\x1b[31m\u202e</x>"


def test_a_hostile_header_is_inert() -> None:
    """Escape sequences from a file are spelled out, and a description of any form is no crash."""
    for program in (
        {},
        [],
        None,
        {"calls": [HOSTILE, [], [HOSTILE, 1, 2, 3, 99], [1, 2, 3, 4, 0]], "sites": [[HOSTILE, 3], 7], "leaves": 3},
    ):
        opaque = [HOSTILE] if program else 5
        about = {"schema": 2, "step": HOSTILE, "program": program, "observed": {HOSTILE: HOSTILE}, "opaque": opaque, "history": 5}
        stream = io.StringIO()
        print_header(Header((TensorHead(HOSTILE, HOSTILE, (2,), 8),), json.loads(json.dumps(about)), 100), HOSTILE, True, file=stream)
        assert "\x1b" not in stream.getvalue() and "\u202e" not in stream.getvalue()
        assert "⟨U+001B⟩" in stream.getvalue()


def test_no_line_is_too_wide(path: Path) -> None:
    """Long lines fold."""
    assert max(map(len, shown(path, program=True, values=True))) <= WIDTH
