"""The shell commands of docs/tutorials and docs/how-to, and which test runs each of them."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from setup.steps import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGES = sorted(str(page.relative_to(DOCS)) for folder in ("tutorials", "how-to") for page in (DOCS / folder).glob("*"))
_FENCE = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r" {2,}# .*$", re.MULTILINE)


class Runner(StrEnum):
    """The test file that runs a command."""

    GPU_TUTORIAL = "tests/operator/chart/test_gpu_tutorial.py"
    CLUSTER_STORY = "tests/operator/chart/test_how_to_commands.py"
    SERVER = "tests/engine/test_server_commands.py"
    TRAINERS = "tests/unit/training/test_documented_trainings.py"
    SIMULATOR = "tests/unit/simulate/test_documented_commands.py"


@dataclass(frozen=True)
class Command:
    page: str
    """Its path below docs/."""
    text: str
    """Text of the page, without comments."""

    @property
    def words(self) -> list[str]:
        """Words as a shell makes them of a single command; variables and `~` stand as they are."""
        return shlex.split(self.text.replace("\\\n", " "))

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


@dataclass(frozen=True)
class Rule:
    """The runner of commands by page and beginning; the first rule that matches holds."""

    page: str
    starts: str
    by: Runner | str
    """A test file, or the reason why no test runs it."""

    def holds(self, command: Command) -> bool:
        return command.page.startswith(self.page) and command.text.startswith(self.starts)


_MINUTES = "runs real models for minutes or an hour"
_REGISTRY = "downloads, or needs a registry"
RULES = (
    Rule("tutorials/gpu-cluster.md", "export REGISTRY=", "the value stands for the reader's own registry"),
    Rule("tutorials/gpu-cluster.md", "docker ", f"{_REGISTRY}; tests/images builds the images"),
    Rule("tutorials/gpu-cluster.md", "", Runner.GPU_TUTORIAL),
    Rule("tutorials/laptop.md", "docker ", f"{_REGISTRY}; tests/images builds the images"),
    Rule("tutorials/laptop.md", "make deps-fast", "make test begins with it"),
    Rule("tutorials/laptop.md", ".venv/bin/python -m setup.model", "make test begins with it"),
    Rule("tutorials/laptop.md", ".venv/bin/outrider-runtime serve", "tests/engine/conftest.py starts it on free ports"),
    Rule("tutorials/laptop.md", "curl ", Runner.SERVER),
    Rule("how-to/beside-your-vllm.md", "pip install", _REGISTRY),
    Rule("how-to/beside-your-vllm.md", "OUTRIDER=1 vllm serve", "tests/engine/test_stock_server.py starts a small one"),
    Rule("how-to/autoscale.md", "kubectl apply ", "needs KEDA; tests/operator/test_autoscaling.py scales by an HPA"),
    Rule("how-to/autoscale.md", "kubectl get hpa", "needs KEDA"),
    Rule("how-to/build-images.md", "buildah ", f"{_REGISTRY}; tests/images builds the images"),
    Rule("how-to/serve-over-several-nodes.md", "kubectl ", "asks of a service over several nodes, with its controller"),
    Rule("how-to/simulate.md", "WORLDS=", "names a folder of the checkout, which tests do not write to"),
    Rule("how-to/simulate.md", ".venv/bin/outrider-simulate ", Runner.SIMULATOR),
    Rule("how-to/simulate.md", ".venv/bin/python -m bench.papers.magicdec_world", Runner.SIMULATOR),
    Rule("how-to/simulate.md", ".venv/bin/python -m outrider_runtime.simulate.worlds.profiled", Runner.SIMULATOR),
    Rule("how-to/simulate.md", ".venv/bin/pip install", _REGISTRY),
    Rule("how-to/simulate.md", ".venv/bin/python -m outrider_runtime.simulate.worlds.compose", "needs an extra"),
    Rule("how-to/simulate.md", ".venv/bin/outrider-profile", f"{_MINUTES}; tests/engine/test_profiler.py runs it"),
    Rule("how-to/simulate.md", "make recording", _MINUTES),
    Rule("how-to/simulate.md", ".venv/bin/python -m bench.record", _MINUTES),
    Rule("how-to/train-a-draft.md", ".venv/bin/python -m training.compare_heads", f"{_MINUTES}, a head"),
    Rule("how-to/train-a-draft.md", ".venv/bin/python -m training.", Runner.TRAINERS),
    *(Rule("how-to/", program, Runner.CLUSTER_STORY) for program in ("kubectl ", "helm ", "curl ")),
)  # fmt: skip


def shell_blocks(page: str) -> list[str]:
    """The text of the page's `sh` fences."""
    return _FENCE.findall((DOCS / page).read_text())


def commands(pages: Sequence[str] = PAGES) -> list[Command]:
    """Every command of the pages, in order, and each once."""
    in_order = (Command(page, text) for page in pages for block in shell_blocks(page) for text in _commands(block))
    return list(dict.fromkeys(in_order))


def commands_of(runner: Runner) -> list[Command]:
    return [command for command in commands() if runner_of(command) == runner]


def runner_of(command: Command) -> Runner | str | None:
    """The first rule's answer; None for a command that no rule covers."""
    return next((rule.by for rule in RULES if rule.holds(command)), None)


def _commands(block: str) -> list[str]:
    """Commands of a block: a line that ends in a backslash, or within quotes, goes on."""
    lines = iter(_COMMENT.sub("", block).splitlines())
    texts = []
    for line in lines:
        command = line
        while command.endswith("\\") or command.count("'") % 2:
            command += "\n" + next(lines)
        texts.append(command.strip())
    return [text for text in texts if text and not text.startswith("#")]


def stale_rules() -> list[Rule]:
    """Rules that are the first to match no command."""
    used = {next((rule for rule in RULES if rule.holds(command)), None) for command in commands()}
    return list(itertools.filterfalse(used.__contains__, RULES))
