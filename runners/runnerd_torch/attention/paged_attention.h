// Paged attention for CPUs over raw pointers, with no dependency but the C++17 library.
//
// The result of a query is a fixed function of its own sequence: keys are taken in tiles at fixed positions, each tile
// gives a maximum, a sum and a weighted value sum, and tiles are merged in order of position (the online softmax of
// FlashAttention, Dao et al. 2022). So neither other rows, nor chunking, nor the number of threads changes a bit.
// For that to hold, each sum below has one order and each expression at most one way to become fused multiply-adds.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "../native/matmul.h"
#include "../native/numbers.h"
#include "../native/team.h"

extern "C" {

enum Status { kOk = 0, kBadLengths = 1, kBadBlock = 2, kBadSlot = 3, kNoMemory = 4 };
enum DType { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Mirrored field by field in native_attention.py. Strides count elements; the innermost stride is 1.
struct WriteArgs {
    const void *key, *value;
    void *key_cache, *value_cache;
    const int64_t* slot_mapping;
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    int64_t num_tokens, num_slots, num_kv_heads, head_bytes, item_bytes;
};

struct ForwardArgs {
    const void *query, *key_cache, *value_cache;
    void* output;
    const int32_t *query_start_loc, *seq_lens, *block_tables;
    int64_t query_token_stride, query_head_stride, block_table_stride;
    int64_t num_rows, num_tokens, num_blocks, block_size, max_blocks, num_heads, num_kv_heads, head_dim;
    int64_t sliding_window;  // 0: none
    int64_t dtype, num_threads;
    int64_t packed;  // 1: the caches lie as pack_key and pack_value leave them
    ParallelRegion parallel_region;  // null: threads of our own
    float scale, softcap;            // softcap 0: none
};
}

namespace {

constexpr int kTile = 64;       // keys per tile
constexpr int kQueryRows = 48;  // (query token, head) pairs that share one pass over a tile
constexpr int kQueryRowsOfProducts = 192;  // the same where bfloat16 is multiplied as such
constexpr int kPages = kTile / kPanel;  // of a tile, where the caches are packed
constexpr int kLanes = 8;
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kAttentionProductsPerThread = 1 << 16;  // about 10 us; less is done sooner than another thread wakes up
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(32)));
typedef int32_t IntVec __attribute__((vector_size(32)));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

inline Vec load(const float* from) {
    Vec vec;
    std::memcpy(&vec, from, sizeof vec);
    return vec;
}
// A load that is used several times. Left alone, GCC repeats it as the memory operand of each multiply-add, and the
// loops below then wait for loads.
inline Vec load_once(const float* from) {
    Vec vec = load(from);
#if defined(__AVX__)
    __asm__("" : "+x"(vec));
#endif
    return vec;
}
inline void store(float* to, Vec vec) { std::memcpy(to, &vec, sizeof vec); }
inline Vec broadcast(float x) { return Vec{x, x, x, x, x, x, x, x}; }

inline int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

// e^x for x <= 0, 0 below -87: 2^n times the Taylor polynomial of the rest, whose size is at most ln(2) / 2.
inline Vec exp_of_negative(Vec x) {
    const Vec lowest = broadcast(-87.0f), magic = broadcast(12582912.0f);  // 1.5 * 2^23 rounds to an integer
    const IntVec underflow = x < lowest;
    x = underflow ? lowest : x;
    const Vec shifted = x * broadcast(1.44269504f) + magic;
    const Vec n = shifted - magic;
    Vec r = x - n * broadcast(0.693359375f);
    r = r + n * broadcast(2.12194440e-4f);
    Vec power = broadcast(1.0f / 5040);
    power = power * r + broadcast(1.0f / 720);
    power = power * r + broadcast(1.0f / 120);
    power = power * r + broadcast(1.0f / 24);
    power = power * r + broadcast(1.0f / 6);
    power = power * r + broadcast(0.5f);
    power = power * r + broadcast(1.0f);
    power = power * r + broadcast(1.0f);
    const IntVec exponent = ((IntVec)shifted - (IntVec)magic + 127) << 23;
    const Vec result = power * (Vec)exponent;
    return underflow ? broadcast(0.0f) : result;
}

#if defined(__AVX512BF16__)
inline __m512 exp_of_negative(__m512 x) {
    const __m512 lowest = _mm512_set1_ps(-87.0f);
    const __mmask16 counts = _mm512_cmp_ps_mask(x, lowest, _CMP_GE_OQ);
    x = _mm512_max_ps(x, lowest);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 power = _mm512_set1_ps(1.0f / 720);
    for (float next : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        power = _mm512_fmadd_ps(power, r, _mm512_set1_ps(next));
    return _mm512_maskz_scalef_ps(counts, power, n);
}
#endif

inline float sum_of_lanes(Vec x) { return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])); }
inline float max_of_lanes(Vec x) {
    float result = x[0];
    for (int i = 1; i < kLanes; ++i) result = x[i] > result ? x[i] : result;
    return result;
}

// Adds up the lanes of four vectors; the sums lie in lanes 0 to 3.
inline Vec sums_of_lanes(const Vec* v) {
    const Vec ab = SHUFFLE(v[0], v[1], 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(v[0], v[1], 2, 10, 3, 11, 6, 14, 7, 15);
    const Vec cd = SHUFFLE(v[2], v[3], 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(v[2], v[3], 2, 10, 3, 11, 6, 14, 7, 15);
    const Vec abcd = SHUFFLE(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    return abcd + SHUFFLE(abcd, abcd, 4, 5, 6, 7, 0, 1, 2, 3);
}

// scores[m][j] = query[m] . keys[j] for M query rows and 4 keys.
template <int M>
inline void score_block(const float* query, const float* const* keys, int64_t head_dim, float* scores) {
    Vec sums[M][4] = {};
    for (int64_t d = 0; d < head_dim; d += kLanes) {
        Vec q[M];
        for (int m = 0; m < M; ++m) q[m] = load_once(query + m * head_dim + d);
        for (int j = 0; j < 4; ++j) {
            const Vec k = load_once(keys[j] + d);
            for (int m = 0; m < M; ++m) sums[m][j] += q[m] * k;
        }
    }
    for (int m = 0; m < M; ++m) {
        const Vec result = sums_of_lanes(sums[m]);
        std::memcpy(scores + m * kTile, &result, 4 * sizeof(float));
    }
}

// output[m] = sum over i of weights[m][i] * values[i], for M query rows and N vectors of the head dimension.
template <int M, int N>
inline void weigh_block(const float* weights, const float* const* values, int num_keys, int64_t d, int64_t head_dim,
                        float* output) {
    Vec sums[M][N] = {};
    for (int i = 0; i < num_keys; ++i) {
        Vec weight[M];
        for (int m = 0; m < M; ++m) weight[m] = broadcast(weights[m * kTile + i]);
        for (int j = 0; j < N; ++j) {
            const Vec v = load_once(values[i] + d + j * kLanes);
            for (int m = 0; m < M; ++m) sums[m][j] += weight[m] * v;
        }
    }
    for (int m = 0; m < M; ++m)
        for (int j = 0; j < N; ++j) store(output + m * head_dim + d + j * kLanes, sums[m][j]);
}

constexpr int kRowsInFloat = 3;  // as many as the registers hold

// Scores of all query rows with the keys of a tile, so many keys at a time that they stay in the first-level cache.
void score_tile(const float* query, int64_t num_rows, const float* const* keys, int num_keys, int64_t head_dim,
                float* scores) {
    const int keys_at_once = int(std::max<int64_t>(4, 4096 / head_dim / 4 * 4));
    for (int first = 0; first < num_keys; first += keys_at_once)
        in_passes<kRowsInFloat>(num_rows, [&](int64_t row, auto rows_at_once, int64_t) {
            for (int j = first; j < std::min(first + keys_at_once, num_keys); j += 4)
                score_block<rows_at_once>(query + row * head_dim, keys + j, head_dim, scores + row * kTile + j);
        });
}

void weigh_tile(const float* weights, int64_t num_rows, const float* const* values, int num_keys, int64_t head_dim,
                float* output) {
    const auto weigh = [&](auto vectors_at_once, int64_t d) {
        in_passes<kRowsInFloat>(num_rows, [&](int64_t row, auto rows_at_once, int64_t) {
            weigh_block<rows_at_once, vectors_at_once>(weights + row * kTile, values, num_keys, d, head_dim,
                                                       output + row * head_dim);
        });
    };
    int64_t d = 0;
    for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) weigh(std::integral_constant<int, 4>(), d);
    for (; d < head_dim; d += kLanes) weigh(std::integral_constant<int, 1>(), d);
}

// Turns the scores of one query row into weights relative to the tile's maximum. Keys outside [begin, end) weigh 0.
__attribute__((noinline)) void softmax_of_tile(float* scores, int num_keys, int begin, int end, float softcap,
                                               float* max, float* sum) {
    const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7};
    Vec maxima = broadcast(kNegativeInfinity), sums = {};
    for (int i = 0; i < num_keys; i += kLanes) {
        Vec s = load(scores + i);
        if (softcap > 0) {
            const Vec x = s * broadcast(2.0f / softcap);
            const Vec e = exp_of_negative(x > 0 ? -x : x);
            const Vec t = (1.0f - e) / (1.0f + e) * broadcast(softcap);
            s = x < 0 ? -t : t;
        }
        const IntVec visible = (lane + i >= begin) & (lane + i < end);
        s = visible ? s : broadcast(kNegativeInfinity);
        maxima = s > maxima ? s : maxima;
        store(scores + i, s);
    }
    *max = max_of_lanes(maxima);
    // With nothing visible, subtracting 0 keeps e^(-inf) = 0; -inf - -inf would be NaN.
    const Vec shift = broadcast(*max == kNegativeInfinity ? 0.0f : *max);
    for (int i = 0; i < num_keys; i += kLanes) {
        const Vec weight = exp_of_negative(load(scores + i) - shift);
        store(scores + i, weight);
        sums += weight;
    }
    *sum = sum_of_lanes(sums);
}

// Merges maxima and sums of a tile into those of the tiles before it, and gives the factors of what was and what comes.
// One body, so that all callers round alike. With nothing visible so far, subtracting 0 keeps e^(-inf) = 0; -inf - -inf
// would be NaN.
#if defined(__AVX512BF16__)
__attribute__((noinline)) void merge_sums(int64_t num_rows, float* max, float* sum, const float* tile_max,
                                          const float* tile_sum, float* keep, float* take) {
    const __m512 lowest = _mm512_set1_ps(kNegativeInfinity);
    for (int64_t row = 0; row < num_rows; row += 16) {
        const __mmask16 mask = num_rows - row >= 16 ? __mmask16(0xffff) : __mmask16((1 << (num_rows - row)) - 1);
        const __m512 before = _mm512_maskz_loadu_ps(mask, max + row), added = _mm512_maskz_loadu_ps(mask, tile_max + row);
        const __m512 larger = _mm512_max_ps(added, before);
        const __m512 shift = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(larger, lowest, _CMP_NEQ_UQ), larger);
        const __m512 kept = exp_of_negative(_mm512_sub_ps(before, shift));
        const __m512 taken = exp_of_negative(_mm512_sub_ps(added, shift));
        const __m512 kept_sum = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, sum + row), kept);
        _mm512_mask_storeu_ps(sum + row, mask,
                              _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, tile_sum + row), taken, kept_sum));
        _mm512_mask_storeu_ps(max + row, mask, larger);
        _mm512_mask_storeu_ps(keep + row, mask, kept);
        _mm512_mask_storeu_ps(take + row, mask, taken);
    }
}

// output = output * keep + added * take, for 16 numbers of one row.
inline void merge_output(float keep, float take, __m512 added, float* output) {
    const __m512 taken = _mm512_mul_ps(added, _mm512_set1_ps(take));
    _mm512_storeu_ps(output, _mm512_fmadd_ps(_mm512_loadu_ps(output), _mm512_set1_ps(keep), taken));
}
#else
__attribute__((noinline)) void merge_sums(int64_t num_rows, float* max, float* sum, const float* tile_max,
                                          const float* tile_sum, float* keep, float* take) {
    for (int64_t row = 0; row < num_rows; row += kLanes) {  // arrays reach up to a multiple of 8
        const Vec before = load(max + row), added = load(tile_max + row);
        const Vec larger = added > before ? added : before;
        const Vec shift = larger == kNegativeInfinity ? broadcast(0.0f) : larger;
        const Vec kept = exp_of_negative(before - shift), taken = exp_of_negative(added - shift);
        store(sum + row, load(sum + row) * kept + load(tile_sum + row) * taken);
        store(max + row, larger);
        store(keep + row, kept);
        store(take + row, taken);
    }
}
#endif

// output = output * keep + added * take, for rows of `width` numbers.
__attribute__((noinline)) void merge_outputs(int64_t num_rows, int64_t width, const float* keep, const float* take,
                                             float* output, const float* added) {
    for (int64_t row = 0; row < num_rows; ++row, output += width, added += width) {
        int64_t d = 0;
#if defined(__AVX512BF16__)
        for (; d + 16 <= width; d += 16) merge_output(keep[row], take[row], _mm512_loadu_ps(added + d), output + d);
#endif
        for (; d < width; d += kLanes)
            store(output + d, load(output + d) * broadcast(keep[row]) + load(added + d) * broadcast(take[row]));
    }
}

// A piece of work: some new tokens of a row, for some KV heads and their query heads, over some tiles of keys.
struct Unit {
    int64_t row, first_query, num_queries, first_head, num_heads, first_tile, num_tiles;
    float* partials;  // null: write the output; else keep what each tile gives, for merge_partials
    int64_t cost() const { return num_tiles * num_heads * num_queries; }
};

struct Attention {
    const ForwardArgs& a;
    const bool uses_products;  // bfloat16 is multiplied as such
    const int64_t group = a.num_heads / a.num_kv_heads;
    const int64_t queries_per_unit = std::max<int64_t>(1, (uses_products ? kQueryRowsOfProducts : kQueryRows) / group);
    std::vector<Unit> units;  // in the order of work: the longest first
    std::vector<Unit> split;  // units that were cut; their partials lie one tile after the other
    int64_t num_threads = 1;
    std::unique_ptr<float[]> partials;
    int64_t partials_size = 0;

    int64_t query_len(int64_t row) const { return a.query_start_loc[row + 1] - a.query_start_loc[row]; }
    int64_t position(int64_t row, int64_t query) const { return a.seq_lens[row] - query_len(row) + query; }
    int64_t first_visible(int64_t position) const {
        return a.sliding_window > 0 ? std::max<int64_t>(0, position - a.sliding_window + 1) : 0;
    }

    Status check() const {
        if (a.query_start_loc[0] != 0 || a.query_start_loc[a.num_rows] != a.num_tokens) return kBadLengths;
        for (int64_t row = 0; row < a.num_rows; ++row) {
            if (query_len(row) < 0 || a.seq_lens[row] < query_len(row)) return kBadLengths;
            if (query_len(row) == 0) continue;
            const int64_t end_block = (a.seq_lens[row] + a.block_size - 1) / a.block_size;
            if (end_block > a.max_blocks) return kBadLengths;
            // Blocks that slid out of the window may be gone.
            for (int64_t i = first_visible(position(row, 0)) / a.block_size; i < end_block; ++i) {
                const int32_t block = a.block_tables[row * a.block_table_stride + i];
                if (block < 0 || block >= a.num_blocks) return kBadBlock;
            }
        }
        return kOk;
    }

    // The keys that some query of a unit sees.
    int64_t first_key(const Unit& unit) const { return first_visible(position(unit.row, unit.first_query)); }
    int64_t last_key(const Unit& unit) const { return position(unit.row, unit.first_query + unit.num_queries - 1); }

    int64_t num_rows(const Unit& unit) const { return unit.num_queries * unit.num_heads * group; }
    int64_t partial_size(const Unit& unit) const { return num_rows(unit) * (a.head_dim + 2); }  // of one tile

    void plan() {
        for (int64_t row = 0; row < a.num_rows; ++row) {
            // One token: all heads together read the cache in its order. Many tokens: there is more to compute than to
            // read, and what one head needs stays in the core's cache.
            const int64_t num_heads = query_len(row) > 1 ? 1 : a.num_kv_heads;
            for (int64_t query = 0; query < query_len(row); query += queries_per_unit)
                for (int64_t head = 0; head < a.num_kv_heads; head += num_heads) {
                    const int64_t num_queries = std::min(queries_per_unit, query_len(row) - query);
                    const int64_t first_tile = first_visible(position(row, query)) / kTile;
                    const int64_t end_tile = position(row, query + num_queries - 1) / kTile + 1;
                    units.push_back(
                        {row, query, num_queries, head, num_heads, first_tile, end_tile - first_tile, nullptr});
                }
        }
        int64_t num_products = 0;
        for (const Unit& unit : units) num_products += unit.cost() * group * kTile * a.head_dim * 2;
        num_threads = std::min(a.num_threads, 1 + num_products / kAttentionProductsPerThread);
        if (num_threads > 1 && int64_t(units.size()) < 4 * num_threads) split_units();
        // Each thread has its share of the tokens; of a share, the longest units come first.
        const auto share = [this](const Unit& unit) {
            return (a.query_start_loc[unit.row] + unit.first_query) * num_threads / a.num_tokens;
        };
        std::sort(units.begin(), units.end(), [share](const Unit& x, const Unit& y) {
            return share(x) != share(y) ? share(x) < share(y) : x.cost() > y.cost();
        });
    }

    // Few rows leave threads without work, so units of one token are cut along the sequence, then between heads.
    void split_units() {
        const int64_t wanted = ceil_div(4 * num_threads, int64_t(units.size()));
        std::vector<Unit> whole;
        std::swap(whole, units);
        for (const Unit& unit : whole) partials_size += unit.num_queries > 1 ? 0 : unit.num_tiles * partial_size(unit);
        partials.reset(new float[partials_size]);
        float* next = partials.get();
        for (const Unit& unit : whole) {
            if (unit.num_queries > 1) {
                units.push_back(unit);
                continue;
            }
            const int64_t tiles_step = ceil_div(unit.num_tiles, std::min(wanted, unit.num_tiles));
            const int64_t heads_step = ceil_div(unit.num_heads, ceil_div(wanted, ceil_div(unit.num_tiles, tiles_step)));
            for (int64_t head = 0; head < unit.num_heads; head += heads_step) {
                Unit of_heads = unit;
                of_heads.first_head += head;
                of_heads.num_heads = std::min(heads_step, unit.num_heads - head);
                if (tiles_step < unit.num_tiles) {
                    of_heads.partials = next;
                    split.push_back(of_heads);
                }
                for (int64_t tile = 0; tile < unit.num_tiles; tile += tiles_step) {
                    Unit part = of_heads;
                    part.first_tile += tile;
                    part.num_tiles = std::min(tiles_step, unit.num_tiles - tile);
                    units.push_back(part);
                    if (part.partials) next = of_heads.partials += part.num_tiles * partial_size(part);
                }
            }
        }
    }
};

// Work memory of one thread. Rows are (KV head, query token, query head of the KV head), the last running fastest.
struct Scratch {
    Scratch(int64_t num_rows, int64_t head_size)
        : max_rows((num_rows + 15) / 16 * 16), head_dim(head_size),
          memory(static_cast<float*>(::operator new(size() * sizeof(float), std::align_val_t(64)))) {}
    int64_t size() const { return max_rows * (3 * head_dim + 2 * kTile + 6) + 2 * kTile * head_dim; }
    struct Free {
        void operator()(float* memory) const { ::operator delete(memory, std::align_val_t(64)); }
    };

    const int64_t max_rows, head_dim;
    std::unique_ptr<float, Free> memory;
    float* query = memory.get();
    float* output = query + max_rows * head_dim;
    float* tile_output = output + max_rows * head_dim;
    float* scores = tile_output + max_rows * head_dim;
    float* weights = scores + max_rows * kTile;
    float* max = weights + max_rows * kTile;
    float* sum = max + max_rows;
    float* tile_max = sum + max_rows;
    float* tile_sum = tile_max + max_rows;
    float* keep = tile_sum + max_rows;
    float* take = keep + max_rows;
    float* keys = take + max_rows;
    float* values = keys + kTile * head_dim;
    int64_t slots[kTile];  // the tile's slots, the same for all heads
    int64_t pages[kPages];  // the same where the caches are packed
    const float* key_rows[kTile];
    const float* value_rows[kTile];
};

// Gives a row of the cache in float32: where it lies, or copied to `copy`.
template <typename T>
inline const float* row_as_float(const T* row, bool in_place, float* copy, int64_t head_dim) {
    if constexpr (std::is_same_v<T, float>)
        if (in_place) return row;
    convert(row, copy, head_dim);
    return copy;
}

// Finds the slots of a tile; gives how many keys there are, and fills up to a whole tile.
int find_slots(const Attention& attention, const Unit& unit, int64_t tile, Scratch& s) {
    const ForwardArgs& a = attention.a;
    const int64_t first = attention.first_key(unit), last = attention.last_key(unit);
    const int num_keys = int(std::min<int64_t>(kTile, last + 1 - tile * kTile));
    const int32_t* blocks = a.block_tables + unit.row * a.block_table_stride;
    // What no query of the unit sees may be another's by now, or NaN: a key that is seen stands in, with weight 0.
    int64_t position = std::clamp<int64_t>(tile * kTile, first, last), offset = position % a.block_size;
    const int32_t* block = blocks + position / a.block_size;
    for (int i = 0; i < kTile; ++i) {
        s.slots[i] = *block * a.block_size + offset;
        if (tile * kTile + i < first || position == last) continue;
        ++position;
        if (++offset == a.block_size) {
            offset = 0;
            ++block;
        }
    }
    return num_keys;
}

// Finds the pages of a tile; one that no query of the unit sees is replaced by one that it sees.
inline void find_pages(const Attention& attention, const Unit& unit, int64_t tile, int64_t* pages) {
    const ForwardArgs& a = attention.a;
    const int64_t first = attention.first_key(unit), last = attention.last_key(unit);
    for (int64_t i = 0; i < kPages; ++i) {
        const int64_t position = std::clamp(tile * kTile + i * kPanel, first / kPanel * kPanel, last);
        const int32_t block = a.block_tables[unit.row * a.block_table_stride + position / a.block_size];
        pages[i] = (block * a.block_size + position % a.block_size) / kPanel;
    }
}

// Reads memory from front to back, so that the processor sees a stream and fetches ahead of it. The loops that need it
// jump; asked for by prefetches, it came no sooner than they did.
inline void touch(const void* from, int64_t num_bytes) {
    uint64_t sum = 0;
    for (int64_t offset = 0; offset < num_bytes; offset += 64) {
        uint64_t word;
        std::memcpy(&word, static_cast<const char*>(from) + offset, sizeof word);
        sum += word;
    }
    __asm__ volatile("" : : "r"(sum));
}

// Brings a tile's pages near, for the heads of a unit.
inline void touch_pages(const ForwardArgs& a, const Unit& unit, const int64_t* pages) {
    const int64_t page_bytes = a.head_dim * kPanel * 2;
    for (const void* cache : {a.key_cache, a.value_cache})
        for (int i = 0; i < kPages; ++i) {
            if (i && pages[i] == pages[i - 1]) continue;
            const int64_t offset = (pages[i] * a.num_kv_heads + unit.first_head) * page_bytes;
            touch(static_cast<const char*>(cache) + offset, unit.num_heads * page_bytes);
        }
}

// Asks for all heads of a tile in the order of memory; the loops over one head jump from token to token.
template <typename T>
void prefetch_tile(const ForwardArgs& a, const Scratch& s, int num_keys) {
    const int64_t token_bytes = a.num_kv_heads * a.head_dim * int64_t(sizeof(T));
    for (const void* cache : {a.key_cache, a.value_cache})
        for (int i = 0; i < num_keys; ++i)
            for (int64_t offset = 0; offset < token_bytes; offset += 64)
                __builtin_prefetch(static_cast<const char*>(cache) + s.slots[i] * token_bytes + offset, 0, 2);
}

// A packed cache has the keys and values of 16 tokens, a page, as products take them:
//   keys: [num_pages][num_kv_heads][head_dim / 2][16 tokens][2]
//   values: [num_pages][num_kv_heads][head_dim / 16][8][16 of head_dim][2 tokens]
// These write `size` numbers of a head, from `begin` on; both are multiples of 16 for values, of 2 for keys.
inline void pack_key(const BFloat16* from, int64_t begin, int64_t size, int64_t slot, int64_t head, int64_t num_heads,
                     int64_t head_dim, BFloat16* cache) {
    BFloat16* const to = cache + ((slot / kPanel * num_heads + head) * head_dim + begin) * kPanel + slot % kPanel * 2;
    for (int64_t d = 0; d < size; d += 2) std::memcpy(to + d * kPanel, from + d, 4);
}

inline void pack_value(const BFloat16* from, int64_t begin, int64_t size, int64_t slot, int64_t head, int64_t num_heads,
                       int64_t head_dim, BFloat16* cache) {
    const int64_t lane = slot % kPanel, page = slot / kPanel * num_heads + head;
    BFloat16* const to = cache + (page * head_dim + begin + lane / 2 * 2) * kPanel + lane % 2;
    for (int64_t d = 0; d < size; d += kPanel)
        for (int64_t i = 0; i < kPanel; ++i) to[d * kPanel + 2 * i] = from[d + i];
}

// What a thread keeps for its work.
template <typename T>
struct ThreadState {
    Scratch scratch;
};
#if defined(__AVX512BF16__)
template <>
struct ThreadState<BFloat16> {
    Scratch scratch;
    Multiplier<BFloat16> multiply{};
};
#endif

#if defined(__AVX512BF16__)
#define RUNNERD_BFLOAT16_PRODUCTS 1

// Turns 16 rows of 16 words around; what comes of the first 8 words goes to `lower`, of the others to `upper`, 16 words
// each.
inline void transpose(const uint32_t* const* rows, int64_t offset, uint32_t* lower, uint32_t* upper) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + offset);
    for (int i = 0; i < 8; ++i) {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; ++i) {
        _mm512_storeu_si512(lower + i * 16, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_storeu_si512(upper + i * 16, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
    }
}

// Lets 16 numbers of two rows take turns.
inline void interleave(const BFloat16* even, const BFloat16* odd, BFloat16* to) {
    const __m512i lower = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)even));
    const __m512i upper = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)odd));
    _mm512_storeu_si512(to, _mm512_or_si512(lower, _mm512_slli_epi32(upper, 16)));
}

// These write 32 numbers of a head for all tokens of a page: what pack_key and pack_value write one token at a time.
// 16 of a key's numbers go to `low`, the others to `high`.
inline void pack_keys(const BFloat16 (*from)[2 * kPanel], BFloat16* low, BFloat16* high) {
    const uint32_t* rows[kPanel];
    for (int i = 0; i < kPanel; ++i) rows[i] = reinterpret_cast<const uint32_t*>(from[i]);
    transpose(rows, 0, reinterpret_cast<uint32_t*>(low), reinterpret_cast<uint32_t*>(high));
}

inline void pack_values(const BFloat16 (*from)[2 * kPanel], BFloat16* to) {
    for (int64_t d = 0; d < 2 * kPanel; d += kPanel)
        for (int64_t token = 0; token < kPanel; token += 2)
            interleave(from[token] + d, from[token + 1] + d, to + (d + token) * kPanel);
}

// 2^x to 18 bits, for results that bfloat16 keeps 8 bits of: a polynomial of what is above the next lower whole number,
// with the least largest relative error. 0 where nothing is visible.
inline __m512 power_of_two(__m512 x, __mmask16 visible = 0xffff) {
    const __m512 r = _mm512_reduce_ps(x, 9);
    __m512 power = _mm512_set1_ps(0.013534168f);
    for (float next : {0.052011460f, 0.24144275f, 0.69300383f, 1.0000026f})
        power = _mm512_fmadd_ps(power, r, _mm512_set1_ps(next));
    return _mm512_maskz_scalef_ps(visible, power, x);
}

// Joins the lanes of each of four vectors; what becomes of vector i lies in lane i of each quarter.
template <typename Join>
inline __m512 join_lanes(const __m512* v, Join join) {
    const __m512 ab = join(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const __m512 cd = join(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512 all = join(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    all = join(all, _mm512_shuffle_f32x4(all, all, 0x4e));
    return join(all, _mm512_shuffle_f32x4(all, all, 0xb1));
}

// tanh(score * scale / softcap) * softcap.
inline __m512 cap(__m512 score, float scale, float softcap) {
    const __m512 x = _mm512_mul_ps(score, _mm512_set1_ps(2.0f * scale / softcap));
    const __m512 e = exp_of_negative(_mm512_or_ps(x, _mm512_set1_ps(-0.0f)));
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 t = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    return _mm512_mul_ps(_mm512_or_ps(t, _mm512_and_ps(x, _mm512_set1_ps(-0.0f))), _mm512_set1_ps(softcap));
}

#if defined(RUNNERD_TILES)
constexpr int64_t kScoresRowStep = kWide, kScoresPartStep = kBlockRows * kWide;
#else
constexpr int64_t kScoresRowStep = kTile, kScoresPartStep = kWide;
#endif

// Gives the weights of up to kBlockRows query rows relative to each one's maximum in the tile. Part p of the scores of row
// r begins at scores + r * kScoresRowStep + p * kScoresPartStep; bit i of visible[r] tells whether it sees key i, of all
// keys if not kMasked. Capped scores are left where scores were. All maxima come first: a row's weights wait for its
// maximum, which takes longer than they do, and the processor sees no more than two rows ahead.
template <bool kMasked, bool kCapped>
__attribute__((noinline)) void softmax_of_rows(int64_t num_rows, float* scores, float scale, float softcap,
                                               const uint64_t* visible, BFloat16* weights, float* max, float* sum) {
    const __m512 lowest = _mm512_set1_ps(kNegativeInfinity);
    constexpr float kLog2E = 1.44269504f;
    const float scale_left = kCapped ? 1.0f : scale;
    const __m512 factor = _mm512_set1_ps(scale_left * kLog2E);
    float shifts[kBlockRows];
    const auto place = [scores](int64_t row, int i) {
        return scores + row * kScoresRowStep + i / 2 * kScoresPartStep + i % 2 * 16;
    };
    const auto seen = [visible](int64_t row, int i) { return __mmask16(kMasked ? visible[row] >> (16 * i) : 0xffff); };
    in_passes<4>(num_rows, [&](int64_t first, auto count, int64_t) {
        constexpr __mmask16 kStored = (1 << count) - 1;
        __m512 joined[4] = {lowest, lowest, lowest, lowest};
#pragma GCC unroll 4
        for (int r = 0; r < count; ++r) {
            __m512 s[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                s[i] = _mm512_loadu_ps(place(first + r, i));
                if (kCapped) _mm512_storeu_ps(place(first + r, i), s[i] = cap(s[i], scale, softcap));
                if (kMasked) s[i] = _mm512_mask_mov_ps(lowest, seen(first + r, i), s[i]);
            }
            joined[r] = _mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3]));
        }
        const __m512 highest = join_lanes(joined, [](__m512 x, __m512 y) { return _mm512_max_ps(x, y); });
        _mm512_mask_storeu_ps(shifts + first, kStored, _mm512_mul_ps(highest, factor));
        _mm512_mask_storeu_ps(max + first, kStored, _mm512_mul_ps(highest, _mm512_set1_ps(scale_left)));
    });
    in_passes<4>(num_rows, [&](int64_t first, auto count, int64_t) {
        __m512 joined[4] = {};
#pragma GCC unroll 4
        for (int r = 0; r < count; ++r) {
            const int64_t row = first + r;
            const __m512 shift = _mm512_set1_ps(shifts[row]);
            __m512 s[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i)
                s[i] = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(place(row, i)), factor, shift), seen(row, i));
            joined[r] = _mm512_add_ps(_mm512_add_ps(s[0], s[1]), _mm512_add_ps(s[2], s[3]));
            _mm512_storeu_si512(weights + row * kTile, (__m512i)_mm512_cvtne2ps_pbh(s[1], s[0]));
            _mm512_storeu_si512(weights + row * kTile + 32, (__m512i)_mm512_cvtne2ps_pbh(s[3], s[2]));
        }
        _mm512_mask_storeu_ps(sum + first, (1 << count) - 1,
                              join_lanes(joined, [](__m512 x, __m512 y) { return _mm512_add_ps(x, y); }));
    });
}

constexpr uint64_t kAllKeys = ~uint64_t(0);

// A word whose bits from begin to end - 1 are set.
inline uint64_t bits_between(int64_t begin, int64_t end) {
    if (begin >= kTile || end <= 0) return 0;
    return (end >= kTile ? kAllKeys : ~(kAllKeys << end)) & (begin <= 0 ? kAllKeys : kAllKeys << begin);
}

// A tile's keys and values of one head, page by page, in the form above.
struct TilePages {
    const BFloat16 *keys[kPages], *values[kPages];
    int first = 0, end = kPages;  // others are seen by nobody, and stand for nothing

    // Leaves out pages without keys from begin to end_key - 1, counted from the tile's first key.
    void limit(int64_t begin, int64_t end_key) {
        first = std::max(first, int(std::max<int64_t>(begin, 0) / kPanel));
        end = std::min(end, int(ceil_div(std::clamp<int64_t>(end_key, 0, kTile), kPanel)));
    }
};

// Arranges pages of rows that lie token by token.
inline TilePages arrange(const Attention& attention, int64_t kv_head, Scratch& s) {
    const ForwardArgs& a = attention.a;
    const int64_t token_size = a.num_kv_heads * a.head_dim;
    BFloat16* const keys = reinterpret_cast<BFloat16*>(s.keys);
    BFloat16* const values = reinterpret_cast<BFloat16*>(s.values);
    const BFloat16* const cached_values = static_cast<const BFloat16*>(a.value_cache) + kv_head * a.head_dim;
    TilePages pages;
    for (int64_t page = 0; page < kPages; ++page) {
        pages.keys[page] = keys + page * a.head_dim * kPanel;
        pages.values[page] = values + page * a.head_dim * kPanel;
        const uint32_t* rows[kPanel];
        for (int i = 0; i < kPanel; ++i)
            rows[i] = reinterpret_cast<const uint32_t*>(static_cast<const BFloat16*>(a.key_cache) +
                                                        s.slots[page * kPanel + i] * token_size + kv_head * a.head_dim);
        for (int64_t d = 0; d < a.head_dim / 2; d += 16) {
            uint32_t* const to = reinterpret_cast<uint32_t*>(keys + page * a.head_dim * kPanel) + d * kPanel;
            transpose(rows, d, to, to + 8 * kPanel);
        }
        // Words of two keys at a time: the lower halves of a pair of rows, and the upper ones.
        for (int64_t key = 0; key < kPanel; key += 2) {
            const BFloat16* even = cached_values + s.slots[page * kPanel + key] * token_size;
            const BFloat16* odd = cached_values + s.slots[page * kPanel + key + 1] * token_size;
            for (int64_t d = 0; d < a.head_dim; d += kPanel)
                interleave(even + d, odd + d, values + page * a.head_dim * kPanel + (d + key) * kPanel);
        }
    }
    return pages;
}

// Gives the pages of a packed cache. What no query of the unit sees may be NaN: such values become 0.
inline TilePages find_in_cache(const Attention& attention, const Unit& unit, int64_t tile, int64_t kv_head, Scratch& s) {
    const ForwardArgs& a = attention.a;
    const int64_t size = a.head_dim * kPanel;
    const int64_t begin = attention.first_key(unit) - tile * kTile, end = attention.last_key(unit) + 1 - tile * kTile;
    TilePages pages;
    pages.limit(begin, end);
    for (int page = 0; page < kPages; ++page) {
        const int64_t offset = (s.pages[page] * a.num_kv_heads + kv_head) * size;
        pages.keys[page] = static_cast<const BFloat16*>(a.key_cache) + offset;
        const BFloat16* const values = static_cast<const BFloat16*>(a.value_cache) + offset;
        pages.values[page] = values;
        const int64_t seen = begin - page * kPanel, unseen = end - page * kPanel;
        if (page < pages.first || page >= pages.end || (seen <= 0 && unseen >= kPanel)) continue;
        BFloat16* const copy = reinterpret_cast<BFloat16*>(s.values) + page * size;
        for (int64_t key = 0; key < kPanel; key += 2) {
            const uint32_t even = key >= seen && key < unseen ? 0xffffu : 0u;
            const uint32_t odd = key + 1 >= seen && key + 1 < unseen ? 0xffff0000u : 0u;
            const __m512i mask = _mm512_set1_epi32(int32_t(even | odd));
            for (int64_t d = 0; d < a.head_dim; d += kPanel)
                _mm512_storeu_si512(copy + (d + key) * kPanel,
                                    _mm512_and_si512(mask, _mm512_loadu_si512(values + (d + key) * kPanel)));
        }
        pages.values[page] = copy;
    }
    return pages;
}

// Gives the scores of up to kBlockRows rows, in two parts of 32 keys: part p of row r begins at scores + r *
// kScoresRowStep + p * kScoresPartStep. Those of pages that nobody sees are not set.
inline void score_pages(const TilePages& pages, const BFloat16* query, int64_t num_rows, int64_t head_dim, float* scores,
                        Multiplier<BFloat16>& multiply) {
#if !defined(RUNNERD_TILES)
    const auto store = [scores](int64_t row, int i, __m512 sums) {
        _mm512_storeu_ps(scores + row * kScoresRowStep + i * kPanel, sums);
    };
    if (pages.first < 2 && pages.end > 2)
        return multiply.segments<kPages>(query, head_dim, num_rows, pages.keys, head_dim, 1, store);
#endif
    for (int part = pages.first / 2; part < (pages.end + 1) / 2; ++part) {
#if defined(RUNNERD_TILES)
        multiply(query, head_dim, num_rows, pages.keys + 2 * part, head_dim, scores + part * kScoresPartStep);
#else
        multiply.segments<2>(query, head_dim, num_rows, pages.keys + 2 * part, head_dim, 1,
                             [&](int64_t row, int i, __m512 sums) { store(row, 2 * part + i, sums); });
#endif
    }
}

// Adds up the weighted values of rows of a head, kPanels of 16 of the head dimension at a time from d on; gives the sums
// of each row and panel to take(row, d, sums).
template <int kPanels, typename Take>
void weigh_pages(const TilePages& pages, const BFloat16* weights, int64_t num_rows, int64_t d,
                 Multiplier<BFloat16>& multiply, Take take) {
    const BFloat16* panels[kPanels * kPages];
    for (int page = pages.first; page < pages.end; ++page)
        for (int i = 0; i < kPanels; ++i)
            panels[kPanels * (page - pages.first) + i] = pages.values[page] + (d + i * kPanel) * kPanel;
#if defined(RUNNERD_TILES)
    // Tiles want a panel in one piece.
    alignas(64) BFloat16 pieces[kPanels][kTile * kPanel];
    alignas(64) float results[kBlockRows * kWide];
    for (int page = 0; page < kPages; ++page)
        for (int i = 0; i < kPanels; ++i) {
            BFloat16* const to = pieces[i] + page * kPanel * kPanel;
            if (page < pages.first || page >= pages.end) std::memset(to, 0, kPanel * kPanel * 2);
            else std::memcpy(to, panels[kPanels * (page - pages.first) + i], kPanel * kPanel * 2);
        }
    for (int i = 0; i < kPanels; ++i) panels[i] = pieces[i];
    for (int64_t i = 0; i < kPanels; i += 2) {
        multiply(weights, kTile, num_rows, panels + i, kTile, results);
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t j = 0; j < 2; ++j)
                take(row, d + (i + j) * kPanel, _mm512_loadu_ps(results + row * kWide + j * kPanel));
    }
#else
    multiply.segments<kPanels>(weights + pages.first * kPanel, kTile, num_rows, panels, kPanel, pages.end - pages.first,
                               [&](int64_t row, int i, __m512 sums) { take(row, d + i * kPanel, sums); });
#endif
}

// Attends to one tile with the rows of a KV head, which begin at first_row, by products of bfloat16. What comes of it is
// merged into the scratch, or left in tile_max, tile_sum and tile_output.
inline void attend_by_products(const Attention& attention, const Unit& unit, int64_t tile, int64_t kv_head,
                               int64_t first_row, Scratch& s, Multiplier<BFloat16>& multiply) {
    const ForwardArgs& a = attention.a;
    const int64_t group = attention.group, end_row = first_row + unit.num_queries * group;
    const BFloat16* const query = reinterpret_cast<const BFloat16*>(s.query);
    const TilePages pages_of_unit =
        a.packed ? find_in_cache(attention, unit, tile, kv_head, s) : arrange(attention, kv_head, s);
    // The keys that a row sees, counted from the tile's first.
    const auto end_for = [&](int64_t row) {
        return attention.position(unit.row, unit.first_query + (row - first_row) / group) + 1 - tile * kTile;
    };
    const auto begin_for = [&](int64_t row) {
        return attention.first_visible(end_for(row) - 1 + tile * kTile) - tile * kTile;
    };
    alignas(64) float scores[2 * kBlockRows * kWide];
    alignas(64) BFloat16 weights[kBlockRows * kTile];
    // So few rows at a time that all they need stays in the first-level cache.
    for (int64_t row = first_row; row < end_row; row += kBlockRows) {
        const int64_t num_rows = std::min(kBlockRows, end_row - row), last_row = row + num_rows - 1;
        TilePages pages = pages_of_unit;
        pages.limit(begin_for(row), end_for(last_row));
        if (pages.first >= pages.end) continue;
        score_pages(pages, query + row * a.head_dim, num_rows, a.head_dim, scores, multiply);
        const bool all_visible = begin_for(last_row) <= 0 && end_for(row) >= kTile;
        uint64_t visible[kBlockRows];
        for (int64_t r = 0; r < num_rows; ++r)
            visible[r] = all_visible ? kAllKeys : bits_between(begin_for(row + r), end_for(row + r));
        const auto softmax = a.softcap > 0 ? softmax_of_rows<true, true>
                             : all_visible ? softmax_of_rows<false, false>
                                           : softmax_of_rows<true, false>;
        softmax(num_rows, scores, a.scale, a.softcap, visible, weights, s.tile_max + row, s.tile_sum + row);
        if (!unit.partials)
            merge_sums(num_rows, s.max + row, s.sum + row, s.tile_max + row, s.tile_sum + row, s.keep + row, s.take + row);
        const auto take = [&](int64_t r, int64_t d, __m512 sums) {
            const int64_t at = (row + r) * a.head_dim + d;
            if (unit.partials) _mm512_storeu_ps(s.tile_output + at, sums);
            else merge_output(s.keep[row + r], s.take[row + r], sums, s.output + at);
        };
        int64_t d = 0;
        for (; d + 4 * kPanel <= a.head_dim; d += 4 * kPanel) weigh_pages<4>(pages, weights, num_rows, d, multiply, take);
        if (d < a.head_dim) weigh_pages<2>(pages, weights, num_rows, d, multiply, take);
    }
}
#endif

// The same in float32.
template <typename T>
void attend_to_tile(const Attention& attention, const Unit& unit, int64_t tile, int num_keys, int64_t kv_head,
                    int64_t first_row, ThreadState<T>& state) {
    const ForwardArgs& a = attention.a;
    Scratch& s = state.scratch;
#if defined(RUNNERD_BFLOAT16_PRODUCTS)
    if constexpr (std::is_same_v<T, BFloat16>)
        if (attention.uses_products)
            return attend_by_products(attention, unit, tile, kv_head, first_row, s, state.multiply);
#endif
    // Rows that lie far apart fall into few sets of the first-level cache; a copy that is read often pays.
    const int64_t token_size = a.num_kv_heads * a.head_dim;
    const bool in_place = unit.num_queries == 1 || token_size < 512;
    for (int i = 0; i < (num_keys + 3) / 4 * 4; ++i) {
        const int64_t offset = s.slots[i] * token_size + kv_head * a.head_dim, to = i * a.head_dim;
        const T* key = static_cast<const T*>(a.key_cache) + offset;
        const T* value = static_cast<const T*>(a.value_cache) + offset;
        s.key_rows[i] = row_as_float(key, in_place, s.keys + to, a.head_dim);
        s.value_rows[i] = row_as_float(value, in_place, s.values + to, a.head_dim);
    }
    const int64_t num_rows = unit.num_queries * attention.group;
    float* const query = s.query + first_row * a.head_dim;
    float* const output = s.tile_output + first_row * a.head_dim;
    float* const scores = s.scores + first_row * kTile;
    score_tile(query, num_rows, s.key_rows, num_keys, a.head_dim, scores);
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t position = attention.position(unit.row, unit.first_query + row / attention.group);
        const int64_t begin = attention.first_visible(position) - tile * kTile, end = position + 1 - tile * kTile;
        softmax_of_tile(scores + row * kTile, num_keys, int(std::clamp<int64_t>(begin, 0, kTile)),
                        int(std::clamp<int64_t>(end, 0, kTile)), a.softcap, s.tile_max + first_row + row,
                        s.tile_sum + first_row + row);
    }
    weigh_tile(scores, num_rows, s.value_rows, num_keys, a.head_dim, output);
}

// Where a row of the scratch belongs in the query and the output.
struct TokenAndHead {
    int64_t token, head;
    TokenAndHead(const Attention& attention, const Unit& unit, int64_t row) {
        const int64_t query = row / attention.group % unit.num_queries;
        const int64_t kv_head = unit.first_head + row / attention.group / unit.num_queries;
        token = attention.a.query_start_loc[unit.row] + unit.first_query + query;
        head = kv_head * attention.group + row % attention.group;
    }
};

template <typename T>
void load_query(const Attention& attention, const Unit& unit, Scratch& s) {
    const ForwardArgs& a = attention.a;
    for (int64_t row = 0; row < attention.num_rows(unit); ++row) {
        const TokenAndHead at(attention, unit, row);
        const int64_t offset = at.token * a.query_token_stride + at.head * a.query_head_stride;
        const T* from = static_cast<const T*>(a.query) + offset;
        if (attention.uses_products)
            std::memcpy(reinterpret_cast<T*>(s.query) + row * a.head_dim, from, a.head_dim * sizeof(T));
        else
            for (int64_t d = 0; d < a.head_dim; ++d) s.query[row * a.head_dim + d] = to_float(from[d]) * a.scale;
    }
}

template <typename T>
void write_output(const Attention& attention, const Unit& unit, Scratch& s) {
    const ForwardArgs& a = attention.a;
    for (int64_t row = 0; row < attention.num_rows(unit); ++row) {
        const TokenAndHead at(attention, unit, row);
        T* to = static_cast<T*>(a.output) + (at.token * a.num_heads + at.head) * a.head_dim;
        float* const from = s.output + row * a.head_dim;
        for (int64_t d = 0; d < a.head_dim; ++d) from[d] /= s.sum[row];
        narrow(from, to, a.head_dim);
    }
}

void clear(Scratch& s, int64_t num_rows) {
    std::fill_n(s.output, num_rows * s.head_dim, 0.0f);
    std::fill_n(s.sum, num_rows, 0.0f);
    std::fill_n(s.max, num_rows, kNegativeInfinity);
}

void merge_tiles(Scratch& s, int64_t num_rows, const float* tile_max, const float* tile_sum, const float* tile_output) {
    merge_sums(num_rows, s.max, s.sum, tile_max, tile_sum, s.keep, s.take);
    merge_outputs(num_rows, s.head_dim, s.keep, s.take, s.output, tile_output);
}

template <typename T>
void attend(const Attention& attention, const Unit& unit, ThreadState<T>& state) {
    Scratch& s = state.scratch;
    const int64_t num_rows = attention.num_rows(unit), rows_of_head = unit.num_queries * attention.group;
    load_query<T>(attention, unit, s);
    clear(s, num_rows);
    for (int64_t i = 0; i < unit.num_tiles; ++i) {
        const int64_t tile = unit.first_tile + i;
        int num_keys = kTile;
        if (attention.a.packed) {
            find_pages(attention, unit, tile, s.pages);
            if (unit.num_queries == 1) touch_pages(attention.a, unit, s.pages);
        } else {
            num_keys = find_slots(attention, unit, tile, s);
            if (unit.num_heads > 1) prefetch_tile<T>(attention.a, s, num_keys);
        }
        for (int64_t head = 0; head < unit.num_heads; ++head)
            attend_to_tile<T>(attention, unit, tile, num_keys, unit.first_head + head, head * rows_of_head, state);
        if (unit.partials) {
            float* partial = unit.partials + i * attention.partial_size(unit);
            std::copy_n(s.tile_max, num_rows, partial);
            std::copy_n(s.tile_sum, num_rows, partial + num_rows);
            std::copy_n(s.tile_output, num_rows * s.head_dim, partial + 2 * num_rows);
        } else if (!attention.uses_products) {
            merge_tiles(s, num_rows, s.tile_max, s.tile_sum, s.tile_output);
        }
    }
    if (!unit.partials) write_output<T>(attention, unit, s);
}

template <typename T>
void merge_partials(const Attention& attention, const Unit& unit, Scratch& s) {
    const int64_t num_rows = attention.num_rows(unit);
    clear(s, num_rows);
    for (int64_t i = 0; i < unit.num_tiles; ++i) {
        const float* partial = unit.partials + i * attention.partial_size(unit);
        merge_tiles(s, num_rows, partial, partial + num_rows, partial + 2 * num_rows);
    }
    write_output<T>(attention, unit, s);
}

template <typename T>
bool multiplies_as_such(int64_t head_dim) {
#if defined(RUNNERD_BFLOAT16_PRODUCTS)
    return std::is_same_v<T, BFloat16> && head_dim % kWide == 0;
#else
    return false;
#endif
}

// Whether forward takes packed caches.
template <typename T>
bool takes_packed(int64_t head_dim, int64_t block_size) {
    return multiplies_as_such<T>(head_dim) && block_size % kPanel == 0;
}

template <typename T>
Status forward(const ForwardArgs& args, const Team& team) {
    const bool uses_products = multiplies_as_such<T>(args.head_dim);
    Attention attention{args, uses_products};
    const Status status = attention.check();
    if (status != kOk) return status;
    attention.plan();
    int64_t max_rows = 0;
    for (const Unit& unit : attention.units) max_rows = std::max(max_rows, attention.num_rows(unit));
    for (const Unit& unit : attention.split) max_rows = std::max(max_rows, attention.num_rows(unit));
    const auto make_state = [&] {
        return std::unique_ptr<ThreadState<T>>(new ThreadState<T>{Scratch(max_rows, args.head_dim)});
    };
    if (!team.run(attention.num_threads, int64_t(attention.units.size()), make_state,
                  [&](auto& state, int64_t i) { attend<T>(attention, attention.units[i], *state); }))
        return kNoMemory;
    if (attention.split.empty()) return kOk;
    const int64_t mergers = std::min(attention.num_threads, 1 + attention.partials_size / kAttentionProductsPerThread);
    return team.run(mergers, int64_t(attention.split.size()), [&] { return Scratch(max_rows, args.head_dim); },
                    [&](Scratch& scratch, int64_t i) { merge_partials<T>(attention, attention.split[i], scratch); })
               ? kOk
               : kNoMemory;
}

}  // namespace
