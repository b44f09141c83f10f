"""Several GPUs that train together, as a person names them: how many in a machine, how many machines, their network."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tightfit.devices import Device
from tightfit.errors import RecipeError
from tightfit.recipe import Recipe
from tightfit.techniques.parallel import ManyProcesses

MOST_CARDS = 1 << 16
"""Cards, at most."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Alike GPUs. cards: in each machine. machines: how many. network: bytes a second that a machine sends, and
    receives as well; 0 where there is one machine alone."""

    cards: int = 1
    machines: int = 1
    network: float = 0.0

    @property
    def world(self) -> int:
        return self.cards * self.machines

    def on(self, device: Device) -> Device:
        """The device as one of these."""
        return replace(device, cards=self.cards, machines=self.machines, network_bandwidth=self.network)


def read_cluster(
    gpu: str | None, gpus: int | None = None, nodes: int | None = None, network: str | None = None
) -> tuple[str | None, Cluster]:
    """The GPU's own name, and how many of it there are.

    gpu: a name, or as in `8xh100-sxm` how many and their name. gpus: how many in a machine, instead. nodes: machines.
    network: between machines, such as `100Gbit` or `8x400Gbit`, what each sends in a second. Raises RecipeError.
    """
    match = re.fullmatch(r"\s*(\d+)\s*x\s*(\S.*)", gpu or "", re.IGNORECASE)
    if match is not None and gpus is not None:
        raise RecipeError(f"gpus: {gpus} and --gpu {gpu} both say how many; write one of them")
    if match is not None:
        gpu, gpus = match[2], int(match[1])
    counts = {"gpus": 1 if gpus is None else gpus, "nodes": 1 if nodes is None else nodes}
    for name, count in counts.items():
        if not 1 <= count <= MOST_CARDS:
            raise RecipeError(f"{name}: {count} should be from 1 to {MOST_CARDS:,}, such as --{name} 2")
    cards, machines = counts["gpus"], counts["nodes"]
    if (cards * machines > 1 or network is not None) and (gpu in ("cpu", "all") or "," in (gpu or "")):
        raise RecipeError(f"gpu: {gpu!r} is planned for one device each; write a GPU's name, such as --gpu 8xh100-sxm")
    if machines > 1 and network is None:
        raise RecipeError(f"network: what connects the {machines} machines is not known; write what each sends in a "
                          "second, such as --network 100Gbit, or 8x400Gbit with a network card for each of 8 GPUs")
    if machines == 1 and network is not None:
        raise RecipeError(f"network: {network!r} is between machines, and there is one; write --nodes 2 beside it")
    return gpu, Cluster(cards=cards, machines=machines, network=0.0 if network is None else parse_network(network))


def parse_network(text: str) -> float:
    """Bytes a second from `100Gbit`, `8x400Gbit` or `25 Gb/s`. Raises RecipeError for anything else."""
    match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*g(?:bit|bps|b)(?:/s)?\s*", text,
                         re.IGNORECASE | re.ASCII)  # fmt: skip
    rate = 0.0 if match is None else int(match[1] or 1) * float(match[2])
    if not 0.1 <= rate <= 1e6:
        raise RecipeError(f"network: {text!r} is not a speed of a network; write what a machine sends in a second, "
                          "such as 100Gbit, or 8x400Gbit")
    return rate * 1e9 / 8


def on_cluster(recipe: Recipe, cluster: Cluster) -> tuple[Recipe, Cluster]:
    """A recipe with as many processes as there are cards, where it names a way to share; and the cards, as many as it
    has processes where nothing else is said. Raises RecipeError where the two contradict each other."""
    parallel = recipe.parallel
    if isinstance(parallel, ManyProcesses):
        if parallel.processes != "auto" and cluster.world == 1:
            cluster = replace(cluster, cards=parallel.processes)
        if parallel.processes not in ("auto", cluster.world):
            raise RecipeError(f"parallel.processes: {parallel.processes} contradicts {cluster.world} GPUs; leave it "
                              "out")
        return recipe.with_processes(cluster.world), cluster
    if cluster.world > 1 and (recipe.mode != "train" or not recipe.backend.runs_torch):
        what = "mode=train" if recipe.mode != "train" else "backend=pytorch"
        raise RecipeError(f"gpus: {cluster.world} are planned with {what}; write that, or leave --gpus and --nodes out")
    return recipe, cluster
