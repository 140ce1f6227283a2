"""Tensor parallelism in three matrix products, with NumPy and one Group in plain sight.

    mpirun -n 4 python scripts/tensor_parallel_matmul.py

    by columns    Y = X @ [W0 W1 ..]          every rank has columns of Y; no message
                  dX = sum of dYr @ Wr^T      backward: all-reduce
    by rows       Y = sum of Xr @ Wr          all-reduce
                  dXr = dY @ Wr^T             backward: no message
    the pair      X @ A by columns, f, @ B by rows: one all-reduce forward, one backward

f works on single numbers (GELU in a transformer, here max(0, x)), so it needs no other columns:
this is why the pair goes with one all-reduce (Shoeybi et al. 2019, section 3).
"""

import numpy as np
from lesson import WORLD, claim, figure, save

from mpiparallel.comm.group import Group
from mpiparallel.comm.ledger import Ledger

ROWS, HIDDEN, WIDE = 6, 8, 16


def draw(t: int) -> None:
    """The matrices, a colour for what each rank has."""
    from matplotlib.patches import Rectangle

    drawn, axes = figure(1, 1, (8, 3))
    place = 0.0
    for name, height, width, columns, rows in (
        ("x\nwhole", ROWS, HIDDEN, 1, 1),
        ("A\nby columns", HIDDEN, WIDE, t, 1),
        ("h = x A\nby columns", ROWS, WIDE, t, 1),
        ("B\nby rows", WIDE, HIDDEN, 1, t),
        ("y = f(h) B\nsummed: whole", ROWS, HIDDEN, 1, 1),
    ):
        w, h = width / columns, height / rows
        for rank in range(columns * rows):
            left = place + rank * w * (columns > 1)
            top = -rank * h * (rows > 1)
            color = f"C{rank % 10}" if columns * rows > 1 else "#cccccc"
            axes.add_patch(Rectangle((left, top - h), w, h, facecolor=color, edgecolor="white"))
            if columns * rows > 1:
                axes.text(left + w / 2, top - h / 2, str(rank), ha="center", va="center", color="w")
        axes.text(place + width / 2, 0.5, name, ha="center", va="bottom")
        place += width + 4
    axes.set(xlim=(-1, place - 3), ylim=(-WIDE - 1, 4), aspect="equal")
    axes.axis("off")
    save(drawn, "tensor_parallel_matmul")


def main() -> None:
    tp = Group(WORLD.Dup(), "tp")
    r, t = tp.rank, tp.size
    whole = np.random.default_rng(0).standard_normal
    x, a = whole((ROWS, HIDDEN)), whole((HIDDEN, WIDE))
    b, dy = whole((WIDE, HIDDEN)), whole((ROWS, HIDDEN))
    mine = slice(r * WIDE // t, (r + 1) * WIDE // t)
    a_r, b_r = a[:, mine], b[mine]  # columns of A, rows of B: what this rank has
    sent: dict[str, int] = {}

    def counted(name: str, array: np.ndarray) -> np.ndarray:
        """An all-reduce of a copy; its bytes, of this rank, go into `sent`."""
        tp.ledger = Ledger()
        array = tp.allreduce(array)
        sent[name] = tp.ledger.row("tp", "allreduce").bytes
        return array

    # One product by columns: every rank has columns of it; who wants it whole gathers.
    h_r = x @ a_r
    tp.ledger = Ledger()
    gathered = tp.allgather(h_r, dim=1)
    sent["columns alone, gathered"] = tp.ledger.row("tp", "allgather").bytes

    # The pair: f, the second product by rows, and its one all-reduce.
    f_r = np.maximum(h_r, 0)
    y = counted("forward, by rows", f_r @ b_r)

    # Backward: through the rows without a message, through the columns with an all-reduce.
    df_r = dy @ b_r.T
    db_r = f_r.T @ dy
    dh_r = df_r * (h_r > 0)
    da_r = x.T @ dh_r
    dx = counted("backward, by columns", dh_r @ a_r.T)

    # The same on one rank.
    h = x @ a
    f = np.maximum(h, 0)
    dh = (dy @ b.T) * (h > 0)
    ours = h_r, gathered, y, da_r, db_r, dx
    right = h[:, mine], h, f @ b, x.T @ dh[:, mine], f.T[mine] @ dy, dh @ a.T
    worst = max(float(np.abs(one - other).max()) for one, other in zip(ours, right, strict=True))
    worst = float(tp.allreduce(np.array([worst]), "max")[0])
    arrays = {"x": x, "A": a_r, "h": h_r, "B": b_r, "y": y, "dB": db_r, "dA": da_r, "dx": dx}
    shapes = tp.allgather_json(["x".join(map(str, array.shape)) for array in arrays.values()])
    tp.free()
    if r:
        return

    print(f"\nshapes on {t} ranks; x is {x.shape}, A {a.shape}, B {b.shape}")
    print("  rank" + "".join(f"{name:>10}" for name in arrays))
    for rank, row in enumerate(shapes):
        print(f"  {rank:>4}" + "".join(f"{shape:>10}" for shape in row))
    reduced, gather = 2 * (t - 1) * y.nbytes // t, (t - 1) * gathered.nbytes // t
    formula = {name: gather if "gathered" in name else reduced for name in sent}
    print("\nbytes that a rank sends           counted   by formula")
    for name, bytes_ in sent.items():
        print(f"  {name:<27}{bytes_:>12,}{formula[name]:>13,}")
    draw(t)
    claim(worst < 1e-12, f"forward and backward equal the whole products, to {worst:.0e}")
    claim(sent == formula, "an all-reduce sends 2(t-1)/t of its array, an all-gather (t-1)/t")
    reduces = [name for name in sent if "gathered" not in name]
    claim(len(reduces) == 2, "the pair takes one all-reduce forward and one backward")


if __name__ == "__main__":
    main()
