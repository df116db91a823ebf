"""Fused attention: softmax(query · keyᵀ + bias) · value in one call, by a kernel that each device has under another name.

A kernel of another device than the one that a step is run again on is answered by what torch attends with here. What draws which tokens to
drop out is no part of a program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nanscope.program.ops import ATTENTIONS

HERE = "_scaled_dot_product_flash_attention_for_cpu"


def drops_out(name: str, given: Mapping[str, Any]) -> bool:
    """Does a call draw what it leaves out? name: of its operator. given: its arguments by name."""
    return name in ATTENTIONS and given.get("dropout_p", 0.0) != 0.0


def bias_of(given: Mapping[str, Any]) -> Tensor | None:
    """Return what is added to the scores, None if nothing is."""
    bias = given.get("attn_mask", given.get("attn_bias"))
    return bias if isinstance(bias, Tensor) else None


def unfit(given: Mapping[str, Any]) -> str | None:
    """Say what no kernel checks of its arguments: whether they fit together; None if they do."""
    query, key, value, bias = given.get("query"), given.get("key"), given.get("value"), bias_of(given)
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return None  # torch refuses it
    if drops_out(HERE, given):
        return "it draws what it drops out"
    tensors = (query, key, value)
    if any(one.dim() != 4 or not one.is_floating_point() or one.dtype is not query.dtype or 0 in one.shape for one in tensors):
        return "query, key and value are no four dimensions of one floating dtype"
    if any(one.shape[3] > 1 and one.stride(3) != 1 for one in tensors):
        return "the numbers of a token do not lie side by side"
    rows, heads, length, width = query.shape
    if key.shape[:3] != value.shape[:3] or key.shape[0] != rows or key.shape[3] != width or heads % key.shape[1]:
        return "query, key and value do not fit together"
    if bias is None:
        return None
    wide = (rows, heads, length, key.shape[2])
    fits = bias.dim() <= 4 and all(n in (1, m) for n, m in zip(reversed(bias.shape), reversed(wide), strict=False))
    return None if fits and bias.dim() >= 2 and bias.dtype in (torch.bool, query.dtype) else "its mask does not fit the scores"


def attended(given: Mapping[str, Any], results: int) -> list[Any]:
    """Return what a kernel of another device gives, as it is computed here; of its other results, which its backward reads, no element."""
    query, key, value = given["query"], given["key"], given["value"]
    made = torch.nn.functional.scaled_dot_product_attention(
        *(query, key, value),
        attn_mask=bias_of(given),
        is_causal=bool(given.get("is_causal", False)),
        scale=given.get("scale"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return [made, *[query.new_empty(0) for _ in range(results - 1)]]
