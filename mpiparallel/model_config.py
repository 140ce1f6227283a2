"""ModelConfig: the sizes of a GPT, and what follows from them with pencil and paper. No MPI."""

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a GPT: layers, H, N, F, V and the longest sequence."""

    layers: int
    hidden: int
    heads: int
    feed_forward: int
    vocabulary: int
    sequence: int

    @property
    def parameters(self) -> int:
        """Number of parameters: 12 l h^2 (1 + 13/(12h) + (V+s)/(12 l h)) where F = 4H (Narayanan
        et al. 2021), and the final norm, which the paper's count leaves out."""
        h, f = self.hidden, self.feed_forward
        block = 4 * h * h + 2 * h * f + 9 * h + f
        return self.layers * block + (self.vocabulary + self.sequence) * h + 2 * h

    def step_flops(self, sequences: int) -> float:
        """Model FLOPs of a step over `sequences` full sequences, forward and backward: three times
        the multiply-adds of forward, causal attention counted in full (Narayanan et al. 2021:
        72 B s l h^2 (1 + s/(6h) + V/(12 l h)) where F = 4H)."""
        h, s = self.hidden, self.sequence
        block = 4 * h * h + 2 * h * self.feed_forward + 2 * s * h
        return 6.0 * sequences * s * (self.layers * block + h * self.vocabulary)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global name -> global shape of every parameter, in the order of the model."""
        h, f = self.hidden, self.feed_forward
        block = {
            "attention_norm": (h,),
            "attention.qkv": (h, 3 * h),
            "attention.projection": (h, h),
            "mlp_norm": (h,),
            "mlp.up": (h, f),
            "mlp.down": (f, h),
        }
        found: dict[str, tuple[int, ...]] = {
            "token_embedding.weight": (self.vocabulary, h),
            "position_embedding.weight": (self.sequence, h),
        }
        for layer in range(self.layers):
            for part, shape in block.items():
                found[f"blocks.{layer}.{part}.weight"] = shape
                found[f"blocks.{layer}.{part}.bias"] = shape[-1:]
        return found | {"final_norm.weight": (h,), "final_norm.bias": (h,)}


def stage_layers(layers: int, stages: int) -> list[range]:
    """The blocks of each stage: contiguous, as even as can be, earlier stages take what is left
    over (the last stage has the output layer to carry)."""
    each, rest = divmod(layers, stages)
    ends = [stage * each + min(stage, rest) for stage in range(stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]
