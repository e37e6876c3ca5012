"""What a user may not set in the engine's arguments, its environment and the pod's labels, because Outrider does."""

from __future__ import annotations

from outrider_crds.pod_template import PodTemplate
from outrider_crds.rule import Rule, cel_list
from outrider_crds.spec import Engine

# Arguments that have a field of their own in the spec.
_FIELD_ARGUMENTS = (
    "--model",
    "--revision",
    "--served-model-name",
    "--max-model-len",
    "--dtype",
    "--tensor-parallel-size",
)
# Arguments through which Outrider drives the engine.
_OUTRIDER_ARGUMENTS = (
    "--api-server-count",
    "--async-scheduling",
    "--config",
    "--cudagraph-capture-sizes",
    "--grpc",
    "--grpc-port",
    "--headless",
    "--host",
    "--max-cudagraph-capture-size",
    "--no-async-scheduling",
    "--port",
    "--scheduler-cls",
    "--spec-method",
    "--spec-model",
    "--spec-tokens",
    "--speculative-config",
    "--uds",
    "--worker-cls",
)
# Engines that span more GPUs than one tensor-parallel group: vLLM drops the table of draft lengths there.
_PARALLEL_ARGUMENTS = ("--data-parallel", "--pipeline-parallel-size", "--prefill-context-parallel-size", "--nnodes")

RESERVED_ENV_PREFIX = "OUTRIDER_"
RESERVED_ENV = (
    "HF_HOME",
    "HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "USER",
    "VLLM_CACHE_ROOT",
    "VLLM_PLUGINS",
    "VLLM_USE_V2_MODEL_RUNNER",
    "XDG_CACHE_HOME",
)
RESERVED_KEY_PREFIX = "outrider.dev/"
RESERVED_LABELS = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "app.kubernetes.io/name")

_RESERVED_ENV_TEXT = f"{RESERVED_ENV_PREFIX}*, {', '.join(RESERVED_ENV)}"


def _names(engine: Engine) -> list[str]:
    """Option names, `--max_model_len.x=1` as `--max-model-len`: vLLM takes both spellings and dotted keys."""
    return [a.split("=")[0].split(".")[0].replace("_", "-") for a in engine.extra_args]


def _cel_names(engine: str) -> str:
    return f"{engine}.extraArgs.map(a, a.split('=')[0].split('.')[0].replace('_', '-'))"


def cel_sets_none(arguments: tuple[str, ...], engine: str = "self") -> str:
    """No name, also abbreviated (argparse completes a unique prefix), is one of `arguments`. engine: where its block
    stands."""
    names = f"{_cel_names(engine)}.all(n, !{cel_list(arguments)}.exists(f, f.startsWith(n)))"
    return f"!has({engine}.extraArgs) || {names}"


def sets_none(arguments: tuple[str, ...], engine: Engine) -> bool:
    """As the CEL above."""
    return not any(f.startswith(n) for n in _names(engine) for f in arguments)


def _reserved_variable(name: str) -> bool:
    return name.startswith(RESERVED_ENV_PREFIX) or name in RESERVED_ENV


def _reserved_key(key: str) -> bool:
    return key.startswith(RESERVED_KEY_PREFIX) or key in RESERVED_LABELS


_VARIABLES_FREE = (
    f"!has(self.env) || self.env.all(e, !e.name.startsWith('{RESERVED_ENV_PREFIX}') "
    f"&& !(e.name in {cel_list(RESERVED_ENV)}))"
)


def _keys_free(field: str) -> str:
    return (
        f"!has(self.{field}) || self.{field}.all(k, !k.startsWith('{RESERVED_KEY_PREFIX}') "
        f"&& !(k in {cel_list(RESERVED_LABELS)}))"
    )


ENGINE_RULES = (
    Rule(
        on=Engine,
        field=".extraArgs",
        cel="!has(self.extraArgs) || self.extraArgs.size() == 0 || self.extraArgs[0].startsWith('--')",
        holds=lambda e: not e.extra_args or e.extra_args[0].startswith("--"),
        message="extraArgs must begin with an option; write each as '--name=value' or '--name'",
    ),
    Rule(
        on=Engine,
        field=".extraArgs",
        cel="!has(self.extraArgs) || self.extraArgs.all(a, a.startsWith('--') || !a.startsWith('-'))",
        holds=lambda e: all(a.startswith("--") or not a.startswith("-") for a in e.extra_args),
        message="extraArgs must not hold short options; write the long form '--name=value'",
    ),
    Rule(
        on=Engine,
        field=".extraArgs",
        cel=cel_sets_none(_FIELD_ARGUMENTS),
        holds=lambda e: sets_none(_FIELD_ARGUMENTS, e),
        message=(
            f"extraArgs must not set {', '.join(_FIELD_ARGUMENTS)}: use spec.target, engine.maxModelLen, "
            "engine.dtype and engine.tensorParallelSize"
        ),
    ),
    Rule(
        on=Engine,
        field=".extraArgs",
        cel=cel_sets_none(_OUTRIDER_ARGUMENTS),
        holds=lambda e: sets_none(_OUTRIDER_ARGUMENTS, e),
        message=(
            f"extraArgs must not set what Outrider sets ({', '.join(_OUTRIDER_ARGUMENTS)}): remove the argument; "
            "drafters belong into spec.draftPool"
        ),
    ),
    Rule(
        on=Engine,
        field=".extraArgs",
        cel=(
            f"!has(self.extraArgs) || {_cel_names('self')}.all(n, !{cel_list(_PARALLEL_ARGUMENTS)}"
            ".exists(f, f.startsWith(n) || n.startsWith(f)))"
        ),
        holds=lambda e: not any(f.startswith(n) or n.startswith(f) for n in _names(e) for f in _PARALLEL_ARGUMENTS),
        message=(
            "extraArgs must not ask for data, pipeline or context parallelism, nor for several nodes: "
            "raise spec.replicas instead, or engine.tensorParallelSize"
        ),
    ),
    Rule(
        on=Engine,
        field=".env",
        cel=_VARIABLES_FREE,
        holds=lambda e: not any(_reserved_variable(v.name) for v in e.env),
        message=f"engine.env must not set variables that Outrider sets ({_RESERVED_ENV_TEXT}): remove them",
    ),
    Rule(
        on=PodTemplate,
        field=".env",
        cel=_VARIABLES_FREE,
        holds=lambda t: not any(_reserved_variable(v.name) for v in t.env),
        message=f"podTemplate.env must not set variables that Outrider sets ({_RESERVED_ENV_TEXT}): remove them",
    ),
    Rule(
        on=PodTemplate,
        field=".labels",
        cel=_keys_free("labels"),
        holds=lambda t: not any(_reserved_key(k) for k in t.labels),
        message=(
            f"podTemplate.labels must not set labels that Outrider sets ({RESERVED_KEY_PREFIX}*, "
            f"{', '.join(RESERVED_LABELS)}): use keys of your own"
        ),
    ),
    Rule(
        on=PodTemplate,
        field=".annotations",
        cel=_keys_free("annotations"),
        holds=lambda t: not any(_reserved_key(k) for k in t.annotations),
        message=f"podTemplate.annotations must not set {RESERVED_KEY_PREFIX}* annotations: use keys of your own",
    ),
)
