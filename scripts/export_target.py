"""Write a model of ours as a transformers directory, for engines that read no GGUF.

    python scripts/export_target.py DIRECTORY [--model smollm2-135m] [--check]

Weights are dequantised to bfloat16: the numbers that Outrider computes with in ``--dtype bfloat16 --weights bf16``, so
that two engines run the same target. ``--check`` compares transformers' logits of the result with our decoder's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from outrider.models.base import Segment
from outrider.models.decoder import Decoder
from outrider.models.expected import expected_shapes
from outrider.models.gguf import GGUFCheckpoint
from outrider.models.load import resolve
from outrider.models.pretrained import PretrainedCheckpoint
from outrider.models.weights import WeightFormat, WeightPlan
from outrider.text.tokenizer import Tokenizer
from outrider.training.model_directory import write_model
from outrider.training.small_model import llama_config

TEXT = "The quick brown fox jumps over the lazy dog. 2 + 2 = 4, and def f(x): return x * x"


def export(model: str, directory: Path) -> GGUFCheckpoint:
    """Write ``model``, a catalogue name or .gguf file, to ``directory``."""
    checkpoint = GGUFCheckpoint(resolve(model).path)
    tensors = {name: checkpoint.tensor(name) for name in expected_shapes(checkpoint.config)}
    tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
    config = llama_config(checkpoint.config)
    size = write_model(directory, config, tensors, tokenizer, {"made_from": model, "dtype": "bfloat16"})
    print(f"{directory}: {size / 1e6:.0f} MB")
    return checkpoint


@torch.inference_mode()
def largest_difference(checkpoint: GGUFCheckpoint, directory: Path) -> tuple[float, float]:
    """Largest difference of float32 logits of one text between transformers and our decoder, both on the directory;
    and the logits' standard deviation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(directory)(TEXT)["input_ids"]
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(torch.tensor([tokens])).logits[0]
    plan = WeightPlan(torch.float32, WeightFormat.AUTO, torch.device("cpu"))
    decoder = Decoder(PretrainedCheckpoint(directory), plan)
    assert tokens == Tokenizer.from_gguf(checkpoint.metadata).encode(TEXT)
    ours = decoder.forward([Segment(decoder.new_cache(), tokens)])[0].logits
    return float((theirs - ours).abs().max()), float(ours.std())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    checkpoint = export(arguments.model, arguments.directory)
    if arguments.check:
        difference, spread = largest_difference(checkpoint, arguments.directory)
        print(f"largest difference of logits {difference:.2e} (their spread is {spread:.2f})")
        if difference > 1e-3 * spread:
            raise SystemExit("transformers and Outrider disagree")


if __name__ == "__main__":
    main()
