// A model's forward pass as a list of operations, run by one team of threads: one call a step instead of hundreds.
#pragma once

#include "attention_bf16.h"
#include "elementwise.h"
#include "linear.h"

#include <atomic>
#include <chrono>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace diptych {

enum class Kind : int64_t { EMBED = 0, NORM = 1, QUANTISE = 2, LINEAR = 3, ROTATE = 4, ATTEND = 5, SELECT = 6 };

// Buffers are named by number: see Step.buffers. -1 is none. What a field means for a kind is said where it runs.
struct Op {
    int64_t kind;
    int64_t rows;            // 0: every token's row, 1: the sampled ones
    int64_t in, out, extra, extra2;
    int64_t width, layer, window, flags;
    const void *weights[3];
    double scale, eps;
};

// What differs from step to step.
struct Step {
    int64_t num_rows, num_sampled;
    const int64_t *token_ids, *positions, *slots, *sampled; // sampled may be null: all rows in order
    void *kv;
    const int64_t *shape; // Shape
    const int64_t *spans;
    const int32_t *tables, *units;
    int64_t num_units;
    char *const *buffers; // rows of each buffer, one behind the other
    int64_t *times;       // nanoseconds of each operation are added here, unless null
};

template <typename T> class Program {
public:
    Program(const Op *ops, int64_t num_ops, const Step &step, int threads) : ops(ops), num_ops(num_ops), step(step), threads(threads) {
        std::memcpy(&shape, step.shape, sizeof shape);
    }

    void run() {
        std::vector<std::atomic<int64_t>> next(num_ops); // part of each operation that is taken next
        for (auto &counter : next) counter.store(0, std::memory_order_relaxed);
#pragma omp parallel num_threads(threads) if (threads > 1)
        for (int64_t i = 0; i < num_ops; i++) {
            const auto began = std::chrono::steady_clock::now();
            const int64_t parts = num_parts(ops[i]);
            for (int64_t part; (part = next[i].fetch_add(1, std::memory_order_relaxed)) < parts;) run_part(ops[i], part, parts);
#pragma omp barrier
#pragma omp master
            if (step.times)
                step.times[i] += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - began).count();
        }
    }

private:
    const Op *ops;
    const int64_t num_ops;
    const Step &step;
    const int threads;
    Shape shape;

    template <typename U = T> U *buffer(int64_t index) const { return reinterpret_cast<U *>(step.buffers[index]); }
    int64_t rows(const Op &op) const { return op.rows ? step.num_sampled : step.num_rows; }
    static int64_t ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

    // Parts are small enough that threads end together, and large enough to be worth taking.
    int64_t num_parts(const Op &op) const {
        switch (Kind(op.kind)) {
        case Kind::LINEAR: {
            const Weights &w = *static_cast<const Weights *>(op.weights[0]);
            return ceil(rows(op), ROWS_AT_ONCE) * ceil(w.panels(), panels_at_once(w, rows(op)));
        }
        case Kind::ATTEND: return step.num_units;
        default: return ceil(rows(op), rows_at_once(op));
        }
    }

    int64_t panels_at_once(const Weights &w, int64_t num_rows) const {
        if (threads == 1) return w.panels();
        return num_rows > 16 ? 1 : std::max<int64_t>(1, std::min<int64_t>(16, w.panels() / (threads * 4)));
    }

    int64_t rows_at_once(const Op &op) const { return threads == 1 ? rows(op) + 1 : std::max<int64_t>(1, 16384 / (op.width + 1)); }

    void run_part(const Op &op, int64_t part, int64_t parts) const {
        if (Kind(op.kind) == Kind::LINEAR) return linear(op, part);
        if (Kind(op.kind) == Kind::ATTEND) return attend(op, part);
        const int64_t first = part * rows_at_once(op), last = std::min(rows(op), first + rows_at_once(op));
        switch (Kind(op.kind)) {
        case Kind::EMBED: return embed(op, first, last);
        case Kind::NORM: return norm(op, first, last);
        case Kind::QUANTISE: return quantise(op, first, last);
        case Kind::ROTATE: return rotate(op, first, last);
        default: return select(op, first, last);
        }
    }

    // out = scale * weights[0][token id]
    void embed(const Op &op, int64_t first, int64_t last) const {
        const T *table = static_cast<const T *>(op.weights[0]);
        for (int64_t row = first; row < last; row++) {
            const T *from = table + step.token_ids[row] * op.width;
            T *to = buffer(op.out) + row * op.width;
            if (op.scale == 1.0) {
                std::memcpy(to, from, op.width * sizeof(T));
                continue;
            }
            for (int64_t i = 0; i < op.width; i += LANES) store(to + i, load(from + i) * float(op.scale));
        }
    }

    // out = rms_norm(in) * weights[0]; with a delta in `extra`: extra2 = in + extra, out = rms_norm(extra2).
    void norm(const Op &op, int64_t first, int64_t last) const {
        const int64_t at = first * op.width;
        const bool sum = op.extra >= 0;
        normalise(buffer<const T>(op.in) + at, sum ? buffer<const T>(op.extra) + at : nullptr,
                  sum ? buffer(op.extra2) + at : nullptr, static_cast<const float *>(op.weights[0]), buffer(op.out) + at,
                  last - first, op.width, float(op.eps), 1);
    }

    // Codes to out, scales to extra, sums to extra2; weights[0] are those that will multiply them.
    void quantise(const Op &op, int64_t first, int64_t last) const {
        const Weights &w = *static_cast<const Weights *>(op.weights[0]);
        const int64_t groups = w.k / w.group;
        for (int64_t row = first; row < last; row++)
            quantise_row(buffer<const T>(op.in) + row * w.k, w.k, w.group, w.format == INT8, buffer<uint8_t>(op.out) + row * w.k,
                         buffer<float>(op.extra) + row * groups, buffer<float>(op.extra2) + row * groups);
    }

    // out = in times weights[0]; flags: the epilogue, + 16 for float32 out.
    void linear(const Op &op, int64_t part) const {
        const Weights &w = *static_cast<const Weights *>(op.weights[0]);
        const int64_t step_panels = panels_at_once(w, rows(op)), columns = ceil(w.panels(), step_panels);
        const int64_t first = part % columns * step_panels, last = std::min(w.panels(), first + step_panels);
        const int64_t row = part / columns * ROWS_AT_ONCE, end = std::min(rows(op), row + ROWS_AT_ONCE);
        const bool coded = w.format >= INT8;
        const Inputs x{buffer<char>(op.in), coded ? buffer<float>(op.extra) : nullptr, coded ? buffer<float>(op.extra2) : nullptr};
        const Epilogue epilogue = Epilogue(op.flags & 15);
        if (op.flags & 16)
            multiply(w, first, last, x, row, end, epilogue, buffer<float>(op.out));
        else
            multiply(w, first, last, x, row, end, epilogue, buffer(op.out));
    }

    // in: q, k, v of a token; q rotated to out, k and v into the cache. weights: cosines, sines, and a pair of norms or null.
    void rotate(const Op &op, int64_t first, int64_t last) const {
        const float *const *norms = static_cast<const float *const *>(op.weights[2]);
        const int64_t dim = shape.head_dim, half = dim / 2, stride = (shape.num_heads + 2 * shape.num_kv_heads) * dim;
        for (int64_t row = first; row < last; row++) {
            const int64_t at = step.positions[row] * half;
            rotate_token(buffer<const T>(op.in) + row * stride, buffer(op.out) + row * shape.num_heads * dim,
                         static_cast<T *>(step.kv), shape, op.layer, step.slots[row],
                         static_cast<const float *>(op.weights[0]) + at, static_cast<const float *>(op.weights[1]) + at,
                         norms ? norms[0] : nullptr, norms ? norms[1] : nullptr, float(op.eps));
        }
    }

    void attend(const Op &op, int64_t part) const {
        const Attention<T> attention{buffer<const T>(op.in), shape.num_heads * shape.head_dim, buffer(op.out),
                                     static_cast<const T *>(step.kv), reinterpret_cast<const Span *>(step.spans), step.tables,
                                     shape, op.layer, op.window, float(op.scale), float(op.eps)}; // eps: the softcap
        attend_unit(attention, reinterpret_cast<const Unit *>(step.units)[part]);
    }

    void select(const Op &op, int64_t first, int64_t last) const {
        for (int64_t row = first; row < last; row++) {
            const int64_t from = step.sampled ? step.sampled[row] : row;
            std::memcpy(buffer(op.out) + row * op.width, buffer<const T>(op.in) + from * op.width, op.width * sizeof(T));
        }
    }
};

} // namespace diptych
