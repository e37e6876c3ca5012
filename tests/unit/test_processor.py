"""What a CPU can do, as Linux says it."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_runtime import processor

V3 = "processor\t: 0\nflags\t\t: fpu abm avx2 bmi1 bmi2 f16c fma movbe {}\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd {}\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    return monkeypatch


@pytest.mark.parametrize(
    ("kind", "info", "name"),
    [
        ("x86_64", V3, "x86-64-v3"),
        ("x86_64", V3.replace("bmi2", ""), None),  # a virtual machine may mask any
        ("x86_64", "", None),
        ("aarch64", ARM, "generic"),
        ("riscv64", "", None),
    ],
)
def test_code_is_for_any_server_that_has_what_it_needs(
    machine: pytest.MonkeyPatch, kind: str, info: str, name: str | None
) -> None:
    """Else a pod would end at its first step: an instruction that the CPU does not know."""
    machine.setattr("platform.machine", lambda: kind)
    processor.CPU_INFO.write_text(info)
    assert processor.any_server({}).get("NUMBA_CPU_NAME") == name
    assert processor.any_server({"NUMBA_CPU_FEATURES": "+avx"}) == {}, "the user has said it"


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("info", "able"), [(V3, False), (V3.format("avx512_bf16"), True), (ARM.format("bf16"), True)])
def test_a_cpu_tells_whether_it_multiplies_bfloat16(info: str, able: bool) -> None:
    processor.CPU_INFO.write_text(f"model name\t: EPYC\n{info}")
    assert processor.multiplies_bfloat16() is able
    assert processor.cpu_name() == ("EPYC" if able else "EPYC without bfloat16"), "a profile is of the one or the other"


@pytest.mark.usefixtures("machine")
def test_a_machine_that_does_not_say_is_taken_to_be_able_to_nothing() -> None:
    assert not processor.multiplies_bfloat16()
    assert processor.cpu_name() == "cpu without bfloat16"
