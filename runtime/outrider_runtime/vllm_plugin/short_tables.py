"""Passes over a bounded context: a shorter block table with the first and the last pages of each request.

Token positions do not change, since cached keys carry theirs. A pass writes as it would without a window; it only reads
less.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from outrider_runtime.drafters.window import Window


class ShortTables:
    def __init__(self, window: Window, member: Any) -> None:
        """member: a speculator of vLLM after `set_attn`. Raises ValueError if its layers are in several KV groups."""
        groups = [number for number, groups in enumerate(member.attn_groups) if groups]
        if len(groups) != 1:
            raise ValueError("a window needs all layers in one KV group, and these are in several: remove the drafter")
        self._member, self.group = member, groups[0]
        self._page: int = member.block_tables.block_sizes[self.group]
        self._widest: int = self.of_requests.shape[1]
        self._sinks = min(window.sink_pages(self._page), self._widest - 1)
        self._pages = min(self._sinks + window.window_pages(self._page), self._widest)
        self._columns = torch.arange(self._widest, device=member.device)
        most = member.max_num_reqs
        self._starts_cpu = torch.arange(most + 1, dtype=torch.int32)
        self._of_pass = torch.zeros(most, self._pages, dtype=torch.int32, device=member.device)
        self._seen_in_pass = torch.zeros(most, dtype=torch.int32, device=member.device)
        """Page tables and lengths of a pass over one token of each request, where graphs find them."""

    @property
    def of_requests(self) -> torch.Tensor:
        """(most requests, most pages) int32, by slot of the request states."""
        table: torch.Tensor = self._member.block_tables.block_tables[self.group].gpu
        return table

    def metadata(
        self, table: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor, starts_cpu: torch.Tensor,
        most_seen: torch.Tensor, slot_mappings: torch.Tensor, positions: torch.Tensor,
    ) -> dict[str, Any]:  # fmt: skip
        """Build the attention metadata of one pass, by layer.

        A request's first token attends to its window. Its other tokens attend to the same pages, and to each other.

        table: (rows, pages), full block tables. lengths: (rows,), tokens of each request, those of the pass included.
        starts, starts_cpu: (rows + 1,) int32, offsets of each request's tokens in the pass. most_seen: (rows,) on the
        host, an upper bound of `lengths`. slot_mappings, positions: vLLM's.
        """
        most = int((starts_cpu[1:] - starts_cpu[:-1]).max())
        short, seen = self._shortened(table, lengths, starts[1:] - starts[:-1], most)
        return self._built(short, seen, starts, starts_cpu, most_seen, slot_mappings, positions)

    def of_a_pass(
        self, table: torch.Tensor, buffers: Any, graph: BatchExecutionDescriptor, most_seen: torch.Tensor,
        slot_mappings: torch.Tensor,
    ) -> dict[str, Any]:  # fmt: skip
        """Metadata of a pass over one token of each request, for the rows of `graph`. buffers: vLLM's, set for it."""
        rows, padded = len(table), graph.num_reqs or len(table)
        lengths = buffers.seq_lens[:rows]
        short, seen = self._shortened(table, lengths, torch.ones_like(lengths), 1)
        self._of_pass[:rows], self._of_pass[rows:padded] = short, 0
        self._seen_in_pass[:rows], self._seen_in_pass[rows:padded] = seen, 0
        starts_cpu = self._starts_cpu[: padded + 1].clamp(max=rows)
        upper = torch.cat([most_seen, most_seen.new_zeros(padded - rows)])
        return self._of_rows(padded, buffers, starts_cpu, upper, slot_mappings)

    def to_capture(self, rows: int, buffers: Any, slot_mappings: torch.Tensor) -> dict[str, Any]:
        """Metadata for a graph, over the tensors of `of_a_pass`."""
        self._of_pass.zero_()
        self._seen_in_pass.fill_(1)
        starts_cpu = self._starts_cpu[: rows + 1]
        return self._of_rows(rows, buffers, starts_cpu, torch.ones(rows).int(), slot_mappings, for_capture=True)

    def _of_rows(
        self, rows: int, buffers: Any, starts_cpu: torch.Tensor, most_seen: torch.Tensor, slot_mappings: torch.Tensor,
        *, for_capture: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        return self._built(
            self._of_pass[:rows], self._seen_in_pass[:rows], buffers.query_start_loc[: rows + 1], starts_cpu, most_seen,
            slot_mappings, buffers.positions[:rows], for_capture=for_capture,
        )  # fmt: skip

    def _built(
        self, short: torch.Tensor, seen: torch.Tensor, starts: torch.Tensor, starts_cpu: torch.Tensor,
        most_seen: torch.Tensor, slot_mappings: torch.Tensor, positions: torch.Tensor, *, for_capture: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """short: (rows, pages), tables; seen: (rows,), tokens in them; else as `metadata`."""
        member, rows = self._member, len(short)
        most = int((starts_cpu[1:] - starts_cpu[:-1]).max())
        longest = min(member.max_model_len, short.shape[1] * self._page)
        made: dict[str, Any] = build_attn_metadata(
            attn_groups=member.attn_groups, num_reqs=rows, num_tokens=slot_mappings.shape[1],
            query_start_loc_gpu=starts, query_start_loc_cpu=starts_cpu, max_query_len=most, seq_lens=seen,
            max_seq_len=longest, block_tables=[short] * len(member.attn_groups), slot_mappings=slot_mappings,
            kv_cache_config=member.kv_cache_config, seq_lens_cpu_upper_bound=most_seen.clamp(max=longest),
            positions=positions, is_prefilling=member.draft_is_prefilling[:rows],
            for_cudagraph_capture=for_capture,
        )  # fmt: skip
        return made

    def _shortened(
        self, table: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, most: int
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(rows, pages) and (rows,): pages that are read, and the tokens in them.

        tokens: (rows,), tokens of each request in the pass. most: their maximum.
        """
        first = lengths - tokens + 1
        skipped = (-(-first // self._page) - self._pages).clamp(min=0)  # pages between sinks and window
        columns = self._columns[: min(self._pages + -(-(most - 1) // self._page), self._widest)]
        columns = columns + skipped[:, None] * (columns >= self._sinks)
        short = table.gather(1, columns.clamp(max=self._widest - 1))
        return short, (lengths - skipped * self._page).to(torch.int32)


def check_plain(specs: list[Any], dcp_size: int, whose: str, remedy: str) -> None:
    """Raise ValueError unless every layer has full attention over its own pages.

    dcp_size: number of GPUs that vLLM splits each request's KV over.
    """
    if dcp_size > 1:
        raise ValueError(f"--decode-context-parallel-size splits {whose} KV of each request over GPUs: {remedy}")
    for spec in specs:
        windowed = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
        if type(spec) is not FullAttentionSpec or windowed:
            kind = f"{type(spec).__name__} with a window" if windowed else type(spec).__name__
            raise ValueError(f"{whose} attention is not plain ({kind}): {remedy}")
