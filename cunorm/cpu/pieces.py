"""Where the pieces of a plan lie: the index arithmetic that all kernels share."""

from __future__ import annotations

from .elements import device_function, store


@device_function
def divide(a, b):
    """(quotient, remainder) of a number that is not negative by a positive one.

    A division takes as long as ten multiplications, and is spared where it can be.
    """
    if b == 1:
        return a, 0
    if a < b:
        return 0, a
    return a // b, a % b


# --- segments: a channel is `outer` runs of `inner` elements ------------------


@device_function
def segments_chunk(chunk, outer, inner, chunk_rows, chunk_length):
    """(first row, rows, offset in each run, length) of a chunk of a channel."""
    pieces = -(-inner // chunk_length)
    row = chunk // pieces * chunk_rows
    offset = chunk % pieces * chunk_length
    return row, min(chunk_rows, outer - row), offset, min(chunk_length, inner - offset)


@device_function
def segments_piece(task, batch, outer, channels, block, parts):
    """(first channel, part) of a task that is one part of one block of all channels.

    Tasks follow each other as their memory does, so that a thread has about the same of it as in a
    sweep over stretches.
    """
    if batch == 1 and outer > 1:
        part, number = divide(task, -(-channels // block))
    else:
        number, part = divide(task, parts)
    return number * block, part


@device_function
def segments_chunks(outer, inner, chunk_rows, chunk_length):
    """Number of chunks in a channel."""
    return -(-outer // chunk_rows) * -(-inner // chunk_length)


@device_function
def segments_starts(first, last, outer, group, inner, starts):
    """Where the channels [first, last) begin, without a division for each."""
    entry, g = divide(first, group)
    start = (entry * outer * group + g) * inner
    for i in range(last - first):
        starts[i] = start
        start += inner
        g += 1
        if g == group:
            g = 0
            start += (outer - 1) * group * inner


@device_function
def segments_jump(starts, i, channels, stride, length):
    """How far it is from the end of a run of the i'th of some channels to the run read next.

    They are read in turns; `stride` is 0 if no other run of a channel follows.
    """
    if i + 1 < channels:
        return starts[i + 1] - starts[i] - length
    return starts[0] + stride - starts[i] - length if stride > 0 else 0


@device_function
def next_parameters(parameter, members, parameters):
    """Where the parameters of the next statistic begin; those of a sample begin anew."""
    following = parameter + members
    return 0 if following == parameters else following


@device_function
def runs_row(element, outer, group, inner, parameters):
    """(run, end, channel, parameter) of the row of `group` runs that an element is in.

    The run is the element's within the row; `end` is the row's, channel and parameter are
    those of its first run.
    """
    run = element // inner
    row = run // group
    channel = row // outer * group
    return run - row * group, (row + 1) * group * inner, channel, channel % parameters


@device_function
def task_runs(task, runs, total, group, inner, write, arguments):
    """Call ``write(start, end, channel, *arguments)`` for a task's runs, `runs` of all `total`."""
    run, end = task * runs, min(total, (task + 1) * runs)
    channel = run % group
    while run < end:
        row_end = min(end, run + group - channel)
        for start in range(run * inner, row_end * inner, inner):
            write(start, start + inner, channel, *arguments)
            channel += 1
        run, channel = row_end, 0


@device_function
def block_runs(starts, channels, rows, stride, inner, write, arguments):
    """Call ``write(start, end, i, *arguments)`` for the runs of a block's channels, in turns.

    Those of the i'th channel are `rows` and lie `stride` apart, from `starts[i]` on.
    """
    for row in range(rows):
        for i in range(channels):
            start = starts[i] + row * stride
            write(start, start + inner, i, *arguments)


# --- columns: folded rows of positions, in blocks of channels -----------------


@device_function
def columns_piece(
    task, outer, group, inner, fold, rows, tail_rows, part_rows, parts, block_channels
):
    """One part of a block: (statistic, channels, part, start, height, tail).

    It is `height` folded rows from `start` on of `channels` channels, whose statistics
    begin at `statistic`, and below them `tail` rows of the array that fill no folded row.
    For whole blocks parts is 1 and part_rows rows.
    """
    blocks = -(-group // block_channels)
    g = task % blocks * block_channels
    part = task // blocks % parts
    entry = task // (blocks * parts)
    height, tail = columns_part(part, rows, tail_rows, part_rows, parts)
    start = entry * outer * group * inner + g * inner + part * part_rows * fold * group * inner
    return entry * group + g, min(block_channels, group - g), part, start, height, tail


@device_function
def column_runs(start, channels, rows, stride, inner, write, arguments):
    """`block_runs` for neighbouring channels, the first of which begins at `start`.

    To look up where each begins would take longer.
    """
    for row in range(rows):
        begin = start + row * stride
        for i in range(channels):
            end = begin + inner
            write(begin, end, i, *arguments)
            begin = end


@device_function
def columns_part(part, rows, tail_rows, part_rows, parts):
    """(folded rows, rows of the array below them) of a part."""
    return min(part_rows, rows - part * part_rows), tail_rows if part == parts - 1 else 0


@device_function
def columns_chunk(chunk, rows, width, tail_width, chunk_rows):
    """(first row, rows, positions) of a chunk; a last one is the row left of `tail_width`."""
    row = chunk * chunk_rows
    if row >= rows:
        return rows, 1, tail_width
    return row, min(chunk_rows, rows - row), width


@device_function
def columns_chunks(rows, tail_width, chunk_rows):
    """Number of chunks of `rows` rows and, left of `tail_width`, one more."""
    return -(-rows // chunk_rows) + (tail_width > 0)


@device_function
def spread(value, channel, channels, fold, inner, block):
    """Write a channel's number to all its positions.

    Copy k of a channel is `inner` positions from (k * channels + channel) * inner on.
    """
    for copy in range(fold):
        first = (copy * channels + channel) * inner
        for p in range(first, first + inner):
            store(block, p, value)
