"""What a manifest's pool would do on a GPU that is not at hand: step times composed, proposals replayed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from outrider_crds.base import seconds
from outrider_crds.service import SpeculativeService
from outrider_crds.spec import DraftMethod, SpeculativeServiceSpec

from outrider_runtime.core.controller import Controller
from outrider_runtime.core.settings import MATCH_EDGES, Drafter, HotSettings, Settings, SLOClass
from outrider_runtime.local_manifest import LocalManifestError, read_service
from outrider_runtime.simulate import recording as recordings
from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.recording import DEPTH, Recording
from outrider_runtime.simulate.replay.engine import Engine, Policy, Setting
from outrider_runtime.simulate.replay.policies import Fixed
from outrider_runtime.simulate.replay.profile import fitted
from outrider_runtime.simulate.replay.scheduling import Limits
from outrider_runtime.simulate.replay.workload import Lengths, Workload, open_load, poisson, with_classes
from outrider_runtime.simulate.worlds.compose import Recipe, compose
from outrider_runtime.simulate.worlds.models import shape_of
from outrider_runtime.simulate.worlds.shapes import Shape
from outrider_runtime.simulate.worlds.world import Pass, World, parsed

SLOTS = 256
SHARES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
"""Rates, as shares of what plain decoding of 128 requests finishes."""
REQUESTS = 200
SPECULATES = 0.1
"""Proposals verified a request and step below which speculation counts as off."""
KINDS = {DraftMethod.EAGLE: "eagle", DraftMethod.DRAFT_MODEL: "draft", DraftMethod.PROMPT_LOOKUP: "lookup"}
TRAITS = {
    "eagle": Drafter("eagle", passes=True, needs_hidden=True),
    "draft": Drafter("draft", passes=True, needs_kv=True),
    "lookup": Drafter("lookup", confidence_edges=MATCH_EDGES),
}


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What is run."""

    service: str
    world: World
    recording: Recording
    acceptance: float
    drafters: tuple[Drafter, ...]
    longest: int
    classes: tuple[SLOClass, ...]
    lengths: Lengths
    notices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One rate."""

    rate_per_s: float
    goodput: float
    speedup: float
    """Mean latency of plain decoding by ours."""
    latency_s: float
    draft_length: float
    attained: tuple[float, ...]
    """By class; with plain decoding in `plain_attained`."""
    plain_attained: tuple[float, ...]


def plan(manifest: Path, system: str, acceptance: float, lengths: Lengths) -> Plan:
    """Raises SimulationError for a manifest that is none, and for what cannot be composed."""
    try:
        service = read_service(manifest)
    except LocalManifestError as error:
        raise SimulationError(str(error)) from error
    spec = service.spec
    target = shape_of(spec.target.name)
    drafters, drafts, notices = _pool(spec)
    recipe = Recipe(service.metadata.name, system, spec.engine.tensor_parallel_size, target, spec.target.name, drafts)
    return Plan(
        service.metadata.name, parsed(compose(recipe)), recordings.lifted(recordings.shipped(), acceptance, seed=0),
        acceptance, drafters, min(spec.speculation.max_draft_tokens, DEPTH), _classes(service), lengths, notices,
    )  # fmt: skip


def _pool(spec: SpeculativeServiceSpec) -> tuple[tuple[Drafter, ...], dict[str, Shape], tuple[str, ...]]:
    """Those that can be composed, the shapes of draft models among them, and a sentence on each other one."""
    drafters: list[Drafter] = []
    drafts: dict[str, Shape] = {}
    notices: list[str] = []
    for one in spec.draft_pool:
        kind = KINDS.get(one.method)
        if kind is None or kind in [drafter.name for drafter in drafters]:
            notices.append(f"drafter {one.name!r} is left out: the dry run has one of each of {', '.join(TRAITS)}.")
            continue
        if kind == "draft" and one.neural is not None:
            drafts["draft"] = shape_of(one.neural.model.name)
        drafters.append(TRAITS[kind])
    if not drafters:
        raise SimulationError("none of the pool's drafters can be composed: " + " ".join(notices))
    return tuple(drafters), drafts, tuple(notices)


def _classes(service: SpeculativeService) -> tuple[SLOClass, ...]:
    return tuple(
        SLOClass(one.name, seconds(one.tpot), seconds(one.ttft) if one.ttft else None)
        for one in service.spec.slo_classes
    )


def rates(plan: Plan) -> list[float]:
    requests = 128
    context = plan.lengths.prompt + plan.lengths.output / 2
    step_s = plan.world.target_s(Pass(requests, requests, context, requests))
    return [share * requests / step_s / plan.lengths.output for share in SHARES]


def rows(plan: Plan, at: Sequence[float]) -> Iterator[Row]:
    """Ours and plain decoding on the same requests, at each rate."""
    latency = fitted(plan.world, plan.drafters, np.random.default_rng(0))
    hot = HotSettings(max_draft_tokens=plan.longest, slo_classes=plan.classes)
    settings = Settings(plan.drafters, plan.longest, SLOTS, largest_graph_tokens=plan.world.graph_tokens, hot=hot)
    for rate in at:
        load = _load(plan, rate)
        ours = Controller(settings, latency, clock=time.perf_counter, rng=np.random.default_rng(1))
        yield _row(plan, rate, _ran(plan, load, ours), _ran(plan, load, Fixed(plan.drafters)))


def _load(plan: Plan, rate: float) -> Workload:
    rng = np.random.default_rng(2)
    load = open_load(poisson(rate, REQUESTS, rng), plan.recording, None, rng, plan.lengths)
    if not plan.classes:
        return load
    return with_classes(load, np.full(len(plan.classes), 1 / len(plan.classes)), rng)


def _ran(plan: Plan, load: Workload, policy: Policy) -> Engine:
    limits = Limits(max_requests=SLOTS, kv_tokens=plan.world.kv_tokens)
    engine = Engine(Setting(plan.world, plan.recording, plan.drafters, limits), load, policy)
    engine.run()
    return engine


def _row(plan: Plan, rate: float, ours: Engine, plain: Engine) -> Row:
    mine, theirs = (float((one.requests.done_s - one.requests.arrived_s).mean()) for one in (ours, plain))
    return Row(
        rate, sum(ours.log.tokens) / ours.now, theirs / mine, mine,
        sum(ours.log.verified) / max(1, sum(ours.log.requests)), _attained(plan, ours), _attained(plan, plain),
    )  # fmt: skip


def _attained(plan: Plan, engine: Engine) -> tuple[float, ...]:
    requests, load = engine.requests, engine.requests.load
    tpot_s = (requests.done_s - requests.first_s) / np.maximum(1, load.output - 1)
    ttft_s = requests.first_s - requests.arrived_s
    met = [(tpot_s <= one.tpot_s) & (ttft_s <= (one.ttft_s or np.inf)) for one in plan.classes]
    return tuple(float(good[load.slo_class == number].mean()) for number, good in enumerate(met))


def crossover(found: Sequence[Row]) -> str:
    """Where speculation stops to pay, in a sentence."""
    off = next((row for row in found if row.draft_length < SPECULATES), None)
    if off is None:
        return f"Speculation pays at every rate up to {found[-1].rate_per_s:.1f} requests a second."
    return f"From {off.rate_per_s:.1f} requests a second on, plain decoding is the right choice, and what runs."
