"""A drafter that looks right and fails in the worker, before the engine serves, is left out: the pod comes up without
it and says why.

Real vLLM in this process.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from outrider_crds.draft_pool import DrafterSpec
from outrider_crds.runtime_state import DrafterReport
from outrider_runtime.paths import RUN_DIR_VARIABLE, Paths
from outrider_runtime.vllm_plugin import launch

from tests.engine import engines, planted_models
from tests.engine.engines import (
    POOR_DRAFT,
    SMALL,
    TARGET,
    Bench,
    block,
    boot_config,
    draft_model,
    eagle,
    lookup,
    model,
    sparse_self,
)
from tests.engine.test_lossless_speculation import SHORT, state_of

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
TARGET_LAYERS = 6


@pytest.fixture(scope="module")
def without_eagle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of SmolLM2's vocabulary and width, of a family for which vLLM has no EAGLE-3."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("models") / "gpt2"
    shape = GPT2Config(vocab_size=49152, n_embd=576, n_head=9, n_layer=2, n_positions=1024)
    GPT2LMHeadModel(shape).save_pretrained(folder)
    for file in TARGET.glob("*token*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture
def small_head(tmp_path: Path) -> DrafterSpec:
    return eagle(engines.head_reading(engines.SMALL_LAYERS, tmp_path / "head"))


def reasons(engine: Bench) -> dict[str, str]:
    """Return the reasons of drafters that are not loaded."""
    drafters: list[DrafterReport] = [state_of(engine, entry.name) for entry in engine.plan.boot.draft_pool]
    return {drafter.name: drafter.reason for drafter in drafters if not drafter.loaded}


def assert_rest_of_the_pool_proposes(engine: Bench) -> None:
    engine.loop.pin(0)
    plain = engine.generate(SHORT)
    for drafter in ("draft", "pld"):
        engine.fresh()
        engine.loop.pin(3, drafter)
        assert engine.generate(SHORT) == plain
        assert engine.accepted(drafter) > 0


def test_head_for_a_target_without_hidden_states_is_left_out(without_eagle: Path) -> None:
    """Bug: vLLM raised while it loaded the target, in another sentence than those that drop a drafter: the pod never
    came up."""
    boot = boot_config([eagle(), lookup()], extra=["--max-model-len=512"])
    boot = boot.model_copy(update={"target": model(without_eagle)})
    run_dir = engines.make_plan([]).paths
    plan = launch.plan_launch(boot, engines.hot_config(), run_dir)
    assert [entry.name for entry in plan.pool.hosted] == ["eagle", "pld"]
    with engines.engine(plan) as llm:
        engine = Bench(llm, plan)
        assert "EAGLE-3" in reasons(engine)["eagle"]
        assert "GPT2LMHeadModel" in reasons(engine)["eagle"]
        engine.loop.pin(0)
        plain = engine.generate(SHORT)
        engine.fresh()
        engine.loop.pin(3, "pld")
        assert engine.generate(SHORT) == plain
        assert engine.verified("pld") > 0


def test_draft_that_ends_before_overridden_positions_is_left_out(tmp_path: Path) -> None:
    """Bug: with `--hf-overrides={"max_position_embeddings": 1024}` a draft of 256 positions was hosted over a target
    whose config.json says 256, too; past them it reads behind its tables."""
    short = tmp_path / "short"
    shutil.copytree(SMALL, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    overridden = ['--hf-overrides={"max_position_embeddings": 1024}']
    plan = engines.make_plan([draft_model(short), sparse_self(1020), lookup()], extra=overridden, target=short)
    assert [drafter.name for drafter in plan.pool.hosted] == ["draft", "self", "pld"]
    with engines.engine(plan) as llm:
        reason_of = reasons(Bench(llm, plan))
    assert (
        "the draft model has 256 positions (max_position_embeddings), and a request may take 1024" in reason_of["draft"]
    )
    assert "its window is 1036 tokens, and a request may take 1024" in reason_of["self"]
    assert set(reason_of) == {"draft", "self"}


def test_draft_that_keeps_a_state_is_left_out(tmp_path: Path) -> None:
    """Bug: its state kept the tokens that the target had rejected, and no other was taken for the next proposal. Where
    a config.json does not tell, vLLM's own class does."""
    state, unnamed = planted_models.mamba2(tmp_path / "mamba"), planted_models.mamba2(tmp_path / "unnamed")
    config = json.loads((unnamed / "config.json").read_text())
    del config["state_size"]
    (unnamed / "config.json").write_text(json.dumps(config | {"ssm_state": 128}))
    pool = [draft_model(POOR_DRAFT), draft_model(state, "state"), draft_model(unnamed, "unnamed"), lookup()]
    plan = engines.make_plan(pool, target=SMALL)
    assert set(plan.pool.dropped) == {"state"}
    with engines.engine(plan) as llm:
        engine = Bench(llm, plan)
        left_out = reasons(engine)
        assert set(left_out) == {"state", "unnamed"}
        assert "keep a state (state_size)" in left_out["state"]
        assert "keep a state (Mamba2ForCausalLM)" in left_out["unnamed"]
        assert_rest_of_the_pool_proposes(engine)


def test_head_is_left_out_if_hidden_states_are_only_claimed(tmp_path: Path) -> None:
    """Bug: MiMo inherits the claim from Qwen2 and hands out nothing. vLLM's assertion ended the engine, whose next
    start knew of no cause and did the same."""
    heads = [eagle(planted_models.eagle_of_small(tmp_path / "head")), block(planted_models.dflash(tmp_path / "flash"))]
    plan = engines.make_plan([*heads, lookup()], target=planted_models.mimo(tmp_path / "mimo"))
    with pytest.raises(RuntimeError, match="'eagle' cannot be started") as ended, engines.engine(plan):
        pass
    smaller = launch.after_failure(plan, ended.value)
    assert smaller is not None
    assert [drafter.name for drafter in smaller.pool.hosted] == ["pld"]
    assert set(smaller.pool.dropped) == {"eagle", "flash"}
    for reason in smaller.pool.dropped.values():
        assert "MiMoForCausalLM hands out no hidden states" in reason


def test_oom_in_graph_capture_restarts_without_the_largest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bug: it ended there at every start."""
    import outrider_cpu

    outrider_cpu.install()
    from outrider_runtime.vllm_plugin.memory import MemoryUse
    from outrider_runtime.vllm_plugin.runner import CPUPoolRunner
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def end(*_: object, **__: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    plan = launch.plan_launch(
        boot_config([draft_model(POOR_DRAFT), lookup()]),
        engines.hot_config(),
        Paths(run_dir=str(tmp_path), mounted=False),
    )
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setattr(GPUModelRunner, "capture_model", end)
    runner = object.__new__(CPUPoolRunner)
    takes = {"draft": MemoryUse(9 << 20, 0)}
    runner.speculator = SimpleNamespace(memory_use=lambda _specs: takes)
    monkeypatch.setattr(CPUPoolRunner, "get_kv_cache_spec", lambda _: {})
    with pytest.raises(torch.OutOfMemoryError) as ended:
        runner.capture_model()
    smaller = launch.after_failure(plan, ended.value)
    assert smaller is not None
    assert [drafter.name for drafter in smaller.pool.hosted] == ["pld"]
    assert "9 MiB" in smaller.pool.dropped["draft"]


@pytest.mark.parametrize("when", ["set_attn", "init_cudagraph_manager", "propose"])
def test_head_that_raises_during_the_start_is_left_out(
    monkeypatch: pytest.MonkeyPatch, small_head: DrafterSpec, when: str
) -> None:
    """While it is given its attention or its graphs, or in the passes that warm up and measure memory.

    Bug: vLLM had counted its layers by then, so its part of every token's KV was lost while the pod ran."""
    import outrider_cpu

    outrider_cpu.install()
    from outrider_runtime.vllm_plugin.eagle_head import EagleHead

    def fail(*_arguments: object, **_keywords: object) -> None:
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr(EagleHead, when, fail)
    plan = engines.make_plan([small_head, draft_model(SMALL), lookup()], target=SMALL)
    with pytest.raises(RuntimeError, match="'eagle' cannot be started") as ended, engines.engine(plan):
        pass
    smaller = launch.after_failure(plan, ended.value)
    assert smaller is not None
    assert smaller.pool.dropped == {"eagle": "it cannot be started: RuntimeError: no kernel for this device"}
    if when != "propose":  # the next start is the same
        return
    with engines.engine(smaller) as llm:
        engine = Bench(llm, smaller)
        assert reasons(engine) == smaller.pool.dropped
        groups = engine.runner.kv_cache_config.kv_cache_groups
        of_draft = engine.runner.speculator.draft_attn_layer_names
        assert len({name for group in groups for name in group.layer_names} - of_draft) == TARGET_LAYERS
        assert_rest_of_the_pool_proposes(engine)


def test_a_head_of_random_weights_starts(small_head: DrafterSpec) -> None:
    """Bug: the map of its smaller vocabulary, which no dummy weights replace, was missed without a checkpoint."""
    with engines.bench([small_head], extra=["--load-format=dummy"], target=SMALL) as engine:
        assert not reasons(engine)
        engine.loop.pin(1, "eagle")
        engine.generate(SHORT[:1], max_tokens=4)
        assert engine.verified("eagle")
