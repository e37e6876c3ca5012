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
def test_code_is_portable_if_the_cpu_has_the_instructions(
    machine: pytest.MonkeyPatch, kind: str, info: str, name: str | None
) -> None:
    """A pod would crash at its first step on an instruction that the CPU lacks."""
    machine.setattr("platform.machine", lambda: kind)
    processor.CPU_INFO.write_text(info)
    assert processor.portable_cpu_variables({}).get("NUMBA_CPU_NAME") == name
    assert processor.portable_cpu_variables({"NUMBA_CPU_FEATURES": "+avx"}) == {}, "the user chose features"


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("info", "able"), [(V3, False), (V3.format("avx512_bf16"), True), (ARM.format("bf16"), True)])
def test_cpu_name_notes_missing_bfloat16(info: str, able: bool) -> None:
    processor.CPU_INFO.write_text(f"model name\t: EPYC\n{info}")
    assert processor.multiplies_bfloat16() is able
    assert processor.cpu_name() == ("EPYC" if able else "EPYC without bfloat16"), "profiles of the two differ"


@pytest.mark.usefixtures("machine")
def test_machine_without_cpu_info_has_no_bfloat16() -> None:
    assert not processor.multiplies_bfloat16()
    assert processor.cpu_name() == "cpu without bfloat16"
