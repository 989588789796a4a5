"""The proof can fail: bugs planted in copies of the CUDA sources are all found by its tests."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cunorm.cuda import source

TESTS = Path(__file__).parent

#: What is wrong, which tests must find it, where it is, the right text and the wrong one.
MUTANTS = {
    "wrong mask at the end of a run": (
        "401 and block",
        "layout.cuh",
        "first + lane >= 0 && first + lane < inner)",
        "first + lane >= 0)",
    ),
    "wrong mask at the start of a run": (
        "401 and block",
        "layout.cuh",
        "first + lane >= 0 && first + lane < inner)",
        "first + lane < inner)",
    ),
    "an access beyond the end": (
        "test_candidate and block",
        "layout.cuh",
        "valid = left > 0",
        "valid = left > -1",
    ),
    "swapped stride": (
        "test_candidate and block",
        "layout.cuh",
        "DEEP / windows * pitch",
        "DEEP / windows * inner",
    ),
    "shift of unaligned arrays forgotten": (
        "test_unaligned_arrays and 600 and block",
        "layout.cuh",
        "(run + shift) % WIDTH",
        "run % WIDTH",
    ),
    "32-bit offsets in large arrays": (
        "elements_in",
        "types.cuh",
        "using Offset = unsigned long long;\nusing Signed = long long;",
        "using Offset = unsigned;\nusing Signed = int;",
    ),
    "lost barrier before the warps' results are read": (
        "test_candidate and block and 257",
        "reduce.cuh",
        "    }\n    __syncthreads();\n    const int from",
        "    }\n    const int from",
    ),
    "lost barrier after the totals": (
        "test_candidate and block and 257",
        "reduce.cuh",
        "totals[position] = value;\n    }\n    __syncthreads();",
        "totals[position] = value;\n    }",
    ),
    "lost barrier after the coefficients": (
        "test_candidate and block and 257",
        "reduce.cuh",
        "    cluster_arrive();\n    __syncthreads();",
        "    cluster_arrive();",
    ),
    "lost barrier of the cluster": (
        "test_candidate and cluster and 257",
        "reduce.cuh",
        "header.folds);\n    cluster_publish();\n    cluster_wait();\n",
        "header.folds);\n",
    ),
    "lost barrier of a cluster that has one statistic": (
        "test_candidate and cluster",
        "reduce.cuh",
        "totals[0] = total;\n    cluster_publish();\n    cluster_wait();\n",
        "totals[0] = total;\n",
    ),
    "a block of a cluster leaves early": (
        "test_candidate and cluster",
        "backward.cu",
        "    cluster_wait();\n",
        "",
    ),
    "divergent shuffle": (
        "test_candidate and block and 257",
        "reduce.cuh",
        "        reduce_lanes<WARPS>(value);",
        "        if (position < POSITIONS) reduce_lanes<WARPS>(value);",
    ),
    "shared memory that nobody wrote": (
        "test_candidate and block",
        "layout.cuh",
        "for (int i = 0; i < TILE; ++i)\n            tile.access[i].load_ahead(",
        "for (int i = 1; i < TILE; ++i)\n            tile.access[i].load_ahead(",
    ),
    "a copy that nobody waited for": (
        "test_candidate and block",
        "transform.cu",
        "wait_for_copies<AHEAD - 1>();",
        "wait_for_copies<AHEAD>();",
    ),
    "wrong weight of a part": (
        "test_candidate and stream and 300",
        "moments.cuh",
        "static_cast<double>(count * share)",
        "static_cast<double>(count)",
    ),
    "means of lanes forgotten": (
        "test_candidate and warp",
        "moments.cuh",
        "moments.m2 + sum * step",
        "moments.m2",
    ),
    "parts counted twice": (
        "test_candidate and stream and 300",
        "reduce.cuh",
        "part += at_once * 32)",
        "part += at_once * 16)",
    ),
    "a lane left out": (
        "test_candidate and warp",
        "reduce.cuh",
        "reduce_lanes<GROUP_LANES, ACROSS>(values[s])",
        "reduce_lanes<GROUP_LANES / 2, ACROSS>(values[s])",
    ),
    "rounding of the mean not corrected": (
        "mean_much_larger",
        "moments.cuh",
        "center[s] + correction",
        "center[s]",
    ),
    "residual of the mean forgotten": (
        "mean_much_larger",
        "transform.cuh",
        " - times_residual(residual, scale);",
        ";",
    ),
    "coefficients of another lane": (
        "test_candidate and warp",
        "gradients.cuh",
        "slope, 0, GROUP",
        "slope, 1, GROUP",
    ),
    "running statistics updated by every part": (
        "running_statistics_of_every_type and cluster",
        "transform.cuh",
        "    if (first && !SPANS) {\n        a.running_mean",
        "    if (!SPANS) {\n        a.running_mean",
    ),
    "channels beyond the last": (
        "test_candidate and stream and (300 or 130)",
        "layout.cuh",
        "if (column >= work.positions) left = 0;",
        "",
    ),
    "parameters of the first row for all": (
        "test_candidate_of_norms and block and group",
        "layout.cuh",
        "return SPANS ? work.parameter *",
        "return SPANS ? 0 *",
    ),
    "one parameter for all lanes of an access": (
        "test_candidate_of_norms and block and 33",
        "layout.cuh",
        "if (SPANS == 2 || lane == 0)",
        "if (lane == 0)",
    ),
    "a group of channels that begins elsewhere": (
        "test_candidate_of_norms and block and 50",
        "reduce.cuh",
        "const Offset first = p / members * members;",
        "const Offset first = p;",
    ),
    "lost barrier before members are merged": (
        "test_candidate_of_norms and block and 50",
        "reduce.cuh",
        "cluster_total(header.folds.totals, p));\n        __syncthreads();",
        "cluster_total(header.folds.totals, p));",
    ),
    "weight left out of the sums of a group": (
        "test_candidate_of_norms and block and 50",
        "backward.cu",
        "return total.times(known.weight(a));",
        "return total;",
    ),
    "weight of another channel in streamed sums": (
        "test_candidate_of_norms and stream and group",
        "backward.cu",
        "weight_of(a, (first + m) %",
        "weight_of(a, m %",
    ),
    "a sample twice": (
        "test_samples_in_blocks and block",
        "layout.cuh",
        "first = block * size;",
        "first = block > 0 ? block * size - 1 : 0;",
    ),
    "the last sample left out": (
        "test_samples_in_blocks and warp",
        "layout.cuh",
        "(block + 1) * size : batch;",
        "(block + 1) * size : batch - 1;",
    ),
    "lost barrier before gradients are gathered": (
        "test_candidate_of_norms and block and layer",
        "kept.cuh",
        "        __syncthreads();\n        // The elements",
        "        // The elements",
    ),
    "gradients of the first group of threads alone": (
        "test_candidate_of_norms and warp",
        "kept.cuh",
        "thread < THREADS; thread += GROUP",
        "thread < GROUP; thread += GROUP",
    ),
    "another parameter's elements": (
        "test_candidate_of_norms and block and group",
        "layout.cuh",
        "factor >> g.span_shift",
        "factor >> (g.span_shift + 1)",
    ),
    "gradients of one tile for all": (
        "test_candidate_of_norms and block and 600",
        "rows.cu",
        "kept.get(n * TILE + i, mine)",
        "kept.get(i, mine)",
    ),
    "a warp's terms left out": (
        "test_candidate_of_norms and block and instance",
        "add_up.cu",
        "for (int other = 1; other < WARPS; ++other)",
        "for (int other = 2; other < WARPS; ++other)",
    ),
    "a factor of a double backward pass": (
        "test_double_backward_by_candidate and block",
        "double_gradients.cuh",
        "3.0 * mean_gv * mean_hv",
        "2.0 * mean_gv * mean_hv",
    ),
    "gradients' means merged as one": (
        "test_double_backward_of_large_means",
        "double_gradients.cuh",
        "of[GH] += delta_g * delta_h * weight;",
        "",
    ),
    "tiles of three inputs kept in one place": (
        "test_double_backward_by_candidate and block",
        "double_backward.cu",
        "in.put(shelf, n)",
        "in.put(shelf, 0)",
    ),
    "second gradients of one tile for all": (
        "test_double_backward_of_rows and block",
        "double_rows.cu",
        "n * TILE + i, lane",
        "i, lane",
    ),
    "lost barrier between rows": (
        "test_candidate_of_norms and block and layer",
        "reduce.cuh",
        "else if (GROUP == THREADS) __syncthreads();",
        "",
    ),
    "the next row where this one is": (
        "test_candidate_of_norms and block and layer",
        "normalize_rows.cu",
        "fetch(turn + turns.step, tiles - row);",
        "fetch(turn + turns.step, row);",
    ),
    "a row that nobody waited for": (
        "test_candidate_of_norms and block and layer",
        "normalize_rows.cu",
        "wait_for_copies<1>();",
        "wait_for_copies<2>();",
    ),
    "a row without room for the next that nobody waited for": (
        "test_rows_without_room_for_the_next",
        "rows.cu",
        "wait_for_copies<SHELVES - 1>();",
        "wait_for_copies<1>();",
    ),
    "the next row over one that is still needed": (
        "test_rows_without_room_for_the_next",
        "rows.cu",
        "  gradient_of_held(a,",
        "  if (SHELVES == 1) fetch(turn + turns.step, on);\n  gradient_of_held(a,",
    ),
    "gradients over rows that are still needed": (
        "test_candidate_of_norms and block and layer",
        "rows.cu",
        "    __syncthreads();  // the rows that were",
        "    // the rows that were",
    ),
    "what is made of parts before all have arrived": (
        "test_candidate and cached",
        "cached.cuh",
        "+ 1 < parts) return;",
        "+ 2 < parts) return;",
    ),
    "a part that nobody counts": (
        "test_candidate and cached",
        "cached.cuh",
        "part < parts; part += THREADS",
        "part + 1 < parts; part += THREADS",
    ),
    "a second sweep that does not wait": (
        "test_candidate and cached",
        "cached.cuh",
        "static_cast<unsigned>(cut.parts) + 1);",
        "static_cast<unsigned>(cut.parts));",
    ),
    "a second sweep that waits for tickets to come": (
        "test_candidate and cached",
        "cached.cuh",
        "second = first - ahead;",
        "second = static_cast<Offset>(tickets.units) - 1 + ahead - first;",
    ),
    "the first units left out": (
        "test_candidate and cached",
        "cached.cuh",
        "has_second = first >= ahead;",
        "has_second = first > ahead;",
    ),
    "a unit that nobody waited for": (
        "test_candidate and cached",
        "normalize_cached.cu",
        "wait_for_copies<0>();",
        "wait_for_copies<1>();",
    ),
    "coefficients of another channel": (
        "test_candidate and cached",
        "backward_cached.cu",
        "b.cut, second.channel);",
        "b.cut, 0);",
    ),
    "another block's word": (
        "test_candidate and cached and 1030",
        "cached.cuh",
        "*word = find();\n    __syncthreads();",
        "*word = find();",
    ),
    "statistics about the mean after all": (
        "test_candidate_of_norms and warp and RMS and 120",
        "moments.cuh",
        "if (CENTERED) sum[s].chunk += of_vector;",
        "sum[s].chunk += of_vector;",
    ),
}


def plant(name, folder):
    _, file, right, wrong = MUTANTS[name]
    shutil.copytree(source.folder(), folder)
    text = (folder / file).read_text()
    assert text.count(right) == 1, f"{name}: {right!r} is {text.count(right)} times in {file}"
    (folder / file).write_text(text.replace(right, wrong))


def run_tests(name, folder):
    """Tests of the kernels on other sources; stops at the first that fails."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider",
         "--backend", "cuda-on-cpu", "--kernels", str(folder),
         "test_cuda_kernels.py", "test_numerics.py",
         "-k", MUTANTS[name][0]],
        cwd=TESTS, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_found(tmp_path, name, on_backend):
    if on_backend is None:
        pytest.skip("needs the CUDA sources executed on the CPU")
    plant(name, tmp_path / "kernels")
    result = run_tests(name, tmp_path / "kernels")
    assert result.returncode != 0, f"{name}: nothing failed"
    found = "FAILED" in result.stdout or "AddressSanitizer" in result.stderr
    crashed = "runtime error" in result.stderr or "Fatal Python error" in result.stderr
    assert found or crashed, result.stdout + result.stderr
