"""Ranks proposals on the device, to choose those that the target verifies (worker process, every rank).

In asynchronous scheduling vLLM schedules a step before its proposals exist. The scheduler reserves a placeholder for
each, and only the device knows which placeholders hold a real proposal. So the loop orders how many tokens are
verified, with each request's forced tokens and weight (`VerifyOrder`), and the device ranks real proposals by

    score(request, k) = weight * p_1 * ... * p_k,    p_i = P(token i accepted | its parent was); 0: no proposal

All inputs are known to all ranks, so all ranks make the same choice. vLLM's adaptive verification is the hook: its
runner trims a batch on the device with the object in its `adaptive_verification`. The flag in vLLM's config stays off:
it requires full CUDA graphs, which CPUs lack, and makes each drafter estimate its own acceptance.

Shapes: N requests of the step, K proposals of each at most, S slots of the worker's request states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from outrider_crds.runtime_state import Verification
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import get_query_lens_mismatch_unsupported_backend
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from outrider_runtime.step_clock import StepClock
from outrider_runtime.vllm_plugin.graph_lengths import verification
from outrider_runtime.vllm_plugin.messages import Numbers, VerifyOrder, numbers
from outrider_runtime.vllm_plugin.versions import no_host_counts

Int32s = np.ndarray[Any, np.dtype[np.int32]]


def verification_lengths(survival: torch.Tensor, caps: torch.Tensor, forced: torch.Tensor, tokens: int) -> torch.Tensor:
    """(N,) int32: proposals to verify for each request, `tokens` in total.

    Forced tokens come first, then the highest scores; ties go to the first request, then to the lowest k. A score never
    rises with k, so each request's tokens are a prefix. A placeholder without a proposal has score 0 and comes last.

    survival: (N, K), weight * P(token and all before it accepted); 0: no proposal. caps: (N,), never exceeded; `tokens`
    is at most their sum. forced: (N,), tokens that come first if they are real.
    """
    depth = torch.arange(survival.shape[1], device=survival.device)
    scores = torch.where((depth < forced[:, None]) & (survival > 0), torch.inf, survival)
    scores = torch.where(depth < caps[:, None], scores, -1.0).flatten()
    first = scores.sort(descending=True, stable=True).indices[:tokens]
    chosen = torch.zeros_like(scores, dtype=torch.int32).index_fill_(0, first, 1)
    return chosen.view_as(survival).sum(dim=1, dtype=torch.int32)


def verification_lengths_by_arm(
    survival: torch.Tensor, caps: torch.Tensor, forced: torch.Tensor, arm: torch.Tensor, tokens: Sequence[int]
) -> torch.Tensor:
    """(N,) int32: `verification_lengths`, ranked separately in each arm of a canary. arm: (N,). tokens: by arm."""
    lengths = torch.zeros_like(caps, dtype=torch.int32)
    for number, part in enumerate(tokens):
        own = arm == number
        lengths += verification_lengths(survival, torch.where(own, caps, 0), torch.where(own, forced, 0), part)
    return lengths


class Verified(NamedTuple):
    """Placeholders of each request that the target scores in a step."""

    columns: list[int]
    """Column of the order, by row of the batch."""
    lengths: torch.Tensor
    """(rows of the batch,), on the host once the step's output is there."""

    def by_column(self) -> Numbers:
        """(N,): lengths in the order of the step's message."""
        made = numbers([0] * len(self.columns))
        made[self.columns] = self.lengths.numpy()
        return made


class DeviceRanking(AdaptiveVerificationManager):  # type: ignore[misc]  # vLLM is untyped here
    """Replaces the manager of vLLM's runner, which estimates costs and acceptance itself.

    `super().__init__` is not called: it would make streams, events and cost tables. `compact_batch` is inherited.
    """

    def __init__(self, runner: Any, clock: StepClock) -> None:
        """runner: vLLM's, with an initialised KV cache."""
        states, device = runner.req_states, runner.device
        self._clock = clock
        self.req_states = states
        self.num_speculative_steps: int = states.num_speculative_steps
        self.num_bonus_tokens: int = runner.model_state.num_new_sampled_tokens_per_step
        self.query_start_loc = runner.input_buffers.query_start_loc
        self.host_knows_proposals = device.type == "cpu"
        """Whether the device is the host, so that no placeholder without a proposal needs to be verified."""
        self._most_logits: int = get_max_chunk_logits(runner.vocab_size)
        self._batch_budget: Any = None
        """Placeholders and other tokens of each request, and the total of placeholders to verify."""
        self._arm_budget: tuple[int, ...] = ()
        """Placeholders to verify, by arm; empty without a draft canary."""
        self._order: VerifyOrder | None = None
        self._columns: dict[str, int] = {}
        """Column of the order and of the step's message, by request."""
        self.verified: Verified | None = None
        """Placeholders that the step verifies; None: all that were scheduled."""
        self._acceptance = torch.zeros(states.max_num_reqs, self.num_speculative_steps, device=device)
        """(S, K): P(token accepted | its parent was) of pending proposals; 0: no proposal."""
        self._cu_num_logits = torch.zeros_like(self.query_start_loc)

    def begin(self, order: VerifyOrder | None) -> None:
        """Begin a step. order: sorted like the step's `num_scheduled_tokens`; None: verify all that is scheduled."""
        self._order, self.verified = order, None

    # -- calls of vLLM's runner -------------------------------------------------------------------------------------

    def add_request(self, req_idx: int) -> None:
        self._acceptance[req_idx] = 0.0

    def batches_to_profile(self, _capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """Profile no batch: the loop knows the cost of a step."""
        return iter(())

    def set_initial_cost_curves(self, _samples: list[Any]) -> None:
        """Ignore the samples: nothing was profiled."""

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """Record acceptance probabilities (rows, K) by row of the batch."""
        self._acceptance[input_batch.idx_mapping] = confidence_probs[: input_batch.num_reqs]

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: Mapping[str, list[int]]) -> int:
        """Return the tokens of the step's batch; called if it holds placeholders."""
        names = list(num_tokens_per_req)
        scheduled = np.array([len(draft_tokens.get(name, ())) for name in names], np.int32)
        others = np.array(list(num_tokens_per_req.values()), np.int32) - scheduled
        tokens = min(int(scheduled.sum()), max(0, self._most_logits - len(names) * self.num_bonus_tokens))
        if self._order is not None:
            tokens = min(tokens, self._order.tokens)
            if self.host_knows_proposals:
                tokens = min(tokens, self._real(names, scheduled))
        self._columns = {name: column for column, name in enumerate(names)}
        arm_tokens = self._arm_tokens(names, scheduled, tokens)
        tokens = sum(arm_tokens) if arm_tokens else tokens
        self._batch_budget, self._arm_budget = (scheduled, others, tokens), arm_tokens
        return int(others.sum()) + tokens

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        """Return the offsets of each request's logits and tokens, and the total of placeholders to verify."""
        (scheduled, others, tokens), self._batch_budget = self._batch_budget, None
        requests, device, order = len(req_ids), idx_mapping.device, self._order
        columns = [self._columns[name] for name in req_ids]
        lengths = async_tensor_h2d(scheduled[columns], device=device)
        if tokens < scheduled.sum():
            survival, forced = self._acceptance[idx_mapping].cumprod(dim=1), torch.zeros_like(lengths)
            if order is not None:
                survival *= async_tensor_h2d(order.weights[columns], device=device)[:, None]
                forced = async_tensor_h2d(order.forced[columns].astype(np.int32), device=device)
            if order is not None and order.arm is not None:
                arm = async_tensor_h2d(order.arm[columns], device=device)
                lengths = verification_lengths_by_arm(survival, lengths, forced, arm, self._arm_budget)
            else:
                lengths = verification_lengths(survival, lengths, forced, tokens)
        self._cu_num_logits[1 : requests + 1] = (lengths + self.num_bonus_tokens).cumsum(0)
        others_on_device = async_tensor_h2d(others[columns], device=device)
        self.query_start_loc[1 : requests + 1] = (lengths + others_on_device).cumsum(0)
        self.query_start_loc[requests + 1 :].fill_(int(others.sum()) + tokens)
        if order is not None:
            self.verified = Verified(columns, self._clock.to_host(lengths.to(torch.int8)))
        return self._cu_num_logits[: requests + 1], self.query_start_loc, tokens, *no_host_counts()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _arm_tokens(self, names: Sequence[str], scheduled: Int32s, tokens: int) -> tuple[int, ...]:
        """Return the placeholders to verify, by arm of a draft canary, at most `tokens` in total; empty without one."""
        order = self._order
        if order is None or order.arm is None:
            return ()
        made = list[int]()
        for number, part in enumerate(order.arm_tokens):
            own = np.where(order.arm == number, scheduled, 0)
            most = self._real(names, own) if self.host_knows_proposals else int(own.sum())
            made.append(min(part, most, tokens - sum(made)))
        return tuple(made)

    def _real(self, names: Sequence[str], scheduled: Int32s) -> int:
        """Count the real proposals among the placeholders. scheduled: (N,), placeholders of each request."""
        slots = [self.req_states.req_id_to_index[name] for name in names]
        real = (self._acceptance[slots] > 0).sum(dim=1).numpy()
        return int(np.minimum(scheduled, real).sum())


def device_ranks(runner: Any) -> bool:
    """Return whether the device can choose the proposals.

    Attention must take lengths that the host does not know, and no other part of the engine may read a request's length
    on the host. runner: vLLM's, with an initialised KV cache.
    """
    config = runner.vllm_config
    return (
        runner.rejection_sampler is not None
        and config.lora_config is None  # the host's lengths say which tokens are an adapter's
        and config.parallel_config.pipeline_parallel_size == 1
        and not config.parallel_config.enable_batch_sharded_sampling
        and not config.model_config.use_mla  # some of its indexers depend on vLLM's flag, which stays off
        and not config.model_config.return_sampling_mask
        and runner.aux_output_connector is None
        and get_query_lens_mismatch_unsupported_backend(runner.attn_groups) is None
        and verification(runner.cudagraph_manager) is Verification.VARLEN
    )
