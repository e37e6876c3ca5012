"""Reserves room for KV that drafts write behind a request's last token, and for their tokens in vLLM's buffers.

vLLM reserves both for the one drafter that its config names. A wider member of the pool would write into pages of other
requests: into keys of other drafts, or of the target if layers share memory.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

from outrider_runtime.vllm_plugin import patches
from outrider_runtime.vllm_plugin.arguments import LOOKAHEAD_TOKENS

_NEW_SLOTS = "outrider_new_slots"


@cache
def install() -> None:
    """Have vLLM's configs return the needs of the widest member, in this process."""
    lookahead, slots = patches.original(patches.LOOKAHEAD), patches.original(patches.NEW_SLOTS)

    @wraps(lookahead.fget)
    def num_lookahead_tokens(config: Any) -> int:
        return max(int(lookahead.fget(config)), widest_lookahead(config))

    @wraps(slots.fget)
    def max_num_new_slots_for_drafting(config: Any) -> int:
        reserved = vars(config).get(_NEW_SLOTS)
        return int(slots.fget(config) if reserved is None else reserved)

    patches.put(patches.LOOKAHEAD, property(num_lookahead_tokens))
    patches.put(patches.NEW_SLOTS, property(max_num_new_slots_for_drafting))


def widest_lookahead(vllm_config: Any) -> int:
    """Return the tokens behind a request's last one that the widest block drafter writes; 0 without block drafters."""
    additional = vllm_config.additional_config
    return int(additional.get(LOOKAHEAD_TOKENS, 0)) if isinstance(additional, dict) else 0


def reserve_batch_tokens(vllm_config: Any) -> None:
    """Reserve a block of each running request in a step's token budget, only if buffers are too small for all blocks.

    vLLM always reserves it, with or without a draft. But a block drafter's pass and its context have buffers of their
    own, each for the largest batch.
    """
    width = widest_lookahead(vllm_config)
    if not width:
        return
    limits = vllm_config.scheduler_config
    fits = limits.max_num_seqs * width <= limits.max_num_batched_tokens
    vars(vllm_config.speculative_config)[_NEW_SLOTS] = 0 if fits else width - 1
