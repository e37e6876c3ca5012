"""The concern of profiles: measuring Jobs, stored profiles, condition ProfilesReady, status.profiles."""

from __future__ import annotations

from outrider_crds.status import ConditionType

from outrider_operator.decide.conditions.profile_conditions import profile_statuses, profiles_ready
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.outcome import ConcernOutcome, earliest_s, merge
from outrider_operator.decide.pod_states import LOOK_AGAIN_S
from outrider_operator.decide.pod_troubles import is_being_created
from outrider_operator.decide.profiling.jobs import plan_jobs
from outrider_operator.decide.profiling.product_profiles import stale_in_s
from outrider_operator.decide.profiling.profile_maps import plan_profile_maps
from outrider_operator.decide.profiling.shared_profiles import plan_shared_profiles
from outrider_operator.decide.service_world import ServiceWorld
from outrider_operator.decide.workloads.serving_deployment import pods_are_placed


def profile(world: ServiceWorld, intent: Intent) -> ConcernOutcome:
    """Profiles and their Jobs. Nothing is measured or deleted for a refused spec."""
    report = ConcernOutcome(
        conditions={ConditionType.PROFILES_READY: profiles_ready(intent.view, intent.profiles)},
        status={"profiles": profile_statuses(intent.view, intent.profiles)},
        wake_after_s=_next_look_s(world, intent),
    )
    return merge([report, _writes(world, intent)]) if intent.problem is None else report


def _writes(world: ServiceWorld, intent: Intent) -> ConcernOutcome:
    view, profiles = intent.view, intent.profiles
    # A Job that measures would download the models as well.
    is_downloading = intent.prefetch is not None and intent.prefetch.holds
    is_next = pods_are_placed(world.children, intent.desired) and not is_downloading
    jobs = plan_jobs(view, profiles, pods_are_placed=is_next)
    ended = ConcernOutcome(stored=frozenset(job.name for job in jobs.delete))
    return merge([plan_profile_maps(view, profiles), plan_shared_profiles(view, profiles), jobs, ended])


def _next_look_s(world: ServiceWorld, intent: Intent) -> float | None:
    """Seconds until a profile is too old, or until the next look at a Job whose progress no watch delivers."""
    aging = (stale_in_s(intent.desired, profile.keys, profile.store, world.at) for profile in intent.profiles)
    retries = (at - world.at for profile in intent.profiles for at in profile.again_at)
    is_polling = any(profile.job_is_active and profile.pod is None for profile in intent.profiles)
    is_polling = is_polling or any(is_being_created(pod) for pod in world.observed.job_pods)
    return earliest_s((*aging, *retries, LOOK_AGAIN_S if is_polling else None))
