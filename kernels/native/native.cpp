// The CPU's kernels: attention that reads blocks in place, matrix products, the element-wise steps between them, and
// whole forward passes of these. README.md says how they fit together; kernels/cpu/backend.py calls them.
//
// Every output row is computed by the same sequence of floating-point operations in every batch,
// however a prompt is cut into chunks and however many threads there are: keys are visited in tiles of 64 aligned to
// absolute positions. Element types: 0 float32, 1 bf16, and of a cache also 2, e4m3, or 3, int8; arithmetic is
// float32. Head sizes and widths are multiples of 16.

#include "attention_pairs.h"
#include "elementwise.h"
#include "experts.h"
#include "linear.h"
#include "program.h"
#include "sampling.h"

#include <cstddef>

using namespace diptych;

template <typename T, typename C> struct Types {
    typedef T Element;
    typedef C Cached;
};

// Calls back with the types of activations and of a cache, which is of the same type or of 8 bits.
template <typename F> void by_types(int type, int kv_type, F &&call) {
    if (kv_type == 2) return type == 0 ? call(Types<float, e4m3>{}) : call(Types<bf16, e4m3>{});
    if (kv_type == 3) return type == 0 ? call(Types<float, int8>{}) : call(Types<bf16, int8>{});
    return type == 0 ? call(Types<float, float>{}) : call(Types<bf16, bf16>{});
}

// A field of a struct that Python mirrors; of a list the first is the struct itself.
struct Field {
    const char *name;
    int64_t offset, size;
};

#define FIELD(S, NAME) {#NAME, offsetof(S, NAME), sizeof(S::NAME)}
constexpr Field OP_FIELDS[] = {
    {"Op", 0, sizeof(Op)}, FIELD(Op, kind),    FIELD(Op, rows),  FIELD(Op, input), FIELD(Op, output),
    FIELD(Op, extra),      FIELD(Op, extra2),  FIELD(Op, width), FIELD(Op, layer), FIELD(Op, window),
    FIELD(Op, flags),      FIELD(Op, weights), FIELD(Op, scale), FIELD(Op, eps),   FIELD(Op, value_scale),
    FIELD(Op, per_token),  FIELD(Op, units),
};
constexpr Field STEP_FIELDS[] = {
    {"Step", 0, sizeof(Step)}, FIELD(Step, num_rows), FIELD(Step, num_sampled), FIELD(Step, token_ids),
    FIELD(Step, positions),    FIELD(Step, slots),    FIELD(Step, sampled),     FIELD(Step, kv),
    FIELD(Step, shape),        FIELD(Step, spans),    FIELD(Step, tables),      FIELD(Step, units),
    FIELD(Step, num_units),    FIELD(Step, buffers),  FIELD(Step, times),       FIELD(Step, places),
    FIELD(Step, cores),        FIELD(Step, adapters),
};
constexpr Field WEIGHTS_FIELDS[] = {
    {"Weights", 0, sizeof(Weights)},
    FIELD(Weights, data),
    FIELD(Weights, scale),
    FIELD(Weights, offset),
    FIELD(Weights, bias),
    FIELD(Weights, n),
    FIELD(Weights, k),
    FIELD(Weights, group),
    FIELD(Weights, format),
};
constexpr Field ROUTING_FIELDS[] = {
    {"Routing", 0, sizeof(Routing)}, FIELD(Routing, per_token),   FIELD(Routing, flags),
    FIELD(Routing, groups),          FIELD(Routing, kept_groups), FIELD(Routing, scale),
};
constexpr Field LORA_FIELDS[] = {
    {"Lora", 0, sizeof(Lora)}, FIELD(Lora, a), FIELD(Lora, num_parts), FIELD(Lora, parts),
};
constexpr Field LORA_PART_FIELDS[] = {
    {"LoraPart", 0, sizeof(LoraPart)}, FIELD(LoraPart, first), FIELD(LoraPart, count), FIELD(LoraPart, rank),
    FIELD(LoraPart, b),
};
#undef FIELD

extern "C" {

// The fields of struct "Op", "Step", "Routing", "Lora", "LoraPart" or "Weights", and how many: Python compares its own
// structs with them.
const Field *diptych_fields(const char *name, int64_t *count) {
    const auto give = [count](const auto &fields) {
        *count = sizeof fields / sizeof *fields;
        return &fields[0];
    };
    if (!std::strcmp(name, "Op")) return give(OP_FIELDS);
    if (!std::strcmp(name, "Step")) return give(STEP_FIELDS);
    if (!std::strcmp(name, "Routing")) return give(ROUTING_FIELDS);
    if (!std::strcmp(name, "Lora")) return give(LORA_FIELDS);
    if (!std::strcmp(name, "LoraPart")) return give(LORA_PART_FIELDS);
    return give(WEIGHTS_FIELDS);
}

void diptych_attend(int type, int kv_type, const void *q, int64_t q_stride, void *out, const void *kv,
                    const int64_t *spans, const int32_t *tables, const int32_t *units, int64_t num_units,
                    const int64_t *shape, int64_t layer, int64_t window, float scale, float softcap, const float *sinks,
                    float value_scale, int threads) {
    Shape s;
    std::memcpy(&s, shape, sizeof s);
    const Span *span = reinterpret_cast<const Span *>(spans);
    const Unit *unit = reinterpret_cast<const Unit *>(units);
    by_types(type, kv_type, [&](auto types) {
        typedef typename decltype(types)::Element T;
        typedef typename decltype(types)::Cached C;
        const Attention<T, C> attention{(const T *)q, q_stride, (T *)out, (const C *)kv, span, tables, s,
                                        layer,        window,   scale,    softcap, sinks, value_scale};
        attend(attention, unit, num_units, threads);
    });
}

void diptych_rms_norm(int type, const void *x, const void *delta, void *total, const float *weight, void *out,
                      int64_t rows, int64_t width, float eps, int threads) {
    by_types(type, type, [&](auto types) {
        typedef typename decltype(types)::Element T;
        normalise((const T *)x, (const T *)delta, (T *)total, weight, (T *)out, rows, width, eps, threads);
    });
}

void diptych_rotate_and_write(int type, int kv_type, const void *qkv, void *q, void *kv, const int64_t *shape,
                              int64_t layer, const int64_t *slots, const float *cosine, const float *sine,
                              const float *q_norm, const float *k_norm, float eps, int wide, float key_scale,
                              float value_scale, int64_t tokens, int threads) {
    Shape s;
    std::memcpy(&s, shape, sizeof s);
    by_types(type, kv_type, [&](auto types) {
        typedef typename decltype(types)::Element T;
        typedef typename decltype(types)::Cached C;
        rotate_and_write((const T *)qkv, (T *)q, (C *)kv, s, layer, slots, cosine, sine, q_norm, k_norm, eps, wide != 0,
                         {key_scale, value_scale}, tokens, threads);
    });
}

void diptych_write_latents(int type, int kv_type, const void *q, const void *absorbed, const void *latents,
                           void *queries, void *kv, const int64_t *shape, int64_t query_dim, int64_t layer,
                           const int64_t *slots, const float *cosine, const float *sine, const float *norm, float eps,
                           float scale, int64_t tokens, int threads) {
    Shape s;
    std::memcpy(&s, shape, sizeof s);
    by_types(type, kv_type, [&](auto types) {
        typedef typename decltype(types)::Element T;
        typedef typename decltype(types)::Cached C;
        write_latents((const T *)q, (const T *)absorbed, (const T *)latents, (T *)queries, (C *)kv, s, query_dim,
                      layer, slots, cosine, sine, norm, eps, scale, tokens, threads);
    });
}

void diptych_gated(int type, const void *gate_up, void *out, int64_t rows, int64_t width, int epilogue, int threads) {
    by_types(type, type, [&](auto types) {
        typedef typename decltype(types)::Element T;
        gate((const T *)gate_up, (T *)out, rows, width, Epilogue(epilogue), threads);
    });
}

// What the library was compiled for: 1 for dot products of int8, 2 for pairs of bf16, 4 for fp16 that vectors widen.
int diptych_features() { return (DOTS_INT8 ? 1 : 0) | (DOTS_BF16 ? 2 : 0) | (WIDENS_FP16 ? 4 : 0); }

// Outputs that lie side by side in packed weights.
int diptych_panel() { return PANEL; }

// Sums up memory as int64 numbers: how fast that goes bounds every product that streams weights.
int64_t diptych_read(const void *memory, int64_t bytes, int threads) {
    const int64_t *words = static_cast<const int64_t *>(memory), count = bytes / 512 * 64;
    int64_t total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total) num_threads(threads)
    for (int64_t i = 0; i < count; i += 64) {
        __builtin_prefetch(words + i + 512);
        int64_t part = 0;
        for (int64_t j = 0; j < 64; j++) part += words[i + j];
        total += part;
    }
    return total;
}

// Draws a token of each row of float32 logits [width]. allowed[i] is null where every token of row i is allowed.
void diptych_sample(const float *const *rows, const uint32_t *const *allowed, int64_t count, int64_t width,
                    const float *temperature, const float *min_p, const int32_t *top_k, const double *top_p,
                    const int64_t *seed, const int64_t *position, int64_t *out, int threads) {
    const int64_t room = width + LANES;
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1)
    {
        std::vector<float> memory; // of a thread
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++) {
            const bool masked = allowed[i] != nullptr;
            if (masked || temperature[i] > 0) memory.resize(2 * room);
            if (masked) mask_logits(rows[i], width, allowed[i], memory.data() + room);
            const Draw draw{temperature[i], min_p[i], top_k[i], top_p[i], noise_of(seed[i], position[i])};
            out[i] = draw_token(masked ? memory.data() + room : rows[i], width, draw, memory.data());
        }
    }
}

// Experts and their shares of each row of float32 logits [experts], to [rows][per_token].
void diptych_route(const float *logits, int64_t rows, int64_t experts, const void *routing, const float *correction,
                   int32_t *chosen, float *shares) {
    const Routing &rule = *static_cast<const Routing *>(routing);
    for (int64_t row = 0; row < rows; row++)
        route_row(logits + row * experts, experts, rule, correction, chosen + row * rule.per_token,
                  shares + row * rule.per_token);
}

// Sums of rows of `made` [rows * per_token][width], which `places` [rows][per_token] names, by their shares.
void diptych_combine(int type, const void *made, const int32_t *places, const float *shares, int64_t rows,
                     int64_t per_token, int64_t width, void *out) {
    by_types(type, type, [&](auto types) {
        typedef typename decltype(types)::Element T;
        for (int64_t row = 0; row < rows; row++)
            combine_row((const T *)made, places + row * per_token, shares + row * per_token, per_token, width,
                        (T *)out + row * width);
    });
}

// x plus `other` times the sigmoid of float32 gates [rows], or without gates the sum.
void diptych_add_gated(int type, const void *x, const void *other, const float *gates, int64_t rows, int64_t width,
                       void *out) {
    by_types(type, type, [&](auto types) {
        typedef typename decltype(types)::Element T;
        for (int64_t row = 0; row < rows; row++)
            add_gated_row((const T *)x + row * width, (const T *)other + row * width, gates ? gates + row : nullptr,
                          width, (T *)out + row * width);
    });
}

// Adds to rows of y [width] what the adapter of each row, -1 for none, makes of its x [k].
void diptych_lora(int type, const void *x, const int64_t *adapters, const void *changes, int64_t rows, int64_t k,
                  int64_t width, int gated, void *y, int threads) {
    const Lora *of = static_cast<const Lora *>(changes);
    by_types(type, type, [&](auto types) {
        typedef typename decltype(types)::Element T;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && rows > 1)
        for (int64_t row = 0; row < rows; row++)
            if (adapters[row] >= 0)
                add_lora_row(of[adapters[row]], (const T *)x + row * k, k, gated != 0, (T *)y + row * width);
    });
}

// Rows of a gated product's panels to rows of `width` gated outputs.
void diptych_gate_panels(int type, const void *x, void *out, int64_t rows, int64_t width, int epilogue) {
    by_types(type, type, [&](auto types) {
        typedef typename decltype(types)::Element T;
        for (int64_t row = 0; row < rows; row++)
            gate_panels_row((const T *)x + row * 2 * width, width, Epilogue(epilogue), (T *)out + row * width);
    });
}

void diptych_quantise(int type, const void *x, int64_t rows, int64_t k, int64_t group, int offset, void *out,
                      float *scale, float *sum) {
    for (int64_t row = 0; row < rows; row++) {
        uint8_t *to = static_cast<uint8_t *>(out) + row * k;
        const int64_t at = row * (k / group);
        by_types(type, type, [&](auto types) {
            typedef typename decltype(types)::Element T;
            quantise_row((const T *)x + row * k, k, group, offset != 0, to, scale + at, sum + at);
        });
    }
}

// Threads share out the columns of `weights`. out_type as type.
void diptych_linear(const void *weights, const void *x, const float *scale, const float *sum, int64_t rows,
                    int out_type, void *out, int epilogue, int threads) {
    const Weights &w = *static_cast<const Weights *>(weights);
    const Inputs inputs{x, scale, sum};
    for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
        const int64_t end = std::min<int64_t>(rows, row + ROWS_AT_ONCE);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
        for (int64_t panel = 0; panel < w.panels(); panel++) {
            Fetcher nothing;
            by_types(out_type, out_type, [&](auto types) {
                typedef typename decltype(types)::Element T;
                multiply(w, panel, inputs, row, end, Epilogue(epilogue), (T *)out, nothing);
            });
        }
    }
}

// x [rows][heads * of] by the weights of each head, of which there is a pointer each: see multiply_head.
void diptych_head_linear(const void *weights, int64_t heads, const void *x, int64_t of, int64_t rows, int type,
                         void *out, int threads) {
    const Weights *const *each = static_cast<const Weights *const *>(weights);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t head = 0; head < heads; head++)
        for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE)
            by_types(type, type, [&](auto types) {
                typedef typename decltype(types)::Element T;
                multiply_head(*each[head], head, heads, (const T *)x, of, row, std::min(rows, row + ROWS_AT_ONCE),
                              (T *)out);
            });
}

// bf16 rows [panels * PANEL][k] in the panels' order. To tables [panels][2][16], and to begins [panels + 1] how many
// outliers the panels before have.
void diptych_choose_exponents(const uint16_t *rows, int64_t panels, int64_t k, uint8_t *tables, int64_t *begins,
                              int threads) {
    begins[0] = 0;
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < panels; panel++)
        begins[panel + 1] = choose_exponents(rows + panel * PANEL * k, k, tables + panel * 2 * EXPONENTS);
    for (int64_t panel = 0; panel < panels; panel++) begins[panel + 1] += begins[panel];
}

// Packs the same rows into `data` using those tables. Outliers are written after `begins`, which must have capacity.
void diptych_pack_12bit(const uint16_t *rows, int64_t panels, int64_t k, const uint8_t *tables, uint8_t *data,
                        int64_t *begins, int threads) {
    Outlier *outlier = reinterpret_cast<Outlier *>(begins + panels + 1);
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < panels; panel++) {
        uint8_t code[256];
        exponent_codes(tables + panel * 2 * EXPONENTS, code);
        uint8_t *to = data + panel * k * PANEL * Bf16In12Bits::BITS / 8;
        pack_12bit_panel(rows + panel * PANEL * k, k, code, to, outlier + begins[panel]);
    }
}

// Some rows of dense weights, as they were: `bytes` each.
void diptych_unpack_rows(const void *weights, const int64_t *rows, int64_t count, int64_t bytes, char *to,
                         int threads) {
    const Weights &w = *static_cast<const Weights *>(weights);
#pragma omp parallel for num_threads(threads) if (count > 64)
    for (int64_t i = 0; i < count; i++) unpack_row(w, rows[i], to + i * bytes);
}

void diptych_run(int type, int kv_type, const void *ops, int64_t num_ops, const void *step, int threads) {
    const Step &s = *static_cast<const Step *>(step);
    by_types(type, kv_type, [&](auto types) {
        typedef decltype(types) Ts;
        Program<typename Ts::Element, typename Ts::Cached>(static_cast<const Op *>(ops), num_ops, s, threads).run();
    });
}

} // extern "C"
