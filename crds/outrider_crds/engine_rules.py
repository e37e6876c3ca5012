"""Rules against engine arguments, environment variables and labels that Outrider sets itself."""

from __future__ import annotations

from outrider_crds.pod_template import PodTemplate
from outrider_crds.rule import Rule, cel_list, cel_pattern, rules_on
from outrider_crds.spec import Engine

# Arguments that have a field of their own in the spec.
_FIELD_ARGUMENTS = (
    "--model", "--revision", "--served-model-name", "--max-model-len", "--dtype", "--tensor-parallel-size",
)  # fmt: skip
# Arguments through which Outrider drives the engine.
_OUTRIDER_ARGUMENTS = (
    "--api-server-count", "--async-scheduling", "--config", "--cudagraph-capture-sizes", "--grpc", "--grpc-port",
    "--headless", "--host", "--master-addr", "--master-port", "--max-cudagraph-capture-size", "--no-async-scheduling",
    "--node-rank", "--port", "--scheduler-cls", "--spec-method", "--spec-model", "--spec-tokens",
    "--speculative-config", "--uds", "--worker-cls",
)  # fmt: skip
# Engines that span more GPUs than one tensor-parallel group: vLLM drops the table of draft lengths there.
_PARALLEL_ARGUMENTS = ("--data-parallel", "--prefill-context-parallel-size", "--nnodes")
# vLLM 0.32 speculates in pipelines: as many batches as stages run at a time, each with a share of the requests.
_PIPELINE_ARGUMENTS = ("--pipeline-parallel-size",)

EXECUTOR = "--distributed-executor-backend"
"""Argument that Outrider sets for a replica of several pods. With one pod it is the user's."""
_LORA_ARGUMENTS = (
    "--enable-lora", "--lora-modules", "--max-cpu-loras", "--max-lora-rank", "--max-loras",
)  # fmt: skip
"""Arguments that engine.lora sets."""

RESERVED_ENV_PREFIX = "OUTRIDER_"
RESERVED_ENV = (
    "HF_HOME", "HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "USER", "VLLM_CACHE_ROOT", "VLLM_PLUGINS",
    "VLLM_USE_V2_MODEL_RUNNER", "XDG_CACHE_HOME",
)  # fmt: skip
RESERVED_KEY_PREFIX = "outrider.dev/"
RESERVED_LABELS = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "app.kubernetes.io/name")

_SHORT_OPTION = "(?s)^-([^-0-9.O]|O($|[^0-3]|[0-3].)|$)"
"""Pattern of a short option. A negative number is a value; -O3 is vLLM's usual name of --optimization-level=3."""
_FIRST = "(?s)^(--.*|-O[0-3])$"
_TWO_WORDS = r"^--[^=]*[ \t\r\n]"

_RESERVED_ENV_TEXT = f"{RESERVED_ENV_PREFIX}*, {', '.join(RESERVED_ENV)}"


def _abbreviations(argument: str) -> str:
    """Pattern of an argument and all its prefixes, since argparse completes them. vLLM accepts `_` for `-`."""
    pattern = ""
    for letter in reversed(argument.removeprefix("--")):
        pattern = f"({letter.replace('-', '[-_]')}{pattern})?"
    return pattern


def _pattern(arguments: tuple[str, ...], *, prefixes: bool = False) -> str:
    """Pattern of entries that set one of `arguments`: `--max_model_len=1`, `--max-model-l`, `--config.x=1`.

    A value in a separate entry does not match. prefixes: also match options whose names begin with one of `arguments`.
    """
    longer = [f"{name.removeprefix('--').replace('-', '[-_]')}[^=.]*" for name in arguments if prefixes]
    names = [*(_abbreviations(name) for name in arguments), *longer]
    return f"(?s)^--({'|'.join(names)})([=.].*)?$"


def cel_sets_none(arguments: tuple[str, ...], engine: str = "self", *, prefixes: bool = False) -> str:
    """CEL: no entry sets one of `arguments`. engine: path of the engine's block."""
    pattern = cel_pattern(_pattern(arguments, prefixes=prefixes))
    return f"!has({engine}.extraArgs) || !{engine}.extraArgs.exists(a, a.matches({pattern}))"


def _sets_none_rule(arguments: tuple[str, ...], message: str, *, prefixes: bool = False) -> tuple[str, str, str]:
    """No entry of extraArgs sets one of `arguments`."""
    return (".extraArgs", cel_sets_none(arguments, prefixes=prefixes), message)


_VARIABLES_FREE = (
    f"!has(self.env) || self.env.all(e, !e.name.startsWith('{RESERVED_ENV_PREFIX}') "
    f"&& !(e.name in {cel_list(RESERVED_ENV)}))"
)


def _keys_free(field: str) -> str:
    return (
        f"!has(self.{field}) || self.{field}.all(k, !k.startsWith('{RESERVED_KEY_PREFIX}') "
        f"&& !(k in {cel_list(RESERVED_LABELS)}))"
    )


_RULES = rules_on(
    Engine,
    (
        ".extraArgs",
        f"!has(self.extraArgs) || self.extraArgs.size() == 0 || self.extraArgs[0].matches({cel_pattern(_FIRST)})",
        "extraArgs must begin with an option; write each as '--name=value' or '--name'",
    ),
    (
        ".extraArgs",
        f"!has(self.extraArgs) || !self.extraArgs.exists(a, a.matches({cel_pattern(_SHORT_OPTION)}))",
        "extraArgs must not hold short options; write the long form '--name=value'",
    ),
    (
        ".extraArgs",
        f"!has(self.extraArgs) || !self.extraArgs.exists(a, a.matches({cel_pattern(_TWO_WORDS)}))",
        "extraArgs must not hold an option and its value in one text: write '--name=value', or two entries",
    ),
    _sets_none_rule(
        _FIELD_ARGUMENTS,
        f"extraArgs must not set {', '.join(_FIELD_ARGUMENTS)}: use spec.target, engine.maxModelLen, "
        "engine.dtype and engine.tensorParallelSize",
    ),
    _sets_none_rule(
        _OUTRIDER_ARGUMENTS,
        f"extraArgs must not set what Outrider sets ({', '.join(_OUTRIDER_ARGUMENTS)}): remove the argument; "
        "drafters belong into spec.draftPool",
    ),
    _sets_none_rule(
        _PARALLEL_ARGUMENTS,
        "extraArgs must not ask for data or context parallelism, nor for several nodes: "
        "raise spec.replicas instead, or engine.tensorParallelSize and engine.nodes",
        prefixes=True,
    ),
    _sets_none_rule(
        _PIPELINE_ARGUMENTS,
        "extraArgs must not ask for pipeline parallelism: the stages of a pipeline run several batches at a time, "
        "and Outrider plans each step for one batch of all requests. Raise engine.tensorParallelSize and "
        "engine.nodes instead",
    ),
    (
        ".extraArgs",
        f"!has(self.lora) || {cel_sets_none(_LORA_ARGUMENTS)}",
        f"extraArgs must not set what engine.lora sets ({', '.join(_LORA_ARGUMENTS)}): remove the argument; "
        "adapters belong into spec.adapters",
    ),
    (
        ".lora",
        "self.backend == 'vLLM' || !has(self.lora)",
        "engine.lora needs engine.backend vLLM, the Torch backend has no LoRA adapters: set it, or remove lora",
    ),
    (
        ".env",
        _VARIABLES_FREE,
        f"engine.env must not set variables that Outrider sets ({_RESERVED_ENV_TEXT}): remove them",
    ),
)

_POD_RULES = rules_on(
    PodTemplate,
    (
        ".env",
        _VARIABLES_FREE,
        f"podTemplate.env must not set variables that Outrider sets ({_RESERVED_ENV_TEXT}): remove them",
    ),
    (
        ".labels",
        _keys_free("labels"),
        f"podTemplate.labels must not set labels that Outrider sets ({RESERVED_KEY_PREFIX}*, "
        f"{', '.join(RESERVED_LABELS)}): use keys of your own",
    ),
    (
        ".annotations",
        _keys_free("annotations"),
        f"podTemplate.annotations must not set {RESERVED_KEY_PREFIX}* annotations: use keys of your own",
    ),
)

ENGINE_RULES: tuple[Rule, ...] = (*_RULES, *_POD_RULES)
