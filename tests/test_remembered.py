"""What was diagnosed before: it is the same to the byte, costs no replay, and never keeps anybody from a diagnosis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import RUNS
from test_cli import call
from test_exact import same
from test_incidents import INCIDENTS, new
from torch.utils._python_dispatch import TorchDispatchMode
from verdicts import ppo_step

import nanscope
from nanscope.exact import read, written
from nanscope.report.html import render_html
from nanscope.report.markdown import render_markdown
from nanscope.report.terminal import render_text
from nanscope.snapshot.file import holds, load, save
from nanscope.snapshot.runs import find_run
from nanscope.snapshot.step import Snapshot
from nanscope.verdict import remembered
from nanscope.verdict.diagnose import Question, diagnosis, explained
from nanscope.verdict.incident import Incident, Verdict
from nanscope.verdict.remembered import Diagnosis, Memory
from nanscope.verdict.run import verdict_of

pytestmark = pytest.mark.filterwarnings("ignore")  # the scripts do what torch warns of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this test's own, in which everything is worth being kept."""
    monkeypatch.setenv("NANSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remembered, "WORTH", 0.0)
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return save(ppo_step({}), tmp_path)


class Counted(TorchDispatchMode):
    """How many calls torch was asked for."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def drawn(incident: Incident) -> tuple[str, ...]:
    """Every form of a report that is text."""
    verdict = Verdict((incident,), steps=1, bad_steps=1)
    return render_html(verdict), render_text(verdict), render_markdown(verdict, "a.png"), json.dumps(verdict.to_json())


def again(found: Diagnosis) -> Diagnosis:
    return read(Diagnosis, json.loads(json.dumps(written(Diagnosis, found))))


def kept_in(cache: Path) -> list[Path]:
    return sorted(cache.glob("*")) if cache.is_dir() else []


def explain(file: Path, fresh: bool = False) -> tuple[Incident, float | None]:
    """What is said of a file, and when that was diagnosed, None if just now."""
    memory = Memory(fresh)
    (incident,) = explained([Question(file=file, shown=str(file))], memory)
    return incident, memory.at


# -- it is the same --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", INCIDENTS[::24], ids=lambda path: path.stem)
def test_what_is_kept_of_a_script_is_what_was_said(path: Path, tmp_path: Path) -> None:
    """Equal in every field, and every report is the same to the byte; and the run itself says what is said of its file."""
    verdict = new.watched(new.load(path), tmp_path)
    for incident in verdict.incidents[:2]:
        assert same(again(Diagnosis(incident, True, True)).incident, incident)
        assert drawn(again(Diagnosis(incident, True, True)).incident) == drawn(incident)
    if verdict.incidents and verdict.incidents[0].snapshot is not None:
        first = verdict.incidents[0]
        assert drawn(replace(diagnosis(load(first.snapshot)).incident, snapshot=first.snapshot)) == drawn(first)


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_keeps_its_verdict_for_those_who_read_it(kind: str, cache: Path, tmp_path: Path) -> None:
    """Nothing is run again, the tensors are not even loaded, and what is drawn is the same to the byte."""
    with nanscope.watch(out=tmp_path / "runs") as scope:
        RUNS[kind]()
    told = scope.verdict
    with Counted() as counted:
        found = nanscope.diagnose(scope.out)
    assert counted.calls == 0 or not all(incident.rows for incident in told.incidents)
    assert [drawn(one) for one in found.incidents] == [drawn(one) for one in told.incidents]
    assert torch.is_grad_enabled() and all(path.suffix == ".diagnosis" for path in kept_in(cache))


def test_a_second_look_costs_no_replay(cache: Path, file: Path) -> None:
    """The first one is kept; the second one asks nothing of torch; --fresh asks again."""
    first, at = explain(file)
    assert at is None and len(kept_in(cache)) == 1
    with Counted() as counted:
        second, at = explain(file)
    assert counted.calls == 0 and same(second, first)
    assert at is not None and 0 <= time.time() - at < 60
    with Counted() as counted:
        assert explain(file, fresh=True)[1] is None
    assert counted.calls > 100 and len(kept_in(cache)) == 1


def test_the_path_is_that_of_the_file_asked_for(cache: Path, file: Path, tmp_path: Path) -> None:
    """Of a copy, too: that is the same step."""
    explain(file)
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(file.read_bytes())
    incident, at = explain(copy)
    assert at is not None and incident.snapshot == str(copy)
    assert str(file).encode() not in b"".join(zlib.decompress(path.read_bytes()) for path in kept_in(cache))


@pytest.mark.parametrize("path", [path for path in INCIDENTS if "after" in path.stem][:4], ids=lambda path: path.stem)
def test_a_run_of_several_bad_steps_is_told_the_same(path: Path, cache: Path, tmp_path: Path) -> None:
    """What an earlier step has to do with a later one is part of the question: diagnosed anew, and as it was before, it is one verdict."""
    new.watched(new.load(path), tmp_path / "runs")
    run_dir, _ = find_run(tmp_path / "runs")
    anew, once, twice = (verdict_of(run_dir, memory=Memory(fresh)) for fresh in (True, True, False))
    assert same(anew, once) and same(once, twice)
    assert [drawn(one) for one in twice.incidents] == [drawn(one) for one in once.incidents]


# -- on the command line ---------------------------------------------------------------------------------------------------------------------

SAID = "diagnosed before, "


def test_a_second_report_says_so_and_is_the_same(cache: Path, file: Path, tmp_path: Path) -> None:
    """To the byte, with the same status, unless it is to be made anew."""
    done = [call("report", file, "-o", f"{name}.html", *more, cwd=tmp_path) for name, more in (("a", ()), ("b", ()), ("c", ("--fresh",)))]
    assert [SAID in one.stderr for one in done] == [False, True, False]
    assert {one.returncode for one in done} == {3}
    assert len({(tmp_path / f"{name}.html").read_bytes() for name in "abc"}) == 1
    assert "--fresh computes it again" in done[1].stderr and SAID not in done[1].stdout


def test_a_second_format_costs_the_drawing_only(cache: Path, file: Path, tmp_path: Path) -> None:
    """Its precision and the smallest script that fails alike are kept with the diagnosis, come back to the byte, and are made anew if asked."""

    def report(name: str, *more: str) -> int:
        with Counted() as counted:
            call("report", file, "-o", f"{name}.md", "-o", f"{name}.json", *more, cwd=tmp_path)
        return counted.calls

    assert report("a") > 1000 and report("b") == 0 and report("c", "--fresh") > 1000
    for form in ("json", "repro.py"):
        assert len({(tmp_path / f"{name}.{form}").read_bytes() for name in "abc"}) == 1
    assert "precision" in json.loads((tmp_path / "b.json").read_text())


def test_a_second_replay_says_so_and_is_the_same(cache: Path, file: Path, tmp_path: Path) -> None:
    """Further edits are tried anew; another loss is asked beside what is known."""
    report = call("report", file, "-o", "a.html", cwd=tmp_path)
    again, fresh = (call("replay", file, "--json", "a.json", *more, cwd=tmp_path) for more in ((), ("--fresh",)))
    assert [SAID in one.stderr for one in (report, again, fresh)] == [False, True, False]
    assert again.stdout == fresh.stdout and again.returncode == fresh.returncode == 3
    edited, under = (call("replay", file, *more, cwd=tmp_path) for more in (("--edit", "clamp:10"), ("--as", "verl.vanilla")))
    assert SAID not in edited.stderr and "±10" in edited.stdout
    assert SAID in under.stderr and "verl.vanilla" in under.stdout and again.stdout.splitlines()[0] in under.stdout


def test_a_healthy_step_replays_the_same(cache: Path, tmp_path: Path) -> None:
    """Whether it goes wrong again is remembered with it."""
    step = ppo_step({})
    harmless = {value: torch.zeros_like(tensor) if tensor.is_floating_point() else tensor for value, tensor in step.tensors.items()}
    file = save(replace(step, tensors=harmless), tmp_path)
    first, second = (call("replay", file, cwd=tmp_path) for _ in range(2))
    assert SAID in second.stderr and (second.stdout, second.returncode) == (first.stdout, first.returncode)


def test_of_a_run_one_damaged_file_is_a_gap_also_after_it_was_diagnosed(cache: Path, tmp_path: Path) -> None:
    with nanscope.watch(out=tmp_path / "runs") as scope:
        next(iter(RUNS.values()))()
    before = verdict_of(scope.out)
    (path,) = scope.out.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert before.incidents and [gap.slug for gap in verdict_of(scope.out).gaps] == ["damaged-snapshot"]


# -- what it depends on ----------------------------------------------------------------------------------------------------------------------


def test_another_step_or_another_question_is_diagnosed(cache: Path, file: Path, tmp_path: Path) -> None:
    """One byte of the file, what an earlier step and another rank have to do with it, how torch calculates, and nanscope's own code."""
    memory = Memory()

    def name(**about: Any) -> str:
        key = memory.key(Diagnosis, file, **about)
        assert key is not None
        return key.name

    plain = name()
    assert plain == name() and len({plain, name(poisoned_at=3), name(poisoned_at=4), name(source="rank 1: a"), name(source="")}) == 4
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert name() != plain
    finally:
        torch.set_num_threads(threads)
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert name() != plain


CODE = """
import os, pathlib, sys
sys.path.insert(0, sys.argv[1])
from nanscope.verdict import remembered
print(pathlib.Path(remembered.__file__).parents[2] == pathlib.Path(sys.argv[1]), remembered._code())
(pathlib.Path(sys.argv[1]) / "nanscope" / "text.py").touch()
remembered._code.cache_clear()
print(remembered._code())
"""


def test_other_code_has_another_key(tmp_path: Path) -> None:
    """A file that is written while a process runs is not what that process runs: it keeps nothing from then on."""
    here = Path(nanscope.__file__).parent
    subprocess.run(["cp", "-r", str(here), str(tmp_path / "nanscope")], check=True)

    def ask() -> list[str]:
        command = [sys.executable, "-c", CODE, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.split()

    first, second = ask(), ask()
    assert first[0] == second[0] == "True" and len(first[1]) == len(second[1]) == 64
    assert first[1] != second[1] and first[2] == second[2] == "None"


def test_a_step_in_memory_is_that_of_its_file_only_as_long_as_they_are_alike(cache: Path, tmp_path: Path) -> None:
    """What could not be written again, what a file would tell otherwise, a damaged file, and what stood on a device are not the same."""
    step = ppo_step({})
    file = save(step, tmp_path)
    assert holds(file, step) and holds(file, load(file))
    loss = step.loss
    assert loss is not None
    others: list[Snapshot] = [
        replace(step, notes=(*step.notes, ("a", "b"))),
        replace(step, reached=replace(step.reached, stepped="skipped")),
        replace(step, settings={"betas": (0.9, 0.95)}),
        replace(step, loss=loss.to("meta")),
    ]
    assert [holds(file, other) for other in others] == [False] * len(others)
    tuples = replace(step, settings={"betas": (0.9, 0.95)})
    assert not holds(save(tuples, tmp_path), tuples)
    assert Memory().key(Diagnosis, file, others[0]) is None
    save(step, tmp_path)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert not holds(file, step)


def test_a_file_that_changed_meanwhile_is_not_remembered(cache: Path, file: Path) -> None:
    """Between the look at its bytes and the diagnosis somebody may have written another one there."""
    memory, found = Memory(), diagnosis(load(file))
    key = memory.key(Diagnosis, file)
    assert key is not None
    os.utime(file, ns=(1, 1))
    memory.keep(key, found)
    assert kept_in(cache) == []


def test_a_damaged_file_is_damaged_also_after_it_was_diagnosed(cache: Path, file: Path) -> None:
    explain(file)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(nanscope.NanscopeError, match="checksum differs"):
        explain(file)


def test_what_could_not_be_run_may_run_the_next_time(cache: Path, tmp_path: Path) -> None:
    """For want of memory or of room on a disk: that is no answer to keep."""
    step = ppo_step({})
    found = diagnosis(step)
    assert found.lasts()
    row = replace(found.incident.rows[-1], loss=None, bad=0, total=0, note="not enough memory")
    assert not replace(found, incident=replace(found.incident, rows=(*found.incident.rows, row))).lasts()
    assert not diagnosis(replace(step, program=replace(step.program, output=10**6))).lasts()


# -- it keeps nobody from a diagnosis --------------------------------------------------------------------------------------------------------


def _other_key(path: Path) -> None:
    data = json.loads(zlib.decompress(path.read_bytes()))
    data["key"][0] = "0" * 64
    path.write_bytes(zlib.compress(json.dumps(data).encode()))


def _without_a_field(path: Path) -> None:
    data = json.loads(zlib.decompress(path.read_bytes()))
    del data["made"]["incident"]["sentence"]
    path.write_bytes(zlib.compress(json.dumps(data).encode()))


def _a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-7]),
        lambda path: path.write_bytes(b"\x80\x04\x95"),
        lambda path: path.write_bytes(zlib.compress(b"[" * 200_000)),
        lambda path: path.write_bytes(zlib.compress(b"null")),
        _other_key,
        _without_a_field,
        _a_folder,
    ],
    ids=["empty", "cut off", "foreign", "deep", "nothing", "of another file", "of another release", "a folder"],
)
def test_a_damaged_one_is_made_again(cache: Path, file: Path, harm: Callable[[Path], None]) -> None:
    """In silence, and a good one takes its place where that is possible."""
    first, _ = explain(file)
    (path,) = kept_in(cache)
    harm(path)
    second, at = explain(file)
    assert at is None and same(second, first)
    assert explain(file)[1] is not None or path.is_dir()


def test_what_unfolds_without_end_is_not_unfolded(cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explain(file)
    monkeypatch.setattr(remembered, "LARGEST", 100)
    assert explain(file)[1] is None


def _a_file_stands_there(cache: Path) -> None:
    cache.write_bytes(b"")


def _others_may_write(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)


def _below_a_file(cache: Path) -> None:
    cache.parent.joinpath("wall").write_bytes(b"")
    os.environ["NANSCOPE_CACHE"] = str(cache.parent / "wall" / "cache")


def _of_somebody_else(cache: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root gives a folder away")
    cache.mkdir()
    os.chown(cache, 12345, 12345)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="not on Windows")
@pytest.mark.parametrize("place", [_a_file_stands_there, _others_may_write, _below_a_file, _of_somebody_else])
def test_where_nothing_can_be_kept_everything_is_diagnosed(cache: Path, file: Path, place: Callable[[Path], None]) -> None:
    """A folder that others may write to is no memory of ours."""
    place(cache)
    first, at = explain(file)
    second, at_last = explain(file)
    assert at is at_last is None and same(first, second)
    assert not cache.is_dir() or kept_in(cache) == []


@pytest.mark.parametrize("value", ["off", "", " OFF "])
def test_it_can_be_switched_off(cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str) -> None:
    monkeypatch.setenv("NANSCOPE_CACHE", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Memory().folder is None and Memory().key(Diagnosis, file) is None
    explain(file)
    assert explain(file)[1] is None and not (tmp_path / "xdg").exists()


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As named, else where this user's caches are; a relative XDG_CACHE_HOME counts for nothing."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NANSCOPE_CACHE", "~/mine")
    assert Memory().folder == tmp_path / "mine"
    monkeypatch.delenv("NANSCOPE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Memory().folder == tmp_path / "xdg" / "nanscope"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert Memory().folder == tmp_path / ".cache" / "nanscope"


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
def test_it_is_this_users_alone(cache: Path, file: Path) -> None:
    explain(file)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in kept_in(cache)] == [0o600]


def test_what_was_quick_is_not_kept(cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be no faster to read."""
    monkeypatch.setattr(remembered, "WORTH", 1e9)
    explain(file)
    assert kept_in(cache) == []


def test_the_oldest_goes_first(cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is kept stays within its bound, and files that are not ours stay where they are."""
    memory, found = Memory(), diagnosis(load(file))
    other = cache / "notes.txt"
    names = []
    for number in range(6):
        key = memory.key(Diagnosis, file, poisoned_at=number)
        assert key is not None
        memory.keep(key, found)
        names.append(key.name)
        os.utime(cache / key.name, (number, number))
        other.write_text("mine")
        if number == 0:
            monkeypatch.setattr(remembered, "MOST", int(3.5 * (cache / key.name).stat().st_size))
    assert [path.name for path in kept_in(cache)] == sorted([*names[3:], "notes.txt"])


@pytest.fixture
def pressed() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_several_may_write_at_once(cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch, pressed: None) -> None:
    """Each reads a whole one or none, and nothing is left of the writing."""
    found = diagnosis(load(file))
    monkeypatch.setattr(remembered, "MOST", 30_000)
    wrong: list[object] = []

    def work(seed: int) -> None:
        memory = Memory()
        for number in range(12):
            key = memory.key(Diagnosis, file, poisoned_at=(seed + number) % 5)
            assert key is not None
            memory.keep(key, found)
            known = memory.recall(key)
            if known is not None and not same(known, found):
                wrong.append(known)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and all(path.suffix == ".diagnosis" for path in kept_in(cache))
