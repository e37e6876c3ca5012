"""Ends requests whose hidden states are not finite (engine core process).

Such a state makes every logit NaN, and vLLM goes on to answer token 0. Its KV is NaN, too, and the pages would spoil
the next requests that get them: an attention kernel that multiplies stale values by 0 reads NaN. So the request ends
with an error, its pages leave the prefix cache, and they are zeroed before they are used again. If the request gave
them up before the report (its client left, or it was preempted), they are zeroed, too. If every request is like that,
the pod itself is at fault: the engine ends, and the pod is restarted. Only plain requests show this: another may have
got its NaN from its client or its adapter, and would get it from the next pod, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider_runtime.vllm_plugin.cause import note_cause

logger = logging.getLogger("vllm.outrider")  # vLLM configures handlers for its own name only
MOST_IN_A_ROW = 3
"""Broken requests without a finite one in between that end the engine. One may be an accident; a restart that was not
needed costs minutes."""


class BrokenPodError(RuntimeError):
    """Nothing that the engine computes is a number."""


class BrokenRow:
    """The broken plain requests since the engine last computed something finite."""

    def __init__(self) -> None:
        self._requests: set[str] = set()

    def observe(self, broken: Iterable[str], *, is_any_finite: bool) -> None:
        """Note the broken plain requests of a step. Raises BrokenPodError if the pod is at fault."""
        if is_any_finite:
            self.end()
            return
        self._requests.update(broken)
        if len(self._requests) >= MOST_IN_A_ROW:
            raise BrokenPodError(
                f"the last {len(self._requests)} requests had no finite hidden state (NaN or infinity), and no other "
                "request had one: the target's weights or the device may be faulty"
            )

    def end(self) -> None:
        """Forget the row: something finite was computed."""
        if self._requests:
            self._requests = set()


class BrokenAnswers:
    """Ends broken requests in vLLM's scheduler, and cleans their pages."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._row = BrokenRow()
        media = scheduler.vllm_config.model_config.multimodal_config
        self._takes_media_embeddings = media is not None and media.enable_mm_embeds
        self._pages: set[int] = set()
        """Pages to be zeroed once no request has them."""
        self._abandoned: dict[str, tuple[int, set[int]]] = {}
        """Requests that gave up pages while steps of them ran: the tokens of these steps, and the pages that no other
        request has got since."""
        self._suspect_pages: set[int] = set()
        """Abandoned pages that the step under way gives to other requests."""
        self.count = 0

    def note_abandoned(self, request: Any) -> None:
        """Note the pages of a request that is about to give them up: it ends, or is preempted."""
        name, tokens = request.request_id, request.num_in_flight_tokens
        if tokens:  # of all steps that run: it may have given up pages before, and have been resumed
            _, earlier_pages = self._abandoned.get(name, (0, set[int]()))
            self._abandoned[name] = tokens, earlier_pages | self._pages_of(name)

    def note_allocated(self, pages: Sequence[int]) -> None:
        """Note pages that a request gets: a step that is not reported yet may have left NaN in them."""
        for _, abandoned in self._abandoned.values():
            self._suspect_pages |= abandoned.intersection(pages)
            abandoned.difference_update(pages)

    def end(self, broken: Sequence[str], output: Any, scheduled: Mapping[str, int]) -> None:
        """End the broken requests of a step. Call it before vLLM's scheduler reads the step's output.

        output: vLLM's ModelRunnerOutput. scheduled: tokens of each request. Raises BrokenPodError, see `BrokenRow`.
        """
        abandoned = self._abandoned_pages(scheduled)
        if not broken:  # as in nearly all steps
            self._row.end()
            return
        scheduler = self._scheduler
        running = {name: scheduler.requests[name] for name in broken if name in scheduler.requests}
        for name in broken:
            pages = abandoned.get(name, set()) | (self._pages_of(name) if name in running else set())
            scheduler.kv_cache_manager.evict_blocks(pages)
            self._pages |= pages
            if name in running and output.sampled_token_ids:
                output.sampled_token_ids[output.req_id_to_index[name]] = []
        self.count += len(running)
        scheduler.grammar_compile_error_reqs.update(dict.fromkeys(running))  # a dict in vLLM 0.33, a set before
        for name, request in running.items():
            adapter = request.lora_request
            of = f"adapter {adapter.lora_name}" if adapter else "the target"
            logger.warning("Request %s of %s ends: the engine computed NaN or infinity for it", name, of)
        plain = [name for name, request in running.items() if self._is_plain(request)]
        with note_cause():  # the server reads it as soon as the engine core ends
            self._row.observe(plain, is_any_finite=len(scheduled) > len(broken))

    def _is_plain(self, request: Any) -> bool:
        """Return whether only the pod can have made its NaN: it brings no adapter, no embeddings, and no audio, whose
        samples may be NaN in the file."""
        has_floats = any(self._takes_media_embeddings or media.modality == "audio" for media in request.mm_features)
        return not request.lora_request and request.prompt_embeds is None and not has_floats

    def _pages_of(self, name: str) -> set[int]:
        manager = self._scheduler.kv_cache_manager
        pages = {page for group in manager.get_block_ids(name) for page in group}
        return pages - {manager.block_pool.null_block.block_id}

    def _abandoned_pages(self, scheduled: Mapping[str, int]) -> dict[str, set[int]]:
        """Return the pages that requests of this step have given up since it was scheduled."""
        pages = {}
        for name in [name for name in self._abandoned if name in scheduled]:
            tokens, pages[name] = self._abandoned.pop(name)
            if tokens > scheduled[name]:  # a later step of it runs, too
                self._abandoned[name] = tokens - scheduled[name], pages[name]
        return pages

    def free_pages(self) -> list[int]:
        """Return the pages to zero in the next step; ask before that is scheduled."""
        if not self._pages:
            return []
        blocks = self._scheduler.kv_cache_manager.block_pool.blocks
        return [page for page in self._pages if not blocks[page].ref_cnt]

    def zero(self, pages: Sequence[int], scheduler_output: Any) -> None:
        """Have the worker zero `pages`, and suspect ones, before the step's forward pass. A step without tokens leaves
        them for later."""
        pages = [*pages, *self._suspect_pages]
        if pages and scheduler_output.total_num_scheduled_tokens:
            scheduler_output.new_block_ids_to_zero = [*(scheduler_output.new_block_ids_to_zero or ()), *pages]
            self._pages.difference_update(pages)
            self._suspect_pages.clear()
