"""The state table, as a table and as a walk."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.domain.states import (
    FINAL_JOB,
    LIVE_ATTEMPT,
    TABLE,
    WAITING_JOB,
    AttemptState,
    IllegalMove,
    Intents,
    JobState,
    Trigger,
    job_state,
    move,
)

FINAL_ATTEMPT = set(AttemptState) - LIVE_ATTEMPT


def test_every_pair_is_either_in_the_table_or_refused():
    for state in AttemptState:
        for trigger in Trigger:
            if (state, trigger) in TABLE:
                assert move(state, trigger) == TABLE[state, trigger]
            else:
                with pytest.raises(IllegalMove):
                    move(state, trigger)


def test_the_illegal_moves_are_these():
    missing = {(state, trigger) for state in LIVE_ATTEMPT for trigger in Trigger} - set(TABLE)
    assert missing == {
        (AttemptState.RUNNING, Trigger.STARTED),
        (AttemptState.RUNNING, Trigger.SPAWN_FAILED),
    }
    assert not any(state in FINAL_ATTEMPT for state, _ in TABLE)


@given(st.lists(st.sampled_from(list(Trigger))))
def test_no_walk_comes_back_to_a_state_it_left(triggers):
    state = AttemptState.STARTING
    seen = [state]
    for trigger in triggers:
        try:
            new = move(state, trigger)
        except IllegalMove:
            assert state in FINAL_ATTEMPT or state == AttemptState.RUNNING
            continue
        if new != state:
            assert new not in seen
            seen.append(new)
        state = new


ALL_INTENTS = st.builds(Intents, cancel=st.booleans(), dependency_failed=st.booleans(), pause=st.booleans())


@given(ALL_INTENTS, st.lists(st.sampled_from(list(AttemptState)), max_size=3))
def test_a_job_with_another_attempt_to_come_waits_unless_it_lives_or_was_done(intents, attempts):
    state = job_state(intents, attempts, another=True)
    if not attempts or attempts[-1] in FINAL_ATTEMPT - {AttemptState.DONE}:
        if not attempts and intents.dependency_failed:
            assert state == JobState.FAILED
        elif intents.cancel:
            assert state == JobState.CANCELLED
        else:
            assert state == (JobState.PAUSED if intents.pause else JobState.QUEUED)
    else:
        assert state == job_state(intents, attempts)


@given(
    ALL_INTENTS,
    st.lists(st.sampled_from(list(AttemptState)), max_size=3),
)
def test_a_job_is_final_exactly_when_its_last_attempt_is(intents, attempts):
    state = job_state(intents, attempts)
    if attempts:
        assert (state in FINAL_JOB) == (attempts[-1] in FINAL_ATTEMPT)
        assert (state == JobState.SUCCEEDED) == (attempts[-1] == AttemptState.DONE)
        assert state != JobState.CANCELLED or intents.cancel
    else:
        assert (state in WAITING_JOB) == (not intents.cancel and not intents.dependency_failed)
