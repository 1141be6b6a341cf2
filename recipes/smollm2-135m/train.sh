#!/usr/bin/env bash
# From the committed answers to the heads that ship. Hours on two cores; every command goes on where it was stopped.
set -euo pipefail
cd "$(dirname "$0")"
features=${FEATURES:-features}
out=${OUT:-heads}
first=(--data "$features/1")
all=(--data "$features/1" --data "$features/2")
outrider train collect --answers answers_1.safetensors --output "$features/1"
outrider train collect --answers answers_2.safetensors --output "$features/2"
outrider train eagle3 "${first[@]}" --output "$out/eagle3_a.safetensors" --tokens 2600k --batch-tokens 1024 --lr 1.5e-3 \
    --draft-vocab 12288 --set k_warmup=0.3
outrider train eagle3 "${all[@]}" --init "$out/eagle3_a.safetensors" --output "$out/eagle3_b.safetensors" --tokens 2200k \
    --validation 0.01 --batch-tokens 512 --lr 1e-3 --set k_warmup=0.6 --set freeze_output=true
outrider train eagle3 "${all[@]}" --init "$out/eagle3_b.safetensors" --output "$out/eagle3.safetensors" --tokens 2500k \
    --seed 1 --validation 0.005 --batch-tokens 512 --lr 7e-4 --set freeze_output=true
outrider train eagle "${first[@]}" --output "$out/eagle.safetensors" --tokens 800k --batch-tokens 1024
# The others were given minutes (of two threads with nothing beside them), which other machines use for other numbers of tokens.
short=(--validation 0.003 --batch-tokens 512)
outrider train medusa "${all[@]}" "${short[@]}" --output "$out/medusa.safetensors" --minutes 5
outrider train small-model "${all[@]}" --validation 0.003 --output "$out/draft-1" --minutes 4.5
outrider train small-model "${all[@]}" --validation 0.003 --output "$out/draft-2" --boost-against "$out/draft-1" --minutes 4.5
mtp=("${all[@]}" "${short[@]}" --set attention=unrolled)
outrider train mtp "${mtp[@]}" --output "$out/mtp_a.safetensors" --minutes 2
outrider train mtp "${mtp[@]}" --init "$out/mtp_a.safetensors" --output "$out/mtp_b.safetensors" --tokens 210k
outrider train mtp "${mtp[@]}" --init "$out/mtp_b.safetensors" --output "$out/mtp.safetensors" --tokens 210k
outrider train hydra "${all[@]}" "${short[@]}" --output "$out/hydra.safetensors" --minutes 2
outrider train layer-skip "${all[@]}" "${short[@]}" --output "$out/layer_skip.safetensors" --minutes 1.5
# Run for the figures in docs/heads.md; its result is another target and does not ship.
outrider train medusa2 "${all[@]}" --validation 0.003 --output "$out/medusa2" --tokens 200k
python ship.py "$out"
