// Team of threads that computes one step. Before each chain of operations, the team checks how many threads may run,
// because the workers of a machine share its cores (common/machine/cores.py).
//
// A chain completes when its parts are done. Threads do not wait for others that have left or have not joined yet.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace diptych {

constexpr int SPINS = 2000; // looks at a number before its thread sleeps: about as long as OpenMP's threads spin
constexpr int PLACES = 64;  // of workers in the page that they share

// An atomic counter with waiting.
class Signal {
public:
    uint32_t load() const { return value.load(); }

    // Adds, without waking a thread, and returns the sum.
    uint32_t add(uint32_t more) { return value.fetch_add(more) + more; }

    void set(uint32_t now) {
        value.store(now);
        wake();
    }

    void wake() {
        if (sleeping.load() == 0) return;
#if defined(__linux__)
        syscall(SYS_futex, reinterpret_cast<uint32_t *>(&value), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
    }

    // Waits until `ready(value)`; the thread that makes it so must call `set` or `wake`.
    template <typename Ready> void wait(Ready &&ready) {
        for (int i = 0; i < SPINS; i++) {
            if (ready(value.load(std::memory_order_acquire))) return;
            pause();
        }
        sleeping.fetch_add(1);
        for (uint32_t seen = value.load(); !ready(seen); seen = value.load()) sleep(seen);
        sleeping.fetch_sub(1);
    }

private:
    std::atomic<uint32_t> value{0}, sleeping{0};

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    // Returns at once if the value is another by now.
    void sleep(uint32_t seen) {
#if defined(__linux__)
        syscall(SYS_futex, reinterpret_cast<uint32_t *>(&value), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
        (void)seen;
        std::this_thread::sleep_for(std::chrono::microseconds(20));
#endif
    }
};

// Counts the claimed and the completed parts of one chain.
class Chain {
public:
    int64_t take() { return next.fetch_add(1, std::memory_order_relaxed); }

    // A thread that found no more to take, and did `mine` of `parts`, waits here until all are done.
    void finish(uint32_t mine, uint32_t parts) {
        if (mine && done.add(mine) == parts) return done.wake();
        done.wait([parts](uint32_t value) { return value == parts; });
    }

private:
    std::atomic<uint32_t> next{0};
    Signal done;
};

// Limits the number of running threads of a team to the current share of cores. The first thread leads and never waits.
class Gate {
public:
    // `places`: a byte for each worker of the machine, 1 for those that compute, this one among them. Null: it is
    // alone.
    Gate(const uint8_t *places, int cores) : places(places), cores(uint32_t(cores)) { open.set(share()); }

    void pass(int thread) {
        if (thread > 0) return open.wait([thread](uint32_t value) { return value > uint32_t(thread); });
        const uint32_t now = share();
        if (now != open.load()) open.set(now);
    }

    // The leader lets all threads go when it has no more to do.
    void leave(int thread) {
        if (thread == 0) open.set(cores);
    }

private:
    const uint8_t *const places;
    const uint32_t cores;
    Signal open;

    uint32_t share() const {
        if (!places) return cores;
        uint32_t computing = 0;
        for (int i = 0; i < PLACES; i++) computing += __atomic_load_n(places + i, __ATOMIC_RELAXED);
        return computing > 1 ? (cores > computing ? cores / computing : 1) : cores;
    }
};

} // namespace diptych
