// Operations of a program and inputs of a step. kernels/cpu/structs.py mirrors both structs, and verifies the layouts
// when it loads the library.
#pragma once

#include <cstdint>

namespace diptych {

enum class Kind : int64_t {
    EMBED = 0,
    NORM = 1,
    QUANTISE = 2,
    LINEAR = 3,
    ROTATE = 4,
    ATTEND = 5,
    SELECT = 6,
    ROUTE = 7,
    GROUP = 8,
    SPREAD = 9,
    EXPERTS = 10,
    COMBINE = 11,
    ADD_GATED = 12,
    HEADS = 13,
    LATENTS = 14,
    LORA = 15,
    GATE = 16,
};

// input, output, extra and extra2 are indices into Step.buffers, or -1 for none. program.h documents the fields of each
// kind.
struct Op {
    int64_t kind;
    int64_t rows; // 0: every token's row, 1: the sampled ones
    int64_t input, output, extra, extra2;
    int64_t width, layer, window, flags;
    const void *weights[3];
    double scale, eps;
    double value_scale; // of ROTATE and ATTEND
    int64_t per_token; // experts of a row: its copies, of which each has a row in a buffer; 0 where there is none;
                       // of HEADS how many there are, of LATENTS the numbers of a head of the input
    int64_t units;     // the buffer of ExpertUnits, or -1
};

// Inputs of one step.
struct Step {
    int64_t num_rows, num_sampled;
    const int64_t *token_ids, *positions, *slots, *sampled; // sampled may be null: all rows in order
    void *kv;
    const int64_t *shape; // Shape
    const int64_t *spans;
    const int32_t *tables, *units;
    int64_t num_units;
    char *const *buffers;  // contiguous rows of each buffer
    int64_t *times;        // nanoseconds of each operation are added here, unless null
    const uint8_t *places; // of the workers that share `cores`, or null: see Gate
    int64_t cores;
    const int64_t *adapters; // of each token's row, -1 for none
};

} // namespace diptych
