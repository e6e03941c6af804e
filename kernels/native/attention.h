// Attention that reads the blocks of the cache in place.
#pragma once

#include "simd.h"

#include <algorithm>
#include <type_traits>
#include <vector>

namespace diptych {

constexpr int TILE = 64;              // keys per tile
constexpr int VECTORS = TILE / LANES; // accumulators per row of a score tile

struct Shape {
    int64_t num_layers, num_kv_heads, block_size, head_dim, num_heads;
};

// One query tile of one sequence against one KV head.
struct Unit {
    int32_t span, head, first, count;
};

struct Span { // of the plan: see native_backend.py
    int64_t row, count, start, table;
};

struct Scratch {
    std::vector<float> keys, values, queries, scores, sums, top, total;

    void reserve(int rows, int dim) {
        keys.resize(TILE * dim);
        values.resize(TILE * dim);
        queries.resize(rows * dim);
        scores.resize(rows * TILE);
        sums.resize(rows * dim);
        top.resize(rows);
        total.resize(rows);
    }
};

alignas(64) const float NOTHING[1024] = {};

// Rows of a tile's positions in the cache; those outside of [begin, end) point at zeros, so that slots which belong to nobody
// are never read.
template <typename T>
void find_rows(const T *kv, const Shape &s, int64_t layer, int head, const int32_t *table, int64_t base, int64_t begin,
               int64_t end, const T *(&rows)[TILE], const T *(&values)[TILE]) {
    for (int i = 0; i < TILE; i++) rows[i] = values[i] = reinterpret_cast<const T *>(NOTHING);
    int64_t at = base > begin ? base : begin;
    const int64_t last = base + TILE < end ? base + TILE : end;
    while (at < last) {
        const int64_t block = at / s.block_size, slot = at % s.block_size;
        const int64_t until = last < (block + 1) * s.block_size ? last : (block + 1) * s.block_size;
        const T *row = kv + (((table[block] * s.num_layers + layer) * s.num_kv_heads + head) * s.block_size + slot) * 2 * s.head_dim;
        for (; at < until; at++, row += 2 * s.head_dim) rows[at - base] = row, values[at - base] = row + s.head_dim;
    }
}

// Keys and values of those rows, float32: keys [head_dim][TILE], values [TILE][head_dim]. Fetches the next tile's meanwhile.
template <typename T>
void read_tile(const T *const (&rows)[TILE], const T *const (&values)[TILE], const T *const (&next)[TILE], int dim,
               Scratch &scratch) {
    float *keys = scratch.keys.data(), *out = scratch.values.data();
    for (int i = 0; i < TILE; i += LANES)
        for (int d = 0; d < dim; d += LANES) {
            f32x16 part[LANES];
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++) part[j] = load(rows[i + j] + d);
            transpose16(part, keys + d * TILE + i, TILE);
            for (int j = 0; j < LANES; j++) { // K and V of 16 rows, in dim / 16 steps
                const char *line = reinterpret_cast<const char *>(next[i + j]) + 2 * d * sizeof(T);
                __builtin_prefetch(line);
                if (sizeof(T) == 4) __builtin_prefetch(line + 64);
            }
        }
    for (int i = 0; i < TILE; i++)
        for (int d = 0; d < dim; d += LANES) store(out + i * dim + d, load(values[i] + d));
}

// scores[R][TILE] = queries[R][dim] . keys[dim][TILE]
template <int R> void multiply_keys(const float *queries, const float *keys, float *scores, int dim) {
    f32x16 acc[R][VECTORS] = {};
    for (int d = 0; d < dim; d++) {
        f32x16 key[VECTORS];
        for (int v = 0; v < VECTORS; v++) hold(key[v] = load(keys + d * TILE + v * LANES));
        for (int r = 0; r < R; r++) {
            const f32x16 q = splat(queries[r * dim + d]);
            for (int v = 0; v < VECTORS; v++) acc[r][v] = q * key[v] + acc[r][v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) store(scores + r * TILE + v * LANES, acc[r][v]);
}

// sums[R][V * 16 of dim] += scores[R][TILE] . values[TILE][V * 16 of dim]
template <int R, int V> void add_values(const float *scores, const float *values, float *sums, int dim) {
    f32x16 acc[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = load(sums + r * dim + v * LANES);
    for (int i = 0; i < TILE; i++) {
        f32x16 value[V];
        for (int v = 0; v < V; v++) hold(value[v] = load(values + i * dim + v * LANES));
        for (int r = 0; r < R; r++) {
            const f32x16 p = splat(scores[r * TILE + i]);
            for (int v = 0; v < V; v++) acc[r][v] = p * value[v] + acc[r][v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(sums + r * dim + v * LANES, acc[r][v]);
}

template <int R> void add_all_values(const float *scores, const float *values, float *sums, int dim) {
    int d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) add_values<R, 4>(scores, values + d, sums + d, dim);
    for (; d < dim; d += LANES) add_values<R, 1>(scores, values + d, sums + d, dim);
}

// Calls back with the number of rows, at most four, as a constant.
template <typename F> void by_rows(int rows, F &&call) {
    switch (rows) {
    case 1: return call(std::integral_constant<int, 1>{});
    case 2: return call(std::integral_constant<int, 2>{});
    case 3: return call(std::integral_constant<int, 3>{});
    default: return call(std::integral_constant<int, 4>{});
    }
}

// One row's scores of a tile to weights relative to a running maximum; rescales what the row has summed so far.
inline void soften(float *scores, int64_t base, int64_t from, int64_t to, float softcap, float *sums, int dim, float &top,
            float &total) {
    f32x16 s[VECTORS];
    for (int v = 0; v < VECTORS; v++) s[v] = load(scores + v * LANES);
    if (softcap > 0.f)
        for (int v = 0; v < VECTORS; v++) // tanh(x) = 1 - 2 / (e^2x + 1)
            s[v] = softcap * (1.f - 2.f / (exponential(s[v] * (2.f / softcap)) + 1.f));
    if (base < from || base + TILE > to) {
        static const i32x16 iota = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const int32_t first = from > base ? int32_t(from - base) : 0;
        const int32_t last = to < base + TILE ? int32_t(to - base) : TILE;
        for (int v = 0; v < VECTORS; v++) {
            const i32x16 at = iota + v * LANES;
            s[v] = ((at >= first) & (at < last)) ? s[v] : splat(NEG_INF);
        }
    }
    f32x16 best = s[0];
    for (int v = 1; v < VECTORS; v++) best = s[v] > best ? s[v] : best;
    const float peak = largest(best);
    const float next = peak > top ? peak : top;
    f32x16 added = {};
    for (int v = 0; v < VECTORS; v++) {
        const f32x16 weight = s[v] == NEG_INF ? f32x16{} : exponential(s[v] - next);
        added += weight;
        store(scores + v * LANES, weight);
    }
    if (next > top) {
        const float shrink = top == NEG_INF ? 0.f : exponential(splat(top - next))[0];
        for (int d = 0; d < dim; d += LANES) store(sums + d, load(sums + d) * shrink);
        total *= shrink;
        top = next;
    }
    total += sum(added);
}

template <typename T> struct Attention {
    const T *q;
    int64_t q_stride; // elements from one token to the next
    T *out;
    const T *kv;
    const Span *spans;
    const int32_t *tables;
    Shape shape;
    int64_t layer, window;
    float scale, softcap;

    void run(const Unit &unit, Scratch &scratch) const {
        const Span &span = spans[unit.span];
        const int dim = int(shape.head_dim), group = int(shape.num_heads / shape.num_kv_heads);
        const int rows = unit.count * group;
        scratch.reserve(rows, dim);
        for (int i = 0; i < rows; i++) {
            const T *from = q + (span.row + unit.first + i / group) * q_stride + (unit.head * group + i % group) * dim;
            for (int d = 0; d < dim; d += LANES) store(&scratch.queries[i * dim + d], load(from + d) * scale);
            scratch.top[i] = NEG_INF;
            scratch.total[i] = 0.f;
        }
        std::fill(scratch.sums.begin(), scratch.sums.begin() + rows * dim, 0.f);
        const int64_t first = span.start + unit.first, end = first + unit.count; // positions of the queries
        const int64_t begin = window && first + 1 > window ? first + 1 - window : 0;
        const T *keys[2][TILE], *values[2][TILE]; // of this tile and of the next, which is fetched meanwhile
        const int32_t *table = tables + span.table;
        int64_t base = begin / TILE * TILE;
        find_rows(kv, shape, layer, unit.head, table, base, begin, end, keys[0], values[0]);
        for (int turn = 0; base < end; base += TILE, turn ^= 1) {
            find_rows(kv, shape, layer, unit.head, table, base + TILE, begin, end, keys[turn ^ 1], values[turn ^ 1]);
            read_tile(keys[turn], values[turn], keys[turn ^ 1], dim, scratch);
            visit(base, rows, group, first, scratch);
        }
        for (int i = 0; i < rows; i++) {
            T *to = out + ((span.row + unit.first + i / group) * shape.num_heads + unit.head * group + i % group) * dim;
            const float inverse = 1.f / scratch.total[i];
            for (int d = 0; d < dim; d += LANES) store(to + d, load(&scratch.sums[i * dim + d]) * inverse);
        }
    }

    void visit(int64_t base, int rows, int group, int64_t first, Scratch &scratch) const {
        const int dim = int(shape.head_dim);
        const int64_t behind = (base - first) * group; // rows before this one see nothing of the tile
        const int begin = behind > 0 ? int(behind) / 4 * 4 : 0;
        const float *keys = scratch.keys.data(), *values = scratch.values.data();
        float *queries = scratch.queries.data(), *scores = scratch.scores.data(), *sums = scratch.sums.data();
        for (int i = begin; i < rows; i += 4)
            by_rows(rows - i, [&](auto count) { multiply_keys<count>(queries + i * dim, keys, scores + i * TILE, dim); });
        for (int i = begin; i < rows; i++) {
            const int64_t at = first + i / group; // position of this query
            const int64_t from = window && at + 1 > window ? at + 1 - window : 0;
            soften(scores + i * TILE, base, from, at + 1, softcap, sums + i * dim, dim, scratch.top[i], scratch.total[i]);
        }
        for (int i = begin; i < rows; i += 4)
            by_rows(rows - i, [&](auto count) { add_all_values<count>(scores + i * TILE, values, sums + i * dim, dim); });
    }
};

// Which implementation serves an element type.
template <typename T> struct Kernel {
    typedef Attention<T> type;
    typedef Scratch scratch;
};

template <typename T> void attend_unit(const Attention<T> &attention, const Unit &unit) {
    static thread_local typename Kernel<T>::scratch scratch;
    typename Kernel<T>::type(attention).run(unit, scratch);
}

template <typename T> void attend(const Attention<T> &attention, const Unit *units, int64_t num_units, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && num_units > 1)
    for (int64_t i = 0; i < num_units; i++) attend_unit(attention, units[i]);
}

} // namespace diptych
