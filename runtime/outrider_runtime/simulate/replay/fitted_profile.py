"""The latency profile that a controller mounts: fitted to noisy samples of the world, never the world itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.settings import Drafter
from outrider_runtime.control.step_times import DrafterCost, LatencyModel, Shape
from outrider_runtime.profiler.cost_fit import Sample, fit
from outrider_runtime.simulate.worlds.world import Pass, World

NOISE = 0.02
"""Standard deviation of the log of a sampled time."""
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (256, 1024, 4096, 16384, 32768)
LONGEST_REQUEST = 4096
"""Default of the longest request, in tokens."""
QUERIES = (1, 2, 4, 6)
CHUNKS = (128, 256, 512, 1024, 2048)
DRAFT_PASSES = (1, 3)
"""Sizes of the sampled steps: as widely spaced as those of a real profile, so that most sizes are predicted."""


def fit_profile(
    world: World, drafters: Sequence[Drafter], rng: np.random.Generator, longest: int = LONGEST_REQUEST
) -> LatencyModel:  # fmt: skip
    """Measure the world like outrider-profile: steps that decode and verify, steps with prefill, and each drafter.

    longest: longest request in tokens; longer contexts are not measured.
    """
    noise = _Noise(rng)
    contexts = [context for context in CONTEXTS if context <= longest] or [max(1, longest // 2)]
    decode = [noise(sample) for sample in _decode_samples(world, contexts)]
    prompts = [noise(sample) for sample in _prompt_samples(world)]
    varlen = decode
    if not world.takes_any_lengths:
        varlen = [noise(sample) for sample in _decode_samples(world, contexts, uniform=False)]
    target = {ExecutionMode.UNIFORM: fit(decode).cost, ExecutionMode.VARLEN: fit([*varlen, *prompts]).cost}
    if world.graph_tokens is not None:
        target[ExecutionMode.BEYOND_GRAPH] = target[ExecutionMode.VARLEN]
    shorter = contexts[:-1] or contexts  # drafters are measured at fewer shapes
    drafts = {drafter.name: _block if drafter.is_block else _drafter for drafter in drafters}
    return LatencyModel(
        target, {drafter.name: drafts[drafter.name](world, drafter, noise, shorter) for drafter in drafters}
    )


class _Noise:
    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def __call__(self, sample: Sample) -> Sample:
        factor = float(np.exp(NOISE * self._rng.standard_normal()))
        return Sample(sample.shape, sample.seconds * factor, later=sample.later, later_passes=sample.later_passes)


def _fits(world: World, requests: int, context: int) -> bool:
    return requests * context <= world.kv_tokens


def _decode_samples(world: World, contexts: Sequence[int], *, uniform: bool = True) -> Iterator[Sample]:
    """Sample decoding steps. uniform: whether all requests have the same number of tokens, or only on average."""
    for requests, context, query in product(REQUESTS, contexts, QUERIES):
        tokens = requests * query
        small = world.graph_tokens is None or tokens <= world.graph_tokens
        unequal = requests > 1 and query > 1
        if _fits(world, requests, context) and small and (uniform or unequal):
            step = Pass(tokens, requests, context, tokens, uniform=uniform)
            yield Sample(_shape(requests, context, tokens), world.target_s(step))


def _prompt_samples(world: World) -> Iterator[Sample]:
    for chunk in CHUNKS:
        for requests in (1, 16, 64):
            context = 512
            step = Pass(chunk + requests, requests, context, requests + 1, ((chunk, 0),))
            shape = Shape(requests * context, chunk + requests, requests + 1, requests * context / 1000, chunk)
            yield Sample(shape, world.target_s(step))


def _drafter(world: World, drafter: Drafter, noise: _Noise, contexts: Sequence[int]) -> DrafterCost:
    samples = []
    for requests in REQUESTS:
        for context in contexts:
            read = context if drafter.kv_budget is None else min(context, drafter.kv_budget)
            for passes in DRAFT_PASSES if drafter.passes else (1,):
                later = _shape(requests, read, requests) if passes > 1 else None
                once = Pass(requests, requests, read, requests, whole_context=context)
                seconds = world.draft_s(drafter.name, once, passes)
                samples.append(
                    noise(Sample(_shape(requests, read, requests), seconds, later=later, later_passes=passes - 1))
                )
            samples += [noise(sample) for sample in _longer_first_passes(world, drafter, requests, read)]
    fitted_cost = fit(samples, first_pass=drafter.passes)
    return DrafterCost(fitted_cost.cost, drafter.passes, fitted_cost.first_pass)


def _block(world: World, drafter: Drafter, noise: _Noise, contexts: Sequence[int]) -> DrafterCost:
    """Fit a block drafter: steps that only feed it, and the extra time of a pass."""
    passes, feeding = list[Sample](), list[Sample]()
    for requests in REQUESTS:
        for context in contexts:
            for query in QUERIES:
                tokens = requests * query
                fed_s, both_s = (
                    world.draft_s(drafter.name, Pass(tokens, requests, context, requests), length) for length in (0, 1)
                )
                feeding.append(noise(Sample(_shape(requests, context, tokens), fed_s)))
                passes.append(noise(Sample(_shape(requests, context, requests), both_s - fed_s)))
    return DrafterCost(fit(passes).cost, False, fit(feeding).cost)


def _longer_first_passes(world: World, drafter: Drafter, requests: int, context: int) -> Iterator[Sample]:
    """Sample first passes, which process every token of the target's step."""
    for query in (4, 8) if drafter.reads else ():
        tokens = requests * query
        seconds = world.draft_s(drafter.name, Pass(tokens, requests, context, requests), 1)
        yield Sample(_shape(requests, context, tokens), seconds)


def _shape(requests: int, context: int, tokens: int) -> Shape:
    return Shape(requests * context, tokens, requests, context * tokens / 1000)
