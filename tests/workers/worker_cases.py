"""What is to be said of each run of a framework's own worker, and how a driver is run. Read by the test and by the table of the documentation."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Said:
    """One incident: step and micro-batch, cause, what the code calls it (variable or function), role, element, mask, part of the remedy.

    of: the step that it follows from.
    """

    step: int
    micro_batch: int
    cause: str
    name: str
    role: str | None
    index: tuple[int, ...] | None = None
    masked: bool | None = None
    remedy: str = ""
    of: int | None = None

    def misses(self, told: dict[str, Any]) -> list[str]:
        """Return what an incident says otherwise."""
        found = {
            "step": (told["step"], self.step),
            "micro-batch": (told["micro_batch"], self.micro_batch),
            "cause": (told["cause"], self.cause),
            "role": (told["role"], self.role),
            "masked": (told["masked"] if self.masked is not None else None, self.masked),
            "follows from": (told["consequence_of"], self.of),
            "element": (told["index"] if self.index is not None else None, list(self.index) if self.index is not None else None),
        }
        wrong = [f"{what} {said!r}, not {wanted!r}" for what, (said, wanted) in found.items() if said != wanted]
        if self.name and self.name not in (told["variable"], str(told["function"])):
            wrong.append(f"name {told['variable']!r} in {told['function']!r}, not {self.name!r}")
        if self.remedy and not any(self.remedy in line for line in told["remedies"]):
            wrong.append(f"no remedy {self.remedy!r} in {told['remedies']!r}")
        return wrong


@dataclass(frozen=True, slots=True)
class Expected:
    """One case of a driver: the incidents of the run, none for a healthy one.

    known: what nanscope says wrong there, "" if all is right. steps: that the framework takes; some refuse a batch that is bad.
    """

    driver: str
    case: str
    said: tuple[Said, ...] = ()
    ranks: int = 1
    known: str = ""
    steps: int = 3

    def __str__(self) -> str:
        return f"{self.driver}-{self.case}{'' if self.ranks == 1 else f'-{self.ranks} ranks'}"

    def misses(self, told: dict[str, Any]) -> list[str]:
        """Return what is wrong with what was told, nothing if all is right."""
        if "error" in told:
            return [told["error"]]
        wrong = [] if told["same"] else ["the watched run has other weights than the bare one"]
        wrong += [] if told["steps"] == self.steps else [f"{told['steps']} steps"]
        wrong += [f"not seen: {gap}" for gap in told["gaps"]]
        if (told["status"] == "healthy") != (not self.said) or len(told["incidents"]) < len(self.said):
            return [*wrong, f"{told['status']}: {told['sentence']}"]
        return [*wrong, *(miss for said, one in zip(self.said, told["incidents"], strict=False) for miss in said.misses(one))]


def weights(weight: str = "model.embed_tokens.weight", first: str | None = None) -> tuple[Said, ...]:
    """An update wrote NaN into the weights: the step that did it, and the one that follows from it."""
    named = weight if first is None else first
    return (Said(2, 2, "unknown", named, "optimizer"), Said(3, 1, "poisoned_weights", weight, "weights", of=2))


VANILLA = "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"
TRAP = Said(2, 1, "where_grad_trap", "ratio", "ratio", (1, 2), True, VANILLA)
CAME = Said(2, 1, "bad_input", "tensor", "old_log_probs", (0, 3), False, VANILLA)
NOTHING = Said(2, 1, "empty_mask_mean", "agg_loss", "loss", (), None, "actor_rollout_ref.actor.loss_agg_mode=token-sum")
REGULAR = "trainer.algorithm.policy_loss_type=regular"
NONE_COUNTS = Said(2, 1, "empty_mask_mean", "aggregate_loss", "loss", (), None, "drop the step's batch if it has no valid token")
PATCHED = Said(2, 1, "inf_times_zero_mask", "importance_ratio", "ratio", (2,), True, "no option clamps")
SEQUENCES = "actor.importance_sampling_level=sequence"
COMPILED = "its policy loss is compiled, and what is compiled is not looked into: told is that the gradient is bad, and no line"

EXPECTED = (
    Expected("verl", "healthy kl"),
    Expected("verl", "masked +200, clamped"),
    Expected("verl", "masked +200", (TRAP,)),
    Expected("verl", "old -inf, open", (CAME,)),
    Expected("verl", "masked micro-batch"),
    Expected("verl", "masked batch", (NOTHING,)),
    Expected("verl", "weights", weights()),
    Expected("verl", "critic healthy"),
    Expected("verl", "critic weights", weights()),
    Expected("verl", "healthy kl", ranks=2),
    Expected("verl", "masked +200", (TRAP,), ranks=2),
    Expected("verl", "weights", weights(), ranks=2),
    Expected("openrlhf", "healthy kl"),
    Expected("openrlhf", "masked +200"),
    Expected("openrlhf", "masked batch", (NONE_COUNTS,)),
    Expected("openrlhf", "weights", weights(weight="model.module.model.embed_tokens.weight", first="")),
    Expected("openrlhf", "zero0 healthy"),
    Expected("openrlhf", "zero2 healthy"),
    Expected("openrlhf", "zero2 masked batch", (NONE_COUNTS,)),
    Expected("openrlhf", "zero2 weights", weights(weight="model.module.model.embed_tokens.weight", first="")),
    Expected("skyrl", "healthy kl"),
    Expected("skyrl", "masked +200, clamped"),
    Expected("skyrl", "masked +200", (Said(2, 1, "inf_times_zero_mask", "prob_ratio", "ratio", (1, 2), True, REGULAR),)),
    Expected("skyrl", "old -inf, clamped"),
    Expected("skyrl", "old -inf", (Said(2, 1, "bad_input", "old_log_probs", "old_log_probs", (0, 3), False, REGULAR),)),
    Expected("skyrl", "masked micro-batch"),
    Expected("skyrl", "masked batch"),
    Expected("skyrl", "weights", weights(weight="model.model.embed_tokens.weight", first="")),
    Expected("nemo_rl", "healthy"),
    Expected("nemo_rl", "masked +200", (Said(2, 1, "where_grad_trap", "ratios", "ratio", (0, 4), True, "loss_fn.use_cispo=true"),)),
    Expected("nemo_rl", "masked +200, cispo"),
    Expected("nemo_rl", "old -inf", (Said(2, 1, "bad_input", "data", "old_log_probs", (0, 6), remedy="loss_fn.use_cispo=true"),)),
    Expected("nemo_rl", "masked batch"),
    Expected("nemo_rl", "weights", weights(weight="", first="")),
    Expected("prime_rl", "healthy"),
    Expected("prime_rl", "masked +200", (PATCHED,)),
    Expected("prime_rl", "masked +200, ipo", (PATCHED,)),
    Expected("prime_rl", "old -inf", (Said(2, 1, "bad_input", "part", "rollout_log_probs", (0, 3), False, "no option clamps"),)),
    Expected("prime_rl", "masked batch"),
    Expected("prime_rl", "weights", weights(weight="", first="")),
    Expected("slime", "healthy"),
    Expected("slime", "healthy kl"),
    Expected("slime", "masked +200", (Said(2, 1, "where_grad_trap", "ratio", "ratio", None, True),), known=COMPILED),
    Expected("slime", "masked +200, cispo"),
    Expected("slime", "old -inf", (Said(2, 1, "bad_input", "", "old_log_probs"),), known=COMPILED),
    Expected("slime", "masked batch"),
    Expected("slime", "weights", weights(weight="", first="")),
    Expected("areal", "healthy"),
    Expected("areal", "masked +200", (Said(2, 1, "where_grad_trap", "ppo_actor_loss_fn", "ratio", (13,), True, SEQUENCES),), steps=2),
    Expected(
        "areal", "masked +200, dual clip", (Said(2, 1, "where_grad_trap", "ppo_actor_loss_fn", "ratio", (13,), True, SEQUENCES),), steps=2
    ),
    Expected("areal", "old -inf", steps=2),
    Expected("areal", "masked batch"),
    Expected("areal", "weights", weights(weight="", first="")[:1], steps=2),
)


def missing(driver: str) -> str:
    """Return why a driver cannot be run here, "" if it can."""
    return "" if find_spec(driver) is not None else f"{driver} is not installed"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@cache
def told(driver: str, ranks: int, out: Path) -> list[dict[str, dict[str, Any]]]:
    """Run all expected cases of a driver in one process a rank; return what each rank was told, by case."""
    cases = [one.case for one in EXPECTED if (one.driver, one.ranks) == (driver, ranks)]
    own = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / f"{driver}_worker.py"), str(out / f"{driver}{ranks}"), *cases],
            env={**os.environ, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    said = []
    try:
        for process in processes:
            output, error = process.communicate(timeout=400)
            found = {line["name"]: line for line in map(json.loads, filter(lambda text: text.startswith('{"name"'), output.splitlines()))}
            if process.returncode or len(found) < len(cases):
                raise RuntimeError(error[-3000:])
            said.append(found)
    finally:
        for process in processes:
            process.kill()
    return said
