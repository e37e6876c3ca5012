"""`outrider-simulate` as a user calls it: one command, a table, files, and errors that say what to do."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from outrider_runtime.simulate import service_manifest
from outrider_runtime.simulate.main import main

from tests.unit.simulate.conftest import MANIFEST

LOAD = ("--rate", "8", "--duration", "1s", "--prompt-tokens", "60", "--output-tokens", "16")
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02d}.5000000,{40 + second},{10 + second}\n" for second in range(12)
)
without_the_extra = pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is not None, reason="the extra `bench` is installed"
)


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    main([str(argument) for argument in arguments])
    return capsys.readouterr().out


@pytest.mark.usefixtures("short")
@pytest.mark.slow
def test_one_command_gives_origin_of_times_table_and_files(manifest, tmp_path, capsys):
    """It uses shipped worlds: no package has to be installed, and nothing is downloaded."""
    folder = tmp_path / "out"
    out = said(capsys, "--manifest", manifest, "--system", "h100_sxm", *LOAD, "--compare", "--output", folder)
    assert "step times (composed): aiconfigurator-core" in out
    assert "  derived: " in out
    assert "head lifted to 0.7 (synthetic), ngram as recorded" in out
    policies = ["outrider", "plain", *(f"{name}, k = {k}" for name in ("head", "ngram") for k in (1, 3, 5))]
    document = json.loads((folder / "simulation.json").read_text())
    assert [row["policy"] for row in document["figures"]] == policies
    assert all(policy in out for policy in policies)
    assert document["figures"][0]["speedup"] > 1.2
    assert (folder / "simulation.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("short")
@pytest.mark.slow
def test_default_rates_show_where_speculation_stops_paying(manifest, capsys):
    out = said(capsys, "--manifest", manifest, "--system", "h100_sxm", "--output-tokens", "16", "--duration", "1s")
    assert out.count("outrider") == 2
    assert "Speculation pays at every rate" in out


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_attainment_is_by_class_for_ours_and_plain_decoding(manifest, tmp_path, capsys):
    """Plain decoding takes 6.5 ms per token and misses 6 ms; ours does not. No request has the third class."""
    folder = tmp_path / "out"
    out = said(capsys, "--manifest", manifest, "--system", "h100_sxm", *LOAD, "--mix", "tight=1", "--output", folder)
    assert "tight met  loose met" in out
    ours, plain = json.loads((folder / "simulation.json").read_text())["figures"]
    assert ours["attained"][0] > plain["attained"][0]
    assert ours["attained"][1] is None


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_the_same_seed_gives_the_same_figures(manifest, capsys):
    """Figures can be repeated, and another seed gives others."""
    arguments = ("--manifest", manifest, "--system", "h100_sxm", *LOAD)
    tables = [said(capsys, *arguments, "--seed", seed) for seed in (1, 1, 2)]
    assert tables[0] == tables[1] != tables[2]


@pytest.mark.slow
def test_a_trace_runs_at_its_own_pace_or_at_a_rate(manifest, tmp_path, capsys):
    """Twelve requests in 11 s; at 100 a second the same in a tenth of a second."""
    trace = tmp_path / "azure.csv"
    trace.write_text(TRACE)
    base = ("--manifest", manifest, "--system", "h200_sxm", "--trace", trace)
    main([*map(str, base)])
    assert "12 requests at 1.09 a second" in capsys.readouterr().err
    main([*map(str, base), "--rate", "100"])
    assert "12 requests at 100 a second" in capsys.readouterr().err


MEASURED_TARGET = {
    "key": "k", "model": "llama-3.1-8b", "product": "gpu", "costs": {"uniform": {"constantS": 0.01}},
    "errorPercent": 1.0, "measuredAt": "2026-01-01T00:00:00Z",
}  # fmt: skip
MEASURED_HEAD = {
    "key": "h", "name": "head", "cost": {"constantS": 1e-3}, "autoregressive": True, "errorPercent": 1.0,
    "measuredAt": "2026-01-01T00:00:00Z",
}  # fmt: skip


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "document",
    [
        {"target": MEASURED_TARGET, "drafters": [MEASURED_HEAD]},
        {"result": {"target": MEASURED_TARGET, "drafters": [MEASURED_HEAD]}},
        {
            "kind": "ConfigMap",
            "data": {"target.json": json.dumps(MEASURED_TARGET), "h.json": json.dumps(MEASURED_HEAD)},
        },
    ],
    ids=["result", "report", "ConfigMap"],
)
def test_a_measured_profile_is_simulated_and_says_what_it_lacks(document, manifest, tmp_path, capsys):
    """Whichever of its three forms a user has; the drafters are those of its names."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    out = said(capsys, "--manifest", manifest, "--profile", path, *LOAD)
    assert "step times (measured): outrider-profile, vLLM ?, 2026-01-01" in out
    assert "note: drafter 'ngram' is left out: profile has step times for head only." in out


@pytest.mark.parametrize(
    "text",
    [
        "[]", "{target: 3}", "{kind: ConfigMap, data: {target.json: nothing}}", "a: b: c", "a: 2026-99-99", "[" * 3000,
        "{kind: ConfigMap, data: [1]}", "{kind: ConfigMap, data: text}", "{kind: ConfigMap, data: {target.json: 1}}",
        "{kind: ConfigMap, data: {target.json: '" + "[" * 100000 + "'}}",
        json.dumps({"target": MEASURED_TARGET, "drafters": [MEASURED_HEAD, MEASURED_HEAD]}),
        json.dumps({"target": MEASURED_TARGET, "drafters": [{**MEASURED_HEAD, "cost": {}}]}),
        json.dumps({"target": {**MEASURED_TARGET, "costs": {"uniform": {"constantS": 1e-300}}}}),
    ],
)  # fmt: skip
def test_a_file_that_is_no_profile_is_refused_with_its_name(text, manifest, tmp_path, capsys):
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    assert str(path) in failure(capsys, "--manifest", manifest, "--profile", path)


@pytest.mark.usefixtures("short")
def test_a_world_that_ships_is_simulated_by_name(capsys):
    """SmolLM2 on CPU cores, its proposals as they were recorded."""
    example = Path(__file__).parents[3] / "examples" / "smollm2-cpu.yaml"
    load = ("--rate", "0.5", "--output-tokens", "16", "--prompt-tokens", "60", "--acceptance", "recorded")
    out = said(capsys, "--manifest", example, "--profile", "smollm2-135m-cpu", *load)
    assert "step times (measured)" in out
    assert "as recorded" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--profile", "h900"), "h900 is no file, and no world is called so; known are"),
        (("--system", "h100_sxm", "--profile", "h900"), "not allowed with"),
        ((), "one of the arguments --system --profile is required"),
        (("--system", "h100_sxm", "--trace", "/nowhere.csv"), "cannot read the trace /nowhere.csv"),
        (
            ("--system", "h100_sxm", "--acceptance", "ngram=0.5"),
            "'ngram' is no simulated drafter with a model; there are head",
        ),
        (("--system", "h100_sxm", "--acceptance", "1.5"), "'1.5' is neither a share between 0 and 1 nor `recorded`"),
        (("--system", "h100_sxm", "--mix", "gold=1"), "class 'gold' is not in the manifest; it has tight, loose"),
        (("--system", "h100_sxm", "--mix", "tight=0"), "the weights add up to nothing"),
        (("--system", "h100_sxm", "--mix", "tight"), "write CLASS=WEIGHT"),
        (("--system", "h100_sxm", "--mix", "tight=1e308,loose=1e308"), "a weight of 0 to 1e+06"),
        (("--system", "h100_sxm", "--mix", "tight=1,tight=0"), "class 'tight' has two weights"),
        (("--system", "h100_sxm", "--output", ""), "name a folder"),
        (("--profile", "/"), "/ is no file"),
        (("--profile", "/dev/null"), "/dev/null is no file"),
        *(
            (
                ("--system", "h100_sxm", "--rate", rate),
                f"{rate} is not a number of requests a second from 1e-06 to 1e+06",
            )
            for rate in ("0", "inf", "nan", "many", "1e300", "1e-300", "1e9")
        ),
        (("--system", "h100_sxm", "--rate", "1e6"), "2e+07 requests, and 1000000 at most are simulated: give a lower"),
        (("--system", "h100_sxm", "--rate", "1", "--duration", f"{'9' * 400}h"), "at most are simulated: give a lower"),
        *(
            (("--system", "h100_sxm", flag, number), f"{number} is not a whole number from")
            for flag in ("--prompt-tokens", "--output-tokens", "--seed")
            for number in ("1" + "0" * 23, "9" * 5000, "-1", "1.5", "²")
        ),
        (("--system", "h100_sxm", "--duration", "ten"), "'ten' is not a duration"),
        (
            ("--system", "h100_sxm", "--rate", "1", "--prompt-tokens", "5000"),
            "does not fit: this deployment takes 2048",
        ),
    ],
)
def test_wrong_input_ends_with_code_2_and_a_sentence(manifest, capsys, arguments, words):
    """What was wrong, and what would do."""
    assert words in failure(capsys, "--manifest", manifest, *arguments)


@pytest.mark.usefixtures("short")
def test_too_many_requests_are_refused_before_the_first_rate(manifest, capsys):
    words = failure(
        capsys, "--manifest", manifest, "--system", "h100_sxm", "--output-tokens", "16", "--duration", "99h"
    )
    assert "at most are simulated" in words
    assert "simulating" not in words


@pytest.mark.parametrize("tokens", ["many", "0", "1" + "0" * 23])
def test_a_trace_with_a_bad_row_is_refused_with_its_line(tokens, manifest, tmp_path, capsys):
    trace = tmp_path / "azure.csv"
    trace.write_text(TRACE + f"2023-11-16 18:18:00,{tokens},3\n")
    assert "azure.csv, line 14" in failure(capsys, "--manifest", manifest, "--system", "h100_sxm", "--trace", trace)


def test_a_trace_at_one_instant_has_no_pace(manifest, tmp_path, capsys):
    """Spreadsheets write it with a byte-order mark."""
    trace = tmp_path / "azure.csv"
    trace.write_text("\n".join(TRACE.splitlines()[:2]), encoding="utf-8-sig")
    words = failure(capsys, "--manifest", manifest, "--system", "h100_sxm", "--trace", trace)
    assert "no two arrivals at different times" in words


@pytest.mark.parametrize("folder", ["/proc/x", "/proc", "file", "file/below"])
def test_unwritable_folder_is_refused_before_simulation(folder, manifest, tmp_path, capsys):
    (tmp_path / "file").touch()
    words = failure(capsys, "--manifest", manifest, "--system", "h100_sxm", *LOAD, "--output", tmp_path / folder)
    assert f"--output {tmp_path / folder}: no folder to write to" in words
    assert "simulating" not in words


@without_the_extra
@pytest.mark.parametrize("system", ["foo", ""])
@pytest.mark.parametrize("manifest_of", ["meta-llama/Llama-3.1-8B-Instruct", "someone/Else-1B"])
def test_unknown_system_is_refused_with_the_known_ones(system, manifest_of, tmp_path, capsys):
    path = tmp_path / "service.yaml"
    path.write_text(MANIFEST.replace("meta-llama/Llama-3.1-8B-Instruct", manifest_of))
    words = failure(capsys, "--manifest", path, "--system", system)
    assert "no step times ship for" in words
    assert "meta-llama/Llama-3.1-8B-Instruct on 1 x a100_sxm" in words


@without_the_extra
def test_system_without_shipped_times_says_what_to_install(manifest, capsys):
    words = failure(capsys, "--manifest", manifest, "--system", "b200_sxm")
    assert "pip install '.[bench]' in a checkout" in words
    assert "meta-llama/Llama-3.1-8B-Instruct on 1 x h200_sxm" in words


def test_a_manifest_that_is_none_is_refused_with_its_fields(tmp_path, capsys):
    """The error is that of serve -f; no model has to be on this machine."""
    broken = tmp_path / "broken.yaml"
    broken.write_text(MANIFEST.replace("tpot: 6ms", "tpot: soon"))
    assert "spec.sloClasses[0].tpot" in failure(capsys, "--manifest", broken, "--system", "h100_sxm")
    assert "cannot read" in failure(capsys, "--manifest", tmp_path / "missing.yaml", "--system", "h100_sxm")
    assert "--manifest" in failure(capsys, "--system", "h100_sxm")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *(
            (f"--max-num-seqs={number}", f"--max-num-seqs={number} is not a whole number from 1 to 16384")
            for number in ("many", "0", "²", "9" * 22, "9" * 200)
        ),
        *(
            (f"--max-num-batched-tokens={number}", "is not a whole number from 16 to 1048576")
            for number in ("1", "15", "9" * 22)
        ),
        (
            "--max-num-seqs=65, --max-num-batched-tokens=64",
            "vLLM does not start where --max-num-seqs (65) is more than --max-num-batched-tokens (64)",
        ),
    ],
)
def test_engine_arguments_that_cannot_be_simulated_are_refused(arguments, words, tmp_path, capsys):
    path = tmp_path / "service.yaml"
    path.write_text(MANIFEST.replace("--max-num-seqs=16", arguments))
    assert words in failure(capsys, "--manifest", path, "--system", "h100_sxm")


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("argument", "requests"), [("--max-num-seqs=1", 1), ("--max-num-batched-tokens=16", 16)])
def test_the_smallest_engine_ends(argument, requests, tmp_path, capsys):
    """One request at a time, or a prompt in many steps. No more requests run than a step has tokens, as in vLLM."""
    path = tmp_path / "service.yaml"
    path.write_text(MANIFEST.replace("--max-num-seqs=16", argument))
    assert service_manifest.read(path).limits.max_requests == requests
    assert "Speculation" in said(capsys, "--manifest", path, "--system", "h100_sxm", *LOAD[2:])


@pytest.mark.slow
def test_no_engine_has_to_be_installed():
    """Neither torch nor vLLM is imported, and matplotlib only to plot."""
    code = (
        "import sys, outrider_runtime.simulate.main; sys.exit(bool({'torch', 'vllm', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
