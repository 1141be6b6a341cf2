#!/usr/bin/env bash
# From the committed answers to the heads that ship. Hours on two cores; every command goes on where it was stopped.
set -euo pipefail
cd "$(dirname "$0")"
features=${FEATURES:-features}
out=${OUT:-heads}
outrider train collect --answers answers.safetensors --output "$features"
