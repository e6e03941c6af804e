// Checks the CPU's kernels against plain loops, without Python: so sanitizers see every byte that is read or written, and it
// runs in an emulator of another CPU. Prints what is wrong, and ends with 1.
#include "native.cpp"

#include <cstdio>
#include <random>

namespace {

std::mt19937 random_bits(7);
int failures = 0;

double uniform(double from, double to) { return std::uniform_real_distribution<double>(from, to)(random_bits); }
int whole(int from, int to) { return std::uniform_int_distribution<int>(from, to)(random_bits); }

double fp16_value(uint16_t h) { // of a finite one
    const int exponent = h >> 10 & 31, fraction = h & 0x3ff;
    const double size =
        exponent ? std::ldexp(1.0 + fraction / 1024.0, exponent - 15) : std::ldexp(double(fraction), -24);
    return h >> 15 ? -size : size;
}
uint16_t random_fp16() { return uint16_t(whole(8, 12) << 10 | whole(0, 1023)); }

bf16 rounded(double x) {
    const float f = float(x);
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return {uint16_t((bits + 0x8000u) >> 16)};
}

void expect(const char *what, double found, double expected, double size, double tolerance) {
    if (std::fabs(found - expected) <= tolerance * size) return;
    if (failures++ < 20) std::printf("%s: %.9g instead of %.9g\n", what, found, expected);
}

// What a nibble format is made of; 0 bits for others.
struct NibbleFormat {
    int64_t bits = 0, group = 32;
    bool stepped = false, offset_steps = false;
};
NibbleFormat nibble_format(Format format) {
    switch (format) {
    case Format::Q4: return {4, 32, false, false};
    case Format::Q5: return {5, 32, false, false};
    case Format::Q4K: return {4, 32, true, true};
    case Format::Q5K: return {5, 32, true, true};
    case Format::Q6K: return {6, 16, true, false};
    case Format::MIXED_K: return {6, 16, true, true};
    default: return {};
    }
}

bool takes_bf16(Format format) { return format == Format::BF16 || format == Format::BF16_12BIT; }

// A matrix in one of the formats, and what it stands for. Every buffer is as long as it must be, and no longer.
struct Matrix {
    std::vector<char> data;
    std::vector<uint16_t> scale, offset16;
    std::vector<int32_t> offset32;
    std::vector<int8_t> steps;
    std::vector<uint8_t> tables;
    std::vector<int64_t> begins;
    std::vector<double> values; // [n][k]
    Weights weights;

    Matrix(Format format, int64_t n, int64_t k, int64_t group) : values(n * k) {
        const int64_t panels = (n + PANEL - 1) / PANEL, groups = k / group;
        const int64_t bits = by_format(format, [](auto f) { return decltype(f)::BITS; });
        data.assign(panels * PANEL * k * bits / 8, 0);
        const NibbleFormat nibbles = nibble_format(format);
        const int64_t parts = 1 + nibbles.offset_steps;
        if (format >= Format::Q8) scale.assign(panels * (nibbles.stepped ? k / BLOCK * parts : groups) * PANEL, 0);
        if (format == Format::Q8) offset32.assign(panels * groups * PANEL, 0);
        if (nibbles.stepped) steps.assign(panels * groups * parts * PANEL, 0);
        if (nibbles.bits && !nibbles.stepped) offset16.assign(panels * groups * PANEL, 0);
        for (int64_t row = 0; row < n; row++)
            for (int64_t g = 0; g < groups; g++) fill_group(format, row, g, k, group);
        if (format == Format::BF16_12BIT) pack_12bit(panels, k);
        const void *scales = format == Format::BF16_12BIT ? (const void *)tables.data() : scale.data();
        const void *offsets = format == Format::BF16_12BIT ? (const void *)begins.data()
                              : format == Format::Q8       ? (const void *)offset32.data()
                              : nibbles.stepped            ? (const void *)steps.data()
                                                           : offset16.data();
        weights = {data.data(), scales, offsets, nullptr, n, k, group, format};
        if (format == Format::FLOAT32 || format == Format::WIDENED_BF16 || format == Format::WIDENED_FP16) unpack(n, k);
    }

    void unpack(int64_t n, int64_t k) {
        for (int64_t row = 0; row < n; row++) {
            std::vector<float> back(k);
            diptych_unpack_rows(&weights, &row, 1, k * 4, (char *)back.data(), 1);
            for (int64_t i = 0; i < k; i++) expect("weight", back[i], values[row * k + i], 0, 0);
        }
    }

    void fill_group(Format format, int64_t row, int64_t g, int64_t k, int64_t group) {
        const int64_t panel = row / PANEL, output = row % PANEL, at = (panel * (k / group) + g) * PANEL + output;
        const uint16_t factor = random_fp16();
        if (nibble_format(format).bits) return fill_nibbles(nibble_format(format), row, g, k);
        if (format == Format::Q8) scale[at] = factor;
        for (int64_t i = g * group; i < (g + 1) * group; i++) {
            double &value = values[row * k + i];
            value = uniform(-1, 1);
            if (format == Format::FLOAT32) {
                const float f = float(value);
                value = f;
                std::memcpy(&data[((panel * k + i) * PANEL + output) * 4], &f, 4);
            } else if (format == Format::WIDENED_BF16) {
                const bf16 b = rounded(value);
                value = widened(b);
                std::memcpy(&data[(((panel * k / 2 + i / 2) * PANEL + output) * 2 + i % 2) * 2], &b, 2);
            } else if (format == Format::WIDENED_FP16) {
                const fp16 h = {uint16_t(i % 5 ? random_fp16() : whole(0, 1) << 15 | whole(0, 1023))};
                value = fp16_value(h.bits);
                std::memcpy(&data[((panel * k + i) * PANEL + output) * 2], &h, 2);
            } else if (format == Format::BF16) {
                const bf16 b = rounded(value);
                value = widened(b);
                std::memcpy(&data[(((panel * k / 2 + i / 2) * PANEL + output) * 2 + i % 2) * 2], &b, 2);
            } else if (format == Format::BF16_12BIT) {
                value = widened(rounded(i % 97 == 0 ? value * 1e20 : value));
            } else {
                const int q = whole(-128, 127);
                value = q * fp16_value(factor);
                data[((panel * k / 4 + i / 4) * PANEL + output) * 4 + i % 4] = char(q);
                offset32[at] -= 128 * q;
            }
        }
    }

    void fill_nibbles(const NibbleFormat &format, int64_t row, int64_t g, int64_t k) {
        const int64_t panel = row / PANEL, output = row % PANEL, groups = k / format.group, parts = 1 + format.offset_steps;
        const int64_t at = (panel * groups + g) * PANEL + output;
        double factor, shift;
        if (format.stepped) {
            uint16_t *block = &scale[(panel * (k / BLOCK) + g * format.group / BLOCK) * parts * PANEL + output];
            if (g * format.group % BLOCK == 0)
                for (int64_t part = 0; part < parts; part++) block[part * PANEL] = random_fp16();
            int8_t *step = &steps[(panel * groups + g) * parts * PANEL + output];
            for (int64_t part = 0; part < parts; part++) step[part * PANEL] = int8_t(whole(-128, 127));
            factor = fp16_value(block[0]) * step[0];
            shift = parts == 2 ? fp16_value(block[PANEL]) * step[PANEL] : -32 * factor;
        } else {
            scale[at] = random_fp16(), offset16[at] = random_fp16();
            factor = fp16_value(scale[at]), shift = fp16_value(offset16[at]);
        }
        const int64_t upper = format.bits - 4, unit = upper ? 32 / upper : 8;
        for (int64_t i = g * format.group; i < (g + 1) * format.group; i++) {
            const int q = whole(0, (1 << format.bits) - 1), octet = int(i % unit / 8), half = int(i / 4 % 2);
            values[row * k + i] = q * factor + shift;
            char *begin = &data[(panel * k + i / unit * unit) * PANEL * format.bits / 8 + output * 4 + i % 4];
            begin[octet * PANEL * 4] |= char((q & 15) << 4 * half);
            if (upper) begin[unit / 8 * PANEL * 4] |= char(q >> 4 << upper * (2 * octet + half));
        }
    }

    void pack_12bit(int64_t panels, int64_t k) {
        std::vector<uint16_t> rows(panels * PANEL * k);
        for (size_t i = 0; i < values.size(); i++) rows[i] = rounded(values[i]).bits;
        tables.resize(panels * 2 * EXPONENTS);
        begins.resize(panels + 1);
        diptych_choose_exponents(rows.data(), panels, k, tables.data(), begins.data(), 2);
        begins.resize(panels + 1 + begins[panels]);
        diptych_pack_12bit(rows.data(), panels, k, tables.data(), (uint8_t *)data.data(), begins.data(), 2);
        weights = {data.data(), tables.data(),     begins.data(), nullptr, int64_t(values.size()) / k, k,
                   k,           Format::BF16_12BIT};
        for (int64_t row = 0; row < weights.n; row++) {
            std::vector<uint16_t> back(k);
            diptych_unpack_rows(&weights, &row, 1, k * 2, (char *)back.data(), 1);
            for (int64_t i = 0; i < k; i++) expect("12-bit weight", back[i], rows[row * k + i], 0, 0);
        }
    }
};

void check_product(Format format, int64_t n, int64_t k, int64_t rows) {
    const int64_t nibble_group = nibble_format(format).bits ? nibble_format(format).group : k;
    const int64_t group = format == Format::Q8 ? 64 : nibble_group, groups = k / group;
    const Matrix matrix(format, n, k, group);
    const bool pairs = takes_bf16(format);
    std::vector<float> x(rows * k), scale(rows * groups), sum(rows * groups), out(rows * n);
    std::vector<bf16> narrow(rows * k);
    std::vector<uint8_t> bytes(rows * k);
    for (int64_t i = 0; i < rows * k; i++) {
        narrow[i] = rounded(uniform(-2, 2));
        x[i] = widened(narrow[i]);
    }
    const void *inputs = pairs ? (const void *)narrow.data() : x.data();
    if (format >= Format::Q8) {
        diptych_quantise(0, x.data(), rows, k, group, format == Format::Q8, bytes.data(), scale.data(), sum.data());
        inputs = bytes.data();
        for (int64_t i = 0; i < rows * k; i++)
            x[i] = scale[i / group] * (format == Format::Q8 ? float(bytes[i]) - 128.f : float(int8_t(bytes[i])));
    }
    diptych_linear(&matrix.weights, inputs, scale.data(), sum.data(), rows, 0, out.data(), 0, 2);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t o = 0; o < n; o++) {
            double expected = 0, size = 0;
            for (int64_t i = 0; i < k; i++) {
                const double part = x[row * k + i] * matrix.values[o * k + i];
                expected += part, size += std::fabs(part);
            }
            char what[80];
            std::snprintf(what, sizeof what, "format %d, %ldx%ld, row %ld of %ld, output %ld", int(format), long(n),
                          long(k), long(row), long(rows), long(o));
            expect(what, out[row * n + o], expected, size + 1e-3, 2e-5);
        }
}

double value(float x) { return x; }
double value(bf16 x) { return widened(x); }
double value(e4m3 x) {
    const int code = x.bits & 127, fraction = code & 7;
    const double size = code >> 3 ? std::ldexp(8 + fraction, (code >> 3) - 10) : std::ldexp(fraction, -9);
    return x.bits >> 7 ? -size : size;
}
double value(int8 x) { return x.number; }
void set(int8 &x, double) { x.number = int8_t(whole(-127, 127)); }
void set(float &x, double to) { x = float(to); }
void set(bf16 &x, double to) { x = rounded(to); }
void set(e4m3 &x, double) { x.bits = uint8_t(whole(0, 1) << 7 | whole(0, 0x37)); } // below 1

// Two sequences, one that decodes and one of whose prompt a chunk is computed, over blocks in disorder.
template <typename T, typename C> void check_attention(int type, int kv_type, int64_t dim, int64_t window,
                                                       float softcap, double tolerance) {
    const int64_t size = 16, heads = 6, kv_heads = 2, layers = 2, layer = 1;
    const int64_t spans[] = {0, 1, 69, 0, 1, 21, 40, 5}; // row, rows, start, first entry of the table
    const int32_t tables[] = {7, 2, 9, 4, 0, 5, 1, 8, 3};
    const int64_t shape[] = {layers, kv_heads, size, dim, heads, 0, kv_heads}, rows = 22;
    static_assert(sizeof shape == sizeof(Shape));
    const int64_t region = size * 2 * (dim + SCALE<C>); // of one block, layer and head
    std::vector<C> kv(10 * layers * kv_heads * region);
    std::vector<T> q(rows * heads * dim), out(rows * heads * dim);
    for (C &v : kv) set(v, uniform(-1, 1));
    const auto scale_at = [&](const C *begin,
                              int64_t place) -> float & { // of a region, of its keys and then its values
        static float one;
        one = 1;
        return SCALE<C> ? ((float *)(begin + size * 2 * dim))[place] : one;
    };
    if constexpr (SCALE<C> != 0)
        for (size_t at = 0; at < kv.size(); at += region)
            for (int64_t place = 0; place < 2 * size; place++) scale_at(&kv[at], place) = float(uniform(0.001, 0.008));
    std::vector<int32_t> units;
    for (int span = 0; span < 2; span++)
        for (int first = 0; first < spans[span * 4 + 1]; first += 8)
            for (int head = 0; head < kv_heads; head++)
                units.insert(units.end(), {span, head, first, std::min(8, int(spans[span * 4 + 1]) - first)});
    const float scale = 1.f / std::sqrt(float(dim));
    std::vector<float> sinks(heads);
    for (float &sink : sinks) sink = float(uniform(-2, 3));
    const float *given = window ? sinks.data() : nullptr;
    const float value_scale = kv_type == 2 ? 0.5f : 1.f;
    diptych_attend(type, kv_type, q.data(), heads * dim, out.data(), kv.data(), spans, tables, units.data(),
                   units.size() / 4, shape, layer, window, scale, softcap, given, value_scale, 2);
    for (int span = 0; span < 2; span++)
        for (int64_t i = 0; i < spans[span * 4 + 1]; i++)
            for (int64_t head = 0; head < heads; head++) {
                const int64_t at = spans[span * 4 + 2] + i, from = window && at + 1 > window ? at + 1 - window : 0;
                const T *query = &q[((spans[span * 4] + i) * heads + head) * dim];
                std::vector<double> sums(dim, 0.0);
                double total = given ? std::exp(double(sinks[head])) : 0;
                for (int64_t j = from; j <= at; j++) {
                    const int64_t block = tables[spans[span * 4 + 3] + j / size];
                    const C *begin = &kv[((block * layers + layer) * kv_heads + head / 3) * region],
                            *key = begin + j % size * 2 * dim;
                    double score = 0;
                    for (int64_t d = 0; d < dim; d++)
                        score += value(query[d]) * value(key[d]) * scale_at(begin, j % size) * scale;
                    if (softcap > 0) score = softcap * std::tanh(score / softcap);
                    const double weight = std::exp(score);
                    total += weight;
                    for (int64_t d = 0; d < dim; d++)
                        sums[d] += weight * value(key[dim + d]) * scale_at(begin, size + j % size);
                }
                for (int64_t d = 0; d < dim; d++)
                    expect("attention", value(out[((spans[span * 4] + i) * heads + head) * dim + d]),
                           sums[d] / total * value_scale, 1, tolerance);
            }
}

// The token that a sorted list of weights gives, in float64; -1 where the noise is too near to a border to tell.
int64_t plain_draw(const std::vector<float> &x, const std::vector<uint32_t> &allowed, const Draw &draw) {
    const int64_t width = int64_t(x.size());
    std::vector<double> weight(width, 0.0);
    double top = -INFINITY, total = 0, before = 0;
    const auto may = [&](int64_t i) { return allowed.empty() || (allowed[i / 32] >> i % 32 & 1); };
    for (int64_t i = 0; i < width; i++)
        if (may(i)) top = std::max(top, double(x[i]));
    if (top == -INFINITY) return width;
    for (int64_t i = 0; i < width; i++) weight[i] = may(i) ? std::exp((x[i] - top) / draw.temperature) : 0;
    for (double &w : weight)
        if (w < draw.min_p) w = 0;
    std::vector<double> sorted(weight);
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    const auto keep = [&](double least) {
        for (double &w : weight)
            if (w < least * (1 - 1e-6)) w = 0;
        for (double &w : sorted)
            if (w < least * (1 - 1e-6)) w = 0;
    };
    if (draw.top_k > 0 && draw.top_k < width) keep(sorted[draw.top_k - 1]);
    for (const double w : sorted) total += w;
    if (draw.top_p < 1) {
        double sum = 0;
        int64_t last = 0;
        while (last + 1 < width && (sum += sorted[last]) < draw.top_p * total) last++;
        if (std::fabs(sum - draw.top_p * total) < 1e-5 * total) return -1;
        keep(sorted[last]);
        total = 0;
        for (const double w : weight) total += w;
    }
    for (int64_t i = 0; i < width; i++) {
        before += weight[i];
        if (std::fabs(before - draw.noise * total) < 1e-5 * total) return -1;
        if (before > draw.noise * total) return i;
    }
    return -1;
}

void check_sampling(int64_t width) {
    constexpr int64_t rows = 40;
    std::vector<std::vector<float>> logits(rows);
    std::vector<std::vector<uint32_t>> masks(rows);
    std::vector<const float *> places;
    std::vector<const uint32_t *> allowed;
    std::vector<float> temperature, min_p;
    std::vector<int32_t> top_k;
    std::vector<double> top_p;
    std::vector<int64_t> seed, position, out(rows);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < width; j++) logits[i].push_back(float(uniform(-6, 6)));
        if (i % 3 == 2)
            for (int64_t j = 0; j < (width + 31) / 32; j++)
                masks[i].push_back(j % 3 ? random_bits() & random_bits() : j ? 0 : ~0u);
        places.push_back(logits[i].data());
        allowed.push_back(masks[i].empty() ? nullptr : masks[i].data());
        temperature.push_back(float(uniform(0.3, 1.5)));
        min_p.push_back(i % 4 == 1 ? 0.05f : 0.f);
        top_k.push_back(i % 4 == 2 ? 7 : 0);
        top_p.push_back(i % 4 >= 2 ? 0.8 : 1.0);
        seed.push_back(whole(-1000, 1000));
        position.push_back(whole(0, 1 << 20));
    }
    diptych_sample(places.data(), allowed.data(), rows, width, temperature.data(), min_p.data(), top_k.data(),
                   top_p.data(), seed.data(), position.data(), out.data(), 2);
    for (int64_t i = 0; i < rows; i++) {
        const Draw draw{temperature[i], min_p[i], top_k[i], top_p[i], noise_of(seed[i], position[i])};
        const int64_t expected = plain_draw(logits[i], masks[i], draw);
        if (expected >= 0) expect("token", double(out[i]), double(expected), 1, 0);
    }
}

// Routes, groups and sums rows whose experts only scale them.
void check_experts(int64_t rows, int64_t experts, int64_t per_token, bool normalised) {
    const int64_t width = 2 * LANES, pairs = rows * per_token, most = 5;
    std::vector<float> logits(rows * experts), shares(pairs), made(pairs * width), out(width);
    std::vector<int32_t> chosen(pairs), places(pairs);
    for (float &logit : logits) logit = float(uniform(-4, 4));
    for (int64_t row = 0; row < rows; row++)
        route_row(&logits[row * experts], experts, Routing{per_token, normalised, 1, 1, 1.0}, nullptr,
                  &chosen[row * per_token], &shares[row * per_token]);
    std::vector<char> memory(sizeof(ExpertUnits) + pairs * sizeof(ExpertUnit));
    ExpertUnits &units = *reinterpret_cast<ExpertUnits *>(memory.data());
    group_by_expert(chosen.data(), pairs, experts, most, places.data(), &units);
    std::vector<int> covered(pairs);
    for (int64_t i = 0; i < units.count; i++) {
        const ExpertUnit &unit = units.units[i];
        expect("size of a unit", unit.last - unit.first, std::min<int64_t>(most, unit.last - unit.first), 1, 0);
        for (int64_t at = unit.first; at < unit.last; at++) covered[at] = unit.expert + 1;
    }
    for (int64_t i = 0; i < pairs; i++) {
        expect("expert at a place", covered[places[i]], chosen[i] + 1, 1, 0);
        for (int64_t at = 0; at < width; at++) made[places[i] * width + at] = float(i * width + at);
    }
    for (int64_t row = 0; row < rows; row++) {
        double total = 0, kept = 0;
        for (int64_t e = 0; e < experts; e++) total += std::exp(double(logits[row * experts + e]));
        for (int64_t j = 0; j < per_token; j++)
            kept += std::exp(double(logits[row * experts + chosen[row * per_token + j]]));
        combine_row(made.data(), &places[row * per_token], &shares[row * per_token], per_token, width, out.data());
        for (int64_t at = 0; at < width; at++) {
            double sum = 0;
            for (int64_t j = 0; j < per_token; j++) {
                const int64_t pair = row * per_token + j;
                const double weight = std::exp(double(logits[row * experts + chosen[pair]]));
                sum += weight / (normalised ? kept : total) * double(pair * width + at);
            }
            expect("sum of experts", out[at], sum, std::abs(sum) + 1, 1e-5);
        }
    }
}

} // namespace

int main() {
    for (const Format format : {Format::FLOAT32, Format::WIDENED_BF16, Format::WIDENED_FP16, Format::BF16,
                                Format::BF16_12BIT, Format::Q8, Format::Q4, Format::Q5, Format::Q4K, Format::Q5K,
                                Format::Q6K, Format::MIXED_K})
        for (const int64_t n : {int64_t(PANEL), int64_t(2 * PANEL + 3)})
            for (const int64_t rows : {1, 2, 3, 5, 7, 12, 13, 100})
                if (DOTS_BF16 || !takes_bf16(format)) check_product(format, n, nibble_format(format).stepped ? 512 : 192, rows);
    for (const int64_t dim : {16, 64, 80})
        for (const int64_t window : {0, 24})
            for (const float softcap : {0.f, 2.f}) {
                check_attention<float, float>(0, 0, dim, window, softcap, 2e-6);
                check_attention<bf16, bf16>(1, 1, dim, window, softcap, 2e-2);
                check_attention<float, e4m3>(0, 2, dim, window, softcap, 2e-6);
                check_attention<bf16, e4m3>(1, 2, dim, window, softcap, 2e-2);
                check_attention<float, int8>(0, 3, dim, window, softcap, 2e-6);
                check_attention<bf16, int8>(1, 3, dim, window, softcap, 2e-2);
            }
    for (const int64_t width : {1, 3, 16, 31, 64, 257, 5000}) check_sampling(width);
    for (const int64_t rows : {1, 2, 40})
        for (const bool normalised : {false, true}) {
            check_experts(rows, 7, 3, normalised);
            check_experts(rows, 1, 1, normalised);
        }
    std::printf("%d outputs to a panel, features %d, %d failures\n", PANEL, diptych_features(), failures);
    return failures ? 1 : 0;
}
