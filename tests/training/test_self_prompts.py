"""Prompts that the target writes itself: where the user's turn begins, what the filter drops, and going on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_targets import CHAT, chat_tokenizer, toy_target, write_rows

from outrider.errors import InvalidOptionError, RunError, UsageError
from outrider.training.prompt_filter import Bounds, ExcludedTexts, PromptFilter, Written, read_excluded, words
from outrider.training.self_prompts import SelfPromptOptions, WrittenPrompts, user_turn_start, write_prompts

NOTHING = ExcludedTexts()
LOOSE = Bounds(min_words=1, max_characters=1500)
"""The toy writes letters, not words."""


def quiet(_done: int, _total: int) -> None: ...


def write(output: Path, count: int = 12, excluded: ExcludedTexts = NOTHING, **options: object) -> WrittenPrompts:
    chosen = SelfPromptOptions(count, max_new_tokens=80, bounds=LOOSE, **options)  # type: ignore[arg-type]
    return write_prompts(toy_target(sharpness=0.5), chosen, excluded, output, quiet)


def prompts(output: Path) -> list[str]:
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert all(row.keys() == {"prompt", "source"} and row["source"] == "self" for row in rows)
    return [row["prompt"] for row in rows]


# -- the filter ------------------------------------------------------------------------------------------------


def keep(*texts: str | Written, excluded: tuple[str, ...] = (), bounds: Bounds | None = None) -> tuple[list[str], dict]:
    chosen = PromptFilter(ExcludedTexts(excluded), bounds)
    turns = [text if isinstance(text, Written) else Written(text, True) for text in texts]
    return [text for turn in turns if (text := chosen.keep(turn)) is not None], dict(chosen.dropped)


def test_words_ignore_case_and_punctuation() -> None:
    assert words("Don't SHOUT,  ＡＢＣ!\n") == ("don", "t", "shout", "abc")
    assert words("你好 world") == ("你", "好", "world")


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (Written("what is a good name for a cat", False), "not finished"),
        (Written("what is a good name for a cat", True, has_specials=True), "special tokens"),
        (Written("what is a good\x00 name", True), "not printable"),
        (Written("what is a good \ufffd name", True), "not printable"),
        (Written("Hi there", True), "too short"),
        (Written("", True), "too short"),
        (Written("word " * 301, True), "too long"),
        (Written("the same words again " * 10, True), "repetitive"),
    ],
)
def test_unfit_turns_are_dropped_and_counted(turn: Written, reason: str) -> None:
    assert keep(turn, "what is a good name for a dog") == (["what is a good name for a dog"], {reason: 1})


def test_bounds_are_inclusive() -> None:
    bounds = Bounds(min_words=3, max_characters=11)
    assert keep("one two six", "one two", "one two sixt", bounds=bounds)[1] == {"too short": 1, "too long": 1}


def test_outer_blanks_go_and_lines_stay() -> None:
    assert keep("  Sort these:\n\tb, a, c \n")[0] == ["Sort these:\n\tb, a, c"]


def test_near_duplicates_are_dropped() -> None:
    first = "Can you tell me how to bake a loaf of bread without an oven at home"
    kept, dropped = keep(
        first,
        "can you tell me how to bake a loaf of bread, without an oven, at home??",  # equal as words
        "Please: can you tell me how to bake a loaf of bread without an oven at the office",  # most runs are shared
        "Can you tell me how to bake a loaf of rye and of wheat, and which of the two my children will rather eat",
        "What is bread?",
        "what is BREAD",
    )
    assert [text.split()[-1] for text in kept] == ["home", "eat", "bread?"]
    assert dropped == {"near-duplicate": 3}


EVALUATION = "Janet's ducks lay 16 eggs per day. She eats three for breakfast every morning."


@pytest.mark.parametrize(
    "text",
    [
        "janet s DUCKS lay 16 eggs per day she eats three for breakfast every morning",
        "My friend's ducks lay 16 eggs per day, she eats three and sells the others",  # 8 words in a row
        "lay 16 eggs per day",  # a short prompt inside the evaluation text
        "Tell me now: what is the capital of France, and why?",  # a short evaluation text inside the prompt
        "hello world",
    ],
)
def test_evaluation_texts_are_kept_out(text: str) -> None:
    excluded = (EVALUATION, "What is the capital of France?", "Hello, world!")
    assert keep(text, excluded=excluded, bounds=LOOSE) == ([], {"close to an evaluation text": 1})


@pytest.mark.parametrize(
    "text",
    ["How many eggs do ducks lay per day?", "hello world and all", "lay 16 eggs", "What is the capital of Mali?"],
)
def test_other_texts_are_not(text: str) -> None:
    excluded = (EVALUATION, "What is the capital of France?", "Hello, world!")
    assert keep(text, excluded=excluded)[0] == [text]


def test_every_text_of_an_evaluation_row_counts(tmp_path: Path) -> None:
    file = write_rows(
        tmp_path / "e.jsonl",
        {"id": 3, "turns": ["What is the first thing?", "And what is the second?"]},
        {"question": "Who did it?", "more": {"answer": ["The butler did it."]}},
    )
    excluded = read_excluded([file])
    for text in ("what is the first thing", "and what is the second", "who did it", "the butler did it"):
        assert excluded.is_close(words(text))
    assert not excluded.is_close(words("what is the third thing"))


def test_bad_evaluation_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the evaluation texts"):
        read_excluded([tmp_path / "none.jsonl"])
    (tmp_path / "e.jsonl").write_text('{"prompt": "a"}\nnot json\n')
    with pytest.raises(UsageError, match="line 2 is not JSON"):
        read_excluded([tmp_path / "e.jsonl"])


# -- writing ---------------------------------------------------------------------------------------------------


def test_the_users_turn_begins_where_the_template_writes_it() -> None:
    tokenizer = chat_tokenizer("S{{ '-' }}<|endoftext|>" + CHAT)
    assert tokenizer.decode(user_turn_start(tokenizer), skip_special_tokens=False) == "S-<|endoftext|>u-"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0].content | upper }}", "does not write the user's text"),
        ("x{{ messages[0].content }}{{ messages[0].content }}", "does not write the user's text"),
        ("{{ messages[0].content }}!", "nothing says whose turn"),
        (None, "no chat template"),
    ],
)
def test_templates_that_do_not_serve(template: str | None, words: str) -> None:
    tokenizer = toy_target(template).tokenizer
    with pytest.raises(InvalidOptionError, match=words):
        user_turn_start(tokenizer)


def test_output_is_a_function_of_the_seed(tmp_path: Path) -> None:
    written = write(tmp_path / "a.jsonl", batch=3)
    found = prompts(tmp_path / "a.jsonl")
    assert written.kept == len(found) > 3
    assert written.kept + sum(written.dropped.values()) == 12
    write(tmp_path / "b.jsonl", batch=7)
    write(tmp_path / "c.jsonl", seed=1)
    assert prompts(tmp_path / "b.jsonl") == found
    assert not set(prompts(tmp_path / "c.jsonl")) & set(found)


def test_more_turns_keep_the_prompts_so_far(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", count=6)
    before = prompts(tmp_path / "a.jsonl")
    write(tmp_path / "a.jsonl", count=12)
    write(tmp_path / "b.jsonl", count=12)
    assert prompts(tmp_path / "a.jsonl")[: len(before)] == before
    assert prompts(tmp_path / "a.jsonl") == prompts(tmp_path / "b.jsonl")


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    found = prompts(tmp_path / "a.jsonl")
    journal = tmp_path / "a.jsonl.turns"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:5]) + lines[5][:9])  # torn in its sixth line
    (tmp_path / "a.jsonl").unlink()
    write(tmp_path / "a.jsonl")
    assert prompts(tmp_path / "a.jsonl") == found
    assert sorted(json.loads(line).get("n", -1) for line in journal.read_text().splitlines()) == list(range(-1, 12))


def test_a_journal_of_other_settings_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    with pytest.raises(UsageError, match="begun with seed=0, now it is 5"):
        write(tmp_path / "a.jsonl", seed=5)
    (tmp_path / "a.jsonl.turns").write_text("something else\n")
    with pytest.raises(UsageError, match="was not written by 'outrider train prompts'"):
        write(tmp_path / "a.jsonl")


def test_the_filter_may_change_without_new_turns(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    found = prompts(tmp_path / "a.jsonl")
    journal = (tmp_path / "a.jsonl.turns").read_bytes()
    write(tmp_path / "a.jsonl", excluded=ExcludedTexts(found[:1]))
    assert prompts(tmp_path / "a.jsonl") == found[1:]
    assert (tmp_path / "a.jsonl.turns").read_bytes() == journal


def test_a_full_disk_keeps_the_output_of_before(tmp_path: Path) -> None:
    from test_feature_shards import largest_file

    write(tmp_path / "a.jsonl", count=6)
    before = (tmp_path / "a.jsonl").read_bytes()
    with largest_file((tmp_path / "a.jsonl.turns").stat().st_size + 50), pytest.raises(RunError, match="make room"):
        write(tmp_path / "a.jsonl", count=12)
    assert (tmp_path / "a.jsonl").read_bytes() == before
    write(tmp_path / "a.jsonl", count=12)
    write(tmp_path / "b.jsonl", count=12)
    assert prompts(tmp_path / "a.jsonl") == prompts(tmp_path / "b.jsonl")
