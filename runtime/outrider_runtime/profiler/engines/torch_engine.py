"""The bundled torch engine, as the profiler measures it."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outrider_crds.base import Model
from outrider_crds.runtime_config import BootConfig, HotConfig

from outrider_runtime.drafters.pool import HostedPool, choose_pool
from outrider_runtime.paths import RUN_DIR_VARIABLE, Paths
from outrider_runtime.profiler.engines.measurable import Measurable, RunningRequest
from outrider_runtime.profiler.grid import EngineLimits
from outrider_runtime.torch_engine.torch_environment import engine_environment

if TYPE_CHECKING:
    from outrider_runtime.torch_engine.engine_loading import Loaded

LAUNCH_FILE = "torch-launch.json"
LEFT_OUT_FILE = "left-out.json"
DRAFT_TOKEN = 0
"""Token of all drafts, which every vocabulary has: the time of verifying does not depend on the token."""


class TorchLaunch(Model):
    """Plan for the torch engine's process, passed to it as a file."""

    boot: BootConfig
    hot: HotConfig
    paths: Paths
    pool: HostedPool

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        folder = Path(self.paths.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LEFT_OUT_FILE).unlink(missing_ok=True)
        (folder / LAUNCH_FILE).write_text(self.model_dump_json(by_alias=True), encoding="utf-8")
        environ.update(engine_environment(self.boot, environ))
        environ[RUN_DIR_VARIABLE] = self.paths.run_dir

    def left_out(self) -> Mapping[str, str]:
        try:
            reasons: dict[str, str] = json.loads(Path(self.paths.run_dir, LEFT_OUT_FILE).read_bytes())
        except FileNotFoundError:  # the engine has not started
            return {}
        return reasons

    def name_culprits(self, _error: Exception) -> Mapping[str, str]:
        """Return the drafters that did not load. The engine starts without them, so none makes it fail."""
        return self.left_out()


class ProfilerTorchEngine:
    """The torch engine behind the profiler's interface."""

    report_delay_steps = 0

    def __init__(self, loaded: Loaded) -> None:
        self._engine = loaded.engine
        self.loop = loaded.loop
        self.vocabulary = loaded.vocabulary
        self.device = loaded.identity.device
        self.version = loaded.identity.engine_version
        self.on_cpu = self.loop.boot.accelerator.on_cpu
        scheduler = self._engine.scheduler
        self.limits = EngineLimits(
            max_requests=scheduler.limits.requests,
            max_model_len=self._engine.longest,
            max_draft_tokens=self.loop.settings.max_draft_tokens if self.loop.hosted else 0,
            step_tokens=scheduler.limits.tokens,
            kv_tokens=self._engine.free_kv_tokens // 2,  # a KV buffer may be twice as long as its content
        )

    @property
    def has_requests(self) -> bool:
        return self._engine.has_work

    @property
    def running(self) -> Sequence[RunningRequest]:
        return [RunningRequest(len(request.tokens), request.decodes) for request in self._engine.scheduler.running]

    def add(self, name: str, tokens: Sequence[int]) -> None:
        from outrider_runtime.torch_engine.engine_request import Request, Sampling, Stops

        endless = Stops(max_tokens=1 << 20)
        request = Request(name, list(tokens), len(tokens), endless, Sampling(temperature=0.0), _NoText())
        self._engine.add(request, time.time())

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            self._engine.abort(name)

    def set_draft_lengths(self, lengths: Sequence[int]) -> None:
        from outrider_runtime.torch_engine.tree import chain

        for request, length in zip(self._engine.scheduler.running, lengths, strict=True):
            request.proposals = chain([DRAFT_TOKEN] * length, 0, math.nan)

    def step(self) -> None:
        self._engine.step()


class _NoText:
    """A detokenizer that makes no text, because the answers are not used."""

    def step(self, _token: int) -> str:
        return ""


def _start() -> ProfilerTorchEngine:
    from outrider_runtime.torch_engine.engine_loading import load

    folder = Path(os.environ[RUN_DIR_VARIABLE])
    plan = TorchLaunch.model_validate_json((folder / LAUNCH_FILE).read_bytes())
    loaded = load(plan.boot, plan.hot, plan.paths)
    left_out = {name: why for name, why in loaded.loop.left_out.items() if name not in plan.pool.dropped}
    (folder / LEFT_OUT_FILE).write_text(json.dumps(left_out), encoding="utf-8")
    return ProfilerTorchEngine(loaded)


def _plan(boot: BootConfig, hot: HotConfig, paths: Paths) -> TorchLaunch:
    run_dir = paths.run_dir or tempfile.mkdtemp(prefix="outrider-")
    own_paths = paths.model_copy(update={"run_dir": run_dir})
    return TorchLaunch(boot=boot, hot=hot, paths=own_paths, pool=choose_pool(boot, own_paths.models))


MEASURABLE = Measurable(plan=_plan, start=_start)
