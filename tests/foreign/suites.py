"""The test suites of others that are run under nanscope, one row each, and what is known of the incidents in them."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch


@dataclass(frozen=True, slots=True)
class Suite:
    """One suite.

    package: whose version is told. what: pytest's arguments, from the root of a checkout. every: of the tests one in so many is run.
    roots: folders of the checkout that modules are imported from, beside its own. sdist: does the source distribution hold the tests? Then no checkout is needed. longest: seconds of one test.
    """

    name: str
    package: str
    what: tuple[str, ...]
    every: int = 1
    roots: tuple[str, ...] = ()
    sdist: bool = False
    longest: int = 60


def files(pattern: str, names: str) -> tuple[str, ...]:
    return tuple(pattern.format(name) for name in names.split())


DEEP = 1  # of so many steps one is looked at deeply

# Without a conftest that wants more than the tests, without pytest's handler of the log where tests format records their own way.
ALONE = ("--noconftest", "-p", "no:logging")
COMPILERS = ("-k", "not test_multi_grad_all_hooks")  # compiles an extension for minutes
NEEDS_MORE = ("--without", "liger_kernel", "-k", "not vlm and not vision")  # Liger's kernels need a GPU, and stay for later tests

MODES = "python_dispatch module_tracker flop_counter autocast stateless subclass autograd_fallback"
NN = "module_hooks parametrization lazy_modules multihead_attention embedding dropout load_state_dict"
TRL = "grpo rloo dpo kto sft reward"  # with the models that tiny_hub.py makes
AREAL = "functional prox_approx ppo_stats rejection_sampling adv_norm_config dpo vocab_parallel per_layer_optim_step"
VERL = "core_algos_on_cpu rollout_corr rollout_corr_integration"
SKYRL = "losses off_policy_correction skip_fwd_logprobs"
NEMO = "test_loss_functions test_advantage_estimator x_token/test_loss_utils"  # most of the first want a GPU
SLIME = "policy_loss cispo_loss ppo_logprob_entropy loss_cp_invariance advantage_whiten_cp ppo_kl_metric"
COOKBOOK = "supervised/common recipes/sdft/sdft rl/multiturn_weight_assignment weights/merge weights/adapter weights/quantized"

SUITES = (
    Suite("torch-autograd", "torch", ("test/test_autograd.py", *ALONE, *COMPILERS)),
    Suite("torch-modes", "torch", (*files("test/test_{}.py", MODES), *ALONE)),
    Suite("torch-nn", "torch", (*files("test/nn/test_{}.py", NN), *ALONE), every=3),
    Suite("torch-optim", "torch", ("test/test_optim.py", *ALONE), every=8, longest=180),
    Suite("torchrl", "torchrl", ("test/objectives",), every=12),
    Suite("trl", "trl", (*files("tests/test_{}_trainer.py", TRL), *NEEDS_MORE), every=6, longest=180),
    Suite("areal", "areal", files("tests/test_{}.py", AREAL)),
    Suite("tinker-cookbook", "tinker_cookbook", files("tinker_cookbook/{}_test.py", COOKBOOK)),
    Suite("verl", "verl", (*files("tests/trainer/ppo/test_{}.py", VERL), "tests/utils/test_torch_functional.py")),
    Suite(
        "skyrl",
        "skyrl",
        (*files("tests/train/algorithms/test_{}.py", SKYRL), "tests/backends/skyrl_train/utils/test_ppo_utils.py"),
        roots=("skyrl-gym",),
    ),
    Suite("nemo-rl", "nemo_rl", (*files("tests/unit/algorithms/{}.py", NEMO), *ALONE)),
    Suite("liger", "liger_kernel", ("test/chunked_loss",), every=40, roots=("src",)),
    Suite("slime", "slime", files("tests/test_{}.py", SLIME)),
    Suite("openrlhf", "openrlhf", ("tests/test_loss_aggregation.py",)),
    Suite("stable-baselines3", "stable_baselines3", ("tests",), sdist=True, every=8),
)

# Of incidents that are true ones: a test, and what it does.
TRUE = (
    ("*::test_anomaly_detect_nan", "divides a gradient by 0, to see that anomaly detection says so"),
    ("*::test_anomaly_mode_no_check_nan", "makes a gradient NaN, to see that nobody says so"),
    ("*::test_nested_anomaly_*", "makes a gradient of a gradient NaN, to see that anomaly detection says so"),
    ("*::test_power_function", "raises 0 to the power of −1"),
    (
        "*::TestDPOTrainer::test_train_model_dtype",
        "trains in float16 at a learning rate of 0.1: weights are NaN from step 4 on, bare as well; NaN has changed",
    ),
    ("*::test_min_max_median_backprops_to_all_values*", "takes extrema of NaN"),
)

# Why an outcome differs where no probe of `run.py` tells.
KNOWN = (
    ("*::test_hook_closure_cycle*", "the loss of the latest backward pass is held until the next one"),
    ("*::test_current_graph_task_id", "a deep look makes a backward pass of its own, and torch numbers all of them"),
    ("*::TestFlopCounter::test_hook_registration", "the test counts the hooks of all modules, and the watch has one"),
    ("*::test_always_called_forward_hooks", "the test counts the hooks of all modules, and the watch has one"),
)


def said_of(test: str, rows: tuple[tuple[str, str], ...]) -> str:
    """Return the words of the first row that a test fits."""
    return next((words for pattern, words in rows if fnmatch(test, pattern)), "")
