"""`python -m setup.words`: the lint of this project's words. CONTRIBUTING.md has the rules.

It finds some marks of sentences and names that a reader stumbles over; it is no substitute for a reader. Rewrite such a
sentence: if only the word is replaced, it reads worse.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
LONGEST_SUBJECT = 72  # git and GitHub cut longer ones
PRODUCT = ("crds/", "operator/", "runtime/")
ENTRY_POINTS = ("__init__.py", "__main__.py", "main.py")
RUNTIME = "runtime/outrider_runtime/"
VERB_FIRST = (
    "bench/", "demo/", "setup/", "training/", f"{RUNTIME}profiler/", f"{RUNTIME}server/", f"{RUNTIME}simulate/",
    f"{RUNTIME}torch_engine/",
)  # fmt: skip
"""Folders whose functions are held to a verb and an object; elsewhere many are bare participles."""
MAIN_BRANCHES = ("origin/main", "main")

PREPOSITIONS = re.compile(
    r"(about|after|against|among|around|as|at|before|behind|below|beneath|beside|between|beyond|by|during|for|from|in"
    r"|inside|of|on|outside|over|since|through|to|under|until|upon|where|wherever|with|within|without|the same)\b",
    re.IGNORECASE,
)
WORDS = re.compile(
    r"\b(nobody|whoever|everybody|somebody|who|whom|dear|dearer|dearest|strangers?|beside|anew|bears?"
    r"|hang(?:s|ing)?[ _]on|hazards?|holes?|ragged|truth|gated(?! (?:model|repositor)))\b",
    re.IGNORECASE,
)
"""Words for persons where things are meant, and those that the glossary of CONTRIBUTING.md replaces."""
NAMES = frozenset(("told", "asked", "given", "found", "held", "wanted", "one", "each", "here", "now"))
"""Names that say nothing where they are used."""
BARE = re.compile(
    r"of|by|at|in|on|for|from|to|with|without|before|after|under|over|beyond|between|among|until|since|behind"
    r"|gone|left|said|wrote|seen|kept|made|taken|drawn|ran|of_\w+|\w+_of|(?!embed|feed|need|seed|speed)[a-z]+ed"
)
NOT_IMPERATIVE = re.compile(
    r"(an?|the|this|these|its?|what|whether|why|how|no|one|two|three|each|every|all|more|same"
    r"|(?!embed|feed|need|seed|speed)\w+ed|(?!bring)\w+ing|\w*[^\Ws]s)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Finding:
    rule: str
    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.rule}: {self.text}"


def find_in_python(file: str, source: str) -> Iterator[Finding]:
    """Find leading prepositions of docstrings, banned words of docstrings and comments, and names that say nothing."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                if opening := PREPOSITIONS.match(text.strip()):
                    yield Finding("opening", f"{file}:{node.lineno}", opening[0])
                yield from _find_words(file, node.lineno, text)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if _is_bare(file, node):
                yield Finding("verb and object", f"{file}:{node.lineno}", node.name)
        for name in _names(node):
            words = _split_name(name)
            if words in NAMES or WORDS.search(words):
                yield Finding("name", f"{file}:{getattr(node, 'lineno', 1)}", name)
    for line, comment in _comments(source):
        yield from _find_words(file, line, comment)


def find_in_text(file: str, text: str) -> Iterator[Finding]:
    """Find banned words of a page; blocks of code are not prose."""
    prose = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    yield from _find_words(file, 1, prose)


def find_repeated(sources: dict[str, str]) -> Iterator[Finding]:
    """Find class names and file names that the product has more than once."""
    places = [(f"file {PurePosixPath(file).name}", f"{file}:1") for file in sources]
    for file, source in sources.items():
        classes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
        places += [(f"class {node.name}", f"{file}:{node.lineno}") for node in classes]
    uses = Counter(name for name, _ in places)
    for name, place in places:
        if uses[name] > 1 and name.removeprefix("file ") not in ENTRY_POINTS:
            yield Finding("twice", place, f"{name}, {uses[name]} times")


def find_in_commits(repository: Path) -> Iterator[Finding]:
    """Find long and not imperative subjects, and banned words, of commits that are not on the main branch yet."""
    for branch in MAIN_BRANCHES:
        log = _run_git(repository, "log", "--no-merges", "-z", "--format=%h %B", f"{branch}..HEAD")
        if log is not None:
            for commit in filter(None, log.split("\0")):
                name, _, message = commit.partition(" ")
                yield from find_in_message(f"commit {name}", message)
            return


def find_in_message(place: str, message: str) -> Iterator[Finding]:
    subject, _, body = message.partition("\n")
    if len(subject) > LONGEST_SUBJECT:
        yield Finding("subject", place, f"{len(subject)} characters, {LONGEST_SUBJECT} are allowed")
    if NOT_IMPERATIVE.match(subject.partition(": ")[2] or subject):
        yield Finding("imperative", place, subject)
    yield from _find_words(place, 1, f"{subject}\n{body}")


def _is_bare(file: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    is_property = any(ast.unparse(decorator) in ("property", "cached_property") for decorator in node.decorator_list)
    return file.startswith(VERB_FIRST) and not is_property and bool(BARE.fullmatch(node.name.strip("_")))


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node defines; a name that it only uses is checked at its definition."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.arg():
            yield node.arg
        case ast.Name(ctx=ast.Store()):
            yield node.id


def _split_name(name: str) -> str:
    """Split a name into words: `HeldRows`, `_held_rows` and `HELD_ROWS` are "held rows"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).replace("_", " ").lower().strip()


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments by line. Tokenizing is slow, so files without a banned word on a line with "#" are skipped."""
    if not any("#" in line and WORDS.search(line) for line in source.splitlines()):
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _find_words(file: str, line: int, text: str) -> Iterator[Finding]:
    """Find banned words of a text. Backticks and targets of links have names, which are checked at their definition."""
    plain = re.sub(r"`[^`\n]*`|\]\([^)\n]*\)", lambda code: " " * len(code[0]), text)
    for match in WORDS.finditer(plain):
        yield Finding("word", f"{file}:{line + plain.count(chr(10), 0, match.start())}", match[0])


def _run_git(repository: Path, *arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _files(repository: Path) -> Iterator[str]:
    """Yield the files that git tracks or would track; without git, all but those in hidden folders."""
    listed = _run_git(repository, "ls-files", "--cached", "--others", "--exclude-standard")
    walked = (path.relative_to(repository).as_posix() for path in sorted(repository.rglob("*")))
    for name in walked if listed is None else listed.splitlines():
        if not name.startswith(".") and (name.endswith(".py") or _is_prose(name)) and (repository / name).is_file():
            yield name


def _is_prose(name: str) -> bool:
    """Whether a file is a page, or has comments that users read: of the chart, the examples, the Dockerfile."""
    if name.endswith(".md"):
        return name.startswith(("docs/", "examples/", "training/")) or "/" not in name
    return name == "Dockerfile" or (name.endswith((".yaml", ".tpl")) and name.startswith(("charts/", "examples/")))


def findings(repository: Path) -> Iterator[Finding]:
    texts = {name: (repository / name).read_text(encoding="utf-8") for name in _files(repository)}
    for name, text in texts.items():
        yield from find_in_python(name, text) if name.endswith(".py") else find_in_text(name, text)
    yield from find_repeated({name: text for name, text in texts.items() if name.startswith(PRODUCT)})
    yield from find_in_commits(repository)


def main(repository: Path = ROOT) -> int:
    """Print the findings; return 1 if there are any."""
    all_findings = list(findings(repository))
    for finding in all_findings:
        print(finding)
    return int(bool(all_findings))


if __name__ == "__main__":
    sys.exit(main())
