// Which elements of an array a thread works on.
//
// A group of threads takes the statistics [statistic, statistic + POSITIONS) and one part
// of their elements. In runs (COLUMNS == 0) a group has one statistic, whose elements are
// `outer` runs of `inner`; a run is covered by `windows` accesses, and the accesses of all
// runs are numbered one after another. In columns the threads of a row have WIDTH
// statistics each, and the rows are numbered.
//
// Consecutive blocks are the parts of one group, so a cluster holds whole groups.
#pragma once

#include "memory.cuh"

// The work of the group that a thread belongs to.
struct Work {
    Offset statistic;  // the first one
    Offset channel;    // its index among `group`
    Offset part;
    Offset base;       // offset of its first element
    bool any;          // false for the idle groups of the last block

    __device__ Work(const Geometry& g, const Cut& cut, bool reversed) {
        const Offset unit = reversed ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
        const Offset parts = static_cast<Offset>(cut.parts);
        const Offset group = static_cast<Offset>(g.group);
        part = unit % parts;
        Offset batch;
        if (COLUMNS) {
            const Offset slices = (group + POSITIONS - 1) / POSITIONS;
            batch = unit / parts / slices;
            channel = unit / parts % slices * POSITIONS;
            any = true;
        } else {
            statistic = unit / parts * (THREADS / GROUP) + threadIdx.x / GROUP;
            any = statistic < static_cast<Offset>(g.batch) * group;
            if (!any) statistic = 0;
            batch = statistic / group;
            channel = statistic % group;
        }
        statistic = batch * group + channel;
        base = (batch * static_cast<Offset>(g.outer) * group + channel)
             * static_cast<Offset>(g.inner);
    }
};

// One memory access: WIDTH elements from `offset` on, of which those outside of the run,
// or all of them beyond the end of the part, are none of the group's.
struct Access {
    Offset offset;  // may be before the array where the access is not aligned
    Signed first;   // index in the run of its first element; unused in columns
    Signed inner;
    bool valid;

    __device__ bool whole() const {
        return valid && (ALIGNED || (first >= 0 && first + WIDTH <= inner));
    }

    __device__ bool has(int lane) const {
        return valid && (ALIGNED || (first + lane >= 0 && first + lane < inner));
    }

    // Lanes outside of the run get the nearest element of it.
    template <bool LAST> __device__ Vector load(const Element* x) const {
        if (whole()) {
            const Vector* place = reinterpret_cast<const Vector*>(x + offset);
            return LAST ? read_last(place) : read(place);
        }
        Vector vector = {};
        if (!ALIGNED && valid) {
            #pragma unroll
            for (int lane = 0; lane < WIDTH; ++lane) {
                Signed i = first + lane;
                i = i < 0 ? 0 : i < inner ? i : inner - 1;
                const Element* place = x + (offset - first + i);
                vector.lane[lane] = LAST ? read_last(place) : read(place);
            }
        }
        return vector;
    }

    __device__ void store(Element* y, const Vector& vector) const {
        if (whole()) {
            write(reinterpret_cast<Vector*>(y + offset), vector);
        } else if (!ALIGNED) {
            #pragma unroll
            for (int lane = 0; lane < WIDTH; ++lane)
                if (has(lane)) write(y + (offset + lane), vector.lane[lane]);
        }
    }
};

// A thread's accesses, one after another.
class Cursor {
  public:
    __device__ Cursor(const Geometry& g, const Cut& cut, const Work& work) {
        const Offset share = static_cast<Offset>(cut.share);
        const Offset thread = threadIdx.x % GROUP;
        const Offset number = work.part * share + thread / ACROSS;
        inner = static_cast<Offset>(g.inner);
        pitch = static_cast<Offset>(g.group) * inner;
        left = static_cast<Signed>(share) - static_cast<Signed>(thread / ACROSS);
        if (COLUMNS) {
            const Offset column = thread % ACROSS * WIDTH;
            const Signed rows = static_cast<Signed>(g.outer) - static_cast<Signed>(number);
            left = left < rows ? left : rows;
            if (work.channel + column >= static_cast<Offset>(g.group)) left = 0;
            run = work.base + number * pitch + column;
            window = step_window = 0;
            step = DEEP * pitch;
        } else {
            windows = static_cast<Offset>(cut.windows);
            const Signed rest = static_cast<Signed>(static_cast<Offset>(g.outer) * windows)
                              - static_cast<Signed>(number);
            left = left < rest ? left : rest;
            if (!work.any) left = 0;
            run = work.base + number / windows * pitch;
            window = number % windows;
            step = DEEP / windows * pitch;
            step_window = DEEP % windows;
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
            if (window >= windows) {
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

    template <bool LAST> __device__ void load(const Element* x, Vector (&values)[TILE]) const {
        #pragma unroll
        for (int i = 0; i < TILE; ++i) values[i] = access[i].load<LAST>(x);
    }
};

// Elements that a thread keeps in shared memory between two sweeps. Each thread reads
// what it wrote itself, so no barrier is needed.
struct Shelf {
    Vector* place;

    __device__ void put(long long tile, int input, const Vector (&values)[TILE], int inputs) {
        #pragma unroll
        for (int i = 0; i < TILE; ++i)
            place[((tile * inputs + input) * TILE + i) * THREADS + threadIdx.x] = values[i];
    }

    __device__ void get(long long tile, int input, Vector (&values)[TILE], int inputs) const {
        #pragma unroll
        for (int i = 0; i < TILE; ++i)
            values[i] = place[((tile * inputs + input) * TILE + i) * THREADS + threadIdx.x];
    }
};
