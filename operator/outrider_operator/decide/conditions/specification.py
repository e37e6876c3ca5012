"""Condition SpecValid: what only the cluster can hold against a spec."""

from __future__ import annotations

from outrider_crds.spec import MetricsSource, SpeculativeServiceSpec
from outrider_crds.status import Reason

from outrider_operator.decide.conditions.verdict import Verdict, false, true
from outrider_operator.decide.ownership import conflicts, controller_name
from outrider_operator.decide.reading import cut
from outrider_operator.model import Observed, Settings, child_names


def spec_verdict(observed: Observed, settings: Settings) -> Verdict:
    """False means that the children stay as they are; the pods serve on."""
    spec = observed.parsed
    if isinstance(spec, str):
        return false(Reason.INVALID_SPEC, cut(f"The spec does not fit this release of Outrider: {spec}.", 2048))
    return _host_paths(spec, settings) or _prometheus(spec, settings) or _conflict(observed) or _rejected(observed)


def _host_paths(spec: SpeculativeServiceSpec, settings: Settings) -> Verdict | None:
    """Model sources and podTemplate.volumes alike: both reach the node's files."""
    if settings.allow_host_path:
        return None
    models = {"target": spec.target, **{f"draftPool[{d.name}]": d.neural.model for d in spec.draft_pool if d.neural}}
    where = [f"{name}.source" for name, model in models.items() if model.source.host_path is not None]
    where += [f"podTemplate.volumes[{v.name}]" for v in spec.pod_template.volumes if v.host_path is not None]
    if not where:
        return None
    return false(
        Reason.HOST_PATH_FORBIDDEN,
        f"spec.{where[0]} names a folder of the node, which this installation does not allow. Use a "
        "PersistentVolumeClaim, or install the chart with allowHostPath=true.",
    )


def _prometheus(spec: SpeculativeServiceSpec, settings: Settings) -> Verdict | None:
    if spec.metrics.source is not MetricsSource.PROMETHEUS or settings.prometheus_configured:
        return None
    return false(
        Reason.PROMETHEUS_NOT_CONFIGURED,
        "spec.metrics.source is Prometheus, and this installation names none. Use metrics.source: Pods, or install "
        "the chart with prometheus.url.",
    )


def _conflict(observed: Observed) -> Verdict | None:
    found = conflicts(observed, child_names(observed.name))
    if not found:
        return None
    kind, name = found[0]
    owner = controller_name(observed.children[found[0]])
    whose = f"belongs to {owner}" if owner else "was not made by Outrider"
    return false(
        Reason.NAME_CONFLICT,
        f"{kind} {name} {whose} and is left alone. Delete it, or give the SpeculativeService another name.",
    )


def _rejected(observed: Observed) -> Verdict:
    if not observed.rejections:
        return true(Reason.ACCEPTED, "The spec is accepted.")
    first = observed.rejections[0]
    return false(
        Reason.CHILD_REJECTED,
        cut(f"The API server refuses {first.kind} {first.name}: {first.message.rstrip('.')}. Correct the spec.", 2048),
    )
