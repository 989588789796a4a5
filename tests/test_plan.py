"""How arrays are cut: everything once, nothing too large, whatever the geometry."""

from importlib import util

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cunorm.cpu import memory, pieces, plan, vectors
from cunorm.geometry import (
    batch_norm_geometry,
    group_norm_geometry,
    row_norm_geometry,
    scale_shift_geometry,
)


def _plan_of(second_level, share, register_bytes):
    """The module as it is on another processor: bytes of its caches (of a third, its share)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "second_level_cache", lambda: second_level)
        patch.setattr(memory, "last_level_cache", lambda: (32 << 20, share))
        patch.setattr(vectors, "REGISTER_BYTES", register_bytes)
        spec = util.find_spec(plan.__name__)
        module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


ZEN_3, ZEN_5 = _plan_of(512 << 10, 8 << 20, 32), _plan_of(1 << 20, 8 << 20, 64)
XEON = _plan_of(2 << 20, 240 << 20, 64)
on_all = pytest.mark.parametrize("plan", [ZEN_3, ZEN_5, XEON], ids=["Zen 3", "Zen 5", "Xeon"])

extents = st.one_of(st.integers(1, 40), st.sampled_from([49, 196, 784, 4097, 100_000]))


@on_all
@given(outer=extents, group=extents,
       inner=st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 4096, 50_176])),
       itemsize=st.sampled_from([2, 4, 8]), operands=st.sampled_from([1, 2]))  # fmt: skip
def test_everything_is_covered(plan, outer, group, inner, itemsize, operands):
    geometry = batch_norm_geometry((outer, group, inner), 1)
    _, outer, _, inner, _, _ = geometry
    cut = plan.plan(geometry, itemsize, operands)
    assert 1 <= cut.parts <= plan._MOST_PARTS
    if isinstance(cut, plan.Segments):
        pieces = -(-inner // cut.chunk_length)
        chunks = -(-outer // cut.chunk_rows) * pieces
        assert pieces == 1 or cut.chunk_rows == 1
        assert cut.chunk_rows * cut.chunk_length <= plan._SEGMENT_CHUNK
        assert (cut.parts - 1) * cut.part_chunks < chunks <= cut.parts * cut.part_chunks
        assert cut.tasks == -(-group // cut.block) * cut.parts
        assert cut.block == 1 or cut.block * geometry.count * itemsize <= plan._BLOCK_BYTES
        bytes_near = geometry.count * itemsize * operands
        assert cut.resident == (bytes_near <= plan._RESIDENT_CHANNEL_BYTES)
    else:
        assert cut.fold * cut.rows + cut.tail_rows == outer
        assert cut.tail_rows < cut.fold
        assert cut.fold == 1 or cut.block_channels == group
        assert (cut.parts - 1) * cut.part_rows < cut.rows <= cut.parts * cut.part_rows
        assert cut.chunk_rows <= plan._COLUMN_CHUNK_ROWS
        blocks = -(-group // cut.block_channels)
        assert cut.tasks == blocks * cut.parts
        # Working arrays of a block stay small whatever the number of channels.
        assert cut.fold * cut.block_channels * inner <= 16 * plan._MOST_BLOCK_POSITIONS
        if cut.resident:
            channel = outer * inner * itemsize * operands
            whole = group * channel <= plan._RESIDENT_RUNS_BYTES
            assert whole or cut.block_channels * channel <= plan._RESIDENT_COLUMNS_BYTES


@pytest.mark.parametrize(
    ("shape", "axis", "family", "resident"),
    [
        ((64, 256, 28, 28), 1, plan.Segments, True),
        ((64, 28, 28, 256), 3, plan.Columns, False),
        ((64, 512, 5, 5), 1, plan.Columns, True),
        ((32, 10, 120_000), 1, plan.Segments, False),
        ((128, 1024), 1, plan.Columns, True),
        # Lines 4 KiB apart, of which a cache keeps few, and lines 384 bytes apart.
        ((8, 1024, 1024), 2, plan.Columns, False),
        ((64, 7, 7, 2048), 3, plan.Columns, False),
        ((8, 32, 32, 96), 3, plan.Columns, True),
        ((1, 1024, 8), 1, plan.Columns, True),
        ((1, 1024, 16), 1, plan.Segments, True),
        ((4, 1024, 16), 1, plan.Columns, True),
    ],
)
def test_known_choices(shape, axis, family, resident):
    cut = plan.plan(batch_norm_geometry(shape, axis), 4, 1)
    assert isinstance(cut, family)
    assert cut.resident == resident


@given(extents, extents, extents, st.sampled_from([2, 4, 8]), st.integers(1, 300))
def test_stretches_cover_memory_in_whole_lines(outer, group, inner, itemsize, number):
    geometry = batch_norm_geometry((outer, group, inner), 1)
    tasks, stretch = plan.stretches(geometry, itemsize, number)
    assert (tasks - 1) * stretch < outer * group * inner <= tasks * stretch
    assert stretch * itemsize % 64 == 0
    assert tasks <= plan._ENOUGH_TASKS


@pytest.mark.parametrize(
    ("kib", "number", "task_kib"),
    [
        (64, 1, 64),
        (512, 1, 128),
        (512, 2, 64),  # four tasks for each thread
        (512, 16, 64),
        (8 << 10, 2, 256),  # enough
        (8 << 10, 16, 128),
        (1 << 20, 2, 4 << 10),
    ],
)
def test_tasks_of_a_sweep(threads, kib, number, task_kib):
    """They are of a size for the threads that there are, be they stretches or runs."""
    threads(number)
    geometry = batch_norm_geometry((kib // 4, 4, 256), 1)
    assert plan.stretches(geometry, 4, number) == (kib // task_kib, task_kib << 8)
    runs = plan.transform_plan(geometry, 4, streaming=False)
    assert isinstance(runs, plan.Runs)
    assert (runs.tasks, runs.runs) == (kib // task_kib, task_kib)


@pytest.mark.parametrize(
    ("shape", "operands", "number", "block"),
    [
        ((64, 256, 27, 27), 1, 2, 11),  # 12 would be 32 KiB on end, 11 are 2 MiB
        ((64, 256, 27, 27), 2, 2, 5),
        ((64, 256, 27, 27), 1, 16, 4),  # 64 blocks for 16 threads
        ((64, 256, 27, 27), 1, 200, 1),
        ((16, 256, 32, 32), 1, 2, 8),  # 32 KiB on end
        ((16, 64, 112, 112), 1, 2, 1),  # 50 KB on end already
        ((1, 1024, 48), 1, 2, 170),  # a task's worth
    ],
)
def test_blocks_of_channels(monkeypatch, shape, operands, number, block):
    """Runs of neighbouring channels are read in turns, as long as all threads are busy."""
    monkeypatch.setattr(plan, "_BLOCK_BYTES", 2 << 20)
    cut = plan._segments.__wrapped__(batch_norm_geometry(shape, 1), 4, operands, number)
    assert (cut.block, cut.resident_tasks) == (block, -(-shape[1] // block))


@pytest.mark.parametrize(("operands", "block"), [(1, 2), (2, 1)])
def test_blocks_of_a_second_level_cache(monkeypatch, operands, block):
    """They are as large as it allows, where they are to stay there."""
    monkeypatch.setattr(plan, "_BLOCK_BYTES", 512 << 10)
    cut = plan._segments.__wrapped__(batch_norm_geometry((64, 256, 28, 28), 1), 4, operands, 2)
    assert cut.block == block


def test_small_arrays_use_several_threads():
    """Columns of 128 to 256 KB are four blocks; one sweep has a task every chunk."""
    for shape, blocks in (((64, 1024), 4), ((32, 1024), 4), ((16, 1024), 1), ((128, 512), 2)):
        cut = plan.plan(batch_norm_geometry(shape, 1), 4, 1)
        assert (cut.resident_tasks, cut.parts) == (blocks, 1)
        assert plan.stays_near(cut, 8)
    assert plan.plan(batch_norm_geometry((64, 1024), 1), 4, 0).tasks == 2


def test_samples_that_are_tasks_are_not_cut():
    """A whole sample of 200 KB is one task, where there are some; its chunks are the same."""
    for batch, blocks in ((1, 2), (3, 2), (4, 1), (64, 1)):
        cut = plan.plan(group_norm_geometry((batch, 14, 14, 512), 3, 32), 2, 1)
        assert cut.resident_tasks == batch * blocks
        assert (cut.chunk_rows, cut.parts) == (196, 1)


@on_all
@given(outer=extents, groups=st.integers(1, 40), inner=st.integers(1, 300),
       members=st.integers(1, 8), itemsize=st.sampled_from([2, 4, 8]),
       operands=st.sampled_from([1, 2]))  # fmt: skip
def test_samples_are_added_up_alike_whatever_their_number(
    plan, outer, groups, inner, members, itemsize, operands
):
    """So their bits are the same: blocks, the tasks of a sample, may differ."""
    kept = {
        plan.Segments: ("chunk_rows", "chunk_length", "part_chunks", "parts"),
        plan.Columns: ("fold", "rows", "tail_rows", "chunk_rows", "part_rows", "parts"),
        plan.Rows: ("chunk_length", "pieces"),
    }
    found = set()
    for batch in (1, 3, 4, 200):
        shape = (batch, outer, groups * members, inner)
        cut = plan.plan(group_norm_geometry(shape, 2, groups), itemsize, operands)
        found.add((type(cut), *(getattr(cut, name) for name in kept[type(cut)])))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("shape", "itemsize", "operands", "fold"),
    [
        ((64, 64, 64, 256), 4, 1, 4),
        ((64, 64, 64, 256), 2, 1, 8),
        ((64, 64, 64, 256), 8, 1, 2),
        ((64, 64, 64, 256), 4, 2, 2),
        ((16, 64, 64, 64), 4, 1, 8),  # 16 MiB
        ((17, 64, 64, 64), 4, 1, 16),
        ((64, 64, 64, 640), 2, 1, 3),
        ((64, 64, 64, 600), 2, 1, 1),  # four would fill whole lines, but are more
        ((64, 64, 64, 24), 4, 1, 42),  # in twos, which fill whole lines
    ],
)
def test_folded_rows_of_far_arrays_fill_a_page(shape, itemsize, operands, fold):
    assert plan.plan(batch_norm_geometry(shape, 3), itemsize, operands).fold == fold


def test_few_channels_use_all_threads():
    """Two channels do not leave most of the threads idle."""
    cut = plan.plan(batch_norm_geometry((2, 2, 6_500_000), 1), 4, 1)
    assert cut.tasks == 2 * plan._MOST_PARTS
    resident = plan.plan(batch_norm_geometry((1, 4, 100_000), 1), 4, 1)
    assert resident.resident
    assert resident.parts > 1
    assert not plan.stays_near(resident, 8)
    assert plan.stays_near(resident, 1)


@pytest.mark.parametrize(
    ("shape", "itemsize", "number", "tasks", "tasks_where_slow"),
    [
        ((64, 2, 1024), 4, 1, 1, 2),
        ((64, 2, 1024), 4, 2, 1, 2),
        ((64, 2, 1024), 4, 8, 1, 2),
        ((64, 2, 1024), 2, 2, 1, 2),  # 128 KiB a channel
        ((63, 2, 1024), 2, 2, 1, 1),
        ((64, 3, 1024), 4, 2, 3, 3),
        ((64, 3, 1024), 4, 8, None, 3),
        ((63, 3, 1024), 2, 8, None, None),
        ((1, 2, 65536), 4, 2, 2, 2),
    ],
)
def test_neighbouring_runs_are_not_written_in_step(
    monkeypatch, shape, itemsize, number, tasks, tasks_where_slow
):
    """No two threads do a channel each whose runs are neighbours, unless these are stretches.

    Where the third level is slow, they do so of larger channels.
    """
    for least, expected in ((1 << 62, tasks), (128 << 10, tasks_where_slow)):
        monkeypatch.setattr(plan, "_IN_STEP_BYTES", least)
        geometry = batch_norm_geometry(shape, 1)
        cut = plan._segments.__wrapped__(geometry, itemsize, 1, number)
        assert cut.parts == 1
        assert plan.stays_near(cut, number) == (expected is not None)
        assert cut.resident_tasks == (expected or shape[1])


def test_few_channels_stay_near_where_the_third_level_is_slow(monkeypatch):
    """If threads have as many of them, each sums and writes its own."""
    cut = plan.plan(batch_norm_geometry((32, 4, 64, 64), 1), 4, 1)
    assert cut.resident
    assert cut.parts > 1
    for slow, near in ((False, {1}), (True, {1, 2, 4})):
        monkeypatch.setattr(plan, "SLOW_THIRD_LEVEL", slow)
        assert {n for n in range(1, 9) if plan.stays_near(cut, n)} == near


@pytest.mark.parametrize(
    ("batch", "outer", "channels", "block", "parts"),
    [(1, 64, 2, 1, 4), (1, 64, 10, 4, 3), (1, 1, 5, 2, 3), (3, 8, 12, 5, 2)],
)
def test_parts_of_segments_follow_each_other_as_memory(
    monkeypatch, batch, outer, channels, block, parts
):
    """Each once: part by part where channels alternate in memory, else channel by channel."""
    monkeypatch.setattr(pieces, "divide", divmod)
    piece = pieces.segments_piece.py_func
    number = -(-channels // block)
    found = [piece(i, batch, outer, channels, block, parts) for i in range(number * parts)]
    expected = {(i * block, part) for i in range(number) for part in range(parts)}
    alternating = batch == 1 and outer > 1
    assert found == sorted(expected, key=lambda at: at[::-1] if alternating else at)


@pytest.mark.parametrize(("channels", "stride"), [(1, 40), (3, 40), (3, 0), (1, 0)])
def test_jumps_to_the_run_that_is_read_next(channels, stride):
    """From the end of each, in turns; from the last one nowhere."""
    length, rows = 7, 3 if stride else 1
    starts = [5, 15, 100][:channels]
    begins = [start + row * stride for row in range(rows) for start in starts]
    for n, begin in enumerate(begins):
        jump = pieces.segments_jump.py_func(starts, n % channels, channels, stride, length)
        if n + 1 < len(begins):
            assert begin + length + jump == begins[n + 1]
        elif stride == 0:
            assert jump == 0


def test_rows_are_covered():
    """Pieces of rows, and blocks of samples, whatever their number."""
    for batch, length in [(1, 1), (3, 4097), (1000, 128), (131072, 128), (5, 700_001), (64, 12288)]:
        for inner in (1, 7):
            for operands in (1, 2):
                geometry = group_norm_geometry((batch, 2 * length, inner), 1, 2)
                cut = plan.plan(geometry, 4, operands, False)
                assert isinstance(cut, plan.Rows)
                row = length * inner
                assert (cut.pieces - 1) * cut.chunk_length < row <= cut.pieces * cut.chunk_length
                assert cut.chunk_length <= plan._SEGMENT_CHUNK
                assert (cut.blocks - 1) * cut.block < batch <= cut.blocks * cut.block
                assert cut.block <= plan._MOST_BLOCK_SAMPLES
                assert cut.tasks == 2 * batch * cut.pieces
                assert cut.resident_tasks == 2 * cut.blocks


@pytest.mark.parametrize(
    ("shape", "itemsize", "resident"),
    [
        ((16, 131_072), 4, False),
        ((128, 32_768), 2, False),
        ((128, 32_768), 4, True),
        ((64, 32_768), 4, False),
        ((64, 16_384), 8, False),
        ((1, 100_000), 4, False),
        ((16, 4096), 4, True),  # else one task
        ((2, 64), 4, True),
    ],
)
def test_partial_sums_of_rows_are_few(shape, itemsize, resident):
    """Rows are read twice where the blocks' sums would be half as much as the rows."""
    geometry = row_norm_geometry(shape, 1)
    cut = plan.plan(geometry, itemsize, 2)
    assert cut.resident == resident
    assert resident or cut.block == shape[0]  # blocks that are no tasks need not be many
    assert plan.plan(geometry, itemsize, 1).resident
    assert plan.rows_plan(geometry, itemsize, 3).resident


@pytest.mark.parametrize(("number", "blocks"), [(2, 8), (4, 4), (8, 4), (32, 4)])
def test_blocks_of_several_rows(number, blocks):
    """Rows of a sample are tasks already: sums of few blocks, 1/16 of the data, will do."""
    geometry = group_norm_geometry((128, 16 * number, 7, 7), 1, number)
    cut = plan.rows_plan(geometry, 4, 2)
    assert cut.blocks == blocks
    assert cut.resident_tasks == number * blocks


@pytest.mark.parametrize(
    ("geometry", "forward", "backward"),
    [
        (row_norm_geometry((64, 4096), 1), plan.Rows, plan.Rows),
        (group_norm_geometry((128, 256, 28, 28), 1, 32), plan.Segments, plan.Segments),
        (group_norm_geometry((128, 512, 14, 14), 1, 32), plan.Rows, plan.Segments),
        (group_norm_geometry((128, 512, 7, 7), 1, 32), plan.Rows, plan.Rows),
        (group_norm_geometry((128, 28, 28, 256), 3, 32), plan.Columns, plan.Columns),
        (group_norm_geometry((128, 28, 256, 28), 2, 32), plan.Columns, plan.Columns),
        (group_norm_geometry((8, 28, 256, 56), 2, 32), plan.Segments, plan.Segments),
        (group_norm_geometry((32, 64, 56, 56), 1, 64), plan.Segments, plan.Segments),
        (group_norm_geometry((32, 56, 56, 64), 3, 64), plan.Columns, plan.Columns),
    ],
    ids=str,
)
def test_families(geometry, forward, backward):
    assert isinstance(plan.plan(geometry, 4, 1), forward)
    assert isinstance(plan.plan(geometry, 4, 2), backward)


@pytest.mark.parametrize(
    ("plan", "itemsize", "forward", "backward"),
    [
        (ZEN_5, 4, 256, 256),
        (ZEN_5, 2, 256, 256),
        (ZEN_3, 4, 256, 128),
        (ZEN_3, 2, 256, 256),
        (XEON, 4, 48, 48),
        (XEON, 2, 80, 128),
    ],
)
def test_runs_that_are_long(plan, itemsize, forward, backward):
    """From which length on many of them are segments, which depends on the processor."""
    for operands, long in ((1, forward), (2, backward)):
        for inner, family in ((long - 1, plan.Columns), (long, plan.Segments)):
            cut = plan.plan(batch_norm_geometry((64, 16, inner), 1), itemsize, operands)
            assert isinstance(cut, family)


def test_groups_of_short_runs_where_the_third_level_is_slow():
    """Runs of small samples are segments from a quarter of that length on."""
    for shape, family in (
        ((8, 256, 8, 8), XEON.Segments),
        ((8, 256, 7, 9), XEON.Rows),
        ((8, 512, 11, 11), XEON.Segments),
        ((8, 512, 12, 12), XEON.Rows),  # samples of 288 KiB
    ):
        geometry = group_norm_geometry(shape, 1, 32)
        assert isinstance(XEON.plan(geometry, 4, 1), family)
        assert isinstance(ZEN_5.plan(geometry, 4, 1), ZEN_5.Rows)


@pytest.mark.parametrize(
    ("shape", "operands", "resident"),
    [
        ((1024, 1024), 1, (True, False)),  # slices of 768 bytes, 4 KiB apart
        ((512, 1024), 1, (True, True)),
        ((512, 1024), 2, (True, False)),
        ((512, 4096), 1, (True, False)),  # of 1.5 KiB
        ((1024, 1040), 1, (True, True)),
        ((256, 4096), 1, (True, True)),  # of 3 KiB
    ],
)
def test_narrow_columns_have_places_in_a_cache(shape, operands, resident):
    """Wider ones do not need any if the next cache is fast."""
    geometry = batch_norm_geometry(shape, 1)
    assert tuple(plan.plan(geometry, 4, operands).resident for plan in (ZEN_5, XEON)) == resident


def test_channels_near_a_slow_third_level():
    """They fit the second."""
    for channel, resident in ((2 << 20, (True, True)), (4 << 20, (True, False))):
        geometry = batch_norm_geometry((16, 16, channel // 64), 1)
        plans = ZEN_5.plan(geometry, 4, 1), XEON.plan(geometry, 4, 1)
        assert tuple(cut.resident for cut in plans) == resident


def test_where_columns_are_summed_apart():
    """Not where what is left of them in the second level is worth more."""
    geometry = batch_norm_geometry((64, 512, 6, 6), 1)
    assert [plan.sweeps_apart(geometry, 4, True) for plan in (ZEN_5, XEON)] == [True, False]


@pytest.mark.parametrize(
    ("shape", "itemsize", "family"),
    [
        ((64, 256, 8, 8), 4, plan.Segments),
        ((64, 256, 8, 8), 2, plan.Segments),
        ((64, 256, 10, 10), 4, plan.Segments),
        ((64, 256, 10, 10), 2, plan.Columns),  # no whole steps
        ((64, 32, 8, 8), 2, plan.Columns),  # many rows of few positions
        ((64, 33, 8, 8), 2, plan.Segments),
        ((63, 32, 8, 8), 2, plan.Segments),
        ((64, 256, 7, 7), 4, plan.Columns),
        ((64, 256, 32), 2, plan.Columns),
    ],
)
def test_family_of_a_sweep_that_sums_nothing(shape, itemsize, family):
    geometry = batch_norm_geometry(shape, 1)
    assert isinstance(plan.plan(geometry, itemsize, 0), plan.Columns)
    assert isinstance(plan.transform_plan(geometry, itemsize, streaming=True), family)


@pytest.mark.parametrize(
    ("shape", "itemsize", "family"),
    [
        ((64, 256, 32), 2, plan.Runs),
        ((64, 256, 31), 2, plan.Columns),
        ((64, 256, 16), 4, plan.Columns),
        ((8, 256, 16), 4, plan.Runs),
        ((8, 256, 15), 4, plan.Columns),
        ((8, 256, 17), 4, plan.Runs),
        ((7, 256, 16), 2, plan.Runs),
        ((8, 256, 16), 2, plan.Columns),  # 8 rows of half types are many
        ((8, 256, 18), 2, plan.Columns),  # a vector and two elements
        ((15, 256, 5, 5), 4, plan.Runs),
        ((16, 256, 5, 5), 4, plan.Columns),
        ((64, 256, 7, 7), 4, plan.Runs),  # three vectors and one element
        ((8, 256, 7, 7), 2, plan.Runs),
        ((64, 256, 6, 6), 4, plan.Columns),  # two vectors and four elements
        ((64, 256, 7, 7), 2, plan.Columns),  # two vectors, a third one and one element
        ((64, 256, 6, 8), 2, plan.Runs),  # two vectors and a third one
        ((8, 256, 6, 6), 2, plan.Columns),  # two and four elements
        ((8, 256, 6, 6), 4, plan.Runs),  # would be segments otherwise
        ((64, 256, 10, 10), 2, plan.Runs),
        ((64, 32, 8, 8), 2, plan.Runs),
        ((8, 4, 4096), 4, plan.Runs),
        ((8, 4, 4097), 4, plan.Segments),
        ((1, 4096, 64), 4, plan.Runs),
        ((1, 4097, 64), 4, plan.Segments),
    ],
)
def test_family_of_a_sweep_whose_output_stays_near(shape, itemsize, family):
    geometry = batch_norm_geometry(shape, 1)
    assert isinstance(plan.transform_plan(geometry, itemsize, streaming=False), family)
    gradient = plan.gradient_plan(geometry, itemsize, streaming=False)
    assert (family is plan.Runs) == isinstance(gradient, plan.Runs)
    assert not isinstance(plan.gradient_plan(geometry, itemsize, streaming=True), plan.Runs)


def test_runs_are_of_single_channels():
    """Not of several that share a statistic, nor of more samples than one."""
    for batch, groups in ((2, 4), (2, 12), (1, 4)):
        geometry = group_norm_geometry((batch, 12, 300), 1, groups)
        assert isinstance(plan.transform_plan(geometry, 4, streaming=False), plan.Segments)


@given(extents, extents, st.integers(1, 4096), st.sampled_from([2, 4, 8]))
def test_runs_cover_memory(outer, group, inner, itemsize):
    geometry = batch_norm_geometry((outer, group, inner), 1)
    cut = plan.transform_plan(geometry, itemsize, streaming=False)
    if isinstance(cut, plan.Runs):
        assert cut.total == geometry.outer * group
        assert (cut.tasks - 1) * cut.runs < cut.total <= cut.tasks * cut.runs


def test_geometry():
    assert batch_norm_geometry((8, 3, 5, 7), 1) == (1, 8, 3, 35, 1, 3)
    assert batch_norm_geometry((8, 5, 7, 3), 3) == (1, 280, 3, 1, 1, 3)
    assert batch_norm_geometry((8, 5), 0) == (1, 1, 8, 5, 1, 8)
    assert batch_norm_geometry((8, 1, 5, 7), 1) == (1, 1, 1, 280, 1, 1)  # all of it is one run
    assert group_norm_geometry((8, 5, 7, 1), 3, 1) == (8, 1, 1, 35, 1, 1)
    geometry = batch_norm_geometry((8, 3, 5, 7), 1)
    assert (geometry.size, geometry.count, geometry.statistics) == (840, 280, 3)
    geometry = group_norm_geometry((2, 5, 12, 7), 2, 4)
    assert geometry == (2, 5, 12, 7, 3, 12)
    assert (geometry.size, geometry.count, geometry.statistics) == (840, 105, 8)
    assert geometry.merged() == (2, 5, 4, 21, 1, 4)
    assert geometry.apart() == (2, 5, 12, 7, 1, 12)
    assert row_norm_geometry((6, 5, 4, 3), 2) == (30, 1, 12, 1, 12, 12)
    assert scale_shift_geometry((6, 5, 4), 1, False) == (1, 6, 5, 4, 1, 5)
    assert scale_shift_geometry((6, 5, 4), 1, True) == (1, 1, 30, 4, 1, 30)
    assert scale_shift_geometry((6, 5, 4), 2, True) == (6, 5, 4, 1, 1, 24)


def test_last_level_cache(monkeypatch, tmp_path):
    """As Linux says it; elsewhere, and for nonsense, that of many processors."""
    from cunorm.cpu import memory, plan, transform

    assert 0 < transform.STREAMING_BYTES <= 64 << 20
    assert 2 << 20 <= plan._RESIDENT_CHANNEL_BYTES <= 12 << 20
    monkeypatch.setattr(memory, "_CACHES", tmp_path)
    unknown = 128 << 20, 4 << 20
    assert memory.last_level_cache() == unknown
    (tmp_path / "index3").mkdir()
    for size, shared, expected in (
        ("32768K\n", "0-1\n", (32 << 20, 16 << 20)),
        ("32768K\n", "0-7,64-71\n", (32 << 20, 2 << 20)),
        ("4096K\n", "0\n", (4 << 20, 4 << 20)),
        ("much", "0\n", unknown),
        ("4096K\n", "", unknown),
    ):
        (tmp_path / "index3" / "size").write_text(size)
        (tmp_path / "index3" / "shared_cpu_list").write_text(shared)
        assert memory.last_level_cache() == expected


def test_second_level_cache(monkeypatch, tmp_path):
    """As Linux says it; elsewhere, and for nonsense, that of many processors."""
    from cunorm.cpu import memory

    assert plan._BLOCK_BYTES == 2 << 20 or plan._SECOND_LEVEL_BYTES == 4 * plan._BLOCK_BYTES
    assert plan.FETCHED_BLOCK_BYTES >= plan._BLOCK_BYTES
    monkeypatch.setattr(memory, "_CACHES", tmp_path)
    assert memory.second_level_cache() == 1 << 20
    (tmp_path / "index2").mkdir()
    for size, expected in (("2048K\n", 2 << 20), ("512K\n", 512 << 10), ("much", 1 << 20)):
        (tmp_path / "index2" / "size").write_text(size)
        assert memory.second_level_cache() == expected
