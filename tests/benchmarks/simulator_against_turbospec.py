"""TurboSpec's tables 4 and 5 beside the simulator: mean request latency over the rate, by draft length.

    python -m tests.benchmarks.simulator_against_turbospec

writes results/simulator_against_turbospec.json and .png. The direction is what is looked for: who is best at which
rate, and where static lengths lose. The costs come from data sheets (profiles `derived`), so the seconds are not the
paper's. Lengths and acceptance are the paper's tables 2 and 3 for ShareGPT; its draft is a 160M model.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
from outrider_runtime.simulate import profiles
from outrider_runtime.simulate.assumptions import read_acceptance
from outrider_runtime.simulate.load import Wanted, read_load
from outrider_runtime.simulate.pod import Pod, read_pod
from outrider_runtime.simulate.policies import NO_SPECULATION, OURS, PolicyChoice
from outrider_runtime.simulate.run import Scenario, simulate
from outrider_runtime.simulate.workload import Lengths

RESULTS = Path(__file__).parent / "results"
MANIFEST = """
apiVersion: outrider.dev/v1alpha1
kind: SpeculativeService
metadata: {name: vicuna}
spec:
  target: {name: %(target)s}
  draftPool:
  - {name: draft, method: DraftModel, draftModel: {model: {name: llama-160m}}}
  accelerator: {products: [%(product)s], count: %(gpus)d}
  engine: {tensorParallelSize: %(gpus)d}
  speculation: {maxDraftTokens: 7}
"""
DURATION_S = 60.0
SEED = 1
POLICIES = {
    "Org": NO_SPECULATION,
    **{f"k={length}": PolicyChoice(f"k = {length}", length, "draft") for length in (1, 3, 5, 7)},
    "TS": OURS,
}


@dataclass(frozen=True)
class Setting:
    table: int
    model: str
    profile: str
    product: str
    gpus: int
    output_tokens: int
    acceptance: float
    paper: dict[float, tuple[float, ...]]
    """Rate -> mean latency in seconds, in the order of POLICIES."""


SETTINGS = (
    Setting(
        4, "Vicuna-7B", "vicuna-7b-l40s-batch-expansion", "NVIDIA-L40S", 1, 256, 0.62,
        {
            1: (2.63, 1.85, 1.36, 1.34, 1.31, 1.34),
            4: (3.39, 2.51, 1.91, 1.92, 2.05, 1.90),
            8: (4.86, 3.78, 2.91, 3.25, 4.19, 2.98),
            16: (13.73, 15.91, 15.01, 23.50, 33.40, 13.62),
        },
    ),
    Setting(
        5, "Vicuna-33B", "vicuna-33b-2xh100-batch-expansion", "NVIDIA-H100-80GB-HBM3", 2, 274, 0.59,
        {
            1: (2.88, 2.14, 1.73, 1.73, 1.81, 1.73),
            4: (3.73, 3.06, 2.51, 2.65, 3.10, 2.65),
            8: (4.69, 4.61, 4.24, 6.67, 12.63, 4.44),
            16: (11.21, 24.31, 32.82, 47.29, 62.22, 11.67),
        },
    ),
)  # fmt: skip
PROMPT_TOKENS = 227


@dataclass(frozen=True)
class Row:
    table: int
    model: str
    rate: float
    paper_s: dict[str, float]
    simulated_s: dict[str, float]
    paper_best: str
    simulated_best: str
    ours_against_best: float
    """Our simulated latency over that of the best fixed length, none included."""
    ours_verified_length: float


def measure(setting: Setting, pod: Pod, rate: float) -> Row:
    acceptance = read_acceptance(pod, [f"draft={setting.acceptance}"], [])
    load = read_load(Wanted(None, rate, None, DURATION_S, Lengths(PROMPT_TOKENS, setting.output_tokens), {}, SEED))
    scenario = Scenario(pod, acceptance.rules, acceptance.hit_rates, load.source, DURATION_S, SEED)
    figures = {name: simulate(scenario, choice).figures for name, choice in POLICIES.items()}
    simulated = {name: round(one.latency_mean_s, 2) for name, one in figures.items()}
    paper = dict(zip(POLICIES, setting.paper[rate], strict=True))
    best = _best_fixed(simulated)
    return Row(
        setting.table, setting.model, rate, paper, simulated, _best_fixed(paper), best,
        round(figures["TS"].latency_mean_s / figures[best].latency_mean_s, 3),
        round(figures["TS"].mean_verified_length, 2),
    )  # fmt: skip


def _best_fixed(latencies: dict[str, float]) -> str:
    fixed = {name: seconds for name, seconds in latencies.items() if name != "TS"}
    return min(fixed, key=lambda name: fixed[name])


def pod_of(setting: Setting) -> Pod:
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder, "service.yaml")
        manifest.write_text(MANIFEST % {"target": setting.model, "product": setting.product, "gpus": setting.gpus})
        return read_pod(manifest, profiles.load(setting.profile))


def plot(rows: list[Row], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row.model for row in rows))
    figure, axes = pyplot.subplots(len(models), 2, figsize=(11, 4 * len(models)), squeeze=False)
    for line, model in zip(axes, models, strict=True):
        own = [row for row in rows if row.model == model]
        for axis, source in zip(line, ("paper", "simulated"), strict=True):
            for policy in POLICIES:
                latencies = [getattr(row, f"{source}_s")[policy] for row in own]
                axis.plot([row.rate for row in own], latencies, marker="o", label=policy)
            axis.set(xscale="log", yscale="log", xlabel="requests a second", ylabel="mean latency, s")
            axis.set_title(f"{model}: {source}")
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    RESULTS.mkdir(exist_ok=True)
    rows = []
    for setting in SETTINGS:
        pod = pod_of(setting)
        for rate in setting.paper:
            rows.append(measure(setting, pod, rate))
            print(rows[-1], flush=True)
    document = {"label": "derived", "duration_s": DURATION_S, "rows": [asdict(row) for row in rows]}
    (RESULTS / "simulator_against_turbospec.json").write_text(json.dumps(document, indent=2) + "\n")
    plot(rows, RESULTS / "simulator_against_turbospec.png")


if __name__ == "__main__":
    main()
