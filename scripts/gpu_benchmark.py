"""One measurement of `gpu_check.py`, in a process of its own: prints one JSON object.

    python scripts/gpu_benchmark.py {ours,torch} {cupy,numpy} SIZES

SIZES : JSON of layers, heads, hidden, seq_len, vocab_size, batch, steps. Both sides train the same
GPT-2 on the same random tokens in float32: forward, backward, gradient norm and clipping, AdamW.
PyTorch runs eager, TF32 off, attention as `scaled_dot_product_attention`, as its users write it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import numpy as np

UNMEASURED = 2  # first steps: kernels are compiled, memory pools filled


def tokens_of(sizes: dict[str, int]) -> np.ndarray:
    """(batch, seq_len) int32, the same on both sides."""
    shape = (sizes["batch"], sizes["seq_len"])
    return np.random.default_rng(0).integers(0, sizes["vocab_size"], shape, np.int32)


def timed(step, steps: int) -> dict[str, float]:
    """step() -> loss, which has waited for the device: the median seconds, and the losses."""
    losses, seconds = [], []
    for _ in range(UNMEASURED + steps):
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    return {
        "step_seconds": statistics.median(seconds[UNMEASURED:]),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def measure_ours(backend_name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """This package on one rank."""
    from mpi4py import MPI

    from mpiparallel import backend
    from mpiparallel import settings as settings_module
    from mpiparallel.backend import choice
    from mpiparallel.bench.matmul import matmul_rate
    from mpiparallel.data import Batch
    from mpiparallel.mesh import Mesh
    from mpiparallel.settings import Settings
    from mpiparallel.train import Trainer

    choice.choose(backend_name, MPI.COMM_WORLD)
    model = {key: value for key, value in sizes.items() if key not in ("batch", "steps")}
    settings = settings_module.check(Settings(global_batch=sizes["batch"], **model), 1)
    config = settings.model_config(sizes["vocab_size"])
    tokens = tokens_of(sizes)
    batch = Batch(tokens, np.roll(tokens, -1, axis=1), tokens.size)
    with Mesh(1, 1, 1) as mesh:
        trainer = Trainer(settings, config, mesh)

        def step() -> float:
            loss = trainer.step(batch, 1e-4).loss
            backend.synchronize()
            return loss

        result: dict[str, Any] = timed(step, sizes["steps"])
    rate = matmul_rate("float32", seconds=1.0)
    flops = config.step_flops(sizes["batch"]) / result["step_seconds"]
    result |= {
        "parameters": config.parameters,
        "tokens_per_second": tokens.size / result["step_seconds"],
        "flops_per_second": flops,
        "float32_matmul_flops_per_second": rate,
        "share_of_float32": flops / rate,
    }
    tf32 = tf32_rate() if backend_name == "cupy" else None
    if tf32:
        result |= {"tf32_matmul_flops_per_second": tf32, "share_of_tf32": flops / tf32}
    return result


def tf32_rate() -> float:
    """The matmul rate with CuPy's TF32 switch, which it reads from the environment at import."""
    import os
    import subprocess

    program = (
        "from mpi4py import MPI\n"
        "from mpiparallel.backend import choice\n"
        "from mpiparallel.bench.matmul import matmul_rate\n"
        "choice.choose('cupy', MPI.COMM_WORLD)\n"
        "print(matmul_rate('float32', seconds=1.0))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CUPY_TF32": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def measure_torch(backend_name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """PyTorch eager, or why not."""
    try:
        import torch
    except ImportError:
        return {"skipped": "torch is not installed"}
    import torch.nn.functional as F
    from torch import nn

    place = "cuda" if backend_name == "cupy" else "cpu"
    if place == "cuda" and not torch.cuda.is_available():
        return {"skipped": "torch sees no GPU"}
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    hidden, heads, sequence = sizes["hidden"], sizes["heads"], sizes["seq_len"]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
            self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

        def forward(self, x):
            rows, length, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(rows, length, 3, heads, hidden // heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(rows, length, hidden))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class GPT2(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(sizes["vocab_size"], hidden)
            self.positions = nn.Embedding(sequence, hidden)
            self.blocks = nn.ModuleList(Block() for _ in range(sizes["layers"]))
            self.norm = nn.LayerNorm(hidden)
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, tokens):
            x = self.table(tokens) + self.positions.weight
            for block in self.blocks:
                x = block(x)
            return self.norm(x) @ self.table.weight.T

    torch.manual_seed(0)
    model = GPT2().to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1)
    tokens = torch.from_numpy(tokens_of(sizes)).long().to(place)
    labels = tokens.roll(-1, 1).reshape(-1)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).view(-1, sizes["vocab_size"]), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = loss.item()
        if place == "cuda":
            torch.cuda.synchronize()
        return value

    result: dict[str, Any] = timed(step, sizes["steps"])
    return {
        **result,
        "torch": torch.__version__,
        "tokens_per_second": tokens.numel() / result["step_seconds"],
    }


def main() -> None:
    """Measure what the arguments say."""
    name, backend_name, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    measure = {"ours": measure_ours, "torch": measure_torch}[name]
    print(json.dumps(measure(backend_name, sizes)))


if __name__ == "__main__":
    main()
