"""Every change of vLLM's own code in memory: what is replaced, and what the replacement relies on.

Subclasses are not changes: vLLM takes their names. Behaviour that is relied on is held by tests/engine/test_patches.py,
which names a test for each line of the table.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

_GPU = "vllm.v1.worker.gpu"
_GRAPHS = f"{_GPU}.spec_decode.target_dependent_ar.cudagraph_utils"
_LOADER = "vllm.model_executor.model_loader.base_loader"


class Patch(NamedTuple):
    owner: str
    """Module or class. A patch of one object names its class."""
    name: str
    purpose: str


SPECULATOR = Patch(f"{_GPU}.model_runner", "init_speculator", "the runner gets the pool's speculator")
HEADS_STATES = Patch(
    f"{_GPU}.model_runner", "set_eagle3_aux_hidden_state_layers",
    "the target hands out hidden states for all heads, not for the one that vLLM's config names",
)  # fmt: skip
TARGET_GRAPHS = Patch(
    f"{_GPU}.model_runner", "ModelCudaGraphManager",
    "graphs for any mix of lengths are captured where the attention can replay them",
)  # fmt: skip
GRAPH_LENGTHS = (
    Patch(f"{_GPU}.cudagraph_utils", "build_dynamic_sd_schedule_lookup", "graphs of every length are captured"),
    Patch(_GRAPHS, "build_dynamic_sd_schedule_lookup", "graphs of every length are captured"),
)
GRAPH_CHOICES = (
    Patch(f"{_GPU}.cudagraph_utils.CudaGraphManager", "_capture_descs", "graphs of plain decoding are kept"),
    Patch(f"{_GPU}.cudagraph_utils.CudaGraphManager", "_candidates", "each step finds a whole graph that fits"),
)
RANKING = (
    Patch(f"{_GPU}.model_runner.GPUModelRunner", "adaptive_verification", "the loop's order chooses what is verified"),
    Patch(
        f"{_GPU}.spec_decode.rejection_sampler.RejectionSampler", "enable_adaptive_verification",
        "the sampler reads lengths from the device",
    ),
)  # fmt: skip
NEW_MODEL = Patch(_LOADER, "initialize_model", "weights of a draft are marked as not loaded")
LOADED_MODEL = Patch(_LOADER, "process_weights_after_loading", "weights of a draft are checked once they are loaded")
_OWN_NAMES = "layers of two drafters have different names"
HEAD_LOADER = Patch(f"{_GPU}.spec_decode.eagle.utils", "get_model", _OWN_NAMES)
DFLASH_LOADER = Patch(f"{_GPU}.spec_decode.dflash.utils", "get_model", _OWN_NAMES)
DSPARK_LOADER = Patch("vllm.model_executor.model_loader", "get_model", f"{_OWN_NAMES}; imported when it is called")
DRAFT_MODEL_LOADER = Patch(f"{_GPU}.spec_decode.standalone_ar.speculator", "get_model", _OWN_NAMES)
COMPILED_PARTS = Patch(
    "vllm.model_executor.models.qwen3_dflash2", "set_model_tag", "compiled code of two drafters has different names"
)
LOOKAHEAD = Patch("vllm.config.VllmConfig", "num_lookahead_tokens", "KV has room for the widest drafter's tokens")
NEW_SLOTS = Patch(
    "vllm.config.SpeculativeConfig", "max_num_new_slots_for_drafting",
    "a step's token budget reserves blocks only if buffers are too small",
)  # fmt: skip
SPECULATION_CHECK = Patch(
    "vllm.sampling_params.SamplingParams", "_validate_spec_decode",
    "min_p and logit_bias are accepted: the second runner applies them before it verifies, the first does not",
)  # fmt: skip
ENGINE_CORE = Patch(
    "vllm.v1.engine.core.EngineCoreProc", "run_engine_core", "the exception that ends the engine core is noted"
)
NEW_BLOCKS = Patch(
    "vllm.v1.core.block_pool.BlockPool",
    "get_new_blocks",
    "each newly allocated block is known: drafters cover none of it, and it may have NaN",
)
ADAPTER_LOADER = Patch(
    "vllm.lora.worker_manager.WorkerLoRAManager", "_load_adapter", "an adapter that does not fit is refused"
)
PROMPT_LOGPROBS = (
    Patch(f"{_GPU}.sample.prompt_logprob.PromptLogprobsWorker", "compute_prompt_logprobs", "rows get their adapters"),
    Patch(
        f"{_GPU}.sample.prompt_logprob.PromptLogprobsWorker", "compute_prompt_token_id_logprobs",
        "rows get their adapters",
    ),
)  # fmt: skip
CPU_RUNNER = Patch(
    "vllm.v1.worker.cpu.model_runner", "CPUModelRunner", "the worker, which builds its runner inline, builds ours"
)
INPUT_PROCESSOR = Patch(
    "vllm.v1.engine.async_llm.AsyncLLM", "input_processor", "requests that do not fit the sampler's tables are refused"
)
ENGINE_CONFIG = Patch(
    "vllm.engine.arg_utils.EngineArgs", "create_engine_config", "the user's flags get what Outrider needs"
)
ENGINE_CLIENT = Patch(
    "vllm.v1.engine.async_llm.AsyncLLM", "from_vllm_config", "an engine that Outrider kept from starting starts plainly"
)
SERVER_APP = Patch(
    "vllm.entrypoints.launchers.api_server.entry", "build_app", "vLLM's server has Outrider's pages and SLO header"
)
MIDDLEWARES = Patch("starlette.applications.Starlette", "middleware_stack", "the app builds its middlewares once more")

PATCHES = (
    SPECULATOR, HEADS_STATES, TARGET_GRAPHS, *GRAPH_LENGTHS, *GRAPH_CHOICES, *RANKING, NEW_MODEL, LOADED_MODEL,
    HEAD_LOADER, DFLASH_LOADER, DSPARK_LOADER, DRAFT_MODEL_LOADER, COMPILED_PARTS, LOOKAHEAD, NEW_SLOTS,
    SPECULATION_CHECK, ENGINE_CORE, NEW_BLOCKS, ADAPTER_LOADER, *PROMPT_LOGPROBS, CPU_RUNNER, INPUT_PROCESSOR,
    ENGINE_CONFIG, ENGINE_CLIENT, SERVER_APP, MIDDLEWARES,
)  # fmt: skip


def original(patch: Patch) -> Any:
    """Return what vLLM has in that place, with what was put there before. Raises AttributeError if it is gone."""
    return getattr(_owner(patch), patch.name)


def put(patch: Patch, ours: Any, of: Any = None) -> None:
    """Replace vLLM's attribute until the process ends. of: the one object to change; None: all of them."""
    owner = _owner(patch) if of is None else of
    getattr(owner, patch.name)  # raises AttributeError if another release of vLLM has no such name
    setattr(owner, patch.name, ours)


@contextmanager
def in_place(patch: Patch, ours: Any) -> Iterator[None]:
    """Replace vLLM's attribute in this context."""
    theirs = original(patch)
    put(patch, ours)
    try:
        yield
    finally:
        put(patch, theirs)


def _owner(patch: Patch) -> Any:
    return pkgutil.resolve_name(patch.owner)
