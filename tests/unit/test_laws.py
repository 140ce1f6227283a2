"""The laws of traffic and memory against numbers worked out by hand and published ones."""

import pytest

from mpiparallel.model_config import ModelConfig
from mpiparallel.pipeline import schedules
from mpiparallel.plan import laws

CONFIG = ModelConfig(layers=2, hidden=8, heads=2, feed_forward=32, vocabulary=5, sequence=3)


def step(dp=1, pp=1, tp=1, zero=0, config=CONFIG, batch=4, **more):
    return laws.Step(config, dp, pp, tp, tuple(range(pp)), batch, zero=zero, **more)


def test_tensor_parallelism_by_hand():
    # 4 x 3 positions of 8 numbers; 2 blocks x 4 + embedding + output = 10; 3 numbers a position.
    assert laws.tensor_bytes(step(tp=2)) == 2 * 1 * 4 * (10 * 96 + 36)
    assert laws.tensor_bytes(step(dp=2, tp=2)) == laws.tensor_bytes(step(tp=2))
    assert laws.tensor_bytes(step(tp=1)) == 0


def test_pipeline_parallelism_by_hand():
    # One boundary, both ways; the table of 5 x 8 between the first and the last stage.
    assert laws.pipeline_bytes(step(pp=2)) == 2 * 4 * (96 + 40)
    # Each tensor rank sends whole activations, and its half of a table padded to 6 rows.
    assert laws.pipeline_bytes(step(pp=2, tp=2)) == 2 * 2 * 4 * (96 + 24)
    assert laws.pipeline_bytes(step(pp=2, frozen=("token",))) == 2 * 4 * 96
    # A V-shaped placement turns on the last rank, and ends where it began: no table is sent.
    turned = laws.Step(CONFIG, 1, 2, 1, schedules.placement("zb-v", 2, None), 4)
    assert laws.pipeline_bytes(turned) == 2 * 4 * 2 * 96


def test_data_parallelism_by_hand():
    # Per block 12 h^2 + 13 h = 872; the final norm 16, the table 40, positions 24.
    p = 2 * 872 + 16 + 40 + 24
    assert CONFIG.parameters == p
    assert laws.data_bytes(step(dp=4)) == {"allreduce": 2 * 3 * 4 * p}
    assert laws.data_bytes(step(dp=4, zero=2)) == {
        "reduce_scatter": 3 * 4 * p,
        "allgather": 3 * 4 * p,
    }
    assert laws.data_bytes(step(dp=4, zero=3))["allgather"] == 2 * 3 * 4 * p


def test_hybrid_ranks_reduce_their_share_alone():
    gpt = ModelConfig(8, 512, 8, 2048, 50000, 1024)
    pure = laws.data_bytes(step(dp=8, config=gpt, batch=8))["allreduce"]
    hybrid = laws.data_bytes(step(dp=2, pp=2, tp=2, config=gpt, batch=8))["allreduce"]
    # 7 copies against 1; the tied table, on two stages, and what is whole on every tensor rank
    # make the rest.
    twice = 50000 * 512 + 8 * 6 * 512 + 1024 * 512 + 2 * 512
    assert pure == 2 * 7 * 4 * gpt.parameters
    assert hybrid == 2 * 1 * 4 * (gpt.parameters + twice)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_memory_of_zero_is_the_published_one(zero, gigabytes):
    # Figure 1 of Rajbhandari et al. 2020: 7.5 G parameters on 64 ranks, 16 bytes a parameter, of
    # which the weights are 2, the gradients 2 and the optimizer's 12; ours are 4, 4 and 8.
    config = ModelConfig(36, 4096, 32, 16384, 50000, 1024)
    share = {
        kind: bytes / 64 for kind, bytes in laws.memory(step(64, zero=zero, config=config)).items()
    }
    half = (share["parameters"] + share["gradients"]) / 2
    scale = 7.5e9 / config.parameters / 1e9
    assert (half + share["optimizer"] * 12 / 8) * scale == pytest.approx(gigabytes, abs=0.05)


def test_memory_by_hand():
    p = CONFIG.parameters
    assert laws.memory(step(dp=4)) == {
        "parameters": 16 * p,
        "gradients": 16 * p,
        "optimizer": 32 * p,
    }
    assert sum(laws.memory(step(dp=4, zero=3)).values()) == 16 * p
    # Frozen weights stay whole on every replica and have no state.
    still = laws.memory(step(dp=4, zero=3, frozen=("blocks.",)))
    assert still == {
        "parameters": 4 * (p + 3 * 2 * 872),
        "gradients": 4 * (p - 2 * 872),
        "optimizer": 8 * (p - 2 * 872),
    }
