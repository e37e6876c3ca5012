"""`python3 -m setup STEP`, `demo` for what the demo needs, or `all` for what the tests need: each step is cached, and
repeats in no time."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

from setup import binaries, environment, next_vllm, system
from setup.steps import REPOSITORY, SetupError, run, say


def _cluster() -> None:
    binaries.kubernetes()
    binaries.helm()


def _neighbours() -> None:
    """What other projects install in a cluster, for the tests of what we make for them."""
    binaries.prometheus_operator_crds()
    binaries.inference_pool_crd()
    binaries.scaled_object_crd()
    binaries.endpoint_picker()
    binaries.envoy()
    binaries.leader_worker_set()
    binaries.containerd()
    system.prometheus()


def _model() -> None:
    """Runs in the environment's Python: the conversion needs torch."""
    done = subprocess.run([str(environment.environment()), "-m", "setup.model"], cwd=REPOSITORY, check=False)
    if done.returncode != 0:
        raise SetupError("The model could not be converted; the reason stands above.")


def _code() -> None:
    """Machine code of the control core, as the images have it, and bytecode of our modules, which the pods of the test
    cluster see read-only. Tests that start together would each compile them."""
    sources = [str(REPOSITORY / folder) for folder in ("crds", "operator", "runtime")]
    run("code: compiling modules", [str(environment.environment()), "-m", "compileall", "-q", *sources])
    warm_up = [str(environment.environment()), "-m", "outrider_runtime.loop.compile_loop"]
    run("code: loading the control core (compiled in two minutes the first time)", warm_up)


_STEPS: dict[str, Callable[[], object]] = {
    "system": system.packages,
    "venv": environment.environment,
    "code": _code,
    "cluster": _cluster,
    "model": _model,
    "neighbours": _neighbours,
    "next-vllm": next_vllm.try_overlay,
}
_OF_THE_DEMO = tuple(name for name in _STEPS if name not in ("neighbours", "next-vllm"))


def main() -> int:
    """Prepare one thing, or all in order; the exit status is 1, with a sentence, when one cannot be had."""
    parser = argparse.ArgumentParser(prog="python3 -m setup", description=__doc__)
    parser.add_argument("step", choices=["all", "demo", *_STEPS])
    step = parser.parse_args().step
    started = time.monotonic()
    try:
        for name in {"all": tuple(_STEPS), "demo": _OF_THE_DEMO}.get(step, (step,)):
            _STEPS[name]()
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    say(f"setup {step}: ready after {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    os.umask(0o022)  # pods that are not root read what is made here
    sys.exit(main())
