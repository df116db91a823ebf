"""Every cause, on training scripts that know nothing of nanscope: what is said of them comes out right in every field that they state.

Each file of `incidents/` fails in its own way and states, by its mechanism, what must be said about it; each file of `healthy/` looks
frightening and is not, and nothing may be said. How to add one: `incidents/README.md`.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import new
import pytest
import torch
from expected import Expected
from filelock import FileLock  # torch needs it, so it is there
from honest import dishonest

from nanscope.causes import Cause
from nanscope.program.program import Program
from nanscope.snapshot.file import load
from nanscope.snapshot.observation import Observation
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.verdict.diagnose import examine
from nanscope.verdict.rules import RULES, Rule, cause_of
from nanscope.watching.afterwards import arrived

FOLDER = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore")  # the scripts do what torch warns of

SHARED = ("expected", "new")
INCIDENTS = sorted(path for path in (FOLDER / "incidents").glob("*.py") if path.stem not in SHARED)
HEALTHY = sorted((FOLDER / "healthy").glob("*.py"))
ROLES = {  # other fair names for a role
    "is_weight": "ratio", "attention": "hidden", "router": "hidden", "rewards": "advantages",
}  # fmt: skip
SAME: dict[str, Callable[[str], str]] = {"op": lambda op: op.strip("_"), "role": lambda role: ROLES.get(role, role)}

UNSEEN = "all of it"  # nothing is said of the script

KNOWN = {  # what is not yet answered rightly: script -> fields. What answers it rightly takes its row out
    # an update in place by a hand-written optimizer is told like one of torch's own, with no line
    "eps_underflow_optimizer_with_closure": "line",
    # the norm that a clip overflowed is told by the name of the first gradient that it ruined
    "feral_16_infinite_norm_logging_clip": "variable",
    # of a row of attention that a kernel's backward divides it is not asked whether its key counts
    "lucidrains_flash_attention_backward_row_sum": "masked",
    # a weight of a model that is not trained, or of none, is called by what is known of its owner
    "cares_rl_407_target_not_rolled_back": "variable",
    "skyrl_1709_reference_inv_freq": "variable",
    "kaixhin_rainbow_2_target_noise_never_reset": "variable",
    # a function that anything is handed to has its own name for it
    "flowrl_trajectory_balance_ref_neg_inf": "variable",
    "sketch_rnn_straight_strokes": "variable",
    "cleanrl_td3_nan_next_obs_of_terminal": "variable",
    "megatron_205_half_main_grad": "variable",
    # the line that wrote NaN into the batch is told, and not the one that read it first
    "slime_2032_opd_unaligned_token": "line",
    "mbrl_lib_110_constant_feature_normalizer": "variable",
    # what selects in one place does not in another, and the element goes into both
    "transformers_time_series_scaler_missing_values": "masked variable",
    # what half precision cannot hold is dropped by a selection: either is a cause
    "deformable_detr_sine_position_half": "cause",
    # what is returned is called what it is bound to in the end
    "nemo_aligner_194_no_sequence_ended": "variable",
    # a weight of a model that was never called before it was spoilt has no name yet
    "sample_factory_pbt_copies_diverged_member": "variable line",
    # visits that stand for a policy
    "leela_chess_283_visits_to_the_inverse_temperature": "role",
    # another fix than the ones that were thought of, which works as well
    "axolotl_3910_orpo_clamped_logp": "fix",
    "mmpretrain_gem_learned_power_in_half": "fix",
    # a weight that the loop set before it was ever seen to be finite is told as an update
    "lm_human_preferences_gain_of_constant_reward": "phase",
    # of several elements the first one that does harm already in forward is told
    "relax_285_zero_connection_of_unscored_rollouts": "index masked",
    # the line that brought it is told, and not the one that read it first
    "trinity_opmd_aborted_rollout_reward": "line",
    # a share of the gap between two distributions
    "dskd_adaptive_kl_identical_padding": "role",
    # what chooses by a product with a comparison is told as a factor
    "wavenet_vocoder_mixture_floor_in_half": "masked",
    # a power that half precision alone cannot hold meets a factor of 0, and an update divides a sum by one that is 0
    "x_transformers_xpos_scale_in_half": "cause",
    "pytorch_optimizer_522_adasmooth_zero_init_bias": "cause",
    # of two that overflow at one token the one is told that backward comes to first
    "pqm_exp_of_padded_step_in_half": "line",
    # float32 heals, and the loss is large in it
    "torchrl_1694_still_pixel_in_half_observations": "fix",
    # the cast is told that made what was stored, and an infinity at a token outside the loss is followed to that
    "distillkit_bos_activation_stored_in_half": "phase op",
    # gradients that a loop divides by its own loss scale are told as gradients, and not as an update
    "apex_777_resumed_loss_scale_of_zero": "phase",
    # a gradient that the code turns around: what it is divided by is bounded, where it should not be divided at all
    "pdqn_inverting_gradients_of_fixed_parameter": "role fix",
    # of several elements the first one is told that the loss counts
    "trl_nash_md_mixture_coefficient_of_zero": "index",
    # weights that the loop has quantised for a sampler are told as bad weights, and not as the quotient that made them so
    "slime_2256_block_fp8_empty_tile": "phase cause fix variable line",
    # what goes into nothing but the backward of a custom function is no part of the recorded loss
    "mcore_bridge_104_mtp_rolled_mask": "masked role fix",
    # a gradient that rounding made, in the first step and inside of a model, while the loss is what it should be
    "peft_hra_gram_schmidt_of_repeated_columns": UNSEEN,
    # the product that made harm of an infinity which a mask had put there is told, and not the mask
    "amdkd_2_distill_routes_with_visited_nodes": "op role fix variable line",
    # gradients that a loop's own clip ruined before the step are told as gradients, and not as the update
    "deepspeed_7171_logical_not_of_inf_norm": "phase",
    # a model that is called with weights that were computed cannot be run again, nor can what was differentiated for them
    "torchopt_meta_adam_eps_root_zero": "cause op index role fix variable line",
}
ROUNDED = {"yolo_ciou_of_cells_without_object"}  # the gradient of a convolution comes out again but for rounding, and that is said

BEST = {  # on how many of the scripts the answer is the best one, not only one that is accepted
    "phase": 681, "cause": 629, "op": 666, "index": 694, "masked": 692, "role": 597, "fix": 487, "variable": 653, "line": 666,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """What the one run of a script gave: what was said, its incidents as the rules see them, each with its best cause, and what is said of
    them and not true."""

    said: Expected | None
    sentence: str
    cases: tuple[tuple[str, Observation], ...]
    dishonest: tuple[str, ...]


def result_of(path: Path, folder: Path) -> Result:
    """Run a script. folder: where its snapshots go."""
    verdict = new.watched(new.load(path), folder)
    snapshots = [load(file) for file in sorted(folder.glob("2*/step-*.safetensors"))]
    cases = [(new.load(path).EXPECTED.cause[0], examine(snapshot)[0]) for snapshot in snapshots[:1]]
    if len(snapshots) > 1 and "after" in path.stem:  # a step that poisoned the weights, and what the next one looks like
        cases.append(("poisoned_weights", examine(snapshots[1], poisoned_at=snapshots[0].step)[0]))
    wrong = tuple(f"step {incident.step}: {words}" for incident in verdict.incidents for words in dishonest(incident))
    return Result(new.said(verdict), verdict.sentence, tuple(cases), wrong)


@pytest.fixture(scope="session")
def result(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Result]:
    """What a script gave; it runs once a session, for whichever test and in whichever process asks first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "results"
    folder.mkdir(exist_ok=True)

    def once(path: Path) -> Result:
        kept = folder / f"{path.stem}.pickle"
        with FileLock(kept.with_suffix(".lock")):
            if not kept.exists():
                kept.write_bytes(pickle.dumps(result_of(path, folder / path.stem)))
            found: Result = pickle.loads(kept.read_bytes())
        return found

    return once


def ranks(expected: Expected, said: Expected) -> dict[str, int | None]:
    """For each field the place of the answer among those that are accepted, 0 for the best and None for a wrong one."""
    phase = said.phase[0]
    free = {
        "op": phase in ("input", "weights"),
        "index": phase == "weights" or expected.index is None,
        "masked": expected.masked is None,
    }

    def rank(field: str) -> int | None:
        accepted, answer = getattr(expected, field), getattr(said, field)
        if field in ("index", "masked"):
            return 0 if free[field] or accepted == answer else None
        same = SAME.get(field, lambda word: word)
        words = [same(word) for word in accepted]
        return 0 if free.get(field) else words.index(same(answer[0])) if same(answer[0]) in words else None

    return {field.name: rank(field.name) for field in fields(Expected)}


def expected_of(path: Path) -> Expected:
    found: Expected = new.load(path).EXPECTED
    return found


@pytest.mark.parametrize("path", INCIDENTS, ids=lambda path: path.stem)
def test_an_incident_is_explained(path: Path, result: Callable[[Path], Result]) -> None:
    """What the script states is what the verdict says, in every field, and what is known to be wrong still is."""
    expected, found = expected_of(path), result(path)
    assert (found.said is None) == (KNOWN.get(path.stem) == UNSEEN), found.sentence
    if found.said is None:
        return
    wrong = {field: getattr(found.said, field) for field, rank in ranks(expected, found.said).items() if rank is None}
    if path.stem in KNOWN:
        assert set(wrong) == set(KNOWN[path.stem].split()), f"no longer so, take it out of KNOWN: {found.sentence}"
    else:
        assert wrong == {}, found.sentence


@pytest.mark.parametrize("path", INCIDENTS, ids=lambda path: path.stem)
def test_nothing_is_claimed_that_was_not_seen(path: Path, result: Callable[[Path], Result]) -> None:
    """No tick without a measure, no best fix that changes healthy tokens, and a step that was recorded here comes out again to the bit."""
    found = [words for words in result(path).dishonest if not (path.stem in ROUNDED and "does not come out again" in words)]
    assert found == []


@pytest.fixture(scope="module")
def all_ranks(result: Callable[[Path], Result]) -> list[dict[str, int | None]]:
    """How good the answers on every script are."""
    found = [(expected_of(path), result(path).said) for path in INCIDENTS]
    return [ranks(expected, said) for expected, said in found if said is not None]


def test_the_best_answers_do_not_become_fewer(all_ranks: list[dict[str, int | None]]) -> None:
    """In each field as many scripts as ever get the best of the answers that are accepted."""
    found = {field: sum(answer[field] == 0 for answer in all_ranks) for field in all_ranks[0]}
    assert {field: count for field, count in found.items() if count < BEST[field]} == {}, "fewer than in BEST"
    assert found == BEST, "more than before: raise the number in BEST"


def test_what_is_stated_stands_in_the_script() -> None:
    """Every line that a script states is one of its own, and what is known to be wrong is of scripts that exist."""
    lines = {path: {line.strip() for line in path.read_text(encoding="utf-8").splitlines()} for path in INCIDENTS}
    assert {path.stem: line for path in INCIDENTS for line in expected_of(path).line if line not in {None, *lines[path]}} == {}
    assert set(KNOWN) <= {path.stem for path in INCIDENTS}


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_a_healthy_run_has_no_incident(path: Path, tmp_path: Path) -> None:
    """Nothing is said that would wake anybody."""
    verdict = new.watched(new.load(path), tmp_path)
    assert verdict.healthy, verdict.sentence
    assert not list(tmp_path.glob("2*/*.safetensors"))


@pytest.fixture(scope="module")
def cases(result: Callable[[Path], Result]) -> list[tuple[str, Observation]]:
    """The incidents of every script, as the rules see them, each with its best cause."""
    found = [case for path in INCIDENTS for case in result(path).cases]
    came = Snapshot(1, 0, Program((), (), -1), {}, None, {}, Reached(0.5, 1, 1), observation=arrived("w", torch.tensor([math.nan])))
    found.append(("allreduce_nan", examine(came)[0]))  # what real ranks say is shown in test_ranks.py
    return found


def named(cases: list[tuple[str, Observation]], rules: tuple[Rule, ...]) -> set[int]:
    """Which incidents get the cause that describes them best."""
    return {number for number, (best, case) in enumerate(cases) if str(cause_of(case, rules)) == best}


def test_no_rule_is_idle(cases: list[tuple[str, Observation]]) -> None:
    """Without any one of the rules some incident is no longer explained in the best way."""
    best = named(cases, RULES)
    assert len(best) > 0.8 * len(cases)
    idle = [(index, RULES[index].cause) for index in range(len(RULES)) if named(cases, RULES[:index] + RULES[index + 1 :]) >= best]
    assert idle == []


def test_every_cause_has_two_incidents_and_health_thirty_settings() -> None:
    """No cause is known from one example only."""
    found = [expected_of(path).cause[0] for path in INCIDENTS]
    short = {str(cause): found.count(str(cause)) for cause in Cause if cause is not Cause.UNKNOWN and found.count(str(cause)) < 2}
    assert short == {}
    assert len(HEALTHY) >= 30


def test_the_scripts_know_nothing_of_the_watcher() -> None:
    """They would fail in the same way without it."""
    assert [path.name for path in (*INCIDENTS, *HEALTHY) if "nanscope" in path.read_text(encoding="utf-8")] == []
    assert "NANSCOPE" not in os.environ


SCRIPT = """
import torch

def run():
    weight = torch.ones(3, requires_grad=True)
    ratio = torch.exp(weight * torch.tensor([1.0, 200.0, 1.0]))
    loss = ratio.sum()
    loss.backward()
    return loss
"""


def test_a_new_script_is_answered_with_what_it_can_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the sentence stands an `Expected` that can be pasted as it is."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    assert new.main([str(path)]) == 0
    sentence, _, source = capsys.readouterr().out.partition("\n\nEXPECTED = ")
    assert "overflowed to +inf at [1] of [3]" in sentence
    stated = eval(source, {"Expected": Expected})
    assert (stated.phase, stated.cause, stated.variable) == (("forward",), ("exp_overflow",), ("ratio",))
    assert stated.line == ("ratio = torch.exp(weight * torch.tensor([1.0, 200.0, 1.0]))",)


def test_a_script_of_which_nothing_is_said_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that stays finite has nothing to state."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("200.0", "2.0"), encoding="utf-8")
    assert new.main([str(path)]) == 1
    assert "EXPECTED" not in capsys.readouterr().out
