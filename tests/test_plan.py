"""How arrays are cut: everything once, nothing too large, whatever the geometry."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cunorm.cpu import plan
from cunorm.geometry import (
    batch_norm_geometry,
    group_norm_geometry,
    row_norm_geometry,
    scale_shift_geometry,
)

extents = st.one_of(st.integers(1, 40), st.sampled_from([49, 196, 784, 4097, 100_000]))


@given(extents, extents, st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 4096, 50_176])),
       st.sampled_from([2, 4, 8]), st.sampled_from([1, 2]))  # fmt: skip
def test_everything_is_covered(outer, group, inner, itemsize, operands):
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
        ((64, 512, 7, 7), 1, plan.Columns, True),
        ((32, 10, 120_000), 1, plan.Segments, False),
        ((128, 1024), 1, plan.Columns, True),
        ((512, 4096), 1, plan.Columns, True),
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


@given(extents, st.integers(1, 40), st.integers(1, 300), st.integers(1, 8),
       st.sampled_from([2, 4, 8]), st.sampled_from([1, 2]))  # fmt: skip
def test_samples_are_added_up_alike_whatever_their_number(
    outer, groups, inner, members, itemsize, operands
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


def test_neighbouring_runs_are_not_written_in_step(threads):
    """No two threads do a channel each whose runs are neighbours, unless these are stretches."""
    for shape, number, tasks in (
        ((64, 2, 1024), 1, 1),
        ((64, 2, 1024), 2, 1),
        ((64, 2, 1024), 8, 1),
        ((64, 3, 1024), 2, 3),
        ((64, 3, 1024), 8, None),
        ((1, 2, 65536), 2, 2),
    ):
        threads(number)
        cut = plan.plan(batch_norm_geometry(shape, 1), 4, 1)
        assert cut.parts == 1
        assert plan.stays_near(cut, number) == (tasks is not None)
        assert cut.resident_tasks == (tasks or shape[1])


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
        (group_norm_geometry((128, 256, 14, 14), 1, 32), plan.Rows, plan.Segments),
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
    ("short_vectors", "itemsize", "inner", "family"),
    [
        (False, 4, 255, plan.Columns),
        (False, 4, 256, plan.Segments),
        (True, 4, 127, plan.Columns),
        (True, 4, 128, plan.Segments),
        (True, 2, 255, plan.Columns),
    ],
)
def test_family_of_a_backward_pass(monkeypatch, short_vectors, itemsize, inner, family):
    """Where vectors are short, runs of float32 pay from half the length on."""
    monkeypatch.setattr(plan, "_SHORT_VECTORS", short_vectors)
    plan._plan.cache_clear()
    try:
        cut = plan.plan(batch_norm_geometry((64, 16, inner), 1), itemsize, 2)
    finally:
        plan._plan.cache_clear()
    assert isinstance(cut, family)


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
