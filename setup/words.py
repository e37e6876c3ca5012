"""`python -m setup.words`: the lint of this project's words. CONTRIBUTING.md has the rules.

A finding is allowed where `words_allowed.txt` has an entry for its rule and file, with a count that may only fall. A
file that is new may use up what the entries of removed files allowed: so a rename needs no edit of that list.
"""

from __future__ import annotations

import argparse
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

ALLOWED = Path(__file__).with_name("words_allowed.txt")
BASE_COMMIT = "7fc38fb0f965f9996d9d3ca96bd16955c9ae80a9"
LONGEST_SUBJECT = 72
PRODUCT = ("crds/", "operator/", "runtime/")
ENTRY_POINTS = ("__init__.py", "__main__.py", "main.py")

PREPOSITIONS = re.compile(
    r"(about|after|against|among|around|as|at|before|behind|below|beneath|beside|between|beyond|by|during|for|from|in"
    r"|inside|of|on|outside|over|since|through|to|under|until|upon|where|wherever|with|within|without|the same)\b",
    re.IGNORECASE,
)
WORDS = re.compile(
    r"\b(told|asked|nobody|whoever|everybody|somebody|who|whom|dear|dearer|dearest|strangers?|beside|anew|bears?"
    r"|hang(?:s|ing)?[ _]on|hazards?|holes?|ragged|truth|gated(?! (?:model|repositor)))\b",
    re.IGNORECASE,
)
NAMES = frozenset(("told", "asked", "given", "found", "held", "wanted", "one", "each", "here", "now"))
"""Names that say nothing where they are used; parts of longer names are held to `WORDS` alone."""

Counts = Counter[tuple[str, str]]
"""Findings by rule and file."""


@dataclass(frozen=True)
class Finding:
    rule: str
    file: str
    line: int
    text: str


def _names(node: ast.AST) -> Iterator[str]:
    """Names that a node defines: what is merely used is mended where it is defined."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.arg():
            yield node.arg
        case ast.Name(ctx=ast.Store()):
            yield node.id


def _split_name(name: str) -> str:
    """A name with its parts apart: `HeldRows`, `_held_rows` and `HELD_ROWS` are "held rows"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).replace("_", " ").lower().strip()


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments by line. Most files are not split into tokens, which is slow: none of their comments can have a word."""
    if not any("#" in line and WORDS.search(line) for line in source.splitlines()):
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _find_words(file: str, line: int, text: str) -> Iterator[Finding]:
    """Banned words of a text; what stands in backticks or is a link's target is a name, checked where it is defined."""
    plain = re.sub(r"`[^`\n]*`|\]\([^)\n]*\)", lambda code: " " * len(code[0]), text)
    for match in WORDS.finditer(plain):
        yield Finding("word", file, line + plain.count("\n", 0, match.start()), match[0])


def python_findings(file: str, source: str) -> Iterator[Finding]:
    """Docstrings that begin with a preposition; banned words in docstrings, comments and names."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                if opening := PREPOSITIONS.match(text.strip()):
                    yield Finding("opening", file, node.lineno, opening[0])
                yield from _find_words(file, node.lineno, text)
        for name in _names(node):
            words = _split_name(name)
            if words in NAMES or WORDS.search(words):
                yield Finding("name", file, getattr(node, "lineno", 1), name)
    for line, comment in _comments(source):
        yield from _find_words(file, line, comment)


def text_findings(file: str, text: str) -> Iterator[Finding]:
    """Banned words of a page; blocks of code are not prose."""
    prose = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    yield from _find_words(file, 1, prose)


def find_repeated(sources: dict[str, str]) -> Iterator[Finding]:
    """Class names and file names that the product has more than once."""
    product = {file: ast.parse(source) for file, source in sources.items() if file.startswith(PRODUCT)}
    places = [
        ("class", node.name, file, node.lineno)
        for file, tree in product.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    names = ((PurePosixPath(file).name, file) for file in product)
    places += [("file", name, file, 1) for name, file in names if name not in ENTRY_POINTS]
    uses = Counter((kind, name) for kind, name, _, _ in places)
    for kind, name, file, line in places:
        if uses[kind, name] > 1:
            yield Finding(f"{kind} twice", file, line, f"{name}, {uses[kind, name]} times")


def long_subjects(repository: Path) -> list[str]:
    """Subjects over 72 characters since the base commit; of all commits if the base is missing; none without git."""
    for commits in (f"{BASE_COMMIT}..HEAD", "HEAD"):
        done = _git(repository, "log", "--no-merges", "--format=%h %s", commits)
        if done.returncode == 0:
            lines = done.stdout.splitlines()
            return [line for line in lines if len(line.partition(" ")[2]) > LONGEST_SUBJECT]
    return []


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=False)


def _files(repository: Path) -> Iterator[str]:
    """Files of the working tree: those that git tracks or would, or everything in a tree that is not a clone."""
    listed = _git(repository, "ls-files", "--cached", "--others", "--exclude-standard")
    names = listed.stdout.splitlines() if listed.returncode == 0 else _walk(repository)
    for name in names:
        if (name.endswith(".py") or _is_prose(name)) and (repository / name).is_file():
            yield name


def _is_prose(name: str) -> bool:
    """Whether a file is a page, or has comments that users read: of the chart, the examples, the Dockerfile."""
    if name.endswith(".md"):
        return name.startswith(("docs/", "examples/", "training/")) or "/" not in name
    return name == "Dockerfile" or (name.endswith((".yaml", ".tpl")) and name.startswith(("charts/", "examples/")))


def _walk(repository: Path) -> Iterator[str]:
    for path in sorted(repository.rglob("*")):
        name = path.relative_to(repository).as_posix()
        if not name.startswith("."):
            yield name


def findings(repository: Path) -> list[Finding]:
    """Everything that the rules object to, allowed or not."""
    texts = {name: (repository / name).read_text(encoding="utf-8") for name in _files(repository)}
    sources = {name: text for name, text in texts.items() if name.endswith(".py")}
    all_findings = [finding for name, text in sources.items() for finding in python_findings(name, text)]
    prose = {name: text for name, text in texts.items() if name not in sources}
    all_findings += [finding for name, text in prose.items() for finding in text_findings(name, text)]
    return all_findings + list(find_repeated(sources))


def read_allowed(path: Path) -> Counts:
    """Entries of the allow-list: a count, the rule and the file on each line."""
    lines = (line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))
    entries = (line.split("\t") for line in lines)
    return Counter({(rule, file): int(count) for count, rule, file in entries})


def write_allowed(path: Path, counts: Counts) -> None:
    """Write what is left to allow, and nothing else."""
    head = (
        "# What `python -m setup.words` lets pass, by rule and file. It only shrinks: --update lowers, never raises.\n"
    )
    lines = (f"{count}\t{rule}\t{file}\n" for (rule, file), count in sorted(counts.items()) if count)
    path.write_text(head + "".join(lines), encoding="utf-8")


def not_allowed(counts: Counts, allowed: Counts, files: set[str]) -> Counts:
    """Findings over their entries. New files share what the entries of removed files allowed, rule by rule."""
    spare = Counter[str]()
    for (rule, file), count in allowed.items():
        spare[rule] += count if file not in files else 0
    over = Counts()
    for (rule, file), count in sorted(counts.items()):
        excess = count - allowed[rule, file]
        if excess > 0 and (rule, file) not in allowed:
            taken = min(excess, spare[rule])
            spare[rule] -= taken
            excess -= taken
        if excess > 0:
            over[rule, file] = excess
    return over


def _report(all_findings: list[Finding], over: Counts) -> None:
    """Print one line a finding: all those of a file that has too many, since any of them may be the new one."""
    for finding in all_findings:
        if (finding.rule, finding.file) in over:
            print(f"{finding.file}:{finding.line}: {finding.rule}: {finding.text}")
    for (rule, file), count in over.items():
        print(f"{file}: {count} more of rule {rule!r} than allowed. The words to use stand in CONTRIBUTING.md.")


def main(arguments: list[str] | None = None, repository: Path | None = None, allowed_at: Path = ALLOWED) -> int:
    """Exit status 1 when a file has more findings than allowed, or a commit's subject is too long."""
    parser = argparse.ArgumentParser(prog="python -m setup.words", description=__doc__)
    parser.add_argument("--update", action="store_true", help="lower the entries to what is left")
    parser.add_argument("--all", action="store_true", help="print every finding, the allowed ones too")
    options = parser.parse_args(arguments)
    root = repository or ALLOWED.parent.parent
    all_findings = findings(root)
    counts: Counts = Counter((finding.rule, finding.file) for finding in all_findings)
    allowed = read_allowed(allowed_at)
    over = not_allowed(counts, allowed, set(_files(root)))
    subjects = long_subjects(root)
    _report(all_findings, counts if options.all else over)
    for subject in subjects:
        print(f"commit {subject!r}: {len(subject.partition(' ')[2])} characters, {LONGEST_SUBJECT} are allowed")
    if options.update and not over:
        write_allowed(allowed_at, counts)
    elif lower := sum((allowed - counts).values()):
        print(f"{lower} findings fewer than allowed: lower the entries (python -m setup.words --update)")
    return 1 if over or subjects else 0


if __name__ == "__main__":
    sys.exit(main())
