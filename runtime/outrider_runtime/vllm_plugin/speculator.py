"""The pool of drafters as one of vLLM's speculators (worker process).

It runs the members that the step's order names, and gives each request the proposals of its chosen member. A member's
error never fails a request: a member that raises, or that returns invalid tokens, proposes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from outrider_crds.runtime_state import DrafterMemory
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from outrider_runtime.vllm_plugin.agreement import Agreement, Failed, alone
from outrider_runtime.vllm_plugin.drafting_step import DraftingStep
from outrider_runtime.vllm_plugin.eagle_head import FirstPass
from outrider_runtime.vllm_plugin.memory import MemoryUse, drafter_memory, kv_bytes_per_token, kv_tokens, weight_bytes
from outrider_runtime.vllm_plugin.messages import IDLE
from outrider_runtime.vllm_plugin.proposed import Proposed, acceptance, assign_proposals, real
from outrider_runtime.vllm_plugin.reads_layers import ReadsLayers
from outrider_runtime.vllm_plugin.sparse_self_member import SparseSelfMember
from outrider_runtime.vllm_plugin.suffix_member import SuffixMember

logger = logging.getLogger("vllm.outrider")  # vLLM configures handlers for its own name only


class NotStartedError(RuntimeError):
    """A member failed after it was loaded; `note_failure` has the reason."""

    def __init__(self, drafter: str, where: Failed) -> None:
        ranks = "" if where is Failed.EVERYWHERE else " on some ranks alone"
        super().__init__(f"drafter {drafter!r} cannot be started{ranks}: the engine starts again without it")


class PoolSpeculator(DraftModelSpeculator):  # type: ignore[misc]  # vLLM is untyped here
    """The members of the pool; those with a model are instances of vLLM's DraftModelSpeculator.

    `super().__init__` is not called: it would make the buffers of one draft model, and each member has its own.
    """

    def __init__(
        self, members: Sequence[tuple[str, Callable[[], Any]]], vllm_config: Any, device: torch.device,
        note_failure: Callable[[str, Exception | None], None], agree: Agreement = alone,
        note_memory: Callable[[dict[str, DrafterMemory], dict[str, set[str]]], None] = lambda _memory, _layers: None,
    ) -> None:  # fmt: skip
        """members: name and constructor of each member, in the pool's order; a member that raises is left out.

        note_memory: called with the memory of each member and the names of its attention layers, once the KV cache has
        its size.
        """
        self.vllm_config, self.device = vllm_config, device
        self.num_speculative_steps = vllm_config.speculative_config.num_speculative_tokens
        self.dcp_size = vllm_config.parallel_config.decode_context_parallel_size
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        self.draft_logits = None  # greedy proposals: sampling stays right, see docs
        self.supports_mm_inputs = False
        self.model = None
        self.any_length_fits = False
        """Whether full CUDA graphs of the target take requests of different lengths."""
        self.step: DraftingStep | None = None
        """The drafting of the current step; None in vLLM's dummy steps."""
        self._note_failure = note_failure
        self._note_memory = note_memory
        self._weights: dict[int, int] = {}
        """Bytes of weights, by member."""
        self._agree = agree
        self._names = [name for name, _ in members]
        self._members: dict[int, Any] = {}
        for number, (_, make) in enumerate(members):
            self._drop_on_failure(partial(self._make, number, make), number)
        most = vllm_config.scheduler_config.max_num_seqs
        self._tokens = torch.zeros(most, self.num_speculative_steps, dtype=torch.int64, device=device)
        self._device_ranks = False
        self.draft_token_confidence_probs = torch.zeros(most, self.num_speculative_steps, device=device)
        """(rows, most tokens) by row of the batch: P(token accepted | its parent was); 0: no proposal."""

    # -- start --------------------------------------------------------------------------------------------------

    def _drop_on_failure(self, works: Callable[[], object], number: int) -> None:
        """Leave a member out on all ranks if it cannot be made or loaded, with the layers that it has registered."""
        layers = self.vllm_config.compilation_config.static_forward_context
        before = set(layers)
        if self._failed_where(works, number) is Failed.NOWHERE:
            return
        self._members.pop(number, None)
        for name in set(layers) - before:
            del layers[name]

    def _fail_start_on_error(
        self, work: Callable[[Any], Callable[[], object]], members: Iterable[Any] | None = None
    ) -> None:
        """Run a part of the start in each loaded member. Raises NotStartedError.

        vLLM has counted the KV of the members' layers by then, and the device may be in any state. So a member that
        fails ends the engine, which is started again without it. work: returns the part to run in a member.
        """
        for number, member in self._members.items():
            if members is None or member in members:
                where = self._failed_where(work(member), number)
                if where is not Failed.NOWHERE:
                    raise NotStartedError(self._names[number], where)

    def _failed_where(self, work: Callable[[], object], number: int) -> Failed:
        """Run `work` and return the ranks on which it failed. All ranks note it: each node has notes of its own."""
        failure: Exception | None = None
        try:
            work()
        except Exception as error:  # a drafter never keeps the engine from starting
            failure = error
        where = self._agree(failure is not None)
        if where is not Failed.NOWHERE:
            logger.error("outrider: drafter %r is left out", self._names[number], exc_info=failure)
        if failure is not None or where is Failed.SOMEWHERE:
            self._note_failure(self._names[number], failure)
        return where

    def _make(self, number: int, make: Callable[[], Any]) -> None:
        self._members[number] = make()

    @property
    def _neural(self) -> list[DraftModelSpeculator]:
        return [member for member in self._members.values() if isinstance(member, DraftModelSpeculator)]

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        raise NotImplementedError("each member loads its own")

    def expose_hidden_states(self, target_model: Any) -> bool:
        """Have the target output the hidden states that all heads read. Returns whether some head reads any.

        Each head picks its own states (`ReadsLayers`). A head is left out if the target cannot output them.
        """
        for number, head in self._heads.items():
            self._drop_on_failure(partial(_expose_hidden_states, target_model, head.layers), number)
        heads = self._heads.values()
        exposed = {layer for head in heads for layer in head.layers(target_model)}
        for head in heads:
            head.reads(target_model, exposed)
        if heads:
            target_model.set_aux_hidden_state_layers(tuple(sorted(exposed)))
            self._check_first_output_of(target_model)
        return bool(heads)

    def _check_first_output_of(self, target_model: Any) -> None:
        """Check at the first forward that the target outputs hidden states.

        Some targets (MiMo) inherit a class that promises them, and output none. Without the check an assertion of
        vLLM ends the engine without a reason.
        """

        def check(_module: Any, _inputs: Any, output: object) -> None:
            checked.remove()
            if not isinstance(output, tuple):
                raise self._without_hidden_states(type(target_model).__name__)

        checked = target_model.register_forward_hook(check)

    def _without_hidden_states(self, target: str) -> NotStartedError:
        names = [self._names[number] for number in self._heads]
        for name in names:
            self._note_failure(name, TypeError(f"{target} hands out no hidden states; use another method for it"))
        return NotStartedError(names[0], Failed.EVERYWHERE)

    @property
    def _heads(self) -> dict[int, ReadsLayers]:
        return {number: member for number, member in self._members.items() if isinstance(member, ReadsLayers)}

    def load_model(self, target_model: Any) -> None:
        for number, member in list(self._members.items()):
            if isinstance(member, DraftModelSpeculator):
                self._drop_on_failure(partial(self._load, number, target_model), number)
        models = [member.model for member in self._neural if member.model is not target_model]
        self.model = models[0] if models else None

    def _load(self, number: int, target_model: Any) -> None:
        member = self._members[number]
        member.load_model(target_model)
        if member.model is not target_model:
            self._weights[number] = weight_bytes(member.model, target_model)

    @property
    def draft_attn_layer_names(self) -> set[str]:
        return {name for member in self._neural for name in member.draft_attn_layer_names}

    @property
    def attn_groups(self) -> list[Any]:
        return [group for member in self._neural for group in member.attn_groups]

    @property
    def num_extra_query_per_req(self) -> int:
        return max((member.num_extra_query_per_req for member in self._neural), default=0)

    @property
    def num_query_per_req(self) -> int:
        """Tokens of a request in the widest member's pass; vLLM's dummy batches hold as many requests as fit."""
        return max((member.num_query_per_req for member in self._neural), default=1)

    @property
    def pcp_manager(self) -> Any:
        return None

    @pcp_manager.setter
    def pcp_manager(self, manager: Any) -> None:
        for member in self._neural:
            member.pcp_manager = manager

    def set_eplb_state(self, eplb_state: Any) -> None:
        for member in self._neural:
            member.set_eplb_state(eplb_state)

    def set_attn(
        self, model_state: Any, kv_cache_config: Any, block_tables: Any, input_buffers: Any, attn_groups: Any
    ) -> None:  # fmt: skip
        self._block_tables = block_tables
        arguments = (model_state, kv_cache_config, block_tables, input_buffers, attn_groups)
        self._fail_start_on_error(lambda member: partial(member.set_attn, *arguments), self._neural)
        self._note_memory(self._memory(kv_cache_config), self.draft_layers)

    @property
    def draft_layers(self) -> dict[str, set[str]]:
        """Names of a drafter's own attention layers, by drafter."""
        neural = [(name, self._members.get(number)) for number, name in enumerate(self._names)]
        return {
            name: member.draft_attn_layer_names for name, member in neural if isinstance(member, DraftModelSpeculator)
        }

    def memory_use(self, kv_cache_spec: Mapping[str, Any]) -> dict[str, MemoryUse]:
        """Return each drafter's memory on this rank's device. kv_cache_spec: vLLM's description of a layer's cache."""
        made = {}
        for number in self._weights.keys() & self._members.keys():
            layers = self._members[number].draft_attn_layer_names & kv_cache_spec.keys()
            kv_bytes = sum(kv_cache_spec[name].max_memory_usage_bytes(self.vllm_config) for name in layers)
            made[self._names[number]] = MemoryUse(self._weights[number], kv_bytes)
        return made

    def _memory(self, kv_cache_config: Any) -> dict[str, DrafterMemory]:
        """Return each drafter's memory on this rank's device."""
        total, tokens = kv_bytes_per_token(kv_cache_config), kv_tokens(kv_cache_config)
        on_gpu, made = self.device.type != "cpu", {}
        for number in self._weights.keys() & self._members.keys():
            own = kv_bytes_per_token(kv_cache_config, self._members[number].draft_attn_layer_names)
            memory = drafter_memory(self._weights[number], own, total, tokens, shares_with_kv=on_gpu)
            made[self._names[number]] = memory
        return made

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        for member in self._neural:
            if isinstance(member, FirstPass):
                member.any_length_fits = self.any_length_fits
        self._fail_start_on_error(lambda member: partial(member.init_cudagraph_manager, cudagraph_mode))

    def serve_ranking(self, *, device_ranks: bool) -> None:
        """device_ranks: whether the device chooses the proposals to verify; only then do models report confidences."""
        self._device_ranks = device_ranks
        for member in self._members.values():
            member.gives_confidence = device_ranks

    def capture(self) -> None:
        self._fail_start_on_error(lambda member: member.capture)

    def observe_verification(self, *_arguments: Any) -> None:
        """Ignore the result: the engine core learns from it, not the worker."""

    def prepare_watermarking(self, *_arguments: Any) -> None:
        """Prepare nothing: proposals are not sampled, so they cannot carry a watermark."""

    # -- one step -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(
        self, input_batch: Any, attn_metadata: Any, slot_mappings: Any, last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None, *arguments: Any, dummy_run: bool = False, **keywords: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Return (requests, most tokens) int64; the order says how many tokens of a row the target may verify."""
        keywords.pop("num_speculative_tokens", None)  # the order has one for each member

        def propose_by(member: Any, **more: Any) -> torch.Tensor:
            aux = member.own_states(aux_hidden_states) if isinstance(member, ReadsLayers) else None
            made: torch.Tensor = member.propose(
                input_batch, attn_metadata, slot_mappings, last_hidden_states, aux, *arguments, **keywords, **more
            )
            return made

        step, tokens = self.step, self._tokens[: input_batch.num_reqs]
        if dummy_run or step is None:  # vLLM's own runs, which warm up and measure memory: all members, all passes
            self._fail_start_on_error(lambda member: partial(propose_by, member, dummy_run=dummy_run))
            return tokens
        step.begin(input_batch.req_ids)
        for member in self._members.values():
            if isinstance(member, SuffixMember):
                member.share(step.order.shared, step.rows)
        proposals = self._run(step, input_batch, propose_by)
        if step.order.draft_tokens:
            self._end(step, assign_proposals(tokens, proposals, step))
        else:
            self.draft_token_confidence_probs.zero_()
            step.end()
        return tokens

    def _end(self, step: DraftingStep, made: torch.Tensor) -> None:
        """made: see `DraftingStep.end`."""
        if self._device_ranks:
            self.draft_token_confidence_probs[: made.shape[1]] = acceptance(made, step.order.calibration)
        step.end(made)

    def _run(
        self, step: DraftingStep, input_batch: Any, propose_by: Callable[..., torch.Tensor]
    ) -> dict[int, Proposed]:
        """Run the members of the order; returns their proposals, by member."""
        proposals: dict[int, Proposed] = {}
        moved = False
        for number, member in self._members.items():
            gaps, passes = step.gaps(number), int(step.order.passes[number])
            if gaps and not step.catch_up(number, partial(member.fill_gaps, gaps, input_batch)):
                continue
            if passes == IDLE:
                continue
            if moved and isinstance(member, FirstPass):
                self._put_slots_back(input_batch)
            of_rows = {"rows": step.rows_of(number)} if isinstance(member, SparseSelfMember) else {}
            made = step.run(number, partial(propose_by, member, num_speculative_tokens=passes, **of_rows))
            moved = moved or isinstance(member, DraftModelSpeculator)
            if made is not None and passes:
                proposals[number] = real(made[:, :passes], member, self.vocab_size, input_batch.idx_mapping)
        return proposals

    def _put_slots_back(self, input_batch: Any) -> None:
        """Restore the target's slot mappings: a head's first pass writes its KV there.

        The last pass of the member before it has left the slots of its own tokens in that buffer.
        """
        self._block_tables.compute_slot_mappings(
            input_batch.idx_mapping, input_batch.query_start_loc, input_batch.positions,
            num_tokens_padded=input_batch.num_tokens_after_padding,
        )  # fmt: skip


def _expose_hidden_states(target_model: Any, layers: Callable[[Any], set[int]]) -> None:
    """Have the target output the hidden states after these layers. Raises TypeError if vLLM does not support it."""
    if not supports_eagle3(target_model):
        raise TypeError(f"vLLM serves no EAGLE-3 heads for {type(target_model).__name__}; use another method for it")
    target_model.set_aux_hidden_state_layers(tuple(sorted(layers(target_model))))
