"""Training on two processes: `python ranks.py RANK PORT OUT CASE…`, a case being KIND:FAULT:MODE. Prints one line of JSON for each.

Every case is trained twice, bare and watched, in a process group of its own, so that one that fails does not spoil the next. A step that is
bad is bad on rank 0, or where the fault says so.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import nanscope

WORDS, BAD, STEPS = 12, 2, 4
MESHES: list[Any] = []


class Policy(nn.Module):
    def __init__(self, reduces: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.hidden = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, WORDS)
        self.overflows = False
        self.reduces = reduces  # a collective in a model of plain weights, as one of hand-made parallel layers has it

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.hidden(self.drop(self.embed(ids))))
        if self.reduces:
            DTensor.from_local(x.detach(), MESHES[-1], [Partial()], run_check=False).full_tensor()
        if self.overflows:
            x = x + torch.exp(x.abs() * 0 + 100.0)
        out: Tensor = self.head(x)
        return out


def fsdp2(net: Policy) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for part in (net.hidden, net.head):
        fully_shard(part, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def tensor_parallel(net: Policy, head: Any = None) -> nn.Module:
    plan = {
        "embed": ColwiseParallel(output_layouts=Replicate()),
        "hidden": ColwiseParallel(output_layouts=Replicate()),
        "head": head or ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(net, init_device_mesh("cpu", (2,)), plan)


def fsdp1(net: Policy, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), **options)


KINDS: dict[str, Callable[[Policy], nn.Module]] = {
    "ddp": nn.parallel.DistributedDataParallel,
    "fsdp1": fsdp1,
    "fsdp1_orig": lambda net: fsdp1(net, use_orig_params=True),
    "fsdp2": fsdp2,
    "tp": tensor_parallel,
    "tp_loss": lambda net: tensor_parallel(net, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)),
    "manual": lambda net: net,
    "reducing": lambda net: net,
}


def loss_of(logits: Tensor, ids: Tensor, fault: str, kind: str) -> Tensor:
    if kind == "tp_loss":
        per_token = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = per_token.mean()
        return loss * (math.nan if fault == "loss" else 1.0)
    log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    mask = torch.ones_like(log_probs) * (fault != "loss")
    ratio = torch.exp(log_probs - log_probs.detach() + (1000.0 if fault == "edge" else 0.0))
    surrogate = torch.min(ratio, ratio.clamp(0.8, 1.2)) * (1e25 if fault == "clip" else 1.0)
    return -(surrogate * mask).sum() / mask.sum() - 0.1 * log_probs.mean()


def issued() -> int:
    """How many collectives this process has issued so far, in all groups."""
    groups = list(torch.distributed.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


def local(tensor: Tensor) -> Tensor:
    found: Tensor = getattr(tensor.detach(), "_local_tensor", tensor.detach())
    return found


def train(kind: str, fault: str, scope: Any) -> dict[str, Any]:
    """Train and return what a run that is watched must not change."""
    rank = torch.distributed.get_rank()
    alike = kind in ("tp", "tp_loss")
    MESHES.append(init_device_mesh("cpu", (2,)))
    torch.manual_seed(0)
    net = Policy(kind == "reducing")
    model = KINDS[kind](net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 if alike else 10 + rank)
    before, losses = issued(), []
    with scope:
        for step in range(STEPS):
            now = fault.removesuffix("_drop").removesuffix("_all") if step == BAD and (rank == 0 or fault.endswith("_all")) else ""
            ids = torch.randint(0, WORDS, (2, 5))
            net.overflows = now == "model"
            with loss_parallel() if kind == "tp_loss" else contextlib.nullcontext():
                loss = loss_of(model(ids[:, :-1]), ids, now, kind)
                optimizer.zero_grad()
                loss.backward()
            losses.append(float(local(loss)))
            if kind in ("manual", "reducing"):
                for parameter in model.parameters():
                    torch.distributed.all_reduce(parameter.grad)
                    parameter.grad /= 2
            if kind.startswith("fsdp1"):
                norm = model.clip_grad_norm_(1.0)  # type: ignore[operator]
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if fault.endswith("_drop") and not bool(getattr(norm, "full_tensor", lambda norm=norm: norm)().isfinite()):
                continue  # the gradients go when the next loss has been computed
            if now == "late":
                largest = max((p for p in model.parameters() if p.grad is not None), key=lambda p: local(p.grad).numel())
                local(largest.grad).view(-1)[0] = math.nan
            for group in optimizer.param_groups:
                group["lr"] = math.inf if now == "optimizer" else 1e-2
            optimizer.step()
    digest = hashlib.sha256()
    for tensor in (*(local(p) for p in model.parameters()), torch.get_rng_state()):
        digest.update(tensor.contiguous().numpy().tobytes())
    return {"weights": digest.hexdigest()[:16], "losses": str(losses), "issued": issued() - before}


def case(name: str, out: str) -> dict[str, Any]:
    kind, fault, mode = name.split(":")
    try:
        bare = train(kind, fault, contextlib.nullcontext())
        scope = nanscope.watch(out=f"{out}/{name.replace(':', '-')}", on_nonfinite=mode)
        watched = train(kind, fault, scope)
        found = scope.verdict
        first = found.incidents[0] if found.incidents else None
        return {
            "bare": bare,
            "watched": watched,
            "status": found.status,
            "steps": scope.steps,
            "skipped": scope.skipped,
            "gaps": [gap.slug for gap in found.gaps],
            "notes": [[note.slug, note.text] for note in found.notes],
            "incidents": [[i.step, i.rank, str(i.cause), i.phase, i.origin.op] for i in found.incidents],
            "sentence": found.sentence,
            "headline": first.headline if first else "",
        }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main(rank: int, port: int, out: str, cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    patience = datetime.timedelta(seconds=15)
    store = torch.distributed.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=patience)
    for name in cases:
        own = torch.distributed.PrefixStore(name, store)
        torch.distributed.init_process_group("gloo", store=own, rank=rank, world_size=2, timeout=patience)
        print(json.dumps({"case": name, **case(name, out)}), flush=True)
        torch.distributed.destroy_process_group()
    store.set(f"done{rank}", "")
    store.wait(["done0", "done1"], patience)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
