"""`nanscope bench`: what it measures is real, what it judges is judged, and what it writes can be read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import call, spawn
from test_packaging import nanscope
from torch import nn

from nanscope.bench import NAMES, asked, growth, tools, turns
from nanscope.bench.measure import Figures, Quartiles, Seconds, bits_equal, compared, environment, nothing_kept, rotated, seconds_of
from nanscope.bench.others import AGENTS, StableBaselines
from nanscope.bench.steps import Work, grpo
from nanscope.bench.subjects import SUBJECTS, Chapter, Setting
from nanscope.bench.table import HEAD, RULE, append, history_row, time_of
from nanscope.bench.tools import AGAIN, BARE, NANSCOPE, OURS, After, Watched
from nanscope.errors import NanscopeError
from nanscope.verdict.remembered import FOLDER

SETTING = {"date", "cpu", "cores", "threads", "load", "gpu", "system", "python", "torch", "nanscope", "commit"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what one short run of the command has written and printed."""
    folder = tmp_path_factory.mktemp("bench")
    words = (
        "small",
        "call",
        "--quick",
        "--rounds",
        1,
        "--threads",
        1,
        "--json",
        folder / "figures.json",
        "--history",
        folder / "history.md",
    )
    done = spawn("bench", *words)
    assert done.returncode == 0, done.stderr
    (folder / "out.txt").write_text(done.stdout)
    return folder


def chapters(path: Path) -> dict[str, Any]:
    return {chapter["name"]: chapter for chapter in json.loads(path.read_text())["chapters"]}


def test_the_figures_are_what_the_head_of_the_file_says(measured: Path) -> None:
    """Schema, setting, chapters, rows: in seconds and ratios, and nothing that was not measured."""
    data = json.loads((measured / "figures.json").read_text())
    assert (data["schema"], data["quick"], set(data["setting"])) == (1, True, SETTING)
    assert data["setting"]["threads"] == 1 and data["setting"]["torch"] == torch.__version__
    assert list(chapters(measured / "figures.json")) == ["small", "call"]
    rows = {row["name"]: row for row in chapters(measured / "figures.json")["small"]["rows"]}
    assert {BARE, NANSCOPE, AGAIN, "detect_anomaly", "isfinite hook"} <= set(rows)
    assert set(rows[NANSCOPE]) == {"name", "seconds", "ratio", "cpu_ratio"}
    assert 0 < rows[NANSCOPE]["seconds"]["low"] <= rows[NANSCOPE]["seconds"]["median"] <= rows[NANSCOPE]["seconds"]["high"] < 60
    assert rows[BARE]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    added = next(row for row in chapters(measured / "figures.json")["call"]["rows"] if row["name"] == "a recorded call, added")
    assert 1e-7 < added["seconds"]["median"] < 1e-2


def test_the_table_says_what_was_measured_and_judged(measured: Path) -> None:
    """Each subject with its words, its rows, and a line on the weights."""
    shown = (measured / "out.txt").read_text()
    assert f"torch {torch.__version__}" in shown and SUBJECTS["small"].words in shown
    assert "weights: the same to the last bit, bare and nanscope, in every round; nanscope saw every step" in shown
    assert "ratio, CPU time" in shown and "bare again" in shown and "a recorded call, added" in shown


def test_a_row_of_the_history_is_appended(measured: Path) -> None:
    """Under the last one, as long as the head, with what was not measured left open; nothing else of the file changes."""
    path = measured / "history.md"
    head, rule, row = path.read_text().splitlines()
    assert (head, rule) == (HEAD, RULE) and row.count(" | ") == head.count(" | ") and "quick" in row and " – |" in row
    page = measured / "page.md"
    page.write_text(f"# Title\n\n{HEAD}\n{RULE}\n| old |\n\nThe end.\n")
    append(page, row)
    assert page.read_text() == f"# Title\n\n{HEAD}\n{RULE}\n| old |\n{row}\n\nThe end.\n"


def test_the_page_has_the_history_and_every_subject() -> None:
    """docs/benchmarks.md has the table that `--history` finds, with a row, and says what each name measures."""
    page = (Path(__file__).parents[1] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    lines = page.splitlines()
    first = lines[lines.index(HEAD) + 2]
    assert lines[lines.index(HEAD) + 1] == RULE and first.startswith("| 20") and first.count(" | ") == HEAD.count(" | ")
    assert [name for name in SUBJECTS if f"| `{name}` |" not in page] == []


def test_the_names_are_those_of_the_subjects() -> None:
    """A shell completes them, and help lists them, without loading torch."""
    assert tuple(SUBJECTS) == NAMES


def test_an_unknown_name_is_one_line() -> None:
    """With the one that was perhaps meant; otherwise all of them."""
    done = call("bench", "smal")
    assert (done.returncode, done.stderr) == (1, "nanscope: nothing that can be measured is called 'smal'; did you mean small?\n")
    assert "there are call, small, 24m" in call("bench", "zzz").stderr


def test_what_is_not_installed_is_said(tmp_path: Path) -> None:
    """A subject that needs a package which is not there is one line, and no failure."""
    done = nanscope("bench", "sac", "trl", without={"stable_baselines3", "trl"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "left out: stable_baselines3" in done.stdout and "left out: trl" in done.stdout and "not installed" in done.stdout


def test_a_changed_bit_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Status 1 and a line that names who changed the weights; the figures are written all the same."""

    @contextmanager
    def spoils(work: Watched) -> Iterator[After]:
        def after() -> None:
            weight = next(iter(work.model.parameters())).detach().view(-1)
            weight[:1].view(torch.int32).bitwise_xor_(1)

        with tools.watched(work):
            yield after

    monkeypatch.setitem(tools.TOOLS, NANSCOPE, spoils)
    done = call("bench", "small", "--quick", "--rounds", 1, "--json", tmp_path / "f.json")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "nanscope: what must hold does not: small"
    assert "FAILED: the weights are not those of the bare run: nanscope" in done.stdout
    assert "the weights are not those of the bare run" in chapters(tmp_path / "f.json")["small"]["failed"]


def test_a_step_that_is_not_seen_is_an_error() -> None:
    """nanscope has to have seen as many steps as the work has made, each whole."""
    work = tiny()
    with pytest.raises(NanscopeError, match="nanscope saw 1 of 2 steps") as caught, tools.watched(work):
        work.step()
        work.steps += 1
    assert caught.value.slug == "bench-failed"


def tiny() -> Work:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    x = torch.randn(3, 4)
    return Work(model, lambda: torch.exp(model(x)).mean(), "cpu")


@pytest.mark.parametrize("name", tools.present())
def test_a_tool_leaves_nothing_behind(name: str) -> None:
    """And a step under it makes the weights that a bare one makes."""
    work = tiny()
    rows, said = turns.by_turns(work, {BARE: tools.bare, name: tools.TOOLS[name]}, rounds=2, timed=1)
    assert said[0].startswith("weights: the same to the last bit") and len(said) == 1 and rows[0].ratio is not None
    assert not any(module._forward_hooks for module in work.model.modules()) and not torch.is_anomaly_enabled()


def test_the_start_is_the_start_again() -> None:
    """`restore` brings back the weights, at the same addresses, and an optimizer that has seen nothing."""
    work = grpo("cpu", width=8, layers=1, heads=2)
    before, at = work.weights(), [weight.data_ptr() for weight in work.model.parameters()]
    work.step()
    once = work.weights()
    assert not bits_equal(before, once)
    work.restore()
    assert bits_equal(before, work.weights()) and at == [weight.data_ptr() for weight in work.model.parameters()]
    work.step()
    assert bits_equal(once, work.weights())


def test_bits_are_compared_as_bits() -> None:
    """-0.0 is not 0.0, a NaN is itself, and tensors of other shapes, dtypes or numbers are others."""
    zero, nan = torch.zeros(2), torch.tensor([float("nan")])
    assert bits_equal([zero, nan, torch.ones(())], [zero.clone(), nan.clone(), torch.ones(())])
    for other in (-zero, torch.zeros(1, 2), torch.zeros(2).half(), torch.zeros(3)):
        assert not bits_equal([zero], [other])
    assert not bits_equal([zero], [])


def test_a_ratio_is_that_of_its_own_round() -> None:
    """A machine that is twice as slow in one round changes no ratio."""
    base = [[Seconds(1.0, 1.0)], [Seconds(2.0, 2.0)], [Seconds(4.0, 4.0)]]
    own = [[Seconds(1.5 * one.wall, 1.5 * one.cpu) for one in group] for group in base]
    found = compared("nanscope", own, base, per=2)
    assert found.ratio == found.cpu_ratio == Quartiles(1.5, 1.5, 1.5) and found.seconds == Quartiles(1.5, 1.125, 2.25)
    assert Figures.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert [rotated("abc", turn) for turn in range(3)] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert seconds_of(lambda: sum(range(10**5))).wall > 0


def test_times_are_told_in_their_unit() -> None:
    """From nanoseconds to seconds, negative ones too."""
    cases = {4.2: "4.20 s [4.20, 4.20]", 4.2e-3: "4.20 ms [4.20, 4.20]", -4.2e-5: "-42.00 µs [-42.00, -42.00]", 0.0: "0.00 ns [0.00, 0.00]"}
    assert {seconds: time_of(Quartiles(seconds, seconds, seconds)) for seconds in cases} == cases


def test_the_history_marks_a_machine_that_was_busy() -> None:
    """A row that other work disturbed says so; it has no name of a host."""
    rows = (Figures(NANSCOPE, Quartiles(1.0, 1.0, 1.0), Quartiles(1.02, 1.0, 1.04)),)
    for load, mark in ((0.2, False), (5.0, True)):
        setting = Setting("2026-01-01", "A CPU", 2, 1, load, "", "Linux x86_64", "3.11", "2.13.0", "0.1.0", "c0ffee")
        row = history_row(setting, [Chapter("24m", "", rows)], quick=False)
        assert ("loaded" in row) == mark and "| × 1.02 [1.00, 1.04] |" in row and "| 0.1.0 c0ffee |" in row


def test_a_verdict_is_measured_and_is_of_the_line() -> None:
    """The origin is the ratio of the loss that stands in the benchmark, as a trainer's own would be; the verbs and the file have their rows."""
    found, _ = asked.asked([(8, 128)], 1)
    names = [row.name.removeprefix("8x128 ") for row in found]
    assert names == [
        "backward, bare", "hit", "verdict", "snapshot, as bytes", "snapshot, written", "import torch", "replay", "report", "check",
    ]  # fmt: skip
    assert all(row.seconds is not None and row.seconds.median > 0 for row in found)


def test_more_tokens_than_are_usually_held() -> None:
    """Each size in a process with the budget for it; per token, and the memory of a verdict beside its file."""
    rows, _ = asked.tokens([(8, 128), (16, 128)], 1)
    assert [row.name for row in rows] == [f"{size} {what}, a token" for what in ("hit", "verdict") for size in ("8x128", "16x128")]
    assert rows[0].ratio is not None and rows[0].ratio.median == 1 and rows[3].seconds is not None and rows[3].seconds.median > 0


def test_what_grows_is_held_against_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes of each kind; the ratio of the smaller one is 1, and all runs have the verdict or the steps that they should."""
    for name, sizes in (
        ("CALLS", (10, 20)),
        ("TOKENS", ((4, 16), (8, 16))),
        ("BAD", ((4, 16), (8, 16))),
        ("LAYERS", (1, 2)),
        ("STEPS", (2, 4)),
    ):
        monkeypatch.setattr(growth, name, sizes)
    rows, _ = growth.growth(1, 2)
    assert [row.name for row in rows][::2] == [
        "10 calls, a call", "64 healthy tokens, a token", "64 bad tokens, a token", "1 layers, a layer", "2 steps, a step", "2 ranks, a rank",
    ]  # fmt: skip
    assert all(row.ratio is not None and row.ratio.median == 1 for row in rows[::2])


def test_two_ranks_are_watched() -> None:
    """DistributedDataParallel with gloo: bit-identical, and every step seen."""
    rows, said = SUBJECTS["ddp"].measure(1, True)
    assert [row.name for row in rows] == list(OURS) and "nanscope saw every step" in said[0]


@pytest.mark.parametrize(
    ("name", "steps", "updates", "settings"), [("sac", 2, 2, {}), ("ppo", 64, 2, {"n_steps": 64, "n_epochs": 2}), ("dqn", 8, 2, {})]
)
def test_an_agent_of_stable_baselines_is_watched(name: str, steps: int, updates: int, settings: dict[str, int]) -> None:
    """Its own loop: each step of each optimizer is seen, of SAC's three an update."""
    pytest.importorskip("stable_baselines3")
    usual = AGENTS[name]
    agent = usual._replace(steps=steps, updates=updates, settings=usual.settings | settings)
    work = StableBaselines(agent)
    rows, said = turns.by_turns(work, OURS, rounds=1, timed=1, per=updates)
    assert [row.name for row in rows] == list(OURS) and "nanscope saw every step" in said[0]
    work.restore()
    before = work.steps
    work.step()
    assert work.steps - before == updates * len(agent.optimizers)


def test_a_real_trainer_of_trl_is_watched() -> None:
    """TRL's own loop, on a model that needs no network."""
    pytest.importorskip("trl")
    rows, said = SUBJECTS["trl"].measure(1, True)
    assert [row.name for row in rows] == list(OURS) and "nanscope saw every step" in said[0]


def test_no_diagnosis_is_kept_of_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by this process nor by those that it starts: a diagnosis that was kept is no measure of one."""
    monkeypatch.setenv(FOLDER, "/nowhere")
    assert environment()[FOLDER] == "off"
    with nothing_kept():
        assert os.environ[FOLDER] == "off"
    assert os.environ[FOLDER] == "/nowhere"
    monkeypatch.delenv(FOLDER)
    with nothing_kept():
        assert os.environ[FOLDER] == "off"
    assert FOLDER not in os.environ
