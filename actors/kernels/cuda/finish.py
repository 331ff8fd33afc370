"""What follows all rows: COLUMN outputs, and the sums of the teams that they come from.

Eight threads add up the partial rows of one column, each some of them in order, and then what they
have, in order: so the result is the same however many blocks there are.
"""

from __future__ import annotations

from actors.kernels.codegen import arguments as words
from actors.kernels.codegen.expressions import sum_type_of
from actors.kernels.codegen.stages import column_lines, outputs_of, scalar_stores
from actors.kernels.codegen.values import indented
from actors.kernels.cuda.stages import COLUMNS, StageWriter
from compiler.fusion.program import Kind

FINISH_COLUMNS = 32
FINISH_THREADS = 256


def finish_lines(stages: StageWriter) -> list[str]:
    """Return the body of the kernel NAME_finish."""
    return _FinishWriter(stages).lines()


class _FinishWriter:
    """The text of what is done once per column."""

    def __init__(self, stages: StageWriter) -> None:
        self.values, self.plan = stages.values, stages.plan

    def lines(self) -> list[str]:
        """Return columns, then numbers."""
        columns = outputs_of(self.values, Kind.COLUMN)
        before, body = column_lines(self.values, "t{v}")
        text, shared = [], []
        if columns and self.plan.column_sums:
            shared = [f"AF_SHARED(af_word, parts, {FINISH_THREADS});"]
            text = [*before, *self._added_columns(body)]
        elif columns:
            loop = f"for (int64_t j = thread; j < {COLUMNS}; j += AF_NUM_BLOCKS * AF_NUM_THREADS)"
            text = [*before, f"{loop} {{", *indented(body), "}"]
        scalars = indented(scalar_stores(self.values))
        if scalars:
            text += ["if (thread == 0) {", *scalars, "}"]
        return [
            *shared,
            "const af_word *a = arguments.w;",
            f"if (a[{words.SKIP}].p && *(const int64_t *)a[{words.SKIP}].p) return;",
            "const int64_t thread = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;",
            "NAME_scalars scalars, *s = &scalars;",
            "NAME_get_scalars(a, s);",
            *text,
            "(void)s, (void)thread;",
        ]

    def _added_columns(self, body: list[str]) -> list[str]:
        """Return the loop over columns: eight threads add up the slots of one, in a fixed order."""
        text = []
        for v in self.plan.column_sums:
            own = sum_type_of(self.values.dtype(v))
            member = "d" if own == "double" else "i"
            step = self.values.partial_step(v)
            text += [
                f"const {own} *c{v} = {self.values.partial_place(v, 'group')} + from;",
                f"{own} t{v} = 0;",
                f"for (int32_t i = group; i < num_slots; i += groups, c{v} += groups * {step})",
                f"    t{v} += *c{v};",
                "AF_BARRIER();",
                f"parts[AF_THREAD].{member} = t{v};",
                "AF_BARRIER();",
                f"t{v} = 0;",
                "for (int32_t i = 0; i < groups; i++)",
                f"    t{v} += parts[i * {FINISH_COLUMNS} + AF_THREAD % {FINISH_COLUMNS}].{member};",
            ]
        return [
            f"const int32_t groups = AF_NUM_THREADS / {FINISH_COLUMNS};",
            f"const int32_t group = AF_THREAD / {FINISH_COLUMNS};",
            f"const int32_t num_slots = (int32_t)a[{words.NUM_TEAMS}].i;",
            f"for (int64_t j0 = AF_BLOCK * {FINISH_COLUMNS}; j0 < {COLUMNS};",
            f"     j0 += AF_NUM_BLOCKS * {FINISH_COLUMNS}) {{",
            f"    const int64_t j = j0 + AF_THREAD % {FINISH_COLUMNS};",
            f"    const int64_t from = af_min(j, {COLUMNS} - 1);",
            *indented(text),
            f"    if (group == 0 && j < {COLUMNS}) {{",
            *indented(body, 2),
            "    }",
            "}",
        ]
