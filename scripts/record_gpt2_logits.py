"""Record what Hugging Face's GPT-2 computes, for the test that compares ours with it.

    python scripts/record_gpt2_logits.py tests/data/gpt2

Needs `torch` and `transformers`, which the tests do not. Writes a tiny model with random weights
as the library saves it (model.safetensors, config.json), and tokens.json: tokens and the logits
that the library computes for them in float64.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def main(folder: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=11,
        n_positions=7,
        n_embd=8,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.5,  # large weights: small ones would hide what a norm gets wrong
    )
    model = GPT2LMHeadModel(config)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.5)
    model.eval().save_pretrained(folder)
    tokens = torch.randint(11, (2, 7))
    with torch.no_grad():
        logits = model.double()(tokens).logits
    found = {"tokens": tokens.tolist(), "logits": logits.tolist()}
    (folder / "tokens.json").write_text(json.dumps(found) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
