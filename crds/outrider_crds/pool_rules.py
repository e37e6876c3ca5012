"""Rules for the draft pool."""

from __future__ import annotations

from outrider_crds.draft_pool import DrafterSpec, DraftMethod, PromptLookup, Suffix, SuffixScope
from outrider_crds.engine_rules import cel_sets_none
from outrider_crds.hardware_rules import ON_CPU
from outrider_crds.rule import Rule, positive, rules_on
from outrider_crds.spec import Backend, SpeculativeServiceSpec

_SPLIT_KV = "--decode-context-parallel-size"
_BLOCKS = {
    DraftMethod.PROMPT_LOOKUP: "promptLookup",
    DraftMethod.SUFFIX: "suffix",
    DraftMethod.DRAFT_MODEL: "draftModel",
    DraftMethod.EAGLE: "eagle",
    DraftMethod.SPARSE_SELF: "sparseSelf",
    DraftMethod.MEDUSA: "medusa",
    DraftMethod.BLOCK: "block",
    DraftMethod.MTP: "mtp",
}


def _method_rules(method: DraftMethod, block: str) -> tuple[Rule, ...]:
    """A method needs its block, and a block its method."""
    return rules_on(
        DrafterSpec,
        (
            ".method",
            f"self.method != '{method}' || has(self.{block})",
            f"method {method} needs the block {block}: add it (it may be empty where nothing is required)",
        ),
        (
            f".{block}",
            f"self.method == '{method}' || !has(self.{block})",
            f"the block {block} belongs to method {method}: remove it or change the method",
        ),
    )


def _method_rule(method: DraftMethod, backend: Backend, why: str) -> tuple[str, str, str]:
    """A method that one engine alone has."""
    return (
        ".draftPool",
        f"self.engine.backend == '{backend}' || !has(self.draftPool) "
        f"|| !self.draftPool.exists(d, d.method == '{method}')",
        f"method {method} needs engine.backend {backend} ({why}): set it, or remove the drafter",
    )


def _single_method_rule(method: DraftMethod, why: str) -> tuple[str, str, str]:
    return (
        ".draftPool",
        f"!has(self.draftPool) || self.draftPool.filter(d, d.method == '{method}').size() <= 1",
        f"draftPool may hold one {method} drafter{why}: remove the others",
    )


POOL_RULES: tuple[Rule, ...] = (
    *(rule for method, block in _BLOCKS.items() for rule in _method_rules(method, block)),
    *rules_on(
        PromptLookup,
        (
            ".minTokens",
            "self.minTokens <= self.maxTokens",
            "minTokens must not exceed maxTokens: lower minTokens or raise maxTokens",
        ),
    ),
    positive(Suffix, "maxAge"),
    *rules_on(
        SpeculativeServiceSpec,
        _single_method_rule(DraftMethod.MTP, ", the target has one set of layers"),
        _single_method_rule(DraftMethod.PROMPT_LOOKUP, " in this release"),
        _single_method_rule(DraftMethod.SUFFIX, " in this release"),
        (
            ".draftPool",
            f"!has(self.draftPool) || {ON_CPU} || self.engine.backend == '{Backend.TORCH}' || "
            f"self.draftPool.all(d, !has(d.suffix) || d.suffix.scope == '{SuffixScope.REQUEST}')",
            "suffix.scope Adapter, Tenant or Service needs product cpu or engine.backend Torch in this release: vLLM "
            "searches on the GPU, and kept answers are on the host. Use scope Request",
        ),
        (
            ".draftPool",
            "!has(self.draftPool) || !has(self.engine.maxModelLen) || self.draftPool.all(d, !has(d.sparseSelf) || "
            "d.sparseSelf.sinkTokens + d.sparseSelf.windowTokens <= self.engine.maxModelLen)",
            "sinkTokens and windowTokens of a drafter must together not exceed engine.maxModelLen: lower them, or "
            "raise maxModelLen",
        ),
        (
            ".draftPool",
            "!has(self.draftPool) || !has(self.engine.maxModelLen) || self.draftPool.all(d, !has(d.draftModel) || "
            "!has(d.draftModel.windowTokens) || d.draftModel.windowTokens <= self.engine.maxModelLen)",
            "windowTokens of a drafter must not exceed engine.maxModelLen: lower it, or raise maxModelLen",
        ),
        (
            ".draftPool",
            "!has(self.draftPool) || !self.draftPool.exists(d, has(d.sparseSelf) || "
            f"(has(d.draftModel) && has(d.draftModel.windowTokens))) || {cel_sets_none((_SPLIT_KV,), 'self.engine')}",
            f"a drafter with windowTokens cannot run where {_SPLIT_KV} splits each request's KV: remove the "
            "argument from engine.extraArgs, or the drafter",
        ),
        (
            ".draftPool",
            f"self.engine.backend == '{Backend.VLLM}' || !has(self.draftPool) || "
            "self.draftPool.all(d, !has(d.draftModel) || !has(d.draftModel.windowTokens))",
            "draftModel.windowTokens needs engine.backend vLLM: set it, or remove windowTokens",
        ),
        _method_rule(DraftMethod.SPARSE_SELF, Backend.VLLM, "the Torch backend has no windows"),
        _method_rule(DraftMethod.BLOCK, Backend.VLLM, "the Torch backend has no block drafters"),
        _method_rule(DraftMethod.MTP, Backend.VLLM, "the Torch backend loads no MTP layers"),
        _method_rule(DraftMethod.MEDUSA, Backend.TORCH, "vLLM's model runner has no Medusa heads"),
        (
            ".speculation.mode",
            "self.speculation.mode != 'Static' || (has(self.draftPool) && self.draftPool.size() > 0)",
            "mode Static needs a drafter: add one to spec.draftPool, or use ClosedLoop or 'Off'",
        ),
    ),
)
