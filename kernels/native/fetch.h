// Prefetches memory that is needed soon while other data is processed.
#pragma once

#include "vectors.h"

namespace diptych {

// A core supports few outstanding cache misses, so a few lines are prefetched after each step of the computation.
class Fetcher {
public:
    void clear() { size = next = 0, at = end = nullptr; }

    // Ranges are hints: those that do not fit into the list are dropped.
    void add(const void *memory, int64_t bytes) {
        if (size == MOST || bytes <= 0) return;
        const char *from = static_cast<const char *>(memory);
        ranges[size++] = {from, from + bytes};
    }

    // Distributes all added ranges over `steps` calls of `step`.
    void spread(int64_t steps) { pace = steps > 0 ? int((lines() + steps - 1) / steps) : 0; }

    void step() { fetch(pace); }

private:
    int64_t lines() const {
        int64_t total = (end - at + LINE - 1) / LINE;
        for (int i = next; i < size; i++) total += (ranges[i].end - ranges[i].at + LINE - 1) / LINE;
        return total;
    }

    void fetch(int count) {
        for (; count > 0; count--) {
            if (at >= end) {
                if (next == size) return;
                at = ranges[next].at, end = ranges[next++].end;
            }
            __builtin_prefetch(at, 0, 2);
            at += LINE;
        }
    }

    static constexpr int MOST = 4;
    struct Range {
        const char *at, *end;
    };
    Range ranges[MOST];
    int pace = 0, size = 0, next = 0; // lines a step; ranges; the first that is not begun
    const char *at = nullptr, *end = nullptr;
};

} // namespace diptych
