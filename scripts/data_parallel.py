"""Data parallelism: every rank has the whole model, and gradients are all-reduced every step.

    mpirun -n 4 python scripts/data_parallel.py

Replicas share a batch and give the loss of one process. What they send grows with the parameters
and with nothing else, so a model that is large for its batch spends its step on sending.
"""

import numpy as np
from lesson import COLORS, WORLD, change, claim, figure, save, train

from mpiparallel.settings import Settings

MODEL = Settings(layers=2, heads=4, hidden=32, seq_len=32, global_batch=16, pp=1, tp=1)
HIDDEN = (32, 64, 128, 256)
REPLICAS = [dp for dp in (1, 2, 4, 8) if dp <= WORLD.size]


def main() -> None:
    exact = {dp: train(change(MODEL, dp=dp, dtype="float64"), 5) for dp in REPLICAS}
    wide = {h: train(change(MODEL, dp=REPLICAS[-1], hidden=h), 2) for h in HIDDEN}
    large = change(MODEL, hidden=192, seq_len=16, global_batch=8)
    split = {dp: train(change(large, dp=dp, global_batch=8 * dp), 8) for dp in REPLICAS}
    if WORLD.rank:
        return

    print("\nthe same 5 steps on dp replicas, float64")
    for dp, run in exact.items():
        print(f"  dp={dp}   losses {'  '.join(f'{loss:.12f}' for loss in run.losses[::2])}")

    dp = REPLICAS[-1]
    print(f"\ngradients of larger models, dp={dp}, float32")
    print("  hidden   parameters   bytes a rank sends   2(dp-1)/dp 4P")
    sent = {}
    for hidden, run in wide.items():
        sent[hidden] = run.on("dp") / dp
        formula = 2 * (dp - 1) / dp * 4 * run.parameters
        print(f"  {hidden:>6}{run.parameters:>13,}{sent[hidden]:>21,.0f}{formula:>16,.0f}")

    print(f"\na step, {split[1].parameters:,} parameters, 8 sequences of 16 on every replica")
    print("    dp   step ms   compute   waits for gradients   tokens/s")
    for dp, run in split.items():
        rest = run.seconds - run.exposed
        rate = 8 * dp * 16 / run.seconds
        print(
            f"  {dp:>4}{1e3 * run.seconds:>10.1f}{1e3 * rest:>10.1f}{1e3 * run.exposed:>22.1f}"
            f"{rate:>11,.0f}"
        )

    drawn, (left, right) = figure(1, 2, (9, 3.4))
    parameters = np.array([run.parameters for run in wide.values()])
    dp = REPLICAS[-1]
    left.plot(parameters, 2 * (dp - 1) / dp * 4 * parameters / 1e6, color="grey", label="formula")
    left.plot(
        parameters, np.array(list(sent.values())) / 1e6, "o", color=COLORS["dp"], label="counted"
    )
    left.set(xlabel="parameters", ylabel="MB per rank and step", title=f"gradients, dp={dp}")
    left.legend(frameon=False)
    names = [f"dp={dp}" for dp in split]
    compute = np.array([1e3 * (run.seconds - run.exposed) for run in split.values()])
    waits = np.array([1e3 * run.exposed for run in split.values()])
    right.bar(names, compute, color=COLORS["forward"], label="compute")
    right.bar(names, waits, bottom=compute, color=COLORS["dp"], label="waits for gradients")
    right.set(ylabel="milliseconds per step", title="8 sequences on every replica")
    right.legend(frameon=False, loc="upper left")
    save(drawn, "data_parallel")

    serial = np.array(exact[1].losses)
    worst = max(float(np.abs(np.array(run.losses) / serial - 1).max()) for run in exact.values())
    claim(worst < 1e-10, f"replicas give the losses of one process, to {worst:.0e} relative")
    claim(
        all(run.sent == run.law for run in wide.values()),
        "a rank sends 2(dp-1)/dp of the gradients, to the byte",
    )
    growth = sent[HIDDEN[-1]] / sent[HIDDEN[0]]
    more = wide[HIDDEN[-1]].parameters / wide[HIDDEN[0]].parameters
    claim(growth == more, f"{more:.1f} times the parameters are {growth:.1f} times the bytes")
    same = {run.on("dp") / (2 * (dp - 1)) for dp, run in split.items() if dp > 1}
    claim(len(same) == 1, "more sequences change nothing about what is sent")


if __name__ == "__main__":
    main()
