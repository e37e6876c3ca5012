"""Random batches of requests in different states, as the second runner's functions take them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

REQUESTS, BATCH, DRAFTED, LENGTH, VOCABULARY = 6, 4, 3, 200, 3000


@dataclass
class Batch:
    """BATCH of REQUESTS requests: some read their prompt, some decode with up to DRAFTED proposals."""

    generator: torch.Generator

    def __post_init__(self) -> None:
        self.requests = torch.randperm(REQUESTS, generator=self.generator)[:BATCH]
        self.logits = self.integers(1, DRAFTED + 2, BATCH).int()
        self.first_logit = _offsets(self.logits)
        self.rows = int(self.first_logit[-1])
        self.row_request = torch.repeat_interleave(self.requests, self.logits.long())
        self.row_place = torch.cat([torch.arange(int(logit)) for logit in self.logits]).int()
        self.tokens = torch.maximum(self.logits, self.integers(1, 9, BATCH).int())
        self.first_token = _offsets(self.tokens)
        self.total = int(self.first_token[-1])
        self.text = self.integers(0, 50, REQUESTS, LENGTH).int()
        self.prompt = self.integers(5, 40, REQUESTS).int()
        self.computed = torch.minimum(
            self.integers(0, 60, REQUESTS).int(), self.prompt + self.integers(0, 20, REQUESTS).int()
        )
        self.last_sampled = self.integers(0, VOCABULARY, REQUESTS, 1)
        self.temperature = torch.tensor([0.0, 1.0, 0.7, 0.0, 1.3, 1.0])
        self.seeds = self.integers(-(2**62), 2**62, REQUESTS)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def random_logits(self, dtype: torch.dtype) -> torch.Tensor:
        """(rows, VOCABULARY), every seventh token impossible."""
        logits = (4 * self.normal(self.rows, VOCABULARY)).to(dtype)
        logits[:, ::7] = -math.inf
        return logits

    def prepared(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions (tokens,) and lengths (REQUESTS,) by place in the batch."""
        from vllm.v1.worker.gpu import input_batch

        positions, lengths = torch.zeros(64, dtype=torch.int64), torch.ones(REQUESTS, dtype=torch.int32)
        input_batch.prepare_pos_seq_lens(self.requests, self.first_token, self.computed, positions, lengths)
        return positions, lengths

    def sampled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """How many tokens each request of the batch sampled, how many proposals it lost."""
        count = torch.minimum(self.integers(1, DRAFTED + 2, BATCH).int(), self.logits)
        return count, self.logits - count

    def as_input_batch(self, input_ids: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> Any:
        return SimpleNamespace(
            num_reqs=BATCH,
            num_tokens=self.total,
            input_ids=input_ids,
            positions=positions,
            idx_mapping=self.requests,
            query_start_loc=self.first_token,
            query_start_loc_np=self.first_token.numpy(),
            seq_lens=lengths[:BATCH],
        )


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
