"""Messages to a user that runs a manifest without Kubernetes."""

from __future__ import annotations

import pytest
from outrider_crds.manifest import ManifestError, load_manifest
from outrider_crds.rules import RULES, violations

from tests import corpus

GOOD = corpus.good()
BAD = corpus.bad()


@pytest.mark.parametrize("name", GOOD)
def test_a_good_manifest_is_read(name: str) -> None:
    """Every manifest that the API server takes, `serve -f` takes."""
    service = load_manifest(GOOD[name])
    assert list(violations(service)) == []


@pytest.mark.parametrize("name", BAD)
def test_a_bad_manifest_is_refused_with_its_sentence(name: str) -> None:
    """The refusal names field and remedy; the corpus holds the words."""
    manifest = BAD[name]
    assert manifest.serve, "the manifest's first lines must say what to expect"
    with pytest.raises(ManifestError) as refusal:
        load_manifest(manifest.text)
    assert manifest.serve in str(refusal.value)


def test_every_rule_has_a_bad_manifest() -> None:
    """A rule that no manifest breaks has never been seen to work. Those about a change are seen on the API server."""
    refusals = []
    for manifest in BAD.values():
        try:
            load_manifest(manifest.text)
        except ManifestError as error:
            refusals.append(str(error))
    proven = "".join(refusals)
    unproven = [rule.cel for rule in RULES if rule.message not in proven and "oldSelf" not in rule.cel]
    assert unproven == []


def test_all_problems_are_reported_at_once() -> None:
    """A user corrects a manifest once, not once for each mistake."""
    with pytest.raises(ManifestError) as refusal:
        load_manifest(
            """
            apiVersion: outrider.dev/v1alpha1
            kind: SpeculativeService
            metadata: {name: Chat}
            spec:
              target: {name: llama}
              accelerator: {products: [cpu], count: 2}
              rollout: {maxSurge: 0}
              sloClasses: [{name: a, tpot: 0s}]
            """
        )
    starts = [problem.split(": ")[0] for problem in refusal.value.problems]
    assert sorted(starts) == [
        "metadata.name",
        "spec.accelerator.count",
        "spec.rollout.maxUnavailable",
        "spec.sloClasses[0].tpot",
    ]


def test_the_service_is_found_among_other_documents() -> None:
    """A file may hold the Secret that the service needs; two services are one too many."""
    secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: hub-token}\n"
    assert load_manifest(f"{secret}---\n{GOOD['least']}").metadata.name == "chat"
    with pytest.raises(ManifestError, match="2 documents of kind SpeculativeService"):
        load_manifest(f"{GOOD['least']}\n---\n{GOOD['full']}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "0 documents of kind SpeculativeService"),
        ("- a\n- b\n", "0 documents of kind SpeculativeService"),
        ("apiVersion: outrider.dev/v1\nkind: SpeculativeService\n", "apiVersion: must be outrider.dev/v1alpha1"),
        ("apiVersion: outrider.dev/v1alpha1\nkind: SpeculativeService\n", "metadata.name: is required"),
        ("kind: SpeculativeService\nmetadata: [\n", "is not YAML: line 3"),
        ("a: !!python/object:os.system {}\n", "is not YAML"),
        ("\x00", "is not YAML"),
        ("&a [*a]: b\n", "is not YAML"),
        ("metadata: &q {a: *q}\n", "holds what JSON cannot: Circular reference"),
        ("spec: {a: !!set {b}}\n", "holds what JSON cannot"),
        ('spec: {a: !!binary "//4="}\n', "holds what JSON cannot"),
        ("[" * 3000, "is nested too deeply"),
        ("{a: " * 3000, "is nested too deeply"),
    ],
)
def test_what_is_no_service_at_all_is_refused(text: str, sentence: str) -> None:
    """Nothing a user passes with -f ends in a traceback."""
    with pytest.raises(ManifestError, match=r"manifest:|metadata|apiVersion") as refusal:
        load_manifest(text)
    assert sentence in str(refusal.value)
