"""Room for what drafts write behind a request's last token, and for their tokens in vLLM's buffers.

vLLM reserves both by the method of the one drafter that its config names. A pool's widest member may write further:
into pages of other requests, and so into other drafts' keys, or the target's where layers share memory.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

from vllm.config import SpeculativeConfig, VllmConfig

from outrider_runtime.vllm_plugin.arguments import LOOKAHEAD_TOKENS

_NEW_SLOTS = "outrider_new_slots"


@cache
def install() -> None:
    """Have vLLM's configs say what the widest member needs, in this process."""
    lookahead: Any = VllmConfig.num_lookahead_tokens
    slots: Any = SpeculativeConfig.max_num_new_slots_for_drafting

    @wraps(lookahead.fget)
    def num_lookahead_tokens(config: Any) -> int:
        return max(int(lookahead.fget(config)), widest_lookahead(config))

    @wraps(slots.fget)
    def max_num_new_slots_for_drafting(config: Any) -> int:
        reserved = vars(config).get(_NEW_SLOTS)
        return int(slots.fget(config) if reserved is None else reserved)

    VllmConfig.num_lookahead_tokens = property(num_lookahead_tokens)
    SpeculativeConfig.max_num_new_slots_for_drafting = property(max_num_new_slots_for_drafting)


def widest_lookahead(vllm_config: Any) -> int:
    """Tokens behind a request's last one that the pool's widest block drafter writes; 0 without any."""
    additional = vllm_config.additional_config
    return int(additional.get(LOOKAHEAD_TOKENS, 0)) if isinstance(additional, dict) else 0


def reserve_batch_tokens(vllm_config: Any) -> None:
    """Have a step's token budget hold the block of every running request only where buffers are too small for all.

    vLLM keeps a block's tokens free for each running request, whether or not it is drafted for. A block drafter's pass
    and its context have buffers of their own, each of the batch's most tokens."""
    width = widest_lookahead(vllm_config)
    if not width:
        return
    limits = vllm_config.scheduler_config
    fits = limits.max_num_seqs * width <= limits.max_num_batched_tokens
    vars(vllm_config.speculative_config)[_NEW_SLOTS] = 0 if fits else width - 1
