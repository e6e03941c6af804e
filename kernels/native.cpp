// The CPU's kernels: attention that reads blocks in place, and the element-wise steps between the matrix products.
//
// Every output row is computed by the same sequence of floating-point operations whatever else is in the batch, however a
// prompt is cut into chunks and however many threads there are: keys are visited in tiles of 64 aligned to absolute positions.
// Element types: 0 float32, 1 bfloat16; arithmetic is float32. Head sizes and widths are multiples of 16.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr int TILE = 64;              // keys per tile
constexpr int VECTORS = TILE / LANES; // accumulators per row of a score tile
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

inline f32x16 splat(float x) { return f32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

inline f32x16 load(const float *p) {
    f32x16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline f32x16 load(const bf16 *p) {
#if defined(__AVX512F__)
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#else
    u16x16 h;
    std::memcpy(&h, p, sizeof h);
    const u32x16 w = __builtin_convertvector(h, u32x16) << 16;
    f32x16 v;
    std::memcpy(&v, &w, sizeof v);
    return v;
#endif
}

inline void store(float *p, f32x16 v) { std::memcpy(p, &v, sizeof v); }

// Keeps a value that several operations use in a register, where compilers would rather load it again for each.
inline void hold(f32x16 &v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#else
    (void)v;
#endif
}

inline void store(bf16 *p, f32x16 v) { // to nearest, ties to even; NaN stays NaN
    u32x16 w;
    std::memcpy(&w, &v, sizeof v);
    const u32x16 rounded = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
    const u32x16 quiet = (w >> 16) | 0x40u;
    const u32x16 chosen = (u32x16)(v != v) ? quiet : rounded;
    const u16x16 h = __builtin_convertvector(chosen, u16x16);
    std::memcpy(p, &h, sizeof h);
}

inline float sum(f32x16 v) {
    float total = 0.f;
    float lanes[LANES];
    std::memcpy(lanes, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    total = lanes[0];
    return total;
}

inline float largest(f32x16 v) {
    float lanes[LANES];
    std::memcpy(lanes, &v, sizeof v);
    float best = lanes[0];
    for (int i = 1; i < LANES; i++) best = lanes[i] > best ? lanes[i] : best;
    return best;
}

// e^x to about one unit in the last place (Cephes' expf), for x clamped to [-87, 88].
inline f32x16 exponential(f32x16 x) {
    x = x < -87.f ? splat(-87.f) : x;
    x = x > 88.f ? splat(88.f) : x;
    const f32x16 magic = splat(12582912.f); // 1.5 * 2^23: adding and subtracting it rounds to an integer
    const f32x16 n = (x * 1.44269504088896341f + magic) - magic;
    f32x16 r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    const i32x16 power = (__builtin_convertvector(n, i32x16) + 127) << 23;
    f32x16 scale;
    std::memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

// ---------------------------------------------------------------------------------------------------------- attention

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

#if defined(__AVX512F__)
inline void transpose16(const f32x16 *in, float *out, int stride) {
    __m512 t[16], r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = (__m512)in[i];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
        const __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 2]);
        const __m512d c = _mm512_castps_pd(t[i + 1]), d = _mm512_castps_pd(t[i + 3]);
        r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
        r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
        r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_ps(out + i * stride, _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88));
        _mm512_storeu_ps(out + (i + 4) * stride, _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88));
        _mm512_storeu_ps(out + (i + 8) * stride, _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd));
        _mm512_storeu_ps(out + (i + 12) * stride, _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd));
    }
}
#else
inline void transpose16(const f32x16 *in, float *out, int stride) {
    for (int d = 0; d < LANES; d++)
        for (int i = 0; i < LANES; i++) out[d * stride + i] = in[i][d];
}
#endif

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
void soften(float *scores, int64_t base, int64_t from, int64_t to, float softcap, float *sums, int dim, float &top,
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

template <typename T> void attend(const Attention<T> &attention, const Unit *units, int64_t num_units, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1 && num_units > 1)
    {
        thread_local Scratch scratch;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_units; i++) attention.run(units[i], scratch);
    }
}

// ------------------------------------------------------------------------------------------------------- element-wise

template <typename T> float inverse_norm(const T *x, int64_t width, float eps) {
    f32x16 squares = {};
    for (int64_t i = 0; i < width; i += LANES) {
        const f32x16 v = load(x + i);
        squares = v * v + squares;
    }
    return 1.f / std::sqrt(sum(squares) / float(width) + eps);
}

template <typename T>
void normalise(const T *x, const T *delta, T *total, const float *weight, T *out, int64_t rows, int64_t width, float eps,
               int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width > 65536)
    for (int64_t row = 0; row < rows; row++) {
        const T *from = x + row * width;
        if (delta) {
            for (int64_t i = 0; i < width; i += LANES)
                store(total + row * width + i, load(from + i) + load(delta + row * width + i));
            from = total + row * width;
        }
        const float scale = inverse_norm(from, width, eps);
        for (int64_t i = 0; i < width; i += LANES) store(out + row * width + i, load(from + i) * scale * load(weight + i));
    }
}

// One head: optional norm, then rotation of element i with element i + dim / 2.
template <typename T>
void turn(const T *x, T *out, const float *weight, float eps, const float *cosine, const float *sine, int64_t dim) {
    const int64_t half = dim / 2;
    const float scale = weight ? inverse_norm(x, dim, eps) : 1.f;
    float lane[1024];
    for (int64_t i = 0; i < dim; i += LANES) store(lane + i, weight ? load(x + i) * scale * load(weight + i) : load(x + i));
    float turned[1024];
    for (int64_t i = 0; i < half; i++) {
        const float a = lane[i], b = lane[i + half], c = cosine[i], s = sine[i];
        turned[i] = a * c - b * s;
        turned[i + half] = b * c + a * s;
    }
    for (int64_t i = 0; i < dim; i += LANES) store(out + i, load(turned + i));
}

template <typename T>
void rotate_and_write(const T *qkv, T *q, T *kv, const Shape &s, int64_t layer, const int64_t *slots, const float *cosine,
                      const float *sine, const float *q_norm, const float *k_norm, float eps, int64_t tokens, int threads) {
    const int64_t dim = s.head_dim, stride = (s.num_heads + 2 * s.num_kv_heads) * dim;
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens * stride > 32768)
    for (int64_t t = 0; t < tokens; t++) {
        const T *from = qkv + t * stride;
        const float *c = cosine + t * dim / 2, *w = sine + t * dim / 2;
        for (int64_t h = 0; h < s.num_heads; h++)
            turn(from + h * dim, q + (t * s.num_heads + h) * dim, q_norm, eps, c, w, dim);
        const int64_t block = slots[t] / s.block_size, slot = slots[t] % s.block_size;
        for (int64_t h = 0; h < s.num_kv_heads; h++) {
            T *to = kv + (((block * s.num_layers + layer) * s.num_kv_heads + h) * s.block_size + slot) * 2 * dim;
            turn(from + (s.num_heads + h) * dim, to, k_norm, eps, c, w, dim);
            std::memcpy(to + dim, from + (s.num_heads + s.num_kv_heads + h) * dim, dim * sizeof(T));
        }
    }
}

template <typename T> void gate(const T *gate_up, T *out, int64_t rows, int64_t width, bool gelu, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width > 32768)
    for (int64_t row = 0; row < rows; row++) {
        const T *g = gate_up + row * 2 * width, *u = g + width;
        for (int64_t i = 0; i < width; i += LANES) {
            const f32x16 x = load(g + i);
            // 0.5 * (1 + tanh(y)) = 1 / (1 + e^-2y)
            const f32x16 y = gelu ? 1.5957691216057308f * (x + 0.044715f * (x * x * x)) : x;
            store(out + row * width + i, x / (1.f + exponential(-y)) * load(u + i));
        }
    }
}

} // namespace

extern "C" {

void diptych_attend(int type, const void *q, int64_t q_stride, void *out, const void *kv, const int64_t *spans,
                    const int32_t *tables, const int32_t *units, int64_t num_units, const int64_t *shape, int64_t layer,
                    int64_t window, float scale, float softcap, int threads) {
    Shape s;
    std::memcpy(&s, shape, sizeof s);
    const Span *span = reinterpret_cast<const Span *>(spans);
    const Unit *unit = reinterpret_cast<const Unit *>(units);
    if (type == 0)
        attend(Attention<float>{(const float *)q, q_stride, (float *)out, (const float *)kv, span, tables, s, layer, window,
                                scale, softcap}, unit, num_units, threads);
    else
        attend(Attention<bf16>{(const bf16 *)q, q_stride, (bf16 *)out, (const bf16 *)kv, span, tables, s, layer, window,
                               scale, softcap}, unit, num_units, threads);
}

void diptych_rms_norm(int type, const void *x, const void *delta, void *total, const float *weight, void *out, int64_t rows,
                      int64_t width, float eps, int threads) {
    if (type == 0)
        normalise((const float *)x, (const float *)delta, (float *)total, weight, (float *)out, rows, width, eps, threads);
    else
        normalise((const bf16 *)x, (const bf16 *)delta, (bf16 *)total, weight, (bf16 *)out, rows, width, eps, threads);
}

void diptych_rotate_and_write(int type, const void *qkv, void *q, void *kv, const int64_t *shape, int64_t layer,
                              const int64_t *slots, const float *cosine, const float *sine, const float *q_norm,
                              const float *k_norm, float eps, int64_t tokens, int threads) {
    Shape s;
    std::memcpy(&s, shape, sizeof s);
    if (type == 0)
        rotate_and_write((const float *)qkv, (float *)q, (float *)kv, s, layer, slots, cosine, sine, q_norm, k_norm, eps,
                         tokens, threads);
    else
        rotate_and_write((const bf16 *)qkv, (bf16 *)q, (bf16 *)kv, s, layer, slots, cosine, sine, q_norm, k_norm, eps,
                         tokens, threads);
}

void diptych_gated(int type, const void *gate_up, void *out, int64_t rows, int64_t width, int gelu, int threads) {
    if (type == 0)
        gate((const float *)gate_up, (float *)out, rows, width, gelu != 0, threads);
    else
        gate((const bf16 *)gate_up, (bf16 *)out, rows, width, gelu != 0, threads);
}

} // extern "C"
