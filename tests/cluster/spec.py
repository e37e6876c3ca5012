"""Shape of a cluster: its nodes, products and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.cluster.errors import ClusterError
from tests.cluster.subnets import MOST_NODES

PRODUCT_LABEL = "nvidia.com/gpu.product"
GPU_RESOURCE = "nvidia.com/gpu"
DEFAULT_GPUS = 8

IMAGES = ("outrider.local/operator:dev", "outrider.local/runtime-cpu:dev", "outrider.local/standin:dev")
"""Names of one image: this machine's Python, virtual environment and checkout."""


@dataclass(frozen=True)
class NodeSpec:
    """One node; with a product it claims to hold `gpus` of that GPU."""

    index: int
    product: str | None = None
    gpus: int = DEFAULT_GPUS
    own_images: bool = False
    """Containers see what their image holds, and nothing of this machine."""
    containerd: str = ""
    """Folder with the programs of another containerd than the machine's."""

    @property
    def name(self) -> str:
        return f"node-{self.index + 1}"

    @property
    def labels(self) -> dict[str, str]:
        return {} if self.product is None else {PRODUCT_LABEL: self.product}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ClusterSpec:
    """`nodes` plain nodes, then one for each product."""

    nodes: int = 1
    gpu_products: Sequence[str] = field(default=())
    gpus: int = DEFAULT_GPUS

    def __post_init__(self) -> None:
        if not 1 <= self.nodes + len(self.gpu_products) <= MOST_NODES:
            raise ClusterError(
                f"A cluster has 1 to {MOST_NODES} nodes: {self.nodes} plain ones and "
                f"{len(self.gpu_products)} with GPUs were asked for."
            )

    def node_specs(self) -> list[NodeSpec]:
        products = [None] * self.nodes + list(self.gpu_products)
        return [NodeSpec(index, product, self.gpus) for index, product in enumerate(products)]
