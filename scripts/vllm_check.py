"""Acceptance length of an EAGLE-3 head here and in vLLM, chain of 3, on the same target and prompts.

    python scripts/vllm_check.py [--head FILE] [--vllm-python /tmp/vllm-env/bin/python] [--questions 20] [--tokens 128]

Exports the target (``export_target.py``) and the head (``outrider convert --to eagle3``) to a temporary directory, lets
``vllm_side.py`` answer the prompts in vLLM's environment, then answers them here; both in bfloat16, greedily. Fails
when the lengths differ by more than 5 percent. ``docs/interoperability.md`` says how to make that environment.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.cli.reexec import ensure_allocator

if __name__ == "__main__":
    ensure_allocator()

from benchmark import MODEL, ROOT, groups_of
from export_target import export

import outrider
from outrider.config import EngineConfig
from outrider.drafters.head_options import shipped_head
from outrider.engine.engine import Engine
from outrider.engine.loading import load_model
from outrider.errors import InvalidOptionError
from outrider.heads.formats.base import facts_of
from outrider.heads.formats.convert import convert

STEPS = 3
TOLERANCE = 0.05
PATIENCE = 3600.0
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def head_file(given: Path | None) -> Path:
    """The head to check: a file, or the one that ships."""
    found = given or shipped_head("eagle3", load_model(MODEL, EngineConfig()).model)
    if found is None:
        raise InvalidOptionError(f"no eagle3 head ships for {MODEL}; give one with --head FILE")
    return found


def our_engine(head: Path) -> Engine:
    """The default model with the head, a chain of three guesses, nothing adaptive."""
    return outrider.load(
        MODEL, drafter=f"eagle3:head={head}", shape=f"chain:{STEPS}", dtype="bfloat16", weights="bf16", adaptive=False
    )


def ours(engine: Engine, prompts: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
    """Mean acceptance length (the bonus token counts) and the answers."""
    drafts = accepted = 0
    answers = []
    for prompt in prompts:
        result = engine.generate(prompt, outrider.SamplingParams(max_tokens=count))
        drafts += result.stats.num_drafts
        accepted += result.stats.num_accepted_tokens
        answers.append(list(result.tokens))
    return 1 + accepted / max(1, drafts), answers


def theirs(job: dict[str, Any], python: Path, folder: Path) -> tuple[float, list[list[int]]]:
    """The same from vLLM's own counters."""
    source, destination = folder / "job.json", folder / "result.json"
    source.write_text(json.dumps(job))
    script = Path(__file__).with_name("vllm_side.py")
    environment = {**os.environ, **VARIABLES}
    process = subprocess.Popen(
        [python, script, source, destination], env=environment, cwd=folder, start_new_session=True
    )
    try:
        if code := process.wait(timeout=PATIENCE):
            sys.exit(f"vLLM failed with exit code {code}; its messages are above")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its engine is a process of its own, which outlives a killed parent
    result = json.loads(destination.read_text())
    counters = result["counters"]
    drafts = counters["vllm:spec_decode_num_drafts"]
    return 1 + counters["vllm:spec_decode_num_accepted_tokens"] / max(1, drafts), result["answers"]


def prompts_of(args: argparse.Namespace, engine: Engine) -> list[list[int]]:
    """Token ids: of a file, or of Spec-Bench questions spread over its six groups."""
    if args.prompts is not None:
        found: list[list[int]] = json.loads(args.prompts.read_text())
        return found
    groups = groups_of(args.data, -(-args.questions // 6)).values()
    texts = [rows[index] for index in range(max(map(len, groups))) for rows in groups if index < len(rows)]
    return [engine.encode(text) for text in texts[: args.questions]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--vllm-python", type=Path, default=Path("/tmp/vllm-env/bin/python"))
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "spec_bench.jsonl")
    parser.add_argument("--prompts", type=Path, help="JSON list of prompts as token ids, instead of --data")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    if not args.vllm_python.exists():
        sys.exit(f"there is no {args.vllm_python}; docs/interoperability.md says how to make vLLM's environment")
    head = head_file(args.head)
    engine = our_engine(head)
    prompts = prompts_of(args, engine)
    with tempfile.TemporaryDirectory(prefix="vllm-check-") as name:
        folder = Path(name)
        export(MODEL, folder / "target")
        facts = facts_of(load_model(MODEL, EngineConfig()).model, str(folder / "target"))
        convert(head, folder / "head", "outrider", "eagle3", facts)
        job = {"model": str(folder / "target"), "head": str(folder / "head"), "steps": STEPS, "tokens": args.tokens}
        job |= {"stop": sorted(engine.tokenizer.eos_ids), "prompts": prompts}
        length, answers = theirs(job, args.vllm_python, folder)
    mine, own_answers = ours(engine, prompts, args.tokens)
    same = sum(a == b for a, b in zip(answers, own_answers, strict=True))
    difference = mine / length - 1
    print(f"acceptance length, chain of {STEPS}, {len(prompts)} prompts, {args.tokens} tokens: ", end="")
    print(f"Outrider {mine:.3f}, vLLM {length:.3f} ({difference:+.1%}); {same} answers equal token by token")
    if abs(difference) > TOLERANCE:
        sys.exit(f"they differ by more than {TOLERANCE:.0%}")


if __name__ == "__main__":
    main()
