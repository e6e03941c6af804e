// Attention that reads the blocks of the cache in place.
#pragma once

#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

namespace diptych {

constexpr int TILE = 64;               // keys per tile
constexpr int VECTORS = TILE / LANES;  // accumulators per row of a score tile
constexpr int GROUP = 4;               // query rows that go through a tile together: scores, weights, sums
constexpr int ABREAST = REGISTERS / 8; // vectors of each of them that are multiplied together
constexpr float SLACK = 8.f;           // by which scores may exceed a row's maximum: weights stay exact up to 2^8
constexpr float LOG2_E = 1.44269504088896341f;

struct Shape {
    int64_t num_layers, num_kv_heads, block_size, head_dim, num_heads;
    int64_t latent_dim; // leading elements of a key that are also its value; 0: the value follows the key
    int64_t num_groups; // of query heads that share a unit: one for each KV head, or more

    // Numbers of one slot, of its value, and where that begins.
    int64_t slot() const { return latent_dim ? head_dim : 2 * head_dim; }
    int64_t value_dim() const { return latent_dim ? latent_dim : head_dim; }
    int64_t value_at() const { return latent_dim ? 0 : head_dim; }

    // Where the n-th keys and values of one block, layer and head begin in a cache of type C.
    template <typename C> int64_t region(int64_t n) const { return n * block_size * (slot() + 2 * SCALE<C>); }

    // The scales of such a region, if it has any.
    template <typename C> auto *scales(C *region) const {
        typedef std::conditional_t<std::is_const_v<C>, const float, float> Float;
        return reinterpret_cast<Float *>(region + block_size * slot());
    }
};

// One query tile of one sequence, for one group of heads that share a KV head.
struct Unit {
    int32_t span, group, first, count;
};

// One sequence of a step: its first query row, how many, the position of the first, and where its block table begins.
struct Span {
    int64_t row, count, start, table;
};

// Python passes them as arrays: kernels/cpu/backend.py.
static_assert(sizeof(Shape) == 7 * sizeof(int64_t) && sizeof(Span) == 4 * sizeof(int64_t));
static_assert(sizeof(Unit) == 4 * sizeof(int32_t));

alignas(64) const float NOTHING[2048] = {};

// Products with the keys and values of a tile.
struct Scales {
    alignas(64) float keys[TILE] = {}, values[TILE] = {};
};

// Addresses of up to 64 keys. A value follows its key or is part of it. Keys that the unit does not see are zeros, so
// that unused slots are never read. C is the element type of the cache; int8 elements are multiplied by `scales`.
template <typename C> struct Tile {
    const C *rows[TILE];
    Scales scales;
    int64_t base;
    int count; // a multiple of LANES; fewer than TILE at the end of a sequence
};

// Running sums of a unit's rows.
struct Sums {
    std::vector<float> sums, top, total; // [rows][value_dim], [rows], [rows][LANES]

    void begin(int rows, int dim) {
        sums.assign(rows * dim, 0.f);
        top.assign(rows, NEG_INF);
        total.assign(rows * LANES, 0.f);
    }
};

// Online softmax (Milakov and Gimelshein 2018) of one row and tile: turns scores, times log2(e), of keys [from, to)
// into weights relative to the row's maximum `top` so far. Where the maximum grows by more than SLACK it rescales
// what the row has summed.
template <typename W>
void online_softmax(const float *scores, W *weights, const Scales *scales, int64_t base, int64_t from, int64_t to,
                    float softcap, float *sums, int dim, float &top, float *total) {
    f32s s[VECTORS];
    for (int v = 0; v < VECTORS; v++) s[v] = load(scores + v * LANES);
    if (scales)
        for (int v = 0; v < VECTORS; v++) s[v] *= load(scales->keys + v * LANES);
    if (softcap > 0.f)
        for (int v = 0; v < VECTORS; v++) // tanh(x) = 1 - 2 / (e^2x + 1)
            s[v] = softcap * LOG2_E * (1.f - 2.f / (exponential(s[v] * (2.f / (softcap * LOG2_E))) + 1.f));
    if (base < from || base + TILE > to) {
        const int32_t first = from > base ? int32_t(from - base) : 0;
        const int32_t last = to < base + TILE ? int32_t(to - base) : TILE;
        for (int v = 0; v < VECTORS; v++) {
            const i32s at = iota() + v * LANES;
            s[v] = ((at >= first) & (at < last)) ? s[v] : splat(NEG_INF);
        }
    }
    f32s best = s[0];
    for (int v = 1; v < VECTORS; v++) best = s[v] > best ? s[v] : best;
    if (any_above(best, top + SLACK)) {
        const float next = largest(best);
        const float shrink = top == NEG_INF ? 0.f : power_of_two(splat(top - next))[0];
        for (int d = 0; d < dim; d += LANES) store(sums + d, load(sums + d) * shrink);
        store(total, load(total) * shrink);
        top = next;
    }
    if (top == NEG_INF) { // the row has seen no key yet
        for (int v = 0; v < VECTORS; v++) store(weights + v * LANES, f32s{});
        return;
    }
    f32s added = load(total);
    for (int v = 0; v < VECTORS; v++) {
        const f32s weight = power_of_two<std::is_same_v<W, bf16>>(s[v] - top);
        added += weight;
        store(weights + v * LANES, scales ? weight * load(scales->values + v * LANES) : weight);
    }
    store(total, added);
}

// Calls back with the number of rows, at most GROUP, as a constant.
template <typename F> void by_rows(int rows, F &&call) {
    switch (rows) {
    case 1: return call(std::integral_constant<int, 1>{});
    case 2: return call(std::integral_constant<int, 2>{});
    case 3: return call(std::integral_constant<int, 3>{});
    default: return call(std::integral_constant<int, 4>{});
    }
}

template <typename T, typename C> class RowStream;

// Attention of one step and layer, of queries of type T over a cache of type C. `Work` multiplies: see PlainWork.
template <typename T, typename C> struct Attention {
    const T *q;
    int64_t q_stride; // elements from one token to the next
    T *out;
    const C *kv;
    const Span *spans;
    const int32_t *tables;
    Shape shape;
    int64_t layer, window;
    float scale, softcap;
    const float *sinks; // one more logit of each head, without a value, or null
    float value_scale;  // multiplies the values

    // The position of a unit's first query, and the keys [begin, end) that the unit sees.
    int64_t first(const Unit &unit) const { return spans[unit.span].start + unit.first; }
    int64_t end(const Unit &unit) const { return first(unit) + unit.count; }
    int64_t begin(const Unit &unit) const { return first_seen(first(unit)); }

    // The first key that the query at a position sees.
    int64_t first_seen(int64_t position) const { return window && position + 1 > window ? position + 1 - window : 0; }

    // The key at a position of the unit, its scale, and how many keys lie side by side from there on.
    const C *row(const Unit &unit, int64_t at, const float *&scale, int64_t &count) const {
        const uint32_t size = uint32_t(shape.block_size), block = uint32_t(at) / size;
        const uint32_t slot = uint32_t(at) - block * size;
        const int32_t id = tables[spans[unit.span].table + block];
        const int64_t head = unit.group * shape.num_kv_heads / shape.num_groups;
        const int64_t place = (id * shape.num_layers + layer) * shape.num_kv_heads + head;
        count = size - slot;
        const C *region = kv + shape.region<C>(place);
        scale = shape.scales(region) + slot;
        return region + slot * shape.slot();
    }

    template <typename Work> void run(const Unit &unit, Work &work, RowStream<T, C> &stream) const {
        const Span &span = spans[unit.span];
        const int dim = int(shape.head_dim), group = int(shape.num_heads / shape.num_groups);
        const int rows = unit.count * group, value_dim = int(shape.value_dim());
        work.begin(rows, shape);
        Sums &so_far = work.so_far;
        so_far.begin(rows, value_dim);
        for (int i = 0; i < rows; i++) {
            const int64_t token = span.row + unit.first + i / group, head = unit.group * group + i % group;
            work.take(i, q + token * q_stride + head * dim, dim, scale * LOG2_E);
        }
        Tile<C> tile;
        for (int64_t base = begin(unit) / TILE * TILE; base < end(unit); base += TILE) {
            stream.take(base, tile);
            const int64_t behind = (base - first(unit)) * group; // rows before this one see nothing of the tile
            work.read(tile, rows, dim, stream);
            for (int row = behind > 0 ? int(behind) / GROUP * GROUP : 0; row < rows; row += GROUP) {
                work.score(tile, row, rows, dim, scale * LOG2_E, stream);
                for (int i = row; i < std::min(rows, row + GROUP); i++) {
                    const int64_t at = first(unit) + i / group; // position of this query
                    online_softmax(&work.scores[(i - row) * TILE], &work.weights[(i - row) * TILE],
                                   Work::SCALES_LATER ? &tile.scales : nullptr, base, first_seen(at), at + 1, softcap,
                                   &so_far.sums[i * value_dim], value_dim, so_far.top[i], &so_far.total[i * LANES]);
                }
                work.add(tile, row, rows, stream);
            }
        }
        for (int i = 0; i < rows; i++) {
            const int64_t token = span.row + unit.first + i / group, head = unit.group * group + i % group;
            T *to = out + (token * shape.num_heads + head) * value_dim;
            const float sink = sinks ? std::exp2(sinks[head] * LOG2_E - so_far.top[i]) : 0.f;
            const float inverse = value_scale / (sum(load(&so_far.total[i * LANES])) + sink);
            for (int d = 0; d < value_dim; d += LANES)
                store(to + d, load(&so_far.sums[i * value_dim + d]) * inverse);
        }
    }
};

// The rows that a thread reads, unit after unit. It fetches those of the next tile at the pace at which it reads this
// one, since a core forgets requests beyond the few that it can wait for.
template <typename T, typename C> class RowStream {
public:
    void clear() { current = nullptr; }

    // `unit` is read now, and `following`, unless null, after it.
    void begin(const Attention<T, C> &of, const Unit &unit, const Unit *following) {
        attention = &of, next = following;
        lines = int(of.shape.slot() * int64_t(sizeof(C)) / LINE);
        first = of.begin(unit), end = of.end(unit);
        if (current == &unit) return; // begun ahead
        current = &unit, position = first, filled = fetched = taken = 0;
    }

    // The unit's tile at position `base`; each of its tiles once, in order.
    void take(int64_t base, Tile<C> &tile) {
        const int from = base < first ? int(first - base) : 0, to = int(std::min<int64_t>(TILE, end - base));
        while (filled - taken < 2 * TILE && fill()) {}
        if (to - from < TILE) std::fill(tile.rows, tile.rows + TILE, reinterpret_cast<const C *>(NOTHING));
        std::memcpy(tile.rows + from, rows + taken, (to - from) * sizeof *rows);
        if constexpr (SCALE<C> != 0) {
            if (to - from < TILE) tile.scales = Scales();
            for (int i = from; i < to; i++) {
                const float *scale = scales[taken + i - from];
                tile.scales.keys[i] = scale[0], tile.scales.values[i] = scale[attention->shape.block_size];
            }
        }
        taken += to - from;
        if (fetched < taken) fetched = taken;
        tile.base = base, tile.count = (to + LANES - 1) / LANES * LANES;
    }

    // Fetches some of the rows that come next.
    void fetch(int count) {
        for (; count > 0 && fetched != filled; count--) {
            const char *row = reinterpret_cast<const char *>(rows[fetched++]);
            for (int i = 0; i < lines; i++) __builtin_prefetch(row + i * LINE, 0, 2);
            if constexpr (SCALE<C> != 0) {
                const float *scale = scales[fetched - 1];
                if (reinterpret_cast<uintptr_t>(scale) % LINE) continue; // an earlier one's line
                __builtin_prefetch(scale, 0, 2), __builtin_prefetch(scale + attention->shape.block_size, 0, 2);
            }
        }
    }

private:
    static constexpr int SIZE = 16 * TILE;
    const C *rows[SIZE];
    const float *scales[SCALE<C> ? SIZE : 1];
    int filled = 0, fetched = 0, taken = 0; // rows that are listed, fetched, read
    int lines = 0;                          // of a row
    const Attention<T, C> *attention = nullptr;
    const Unit *current = nullptr, *next = nullptr; // the unit that `position` is in, and the one after it
    int64_t position = 0, first = 0, end = 0;

    // Lists up to 64 rows more; false at the end of the units. Kept out of the loops that fetch: they need the
    // registers.
    __attribute__((noinline)) bool fill() {
        if (position >= attention->end(*current)) {
            if (!next) return false;
            current = next, next = nullptr, position = attention->begin(*current);
        }
        if (filled + TILE > SIZE) { // at most two tiles are left
            std::memmove(rows, rows + taken, (filled - taken) * sizeof *rows);
            if constexpr (SCALE<C> != 0) std::memmove(scales, scales + taken, (filled - taken) * sizeof *scales);
            filled -= taken, fetched -= taken, taken = 0;
        }
        int64_t count;
        const float *scale;
        const C *row = attention->row(*current, position, scale, count);
        const int more = int(std::min(std::min<int64_t>(count, TILE), attention->end(*current) - position));
        const int64_t stride = attention->shape.slot();
        for (int i = 0; i < more; i++) rows[filled + i] = row + i * stride;
        if constexpr (SCALE<C> != 0)
            for (int i = 0; i < more; i++) scales[filled + i] = scale + i;
        filled += more, position += more;
        return true;
    }
};

// scores[R][ABREAST * LANES of TILE] = queries[R][dim] . keys[dim][TILE]
template <int R> void multiply_keys(const float *queries, const float *keys, float *scores, int dim) {
    f32s acc[R][ABREAST] = {};
    for (int d = 0; d < dim; d++) {
        f32s key[ABREAST];
#pragma GCC unroll 4
        for (int v = 0; v < ABREAST; v++) hold(key[v] = load(keys + d * TILE + v * LANES));
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const f32s q = splat(queries[r * dim + d]);
#pragma GCC unroll 4
            for (int v = 0; v < ABREAST; v++) acc[r][v] = q * key[v] + acc[r][v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < ABREAST; v++) store(scores + r * TILE + v * LANES, acc[r][v]);
}

// sums[R][V * LANES of dim] += weights[R][TILE] . values[TILE][V * LANES of dim]
template <int R, int V> void add_values(const float *weights, const float *values, float *sums, int dim) {
    f32s acc[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = load(sums + r * dim + v * LANES);
    for (int i = 0; i < TILE; i++) {
        f32s value[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) hold(value[v] = load(values + i * dim + v * LANES));
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const f32s p = splat(weights[r * TILE + i]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[r][v] = p * value[v] + acc[r][v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(sums + r * dim + v * LANES, acc[r][v]);
}

template <int R> void add_all_values(const float *weights, const float *values, float *sums, int dim) {
    int d = 0;
    for (; d + ABREAST * LANES <= dim; d += ABREAST * LANES) add_values<R, ABREAST>(weights, values + d, sums + d, dim);
    for (; d < dim; d += LANES) add_values<R, 1>(weights, values + d, sums + d, dim);
}

// In float32, on any machine: tiles are converted first, keys [dim][TILE], values [TILE][dim].
template <typename T, typename C> struct PlainWork {
    alignas(64) float scores[GROUP * TILE];
    float *const weights = scores;              // in place
    static constexpr bool SCALES_LATER = false; // tiles are multiplied by their scales when they are converted
    std::vector<float> queries, keys, values;
    Sums so_far;
    int value_dim, value_at; // numbers of a value, and where it begins in its slot

    void begin(int rows, const Shape &shape) {
        value_dim = int(shape.value_dim()), value_at = int(shape.value_at());
        queries.resize(rows * shape.head_dim);
        keys.resize(TILE * shape.head_dim);
        values.resize(TILE * value_dim);
    }

    void take(int row, const T *query, int dim, float scale) {
        for (int d = 0; d < dim; d += LANES) store(&queries[row * dim + d], load(query + d) * scale);
    }

    void score(const Tile<C> &, int row, int rows, int dim, float, RowStream<T, C> &) {
        by_rows(rows - row, [&](auto r) {
            for (int at = 0; at < TILE; at += ABREAST * LANES)
                multiply_keys<r>(&queries[row * dim], keys.data() + at, scores + at, dim);
        });
    }

    void add(const Tile<C> &, int row, int rows, RowStream<T, C> &) {
        float *sums = &so_far.sums[row * value_dim];
        by_rows(rows - row, [&](auto r) { add_all_values<r>(weights, values.data(), sums, value_dim); });
    }

    void read(const Tile<C> &tile, int, int dim, RowStream<T, C> &stream) {
        for (int i = 0; i < TILE; i += LANES)
            for (int d = 0; d < dim; d += LANES) {
                f32s part[LANES];
                stream.fetch(std::max(1, LANES * LANES / dim));
#pragma GCC unroll 16
                for (int j = 0; j < LANES; j++) part[j] = wide(tile.rows[i + j] + d, tile.scales.keys[i + j]);
                transpose(part);
#pragma GCC unroll 16
                for (int j = 0; j < LANES; j++) store(&keys[(d + j) * TILE + i], part[j]);
            }
        for (int i = 0; i < TILE; i++)
            for (int d = 0; d < value_dim; d += LANES)
                store(&values[i * value_dim + d], wide(tile.rows[i] + value_at + d, tile.scales.values[i]));
    }

    static f32s wide(const C *numbers, float scale) { return SCALE<C> ? load(numbers) * scale : load(numbers); }
};

// Which implementation serves queries of type T over a cache of type C.
template <typename T, typename C> struct Chosen {
    typedef PlainWork<T, C> Work;
};

template <typename T, typename C>
void attend_unit(const Attention<T, C> &attention, const Unit &unit, const Unit *following, RowStream<T, C> &stream) {
    static thread_local typename Chosen<T, C>::Work work;
    stream.begin(attention, unit, following);
    attention.run(unit, work, stream);
}

template <typename T, typename C>
void attend(const Attention<T, C> &attention, const Unit *units, int64_t num_units, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && num_units > 1)
    for (int64_t i = 0; i < num_units; i++) {
        RowStream<T, C> stream;
        attend_unit(attention, units[i], nullptr, stream);
    }
}

} // namespace diptych
