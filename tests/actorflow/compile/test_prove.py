"""What is asked of a whole plan: that it agrees with itself, with a run's parts, and fits."""

import importlib
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow.compile.prove import check_memory, prove, prove_consistent
from actorflow.run import devices
from actorflow.run.runner import Runner
from compiler.contract.errors import OutOfMemory, PlanFormatError
from compiler.contract.placement import Device, DeviceKind
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import ActorKind, RegisterKind


def refused(plan):
    with raises(PlanFormatError):
        prove(plan)


def with_row(plan, table, index, **changes):
    rows = list(getattr(plan, table))
    rows[index] = replace(rows[index], **changes)
    return replace(plan, **{table: tuple(rows)})


def test_a_plan_of_the_compiler_is_proven_also_from_bytes(plan):
    prove(plan)
    prove(Plan.from_bytes(plan.to_bytes()))


PARTS_OF_A_PROOF = (
    "compiler.contract.plan.sub_plans",  # of `check_references`
    "compiler.verify.verify.extents_of",
    "actors.race.race.share_bytes",
)

PROVEN_WHILE_DECODED = PARTS_OF_A_PROOF[:1]


@pytest.mark.parametrize("name", PARTS_OF_A_PROOF)
def test_a_plan_is_verified_once_from_its_compilation_to_its_steps(monkeypatch, name):
    module, _, function = name.rpartition(".")
    checked, check = [], getattr(importlib.import_module(module), function)

    def counted(*arguments):
        checked.append(arguments)
        return check(*arguments)

    monkeypatch.setattr(name, counted)
    monkeypatch.setenv("ACTORFLOW_CACHE", "off")
    double = af.job(lambda model, batch: model(batch.x) * 2, train=False)
    for value in (1, 2):
        assert double.step(af.nn.Identity(), {"x": np.array(value)})["output"] == 2 * value
    assert len(checked) == 1
    plan = double.compile(af.nn.Identity(), {"x": af.TensorType(af.DType.INT64, ())})
    loaded = Plan.from_bytes(plan.to_bytes())  # another object: nothing is known of it
    checked.clear()
    prove(loaded)
    Runner(loaded)
    assert len(checked) == (name not in PROVEN_WHILE_DECODED)


def test_a_plan_that_was_refused_is_refused_again(plan):
    wrong = with_row(plan, "arenas", 0, size_bytes=1 << 47)
    for _ in range(2):
        with pytest.raises(OutOfMemory):
            prove(wrong)


def test_the_runner_proves_what_it_is_given_before_anything_is_built(edit, monkeypatch):
    monkeypatch.setattr(devices, "build", lambda plan: pytest.fail("built before it was proven"))
    with raises(PlanFormatError):
        Runner(edit.with_launch("gelu", kernel="numpy.none"))


def test_more_memory_than_the_machine_has_is_told_before_it_is_asked_for(plan):
    with pytest.raises(OutOfMemory, match=r"needs 128\.0 TiB, and this machine has"):
        prove(with_row(plan, "arenas", 0, size_bytes=1 << 47))


def test_the_memory_of_a_gpu_is_none_of_the_machines(plan):
    cuda = Device(DeviceKind.CUDA)
    on_gpu = [replace(a, device=cuda, memory=cuda.place.memory) for a in plan.arenas]
    check_memory(replace(plan, arenas=tuple(on_gpu)), 0)
    with raises(OutOfMemory):
        check_memory(plan, 0)


def test_a_machine_that_does_not_tell_its_memory_is_asked_for_it_all_the_same(plan, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "nothing known")
    check = with_row(plan, "arenas", 0, size_bytes=1 << 47)
    refused(check)


def test_thousands_of_streams_are_refused(plan):
    streams = tuple([replace(plan.streams[0], id=i) for i in range(5000)])
    refused(replace(plan, streams=streams))


def test_two_variables_in_one_register_are_refused(plan):
    refused(with_row(plan, "variables", 0, view=plan.variables[1].view))


def test_slots_that_never_come_round_together_are_refused(plan, edit):
    """Launches are bound once for every phase of the slots; primes multiply."""
    registers = list(plan.registers)
    ports = [p.register for a in plan.actors if a.name == "step" for p in a.inputs + a.outputs]
    data = [r for r in ports if registers[r].kind is RegisterKind.DATA]
    for register, slots in zip(data, (104729, 104723), strict=False):
        at = registers[register].offsets_bytes[0]
        registers[register] = replace(
            registers[register], num_slots=slots, offsets_bytes=(at,) * slots
        )
    refused(replace(plan, registers=tuple(registers)))


@pytest.mark.parametrize(
    ("table", "changes"),
    [
        ("views", {"register": 10**6}),
        ("views", {"strides_bytes": ()}),
        ("views", {"offset_bytes": 2}),
        ("registers", {"id": 5}),
        ("registers", {"arena": 3}),
        ("registers", {"interval": (7, 2)}),
        ("fields", {"source": 10**6}),
        ("variables", {"view": 10**6}),
        ("variables", {"role": "tenant"}),
        ("variables", {"role": "rounded"}),
        ("variables", {"init": (("kind", "evil"),)}),
        ("variables", {"init": (("kind", "normal"), ("std", -1.0))}),
        ("constants", {"data": b""}),
    ],
)
def test_a_row_that_does_not_fit_the_others_is_named(plan, table, changes):
    refused(with_row(plan, table, 0, **changes))


@pytest.mark.parametrize(
    ("actor", "changes"),
    [
        ("metrics", {"kind": ActorKind.SOURCE}),
        ("metrics", {"name": "strangers"}),
        ("snapshot", {"name": "other"}),
        ("snapshot", {"is_flushed": False}),
        ("data", {"stream": 10**6}),
    ],
)
def test_an_actor_that_no_run_knows_is_refused(edit, actor, changes):
    refused(edit.with_actor(actor, **changes))


def test_options_that_disagree_with_the_actors_are_refused(plan):
    for name, value in (("metrics_every", 7), ("accumulate", 0), ("evaluate_every", 3)):
        options = tuple((dict(plan.options) | {name: value}).items())
        refused(replace(plan, options=options))


def renamed(plan, table, name):
    """Return the plan where whoever has this name is called otherwise."""
    rows = getattr(plan, table)
    index = next(i for i, row in enumerate(rows) if row.name == name)
    return with_row(plan, table, index, name="no word of ours")


def test_a_plan_that_trains_without_handing_on_its_loss_is_refused(plan):
    refused(renamed(plan, "fields", "loss"))


def test_steps_of_several_batches_need_their_counter(accumulating):
    prove(accumulating)
    refused(renamed(accumulating, "variables", "batches"))


def test_who_only_looks_needs_no_kernels(edit):
    prove_consistent(edit.with_launch("gelu", kernel="numpy.none"), "p.plan")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91" * 2000,
        b"\xdd\xff\xff\xff\xff",
        b"\xd9\x04\xff\xfe\xfd\xfc",
        b"\x81\x80\x01",
        b"\xd6\xff\x00\x00\x00\x00",
        b"\xc7\x0c\xff" + b"\xff" * 12,
        msgpack.packb(5),
        msgpack.packb({"a": 1}),
        msgpack.packb([0] * 16),
    ],
)
def test_broken_rows_under_a_right_hash_are_refused_by_file(plan, body):
    import hashlib

    head = msgpack.unpackb(plan.to_bytes())
    head["body"], head["digest"] = body, hashlib.blake2b(body, digest_size=16).hexdigest()
    with raises(PlanFormatError):
        Plan.from_bytes(msgpack.packb(head), "mine.plan")


def test_every_field_of_a_plan_is_read_by_its_type(plan):
    """A value of no type at all in place of any field of the first row of every table."""
    import hashlib

    row = msgpack.unpackb(msgpack.unpackb(plan.to_bytes())["body"], use_list=False)
    tried = 0
    for table, rows in enumerate(row):
        is_table = isinstance(rows, tuple) and rows and isinstance(rows[0], tuple)
        for place in range(len(rows[0])) if is_table else ():
            first = (*rows[0][:place], {"no": "type"}, *rows[0][place + 1 :])
            body = msgpack.packb((*row[:table], (first, *rows[1:]), *row[table + 1 :]))
            head = {
                **msgpack.unpackb(plan.to_bytes()),
                "body": body,
                "digest": hashlib.blake2b(body, digest_size=16).hexdigest(),
            }
            with raises(PlanFormatError):
                Plan.from_bytes(msgpack.packb(head))
            tried += 1
    assert tried > 60


class TwoLayers(af.nn.Module):
    def __init__(self):
        self.a, self.b = af.nn.Linear(4, 4), af.nn.Linear(4, 4)

    def __call__(self, x):
        return self.b(self.a(x))


@af.job(optimizer=af.optim.SGD(1e-2), device="sim")
def on_device(model, batch):
    return af.square(model(batch.x)).mean()


def test_a_snapshot_that_leaves_its_device_as_another_variable_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path))
    rows = af.data.ArraySource({"x": np.zeros((8, 4), np.float32)}, batch=4)
    plan = on_device.compile(TwoLayers(), rows, every=2)
    prove(plan)
    fetch = next(a for a in plan.actors if a.name == "snapshot.fetch")
    (copy,) = fetch.launches
    one, other = [i for i, f in enumerate(plan.fields) if f.name.endswith("weight")]
    fields = list(plan.fields)
    for k, name in ((one, fields[other].name), (other, fields[one].name)):
        fields[k] = replace(fields[k], name=name)
    refused(replace(plan, fields=tuple(fields)))
    turned = replace(copy, inputs=copy.inputs[::-1], reads=copy.reads[::-1])
    refused(with_row(plan, "actors", fetch.id, launches=(turned,)))
    refused(with_row(plan, "actors", fetch.id, name="fetched"))
