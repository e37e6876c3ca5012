"""Outrider from an empty machine to judged drafts: cluster, chart, manifest, load, two patches, clean-up.

The demo does what a user would do: helm, kubectl and HTTP requests. The cluster ends with this process, however that
ends, unless --keep is given.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import yaml

from demo.chart import install_outrider
from demo.console import Console
from demo.load import Load
from demo.service import Follower, JsonObject, condition, get, is_measured, is_true, rollout_phase
from setup.steps import REPOSITORY
from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError

MANIFEST = REPOSITORY / "examples" / "smollm2-canary.yaml"
BETTER = REPOSITORY / "examples" / "smollm2-better-draft-patch.yaml"
WORSE = REPOSITORY / "examples" / "smollm2-worse-draft-patch.yaml"
STATE = Path("~/.cache/outrider/demo-cluster")
PHASES = ((1, 20), (8, 20), (1, 20))
"""(concurrent requests, seconds): the load rises past the point where speculation pays, and falls again."""
SHOW_EVERY_S = 10.0
CANARY_USERS = 4
CANARY_TOKENS = 24
"""Most tokens of an answer during a canary: it is judged by requests, so short ones end sooner."""
THINKING_S = 2.0
CANARY_TIMEOUT_S = 1800.0
OVER = ("Successful", "Failed", "Error", "Inconclusive")


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    keep = False  # an interrupted demo leaves nothing behind, whatever the options say
    cluster = Cluster(state=STATE, progress=console.say)
    try:
        console.step("A real Kubernetes on this machine")
        cluster.start(keep=options.keep)
        Demo(console, cluster, yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))).run()
        keep = options.keep
    except (ClusterError, TimeoutError, subprocess.SubprocessError) as error:
        keep = options.keep  # to look at what went wrong
        console.say(f"The demo stops here: {error}")
        _explain(cluster, console)
        return 1
    except KeyboardInterrupt:
        console.say("interrupted")
        return 130
    finally:
        _leave(cluster, console, keep=keep)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the cluster and the service up at the end")
    return parser.parse_args()


class Demo:
    """The steps of the demo on a running cluster."""

    def __init__(self, console: Console, cluster: Cluster, manifest: JsonObject) -> None:
        self._console = console
        self._cluster = cluster
        self._spec = manifest["spec"]
        self._name = manifest["metadata"]["name"]
        self._follow = Follower(cluster.kubectl, console, self._name)

    def run(self) -> None:
        self._install()
        self._apply()
        asyncio.run(self._serve_changing_load())
        asyncio.run(self._patch(BETTER, "Successful"))
        asyncio.run(self._patch(WORSE, "Failed"))
        self._show("-o", "yaml", "--show-managed-fields=false")

    def _install(self) -> None:
        self._console.step("helm install outrider charts/outrider: the operator, under its own service account")
        install_outrider(self._cluster)
        self._console.block(self._cluster.kubectl("get", "pods", "-n", "outrider-system"))

    def _apply(self) -> None:
        self._console.step(f"kubectl apply -f {MANIFEST.relative_to(REPOSITORY)}")
        self._console.block(self._cluster.kubectl("apply", "-f", str(MANIFEST)))
        self._follow.follow_until(
            lambda service: is_true(service, "Ready", "Updated") and is_measured(service),
            timeout_s=600, what="a profiled service with a ready pod",
        )  # fmt: skip
        self._show()

    async def _serve_changing_load(self) -> None:
        self._console.step("Real chat requests at changing load: the draft length follows")
        load = self._load()
        running = asyncio.create_task(load.run())
        for concurrency, duration_s in PHASES:
            self._console.say(f"{concurrency} concurrent request(s) for {duration_s} s")
            load.concurrency = concurrency
            for _ in range(round(duration_s / SHOW_EVERY_S)):
                await asyncio.sleep(SHOW_EVERY_S)
                await asyncio.to_thread(self._show_choice)
        load.stop()
        await running
        await asyncio.to_thread(self._show)
        self._say_outcome(load)

    async def _patch(self, file: Path, outcome: str) -> None:
        """Patch the pool under load and follow its canary. Raises ClusterError if that does not end in `outcome`."""
        self._console.step(
            f"kubectl patch specsvc {self._name} --type=json --patch-file {file.relative_to(REPOSITORY)}"
        )
        load, serving = self._load(), self._serving_pods()
        load.max_tokens = CANARY_TOKENS
        running = asyncio.create_task(load.run())
        try:
            ended = await asyncio.to_thread(self._canary, file, load)
        except asyncio.CancelledError:
            self._follow.stop()
            raise
        finally:
            load.stop()
            await running
        await asyncio.to_thread(self._show)
        self._console.say(ended["status"]["rollout"]["message"])
        self._say_outcome(load)
        if outcome == "Failed" and self._serving_pods() != serving:
            raise ClusterError(f"a pod that served before {file.name} was replaced")
        if rollout_phase(ended) != outcome:
            raise ClusterError(f"the canary of {file.name} ended as {rollout_phase(ended)}, not as {outcome}")
        if load.errors:
            raise ClusterError(f"{len(load.errors)} request(s) failed during the rollout; the first: {load.errors[0]}")

    def _canary(self, file: Path, load: Load) -> JsonObject:
        """Patch the pool; return the service once the canary is over.

        Pods that start share the cores with those that serve. So there is one user with pauses, and more users only
        while the canary measures.
        """
        patch = ("patch", "specsvc", self._name, "--type=json", "--patch-file", str(file), "-o", "yaml")
        generation = yaml.safe_load(self._cluster.kubectl(*patch))["metadata"]["generation"]

        def follow_to_phase(*phases: str) -> JsonObject:
            return self._follow.follow_until(
                lambda service: rollout_phase(service, generation) in (*phases, *OVER),
                timeout_s=CANARY_TIMEOUT_S,
                what=f"a rollout in phase {', '.join((*phases, *OVER))}",
            )

        load.concurrency, load.thinking_s = 1, THINKING_S
        follow_to_phase("Measuring", "Promoting")
        load.concurrency, load.thinking_s = CANARY_USERS, 0.0
        follow_to_phase("Promoting")
        load.concurrency, load.thinking_s = 1, THINKING_S
        return follow_to_phase()

    def _serving_pods(self) -> set[str]:
        """Return the uids of the serving pods, without those of a canary."""
        selector = f"outrider.dev/service={self._name},outrider.dev/revision,outrider.dev/track!=canary"
        pods = get(self._cluster.kubectl, "pods", "-l", selector).get("items", [])
        return {pod["metadata"]["uid"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}

    def _load(self) -> Load:
        address = self._cluster.get("service", self._name)["spec"]["clusterIP"]
        classes = tuple(entry["name"] for entry in self._spec["sloClasses"])
        return Load(f"http://{address}", self._spec["target"]["name"], classes)

    def _show(self, *how: str) -> None:
        self._console.block(self._cluster.kubectl("get", "specsvc", self._name, *how))

    def _show_choice(self) -> None:
        service = self._follow.look()
        active = condition(service, "SpeculationActive")
        self._show()
        self._console.say(active.get("message", "no choice yet"))

    def _say_outcome(self, load: Load) -> None:
        answered = [answer for answer in load.answers if not answer.error]
        tokens = sum(answer.tokens for answer in answered)
        self._console.say(f"{len(answered)} requests answered, {tokens} tokens, {len(load.errors)} failed")


def _explain(cluster: Cluster, console: Console) -> None:
    """Print what a person would look at next, while it still exists."""
    if not cluster.is_running():
        return
    for question in (("get", "specsvc,pods,jobs", "-A"), ("get", "events", "-A", "--sort-by=.lastTimestamp")):
        console.block(cluster.try_kubectl(*question).stdout[-4000:])
    console.block(cluster.try_kubectl("logs", "-n", "outrider-system", "deploy/outrider", "--tail=30").stdout)


def _leave(cluster: Cluster, console: Console, *, keep: bool) -> None:
    if keep and cluster.is_running():
        console.say("The cluster is up. To talk to it:")
        console.block(
            f"export KUBECONFIG={cluster.kubeconfig}\nkubectl get specsvc -w\n"
            f"{sys.executable} -m tests.cluster --state {STATE} down   # removes everything"
        )
        return
    cluster.stop()
    console.say("everything that the demo started is gone; caches stay in ~/.cache/outrider")


if __name__ == "__main__":
    sys.exit(main())
