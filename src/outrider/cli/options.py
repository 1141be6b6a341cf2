"""Options that several commands share, and their way into the engine's configuration and the sampling parameters.

Defaults come from ``EngineConfig`` and ``SamplingParams``; they are stated there only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from outrider.config import EngineConfig
from outrider.errors import InvalidOptionError
from outrider.sampling.params import SamplingParams

ENGINE = EngineConfig()
SAMPLING = SamplingParams()

_PARTS, _SAMPLING, _RUNNING = "Speculation", "Sampling", "Model and machine"

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="Catalogue name, directory, .gguf file or hub id.", rich_help_panel=_RUNNING),
]
Drafter = Annotated[
    str, typer.Option(help="Where guesses come from: NAME or NAME:OPTION=VALUE,...", rich_help_panel=_PARTS)
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        help="Second, smaller model for drafters that need one; several with commas. (default: none)",
        rich_help_panel=_PARTS,
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(
        help="Tree of guesses, e.g. chain:8 or widths:1,1,3. (default: the drafter's)", rich_help_panel=_PARTS
    ),
]
Proposal = Annotated[
    str | None,
    typer.Option(
        help="deterministic, iid or without_replacement. (default: what suits drafter and temperature)",
        rich_help_panel=_PARTS,
    ),
]
Verifier = Annotated[
    str | None,
    typer.Option(
        help="Rule that accepts guesses. (default: greedy at temperature 0; above, sample_match or, drawn, multi_step)",
        rich_help_panel=_PARTS,
    ),
]
MaxNodes = Annotated[
    int | None,
    typer.Option(help="Guesses per step at most, 0 to 4096. (default: what the shape makes)", rich_help_panel=_PARTS),
]
Lossy = Annotated[
    bool,
    typer.Option("--lossy", help="Admit a verifier that changes the output (typical).", rich_help_panel=_PARTS),
]
Adaptive = Annotated[
    bool,
    typer.Option(
        "--adaptive/--no-adaptive", help="Turn speculation down where it does not pay.", rich_help_panel=_PARTS
    ),
]
Dtype = Annotated[
    str, typer.Option(help="float32, bfloat16, float16 or auto (the hardware's best).", rich_help_panel=_RUNNING)
]
Weights = Annotated[str, typer.Option(help="How weights are held: bf16, int8, int4 or auto.", rich_help_panel=_RUNNING)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=_RUNNING)]
Threads = Annotated[
    int | None, typer.Option(help="Compute threads, at least 1. (default: one per core)", rich_help_panel=_RUNNING)
]
Fallback = Annotated[
    bool, typer.Option("--fallback", help="Run the model through transformers (slower).", rich_help_panel=_RUNNING)
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="With --fallback: run Python code of the model.", rich_help_panel=_RUNNING
    ),
]

Temperature = Annotated[
    float, typer.Option("--temperature", "-t", help="0 is greedy; 0 to 100.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int, typer.Option(help="Keep the k best tokens; 0 keeps all.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float, typer.Option(help="Keep the best tokens up to this mass; above 0, to 1.", rich_help_panel=_SAMPLING)
]
MinP = Annotated[
    float, typer.Option(help="Drop tokens below this share of the best; 0 to 1.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[
    int | None,
    typer.Option(help="Makes sampling repeatable; 0 to 2^64-1. (default: random)", rich_help_panel=_SAMPLING),
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "-n", help="Output tokens at most, from 0.", rich_help_panel=_SAMPLING)
]
MinTokens = Annotated[int, typer.Option(help="No stop before this many output tokens.", rich_help_panel=_SAMPLING)]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", help="Text that ends the output; may be repeated. (default: none)", rich_help_panel=_SAMPLING
    ),
]
StopTokenId = Annotated[
    list[int] | None,
    typer.Option(
        "--stop-token-id",
        help="Token id that ends the output; may be repeated. (default: none)",
        rich_help_panel=_SAMPLING,
    ),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after the model's end token.", rich_help_panel=_SAMPLING)
]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 0, to 100; 1 is off.", rich_help_panel=_SAMPLING)]
PresencePenalty = Annotated[float, typer.Option(help="-2 to 2; 0 is off.", rich_help_panel=_SAMPLING)]
FrequencyPenalty = Annotated[float, typer.Option(help="-2 to 2; 0 is off.", rich_help_panel=_SAMPLING)]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID=VALUE",
        help="Add VALUE to a token's logit; may be repeated. (default: none)",
        rich_help_panel=_SAMPLING,
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        help="Report log-probabilities and this many best tokens, 0 to 100. (default: off)", rich_help_panel=_SAMPLING
    ),
]
Grammar = Annotated[
    str | None, typer.Option(help="Not supported yet; refused when given. (default: none)", rich_help_panel=_SAMPLING)
]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the user said about the engine: the fields of ``EngineConfig``, unchecked."""

    model: str = ENGINE.model
    drafter: str = ENGINE.drafter
    draft_model: str | None = ENGINE.draft_model
    shape: str | None = ENGINE.shape
    proposal: str | None = ENGINE.proposal
    verifier: str | None = ENGINE.verifier
    max_nodes: int | None = ENGINE.max_nodes
    adaptive: bool = ENGINE.adaptive
    lossy: bool = ENGINE.lossy
    dtype: str = ENGINE.dtype
    weights: str = ENGINE.weights
    device: str = ENGINE.device
    threads: int | None = ENGINE.threads
    fallback: bool = ENGINE.fallback
    trust_remote_code: bool = ENGINE.trust_remote_code

    def to_dict(self) -> dict[str, object]:
        """Field -> value."""
        return asdict(self)


def parse_logit_bias(items: Sequence[str] | None) -> dict[int, float]:
    """``["198=-5", "11=2.5"]`` -> ``{198: -5.0, 11: 2.5}``.

    Raises:
        InvalidOptionError: for anything that is not ID=VALUE.
    """
    bias: dict[int, float] = {}
    for item in items or ():
        key, _, value = item.partition("=")
        try:
            bias[int(key)] = float(value)
        except ValueError:
            raise InvalidOptionError(f"--logit-bias '{item}' is not of the form ID=VALUE, for example 198=-5") from None
    return bias
