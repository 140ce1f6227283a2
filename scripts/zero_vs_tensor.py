"""ZeRO shards the state of data parallelism; tensor parallelism shards the computation.

    mpirun -n 4 python scripts/zero_vs_tensor.py

Both leave a rank a part of the parameters. Under ZeRO it still computes whole layers, on its own
sequences, and fetches what it lacks: bytes that depend on the parameters. A tensor rank computes
its part of every layer on all sequences, and adds up activations: bytes that depend on the tokens.
"""

import numpy as np
from lesson import COLORS, WORLD, change, claim, figure, save, train

from mpiparallel.settings import Settings

P = WORLD.size
MODEL = Settings(layers=4, heads=4, hidden=64, seq_len=32, global_batch=2 * P, pp=1)
WAYS = {f"ZeRO {stage}": dict(dp=P, tp=1, zero=stage) for stage in range(4)}
WAYS["tensor"] = dict(dp=1, tp=P, zero=0)
KINDS = ("parameters", "gradients", "optimizer")


def main() -> None:
    runs = {name: train(change(MODEL, **way), 3) for name, way in WAYS.items()}
    double = {
        name: train(change(MODEL, global_batch=4 * P, **way), 2) for name, way in WAYS.items()
    }
    if WORLD.rank:
        return
    parameters = runs["tensor"].parameters
    print(f"\n{parameters:,} parameters, {2 * P} sequences of 32 tokens on {P} ranks, float32")
    print("bytes that a rank holds, and sends per step; the same with twice the sequences")
    print("              weights   gradients   optimizer     on dp     on tp     dp x2     tp x2")
    for name, run in runs.items():
        held = "".join(f"{max(run.held[kind]):>12,}" for kind in KINDS)
        sent = "".join(f"{r.on(a) / P:>10,.0f}" for r in (run, double[name]) for a in ("dp", "tp"))
        print(f"  {name:<8}{held}{sent}")

    drawn, (left, right) = figure(1, 2, (9, 3.4))
    names, bottom = list(runs), np.zeros(len(runs))
    shades = {"parameters": "forward", "gradients": "backward", "optimizer": "optimizer"}
    for kind, shade in shades.items():
        heights = np.array([max(run.held[kind]) / 1e6 for run in runs.values()])
        left.bar(names, heights, bottom=bottom, color=COLORS[shade], label=kind)
        bottom += heights
    left.set(ylabel="MB", title="held by a rank between steps")
    left.legend(frameon=False)
    places, bottom = np.arange(len(names)), 0
    for offset, (label, which, hatch) in enumerate(
        [("", runs, None), (", twice the sequences", double, "///")]
    ):
        for axis in ("dp", "tp"):
            heights = [run.on(axis) / P / 1e6 for run in which.values()]
            right.bar(
                places + 0.4 * offset - 0.2,
                heights,
                0.36,
                color=COLORS[axis],
                hatch=hatch,
                edgecolor="white",
                label=f"on {axis}{label}",
            )
    right.set_xticks(places, names)
    right.set(ylabel="MB", title="sent by a rank in a step")
    right.margins(y=0.25)
    right.legend(frameon=False, fontsize=8, loc="upper left")
    save(drawn, "zero_vs_tensor")

    state = {name: sum(map(sum, run.held.values())) for name, run in runs.items()}
    claim(
        state["ZeRO 3"] == 16 * parameters and state["ZeRO 0"] == 16 * parameters * P,
        "16 bytes a parameter on every rank without ZeRO, once in all with stage 3",
    )
    zero = {name: run.on("dp") for name, run in runs.items() if name != "tensor"}
    claim(
        zero["ZeRO 1"] == zero["ZeRO 2"] == zero["ZeRO 0"] == zero["ZeRO 3"] * 2 // 3,
        "stages 1 and 2 send what data parallelism sends, stage 3 half as much again",
    )
    claim(
        all(double[name].on("dp") == sent for name, sent in zero.items()),
        "what ZeRO sends does not depend on the sequences",
    )
    tensor = runs["tensor"].on("tp")
    claim(
        double["tensor"].on("tp") == 2 * tensor and not runs["tensor"].on("dp"),
        "what tensor parallelism sends doubles with them, and none of it is on dp",
    )
    close = np.allclose(runs["tensor"].losses, runs["ZeRO 3"].losses, rtol=1e-5)
    claim(bool(close), "both train alike")


if __name__ == "__main__":
    main()
