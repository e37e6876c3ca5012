"""The service of a manifest: its pool, SLO classes, speculation settings and engine limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider_crds.base import seconds
from outrider_crds.draft_pool import DrafterSpec as PoolEntry
from outrider_crds.draft_pool import DraftMethod
from outrider_crds.spec import Engine, SpeculativeServiceSpec

from outrider_runtime.control.settings import Drafter, DraftPrefill, HotSettings, Mode, SLOClass
from outrider_runtime.drafters import traits
from outrider_runtime.local_manifest import LocalManifestError, read_service
from outrider_runtime.simulate.bounds import LEAST_STEP_TOKENS, MOST_AT_ONCE, MOST_TOKENS, whole
from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.recording import DEPTH
from outrider_runtime.simulate.replay.replay_requests import BLOCK_TOKENS
from outrider_runtime.simulate.replay.step_scheduler import Limits
from outrider_runtime.simulate.worlds.world import BLOCK_LAYERS

EAGLE, DRAFT, LOOKUP, SPARSE = "eagle", "draft", "lookup", "sparse"
RECORDED_AS = {
    DraftMethod.EAGLE: EAGLE,
    DraftMethod.DRAFT_MODEL: DRAFT,
    DraftMethod.PROMPT_LOOKUP: LOOKUP,
    DraftMethod.SUFFIX: LOOKUP,
    DraftMethod.SPARSE_SELF: SPARSE,
    DraftMethod.MTP: EAGLE,
    DraftMethod.BLOCK: EAGLE,
}
BLOCK = Drafter("block", needs_kv=True, needs_hidden=True)
TRAITS = {
    EAGLE: Drafter(EAGLE, passes=True, needs_hidden=True),
    DRAFT: Drafter(DRAFT, passes=True, needs_kv=True),
    LOOKUP: Drafter(LOOKUP),
    SPARSE: Drafter(SPARSE, passes=True),
}
MOST_REQUESTS = 256
"""vLLM's default of max_num_seqs."""
BUDGET, REQUESTS = "--max-num-batched-tokens", "--max-num-seqs"


@dataclass(frozen=True, slots=True)
class Member:
    """A drafter of the pool."""

    drafter: Drafter
    recorded_as: str
    """Name of the drafter in the recording and in composed worlds."""
    model: str = ""
    """Name of a draft model."""


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    target: str
    gpus: int
    pool: tuple[Member, ...]
    hot: HotSettings
    default_class: int
    """Position of the default class among the SLO classes."""
    learns: bool
    """Whether profiling.mode is Skip, so that the controller starts without a profile."""
    limits: Limits
    longest_request: int | None
    """maxModelLen, in tokens."""
    notices: tuple[str, ...]
    """Parts of the manifest that the figures do not cover, in sentences."""


def read(manifest: Path) -> Service:
    """Read a manifest. Raises SimulationError if it is invalid, or has a drafter that cannot be simulated."""
    try:
        service = read_service(manifest)
    except LocalManifestError as error:
        raise SimulationError(str(error)) from error
    spec = service.spec
    names = [slo_class.name for slo_class in spec.slo_classes]
    default = spec.class_of_unmarked_requests
    return Service(
        name=service.metadata.name,
        target=spec.target.name,
        gpus=spec.engine.tensor_parallel_size,
        pool=tuple(_member(entry) for entry in spec.draft_pool),
        hot=_hot(spec),
        default_class=0 if default is None else names.index(default),
        learns=spec.profiling.mode.value == "Skip",
        limits=_limits(spec.engine),
        longest_request=spec.engine.max_model_len,
        notices=tuple(_notices(spec)),
    )


def _member(entry: PoolEntry) -> Member:
    if entry.method not in RECORDED_AS:
        raise SimulationError(f"spec.draftPool: drafter {entry.name!r}: {entry.method} is not recorded; remove it")
    kind = RECORDED_AS[entry.method]
    model = entry.neural.model.name if kind == DRAFT and entry.neural is not None else ""
    known, has = traits(entry, BLOCK_TOKENS), TRAITS[kind] if entry.block is None else BLOCK
    return Member(replace(has, name=entry.name, kv_budget=known.kv_budget, most_tokens=known.most_tokens), kind, model)


def _hot(spec: SpeculativeServiceSpec) -> HotSettings:
    speculation = spec.speculation
    return HotSettings(
        mode=Mode(speculation.mode.value),
        draft_prefill=DraftPrefill(speculation.draft_prefill.value),
        max_draft_tokens=min(speculation.max_draft_tokens, DEPTH),
        slo_classes=tuple(
            SLOClass(entry.name, seconds(entry.tpot), seconds(entry.ttft) if entry.ttft else None)
            for entry in spec.slo_classes
        ),
    )


def _limits(engine: Engine) -> Limits:
    budget = _number(engine, BUDGET, Limits().token_budget, LEAST_STEP_TOKENS, MOST_TOKENS)
    requests = _number(engine, REQUESTS, min(MOST_REQUESTS, budget), 1, MOST_AT_ONCE)
    if requests > budget:
        raise SimulationError(
            f"spec.engine.extraArgs: vLLM does not start where {REQUESTS} ({requests}) is more than {BUDGET} ({budget})"
        )
    return Limits(token_budget=budget, max_requests=requests)


def _number(engine: Engine, flag: str, default: int, least: int, most: int) -> int:
    value = engine.argument(flag)
    try:
        return whole(str(default) if value is None else value, least, most)
    except ValueError as error:
        raise SimulationError(f"spec.engine.extraArgs: {flag}={error}") from error


def _notices(spec: SpeculativeServiceSpec) -> Sequence[str]:
    notices = []
    if spec.replicas > 1:
        notices.append(f"one pod is simulated, and the load is one pod's; the service has {spec.replicas} replicas.")
    if spec.speculation.max_draft_tokens > DEPTH:
        notices.append(f"proposals are recorded up to {DEPTH} tokens; maxDraftTokens counts as {DEPTH}.")
    notices += [
        f"drafter {entry.name!r} is as fast as its window makes it, and as often right as with any other window: "
        "proposals over 4 first and 64 last tokens were recorded."
        for entry in spec.draft_pool
        if entry.method is DraftMethod.SPARSE_SELF
    ]
    notices += [
        f"drafter {entry.name!r} is as fast as its window makes it, and as often right as over the whole context."
        for entry in spec.draft_pool
        if entry.draft_model is not None and entry.draft_model.window_tokens is not None
    ]
    notices += [
        f"drafter {entry.name!r} proposes as a prompt lookup: no suffix drafter was recorded."
        for entry in spec.draft_pool
        if entry.method is DraftMethod.SUFFIX
    ]
    notices += [
        f"drafter {entry.name!r} is as fast and as often right as an EAGLE head: no MTP layer was recorded."
        for entry in spec.draft_pool
        if entry.method is DraftMethod.MTP
    ] + [
        f"drafter {entry.name!r} is as often right as an EAGLE head, and its pass costs that of {BLOCK_LAYERS} of its "
        "layers over the whole block: no block draft was recorded."
        for entry in spec.draft_pool
        if entry.method is DraftMethod.BLOCK
    ]
    heads = [entry.name for entry in spec.draft_pool if RECORDED_AS.get(entry.method) == EAGLE]
    if len(heads) > 1:
        notices.append(f"one EAGLE head is recorded: {', '.join(heads)} are derived from it, each lifted apart.")
    return notices
