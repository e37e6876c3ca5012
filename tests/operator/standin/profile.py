"""`outrider-profile`, as a stand-in: a plausible result at once, or a failure of the kind STANDIN_PROFILE names."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from outrider_crds import profile
from outrider_crds.profile_keys import ProfileKeys
from outrider_crds.runtime_config import BootConfig


def main() -> None:
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # the first process of a container ends at no signal by itself
    arguments = _arguments()
    behaviour = os.environ.get("STANDIN_PROFILE", "ok")
    time.sleep(float(os.environ.get("STANDIN_PROFILE_S", "0.2")))
    if behaviour == "hang":
        time.sleep(3600)
    if behaviour == "die":
        sys.exit("CUDA error: out of memory")
    if behaviour == "nonsense":
        arguments.result.write_text('{"target": "not a profile"')
        return
    boot = BootConfig.model_validate_json(arguments.config_json)
    keys = next(keys for keys in boot.profile_keys if keys.product == arguments.product)
    if behaviour == "vocabulary":
        result = _vocabulary_mismatch(boot, keys, arguments)
    else:
        result = _measured(boot, keys, arguments)
    said = result.model_dump_json(by_alias=True)
    if behaviour == "absurd":
        said = re.sub('"measuredAt":"[^"]*"', f'"measuredAt":"{"9" * 300}"', said)
    arguments.result.write_text(said)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-json", required=True)
    parser.add_argument("--product", required=True)
    parser.add_argument("--target", action="store_true")
    parser.add_argument("--drafter", action="append", default=[])
    parser.add_argument("--time-budget", default="5m")
    parser.add_argument("--result", type=Path, required=True)
    return parser.parse_args()


def _measured(boot: BootConfig, keys: ProfileKeys, arguments: argparse.Namespace) -> profile.ProfilingResult:
    cost = profile.ProfileStepCost(
        per_batched_token_s=0.0001, per_batched_token_above_knee_s=0.0005, knee_tokens=32, constant_s=0.01
    )
    noise = float(os.environ.get("STANDIN_SPREAD_PERCENT", "1"))
    target = profile.TargetProfile(
        key=keys.target,
        model=boot.target.name,
        product=arguments.product,
        costs={profile.ProfileExecutionMode.UNIFORM: cost, profile.ProfileExecutionMode.VARLEN: cost},
        error_percent=4.2,
        spread_percent=noise,
        measured_at=_timestamp_now(),
    )
    return profile.ProfilingResult(
        target=target if arguments.target else None,
        drafters=[_drafter(name, keys) for name in arguments.drafter],
    )


def _vocabulary_mismatch(boot: BootConfig, keys: ProfileKeys, arguments: argparse.Namespace) -> profile.ProfilingResult:
    measured = _measured(boot, keys, arguments)
    sentence = "its vocabulary has 32000 tokens, the target's 49152; take a draft of the target's family"
    failures = [
        profile.ProfilingFailure(reason="VocabularyMismatch", message=sentence, drafter=name)
        for name in arguments.drafter
    ]
    return measured.model_copy(update={"drafters": [], "failures": failures})


def _drafter(name: str, keys: ProfileKeys) -> profile.DrafterProfile:
    return profile.DrafterProfile(
        key=keys.drafters[name],
        name=name,
        cost=profile.ProfileStepCost(constant_s=0.001),
        autoregressive=False,
        error_percent=3.0,
        measured_at=_timestamp_now(),
    )


def _timestamp_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


if __name__ == "__main__":
    main()
