"""How arrays are cut: everything once, nothing too large, whatever the geometry."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cunorm.cpu import plan
from cunorm.geometry import Geometry, batch_norm_geometry

extents = st.one_of(st.integers(1, 40), st.sampled_from([49, 196, 784, 4097, 100_000]))


@given(extents, extents, st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 4096, 50_176])),
       st.sampled_from([2, 4, 8]), st.sampled_from([1, 2]))  # fmt: skip
def test_everything_is_covered(outer, group, inner, itemsize, operands):
    geometry = Geometry(1, outer, group, inner)
    cut = plan.plan(geometry, itemsize, operands)
    assert 1 <= cut.parts <= plan._MOST_PARTS
    if isinstance(cut, plan.Segments):
        pieces = -(-inner // cut.chunk_length)
        chunks = -(-outer // cut.chunk_rows) * pieces
        assert pieces == 1 or cut.chunk_rows == 1
        assert cut.chunk_rows * cut.chunk_length <= plan._SEGMENT_CHUNK
        assert (cut.parts - 1) * cut.part_chunks < chunks <= cut.parts * cut.part_chunks
        assert cut.tasks == -(-group * cut.parts // cut.task_units)
        bytes_near = geometry.count * itemsize * operands
        assert cut.resident == (bytes_near <= plan._RESIDENT_RUNS_BYTES)
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
            block = outer * cut.block_channels * inner * itemsize * operands
            assert block <= plan._RESIDENT_COLUMNS_BYTES


@pytest.mark.parametrize(
    ("shape", "axis", "family", "resident"),
    [
        ((64, 256, 28, 28), 1, plan.Segments, True),
        ((64, 28, 28, 256), 3, plan.Columns, False),
        ((64, 512, 7, 7), 1, plan.Columns, True),
        ((32, 10, 40_000), 1, plan.Segments, False),
        ((128, 1024), 1, plan.Columns, True),
    ],
)
def test_known_choices(shape, axis, family, resident):
    cut = plan.plan(batch_norm_geometry(shape, axis), 4, 1)
    assert isinstance(cut, family)
    assert cut.resident == resident


def test_few_channels_use_all_threads():
    """Two channels do not leave most of the threads idle."""
    cut = plan.plan(batch_norm_geometry((2, 2, 6_500_000), 1), 4, 1)
    assert cut.tasks == 2 * plan._MOST_PARTS
    resident = plan.plan(batch_norm_geometry((1, 4, 100_000), 1), 4, 1)
    assert resident.resident
    assert resident.parts > 1
    assert not plan.stays_near(resident, 8)
    assert plan.stays_near(resident, 1)


def test_geometry():
    assert batch_norm_geometry((8, 3, 5, 7), 1) == (1, 8, 3, 35)
    assert batch_norm_geometry((8, 5, 7, 3), 3) == (1, 280, 3, 1)
    assert batch_norm_geometry((8, 5), 0) == (1, 1, 8, 5)
    geometry = batch_norm_geometry((8, 3, 5, 7), 1)
    assert (geometry.size, geometry.count, geometry.statistics) == (840, 280, 3)
