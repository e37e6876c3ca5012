"""A recording that is made in parts is the one that would have been made at once."""

from __future__ import annotations

import numpy as np
from outrider_runtime.simulate import recording as recordings
from outrider_runtime.simulate.recording import Recording

from bench.record.parts import ONE_IN, SAMPLED, join_recordings, parts


def only(recording: Recording, group: str) -> Recording:
    """The answers of one group alone."""
    rows = np.flatnonzero(recording.group == recording.groups.index(group))
    positions = np.concatenate([np.arange(*recording.start[row : row + 2]) for row in rows])
    lengths = np.diff(recording.start)[rows]
    return Recording(
        recording.drafters, (group,), np.zeros(len(rows), np.int16), recording.temperature[rows],
        recording.prompt_tokens[rows], np.cumsum([0, *lengths]).astype(np.int32), recording.depth[:, positions],
        recording.proposed[:, positions], recording.confidence[:, positions],
    )  # fmt: skip


def test_parts_of_a_recording_join_to_the_whole():
    whole = recordings.load_shipped()
    again = join_recordings([only(whole, group) for group in whole.groups], whole.groups)
    for name in recordings._ARRAYS:
        assert np.array_equal(getattr(again, name), getattr(whole, name)), name


def test_every_prompt_is_in_one_part_and_a_third_is_sampled():
    prompts = {group: [f"{group} {number}" for number in range(48)] for group in ("chat", "reading")}
    made = list(parts(prompts))
    assert sorted(prompt for part in made for prompt in part.prompts) == sorted(
        prompt for every in prompts.values() for prompt in every
    )
    sampled = sum(len(part.prompts) for part in made if part.temperature == SAMPLED)
    assert sampled == 2 * 48 // ONE_IN
    assert len({part.name for part in made}) == len(made)
