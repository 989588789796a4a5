// Executes CUDA kernels on the CPU, for tests: grids, blocks, clusters, warps, shuffles,
// barriers and shared memory, one fiber a thread.
//
// A fiber runs until it waits for others; which one runs next is drawn at random from a
// seed, so that a missing barrier shows as changed results. Shared memory is filled with
// NaNs before each block. Threads that wait for what never comes, or for different things,
// end the launch with a message. Loads and stores of global memory must be aligned, and are
// counted: those of watched arrays, and all others.
#include "harness.hpp"

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>

namespace harness {
namespace {

constexpr unsigned lanes = 32;
constexpr size_t stack_size = 128 << 10;
constexpr unsigned most_sleeps = 1 << 20;  // far more than others take turns

enum class Wait { nothing, others, warp, block, cluster, end };

struct Block;

// Of global memory, on its way to shared memory.
struct Copy {
    void* shared;
    const void* place;
    unsigned size, group;
};

// Where a stack was left. The compiler's own jumps cost nanoseconds; swapcontext asks the system for
// its mask of signals twice, and the address sanitizer clears its record of the stack for it.
struct Place {
    void* words[5];
};

[[noreturn, gnu::noinline, gnu::no_sanitize_address]] void jump(Place* to) {
    __builtin_longjmp(to->words, 1);
}

[[gnu::noinline, gnu::no_sanitize_address]] void leave(Place* from, Place* to) {
    if (__builtin_setjmp(from->words) == 0) jump(to);
}

struct Fiber {
    Place place;
    bool begun = false;
    void* stack = nullptr;
    Block* block = nullptr;
    unsigned thread = 0;
    Wait wait = Wait::nothing;
    const char* operation = "";  // that it waits for with its warp
    unsigned operations = 0;     // of its warp so far
    unsigned sleeps = 0;
    unsigned arrivals = 0;       // at the cluster's barrier
    unsigned departures = 0;
    std::vector<Copy> copies;  // on their way
    unsigned groups = 0;       // of copies, which have ended
    bool hasty = false;        // goes on before others whenever it can
};

struct Block {
    unsigned index = 0, rank = 0;
    unsigned char* shared = nullptr;
    std::vector<Fiber*> fibers;
    // What the lanes of a warp show each other, for even and odd operations.
    std::vector<uint64_t> shown[2];
};

struct Launch {
    void (*kernel)(const void*) = nullptr;
    const void* arguments = nullptr;
    unsigned blocks = 0;
    size_t shared = 0;
    uint64_t random = 0;
    uint64_t* counters = nullptr;
    std::vector<Block*> cluster;
    std::vector<Fiber*> runnable, hasty;
    Fiber* current = nullptr;
    Place scheduler;
    std::string error;
};

Launch* now = nullptr;
std::vector<std::pair<uintptr_t, uintptr_t>> watched;  // ranges of addresses
std::vector<unsigned> chosen;                           // blocks that are run; none: all
std::vector<void*> stacks;  // kept for the launches to come

std::string where(const Fiber* fiber) {
    return " (block " + std::to_string(fiber->block->index) + ", thread "
         + std::to_string(fiber->thread) + ")";
}

void fail(const std::string& message) {  // does not return
    now->error = message + where(now->current);
    jump(&now->scheduler);
}

uint64_t draw() {  // xorshift64*
    uint64_t& x = now->random;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    return (x * 0x2545F4914F6CDD1Dull) >> 16;
}

void suspend(Wait wait) {
    Fiber* fiber = now->current;
    fiber->wait = wait;
    leave(&fiber->place, &now->scheduler);
}

void main_of_fiber() {  // a thread of one block after another
    for (;;) {
        now->kernel(now->arguments);
        suspend(Wait::end);
    }
}

// Goes to where a fiber was left, or to where it begins, on its own stack.
[[gnu::noinline, gnu::no_sanitize_address]] void enter(Fiber* fiber) {
    if (fiber->begun) {
        leave(&now->scheduler, &fiber->place);
    } else if (__builtin_setjmp(now->scheduler.words) == 0) {
        fiber->begun = true;
        ucontext_t context;
        getcontext(&context);
        context.uc_stack.ss_sp = fiber->stack;
        context.uc_stack.ss_size = stack_size;
        context.uc_link = nullptr;
        makecontext(&context, main_of_fiber, 0);
        setcontext(&context);
    }
}

void resume(Fiber* fiber) {
    fiber->wait = Wait::nothing;
    (fiber->hasty ? now->hasty : now->runnable).push_back(fiber);
}

// Lets fibers [first, first + number) of a block go on if all of them wait for the same.
void release(Block* block, unsigned first, unsigned number, Wait wait) {
    Fiber* const leader = block->fibers[first];
    for (unsigned t = first; t < first + number; ++t) {
        Fiber* fiber = block->fibers[t];
        if (fiber->wait != wait) return;
        if (wait == Wait::warp && (std::strcmp(fiber->operation, leader->operation) != 0
                                   || fiber->operations != leader->operations)) {
            now->error = "the lanes of a warp wait for different operations" + where(fiber);
            return;
        }
    }
    for (unsigned t = first; t < first + number; ++t) resume(block->fibers[t]);
}

// A cluster's barrier opens when all have arrived, whatever they have done since.
void release_cluster() {
    unsigned least = ~0u;
    for (const Block* block : now->cluster)
        for (const Fiber* f : block->fibers) least = f->arrivals < least ? f->arrivals : least;
    for (const Block* block : now->cluster) {
        for (Fiber* f : block->fibers) {
            if (f->wait == Wait::cluster && f->departures < least) {
                ++f->departures;
                resume(f);
            }
        }
    }
}

void step(Fiber* fiber) {
    now->current = fiber;
    enter(fiber);
    if (!now->error.empty()) return;
    Block* block = fiber->block;
    switch (fiber->wait) {
        case Wait::warp: release(block, fiber->thread / lanes * lanes, lanes, Wait::warp); break;
        case Wait::others: resume(fiber); break;
        case Wait::block: release(block, 0, block->fibers.size(), Wait::block); break;
        case Wait::end:
            if (fiber->arrivals != fiber->departures)
                now->error = "a thread left between arriving at a cluster's barrier and waiting";
            if (!fiber->copies.empty()) now->error = "a thread left while it was copying";
            break;
        default: break;
    }
    if (now->cluster.size() > 1 && fiber->wait == Wait::cluster) release_cluster();
    else if (now->cluster.size() == 1 && fiber->wait == Wait::cluster)
        now->error = "a cluster's barrier without a cluster";
}

// One warp of every other cluster is hasty: where a barrier is missing it overtakes all others,
// which hardly happens where all are drawn alike.
void run_cluster() {
    size_t running = 0;
    const bool any = draw() % 2;
    const unsigned rank = draw() % now->cluster.size();
    const unsigned warp = draw() % (now->cluster[0]->fibers.size() / lanes);
    for (Block* block : now->cluster) {
        std::memset(block->shared, 0xff, now->shared);
        for (Fiber* fiber : block->fibers) {
            fiber->operations = fiber->arrivals = fiber->departures = fiber->groups = 0;
            fiber->sleeps = 0;
            fiber->hasty = any && block->rank == rank && fiber->thread / lanes == warp;
            resume(fiber);
            ++running;
        }
    }
    while (running > 0) {
        auto& runnable = now->hasty.empty() ? now->runnable : now->hasty;
        if (runnable.empty()) {
            now->error = "threads wait for others that never come";
            return;
        }
        const size_t i = draw() % runnable.size();
        Fiber* fiber = runnable[i];
        runnable[i] = runnable.back();
        runnable.pop_back();
        step(fiber);
        if (!now->error.empty()) return;
        if (fiber->wait == Wait::end) --running;
    }
}

}  // namespace

unsigned thread() { return now->current->thread; }
unsigned block() { return now->current->block->index; }
unsigned grid() { return now->blocks; }
unsigned char* shared() { return now->current->block->shared; }

void barrier() { suspend(Wait::block); }

void sleep() {
    now->current->hasty = false;  // others have to come first
    if (++now->current->sleeps > most_sleeps) fail("waiting for what other blocks never do");
    suspend(Wait::others);
}

void cluster_arrive() {
    ++now->current->arrivals;
    release_cluster();
}

void cluster_wait() {
    if (now->current->arrivals != now->current->departures + 1)
        fail("waiting at a cluster's barrier without having arrived");
    suspend(Wait::cluster);
}

void* map_shared(const void* place, unsigned rank) {
    const auto offset = static_cast<const unsigned char*>(place) - shared();
    if (rank >= now->cluster.size() || offset < 0 || size_t(offset) >= now->shared)
        fail("shared memory outside of the cluster");
    return now->cluster[rank]->shared + offset;
}

void begin_copy(void* shared, const void* place, unsigned size) {
    if (reinterpret_cast<uintptr_t>(shared) % size != 0) fail("a copy that is not aligned");
    count_read(place, size);
    if (draw() % 2) std::memcpy(shared, place, size);  // at once, or as late as may be
    else now->current->copies.push_back({shared, place, size, now->current->groups});
}

void end_group_of_copies() { ++now->current->groups; }

void wait_for_copies(unsigned pending) {
    Fiber* fiber = now->current;
    std::vector<Copy> rest;
    for (const Copy& copy : fiber->copies) {
        if (copy.group + pending < fiber->groups) std::memcpy(copy.shared, copy.place, copy.size);
        else rest.push_back(copy);
    }
    fiber->copies.swap(rest);
}

const uint64_t* show(const char* operation, unsigned mask, uint64_t word) {
    Fiber* fiber = now->current;
    if (mask != 0xffffffffu) fail("a shuffle of some lanes only");
    auto& shown = fiber->block->shown[fiber->operations++ % 2];
    shown[fiber->thread] = word;
    fiber->operation = operation;
    suspend(Wait::warp);
    return &shown[fiber->thread / lanes * lanes];
}

void count(const void* place, unsigned size, int kind) {
    const auto address = reinterpret_cast<uintptr_t>(place);
    if (address % size != 0) fail("an access that is not aligned");
    bool inside = false;
    for (const auto& range : watched)
        inside = inside || (range.first <= address && address < range.second);
    now->counters[(inside ? 0 : 2) + kind] += size;
}

void count_read(const void* place, unsigned size) { count(place, size, 0); }
void count_write(const void* place, unsigned size) { count(place, size, 1); }

extern "C" void watch(uintptr_t first, uintptr_t end) { watched.emplace_back(first, end); }
extern "C" void unwatch() { watched.clear(); }

extern "C" void choose(const unsigned* blocks, unsigned number) {
    chosen.assign(blocks, blocks + number);
}

const char* launch(void (*kernel)(const void*), const void* arguments, unsigned blocks,
                   unsigned threads, unsigned cluster, size_t shared, uint64_t seed,
                   uint64_t* counters) {
    static std::string message;
    if (blocks == 0 || threads % lanes != 0 || blocks % cluster != 0)
        return "a grid without blocks, a broken warp or a broken cluster";
    Launch launch;
    launch.kernel = kernel;
    launch.arguments = arguments;
    launch.blocks = blocks;
    launch.shared = shared;
    launch.random = 2 * seed + 1;
    launch.counters = counters;
    now = &launch;
    while (stacks.size() < size_t(threads) * cluster)
        stacks.push_back(mmap(nullptr, stack_size, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    std::vector<Fiber> fibers(size_t(threads) * cluster);
    std::vector<Block> together(cluster);
    for (unsigned rank = 0; rank < cluster; ++rank) {
        Block& block = together[rank];
        block.rank = rank;
        block.shared = static_cast<unsigned char*>(malloc(shared));  // exact, for the sanitizer
        for (auto& shown : block.shown) shown.resize(threads);
        for (unsigned t = 0; t < threads; ++t) {
            Fiber& fiber = fibers[rank * threads + t];
            fiber.stack = stacks[rank * threads + t];
            fiber.block = &block;
            fiber.thread = t;
            block.fibers.push_back(&fiber);
        }
        launch.cluster.push_back(&block);
    }
    std::vector<unsigned> order;
    for (unsigned block : chosen) order.push_back(block / cluster);
    for (unsigned i = 0; chosen.empty() && i < blocks / cluster; ++i) order.push_back(i);
    for (size_t i = 0; i < order.size(); ++i) std::swap(order[i], order[draw() % (i + 1)]);
    for (unsigned i : order) {
        for (Block& block : together) block.index = i * cluster + block.rank;
        run_cluster();
        if (!launch.error.empty()) break;
    }
    for (Block& block : together) free(block.shared);
    message = launch.error;
    now = nullptr;
    return message.c_str();
}

}  // namespace harness
