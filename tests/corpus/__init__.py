"""Good and bad manifests: what the API server and `serve -f` must judge alike.

A bad one says in its first lines what the refusal must contain: `# expect:` for both, or `# apiserver:` and
`# serve:` where each words it in its own way.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class BadManifest:
    text: str
    apiserver: str
    """What the API server's refusal contains."""
    serve: str
    """What the refusal of `serve -f` contains."""


def good() -> dict[str, str]:
    """Name -> text of each manifest that must be accepted."""
    return {path.stem: path.read_text() for path in sorted((_FOLDER / "good").glob("*.yaml"))}


def bad() -> dict[str, BadManifest]:
    """Name -> each manifest that must be refused."""
    return {path.stem: _bad(path.read_text()) for path in sorted((_FOLDER / "bad").glob("*.yaml"))}


def _bad(text: str) -> BadManifest:
    expected = dict(line.removeprefix("# ").split(": ", 1) for line in text.splitlines() if line.startswith("# "))
    both = expected.get("expect", "")
    return BadManifest(text=text, apiserver=expected.get("apiserver", both), serve=expected.get("serve", both))
