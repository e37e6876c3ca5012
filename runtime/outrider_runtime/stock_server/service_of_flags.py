"""The service that vLLM's flags describe, together with the file that OUTRIDER_CONFIG names.

The file holds fields of a SpeculativeService's spec: the pool, the SLO classes and the speculation. Everything else is
vLLM's. The rules of the API server hold, and their sentences are the errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider_crds.existing_pods import CONFIG_FILE_FIELDS
from outrider_crds.manifest import ManifestError, load_manifest
from outrider_crds.spec import API_GROUP, API_VERSION, CPU_PRODUCT, KIND
from outrider_crds.yaml_text import YamlTextError, read_documents

from outrider_runtime.bucket import is_bucket
from outrider_runtime.error_text import without_secrets
from outrider_runtime.identity import device_name
from outrider_runtime.local_manifest import LocalManifestError, LocalService, local_service
from outrider_runtime.model_config import read_config
from outrider_runtime.stock_server.activity import StepAsideError

FILE_VARIABLE = "OUTRIDER_CONFIG"
LOOKUP = {"name": "lookup", "method": "PromptLookup", "promptLookup": {}}
DRAFTER_NAME = "draft"
DEFAULT_DRAFT_TOKENS = 5
LONGEST_NAME = 40
NAME_PREFIX = "model-"  # a service's name starts with a letter
_SPECULATIVE_KEYS = {
    "method", "model", "revision", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max",
    "draft_tensor_parallel_size",
}  # fmt: skip
_BLOCKS = {"eagle3": "Eagle", "eagle": "Eagle", "draft_model": "DraftModel", "dflash": "Block", "dspark": "Block"}
_LOOKUPS = ("ngram", "ngram_gpu")


def obstacle(arguments: Any, environ: Mapping[str, str]) -> str:
    """Return which of the user's choices Outrider cannot go together with, in a sentence; empty if there is none.

    arguments: vLLM's EngineArgs.
    """
    parallel = {
        "--data-parallel-size": arguments.data_parallel_size,
        "--pipeline-parallel-size": arguments.pipeline_parallel_size,
        "--prefill-context-parallel-size": arguments.prefill_context_parallel_size,
        "--nnodes": arguments.nnodes,
    }
    for flag, size in parallel.items():
        if size > 1:
            return f"{flag} is {size}: Outrider plans each step for one batch of all requests, on one node"
    if arguments._api_process_count > 1 or arguments._api_process_rank < 0:
        return "vLLM runs several API servers, or its front end in Rust: Outrider needs the one in Python"
    if arguments.scheduler_cls is not None:
        return f"the scheduler is {arguments.scheduler_cls}, set by a flag or another plugin: Outrider has its own"
    if arguments.worker_cls != "auto":
        return f"the worker is {arguments.worker_cls}, set by a flag or another plugin: Outrider has its own"
    if environ.get("VLLM_USE_V2_MODEL_RUNNER", "1").strip().lower() in ("0", "false"):
        return "VLLM_USE_V2_MODEL_RUNNER is 0: Outrider extends vLLM's second model runner"
    if arguments.distributed_executor_backend not in (None, "mp", "uni"):
        return f"--distributed-executor-backend is {arguments.distributed_executor_backend}: only mp was tested"
    if arguments.kv_transfer_config is not None:
        return "--kv-transfer-config is set: KV connectors were not tested with Outrider"
    return ""


def service_of_flags(arguments: Any, file: Path | None) -> LocalService:
    """Return the service. Raises StepAsideError with a sentence if Outrider cannot serve it."""
    fields = {} if file is None else read_fields(file)
    speculative = users_speculation(arguments)
    draft_size, size = speculative.get("draft_tensor_parallel_size"), arguments.tensor_parallel_size
    if draft_size not in (None, size):
        raise StepAsideError(f"draft_tensor_parallel_size is {draft_size}: Outrider shards drafts over {size} devices")
    if speculative and "draftPool" in fields:
        raise StepAsideError(
            f"{file} has a draftPool, and --speculative-config a drafter: move the drafter to the pool, or remove one"
        )
    most = speculative.get("num_speculative_tokens", DEFAULT_DRAFT_TOKENS)
    spec = {
        "target": _model(arguments.model, arguments.revision),
        "accelerator": {"products": [_product()]},
        "engine": _engine(arguments),
        "draftPool": _pool(speculative),
        "speculation": {"maxDraftTokens": most},
        **fields,
    }
    document = {"apiVersion": f"{API_GROUP}/{API_VERSION}", "kind": KIND, "metadata": _metadata(arguments)}
    try:
        service = local_service(load_manifest(json.dumps({**document, "spec": spec})))
    except ManifestError as error:
        where = "vLLM's flags" if file is None else str(file)
        raise StepAsideError(f"{where} make no valid service: {'; '.join(error.problems)}") from error
    except LocalManifestError as error:
        raise StepAsideError(str(error)) from error
    return _with_flags(service, arguments)


def users_speculation(arguments: Any) -> dict[str, Any]:
    """Return the user's speculative config, with the flags of its parts; empty without one."""
    parts = {
        "method": arguments.spec_method, "model": arguments.spec_model, "num_speculative_tokens": arguments.spec_tokens,
    }  # fmt: skip
    config = {key.replace("-", "_"): value for key, value in (arguments.speculative_config or {}).items()}
    return config | {key: value for key, value in parts.items() if value is not None}


def read_fields(file: Path) -> dict[str, Any]:
    try:
        documents = read_documents(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YamlTextError) as error:
        raise StepAsideError(f"{FILE_VARIABLE}: cannot read {file}: {error}") from error
    known = ", ".join(CONFIG_FILE_FIELDS)
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise StepAsideError(f"{FILE_VARIABLE}: {file} must hold one document with the fields {known}")
    unknown = sorted(documents[0].keys() - set(CONFIG_FILE_FIELDS))
    if unknown:
        raise StepAsideError(
            f"{FILE_VARIABLE}: {file} has the fields {', '.join(unknown)}: known are {known}; the rest is vLLM's flags"
        )
    return documents[0]


def _pool(speculative: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the user's drafter and a prompt lookup."""
    if not speculative:
        return [LOOKUP]
    unknown = sorted(speculative.keys() - _SPECULATIVE_KEYS)
    if unknown:
        raise StepAsideError(f"--speculative-config has {', '.join(unknown)}, which Outrider does not host")
    if "num_speculative_tokens" not in speculative:
        raise StepAsideError("--speculative-config has no num_speculative_tokens, the most that a step may draft")
    method, model = speculative.get("method"), speculative.get("model")
    if method in _LOOKUPS or (method is None and model == "ngram"):
        return [{**LOOKUP, "promptLookup": _lookup_lengths(speculative)}]
    if method is not None and (method == "mtp" or method.endswith("_mtp")) and model is None:
        return [{"name": DRAFTER_NAME, "method": "MTP", "mtp": {}}, LOOKUP]
    if method is None and model is not None:
        method = "eagle" if "eagle" in model.lower() else "draft_model"
    kind = _BLOCKS.get(method or "")
    if kind is None or model is None:
        raise StepAsideError(f"--speculative-config has the method {method}, which Outrider does not host as a drafter")
    block = f"{kind[0].lower()}{kind[1:]}"
    drafter = {"name": DRAFTER_NAME, "method": kind, block: {"model": _model(model, speculative.get("revision"))}}
    return [drafter, LOOKUP]


def _lookup_lengths(speculative: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lengths of n-grams; vLLM takes one for the other where it is missing."""
    shortest, longest = (speculative.get(f"prompt_lookup_{end}") for end in ("min", "max"))
    lengths = {"minTokens": shortest or longest, "maxTokens": longest or shortest}
    return lengths if shortest or longest else {}


def _model(name: str, revision: str | None) -> dict[str, Any]:
    if is_bucket(name):
        return {"name": without_secrets(name)[-256:], "source": {"s3": {"uri": name}}}
    if Path(name).is_dir():
        return {"name": Path(name).name or name, "source": {"hostPath": {"path": str(Path(name).absolute())}}}
    return {"name": name} if revision is None else {"name": name, "revision": revision}


def _product() -> str:
    """Return the device's name as a label's value."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return CPU_PRODUCT
    return re.sub(r"[^A-Za-z0-9_.]+", "-", device_name()).strip("-_.")[:63]


def _engine(arguments: Any) -> dict[str, Any]:
    engine: dict[str, Any] = {"tensorParallelSize": arguments.tensor_parallel_size}
    if isinstance(arguments.max_model_len, int) and arguments.max_model_len > 0:
        engine["maxModelLen"] = arguments.max_model_len
    return engine


def _metadata(arguments: Any) -> dict[str, str]:
    """Name the service after the model that requests name, for the labels of metrics."""
    names = arguments.served_model_name or arguments.model
    name = names if isinstance(names, str) else names[0]
    words = re.sub(r"[^a-z0-9]+", "-", Path(name).name.lower()).strip("-")
    named = words if words[:1].isalpha() else f"{NAME_PREFIX}{words}"
    return {"name": named[:LONGEST_NAME].strip("-"), "namespace": "default"}


def _with_flags(service: LocalService, arguments: Any) -> LocalService:
    """Return the service with the flags that decide which graphs Outrider asks for, and how long a request may be."""
    words = [] if arguments.max_num_seqs is None else [f"--max-num-seqs={arguments.max_num_seqs}"]
    graphs = arguments.compilation_config
    if any((arguments.cudagraph_capture_sizes, arguments.max_cudagraph_capture_size,
            graphs.cudagraph_capture_sizes, graphs.max_cudagraph_capture_size)):  # fmt: skip
        words.append("--cudagraph-capture-sizes")
    if arguments.hf_overrides:
        words.append("--hf-overrides")
    engine = service.boot.engine.model_copy(update={"extra_args": words})
    boot = service.boot.model_copy(update={"engine": engine})
    return LocalService(boot=boot, hot=service.hot, drain_timeout_s=service.drain_timeout_s)


def check_target(arguments: Any) -> None:
    """Raise StepAsideError if the model is a draft that names its target, which vLLM then serves instead."""
    folder = Path(arguments.model)
    if folder.is_dir() and "speculators_config" in _config(folder):
        raise StepAsideError("the model is a draft: name its target as the model, and it in --speculative-config")


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        return read_config(folder)
    except (OSError, ValueError):  # vLLM says what is wrong with it
        return {}
