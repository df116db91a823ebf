"""What other tools say of the same failing scripts, and what they cost: writes docs/beside.md.

    python tests/benchmarks/beside.py docs/beside.md [--rounds N]      # msprobe is there if mindstudio-probe is installed

The scripts are those of the gallery, one for each cause, the demo, and every tenth of `tests/healthy`. Each tool is used as its documentation
says, on the script as it stands, in a process of its own. An answer is right where the statement that the tool points at is the one that the
script states; where a tool shows a stack, that is the innermost line of the script. For the cost the tools take turns, each in a fresh
process with the model and the step of `nanscope bench 24m`, and a ratio is that of the same round.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from importlib import metadata, util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
INCIDENTS, HEALTHY = ROOT / "tests" / "incidents", ROOT / "tests" / "healthy"
sys.path[:0] = [str(ROOT / "docs"), str(INCIDENTS), str(Path(__file__).parent)]

import gallery  # noqa: E402
import new  # noqa: E402

import nanscope  # noqa: E402
from nanscope import demo  # noqa: E402
from nanscope.bench import tools  # noqa: E402
from nanscope.bench.measure import Quartiles, Seconds, ratios, rotated, seconds_of  # noqa: E402
from nanscope.bench.steps import grpo  # noqa: E402

DEMO = Path(demo.__file__)
DEMO_LINE = "per_token_kl = torch.exp(ref_log_ratio) - ref_log_ratio - 1"
FAILS = "fails: "
TIMED = 3  # steps of a process that are timed, after one that is not


@dataclass(frozen=True)
class Answer:
    """What a tool said of a script. said: its own words, "" if none. line: number of the line of the script that it points at, 0 for none.
    weight: the weight that it points at."""

    said: str = ""
    line: int = 0
    weight: str = ""
    element: tuple[int, ...] | None = None
    masked: bool | None = None
    cause: str = ""
    proven: bool = False


@dataclass
class Told:
    """What an open tool has found so far. file: of the script. stepped: to be called after each step, where the tool wants that."""

    file: str
    answer: Answer = Answer()
    stepped: Callable[[], None] = lambda: None


# -- the tools ---------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def bare(model: nn.Module, told: Told) -> Iterator[None]:
    """Nothing at all."""
    yield


@contextlib.contextmanager
def watched(model: nn.Module, told: Told) -> Iterator[None]:
    """nanscope as it comes; while it is timed without its deep looks, which are one step in a hundred and the first three."""
    options = {} if told.file else {"deep_every": 0}
    with tempfile.TemporaryDirectory() as folder, nanscope.watch(out=folder, **options) as scope:
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
    if scope.verdict.incidents:
        first = scope.verdict.incidents[0]
        origin = first.origin
        proven = any(fix.executed and fix.proven for fix in first.fixes)
        told.answer = Answer(str(scope.verdict), origin.line or 0, "", origin.index, origin.masked, str(first.cause), proven)


@contextlib.contextmanager
def anomaly(model: nn.Module, told: Told) -> Iterator[None]:
    """torch's anomaly mode. It raises, and shows in a warning where forward made the node."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with tools.anomaly():
                yield
        except RuntimeError as error:
            shown = [str(warning.message) for warning in caught if "Error detected in" in str(warning.message)]
            told.answer = Answer(str(error), innermost(shown[0], told.file) if shown else 0)


@contextlib.contextmanager
def debug_mode(model: nn.Module, told: Told) -> Iterator[None]:
    """torch's DebugMode with a hook on every call.

    It takes the first call that made NaN of no NaN, or an infinity of finite numbers, which is kinder than the first result that is bad.
    """
    with tools.dispatched() as mode:
        told.stepped = mode.reset
        try:
            yield
        finally:
            bad = [call for call in mode.operators if getattr(call, "record", None)]
            for call in sorted(bad, key=lambda call: not call.record["born"])[:1]:
                stack = getattr(call, "fwd_stack_trace", None) or getattr(call, "stack_trace", None) or ""
                told.answer = Answer(str(call.op), innermost(stack, told.file))


@contextlib.contextmanager
def underflow_overflow(model: nn.Module, told: Told) -> Iterator[None]:
    """transformers' detector, which prints the last calls of modules and raises."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            with tools.underflow_overflow(model):
                yield
        except ValueError as error:
            if "inf/nan detected" not in str(error):
                raise
            words = printed.getvalue()
            told.answer = Answer(words.partition("\n\n")[0], frame_of(error, told.file), weight=_weight_in(words))


def _weight_in(words: str) -> str:
    """The weight that DebugUnderflowOverflow calls bad: its name stands before `has`, that of its module over the last frame."""
    bad = re.search(r"^(?!input|output)(\w+) has (?:nans|infs)$", words, re.MULTILINE)
    frames = re.findall(r"^ {18}(\S*) \w+$", words, re.MULTILINE)
    return f"{frames[-1]}.{bad[1]}" if bad and frames else ""


@contextlib.contextmanager
def finite_hook(model: nn.Module, told: Told) -> Iterator[None]:
    """The hook that people write themselves: is what a module returns finite?"""
    try:
        with tools.finite_hook(model):
            yield
    except tools.NotFinite as error:
        told.answer = Answer(str(error), frame_of(error, told.file))


@contextlib.contextmanager
def msprobe(model: nn.Module, told: Told) -> Iterator[None]:
    """MindStudio's probe: the statistics of all calls and modules are dumped, and its `overflow_check` reads them."""
    from msprobe.overflow_check.analyzer import OverFlowCheck  # what `msprobe overflow_check` calls
    from msprobe.pytorch import PrecisionDebugger

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lists = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
        config = {"task": "statistics", "dump_path": str(folder / "dump"), "rank": [], "step": [], "level": "mix", "statistics": lists}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        debugger = PrecisionDebugger(config_path=str(folder / "config.json"))

        def stepped() -> None:
            debugger.stop()
            debugger.step()
            debugger.start(model=model)

        told.stepped = stepped
        debugger.start(model=model)
        try:
            yield
        finally:
            debugger.stop()
            debugger.step()
        if told.file:
            told.answer = _checked(OverFlowCheck, folder, told.file)


def _checked(check: Any, folder: Path, file: str) -> Answer:
    for step in sorted((folder / "dump").glob("step*"), key=lambda path: int(path.name[4:])):
        check(str(step), str(folder / "output")).analyze()
        for found in (folder / "output").glob("*.json") if (folder / "output").exists() else ():
            first = next(iter(json.loads(found.read_text(encoding="utf-8")).values()))[0]
            stack = _stack_of(first["op_name"].replace("backward", "forward"), step) if not first["stack_info"] else first["stack_info"]
            frames = [re.match(r"File (.+?), line (\d+)", frame) for frame in stack]
            lines = [int(frame[2]) for frame in frames if frame and frame[1] == file]
            return Answer(first["op_name"], lines[0] if lines else 0)
    return Answer()


def _stack_of(call: str, step: Path) -> list[str]:
    """Where forward made what a call of backward is of, which one has to look up in another file of the dump."""
    (stacks,) = step.glob("*/stack.json")
    return next((stack for calls, stack in json.loads(stacks.read_text(encoding="utf-8")).values() if call in calls), [])


def innermost(stack: str, file: str) -> int:
    """The last line of the script in a printed stack, 0 if there is none."""
    lines = re.findall(rf'File "{re.escape(file)}", line (\d+)', stack)
    return int(lines[-1]) if lines else 0


def frame_of(error: BaseException, file: str) -> int:
    """The last line of the script in what an exception went through, but for the hooks of this file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return lines[-1] or 0 if lines else 0


TOOLS: dict[str, Callable[[nn.Module, Told], contextlib.AbstractContextManager[None]]] = {
    "nanscope": watched,
    "detect_anomaly": anomaly,
    "DebugMode + hook": debug_mode,
    "DebugUnderflowOverflow": underflow_overflow,
    "isfinite hook": finite_hook,
    "msprobe": msprobe,
}


# -- the scripts -------------------------------------------------------------------------------------------------------------------------


def answer(tool: str, path: Path) -> Answer:
    """Run a script under a tool. What it raises itself stands in the answer."""
    told = Told(str(path))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stderr(io.StringIO()):
        try:
            if path == DEMO:
                _dying_demo(TOOLS[tool], told)
            else:
                module = new.load(path)
                state = module.build() if hasattr(module, "build") else None
                with TOOLS[tool](model_of(state), told):
                    module.run(state) if state is not None else module.run()
        except Exception as error:
            return Answer(f"{FAILS}{type(error).__name__}: {error}"[:300])
        finally:
            torch.use_deterministic_algorithms(False)
            torch.set_default_dtype(torch.float32)
            torch.autograd.set_detect_anomaly(False)
    return told.answer


def model_of(state: Any) -> nn.Module:
    """The models of a script as one, which is what a person would hand over."""
    found = [value for value in vars(state).values() if isinstance(value, nn.Module)] if state is not None else []
    if isinstance(getattr(state, "model", None), nn.Module):
        return state.model  # type: ignore[no-any-return]
    return found[0] if len(found) == 1 else nn.ModuleList(found)


def _dying_demo(tool: Callable[[nn.Module, Told], contextlib.AbstractContextManager[None]], told: Told) -> None:
    """The demo, opened two steps before the one that it dies in: its steps before are many, and under some tools they take minutes."""
    dies = next(record.step for record in demo.train(demo.DemoSettings()) if not abs(record.loss) < float("inf"))
    records = demo.train(demo.DemoSettings())
    assert any(record.step == dies - 3 for record in records)
    policy = records.gi_yieldfrom.gi_frame.f_locals["policy"]  # type: ignore[attr-defined]
    with tool(policy, told):
        for record in records:
            if record.step == dies:
                break


def is_right(path: Path, found: Answer) -> bool:
    """Does the line belong to the statement that the script states, or is it the weight that it states?"""
    if found.weight and found.weight in stated_of(path).variable:
        return True
    line = found.line
    texts = path.read_text(encoding="utf-8").splitlines()
    stated = {DEMO_LINE} if path == DEMO else set(stated_of(path).line)
    around = [
        node for node in ast.walk(ast.parse("\n".join(texts))) if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno
    ]
    smallest = min(around, key=lambda node: (node.end_lineno or 0) - node.lineno, default=None)
    return smallest is not None and any(text.strip() in stated for text in texts[smallest.lineno - 1 : smallest.end_lineno])


def stated_of(path: Path) -> Any:
    module: ModuleType = new.load(path)
    return module.EXPECTED


def answers_of(tool: str, paths: list[Path]) -> list[Answer]:
    """What a tool says of scripts, in a process of its own; msprobe in one for each, since it stays in torch once it is there."""
    found: list[Answer] = []
    for some in [[path] for path in paths] if tool == "msprobe" else [paths]:
        done = run("--answers", tool, *map(str, some))
        found += [Answer(**{**row, "element": None if row["element"] is None else tuple(row["element"])}) for row in json.loads(done)]
    return found


def run(*arguments: str) -> str:
    """The last line that this script prints when it is called so."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{arguments}: {done.stderr}")
    return done.stdout.strip().splitlines()[-1]


# -- the cost ----------------------------------------------------------------------------------------------------------------------------


def time_of(tool: str) -> list[Seconds]:
    """Some steps under a tool."""
    work, told = grpo("cpu"), Told("")
    with {**TOOLS, "bare": bare, "bare again": bare}[tool](work.model, told):
        times = []
        for _ in range(1 + TIMED):

            def step() -> None:
                work.step()
                told.stepped()

            times.append(seconds_of(step))
    return times[1:]


Costs = dict[str, tuple[Quartiles, Quartiles]]  # ratios to bare: by the clock, by processor time


def costs(wanted: list[str], rounds: int) -> Costs:
    """Time all tools by turns."""
    names = ["bare", *wanted, "bare again"]
    times: dict[str, list[list[Seconds]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in rotated(names, turn):
            times[name].append([Seconds(*pair) for pair in json.loads(run("--time", name))])
    wall, cpu = ({name: [[getattr(s, kind) for s in group] for group in times[name]] for name in names} for kind in ("wall", "cpu"))
    return {name: (ratios(wall[name], wall["bare"]), ratios(cpu[name], cpu["bare"])) for name in names[1:]}


# -- the page ----------------------------------------------------------------------------------------------------------------------------

HEALTHY_EVERY, OTHERS_EVERY = 10, 11

HEAD = """# Beside other tools

{gallery} failing scripts, one for each [cause](gallery.md) and the demo; {others} more, every eleventh of the other scripts of `tests/incidents`; and
{healthy} scripts that look frightening and are healthy. Each tool is used as its documentation says, on the script as it stands. *Line* is the statement
in which the first harmful value is made; where a tool shows a stack, its innermost line of the script counts. *Alarms* are healthy scripts that it calls
bad, or stops.

{summary}

Beside the line nanscope is right about
{told},
where the scripts state it. The others say nothing of these four.

**Read it with care.** All these scripts are nanscope's own tests: it was built on them, and the others never saw them. Its tests require
the right answer on each of the first {gallery}. Most of those go wrong in a loss, outside of modules, where tools for the inside of a model have nothing to look at.

## When another tool is enough

- **`torch.autograd.detect_anomaly`** is one line, and is in torch. It finds a NaN in a gradient, and shows the forward line of the node that returned it:
  the line you want where the trap is in backward (`where` after `exp`, a square root at 0). Where forward was bad already it is a line further on. Infinities
  are none to it. It stops the run.
- **`DebugMode` with a hook** of ten lines names the line nearly as often as nanscope, if you know what to ask for: *NaN out of no NaN, infinity out of
  finite numbers*. If the script can be run again, and may take four times as long, that is enough. It is also the tool to compare two runs with
  (`log_tensor_hashes`). It reads every tensor back and holds every call. What is not finite on purpose, a mask of −inf or a step that a GradScaler skips,
  it shows as well.
- **`DebugUnderflowOverflow`** and **a hook that asks `isfinite`** look at what modules take and return. Where activations in half precision grow from layer to
  layer the former is the better picture: it prints the largest number of each of the last 21 modules before the one that overflowed. Of weights it says
  which one is bad. Both stop the run.
- **msprobe** dumps statistics of every call, and `msprobe overflow_check` finds the first bad one of them afterwards, with its stack, over many ranks. It is made
  for NPUs, and where a run on another device differs it is the one to take: `msprobe compare` lays two dumps side by side. It wants to know which steps to
  dump; here it dumped all.

## Script by script

✓ the line · *seen*: it says that something is bad, and points elsewhere or nowhere · – silent · ! stopped by an error of its own

{table}

## How it was measured

{machine}.

A step is a GRPO step of a transformer of 24 M parameters on one thread, that of `nanscope bench 24m`. The tools take turns, {rounds} rounds, each
in a fresh process: one step that is not timed, {timed} that are. Ratios are to bare in the same round, medians and quartiles, by processor time, which other
work on the machine stretches less; *bare again* is the noise. nanscope is timed without its [deep looks](costs.md#what-it-costs), the first three steps and one
in a hundred. The demo was opened two steps before it dies. `DebugMode` records stacks (`record_stack_trace=True`). msprobe is `mindstudio-probe` of PyPI, with
`task: statistics`, `level: mix`, on a CPU: it says that no CANN is there, and goes on.

This page is written by `python tests/benchmarks/beside.py docs/beside.md`.
"""


def summary(
    tools: list[str], sets: list[tuple[list[Path], dict[str, list[Answer]]]], alarms: dict[str, int], healthy: int, cost: Costs
) -> str:
    """The table of all tools."""
    heads = [f"| of {len(paths)}: notices | line " for paths, _ in sets]
    rows = [f"| tool {''.join(heads)}| alarms of {healthy} | a step takes |", "| --- " + "| --- | --- " * len(sets) + "| --- | --- |"]
    for tool in tools:
        counts = []
        for paths, answers in sets:
            noticed = sum(bool(found.said) and not failed(found) for found in answers[tool])
            counts += [noticed, sum(map(is_right, paths, answers[tool]))]
        name = f"**{tool}**" if tool == "nanscope" else tool
        rows.append(f"| {name} | {' | '.join(map(str, counts))} | {alarms[tool]} | × {cost[tool][1].show(2)} |")
    rows.append(f"| *bare again* |{' |' * (2 * len(sets) + 1)} × {cost['bare again'][1].show(2)} |")
    return "\n".join(rows)


def told_beside(paths: list[Path], answers: list[Answer]) -> str:
    """How often nanscope is right where the scripts state something."""
    pairs = [(stated_of(path), found) for path, found in zip(paths, answers, strict=True) if path != DEMO]
    element = [found.element == stated.index for stated, found in pairs if stated.index is not None and stated.phase[0] != "weights"]
    masked = [found.masked == stated.masked for stated, found in pairs if stated.masked is not None]
    cause = [found.cause in stated.cause for stated, found in pairs]
    proven = sum(found.proven for _, found in pairs)
    counted = [f"the {name} {sum(right)} of {len(right)}" for name, right in (("element", element), ("cause", cause))]
    return f"{counted[0]}, masked or not {sum(masked)} of {len(masked)}, {counted[1]}, and a fix that was run and heals {proven} of {len(pairs)}"


def table(tools: list[str], paths: list[Path], answers: dict[str, list[Answer]]) -> str:
    """What each tool said of each script."""
    rows = [f"| script | {' | '.join(tools)} |", "| --- " * (1 + len(tools)) + "|"]
    for number, path in enumerate(paths):
        rows.append(f"| `{path.stem}` | {' | '.join(cell(path, answers[tool][number]) for tool in tools)} |")
    return "\n".join(rows)


def cell(path: Path, found: Answer) -> str:
    return "!" if failed(found) else "–" if not found.said else "✓" if is_right(path, found) else "*seen*"


def failed(found: Answer) -> bool:
    """Did the tool stop by an error of its own?"""
    return found.said.startswith(FAILS)


def machine(tools: list[str]) -> str:
    """Date, machine and versions."""
    versions = {"torch": "torch", "transformers": "transformers", "msprobe": "mindstudio-probe"}
    named = [f"{name} {metadata.version(package)}" for name, package in versions.items() if name != "msprobe" or name in tools]
    kind = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores that other work shares"
    return f"{date.today()}, {kind}; Python {platform.python_version()}, nanscope {nanscope.__version__}, {', '.join(named)}"


def page(rounds: int) -> str:
    """Run everything."""
    tools = [tool for tool in TOOLS if tool != "msprobe" or util.find_spec("msprobe")]
    shown = [*(path for path in gallery.SOURCES.values() if path != gallery.RANKS), DEMO]
    scripts = [path for path in sorted(INCIDENTS.glob("*.py")) if path.stem not in ("new", "expected") and path not in shown]
    others, healthy = scripts[::OTHERS_EVERY], sorted(HEALTHY.glob("*.py"))[::HEALTHY_EVERY]
    answers, more, calm = ({tool: answers_of(tool, paths) for tool in tools} for paths in (shown, others, healthy))
    alarms = {tool: sum(bool(found.said) for found in calm[tool]) for tool in tools}
    every = [*shown, *others], [*answers["nanscope"], *more["nanscope"]]
    return HEAD.format(
        gallery=len(shown),
        others=len(others),
        healthy=len(healthy),
        summary=summary(tools, [(shown, answers), (others, more)], alarms, len(healthy), costs(tools, rounds)),
        told=told_beside(*every),
        table=table(tools, shown, answers),
        machine=machine(tools),
        rounds=rounds,
        timed=TIMED,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, nargs="?", help="the file that is written")
    parser.add_argument("--rounds", type=int, default=10, help="of the cost: processes for each tool (10)")
    parser.add_argument("--answers", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--time", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if args.answers:
        print("\n" + json.dumps([asdict(answer(args.answers[0], Path(path))) for path in args.answers[1:]]))
    elif args.time:
        print("\n" + json.dumps(time_of(args.time)))
    else:
        args.page.write_text(page(args.rounds), encoding="utf-8")


if __name__ == "__main__":
    main()
