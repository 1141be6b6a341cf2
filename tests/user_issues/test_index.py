"""Every reported case that this folder answers has exactly one test, named by its kind and number."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

CASES = {
    "numerics": "03 04",
    "rollback": "01 08 61 63 65 67 68",
    "tree": "09 10",
    "q_mismatch": "12 13 15",
    "params": "17 18 20",
    "multi_candidate": "22",
    "rule_choice": "25",
    "seeds": "26",
    "stops": "30 32 33 34 36 38",
    "context": "39 41 42 44 45 46 47",
    "vocabulary": "69 71 73 74 75",
    "documented": "06 23 28",
}
"""Kind -> numbers in the users' list."""


def test_every_case_has_one_test_of_its_kind() -> None:
    assert sum(len(numbers.split()) for numbers in CASES.values()) == 41
    found: Counter[tuple[str, str]] = Counter()
    for path in Path(__file__).parent.glob("test_*.py"):
        kind = next((kind for kind in CASES if path.stem.endswith(f"_{kind}")), "")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE):
            if number := re.fullmatch(rf"test_{kind}_\w+_u(\d\d)", name):
                found[kind, number[1]] += 1
            else:
                assert path.name == Path(__file__).name, f"{name} in {path.name} is not named by its kind and number"
    assert found == Counter((kind, number) for kind, numbers in CASES.items() for number in numbers.split())
