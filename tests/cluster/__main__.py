"""`python -m tests.cluster up|down|kubeconfig|status|add-node|import-image`: a cluster for your shell."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.cluster.cluster import DEFAULT_STATE, Cluster
from tests.cluster.errors import ClusterError
from tests.cluster.spec import DEFAULT_GPUS, ClusterSpec


def main() -> int:
    """The exit status: 1 with a sentence on stderr when something cannot be had."""
    arguments = _parser().parse_args()
    try:
        return _run(arguments)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing of the cluster is left", file=sys.stderr)
        return 130


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "up":
        products = [product for product in arguments.gpu_products.split(",") if product]
        nodes = arguments.nodes if arguments.nodes is not None else 1
        Cluster(ClusterSpec(nodes, products, arguments.gpus), arguments.state).start(keep=True)
        print(f"export KUBECONFIG={Cluster(state=arguments.state).kubeconfig}")
        return 0
    cluster = Cluster(state=arguments.state)
    if arguments.command == "down":
        cluster.stop()
        return 0
    if not cluster.is_running():
        raise ClusterError(f"No cluster runs in {arguments.state}: `python -m tests.cluster up` starts one.")
    if arguments.command == "kubeconfig":
        print(cluster.kubeconfig)
    elif arguments.command == "add-node":
        print(cluster.add_node(arguments.product, arguments.gpus))
    elif arguments.command == "import-image":
        cluster.import_image(arguments.name)
    else:
        print(json.dumps(cluster.status(), indent=1))
        print(cluster.kubectl("get", "nodes", "-o", "wide"), end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--state", type=Path, default=DEFAULT_STATE, help=f"state folder (default {DEFAULT_STATE})")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster that lives until `down`")
    up.add_argument("--nodes", type=int, help="nodes without GPUs (default 1)")
    up.add_argument("--gpu-products", default="", help="one more node for each: NVIDIA-H200,NVIDIA-L4")
    up.add_argument("--gpus", type=int, default=DEFAULT_GPUS, help="GPUs that each such node claims")
    commands.add_parser("down", help="end it; nothing but its logs is left")
    commands.add_parser("kubeconfig", help="print the kubeconfig's path")
    commands.add_parser("status", help="its processes and nodes")
    add = commands.add_parser("add-node", help="one more node")
    add.add_argument("--product", help="the GPU that it claims to hold")
    add.add_argument("--gpus", type=int, default=DEFAULT_GPUS)
    image = commands.add_parser("import-image", help="one more name for the checkout's image")
    image.add_argument("name", help="outrider.local/runtime-cpu:next")
    return parser


if __name__ == "__main__":
    sys.exit(main())
