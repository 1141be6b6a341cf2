"""Any other attention-only causal language model, run by transformers under the same contract as ``models/decoder.py``.

Slower than our decoder (module overhead, one forward per sequence of a batch), but exact: the tree mask is given as a
4-D additive mask, positions explicitly, keys and values live in our own cache. What cannot be rolled back is refused
(``models/hf_support.py``). Early exits are not supported. Knows nothing of tokenizers.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from outrider.errors import ContextLengthError, ModelFileError, UnsupportedModelError
from outrider.models.base import FINAL_HIDDEN, FULL, LanguageModel, Segment, SegmentOutput, Sublayers
from outrider.models.hf_cache import TransformersCache
from outrider.models.hf_support import attention_layout, check_config, context_length, self_check
from outrider.models.request import check_request

__all__ = ["TransformersCache", "TransformersModel"]


class TransformersModel(LanguageModel):
    """A transformers model in evaluation mode, already on its device and in its dtype.

    Attributes:
        bos_id, eos_ids: special tokens of its generation configuration.

    Raises:
        UnsupportedModelError: when the model keeps state that cannot be rolled back, or fails the self-check (a few
            forwards on random tokens).
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        config = model.config
        check_config(config)
        text = config.get_text_config(decoder=True)
        self.name = name
        self.model = model.eval().requires_grad_(False)
        self.device = model.device
        self.dtype = model.dtype
        self.num_layers = int(text.num_hidden_layers)
        self.hidden_size = int(text.hidden_size)
        self.context_length = context_length(config)
        self.layout = attention_layout(config)
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        head = model.get_output_embeddings()
        self.vocab_size = int(text.vocab_size if head is None else head.weight.shape[0])
        self.bos_id, self.eos_ids = _special_tokens(model)
        self._require("position_ids")
        self._require("attention_mask")
        self._cache_name = "cache" if "cache" in self._accepted else "past_key_values"
        self._require(self._cache_name)
        self_check(self, self._plain_logits, self.layout)

    @classmethod
    def from_directory(
        cls, path: str | Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False
    ) -> TransformersModel:
        """Load a local transformers directory: safetensors where there are some, else pickles of plain tensors.

        Args:
            trust_remote_code: run Python code that the directory brings along.

        Raises:
            UnsupportedModelError: an architecture that transformers does not know, that needs the directory's own code
                (when not trusted), or whose state cannot be rolled back; before weights are read where possible.
            ModelFileError: no, damaged, unsafe or incomplete files.
        """
        config = _read_config(Path(path), trust_remote_code)
        check_config(config)
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                str(path),
                config=config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                weights_only=True,
                output_loading_info=True,
            )
        except ImportError as error:
            raise UnsupportedModelError(f"{path} needs a missing package: {_first_line(error)}; install it") from error
        except Exception as error:  # transformers and safetensors raise many kinds for a damaged file
            raise ModelFileError(f"cannot load {path}: {_first_line(error)}; download it again") from error
        missing = sorted(report["missing_keys"])
        if missing:
            # transformers would run with random values there.
            raise ModelFileError(f"{path} has no tensor '{missing[0]}'; the model is incomplete, download it again")
        return cls(model.to(device), str(path))

    def new_cache(self) -> TransformersCache:
        return TransformersCache(self.layout.has_entries)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        rows: Tensor = self.model.get_input_embeddings()(tokens.to(self.device))
        return rows

    @torch.inference_mode()
    def output_rows(self, tokens: Tensor | None = None) -> Tensor:
        head = self.model.get_output_embeddings()
        if head is None:
            raise UnsupportedModelError(f"{self.name} has no output matrix that a draft head could share")
        rows: Tensor = head.weight if tokens is None else head.weight[tokens.to(self.device)]
        return rows

    @torch.inference_mode()
    def forward(
        self, segments: Sequence[Segment], hidden: Sequence[str | int] = (), skip: Sublayers = FULL
    ) -> list[SegmentOutput]:
        """See ``LanguageModel.forward``; segments are evaluated one after the other.

        Raises:
            ValueError: for ``skip``, an unknown hidden state, a wrong mask shape or a cache given twice.
            ContextLengthError: for a position beyond the model's context.
        """
        if skip:
            raise ValueError(f"{self.name} runs through transformers, which cannot skip sublayers")
        check_request(segments, hidden, self.num_layers)
        return [self._evaluate(segment, hidden) for segment in segments]

    # -- one segment ---------------------------------------------------------------------------------------

    def _evaluate(self, segment: Segment, hidden: Sequence[str | int]) -> SegmentOutput:
        cache = segment.cache
        if not isinstance(cache, TransformersCache):
            raise TypeError(f"{self.name} needs its own TransformersCache, got {type(cache).__name__}")
        cache.settle()
        positions = segment.resolved_positions()
        if max(positions) >= self.context_length:
            raise ContextLengthError(
                f"position {max(positions)} is beyond {self.name}'s context of {self.context_length}; shorten the text"
            )
        tokens = torch.tensor([list(segment.tokens)], device=self.device)
        wanted = list(range(len(positions)) if segment.logit_rows is None else segment.logit_rows)
        options: dict[str, Any] = {
            "attention_mask": self._masks(segment, cache, positions),
            "position_ids": torch.tensor([positions], device=self.device),
            self._cache_name: cache.dynamic,
        }
        if "cache_position" in self._accepted:
            start = cache.length + cache.scratch
            options["cache_position"] = torch.arange(start, start + len(positions), device=self.device)
        if hidden:
            options["output_hidden_states"] = True
        selects = "logits_to_keep" in self._accepted
        if selects:
            # An empty index is not understood by every head, so one row is computed and dropped.
            options["logits_to_keep"] = torch.tensor(wanted or [0], device=self.device)
        output = self.model(input_ids=tokens, use_cache=True, **options)
        self._check_written(cache, len(positions))
        cache.add_scratch(positions)
        rows = torch.arange(len(wanted)) if selects else torch.tensor(wanted, dtype=torch.long)
        logits = output.logits[0].index_select(0, rows.to(output.logits.device)).to(self.device)
        return SegmentOutput(logits, self._states(output.hidden_states, hidden) if hidden else {})

    def _masks(self, segment: Segment, cache: TransformersCache, positions: list[int]) -> Tensor | dict[str, Tensor]:
        """Additive masks [1, 1, n, entries] of the kinds of layers: one tensor, or a dictionary where kinds differ."""
        rows, before = len(positions), cache.length + cache.scratch
        visible = torch.ones((rows, before + rows), dtype=torch.bool)
        if segment.mask is None:
            visible.tril_(before)
        else:
            if segment.mask.shape != (rows, cache.scratch + rows):
                raise ValueError(f"mask of shape {segment.mask.shape}, not {(rows, cache.scratch + rows)}")
            visible[:, cache.length :] = torch.from_numpy(segment.mask)
        # Tree rows share positions, so an entry's slot says nothing about its distance.
        places = torch.tensor([*range(cache.length), *cache.scratch_positions, *positions])
        own = torch.tensor(positions)[:, None]
        lowest = torch.finfo(self.dtype).min
        masks: dict[str, Tensor] = {}
        for kind, window in self.layout.windows.items():
            seen = visible if window is None else visible & (places[None, :] > own - window)
            bias = torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, lowest)
            masks[kind] = bias[None, None].to(self.device)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _check_written(self, cache: TransformersCache, rows: int) -> None:
        wanted = cache.length + cache.scratch + rows
        found = {layer.get_seq_length() for layer in cache.layers}
        if found != {wanted}:
            raise UnsupportedModelError(
                f"{self.name} did not write to the cache it was given ({sorted(found)} entries, not {wanted}): it "
                "keeps state elsewhere, which cannot be rolled back; use a model of another architecture"
            )

    def _states(self, states: Sequence[Tensor] | None, wanted: Sequence[str | int]) -> dict[str | int, Tensor]:
        if states is None or len(states) != self.num_layers + 1:
            raise UnsupportedModelError(
                f"{self.name} does not return the hidden states of its {self.num_layers} blocks; "
                "use a drafter that needs none (for example ngram)"
            )
        last = self.num_layers
        return {name: states[last if name == FINAL_HIDDEN else int(name)][0].to(self.device) for name in wanted}

    @torch.inference_mode()
    def _plain_logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [n, vocab_size] as anyone would compute them: no cache, no mask, no positions."""
        logits: Tensor = self.model(input_ids=torch.tensor([list(tokens)], device=self.device), use_cache=False).logits
        return logits[0].to(self.device)

    def _require(self, parameter: str) -> None:
        if parameter not in self._accepted:
            raise UnsupportedModelError(
                f"{self.name}: {type(self.model).__name__}.forward takes no '{parameter}', so token trees cannot be "
                "evaluated; use a model of another architecture"
            )


def _read_config(path: Path, trust_remote_code: bool) -> PretrainedConfig:
    if not (path / "config.json").is_file():
        raise ModelFileError(f"{path} has no config.json; give a transformers model directory")
    try:
        return AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code, local_files_only=True)
    except OSError as error:
        raise ModelFileError(f"cannot read {path / 'config.json'}: {_first_line(error)}") from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(
            f"transformers cannot run the model in {path}: {_first_line(error)}; a model that brings its own code runs "
            "only with trust_remote_code, if you trust its author"
        ) from error


def _special_tokens(model: PreTrainedModel) -> tuple[int | None, tuple[int, ...]]:
    """(bos, all eos) of the generation configuration, else of the model's."""
    sources = [source for source in (model.generation_config, model.config.get_text_config(decoder=True)) if source]
    bos = next((s.bos_token_id for s in sources if getattr(s, "bos_token_id", None) is not None), None)
    eos = next((s.eos_token_id for s in sources if getattr(s, "eos_token_id", None) is not None), ())
    return bos, tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
