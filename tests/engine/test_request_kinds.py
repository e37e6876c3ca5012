"""An engine with speculation answers every kind of request as without, with any drafter: a pool of a lookup, a
draft model, a head and the target itself takes turns, and every answer is that of plain decoding.

Real vLLM in this process; planted models, and two LoRA adapters that are made here. What a client sees of it over HTTP
is in test_server_requests.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.engine.engines import TARGET, Bench, RequestArguments, bench, draft_model, eagle, lookup, sparse_self
from tests.engine.planted_models import Counting

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]

POOL = ("pld", "draft", "eagle", "self")
LIMITS = ("--max-model-len=512", "--max-num-batched-tokens=128", "--block-size=32")
WITHOUT_SPACES = '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}'
"""JSON of a target that has never seen any ends within the tokens of a request."""
WITH_ADAPTERS = ("--enable-lora", "--max-loras=2", "--max-lora-rank=8")
COUNTING = "one two three four five six one two three four five six one two three"
FRANCO, BEN = 28757, 14414
"""Tokens in the plain answer to COUNTING: " Franco" is the fifth, "Ben" comes later."""
FRANCE = "The capital of France is"
LONG = "The old lighthouse keeper counted the waves: one, two, three, four, one, two. " * 12 + "Then he"
"""Longer than one step reads."""


@pytest.fixture(scope="module")
def running(models: Counting) -> Iterator[Bench]:
    pool = (lookup(), draft_model(models.draft), eagle(models.head), sparse_self(64))
    with bench(pool, extra=[*LIMITS, *WITH_ADAPTERS, WITHOUT_SPACES], target=models.target) as started:
        yield started


@pytest.fixture
def engine(running: Bench) -> Bench:
    running.fresh()
    return running


@pytest.fixture(scope="module")
def adapters(models: Counting, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Two, which say other things than the target does."""
    from vllm.lora.request import LoRARequest

    folders = [tmp_path_factory.mktemp("adapters") / name for name in ("one", "two")]
    return tuple(
        LoRARequest(folder.name, number, str(write_adapter(folder, seed=number, target=models.target)))
        for number, folder in enumerate(folders, 1)
    )


def write_adapter(folder: Path, seed: int, rank: int = 8, target: Path = TARGET) -> Path:
    """Random LoRA weights for attention, the MLP and the output layer of SmolLM2, as PEFT writes them."""
    shape, random = AutoConfig.from_pretrained(target), torch.Generator().manual_seed(seed)
    width, inner = shape.hidden_size, shape.intermediate_size
    keys = width // shape.num_attention_heads * shape.num_key_value_heads
    sizes = {"lm_head": (width, shape.vocab_size)}
    for layer in range(shape.num_hidden_layers):
        sizes |= {
            f"model.layers.{layer}.self_attn.q_proj": (width, width),
            f"model.layers.{layer}.self_attn.v_proj": (width, keys),
            f"model.layers.{layer}.mlp.down_proj": (inner, width),
        }
    weights = {}
    for name, (fed, made) in sizes.items():
        weights[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, fed, generator=random) / fed**0.5
        weights[f"base_model.model.{name}.lora_B.weight"] = torch.randn(made, rank, generator=random) / 10
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    modules = sorted({name.rpartition(".")[2] for name in sizes})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


Spells = tuple[tuple[int, int, str | None], ...]
"""Steps, draft length and drafter, one spell after another."""
EACH_DRAFTER: Spells = (
    (4, 3, "draft"), (2, 3, "pld"), (2, 2, "eagle"), (2, 3, "self"), (1, 0, None), (2, 1, "eagle")
)  # fmt: skip
"""The draft model is first, since it reads the prompts. Lengths differ."""


def by_turns(engine: Bench, spells: Spells) -> Callable[[int], None]:
    turns = itertools.cycle([(length, drafter) for steps, length, drafter in spells for _ in range(steps)])
    return lambda _step: engine.loop.pin(*next(turns))


def plain_and_speculative(
    engine: Bench, requests: list[RequestArguments], spells: Spells = EACH_DRAFTER, **how: Any
) -> tuple[list[Any], list[Any]]:
    """vLLM's outputs, without drafts and with drafters in turn."""
    engine.loop.pin(0)
    plain = engine.outputs(requests, **how)
    assert engine.verified() == 0
    engine.fresh()
    speculative = engine.outputs(requests, before_step=by_turns(engine, spells), **how)
    assert engine.verified() > 0
    return plain, speculative


def tokens(outputs: list[Any]) -> list[list[list[int]]]:
    """Tokens of each choice of each request."""
    return [[list(choice.token_ids) for choice in output.outputs] for output in outputs]


def sampled_as(kind: str) -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    schema = {"type": "object", "properties": {"name": {"enum": ["one", "two"]}}, "required": ["name"]}
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "regular expression": {"structured_outputs": StructuredOutputsParams(regex="(one two three ){4}")},
        "JSON schema": {"structured_outputs": StructuredOutputsParams(json=schema, disable_any_whitespace=True)},
        "repetition_penalty": {"repetition_penalty": 1.5},
        "presence_penalty": {"presence_penalty": 2.0},
        "frequency_penalty": {"frequency_penalty": 2.0},
        "logit_bias": {"logit_bias": {260: 100.0}},
        "min_p": {"min_p": 1.0, "temperature": 1.0},
        "top_k": {"top_k": 1, "temperature": 1.0},
        "seed": {"seed": 7, "temperature": 1.0},
        "bad_words": {"bad_words": ["six", "Ben"], "min_tokens": 20},
        "allowed_token_ids": {"allowed_token_ids": [28, 260, 281, 338, 411]},
        "stop": {"stop": ["Franco"]},
        "stop_token_ids": {"stop_token_ids": [BEN], "min_tokens": 4},
    }
    ends = {"ignore_eos": False} if "structured_outputs" in kinds[kind] else {}
    return kinds[kind] | ends


KINDS = (
    "greedy", "regular expression", "JSON schema", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "min_p", "top_k", "seed", "bad_words", "allowed_token_ids", "stop", "stop_token_ids",
)  # fmt: skip


def test_requests_of_every_kind_share_a_batch(engine: Bench) -> None:
    """Bug: vLLM refuses min_p and logit_bias while speculation is configured. Every row has one right answer."""
    requests = [(COUNTING, sampled_as(kind) | {"max_tokens": 48}) for kind in KINDS]
    plain, speculative = (
        dict(zip(KINDS, tokens(outputs), strict=True)) for outputs in plain_and_speculative(engine, requests)
    )
    assert speculative == plain
    assert FRANCO in plain["greedy"][0]
    assert BEN in plain["greedy"][0]
    same = {kind for kind in KINDS if plain[kind] == plain["greedy"]}
    assert same <= {"greedy", "min_p", "top_k", "presence_penalty"}, "the others change the answer"
    assert {outcome.drafter for outcome in engine.outcomes if outcome.verified} == {*POOL}


def test_an_answer_keeps_to_its_grammar(engine: Bench) -> None:
    room = {"max_tokens": 64}  # letters of an answer: the target may choose a token for each
    bound_requests = [
        (COUNTING, sampled_as("regular expression") | room),
        (FRANCE, sampled_as("JSON schema") | room),
    ]
    # The lookup alone proposes what the grammar allows. When a request begins depends on the grammar's compiler.
    _, (bound, shaped) = plain_and_speculative(engine, bound_requests, ((3, 3, "pld"), (1, 2, "eagle")))
    assert bound.outputs[0].text.split() == ["one", "two", "three"] * 4
    assert json.loads(shaped.outputs[0].text)["name"] in ("one", "two")


def test_log_probabilities_are_those_of_plain_decoding(engine: Bench, adapters: tuple[Any, Any]) -> None:
    """Log-probabilities of each token, of its most probable alternatives, and of the prompt's tokens.

    Bug: with adapters, log-probabilities of a prompt ended the engine: vLLM names an adapter for
    one row of logits of each request."""
    fields = {"logprobs": 3, "prompt_logprobs": 2}
    requests: list[RequestArguments] = [
        (COUNTING, fields),
        (FRANCE, {}),
        (FRANCE, fields | {"temperature": 1.0, "top_k": 1}),
    ]
    requests += [(COUNTING, fields), (LONG, fields)]
    which = {3: adapters[0], 4: adapters[1]}
    plain, speculative = plain_and_speculative(engine, requests, adapters=which)
    assert tokens(speculative) == tokens(plain)
    for right, returned in zip(plain, speculative, strict=True):
        assert values(returned.outputs[0].logprobs) == near(right.outputs[0].logprobs)
        assert values(returned.prompt_logprobs) == near(right.prompt_logprobs)
    assert len(plain[0].outputs[0].logprobs) == len(plain[0].outputs[0].token_ids)
    assert plain[1].outputs[0].logprobs is None
    assert values(plain[3].prompt_logprobs) != near(plain[0].prompt_logprobs), "the adapter has another opinion"
    engine.fresh()
    (alone,) = engine.outputs([(COUNTING, fields)], adapters={0: adapters[0]})
    assert values(alone.prompt_logprobs) == near(plain[3].prompt_logprobs)


def values(logprobs: list[Mapping[int, Any] | None] | None) -> list[float]:
    """Values by position, the highest first: which of two nearly equal tokens is reported is not
    promise."""
    return [
        value
        for position in logprobs or ()
        for value in sorted((entry.logprob for entry in (position or {}).values()), reverse=True)
    ]


def near(logprobs: Any) -> Any:
    return pytest.approx(values(logprobs), abs=1e-3)


def test_a_request_gets_as_many_choices_as_it_asks_for(engine: Bench) -> None:
    from vllm.sampling_params import RequestOutputKind

    whole = {"output_kind": RequestOutputKind.FINAL_ONLY, "temperature": 1.0}
    requests = [(COUNTING, {"n": 3, "top_k": 1, **whole}), (COUNTING, {"n": 2, "seed": 7, **whole}), (FRANCE, {})]
    plain, speculative = plain_and_speculative(engine, requests)
    assert tokens(speculative) == tokens(plain)
    sure, seeded, _ = tokens(speculative)
    assert len(sure) == 3
    assert sure[0] == sure[1] == sure[2]
    assert len(seeded) == 2
    assert seeded[0] != seeded[1]


def test_prompts_in_chunks_and_cached_prefixes_change_no_answer(engine: Bench) -> None:
    """The second request finds the first one's prompt in the cache, while others decode."""
    requests: list[RequestArguments] = [(LONG, {}), (COUNTING, {"max_tokens": 60}), (LONG, {}), (LONG + " went", {})]
    plain, speculative = plain_and_speculative(engine, requests, arrive_every=8)
    assert tokens(speculative) == tokens(plain)
    cached = [output.num_cached_tokens for output in speculative]
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) >= 128
    chunks = [output.step for output in engine.steps if output.step.prompt.any()]
    assert any((step.prompt > 0).any() and (step.prompt == 0).any() for step in chunks), (
        "together with one that decodes"
    )
    assert max(int(step.prompt.max()) for step in chunks) <= 128 < len(speculative[0].prompt_token_ids)


def test_preempted_requests_go_on_where_they_were(engine: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for two of four: the others lose their KV on the way and read it again."""
    preempted: list[str] = []
    preempt = engine.scheduler._preempt_request

    def noted(request: Any, *arguments: Any, **keywords: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *arguments, **keywords)

    requests: list[RequestArguments] = [(f"{number} {COUNTING * 4}", {"max_tokens": 60}) for number in range(4)]
    engine.loop.pin(0)
    right = engine.run(requests)
    engine.fresh()
    monkeypatch.setattr(engine.scheduler, "_preempt_request", noted)
    blocks = engine.scheduler.kv_cache_manager.block_pool
    reserved = blocks.get_new_blocks(blocks.get_num_free_blocks() - 12)
    try:
        assert engine.run(requests, before_step=by_turns(engine, EACH_DRAFTER)) == right
    finally:
        blocks.free_blocks(reserved)
    assert preempted
    assert engine.verified() > 0


def test_an_aborted_request_leaves_nothing_behind(engine: Bench) -> None:
    blocks = engine.scheduler.kv_cache_manager.block_pool
    free = blocks.get_num_free_blocks()
    requests: list[RequestArguments] = [(COUNTING, {}), (LONG, {"max_tokens": 100}), (FRANCE, {}), (COUNTING, {})]
    plain, speculative = plain_and_speculative(engine, requests, arrive_every=2, abort_at={8: "3", 9: "1"})
    for place in (0, 2):
        assert tokens([speculative[place]]) == tokens([plain[place]])
    assert len(speculative[1].outputs[0].token_ids) < 100
    assert blocks.get_num_free_blocks() == free
    assert not engine.scheduler.requests
    assert not engine.scheduler._stepper.requests._known


def test_requests_with_adapters_share_the_batch(engine: Bench, adapters: tuple[Any, Any]) -> None:
    """Bug: vLLM names an adapter for each request, and rows of logits there are for each proposal, too: one request got
    the adapter of another, or the engine died."""
    requests: list[RequestArguments] = [(COUNTING, {}), (COUNTING, {}), (LONG, {}), (FRANCE, {}), (COUNTING, {})]
    which = {1: adapters[0], 2: adapters[1], 4: adapters[1]}
    plain, speculative = plain_and_speculative(engine, requests, arrive_every=2, adapters=which)
    assert tokens(speculative) == tokens(plain)
    base, first, _, _, two = (answer for (answer,) in tokens(plain))
    assert len({tuple(answer) for answer in (base, first, two)}) == 3, "adapters change the answer"
    for drafter in POOL:
        engine.fresh()
        engine.loop.pin(3, drafter)
        assert tokens(engine.outputs(requests, arrive_every=2, adapters=which)) == tokens(plain), drafter
        assert engine.verified(drafter) > 0


def test_a_request_without_an_adapter_gets_none(engine: Bench, adapters: tuple[Any, Any]) -> None:
    """Bug: on a CPU, vLLM gave it the one in the last slot while any request of the batch had one."""
    fields = {"logprobs": 3, "prompt_logprobs": 2}
    engine.loop.pin(0)
    engine.outputs([(FRANCE, {}), (FRANCE, {})], adapters=dict(enumerate(adapters)))
    (alone,) = engine.outputs([(COUNTING, fields)])
    together, *_ = engine.outputs(
        [(COUNTING, fields), (FRANCE, {}), (LONG, {})], adapters={1: adapters[0], 2: adapters[1]}
    )
    assert tokens([together]) == tokens([alone])
    assert values(together.outputs[0].logprobs) == near(alone.outputs[0].logprobs)


def test_self_drafting_uses_the_requests_adapter(engine: Bench, adapters: tuple[Any, Any]) -> None:
    """The window covers the whole of a short context, so it proposes what it says itself."""
    engine.loop.pin(3, "self")
    which = {1: adapters[0], 2: adapters[1]}
    engine.outputs([(FRANCE, {}), (FRANCE, {}), (COUNTING, {})], arrive_every=2, adapters=which)
    assert engine.accepted("self") > 0.95 * engine.verified("self") > 20


@pytest.fixture(scope="module")
def overflowing(models: Counting, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Two adapters of finite weights with infinite products: in the attention, and in the output layer alone."""
    from vllm.lora.request import LoRARequest

    folder, made = tmp_path_factory.mktemp("overflowing"), []
    for number, part in enumerate(("self_attn", "lm_head"), 3):
        file = write_adapter(folder / part, seed=number, target=models.target) / "adapter_model.safetensors"
        weights = load_file(file)
        save_file({n: weight * 1e30 if part in n else weight * 0 for n, weight in weights.items()}, file)
        made.append(LoRARequest(part, number, str(file.parent)))
    return made[0], made[1]


def test_nan_of_a_request_that_left_is_zeroed(
    engine: Bench, overflowing: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a client that leaves during the step which overflows; its pages were free before that was reported."""
    engine.loop.pin(0)
    right = engine.run([(COUNTING, {})])
    update = engine.scheduler.update_from_output

    def leave_and_update(*arguments: Any) -> Any:
        monkeypatch.undo()
        engine.llm.llm_engine.abort_request(["0"])
        return update(*arguments)

    monkeypatch.setattr(engine.scheduler, "update_from_output", leave_and_update)
    engine.outputs([(FRANCE, {})], adapters={0: overflowing[0]})
    assert _has_nan(engine)
    engine.fresh()
    engine.loop.pin(0)
    assert engine.run([(COUNTING, {})]) == right
    assert not _has_nan(engine)


def _has_nan(engine: Bench) -> bool:
    return any(bool(cache.isnan().any()) for cache in engine.runner.kv_caches)


def test_overflow_at_a_verified_token_is_noticed(engine: Bench, adapters: tuple[Any, Any]) -> None:
    """Bug: only each request's first row of logits was looked at. Here the rows of proposals are spoilt."""
    from vllm.lora.layers import LogitsProcessorWithLoRA

    def spoil(_layer: Any, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(0, torch.arange(1, len(logits)), torch.nan)

    engine.loop.pin(3, "self")
    (layer,) = (part for part in engine.runner.model.modules() if isinstance(part, LogitsProcessorWithLoRA))
    with layer.register_forward_hook(spoil, prepend=True):
        (output,) = engine.outputs([(COUNTING, {})], adapters={0: adapters[0]})
    assert output.outputs[0].finish_reason == "error"


def test_adapter_that_overflows_in_the_output_layer_is_noticed(engine: Bench, overflowing: tuple[Any, Any]) -> None:
    """Bug: only hidden states were looked at, and NaN logits were answered with token 0, as a success."""
    requests: list[RequestArguments] = [(FRANCE, {}), (COUNTING, {}), (FRANCE, {})]
    plain, speculative = plain_and_speculative(engine, requests, adapters={0: overflowing[1]})
    assert tokens(speculative) == tokens(plain)
    assert [output.outputs[0].finish_reason for output in plain] == ["error", "length", "length"]
    assert not _has_nan(engine)
