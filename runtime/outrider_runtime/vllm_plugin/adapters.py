"""LoRA adapters for rows of a step that vLLM assigns no adapter to (worker process).

vLLM assigns an adapter to each token, and to the one row of logits of each request. But a request that verifies has a
row for each proposal, too. Log-probabilities of prompts take a row for each token. And a target that drafts for itself
runs over one token of some requests.

An adapter of the output layer may overflow there alone: the hidden states are finite, and the logits are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from outrider_runtime.finite_weights import first_rows, overflows
from outrider_runtime.vllm_plugin.adapter_shapes import check_each
from outrider_runtime.vllm_plugin.patches import PROMPT_LOGPROBS, put

Rows = npt.NDArray[np.int64]
"""Rows of the batch."""
AdapterIds = tuple[int, ...]
"""vLLM's number of the adapter, by row; 0: none."""


class StateOfAdapters(LoraState):  # type: ignore[misc]
    """Adapters of the running requests. vLLM takes two of one name for one, and its weights may have been replaced."""

    def get_activate_loras(self, req_ids: list[str]) -> Any:
        adapters = (self.lora_requests.get(name) for name in req_ids)
        return {adapter.lora_int_id: adapter for adapter in adapters if adapter is not None}.values()


class RunnerWithAdapters(GPUModelRunner):  # type: ignore[misc]  # vLLM is untyped here
    _verified: Any = None
    """Proposals of each request in the current batch; None without proposals."""
    _active: tuple[AdapterIds, AdapterIds, Any] = (), (), set()
    """Adapters by request and by token of the step, and vLLM's descriptions of these adapters."""
    _samples_adapters = False
    """A step with adapters is being sampled."""
    _largest_logits: torch.Tensor | None = None
    """(rows,): largest logit of each row of the step; None in a step without adapters."""

    def load_lora_model(self, *args: Any, **kwargs: Any) -> Any:
        model = super().load_lora_model(*args, **kwargs)
        for layer in model.modules():
            if isinstance(layer, LogitsProcessorWithLoRA):
                layer.register_forward_hook(self._note_largest)
        check_each(self.lora_manager)
        self.lora_state = StateOfAdapters(self.max_num_reqs)
        return model

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        worker = self.prompt_logprobs_worker
        if self.lora_config is not None and worker is not None:
            for patch in PROMPT_LOGPROBS:
                put(patch, self._of_prompts(getattr(worker, patch.name)), of=worker)

    def sample(self, hidden_states: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._largest_logits, self._samples_adapters = None, any(self._active[0])
        sampled = super().sample(hidden_states, input_batch, *args, **kwargs)
        self._samples_adapters = False
        return sampled

    def _note_largest(self, _layer: Any, _inputs: Any, logits: torch.Tensor) -> None:
        """Note the logits before grammars and penalties change them."""
        if self._samples_adapters:
            self._largest_logits = logits.amax(dim=1)

    def output_overflows(self, input_batch: Any, sampled: torch.Tensor) -> torch.Tensor | None:
        """(requests,): whether the output layer overflowed for a token of the step that was just sampled; None: not
        checked, since no request of the step has an adapter. sampled: (requests,), tokens of each request."""
        largest = self._largest_logits
        return None if largest is None else overflows(largest, first_rows(input_batch), sampled)

    def _of_prompts(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method so that each slice of the hidden states gets its adapters.

        compute: takes a function that makes logits of slices of the step's hidden states, and these hidden states.
        """

        def computed(logits_of: Callable[[torch.Tensor], Any], hidden_states: torch.Tensor, *arguments: Any) -> Any:
            def adapted(part: torch.Tensor) -> Any:
                first = (part.storage_offset() - hidden_states.storage_offset()) // hidden_states.stride(0)
                self._use(self._active[1][first : first + len(part)])
                return logits_of(part)

            return compute(adapted, hidden_states, *arguments)

        return computed

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().prepare_inputs(*args, **kwargs)
        self._verified = batch.num_draft_tokens_per_req
        return batch

    def _set_active_loras(
        self, of_requests: AdapterIds, of_tokens: AdapterIds, adapters: Any, *args: Any, **kwargs: Any
    ) -> None:  # fmt: skip
        verified, self._verified = self._verified, None
        self._active = of_requests, of_tokens, adapters
        if verified is not None:
            of_requests = tuple(np.repeat(of_requests, verified + 1).tolist())
        super()._set_active_loras(of_requests, of_tokens, adapters, *args, **kwargs)

    def adapt(self, rows: Rows) -> None:
        """Set the adapters for passes of the target over one token of each request in `rows`, until the next step."""
        if self.lora_config is not None:
            of_requests = self._active[0]
            self._use(tuple(of_requests[row] for row in rows.tolist()))

    def _use(self, adapter_ids: AdapterIds) -> None:
        super()._set_active_loras(adapter_ids, adapter_ids, self._active[2])
