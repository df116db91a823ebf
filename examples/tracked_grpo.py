"""A TRL GRPO run whose tracker shows days before that it will die: the headroom of the loss falls while the loss looks well.

    python examples/tracked_grpo.py                             # prints what the trainer logs, which is what any tracker gets
    python examples/tracked_grpo.py --report-to tensorboard     # or wandb, mlflow, trackio: the same as curves

The policy is that of trl_grpo.py. One token that a tool wrote, masked out of the loss, has an old log-prob that falls by 12 nats a step, as
where a policy drifts away from a text that it did not write. What is new in a run of your own is the line with `callbacks`.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer
from trl_grpo import build_trainer

import nanscope


class DriftingToolTokens(GRPOTrainer):
    """A trainer whose sampler and policy drift apart on one token that a tool wrote."""

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        row = int(inputs["advantages"].argmax())  # A > 0: the loss stays finite, only the gradient shows the overflow
        column = int(inputs["completion_mask"][row].sum()) // 2
        tool_mask = torch.ones_like(inputs["completion_mask"])
        tool_mask[row, column] = 0  # written by a tool: seen by the policy, not trained on
        old_per_token_logps = inputs["old_per_token_logps"].clone()
        old_per_token_logps[row, column] -= 12.0 * self.state.global_step
        inputs = {**inputs, "tool_mask": tool_mask, "old_per_token_logps": old_per_token_logps}
        return super()._compute_loss(model, inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report-to", action="append", default=[], help="a tracker that transformers knows; may be given again")
    parser.add_argument("--out", type=Path, default=Path("nanscope-runs"), help="where nanscope saves (default: %(default)s)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # TRL 1.16 uses names that newer transformers releases changed

    watching = nanscope.integrations.Callback(out=args.out, trackers=[nanscope.integrations.Live()])
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = build_trainer(DriftingToolTokens, 10, output_dir, callbacks=[watching], report_to=args.report_to)
        try:
            trainer.train()
        except RuntimeError as error:  # what people see first: some steps later, sampling from the NaN policy fails
            print(f"training stopped: {error}")

    print("step      loss  nanscope/headroom_nats  nanscope/bad_steps")
    for line in trainer.state.log_history:
        if "loss" in line:
            headroom = line.get("nanscope/headroom_nats")
            shown = "" if headroom is None else f"{headroom:.1f}"
            print(f"{line['step']:>4}  {line['loss']:>8.4f}  {shown:>22}  {line['nanscope/bad_steps']:>18.0f}")


if __name__ == "__main__":
    main()
