"""Before the pod is ready everything is compiled that decisions call: a step that compiles stands still for seconds."""

from __future__ import annotations

import importlib
import pkgutil

import numpy as np
import pytest
from numba.core.registry import CPUDispatcher
from outrider_runtime import control
from outrider_runtime.control.cost.model import DrafterCost, StepCost
from outrider_runtime.control.settings import Drafter, HotSettings, Settings, SLOClass
from outrider_runtime.control.warm_up import DRAFTERS, compile_all

from tests.unit.control.engine import Engine, World, controller, linear, profile


def compiled() -> set[tuple[str, str]]:
    """(function, types of its arguments) of all that was compiled so far."""
    names = [one.name for one in pkgutil.walk_packages(control.__path__, f"{control.__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    functions = {one for module in modules for one in vars(module).values() if isinstance(one, CPUDispatcher)}
    return {(one.py_func.__qualname__, str(types)) for one in functions for types in one.signatures}


def test_nothing_is_left_to_be_compiled_while_serving() -> None:
    """Two models, a lookup, and a class that is late now and then; requests come and go."""
    hot = HotSettings(slo_classes=(SLOClass("tight", 0.012), SLOClass("loose", 1.0)))
    compile_all(Settings(DRAFTERS, 5, 64, hot=hot))
    before = compiled()
    costs = {one.name: DrafterCost(StepCost(constant_s=5e-4), one.passes) for one in DRAFTERS}
    world = World(
        target_s=linear(0.010, 4e-5),
        pass_s=dict.fromkeys(range(3), linear(5e-4, 0.0)),
        hazard=lambda _drafter, _number, depth: np.full(np.shape(depth), 0.6),
    )
    loop = controller(DRAFTERS, profile(StepCost(per_batched_token_s=4e-5, constant_s=0.010), costs), hot=hot)
    running = Engine(world, loop, load=12, prompt=40, output=40, classes=lambda number: int(number % 2))
    running.run(300)
    assert compiled() - before == set()


@pytest.mark.parametrize("drafters", [(), *((one,) for one in DRAFTERS)], ids=["none", *(one.name for one in DRAFTERS)])
def test_an_image_that_was_compiled_for_every_drafter_has_the_code_of_each_pool(drafters: tuple[Drafter, ...]) -> None:
    compile_all(Settings(DRAFTERS, 5, 4))
    before = compiled()
    compile_all(Settings(drafters, 3, 64, largest_graph_tokens=8))
    assert compiled() - before == set()
