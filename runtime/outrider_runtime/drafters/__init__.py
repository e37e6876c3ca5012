"""The table of draft methods.

A new method needs a module here, a line in the table, its block and rules in the API (`outrider_crds.draft_pool`,
`pool_rules`), and its implementation in each engine that hosts it (`vllm_plugin.pool_members`, `torch_engine.drafts`).
If it has traits of its own: `simulate.service_manifest` and `profiler.run` too.
"""

from __future__ import annotations

from outrider_crds.draft_pool import DrafterSpec, DraftMethod

from outrider_runtime.control import settings
from outrider_runtime.drafters import block, draft_model, eagle, medusa, mtp, sparse_self, suffix
from outrider_runtime.drafters.method import Method
from outrider_runtime.drafters.window import window_of

METHODS: dict[DraftMethod, Method] = {
    DraftMethod.PROMPT_LOOKUP: suffix.METHOD,
    DraftMethod.SUFFIX: suffix.METHOD,
    DraftMethod.DRAFT_MODEL: draft_model.METHOD,
    DraftMethod.EAGLE: eagle.METHOD,
    DraftMethod.SPARSE_SELF: sparse_self.METHOD,
    DraftMethod.MEDUSA: medusa.METHOD,
    DraftMethod.BLOCK: block.METHOD,
    DraftMethod.MTP: mtp.METHOD,
}


def traits(
    drafter: DrafterSpec, page_tokens: int = 1, widest: int = 1, checkpoint: block.BlockCheckpoint | None = None
) -> settings.Drafter:  # fmt: skip
    """Convert a drafter of the manifest to the controller's description of it.

    page_tokens: tokens in a page of the engine's KV cache. widest: most nodes at a depth of the trees that the engine
    verifies. checkpoint: the loaded checkpoint of a block drafter, if it is known.
    """
    method, window = METHODS[drafter.method], window_of(drafter)
    manifest_tokens = None if drafter.block is None else drafter.block.max_tokens
    return settings.Drafter(
        drafter.name, method.autoregressive, method.needs_kv, method.needs_hidden,
        None if window is None else window.budget(page_tokens),
        manifest_tokens if checkpoint is None else checkpoint.tokens, widest if method.beams else 1,
    )  # fmt: skip
