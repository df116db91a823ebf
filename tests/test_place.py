"""Where a run writes: one directory a run, the same one for all ranks of a job, whoever comes first, and never that of an earlier job."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from nanscope.snapshot.processes import mark
from nanscope.snapshot.remote import Remote
from nanscope.snapshot.runs import Folder, latest, runs_in
from nanscope.watching import place
from nanscope.watching.place import CLAIMS, SHARED, name_of, settle, shared_key

FORK = multiprocessing.get_context("fork")  # quick, and what these processes do needs no thread

JOB = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may themselves run in a job."""
    for name in ("RANK", *SHARED):
        monkeypatch.delenv(name, raising=False)


def in_process(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a process of its own."""
    return in_processes([work])[0]


def in_processes(works: list[Callable[[], Any]]) -> list[Any]:
    """Return what these return in processes of their own that run at once."""

    def begin(work: Callable[[], Any], answer: Connection) -> None:
        answer.send(work())

    pipes = [FORK.Pipe(duplex=False) for _ in works]
    processes = [FORK.Process(target=begin, args=(work, there)) for work, (_, there) in zip(works, pipes, strict=True)]
    for process in processes:
        process.start()
    for _, there in pipes:
        there.close()  # a process that dies is then an EOFError
    answers = [here.recv() if here.poll(60) else None for here, _ in pipes]
    for process in processes:
        process.join(10)
    return answers


def rank(folder: Path | str, number: int, scopes: int = 1, **more: str) -> Callable[[], list[str]]:
    """A rank of a job that opens some scopes, one after another, and returns the names of their directories."""

    def begin() -> list[str]:
        os.environ.update({**JOB, "RANK": str(number), **more})
        return [settle(Folder.of(folder), "train").path.name for _ in range(scopes)]

    return begin


def names(folder: Path) -> list[str]:
    return [path.name for path in runs_in(folder)]


def test_a_run_alone_has_a_directory_of_its_own(tmp_path: Path) -> None:
    """Named after the time and the script; `latest` leads there; a second one leaves it alone."""
    first = settle(Folder.of(tmp_path / "deep" / "runs"), "train")
    folder = first.path.parent
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d-train", first.path.name) and first.run.startswith(first.path.name)
    assert (folder / "latest").resolve() == first.path.resolve() and latest(folder) == first.path
    second = settle(Folder.of(folder), "train")
    assert second.path != first.path and second.run != first.run and latest(folder) == second.path
    assert [path.name for path in first.path.iterdir()] == ["history.rank0.jsonl"]


def test_runs_of_one_second_do_not_meet(tmp_path: Path) -> None:
    """Twelve at once, of which no launcher says that they belong together, are twelve directories."""
    found = in_processes([lambda: settle(Folder.of(tmp_path), "train").path.name] * 12)
    assert len(set(found)) == 12 and sorted(names(tmp_path)) == sorted(found) and latest(tmp_path) is not None


def test_all_ranks_of_a_job_come_to_one_directory(tmp_path: Path) -> None:
    """Eight at once, without a word to each other."""
    found = in_processes([rank(tmp_path, number) for number in range(8)])
    assert len({name for (name,) in found}) == 1 and len(names(tmp_path)) == 1
    files = sorted(path.name for path in (tmp_path / names(tmp_path)[0]).iterdir())
    assert files == [f"history.rank{number}.jsonl" for number in range(8)]
    assert latest(tmp_path) == runs_in(tmp_path)[0]


def test_a_job_after_another_does_not_join_it(tmp_path: Path) -> None:
    """The same address, the same port, the same launcher: the ranks are taken there."""
    first, second = (in_processes([rank(tmp_path, number) for number in range(2)]) for _ in range(2))
    assert first[0] == first[1] and second[0] == second[1] and first != second


def test_a_job_whose_launcher_is_gone_is_not_joined(tmp_path: Path) -> None:
    """Of the first job only rank 0 came to its scope; rank 1 of the second, which has another launcher, does not take its place there."""
    ((first,),) = in_process(lambda: in_processes([rank(tmp_path, 0)]))
    time.sleep(0.05)
    (late,), (early,) = in_process(lambda: [in_process(rank(tmp_path, 1)), in_process(rank(tmp_path, 0))])
    assert late == early != first


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[str, dict[str, str]]]:
    """Where a rank writes at an address, as seen from a machine of its own."""
    url = f"file://{tmp_path}/store"

    def on(number: int) -> tuple[str, dict[str, str]]:
        folder = tmp_path / f"machine{number}"
        folder.mkdir(exist_ok=True)
        return url, {"TMPDIR": str(folder)}

    monkeypatch.setattr(tempfile, "tempdir", None)
    return on


def at_address(on: Callable[[int], tuple[str, dict[str, str]]], numbers: Iterable[int], scopes: int = 1, **more: str) -> list[list[str]]:
    """Ranks of a job, each on a machine of its own, which send their records when they have them."""

    def begin(number: int) -> list[str]:
        url, own = on(number)
        os.environ.update({**JOB, **own, "RANK": str(number), **more})
        tempfile.tempdir = None
        found = []
        for _ in range(scopes):
            found.append(settle(Folder.of(url), "train"))
            (Remote(url) / found[-1].path.name).put(found[-1].record_name, b"{}")
        return [one.path.name for one in found]

    return in_processes([partial(begin, number) for number in numbers])


def test_ranks_on_several_machines_meet_at_an_address(stores: Callable[[int], tuple[str, dict[str, str]]]) -> None:
    """Where no claim can be made: in the order of their scopes, and the next job of the same name beside them."""
    found = at_address(stores, range(3), scopes=2)
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 2 and found[0][0].endswith("-train")
    again = at_address(stores, range(2))
    assert again[0] == again[1] and again[0][0] not in found[0]
    assert at_address(stores, [0], MASTER_PORT="1")[0][0] not in {*found[0], *again[0]}


def test_at_an_address_a_job_whose_launcher_is_gone_is_not_joined(stores: Callable[[int], tuple[str, dict[str, str]]]) -> None:
    """By the machine on which it was; elsewhere the time tells."""
    ((first,),) = in_process(lambda: at_address(stores, [0]))
    time.sleep(0.05)
    ((late,), (early,)) = in_process(lambda: [*at_address(stores, [1]), *at_address(stores, [0])])
    assert late == early != first
    began = Path(stores(0)[0].removeprefix("file://")) / early / ".began"
    claim = {"launcher": "elsewhere-1-1", "at": time.time() - 4000.0}
    began.write_text(json.dumps(claim))
    assert at_address(stores, [2])[0][0] not in (first, early)


@pytest.mark.parametrize(("job", "other", "joins"), [("job", "1", True), ("none", "1", False), ("none", "0", True)])
def test_ranks_that_are_started_again_belong_to_the_run(tmp_path: Path, job: str, other: str, joins: bool) -> None:
    """torchelastic starts the ranks again and counts it, hours later perhaps, and at another port: that tells only what has no name."""
    attempts = []
    for count, port in (("0", "0"), ("1", other)):
        given = {"TORCHELASTIC_RUN_ID": job, "TORCHELASTIC_RESTART_COUNT": count, "MASTER_PORT": port}
        attempts.append(in_processes([rank(tmp_path, number, **given) for number in range(2)]))
        age_claims(tmp_path, place.LATE + 60)
    (first, again) = ({name for (name,) in attempt} for attempt in attempts)
    assert len(first) == len(again) == 1 and (first == again) == joins
    written = {path.name for path in (tmp_path / next(iter(again))).glob("history.*")}
    assert {f"history.rank{number}.attempt-2.jsonl" for number in range(2)} <= written


def test_another_job_of_that_name_has_a_run_of_its_own(tmp_path: Path) -> None:
    given = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0"}
    assert in_process(rank(tmp_path, 0, **given)) != in_process(rank(tmp_path, 0, **given))


@pytest.mark.parametrize(("seconds", "joins"), [(20, True), (place.LATE + 60, False)])
def test_a_rank_may_be_late_but_not_by_a_job(tmp_path: Path, seconds: float, joins: bool) -> None:
    """Twenty seconds are nothing; a claim that is older than the rank's own process by far was another job's."""
    (first,) = in_process(rank(tmp_path, 0))
    age_claims(tmp_path, seconds)
    (second,) = in_process(rank(tmp_path, 1))
    assert (first == second) is joins


def age_claims(folder: Path, seconds: float) -> None:
    for path in (folder / CLAIMS).iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


@pytest.mark.parametrize(("seconds", "joins"), [(0, True), (place.APART + 60, False)])
def test_ranks_of_several_machines_meet(tmp_path: Path, seconds: float, joins: bool) -> None:
    """Nobody here can ask after their launcher; it began about when ours did, or it is that of an earlier job."""
    ((first,),) = in_process(lambda: in_processes([rank(tmp_path, 0)]))
    (path,) = (tmp_path / CLAIMS).iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "launcher": "0badcafe-17-4711"}))
    age_claims(tmp_path, seconds)
    ((second,),) = in_process(lambda: in_processes([rank(tmp_path, 1)]))
    assert (first == second) is joins


def test_scopes_in_sequence_meet_in_their_order(tmp_path: Path) -> None:
    """Rank 0 has opened three and closed them before rank 1 comes to its first."""
    first, second = in_process(rank(tmp_path, 0, scopes=3)), in_process(rank(tmp_path, 1, scopes=3))
    assert first == second and len(set(first)) == 3


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"directory": "../out", "run": "x"}', b'{"directory": 3}', b"[" * 100_000, b'{"directory": ""}']
)
def test_a_claim_that_makes_no_sense_is_passed_over(tmp_path: Path, content: bytes) -> None:
    """A run begins all the same, inside the folder, and the next rank finds it."""
    ((tmp_path / "runs") / CLAIMS).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in JOB.items():
            patch.setenv(name, value)
        key = shared_key(os.environ, 4)
    (tmp_path / "runs" / CLAIMS / f"{key}.1").write_bytes(content)
    (tmp_path / "runs" / CLAIMS / f"{key}.old").write_bytes(content)
    first, second = (in_process(rank(tmp_path / "runs", number)) for number in range(2))
    assert first == second and [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize("lacking", ["hardlink_to", "symlink_to"])
def test_a_disk_without_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    """Claims are made otherwise, and `latest` is a line of text."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, lacking, refused)
    found = in_processes([rank(tmp_path, number) for number in range(4)])
    assert len({name for (name,) in found}) == 1 and latest(tmp_path) == tmp_path / found[0][0]
    assert (tmp_path / "latest").is_symlink() is (lacking == "hardlink_to")
    (again,) = in_process(rank(tmp_path, 0))
    assert latest(tmp_path) == tmp_path / again


KEYS: list[tuple[dict[str, str], int, bool]] = [
    ({}, 1, False),
    ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, 1, False),  # torchrun with one process
    ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, 2, True),
    ({"SLURM_JOB_ID": "7"}, 1, False),  # a sweep of single processes
    ({"SLURM_JOB_ID": "7"}, 8, True),
    ({}, 2, True),  # mp.spawn with an address of its own
    ({"NANSCOPE_RUN": "mine"}, 1, True),
]


@pytest.mark.parametrize(("environ", "world", "shared"), KEYS)
def test_who_belongs_together(environ: dict[str, str], world: int, shared: bool) -> None:
    """A process that trains alone does, with nobody, unless it is said."""
    assert (shared_key(environ, world) is not None) is shared


@pytest.mark.parametrize("changed", SHARED)
def test_whatever_tells_two_jobs_apart_is_in_the_key(changed: str) -> None:
    """Each of the variables that launchers set, but for where the ranks of an elastic job meet: by its name, if it has one."""
    environ = dict.fromkeys(SHARED, "1") | {place.ELASTIC: place.UNNAMED}
    assert shared_key(environ, 2) != shared_key({**environ, changed: "2"}, 2)


class Trainer:
    args = state = None


NAMES = [
    (["train.py", "--lr", "1"], (), "train"),
    (["/a/b/grpo run.v2.py"], (), "grpo_run.v2"),
    (["/a/package/__main__.py"], (), "package"),
    (["-c"], (), "run"),
    (["-c"], (3, Trainer()), "Trainer"),
    (["/x/ipykernel_launcher.py"], (Trainer(),), "Trainer"),
    (["train.py"], (Trainer(),), "train"),
    ([], (), "run"),
    (["../../.."], (), "run"),
    (["a" * 99 + ".py"], (), "a" * 40),
    (["ночь.py"], (), "run"),
]


@pytest.mark.parametrize(("argv", "targets", "name"), NAMES)
def test_a_run_is_called_as_its_script(argv: list[str], targets: tuple[Any, ...], name: str) -> None:
    """Or as its trainer, where nobody gave the script a name; a name is one plain part of a path."""
    assert name_of(argv, targets) == name


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    """When the next run begins: in the runs of the folder, of dead processes of ours only."""
    earlier = settle(Folder.of(tmp_path), "train").path
    dead = in_process(mark)
    gone, kept = earlier / f".nanscope-{dead}-abc.tmp", [earlier / f".nanscope-{mark()}-abc.tmp", earlier / ".other.tmp"]
    for path in (gone, *kept):
        path.write_bytes(b"half")
    settle(Folder.of(tmp_path), "train")
    assert not gone.exists() and all(path.exists() for path in kept)


TORCHRUN = """
import os, sys, time
from pathlib import Path
from nanscope.snapshot.runs import Folder
from nanscope.watching.place import settle
rank, count = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
time.sleep(0.3 * int(rank))
path = settle(Folder.of(Path(sys.argv[1])), "train").path
(path / f"was-here.{rank}.{count}").touch()
sys.exit(1 if count == "0" else 0)
"""


def test_under_torchrun(tmp_path: Path) -> None:
    """Two ranks, a failure, and the restart: one directory, with both ranks of each attempt."""
    (tmp_path / "train.py").write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run([*command, str(tmp_path / "train.py"), str(tmp_path / "runs")], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    attempts = {path.name.removeprefix("was-here."): path.parent for path in tmp_path.glob("runs/2*/was-here.*")}
    assert attempts["0.1"] == attempts["1.1"] == (attempts.get("0.0") or attempts["1.0"])
    assert len(runs_in(tmp_path / "runs")) == 1


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """For whoever asked; nothing is left there."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError):
        settle(Folder.of(tmp_path / "file" / "runs"), "train")


def test_the_place_says_whether_others_write_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of several is told with what it says."""
    assert not settle(Folder.of(tmp_path), "x").shared
    for name, value in {**JOB, "RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    found = settle(Folder.of(tmp_path), "x")
    assert found.shared and found.rank == 3
