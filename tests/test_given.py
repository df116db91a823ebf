"""Arguments are looked at when they are given: whatever is wrong is one clear error at the call, and never comes late or from deep inside."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verdicts import ppo_step

import nanscope
from nanscope import LossInputs, LossSettings, given
from nanscope.atlas import atlas
from nanscope.audit import audit, audit_snapshots
from nanscope.errors import NanscopeError
from nanscope.integrations import Live
from nanscope.objective import advantages
from nanscope.objective.settings import Level, Ratio
from nanscope.program.glance import show
from nanscope.snapshot.file import save

LP = torch.zeros(2, 3)
NEEDED: dict[str, Any] = {
    "log_probs": LP, "old_log_probs": None, "ref_log_probs": None, "rollout_log_probs": None, "advantages": torch.ones(2), "mask": LP + 1,
}  # fmt: skip


def batch(**changes: Any) -> LossInputs:
    return LossInputs(**{**NEEDED, **changes})


def loss(log_probs, mask):
    return (log_probs.exp() * mask).sum()


@dataclass(frozen=True)
class World:
    """What the cases are called with."""

    step: nanscope.Snapshot
    file: Path
    inputs: LossInputs


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    step = ppo_step({})
    file = save(step, tmp_path_factory.mktemp("runs") / "one")
    return World(step, file, nanscope.loss_inputs(step))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


watch = nanscope.watch
ACTIONS = 'on_nonfinite takes "record", "skip", "stop" or "repair", not '
TARGET = "watch(…) takes a trainer, an nn.Module, an optimizer, or nothing at all, not "
CHECKED = "check(…) takes a saved step, its path or address, or a function that returns a loss, not "

# what is called, and how its error begins: the argument, what it takes, what it was
CASES: tuple[tuple[Callable[[World], Any], str], ...] = (
    (lambda w: watch(on_nonfinite="stpo"), f"{ACTIONS}'stpo': did you mean 'stop'?"),  # type: ignore[arg-type]
    (lambda w: watch(on_nonfinite=None), f"{ACTIONS}None"),  # type: ignore[arg-type]
    (lambda w: watch(on_nonfinite=["stop"]), f"{ACTIONS}a list"),  # type: ignore[arg-type]
    (lambda w: watch(out=None), "out takes the path or address of a folder, not None"),  # type: ignore[arg-type]
    (lambda w: watch(out=3), "out takes the path or address of a folder, not 3"),  # type: ignore[arg-type]
    (lambda w: watch(out=""), "out takes the path or address of a folder, not ''"),
    (lambda w: watch(limit=-1), "limit takes a number of steps, not -1"),
    (lambda w: watch(limit="3"), "limit takes a number of steps, not '3'"),  # type: ignore[arg-type]
    (lambda w: watch(budget="1GB"), "budget takes a number of bytes above 0, not '1GB'"),  # type: ignore[arg-type]
    (lambda w: watch(budget=0), "budget takes a number of bytes above 0, not 0"),
    (lambda w: watch(max_bytes=None), "max_bytes takes a number of bytes above 0, not None"),  # type: ignore[arg-type]
    (lambda w: watch(max_bytes=float("nan")), "max_bytes takes a number of bytes above 0, not nan"),  # type: ignore[arg-type]
    (lambda w: watch(deep_every=-1), "deep_every takes a whole number of steps, 0 for no deep looks, not -1"),
    (lambda w: watch(deep_every=True), "deep_every takes a whole number of steps, 0 for no deep looks, not True"),
    (lambda w: watch(max_repairs=1.5), "max_repairs takes a whole number of backward passes, not 1.5"),  # type: ignore[arg-type]
    (lambda w: watch(save_steps=3), "save_steps takes numbers of steps, not 3"),  # type: ignore[arg-type]
    (lambda w: watch(save_steps="12"), "save_steps takes numbers of steps, not '12'"),  # type: ignore[arg-type]
    (lambda w: watch(save_steps=[1, 2.5]), "save_steps takes numbers of steps, not 2.5"),  # type: ignore[list-item]
    (lambda w: watch(trackers=3), "trackers takes trackers, each with the methods log, alert and artifact, not 3"),  # type: ignore[arg-type]
    (lambda w: watch(trackers="mlflow"), "trackers takes trackers, each with the methods log, alert and artifact, not 'mlflow'"),  # type: ignore[arg-type]
    (lambda w: watch(trackers=[Live]), "trackers takes trackers, each with the methods log, alert and artifact, not the class Live"),  # type: ignore[list-item]
    (lambda w: watch(save_steps=None), "save_steps takes numbers of steps, not None"),  # type: ignore[arg-type]
    (lambda w: watch(name=3), "name takes text, not 3"),  # type: ignore[arg-type]
    (lambda w: watch(on_incident="print"), "on_incident takes a function of an Incident, or None, not 'print'"),  # type: ignore[arg-type]
    (lambda w: watch(on_warning=3), "on_warning takes a function of a Forecast, or None, not 3"),  # type: ignore[arg-type]
    (lambda w: watch(check="no"), "check takes True or False, not 'no'"),  # type: ignore[arg-type]
    (lambda w: watch(save_tokens=None), "save_tokens takes True or False, not None"),  # type: ignore[arg-type]
    (lambda w: watch("runs"), f"{TARGET}'runs': a folder is out='runs'"),
    (lambda w: watch(None), f"{TARGET}None"),
    (lambda w: watch(torch.nn.Linear), f"{TARGET}the class Linear"),
    (lambda w: watch(LP), f"{TARGET}a Tensor of shape [2, 3]"),
    (lambda w: watch(Path("x")), f"{TARGET}the path 'x'"),
    (lambda w: watch().tag(log_prob=LP), "no role is called 'log_prob' (did you mean 'log_probs'?); known are log_probs, "),
    (lambda w: watch().tag(log_probs=[1]), "tag(log_probs=…) takes a tensor, not a list"),  # type: ignore[arg-type]
    (lambda w: watch().step("x"), "step(…) takes a whole number, not 'x'"),  # type: ignore[arg-type]
    (lambda w: watch().report(3), "report(…) takes the path of a file, not 3"),  # type: ignore[arg-type]
    (lambda w: watch().report("x.docx"), "no renderer for '.docx'; known are .html, .md, .png, .txt, .json"),
    (lambda w: nanscope.load(None), "load(…) takes the path or address of a snapshot, not None"),  # type: ignore[arg-type]
    (lambda w: nanscope.load(w.step), "load(…) takes the path or address of a snapshot, not a Snapshot"),  # type: ignore[arg-type]
    (lambda w: nanscope.load("a\0b"), "load(…) takes the path or address of a snapshot, not 'a\\x00b'"),
    (lambda w: nanscope.load("nope.safetensors"), "nope.safetensors: cannot be read (No such file or directory)"),
    (lambda w: nanscope.load(w.file.parent), f"{'{parent}'}: is a folder; name a snapshot in it, as step-000412.rank0.safetensors"),
    (lambda w: nanscope.load("nowhere://x/y.safetensors"), "nowhere://x cannot be reached (Protocol not known: nowhere)"),
    (lambda w: nanscope.history(None), "history(…) takes the path or address of a run, or of a folder of runs, not None"),  # type: ignore[arg-type]
    (lambda w: nanscope.history("nope"), "there is no history.rank*.jsonl in 'nope': a run directory is what a watched run wrote"),
    (lambda w: nanscope.diagnose(None), "diagnose(…) takes a run directory, a folder of runs, a snapshot, or several snapshots"),  # type: ignore[arg-type]
    (lambda w: nanscope.diagnose([w.step, 3]), "diagnose(…) takes a snapshot, its path or its address, not 3"),  # type: ignore[list-item]
    (lambda w: nanscope.diagnose("nope"), "there is no run directory or snapshot 'nope'"),
    (lambda w: nanscope.replay(None), "replay(…) takes a snapshot, its path or its address, not None"),  # type: ignore[arg-type]
    (lambda w: nanscope.replay(w.step, "clmp:20"), "unknown edit 'clmp:20' (did you mean 'clamp'?); known are "),
    (lambda w: nanscope.replay(w.step, [3]), "edits takes names of edits, as clamp:20, not 3"),  # type: ignore[list-item]
    (lambda w: nanscope.check(None), f"{CHECKED}None"),  # type: ignore[arg-type]
    (lambda w: nanscope.check(LP), f"{CHECKED}a Tensor of shape [2, 3]"),  # type: ignore[arg-type]
    (lambda w: nanscope.check("nope"), "nope: cannot be read (No such file or directory)"),
    (lambda w: nanscope.check("mod:fun"), "check(…) takes a function itself, and not its name, not 'mod:fun': import it"),
    (lambda w: nanscope.check(loss, [LP]), "inputs takes a mapping of names to what the loss is called with, not a list"),  # type: ignore[arg-type]
    (lambda w: nanscope.check(loss, {"log_probs": LP, "maks": LP}), "loss takes no 'maks' (did you mean 'mask'?): it takes log_probs, mask"),
    (lambda w: nanscope.check(loss, {"log_probs": LP}), "loss cannot be called with these inputs: missing a required argument: 'mask'"),
    (lambda w: nanscope.check(w.step, {"mask": LP}), "inputs takes nothing beside a saved step: they are what a function is called with"),
    (lambda w: nanscope.check(w.step, dtypes="bfloat16"), "dtypes takes floating-point dtypes, as torch.bfloat16, not 'bfloat16'"),  # type: ignore[arg-type]
    (lambda w: nanscope.check(w.step, dtypes=[torch.int64]), "dtypes takes floating-point dtypes, as torch.bfloat16, not torch.int64"),
    (lambda w: nanscope.loss_inputs(None), "loss_inputs(…) takes a snapshot, its path or its address, not None"),  # type: ignore[arg-type]
    (lambda w: nanscope.loss_inputs(w.step, 3), "run takes the executed program, or None, not 3"),  # type: ignore[arg-type]
    (lambda w: nanscope.replay_under(None), "replay_under(…) takes a snapshot, its path or its address, not None"),  # type: ignore[arg-type]
    (lambda w: nanscope.replay_under(w.step, 3), "asked takes keys of losses, as verl.vanilla:clip_ratio=0.3, not 3"),  # type: ignore[arg-type]
    (lambda w: nanscope.replay_under(w.step, "verll.vanilla"), "no loss is called 'verll.vanilla' (did you mean 'verl.vanilla'?): there are "),
    (
        lambda w: nanscope.replay_under(w.step, "verl.vanilla:clip_ratoi=0.2"),
        "verl.vanilla has no setting 'clip_ratoi' (did you mean 'clip_ratio'?): it has ",
    ),
    (lambda w: nanscope.replay_under(w.step, own=[3]), "own takes losses of your own: functions, or their names, as mymodule:my_loss, not 3"),  # type: ignore[list-item]
    (lambda w: nanscope.framework_loss("tlr.grpo", w.inputs), "no loss is called 'tlr.grpo' (did you mean 'trl.grpo'?): there are "),
    (lambda w: nanscope.framework_loss(w.inputs, "trl.grpo"), "framework_loss(…) takes the name of a loss, as trl.grpo, then a batch, not a "),  # type: ignore[arg-type]
    (lambda w: nanscope.framework_loss("trl.grpo", None), "inputs takes a batch (LossInputs), not None"),  # type: ignore[arg-type]
    (lambda w: nanscope.framework_loss("trl.grpo", w.inputs, epsilom=0.2), "trl.grpo has no setting 'epsilom' (did you mean 'epsilon'?): "),
    (lambda w: nanscope.framework_loss("trl.grpo", w.inputs, epsilon=[1]), "trl.grpo: epsilon=[1] is not known: it is float"),
    (lambda w: batch(log_probs=None), "LossInputs(log_probs=…) takes a tensor, not None"),
    (lambda w: batch(mask=[1]), "LossInputs(mask=…) takes a tensor, not a list"),
    (lambda w: batch(entropy=0.1), "LossInputs(entropy=…) takes a tensor or None, not 0.1"),
    (lambda w: batch(mask=torch.ones(5)), "mask is (5,) and log_probs is (2, 3): they must be alike"),
    (lambda w: batch(advantages=torch.ones(7)), "advantages is (7,) and log_probs is (2, 3): they must be alike"),
    (lambda w: batch(log_probs=LP[0]), "log_probs is (3,): a batch is [B, T], rows by response tokens"),
    (lambda w: batch(log_probs=LP.long()), "log_probs are torch.int64: they are floating-point numbers"),
    (lambda w: LossSettings(kl=0.04), "LossSettings(kl=…) takes Kl or None, not 0.04"),  # type: ignore[arg-type]
    (lambda w: LossSettings(surrogate="ppo"), "LossSettings(surrogate=…) takes Ppo, ImportanceSampling, "),  # type: ignore[arg-type]
    (lambda w: LossSettings(drop_unscored="no"), "LossSettings(drop_unscored=…) takes bool, not 'no'"),  # type: ignore[arg-type]
    (lambda w: Ratio(level="tokn"), "Ratio(level=…) takes Level.TOKEN, Level.SEQUENCE_MEAN, "),  # type: ignore[arg-type]
    (lambda w: atlas(["tlr"]), "no loss path begins with 'tlr' (did you mean 'trl'?): there are trl, "),
    (lambda w: atlas(3), "atlas(…) takes beginnings of names of loss paths, as trl.grpo, not 3"),  # type: ignore[arg-type]
    (lambda w: audit(w.inputs), "audit(…) takes the batches (LossInputs) of one step, in order, not a LossInputs"),  # type: ignore[arg-type]
    (lambda w: audit([w.step]), "audit(…) takes the batches (LossInputs) of one step, in order, not a Snapshot"),  # type: ignore[list-item]
    (lambda w: audit([w.inputs], ranks=3), "ranks takes the rank of each batch, not 3"),  # type: ignore[arg-type]
    (lambda w: audit([w.inputs], group_size=0), "group_size takes a number of completions, at least one, or None, not 0"),
    (lambda w: audit_snapshots(w.step), "audit_snapshots(…) takes snapshots of one step, or their paths, not a Snapshot"),  # type: ignore[arg-type]
    (lambda w: audit_snapshots([3]), "audit_snapshots(…) takes a snapshot, its path or its address, not 3"),  # type: ignore[list-item]
    (lambda w: nanscope.ray(3), "runtime_env takes a mapping, or None, not 3"),  # type: ignore[arg-type]
    (lambda w: nanscope.ray(out=None), "out takes the path or address of a folder, not None"),  # type: ignore[arg-type]
    (lambda w: nanscope.ray(on_nonfinite="stpo"), f"{ACTIONS}'stpo': did you mean 'stop'?"),  # type: ignore[arg-type]
    (lambda w: advantages.relative([1.0], LP, advantages.Relative()), "rewards_B takes a tensor, not a list"),  # type: ignore[arg-type]
    (lambda w: advantages.relative(LP[:, 0], LP[:, 0], "trl.group"), "how takes a Relative, as RELATIVE holds them by name, not 'trl.group'"),  # type: ignore[arg-type]
    (lambda w: advantages.whiten(LP, torch.ones(7)), "mask_BT is (7,): it is [B, T], rows by response tokens"),
    (lambda w: advantages.gae(LP, LP, torch.ones(3, 2)), "mask_BT is (3, 2) and rewards_BT is (2, 3): they must be alike"),
    (lambda w: advantages.returns_to_go(LP, LP, "x"), "gamma takes a number, not 'x'"),  # type: ignore[arg-type]
)  # fmt: skip


@pytest.mark.parametrize(("call", "begins"), CASES, ids=[begins[:70] for _, begins in CASES])
def test_a_wrong_argument_is_one_clear_error_at_the_call(call: Callable[[World], Any], begins: str, world: World) -> None:
    """It names the argument, what it takes and what it was, has no other error behind it, and nothing was written."""
    with pytest.raises(NanscopeError) as raised:
        call(world)
    assert str(raised.value).startswith(begins.replace("{parent}", str(world.file.parent)))
    assert raised.value.__cause__ is None and (raised.value.__suppress_context__ or raised.value.__context__ is None)
    assert len(str(raised.value).splitlines()) == 1 and "\0" not in str(raised.value)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: watch(on_nonfinit="stop"),  # type: ignore[call-arg]
        lambda: LossSettings(kll=None),  # type: ignore[call-arg]
        lambda: nanscope.summarise(None),  # type: ignore[arg-type]
        lambda: show("x"),  # type: ignore[arg-type]
    ],
)
def test_what_python_says_itself_is_left_to_it(call: Callable[[], Any]) -> None:
    """A keyword that no function has, and a number for a tensor, are a TypeError as everywhere, and not from deep inside."""
    with pytest.raises(TypeError) as raised:
        call()
    assert len(traceback.extract_tb(raised.value.__traceback__)) <= 5


def test_what_people_have_is_taken(world: World, tmp_path: Path) -> None:
    """A round number of bytes, one where several may stand, a path as text or not, a step by itself or by its file, a loss by itself."""
    scope = watch(max_bytes=1e9, budget=2.0**20, limit=0, save_steps=range(3), name="", out=tmp_path)  # type: ignore[arg-type]
    assert scope.out == tmp_path
    assert watch(torch.nn.Linear(1, 1), SimpleNamespace(model=torch.nn.Linear(1, 1)), save_steps=torch.arange(2).tolist())
    by_file, by_step = nanscope.check(world.file, dtypes=torch.bfloat16), nanscope.check(world.step, dtypes=[torch.bfloat16])
    assert [hazard.words for hazard in by_file.hazards] == [hazard.words for hazard in by_step.hazards] and by_file.hazards
    one, other = (nanscope.replay_under(it, "verl.vanilla", loss) for it in (str(world.file), world.step))
    assert one.outcomes == other.outcomes and one.outcomes[1].id == "loss" and one.outcomes[1].label == "your own, loss"
    assert torch.equal(nanscope.loss_inputs(world.file).log_probs, world.inputs.log_probs)
    assert audit_snapshots([world.file]) == audit_snapshots([world.step], [str(world.file)])
    assert atlas("trl.grpo").paths == atlas(["trl.grpo"]).paths
    assert Ratio(level=Level.SEQUENCE_SUM, log_clip=None).level is Level.SEQUENCE_SUM


TOLD = (
    (None, "None"), ("x" * 200, "'" + "x" * 78 + "…"), (-1, "-1"), ([1], "a list"), ({}, "a dict"), (LP, "a Tensor of shape [2, 3]"),
    (torch.float16, "torch.float16"), (Path("a b"), "the path 'a b'"), (loss, "the function loss"), (LossInputs, "the class LossInputs"),
    ("\x1b[2J", "'\\x1b[2J'"), (Level.TOKEN, "<Level.TOKEN: 'token'>"),
)  # fmt: skip


@pytest.mark.parametrize(("value", "words"), TOLD, ids=[words for _, words in TOLD])
def test_what_was_given_is_told_in_a_few_words(value: object, words: str) -> None:
    """No tensor is printed, and nothing that commands a terminal."""
    assert given.told(value) == words


def test_a_word_is_suggested_only_where_one_is_like_it() -> None:
    """Not for what is no word, and not for one that is far from all."""
    assert given.near("stpo", ["stop", "skip"]) == "did you mean 'stop'?"
    assert given.near("zebra", ["stop", "skip"]) == given.near(3, ["stop"]) == given.spelled("zebra", ["stop"]) == ""
