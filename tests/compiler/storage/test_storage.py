from compiler.graph.graph import Write
from compiler.ops.families.arithmetic import EXP, SQUARE
from compiler.ops.families.updates import INCREMENT, SGD_UPDATE
from compiler.ops.primitives.shape import RESHAPE, TRANSPOSE
from compiler.storage.storage import OldRead, assign_storage, is_dense, old_reads, write_after_read


def test_a_view_shares_its_input_and_is_no_launch(sketch):
    x = sketch.input("x", (2, 3), "float32")
    t = sketch.b.emit_one(TRANSPOSE, x, perm=(1, 0))
    y = sketch.b.emit_one(EXP, t)
    storage = assign_storage(sketch.b.freeze())
    assert storage.root[t] == x
    assert storage.layout[t].strides_bytes == (4, 12)
    assert storage.is_launch == (False, False, True)
    assert storage.root[y] == y


def test_a_reshape_that_needs_a_copy_is_a_launch_with_bytes_of_its_own(sketch):
    x = sketch.input("x", (2, 3))
    t = sketch.b.emit_one(TRANSPOSE, x, perm=(1, 0))
    r = sketch.b.emit_one(RESHAPE, t, shape=(6,))
    graph = sketch.b.freeze()
    storage = assign_storage(graph)
    assert storage.root[r] == r
    assert storage.is_launch[-1]
    assert not is_dense(graph.types[t], storage.layout[t])
    assert is_dense(graph.types[r], storage.layout[r])


def test_an_update_lies_over_its_variable(sketch):
    step = sketch.variable("step", (), "int64")
    new = sketch.b.emit_one(INCREMENT, step)
    assert assign_storage(sketch.b.freeze()).root[new] == step


def test_every_reader_of_the_old_value_precedes_the_update_but_readers_of_the_new_do_not(sketch):
    w = sketch.variable("w", (), "int64")
    seen = sketch.b.emit_one(RESHAPE, w, shape=(1,))  # a view on the old value
    old = sketch.b.emit_one(SQUARE, seen)
    new = sketch.b.emit_one(INCREMENT, w)
    after = sketch.b.emit_one(SQUARE, sketch.b.emit_one(RESHAPE, new, shape=(1,)))
    sketch.b.writes = [Write(w, new)]
    graph = sketch.b.freeze()
    producers = graph.producers()
    pairs = write_after_read(graph)
    assert (producers[old], producers[new]) in pairs
    assert all(reader != producers[after] for reader, _ in pairs)


def test_reads_of_old_values_include_an_updates_own_other_inputs_but_not_what_it_writes(sketch):
    w = sketch.variable("w", (2, 2), "float32")
    rate = sketch.input("rate", (), "float32")
    turned = sketch.b.emit_one(TRANSPOSE, w, perm=(1, 0))
    new = sketch.b.emit_one(SGD_UPDATE, w, turned, rate, weight_decay=0.0)
    sketch.b.writes = [Write(w, new)]
    graph = sketch.b.freeze()
    view, update = (graph.producers()[v] for v in (turned, new))
    reads = list(old_reads(graph))
    assert reads == [OldRead(view, 0, update), OldRead(update, 1, update)]
