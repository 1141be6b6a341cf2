"""The other engines that `benchmark.py` times beside Outrider, each given the same prompt tokens and token count."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from outrider.models.gguf import GGUFCheckpoint


@dataclass(frozen=True)
class Timing:
    """Tokens and seconds of one request; ``first`` is the time to the first token."""

    tokens: tuple[int, ...]
    first: float
    total: float

    @property
    def decode_rate(self) -> float:
        return (len(self.tokens) - 1) / (self.total - self.first)

    @property
    def end_to_end_rate(self) -> float:
        return len(self.tokens) / self.total


class _Watch:
    """A transformers streamer that only notes when tokens arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Transformers:
    """`generate` of transformers on the same (dequantised) weights."""

    def __init__(self, checkpoint: GGUFCheckpoint, dtype: torch.dtype) -> None:
        self.model = transformers_model(checkpoint, dtype)

    def run(self, prompt: list[int], count: int) -> Timing:
        watch = _Watch()
        started = time.perf_counter()
        output = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            streamer=watch,
            pad_token_id=0,
        )
        # The streamer is first called with the prompt, then once per token.
        return Timing(tuple(output[0, len(prompt) :].tolist()), watch.times[1] - started, watch.times[-1] - started)


def transformers_model(checkpoint: GGUFCheckpoint, dtype: torch.dtype) -> torch.nn.Module:
    """A transformers Llama holding the checkpoint's dequantised weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = checkpoint.config
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.context_length,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_full.theta},
        tie_word_embeddings=shape.tie_embeddings,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {name: checkpoint.tensor(name).to(dtype) for name in checkpoint.names()}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    # Buffers made on the meta device (rotary frequencies) are made anew.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


_LLAMA_CHILD = r"""
import json, sys, time
import numpy as np, llama_cpp as L
path, threads = sys.argv[1], int(sys.argv[2])
llm = L.Llama(model_path=path, n_ctx=2048, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
ctx, vocab = llm._ctx.ctx, llm.n_vocab()
def forward(tokens, start):
    batch = L.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, t in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = t, start + i, 1, 0
        batch.logits[i] = i == len(tokens) - 1
    assert L.llama_decode(ctx, batch) == 0
    L.llama_batch_free(batch)
    return int(np.ctypeslib.as_array(L.llama_get_logits_ith(ctx, -1), (vocab,)).argmax())
print(json.dumps({"ready": L.__version__}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    L.llama_memory_clear(L.llama_get_memory(ctx), True)
    started = time.perf_counter()
    prompt = job["prompt"]
    for start in range(0, len(prompt), 512):
        token = forward(prompt[start:start + 512], start)
    first = time.perf_counter() - started
    out = [token]
    while len(out) < job["count"]:
        out.append(forward(out[-1:], len(prompt) + len(out) - 1))
    print(json.dumps({"tokens": out, "first": first, "total": time.perf_counter() - started}), flush=True)
"""


class LlamaCpp:
    """llama.cpp through llama-cpp-python in its own process and environment, stopped while others are timed."""

    def __init__(self, python: str, path: str, threads: int) -> None:

        environment = dict(os.environ)
        self.process = subprocess.Popen(
            [python, "-c", _LLAMA_CHILD, path, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.version = self._read()["ready"]
        self.process.send_signal(signal.SIGSTOP)

    def run(self, prompt: list[int], count: int) -> Timing:
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps({"prompt": prompt, "count": count}) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        self.process.send_signal(signal.SIGSTOP)
        return Timing(tuple(answer["tokens"]), answer["first"], answer["total"])

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()

    def _read(self) -> dict[str, object]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit("llama.cpp's process ended; is llama-cpp-python installed in the environment given?")
        return json.loads(line)
