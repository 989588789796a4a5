// Two sweeps in one launch, the second of which finds in the second-level cache what the first has
// just read.
//
// Of runs alone. The parts of all channels are units, gone over twice: first for partial results,
// then with what all of a channel make. Blocks take tickets as they start, and go over the unit of that number for the first
// time, and over the one `ahead` units before for the second, whose elements are on their way to
// shared memory meanwhile. Only the second time waits, for blocks with lower tickets, which run
// already, and for what these do before they wait themselves: no number of blocks that run at a
// time, and nothing that runs beside them, can make them wait for ever. The last block to arrive at
// a channel folds its partial results, whose order is that of the parts, whoever wrote them when. So
// the same bits come out every time.
#pragma once

#include "reduce.cuh"

static_assert(GROUP == THREADS && !COLUMNS, "a block has a part of one channel");

struct Tickets {
    // Zeros in the beginning: the next ticket, then of every channel the parts that have arrived, and
    // one more when what they make is there.
    unsigned* counters;
    Accumulator* coefficients;  // of every channel
    long long units;
    long long ahead;  // units by which the first time is ahead of the second

    __device__ unsigned* of_channel(Offset unit, const Cut& cut) const {
        return counters + 1 + unit / static_cast<Offset>(cut.parts);
    }
};

// Shared memory of a block after the header: a word, and the elements of a unit.
__device__ inline Shelf shelf_of(unsigned char* shared) {
    return {reinterpret_cast<Vector*>(shared + HEADER + 16)};
}

// Of thread 0, for all threads of the block, which meet before the next.
template <class Find> __device__ inline unsigned find_once(unsigned char* shared, Find find) {
    auto* const word = reinterpret_cast<unsigned*>(shared + HEADER);
    if (threadIdx.x == 0) *word = find();
    __syncthreads();
    return *word;
}

// What a block does.
struct Ticket {
    Offset first;   // unit that it goes over for the first time, if it has one
    Offset second;  // and for the second
    bool has_first, has_second;

    __device__ Ticket(const Tickets& tickets, unsigned char* shared) {
        const Offset ahead = static_cast<Offset>(tickets.ahead);
        first = find_once(shared, [&] { return arrive(tickets.counters); });
        second = first - ahead;
        has_first = first < static_cast<Offset>(tickets.units);
        has_second = first >= ahead;
    }
};

// After a block has written its part: if it is the last of the channel's, folds the partial results
// of all of them, as it has folded those of its threads. `make(total, first)` makes the
// coefficients of the channel, and if `first` saves what else there is to save: when nobody waits
// any more.
template <class C, class P, class Make> __device__ inline void finish_channel(
    const Tickets& tickets, Offset unit, const double* partials, unsigned char* shared,
    const Work& work, const Cut& cut, Make make
) {
    const Offset parts = static_cast<Offset>(cut.parts);
    unsigned* const counter = tickets.of_channel(unit, cut);
    if (find_once(shared, [&] { return arrive(counter); }) + 1 < parts) return;
    P values[STATISTICS] = {};
    for (Offset part = threadIdx.x; part < parts; part += THREADS)
        values[0].merge(P::read(partials, work.channel * parts + part));
    auto& folds = *reinterpret_cast<Folds<P>*>(shared);
    reduce_block(values, folds);
    if (threadIdx.x != 0) return;
    const P total = folds.totals[0];
    constexpr int number = sizeof(C) / sizeof(Accumulator);
    struct Numbers { Accumulator of[number]; };
    const Numbers made = bits<Numbers>(C(make(total, false)));
    for (int i = 0; i < number; ++i)
        write(tickets.coefficients + work.channel * number + i, made.of[i]);
    arrive(counter);
    make(total, true);
}

// The coefficients of a channel of a unit, once they are there.
template <class C> __device__ inline C wait_for_coefficients(
    const Tickets& tickets, Offset unit, const Cut& cut, Offset channel
) {
    wait_for(tickets.of_channel(unit, cut), static_cast<unsigned>(cut.parts) + 1);
    constexpr int number = sizeof(C) / sizeof(Accumulator);
    struct Numbers { Accumulator of[number]; } made;
    for (int i = 0; i < number; ++i)
        made.of[i] = read(tickets.coefficients + channel * number + i);
    return bits<C>(made);
}
