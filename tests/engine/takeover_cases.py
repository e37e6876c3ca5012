"""Configs that vLLM makes with Outrider installed, in a process of their own: prints a JSON object, by case.

A case is a list: the scheduler, the speculative method and the reason for not being active, after vLLM made its config.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from outrider_runtime.stock_server.takeover import install
from outrider_runtime.vllm_plugin import patches, versions
from prometheus_client import REGISTRY
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from tests.engine.server_process import TARGET

HOOKS = (patches.ENGINE_CONFIG, patches.ENGINE_CLIENT, patches.SERVER_APP)
BROKEN_HEAD = {"method": "eagle3", "model": "/nowhere/head", "num_speculative_tokens": 3}
LOOKUP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@contextmanager
def undone() -> Iterator[None]:
    """Put vLLM and the environment back after a case."""
    environment, before = dict(os.environ), {patch: vars(patches._owner(patch))[patch.name] for patch in HOOKS}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        for patch, theirs in before.items():
            patches.put(patch, theirs)


def reason() -> str:
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples if sample.name == "outrider_active"]
    (sample,) = samples
    return str(sample.labels["reason"])


def config(usage: UsageContext = UsageContext.OPENAI_API_SERVER, **flags: Any) -> Any:
    arguments = AsyncEngineArgs(model=str(TARGET), dtype="float32", enforce_eager=True, max_model_len=512, **flags)
    return arguments.create_engine_config(usage)


def case(made: Any) -> list[Any]:
    speculative = made.speculative_config
    return [made.scheduler_config.scheduler_cls, None if speculative is None else speculative.method, reason()]


def with_(environment: dict[str, str], **flags: Any) -> Callable[[], list[Any]]:
    def run() -> list[Any]:
        os.environ.update(environment)
        install()
        return case(config(**flags))

    return run


def changed_by_another_plugin() -> list[Any]:
    theirs = patches.original(patches.ENGINE_CONFIG)

    def other(arguments: Any, *more: Any) -> Any:
        made = theirs(arguments, *more)
        if made.scheduler_config.scheduler_cls is not None:
            made.scheduler_config.scheduler_cls = "other.Scheduler"
        return made

    patches.put(patches.ENGINE_CONFIG, other)
    install()
    return case(config())


def not_started() -> list[Any]:
    """The engine does not start with Outrider; the client is the config here."""

    def client(_cls: Any, made: Any) -> Any:
        if made.scheduler_config.scheduler_cls is not None:
            raise RuntimeError("no engine today")
        return made

    patches.put(patches.ENGINE_CLIENT, classmethod(client))
    install()
    made = AsyncLLM.from_vllm_config(config(speculative_config=dict(LOOKUP)))
    check = patches.original(patches.SPECULATION_CHECK).__qualname__
    return [*case(made), check, os.environ.get("OUTRIDER_RUN_DIR", ""), made.use_v2_model_runner]


def of_an_untested_vllm() -> list[Any]:
    tested, versions.TESTED_VERSIONS = versions.TESTED_VERSIONS, ("0.1",)
    try:
        install()
        return case(config(speculative_config=dict(LOOKUP)))
    finally:
        versions.TESTED_VERSIONS = tested


def strict() -> list[Any]:
    os.environ["OUTRIDER_STRICT"] = "1"
    install()
    try:
        config(scheduler_cls="other.Scheduler")
    except SystemExit as error:
        return [str(error)]
    return []


def offline() -> list[Any]:
    install()
    return case(config(UsageContext.LLM_CLASS))


def main(folder: Path) -> None:
    (folder / "broken.yaml").write_text("draftPool: [")
    cases: dict[str, Callable[[], list[Any]]] = {
        "plain": with_({}),
        "users lookup": with_({}, speculative_config=dict(LOOKUP), additional_config={"mine": 1}),
        "broken file": with_({"OUTRIDER_CONFIG": str(folder / "broken.yaml")}, speculative_config=dict(LOOKUP)),
        "read-only": with_({"OUTRIDER_RUN_DIR": "/proc/nowhere"}),
        "other scheduler": with_({}, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler"),
        "not hosted": with_({}, speculative_config={"method": "suffix", "num_speculative_tokens": 3}),
        "missing head": with_({}, speculative_config=dict(BROKEN_HEAD)),
        "lora": with_({}, enable_lora=True, max_lora_rank=8),
        "changed by another plugin": changed_by_another_plugin,
        "not started": not_started,
        "untested": of_an_untested_vllm,
        "strict": strict,
        "offline": offline,
    }
    seen: dict[str, list[Any]] = {}
    for name, run in cases.items():
        with undone(), suppress(AssertionError):
            try:
                seen[name] = run()
            except Exception as error:  # vLLM's own refusal of the user's flags
                seen[name] = [type(error).__name__, None, reason()]
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
