"""Sends a point's requests with vLLM's own load generator (`vllm.benchmarks.serve`) and keeps what came of each.

Requests come as places get free. Those that come at times of their own are `timed_load`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from dataclasses import dataclass, replace
from typing import Any

from tests.benchmarks.evidence.plan import Planned, Point


@dataclass(frozen=True)
class Outcome:
    """What one request's user saw. Seconds."""

    phase: str
    slo_class: str
    latency_s: float
    """From when it was due (or had a place) to its last token."""
    ttft_s: float
    tokens: int
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """The field's definition: never an average over streamed chunks, which carry many tokens each."""
        return (self.latency_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else 0.0

    def scaled(self, factor: float) -> Outcome:
        """With times that are `factor` as long."""
        return replace(self, latency_s=self.latency_s * factor, ttft_s=self.ttft_s * factor)


@dataclass(frozen=True)
class Sent:
    """A point, sent."""

    seconds: float
    """From the first request to the last answer."""
    outcomes: tuple[Outcome, ...]
    accepted_per_draft: float | None
    """As the engine counts, where it publishes that: accepted tokens a (request, step) pair that had proposals."""
    final: bool = False
    """Its times count as they are, whatever the machine's speed was meanwhile."""


def send(point: Point, base_url: str, model: str, output_tokens: int) -> Sent:
    """Runs the point to its last answer. A request that failed is an outcome with an error."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints a table of its own
        result = asyncio.run(_benchmark(point, base_url, model, output_tokens))
    length = result.get("spec_decode_acceptance_length")
    return Sent(
        seconds=result["duration"],
        outcomes=tuple(_outcome(planned, result, index) for index, planned in enumerate(point.requests)),
        accepted_per_draft=None if length is None else length - 1,
    )


async def _benchmark(point: Point, base_url: str, model: str, output_tokens: int) -> dict[str, Any]:
    from vllm.benchmarks.serve import TaskType, benchmark

    result: dict[str, Any] = await benchmark(
        task_type=TaskType.GENERATION, endpoint_type="openai-chat", api_url=f"{base_url}/v1/chat/completions",
        base_url=base_url, model_id=model, model_name=model, tokenizer=None,
        input_requests=[_request(planned, output_tokens) for planned in point.requests], logprobs=None,
        request_rate=float("inf"), burstiness=1.0, disable_tqdm=True, num_warmups=0, profile=False,
        selected_percentile_metrics=[], selected_percentiles=[], ignore_eos=True, goodput_config_dict={},
        max_concurrency=point.concurrency, lora_modules=None, extra_headers=None, extra_body={"temperature": 0.0},
        ready_check_timeout_sec=0,
    )  # fmt: skip
    return result


def _request(planned: Planned, output_tokens: int) -> Any:
    from vllm.benchmarks.datasets import SampleRequest

    return SampleRequest(
        prompt=planned.prompt, prompt_len=0, expected_output_len=output_tokens,
        chat_messages=[{"role": "user", "content": planned.prompt}],
    )  # fmt: skip


def _outcome(planned: Planned, result: dict[str, Any], index: int) -> Outcome:
    return Outcome(
        phase=planned.phase,
        slo_class=planned.slo_class,
        latency_s=result["latencies"][index],
        ttft_s=result["ttfts"][index],
        tokens=result["output_lens"][index],
        error=result["errors"][index],
    )
