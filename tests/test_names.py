"""One class name stands for one thing, and a module never has the name of what it exports."""

import ast
import functools
import re
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

import actorflow as af

HOUSE = Path(__file__).resolve().parents[1]
WINGS = ("actorflow", "actors", "compiler", "memory")

SHARED_NAMES = 0
"""Names that stand for several classes still. It may only fall."""


@functools.cache
def modules():
    """Return the path and the syntax tree of every module of the product."""
    paths = [path for wing in WINGS for path in sorted((HOUSE / wing).rglob("*.py"))]
    return [(path, ast.parse(path.read_bytes())) for path in paths]


def classes():
    """Return the files of every class by its name, whether private or not."""
    files = defaultdict(list)
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name.lstrip("_")].append(str(path.relative_to(HOUSE)))
    return files


def test_one_class_name_stands_for_one_thing():
    shared = {name: files for name, files in classes().items() if len(files) > 1}
    listing = "\n".join([f"{name}: {', '.join(files)}" for name, files in sorted(shared.items())])
    assert len(shared) <= SHARED_NAMES, (
        f"{len(shared)} class names stand for several things, rename what is new:\n{listing}"
    )


def test_no_module_hides_what_it_exports():
    """`import actorflow.job` would put the module where the function stands."""
    names = [name for name in af.__all__ if not isinstance(getattr(af, name), type(af))]
    assert [name for name in names if find_spec(f"actorflow.{name}") is not None] == []


RETIRED = """
AddedPass agree_on_data agree_on_plan agree_on_steps agree_on_values Agreement AHEAD ALONE Among
among_launched among_zeros apart_by_rates APPROACH array_of as_run ASIDE_BYTES Asked AWAITED
BatchGiven become_member Began blamed Board bring_home BrokenSteps By calls_watched Came CameTo
Carried CarriedCount CarriedRead Cell check_anatomy check_house check_one_job CheckpointAsked
Choice CollectiveOffer Columns come_home CommMove CommTurn Compilation created derive ELSEWHERE
Employer EndsAfter Fetching Filled find_origins find_turns Finish finish_lines finished_values
FinishedProduct FiringNote fit_together Fleet foreign_programs Form Game GameRounds Gate Gather
gather_whole Gathering GIVEN_UP GivenBatches GivesUp GONE GpuListed GpuSeen Granted hand_over
HasData Held held_pieces HeldProduct hold_batches HoldAsked Hop how_far_apart how_to_do_without
impossible InFlight is_at_rest is_still Join join_updates joined_updates JoinedLaunches Joining
keep_plan Keeping Kept kept_plan KernelTrouble Lack LackKind Lane LATE lay LayoutProblem Layouts
least_kept leaves_of Left LeftOut let_pass_late Line Listing lone_update LoneUpdate Made
made_for_device make_ready MakeWhole Meeting meetings_of MeetingState MeetLaunch Members Met
met_values Moment narrowed not_read Noted numbers_along OF_MODULES OF_TENSORS OF_THE_PACKAGE Offer
OfRank ONE_RANK OneOf OneOfSeveral only_first OpenLaunch OTHER_FIRING OtherEndsAfter OwnGradient
PartOf PartPlace place_number place_parts Places play_chains Product product_finishes RankLane
RankMember Ranks Reached read_sealed Reading ready_native recost Refused Region Registers
replace_sealed Reports Rest RestOfProgram Room Rounds RowNumbers runs_beside_steps said_of sealed
Share share_cores Situation Slot Span Stage StageBuilder staged_update StagedUpdate stands_alone
Start StepKind StopAsked Stored Study Style take_over TeamWalk tell_all tell_difference tellers_of
Terrain this_member threads_at Together Told Traced Traces Trials TriedWays turn_off turn_on Turns
turns_of update_gates Visit Visitors WaitedInVain waiting_for_nobody waiting_nodes ways_between
ways_of WayToSee what_differs When widen WideValues with_homes_of with_layouts_of
with_streams_that_pay word_of words_text WouldEnd WrongValue
"""
"""Names that said less than the field's word for the same thing (docs/glossary.md)."""

NO_DEFINITIONS = """
between binders came change choosing claimed closed copied evaluates fact find finishes forget
found Frame handed_on in_turn inside is_on is_there is_told join kept like look made_of missing
needed ONE opened own_part packed part_of places remembered rewritten runs_as shares streams
Structure structure tell together traced unread walk watched writes
"""
"""Names that a variable or a field may have, but no module defines: none says what it is."""


def identifiers(tree):
    """Yield the names that a module says: definitions, names, attributes, arguments, imports."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield name


def top_names(tree):
    """Yield the names that a module defines: classes, functions, constants."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from [target.id for target in targets if isinstance(target, ast.Name)]


@pytest.mark.parametrize(("names", "of"), [(RETIRED, identifiers), (NO_DEFINITIONS, top_names)])
def test_a_name_that_was_replaced_does_not_come_back(names, of):
    back = [
        f"{path.relative_to(HOUSE)}: {name}"
        for path, tree in modules()
        for name in sorted(set(of(tree)) & set(names.split()))
    ]
    assert back == []


def test_the_glossary_names_what_is_defined():
    defined = {str(path.relative_to(HOUSE)): set(top_names(tree)) for path, tree in modules()}
    page = (HOUSE / "docs" / "glossary.md").read_text()
    places = re.findall(r"`([\w/]+\.py):(\w+)`", page)
    assert len(places) > 60
    assert [f"{file}:{name}" for file, name in places if name not in defined.get(file, ())] == []
