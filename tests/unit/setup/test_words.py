"""The lint of this project's words: what it finds, and what passes."""

import subprocess
from pathlib import Path

import pytest

from setup import words

BANNED = "who"
"""Written apart from the texts below, so that the lint finds nothing in this file."""


def _find_in_python(source: str, file: str = "a.py") -> list[tuple[str, str, str]]:
    return [(finding.rule, finding.place, finding.text) for finding in words.find_in_python(file, source)]


@pytest.mark.parametrize("opening", ["Of", "By", "As", "In", "Where", "The same", "With", "for"])
def test_docstring_that_begins_with_a_preposition_is_found(opening: str) -> None:
    assert _find_in_python(f'def cost():\n    """{opening} a cost."""\n') == [("opening", "a.py:2", opening)]


@pytest.mark.parametrize("text", ["Seconds per context token.", "Inverse of a matrix.", "Offer a lookup.", "Bytes."])
def test_docstring_that_begins_with_its_thing_passes(text: str) -> None:
    assert _find_in_python(f'def cost():\n    """{text}"""\n') == []


def test_attribute_docstring_with_leading_preposition_is_found() -> None:
    assert _find_in_python('PARTS = 16\n"""Of the room."""\n') == [("opening", "a.py:2", "Of")]


def test_banned_words_in_docstrings_and_comments_have_lines() -> None:
    source = f'"""Steps.\n\nRequests {BANNED} wait."""\n\nx = 1  # this hangs {"on"} y\n'
    assert _find_in_python(source) == [("word", "a.py:3", BANNED), ("word", "a.py:5", "hangs on")]


def test_text_of_strings_and_quoted_names_passes() -> None:
    assert _find_in_python(f'"""The column `{BANNED}`."""\nprint("{BANNED} # {BANNED}")\n') == []


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
    assert [text for rule, _, text in _find_in_python(source.format(name)) if rule == "name"] == [
        name if "test" not in source else f"test_it_is_the_{name}_of_all"
    ]


def test_names_that_are_used_or_merely_contain_a_word_pass() -> None:
    assert _find_in_python("found_at_s = settings.asked\nwhole = given(1)\nclass Stranded: ...\n") == []


@pytest.mark.parametrize("name", ["failed", "_padded", "of", "of_head", "config_of", "without", "ran"])
def test_function_without_verb_and_object_is_found(name: str) -> None:
    assert _find_in_python(f"def {name}(): ...\n", "bench/a.py") == [("verb and object", "bench/a.py:1", name)]
    assert _find_in_python(f"def {name}(): ...\n", "tests/a.py") == []


def test_function_with_a_verb_and_property_pass() -> None:
    source = "def feed(): ...\n\ndef read_config(): ...\n\nclass A:\n    @property\n    def failed(self): ...\n"
    assert _find_in_python(source, "bench/a.py") == []


def test_page_is_held_to_the_words_but_its_code_is_not() -> None:
    page = f"# A page\n```sh\necho {BANNED}\n```\nSay `{BANNED}`, [it]({BANNED}.md), not {BANNED}.\n"
    assert list(words.find_in_text("docs/a.md", page)) == [words.Finding("word", "docs/a.md:5", BANNED)]


def test_class_and_file_names_of_the_product_occur_once() -> None:
    engine = "class Engine: ...\n"
    sources = {"runtime/a/slo.py": engine, "operator/b/slo.py": engine, "runtime/a/main.py": "", "crds/b/main.py": ""}
    assert sorted(map(str, words.find_repeated(sources))) == [
        "operator/b/slo.py:1: twice: class Engine, 2 times",
        "operator/b/slo.py:1: twice: file slo.py, 2 times",
        "runtime/a/slo.py:1: twice: class Engine, 2 times",
        "runtime/a/slo.py:1: twice: file slo.py, 2 times",
    ]


@pytest.mark.parametrize(
    "subject",
    [
        "operator: one question for whether a pod has ended",
        "tests: a damaged draft ends the start",
        "operator: watches read their scopes from the settings",
        "docs: what a canary takes",
        "runtime: fixed the queue",
    ],
)
def test_subject_that_is_not_imperative_is_found(subject: str) -> None:
    assert [finding.rule for finding in words.find_in_message("commit a", subject)] == ["imperative"]


@pytest.mark.parametrize("verb", ["process", "bring", "feed", "embed", "need", "read", "pass", "theorise", "note"])
def test_imperative_subject_passes(verb: str) -> None:
    assert list(words.find_in_message("commit a", f"runtime: {verb} a draft\n\nWhy.\n")) == []


def test_long_subject_and_banned_word_in_a_body_are_found() -> None:
    message = "d" * 73 + f"\n\nThose {BANNED} wait.\n"
    assert list(map(str, words.find_in_message("commit a", message))) == [
        "commit a: subject: 73 characters, 72 are allowed",
        f"commit a:3: word: {BANNED}",
    ]


def _git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)


def _commit(folder: Path, subject: str) -> None:
    _git(folder, "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-qm", subject, "--allow-empty")


def test_commits_of_a_branch_are_checked_and_those_of_main_pass(tmp_path: Path) -> None:
    """What is on the main branch cannot be mended any more, so a lint that fails for it would fail for ever."""
    _git(tmp_path, "init", "--quiet", "--initial-branch=main")
    _commit(tmp_path, "a" * 100)
    assert words.main(tmp_path) == 0
    _git(tmp_path, "switch", "--quiet", "--create", "work")
    _commit(tmp_path, "c" * 72)
    assert words.main(tmp_path) == 0
    _commit(tmp_path, "d" * 73)
    assert words.main(tmp_path) == 1


def test_tree_without_git_is_held_to_the_words_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert words.main(tmp_path) == 0
    (tmp_path / "README.md").write_text(f"{BANNED}?\n")
    assert words.main(tmp_path) == 1
