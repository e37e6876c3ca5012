"""From a system of the testbed to its running server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider_crds.profile import ProfilingResult

from tests.benchmarks.evidence import synthetic
from tests.benchmarks.evidence.manifest import base_manifest, with_chunk, with_classes, with_pool, write_manifest
from tests.benchmarks.evidence.profile import ProfileError, profile_once
from tests.benchmarks.evidence.scenario import System, SystemKind, Testbed
from tests.benchmarks.evidence.server import Server, start_ours, start_stock, stock_drafter
from tests.benchmarks.evidence.table import draft_length_table

CONTEXT_TOKENS = 150
"""Mean context of a request here, for the table: a prompt of about 100 tokens and half an answer."""
LARGEST_BATCH = 64


@dataclass(frozen=True)
class Starter:
    """Starts the testbed's systems; what they need and what they say is in `folder`."""

    testbed: Testbed
    folder: Path
    pool: tuple[str, ...]
    """Drafters that are profiled together; a system that has others is profiled with its own."""
    profiled: bool = True
    """False: ours learns its costs while it serves, and tables cannot be made."""

    def start(self, system: System, tpot_s: Mapping[str, float], *, controlled: bool = False) -> Server:
        """`tpot_s`: the SLO classes of ours. Raises ProfileError, FileError or ServerError."""
        log = self.folder / f"{system.name}{'-controlled' if controlled else ''}.log"
        environment = synthetic.plugin_environment(self.folder) if controlled else {}
        self.prepare(system)
        if system.kind is SystemKind.OURS:
            profiles = self._profile_folder(system, system.pool)
            return start_ours(self._manifest(system, system.pool, tpot_s), profiles, log, environment)
        drafters = (system.drafter,) if system.drafter else ()
        manifest = self._manifest(system, drafters)
        return start_stock(manifest, self._speculative(system, manifest), log, environment)

    def prepare(self, system: System) -> None:
        """Measures the profile that it needs, where there is none yet; that wants a machine without servers."""
        if self.profiled and system.kind is SystemKind.OURS:
            self._profile(system, system.pool)
        if self.profiled and system.kind is SystemKind.TABLE:
            self._profile(system, (system.drafter,))

    def _speculative(self, system: System, manifest: Path) -> dict[str, Any] | None:
        if system.kind is SystemKind.STOCK:
            return None
        if system.kind is SystemKind.STATIC:
            return stock_drafter(manifest, system.draft_tokens)
        table = self._table(system)
        return {
            **stock_drafter(manifest, max(1, *(length for *_, length in table))),
            "num_speculative_tokens_per_batch_size": table,
        }

    def _table(self, system: System) -> list[tuple[int, int, int]]:
        if not self.profiled:
            raise ProfileError(f"{system.name} needs a profile, and this run makes none")
        return table_of(self._profile(system, (system.drafter,)), system, self.testbed.max_draft_tokens)

    def _profile(self, system: System, drafters: tuple[str, ...]) -> ProfilingResult:
        manifest = self._manifest(system, self._profiled_with(drafters))
        return profile_once(manifest, self._profile_folder(system, drafters))

    def _profile_folder(self, system: System, drafters: tuple[str, ...]) -> Path:
        names = "-".join(self._profiled_with(drafters))
        return self.folder / f"profile-{names}-{system.chunk_tokens or 'default'}"

    def _profiled_with(self, drafters: tuple[str, ...]) -> tuple[str, ...]:
        """One measurement serves many systems, but no pool hosts two models that draft."""
        return self.pool if set(drafters) <= set(self.pool) else drafters

    def _manifest(self, system: System, pool: tuple[str, ...], tpot_s: Mapping[str, float] | None = None) -> Path:
        manifest = with_pool(base_manifest(self.testbed), pool)
        if system.chunk_tokens is not None:
            manifest = with_chunk(manifest, system.chunk_tokens)
        if tpot_s:
            manifest = with_classes(manifest, tpot_s)
        return write_manifest(manifest, self.folder / f"{system.name}-{'-'.join(pool) or 'none'}.yaml")


def table_of(profile: ProfilingResult, system: System, most: int) -> list[tuple[int, int, int]]:
    """Raises ProfileError when the system's drafter was not profiled."""
    drafters = {drafter.name: drafter for drafter in profile.drafters}
    if profile.target is None or system.drafter not in drafters:
        raise ProfileError(f"{system.name}: the profile has no costs of {system.drafter!r}")
    return draft_length_table(
        profile.target, drafters[system.drafter], acceptance=system.acceptance, context_tokens=CONTEXT_TOKENS,
        largest_batch=LARGEST_BATCH, most=most,
    )  # fmt: skip
