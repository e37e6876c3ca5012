"""Drafters of a service: one class a method."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from outrider_crds.base import Duration, Model
from outrider_crds.model_sources import ModelRef
from outrider_crds.names import Name

MOST_DRAFT_TOKENS = 16
SINK_TOKENS = 16
"""Tokens at the beginning of a request that a drafter with a window reads by default."""
MOST_WINDOW_TOKENS = 1_000_000


class DraftMethod(StrEnum):
    PROMPT_LOOKUP = "PromptLookup"
    SUFFIX = "Suffix"
    DRAFT_MODEL = "DraftModel"
    EAGLE = "Eagle"
    SPARSE_SELF = "SparseSelf"
    MEDUSA = "Medusa"
    BLOCK = "Block"
    MTP = "MTP"


class PromptLookup(Model):
    min_tokens: Annotated[int, Field(ge=1, le=16)] = 2
    """Shortest n-gram that may match, in tokens."""
    max_tokens: Annotated[int, Field(ge=1, le=16)] = 4
    """Longest n-gram that is tried, in tokens."""


class SuffixScope(StrEnum):
    REQUEST = "Request"
    ADAPTER = "Adapter"
    TENANT = "Tenant"
    SERVICE = "Service"


class Suffix(Model):
    scope: SuffixScope = SuffixScope.REQUEST
    """Texts that are searched. Request: the request's own prompt and answer; nothing is kept. Adapter, Tenant and
    Service also search answers that the pod gave before: on the same LoRA adapter, or on none; to the same tenant
    (headers X-Tenant, Authorization and X-API-Key; a request without them shares with no other); to any request."""
    max_tokens: Annotated[int, Field(ge=1, le=64)] = 16
    """Longest match that is tried, in tokens."""
    memory: Annotated[str, StringConstraints(max_length=5, pattern=r"^[1-9][0-9]{0,2}Mi$")] = "16Mi"
    """Host memory for kept answers in each process that searches, 1Mi to 999Mi; 60 bytes a token. The oldest make room.
    Not used with scope Request."""
    max_age: Duration = "1h"
    """Age at which a kept answer is erased. Not used with scope Request."""


class NeuralDraft(Model):
    model: ModelRef
    """The draft's weights. They must share the target's vocabulary."""


class DraftModel(NeuralDraft):
    window_tokens: Annotated[int, Field(ge=1, le=MOST_WINDOW_TOKENS)] | None = None
    """Tokens at the end of the request that every draft pass reads, together with the first 16, both rounded up to
    whole pages of the KV cache. Absent: the whole request. For long contexts (engine.backend vLLM only)."""


class BlockDraft(NeuralDraft):
    max_tokens: Annotated[int, Field(ge=1, le=MOST_DRAFT_TOKENS)] | None = None
    """Most tokens that it proposes for a request in a step, at most what the checkpoint's block holds. When absent:
    that, or speculation.maxDraftTokens where it is less."""


class MTP(Model):
    """Multi-token prediction has no settings: its layers are in the target's own checkpoint."""


class SparseSelf(Model):
    sink_tokens: Annotated[int, Field(ge=0, le=1024)] = SINK_TOKENS
    """Tokens at the beginning of the request that every draft pass reads, rounded up to whole pages of the KV cache."""
    window_tokens: Annotated[int, Field(ge=1, le=MOST_WINDOW_TOKENS)] = 512
    """Tokens at the end of the request that every draft pass reads, rounded up to whole pages of the KV cache. A larger
    window has a higher acceptance rate, and costs more to read."""

    @property
    def tokens(self) -> int:
        """Most tokens of a request that a draft pass reads, before they are rounded up."""
        return self.sink_tokens + self.window_tokens


class DrafterSpec(Model):
    name: Name
    """Name of this drafter, unique in the pool; status and metrics use it."""
    method: DraftMethod
    """PromptLookup, Suffix, DraftModel, Eagle, SparseSelf, Medusa, Block or MTP; the block of the same name holds its
    settings."""
    prompt_lookup: PromptLookup | None = None
    """Proposes the tokens that followed the same n-gram earlier in the request (no model)."""
    suffix: Suffix | None = None
    """Proposes the tokens that followed the longest earlier occurrence of the last tokens, with a confidence from how
    many occurrences agree (no model)."""
    draft_model: DraftModel | None = None
    """Proposes tokens one by one with a small model of the same vocabulary."""
    eagle: NeuralDraft | None = None
    """Proposes tokens with an EAGLE-3 head on the target's hidden states."""
    sparse_self: SparseSelf | None = None
    """Proposes tokens with the target itself, which reads only the beginning and the end of the request (no model; for
    long contexts)."""
    medusa: NeuralDraft | None = None
    """Proposes one token per Medusa head on the target's last hidden state, all at once (engine.backend Torch only)."""
    block: BlockDraft | None = None
    """Proposes all tokens in one pass over the target's hidden states, with a block drafter: DFlash, DFlash2 or DSpark,
    as its checkpoint says (engine.backend vLLM only)."""
    mtp: MTP | None = None
    """The multi-token prediction layer of the target's own checkpoint proposes tokens one by one (engine.backend vLLM
    only)."""
    paused: bool = False
    """True: the drafter stays loaded but proposes nothing. Changing it restarts nothing."""

    @property
    def neural(self) -> NeuralDraft | None:
        """The draft's weights, or None for a drafter that has none."""
        return self.draft_model or self.eagle or self.medusa or self.block

    @property
    def window(self) -> int | None:
        """Tokens of a request that the manifest lets a draft pass read; None: all of them."""
        if self.sparse_self is not None:
            return self.sparse_self.tokens
        return self.draft_model.window_tokens if self.draft_model is not None else None
