"""Launch plans of the CUDA kernels: pure functions, so they are tested without a GPU."""

import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cunorm.cuda import launch
from cunorm.cuda.launch import Alignment, Device, LaunchPlan
from cunorm.geometry import (
    batch_norm_geometry,
    group_norm_geometry,
    row_norm_geometry,
)

H200 = Device(90, 132, 227 << 10, 228 << 10, 60 << 20)
A100 = Device(80, 108, 163 << 10, 164 << 10, 40 << 20)
T4 = Device(75, 40, 64 << 10, 64 << 10, 4 << 20)
RTX4090 = Device(89, 128, 99 << 10, 100 << 10, 72 << 20)
DEVICES = [H200, A100, T4, RTX4090]
WHOLE = Alignment(16, 0)
DTYPES = [np.dtype(d) for d in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]


def channels(outer, group, inner):
    """Geometry of batch norm over (outer, group, inner)."""
    return batch_norm_geometry((outer, group, inner), 1)


def options(plan):
    return {k: int(v) for k, v in (o[2:].split("=") for o in plan.options)}


def packed(plan):
    """Geometry and Cut, as the kernels see them."""
    names = ("batch", "outer", "group", "inner", "members", "parameters",
             "span", "span_factor", "span_shift",
             "windows", "share", "parts", "pieces", "tiles", "shift", "taken")  # fmt: skip
    return dict(zip(names, np.frombuffer(plan.packed, np.int64).tolist(), strict=True))


def check(plan, geometry, dtype, operands, device):
    """Every element has exactly one thread, and the block fits the device."""
    o, cut = options(plan), packed(plan)
    assert o["THREADS"] == plan.threads <= 512
    assert plan.shared <= device.shared_per_block
    assert 0 < plan.blocks < 2**31
    assert o["CLUSTER"] == 1 or device.compute_capability >= 90
    assert plan.blocks % o["CLUSTER"] == 0
    columns = cut["inner"] == 1
    accesses = cut["outer"] * (1 if columns else cut["windows"])
    assert accesses <= cut["parts"] * cut["share"]
    assert cut["parts"] % cut["pieces"] == 0
    assert plan.blocks % cut["parts"] == 0
    if o["CLUSTER"] == 1:  # a cluster may be too large for little data
        assert (cut["parts"] - cut["pieces"]) * cut["share"] < accesses
    deep = o["GROUP"] // o["ACROSS"]
    assert (cut["tiles"] - 1) * deep * o["TILE"] < cut["share"] <= cut["tiles"] * deep * o["TILE"]
    assert o["WIDTH"] * dtype.itemsize <= 16
    positions = o["ACROSS"] * o["WIDTH"] if columns else 1
    assert 0 < cut["taken"] <= positions
    if o["MERGED"]:  # blocks hold whole statistics
        assert cut["taken"] % cut["members"] == 0
        assert cut["taken"] % o["WIDTH"] == 0
        assert plan.resident
    groups = -(-cut["group"] // cut["taken"]) if columns else cut["group"]
    if plan.samples:
        assert plan.sample_blocks * plan.samples >= cut["batch"]
        assert (plan.sample_blocks - 1) * plan.samples < cut["batch"]
        assert plan.samples <= 256 * (o["THREADS"] // o["GROUP"])
        assert plan.blocks == plan.sample_blocks * groups * cut["parts"]
        if cut["parts"] > 1:  # parameters are in one part each
            assert cut["share"] * o["WIDTH"] % cut["span"] == 0
    else:
        assert plan.blocks * (o["THREADS"] // o["GROUP"]) >= cut["batch"] * groups * cut["parts"]
    if not columns:
        slack = 0 if o["ALIGNED"] else o["WIDTH"] - 1
        assert cut["windows"] * o["WIDTH"] >= cut["inner"] + slack
    assert cut["batch"] * cut["group"] // cut["members"] == geometry.statistics
    assert cut["outer"] * cut["inner"] * cut["members"] == geometry.count
    if plan.ahead:  # by whole statistics, and not by so many that the cache could have all
        assert cut["members"] == 1
        assert plan.blocks == cut["batch"] * groups * cut["parts"]
        assert plan.ahead % cut["parts"] == 0
        assert 2 * plan.ahead < plan.blocks
        width = o["ACROSS"] * o["WIDTH"] * dtype.itemsize * operands
        assert plan.ahead // cut["parts"] * accesses * width < 0.3 * device.cache
        assert cut["parts"] <= 512
    assert plan.rows == (cut["span"] > 0) == (o["SPANS"] > 0)
    if o["SPANS"] == 1:  # an access has one parameter
        assert o["ALIGNED"]
        assert cut["span"] % o["WIDTH"] == 0
    if plan.resident:
        assert cut["parts"] == o["CLUSTER"]
        on_chip = plan.threads * o["TILE"] * o["WIDTH"] * dtype.itemsize * operands + plan.shared
        held = cut["share"] * (o["ACROSS"] if columns else 1) * o["WIDTH"] * dtype.itemsize
        assert on_chip >= held * operands


extents = st.integers(1, 70)
geometries = st.one_of(
    st.builds(
        channels,
        outer=st.integers(1, 5000),
        group=st.integers(1, 3000),
        inner=st.one_of(st.just(1), st.integers(1, 70_000)),
    ),
    st.builds(row_norm_geometry, st.tuples(st.integers(1, 5000), st.integers(1, 300_000)),
              st.just(1)),
    st.builds(
        lambda batch, outer, groups, members, inner: group_norm_geometry(
            (batch, outer, groups * members, inner), 2, groups
        ),
        st.integers(1, 300), st.sampled_from([1, 1, 2, 49, 3136]), extents, extents,
        st.sampled_from([1, 1, 4, 49, 3136, 70_001]),
    ),
)  # fmt: skip


@given(
    geometries,
    st.sampled_from(DTYPES),
    st.sampled_from([1, 2]),
    st.sampled_from([(16, 0), (8, 8), (4, 4), (4, 12), (2, 6), (2, -1), (8, -1)]),
    st.sampled_from(DEVICES),
)
def test_every_plan_covers_its_geometry(geometry, dtype, operands, lie, device):
    lie = Alignment(max(lie[0], dtype.itemsize), lie[1] if lie[0] >= dtype.itemsize else -1)
    for made in launch.candidates(geometry, dtype, operands, lie, device).values():
        if isinstance(made, LaunchPlan):
            check(made, geometry, dtype, operands, device)
        else:
            assert re.search(r"\w", made)
    apart = geometry.apart()
    check(launch.sweep(geometry, dtype, operands, lie, device), apart, dtype, operands, device)
    for alike in (geometry, apart):
        made = launch.elementwise(alike, dtype, operands, lie, device)
        check(made, alike, dtype, operands, device)


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_numbers_are_divided_by_spans(divisor, number):
    factor, shift = launch._division(divisor)
    assert factor < 2**32
    for n in (number, number // divisor * divisor, max(0, number // divisor * divisor - 1)):
        assert n * factor >> shift == n // divisor
    assert (2**31 - 1) * factor >> shift == (2**31 - 1) // divisor


def names(shape, dtype, device, axis=1, operands=1):
    geometry = batch_norm_geometry(shape, axis % len(shape))
    return launch.plan(geometry, np.dtype(dtype), operands, WHOLE, device).name


@pytest.mark.parametrize(
    ("shape", "axis", "dtype", "forward", "backward"),
    [
        ((8, 16, 4, 4), 1, np.float32, "warp", "warp"),
        ((32, 1024, 7, 7), 1, np.float32, "block", "block"),
        ((64, 512, 28, 28), 1, np.float32, "cluster", "cluster"),
        ((64, 256, 56, 56), 1, np.float16, "cluster", "cluster"),
        ((64, 256, 56, 56), 1, np.float32, "cluster", "whole_cluster"),
        ((16, 64, 112, 112), 1, np.float32, "cluster", "whole_cluster"),
        ((8, 2, 1024, 1024), 1, np.float32, "stream", "stream"),
        ((4, 128, 1024, 1024), 1, np.float16, "cached", "stream"),
        ((8, 256, 102_400), 1, np.float32, "cached", "cached"),
        ((16, 64, 512, 512), 1, np.float32, "stream", "stream"),
        ((64, 28, 28, 512), -1, np.float16, "stream", "stream"),
        ((64, 14, 14, 1024), -1, np.float32, "cluster", "whole_cluster"),
        ((64, 56, 56, 256), -1, np.float16, "stream", "stream"),
        ((128, 1024), -1, np.float32, "block", "block"),
    ],
    ids=str,
)  # fmt: skip
def test_choice_on_an_h200(shape, axis, dtype, forward, backward):
    """A change of these is a decision: most real shapes are read once."""
    assert names(shape, dtype, H200, axis) == forward
    assert names(shape, dtype, H200, axis, operands=2) == backward


@pytest.mark.parametrize(
    ("geometry", "dtype", "forward", "backward"),
    [
        (row_norm_geometry((131072, 128), 1), np.float16, "warp", "warp"),
        (row_norm_geometry((16384, 4096), 1), np.float16, "block", "block"),
        (row_norm_geometry((8192, 8192), 1), np.float16, "block", "block"),
        (row_norm_geometry((1024, 12288), 1), np.float16, "block", "whole_block"),
        (row_norm_geometry((64, 200_704), 1), np.float32, "whole_cluster", "stream"),
        (group_norm_geometry((128, 256, 28, 28), 1, 32), np.float32, "block", "whole_block"),
        (
            group_norm_geometry((256, 512, 56, 56), 1, 32),
            np.float32,
            "whole_block",
            "stream",
        ),
        (group_norm_geometry((128, 28, 28, 256), 3, 32), np.float32, "block", "cluster"),
        (group_norm_geometry((256, 56, 56, 512), 3, 32), np.float16, "cluster", "cluster"),
        (group_norm_geometry((32, 64, 128, 128), 1, 64), np.float32, "block", "block"),
        (group_norm_geometry((4, 64, 2048, 2048), 1, 64), np.float16, "cached", "stream"),
        (group_norm_geometry((8, 16, 64, 16), 2, 8), np.float32, "stream", "stream"),
    ],
    ids=str,
)
def test_choice_of_norms_on_an_h200(geometry, dtype, forward, backward):
    made = [launch.plan(geometry, np.dtype(dtype), n, WHOLE, H200).name for n in (1, 2)]
    assert made == [forward, backward]


def test_room_for_the_next_row():
    """Where it fits; what is alone on its multiprocessor does without, before it is read twice."""

    def shelves(length, device):
        made = launch.plan(row_norm_geometry((600, length), 1), DTYPES[2], 1, WHOLE, device)
        return made.name, options(made)["SHELVES"]

    assert shelves(196_608, H200) == ("whole_cluster", 2)
    assert shelves(262_144, H200) == ("whole_cluster", 1)
    assert shelves(16_384, A100) == ("whole_block", 2)
    assert shelves(32_768, A100) == ("whole_block", 1)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: str(d.compute_capability))
@pytest.mark.parametrize("length", [8, 128, 193, 1000, 4096, 12321, 100_000, 300_000, 3_000_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operands", [1, 2, 3])
def test_plans_of_rows_do_not_depend_on_their_number(length, dtype, operands, device):
    """Nor do their bits: the kernels' specialization and the parts of a row are the same."""
    made = [
        launch.plan(row_norm_geometry((rows, length), 1), dtype, operands, WHOLE, device)
        for rows in (1, 3, 100, 600)
    ]
    assert len({tuple(o for o in plan.options if "WIDE" not in o) for plan in made}) == 1
    assert len({(plan.name, plan.parts, packed(plan)["share"]) for plan in made}) == 1
    assert made[0].shared <= device.shared_per_block


@pytest.mark.parametrize(
    ("length", "dtype", "operands", "name", "group"),
    [
        (128, np.float16, 1, "warp", 8), (1024, np.float16, 1, "warp", 16),
        (2048, np.float16, 1, "warp", 32), (4096, np.float16, 1, "block", 128),
        (8192, np.float16, 1, "block", 256), (4096, np.float16, 2, "block", 128),
        (2048, np.float16, 2, "warp", 32), (1024, np.float32, 1, "warp", 32),
        (4096, np.float32, 1, "block", 256), (4096, np.float32, 2, "block", 256),
    ],
    ids=str,
)  # fmt: skip
def test_bytes_of_a_row_that_threads_have(length, dtype, operands, name, group):
    """128 of each input where a warp needs no other, 64 where several meet, from 8 threads on."""
    made = launch.plan(row_norm_geometry((600, length), 1), np.dtype(dtype), operands, WHOLE, H200)
    assert (made.name, options(made)["GROUP"]) == (name, group)
    assert length * np.dtype(dtype).itemsize <= (128 if name == "warp" else 64) * group


def test_parameters_that_change_within_accesses_stay_in_registers():
    """To find those of a thread's other tiles again would take divisions."""
    made = launch.plan(group_norm_geometry((128, 512, 7, 7), 1, 32), DTYPES[0], 1, WHOLE, H200)
    assert options(made)["SPANS"] == 2
    assert packed(made)["tiles"] == 1


@pytest.mark.parametrize("length", [98_304, 131_072])
@pytest.mark.parametrize("operands", [1, 2])
@pytest.mark.parametrize("rows", [600, 4096, 20_000])
def test_clusters_are_as_many_as_run_at_a_time(rows, length, operands):
    """Each within a GPC: of 8 blocks, two on a multiprocessor, 4 in each of 8 GPCs.

    Or so many in each of several waves, where a block would add up too many samples.
    """
    made = launch.plan(row_norm_geometry((rows, length), 1), DTYPES[2], operands, WHOLE, H200)
    cluster = options(made)["CLUSTER"]
    alone = made.name == "whole_cluster"
    at_once = {2: (66, 132), 4: (32, 66), 8: (16, 32)}[cluster][not alone]
    clusters = made.blocks // cluster
    waves = -(-clusters // at_once)
    assert made.samples <= 256
    assert made.samples * waves < -(-rows // at_once) + 2 * waves


@pytest.mark.parametrize(
    ("operands", "centered", "dtype", "blocks"),
    [
        (1, False, DTYPES[1], 8),  # of 128 threads of 64 registers
        (1, True, DTYPES[1], 5),
        (1, True, DTYPES[2], 2),  # of 256 threads
        (2, False, DTYPES[1], 5),
        (2, True, DTYPES[1], 4),
        (2, False, DTYPES[2], 3),
        (2, False, DTYPES[3], 1),  # of 512 threads
    ],
)
def test_as_many_threads_take_rows_as_need_no_spills(operands, centered, dtype, blocks):
    """And as many blocks as run at a time, unless shared memory is short."""
    geometry = row_norm_geometry((16384, 4096), 1)
    made = launch.plan(geometry, dtype, operands, WHOLE, H200, centered)
    assert options(made)["AT_ONCE"] == blocks
    assert made.samples == -(-16384 // (132 * blocks))
    assert made.shared <= H200.shared_per_multiprocessor // blocks - 1024


@pytest.mark.parametrize(
    ("device", "megabytes", "operands", "lag"),
    [(H200, 8, 1, 2), (H200, 4, 2, 2), (H200, 3, 1, 5), (A100, 2, 1, 5), (RTX4090, 2, 2, 4)],
    ids=str,
)  # fmt: skip
def test_two_sweeps_share_a_launch(device, megabytes, operands, lag):
    """A quarter of the second-level cache apart, three blocks on a multiprocessor."""
    geometry = channels(4, 128, megabytes << 17)
    made = launch.candidates(geometry, DTYPES[0], operands, WHOLE, device)["cached"]
    assert made.ahead == lag * made.parts
    assert made.shared <= device.shared_per_multiprocessor // 3 - 1024
    if device is H200:
        assert made.parts == megabytes * operands << 4
    assert options(made)["THREADS"] == 256


def test_without_clusters():
    for device in (A100, T4, RTX4090):
        made = launch.candidates(channels(64, 256, 784), DTYPES[2], 1, WHOLE, device)
        assert made["cluster"] == "clusters need compute capability 9.0"
        assert isinstance(made["stream"], LaunchPlan)
    assert names((64, 256, 14, 14), np.float32, A100) == "block"


def test_each_refusal_says_why():
    made = launch.candidates(channels(8, 2, 1 << 20), DTYPES[2], 1, WHOLE, H200)
    assert made["warp"] == "2097152 accesses a statistic; a warp holds 128"
    assert re.fullmatch(r"needs \d+ bytes of shared memory a block; \d+ are to be had",
                        made["block"])  # fmt: skip
    assert made["cluster"].startswith("clusters of 8: needs")
    assert made["cached"] == "33554432 bytes of a statistic: too much for the cache"
    little = launch.candidates(channels(8, 4, 1 << 18), DTYPES[2], 1, WHOLE, H200)
    assert little["cached"].startswith("little enough for the cache to have most of it")
    rows = launch.candidates(row_norm_geometry((64, 1 << 22), 1), DTYPES[2], 1, WHOLE, H200)
    assert rows["cached"] == "parameters change within a statistic"
    old = launch.candidates(channels(4, 128, 1 << 17), DTYPES[0], 1, WHOLE, T4)
    assert old["cached"] == "copies that go on by themselves need compute capability 8.0"
    double = launch.candidates(channels(4, 128, 1 << 20), DTYPES[0], 3, WHOLE, H200)
    assert double["cached"] == "double backward passes take two launches"
    few = launch.candidates(channels(32, 4, 784), DTYPES[2], 1, WHOLE, A100)
    assert few["whole_block"] == "4 blocks would leave most of the 108 multiprocessors idle"
    side = launch.candidates(channels(64, 4, 1), DTYPES[2], 1, WHOLE, A100)
    assert side["warp"] == "statistics lie side by side: blocks take several at once"


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: str(d.compute_capability))
@pytest.mark.parametrize(
    "geometry",
    [channels(1, 2, 1 << 20), channels(100_000, 3, 300), channels(1 << 20, 2, 1),
     channels(1 << 24, 1, 1)],
    ids=str,
)  # fmt: skip
def test_few_large_channels_fill_the_device(geometry, device):
    plan = launch.plan(geometry, DTYPES[2], 1, WHOLE, device)
    # Parts are whole tiles, so there may be a few less than wanted.
    assert plan.blocks * plan.threads >= 0.9 * 512 * device.multiprocessors


def test_more_elements_than_32_bits_count():
    assert options(launch.plan(channels(1, 2, 1 << 30), DTYPES[0], 1, WHOLE, H200))["WIDE"] == 1
    assert options(launch.plan(channels(1, 2, 1 << 29), DTYPES[0], 1, WHOLE, H200))["WIDE"] == 0
    plan = launch.plan(channels(5, 3, 1 << 30), DTYPES[2], 2, WHOLE, H200)
    check(plan, channels(5, 3, 1 << 30), DTYPES[2], 2, H200)


def test_too_many_blocks_are_refused():
    geometry = channels(1, 1 << 36, 2)
    with pytest.raises(ValueError, match="x: expected at most 2147483647 blocks of channels"):
        launch.plan(geometry, DTYPES[2], 1, WHOLE, H200)


def test_width_of_accesses():
    """As wide as runs and addresses allow; runs that are long and odd are taken unaligned."""

    def width(inner, dtype, lie=WHOLE):
        o = options(launch.plan(channels(4, 3, inner), np.dtype(dtype), 1, lie, H200))
        return o["WIDTH"], o["ALIGNED"]

    assert width(784, np.float32) == (4, 1)
    assert width(784, np.float16) == (8, 1)
    assert width(196, np.float16) == (4, 1)  # 8 bytes
    assert width(49, np.float32) == (1, 1)
    assert width(12321, np.float32) == (4, 0)
    assert width(784, np.float32, Alignment(4, 4)) == (4, 0)
    assert width(784, np.float32, Alignment(4, -1)) == (1, 1)  # each array in its own way
    assert width(784, np.float64, Alignment(8, 8)) == (1, 1)


def test_alignment():
    assert launch.alignment(0, 32, 48) == (16, 0)
    assert launch.alignment(4, 20) == (4, 4)
    assert launch.alignment(8, 16) == (8, -1)
    assert launch.alignment(6) == (2, 6)


def test_same_plan_object_for_the_same_question():
    arguments = (channels(4, 3, 784), DTYPES[2], 1, WHOLE, H200)
    assert launch.plan(*arguments) is launch.plan(*arguments)
    assert hash(launch.plan(*arguments)) == hash(launch.plan(*arguments))
