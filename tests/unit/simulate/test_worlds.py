"""Worlds: the step times that everything is judged in."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.step_times import Shape
from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.replay.fitted_profile import fit_profile
from outrider_runtime.simulate.worlds import compose
from outrider_runtime.simulate.worlds.world import WORLDS, Forward, Pass, World, load, world_names

from bench.papers import magicdec_world


def document(name: str) -> dict[str, Any]:
    world_document: dict[str, Any] = json.loads((WORLDS / f"{name}.json").read_text())
    return world_document


def decoding(requests: int, query: int = 1, context: int = 500) -> Pass:
    return Pass(requests * query, requests, context, requests * query)


@pytest.fixture(params=world_names())
def world(request) -> World:
    return load(request.param)


def test_every_world_names_the_source_of_its_times(world):
    """A figure is worth what its source is worth."""
    assert world.source
    assert world.derived
    assert world.kv_tokens > 40_000


def test_a_step_grows_with_requests_tokens_and_context(world):
    """The tolerance is 5%, by which measured kernels differ from one size to the next."""
    grid = [[world.target_s(decoding(n, q)) for q in (1, 2, 4, 8)] for n in (1, 8, 32, 64, 128)]
    for smaller, larger in pairwise(grid):
        assert all(more > 0.95 * less for less, more in zip(smaller, larger, strict=True))
    for row in grid:
        assert all(more > 0.95 * less for less, more in pairwise(row))
    assert world.target_s(decoding(64, context=16000)) > world.target_s(decoding(64, context=1000))


def test_speculation_is_cheap_at_one_request_only(world):
    """The crossover that the loop is there to find is in every world."""
    extra = {n: world.target_s(decoding(n, 5)) / world.target_s(decoding(n)) for n in (1, 128)}
    assert extra[1] < 1.25
    assert extra[128] > 1.4


@pytest.mark.parametrize(
    ("name", "more_ms"), [("llama-3.1-8b-a100", 0.192), ("llama-3.1-8b-l40s", 0.192), ("llama-3.1-8b-h200", 0.0)]
)
def test_a_varlen_step_costs_more_with_flash_attention_2(name, more_ms):
    """It runs in pieces, with attention between graphs; FlashAttention 3 has a whole graph for any lengths."""
    world = load(name)
    even = Pass(96, 32, 500, 96)
    varlen = replace(even, uniform=False)
    assert 1e3 * (world.target_s(varlen) - world.target_s(even)) == pytest.approx(more_ms)
    assert world.takes_any_lengths == (more_ms == 0.0)


def test_a_varlen_step_with_a_prompt_pays_for_its_pieces_once():
    world = load("llama-3.1-8b-a100")
    step = Pass(196, 32, 500, 97, ((100, 0),))
    assert world.target_s(replace(step, uniform=False)) == world.target_s(step)


def test_a_profile_of_flash_attention_2_tells_varlen_steps_apart():
    """What the loop mounts prices 32 requests of 3 tokens each lower than 96 tokens of other lengths."""
    costs = fit_profile(load("llama-3.1-8b-a100"), (), np.random.default_rng(0)).target
    shape = Shape(32 * 500, 96, 32, 500 * 96 / 1000)
    assert costs[ExecutionMode.VARLEN].seconds(shape) > costs[ExecutionMode.UNIFORM].seconds(shape)


def test_a_pass_costs_what_the_graph_that_holds_it_costs():
    """129 tokens run in the graph of 136."""
    world = load("llama-3.1-8b-h100")
    assert isinstance(world.target, Forward)
    smaller, other = Pass(129, 64, 500, 129), Pass(136, 64, 500, 129)
    assert world.target.tables.tokens(129) < world.target.tables.tokens(136)
    assert world.target_s(smaller) == pytest.approx(world.target_s(other), rel=2e-3)
    assert world.target_s(decoding(33, 4)) == pytest.approx(world.target_s(decoding(34, 4)), rel=0.02)


def test_unknown_world_is_refused_with_the_known_names():
    with pytest.raises(SimulationError, match=r"llama-3\.1-8b-h200"):
        load("llama-3.1-8b-abacus")


def test_a_measured_world_costs_what_its_profile_says():
    """Uniform steps use the uniform coefficients; steps with prefill or several lengths use the varlen ones."""
    world = load("smollm2-135m-cpu")
    uniform, varlen = (document("smollm2-135m-cpu")["target"]["costs"][mode] for mode in ("uniform", "varlen"))
    plain_s = uniform["constant_s"] + 8 * uniform["per_batched_token_s"] + 8 * 300 * uniform["per_context_token_s"]
    assert world.target_s(Pass(8, 8, 300, 8)) == pytest.approx(plain_s)
    prompt_s = varlen["constant_s"] + 64 * varlen["per_batched_token_s"] + varlen["per_request_s"]
    assert world.target_s(Pass(64, 0, 0, 1, ((64, 0),))) == pytest.approx(prompt_s)
    uneven = Pass(8, 4, 300, 8, uniform=False)
    assert world.target_s(uneven) != pytest.approx(world.target_s(Pass(8, 4, 300, 8)))


def test_magicdecs_world_gives_back_the_papers_rows():
    """Table 1, as printed: steps of one token and of three, and two passes of the draft, which reads 512 tokens."""
    world = load("llama-3.1-8b-8xa100-long")
    for row in magicdec_world.rows("llama-3.1-8b"):
        decode, verify = (world.target_s(decoding(row.requests, q, row.context)) * 1e3 for q in (1, 3))
        assert decode == pytest.approx(row.decode_ms, rel=1e-3)
        assert verify == pytest.approx(row.verify_ms, rel=1e-3)
        once = Pass(row.requests, row.requests, 512, row.requests, whole_context=row.context)
        assert world.draft_s("sparse", once, magicdec_world.DRAFTED) * 1e3 == pytest.approx(row.draft_ms, rel=1e-3)


def test_the_worlds_that_ship_are_what_the_kernels_say():
    """The files can be made again, where the extra `bench` is installed."""
    pytest.importorskip("aiconfigurator_core")
    recipe = compose.RECIPES[1]
    assert document(recipe.name)["target"] == json.loads(json.dumps(compose.compose(recipe)["target"]))
