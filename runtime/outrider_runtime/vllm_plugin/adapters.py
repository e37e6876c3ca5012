"""LoRA adapters, wherever a row of the step is not the one that vLLM has named an adapter for (worker process).

vLLM names the adapter of each token, and of each request for its one row of logits. A request that verifies has a row
for each proposal, too; log-probabilities of prompts take a row for each token; and a target that drafts for itself runs
over one token of some requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

Rows = npt.NDArray[np.int64]
"""Of the batch."""
Names = tuple[int, ...]
"""vLLM's number of an adapter for each row; 0: none."""


class RunnerWithAdapters(GPUModelRunner):  # type: ignore[misc]  # vLLM is untyped here
    _verified: Any = None
    """Proposals of each request in the batch under way; None without any."""
    _named: tuple[Names, Names, Any] = (), (), set()
    """By request and by token of the step, and vLLM's descriptions of these adapters."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        worker = self.prompt_logprobs_worker
        if self.lora_config is not None and worker is not None:
            for name in ("compute_prompt_logprobs", "compute_prompt_token_id_logprobs"):
                setattr(worker, name, self._of_prompts(getattr(worker, name)))

    def _of_prompts(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """compute: takes a function that makes logits of slices of the step's hidden states, which come next."""

        def computed(logits_of: Callable[[torch.Tensor], Any], hidden_states: torch.Tensor, *arguments: Any) -> Any:
            def adapted(part: torch.Tensor) -> Any:
                first = (part.storage_offset() - hidden_states.storage_offset()) // hidden_states.stride(0)
                self._use(self._named[1][first : first + len(part)])
                return logits_of(part)

            return compute(adapted, hidden_states, *arguments)

        return computed

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().prepare_inputs(*args, **kwargs)
        self._verified = batch.num_draft_tokens_per_req
        return batch

    def _set_active_loras(
        self, of_requests: Names, of_tokens: Names, adapters: Any, *args: Any, **kwargs: Any
    ) -> None:  # fmt: skip
        verified, self._verified = self._verified, None
        self._named = of_requests, of_tokens, adapters
        if verified is not None:
            of_requests = tuple(np.repeat(of_requests, verified + 1).tolist())
        super()._set_active_loras(of_requests, of_tokens, adapters, *args, **kwargs)

    def adapt(self, rows: Rows) -> None:
        """From here on the target runs over one token of each request in `rows`. The next step names its own."""
        if self.lora_config is not None:
            of_requests = self._named[0]
            self._use(tuple(of_requests[row] for row in rows.tolist()))

    def _use(self, names: Names) -> None:
        super()._set_active_loras(names, names, self._named[2])
