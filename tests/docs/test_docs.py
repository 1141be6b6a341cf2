"""Documents execute: every path and link exists, every command and code block runs, every registered part has its page.

What needs the default model runs on the toy model instead (``on_toy``), so nothing here needs a network.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

import outrider
from outrider.engine.registry import AXES, MethodInfo, load_class, methods

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
METHOD_PAGES = sorted((ROOT / "docs" / "methods").glob("*.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

TOY_PARTS = {"layer_skip:24": "layer_skip:3"}  # the toy model pretends to have four blocks
TAKES_NO_MODEL = ("methods", "models")
# These need a chat template, the default model, files, minutes or a network.
PARSED_ONLY = ("audit", "chat", "convert", "datastore", "demo", "doctor", "pull", "train", "tune")
PATH = re.compile(r"`((?:src|tests|docs|examples|scripts)/[\w./-]+)`")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """Contents of the page's fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def registered_file(method: MethodInfo) -> str:
    module = AXES[method.axis][method.name].partition(":")[0]
    return "src/" + module.replace(".", "/") + ".py"


ALL_BLOCKS = [(name_of(page), code) for page in PAGES for code in blocks(page, "python")]
ALL_COMMANDS = [
    (name_of(page), line)
    for page in PAGES
    for block in blocks(page, "sh")
    for line in block.splitlines()
    if line.startswith("outrider ")
]


# -- paths and links ---------------------------------------------------------------------------------------------


def test_there_are_pages_and_commands() -> None:
    """So that a broken pattern cannot make the other tests pass."""
    assert len(PAGES) >= 15
    assert len(ALL_BLOCKS) >= 2
    assert len(ALL_COMMANDS) >= 20
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_path_exists(page: Path) -> None:
    # Raw results appear when a benchmark has run.
    paths = [path for path in PATH.findall(page.read_text()) if not path.startswith("docs/results")]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_tour_names_paths_in_every_hop() -> None:
    hops = re.findall(
        r"^\d+\. \*\*.*?(?=^\d+\. \*\*|^##)", (ROOT / "docs/tour.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(hops) == 14
    assert all(PATH.search(hop) for hop in hops)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_resolves(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    relative = [link.partition("#")[0] for link in links if not link.startswith(("https://", "http://", "#"))]
    assert [link for link in relative if not (page.parent / link).exists()] == []


def test_every_page_is_reachable_from_the_readme() -> None:
    found, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in found or page.suffix != ".md":
            continue
        found.add(page)
        links = re.findall(r"\]\(([^)\s#]+)", page.read_text())
        waiting += [(page.parent / link).resolve() for link in links if not link.startswith("http")]
    assert set(PAGES) <= found


def test_every_test_that_the_guarantees_name_exists() -> None:
    named = re.findall(r"`(test_\w+)` in `(tests/[\w/]+\.py)`", (ROOT / "docs/guarantees.md").read_text())
    assert len(named) >= 5
    assert [pair for pair in named if f"def {pair[0]}(" not in (ROOT / pair[1]).read_text()] == []


def test_reading_order_is_about_800_lines() -> None:
    order = (ROOT / "docs/tour.md").read_text().partition("## Reading order")[2]
    files = re.findall(r"^\d+\. `(src/\S+)`", order, re.MULTILINE)
    assert len(files) >= 6
    assert 700 <= sum(len((ROOT / file).read_text().splitlines()) for file in files) <= 900


# -- registered parts --------------------------------------------------------------------------------------------


def readme_row(method: MethodInfo) -> str:
    page, file = f"docs/methods/{method.name}.md", registered_file(method)
    short = file.removeprefix("src/outrider/")
    return (
        f"| {method.axis} | [`{method.name}`]({page}) | {method.summary} | [`{short}`]({file}) | {method.exactness} |"
    )


def test_readme_lists_the_registry() -> None:
    section = (ROOT / "README.md").read_text().partition("## Methods")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| \w+ \| \[`", line)]
    assert rows == [readme_row(method) for method in methods()]


def test_every_part_has_a_page_and_every_page_a_part() -> None:
    names = [name for table in AXES.values() for name in table]
    assert len(names) == len(set(names)), "two parts of different axes share a name, and so a page"
    assert sorted(names) == [page.stem for page in METHOD_PAGES]


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda page: page.stem)
def test_method_page_says_what_it_must(page: Path) -> None:
    text = page.read_text()
    axis = next(axis for axis, table in AXES.items() if page.stem in table)
    assert text.startswith(f"# {page.stem}\n")
    for heading in ("Idea", "Source", "File", "Options", "Exactness", "When it wins", "When it loses", "Try it"):
        assert f"**{heading}.**" in text, heading
    assert "**Equation.**" in text or "**Rule.**" in text
    assert f"**File.** `{registered_file(MethodInfo(axis, page.stem, '', '', '', ''))}`" in text
    arxiv = re.findall(r"arXiv[: ](\d{4}\.\d{5})", load_class(axis, page.stem).source)
    assert [number for number in arxiv if number not in text] == []


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda page: page.stem)
def test_method_page_lists_the_options_and_defaults(page: Path) -> None:
    axis = next(axis for axis, table in AXES.items() if page.stem in table)
    options = getattr(load_class(axis, page.stem), "Options", None)
    fields = {} if options is None else {name: field.default for name, field in options.model_fields.items()}
    rows = re.findall(r"^\| `(\w+)`(?: \(positional\))? \| ([^|]+) \|", page.read_text(), re.MULTILINE)
    expected = {name: ",".join(map(str, d)) if isinstance(d, tuple) else str(d) for name, d in fields.items()}
    assert {name: value.strip() for name, value in rows} == expected


@pytest.mark.parametrize("name", sorted(AXES["verifier"]))
def test_guarantees_agree_with_exact_for(name: str) -> None:
    row = re.search(rf"^\| \[`{name}`\].*$", (ROOT / "docs/guarantees.md").read_text(), re.MULTILINE)
    assert row is not None, f"docs/guarantees.md has no row for verifier {name}"
    _, greedy, sampled, kinds, topologies = (cell.strip() for cell in row.group().strip("| ").split("|"))
    claims = load_class("verifier", name).exact_for
    if load_class("verifier", name).lossy:
        assert greedy.startswith("LOSSY")
        assert sampled.startswith("LOSSY")
        assert kinds == topologies == "none"
        return
    assert greedy.startswith("exact") == any(regime == "greedy" for _, _, regime in claims)
    assert sampled.startswith("exact") == any(regime == "sampled" for _, _, regime in claims)
    assert set(kinds.split(", ")) == {kind.value for kind, _, _ in claims}
    assert topologies == ("both" if len({t for _, t, _ in claims}) == 2 else next(iter(claims))[1].value)


# -- what can be run ---------------------------------------------------------------------------------------------


def on_toy(command: str, folder: Path) -> list[str]:
    """Arguments of a documented command, made small and independent of any download."""
    arguments = [TOY_PARTS.get(argument, argument) for argument in shlex.split(command, comments=True)[1:]]
    if arguments[0] in TAKES_NO_MODEL:
        return arguments
    if arguments[0] in PARSED_ONLY:
        return [*arguments, "--help"]  # unknown options are still found
    if "--file" in arguments:
        (folder / "prompts.jsonl").write_text('{"prompt": "Hello"}\n{"turns": ["Good day"]}\n')
    for option, value in (("--draft-model", "toy-draft"), ("--model", "toy"), ("--max-new-tokens", "6")):
        if option in arguments:
            place = arguments.index(option) + 1
            arguments[place] = ",".join([value] * len(arguments[place].split(",")))  # drafters may have several models
        elif option != "--draft-model":
            arguments += [option, value]
    for option in {"--dtype", "--weights"} & set(arguments):  # a table has neither
        del arguments[(at := arguments.index(option)) : at + 2]
    return [*arguments, "--ignore-eos"]


@pytest.mark.parametrize(("page", "command"), ALL_COMMANDS, ids=lambda value: value[:60])
def test_commands_run(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from outrider.cli.app import run

    monkeypatch.chdir(tmp_path)
    assert run(on_toy(command, tmp_path)) == 0, capfd.readouterr().err


@pytest.mark.parametrize(("page", "code"), ALL_BLOCKS, ids=lambda value: value[:40])
def test_python_blocks_run(page: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    toy = code.replace('"smollm2-135m"', '"toy"')
    assert toy != code, "the block does not name the default model"
    exec(compile(toy, page, "exec"), {"__name__": "__document__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 3


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = "".join(page.read_text() for page in PAGES)
    targets = set(re.findall(r"`make ([a-z-]+)`", text) + re.findall(r"^make ([a-z-]+)  ", text, re.MULTILINE))
    assert {"demo", "test"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_planted_fault_distances_are_those_of_the_page() -> None:
    from outrider.audit.faults import FAULTS, fault_distance

    faults = {(fault.name, fault.kind.value): fault for fault in FAULTS}
    rows = re.findall(r"\| `(\w+)`, (\w+) \| (\d\.\d+) \|$", (ROOT / "docs/guarantees.md").read_text(), re.MULTILINE)
    assert len(rows) >= 14
    for name, kind, stated in rows:
        assert float(stated) == pytest.approx(fault_distance(faults[name, kind]), abs=6e-4), f"{name}, {kind}"


def test_licence_and_changelog() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]
    assert "END OF TERMS AND CONDITIONS" in (ROOT / "LICENSE").read_text()
    assert f"## [{outrider.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md", "docs/guarantees.md"])
def test_no_measured_block_is_empty(page: str) -> None:
    text = (ROOT / page).read_text()
    blocks = re.findall(r"<!-- measured:.*?begin -->(.*?)<!-- measured:.*?end -->", text, flags=re.S)
    assert blocks or page == "docs/guarantees.md"
    for block in blocks:
        has_figures = re.search(r"\d", block) and not re.search(r"[Nn]ot measured|[Tt]o be measured|goes here", block)
        assert has_figures, f"{page} has a measured block without figures: {block.strip()[:60]}"
