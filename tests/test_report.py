"""`nanscope.report`: the suffix chooses the renderer, every renderer takes every kind of verdict, and no half file is ever left.

The kinds of verdict (`verdict_of`) and the hostile ones (`hostile`) are used by the tests of the single renderers, too.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import json
import math
import os
import tempfile
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nanscope
from nanscope.errors import NanscopeError
from nanscope.program.program import Program
from nanscope.report import render as report
from nanscope.report.render import render, suffixes
from nanscope.snapshot.observation import Observation, Origin, Phase
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.verdict import incident
from nanscope.verdict.diagnose import verdict as diagnosed
from nanscope.verdict.incident import Note, Verdict

# -- small training steps that go wrong ------------------------------------------------------------------------------------------


def _model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1)


def _mask_after(step: int = 0) -> None:
    model, x = _model(), torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    mask = torch.ones(2, 3)
    mask[1, 2] = 0.0
    old_logps = torch.zeros(2, 3)
    old_logps[1, 2] = -120.0
    logps = model(x).squeeze(-1)
    log_ratio = logps - old_logps
    ratio = torch.exp(log_ratio)
    loss = -(ratio * mask).sum() / mask.sum()
    loss.backward()


def _finite_loss() -> None:
    model, x = _model(), torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    mask = torch.ones(2, 3, dtype=torch.bool)
    mask[0, 1] = False
    logps = model(x).squeeze(-1)
    log_ratio = torch.where(mask, logps, logps + 150.0)
    ratio = torch.exp(log_ratio)
    loss = -torch.where(mask, ratio, 0.0).mean()
    loss.backward()


def _bad_input() -> None:
    model, x = _model(), torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    mask = torch.ones(2, 3)
    mask[0, 2] = 0.0
    old_logps = torch.zeros(2, 3)
    old_logps[0, 2] = math.nan
    ratio = torch.exp(model(x).squeeze(-1) - old_logps)
    loss = -(ratio * mask).mean()
    loss.backward()


def _optimizer() -> None:
    model = _model().half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-9, foreach=False)
    loss = model(torch.full((1, 4), 1e-4, dtype=torch.float16)).sum()
    loss.backward()
    optimizer.step()


def _drifting() -> None:
    """Nine healthy steps whose masked exponents grow, and one too many."""
    model, x = _model(), torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    mask, offset = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 10.0]])
    for step in range(10):
        logps = model(x).squeeze(-1)
        old_logps = logps.detach() - step * offset
        ratio = torch.exp(logps - old_logps)
        loss = -(ratio * mask).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _healthy() -> None:
    loss = _model()(torch.ones(3, 4)).sum()
    loss.backward()


RUNS: dict[str, Callable[[], None]] = {
    "forward masked": _mask_after,
    "backward, finite loss": _finite_loss,
    "input": _bad_input,
    "optimizer": _optimizer,
    "history": _drifting,
    "healthy": _healthy,
}
KINDS = (*RUNS, "observed only", "absorbed")


@functools.cache
def verdict_of(kind: str) -> Verdict:
    """Return a verdict of this kind, from a real run where there is one."""
    if kind == "absorbed":
        return Verdict((), (Note("nonfinite_absorbed", "ratio was +inf at [0, 1], and it was absorbed", 3),), steps=12, version="0.1.0")
    if kind == "observed only":
        origin = Origin("module", (0, 1, 2), (2, 3, 4), math.nan, "bfloat16", "logits")
        snapshot = Snapshot(
            step=7, rank=3, program=Program((), (), -1), tensors={}, loss=torch.tensor(math.nan), grads={},
            reached=Reached(loss=math.nan, gradients=4, bad_gradients=4), observation=Observation(phase=Phase.FORWARD, origin=origin),
        )  # fmt: skip
        return diagnosed([snapshot], steps=7, bad_steps=1)
    with tempfile.TemporaryDirectory() as folder:
        with nanscope.watch(out=folder) as scope:
            RUNS[kind]()
        return scope.verdict


# -- a verdict with a hostile string in every field ---------------------------------------------------------------------------------

NASTY = (
    "</script></style></title>\"'><img src=x onerror=alert(1)><script>alert(2)</script>{{ 7*7 }}{% raw %}$\\frac{a}$"
    "\x00\x1b[31m\x9b\u202e\u2066\u200b\u2028\ud800"
)


def hostile(kind: Any = Verdict, text: str = NASTY, count: int = 2) -> Any:
    """Build a value of a type, with hostile text wherever a string fits; count: items in every list."""
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind, vars(incident) | {"Any": Any})
        return kind(**{field.name: _field(kind.__name__, field.name, hints[field.name], text, count) for field in dataclasses.fields(kind)})
    if origin in (typing.Union, types.UnionType):
        return hostile(next(arg for arg in args if arg is not type(None)), text, count)
    if origin is tuple and args[-1] is Ellipsis:
        return tuple(hostile(args[0], text, count) for _ in range(count))
    if origin is tuple:
        return tuple(hostile(arg, text, count) for arg in args)
    if origin is dict or kind is Any:
        return {f"{text}{n}": [text, {text: text}, math.nan, None, True] for n in range(count)}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    return {str: text, int: 1, float: math.inf, bool: True}[kind]


def _field(owner: str, name: str, hint: Any, text: str, count: int) -> Any:
    special: dict[tuple[str, str], Any] = {
        ("Row", "kind"): "fix",
        ("Row", "works"): True,
        ("Row", "bad"): 0,
        ("Row", "loss"): 0.5,
        ("Incident", "reached"): {"loss": text, "gradients": [text, text], "weights": text, "stepped": text, text: text},
    }
    return special[owner, name] if (owner, name) in special else hostile(hint, text, count)


# -- the tests ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", suffixes())
@pytest.mark.parametrize("kind", KINDS)
def test_every_renderer_takes_every_kind(kind: str, suffix: str, tmp_path: Path) -> None:
    """A file comes out, and nothing else is left beside it."""
    path = tmp_path / f"report{suffix}"
    render(verdict_of(kind), path)
    assert path.stat().st_size > 50
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", suffixes())
def test_every_renderer_takes_hostile_strings(suffix: str, tmp_path: Path) -> None:
    """Text that no codec or template likes in every field stops no renderer."""
    render(hostile(), tmp_path / f"report{suffix}")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("healthy", "absorbed")])
def test_the_kinds_are_what_they_are_called(kind: str) -> None:
    """The examples of this file are incidents, each of its own phase."""
    incident = verdict_of(kind).incidents[0]
    phases = {"input": "input", "optimizer": "optimizer", "backward, finite loss": "backward"}
    assert incident.phase == phases.get(kind, "forward")
    assert (incident.picture is None) == (kind == "observed only")
    if kind == "history":
        assert len(incident.history) == 9
    if kind == "observed only":
        assert incident.origin.file is None and not incident.origin.source and not incident.rows


def test_the_suffix_chooses(tmp_path: Path) -> None:
    """Upper case is the same suffix; text and pictures are what they claim to be."""
    verdict = verdict_of("forward masked")
    for name, start in (("a.HTML", b"<!doctype html>"), ("a.png", b"\x89PNG"), ("a.json", b"{")):
        render(verdict, tmp_path / name)
        assert (tmp_path / name).read_bytes().lstrip().startswith(start)
    render(verdict, str(tmp_path / "a.txt"))
    assert verdict.incidents[0].headline.split()[0] in (tmp_path / "a.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["report.pdf", "report", "report.html.gz", ".html"])
def test_an_unknown_suffix_is_a_clear_error(name: str, tmp_path: Path) -> None:
    """The error names the suffixes that are known, and no file is made."""
    with pytest.raises(NanscopeError, match=r"\.html, \.png, \.txt, \.json") as caught:
        render(verdict_of("healthy"), tmp_path / name)
    assert caught.value.slug == "unknown-format"
    assert not list(tmp_path.iterdir())


def test_json_is_json_whatever_the_settings_hold(tmp_path: Path) -> None:
    """NaN becomes text, objects become text, and the rest is what the verdict says."""
    settings = {"beta": math.nan, "dtype": torch.float16, "clip": (0.2, math.inf)}
    incident = dataclasses.replace(verdict_of("input").incidents[0], settings=settings)
    render(Verdict((incident,)), tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert data["incidents"][0]["settings"] == {"beta": "nan", "dtype": "torch.float16", "clip": [0.2, "inf"]}
    assert data["incidents"][0]["sentence"] == incident.sentence


def test_a_missing_folder_is_an_oserror(tmp_path: Path) -> None:
    """Where a file cannot be written the error is the system's own."""
    with pytest.raises(FileNotFoundError):
        render(verdict_of("healthy"), tmp_path / "nowhere" / "a.html")


def test_a_renderer_that_fails_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of before is untouched, and no temporary file stays, whether drawing fails or writing does."""
    path = tmp_path / "a.txt"
    path.write_text("before", encoding="utf-8")

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setitem(report.RENDERERS, ".txt", broken)
        with pytest.raises(OSError, match="No space"):
            render(verdict_of("healthy"), path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", broken)
        with pytest.raises(OSError, match="No space"):
            render(verdict_of("healthy"), path)
    assert path.read_text(encoding="utf-8") == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_report_can_be_read_by_others(tmp_path: Path) -> None:
    """The file has the permissions that any new file has."""
    render(verdict_of("healthy"), tmp_path / "a.html")
    (tmp_path / "plain").touch()
    assert (tmp_path / "a.html").stat().st_mode == (tmp_path / "plain").stat().st_mode


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_reports_know_only_what_lies_below() -> None:
    """No report imports the session, the launcher, the command line or the instruments."""
    above = ("nanscope.watching", "nanscope.__main__", "nanscope.capture", "nanscope.demo")
    for path in Path(report.__file__).parent.glob("*.py"):
        assert not [name for name in _imports(path) if name.startswith(above)], path.name
