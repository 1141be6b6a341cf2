"""Invariant 8: speculation is never a loss that nobody sees. The controller on simulated clocks."""

from __future__ import annotations

import math
import statistics

import pytest

from outrider.schedules.controller import Controller
from schedules.simulated_clock import COSTS, Machine, expected_rate

SEEDS = range(12)
ACCEPTANCE = [0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9]
EXPENSIVE = {0: 0.012, 3: 0.018, 8: 0.060}
"""A machine on which every tree is a bad bargain unless nearly everything is accepted."""


def run(acceptance: float, seed: int, steps: int = 500, **options: object) -> Machine:
    machine = Machine(lambda _: acceptance, seed=seed, **options)  # type: ignore[arg-type]
    machine.run(Controller(8), steps)
    return machine


@pytest.mark.parametrize("acceptance", ACCEPTANCE)
@pytest.mark.parametrize("costs", [COSTS, EXPENSIVE], ids=["cheap", "expensive"])
def test_loss_against_plain_decoding_stays_below_five_per_cent(costs: dict[int, float], acceptance: float) -> None:
    """U25, U76: over 500 steps, first trials included, 10% noise; and no seed is far from the mean."""
    losses = [run(acceptance, seed, costs=costs).loss for seed in SEEDS]
    assert statistics.mean(losses) < 0.05
    assert max(losses) < 0.07


@pytest.mark.parametrize("acceptance", ACCEPTANCE)
def test_most_of_the_possible_gain_is_taken(acceptance: float) -> None:
    """Against always using the best level, which nobody knows beforehand."""
    best = max(expected_rate(size, acceptance) for size in COSTS)
    rates = [(m := run(acceptance, seed)).tokens / m.seconds for seed in SEEDS]
    assert statistics.mean(rates) > 0.90 * best


def test_useless_guesses_turn_it_off_soon() -> None:
    """U76: nothing accepted: after the first trials, nearly every step is plain."""
    for seed in SEEDS:
        chosen = run(0.0, seed, costs=EXPENSIVE).chosen
        assert chosen[20:].count(0) > 0.9 * len(chosen[20:])


def test_good_guesses_keep_it_on() -> None:
    for seed in SEEDS:
        chosen = run(0.9, seed).chosen
        assert chosen[40:].count(0) < 0.1 * len(chosen[40:])


def test_a_turn_for_the_worse_is_followed() -> None:
    """U45: acceptance drops to nothing at step 250 (a head beyond the length that it was trained on)."""
    for seed in SEEDS:
        machine = Machine(lambda step: 0.9 if step < 250 else 0.0, seed=seed)
        machine.run(Controller(8), 500)
        late = machine.chosen[350:]
        assert late.count(8) < 0.1 * len(late)


def test_a_turn_for_the_better_is_found() -> None:
    """Off is never for good, even after a thousand plain steps."""
    for seed in SEEDS:
        machine = Machine(lambda step: 0.0 if step < 1000 else 0.9, seed=seed, costs=dict(COSTS))
        machine.run(Controller(8), 1600)
        late = machine.chosen[1300:]
        assert late.count(0) < 0.2 * len(late)


def test_a_machine_that_slows_down_is_followed() -> None:
    """Another process takes the cores: trees become dear while plain steps don't (the window forgets)."""
    controller = Controller(8)
    Machine(lambda _: 0.6).run(controller, 300)
    slow = Machine(lambda _: 0.6, costs={0: 0.012, 3: 0.040, 8: 0.080}, seed=1)
    slow.run(controller, 500)
    assert slow.chosen[200:].count(0) > 0.8 * 300


def test_steps_without_a_guess_count_as_plain() -> None:
    """A drafter that finds something in one step of ten: trying costs nothing, so it stays on."""
    controller = Controller(8)
    machine = Machine(lambda _: 0.9, finds=0.1)
    machine.run(controller, 400)
    assert controller.plain_seconds == pytest.approx(COSTS[0], rel=0.1)
    assert machine.loss < -0.1
    assert machine.chosen[100:].count(0) < 100


def ready(full_budget: int, plain: float = 0.012) -> Controller:
    """A controller that knows what a plain step takes."""
    controller = Controller(full_budget)
    while controller.choose() == 0 and controller.step <= 3:
        controller.record(0, 1, plain)
    return controller


def test_a_step_without_a_guess_is_booked_as_plain_whatever_was_allowed() -> None:
    """A full budget that found nothing cost a plain step: booked as a full tree it would make trees look cheap."""
    controller = ready(8)
    controller.record(3, 1, 0.014)  # the short tree was chosen
    controller.choose()
    controller.record(3, 1, 0.014)
    full = controller.levels[-1]
    for _ in range(3):
        assert controller.choose() == 8
        controller.record(0, 1, 0.012, 0.0001)
    assert full.hope == math.inf, "a look-up that found nothing says nothing about the tree that it might have made"
    for _ in range(2):  # the first step of a level is not counted
        assert controller.choose() == 8
        controller.record(0, 1, 0.013, 0.001)
    assert full.hope < math.inf, "a head that was asked and let nothing through did cost something"


def find_nothing(controller: Controller, steps: int, seconds: float, **paid: float | bool) -> list[int]:
    """Budgets chosen where no guess is ever found, and a step that might have made one takes ``seconds``."""
    sizes = []
    for _ in range(steps):
        sizes.append(controller.choose())
        if sizes[-1]:
            controller.record(0, 1, seconds, **paid)  # type: ignore[arg-type]
        else:
            controller.record(0, 1, 0.012)
    return sizes


def test_drafting_that_found_nothing_is_taken_off_a_plain_steps_time() -> None:
    """A head that is asked each time and lets no guess through: what a plain step takes is known without trying one."""
    controller = Controller(8)
    find_nothing(controller, 40, 0.013, draft_seconds=0.001)
    assert controller.plain_seconds == pytest.approx(0.012)


def test_a_drafter_that_pays_and_finds_nothing_is_turned_off() -> None:
    """A draft model whose confidence stop lets no guess through still costs its forward."""
    sizes = find_nothing(Controller(8), 500, 0.018, draft_seconds=0.006)
    assert sizes.count(0) > 0.85 * len(sizes)


def test_extra_rows_that_find_nothing_are_paid_for() -> None:
    """Lookahead's window makes the target's pass dearer, whether or not it offers a guess."""
    controller = Controller(8)
    sizes = find_nothing(controller, 500, 0.030, has_extra_rows=True)
    assert sizes.count(0) > 0.9 * len(sizes)
    assert controller.plain_seconds == pytest.approx(0.012)


def test_a_gain_is_taken_through_a_streak_of_bad_luck() -> None:
    """Ten per cent faster on the whole, every other streak of 20 steps without a hit: kept for most of them."""
    controller = Controller(3)
    chosen = []
    for step in range(800):
        chosen.append(controller.choose())
        is_lucky = step // 20 % 2 == 0
        controller.record(chosen[-1], 2.0 if chosen[-1] and is_lucky else 1.0, 0.0165 if chosen[-1] else 0.012)
    assert chosen[50:].count(3) > 0.75 * len(chosen[50:])


def test_plain_steps_are_measured_anew() -> None:
    """A drafter that always guesses leaves none: every 64 steps one is taken, so longer texts are compared fairly."""
    controller = Controller(3)
    chosen = []
    for _ in range(300):
        chosen.append(controller.choose())
        controller.record(chosen[-1], 4.0 if chosen[-1] else 1.0, 0.02)
    assert 3 <= chosen[10:].count(0) <= 6


def test_one_disturbance_decides_nothing() -> None:
    """A single step that took a second (a page fault storm) does not turn a good drafter off."""
    controller = Controller(8)
    Machine(lambda _: 0.9).run(controller, 100)
    size = controller.choose()
    assert size > 0
    (level,) = (level for level in controller.levels if level.max_nodes == size)
    before = level.hope
    controller.record(size, 4, 1.0)
    assert level.hope > 0.8 * before
    after = Machine(lambda _: 0.9, seed=3)
    after.run(controller, 60)
    assert after.chosen.count(0) < 20


@pytest.mark.parametrize("extra", [0.05, 0.15, 1.0])
def test_a_slow_first_draft_step_decides_nothing(extra: float) -> None:
    """A head reads the prompt in its first step, a small model evaluates it, and code is loaded."""
    rates = []
    for seed in SEEDS:
        controller = ready(3)
        controller.record(3, 2.0, 0.014 + extra)
        machine = Machine(lambda _: 0.7, seed=seed)
        machine.run(controller, 400)
        rates.append(machine.tokens / machine.seconds)
    assert statistics.mean(rates) > 0.93 * expected_rate(3, 0.7)


def test_a_cold_first_plain_step_decides_nothing() -> None:
    """The first pass of a process compiles or loads its kernels: trees must not look cheap beside it."""
    losses = []
    for seed in SEEDS:
        controller = Controller(8)
        assert controller.choose() == 0
        controller.record(0, 1, 1.2)
        machine = Machine(lambda _: 0.0, seed=seed)
        machine.run(controller, 300)
        losses.append(machine.loss)
    assert statistics.mean(losses) < 0.05


@pytest.mark.parametrize(("before", "after"), [(0.024, 0.012), (0.048, 0.012), (0.012, 0.030)])
def test_another_plain_time_is_noticed(before: float, after: float) -> None:
    """A batch that shrinks, a short chat after a long one: a drafter that always guesses leaves few plain steps."""
    controller = Controller(3)
    for _ in range(300):
        size = controller.choose()
        controller.record(size, 3.0 if size else 1.0, 1.2 * before if size else before)
    assert controller.plain_seconds == pytest.approx(before)
    plain = 0
    for _ in range(75):
        size = controller.choose()
        plain += size == 0
        controller.record(size, 3.0 if size else 1.0, 1.2 * after if size else after)
    assert controller.plain_seconds == pytest.approx(after)
    assert plain < 8


def test_a_lasting_loss_behind_another_plain_time_is_small() -> None:
    """600 paying steps, then the machine is twice as fast and nothing is accepted any more."""
    losses = []
    for seed in SEEDS:
        controller = Controller(8)
        slow = {size: 2 * seconds for size, seconds in COSTS.items()}
        Machine(lambda _: 0.8, costs=slow, seed=seed).run(controller, 600)
        machine = Machine(lambda _: 0.0, seed=seed)
        machine.run(controller, 400)
        losses.append(machine.loss)
    assert statistics.mean(losses) < 0.15


@pytest.mark.parametrize(("budget", "sizes"), [(0, {0}), (1, {0, 1}), (3, {0, 3}), (64, {0, 3, 64})])
def test_levels(budget: int, sizes: set[int]) -> None:
    controller = Controller(budget)
    seen = set()
    for _ in range(100):
        size = controller.choose()
        controller.record(size, 1 + 0.01 * size, 0.01)
        seen.add(size)
    assert seen == sizes


def test_steps_that_kept_nothing_are_ignored() -> None:
    controller = Controller(8)
    controller = ready(8)
    controller.record(3, 0, 1.0)
    assert all(level.hope == math.inf for level in controller.levels)
    assert controller.plain_seconds == pytest.approx(0.012)
    for _ in range(4):
        controller.choose()
        controller.record(3, 2, 0.014)
    controller.choose()
    before = [level.hope for level in controller.levels]
    controller.record(3, 0, 1.0)
    assert [level.hope for level in controller.levels] == before
