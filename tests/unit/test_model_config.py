"""Sizes and FLOPs of a GPT against the published formulas, and which layers make a stage."""

import pytest

from mpiparallel.model_config import ModelConfig, stage_layers

GPT2_SMALL = ModelConfig(12, 768, 12, 3072, 50257, 1024)


def test_gpt2_small_has_124_million_parameters():
    assert GPT2_SMALL.parameters == 124_439_808


@pytest.mark.parametrize("config", [GPT2_SMALL, ModelConfig(6, 384, 6, 1536, 65, 256)])
def test_the_closed_forms_of_narayanan_et_al(config):
    layers, h, v, s, batch = config.layers, config.hidden, config.vocabulary, config.sequence, 8
    parameters = 12 * layers * h * h * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
    assert config.parameters - 2 * h == pytest.approx(parameters, rel=1e-12)
    flops = 72 * batch * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
    assert config.step_flops(batch) == pytest.approx(flops, rel=1e-12)


def test_layers_are_spread_as_evenly_as_can_be():
    assert stage_layers(8, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert stage_layers(5, 3) == [range(0, 2), range(2, 4), range(4, 5)]
    for layers in range(1, 20):
        for stages in range(1, layers + 1):
            cut = stage_layers(layers, stages)
            assert [layer for stage in cut for layer in stage] == list(range(layers))
            assert max(map(len, cut)) - min(map(len, cut)) <= 1
            assert min(map(len, cut)) >= 1
