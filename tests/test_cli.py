"""The command line: exit statuses, one-line errors, what is written, and that help needs no torch."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner
from verdicts import ppo_step

import nanscope
from nanscope import __main__ as cli
from nanscope.snapshot.checksum import seal
from nanscope.snapshot.file import save
from nanscope.snapshot.header import SCHEMA_VERSION

HEALTHY = """
import sys, torch
w = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    w(torch.ones(2)).sum().backward()
    optimizer.step()
print("args", sys.argv[1:])
"""

FAILING = """
import torch
logps = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
old_logps = torch.tensor([[-1.0, -200.0, -0.5]])
mask = torch.tensor([[1.0, 0.0, 1.0]])
advantages = torch.tensor([[-1.0]])
log_ratio = logps - old_logps
ratio = torch.exp(log_ratio)
loss = -(ratio * advantages * mask).sum() / mask.sum()
loss.backward()
"""


def spawn(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`nanscope …` in a process of its own."""
    command = [sys.executable, "-m", "nanscope", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, env={**os.environ, "COLUMNS": "120"})


def call(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has loaded torch already: for a verb that leaves nothing of itself in the interpreter."""
    out, err = io.StringIO(), io.StringIO()
    command = ["nanscope", *map(str, args)]
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.object(sys, "path", [*sys.path]),
        mock.patch.dict(os.environ, COLUMNS="120"),
        chdir(cwd or Path.cwd()),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as left,
    ):
        cli.main()
    return subprocess.CompletedProcess(command, left.value.code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with one bad step in it."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "fails.py").write_text(FAILING)
    done = spawn("run", "--out", folder / "run", "--json", folder / "verdict.json", folder / "fails.py")
    assert done.returncode == 3, done.stderr
    return folder


def snapshot_of(run_dir: Path) -> Path:
    return next((run_dir / "run" / "latest").glob("*.safetensors"))


def test_help_is_one_screen_with_an_example_and_without_torch() -> None:
    """Every command explains itself in at most 30 lines, shows an example, and does not load torch for it."""
    for command in ("run", "replay", "report", "runs", "inspect", "demo", "atlas", "precision", "check", "bench"):
        result = CliRunner().invoke(cli.app, [command, "--help"])
        assert result.exit_code == 0
        assert len(result.output.splitlines()) <= 30
        assert "Example: nanscope " + command in result.output
    code = "import sys; sys.argv = ['nanscope', '--help']\ntry:\n    from nanscope.__main__ import main; main()\nexcept SystemExit:\n    pass\n"
    check = subprocess.run([sys.executable, "-c", code + "print('torch' in sys.modules)"], capture_output=True, text=True, timeout=60)
    assert check.stdout.strip().endswith("False")


def test_a_healthy_script_exits_0_and_keeps_its_arguments_and_output(tmp_path: Path) -> None:
    """The script sees its own arguments, options included, and its standard output is its own."""
    (tmp_path / "train.py").write_text(HEALTHY)
    done = spawn("run", "--json", tmp_path / "v.json", "train.py", "--lr", "1e-6", "-x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "args ['--lr', '1e-6', '-x']\n"
    assert "3 steps watched" in done.stderr
    verdict = json.loads((tmp_path / "v.json").read_text())
    assert (verdict["status"], verdict["incidents"], verdict["steps"]) == ("healthy", [], 3)


def test_a_module_is_run_as_python_would(tmp_path: Path) -> None:
    """-m finds a module in the working directory."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text(HEALTHY)
    done = spawn("run", "-m", "package.train", "--lr", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "args ['--lr', '1']\n"


def test_a_failing_script_exits_3_and_leaves_everything(run_dir: Path) -> None:
    """Verdict as JSON, snapshot, history, page and picture."""
    verdict = json.loads((run_dir / "verdict.json").read_text())
    incident = verdict["incidents"][0]
    assert (verdict["status"], incident["phase"], incident["cause"]) == ("non-finite", "forward", "inf_times_zero_mask")
    origin = incident["origin"]
    assert (origin["op"], origin["variable"], origin["index"], origin["masked"], origin["line"]) == ("exp", "ratio", [0, 1], True, 8)
    assert incident["fixes"][0]["id"] == "mask_before_op" and incident["fixes"][0]["works"] is True
    names = {path.name for path in (run_dir / "run" / "latest").iterdir()}
    assert names >= {"run.json", "report.html", "report.png", "step-000001.rank0.safetensors"}


def test_a_script_that_fails_by_itself_keeps_its_status(tmp_path: Path) -> None:
    """An exception is shown as Python shows it and gives 1; sys.exit keeps its code."""
    (tmp_path / "raises.py").write_text("raise ValueError('mine')")
    (tmp_path / "exits.py").write_text("import sys; sys.exit(7)")
    raised, exited = spawn("run", "raises.py", cwd=tmp_path), spawn("run", "exits.py", cwd=tmp_path)
    assert raised.returncode == 1 and "ValueError: mine" in raised.stderr
    assert exited.returncode == 7


def test_stop_ends_the_script_with_3(tmp_path: Path) -> None:
    """--on-nonfinite stop ends the run at the bad step, with the report and not with a traceback."""
    (tmp_path / "fails.py").write_text(FAILING + "\nprint('went on')\n")
    done = spawn("run", "--on-nonfinite", "stop", "fails.py", cwd=tmp_path)
    assert done.returncode == 3
    assert "went on" not in done.stdout and "Traceback" not in done.stderr


def test_repair_goes_on_until_its_limit_also_in_a_child(tmp_path: Path) -> None:
    """--on-nonfinite repair mends the first bad step of a process that a command starts, and with --max-repairs 1 ends it at the second."""
    (tmp_path / "fails.py").write_text(FAILING + "\nprint('went on')\n" + FAILING + "\nprint('and on')\n")
    options = ["--on-nonfinite", "repair", "--max-repairs", "1", "--json", str(tmp_path / "v.json")]
    done = spawn("run", *options, "--", sys.executable, "fails.py", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert done.stdout == "went on\n" and json.loads((tmp_path / "v.json").read_text())["repaired"] == 1


def test_a_rerun_leaves_the_earlier_run_alone(tmp_path: Path) -> None:
    """After the bug is mended the latest run is healthy, `report` takes that and says so, and the broken one is still there whole."""
    (tmp_path / "train.py").write_text(FAILING)
    assert spawn("run", "train.py", cwd=tmp_path).returncode == 3
    (broken,) = (tmp_path / "nanscope-runs").glob("2*")
    before = {path.name: path.read_bytes() for path in broken.iterdir()}
    (tmp_path / "train.py").write_text(HEALTHY)
    assert spawn("run", "train.py", cwd=tmp_path).returncode == 0
    assert {path.name: path.read_bytes() for path in broken.iterdir()} == before
    (mended,) = set((tmp_path / "nanscope-runs").glob("2*")) - {broken}
    done = call("report", "-o", "report.txt", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == f"nanscope: {mended.name}, the latest of 2 in nanscope-runs\n"
    assert "3 steps watched" in (tmp_path / "report.txt").read_text()
    assert call("report", broken, "-o", tmp_path / "report.json").returncode == 3
    ids = {json.loads((run / "run.json").read_text())["run"] for run in (broken, mended)}
    assert len(ids) == 2 and nanscope.load(next(broken.glob("*.safetensors"))).run in ids
    listed = call("runs", "--json", "runs.json", cwd=tmp_path)
    assert listed.returncode == 0
    data = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert [(run["status"], run["script"], run["steps"], run["bad_steps"], run["ranks"], run["snapshots"]) for run in data] == [
        ("non-finite", "train", 0, 1, 1, 1),
        ("healthy", "train", 3, 0, 1, 0),
    ]
    assert f"  nanscope-runs/{mended.name}\n" in listed.stdout


def test_runs_of_a_folder_without_any_are_none(tmp_path: Path) -> None:
    """A folder that is not there is an error; a run directory is a list of itself."""
    assert call("runs", tmp_path).stdout == f"no run in {tmp_path}\n"
    assert call("runs", tmp_path / "gone").returncode == 1
    (tmp_path / "run.json").write_text("{nonsense")
    assert "damaged" in call("runs", tmp_path).stdout


def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    """Each has its verdict, its history and its snapshot."""
    (tmp_path / "bad.py").write_text(FAILING)
    (tmp_path / "good.py").write_text(HEALTHY)
    command = [sys.executable, "-m", "nanscope", "run"]
    runs = [
        subprocess.Popen([*command, name], cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for name in ("bad.py", "good.py")
    ]
    assert [run.wait(120) for run in runs] == [3, 0]
    (bad,), (good,) = ((tmp_path / "nanscope-runs").glob(f"2*-{name}") for name in ("bad", "good"))
    assert len(list(bad.glob("*.safetensors"))) == 1 and len((good / "history.rank0.jsonl").read_text().splitlines()) == 3


def test_a_run_whose_files_are_gone_is_not_called_healthy(run_dir: Path, tmp_path: Path) -> None:
    """Its record knows that a step was bad, also where a full disk or a person has taken the snapshot away."""
    shutil.copytree((run_dir / "run" / "latest").resolve(), tmp_path / "run", ignore=shutil.ignore_patterns("*.safetensors"))
    assert call("report", tmp_path / "run", "-o", tmp_path / "report.txt").returncode == 3
    assert "1 backward pass watched, 1 bad, and nothing of that was kept" in (tmp_path / "report.txt").read_text()


def test_the_report_of_a_run_is_its_verdict(run_dir: Path, tmp_path: Path) -> None:
    """Word for word and number for number, from what stands in its directory."""
    assert call("report", run_dir / "run", "-o", tmp_path / "report.json").returncode == 3
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads((run_dir / "verdict.json").read_text())


@pytest.mark.parametrize("where", ["--out", "--json"])
def test_what_cannot_be_written_is_refused_before_the_script_runs(tmp_path: Path, where: str) -> None:
    """One line, and nothing of the script."""
    (tmp_path / "train.py").write_text("print('ran')")
    (tmp_path / "file").write_text("in the way")
    done = spawn("run", where, tmp_path / "file" / "x", "train.py", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"nanscope: {tmp_path / 'file' / 'x'} cannot be written")


BROKEN_LATER = {  # what happens to the folder of a run while it runs -> the words that say what is missing
    "removed": ("import shutil; [shutil.rmtree(p) for p in pathlib.Path('nanscope-runs').glob('2*')]", "report.html"),
    "drawing": ("import nanscope.report.html as h; h.render_html = lambda *a: 1 / 0", "report.html could not be drawn (ZeroDivisionError"),
}


@pytest.mark.parametrize(("code", "words"), BROKEN_LATER.values(), ids=BROKEN_LATER)
def test_the_verdict_comes_first(tmp_path: Path, code: str, words: str) -> None:
    """Before anything is drawn; what cannot be drawn is one line after it, and the JSON is there."""
    (tmp_path / "train.py").write_text(f"{FAILING}\nimport pathlib\n{code}\n")
    done = spawn("run", "--json", "v.json", "train.py", cwd=tmp_path)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    verdict = next(n for n, line in enumerate(lines) if line.startswith("●"))
    assert verdict < next(n for n, line in enumerate(lines) if words in line)
    assert json.loads((tmp_path / "v.json").read_text())["status"] == "non-finite"


UNWATCHED = {
    "dies at once": ("raise SystemExit(0)", "no backward pass and no optimizer step was seen here"),
    "starts a process": (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', '1'])",
        "the processes did that the script started",
    ),
    "leaves one behind": ("import subprocess; subprocess.Popen(['sleep', '1'])", "the processes did that the script started"),
}


@pytest.mark.parametrize(("code", "words"), UNWATCHED.values(), ids=UNWATCHED)
def test_a_run_in_which_nothing_was_seen_is_not_healthy(tmp_path: Path, code: str, words: str) -> None:
    """It is unwatched, and says why; so does its report."""
    (tmp_path / "train.py").write_text(code)
    done = spawn("run", "--json", "v.json", "train.py", cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    verdict = json.loads((tmp_path / "v.json").read_text())
    assert verdict["status"] == "unwatched" and words in verdict["sentence"]
    assert call("report", tmp_path / "nanscope-runs", "-o", tmp_path / "r.json").returncode == 4
    assert json.loads((tmp_path / "r.json").read_text()) == verdict


FORKS = f"""
import multiprocessing
def train():
    exec({FAILING!r}, {{}})
process = multiprocessing.get_context("fork").Process(target=train)
process.start()
process.join()
"""


def test_a_forked_process_that_trains_takes_part_in_the_run(tmp_path: Path) -> None:
    """It inherits the instruments, and writes under its own name into the run's directory; the verdict is its parent's, once."""
    (tmp_path / "train.py").write_text(FORKS)
    done = spawn("run", "--json", "v.json", "train.py", cwd=tmp_path)
    assert done.returncode == 3 and "[bad-step]: step 1 on ForkProcess-1" in done.stderr and done.stderr.count("● step 1") == 1
    verdict = json.loads((tmp_path / "v.json").read_text())
    assert (verdict["status"], verdict["incidents"][0]["worker"], verdict["gaps"]) == ("non-finite", "ForkProcess-1", [])
    (run,) = (tmp_path / "nanscope-runs").glob("2*")
    names = {path.name for path in run.iterdir()} - {"report.html", "report.png"}
    assert names == {
        "run.json",
        "run.rank0.ForkProcess-1.json",
        "history.rank0.ForkProcess-1.jsonl",
        "step-000001.rank0.ForkProcess-1.safetensors",
    }
    assert call("report", tmp_path / "nanscope-runs", "-o", tmp_path / "r.json").returncode == 3


def test_replay_prints_the_table_and_tries_what_is_asked(run_dir: Path, tmp_path: Path) -> None:
    """As recorded, float64, fixes, asked edits, and the tempting wrong ones failing."""
    done = call("replay", snapshot_of(run_dir), "--edit", "clamp:5", "--edit", "clamp_denominator", "--json", tmp_path / "r.json")
    assert done.returncode == 3, done.stderr
    for words in ("reproduces bit for bit", "mask_before_op", "✓ best", "±5", "tempting, and wrong", "does not apply"):
        assert words in done.stdout
    rows = {row["id"]: row for row in json.loads((tmp_path / "r.json").read_text())["rows"]}
    assert rows["mask_before_op"]["works"] and not rows["where_after_op"]["works"] and not rows["as_recorded"]["works"]


@pytest.mark.parametrize("edit", ["explode", "clamp:abc", "mask:3", "clamp:-1", "clamp:1e"])
def test_a_wrong_edit_is_one_line_and_1(run_dir: Path, edit: str) -> None:
    """An edit that does not exist or has no such bound is refused."""
    done = call("replay", snapshot_of(run_dir), "--edit", edit)
    assert done.returncode == 1
    assert done.stderr.startswith("nanscope: ") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["report.html", "report.png", "report.txt", "report.json"])
def test_report_chooses_its_form_by_suffix(run_dir: Path, tmp_path: Path, name: str) -> None:
    """A run directory or a single snapshot becomes a page, a picture, text or JSON."""
    for source in (run_dir / "run", snapshot_of(run_dir)):
        done = call("report", source, "-o", tmp_path / name)
        assert done.returncode == 3, done.stderr
        assert (tmp_path / name).stat().st_size > 500


def test_inspect_lists_what_is_in_a_snapshot_without_torch(run_dir: Path) -> None:
    """Tensors, program, sources, settings; and torch stays unloaded."""
    done = call("inspect", snapshot_of(run_dir), "--program")
    assert done.returncode == 0, done.stderr
    for words in ("old_logps", "mask", "F32", "fails.py", "aten.exp.default", "torch"):
        assert words in done.stdout
    code = f"import sys; sys.argv = ['nanscope', 'inspect', {str(snapshot_of(run_dir))!r}]\ntry:\n    from nanscope.__main__ import main; main()\n"
    code += "except SystemExit:\n    pass\nprint('torch' in sys.modules)"
    check = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert check.stdout.strip().endswith("False"), check.stderr
    done = call("inspect", snapshot_of(run_dir), "--values")
    assert done.returncode == 0 and "[1, 3] float32, −200 … −0.5" in done.stdout and "NaN!" in done.stdout, done.stderr


def test_an_unknown_form_is_refused_without_torch(run_dir: Path) -> None:
    """At once, and not after the seconds that it takes to load it."""
    code = f"import sys; sys.argv = ['nanscope', 'report', {str(run_dir)!r}, '-o', 'x.foo']\ntry:\n    from nanscope.__main__ import main; main()\n"
    code += "except SystemExit as left:\n    print(left.code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().endswith("False") and ".foo" in done.stderr, done.stderr


def damaged(kind: str, source: Path, target: Path) -> None:
    data = source.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if kind == "truncated":
        data = data[: 8 + length + 4]
    elif kind == "cut header":
        data = data[: length // 2]
    elif kind == "empty":
        data = b""
    elif kind == "wrong magic":
        data = b"\x89PNG\r\n\x1a\n" + data
    elif kind == "oversized header":
        data = (1 << 62).to_bytes(8, "little") + data[8:]
    elif kind == "newer":
        data = data.replace(b'\\"schema\\": %d,' % SCHEMA_VERSION, b'\\"schema\\": 7,')
    elif kind == "unknown operator":
        data = data.replace(b"aten.exp.default", b"aten.abc.default")
    elif kind == "foreign":
        import torch

        save_file({"x": torch.zeros(2)}, target)
        return
    target.write_bytes(data)
    if kind == "unknown operator":  # by somebody who knows how to make a checksum
        seal(target)


@pytest.mark.parametrize("command", ["replay", "inspect", "report"])
@pytest.mark.parametrize("kind", ["truncated", "cut header", "empty", "wrong magic", "oversized header", "newer", "foreign"])
def test_a_bad_file_is_one_clear_error_and_1(run_dir: Path, tmp_path: Path, kind: str, command: str) -> None:
    """Damaged, foreign and newer files: one line that names the file, exit status 1, no traceback."""
    bad = tmp_path / "bad.safetensors"
    damaged(kind, snapshot_of(run_dir), bad)
    done = call(command, bad, *(["-o", tmp_path / "x.html"] if command == "report" else []))
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith(f"nanscope: {bad}"), done.stderr


def test_an_operator_outside_the_whitelist_is_refused(run_dir: Path, tmp_path: Path) -> None:
    """A program that names something else than a known operator is not executed."""
    bad = tmp_path / "bad.safetensors"
    damaged("unknown operator", snapshot_of(run_dir), bad)
    done = call("replay", bad)
    assert done.returncode == 1 and "whitelist" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "args",
    [
        ["replay"],
        ["replay", "--png", "x.png", "a", "b"],
        ["run"],
        ["report", "x", "--nothing"],
        ["run", "--on-nonfinite", "explode", "x.py"],
        ["fly"],
    ],
)
def test_wrong_usage_is_2(args: list[str], tmp_path: Path) -> None:
    """Unknown commands, options and missing arguments are usage errors."""
    assert call(*args, cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("args", [["replay", "none.safetensors"], ["run", "none.py"], ["run", "-m", "none_such"], ["report", "none"]])
def test_a_missing_file_is_one_line_and_1(args: list[str], tmp_path: Path) -> None:
    """What is not there is said in one line."""
    done = call(*args, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("nanscope: "), done.stderr


def test_an_unknown_report_form_is_refused_before_any_work(run_dir: Path, tmp_path: Path) -> None:
    """A suffix without a renderer names the known ones."""
    done = call("report", run_dir / "run", "-o", tmp_path / "report.docx")
    assert done.returncode == 1 and ".html" in done.stderr


def test_an_output_that_fails_keeps_no_other_back(run_dir: Path, tmp_path: Path) -> None:
    """What can be written is written and named, each failure is a line, and the status is that of a failure; an unknown form writes nothing."""
    page, text, data = tmp_path / "a.html", tmp_path / "b.txt", tmp_path / "c.json"
    gone, folder = tmp_path / "gone" / "a.md", tmp_path / "d.json"
    folder.mkdir()
    done = call("report", run_dir / "run", "-o", gone, "-o", page, "-o", folder, "-o", text, "-o", data)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [str(page), str(text), str(data)] and all(path.stat().st_size > 500 for path in (page, text, data))
    assert [line.split(" (")[0] for line in done.stderr.splitlines() if "cannot be" in line] == [
        f"nanscope: {path} cannot be written" for path in (gone, folder)
    ]
    assert not [path for path in tmp_path.iterdir() if path not in (page, text, data, folder)]
    for path in (page, text, data):
        path.unlink()
    done = call("report", run_dir / "run", "-o", page, "-o", tmp_path / "bad.xyz", "-o", text)
    assert done.returncode == 1 and "'.xyz'" in done.stderr and list(tmp_path.iterdir()) == [folder]


def test_version() -> None:
    """--version prints the package's version."""
    assert CliRunner().invoke(cli.app, ["--version"]).output.strip() == f"nanscope {nanscope.__version__}"


def test_the_atlas_is_shown_written_and_verified(tmp_path: Path) -> None:
    """A table of the chosen losses with 0; a file by its suffix; with --verify how many cells of which framework were compared."""
    shown = call("atlas", "torchtitan", "areal.sapo")
    assert shown.returncode == 0 and shown.stderr == ""
    assert "torchtitan 0.3.0 · 1 path · a fault at a masked token: all clean" in shown.stdout and "trl" not in shown.stdout
    written = call("atlas", "liger.sapo", "-o", tmp_path / "a.json", "--verify")
    assert written.returncode == 0, written.stderr
    assert written.stdout.startswith(str(tmp_path / "a.json")) and "0 cells disagree" in written.stdout
    data = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in data["paths"]] == ["liger.sapo", "liger.sapo · beta=0.0"]
    assert [one["cells"] for one in data["verification"]["compared"]] == [2 * len(data["faults"])]


@pytest.mark.parametrize("wrong", [["verl.vanila"], ["trl.rloo", "-o", "atlas.png"]])
def test_a_wrong_atlas_is_one_line_and_1(wrong: list[str], tmp_path: Path) -> None:
    """A prefix that no loss has, a form that there is not; nothing is written."""
    done = call("atlas", *wrong, cwd=tmp_path)
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert done.stderr.startswith("nanscope: ") and len(done.stderr.splitlines()) == 1


def test_an_atlas_that_a_framework_contradicts_is_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a row of nanscope's table wrong, --verify would name the cells and both answers."""
    from nanscope.atlas import cells

    own = cells.evaluate
    monkeypatch.setattr(cells, "evaluate", lambda path, inputs: own(replace(path, key="liger.cispo"), inputs))
    result = CliRunner().invoke(cli.app, ["atlas", "liger.bnpo", "--verify"])
    assert result.exit_code == 3
    assert "✗ liger.bnpo · beta=0.0 | old +200 masked A>0 | nanscope · | liger M" in result.output


MY_LOSS = """
import torch
def mine(log_probs, old_log_probs, advantages, mask):
    delta = torch.where(mask > 0, log_probs - old_log_probs, 0.0)
    return -(delta.exp() * advantages * mask).sum() / mask.sum()
"""


def test_a_step_is_replayed_under_other_losses(run_dir: Path, tmp_path: Path) -> None:
    """Rows in the table, a sentence each, and the same as JSON; one's own function comes from the current directory."""
    (tmp_path / "my_losses.py").write_text(MY_LOSS)
    asked = ["--as", "verl.vanilla", "--as", "trl.dapo:epsilon=0.3", "--loss", "my_losses:mine", "--json", "rows.json"]
    done = spawn("replay", snapshot_of(run_dir), *asked, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    text = " ".join(done.stdout.split())
    assert "verl.vanilla would have survived this batch" in text and "my_losses:mine would have survived" in text
    assert "trl.dapo:epsilon=0.3 would not have survived" in text and "1 masked token" in text
    assert "log_probs ← logps, old_log_probs ← old_logps" in text
    data = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    rows = {row["id"]: row["works"] for row in data["rows"] if row["kind"] == "objective"}
    assert rows == {"verl.vanilla": True, "trl.dapo": False, "my_losses:mine": True}
    assert [one["works"] for one in data["alternatives"]] == [True, False, True]


def test_a_clamp_is_swept(run_dir: Path, tmp_path: Path) -> None:
    """A table of bounds in both orders, the picture, and JSON; the step failed, so the status is 3."""
    done = call("replay", snapshot_of(run_dir), "--sweep", "clamp", "--png", "sweep.png", "--json", "sweep.json", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "before exp" in done.stdout and "gradient not finite" in done.stdout and "← smallest" in done.stdout
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    assert data["points"][0]["before"]["works"] is True and data["points"][0]["after"]["works"] is False


def test_variants_lists_losses_and_edits(tmp_path: Path) -> None:
    """All of them in short, some with their settings, everything as JSON."""
    whole, some = call("variants"), call("variants", "verl.vanilla", "--json", tmp_path / "v.json")
    assert whole.returncode == some.returncode == 0
    assert all(
        words in whole.stdout for words in ("nemo_rl.clipped_pg", "liger.luspo", "mask is not applied", "clamp_exponent", "where_after_op")
    )
    assert "clip_ratio=0.2" in some.stdout and "±20" in some.stdout and "clamp_exponent" not in some.stdout
    assert [loss["key"] for loss in json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))["losses"]] == ["verl.vanilla"]


@pytest.mark.parametrize(
    ("asked", "status", "word"),
    [
        (("--as", "verl.vanila"), 1, "verl.vanilla"),
        (("--as", "verl.vanilla:clip=0.2"), 1, "clip_ratio"),
        (("--loss", "no_such_module:f"), 1, "ModuleNotFoundError"),
        (("--sweep", "mask"), 2, "clamp"),
        (("--sweep", "clamp", "--png", "sweep.bmp"), 1, ".png"),
    ],
    ids=lambda value: str(value),
)
def test_what_cannot_be_replayed_under_is_one_line(asked: tuple[str, ...], status: int, word: str, run_dir: Path, tmp_path: Path) -> None:
    """It says what there is instead, and nothing is written."""
    done = call("replay", snapshot_of(run_dir), *asked, cwd=tmp_path)
    assert done.returncode == status and word in done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_an_output_that_cannot_be_written_keeps_no_other_back(tmp_path: Path) -> None:
    """Of a check: the log, the page and the data are each written or told of, and the status says that one is missing."""
    file = save(ppo_step({}), tmp_path)
    page, nowhere = tmp_path / "hazards.html", tmp_path / "nowhere" / "x"
    done = call("check", file, "--json", nowhere, "--sarif", nowhere, "-o", page)
    assert done.returncode == 1 and page.is_file() and done.stdout.splitlines() == [str(page)]
    assert done.stderr.count("cannot be written") == 2
    done = call("check", file, "--json", tmp_path / "x.json", "--sarif", tmp_path / "x.sarif", "-o", nowhere.with_suffix(".html"))
    assert done.returncode == 1 and (tmp_path / "x.json").is_file() and (tmp_path / "x.sarif").is_file()
    for verb in ("replay", "inspect", "audit", "diff"):
        done = call(verb, file, "--json", nowhere)
        assert done.returncode == 1 and done.stdout and "cannot be written" in done.stderr, verb
