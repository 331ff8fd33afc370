import numpy as np

from actorflow.cli.memory_map import COLOURS, PHASE_COLOURS, BoxKind, map_memory
from compiler.contract.types import Phase


def test_every_slot_of_every_register_with_bytes_is_one_box(training_plan):
    shown = map_memory(training_plan)
    expected = sorted(
        (offset, r.size_bytes, *r.interval)
        for r in training_plan.registers
        if r.size_bytes
        for offset in r.offsets_bytes
    )
    found = sorted((b.offset_bytes, b.size_bytes, b.begin, b.end) for b in shown.boxes)
    assert found == expected


def test_boxes_never_overlap_and_stay_inside_the_picture(training_plan):
    shown = map_memory(training_plan)
    for i, a in enumerate(shown.boxes):
        assert 0 <= a.begin < a.end <= shown.horizon
        assert 0 <= a.offset_bytes <= shown.account.peak_bytes - a.size_bytes
        for b in shown.boxes[i + 1 :]:
            apart_in_time = a.end <= b.begin or b.end <= a.begin
            below = a.offset_bytes + a.size_bytes <= b.offset_bytes
            above = b.offset_bytes + b.size_bytes <= a.offset_bytes
            assert apart_in_time or below or above


def test_kinds_tell_state_activations_gradients_and_staging_apart(training_plan):
    by_name = {box.name: box.kind for box in map_memory(training_plan).boxes}
    assert by_name["up.weight"] is BoxKind.PARAMETER
    assert by_name["staging"] is BoxKind.STAGING
    assert by_name["batch[0]"] is BoxKind.SLOT
    assert by_name["step"] is BoxKind.OTHER_VARIABLE
    kinds = set(by_name.values())
    assert {BoxKind.OPTIMIZER, BoxKind.ACTIVATION, BoxKind.BACKWARD} <= kinds
    up = [b for b in map_memory(training_plan).boxes if b.name == "up + add"]
    assert up[0].kind is BoxKind.ACTIVATION  # gelu's gradient reads it again


def test_the_writer_of_a_temporary_is_the_launch_at_its_begin(training_plan):
    shown = map_memory(training_plan)
    temporary = [
        b for b in shown.boxes if b.kind in (BoxKind.ACTIVATION, BoxKind.BACKWARD, BoxKind.FORWARD)
    ]
    assert temporary
    for box in temporary:
        assert box.writer == box.begin
        _, launch = shown.steps[box.writer]
        assert " + ".join(launch.made_of).removeprefix("matmul") in box.name
        assert box.name.startswith(launch.scope)


def test_the_curve_is_the_sum_of_the_boxes_at_every_launch(training_plan):
    shown = map_memory(training_plan)
    times = [time for time, _ in shown.curve]
    assert times == sorted(set(times))
    for launch in range(shown.horizon):
        live = sum(b.size_bytes for b in shown.boxes if b.begin <= launch < b.end)
        drawn = shown.curve[int(np.searchsorted(times, launch, side="right")) - 1][1]
        assert drawn == live


def test_who_holds_the_peak_is_listed_by_size(training_plan):
    shown = map_memory(training_plan)
    sizes = [box.size_bytes for box in shown.peak_holders]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) <= shown.account.peak_live_bytes < sum(sizes) + 64 * len(sizes)


def test_every_kind_and_every_phase_has_a_colour_of_its_own():
    assert set(COLOURS) == set(BoxKind)
    assert len(set(COLOURS.values())) == len(BoxKind)
    assert set(PHASE_COLOURS) == set(Phase)
