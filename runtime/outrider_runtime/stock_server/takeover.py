"""Takes over the engine of vLLM's own server (API server process).

vLLM makes its config from the user's flags. Before that, the flags that Outrider needs are set, and the plan is written
for the engine's processes. Whatever fails from there until the engine has started, the flags and this process are put
back, and vLLM starts with the user's own flags alone.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

from outrider_runtime.error_text import with_type, without_secrets
from outrider_runtime.local_manifest import LocalService
from outrider_runtime.paths import Paths
from outrider_runtime.server.config import Serving, run_folder, write_hot
from outrider_runtime.server.server_errors import StartupError
from outrider_runtime.stock_server.activity import Activity, StepAsideError, survives
from outrider_runtime.stock_server.config_file import ConfigFile
from outrider_runtime.stock_server.entry_point import logger
from outrider_runtime.stock_server.service_of_flags import (
    FILE_VARIABLE,
    check_target,
    obstacle,
    service_of_flags,
    users_speculation,
)
from outrider_runtime.stock_server.start_record import StartRecord
from outrider_runtime.stock_server.stock_app import EnginePages, StockApp
from outrider_runtime.vllm_plugin import patches
from outrider_runtime.vllm_plugin.arguments import CPU_EXECUTOR_CLASS, engine_settings, prepare_vllm
from outrider_runtime.vllm_plugin.cause import cause
from outrider_runtime.vllm_plugin.environment import plugin_environment
from outrider_runtime.vllm_plugin.launch import LaunchPlan, after_failure, noted_failures, plan_launch, write_plan
from outrider_runtime.vllm_plugin.patches import put
from outrider_runtime.vllm_plugin.versions import UntestedEngineError, check_engine_version

UNDONE = (patches.SPECULATION_CHECK, patches.ENGINE_CORE)
"""What the engine's start changes in this process, and plain vLLM must not have."""


def install() -> None:
    """Have the next engine that this process configures taken over. It never raises, unless the user is strict."""
    activity = Activity()
    try:
        check_engine_version()
        _install(activity)
    except UntestedEngineError as error:
        activity.step_aside(str(error))
    except Exception as error:
        logger.debug("Outrider cannot be installed", exc_info=True)
        activity.step_aside(f"this vLLM cannot be taken over: {with_type(error)}")


def _install(activity: Activity) -> None:
    make_config, make_client, make_app = map(
        patches.original, (patches.ENGINE_CONFIG, patches.ENGINE_CLIENT, patches.SERVER_APP)
    )
    engines: list[TakenEngine] = []

    @wraps(make_config)
    def create_engine_config(arguments: Any, usage_context: Any = None, headless: bool = False) -> Any:
        make = partial(make_config, arguments, usage_context, headless)
        if getattr(usage_context, "name", "") != "OPENAI_API_SERVER" or headless or engines:
            return make()  # offline use, a worker of another node, or a second engine of this process
        try:
            engines.append(TakenEngine(arguments, make, activity))
        except Exception as error:
            activity.step_aside(f"the flags of this vLLM cannot be read: {with_type(error)}")
            return make()
        return engines[0].config()

    @wraps(make_client.__func__)
    def from_vllm_config(cls: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        def start(config: Any) -> Any:
            return make_client.__func__(cls, config, *args, **kwargs)

        return engines[0].start(start) if engines and engines[0].has_made(vllm_config) else start(vllm_config)

    @wraps(make_app)
    def build_app(*args: Any, **kwargs: Any) -> Any:
        app = make_app(*args, **kwargs)
        with survives("add its pages to the server"):
            StockApp.add_to(app, activity, engines[0].pages if engines else None)
        return app

    put(patches.ENGINE_CONFIG, create_engine_config)
    put(patches.ENGINE_CLIENT, classmethod(from_vllm_config))
    put(patches.SERVER_APP, build_app)


class TakenEngine:
    """One engine, from its flags to its start: with Outrider, then without a drafter that fails, then alone."""

    def __init__(self, arguments: Any, make: Callable[[], Any], activity: Activity) -> None:
        """arguments: vLLM's EngineArgs. make: makes vLLM's config from them."""
        self._arguments = arguments
        self._make = make
        self._activity = activity
        self._users_flags = {name: _copied(value) for name, value in vars(arguments).items()}
        self._users_environment = dict(os.environ)
        self._record = StartRecord(self._users_flags)
        self._has_users_drafter = bool(users_speculation(arguments))
        self._theirs = {patch: patches.original(patch) for patch in UNDONE}
        self._file = Path(os.environ[FILE_VARIABLE]) if os.environ.get(FILE_VARIABLE) else None
        self._plan: LaunchPlan | None = None
        self._made: Any = None
        self.pages: EnginePages | None = None
        """Source of Outrider's pages; None if it is not active."""

    def has_made(self, config: Any) -> bool:
        return self._plan is not None and config is self._made

    def config(self) -> Any:
        """Return vLLM's config: Outrider's, or that of the user's own flags."""
        try:
            self._plan = self._first_plan()
        except Exception as error:
            return self._alone(error)
        return self._config_of_plan()

    def _config_of_plan(self) -> Any:
        assert self._plan is not None
        while True:
            try:
                self._apply(self._plan)
                self._made = self._make()
                self._check()
            except Exception as error:
                if not self._drop_drafter(error):
                    return self._alone(error)
            else:
                return self._made

    def start(self, start: Callable[[Any], Any]) -> Any:
        """Start the engine of the config that was made. start: makes vLLM's client of an engine from a config."""
        config = self._made
        self._record.begin()
        while self._plan is not None:
            try:
                client = start(config)
            except Exception as error:
                logger.warning("the engine did not start with Outrider", exc_info=True)
                traceback.clear_frames(error.__traceback__)
                config = self._config_of_plan() if self._drop_drafter(error) else self._alone(error)
            else:
                self._record.succeed()
                self._serve(self._plan, client)
                return client
            gc.collect()  # ends the failed client, whose renderer has threads: the next start may fork
        return start(config)

    # -- with Outrider ---------------------------------------------------------------------------------------------

    def _first_plan(self) -> LaunchPlan:
        reason = obstacle(self._arguments, os.environ)
        if reason:
            raise StepAsideError(reason)
        self._record.check()
        check_target(self._arguments)
        service = self._load()
        run_dir = run_folder(os.environ, keep_others=True)
        atexit.register(shutil.rmtree, run_dir, ignore_errors=True)
        paths = Paths(run_dir=str(run_dir), hot_file=str(run_dir / "hot.json"), mounted=False)
        write_hot(Path(paths.hot_file), service.hot)
        plan = plan_launch(service.boot, service.hot, paths)
        if plan.pool.dropped and self._has_users_drafter:
            raise StepAsideError(_dropped(plan))
        for name, dropped in plan.pool.dropped.items():
            logger.warning("drafter %r is not used: %s", name, dropped)
        return plan

    def _load(self) -> LocalService:
        return service_of_flags(self._arguments, self._file)

    def _apply(self, plan: LaunchPlan) -> None:
        """Set the flags, this process and its environment as the plan needs them."""
        write_plan(plan)
        os.environ.update(plugin_environment(plan.boot, plan.paths.run_dir))
        from outrider_runtime.vllm_plugin import engine_core  # binds vLLM's own function

        engine_core.install()
        prepare_vllm()
        self._put_flags_back()
        settings = engine_settings(plan)
        if plan.boot.accelerator.on_cpu:
            settings["distributed_executor_backend"] = CPU_EXECUTOR_CLASS
            settings.pop("enforce_eager", None)  # the user's choice
        additional = {**(self._arguments.additional_config or {}), **_mapping(settings.get("additional_config"))}
        vars(self._arguments).update(settings, additional_config=additional, **_NO_PARTS)
        if "speculative_config" not in settings:
            self._arguments.speculative_config = None

    def _check(self) -> None:
        """Raise StepAsideError if something replaced what drives the engine."""
        for name, config, ours in (
            ("scheduler", self._made.scheduler_config.scheduler_cls, self._arguments.scheduler_cls),
            ("worker", self._made.parallel_config.worker_cls, self._arguments.worker_cls),
        ):
            if config != ours:
                raise StepAsideError(f"another plugin set the {name} to {config}")

    def _serve(self, plan: LaunchPlan, client: Any) -> None:
        with survives("serve its pages, though it drives the engine"):
            from outrider_runtime.vllm_plugin.bounded_input import BoundedInput  # imports torch: not before the fork

            put(patches.INPUT_PROCESSOR, BoundedInput(client.vllm_config, client.renderer), of=client)
            file = None
            if self._file is not None:
                file = ConfigFile(self._file, self._reload, Serving(plan.boot, plan.hot, plan.paths))
                file.follow()
            self.pages = EnginePages(plan, client, file)
        failed: Mapping[str, str] = {}
        with survives("read which drafters the engine left out"):
            failed = noted_failures(plan)
        origin = "--speculative-config" if self._has_users_drafter else "the pool"
        for name, reason in failed.items():
            logger.warning("drafter %r of %s is not used: %s", name, origin, reason)
        loaded = [drafter.name for drafter in plan.pool.hosted if drafter.name not in failed]
        self._activity.active(loaded, plan.boot.max_draft_tokens)

    def _reload(self) -> LocalService:
        self._put_flags_back()
        return self._load()

    # -- without -----------------------------------------------------------------------------------------------------

    def _drop_drafter(self, error: Exception) -> bool:
        """Leave out the drafter of the file that caused `error`. False: no such drafter did."""
        assert self._plan is not None
        smaller = None
        with survives("read which drafter failed"):
            smaller = after_failure(self._plan, error) if self._file is not None else None
        if smaller is None:
            return False
        logger.warning("starting again without a drafter: %s", _dropped(smaller))
        self._plan = smaller
        return True

    def _alone(self, error: Exception) -> Any:
        """Undo everything, and return the config of the user's own flags."""
        reason = _sentence(error)
        plan, self._plan = self._plan, None
        self._put_flags_back()
        os.environ.clear()
        os.environ.update(self._users_environment)
        with survives("put vLLM back"):
            self._put_process_back()
        if plan is not None:
            with survives("read why the engine ended"):
                reason = cause(plan.paths.run_dir) or reason
            shutil.rmtree(plan.paths.run_dir, ignore_errors=True)
        self._record.fail(without_secrets(reason))
        self._activity.step_aside(reason)
        return self._make()

    def _put_process_back(self) -> None:
        for patch, theirs in self._theirs.items():
            put(patch, theirs)
        if "outrider_cpu" in sys.modules:
            import outrider_cpu

            outrider_cpu.forbid_second_runner()

    def _put_flags_back(self) -> None:
        vars(self._arguments).update({name: _copied(value) for name, value in self._users_flags.items()})


_NO_PARTS: Mapping[str, None] = {"spec_method": None, "spec_model": None, "spec_tokens": None}
"""Flags of parts of the speculative config, which vLLM would add to ours."""


def _copied(value: Any) -> Any:
    """Copy what vLLM changes in place."""
    return dict(value) if isinstance(value, dict) else value


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dropped(plan: LaunchPlan) -> str:
    return "; ".join(f"drafter {name!r}: {reason}" for name, reason in plan.pool.dropped.items())


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, StepAsideError | StartupError) else with_type(error)
