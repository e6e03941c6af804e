// A model's forward pass as a list of operations, run by one thread team: one call per step instead of hundreds.
#pragma once

#include "attention_pairs.h"
#include "elementwise.h"
#include "experts.h"
#include "linear.h"
#include "lora.h"
#include "step.h"
#include "team.h"

#include <chrono>
#if defined(_OPENMP) && __has_include(<omp.h>)
#include <omp.h>
#elif defined(_OPENMP) // Apple's compiler supports OpenMP but does not ship its header
extern "C" int omp_get_thread_num();
#endif

namespace diptych {

// Runs a program. T is the type of activations, C that of the cache.
template <typename T, typename C> class Program {
public:
    Program(const Op *ops, int64_t num_ops, const Step &step, int threads)
        : ops(ops), num_ops(num_ops), step(step), elastic(step.places && step.num_rows >= LONG),
          threads(elastic ? int(step.cores) : threads) {
        std::memcpy(&shape, step.shape, sizeof shape);
    }

    void run() {
        std::vector<Chain> chains(num_ops); // only entries at the first operation of a chain are used
        Gate gate(elastic ? step.places : nullptr, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            const int thread = thread_number();
            Ahead ahead;
            Clock clock{thread == 0 ? step.times : nullptr};
            for (int64_t from = 0, to; from < num_ops; from = to) {
                to = end_of_chain(from);
                gate.pass(thread);
                const int64_t parts = num_parts(from, to);
                chains[from].finish(run_chain(from, to, parts, chains[from], ahead, clock), parts);
                clock.stop(to - 1);
            }
            gate.leave(thread);
        }
    }

private:
    const Op *ops;
    const int64_t num_ops;
    const Step &step;
    const bool elastic; // the number of threads may change during a step
    const int threads;
    Shape shape;

    static constexpr int64_t LONG = 64; // minimum number of rows of a step that shares cores with other workers

    // Profile of one thread: assigns the time since the last stop to an operation.
    struct Clock {
        int64_t *times;
        std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();

        void stop(int64_t op) {
            if (!times) return;
            const auto now = std::chrono::steady_clock::now();
            times[op] += std::chrono::duration_cast<std::chrono::nanoseconds>(now - began).count();
            began = now;
        }
    };

    // Prefetch state of one thread.
    struct Ahead {
        Fetcher weights;
        RowStream<T, C> rows;
    };

    static int thread_number() {
#ifdef _OPENMP
        return omp_get_thread_num();
#else
        return 0;
#endif
    }

    template <typename U = T> U *buffer(int64_t index) const { return reinterpret_cast<U *>(step.buffers[index]); }
    int64_t rows(const Op &op) const {
        const int64_t count = op.rows ? step.num_sampled : step.num_rows;
        return Kind(op.kind) == Kind::QUANTISE && op.per_token ? count * op.per_token : count;
    }
    static int64_t ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

    static bool by_row(const Op &op) {
        const Kind kind = Kind(op.kind);
        return kind != Kind::LINEAR && kind != Kind::ATTEND && kind != Kind::GROUP && kind != Kind::EXPERTS &&
               kind != Kind::HEADS;
    }

    // Consecutive row-wise operations form a chain: a row passes through all of them without a barrier in between.
    int64_t end_of_chain(int64_t from) const {
        int64_t to = from + 1;
        while (to < num_ops && by_row(ops[from]) && by_row(ops[to]) && Kind(ops[to].kind) != Kind::SELECT &&
               ops[to].rows == ops[from].rows && rows(ops[to]) == rows(ops[from]))
            to++;
        return to;
    }

    // Runs parts until none are left. Returns the number of parts run by this thread. During a long part, the thread
    // has already claimed its next part and prefetches its inputs.
    uint32_t run_chain(int64_t from, int64_t to, int64_t parts, Chain &chain, Ahead &ahead, Clock &clock) const {
        const Op &op = ops[from];
        const Attention<T, C> attention = attention_of(op);
        ahead.rows.clear();
        uint32_t mine = 0;
        for (int64_t part = chain.take(); part < parts; mine++) {
            if (by_row(op)) {
                for (int64_t i = from; i < to; i++) {
                    const int64_t height = rows_at_once(from, to);
                    run_rows(ops[i], part * height, std::min(rows(op), (part + 1) * height));
                    clock.stop(i);
                }
                part = chain.take();
                continue;
            }
            const int64_t following = chain.take();
            if (Kind(op.kind) == Kind::LINEAR)
                linear(from, part, parts, following, ahead.weights);
            else if (Kind(op.kind) == Kind::EXPERTS)
                experts(op, part, ahead.weights);
            else if (Kind(op.kind) == Kind::GROUP)
                group(op);
            else if (Kind(op.kind) == Kind::HEADS)
                heads(op, part);
            else
                attend_unit(attention, units()[part], following < parts ? units() + following : nullptr, ahead.rows);
            part = following;
        }
        return mine;
    }

    // Small enough for load balance, large enough to amortise claiming a part.
    int64_t num_parts(int64_t from, int64_t to) const {
        const Op &op = ops[from];
        if (Kind(op.kind) == Kind::ATTEND) return step.num_units;
        if (by_row(op)) return ceil(rows(op), rows_at_once(from, to));
        if (Kind(op.kind) == Kind::GROUP) return 1;
        if (Kind(op.kind) == Kind::HEADS) return op.per_token * ceil(rows(op), ROWS_AT_ONCE);
        if (Kind(op.kind) == Kind::EXPERTS) return most_units(op) * columns_of(op);
        const Weights &w = *static_cast<const Weights *>(op.weights[0]);
        return ceil(rows(op), ROWS_AT_ONCE) * ceil(w.panels(), panels_at_once(w, rows(op)));
    }

    int64_t panels_at_once(const Weights &w, int64_t num_rows) const {
        if (threads == 1) return w.panels();
        return num_rows > 16 ? 1 : std::max<int64_t>(1, std::min<int64_t>(16, w.panels() / (threads * 4)));
    }

    int64_t rows_at_once(int64_t from, int64_t to) const {
        int64_t width = 1;
        for (int64_t i = from; i < to; i++) width = std::max(width, ops[i].width);
        return std::max<int64_t>(1, 4096 / width);
    }

    void run_rows(const Op &op, int64_t first, int64_t last) const {
        switch (Kind(op.kind)) {
        case Kind::EMBED: return embed(op, first, last);
        case Kind::NORM: return norm(op, first, last);
        case Kind::QUANTISE: return quantise(op, first, last);
        case Kind::ROTATE: return rotate(op, first, last);
        case Kind::LATENTS: return latents(op, first, last);
        case Kind::ROUTE: return route(op, first, last);
        case Kind::SPREAD: return spread(op, first, last);
        case Kind::COMBINE: return combine(op, first, last);
        case Kind::ADD_GATED: return add_gated(op, first, last);
        case Kind::LORA: return lora(op, first, last);
        case Kind::GATE: return gate(op, first, last);
        default: return select(op, first, last);
        }
    }

    // out = scale * weights[0][token id]; flags: 1 for packed weights.
    void embed(const Op &op, int64_t first, int64_t last) const {
        for (int64_t row = first; row < last; row++) {
            const int64_t id = step.token_ids[row];
            T *to = buffer(op.output) + row * op.width;
            if (op.flags)
                unpack_row(*static_cast<const Weights *>(op.weights[0]), id, to);
            else
                std::memcpy(to, static_cast<const T *>(op.weights[0]) + id * op.width, op.width * sizeof(T));
            if (op.scale == 1.0) continue;
            for (int64_t i = 0; i < op.width; i += LANES) store(to + i, load(to + i) * float(op.scale));
        }
    }

    // out = rms_norm(in) * weights[0]; with a delta in `extra`: extra2 = in + extra, out = rms_norm(extra2).
    void norm(const Op &op, int64_t first, int64_t last) const {
        const int64_t at = first * op.width;
        const bool sum = op.extra >= 0;
        normalise(buffer<const T>(op.input) + at, sum ? buffer<const T>(op.extra) + at : nullptr,
                  sum ? buffer(op.extra2) + at : nullptr, static_cast<const float *>(op.weights[0]),
                  buffer(op.output) + at, last - first, op.width, float(op.eps), 1);
    }

    // Quantises in: bytes to out, scales to extra, sums to extra2. weights[0] is the matrix of the next product.
    void quantise(const Op &op, int64_t first, int64_t last) const {
        const Weights &w = *static_cast<const Weights *>(op.weights[0]);
        const int64_t groups = w.k / w.group;
        for (int64_t row = first; row < last; row++)
            quantise_row(buffer<const T>(op.input) + row * w.k, w.k, w.group, w.format == Format::Q8,
                         buffer<uint8_t>(op.output) + row * w.k, buffer<float>(op.extra) + row * groups,
                         buffer<float>(op.extra2) + row * groups);
    }

    // out = in * weights[0]; flags: the epilogue, + 16 for float32 out.
    void linear(int64_t index, int64_t part, int64_t parts, int64_t following, Fetcher &fetcher) const {
        const Op &op = ops[index];
        const Weights &w = *static_cast<const Weights *>(op.weights[0]);
        const int64_t step_panels = panels_at_once(w, rows(op)), columns = ceil(w.panels(), step_panels);
        const int64_t first = part % columns * step_panels, last = std::min(w.panels(), first + step_panels);
        const int64_t row = part / columns * ROWS_AT_ONCE, end = std::min(rows(op), row + ROWS_AT_ONCE);
        const int64_t after = following < parts ? following % columns * step_panels : -1;
        Inputs x{buffer<char>(op.input), nullptr, nullptr};
        if (w.quantised()) x.scale = buffer<float>(op.extra), x.sum = buffer<float>(op.extra2);
        const Epilogue epilogue = Epilogue(op.flags & 15);
        for (int64_t panel = first; panel < last; panel++) {
            fetcher.clear();
            if (end - row > STREAMED_ROWS) {
                const int64_t coming = panel + 1 < last ? panel + 1 : after;
                if (coming >= 0) w.fetch(coming, fetcher);
                fetcher.spread(w.steps(end - row));
            }
            if (op.flags & 16)
                multiply(w, panel, x, row, end, epilogue, buffer<float>(op.output), fetcher);
            else
                multiply(w, panel, x, row, end, epilogue, buffer(op.output), fetcher);
        }
    }

    // in: q, k, v of a token. Writes rotated q to out, k and v to the cache. weights: cosines, sines, and a pair of
    // norms or null; flags: 1 if the norms span all heads; scale, value_scale: divisors of keys and values.
    void rotate(const Op &op, int64_t first, int64_t last) const {
        const float *const *norms = static_cast<const float *const *>(op.weights[2]);
        const int64_t dim = shape.head_dim, half = dim / 2, stride = (shape.num_heads + 2 * shape.num_kv_heads) * dim;
        for (int64_t row = first; row < last; row++) {
            const int64_t at = step.positions[row] * half;
            rotate_token(buffer<const T>(op.input) + row * stride, buffer(op.output) + row * shape.num_heads * dim,
                         static_cast<C *>(step.kv), shape, op.layer, step.slots[row],
                         static_cast<const float *>(op.weights[0]) + at, static_cast<const float *>(op.weights[1]) + at,
                         norms ? norms[0] : nullptr, norms ? norms[1] : nullptr, float(op.eps), op.flags & 1,
                         {float(op.scale), float(op.value_scale)});
        }
    }

    // in: queries; extra: their absorbed parts without rotation; extra2: latents, written to the cache. Writes complete
    // queries to out. weights: cosines, sines, the norm of latents; scale: divisor of latents.
    void latents(const Op &op, int64_t first, int64_t last) const {
        const int64_t half = (shape.head_dim - shape.latent_dim) / 2, heads = shape.num_heads;
        for (int64_t row = first; row < last; row++) {
            const int64_t at = step.positions[row] * half;
            write_latent(buffer<const T>(op.input) + row * heads * op.per_token,
                         buffer<const T>(op.extra) + row * heads * shape.latent_dim,
                         buffer<const T>(op.extra2) + row * shape.head_dim,
                         buffer(op.output) + row * heads * shape.head_dim, static_cast<C *>(step.kv), shape,
                         op.per_token, op.layer, step.slots[row], static_cast<const float *>(op.weights[0]) + at,
                         static_cast<const float *>(op.weights[1]) + at, static_cast<const float *>(op.weights[2]),
                         float(op.eps), float(op.scale));
        }
    }

    // in: `per_token` heads with `width` numbers in total; weights[0]: pointers to the weights of each head.
    void heads(const Op &op, int64_t part) const {
        const int64_t head = part % op.per_token, row = part / op.per_token * ROWS_AT_ONCE;
        multiply_head(expert(op, head), head, op.per_token, buffer<const T>(op.input), op.width / op.per_token, row,
                      std::min(rows(op), row + ROWS_AT_ONCE), buffer(op.output));
    }

    Attention<T, C> attention_of(const Op &op) const {
        if (Kind(op.kind) != Kind::ATTEND) return {};
        return {buffer<const T>(op.input),
                shape.num_heads * shape.head_dim,
                buffer(op.output),
                static_cast<const C *>(step.kv),
                reinterpret_cast<const Span *>(step.spans),
                step.tables,
                shape,
                op.layer,
                op.window,
                float(op.scale),
                float(op.eps), // the softcap
                static_cast<const float *>(op.weights[0]),
                float(op.value_scale)};
    }

    // Writes chosen experts to out, shares to extra. width: number of experts; weights: corrections or null, Routing.
    void route(const Op &op, int64_t first, int64_t last) const {
        for (int64_t row = first; row < last; row++)
            route_row(buffer<const float>(op.input) + row * op.width, op.width,
                      *static_cast<const Routing *>(op.weights[1]), static_cast<const float *>(op.weights[0]),
                      buffer<int32_t>(op.output) + row * op.per_token, buffer<float>(op.extra) + row * op.per_token);
    }

    // in: the chosen ones of `width` experts. Writes places, the rows of copies sorted by expert, to out.
    void group(const Op &op) const {
        group_by_expert(buffer<const int32_t>(op.input), rows(op) * op.per_token, op.width, ROWS_AT_ONCE,
                        buffer<int32_t>(op.output), buffer<ExpertUnits>(op.units));
    }

    // Copies each row of `width` bytes to its places, given in `extra`.
    void spread(const Op &op, int64_t first, int64_t last) const {
        for (int64_t row = first; row < last; row++)
            for (int64_t j = 0; j < op.per_token; j++)
                std::memcpy(buffer<char>(op.output) + buffer<int32_t>(op.extra)[row * op.per_token + j] * op.width,
                            buffer<char>(op.input) + row * op.width, op.width);
    }

    // Sums the experts' outputs. in: outputs for the copies; extra: places; extra2: shares.
    void combine(const Op &op, int64_t first, int64_t last) const {
        for (int64_t row = first; row < last; row++) {
            const int64_t at = row * op.per_token;
            combine_row(buffer<const T>(op.input), buffer<int32_t>(op.extra) + at, buffer<float>(op.extra2) + at,
                        op.per_token, op.width, buffer(op.output) + row * op.width);
        }
    }

    // out = in + extra * sigmoid(extra2), or in + extra.
    void add_gated(const Op &op, int64_t first, int64_t last) const {
        for (int64_t row = first; row < last; row++) {
            const int64_t at = row * op.width;
            add_gated_row(buffer<const T>(op.input) + at, buffer<const T>(op.extra) + at,
                          op.extra2 < 0 ? nullptr : buffer<float>(op.extra2) + row, op.width, buffer(op.output) + at);
        }
    }

    // Adds the LoRA outputs for in, `per_token` wide, to out; weights[0]: the matrices of each adapter.
    void lora(const Op &op, int64_t first, int64_t last) const {
        const Lora *changes = static_cast<const Lora *>(op.weights[0]);
        for (int64_t row = first; row < last; row++) {
            const int64_t adapter = step.adapters[op.rows && step.sampled ? step.sampled[row] : row];
            if (adapter < 0) continue;
            add_lora_row(changes[adapter], buffer<const T>(op.input) + row * op.per_token, op.per_token, op.flags != 0,
                         buffer(op.output) + row * op.width);
        }
    }

    // out = gated product of the panels in `in`; flags: the epilogue.
    void gate(const Op &op, int64_t first, int64_t last) const {
        for (int64_t row = first; row < last; row++)
            gate_panels_row(buffer<const T>(op.input) + row * 2 * op.width, op.width, Epilogue(op.flags),
                            buffer(op.output) + row * op.width);
    }

    const ExpertUnits &units_of(const Op &op) const { return *buffer<const ExpertUnits>(op.units); }

    static const Weights &expert(const Op &op, int64_t index) {
        return *static_cast<const Weights *const *>(op.weights[0])[index];
    }

    // Upper limit of the number of units, because a late thread may count parts of a chain that has ended.
    int64_t most_units(const Op &op) const {
        const int64_t pairs = rows(op) * op.per_token;
        return std::min(pairs, op.width) + pairs / ROWS_AT_ONCE;
    }

    // Number of parts per unit, so that all threads have work.
    int64_t columns_of(const Op &op) const {
        if (threads == 1) return 1;
        return std::min(expert(op, 0).panels(), ceil(threads * 8, std::max<int64_t>(1, most_units(op))));
    }

    // Like `linear`, for copies and the weights of `width` experts; weights[0]: pointers to them.
    void experts(const Op &op, int64_t part, Fetcher &fetcher) const {
        const int64_t columns = columns_of(op);
        if (part / columns >= units_of(op).count) return;
        const ExpertUnit &unit = units_of(op).units[part / columns];
        const Weights &w = expert(op, unit.expert);
        const int64_t step_panels = ceil(w.panels(), columns), first = part % columns * step_panels;
        const int64_t last = std::min(w.panels(), first + step_panels);
        Inputs x{buffer<char>(op.input), nullptr, nullptr};
        if (w.quantised()) x.scale = buffer<float>(op.extra), x.sum = buffer<float>(op.extra2);
        for (int64_t panel = first; panel < last; panel++) {
            fetcher.clear();
            if (unit.last - unit.first > STREAMED_ROWS && panel + 1 < last) {
                w.fetch(panel + 1, fetcher);
                fetcher.spread(w.steps(unit.last - unit.first));
            }
            multiply(w, panel, x, unit.first, unit.last, Epilogue(op.flags), buffer(op.output), fetcher);
        }
    }

    const Unit *units() const { return reinterpret_cast<const Unit *>(step.units); }

    void select(const Op &op, int64_t first, int64_t last) const {
        for (int64_t row = first; row < last; row++) {
            const int64_t from = step.sampled ? step.sampled[row] : row;
            const T *source = buffer<const T>(op.input) + from * op.width;
            std::memcpy(buffer(op.output) + row * op.width, source, op.width * sizeof(T));
        }
    }
};

} // namespace diptych
