"""Block drafters (DFlash, DFlash2, DSpark) as members of the pool: one pass over a block of masks proposes all tokens.

A member caches keys and values of the context. It projects them from the target's hidden states without a pass, so a
draft length of 0 costs a projection. Hidden states are not kept after their step, so a KV gap stays.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from outrider_runtime.vllm_plugin.block_edges import clear_past_last_block
from outrider_runtime.vllm_plugin.confident import MIN_PROBABILITY, Confident
from outrider_runtime.vllm_plugin.layer_names import named, tagged
from outrider_runtime.vllm_plugin.patches import DFLASH_LOADER, DSPARK_LOADER, Patch
from outrider_runtime.vllm_plugin.reads_layers import ReadsLayers
from outrider_runtime.vllm_plugin.whole_weights import FROM_TARGET, check_token_map, whole_weights

MAY_LACK = {**FROM_TARGET, "mask_embedding": "has_own_mask_embedding"}
"""Weights that a checkpoint may lack. If its mask is a token of the vocabulary, it has no embedding for the mask."""


class BlockMember(Confident, ReadsLayers):
    """The common part of block drafters: the first base class, before vLLM's speculator."""

    loader: ClassVar[Patch] = DFLASH_LOADER
    """The place in which vLLM's loader looks up `get_model`."""

    query_cudagraph_manager: Any

    def __init__(self, vllm_config: Any, device: torch.device, prefix: str | None) -> None:
        """prefix: see `named`."""
        super().__init__(vllm_config, device)
        self._prefix = prefix
        self._feeds_only = False
        self._eager_graphs: Any = None

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        load_format = self.vllm_config.load_config.load_format
        with named(self.loader, self._prefix), whole_weights(load_format, MAY_LACK):
            draft = super().load_draft_model(target_model, target_attn_layer_names)  # type: ignore[misc]
        check_token_map(draft, self.vllm_config.model_config.get_vocab_size())
        self.check_layers(draft, target_model)
        return draft

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        super().init_cudagraph_manager(cudagraph_mode)  # type: ignore[misc]
        width = self.num_query_per_req  # type: ignore[attr-defined]
        self._eager_graphs = DFlashCudaGraphManager(self.vllm_config, self.device, CUDAGraphMode.NONE, width)  # type: ignore[attr-defined]

    def propose(
        self, input_batch: Any, *arguments: Any, dummy_run: bool = False, num_speculative_tokens: int | None = None,
        **keywords: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Propose the whole block for any length above 0; for 0 only write the context's keys and values."""
        graphs = self.query_cudagraph_manager
        self._feeds_only = num_speculative_tokens == 0
        try:
            if self._feeds_only:
                self.query_cudagraph_manager = self._eager_graphs  # a whole graph holds the pass, too
            elif not dummy_run:
                self._clear_stale_pages(input_batch)  # the context lies in the request's own pages
            made: torch.Tensor = super().propose(input_batch, *arguments, dummy_run=dummy_run, **keywords)  # type: ignore[misc]
            return made
        finally:
            self._feeds_only = False
            self.query_cudagraph_manager = graphs

    def _clear_stale_pages(self, input_batch: Any) -> None:
        """Clear block-table entries behind a request's last page: they belong to other requests.

        vLLM's kernel writes nothing into page 0.
        """
        tables = self.block_tables  # type: ignore[attr-defined]
        for group in self.draft_kv_cache_group_ids:  # type: ignore[attr-defined]
            counts = tables.num_blocks.gpu[group][input_batch.idx_mapping]
            table = tables.input_block_tables[group][: len(counts)]
            clear_past_last_block(table, counts, self.num_query_per_req, tables.block_sizes[group])  # type: ignore[attr-defined]

    def _build_uniform_attn_metadata(self, *arguments: Any, **keywords: Any) -> Any:
        """Build the metadata of a pass; a KV projection needs none."""
        return None if self._feeds_only else super()._build_uniform_attn_metadata(*arguments, **keywords)  # type: ignore[misc]

    def _generate_draft(self, *arguments: Any, **keywords: Any) -> None:
        if not self._feeds_only:
            super()._generate_draft(*arguments, **keywords)  # type: ignore[misc]


class DFlash(BlockMember, DFlashSpeculator):  # type: ignore[misc]  # vLLM is untyped here
    pass


class DFlash2(BlockMember, DFlash2Speculator):  # type: ignore[misc]
    def load_draft_model(self, *arguments: Any, **keywords: Any) -> Any:
        with tagged(self._prefix):
            return super().load_draft_model(*arguments, **keywords)

    def _generate_draft(self, num_reqs: int, *arguments: Any, **keywords: Any) -> None:
        super()._generate_draft(num_reqs, *arguments, **keywords)
        if not self._feeds_only:  # vLLM calls the hook for its own estimator alone
            tokens = num_reqs * self.num_speculative_steps
            scores = self.candidate_sampler.scores[:num_reqs].flatten(0, 1)  # (tokens, candidates)
            self._maybe_predict_acceptance(scores, self.sample_idx_mapping[:tokens], self.sample_col[:tokens])


class DSpark(BlockMember, DSparkSpeculator):  # type: ignore[misc]
    loader = DSPARK_LOADER
    _has_confidence_head = False

    def load_draft_model(self, *arguments: Any, **keywords: Any) -> Any:
        draft = super().load_draft_model(*arguments, **keywords)
        self._has_confidence_head = draft.model.confidence_head is not None
        return draft

    def _maybe_predict_acceptance(self, *arguments: Any) -> None:
        if not self.use_confidence_head:
            super()._maybe_predict_acceptance(*arguments)

    def _generate_draft(self, num_reqs: int, *arguments: Any, **keywords: Any) -> None:
        """Use the checkpoint's confidence head, if it has one: it predicts acceptance better than log-odds do."""
        self.use_confidence_head = self._has_confidence_head and self.gives_confidence
        super()._generate_draft(num_reqs, *arguments, **keywords)
        if self.use_confidence_head and not self._feeds_only:
            tokens = num_reqs * self.num_speculative_steps
            probabilities = self.draft_token_confidence_probs[:num_reqs].flatten()  # (tokens,)
            self._note_confidence(
                torch.logit(probabilities.float(), eps=MIN_PROBABILITY), self.sample_idx_mapping[:tokens],
                self.sample_col[:tokens],
            )  # fmt: skip


def block_draft(vllm_config: Any, device: torch.device, prefix: str | None, tokens: int) -> Any:
    """Make the member for a checkpoint. tokens: the length of its block, independent of the engine's longest draft."""
    kinds = {"DFlash2DraftModel": DFlash2, "DFlashDraftModel": DFlash}
    speculative = copy.copy(vllm_config.speculative_config)
    kind = DSpark if speculative.method == "dspark" else kinds[speculative.draft_model_config.architectures[0]]
    speculative.num_speculative_tokens = tokens
    speculative.num_speculative_tokens_per_batch_size = None  # or vLLM captures graphs of every length
    config = copy.copy(vllm_config)
    config.speculative_config = speculative
    return kind(config, device, prefix)
