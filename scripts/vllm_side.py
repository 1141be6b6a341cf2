"""The other half of ``vllm_check.py``: runs in vLLM's own environment, knows nothing of Outrider.

    VLLM_CPU_KVCACHE_SPACE=1 /tmp/vllm-env/bin/python scripts/vllm_side.py JOB.json RESULT.json

JOB has ``model``, ``head``, ``steps``, ``tokens``, ``stop`` (ids) and ``prompts`` (lists of token ids); RESULT gets the
tokens of each answer and vLLM's counters of speculative decoding.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Answer every prompt greedily, one at a time."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=job["model"],
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=1,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config={"method": "eagle3", "model": job["head"], "num_speculative_tokens": job["steps"]},
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["tokens"], stop_token_ids=job["stop"])
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False)
    counters: dict[str, Any] = {}
    for metric in engine.get_metrics():
        if metric.name.startswith("vllm:spec_decode"):
            counters[metric.name] = getattr(metric, "value", None) or getattr(metric, "values", 0)
    return {"answers": [list(output.outputs[0].token_ids) for output in outputs], "counters": counters}


def main() -> None:
    source, destination = map(Path, sys.argv[1:3])
    destination.write_text(json.dumps(run(json.loads(source.read_text()))))


if __name__ == "__main__":
    main()
