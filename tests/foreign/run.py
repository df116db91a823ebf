"""Runs the tests of others bare and inside `nanscope.watch(deep_every=1)`, and compares: no outcome may change, and each incident must be a true one.

    python tests/foreign/run.py torchrl=~/src/rl torch-autograd=~/src/pytorch stable-baselines3 --page docs/foreign.md

    torchrl             1238 tests: 1150 pass either way, 0 differ, 0 incidents, 2.1 times as long

NAME=CHECKOUT: a suite of `suites.py`, and where its tests lie; CHECKOUT@REVISION where the checkout does not tell its version. A NAME alone is fetched by pip, where the source distribution holds the tests.
`--python` names the interpreter that has the framework, torch, pytest, and what nanscope needs. TRL's tests need what `tiny_hub.py` makes.

What differs is run again, without the other tests: what is then as before is unsteady. What still differs is probed: does it also under a
dispatch mode that only passes calls on, with nanscope not there at all? Or only while tensors are held? What is left, and an incident that
no row of `suites.py` says to be true, is an open question, and the exit status is 1. Results stay in `--work`, one file a suite, and the
page is made of all of them; beside them a folder of the snapshots of a suite's incidents.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import page
from suites import DEEP, KNOWN, SUITES, TRUE, Suite, said_of

HERE = Path(__file__).resolve().parent
NEVER = {"outcome": "absent", "raised": "", "seconds": 0.0, "told": None}
DIED = {**NEVER, "outcome": "died"}
PROBES = {  # what a test is put under → why it differs, if it ends there as it does watched, or as it does bare
    "mode": ("watched", "torch does the same under any dispatch mode, without nanscope"),
    "holding-nothing": ("bare", "the recording holds a tensor that the test wants to be gone; with `budget=1` it is"),
}
SLOW = "watched it takes longer than a test may"
Lines = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Bench:
    """Where one suite is run. revision: of the checkout, "" if it tells its version. python: the interpreter. work: for what is written."""

    suite: Suite
    checkout: Path
    revision: str
    python: str
    work: Path

    def file(self, part: str) -> Path:
        """Return a file of this suite's."""
        return self.work / f"{self.suite.name}.{part}"

    def roots(self) -> list[str]:
        """Return the folders of the checkout that its modules are imported from."""
        return [str(self.checkout), *(str(self.checkout / root) for root in self.suite.roots)]

    def pytest(self, *args: str) -> None:
        """Run pytest in the checkout."""
        path = os.pathsep.join([str(HERE), str(HERE.parents[1]), *self.roots()])
        variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [self.python, "-m", "pytest", "-q", "-p", "watched_tests", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", "."]
        command.append("--continue-on-collection-errors")
        command += [*self.suite.what, "--longest", str(self.suite.longest), *args]
        with self.file("log").open("a") as log:
            subprocess.run(command, cwd=self.checkout, env=variables, stdout=log, stderr=log, check=False)

    def collect(self, every: int) -> list[str]:
        """Return the tests, one in `every`."""
        listed = self.file("collected")
        listed.unlink(missing_ok=True)
        self.pytest("--collect-only", "--told", os.devnull, "--list-ids", str(listed))
        return listed.read_text(encoding="utf-8").splitlines()[::every] if listed.exists() else []

    def run(self, ids: list[str], under: str) -> Lines:
        """Run tests, going on behind one that takes the process with it."""
        found: Lines = {}
        left = ids
        while left:
            told, only = self.file("told"), self.file("only")
            told.write_text("")
            only.write_text("\n".join(left), encoding="utf-8")
            self.pytest("--told", str(told), "--only-ids", str(only), "--under", under, "--keep", str(self.file("incidents")))
            for line in map(json.loads, told.read_text(encoding="utf-8").splitlines()):
                found[line["id"]] = DIED if "begun" in line else line
            rest = [name for name in left if name not in found]
            left = rest if len(rest) < len(left) else []
        return {name: found.get(name, NEVER) for name in ids}

    def versions(self) -> list[str]:
        """Return the versions of the tests, of the package and of torch; the first as the checkout says."""
        code = f"import sys; sys.path[:0] = {self.roots()!r}; import torch, {self.suite.package} as it; print(getattr(it, '__version__', ''), torch.__version__)"
        done = subprocess.run([self.python, "-W", "ignore", "-c", code], cwd=self.checkout, check=True, capture_output=True, text=True)
        package, torch = ["", *done.stdout.split()][-2:]
        own = any(
            (Path(root) / self.suite.package).is_dir() for root in self.roots()
        )  # what is tested lies beside its tests, whatever is installed
        told = [path for name in ("version.txt", "VERSION") if (path := self.checkout / name).exists()]
        of = self.revision or (told[0].read_text(encoding="utf-8").strip() if told else package)
        return [of, of if own else package, torch]


def measure(bench: Bench, every: int) -> page.Result:
    """Run one suite both ways, and ask why where that makes a difference."""
    ids = bench.collect(every)
    bare, watched = bench.run(ids, "nothing"), bench.run(ids, "watch")
    once = [name for name in ids if outcome(bare[name]) != outcome(watched[name])]
    again = {"bare": bench.run(once, "nothing"), "watched": bench.run(once, "watch")}
    differ = [name for name in once if outcome(again["bare"][name]) != outcome(again["watched"][name])]
    slow = {name: SLOW for name in differ if again["watched"][name]["raised"].startswith("TookTooLong")}
    why = slow | {name: words for name in differ if (words := said_of(name, KNOWN))}
    for under, (like, words) in PROBES.items():
        left = [name for name in differ if name not in why]
        probed = bench.run(left, under)
        why |= {name: words for name in left if outcome(probed[name]) == outcome(again[like][name])}
    passed = [name for name in ids if bare[name]["outcome"] == watched[name]["outcome"] == "passed"]
    before, after = (sum(lines[name]["seconds"] for name in passed) for lines in (bare, watched))
    told = {name: line["told"] for name, line in watched.items() if line["told"]}
    return page.Result(
        bench.suite.name, *bench.versions(), every, len(ids), len(passed), sum(said["backwards"] for said in told.values()),
        before, after / before if before else 0.0,
        [page.Differs(n, bare[n]["outcome"], watched[n]["outcome"], watched[n]["raised"], why.get(n, "")) for n in differ],
        [name for name in once if name not in differ],
        [page.Said(name, i["sentence"], said_of(name, TRUE)) for name, said in told.items() for i in said["incidents"]],
        [page.Said(name, gap) for name, said in told.items() for gap in said["gaps"]],
        datetime.now(UTC).date().isoformat(),
        DEEP,
    )  # fmt: skip


def outcome(line: dict[str, Any]) -> tuple[str, str]:
    """Return how a test ended, and the class of what it raised."""
    return line["outcome"], line["raised"].partition(":")[0]


def fetched(suite: Suite, python: str, work: Path) -> Path:
    """Return the source distribution of a suite, unpacked."""
    if not suite.sdist:
        sys.exit(f"{suite.name} needs a checkout: {suite.name}=PATH")
    folder = work / f"{suite.name}.sdist"
    wanted = ["--no-deps", "--no-binary", ":all:", "-d", str(folder), suite.package]
    subprocess.run([python, "-m", "pip", "download", "-q", *wanted], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="NAME[=CHECKOUT]")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the framework")
    parser.add_argument("--every", type=int, help="run one test in so many; by default as the suite's row says")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "nanscope-foreign", help="where results are kept")
    parser.add_argument("--page", type=Path, help="the page to write")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    known = {suite.name: suite for suite in SUITES}
    status = 0
    for named in args.suites:
        name, _, place = named.partition("=")
        path, _, revision = place.partition("@")
        if name not in known:
            sys.exit(f"no suite is called {name}; there are {', '.join(known)}")
        checkout = Path(path).expanduser().resolve() if path else fetched(known[name], args.python, work)
        result = measure(Bench(known[name], checkout, revision, args.python, work), args.every or known[name].every)
        (work / f"{name}.json").write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
        print(page.line(result), flush=True)
        status |= not result.tests or bool(result.open())
    if args.page:
        results = [page.load(path) for name in known if (path := work / f"{name}.json").exists()]
        args.page.write_text(page.render(results), encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
