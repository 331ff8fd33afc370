import json

from benchmarks.compare.report import (
    Bench,
    MachineInfo,
    Measured,
    RowResult,
    as_json,
    launches_markdown,
    markdown,
    write_png,
)

OURS = Measured("actorflow", "", "as is", 10.0, 5, 300.0, 100.0, 0.5)
JAX = Measured("jax", "jit", "donated", 15.0, 5, 600.0, 300.0, 2.0, idle_share=0.2)
BENCH = Bench(
    MachineInfo("a processor", 2, {"numpy": 100.0, "torch": 200.0}, {"torch": 400.0}),
    (
        RowResult("gpt", "fp32", 2048, "tokens", 1e9, OURS, (JAX,), ("torch: no",)),
        RowResult("mlp", "bf16", 128, "samples", 0.0, None, (), ("actorflow: not yet",)),
    ),
)


def test_the_json_has_the_agreed_shape():
    found = json.loads(json.dumps(as_json(BENCH), allow_nan=False))
    assert found["machine"]["peak_gflops"] == 200.0
    row = found["rows"][0]
    assert {k: row[k] for k in ("row", "precision", "ms", "items_per_s", "gflops")} == {
        "row": "gpt", "precision": "fp32", "ms": 10.0, "items_per_s": 204_800.0, "gflops": 100.0,
    }  # fmt: skip
    assert (row["peak_rss_mb"], row["first_step_s"], row["peak_fraction"]) == (300.0, 0.5, 0.5)
    assert row["rivals"]["jax"]["ms"] == 15.0
    assert row["ratio_to_best_rival"] == 1.5
    assert row["failures"] == ["torch: no"]


def test_a_row_is_held_against_the_peak_of_its_own_precision():
    rows = [RowResult("gpt", name, 1, "x", 1e9, OURS, (), ()) for name in ("fp32", "bf16")]
    found = as_json(Bench(BENCH.machine, tuple(rows)))
    assert [row["peak_fraction"] for row in found["rows"]] == [0.5, 0.25]
    assert "200 GFLOP/s in fp32 (numpy 100, torch 200) and 400 GFLOP/s in bf16" in markdown(BENCH)


def test_a_row_without_ours_has_nulls_and_says_why():
    row = as_json(BENCH)["rows"][1]
    assert (row["ms"], row["gflops"], row["ratio_to_best_rival"]) == (None, None, None)
    assert row["rivals"] == {}
    assert row["failures"] == ["actorflow: not yet"]


def test_the_report_names_ratios_failures_and_settings():
    text = markdown(BENCH)
    assert "| gpt fp32 | jax jit | 15 |  | 136,533 | 1.50 x | 66.7 | 33% | 600 MB |" in text
    assert "- gpt fp32: the best rival is jax; ours is 1.50 x as fast" in text
    assert "- gpt fp32: torch: no" in text
    assert "- gpt fp32: jax burned 20% of a core while others ran" in text
    assert "- jax jit: donated" in text
    assert "- mlp bf16: actorflow: not yet" in text


def test_every_line_of_the_table_has_as_many_cells_as_its_head():
    for extras in ({}, {"busy_slowdown": 1.5}, {"cold_first_step_s": 9.0}):
        ours = Measured("actorflow", "", "", 10.0, 5, 300.0, 100.0, 0.5, **extras)
        row = RowResult("gpt", "fp32", 1, "tokens", 1e9, ours, (JAX,), ())
        table = [li for li in markdown(Bench(BENCH.machine, (row,))).split("\n") if li[:1] == "|"]
        assert len({line.count("|") for line in table}) == 1


def test_an_empty_comparison_can_be_told():
    assert "nothing was measured" in markdown(Bench(MachineInfo("a processor", 2, {}, {}), ()))


def test_the_longest_launches_are_shown():
    launches = [{"op": f"op{i}", "kernel": "k", "scope": "s", "us": 9.0 - i, "gflops": 1.0}
                for i in range(9)]  # fmt: skip
    text = launches_markdown("gpt", launches, 2)
    assert "op1" in text
    assert "op2" not in text


def test_the_picture_is_a_png(tmp_path):
    write_png(BENCH, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
