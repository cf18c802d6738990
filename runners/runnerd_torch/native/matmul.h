// Matrix products of rows with a large packed weight: y = x w^T, sums in float32.
//
// A library's general product reads a weight that lies as the checkpoint has it; with a handful of rows it spends its
// time on rearranging it. Here the weight was rearranged once: panels of 16 outputs, inputs running over the panel, in
// float32 one at a time, in narrower types in twos or fours, as the processor's dot products take them. Each output is
// one sum over the inputs in one order, whatever other rows there are and however many threads work.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include "numbers.h"
#include "team.h"
#if defined(__AVX512F__) || defined(__AMX_BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int kPanel = 16;                       // outputs side by side in the packed weight
constexpr int kWide = 2 * kPanel;                // outputs of two panels, which are computed together
constexpr int kGroup = 32;                       // inputs of an int4 weight that share scales
constexpr int64_t kBlockRows = 48;               // rows of a block of results
constexpr int64_t kRowsPerPass = 256;            // rows whose inputs stay in the second-level cache
constexpr int64_t kRowsOfShare = 96;             // fewer rows are not worth a thread's reading all of the weight
constexpr int64_t kProductsPerThread = 1 << 17;  // about 10 us; less is done sooner than another thread wakes up

enum WeightType { kFloat32Weight = 0, kBFloat16Weight = 1, kInt8Weight = 2, kInt4Weight = 3 };

struct Nibbles { uint32_t bits; };  // numbers from 0 to 15 for eight inputs of an output, the first one lowest

#if defined(__AVX512F__)
constexpr int kWidth = 16;
constexpr int kMaxRows = 12;
#elif defined(__AVX__)
constexpr int kWidth = 8;
constexpr int kMaxRows = 3;
#else
constexpr int kWidth = 4;
constexpr int kMaxRows = 2;
#endif
typedef float Floats __attribute__((vector_size(kWidth * sizeof(float)), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * sizeof(float)), aligned(4)));
constexpr int kVectors = kWide / kWidth;

}  // namespace

extern "C" {
// A projection of num_inputs to num_outputs. Mirrored in packing.py.
//   float32:  values float[num_panels][num_inputs][16]
//   bfloat16: values bfloat16[num_panels][num_inputs / 2][16][2]
//   int8:     values int8[num_panels][num_inputs / 4][16][4], scales float[num_panels][16]
//   int4:     values Nibbles[num_panels][num_inputs / 8][16], scales float16[num_panels][num_inputs / 32][2][16], first
//             what a number counts, then what is added to it
// The last panel is filled up with zeros. num_inputs is a multiple of 32 for bfloat16 and int4, of 64 for int8.
struct Projection {
    const void *values, *scales;
    const float* bias;  // [num_outputs], may be null
    int64_t num_inputs, num_outputs, weight_type;
};
}

namespace {

// Calls work with count, from 1 to kMost, as a constant.
template <int kMost, typename Work>
void with_constant(int64_t count, Work work) {
    if (count == kMost) return work(std::integral_constant<int, kMost>());
    if constexpr (kMost > 1) with_constant<kMost - 1>(count, work);
}

// Calls pass(first row, number of rows as a constant, number of passes) for parts of nearly the same size, of up to
// kMost rows: as many as the registers hold.
template <int kMost, typename Pass>
void in_passes(int64_t num_rows, Pass pass) {
    const int64_t num_passes = (num_rows + kMost - 1) / kMost;
    for (int64_t row = 0, left = num_passes; left; --left) {
        const int64_t count = (num_rows - row + left - 1) / left;
        with_constant<kMost>(count, [&](auto constant) { pass(row, constant, num_passes); });
        row += count;
    }
}

constexpr int64_t kStretchLines = 32;  // lines of 64 bytes of two panels between two looks ahead
template <typename Value>
constexpr int64_t kStretch = 64 / sizeof(Value);  // inputs of such a stretch

// Adds the products of kRows rows of inputs with two panels: sums[kRows][32].
template <int kRows>
void multiply_rows(const float* inputs, int64_t stride, const float* const* panels, int64_t num_inputs, float* results) {
    constexpr int kHalf = kVectors / 2;
    Floats sums[kRows][kVectors] = {};
    for (int64_t k = 0; k < num_inputs; ++k) {
        for (int v = 0; v < kVectors; ++v) {
            Floats weight;
            std::memcpy(&weight, panels[v / kHalf] + k * kPanel + v % kHalf * kWidth, sizeof weight);
            for (int r = 0; r < kRows; ++r) sums[r][v] += inputs[r * stride + k] * weight;
        }
    }
    std::memcpy(results, sums, sizeof sums);
}

#if defined(__AVX512BF16__)
// The same for kPanels panels; gives the sums of each row and panel to take(row, panel, sums). Panels may come in segments
// of num_inputs, kPanels pointers each: what counts is the sum over all of them. Meanwhile lines of 64 bytes from `ahead`
// on are asked for, so many for each stretch of inputs.
template <int kRows, int kPanels, typename Take>
void multiply_segments(const BFloat16* inputs, int64_t stride, const BFloat16* const* panels, int64_t num_inputs,
                       int64_t num_segments, const char* ahead, int64_t lines, Take take) {
    __m512 sums[kRows][kPanels] = {};
    for (int64_t segment = 0; segment < num_segments; ++segment, inputs += num_inputs, panels += kPanels) {
        for (int64_t begin = 0; begin < num_inputs; begin += kStretch<BFloat16>) {
            for (int64_t i = 0; i < lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
            const int64_t end = std::min(begin + kStretch<BFloat16>, num_inputs);
            for (int64_t k = begin; k < end; k += 2) {
                __m512bh weights[kPanels];
#pragma GCC unroll 16
                for (int i = 0; i < kPanels; ++i) weights[i] = (__m512bh)_mm512_loadu_si512(panels[i] + k * kPanel);
#pragma GCC unroll 16
                for (int r = 0; r < kRows; ++r) {
                    int32_t pair;
                    std::memcpy(&pair, inputs + r * stride + k, sizeof pair);
                    const __m512bh input = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 16
                    for (int i = 0; i < kPanels; ++i) sums[r][i] = _mm512_dpbf16_ps(sums[r][i], weights[i], input);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
        for (int i = 0; i < kPanels; ++i) take(r, i, sums[r][i]);
}
#else
template <int kRows>
void multiply_rows(const BFloat16* inputs, int64_t stride, const BFloat16* const* panels, int64_t num_inputs,
                   float* results) {
    constexpr int kHalf = kVectors / 2;
    Floats sums[kRows][kVectors] = {};
    for (int64_t k = 0; k < num_inputs; k += 2) {
        for (int v = 0; v < kVectors; ++v) {
            Words pairs;
            std::memcpy(&pairs, panels[v / kHalf] + k * kPanel + v % kHalf * kWidth * 2, sizeof pairs);
            const Floats even = (Floats)(pairs << 16), odd = (Floats)(pairs & 0xffff0000u);
            for (int r = 0; r < kRows; ++r) {
                sums[r][v] += to_float(inputs[r * stride + k]) * even;
                sums[r][v] += to_float(inputs[r * stride + k + 1]) * odd;
            }
        }
    }
    std::memcpy(results, sums, sizeof sums);
}
#endif

// Gives blocks of results[num_rows][32] for rows of float or bfloat16; a thread keeps one for its work.
template <typename T>
class Multiplier {
public:
    // `ahead`: what will be wanted next, as large as the two panels; may be null.
    void operator()(const T* inputs, int64_t stride, int64_t num_rows, const T* const* panels, int64_t num_inputs,
                    float* results, const void* = nullptr) {
        in_passes<kMaxRows>(num_rows, [&](int64_t row, auto count, int64_t) {
            multiply_rows<count>(inputs + row * stride, stride, panels, num_inputs, results + row * kWide);
        });
    }
};

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define RUNNERD_TILES 1

// Asks the operating system to let this process use tiles; without that their first use ends it.
inline bool request_tiles() {
#if defined(__linux__)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return true;
#endif
}

// A thread's matrix tiles. Tiles 0 to 3 are sums, 4 and 5 inputs, 6 and 7 weights.
class Tiles {
public:
    Tiles() { _tile_storeconfig(before_); }
    ~Tiles() {
        // Libraries configure a thread's tiles once and rely on it.
        if (before_[0]) _tile_loadconfig(before_);
        else _tile_release();
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    // Sums 0 and 1 and input 4 get so many upper rows; sums 2 and 3 and input 5 get so many lower ones.
    void configure(int64_t upper, int64_t lower) {
        if (upper == upper_ && lower == lower_) return;
        upper_ = upper;
        lower_ = lower;
        alignas(64) uint8_t config[64] = {1};
        const int64_t rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
        for (int tile = 0; tile < 8; ++tile) {
            config[16 + 2 * tile] = 64;  // bytes of a row
            config[48 + tile] = uint8_t(rows[tile]);
        }
        _tile_loadconfig(config);
    }

private:
    alignas(64) uint8_t before_[64];
    int64_t upper_ = 0, lower_ = 0;
};

// The same for bfloat16 on tiles. They sum in another order than vectors do, so one or the other does all.
template <>
class Multiplier<BFloat16> {
public:
    void operator()(const BFloat16* inputs, int64_t stride, int64_t num_rows, const BFloat16* const* panels,
                    int64_t num_inputs, float* results, const void* = nullptr) {
        for (; num_rows > 0; num_rows -= 32, inputs += 32 * stride, results += 32 * kWide) {
            tiles_.configure(std::min<int64_t>(num_rows, 16), std::clamp<int64_t>(num_rows - 16, 1, 16));
            if (num_rows > 16) many_rows(inputs, stride, panels, num_inputs, results);
            else few_rows(inputs, stride, panels, num_inputs, results);
        }
    }

private:
    static void few_rows(const BFloat16* inputs, int64_t stride, const BFloat16* const* panels, int64_t num_inputs,
                         float* results) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t k = 0; k < num_inputs; k += 32) {
            _tile_loadd(4, inputs + k, stride * 2);
            _tile_loadd(6, panels[0] + k * kPanel, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, panels[1] + k * kPanel, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, results, kWide * 4);
        _tile_stored(1, results + kPanel, kWide * 4);
    }

    static void many_rows(const BFloat16* inputs, int64_t stride, const BFloat16* const* panels, int64_t num_inputs,
                          float* results) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < num_inputs; k += 32) {
            _tile_loadd(4, inputs + k, stride * 2);
            _tile_loadd(6, panels[0] + k * kPanel, 64);
            _tile_loadd(7, panels[1] + k * kPanel, 64);
            _tile_loadd(5, inputs + 16 * stride + k, stride * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, results, kWide * 4);
        _tile_stored(1, results + kPanel, kWide * 4);
        _tile_stored(2, results + 16 * kWide, kWide * 4);
        _tile_stored(3, results + 16 * kWide + kPanel, kWide * 4);
    }

    Tiles tiles_;
};
#endif

#if !defined(RUNNERD_TILES)
inline bool request_tiles() { return true; }

#if defined(__AVX512BF16__)
template <>
class Multiplier<BFloat16> {
public:
    void operator()(const BFloat16* inputs, int64_t stride, int64_t num_rows, const BFloat16* const* panels,
                    int64_t num_inputs, float* results, const void* ahead = nullptr) {
        const char* next = static_cast<const char*>(ahead);
        in_passes<kMaxRows>(num_rows, [&](int64_t row, auto count, int64_t num_passes) {
            const int64_t lines = next ? kStretchLines / num_passes : 0;
            multiply_segments<count, 2>(inputs + row * stride, stride, panels, num_inputs, 1, next, lines,
                                        [&](int64_t r, int i, __m512 sums) {
                                            _mm512_storeu_ps(results + (row + r) * kWide + i * kPanel, sums);
                                        });
            next += num_inputs / kStretch<BFloat16> * lines * 64;
        });
    }

    // The same for kPanels panels in segments of num_inputs; see multiply_segments.
    template <int kPanels, typename Take>
    void segments(const BFloat16* inputs, int64_t stride, int64_t num_rows, const BFloat16* const* panels,
                  int64_t num_inputs, int64_t num_segments, Take take) {
        in_passes<2 * kMaxRows / kPanels>(num_rows, [&](int64_t row, auto count, int64_t) {
            multiply_segments<count, kPanels>(inputs + row * stride, stride, panels, num_inputs, num_segments, nullptr, 0,
                                              [&](int64_t r, int i, __m512 sums) { take(row + r, i, sums); });
        });
    }
};
#endif
#endif

// Rows of whole numbers of up to 15 bits, each row with a scale: what an int8 or int4 weight is multiplied with. Sums of
// whole numbers have no order, and here they fit into 32 bits. Where there are tiles of bytes, they take 128 high + low.
struct WholeRows {
    int16_t* numbers;  // [num_rows][num_inputs]; of each four or eight inputs in the order of kPlaces
    int8_t *high, *low;  // [num_rows][num_inputs]; null where there are no tiles
    float* group_sums;   // [num_rows][num_inputs / 32], for an int4 weight
    float* scales;       // [num_rows]
};

// Where each of eight inputs goes: two and two side by side, as shifts take them out of words of a weight.
template <WeightType kType>
constexpr int kPlaces[8] = {0, 2, 1, 3, 4, 6, 5, 7};
template <>
constexpr int kPlaces<kInt4Weight>[8] = {0, 2, 4, 6, 1, 3, 5, 7};

// Gives the largest number whose products with an int8 or int4 weight, summed over so many inputs, fit.
template <WeightType kType>
inline int32_t largest_whole(int64_t num_inputs) {
    const int64_t weight = kType == kInt4Weight ? 15 : 127, num_summed = kType == kInt4Weight ? kGroup : num_inputs;
    return int32_t(std::min<int64_t>(127 * 128, ((int64_t(1) << 31) - 1) / (weight * num_summed)));
}

// Gives numbers times factor, rounded.
template <WeightType kType>
inline void round_row(const BFloat16* from, float factor, int64_t num_inputs, int64_t row, const WholeRows& to) {
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23 rounds to a whole number
    for (int64_t i = 0; i < num_inputs; ++i) {
        const int32_t number = int32_t(float_to_bits(to_float(from[i]) * factor + kMagic) - float_to_bits(kMagic));
        if (kType == kInt8Weight && to.high) {
            const int32_t high = (number + 64) >> 7;
            to.high[row * num_inputs + i] = int8_t(high);
            to.low[row * num_inputs + i] = int8_t(number - high * 128);
        } else {
            to.numbers[row * num_inputs + i / 8 * 8 + kPlaces<kType>[i % 8]] = int16_t(number);
        }
    }
}
#if defined(__AVX512BW__)
// The same without tiles, 32 inputs at a time.
template <WeightType kType>
inline void round_words(const BFloat16* from, float factor, int64_t num_inputs, int16_t* to) {
    alignas(64) int16_t sources[32];
    for (int i = 0; i < 32; ++i) sources[i / 8 * 8 + kPlaces<kType>[i % 8]] = int16_t(i);
    const __m512i order = _mm512_load_si512(sources);
    const auto rounded = [&](const BFloat16* part) {
        const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)part)), 16);
        return _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(factor))));
    };
    for (int64_t i = 0; i < num_inputs; i += 32) {
        const __m512i numbers = _mm512_inserti64x4(_mm512_castsi256_si512(rounded(from + i)), rounded(from + i + 16), 1);
        _mm512_storeu_si512(to + i, _mm512_permutexvar_epi16(order, numbers));
    }
}
#endif

template <WeightType kType>
inline void to_whole(const BFloat16* from, int64_t num_inputs, int64_t row, const WholeRows& to) {
    uint16_t bits = 0;  // without the sign they are in the order of the numbers, and those of NaN are above all
    for (int64_t i = 0; i < num_inputs; ++i) bits = std::max(bits, uint16_t(from[i].bits & 0x7fff));
    const float largest = to_float(BFloat16{bits}), limit = float(largest_whole<kType>(num_inputs));
    // What is not finite must not vanish: its scale makes every output of the row NaN.
    to.scales[row] = largest / limit;
    const float factor = largest > 0 && largest < bits_to_float(0x7f800000u) ? limit / largest : 0.0f;
#if defined(__AVX512BW__)
    if (kType == kInt4Weight || !to.high) round_words<kType>(from, factor, num_inputs, to.numbers + row * num_inputs);
    else
#endif
        round_row<kType>(from, factor, num_inputs, row, to);
    if (kType != kInt4Weight) return;
    for (int64_t group = 0; group < num_inputs / kGroup; ++group) {
        const int16_t* const numbers = to.numbers + row * num_inputs + group * kGroup;
        int32_t sum = 0;
        for (int i = 0; i < kGroup; ++i) sum += numbers[i];
        to.group_sums[row * (num_inputs / kGroup) + group] = float(sum);
    }
}

#if defined(__AVX512BW__)
inline __m512i add_products(__m512i sums, __m512i weights, __m512i inputs) {
#if defined(__AVX512VNNI__)
    return _mm512_dpwssd_epi32(sums, weights, inputs);
#else
    return _mm512_add_epi32(sums, _mm512_madd_epi16(weights, inputs));
#endif
}
#endif

// Gives blocks of results[num_rows][32] for rows of whole numbers, without the scales.
class WholeMultiplier {
public:
#if defined(RUNNERD_TILES)
    void operator()(const WholeRows& inputs, int64_t row, int64_t num_rows, const int8_t* const* panels,
                    int64_t num_inputs, float* results, const void* = nullptr) {
        for (int64_t first = 0; first < num_rows; first += 16) {
            const int64_t count = std::min<int64_t>(num_rows - first, 16), at = (row + first) * num_inputs;
            tiles_.configure(count, count);
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t k = 0; k < num_inputs; k += 64) {
                _tile_loadd(4, inputs.high + at + k, num_inputs);
                _tile_loadd(5, inputs.low + at + k, num_inputs);
                _tile_loadd(6, panels[0] + k * kPanel, 64);
                _tile_loadd(7, panels[1] + k * kPanel, 64);
                _tile_dpbssd(0, 4, 6);
                _tile_dpbssd(1, 4, 7);
                _tile_dpbssd(2, 5, 6);
                _tile_dpbssd(3, 5, 7);
            }
            alignas(64) int32_t high[16 * kWide], low[16 * kWide];
            _tile_stored(0, high, kWide * 4);
            _tile_stored(1, high + kPanel, kWide * 4);
            _tile_stored(2, low, kWide * 4);
            _tile_stored(3, low + kPanel, kWide * 4);
            for (int64_t i = 0; i < count * kWide; ++i) results[first * kWide + i] = float(high[i] * 128 + low[i]);
        }
    }

private:
    Tiles tiles_;
#else
    void operator()(const WholeRows& inputs, int64_t row, int64_t num_rows, const int8_t* const* panels,
                    int64_t num_inputs, float* results, const void* ahead = nullptr) {
        const char* next = static_cast<const char*>(ahead);
        in_passes<kRowsAtOnce>(num_rows, [&](int64_t first, auto count, int64_t num_passes) {
            const int64_t lines = next ? kStretchLines / num_passes : 0;
            rows<count>(inputs.numbers + (row + first) * num_inputs, panels, num_inputs, results + first * kWide, next,
                        lines);
            next += num_inputs / kStretch<int8_t> * lines * 64;
        });
    }

private:
    static constexpr int kRowsAtOnce = 8;

#if defined(__AVX512BW__)
    // A word of the weight holds inputs 0 and 1 or 2 and 3 of an output: shifts make words of 0 and 2, and of 1 and 3.
    template <int kRows>
    static void rows(const int16_t* numbers, const int8_t* const* panels, int64_t num_inputs, float* results,
                     const char* ahead, int64_t lines) {
        constexpr int kChains = kRows > 4 ? 1 : 2;  // with few rows, sums would wait for one another
        __m512i sums[kRows][2][kChains] = {};
        for (int64_t begin = 0; begin < num_inputs; begin += kStretch<int8_t>) {
            for (int64_t i = 0; i < lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
            for (int64_t k = begin; k < begin + kStretch<int8_t>; k += 4) {
                const __m512i left = _mm512_loadu_si512(panels[0] + k * kPanel);
                const __m512i right = _mm512_loadu_si512(panels[1] + k * kPanel);
                const __m512i left_even = _mm512_srai_epi16(_mm512_slli_epi16(left, 8), 8);
                const __m512i right_even = _mm512_srai_epi16(_mm512_slli_epi16(right, 8), 8);
                const __m512i left_odd = _mm512_srai_epi16(left, 8), right_odd = _mm512_srai_epi16(right, 8);
#pragma GCC unroll 16
                for (int r = 0; r < kRows; ++r) {
                    int32_t pairs[2];
                    std::memcpy(pairs, numbers + r * num_inputs + k, sizeof pairs);
                    const __m512i even = _mm512_set1_epi32(pairs[0]), odd = _mm512_set1_epi32(pairs[1]);
                    sums[r][0][0] = add_products(sums[r][0][0], left_even, even);
                    sums[r][1][0] = add_products(sums[r][1][0], right_even, even);
                    sums[r][0][kChains - 1] = add_products(sums[r][0][kChains - 1], left_odd, odd);
                    sums[r][1][kChains - 1] = add_products(sums[r][1][kChains - 1], right_odd, odd);
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
            for (int i = 0; i < 2; ++i) {
                __m512i sum = sums[r][i][0];
                if constexpr (kChains == 2) sum = _mm512_add_epi32(sum, sums[r][i][1]);
                _mm512_storeu_ps(results + r * kWide + i * kPanel, _mm512_cvtepi32_ps(sum));
            }
    }
#else
    template <int kRows>
    static void rows(const int16_t* numbers, const int8_t* const* panels, int64_t num_inputs, float* results,
                     const char*, int64_t) {
        for (int i = 0; i < 2; ++i)
            for (int r = 0; r < kRows; ++r) {
                int32_t sums[kPanel][4] = {};
                for (int64_t k = 0; k < num_inputs; k += 4)
                    for (int output = 0; output < kPanel; ++output)
                        for (int j = 0; j < 4; ++j)
                            sums[output][j] += int32_t(panels[i][k * kPanel + output * 4 + j]) *
                                               numbers[r * num_inputs + k + kPlaces<kInt8Weight>[j]];
                for (int output = 0; output < kPanel; ++output)
                    results[r * kWide + i * kPanel + output] =
                        float(sums[output][0] + sums[output][1] + sums[output][2] + sums[output][3]);
            }
    }
#endif
#endif
};

// Gives blocks of results[num_rows][32] for rows of whole numbers and an int4 weight, without the scales of the rows. The
// sum of a group is exact; those of the groups are added in float32, in their order.
class GroupMultiplier {
public:
    void operator()(const WholeRows& inputs, int64_t row, int64_t num_rows, const Nibbles* const* panels,
                    const Float16* const* scales, int64_t num_inputs, float* results, const void* ahead) {
        const char* next = static_cast<const char*>(ahead);
        in_passes<kRowsAtOnce>(num_rows, [&](int64_t first, auto count, int64_t num_passes) {
            const int64_t lines = next ? kLinesOfGroup / num_passes : 0, at = row + first;
            rows<count>(inputs.numbers + at * num_inputs, inputs.group_sums + at * (num_inputs / kGroup), panels, scales,
                        num_inputs, results + first * kWide, next, lines);
            next += num_inputs / kGroup * lines * 64;
        });
    }

private:
    static constexpr int64_t kLinesOfGroup = kGroup / 8 * kWide * sizeof(Nibbles) / 64;  // of two panels

#if defined(__AVX512BW__)
    static constexpr int kRowsAtOnce = 12;

    // Gives inputs `at` and `at` + 4 of each output as whole numbers of 16 bits.
    static __m512i pair_of(__m512i nibbles, int at) {
        return _mm512_and_si512(_mm512_srli_epi16(nibbles, 4 * at), _mm512_set1_epi16(15));
    }

    static __m512 to_floats(const Float16* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }

    template <int kRows>
    static void rows(const int16_t* numbers, const float* group_sums, const Nibbles* const* panels,
                     const Float16* const* scales, int64_t num_inputs, float* results, const char* ahead, int64_t lines) {
        const int64_t num_groups = num_inputs / kGroup;
        __m512 totals[kRows][2] = {};
        for (int64_t group = 0; group < num_groups; ++group) {
            for (int64_t i = 0; i < lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
            __m512i sums[kRows][2] = {};
            for (int64_t k = group * kGroup; k < (group + 1) * kGroup; k += 8) {
                const __m512i left = _mm512_loadu_si512(panels[0] + k / 8 * kPanel);
                const __m512i right = _mm512_loadu_si512(panels[1] + k / 8 * kPanel);
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) {
                    const __m512i of_left = pair_of(left, j), of_right = pair_of(right, j);
#pragma GCC unroll 16
                    for (int r = 0; r < kRows; ++r) {
                        int32_t pair;
                        std::memcpy(&pair, numbers + r * num_inputs + k + 2 * j, sizeof pair);
                        sums[r][0] = add_products(sums[r][0], of_left, _mm512_set1_epi32(pair));
                        sums[r][1] = add_products(sums[r][1], of_right, _mm512_set1_epi32(pair));
                    }
                }
            }
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                const Float16* const of_group = scales[i] + group * 2 * kPanel;
                const __m512 step = to_floats(of_group), least = to_floats(of_group + kPanel);
#pragma GCC unroll 16
                for (int r = 0; r < kRows; ++r) {
                    const __m512 inputs = _mm512_set1_ps(group_sums[r * num_groups + group]);
                    totals[r][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][i]), step, totals[r][i]);
                    totals[r][i] = _mm512_fmadd_ps(inputs, least, totals[r][i]);
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
            for (int i = 0; i < 2; ++i) _mm512_storeu_ps(results + r * kWide + i * kPanel, totals[r][i]);
    }
#else
    static constexpr int kRowsAtOnce = 1;

    template <int>
    static void rows(const int16_t* numbers, const float* group_sums, const Nibbles* const* panels,
                     const Float16* const* scales, int64_t num_inputs, float* results, const char*, int64_t) {
        for (int i = 0; i < 2; ++i) {
            float totals[kPanel] = {};
            for (int64_t group = 0; group < num_inputs / kGroup; ++group) {
                int32_t sums[kPanel] = {};
                for (int64_t k = group * kGroup; k < (group + 1) * kGroup; k += 8)
                    for (int output = 0; output < kPanel; ++output) {
                        const uint32_t bits = panels[i][k / 8 * kPanel + output].bits;
                        for (int j = 0; j < 8; ++j)
                            sums[output] += int32_t(bits >> 4 * j & 15) * numbers[k + kPlaces<kInt4Weight>[j]];
                    }
                const Float16* const of_group = scales[i] + group * 2 * kPanel;
                for (int output = 0; output < kPanel; ++output)
                    totals[output] += float(sums[output]) * to_float(of_group[output]) +
                                      group_sums[group] * to_float(of_group[kPanel + output]);
            }
            std::memcpy(results + i * kPanel, totals, sizeof totals);
        }
    }
#endif
};

inline int64_t panels_of(const Projection& p) { return (p.num_outputs + kPanel - 1) / kPanel; }
inline int64_t panel_bytes(const Projection& p) {
    const int64_t bits[] = {32, 16, 8, 4};  // of a number, by weight type
    return p.num_inputs * kPanel * bits[p.weight_type] / 8;
}
// Gives the first or the second panel of a pair; the last pair may have one panel only, which is taken for both.
inline int64_t panel_of(const Projection& p, int64_t pair, int i) { return std::min(2 * pair + i, panels_of(p) - 1); }

inline int64_t pairs_of(const Projection& p) { return (p.num_outputs + kWide - 1) / kWide; }
inline int64_t pairs_of_part(const Projection& p, int64_t threads) {
    return std::max<int64_t>(1, pairs_of(p) / (8 * threads));
}

// Calls compute(kernel, panels, pair, row, num_rows, results, ahead) and take(row, num_rows, output, num_outputs, results)
// for blocks of the product, results being [num_rows][32]. A block's outputs are those of a pair of panels, so that pairs
// may be joined. What lies at `ahead` will be wanted next; it may be null.
// `following` is the weight that will be read after this one; it may be null.
template <typename Kernel, typename Value, typename Compute, typename Take>
bool in_blocks(const Team& team, const Projection& p, const Projection* following, int64_t num_rows, Compute compute,
               Take take) {
    const int64_t num_pairs = pairs_of(p);
    const int64_t threads = std::min(team.num_threads, 1 + num_rows * p.num_inputs * p.num_outputs / kProductsPerThread);
    // With many rows a thread's share is of rows, else of outputs.
    const bool shares_rows = threads > 1 && num_rows >= threads * kRowsOfShare;
    const int64_t rows_of_thread = (num_rows + threads * kBlockRows - 1) / (threads * kBlockRows) * kBlockRows;
    const int64_t rows_per_pass = shares_rows ? std::min(kRowsPerPass, rows_of_thread) : kRowsPerPass;
    const int64_t num_passes = (num_rows + rows_per_pass - 1) / rows_per_pass;
    // More parts than threads: one that is late, or shares its core, takes fewer.
    const int64_t part = pairs_of_part(p, threads), num_parts = (num_pairs + part - 1) / part;
    const int64_t num_items = num_passes * num_parts;
    struct Scratch {
        std::unique_ptr<Kernel> kernel = std::make_unique<Kernel>();
        alignas(64) float results[kBlockRows * kWide];
    };
    const auto values_of = [](const Projection& of, int64_t panel) {
        return static_cast<const char*>(of.values) + panel * panel_bytes(of);
    };
    // What a thread will likely read next: the next of its share, or the first of its share of what follows.
    const auto after_item = [&](int64_t item) -> const char* {
        const int64_t share = ((item + 1) * threads - 1) / num_items;
        if (item + 1 < (share + 1) * num_items / threads) return values_of(p, 2 * ((item + 1) % num_parts * part));
        if (!following) return nullptr;
        const int64_t size = pairs_of_part(*following, threads), count = (pairs_of(*following) + size - 1) / size;
        return values_of(*following, shares_rows ? 0 : 2 * (share * count / threads * size));
    };
    const auto compute_item = [&](Scratch& s, int64_t item) {
        const int64_t begin = item / num_parts * rows_per_pass, end = std::min(begin + rows_per_pass, num_rows);
        const int64_t first = item % num_parts * part, last = std::min(first + part, num_pairs);
        for (int64_t pair = first; pair < last; ++pair) {
            const Value* panels[2];
            for (int i = 0; i < 2; ++i) panels[i] = reinterpret_cast<const Value*>(values_of(p, panel_of(p, pair, i)));
            const int64_t output = pair * kWide, num_outputs = std::min<int64_t>(kWide, p.num_outputs - output);
            for (int64_t row = begin; row < end; row += kBlockRows) {
                const int64_t count = std::min(kBlockRows, end - row);
                // While the last rows are computed, the next pair comes from memory.
                const void* const next = pair + 1 < last ? values_of(p, 2 * (pair + 1)) : after_item(item);
                const void* const ahead = row + count == end ? next : nullptr;
                compute(*s.kernel, panels, pair, row, count, s.results, ahead);
                if (p.bias)
                    for (int64_t r = 0; r < count; ++r)
                        for (int64_t i = 0; i < num_outputs; ++i) s.results[r * kWide + i] += p.bias[output + i];
                take(row, count, output, num_outputs, s.results);
            }
        }
    };
    return team.run(threads, num_items, [] { return Scratch(); }, compute_item);
}

// Gives the product of rows of float or bfloat16 to take; gives whether there was memory.
template <typename T, typename Take>
bool multiply(const Team& team, const Projection& p, const T* inputs, int64_t num_rows, Take take,
              const Projection* following = nullptr) {
    return in_blocks<Multiplier<T>, T>(
        team, p, following, num_rows,
        [&](Multiplier<T>& kernel, const T* const* panels, int64_t, int64_t row, int64_t count, float* results,
            const void* ahead) {
            kernel(inputs + row * p.num_inputs, p.num_inputs, count, panels, p.num_inputs, results, ahead);
        },
        take);
}

// The same for rows of whole numbers and an int8 weight.
template <typename Take>
bool multiply_int8(const Team& team, const Projection& p, const WholeRows& inputs, int64_t num_rows, Take take,
                   const Projection* following) {
    return in_blocks<WholeMultiplier, int8_t>(
        team, p, following, num_rows,
        [&](WholeMultiplier& kernel, const int8_t* const* panels, int64_t pair, int64_t row, int64_t count, float* results,
            const void* ahead) {
            kernel(inputs, row, count, panels, p.num_inputs, results, ahead);
            const int64_t num_outputs = std::min<int64_t>(kWide, (panels_of(p) - 2 * pair) * kPanel);
            const float* const scales = static_cast<const float*>(p.scales) + pair * kWide;
            for (int64_t r = 0; r < count; ++r)
                for (int64_t i = 0; i < num_outputs; ++i) results[r * kWide + i] *= scales[i] * inputs.scales[row + r];
        },
        take);
}

// The same for an int4 weight.
template <typename Take>
bool multiply_int4(const Team& team, const Projection& p, const WholeRows& inputs, int64_t num_rows, Take take,
                   const Projection* following) {
    return in_blocks<GroupMultiplier, Nibbles>(
        team, p, following, num_rows,
        [&](GroupMultiplier& kernel, const Nibbles* const* panels, int64_t pair, int64_t row, int64_t count, float* results,
            const void* ahead) {
            const int64_t of_panel = p.num_inputs / kGroup * 2 * kPanel;
            const Float16* scales[2];
            for (int i = 0; i < 2; ++i)
                scales[i] = static_cast<const Float16*>(p.scales) + panel_of(p, pair, i) * of_panel;
            kernel(inputs, row, count, panels, scales, p.num_inputs, results, ahead);
            for (int64_t r = 0; r < count; ++r)
                for (int i = 0; i < kWide; ++i) results[r * kWide + i] *= inputs.scales[row + r];
        },
        take);
}

}  // namespace
