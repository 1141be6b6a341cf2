"""Two models, two heads, two tokenizers: which ids mean the same token."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from torch import Tensor

from engine.tiny_engines import build_engine, letters_tokenizer, loaded, random_prompts
from outrider.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.errors import IllegalCombinationError
from outrider.models.base import FULL, Sublayers
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.text.running_encoding import RunningEncoding
from outrider.text.tokenizer import Tokenizer
from outrider.text.translate import Translator
from outrider.types import ProposalKind
from text.tiny_tokenizers import byte_level, byte_level_metadata, sentencepiece
from user_issues.toy_decoding import plain_text


class LikesPadding(ToyModel):
    """Rows of the head from 10 on, which no token has, are its best ones."""

    def _logits(self, view: object, skip: Sublayers = FULL) -> Tensor:
        logits = super()._logits(view, skip).clone()  # type: ignore[arg-type]
        logits[10:] += 50.0
        return logits


@pytest.mark.parametrize("drafter", ["small_model", "cross_tokenizer"])
@pytest.mark.parametrize(("target_rows", "draft_rows"), [(10, 12), (12, 10), (12, 14)])
def test_vocabulary_padded_heads_u69(drafter: str, target_rows: int, draft_rows: int) -> None:
    """Heads padded to 151936 and 152064 rows were refused as a pair, though the tokenizer was one and the same.

    Tokenizers are compared, not heads: the pair runs, and a padding row is neither guessed nor emitted.
    """
    models_ = {"target": LikesPadding(target_rows, order=2), "draft": LikesPadding(draft_rows, order=2, noise=0.1)}
    for proposal, temperature in ((None, 0.0), (ProposalKind.DETERMINISTIC, 1.2), (ProposalKind.IID, 1.2)):
        shape = "chain:3" if proposal is ProposalKind.IID else "widths:2,2"
        engine = build_engine(drafter, shape, proposal, tokenizer=letters_tokenizer(10), **models_)  # type: ignore[arg-type]
        for prompt in random_prompts(3, 10, seed=69):
            params = SamplingParams(max_tokens=20, temperature=temperature, seed=1, ignore_eos=True)
            result = engine.generate(prompt, params)
            assert max(result.tokens) < 10
            assert max(token for record in result.records for token in record.tokens) < 10
            assert result.stats.num_accepted_tokens > 0


def test_vocabulary_identity_translation_u71() -> None:
    """With the same tokenizer on both sides and heads of two sizes the translator crashed on a missing attribute.

    It is the identity: the guesses and the text are those of ``small_model``, tree by tree.
    """
    target, draft = ToyModel(10, order=2, seed=3), ToyModel(13, order=2, seed=3, noise=0.3)
    tokenizer = letters_tokenizer(10)
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=71, ignore_eos=True)
        seen = []
        for drafter in ("cross_tokenizer", "small_model"):
            engine = build_engine(drafter, "chain:4", target=target, draft=draft, tokenizer=tokenizer)
            result = engine.generate([2, 7], params)
            seen.append((result.tokens, [record.tokens for record in result.records]))
        assert seen[0] == seen[1]
    assert Translator(tokenizer, tokenizer).is_identity
    both = Translator(tokenizer, letters_tokenizer(10)).shared
    assert [ids.tolist() for ids in both] == [list(range(10))] * 2


@pytest.mark.parametrize(
    ("target", "draft"), [(byte_level, sentencepiece), (sentencepiece, byte_level), (sentencepiece, sentencepiece)]
)
@pytest.mark.parametrize("piece", [1, 2, 3, 50])
def test_vocabulary_one_bos_and_every_space_u73(
    target: Callable[[], Tokenizer], draft: Callable[[], Tokenizer], piece: int
) -> None:
    """Every re-encoding put a BOS token in front, and cleaned-up spaces made the two texts drift apart.

    However the text arrives, its draft encoding is that of the whole text: one BOS where that tokenizer has one, and
    double spaces at the beginning, inside and at the end stay double.
    """
    text = "  the  in the   . , 12  "
    translator = Translator(target(), draft())
    ids = translator.target.encode(text)
    encoding = RunningEncoding(translator)
    for start in range(0, len(ids), piece):
        encoding.extend(ids[start : start + piece])
        if translator.to_draft.adds_bos:
            assert encoding.tokens.count(translator.draft.bos_id or 0) == 1
    assert encoding.tokens == translator.draft.encode(text)
    assert translator.draft.decode(encoding.tokens) == text


def test_vocabulary_smaller_draft_head_u74() -> None:
    """A draft head with fewer rows was saved without its map; rows were read as ids 0 ... N - 1 and nothing fitted.

    Heads with a ``d2t`` map come with the trained heads and are not loaded yet. A draft model whose head has fewer
    rows than the target's tokenizer has tokens is taken to speak the first ids of that tokenizer, which its own
    tokenizer must confirm: missing rows get no probability, the others are the target's ids, and a draft model that
    agrees with the target is right wherever its vocabulary reaches.
    """
    target, draft = ToyModel(12, order=2, seed=3), ToyModel(9, order=2, seed=3)
    prompt, params = [1, 11, 10, 3], SamplingParams(max_tokens=60, ignore_eos=True)
    engine = build_engine("small_model", "chain:1", target=target, draft=draft)
    result = engine.generate(prompt, params)
    assert result.tokens == plain_text(target, prompt, 60)
    text = [*prompt, *result.tokens]
    sure = 0
    for record in result.records[1:-1]:
        before = text[: len(prompt) + record.position]
        assert record.drafted == 1
        assert record.tokens[1] < 9
        if max(before[-2:]) < 9:  # what the draft model cannot read it takes for another token
            assert record.accepted == (int(target.logits_after(before).argmax()) < 9)
            sure += 1
    assert sure > 10
    other = loaded(draft, Tokenizer(letters_tokenizer(9, with_end=False).backend), "other")
    with pytest.raises(IllegalCombinationError, match="shared ids mean different tokens"):
        Engine(EngineConfig(drafter="small_model", draft_model="other"), loaded(target), [other])


def test_vocabulary_declared_type_u75() -> None:
    """An update compared the declared kinds of the vocabularies, and refused pairs that had always worked.

    Pairs that spell every id alike are accepted whatever they declare; a spelling that differs is named and refused.
    """
    declared = [Tokenizer.from_gguf(byte_level_metadata(pre)) for pre in ("smollm", "llama-bpe")]
    declared.append(Tokenizer(Backend(WordLevel(byte_level().vocabulary(), unk_token="a")), eos_ids=[0]))
    for one, other in permutations(declared, 2):
        size = one.vocab_size
        target, draft = ToyModel(size, order=2, seed=3), ToyModel(size, order=2, seed=3)
        config = EngineConfig(model="tiny", drafter="small_model", draft_model="tiny-draft", adaptive=False)
        stats = (
            Engine(config, loaded(target, one), [loaded(draft, other, "tiny-draft")])
            .generate([3, 4], SamplingParams(max_tokens=20, ignore_eos=True))
            .stats
        )
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 10
    with pytest.raises(IllegalCombinationError, match=r"the first is 0: '<\|endoftext\|>' in one, 'a' in the other"):
        Engine(
            config, loaded(target, letters_tokenizer(12)), [loaded(draft, letters_tokenizer(12, False), "tiny-draft")]
        )
