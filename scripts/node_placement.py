"""Where tensor groups belong: inside a node, or across the link between nodes.

    python scripts/node_placement.py

Two hosts of two ranks, dp=2 x tp=2. The mesh numbers tensor ranks first, so they share a host and
gradients cross the link. Then ranks are numbered the other way round: replicas share a host, and
the all-reduces inside every layer cross. Same model, same batch, same losses.

Hosts are network namespaces with a real TCP link of a set rate (`netns_cluster.py`, which needs
Linux and root). Where they cannot be made, or under mpirun, the link is emulated: what crosses
between two pretended hosts takes its bytes over the rate, and a latency, longer.
"""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

RATE_MBIT, LATENCY = 100, 2e-4
HOW = "NODE_PLACEMENT"  # the environment variable that says how the link is made
STEPS = 6


def start() -> int:
    """Start this script on a cluster of namespaces, or under mpirun where there is none."""
    here, python = Path(__file__).resolve(), Path(sys.executable)
    env = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", HOW: "real"}
    cluster = [sys.executable, str(here.with_name("netns_cluster.py")), "--hosts", "2"]
    cluster += ["--ranks-per-host", "2", "--rate", f"{RATE_MBIT}mbit", "--"]
    status = subprocess.run([*cluster, sys.executable, str(here)], env=env).returncode
    if status == 77:  # it has said why
        launcher = shlex.split(os.environ.get("MPIRUN", "mpirun"))
        command = [*launcher, "-n", "4", sys.executable, str(here)]
        status = subprocess.run(command, env=env | {HOW: "emulated"}).returncode
    return status


def emulated_link(axis: str):
    """While it is on, what is sent on the axis takes as long as over the link."""
    from mpiparallel.comm.pending import Pending

    right = Pending.wait

    def wait(self):
        result = right(self)
        if self._group.axis == axis:
            time.sleep(LATENCY + self._bytes * 8e-6 / RATE_MBIT)
        return result

    return mock.patch.object(Pending, "wait", wait)


def main() -> None:
    from contextlib import nullcontext

    from lesson import COLORS, WORLD, claim, figure, save, train

    from mpiparallel.settings import Settings

    real = os.environ.get(HOW) == "real"
    model = Settings(layers=2, heads=4, hidden=64, seq_len=64, global_batch=8, dp=2, pp=1, tp=2)
    turned = WORLD.Split(0, [0, 2, 1, 3][WORLD.rank])  # ranks 0 and 2 become neighbours
    placed = {}
    for name, order, crosses in (
        ("tensor inside, data across", WORLD, "dp"),
        ("data inside, tensor across", turned, "tp"),
    ):
        with nullcontext() if real else emulated_link(crosses):
            placed[name] = train(model, STEPS, communicator=order), crosses
    if WORLD.rank:
        return

    link = f"{RATE_MBIT} Mbit/s between two hosts of two ranks"
    print(f"\n{link}, {'real TCP' if real else 'emulated'}")
    print("  placement                      over the link, bytes per step   messages   step ms")
    for name, (run, crosses) in placed.items():
        calls = run.calls[crosses, "allreduce"]
        print(f"  {name:<28}{run.on(crosses):>34,}{calls:>11.0f}{1e3 * run.seconds:>10.1f}")

    drawn, axes = figure(1, 1, (6, 3.2))
    for name, (run, crosses) in placed.items():
        axes.bar(name, 1e3 * run.seconds, color=COLORS[crosses])
        note = f"{run.on(crosses) / 1e6:.1f} MB on {crosses}\nover the link"
        axes.text(name, 1e3 * run.seconds, note, ha="center", va="bottom")
    axes.margins(y=0.25)
    axes.set(ylabel="milliseconds per step", title=link)
    save(drawn, "node_placement")

    (inside, _), (across, _) = placed.values()
    same = all(abs(a / b - 1) < 1e-5 for a, b in zip(inside.losses, across.losses, strict=True))
    claim(same, "both placements give the same losses")
    claim(inside.sent == across.sent == inside.law, "and send the same bytes on each axis")
    more = across.on("tp") / inside.on("dp")
    claim(more > 2, f"tensor parallelism across the link is {more:.1f} times the bytes over it")
    slower = across.seconds / inside.seconds
    claim(slower > 1.3, f"and a step takes {slower:.1f} times as long")


if __name__ == "__main__":
    launched = {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"} & set(os.environ)
    sys.exit(main() if launched or HOW in os.environ else start())
