"""Every shell command of a tutorial or a how-to is run by a test, or a rule says why none runs it."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from setup.steps import REPOSITORY
from tests import documented_commands
from tests.documented_commands import DOCS, PAGES, Runner, commands, commands_of, runner_of

_MODULE = re.compile(r"python -m ([a-z_]\w*(?:\.[a-z_]\w*)*)")
_BENCHMARK = re.compile(r"make bench ONLY=([a-z_]\w*(?:\.[a-z_]\w*)*)")
_PROGRAM = re.compile(r"^(\$ |kubectl |helm |curl |make |docker |buildah |python|pip |\.venv/bin/|[A-Z]+=)")


def test_command_of_a_page_is_run_or_has_a_reason() -> None:
    """A new one needs a rule in tests/documented_commands.py, and a test file that runs it."""
    assert [str(command) for command in commands() if runner_of(command) is None] == []


def test_rules_and_runners_are_in_use() -> None:
    assert documented_commands.stale_rules() == []
    for runner in Runner:
        assert (REPOSITORY / runner).exists()
        assert commands_of(runner), runner


def test_shell_commands_stand_in_sh_fences() -> None:
    """What stands elsewhere would be run by no test."""
    fence = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
    outside = [
        f"{page}: {line.strip()}"
        for page in PAGES
        for line in fence.sub("", (DOCS / page).read_text()).splitlines()
        if line.startswith("    ") and _PROGRAM.match(line.strip())
    ]
    assert outside == []


def test_fences_stand_at_the_margin() -> None:
    """Bug: the site showed the commands of a numbered step as words of its paragraph: it takes no indented fence."""
    indented = re.compile(r"^ +```", re.MULTILINE)
    assert [page for page in PAGES if indented.search((DOCS / page).read_text())] == []


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{page.relative_to(DOCS)}" for page in sorted(DOCS.rglob("*.md")))]
)
def test_module_that_a_page_runs_is_there(page: str) -> None:
    """Bug: two benchmarks had moved to bench/papers, and the pages' `make bench ONLY=...` ended with an error."""
    text = (REPOSITORY / page).read_text()
    modules = {*_MODULE.findall(text), *(f"bench.{name}" for name in _BENCHMARK.findall(text))}
    assert [module for module in sorted(modules) if find_spec(module) is None] == []


def test_block_is_split_into_its_commands() -> None:
    """Continued lines, quotes over several lines, and comments behind a command."""
    assert documented_commands._commands("a \\\n  b  # c\nd 'e\nf'\n# g\n\nh\n") == ["a \\\n  b", "d 'e\nf'", "h"]
    (story,) = [c for c in commands(["how-to/route-by-load.md"]) if c.text.startswith("kubectl create rolebinding")]
    assert story.text.endswith("--clusterrole=outrider-system:outrider:endpoint-picker")
