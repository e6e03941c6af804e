// Element-wise operations: norms, rotary embedding with the cache write, gated activations.
#pragma once

#include "attention.h"

#include <cmath>

namespace diptych {

// Epilogue of a product; the last three are gates. kernels/cpu/structs.py has the same numbers.
enum class Epilogue : int { PLAIN = 0, SILU = 1, GELU = 2, CLAMPED = 3 };

// gate * sigmoid(gate) or gelu_tanh(gate), times up. CLAMPED is the gate of gpt-oss: both clamped at 7, then gate *
// sigmoid(1.702 gate) * (up + 1).
inline f32s gate_lanes(f32s x, f32s up, Epilogue kind) {
    f32s y = x;
    // 0.5 * (1 + tanh(z)) = 1 / (1 + e^-2z)
    if (kind == Epilogue::GELU) y = 1.5957691216057308f * (x + 0.044715f * (x * x * x));
    if (kind == Epilogue::CLAMPED) {
        const f32s limit = splat(7.f);
        x = x > limit ? limit : x;
        up = up > limit ? limit : up;
        up = (up < -limit ? -limit : up) + 1.f;
        y = 1.702f * x;
    }
    return x / (1.f + exponential(-y)) * up;
}

template <typename T> float inverse_norm(const T *x, int64_t width, float eps) {
    f32s squares = {};
    for (int64_t i = 0; i < width; i += LANES) {
        const f32s v = load(x + i);
        squares = v * v + squares;
    }
    return 1.f / std::sqrt(sum(squares) / float(width) + eps);
}

template <typename T>
void normalise(const T *x, const T *delta, T *total, const float *weight, T *out, int64_t rows, int64_t width,
               float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width > 65536)
    for (int64_t row = 0; row < rows; row++) {
        const T *from = x + row * width;
        if (delta) {
            for (int64_t i = 0; i < width; i += LANES)
                store(total + row * width + i, load(from + i) + load(delta + row * width + i));
            from = total + row * width;
        }
        const float scale = inverse_norm(from, width, eps);
        for (int64_t i = 0; i < width; i += LANES)
            store(out + row * width + i, load(from + i) * scale * load(weight + i));
    }
}

// Divisors of a layer's keys and values in an e4m3 cache, applied before rounding. Latents use `key`.
struct Divisors {
    float key = 1.f, value = 1.f;
};

// Divides numbers in place by the scale of an e4m3 cache.
template <typename C> void divide(float *x, float divisor, int64_t dim) {
    if constexpr (std::is_same_v<C, e4m3>)
        for (int64_t i = 0; i < dim; i += LANES) store(x + i, load(x + i) / divisor);
}

// Multiplies a head by `scale` and an optional weight, then rotates element i with element i + dim / 2, in float32.
// Divides by the scale of an e4m3 cache.
template <typename T, typename C>
void rotate_head(const T *x, C *out, float *scale_out, const float *weight, float scale, const float *cosine,
                 const float *sine, int64_t dim, float divisor = 1.f) {
    const int64_t half = dim / 2;
    float lane[1024], rotated[1024];
    for (int64_t i = 0; i < dim; i += LANES)
        store(lane + i, weight ? load(x + i) * scale * load(weight + i) : load(x + i));
    if (half % LANES == 0) {
        for (int64_t i = 0; i < half; i += LANES) {
            const f32s a = load(lane + i), b = load(lane + i + half), c = load(cosine + i), s = load(sine + i);
            store(rotated + i, a * c - b * s);
            store(rotated + i + half, b * c + a * s);
        }
    } else {
        for (int64_t i = 0; i < half; i++) {
            const float a = lane[i], b = lane[i + half], c = cosine[i], s = sine[i];
            rotated[i] = a * c - b * s;
            rotated[i + half] = b * c + a * s;
        }
    }
    divide<C>(rotated, divisor, dim);
    put_row(out, scale_out, rotated, dim);
}

// Norm of heads: of each head with one weight, or of all heads together (`wide`) with a weight of full width.
template <typename T> struct HeadNorm {
    const T *x;
    const float *weight;
    int64_t dim;
    float eps, whole; // the scale of all heads
    bool wide;

    HeadNorm(const T *x, const float *weight, int64_t heads, int64_t dim, float eps, bool wide)
        : x(x), weight(weight), dim(dim), eps(eps), whole(1.f), wide(wide && weight) {
        if (this->wide) whole = inverse_norm(x, heads * dim, eps);
    }

    const float *weight_of(int64_t head) const { return wide ? weight + head * dim : weight; }
    float scale_of(int64_t head) const { return weight && !wide ? inverse_norm(x + head * dim, dim, eps) : whole; }
};

// Processes one token: writes rotated q to `q`, k and v to their cache slot.
template <typename T, typename C>
void rotate_token(const T *qkv, T *q, C *kv, const Shape &s, int64_t layer, int64_t at, const float *cosine,
                  const float *sine, const float *q_norm, const float *k_norm, float eps, bool wide,
                  Divisors divisors) {
    const int64_t dim = s.head_dim, block = at / s.block_size, slot = at % s.block_size;
    const HeadNorm<T> queries(qkv, q_norm, s.num_heads, dim, eps, wide);
    const HeadNorm<T> keys(qkv + s.num_heads * dim, k_norm, s.num_kv_heads, dim, eps, wide);
    for (int64_t h = 0; h < s.num_heads; h++)
        rotate_head(qkv + h * dim, q + h * dim, nullptr, queries.weight_of(h), queries.scale_of(h), cosine, sine, dim);
    for (int64_t h = 0; h < s.num_kv_heads; h++) {
        C *region = kv + s.region<C>((block * s.num_layers + layer) * s.num_kv_heads + h);
        C *to = region + slot * 2 * dim;
        float *scale = s.scales(region) + slot;
        rotate_head(keys.x + h * dim, to, scale, keys.weight_of(h), keys.scale_of(h), cosine, sine, dim, divisors.key);
        const T *value = qkv + (s.num_heads + s.num_kv_heads + h) * dim;
        if constexpr (std::is_same_v<T, C>) {
            std::memcpy(to + dim, value, dim * sizeof(T));
        } else {
            float wide[1024];
            put_row(wide, nullptr, value, dim);
            divide<C>(wide, divisors.value, dim);
            put_row(to + dim, scale + s.block_size, wide, dim);
        }
    }
}

template <typename T, typename C>
void rotate_and_write(const T *qkv, T *q, C *kv, const Shape &s, int64_t layer, const int64_t *slots,
                      const float *cosine, const float *sine, const float *q_norm, const float *k_norm, float eps,
                      bool wide, Divisors divisors, int64_t tokens, int threads) {
    const int64_t half = s.head_dim / 2, stride = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim;
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens * stride > 32768)
    for (int64_t t = 0; t < tokens; t++)
        rotate_token(qkv + t * stride, q + t * s.num_heads * s.head_dim, kv, s, layer, slots[t], cosine + t * half,
                     sine + t * half, q_norm, k_norm, eps, wide, divisors);
}

// Processes one token of a model with latents. Normalises `latent_dim` numbers, rotates the others, and writes them to
// their cache slot. Builds queries [num_heads][head_dim] from `absorbed` [num_heads][latent_dim] and the rotated ends
// of q [num_heads][query_dim].
template <typename T, typename C>
void write_latent(const T *q, const T *absorbed, const T *latent, T *queries, C *kv, const Shape &s, int64_t query_dim,
                  int64_t layer, int64_t at, const float *cosine, const float *sine, const float *norm, float eps,
                  float divisor) {
    const int64_t rank = s.latent_dim, dim = s.head_dim, block = at / s.block_size, slot = at % s.block_size;
    for (int64_t h = 0; h < s.num_heads; h++) {
        std::memcpy(queries + h * dim, absorbed + h * rank, rank * sizeof(T));
        rotate_head(q + (h + 1) * query_dim - (dim - rank), queries + h * dim + rank, nullptr, nullptr, 0.f, cosine,
                    sine, dim - rank);
    }
    if constexpr (SCALE<C> == 0) { // latents are not cached in int8
        C *to = kv + s.region<C>((block * s.num_layers + layer) * s.num_kv_heads) + slot * s.slot();
        const float scale = inverse_norm(latent, rank, eps);
        for (int64_t i = 0; i < rank; i += LANES) store(to + i, load(latent + i) * scale * load(norm + i) / divisor);
        rotate_head(latent + rank, to + rank, nullptr, nullptr, 0.f, cosine, sine, dim - rank, divisor);
    }
}

template <typename T, typename C>
void write_latents(const T *q, const T *absorbed, const T *latents, T *queries, C *kv, const Shape &s,
                   int64_t query_dim, int64_t layer, const int64_t *slots, const float *cosine, const float *sine,
                   const float *norm, float eps, float divisor, int64_t tokens, int threads) {
    const int64_t half = (s.head_dim - s.latent_dim) / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens * s.num_heads * s.head_dim > 32768)
    for (int64_t t = 0; t < tokens; t++)
        write_latent(q + t * s.num_heads * query_dim, absorbed + t * s.num_heads * s.latent_dim,
                     latents + t * s.head_dim, queries + t * s.num_heads * s.head_dim, kv, s, query_dim, layer,
                     slots[t], cosine + t * half, sine + t * half, norm, eps, divisor);
}

template <typename T> void gate(const T *gate_up, T *out, int64_t rows, int64_t width, Epilogue kind, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width > 32768)
    for (int64_t row = 0; row < rows; row++) {
        const T *g = gate_up + row * 2 * width, *u = g + width;
        for (int64_t i = 0; i < width; i += LANES)
            store(out + row * width + i, gate_lanes(load(g + i), load(u + i), kind));
    }
}

} // namespace diptych
