from actors.machine.transitions import (
    NOBODY,
    REACTION_CODES,
    REACTIONS,
    TRANSITIONS,
    Message,
    Reaction,
    State,
    kind_of,
    message,
    state_diagram,
    subject_of,
    transition_table,
)


def test_the_table_has_a_cell_for_every_state_and_message():
    assert set(TRANSITIONS) == set(State)
    assert all(set(row) == set(Message) for row in TRANSITIONS.values())


def test_an_illegal_message_leaves_the_state_as_it_is():
    for state, row in TRANSITIONS.items():
        for transition in row.values():
            if transition.reaction is Reaction.ILLEGAL:
                assert transition.to == (state,)


def test_the_flat_table_agrees_with_the_rows():
    for state, row in TRANSITIONS.items():
        for kind, transition in row.items():
            assert REACTIONS[state | kind] == REACTION_CODES[transition.reaction]


def test_nobody_and_unknown_kinds_accept_nothing():
    illegal = REACTION_CODES[Reaction.ILLEGAL]
    assert set(REACTIONS[NOBODY : NOBODY + 8]) == {illegal}
    assert all(REACTIONS[state | 7] == illegal for state in State)


def test_ended_is_final():
    assert {t.reaction for t in TRANSITIONS[State.ENDED].values()} == {Reaction.ILLEGAL}


def test_a_message_is_an_int_that_carries_kind_and_subject():
    for kind in Message:
        code = message(kind, 1234)
        assert type(code) is int
        assert (kind_of(code), subject_of(code)) == (kind, 1234)


def test_the_table_prints_as_markdown_with_a_row_per_state():
    lines = transition_table().splitlines()
    assert len(lines) == 2 + len(State)
    assert lines[0].startswith("| state | READY | FREE |")
    assert len({line.count("|") for line in lines}) == 1
    assert "| WAITING | count; fire if nothing is missing → WAITING, FIRING |" in lines[2]


def test_the_diagram_has_an_arrow_for_every_change_of_state_that_the_table_allows():
    changes = {
        (state.name, to.name, kind.name)
        for state, row in TRANSITIONS.items()
        for kind, transition in row.items()
        for to in transition.to
        if to is not state
    }
    drawn = set()
    for line in state_diagram().splitlines()[2:]:
        left, _, right = line.strip().partition(" --> ")
        to, _, kinds = right.partition(": ")
        if to != "[*]":
            drawn |= {(left, to, kind) for kind in kinds.split(", ")}
    assert drawn == changes
