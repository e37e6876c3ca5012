"""What an EAGLE-3 head proposes as a tree at every position of a text at once (AdaServe, section 4.1).

Each position goes on by itself, as in `chains`, with the nodes of its beam. A node sees its ancestors in its tree, so
the row of a node has the keys of these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.record.chains import Visible, attending_layer
from training.eagle3.head import Head


class Beams(NamedTuple):
    """The w nodes of the likeliest paths at M positions and K depths, likeliest first. All (M, K, w).

    The greedy chain's node is always among them; if need be it replaces the last one (`torch_engine.drafts.beam`).
    """

    tokens: Tensor
    parent: Tensor
    """Index of each node's parent among the w nodes of the depth before; 0 at the first depth."""
    logprob: Tensor
    """Log-probability of the node, given its parent, in the drafter's distribution."""


@torch.inference_mode()
def propose_beams(
    head: Head, embed: nn.Module, tokens: Tensor, fused: Tensor, first: int, count: int, length: int, width: int,
    visible: Visible,
) -> Beams:  # fmt: skip
    """Return the beams at positions first..first+count-1; tokens (N + 1,), fused (N, 3H): see `chains`."""
    dtype = head.fc.weight.dtype
    state: Tensor = head.fc(fused[None].to(dtype))  # (1, N, H)
    n, chain = state.shape[1], list[tuple[Tensor, Tensor]]()
    keys, places = torch.arange(n), torch.arange(first, first + count)
    seen = visible(keys[:, None], keys[None])
    state = attending_layer(head, embed(tokens[None, 1 : n + 1]).to(dtype), state, keys, seen, chain)[:, places]
    paths, chained, levels = torch.zeros(count, 1), torch.zeros(count, dtype=torch.long), []
    for step in range(length):
        best = _grow(head, state[0], paths, chained, width)
        levels.append(best)
        paths, chained = best.path, best.chained
        if step + 1 < length:
            rows = (torch.arange(count)[:, None] * (1 if step == 0 else width) + best.parent).flatten()  # (M * w,)
            text, own = chain[0], chain[1:]
            chain = [text, *((key[:, :, rows], value[:, :, rows]) for key, value in own)]
            token = embed(best.token.flatten()[None]).to(dtype)
            at, sees = (places + 1 + step).repeat_interleave(width), seen[places].repeat_interleave(width, 0)
            state = attending_layer(head, token, state[:, rows], at, sees, chain)
    return Beams(
        *(torch.stack([getattr(level, name) for level in levels], 1) for name in ("token", "parent", "logprob"))
    )


class _Grown(NamedTuple):
    """Nodes of the next depth. All (M, w)."""

    token: Tensor
    parent: Tensor
    logprob: Tensor
    path: Tensor
    chained: Tensor
    """(M,): index of the greedy chain's node."""


def _grow(head: Head, state: Tensor, paths: Tensor, chained: Tensor, width: int) -> _Grown:
    """Choose the w best children. state (M * v, H), paths (M, v): states and log-probabilities of the v nodes of the
    depth before. chained: (M,), index of the greedy chain's node among them."""
    logs = head.lm_head(head.norm(state)).float().log_softmax(-1)
    edges, token = logs.topk(width, -1)  # (M * v, w)
    v = paths.shape[1]
    edges, token = edges.reshape(-1, v * width), head.vocabulary[token].reshape(-1, v * width)
    whole = edges + paths.repeat_interleave(width, 1)
    best, chain = whole.topk(width, -1).indices, chained * width  # a node's first child is its likeliest
    best[:, -1] = torch.where((best == chain[:, None]).any(1), best[:, -1], chain)
    place = (best == chain[:, None]).int().argmax(1)
    return _Grown(token.gather(1, best), best // width, edges.gather(1, best), whole.gather(1, best), place)
