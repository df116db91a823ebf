"""TRL's own trainers, really training, in every setting that TRL 1.16 offers and with faults that TRL itself lets through.

Nobody tells nanscope of a fault: inputs, rewards or weights are spoilt by the test, the rest is TRL. What a verdict must say was worked
out by hand or with plain torch, and where a test states a number, it computes that number beside the run.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
trl = pytest.importorskip("trl")

import transformers  # noqa: E402
from datasets import Dataset  # type: ignore[import-untyped]  # noqa: E402
from pairwise import named, pairwise, product  # noqa: E402
from trl.experimental.gmpo.gmpo_config import GMPOConfig  # noqa: E402
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer  # noqa: E402
from trl.trainer.dpo_trainer import DPOTrainer  # noqa: E402
from trl.trainer.grpo_config import GRPOConfig  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.rloo_trainer import RLOOTrainer  # noqa: E402
from trl_runs import (  # noqa: E402
    EditedTrainer,
    Fault,
    FaultyTrainer,
    Inputs,
    Reward,
    SampledTrainer,
    make_dpo_trainer,
    make_model,
    make_tokenizer,
    make_trainer,
    mean_token_id,
)

import nanscope  # noqa: E402
from nanscope.verdict.incident import Incident  # noqa: E402

INF, NAN = math.inf, math.nan
HUGE = torch.finfo(torch.float32).max
LOSS_TYPES: dict[str, dict[str, Any]] = {  # what a loss type needs beside its name
    "grpo": {}, "dr_grpo": {}, "dapo": {}, "bnpo": {}, "cispo": {}, "sapo": {}, "luspo": {"importance_sampling_level": "sequence"}, "vespo": {},
}  # fmt: skip
SETTINGS: dict[str, tuple[Any, ...]] = {  # what people change, each as it stands first and then as they do
    "loss_type": tuple(LOSS_TYPES),
    "beta": (0.0, 0.04),
    "gradient_checkpointing": (False, True),
    "attention_dropout": (0.0, 0.2),
    "num_iterations": (2, 1),  # with 1 TRL keeps no old log-probs
    "bf16": (False, True),
}
USUAL = pairwise(SETTINGS)
DPO_LOSS_TYPES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard",
    "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
SMOOTHED: dict[str, dict[str, Any]] = {
    "exo_pair": {"label_smoothing": 1e-3},
    "robust": {"label_smoothing": 0.1},
}  # TRL refuses exo_pair without
HALVES: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},  # autocast around float32 weights
    "fp16": {"dtype": torch.float16, "optim": "sgd"},  # weights in half precision
}
IS_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


class Edited(EditedTrainer, GRPOTrainer):
    """GRPO whose loss reads edited inputs."""


class EditedRLOO(EditedTrainer, RLOOTrainer):
    """The same of RLOO."""


class EditedGMPO(EditedTrainer, GMPOTrainer):
    """The same of trl.experimental's GMPO."""


class Spoilt(EditedTrainer, GRPOTrainer):
    """GRPO with one weight changed in step 2, before its loss; `before` is what plain torch needs to run that forward again."""

    parameter: str
    change: Callable[[Tensor], None]
    before: tuple[dict[str, Tensor], Tensor, Tensor, Tensor] | None = None

    def _compute_loss(self, model: torch.nn.Module, inputs: Inputs, *rest: Any) -> Tensor:
        if self.state.global_step == 1:
            with torch.no_grad():
                self.change(model.get_parameter(self.parameter))
            self.before = (
                copy.deepcopy(model.state_dict()),
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                inputs["completion_mask"],
            )
        return super()._compute_loss(model, inputs, *rest)


class Remembering(GRPOTrainer):
    """GRPO that keeps what its last loss was made of: log-probs (policy, old, reference) [B, T] and advantages [B]."""

    policy: Tensor
    old: Tensor
    reference: Tensor
    advantages: Tensor

    def _get_per_token_logps_and_entropies(self, *args: Any, **named: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **named)
        if torch.is_grad_enabled():
            self.policy = found[0].detach().clone()
        return found

    def _compute_loss(self, model: torch.nn.Module, inputs: Inputs) -> Tensor:
        loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[no-untyped-call]
        self.old, self.reference = inputs["old_per_token_logps"].clone(), inputs["ref_per_token_logps"].clone()
        self.advantages = inputs["advantages"].clone()
        return loss


def train(tmp_path: Path, trainer: Any, **options: Any) -> nanscope.Scope:
    """Train to the end, or until TRL cannot sample from ruined weights any more."""
    scope = nanscope.watch(trainer, out=tmp_path / "run", **options)
    try:
        with scope:
            trainer.train()
    except RuntimeError as error:
        assert "probability tensor contains" in str(error)
    return scope


def first(scope: nanscope.Scope) -> Incident:
    """The first incident."""
    assert scope.verdict.incidents, scope.verdict.sentence
    return scope.verdict.incidents[0]


def weights_finite(trainer: Any) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())


def silent(scope: nanscope.Scope, trainer: Any, steps: int = 2) -> None:
    """The run went to its end, nothing is said of it and nothing was harmed."""
    assert scope.verdict.healthy, scope.verdict.sentence
    assert not scope.verdict.notes, scope.verdict.notes
    assert not scope.snapshots
    assert trainer.state.global_step == scope.steps == steps
    assert weights_finite(trainer)


def put(tensor: Tensor, place: tuple[int, ...], value: float) -> Tensor:
    """A copy with one element replaced, made from numbers as a batch is."""
    numbers: Any = tensor.tolist()
    row = numbers
    for index in place[:-1]:
        row = row[index]
    row[place[-1]] = value
    return torch.tensor(numbers, dtype=tensor.dtype)


def row_of(inputs: Inputs, sign: int) -> int:
    """The first row whose advantage has this sign."""
    return next(i for i, advantage in enumerate(inputs["advantages"].tolist()) if advantage * sign > 0)


def spoil_reward(value: float | None, spoilt: Callable[[int], bool] = lambda i: i == 1) -> Reward:
    """The usual reward with some of its values replaced."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [value if spoilt(i) else usual for i, usual in enumerate(mean_token_id(completion_ids))]

    return reward


# -- healthy, in every setting -------------------------------------------------------------------------------------------------


def test_the_loss_types_here_are_those_of_trl() -> None:
    """The config's own list of loss types is the one that is tested below."""
    help_text = GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    listed = re.search(r"Supported values are (.*?)\. ", help_text)
    assert listed is not None
    assert set(re.findall(r"'(\w+)'", listed.group(1))) == set(LOSS_TYPES)


def test_every_two_settings_meet_in_a_row() -> None:
    """Of the rows that always run, one has any two values of any two settings; the nightly ones are all combinations there are."""
    for (one, ones), (other, others) in itertools.combinations(SETTINGS.items(), 2):
        assert {(row[one], row[other]) for row in USUAL} == set(itertools.product(ones, others))
    assert len(USUAL) < 20 and all(row in product(SETTINGS) for row in USUAL)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=named(row, SETTINGS), marks=() if row in USUAL else pytest.mark.nightly) for row in product(SETTINGS)],
)
def test_every_loss_type_trains_in_silence(tmp_path: Path, row: dict[str, Any]) -> None:
    """Two healthy steps of any loss type, with any combination of the usual settings, give no incident and no note."""
    settings = {name: value for name, value in row.items() if name != "attention_dropout"}
    dropout = {"attention_dropout": row["attention_dropout"]}
    trainer = make_trainer(tmp_path, model_config=dropout, max_steps=2, **LOSS_TYPES[row["loss_type"]], **settings)
    silent(train(tmp_path, trainer), trainer)


@pytest.mark.parametrize(
    "settings",
    [{"optim": "sgd"}, {"beta": 0.04, "optim": "sgd"}, {"gradient_checkpointing": True, "optim": "sgd"}],
    ids=["sgd", "beta", "checkpointing"],
)
def test_a_healthy_model_in_half_precision_is_silent(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A model whose weights are float16 stays finite and is left alone."""
    trainer = make_trainer(tmp_path, dtype=torch.float16, max_steps=2, **settings)
    assert next(trainer.model.parameters()).dtype is torch.float16
    silent(train(tmp_path, trainer), trainer)


def test_an_adam_in_half_precision_ruins_weights_with_finite_numbers(tmp_path: Path) -> None:
    """Its squares and its epsilon round to 0: a weight moves by hundreds of learning rates, twenty times the size of its neighbours."""
    trainer = make_trainer(tmp_path, dtype=torch.float16, max_steps=2)
    before = [weight.detach().float() for weight in trainer.model.parameters()]
    scope = train(tmp_path, trainer)
    moved = max(float((weight.detach().float() - old).abs().max()) for weight, old in zip(trainer.model.parameters(), before, strict=True))
    assert math.isfinite(moved) and moved > 100 * trainer.args.learning_rate
    assert scope.verdict.status == "suspect" and scope.verdict.incidents[0].cause == "eps_underflow"
    assert scope.verdict.incidents[0].phase == "optimizer"


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_batch_that_is_truncated_to_nothing_is_silent(tmp_path: Path, loss_type: str) -> None:
    """With mask_truncated_completions and nothing but truncated completions TRL 1.16 divides by a count that it clamps to 1.

    Loss and gradient are exactly 0 and the weights stay as they are. A 0/0 exists (`masked_seq_mean`), but only in the metrics, where
    TRL expects it: no incident.
    """
    settings: dict[str, Any] = {
        "loss_type": loss_type,
        "mask_truncated_completions": True,
        "max_completion_length": 2,
        **LOSS_TYPES[loss_type],
    }
    trainer = make_trainer(tmp_path, max_steps=2, **settings)
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    silent(train(tmp_path, trainer), trainer)
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert logged[0]["completions/clipped_ratio"] == 1.0
    assert [(entry["loss"], entry["grad_norm"]) for entry in logged] == [(0.0, 0.0)] * 2
    assert all(torch.equal(old, new) for old, new in zip(weights, trainer.model.parameters(), strict=True))


def test_a_batch_truncated_to_nothing_is_silent_with_all_terms(tmp_path: Path) -> None:
    """The same with a reference, an entropy bonus and a quantile over no token at all."""
    settings: dict[str, Any] = {"beta": 0.04, "entropy_coef": 0.01, "top_entropy_quantile": 0.2, "off_policy_mask_threshold": 0.5}
    trainer = make_trainer(tmp_path, max_steps=2, mask_truncated_completions=True, max_completion_length=2, **settings)
    silent(train(tmp_path, trainer), trainer)


# -- rewards -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(
    ("value", "spoilt"),
    [(None, (1,)), (None, (0, 1, 2, 3)), (None, tuple(range(8))), (NAN, (1,)), (INF, (1,)), (-INF, (1,)), (INF, tuple(range(8)))],
    ids=["none for one", "none for a group", "none for all", "nan for one", "inf for one", "-inf for one", "inf for all"],
)
def test_an_unusable_reward_moves_nothing(tmp_path: Path, value: float | None, spoilt: tuple[int, ...], beta: float) -> None:
    """TRL takes None and NaN as unscorable and sets what they make of advantages to 0; scaled by its group's infinite deviation, an
    infinite reward ends there as well. Loss, gradients and weights are finite: no incident, though NaN passed through the rewards."""
    trainer = make_trainer(tmp_path, reward=spoil_reward(value, lambda i: i in spoilt), max_steps=2, beta=beta)
    scope = train(tmp_path, trainer)
    advantages = list(trainer._logs["advantages"])
    assert all(math.isfinite(a) for a in advantages) and all(advantages[i] == 0 for i in spoilt)
    assert scope.verdict.healthy, scope.verdict.sentence
    assert weights_finite(trainer) and trainer.state.global_step == 2


@pytest.mark.parametrize(("loss_type", "sign"), [("dapo", 1), ("dapo", -1), ("grpo", 1)])
def test_an_infinite_reward_without_scaling_is_named(tmp_path: Path, loss_type: str, sign: int) -> None:
    """With scale_rewards="none" the group's other advantages are -inf, which TRL's nan_to_num turns into the largest float.

    Everything is finite again until the loss is summed and overflows: the reward is what came in bad.
    """
    trainer = make_trainer(tmp_path, reward=spoil_reward(sign * INF), scale_rewards="none", loss_type=loss_type, max_steps=1)
    incident = first(train(tmp_path, trainer))
    assert min(sign * a for a in trainer._logs["advantages"]) == -HUGE
    assert (incident.step, incident.phase, incident.cause) == (1, "input", "bad_input")
    assert (incident.origin.index, incident.origin.role, incident.origin.value) == ((1,), "rewards", sign * INF)
    assert incident.origin.masked is not True
    assert incident.loss == sign * INF


# -- half precision ------------------------------------------------------------------------------------------------------------

STALE = {  # (place, advantage): phase, masked, fair causes; min() takes the clipped side of a positive advantage, so its loss is finite
    ("tool", 1): ("backward", True, {"where_grad_trap", "inf_times_zero_mask"}),
    ("tool", -1): ("forward", True, {"inf_times_zero_mask"}),
    ("valid", 1): ("backward", True, {"where_grad_trap"}),
    ("valid", -1): ("forward", False, {"exp_overflow"}),
}


@pytest.mark.parametrize(("place", "advantage"), STALE)
@pytest.mark.parametrize("half", HALVES)
def test_a_stale_token_is_named_in_half_precision(tmp_path: Path, half: str, place: Any, advantage: Any) -> None:
    """An old log-prob 200 nat off, at a masked or a counted token, is the same fault in half precision: TRL's loss is in float32."""
    trainer = make_trainer(tmp_path, FaultyTrainer, fault=Fault(place, advantage), max_steps=2, **HALVES[half])
    incident = first(train(tmp_path, trainer))
    origin = incident.origin
    phase, masked, causes = STALE[place, advantage]
    assert (incident.step, incident.phase, origin.masked) == (2, phase, masked)
    assert incident.cause in causes
    assert (origin.op, origin.variable, origin.role, origin.dtype) == ("exp", "coef_1", "ratio", "float32")
    assert (origin.index, origin.shape, origin.value) == (trainer.planted, trainer.planted_shape, INF)
    assert incident.reached["gradients"] == [27, 27]
    assert incident.fixes[0].works


@dataclass(frozen=True, slots=True)
class Overflow:
    """One scaled weight, and what leaves the range behind it. to: the largest weight after scaling; module: its output overflows."""

    parameter: str
    to: float
    module: str
    ops: frozenset[str]
    role: str = "hidden"


OVERFLOWS = {
    "norm in a layer": Overflow("model.layers.1.input_layernorm.weight", 6e4, "model.layers.1.input_layernorm", frozenset({"mul"})),
    "last norm": Overflow("model.norm.weight", 6e4, "model.norm", frozenset({"mul"})),
    "values": Overflow(
        "model.layers.1.self_attn.v_proj.weight", 6e4, "model.layers.1.self_attn.v_proj", frozenset({"linear", "addmm", "mm", "matmul"})
    ),
    "head": Overflow("lm_head.weight", 6e4, "lm_head", frozenset({"mm", "linear", "matmul"}), "logits"),
}


def scale_to(largest: float) -> Callable[[Tensor], None]:
    """A change of a weight that makes its largest element this large."""

    def change(weight: Tensor) -> None:
        weight.mul_(largest / float(weight.abs().max()))

    return change


def outside_range(trainer: Any, module: str, dtype: torch.dtype, bf16: bool = False) -> Tensor:
    """Plain torch: the output of a module in the spoilt forward, with 0 where no token is attended, [B, S, D]."""
    state, input_ids, attention_mask, _ = trainer.before
    model = make_model(make_tokenizer())
    torch.nn.Module.to(model, dtype)
    model.load_state_dict(state)
    outputs: list[Tensor] = []
    model.get_submodule(module).register_forward_hook(lambda _m, _a, output: outputs.append(output))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    return outputs[0].masked_fill(attention_mask[..., None] == 0, 0)


def first_bad(tensor: Tensor) -> tuple[int, ...]:
    """The index of the first non-finite element."""
    return tuple((~torch.isfinite(tensor)).nonzero()[0].tolist())


@pytest.mark.parametrize("case", OVERFLOWS)
def test_a_value_beyond_65504_is_named_in_the_model(tmp_path: Path, case: str) -> None:
    """In a float16 model one scaled weight drives an activation out of range: op, element, module and fp16_overflow are named."""
    expected = OVERFLOWS[case]
    trainer = make_trainer(tmp_path, Spoilt, dtype=torch.float16, optim="sgd", max_steps=2)
    trainer.parameter, trainer.change = expected.parameter, scale_to(expected.to)
    incident = first(train(tmp_path, trainer))
    origin = incident.origin
    assert weights_in_range(trainer, expected.parameter)
    output = outside_range(trainer, expected.module, torch.float16)
    assert bool(torch.isinf(output).any())
    assert (incident.step, incident.phase, incident.cause) == (2, "forward", "fp16_overflow"), incident.sentence
    # In TRL's fused head the logits are a nameless tile of a buffer.
    assert origin.op in expected.ops and origin.role in (expected.role, "hidden") and origin.dtype == "float16"
    assert math.isinf(origin.value) and origin.masked is not True
    assert expected.role == "logits" or (origin.module or "").split(" ")[0].endswith(expected.module)
    assert incident.fixes[0].id == "upcast_fp32"
    places = first_harmful_logits(trainer, output) if expected.role == "logits" else first_harmful(trainer, output)
    flat = [
        (row * output.shape[1] + column, unit) for row, column, unit in (p for p in places if len(p) == 3)
    ]  # as a linear layer computes
    if expected.role == "logits":  # of the infinite logits it names the first that is +inf, without asking which rows the loss scores
        row, unit = origin.index
        assert bool(torch.isinf(output[:, :-1].flatten(0, 1)[row, unit]))
    else:
        assert origin.index in [*places, *flat]


def weights_in_range(trainer: Any, parameter: str) -> bool:
    """The weight itself is finite: what overflows is made of it."""
    return bool(torch.isfinite(trainer.before[0][parameter]).all())


def first_harmful(trainer: Any, output: Tensor) -> list[tuple[int, ...]]:
    """Where the first non-finite element of a hidden state lies: of all attended tokens, and of those whose log-prob the loss reads."""
    completion_mask = trainer.before[3]
    read = torch.zeros(output.shape[:2], dtype=torch.bool)
    read[:, -completion_mask.size(1) - 1 : -1] = completion_mask.bool()
    return [first_bad(output), first_bad(output.masked_fill(~read[..., None], 0))]


def first_harmful_logits(trainer: Any, logits: Tensor) -> list[tuple[int, ...]]:
    """The same of the logits, as [B, S, V] and flattened as TRL's fused head computes them, [B·(S-1), V].

    A logit of +inf makes the row's normaliser NaN; one of -inf is a probability of 0 and hurts only if it is the token's own.
    """
    _, input_ids, _, completion_mask = trainer.before
    rows, length = input_ids.shape
    scored = torch.zeros(rows, length - 1, dtype=torch.bool)
    scored[:, -completion_mask.size(1) :] = completion_mask.bool()
    logits = logits[:, :-1]
    own = torch.nn.functional.one_hot(input_ids[:, 1:], logits.size(-1)).bool()
    bad = torch.isinf(logits)
    places = [first.nonzero()[0].tolist() for first in (bad, ((logits == INF) | (own & bad)) & scored[..., None])]
    return [place for row, column, token in places for place in ((row, column, token), (row * (length - 1) + column, token))]


@pytest.mark.parametrize(
    "settings", [{}, {"gradient_checkpointing": True}, {"bf16": True}, {"beta": 0.04}], ids=["plain", "checkpointing", "bf16", "beta"]
)
def test_an_overflow_in_the_model_is_located(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The last norm's weight at 3e38 drives float32 out of range inside the model: its multiplication is named, to the element."""
    trainer = make_trainer(tmp_path, Spoilt, max_steps=2, **settings)
    trainer.parameter, trainer.change = "model.norm.weight", scale_to(3e38)
    incident = first(train(tmp_path, trainer))
    output = outside_range(trainer, "model.norm", torch.float32, bf16="bf16" in settings)
    assert (incident.step, incident.phase, incident.cause) == (2, "forward", "magnitude_overflow"), incident.sentence
    assert (incident.origin.op, incident.origin.role) == ("mul", "hidden")
    assert (incident.origin.module or "").split(" ")[0].endswith("norm")
    assert incident.origin.index in first_harmful(trainer, output)


def test_a_nan_weight_is_a_matter_of_the_weights(tmp_path: Path) -> None:
    """One NaN that a callback leaves in a weight between two steps: phase weights, and the parameter and the element are named."""
    name = "model.layers.1.mlp.down_proj.weight"

    class Poison(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 1:
                with torch.no_grad():
                    model.get_parameter(name)[3, 5] = NAN

    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.add_callback(Poison())
    incident = first(train(tmp_path, trainer))
    assert (incident.step, incident.phase, incident.cause) == (2, "weights", "poisoned_weights"), incident.sentence
    assert name in (incident.origin.variable, incident.origin.module, f"{incident.origin.module}.weight")
    assert (incident.origin.index, incident.origin.role) == ((3, 5), "weights")


def test_a_nan_that_attention_makes_in_backward_is_placed(tmp_path: Path) -> None:
    """Attention scores of about 1e10: forward is finite, and the backward of the fused attention alone makes NaN.

    It computes exp(score - logsumexp) again, where rounding of 1e10 leaves hundreds of nat. Before that, no gradient is non-finite: the
    gradient that reaches attention is finite, the one that leaves it is not.
    """
    trainer = make_trainer(tmp_path, Spoilt, max_steps=2)
    trainer.parameter, trainer.change = "model.layers.1.self_attn.q_proj.weight", scale_to(1e11)
    scope = nanscope.watch(trainer, out=tmp_path / "run")
    with scope:
        trainer.train()
    if not attention_backward_is_nan(trainer):
        assert scope.verdict.healthy, scope.verdict.sentence
        return  # this processor's attention survives such scores in backward: there is nothing to tell, and nothing was told
    incident = first(scope)
    assert (incident.step, incident.phase) == (2, "backward"), incident.sentence
    assert incident.loss is not None and math.isfinite(incident.loss)
    assert "attention" in incident.origin.op or "self_attn" in (incident.origin.module or ""), incident.sentence
    assert incident.origin.role in ("attention", "hidden")


def attention_backward_is_nan(trainer: Any) -> bool:
    """Plain torch: do the gradients of query, key or value of the last layer come out non-finite of a finite forward?"""
    state, input_ids, attention_mask, _ = trainer.before
    model = make_model(make_tokenizer())
    model.load_state_dict(state)
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    assert bool(torch.isfinite(logits).all())
    torch.log_softmax(logits[:, -8:], dim=-1)[..., 5].sum().backward()  # type: ignore[no-untyped-call]
    attention = model.model.layers[1].self_attn
    assert bool(torch.isfinite(attention.o_proj.weight.grad).all())
    return not all(bool(torch.isfinite(p.grad).all()) for p in (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))


# -- log-probs of the sampler --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, NAN, -INF], ids=["healthy", "nan", "-inf"])
@pytest.mark.parametrize("mode", IS_MODES)
def test_trl_survives_what_a_sampler_reports(tmp_path: Path, mode: str, value: float | None) -> None:
    """TRL corrects for the sampler: NaN counts as no difference; -inf is an infinite ratio, which the bound of 3 cuts or drops.

    Loss, gradients and weights stay clean. A healthy sampler is no cause for a word; the overflow of -inf is worth a note at most.
    """
    trainer = make_trainer(tmp_path, SampledTrainer, vllm_importance_sampling_mode=mode, max_steps=2)
    trainer.use_vllm = True

    def spoil(log_probs: list[list[float]]) -> None:
        if value is not None:
            log_probs[0][1] = value

    trainer.spoil = spoil
    scope = train(tmp_path, trainer)
    if value is not None and math.isinf(value):
        assert scope.verdict.healthy, scope.verdict.sentence
        assert {note.slug for note in scope.verdict.notes} <= {"nonfinite_absorbed"}
        assert weights_finite(trainer)
    else:
        silent(scope, trainer)


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
def test_a_sampler_of_minus_infinity_without_a_bound_is_named(tmp_path: Path, mode: str) -> None:
    """Without an upper bound nothing cuts the ratio: nan_to_num leaves exp the largest float, its row's loss is infinite.

    What the sampler reported is what came in bad, on a token that counts.
    """
    trainer = make_trainer(
        tmp_path, SampledTrainer, vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=None, max_steps=1
    )
    trainer.use_vllm = True
    trainer.spoil = lambda log_probs: log_probs[0].__setitem__(1, -INF)
    incident = first(train(tmp_path, trainer))
    origin = incident.origin
    assert (incident.step, incident.phase, incident.cause) == (1, "input", "bad_input")
    assert (origin.role, origin.value, origin.index[-1], origin.masked) == ("rollout_log_probs", -INF, 1, False)


@pytest.mark.parametrize("place", ["valid", "padding"])
@pytest.mark.parametrize("value", [NAN, -INF], ids=["nan", "-inf"])
def test_the_off_policy_mask_reads_bad_sampler_log_probs_unharmed(tmp_path: Path, value: float, place: str) -> None:
    """`sampling_per_token_logps` is read for a comparison only, after nan_to_num: neither NaN nor -inf reaches loss or gradient."""
    trainer = make_trainer(tmp_path, Edited, max_steps=2, off_policy_mask_threshold=0.5, max_completion_length=16)

    def edit(trainer: Any, inputs: Inputs) -> Inputs:
        row, column = spot(inputs, place)
        inputs["sampling_per_token_logps"] = put(inputs["old_per_token_logps"], (row, column), value)
        return inputs

    trainer.edit = edit
    scope = train(tmp_path, trainer)
    assert scope.verdict.healthy, scope.verdict.sentence
    assert weights_finite(trainer) and trainer.state.global_step == 2


def spot(inputs: Inputs, place: str) -> tuple[int, int]:
    """A token that counts, or the first one after the end of the shortest completion."""
    lengths = inputs["completion_mask"].sum(dim=1).tolist()
    row = lengths.index(min(lengths) if place == "padding" else max(lengths))
    column = lengths[row] if place == "padding" else 2
    assert column < inputs["completion_mask"].size(1)
    return row, column


@pytest.mark.parametrize("place", ["valid", "padding", "tool"])
@pytest.mark.parametrize("value", [NAN, INF], ids=["nan", "inf"])
def test_a_bad_correction_weight_came_with_the_batch(tmp_path: Path, value: float, place: str) -> None:
    """`importance_sampling_ratio` is multiplied onto the loss before the mask. At a counted token it is a bad input; at another one
    the mask makes 0 · NaN or 0 · inf of it, which are two causes. Gradients of padding are cut off in TRL's fused head, those of a
    tool's token are not."""
    trainer = make_trainer(tmp_path, SampledTrainer, vllm_importance_sampling_mode="token_truncate", max_completion_length=16, max_steps=2)
    trainer.use_vllm = True

    def edit(trainer: Any, inputs: Inputs) -> Inputs:
        if trainer.state.global_step == 1:
            trainer.place = spot(inputs, place)
            if place == "tool":
                inputs["tool_mask"] = put(torch.ones_like(inputs["completion_mask"]), trainer.place, 0)
            inputs["importance_sampling_ratio"] = put(inputs["importance_sampling_ratio"], trainer.place, value)
        return inputs

    trainer.edit = edit
    incident = first(train(tmp_path, trainer))
    origin = incident.origin
    masked = {NAN: "nan_times_zero_mask", INF: "inf_times_zero_mask"}
    cause = "bad_input" if place == "valid" else masked[value]
    assert (incident.step, incident.phase, incident.cause) == (2, "input", cause), incident.sentence
    assert (origin.index, origin.masked, origin.role) == (trainer.place, place != "valid", "is_weight")
    assert incident.reached["gradients"] == [0 if place == "padding" else 27, 27]
    assert origin.value == value or (math.isnan(origin.value) and math.isnan(value))
    assert incident.fixes[0].id in ({"reject_input", "drop_invalid_sample"} if place == "valid" else {"mask_before_op"})
    if value == INF:
        assert "token is NaN" not in incident.sentence


# -- when in a step ------------------------------------------------------------------------------------------------------------


class Sometimes(FaultyTrainer):
    """Plants its fault in backward passes of odd number only, counted from 0."""

    def _plant(self, model: torch.nn.Module, inputs: Inputs, fault: Fault) -> Inputs:
        return super()._plant(model, inputs, fault) if self._step % 2 else inputs


@pytest.mark.parametrize(("advantage", "phase"), [(1, "backward"), (-1, "forward")])
def test_the_second_micro_batch_alone_is_bad(tmp_path: Path, advantage: Any, phase: str) -> None:
    """With two micro-batches a step and the fault in the second, the step is named once, and the element within its micro-batch."""
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "num_iterations": 1, "max_steps": 2}
    trainer = make_trainer(tmp_path, Sometimes, fault=Fault("tool", advantage), **settings)
    scope = train(tmp_path, trainer)
    incident = first(scope)
    assert [i.step for i in scope.verdict.incidents] == [2]
    assert (incident.phase, incident.origin.op, incident.origin.masked) == (phase, "exp", True)
    assert (incident.origin.index, incident.origin.shape) == (trainer.planted, trainer.planted_shape) and trainer.planted_shape[0] == 4
    assert trainer.planted_step == 1
    assert incident.reached["gradients"] == incident.reached["weights"] == [27, 27]


@pytest.mark.parametrize("advantage", [1, -1])
def test_the_first_micro_batch_alone_is_bad(tmp_path: Path, advantage: Any) -> None:
    """The fault in the first of two micro-batches is found there too, though the second is healthy."""

    class First(FaultyTrainer):
        def _plant(self, model: torch.nn.Module, inputs: Inputs, fault: Fault) -> Inputs:
            return inputs if self._step % 2 else super()._plant(model, inputs, fault)

    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "num_iterations": 1, "max_steps": 2}
    trainer = make_trainer(tmp_path, First, fault=Fault("valid", advantage), **settings)
    incident = first(train(tmp_path, trainer))
    assert (incident.step, incident.origin.op, incident.origin.index) == (2, "exp", trainer.planted)
    assert incident.origin.masked is (advantage > 0)  # min() picked the other side


@pytest.mark.parametrize(("advantage", "phase"), [(1, "backward"), (-1, "forward")])
def test_the_second_iteration_alone_is_bad(tmp_path: Path, advantage: Any, phase: str) -> None:
    """With num_iterations=2 and the fault whenever completions are used again, steps 2 and 4 are incidents, 1 and 3 are not."""
    trainer = make_trainer(tmp_path, Sometimes, fault=Fault("tool", advantage, step=0), num_iterations=2)
    scope = train(tmp_path, trainer, on_nonfinite="skip")
    assert [i.step for i in scope.verdict.incidents] == [2, 4]
    assert {(i.phase, i.origin.op, i.origin.variable, i.origin.masked) for i in scope.verdict.incidents} == {(phase, "exp", "coef_1", True)}
    assert scope.verdict.incidents[0].origin.index == trainer.planted
    assert weights_finite(trainer)


def test_a_run_that_dies_of_its_weights_is_still_explained(tmp_path: Path) -> None:
    """TRL cannot sample from NaN weights and raises in the next generation: the verdict names the step and the line before."""
    trainer = make_trainer(tmp_path, FaultyTrainer, fault=Fault("tool", 1))
    scope = nanscope.watch(trainer, out=tmp_path / "run")
    with pytest.raises(RuntimeError, match="probability tensor"), scope:
        trainer.train()
    incident = first(scope)
    assert (incident.step, incident.phase, incident.origin.variable) == (2, "backward", "coef_1")
    assert incident.origin.index == trainer.planted
    assert scope.paths[0] is not None and Path(scope.paths[0]).is_file()


@pytest.mark.parametrize("corrected", [True, False])
def test_a_policy_that_ran_away_overflows_the_kl(tmp_path: Path, corrected: bool) -> None:
    """A learning rate of 100 alone: in the second iteration the policy gives a token e^-1000 and less, and exp(ref - policy) overflows.

    TRL multiplies the estimate by the ratio unless told otherwise, and that ratio is exactly 0 here: inf · 0, a coefficient of 0, and no
    matter of the advantage, which is not 0. Without the correction the overflow itself is the loss.
    """
    trainer = make_trainer(tmp_path, Remembering, beta=0.04, learning_rate=100.0, use_bias_correction_kl=corrected, max_steps=2)
    incident = first(train(tmp_path, trainer))
    origin = incident.origin
    overflow = torch.exp(trainer.reference - trainer.policy)
    assert (incident.step, incident.phase, origin.op, origin.masked) == (2, "forward", "exp", False)
    assert origin.expression == "torch.exp(ref_per_token_logps - per_token_logps)"
    assert origin.index == first_bad(overflow) and origin.value == INF
    assert origin.role in ("kl", "ratio")
    row, column = origin.index
    assert float(trainer.advantages[row]) != 0
    assert float(torch.exp(trainer.policy - trainer.old)[row, column]) == 0
    assert incident.cause == ("inf_times_zero_coef" if corrected else "exp_overflow")
    assert "advantage is exactly 0" not in incident.sentence
    assert incident.fixes[0].id == "clamp_exponent" and incident.fixes[0].works


# -- RLOO ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"beta": 0.05}, {"normalize_advantages": True}, {"bf16": True}, {"mask_truncated_completions": True}]
)
def test_rloo_trains_in_silence(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Healthy RLOO gives no incident and no note."""
    trainer = make_trainer(tmp_path, RLOOTrainer, max_steps=2, **settings)
    silent(train(tmp_path, trainer), trainer)


@pytest.mark.parametrize(("sign", "phase", "masked"), [(1, "backward", True), (-1, "forward", False)])
def test_a_stale_sequence_of_rloo_is_named(tmp_path: Path, sign: int, phase: str, masked: bool) -> None:
    """An old sequence log-prob 200 nat off overflows RLOO's ratio, which is one number a row; min() hides it for a positive advantage."""
    trainer = make_trainer(tmp_path, EditedRLOO, max_steps=2)

    def edit(trainer: Any, inputs: Inputs) -> Inputs:
        if trainer.state.global_step == 1:
            trainer.row = row_of(inputs, sign)
            inputs["old_logps"] = put(inputs["old_logps"], (trainer.row,), float(inputs["old_logps"][trainer.row]) - 200)
        return inputs

    trainer.edit = edit
    incident = first(train(tmp_path, trainer))
    origin = incident.origin
    assert (incident.step, incident.phase, origin.masked) == (2, phase, masked)
    assert (origin.op, origin.variable, origin.role, origin.index) == ("exp", "coef_1", "ratio", (trainer.row,))
    assert incident.cause in ({"where_grad_trap"} if sign > 0 else {"seq_ratio_overflow", "exp_overflow"})
    assert origin.file is not None and origin.file.endswith("rloo_trainer.py")
    assert incident.fixes[0].id == "clamp_exponent" and incident.fixes[0].works


@pytest.mark.parametrize("value", [None, NAN])
def test_an_unscored_completion_of_rloo_moves_nothing(tmp_path: Path, value: float | None) -> None:
    """None and NaN are unscorable in RLOO too: their advantage is 0, and nothing is harmed."""
    trainer = make_trainer(tmp_path, RLOOTrainer, reward=spoil_reward(value), max_steps=2)
    scope = train(tmp_path, trainer)
    assert scope.verdict.healthy, scope.verdict.sentence
    assert trainer._logs["advantages"][1] == 0 and weights_finite(trainer)


def test_an_infinite_reward_of_rloo_is_named(tmp_path: Path) -> None:
    """RLOO never scales, so one infinite reward is enough: its siblings' advantages become the largest float, their mean overflows."""
    trainer = make_trainer(tmp_path, RLOOTrainer, reward=spoil_reward(INF), max_steps=1)
    incident = first(train(tmp_path, trainer))
    assert min(trainer._logs["advantages"]) == -HUGE
    assert (incident.step, incident.phase, incident.cause) == (1, "input", "bad_input")
    assert (incident.origin.index, incident.origin.role, incident.origin.value) == ((1,), "rewards", INF)


# -- DPO -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", DPO_LOSS_TYPES)
def test_dpo_trains_in_silence(tmp_path: Path, loss_type: str) -> None:
    """Every loss type of DPO, healthy: no incident and no note."""
    trainer = make_dpo_trainer(tmp_path, loss_type=[loss_type], **SMOOTHED.get(loss_type, {}))
    silent(train(tmp_path, trainer), trainer)


def with_references(tmp_path: Path, chosen: float | None, rejected: float | None, **settings: Any) -> Any:
    """A DPO trainer whose dataset holds these precomputed reference log-probs for one of its pairs; None leaves TRL's own."""

    class Seeing(EditedTrainer, DPOTrainer):
        """Notes at which row of the first batch the spoilt pair came."""

        def _compute_loss(self, model: torch.nn.Module, inputs: Inputs, *rest: Any) -> Tensor:
            bad = [~torch.isfinite(inputs[name]) for name in ("ref_chosen_logps", "ref_rejected_logps")]
            if not hasattr(self, "row"):
                self.row = int((bad[0] | bad[1]).nonzero()[0])
            return super()._compute_loss(model, inputs, *rest)

    trainer = make_dpo_trainer(tmp_path, Seeing, precompute_ref_log_probs=True, **settings)
    pairs = trainer.train_dataset.to_list()
    for name, value in (("ref_chosen_logps", chosen), ("ref_rejected_logps", rejected)):
        if value is not None:
            pairs[2][name] = value
    trainer.train_dataset = Dataset.from_list(pairs)
    return trainer


@pytest.mark.parametrize(
    ("chosen", "rejected", "loss_type", "gradients"),
    [
        (None, -INF, "sigmoid", 0),  # -logsigmoid(-inf) is +inf with a gradient of -beta: only the loss is ruined
        (None, -INF, "ipo", 27),
        (-INF, None, "ipo", 27),
        (-INF, -INF, "sigmoid", 27),  # inf - inf
        (NAN, None, "sigmoid", 27),
        (None, NAN, "hinge", 0),  # the gradient of a hinge does not depend on the margin's value
    ],
)
def test_a_bad_reference_of_dpo_came_with_the_batch(
    tmp_path: Path, chosen: float | None, rejected: float | None, loss_type: str, gradients: int
) -> None:
    """A precomputed reference log-prob of -inf or NaN in the dataset: phase input, that column, that row, on a pair that counts."""
    trainer = with_references(tmp_path, chosen, rejected, loss_type=[loss_type])
    incident = first(train(tmp_path, trainer))
    origin = incident.origin
    assert (incident.step, incident.phase, origin.masked, origin.role) == (1, "input", False, "ref_log_probs"), incident.sentence
    assert incident.cause in ({"bad_input"} if None in (chosen, rejected) else {"bad_input", "inf_minus_inf"})
    assert (origin.index, origin.shape) == ((trainer.row,), (4,))
    assert origin.variable == ("ref_rejected_logps" if chosen is None else "ref_chosen_logps")
    assert incident.reached["gradients"] == [gradients, 27]
    assert incident.fixes[0].id in ("reject_input", "drop_invalid_sample")


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge"])
def test_a_chosen_answer_that_the_reference_excludes_is_harmless(tmp_path: Path, loss_type: str) -> None:
    """-logsigmoid(+inf) and relu(1 - inf) are 0 with a gradient of 0: an infinite margin ruins nothing, and nothing is blamed."""
    trainer = with_references(tmp_path, -INF, None, loss_type=[loss_type])
    scope = train(tmp_path, trainer)
    assert scope.verdict.healthy, scope.verdict.sentence
    assert weights_finite(trainer) and trainer.state.global_step == 2


# -- trl.experimental ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"beta": 0.04}, {"bf16": True}, {"top_entropy_quantile": 0.5}])
def test_gmpo_trains_in_silence(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Healthy GMPO of trl.experimental gives no incident and no note."""
    trainer = make_trainer(tmp_path, GMPOTrainer, config_class=GMPOConfig, max_steps=2, **settings)
    silent(train(tmp_path, trainer), trainer)


def stale_gmpo(tmp_path: Path, value: float, sign: int, tool: bool) -> Any:
    """GMPO with one old log-prob replaced in step 2, at a counted or a tool's token of a row with an advantage of this sign."""
    trainer = make_trainer(tmp_path, EditedGMPO, config_class=GMPOConfig, max_steps=2)

    def edit(trainer: Any, inputs: Inputs) -> Inputs:
        if trainer.state.global_step == 1:
            row = row_of(inputs, sign)
            trainer.place = row, int(inputs["completion_mask"][row].sum()) // 2
            inputs["old_per_token_logps"] = put(inputs["old_per_token_logps"], trainer.place, value)
            if tool:
                inputs["tool_mask"] = put(torch.ones_like(inputs["completion_mask"]), trainer.place, 0)
        return inputs

    trainer.edit = edit
    return trainer


def test_a_stale_token_of_gmpo_overflows_its_sequence(tmp_path: Path) -> None:
    """GMPO clips one side in log space: at a negative advantage 10 000 nat pass, and exp of the sequence's mean overflows."""
    trainer = stale_gmpo(tmp_path, -1e4, sign=-1, tool=False)
    incident = first(train(tmp_path, trainer))
    origin = incident.origin
    assert (incident.step, incident.phase, incident.cause) == (2, "forward", "seq_ratio_overflow")
    assert (origin.op, origin.variable, origin.role, origin.index) == ("exp", "coef", "ratio", (trainer.place[0],))
    assert origin.masked is not True
    assert origin.file is not None and origin.file.endswith("gmpo_trainer.py")
    assert incident.fixes[0].id == "clamp_exponent" and incident.fixes[0].works


@pytest.mark.parametrize(("value", "cause"), [(-INF, "inf_times_zero_mask"), (NAN, "nan_times_zero_mask")])
def test_a_masked_token_of_gmpo_is_multiplied_by_its_mask(tmp_path: Path, value: float, cause: str) -> None:
    """GMPO masks by multiplication: an old log-prob of -inf at a tool's token gives inf · 0, one of NaN gives NaN · 0."""
    trainer = stale_gmpo(tmp_path, value, sign=-1, tool=True)
    incident = first(train(tmp_path, trainer))
    origin = incident.origin
    assert (incident.step, incident.phase, incident.cause) == (2, "input", cause), incident.sentence
    assert (origin.index, origin.role, origin.masked) == (trainer.place, "old_log_probs", True)
    assert incident.fixes[0].id == "mask_before_op" and incident.fixes[0].works
    if math.isinf(value):
        assert "token is NaN" not in incident.sentence


@pytest.mark.parametrize(("value", "tool"), [(-1e4, False), (-1e4, True), (-INF, False), (-INF, True)])
def test_gmpo_clips_a_positive_advantage(tmp_path: Path, value: float, tool: bool) -> None:
    """At a positive advantage the minimum takes the clipped side in log space, before exp, and nothing is harmed."""
    trainer = stale_gmpo(tmp_path, value, sign=1, tool=tool)
    scope = train(tmp_path, trainer)
    assert scope.verdict.healthy, scope.verdict.sentence
    assert weights_finite(trainer) and trainer.state.global_step == 2
