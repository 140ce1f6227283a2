"""Three common answers about parallel training that are wrong, each refuted by a measurement.

mpirun -n 4 python scripts/wrong_answers.py

"More replicas always speed training."         The batch is shared out, the gradients are not:
                                               with the work the bytes do not shrink.
"Tensor and pipeline parallelism are the same  They cut the same model in other places, and
thing, both split the model."                  pay with other operations and other bytes.
"A pipeline needs all-reduce between stages."  It sends to neighbours, and nothing else.
"""

from lesson import COLORS, WORLD, change, claim, figure, save, train

from mpiparallel.settings import Settings

P = WORLD.size
WIDE = Settings(layers=2, heads=4, hidden=384, seq_len=8, global_batch=P, pp=1, tp=1)
DEEP = Settings(layers=P, heads=4, hidden=64, seq_len=32, global_batch=8, micro_batches=4, dp=1)
REPLICAS = [dp for dp in (1, 2, 4, 8) if dp <= P]


def main() -> None:
    replicas = {dp: train(change(WIDE, dp=dp), 12) for dp in REPLICAS}
    tensor = train(change(DEEP, tp=P, pp=1), 3)
    pipeline = train(change(DEEP, tp=1, pp=P), 3)
    if WORLD.rank:
        return

    print(f'\n"more replicas always speed training": {P} sequences of 8 tokens in all')
    print("    dp   sequences a rank   bytes sent per token   step ms   speed-up")
    for dp, run in replicas.items():
        print(
            f"  {dp:>4}{P / dp:>19.0f}{run.on('dp') / (P * 8):>23,.0f}{1e3 * run.seconds:>10.1f}"
            f"{replicas[1].seconds / run.seconds:>11.2f}"
        )
    print(f'\n"tensor and pipeline parallelism are the same": {P} ranks, one model, one batch')
    print("            operations per step, all ranks                 bytes")
    for name, axis, run in (("tensor", "tp", tensor), ("pipeline", "pp", pipeline)):
        calls = {op: number for (where, op), number in run.calls.items() if where == axis}
        listed = ", ".join(f"{number:.0f} {op}" for op, number in calls.items())
        print(f"  {name:<10}{listed:<45}{run.on(axis):>12,}")

    drawn, (left, right) = figure(1, 2, (9, 3.4))
    ideal = list(replicas)
    left.plot(ideal, ideal, color="#999999", label="as one might think")
    speed = [replicas[1].seconds / run.seconds for run in replicas.values()]
    left.plot(ideal, speed, "o-", color=COLORS["forward"], label="measured")
    left.set(xlabel="replicas of one batch", ylabel="speed-up", ylim=(0, None))
    left.set_xticks(ideal)
    left.legend(frameon=False)
    names = ["tensor:\nall-reduces", "pipeline:\nsends"]
    heights = [tensor.on("tp") / 1e6, pipeline.on("pp") / 1e6]
    right.bar(names, heights, color=[COLORS["tp"], COLORS["pp"]])
    right.set(ylabel="MB per step, all ranks", title=f"the same model cut over {P} ranks")
    save(drawn, "wrong_answers")

    last = REPLICAS[-1]
    growth = replicas[last].on("dp") / replicas[2].on("dp") if last > 2 else 1.0
    claim(
        growth == (last - 1),
        f"{last} replicas send {growth:.0f} times what 2 send, for the same batch",
    )
    claim(speed[-1] < 0.75 * last, f"{last} replicas are {speed[-1]:.2f} times as fast as one")
    operations = [
        {op for where, op in run.calls if where == axis}
        for run, axis in ((tensor, "tp"), (pipeline, "pp"))
    ]
    claim(not set.intersection(*operations), f"no operation in common: {operations}")
    more = tensor.on("tp") / pipeline.on("pp")
    claim(more > 2, f"tensor parallelism sends {more:.0f} times the bytes of the pipeline")
    claim(operations[1] == {"isend", "irecv"}, "the pipeline has no all-reduce, nor any collective")
    losses = zip(tensor.losses, pipeline.losses, strict=True)
    claim(all(abs(a / b - 1) < 1e-5 for a, b in losses), "and both give the same losses")


if __name__ == "__main__":
    main()
