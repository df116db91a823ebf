"""The directory of a run and its remote folder are kept alike, and training does not wait for it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from nanscope.snapshot.remote import Remote
from nanscope.watching import mirror as module
from nanscope.watching.mirror import Mirror

NUMBER = itertools.count()
HISTORY = "history.rank0.jsonl"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD", 0.02)


@pytest.fixture
def remote() -> Remote:
    return Remote(f"memory://mirror-{next(NUMBER)}/run")


@pytest.fixture
def mirror(tmp_path: Path, remote: Remote) -> Mirror:
    """Of a folder in which rank 0 writes."""
    return Mirror(tmp_path, remote, lambda name: "rank1" not in name, FAILURES.append)


FAILURES: list[OSError] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    FAILURES.clear()


def content(remote: Remote, name: str) -> bytes | None:
    """What is there, None if nothing is."""
    try:
        found: bytes = MemoryFileSystem().cat_file(f"{remote.url.removeprefix('memory:/')}/{name}")
    except FileNotFoundError:
        return None
    return found


def eventually(holds: Callable[[], bool]) -> bool:
    """Does it come to hold within ten seconds?"""
    until = time.monotonic() + 10
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


def test_what_is_written_arrives_by_itself(tmp_path: Path, remote: Remote, mirror: Mirror) -> None:
    """Nobody has to say so; the last state of a file counts, and one that is removed here is removed there."""
    (tmp_path / "run.json").write_bytes(b"1")
    (tmp_path / "step-1.safetensors").write_bytes(b"22")
    assert eventually(lambda: content(remote, "run.json") == b"1" and content(remote, "step-1.safetensors") == b"22")
    (tmp_path / "run.json").write_bytes(b"333")
    (tmp_path / "step-1.safetensors").unlink()
    assert eventually(lambda: content(remote, "run.json") == b"333" and content(remote, "step-1.safetensors") is None)
    assert mirror.flush() == [] and FAILURES == []


def test_files_of_others_and_half_written_ones_are_not_sent(tmp_path: Path, remote: Remote, mirror: Mirror) -> None:
    """Each process sends its own."""
    for name in ("history.rank1.jsonl", ".nanscope-x.tmp", "run.json"):
        (tmp_path / name).write_bytes(b"1\n")
    assert mirror.flush() == []
    assert set(remote.names()) == {"run.json"}


def test_what_another_process_of_the_machine_writes_is_its_own(tmp_path: Path, remote: Remote) -> None:
    """Ranks share the directory: what is newer here is not fetched over, and who ends first removes nothing of the other's."""
    first, second = (Mirror(tmp_path, remote, lambda name, rank=rank: rank in name, FAILURES.append) for rank in ("rank0", "rank1"))
    for name in (HISTORY, "history.rank1.jsonl"):
        (tmp_path / name).write_bytes(b"{}\n")
    assert eventually(lambda: content(remote, HISTORY) == content(remote, "history.rank1.jsonl") == b"{}\n")
    remote.put("run.rank2.json", b"elsewhere")
    with (tmp_path / "history.rank1.jsonl").open("ab") as file:
        first.fetch()
        file.write(b"{}\n")
    second.fetch()
    first.flush()
    first._leave()
    assert (tmp_path / "history.rank1.jsonl").read_bytes() == b"{}\n{}\n" and not (tmp_path / HISTORY).exists()
    second.flush()
    second._leave()
    assert not tmp_path.exists() and content(remote, "history.rank1.jsonl") == b"{}\n{}\n" and content(remote, HISTORY) == b"{}\n"
    assert content(remote, "run.rank2.json") == b"elsewhere" and FAILURES == []


def test_what_a_killed_process_came_not_to_send_is_sent_by_who_began_the_run(tmp_path: Path, remote: Remote) -> None:
    """Those that it began leave their files to it; what they have sent is not sent again."""
    led = Mirror(tmp_path, remote, lambda name: "rank1" in name, FAILURES.append, led=True)
    (tmp_path / "step-000001.rank1.safetensors").write_bytes(b"tensors")
    led.flush()
    led._leave()
    (tmp_path / "step-000002.rank1.safetensors").write_bytes(b"after")
    (tmp_path / "run.rank1.json").write_bytes(b"{}")
    (tmp_path / ".places").mkdir()
    leading = Mirror(tmp_path, remote, lambda name: name == "run.json", FAILURES.append)
    leading.adopts = True
    before = remote.names()["step-000001.rank1.safetensors"]
    assert (
        leading.flush() == []
        and content(remote, "step-000002.rank1.safetensors") == b"after"
        and content(remote, "run.rank1.json") == b"{}"
    )
    assert remote.names()["step-000001.rank1.safetensors"] == before
    leading._leave()
    assert [path.name for path in tmp_path.iterdir()] == [".places"] and FAILURES == []


def test_a_history_is_sent_in_whole_lines_and_seldom_while_it_grows(
    tmp_path: Path, remote: Remote, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first lines go at once, then once a while, or when it has come to rest; what is left goes when the run ends."""
    path = tmp_path / HISTORY
    path.write_bytes(b"{}\n{")
    assert eventually(lambda: content(remote, HISTORY) == b"{}\n")
    grows = threading.Event()

    def grow() -> None:
        while not grows.is_set():
            with path.open("ab") as file:
                file.write(b"}\n{")
            time.sleep(0.001)

    writer = threading.Thread(target=grow)
    writer.start()
    time.sleep(0.3)
    seen = content(remote, HISTORY)
    grows.set()
    writer.join()
    assert seen is not None and seen.count(b"\n") < path.read_bytes().count(b"\n") / 2
    assert eventually(lambda: content(remote, HISTORY) == path.read_bytes().removesuffix(b"{"))
    with path.open("ab") as file:
        file.write(b"}\n")
    assert mirror.flush() == [] and content(remote, HISTORY) == path.read_bytes()


def test_a_store_that_fails_is_told_once_and_asked_again(
    tmp_path: Path, remote: Remote, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it, and nothing is lost: what it refused is sent when it answers."""
    answers = threading.Event()
    real = MemoryFileSystem.put_file

    def put_file(self: MemoryFileSystem, *args: object, **kwargs: object) -> object:
        if not answers.is_set():
            raise ConnectionError("no route")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    (tmp_path / "run.json").write_bytes(b"1")
    assert eventually(lambda: len(FAILURES) == 1)
    time.sleep(0.1)
    answers.set()
    assert eventually(lambda: content(remote, "run.json") == b"1")
    assert [str(error) for error in FAILURES] == [f"{remote.address('run.json')} cannot be reached (no route)"]


def test_what_could_not_be_sent_is_named(tmp_path: Path) -> None:
    """The end of the block does not wait for a store that never answers, and what was found stays here."""
    mirror = Mirror(tmp_path, Remote("file:///proc/none/of/it"), lambda name: True, FAILURES.append)
    (tmp_path / "run.json").write_bytes(b"1")
    assert mirror.flush() == ["run.json"]
    assert len(FAILURES) == 1
    mirror._leave()
    assert (tmp_path / "run.json").exists()


def test_what_was_sent_is_not_kept_here_when_the_process_ends(tmp_path: Path, remote: Remote) -> None:
    """Also what was written after the last flush, as the page of the verdict is; files of others that were fetched go, too."""
    folder = tmp_path / "run"
    folder.mkdir()
    mirror = Mirror(folder, remote, lambda name: "rank1" not in name, FAILURES.append)
    remote.put("history.rank1.jsonl", b"{}\n")
    mirror.fetch()
    assert (folder / "history.rank1.jsonl").read_bytes() == b"{}\n"
    mirror.flush()
    (folder / "report.html").write_bytes(b"page")
    mirror._leave()
    assert content(remote, "report.html") == b"page"
    assert not folder.exists()


TRAIN = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(6, 4)).pow(2).mean()
    if step == 2:
        loss = torch.log(loss * 0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def nanscope(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line, with a folder of temporary files of its own."""
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    return subprocess.run(
        [sys.executable, "-m", "nanscope", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_run_whose_folder_is_an_address_is_there_whole_and_read_from_there(tmp_path: Path) -> None:
    """Everything that a run in a folder leaves, nothing of it on this machine, and each verb takes the address."""
    (tmp_path / "train.py").write_text(TRAIN)
    url = f"file://{tmp_path}/store/runs"
    done = nanscope(tmp_path, "run", "--out", url, "train.py")
    assert done.returncode == 3, done.stderr
    (run,) = (path for path in (tmp_path / "store" / "runs").iterdir() if path.is_dir())
    assert {path.name for path in run.iterdir()} == {
        "run.json", "history.rank0.jsonl", "step-000003.rank0.safetensors", "step-000004.rank0.safetensors", "report.html", "report.png",
    }  # fmt: skip
    assert not [path for path in (tmp_path / "tmp").rglob("*") if path.is_file() and path.name != "latest"]
    file = f"{url}/{run.name}/step-000003.rank0.safetensors"
    assert f"nanscope replay {file}" in done.stderr
    assert json.loads((run / "run.json").read_text())["status"] == "non-finite"
    report = nanscope(tmp_path, "report", url, "-o", "report.json")
    assert report.returncode == 3 and "the latest of 1 in file://" in report.stderr
    assert json.loads((tmp_path / "report.json").read_text())["incidents"][0]["snapshot"] == file
    assert nanscope(tmp_path, "replay", file).returncode == 3
    assert nanscope(tmp_path, "inspect", file).returncode == 0
    assert nanscope(tmp_path, "runs", url, "--json", "runs.json").returncode == 0
    (listed,) = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert (listed["status"], listed["snapshots"], listed["path"]) == ("non-finite", 2, f"{url}/{run.name}")


def test_an_address_that_cannot_be_written_is_refused_before_the_script_starts(tmp_path: Path) -> None:
    """In one line, with what the store said."""
    (tmp_path / "train.py").write_text("print('began')")
    for url in ("file:///proc/nobody/runs", "nosuchstore://bucket/runs"):
        done = nanscope(tmp_path, "run", "--out", url, "train.py")
        assert done.returncode == 1 and "began" not in done.stdout
        assert done.stderr.count("\n") == 1 and url in done.stderr
