"""`outrider-simulate` as a user calls it: one command, a table, files, and errors that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from outrider_runtime.simulate.main import main

MANIFEST = """
apiVersion: outrider.dev/v1alpha1
kind: SpeculativeService
metadata: {name: chat}
spec:
  target: {name: meta-llama/Llama-3.1-8B-Instruct}
  draftPool:
  - {name: eagle, method: Eagle, eagle: {model: {name: head}}}
  - {name: lookup, method: PromptLookup, promptLookup: {}}
  accelerator: {products: [NVIDIA-H100-80GB-HBM3]}
  sloClasses:
  - {name: tight, tpot: 6ms}
  - {name: loose, tpot: 200ms}
  engine: {maxModelLen: 2048, extraArgs: [--max-num-seqs=16]}
"""
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02d}.5000000,{40 + second},{10 + second}\n" for second in range(12)
)


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    path = tmp_path / "service.yaml"
    path.write_text(MANIFEST)
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_one_command_gives_a_table_and_files(manifest, tmp_path, capsys):
    """The label stands on both, and so does what was assumed."""
    folder = tmp_path / "out"
    main([
        "--manifest", manifest, "--profile", "llama-3.1-8b-h100", "--rate", "4", "--duration", "2s", "--compare",
        "--output-tokens", "20", "--prompt-tokens", "50", "--mix", "tight=60,loose=40", "--output", str(folder),
    ])  # fmt: skip
    out = capsys.readouterr().out
    assert "llama-3.1-8b-h100 (derived)" in out
    assert "simulated, with a derived profile" in out
    assert "(assumed; see --acceptance)" in out
    rows = [line.split("  ")[0] for line in out.splitlines()]
    for policy in ("outrider", "no speculation", "eagle, k = 1", "eagle, k = 5", "lookup, k = 3"):
        assert policy in rows
    document = json.loads((folder / "simulation.json").read_text())
    assert document["label"] == "derived"
    ours = document["runs"][0]
    assert ours["requests"] > 0
    assert sum(one["requests"] for one in ours["classes"]) == ours["requests"]
    assert len(ours["timeline"]) > 10
    assert (folder / "simulation.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_figures(manifest, capsys):
    """Figures can be repeated, and another seed gives others."""
    arguments = ["--manifest", manifest, "--profile", "llama-3.1-8b-h100", "--concurrency", "4", "--duration", "1s"]
    tables = []
    for seed in ("1", "1", "2"):
        main([*arguments, "--seed", seed])
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] != tables[2]


def test_a_trace_runs_at_its_own_pace_or_at_a_rate(manifest, trace, capsys):
    """Ten requests of twelve within 10 s; at 100 a second the same in a tenth of a second."""
    base = ["--manifest", manifest, "--profile", "llama-3.1-8b-h200", "--trace", trace]
    main([*base, "--duration", "9500ms"])
    assert "trace.csv: 10 requests in 10 s" in capsys.readouterr().out
    main([*base, "--rate", "100"])
    assert "trace.csv, its gaps scaled: 12 requests in 0 s (109.09 a second)" in capsys.readouterr().out


def test_acceptance_is_taken_by_class_position_and_time(manifest, capsys):
    """And what nothing was said about is marked as assumed."""
    main([
        "--manifest", manifest, "--profile", "llama-3.1-8b-h100", "--rate", "5", "--duration", "1s",
        "--acceptance", "eagle=0.9,0.5", "--acceptance", "eagle/loose=0.2", "--acceptance", "eagle@30s=0.1",
        "--hit-rate", "lookup=0.25",
    ])  # fmt: skip
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("accepted")]
    assert lines == [
        "accepted  lookup accepts 0.60 a position, proposes for 25% of the requests (assumed; see --acceptance)",
        "accepted  eagle accepts 0.90, 0.50 a position",
        "accepted  eagle accepts 0.20 a position for class loose",
        "accepted  eagle accepts 0.10 a position from 30 s on",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "1", "--profile", "h900"], "h900: no such file, and no shipped profile of this name; known are"),
        (["--profile", "llama-3.1-8b-h100"], "what load? give --rate, --trace or --concurrency"),
        (["--rate", "1", "--concurrency", "2"], "leave --trace and --rate out"),
        (["--trace", "/nowhere.csv"], "cannot read the trace /nowhere.csv"),
        (
            ["--rate", "1", "--acceptance", "medusa=0.5"],
            "drafter 'medusa' is not in the manifest; it has eagle, lookup",
        ),
        (["--rate", "1", "--acceptance", "eagle/gold=0.5"], "SLO class 'gold' is not in the manifest; it has tight"),
        (["--rate", "1", "--acceptance", "eagle=1.5"], "'1.5' is not a probability from 0 to 1"),
        (["--rate", "1", "--acceptance", "eagle"], "write DRAFTER=0.7"),
        (["--rate", "1", "--acceptance", "eagle@soon=0.5"], "'soon' is not a duration"),
        (["--rate", "1", "--hit-rate", "eagle=0.5"], "name 'eagle' is not in the manifest; it has lookup"),
        (["--rate", "1", "--mix", "gold=1"], "name 'gold' is not in the manifest; it has tight, loose"),
        (["--rate", "1", "--mix", "tight=0"], "the weights add up to nothing"),
        (["--rate", "0"], "0 is not above 0"),
        (["--rate", "inf"], "inf is not above 0"),
        (["--rate", "1", "--duration", "ten"], "'ten' is not a duration"),
        (["--rate", "0.001", "--duration", "1s"], "no request comes within 1 s"),
    ],
)
def test_wrong_input_ends_with_code_2_and_a_sentence(manifest, capsys, arguments, words):
    """What was wrong, and what would do."""
    base = ["--manifest", manifest, "--profile", "llama-3.1-8b-h100"]
    assert words in failure(capsys, *base, *arguments)


def test_a_manifest_that_is_none_is_refused_with_its_fields(tmp_path, capsys):
    """As serve -f refuses it; no model has to be on this machine."""
    broken = tmp_path / "broken.yaml"
    broken.write_text(MANIFEST.replace("tpot: 6ms", "tpot: soon"))
    common = ("--profile", "llama-3.1-8b-h100", "--rate", "1")
    assert "spec.sloClasses[0].tpot" in failure(capsys, "--manifest", str(broken), *common)
    assert "cannot read" in failure(capsys, "--manifest", str(tmp_path / "missing.yaml"), *common)
    assert "--manifest and one of --system and --profile are needed" in failure(capsys, *common)


def test_a_pool_that_the_profile_knows_nothing_of_is_refused(tmp_path, capsys):
    """No figure rather than one of another pool."""
    path = tmp_path / "service.yaml"
    start, end = MANIFEST.index("  - {name: lookup"), MANIFEST.index("  accelerator")
    path.write_text(MANIFEST[:start] + MANIFEST[end:])
    said = failure(capsys, "--manifest", str(path), "--profile", "llama-3.1-70b-4xh100", "--rate", "1")
    assert "has costs for none of the pool's drafters: drafter 'eagle' is left out" in said


def test_what_the_figures_do_not_cover_is_said(manifest, capsys):
    """A drafter, a target and a number of GPUs that the profile does not know."""
    main(["--manifest", manifest, "--profile", "llama-3.1-70b-4xh100", "--rate", "5", "--duration", "1s"])
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert len(notes) == 3
    assert "step times are those of 'llama-3.1-70b'" in notes[0]
    assert "splits the target over 1 GPU(s); the profile's step times are those of 4" in notes[1]
    assert "'eagle' is left out: the profile has no costs of Eagle, only of DraftModel, PromptLookup" in notes[2]


def test_suffix_decoding_costs_what_prompt_lookup_does_where_the_profile_has_no_own(tmp_path, capsys):
    """And that is said."""
    path = tmp_path / "service.yaml"
    path.write_text(MANIFEST.replace("lookup, method: PromptLookup, promptLookup", "suffix, method: Suffix, suffix"))
    main(["--manifest", str(path), "--profile", "llama-3.1-8b-h100", "--rate", "5", "--duration", "1s"])
    printed = capsys.readouterr().out
    assert "'suffix' is taken to cost what the profile says of PromptLookup" in printed
    assert "suffix accepts 0.60 a position, proposes for 40% of the requests" in printed


def test_no_engine_has_to_be_installed():
    """numpy and pydantic are enough: neither torch nor vLLM is imported, and matplotlib only to plot."""
    code = (
        "import sys, outrider_runtime.simulate.main; sys.exit(bool({'torch', 'vllm', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_held_out_error_can_be_had_without_a_manifest(capsys):
    """`--check-profiles` prints each point, measured and predicted."""
    main(["--check-profiles"])
    out = capsys.readouterr().out
    assert "derived  TurboSpec, h100  llama-2-7b, batch 50" in out
    assert "median absolute error on what was held out" in out
