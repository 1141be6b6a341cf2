"""Every complaint about trained heads that a test can show has one: numbers of ``reference/heads.md``, section 4.

The others are about things that are not here: 16 (a training recipe; model cards tell data and epochs), 25 (ReDrafter),
26 (when others published their training code).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

COMPLAINTS: dict[int, tuple[str, ...]] = {
    1: (
        "training/test_align.py::test_every_position_is_what_plain_loops_say",
        "training/test_align.py::test_the_boundary_of_prompt_and_answer",
    ),
    2: (
        "training/test_collect.py::test_only_what_was_generated_is_supervised",
        "training/test_collect.py::test_an_answer_that_repeats_the_prompt_is_supervised_at_its_own_place",
    ),
    3: ("training/test_collect.py::test_any_separators_work",),
    4: ("training/test_collect.py::test_the_templates_own_insertions_are_not_supervised",),
    5: ("training/test_collect.py::test_every_turn_is_a_sequence_of_its_own",),
    6: (
        "training/test_draft_vocabulary.py::test_padding_rows_of_the_target_can_fill_up",
        "heads/test_file.py::test_stored_maps_are_offsets",
    ),
    7: (
        "cli/test_train.py::test_going_on_from_a_head_keeps_its_vocabulary",
        "training/test_unrolled_objective.py::test_positions_outside_the_draft_vocabulary_are_misses_without_a_loss",
    ),
    8: (
        "heads/test_file.py::test_a_reduced_vocabulary_needs_a_valid_map",
        "heads/formats/test_strict_files.py::test_vocabulary_maps",
    ),
    9: (
        "heads/formats/test_strict_files.py::test_zeros_are_the_map_of_a_full_vocabulary",
        "drafters/test_eagle_drafters.py::test_a_head_of_another_target_is_refused",
    ),
    10: (
        "drafters/test_feature_rows.py::test_the_pair_at_row_t_is_features_t_and_token_t_plus_1",
        "heads/formats/test_dialect.py::test_all_dialects_name_the_same_states",
    ),
    11: (
        "training/test_generate_answers.py::test_a_batch_answers_as_each_prompt_alone",
        "drafters/test_feature_rows.py::test_decoders_in_batches",
    ),
    12: (
        "heads/test_eagle3.py::test_every_flag_changes_the_output",
        "heads/formats/test_round_trips.py::test_flags_and_positions_are_always_written",
    ),
    13: (
        "drafters/test_feature_session.py::test_the_cache_is_fresh_after_every_step",
        "drafters/test_feature_session.py::test_a_head_that_keeps_its_own_guesses_is_caught",
    ),
    14: ("training/test_gate.py::test_heads_learn_eight_texts_and_decode_them_as_foretold",),
    15: (
        "heads/formats/test_round_trips.py::test_every_layout_survives_our_file_and_every_format_that_holds_it",
        "heads/test_cached.py::test_a_chain_equals_the_training_form",
    ),
    17: ("training/test_gate.py::test_heads_learn_eight_texts_and_decode_them_as_foretold",),
    18: ("drafters/test_eagle_drafters.py::test_greedy_text_is_plain_for_every_shape",),
    19: ("training/test_align.py::test_simulated_acceptance_counts_chains",),
    20: (
        "drafters/test_eagle_drafters.py::test_the_law_is_the_targets_with_a_reduced_vocabulary",
        "drafters/test_medusa_drafter.py::test_law",
        "drafters/test_hydra_drafter.py::test_law",
        "drafters/test_mtp_drafter.py::test_the_law_above_temperature_0_is_the_targets",
    ),
    21: ("drafters/test_feature_session.py::test_batches",),
    22: ("user_issues/test_numerics.py::test_numerics_bfloat16_near_ties_u04",),
    23: ("heads/formats/test_round_trips.py::test_shared_medusa_for_vllm_carries_the_targets_rows",),
    24: ("training/test_medusa_objective.py::test_every_head_learns_its_own_shift",),
    27: ("heads/test_mtp.py::test_the_embedding_comes_first_and_inputs_are_named",),
    28: ("training/test_draft_vocabulary.py::test_coverage",),
}
"""Number -> tests that would have shown it."""

NOT_HERE = {16, 25, 26}


def test_every_complaint_has_its_answer() -> None:
    assert COMPLAINTS.keys() | NOT_HERE == set(range(1, 29))
    assert not COMPLAINTS.keys() & NOT_HERE


@pytest.mark.parametrize("number", COMPLAINTS)
def test_its_tests_exist(number: int) -> None:
    for place in COMPLAINTS[number]:
        path, name = place.split("::")
        assert re.search(rf"^def {name}\(", (TESTS / path).read_text(encoding="utf-8"), re.MULTILINE), place
