"""Makes the gallery: for each cause the report of a script that dies of it, run while the documentation is built.

    python docs/gallery.py FOLDER      # FOLDER/<cause>/report.html and .png, and FOLDER/gallery.md, which leads to them

Notable: nothing of it is kept in the repository, so no page can show what nanscope does not say any more. The scripts are those of
`tests/incidents`, which state by their mechanism what must be said of them. Where the report says another cause than its script does, there
is no gallery, and no documentation.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INCIDENTS = ROOT / "tests" / "incidents"
sys.path.insert(0, str(INCIDENTS))  # the scripts import what they state it with

import new  # noqa: E402

import nanscope  # noqa: E402
from nanscope.causes import Cause  # noqa: E402
from nanscope.report.clean import LIMITS  # noqa: E402
from nanscope.report.diff import changed, hunks_of, written_fix  # noqa: E402
from nanscope.report.headline import lead_and_rest  # noqa: E402
from nanscope.report.markdown import block, code, escaped  # noqa: E402
from nanscope.report.origin import source_of, where_in  # noqa: E402
from nanscope.report.segments import segments  # noqa: E402
from nanscope.report.tried import fix_words, unit_of  # noqa: E402
from nanscope.verdict.incident import Incident, Verdict  # noqa: E402

SCRIPTS = {  # of each cause the most ordinary one: short, and as a loss of RL post-training is written
    Cause.EXP_OVERFLOW: "exp_overflow_packed_ppo",
    Cause.SEQ_RATIO_OVERFLOW: "seq_ratio_overflow_gspo_sum",
    Cause.INF_TIMES_ZERO_MASK: "inf_times_zero_mask_k3_padding",
    Cause.NAN_TIMES_ZERO_MASK: "nan_times_zero_mask_rollout_prob_sentinel",
    Cause.INF_TIMES_ZERO_COEF: "inf_times_zero_coef_kl_warmup",
    Cause.INF_MINUS_INF: "inf_minus_inf_dpo_banned_token",
    Cause.WHERE_GRAD_TRAP: "packed_boolean_select_ratio",
    Cause.LOG_ZERO: "log_zero_softmax_gather_log",
    Cause.PLOGP_ZERO: "plogp_zero_action_mask_entropy",
    Cause.ZERO_DIV_ZERO: "zero_div_zero_group_std",
    Cause.ZERO_DENOMINATOR: "verl_gpg_no_answer_right",
    Cause.EMPTY_MASK_MEAN: "empty_mask_mean_micro_batch",
    Cause.STD_SINGLE: "std_single_uid_groups",
    Cause.SQRT_ZERO_GRAD: "sqrt_zero_grad_hellinger_distill",
    Cause.SQRT_NEGATIVE: "nemo_rl_4161_leave_one_out_std",
    Cause.OUTSIDE_DOMAIN: "truncated_normal_erfinv",
    Cause.CANCELLATION_SPIKE: "cancellation_spike_leave_one_out_scale",
    Cause.FULLY_MASKED_SOFTMAX: "fully_masked_softmax_no_legal_tool",
    Cause.FP16_OVERFLOW: "fp16_overflow_k3_penalty_in_half",
    Cause.EPS_UNDERFLOW: "eps_underflow_half_group_scale",
    Cause.MAGNITUDE_OVERFLOW: "critic_cost_in_bytes",
    Cause.BAD_INPUT: "bad_input_critic_value_from_replay",
    Cause.UNINITIALIZED: "uninitialized_logprob_buffer_tail",
    Cause.POISONED_WEIGHTS: "poisoned_weights_saved_value_norm",
    Cause.HW_BITFLIP: "hw_bitflip_unembedding_row",
    Cause.INF_GRAD_NORM_CLIP: "inf_grad_norm_clip_half_grads",
}
RANKS = ROOT / "examples" / "ddp_grpo.py"  # what reached a rank by all-reduce takes two of them
SOURCES = {cause: INCIDENTS / f"{name}.py" for cause, name in SCRIPTS.items()} | {Cause.ALLREDUCE_NAN: RANKS}
REPOSITORY = "https://github.com/nanscope/nanscope/blob/main"
LIMIT = LIMITS[1]


class Lies(Exception):
    """A report says another cause than the one that it is shown for."""


def make(cause: Cause, source: Path, folder: Path) -> str:
    """Run a script, write its report into a folder of its cause, and return its section of the page.

    Raises Lies if the script, or what nanscope says of it, has another cause.
    """
    verdict = _of_ranks(source) if source == RANKS else _of_script(source, cause)
    said = verdict.causes[0].cause if verdict.incidents else None
    if said != cause:
        raise Lies(f"{source.name} is shown for {cause}, and nanscope says {said or 'nothing'}: {verdict.sentence}")
    (folder / cause).mkdir(parents=True)
    for suffix in ("html", "png"):
        verdict.report(folder / cause / f"report.{suffix}")
    return section(cause, source, verdict.causes[0])


def _of_script(source: Path, cause: Cause) -> Verdict:
    module = new.load(source)
    if module.EXPECTED.cause[0] != cause:
        raise Lies(f"{source.name} is shown for {cause}, and states {module.EXPECTED.cause[0]}")
    sys.argv = [source.name]  # what a report says of how its run was started is said of the script, and not of who makes the gallery
    return new.watched(module, Path("nanscope-runs"))


def _of_ranks(source: Path) -> Verdict:
    """What the rank saw on which nothing went wrong, from its own file."""
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(source), "--fault"]
    done = subprocess.run([sys.executable, "-m", "nanscope", "run", "--", *ranks], capture_output=True, text=True, check=False)
    files = sorted(Path("nanscope-runs", "latest").glob("step-*.rank0.safetensors"))
    if not files:
        raise Lies(f"{source.name} saved nothing on rank 0:\n{done.stdout}{done.stderr}")
    return nanscope.diagnose(files[0])


def section(cause: Cause, source: Path, incident: Incident) -> str:
    """Return what the page says of a cause: the sentence, the line, the change, and the picture, which leads to the report."""
    lead, rest = lead_and_rest(incident, LIMIT)
    sentence = [code(piece.text) if piece.code else escaped(piece.text) for piece in segments(lead, incident.origin, LIMIT)]
    lines = [f"## {cause}", "", f"{''.join(sentence)} {escaped(rest)}".strip(), ""]
    lines += list(_remedy(incident))
    page = f"gallery/{cause}/report.html"
    lines += [f"[![the report of {source.stem}](gallery/{cause}/report.png){{ loading=lazy width=480 }}]({page})", ""]
    script = f"{REPOSITORY}/{source.relative_to(ROOT)}"
    lines += [f"[The report]({page}) · [the script]({script}) · [why it happens](causes/{cause}.md)", ""]
    return "\n".join(lines)


def _remedy(incident: Incident) -> Iterator[str]:
    """The change that was run, as a diff; the line itself where there is none; and what is advised before either."""
    first, fix = next(iter(incident.fixes), None), written_fix(incident)
    if first is not None and first is not fix:  # advice, or an edit that is not written as a change of the source
        yield from (f"{'Best fix' if first.executed else 'Advice'}: {escaped(first.label)}.", "")
    if fix is not None:
        yield from (f"Run on this step, with the change below: {escaped(fix_words(fix, unit_of(incident)))}.", "")
        for hunk in hunks_of(fix):
            yield from block([f"{line.sign} {line.text}" for line in changed(hunk)], f'diff title="{hunk.where}"')
    elif incident.origin.file:
        read = [text.strip() for _, text, is_origin in source_of(incident.origin, 0) if is_origin]
        yield from block(read, f'python title="{where_in(incident.origin)}"')


def main(folder: Path) -> None:
    """Make all of it. folder: may not hold a gallery yet."""
    warnings.simplefilter("ignore")  # of torch, about what the scripts do wrong
    logging.disable(logging.WARNING)  # what nanscope says in a running training stands in the reports
    folder = folder.resolve()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)  # a report names its snapshot by the path that a run in this folder would give it
        sections = [make(cause, SOURCES[cause], folder) for cause in Cause if cause in SOURCES]
        os.chdir(folder)
    (folder / "gallery.md").write_text("\n".join(sections), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
