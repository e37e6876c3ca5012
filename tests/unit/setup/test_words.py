"""The lint of this project's words: what it finds, and what its allow-list lets pass."""

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from setup import words

BANNED = "who"
"""Written apart from the texts below, so that the lint finds nothing in this file."""


def _of_python(source: str) -> list[tuple[str, int, str]]:
    return [(finding.rule, finding.line, finding.text) for finding in words.python_findings("a.py", source)]


@pytest.mark.parametrize("opening", ["Of", "By", "As", "In", "Where", "The same", "With", "for"])
def test_docstring_that_begins_with_a_preposition_is_found(opening: str) -> None:
    assert _of_python(f'def cost():\n    """{opening} a cost."""\n') == [("opening", 2, opening)]


@pytest.mark.parametrize("text", ["Seconds per context token.", "Inverse of a matrix.", "Offer a lookup.", "Bytes."])
def test_docstring_that_begins_with_its_thing_passes(text: str) -> None:
    assert _of_python(f'def cost():\n    """{text}"""\n') == []


def test_attribute_docstring_with_leading_preposition_is_found() -> None:
    assert _of_python('PARTS = 16\n"""Of the room."""\n') == [("opening", 2, "Of")]


def test_banned_words_in_docstrings_and_comments_have_lines() -> None:
    source = f'"""Steps.\n\nRequests {BANNED} wait."""\n\nx = 1  # this hangs {"on"} y\n'
    assert _of_python(source) == [("word", 3, BANNED), ("word", 5, "hangs on")]


def test_text_of_strings_and_quoted_names_passes() -> None:
    assert _of_python(f'"""The column `{BANNED}`."""\nprint("{BANNED} # {BANNED}")\n') == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f({}): ...", "asked"),
        ("{} = 1", "_told"),
        ("for {} in range(3): ...", "one"),
        ("class {}: ...", "Told"),
        ("{}: int = 3", "MOST_STRANGERS"),
        ("def test_it_is_the_{}_of_all(): ...", "nobody"),
    ],
)
def test_names_with_banned_words_are_found_at_definition(source: str, name: str) -> None:
    assert [text for rule, _, text in _of_python(source.format(name)) if rule == "name"] == [
        name if "test" not in source else f"test_it_is_the_{name}_of_all"
    ]


def test_names_that_are_used_or_merely_contain_a_word_pass() -> None:
    assert _of_python("found_at_s = settings.asked\nwhole = given(1)\nclass Stranded: ...\n") == []


def test_page_is_held_to_the_words_but_its_code_is_not() -> None:
    page = f"# A page\n```sh\necho {BANNED}\n```\nSay `{BANNED}`, [it]({BANNED}.md), not {BANNED}.\n"
    assert list(words.text_findings("docs/a.md", page)) == [words.Finding("word", "docs/a.md", 5, BANNED)]


def test_class_and_file_names_of_the_product_occur_once() -> None:
    engine = "class Engine: ...\n"
    sources = {
        "runtime/a/slo.py": engine,
        "operator/b/slo.py": engine,
        "runtime/a/main.py": "",
        "crds/b/main.py": "",
        "tests/slo.py": engine,
    }
    assert sorted((finding.rule, finding.file, finding.text) for finding in words.find_repeated(sources)) == [
        ("class twice", "operator/b/slo.py", "Engine, 2 times"),
        ("class twice", "runtime/a/slo.py", "Engine, 2 times"),
        ("file twice", "operator/b/slo.py", "slo.py, 2 times"),
        ("file twice", "runtime/a/slo.py", "slo.py, 2 times"),
    ]


def test_count_over_its_entry_fails_and_under_it_passes() -> None:
    allowed = Counter({("word", "a.py"): 2})
    assert words.not_allowed(Counter({("word", "a.py"): 3}), allowed, {"a.py"}) == {("word", "a.py"): 1}
    assert not words.not_allowed(Counter({("word", "a.py"): 1}), allowed, {"a.py"})
    assert words.not_allowed(Counter({("name", "a.py"): 1}), allowed, {"a.py"}) == {("name", "a.py"): 1}


def test_new_files_share_the_entries_of_removed_ones() -> None:
    allowed = Counter({("word", "removed.py"): 3, ("word", "kept.py"): 1})
    counts = Counter({("word", "b.py"): 2, ("word", "c.py"): 2, ("word", "kept.py"): 2})
    over = words.not_allowed(counts, allowed, {"b.py", "c.py", "kept.py"})
    assert over == {("word", "c.py"): 1, ("word", "kept.py"): 1}


class Repository:
    """A git repository with a page and an allow-list."""

    def __init__(self, root: Path) -> None:
        self.root, self.allowed = root, root / "allowed.txt"
        words.write_allowed(self.allowed, Counter())
        self.git("init", "--quiet")
        self.git("config", "user.email", "test@localhost")
        self.git("config", "user.name", "test")

    def git(self, *arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=self.root, capture_output=True, text=True, check=True).stdout

    def commit(self, subject: str) -> str:
        self.git("commit", "--quiet", "--allow-empty", "--message", subject)
        return self.git("rev-parse", "HEAD").strip()

    def write(self, text: str) -> None:
        (self.root / "README.md").write_text(text)

    def lint(self, *arguments: str) -> int:
        return words.main(list(arguments), self.root, self.allowed)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_update_lowers_an_entry_and_never_raises_one(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    words.write_allowed(repository.allowed, Counter({("word", "README.md"): 2}))
    repository.write(f"{BANNED} is it?\n")
    assert repository.lint() == 0
    assert "lower the entries" in capsys.readouterr().out
    assert repository.lint("--update") == 0
    assert words.read_allowed(repository.allowed) == {("word", "README.md"): 1}
    repository.write(f"{BANNED} is {BANNED}?\n")
    assert repository.lint("--update") == 1
    assert "1 more of rule 'word'" in capsys.readouterr().out
    assert words.read_allowed(repository.allowed) == {("word", "README.md"): 1}


def test_subjects_are_held_to_their_length_since_the_base(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.commit("a" * 100)
    monkeypatch.setattr(words, "BASE_COMMIT", repository.commit("b" * 100))
    repository.commit("c" * 72)
    assert repository.lint() == 0
    repository.commit("d" * 73)
    assert repository.lint() == 1
    printed = capsys.readouterr().out
    assert "d" * 73 in printed
    assert "73 characters" in printed


def test_subjects_of_a_clone_without_the_base_are_all_checked(repository: Repository) -> None:
    """Bug avoided: `git log BASE..HEAD` fails in a shallow clone, which must neither fail the lint nor pass it."""
    repository.commit("a" * 72)
    assert repository.lint() == 0
    repository.commit("b" * 73)
    assert repository.lint() == 1


def test_tree_without_git_is_held_to_the_words_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    allowed = tmp_path / "allowed.txt"
    words.write_allowed(allowed, Counter())
    assert words.main([], tmp_path, allowed) == 0
    (tmp_path / "README.md").write_text(f"{BANNED}?\n")
    assert words.main([], tmp_path, allowed) == 1
