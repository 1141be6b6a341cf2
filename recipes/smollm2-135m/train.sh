#!/usr/bin/env bash
# From the committed answers to the heads that ship. Hours on two cores; every command goes on where it was stopped.
set -euo pipefail
cd "$(dirname "$0")"
features=${FEATURES:-features}
out=${OUT:-heads}
outrider train collect --answers answers.safetensors --output "$features"
outrider train eagle3 --data "$features" --output "$out/eagle3.safetensors" --tokens 2600k --batch-tokens 1024 --lr 1.5e-3 \
    --draft-vocab 12288 --set k_warmup=0.3
outrider train eagle --data "$features" --output "$out/eagle.safetensors" --tokens 800k --batch-tokens 1024
python ship.py "$out"
