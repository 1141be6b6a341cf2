"""Collecting: which requests a prompt file makes, what is supervised, resuming, and every refusal."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from tiny_targets import CHAT, toy_target, write_rows

from outrider.errors import InvalidOptionError, RunError, UsageError
from outrider.models.toy import ToyModel
from outrider.training import collect_folder
from outrider.training.answer_tokens import export_answers, read_answers
from outrider.training.collect import CollectOptions, Progress, collect, replay, target_fingerprint
from outrider.training.collect_folder import CollectFolder
from outrider.training.prompt_data import Plan, PromptEncoder, read_prompt_files, tokens_at_most
from outrider.training.shards import Shard, iterate, open_folder, read_features, shard_paths

Texts = dict[int, tuple[list[int], int, float]]
"""Tokens, prompt length and temperature by index."""

ROWS = (
    {"prompt": "Hello there"},
    {"text": "two words"},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                  {"role": "user", "content": "c"}]},
    {"turns": ["first", "second", "third"]},
    {"prompt": "one more"},
)  # fmt: skip


def quiet(_: Progress) -> None: ...


def run(folder: Path, *rows: object, template: str | None = CHAT, **options: object) -> Progress:
    file = write_rows(folder.with_suffix(".jsonl"), *(rows or ROWS))
    values = {"max_new_tokens": 10, "batch": 3} | options
    return collect(toy_target(template), read_prompt_files([file]), CollectOptions.parse(**values), folder, quiet)


def texts(folder: Path) -> Texts:
    found: Texts = {}
    for shard, number in iterate(open_folder(folder)[1]):
        assert shard.index[number] not in found
        tokens = shard.tokens[shard.span(number)].tolist()
        found[shard.index[number]] = (tokens, shard.prompts[number], shard.temperature[number])
    return found


def prompt_texts(folder: Path) -> dict[int, str]:
    tokenizer = toy_target().tokenizer
    return {i: tokenizer.decode(t[:n], skip_special_tokens=False) for i, (t, n, _) in texts(folder).items()}


# -- which requests --------------------------------------------------------------------------------------------


def test_every_turn_is_answered_once(tmp_path: Path) -> None:
    progress = run(tmp_path / "f")
    assert sorted(texts(tmp_path / "f")) == list(range(7))
    assert (progress.total, progress.done, progress.skipped) == (7, 7, 0)


def test_temperatures_are_given_in_turn(tmp_path: Path) -> None:
    run(tmp_path / "f", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}, repeats=2, temperatures=(0.0, 0.5))
    assert [temperature for _, (_, _, temperature) in sorted(texts(tmp_path / "f").items())] == [0, 0.5, 0, 0.5, 0, 0.5]


def test_a_second_answer_at_temperature_0_is_not_made(tmp_path: Path) -> None:
    run(tmp_path / "f", {"prompt": "a"}, {"prompt": "b"}, repeats=4, temperatures=(0.0, 0.5))
    found = texts(tmp_path / "f")
    assert sorted(found) == [0, 1, 2, 3, 5, 6]
    assert found[1][0] != found[5][0]  # the same prompt at the same temperature, under another seed


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    progress = run(tmp_path / "f", {"prompt": "x" * 50}, {"prompt": "a"}, max_prompt_tokens=40)
    assert (progress.total, progress.done, progress.skipped) == (2, 1, 1)
    assert sorted(texts(tmp_path / "f")) == [1]


def test_a_conversation_stops_where_it_is_too_long(tmp_path: Path) -> None:
    progress = run(tmp_path / "f", {"turns": ["a" * 10, "b" * 30, "c"]}, max_prompt_tokens=30)
    assert (progress.total, progress.done, progress.skipped) == (3, 1, 2)


def test_nothing_fits(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="every prompt has more than 5 tokens"):
        run(tmp_path / "f", {"prompt": "too long for that"}, max_prompt_tokens=5)


def test_a_model_without_template_takes_plain_prompts(tmp_path: Path) -> None:
    run(tmp_path / "f", {"prompt": "abc"}, template=None)
    tokens, length, _ = texts(tmp_path / "f")[0]
    assert toy_target().tokenizer.decode(tokens[:length]) == "abc"


def test_conversations_need_a_template(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"line 2: the model has no chat template.*; line 3: "):
        run(tmp_path / "f", {"prompt": "abc"}, {"turns": ["a", "b"]}, ROWS[2], template=None)


# -- what is supervised (heads.md section 4, items 2 to 5) -------------------------------------------------------


def test_only_what_was_generated_is_supervised(tmp_path: Path) -> None:
    """Everything up to and with the generation prompt is prompt, whatever the conversation says before."""
    run(tmp_path / "f")
    assert prompt_texts(tmp_path / "f")[2] == "u-a<|endoftext|>a-b<|endoftext|>u-c<|endoftext|>a-"
    for shard, number in iterate(open_folder(tmp_path / "f")[1]):
        supervised = shard.best[shard.span(number)] >= 0
        length, first = shard.span(number).stop - shard.span(number).start, shard.prompts[number] - 1
        assert supervised.tolist() == [first <= row < length - 1 for row in range(length)]


def test_an_answer_that_repeats_the_prompt_is_supervised_at_its_own_place(tmp_path: Path) -> None:
    """Item 2: looking for the answer's text in the conversation finds its first copy; token counts do not."""
    row = {"messages": [{"role": "assistant", "content": "aaaa"}, {"role": "user", "content": "aaaa"}]}
    run(tmp_path / "f", row, max_new_tokens=4)
    tokens, length, _ = texts(tmp_path / "f")[0]
    expected = toy_target().tokenizer.encode("a-aaaa<|endoftext|>u-aaaa<|endoftext|>a-")
    assert tokens[:length] == expected


def test_the_templates_own_insertions_are_not_supervised(tmp_path: Path) -> None:
    """Item 4: what the template puts behind the generation prompt (empty thinking) is prompt."""
    thinking = CHAT.replace("a-{% endif %}", "a-TT{% endif %}")
    run(tmp_path / "f", {"prompt": "hi"}, template=thinking)
    assert prompt_texts(tmp_path / "f")[0] == "u-hi<|endoftext|>a-TT"


def test_any_separators_work(tmp_path: Path) -> None:
    """Item 3: nothing is looked for in the text, so a template's separators do not matter."""
    run(tmp_path / "f", {"prompt": "hi"}, template="{% for m in messages %}[[{{ m.content }}]]{% endfor %}>>")
    tokens, length, _ = texts(tmp_path / "f")[0]
    assert length == len(toy_target().tokenizer.encode("[[hi]]>>"))
    assert len(tokens) > length


def test_every_turn_is_a_sequence_of_its_own(tmp_path: Path) -> None:
    """Item 5: each turn's answer is supervised, behind the target's own earlier answers."""
    run(tmp_path / "f", {"turns": ["first", "second", "third"]})
    found, tokenizer = texts(tmp_path / "f"), toy_target().tokenizer
    conversation = ""
    for index, turn in enumerate(("first", "second", "third")):
        conversation += f"u-{turn}<|endoftext|>a-"
        tokens, length, temperature = found[index]
        assert tokenizer.decode(tokens[:length], skip_special_tokens=False) == conversation
        assert temperature == 0
        conversation += tokenizer.decode(tokens[length:]) + "<|endoftext|>"


def test_an_assistant_message_at_the_end_is_written_by_the_target(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "somebody else's"}]}
    run(tmp_path / "f", row)
    assert prompt_texts(tmp_path / "f")[0] == "u-a<|endoftext|>a-"


# -- bad input -------------------------------------------------------------------------------------------------


def test_every_bad_line_of_every_file_is_named(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    first.write_text('{"prompt": "fine"}\n{\n\n{"question": "?"}\n')
    assistant = {"role": "assistant", "content": "x"}
    write_rows(second, {"prompt": "fine"}, {"messages": [assistant]}, {"messages": [assistant]})
    with pytest.raises(UsageError) as caught:
        read_prompt_files([first, second])
    message = str(caught.value)
    assert f"{first}, line 2 is not JSON" in message
    assert "line 4 has no prompt" in message
    assert f"{second}, line 2, 3 holds nothing to answer" in message


def test_lines_of_other_encodings_and_endless_nesting_are_named(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    fine, deep = '{"prompt": "caf\u00e9"}\n', "[" * 100_000
    file.write_bytes(b"\xef\xbb\xbf" + fine.encode() + fine.encode("latin-1") + f"{deep}\n{fine}".encode())
    with pytest.raises(UsageError, match=r"line 2 is not UTF-8: .*; line 3 is not JSON: maximum recursion"):
        read_prompt_files([file])


def test_at_most_20_bad_lines_are_named(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("{\n" * 33)
    with pytest.raises(UsageError) as caught:
        read_prompt_files([file])
    assert str(caught.value).count("is not JSON") == 20
    assert "; and 13 more" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"repeats": 0}, "repeats=0"),
        ({"temperatures": (0.0, -1.0)}, "temperatures.1=-1.0"),
        ({"temperatures": ()}, "temperatures"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"batch": 0}, "batch=0"),
        ({"shard_megabytes": 65}, "shard_megabytes=65"),
        ({"features": (4,)}, "'4' is not a hidden state of toy.*0 to 3"),
        ({"features": ("last",)}, "'last' is not a hidden state"),
    ],
)
def test_bad_options(options: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match=words):
        run(tmp_path / "f", **options)
    assert not shard_paths(tmp_path / "f")


def test_too_little_room_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("outrider.training.collect.shutil.disk_usage", lambda _: usage(10**9, 0, 20_000_000))
    with pytest.raises(UsageError, match=r"may take 0\.\d\d GB more but .* has 0\.02 GB free"):
        run(tmp_path / "f", repeats=60, temperatures=(1.0,), max_new_tokens=1000)
    assert not (tmp_path / "f").exists()
    run(tmp_path / "f")


def test_the_estimate_is_an_upper_bound(tmp_path: Path) -> None:
    run(tmp_path / "f", repeats=2)
    target, rows = toy_target(), read_prompt_files([tmp_path / "f.jsonl"])
    plan = Plan(2, (0.0, 0.8), 0, 1024, 10)
    most, too_long = tokens_at_most(rows, PromptEncoder(target.tokenizer), plan)
    taken = sum(len(tokens) for tokens, _, _ in texts(tmp_path / "f").values())
    assert taken <= most <= 2 * taken
    assert too_long == 0


# -- going on --------------------------------------------------------------------------------------------------


def test_a_finished_run_has_nothing_left(tmp_path: Path) -> None:
    run(tmp_path / "f")
    before = {path.name: path.read_bytes() for path in (tmp_path / "f").iterdir()}
    assert run(tmp_path / "f").tokens == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "f").iterdir()} == before


def test_a_run_that_lost_shards_makes_the_same_answers_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_folder, "FLUSH_SECONDS", 0.0)  # each answer is a shard
    run(tmp_path / "f", repeats=2)
    whole, paths = texts(tmp_path / "f"), shard_paths(tmp_path / "f")
    assert len(paths) == 14
    for path in paths[1::2]:
        path.unlink()
    (tmp_path / "f" / "features-00003.part").write_bytes(b"half")
    run(tmp_path / "f", repeats=2)
    assert texts(tmp_path / "f") == whole
    assert not list((tmp_path / "f").glob("*.part"))


def test_more_repeats_keep_what_is_there(tmp_path: Path) -> None:
    run(tmp_path / "f")
    before = texts(tmp_path / "f")
    run(tmp_path / "f", repeats=3, temperatures=(0.0, 0.8))
    after = texts(tmp_path / "f")
    assert before.items() <= after.items()
    assert len(after) == 7 + 7 + 3 + 1  # turns at temperature 0 or 0.8, the other one, and 0.8 once more
    with pytest.raises(UsageError, match="repeats=3, now it is 2"):
        run(tmp_path / "f", repeats=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 11}, "max_new_tokens=10, now it is 11"),
        ({"temperatures": (0.0,)}, r"temperatures=\[0.0, 0.8\], now it is \[0.0\]"),
        ({"seed": 1}, "seed=0, now it is 1"),
        ({"max_prompt_tokens": 99}, "max_prompt_tokens=1024, now it is 99"),
        ({"features": (1,)}, "another features"),
        ({"template": CHAT + " "}, "another template"),
    ],
)
def test_other_settings_are_refused_by_name(options: dict[str, object], words: str, tmp_path: Path) -> None:
    run(tmp_path / "f")
    with pytest.raises(UsageError, match=words):
        run(tmp_path / "f", **options)  # type: ignore[arg-type]


def test_answers_through_other_kernels_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "f")
    monkeypatch.setattr(ToyModel, "weight_format", "int4")
    with pytest.raises(UsageError, match='weights="full", now it is "int4"'):
        run(tmp_path / "f")


def test_a_changed_prompt_file_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "f")
    with pytest.raises(UsageError, match="begun with prompts="):
        run(tmp_path / "f", *ROWS[:-1], {"prompt": "another"})
    run(tmp_path / "f", *({"id": n, **row} for n, row in enumerate(ROWS)))  # labels do not count


def test_foreign_feature_files_are_not_mixed(tmp_path: Path) -> None:
    run(tmp_path / "f")
    (tmp_path / "f" / "collect.json").unlink()
    with pytest.raises(UsageError, match=r"no collect\.json"):
        run(tmp_path / "f")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    key = target_fingerprint(toy_target())
    with CollectFolder(tmp_path / "f", key, {}), pytest.raises(UsageError, match="another process is writing to"):
        CollectFolder(tmp_path / "f", key, {})
    CollectFolder(tmp_path / "f", key, {}).__exit__(None, None, None)


def test_shards_stay_below_their_size(tmp_path: Path) -> None:
    long = {"prompt": "word " * 100}
    run(tmp_path / "f", *[long] * 8, max_new_tokens=20, shard_megabytes=1, temperatures=(1.0,), repeats=2)
    sizes = [path.stat().st_size for path in shard_paths(tmp_path / "f")]
    assert len(texts(tmp_path / "f")) == 16
    assert max(sizes) <= 2**20 + 4096
    assert len(sizes) > 1
    assert min(sizes[:-1]) > 2**19


def test_an_interrupt_keeps_whole_answers(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "f.jsonl", *ROWS)
    rows, options = read_prompt_files([file]), CollectOptions.parse(max_new_tokens=10, batch=2)

    def interrupt(progress: Progress) -> None:
        if progress.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(toy_target(), rows, options, tmp_path / "f", interrupt)
    kept = texts(tmp_path / "f")
    assert len(kept) == 3
    collect(toy_target(), rows, options, tmp_path / "f", quiet)
    run(tmp_path / "g")
    assert texts(tmp_path / "f") == texts(tmp_path / "g")


def test_a_full_disk_is_said_and_leaves_whole_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_feature_shards import largest_file

    monkeypatch.setattr(collect_folder, "FLUSH_SECONDS", 0.0)
    run(tmp_path / "g")
    largest = max(path.stat().st_size for path in shard_paths(tmp_path / "g"))
    with largest_file(largest - 1), pytest.raises(RunError, match="make room"):
        run(tmp_path / "f")
    assert not list((tmp_path / "f").glob("*.part"))
    run(tmp_path / "f")
    assert texts(tmp_path / "f") == texts(tmp_path / "g")


KILLED = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {here!r}]
from tiny_targets import toy_target
from outrider.training import collect_folder
from outrider.training.collect import CollectOptions, collect
from outrider.training.prompt_data import read_prompt_files
collect_folder.FLUSH_SECONDS = 0.01
options = CollectOptions.parse(max_new_tokens=40, batch=4, repeats=6)
collect(toy_target(), read_prompt_files([Path({file!r})]), options, Path({folder!r}), lambda progress: None)
"""


def test_kill_9_and_again_gives_the_same_answers(tmp_path: Path) -> None:
    rows = [{"prompt": f"word {'abc'[i % 3] * i}"} for i in range(8)] + [{"turns": ["one", "two"]}]
    file, folder = write_rows(tmp_path / "f.jsonl", *rows), tmp_path / "f"
    here = Path(__file__).parent
    code = KILLED.format(tests=str(here.parent), here=str(here), file=str(file), folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        until = time.monotonic() + 60
        while len(shard_paths(folder)) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    partly = texts(folder)
    run(folder, *rows, max_new_tokens=40, batch=5, repeats=6)
    run(tmp_path / "g", *rows, max_new_tokens=40, batch=4, repeats=6)
    assert texts(folder) == texts(tmp_path / "g")
    assert 0 < len(partly) < len(texts(folder))


# -- answers without features ----------------------------------------------------------------------------------


def states(shards: list[Shard]) -> dict[int, torch.Tensor]:
    return {
        shard.index[number]: torch.cat(list(read_features(shard, (1, 2, "final"), shard.span(number)).values()))
        for shard, number in iterate(shards)
    }


def test_exported_answers_give_the_same_features_again(tmp_path: Path) -> None:
    run(tmp_path / "f", repeats=2)
    count, tokens = export_answers([tmp_path / "f"], tmp_path / "a.safetensors")
    assert count == len(texts(tmp_path / "f"))
    assert (tmp_path / "a.safetensors").stat().st_size < 1000 + 2 * tokens + 30 * count
    replay(toy_target(), tmp_path / "a.safetensors", CollectOptions(), tmp_path / "g", quiet)
    assert texts(tmp_path / "g") == texts(tmp_path / "f")
    first, second = (states(open_folder(tmp_path / name)[1]) for name in "fg")
    assert all(torch.equal(first[index], second[index]) for index in first)
    assert replay(toy_target(), tmp_path / "a.safetensors", CollectOptions(), tmp_path / "g", quiet).tokens == 0


def test_several_folders_are_exported_one_behind_the_other(tmp_path: Path) -> None:
    run(tmp_path / "f")
    run(tmp_path / "g", {"prompt": "other"}, max_new_tokens=4)
    export_answers([tmp_path / "f", tmp_path / "g"], tmp_path / "a.safetensors")
    found = read_answers(tmp_path / "a.safetensors", target_fingerprint(toy_target()))
    assert [one.request.index for one in found] == list(range(8))
    assert found[-1].tokens == texts(tmp_path / "g")[0][0]


def test_answers_of_another_target_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "f")
    export_answers([tmp_path / "f"], tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="are of another template"):
        replay(toy_target(CHAT + " "), tmp_path / "a.safetensors", CollectOptions(), tmp_path / "g", quiet)
    run(tmp_path / "h", template=CHAT + " ")
    with pytest.raises(UsageError, match="another template than"):
        export_answers([tmp_path / "f", tmp_path / "h"], tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()


def test_damaged_answers_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "f")
    file = tmp_path / "a.safetensors"
    export_answers([tmp_path / "f"], file)
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(UsageError, match="is not a file of 'outrider train export-answers'"):
        read_answers(file, target_fingerprint(toy_target()))
    shutil.copy(shard_paths(tmp_path / "f")[0], file)
    with pytest.raises(UsageError, match="is not a file of"):
        read_answers(file, target_fingerprint(toy_target()))


def test_settings_are_readable(tmp_path: Path) -> None:
    run(tmp_path / "f")
    assert json.loads((tmp_path / "f" / "collect.json").read_text())["max_new_tokens"] == 10
