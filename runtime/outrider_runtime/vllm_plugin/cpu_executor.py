"""The executor on a CPU, without the call for proposals: they come with the step's output."""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class OutriderCPUExecutor(MultiprocExecutor):  # type: ignore[misc]  # vLLM is untyped here
    def take_draft_token_ids(self) -> None:
        """Return None: proposals come with the output, see `PoolRunner`."""
