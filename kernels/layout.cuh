// Which elements of an array a thread works on.
//
// A *channel* is a group of the geometry in one sample. A group of threads takes the channels
// [channel, channel + positions) and one part of their elements. In runs (COLUMNS == 0) a group
// has one channel, whose elements are `outer` runs of `inner`; a run is covered by `windows`
// accesses, and the accesses of all runs are numbered one after another. In columns the threads
// of a row have WIDTH channels each, and the rows are numbered.
//
// Consecutive blocks are the parts of one group, so a cluster holds whole groups; or `pieces` of
// them, then as many of the next group, which lies beside them in memory (about, where runs are
// no whole number of parts).
#pragma once

#include "memory.cuh"

// The work of the group that a thread belongs to.
struct Work {
    Offset channel;    // the first one, of all samples
    Offset parameter;  // that it has
    Offset positions;  // channels; 0 for the idle groups of the last block
    Offset part;
    Offset base;       // offset of its first element

    __device__ Work(const Geometry& g, const Cut& cut, bool reversed)
        : Work(g, cut, static_cast<Offset>(reversed ? gridDim.x - 1 - blockIdx.x : blockIdx.x)) {}

    // Units are numbered by part, then by who has them: as blocks are.
    __device__ Work(const Geometry& g, const Cut& cut, Offset unit) {
        const Offset parts = static_cast<Offset>(cut.parts);
        const Offset pieces = static_cast<Offset>(cut.pieces);
        const Offset group = static_cast<Offset>(g.group);
        const Offset groups = gridDim.x / parts;
        const Offset which = unit / pieces % groups;
        part = unit / pieces / groups * pieces + unit % pieces;
        if (COLUMNS) {
            const Offset taken = static_cast<Offset>(cut.taken);
            const Offset slices = (group + taken - 1) / taken;
            const Offset first = which % slices * taken;
            positions = group - first < taken ? group - first : taken;
            place(g, which / slices, first);
        } else {
            const Offset number = which * (THREADS / GROUP) + threadIdx.x / GROUP;
            positions = number < static_cast<Offset>(g.batch) * group ? 1 : 0;
            place(g, positions ? number / group : 0, positions ? number % group : 0);
        }
    }

    // One channel of a sample.
    __device__ Work(const Geometry& g, Offset sample, Offset index, Offset part, bool any)
        : positions(any ? 1 : 0), part(part) {
        place(g, any ? sample : 0, index);
    }

  private:
    __device__ void place(const Geometry& g, Offset sample, Offset index) {
        const Offset group = static_cast<Offset>(g.group);
        channel = sample * group + index;
        parameter = !SPANS && g.parameters > g.group ? channel : index;
        base = (sample * static_cast<Offset>(g.outer) * group + index)
             * static_cast<Offset>(g.inner);
    }
};

// Number of the statistic that a channel has, or a row is.
__device__ inline Offset statistic_of(const Geometry& g, Offset channel) {
    return !SPANS && g.members > 1 ? channel / static_cast<Offset>(g.members) : channel;
}

// One memory access: WIDTH elements from `offset` on, of which those outside of the run,
// or all of them beyond the end of the part, are none of the group's.
struct Access {
    Offset offset;  // may be before the array where the access is not aligned
    Signed first;   // index in the run of its first element; 0 in columns
    Signed inner;
    bool valid;

    __device__ bool whole() const {
        return valid && (ALIGNED || (first >= 0 && first + WIDTH <= inner));
    }

    __device__ bool has(int lane) const {
        return valid && (ALIGNED || (first + lane >= 0 && first + lane < inner));
    }

    // Lanes outside of the run get the nearest element of it.
    __device__ Vector load(const Element* x) const {
        Vector vector = {};
        if (whole()) {
            const Vector* place = reinterpret_cast<const Vector*>(x + offset);
            vector = read(place);
        } else if (!ALIGNED && valid) {
            Elements elements;
            #pragma unroll
            for (int lane = 0; lane < WIDTH; ++lane) {
                Signed i = first + lane;
                i = i < 0 ? 0 : i < inner ? i : inner - 1;
                const Element* place = x + (offset - first + i);
                elements.lane[lane] = read(place);
            }
            vector = bits<Vector>(elements);
        }
        return vector;
    }

    // The same to shared memory, if any are the group's.
    __device__ void load_ahead(const Element* x, Vector* shared) const {
        if (whole()) read_ahead(shared, reinterpret_cast<const Vector*>(x + offset));
        else if (!ALIGNED && valid) *shared = load(x);
    }

    __device__ void store(Element* y, const Elements& elements) const {
        if (whole()) {
            write(reinterpret_cast<Vector*>(y + offset), bits<Vector>(elements));
        } else if (!ALIGNED) {
            #pragma unroll
            for (int lane = 0; lane < WIDTH; ++lane)
                if (has(lane)) write(y + (offset + lane), elements.lane[lane]);
        }
    }
};

// A thread's accesses, one after another, from one of its tiles on.
class Cursor {
  public:
    __device__ Cursor(const Geometry& g, const Cut& cut, const Work& work, int tile = 0) {
        const Offset share = static_cast<Offset>(cut.share);
        const Offset thread = threadIdx.x % GROUP;
        const Offset before = thread / ACROSS + static_cast<Offset>(tile) * (TILE * DEEP);
        const Offset number = work.part * share + before;
        inner = static_cast<Offset>(g.inner);
        pitch = static_cast<Offset>(g.group) * inner;
        left = static_cast<Signed>(share) - static_cast<Signed>(before);
        if (COLUMNS) {
            const Offset column = thread % ACROSS * WIDTH;
            const Signed rows = static_cast<Signed>(g.outer) - static_cast<Signed>(number);
            left = left < rows ? left : rows;
            if (column >= work.positions) left = 0;
            run = work.base + number * pitch + column;
            window = step_window = 0;
            step = DEEP * pitch;
        } else {
            windows = static_cast<Offset>(cut.windows);
            const Signed rest = static_cast<Signed>(static_cast<Offset>(g.outer) * windows)
                              - static_cast<Signed>(number);
            left = left < rest ? left : rest;
            if (work.positions == 0) left = 0;
            run = SPANS ? work.base : work.base + number / windows * pitch;  // a row is one run
            window = SPANS ? number : number % windows;
            step = SPANS ? 0 : DEEP / windows * pitch;
            step_window = SPANS ? DEEP : DEEP % windows;
            shift = static_cast<Offset>(cut.shift);
        }
    }

    __device__ Access next() {
        Access access;
        access.valid = left > 0;
        if (COLUMNS) {
            access.offset = run;
            access.first = access.inner = 0;
            run += step;
        } else {
            const Offset before = ALIGNED ? 0 : (run + shift) % WIDTH;
            access.first = static_cast<Signed>(window * WIDTH - before);
            access.inner = static_cast<Signed>(inner);
            access.offset = run + access.first;
            run += step;
            window += step_window;
            if (!SPANS && window >= windows) {
                window -= windows;
                run += pitch;
            }
        }
        left -= DEEP;
        return access;
    }

  private:
    Offset run;     // offset of the run; in columns, of the access
    Offset window;  // access in the run
    Signed left;    // accesses of the part from this one on, of all threads
    Offset windows, inner, pitch, step, step_window, shift;
};

// Elements of an access that belong to a thread's statistic `s`: all lanes of runs, lane `s` of
// columns.
constexpr int LANES = COLUMNS ? 1 : WIDTH;

// TILE accesses that are in flight together.
struct Tile {
    Access access[TILE];

    __device__ explicit Tile(Cursor& cursor) {
        #pragma unroll
        for (int i = 0; i < TILE; ++i) access[i] = cursor.next();
    }

    __device__ bool whole() const {
        bool all = true;
        #pragma unroll
        for (int i = 0; i < TILE; ++i) all = all && access[i].whole();
        return all;
    }

    // Elements that a statistic has of it.
    __device__ int number() const {
        int all = 0;
        #pragma unroll
        for (int i = 0; i < TILE; ++i) {
            if (ALIGNED) {
                all += access[i].valid ? LANES : 0;
            } else {
                #pragma unroll
                for (int lane = 0; lane < LANES; ++lane) all += access[i].has(lane) ? 1 : 0;
            }
        }
        return all;
    }

    __device__ void load(const Element* x, Vector (&values)[TILE]) const {
        #pragma unroll
        for (int i = 0; i < TILE; ++i) values[i] = access[i].load(x);
    }
};

// Elements that a thread keeps in shared memory between two sweeps. Each thread reads
// what it wrote itself, so no barrier is needed.
struct Shelf {
    Vector* place;

    // Begins to fill it; `wait_for_copies` ends that.
    __device__ void fetch(
        const Tile& tile, const Element* x, int number, int input, int inputs
    ) const {
        #pragma unroll
        for (int i = 0; i < TILE; ++i)
            tile.access[i].load_ahead(
                x, place + ((number * inputs + input) * TILE + i) * THREADS + threadIdx.x);
    }

    __device__ void put(int tile, int input, const Vector (&values)[TILE], int inputs) const {
        #pragma unroll
        for (int i = 0; i < TILE; ++i)
            place[((tile * inputs + input) * TILE + i) * THREADS + threadIdx.x] = values[i];
    }

    __device__ void get(int tile, int input, Vector (&values)[TILE], int inputs) const {
        #pragma unroll
        for (int i = 0; i < TILE; ++i)
            values[i] = place[((tile * inputs + input) * TILE + i) * THREADS + threadIdx.x];
    }
};

// Tiles that a thread has on their way to its shelf, each a group of copies: all that a
// multiprocessor has room for, in most plans.
constexpr int AHEAD = 8;

// Before the first of `number` tiles is taken from the shelf. `fetch(n)` fetches one.
template <class Fetch> __device__ inline void fetch_first(int number, Fetch fetch) {
    #pragma unroll 1
    for (int n = 0; n < AHEAD; ++n) {
        if (n < number) fetch(n);
        end_group_of_copies();
    }
}

// After tile `n` has been taken.
template <class Fetch> __device__ inline void fetch_next(int n, int number, Fetch fetch) {
    if (n + AHEAD < number) fetch(n + AHEAD);
    end_group_of_copies();
}

// Which rows a group of threads takes, one after another: a part of row `index` of each of a
// block of samples. Blocks are numbered by part, then row of a sample, then block of samples.
// All groups of a block take as many turns: barriers and shuffles are for all of them.
struct Turns {
    Offset part, index, block, first, end;

    static constexpr Offset step = THREADS / GROUP;

    __device__ Turns(const Geometry& g, const Cut& cut, long long samples) {
        const Offset parts = static_cast<Offset>(cut.parts), group = static_cast<Offset>(g.group);
        const Offset size = static_cast<Offset>(samples), batch = static_cast<Offset>(g.batch);
        part = blockIdx.x % parts;
        index = blockIdx.x / parts % group;
        block = blockIdx.x / parts / group;
        first = block * size;
        end = (block + 1) * size < batch ? (block + 1) * size : batch;
    }

    __device__ Work work(const Geometry& g, Offset turn) const {
        const Offset sample = turn + threadIdx.x / GROUP;
        return Work(g, sample, index, part, sample < end);
    }
};

// Of the parameters of a run, that of one of its elements.
__device__ inline Offset parameter_of(const Geometry& g, Offset element) {
    if (SPANS == 3) return element;
    if (WIDE) return element / static_cast<Offset>(g.span);
    const unsigned factor = static_cast<unsigned>(g.span_factor);
    return static_cast<Offset>(
        static_cast<unsigned long long>(element) * factor >> g.span_shift);
}

// The first parameter of a run in which they change.
__device__ inline Offset first_parameter(const Work& work, const Geometry& g) {
    return SPANS ? work.parameter * parameter_of(g, static_cast<Offset>(g.inner)) : 0;
}

// Parameters of the elements of an access, plus an offset, in a run whose own begin at `first`.
__device__ inline void spread(
    const Parameter& parameter, const Geometry& g, Offset first, const Access& access,
    double absent, double offset, Accumulator (&numbers)[WIDTH]
) {
    const Number* const place = parameter.as<Number>();
    if (place == nullptr || !access.valid) {
        #pragma unroll
        for (int lane = 0; lane < WIDTH; ++lane)
            numbers[lane] = static_cast<Accumulator>(absent);
    } else if (SPANS == 3) {
        read_numbers(place + (first + static_cast<Offset>(access.first)), offset, numbers);
    } else {
        Accumulator number = 0;
        #pragma unroll
        for (int lane = 0; lane < WIDTH; ++lane) {
            const Offset element = static_cast<Offset>(access.first + lane);
            if (SPANS == 2 || lane == 0)
                number = shifted(read_common(place + (first + parameter_of(g, element))), offset);
            numbers[lane] = number;
        }
    }
}

// Those of a tile.
__device__ inline void spread(
    const Parameter& parameter, const Geometry& g, const Work& work, const Tile& tile,
    double absent, double offset, Accumulator (&numbers)[TILE][WIDTH]
) {
    const Offset first = first_parameter(work, g);
    if (offset == 0.0) {  // as a rule; where the compiler knows it, nothing is added
        #pragma unroll
        for (int i = 0; i < TILE; ++i)
            spread(parameter, g, first, tile.access[i], absent, 0.0, numbers[i]);
    } else {
        #pragma unroll
        for (int i = 0; i < TILE; ++i)
            spread(parameter, g, first, tile.access[i], absent, offset, numbers[i]);
    }
}
