"""Everything that decisions call is compiled before the pod is ready: a step that compiles takes seconds."""

from __future__ import annotations

import importlib
import pkgutil

import numpy as np
import pytest
from numba.core.registry import CPUDispatcher
from outrider_runtime import control
from outrider_runtime.control.settings import Drafter, HotSettings, Settings, SLOClass
from outrider_runtime.control.step_times import DrafterCost, StepCost
from outrider_runtime.control.warm_up import DRAFTERS, compile_all

from tests.unit.control.engine import Engine, World, controller, linear, profile


def compiled() -> set[tuple[str, str]]:
    """(function, types of its arguments) of all that was compiled so far."""
    names = [module.name for module in pkgutil.walk_packages(control.__path__, f"{control.__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    functions = {value for module in modules for value in vars(module).values() if isinstance(value, CPUDispatcher)}
    return {(function.py_func.__qualname__, str(types)) for function in functions for types in function.signatures}


def test_serving_compiles_nothing_after_the_warm_up() -> None:
    """Two models, a lookup, and a class that is late now and then; requests come and go."""
    hot = HotSettings(slo_classes=(SLOClass("tight", 0.012), SLOClass("loose", 1.0)))
    compile_all(Settings(DRAFTERS, 5, 64, hot=hot))
    before = compiled()
    costs = {drafter.name: DrafterCost(StepCost(constant_s=5e-4), drafter.passes) for drafter in DRAFTERS}
    world = World(
        target_s=linear(0.010, 4e-5),
        pass_s=dict.fromkeys(range(3), linear(5e-4, 0.0)),
        acceptance=lambda _drafter, _number, depth: np.full(np.shape(depth), 0.6),
    )
    loop = controller(DRAFTERS, profile(StepCost(per_batched_token_s=4e-5, constant_s=0.010), costs), hot=hot)
    running = Engine(world, loop, load=12, prompt=40, output=40, classes=lambda number: int(number % 2))
    running.run(300)
    assert compiled() - before == set()


NAMES = [drafter.name for drafter in DRAFTERS]


@pytest.mark.parametrize("drafters", [(), *((drafter,) for drafter in DRAFTERS)], ids=["none", *NAMES])
def test_code_compiled_for_all_drafters_serves_every_pool(drafters: tuple[Drafter, ...]) -> None:
    compile_all(Settings(DRAFTERS, 5, 4))
    before = compiled()
    compile_all(Settings(drafters, 3, 64, largest_graph_tokens=8))
    assert compiled() - before == set()
