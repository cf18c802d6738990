// One step of a Llama-like decoder on the host's cores, from token ids to logits, without a return to Python between.
//
// What lies between the products is kept in float32; the products take their inputs in the model's type. A token's
// numbers depend on its own sequence alone: each operation has one order of its sums, whatever else is in the batch.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "../attention/paged_attention.h"
#include "../native/matmul.h"

extern "C" {

// Mirrored field by field in library.py.
struct LayerWeights {
    Projection qkv, output, gate_up, down;  // the panels of gate and up take turns
    const float *input_norm, *mlp_norm;     // [hidden_size]
    const float *query_norm, *key_norm;     // [head_dim], both or neither may be null
    int64_t sliding_window;                 // 0: none
};

struct DecoderModel {
    const LayerWeights* layers;
    Projection head;
    const float* final_norm;
    const void* embedding;  // [vocab_size, hidden_size] in the model's type; null: the head's weight
    int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size;
    int64_t halves_take_turns;  // 1: in qkv, panels of the two halves of a query's and of a key's head take turns
    float eps, scale;
};

struct DecoderStep {
    const int64_t *input_ids, *slot_mapping, *logits_index;
    const float *cos, *sin;  // [num_tokens, head_dim]
    const int32_t *query_start_loc, *seq_lens, *block_tables;
    void *const *key_caches, *const *value_caches;  // of each layer
    void* workspace;                                // as many bytes as runnerd_decoder_workspace says
    float* logits;                                  // [num_logits, vocab_size]
    int64_t* phase_ns;                              // [kNumPhases], added to; null: not measured
    int64_t num_tokens, num_rows, num_logits, num_blocks, block_size, max_blocks, block_table_stride, num_threads;
    ParallelRegion parallel_region;  // null: threads of our own
};
}

namespace {

enum Phase { kEmbed, kNorm, kQkv, kRotate, kAttend, kOutput, kGateUp, kDown, kHead, kNumPhases };

constexpr int64_t kRowsPerItem = 4;                 // of what is done token by token
constexpr int64_t kNumbersPerThread = 1 << 13;      // about 1 us; less is done sooner than another thread takes part
constexpr int64_t kComparisonsPerThread = 1 << 19;  // about 50 us; less is done sooner than another thread wakes up

// Hands out parts of a piece of memory; without memory it only counts.
class Carver {
public:
    explicit Carver(void* memory) : memory_(static_cast<char*>(memory)) {}
    template <typename T>
    T* take(int64_t count) {
        char* part = memory_ + size_;
        size_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return reinterpret_cast<T*>(part);
    }
    int64_t size() const { return size_; }

private:
    char* memory_;
    int64_t size_ = 0;
};

template <typename T>
struct Workspace {
    Workspace(const DecoderModel& m, int64_t num_tokens, Carver& carver)
        : hidden(carver.take<float>(num_tokens * m.hidden_size)),
          qkv(carver.take<float>(num_tokens * (m.num_heads + 2 * m.num_kv_heads) * m.head_dim)),
          normed(carver.take<T>(num_tokens * m.hidden_size)),
          query(carver.take<T>(num_tokens * m.num_heads * m.head_dim)),
          heads(carver.take<T>(num_tokens * m.num_heads * m.head_dim)),
          gated(carver.take<T>(num_tokens * m.intermediate_size)) {
        if (m.head.weight_type != kInt8Weight) return;
        const int64_t width = std::max({m.hidden_size, m.num_heads * m.head_dim, m.intermediate_size});
#if defined(RUNNERD_TILES)
        whole.high = carver.take<int8_t>(num_tokens * width);
        whole.low = carver.take<int8_t>(num_tokens * width);
#endif
        whole.numbers = carver.take<int16_t>(num_tokens * width);
        whole.group_sums = carver.take<float>(num_tokens * (width / kGroup));
        whole.scales = carver.take<float>(num_tokens);
    }
    float *hidden, *qkv;
    T *normed, *query, *heads, *gated;
    WholeRows whole{};
};

inline float sum_of_squares(const float* x, int64_t size) {
    float sums[16] = {};
    int64_t i = 0;
    for (; i + 16 <= size; i += 16)
        for (int lane = 0; lane < 16; ++lane) sums[lane] += x[i + lane] * x[i + lane];
    for (int lane = 0; i < size; ++i, ++lane) sums[lane] += x[i] * x[i];
    for (int width = 8; width; width /= 2)
        for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
    return sums[0];
}

template <typename T>
inline void normalize(const float* from, const float* weight, float eps, int64_t size, T* to) {
    const float factor = 1.0f / std::sqrt(sum_of_squares(from, size) / float(size) + eps);
    float part[64];
    for (int64_t begin = 0; begin < size; begin += 64) {
        const int64_t count = std::min<int64_t>(64, size - begin);
        for (int64_t i = 0; i < count; ++i) part[i] = from[begin + i] * factor * weight[begin + i];
        narrow(part, to + begin, count);
    }
}

// x times its logistic function.
inline Vec silu(Vec x) {
    const Vec e = exp_of_negative(x > 0 ? -x : x), one = broadcast(1.0f);
    return x * (x > 0 ? one : e) / (one + e);
}

// Gives silu(gate) * up of 16 gates and the 16 ups behind them.
template <typename T>
inline void join(const float* from, T* to) {
    for (int i = 0; i < kPanel; i += kLanes) {
        float joined[kLanes];
        store(joined, silu(load(from + i)) * load(from + kPanel + i));
        for (int lane = 0; lane < kLanes; ++lane) from_float(joined[lane], to + i + lane);
    }
}
#if defined(__AVX512BF16__)
inline void join(const float* from, BFloat16* to) {
    const __m512 gate = _mm512_loadu_ps(from), one = _mm512_set1_ps(1.0f);
    const __m512 e = power_of_two(_mm512_mul_ps(gate, _mm512_set1_ps(-1.44269504f)));
    const __m512 joined = _mm512_mul_ps(_mm512_div_ps(gate, _mm512_add_ps(one, e)), _mm512_loadu_ps(from + kPanel));
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(joined));
}
#endif

template <typename T>
class Step {
public:
    Step(const DecoderModel& model, const DecoderStep& step, const Team& members)
        : m(model), s(step), team(members), carver(step.workspace),
          w(model, step.num_tokens, carver) {}

    Status run() {
        bool done = timed(kEmbed, [&] { return embed(); });
        for (int64_t i = 0; i < m.num_layers && done; ++i) {
            const LayerWeights& layer = m.layers[i];
            const bool is_last = i + 1 == m.num_layers;
            done = timed(kNorm, [&] { return norm(s.num_tokens, layer.input_norm); });
            if (m.halves_take_turns) {
                done = done && timed(kQkv, [&] { return project(layer, i); });
            } else {
                done = done && timed(kQkv, [&] { return store(layer.qkv, &layer.output, w.normed, s.num_tokens, w.qkv); }) &&
                       timed(kRotate, [&] { return rotate(layer, i); });
            }
            // Beyond the last keys and values, only what is sampled from counts.
            if (!done || (is_last && s.num_logits == 0)) break;
            if (is_last) select_queries();
            const Status status = timed(kAttend, [&] { return attend(layer, i); });
            if (status != kOk) return status;
            if (is_last) select_rows();
            const int64_t num_rows = is_last ? s.num_logits : s.num_tokens;
            done = timed(kOutput, [&] { return add(layer.output, &layer.gate_up, w.heads, num_rows); }) &&
                   timed(kNorm, [&] { return norm(num_rows, layer.mlp_norm); }) &&
                   timed(kGateUp, [&] { return gate(layer.gate_up, &layer.down, num_rows); }) &&
                   timed(kDown, [&] { return add(layer.down, is_last ? &m.head : &m.layers[i + 1].qkv, w.gated, num_rows); });
        }
        if (!done) return kNoMemory;
        if (s.num_logits == 0) return kOk;
        done = timed(kNorm, [&] { return norm(s.num_logits, m.final_norm); }) &&
               timed(kHead, [&] { return store(m.head, nullptr, w.normed, s.num_logits, s.logits); });
        return done ? kOk : kNoMemory;
    }

private:
    template <typename Work>
    auto timed(Phase phase, Work work) {
        if (!s.phase_ns) return work();
        const auto begin = std::chrono::steady_clock::now();
        const auto result = work();
        s.phase_ns[phase] += std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count();
        return result;
    }

    // Gives the product of rows of the model's type to take.
    template <typename Take>
    bool product(const Projection& p, const Projection* following, const T* inputs, int64_t num_rows, Take take) {
        if constexpr (std::is_same_v<T, BFloat16>) {
            if (p.weight_type == kInt8Weight)
                return make_whole<kInt8Weight>(p, inputs, num_rows) && multiply_int8(team, p, w.whole, num_rows, take, following);
            if (p.weight_type == kInt4Weight)
                return make_whole<kInt4Weight>(p, inputs, num_rows) && multiply_int4(team, p, w.whole, num_rows, take, following);
        }
        return multiply(team, p, inputs, num_rows, take, following);
    }

    template <WeightType kType>
    bool make_whole(const Projection& p, const T* inputs, int64_t num_rows) {
        return by_rows(num_rows, p.num_inputs, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; ++row)
                to_whole<kType>(inputs + row * p.num_inputs, p.num_inputs, row, w.whole);
        });
    }

    // Calls work(first, last) for parts of num_rows rows of so many numbers.
    template <typename Work>
    bool by_rows(int64_t num_rows, int64_t numbers_per_row, Work work) {
        const int64_t num_items = (num_rows + kRowsPerItem - 1) / kRowsPerItem;
        return team.run(
            1 + num_rows * numbers_per_row / kNumbersPerThread, num_items, [] { return 0; },
            [&](int, int64_t item) { work(item * kRowsPerItem, std::min((item + 1) * kRowsPerItem, num_rows)); });
    }

    bool embed() {
        return by_rows(s.num_tokens, m.hidden_size, [&](int64_t first, int64_t last) {
            for (int64_t token = first; token < last; ++token) embed_token(s.input_ids[token], w.hidden + token * m.hidden_size);
        });
    }

    void embed_token(int64_t id, float* to) const {
        if (m.embedding) return convert(static_cast<const T*>(m.embedding) + id * m.hidden_size, to, m.hidden_size);
        const int64_t panel = id / kPanel * m.hidden_size * kPanel, lane = id % kPanel;
        for (int64_t k = 0; k < m.hidden_size; ++k) {
            if (m.head.weight_type == kFloat32Weight) {
                to[k] = static_cast<const float*>(m.head.values)[panel + k * kPanel + lane];
            } else if (m.head.weight_type == kBFloat16Weight) {
                to[k] = to_float(static_cast<const BFloat16*>(m.head.values)[panel + (k / 2 * kPanel + lane) * 2 + k % 2]);
            } else {
                const int8_t number = static_cast<const int8_t*>(m.head.values)[panel + (k / 4 * kPanel + lane) * 4 + k % 4];
                to[k] = float(number) * static_cast<const float*>(m.head.scales)[id];
            }
        }
    }

    bool norm(int64_t num_rows, const float* weight) {
        return by_rows(num_rows, m.hidden_size, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; ++row)
                normalize(w.hidden + row * m.hidden_size, weight, m.eps, m.hidden_size, w.normed + row * m.hidden_size);
        });
    }

    bool store(const Projection& p, const Projection* following, const T* inputs, int64_t num_rows, float* to) {
        return product(p, following, inputs, num_rows,
                        [&](int64_t row, int64_t count, int64_t output, int64_t num_outputs, const float* results) {
                            for (int64_t r = 0; r < count; ++r)
                                std::memcpy(to + (row + r) * p.num_outputs + output, results + r * kWide,
                                            num_outputs * sizeof(float));
                        });
    }

    bool add(const Projection& p, const Projection* following, const T* inputs, int64_t num_rows) {
        return product(p, following, inputs, num_rows,
                        [&](int64_t row, int64_t count, int64_t output, int64_t num_outputs, const float* results) {
                            for (int64_t r = 0; r < count; ++r) {
                                float* to = w.hidden + (row + r) * m.hidden_size + output;
                                for (int64_t i = 0; i < num_outputs; ++i) to[i] += results[r * kWide + i];
                            }
                        });
    }

    bool gate(const Projection& p, const Projection* following, int64_t num_rows) {
        return product(p, following, w.normed, num_rows,
                        [&](int64_t row, int64_t count, int64_t output, int64_t, const float* results) {
                            for (int64_t r = 0; r < count; ++r) {
                                const float* from = results + r * kWide;
                                join(from, w.gated + (row + r) * m.intermediate_size + output / 2);
                            }
                        });
    }

    // Gives queries, keys and values; they are rotated and go to their places while they are near.
    bool project(const LayerWeights& layer, int64_t index) {
        const int64_t query_size = m.num_heads * m.head_dim, kv_size = m.num_kv_heads * m.head_dim;
        T* const keys = static_cast<T*>(s.key_caches[index]);
        T* const values = static_cast<T*>(s.value_caches[index]);
        return product(layer.qkv, &layer.output, w.normed, s.num_tokens,
                       [&](int64_t row, int64_t count, int64_t output, int64_t, const float* results) {
                           if (output < query_size) return store_queries(row, count, output, results);
                           output -= query_size;
                           if (output < kv_size) store_keys(row, count, output, results, keys);
                           else store_values(row, count, output - kv_size, results, values);
                       });
    }

    // Each of these takes a block of 32 outputs, of one head, for rows.
    void store_queries(int64_t row, int64_t count, int64_t output, const float* results) const {
        const int64_t head = output / m.head_dim, begin = output % m.head_dim / 2, half = m.head_dim / 2;
        for (int64_t token = row; token < row + count; ++token, results += kWide) {
            T* const to = w.query + (token * m.num_heads + head) * m.head_dim + begin;
            rotate_panels(results, token, begin, to, to + half);
        }
    }

    void store_keys(int64_t row, int64_t count, int64_t output, const float* results, T* keys) const {
        const int64_t head = output / m.head_dim, begin = output % m.head_dim / 2, half = m.head_dim / 2;
#if defined(RUNNERD_BFLOAT16_PRODUCTS)
        if constexpr (std::is_same_v<T, BFloat16>)
            if (is_packed)
                return store_packed(
                    row, count, results,
                    [&](const float* from, int64_t token, BFloat16* to) {
                        rotate_panels(from, token, begin, to, to + kPanel);
                    },
                    [&](int64_t slot, const BFloat16* key) {
                        pack_key(key, begin, kPanel, slot, head, m.num_kv_heads, m.head_dim, keys);
                        pack_key(key + kPanel, begin + half, kPanel, slot, head, m.num_kv_heads, m.head_dim, keys);
                    },
                    [&](int64_t slot, const BFloat16 (*page)[kWide]) {
                        BFloat16* const to = keys + (slot / kPanel * m.num_kv_heads + head) * m.head_dim * kPanel;
                        pack_keys(page, to + begin * kPanel, to + (begin + half) * kPanel);
                    });
#endif
        for (int64_t token = row; token < row + count; ++token, results += kWide) {
            T* const to = keys + (s.slot_mapping[token] * m.num_kv_heads + head) * m.head_dim + begin;
            rotate_panels(results, token, begin, to, to + half);
        }
    }

    void store_values(int64_t row, int64_t count, int64_t output, const float* results, T* values) const {
        const int64_t head = output / m.head_dim, begin = output % m.head_dim;
#if defined(RUNNERD_BFLOAT16_PRODUCTS)
        if constexpr (std::is_same_v<T, BFloat16>)
            if (is_packed)
                return store_packed(
                    row, count, results, [](const float* from, int64_t, BFloat16* to) { narrow(from, to, kWide); },
                    [&](int64_t slot, const BFloat16* value) {
                        pack_value(value, begin, kWide, slot, head, m.num_kv_heads, m.head_dim, values);
                    },
                    [&](int64_t slot, const BFloat16 (*page)[kWide]) {
                        pack_values(page, values + ((slot / kPanel * m.num_kv_heads + head) * m.head_dim + begin) * kPanel);
                    });
#endif
        for (int64_t token = row; token < row + count; ++token, results += kWide)
            narrow(results, values + (s.slot_mapping[token] * m.num_kv_heads + head) * m.head_dim + begin, kWide);
    }

    // Has make(results, token, numbers) make 32 numbers of each token, and write(slot, numbers) write them, or, where all
    // tokens of a page are there, write_page(first slot, numbers of each).
    template <typename Make, typename Write, typename WritePage>
    void store_packed(int64_t row, int64_t count, const float* results, Make make, Write write, WritePage write_page) const {
        const int64_t end = row + count;
        for (int64_t token = row; token < end;) {
            const int64_t slot = s.slot_mapping[token];
            const bool is_whole = slot % kPanel == 0 && token + kPanel <= end &&
                                  s.slot_mapping[token + kPanel - 1] == slot + kPanel - 1;
            const int64_t num_tokens = is_whole ? kPanel : 1;
            alignas(64) BFloat16 made[kPanel][kWide];
            for (int64_t i = 0; i < num_tokens; ++i) make(results + (token - row + i) * kWide, token + i, made[i]);
            if (is_whole) write_page(slot, made);
            else write(slot, made[0]);
            token += num_tokens;
        }
    }

    // Rotates 16 numbers of a head's first half, which are `begin` on, and the 16 of its second half behind them.
    void rotate_panels(const float* from, int64_t token, int64_t begin, T* low, T* high) const {
        const int64_t half = m.head_dim / 2;
        const float *cos = s.cos + token * m.head_dim + begin, *sin = s.sin + token * m.head_dim + begin;
        float turned[kWide];
        for (int i = 0; i < kPanel; ++i) turned[i] = from[i] * cos[i] - from[kPanel + i] * sin[i];
        for (int i = 0; i < kPanel; ++i)
            turned[kPanel + i] = from[kPanel + i] * cos[half + i] + from[i] * sin[half + i];
        narrow(turned, low, kPanel);
        narrow(turned + kPanel, high, kPanel);
    }

    // Whether a token is the first of its page, of those from `first` on.
    bool begins_page(int64_t token, int64_t first) const {
        return token == first || s.slot_mapping[token] / kPanel != s.slot_mapping[token - 1] / kPanel;
    }

    // Normalizes and rotates queries and keys; keys and values go into the cache.
    bool rotate(const LayerWeights& layer, int64_t index) {
        const int64_t num_heads = m.num_heads + 2 * m.num_kv_heads, kv_size = m.num_kv_heads * m.head_dim;
        T* const keys = static_cast<T*>(s.key_caches[index]);
        T* const values = static_cast<T*>(s.value_caches[index]);
        return by_rows(s.num_tokens, num_heads * m.head_dim, [&](int64_t first, int64_t last) {
            for (int64_t token = first; token < last; ++token) {
                const float* from = w.qkv + token * num_heads * m.head_dim;
                const int64_t slot = s.slot_mapping[token];
                if (is_packed && begins_page(token, first)) {
                    // All of a page is written to or read soon; written to first, it would come line by line.
                    const int64_t page = slot / kPanel * kPanel * kv_size, page_bytes = kPanel * kv_size * sizeof(T);
                    touch(keys + page, page_bytes);
                    touch(values + page, page_bytes);
                }
                for (int64_t head = 0; head < m.num_heads; ++head)
                    rotate_head(from + head * m.head_dim, layer.query_norm, token,
                                w.query + (token * m.num_heads + head) * m.head_dim);
                from += m.num_heads * m.head_dim;
                for (int64_t head = 0; head < m.num_kv_heads; ++head)
                    write_head(head, slot, keys, values, [&](T* key, T* value) {
                        rotate_head(from + head * m.head_dim, layer.key_norm, token, key);
                        narrow(from + kv_size + head * m.head_dim, value, m.head_dim);
                    });
            }
        });
    }

    // Has make(key, value) write a head's key and value of a token where they lie in the caches.
    template <typename Make>
    void write_head(int64_t head, int64_t slot, T* keys, T* values, Make make) const {
        if constexpr (std::is_same_v<T, BFloat16>) {
            if (is_packed) {
                BFloat16 key[kMaxHeadDim], value[kMaxHeadDim];
                make(key, value);
                pack_key(key, 0, m.head_dim, slot, head, m.num_kv_heads, m.head_dim, keys);
                return pack_value(value, 0, m.head_dim, slot, head, m.num_kv_heads, m.head_dim, values);
            }
        }
        const int64_t offset = (slot * m.num_kv_heads + head) * m.head_dim;
        make(keys + offset, values + offset);
    }

    void rotate_head(const float* from, const float* weight, int64_t token, T* to) const {
        float normed[kMaxHeadDim];
        if (weight) {
            normalize(from, weight, m.eps, m.head_dim, normed);
            from = normed;
        }
        const float *cos = s.cos + token * m.head_dim, *sin = s.sin + token * m.head_dim;
        const int64_t half = m.head_dim / 2;
        float turned[kMaxHeadDim];
        for (int64_t i = 0; i < half; ++i) turned[i] = from[i] * cos[i] - from[i + half] * sin[i];
        for (int64_t i = half; i < m.head_dim; ++i) turned[i] = from[i] * cos[i] + from[i - half] * sin[i];
        narrow(turned, to, m.head_dim);
    }

    Status attend(const LayerWeights& layer, int64_t index) {
        ForwardArgs args{};
        args.query = w.query;
        args.key_cache = s.key_caches[index];
        args.value_cache = s.value_caches[index];
        args.output = w.heads;
        args.query_start_loc = query_start_loc;
        args.seq_lens = s.seq_lens;
        args.block_tables = s.block_tables;
        args.query_token_stride = m.num_heads * m.head_dim;
        args.query_head_stride = m.head_dim;
        args.block_table_stride = s.block_table_stride;
        args.num_rows = s.num_rows;
        args.num_tokens = query_start_loc[s.num_rows];
        args.num_blocks = s.num_blocks;
        args.block_size = s.block_size;
        args.max_blocks = s.max_blocks;
        args.num_heads = m.num_heads;
        args.num_kv_heads = m.num_kv_heads;
        args.head_dim = m.head_dim;
        args.sliding_window = layer.sliding_window;
        args.num_threads = s.num_threads;
        args.packed = is_packed;
        args.scale = m.scale;
        return forward<T>(args, team);
    }

    int64_t row_of(int64_t token) const {
        return std::upper_bound(s.query_start_loc, s.query_start_loc + s.num_rows, token) - s.query_start_loc - 1;
    }

    // Leaves out the queries of each sequence that come before the first whose logits are wanted.
    void select_queries() {
        const int32_t* const all = s.query_start_loc;
        std::vector<int32_t> first(all + 1, all + s.num_rows + 1);
        for (int64_t i = 0; i < s.num_logits; ++i) {
            int32_t& of_row = first[row_of(s.logits_index[i])];
            of_row = std::min(of_row, int32_t(s.logits_index[i]));
        }
        const int64_t query_size = m.num_heads * m.head_dim;
        selected_start_loc.assign(1, 0);
        for (int64_t row = 0; row < s.num_rows; ++row) {
            const int64_t count = all[row + 1] - first[row];
            std::memmove(w.query + selected_start_loc.back() * query_size, w.query + first[row] * query_size,
                         count * query_size * sizeof(T));
            selected_start_loc.push_back(selected_start_loc.back() + count);
        }
        query_start_loc = selected_start_loc.data();
    }

    // Moves the rows whose logits are wanted to the front, in their order.
    void select_rows() {
        const int64_t heads_size = m.num_heads * m.head_dim;
        for (int64_t i = 0; i < s.num_logits; ++i) {
            const int64_t token = s.logits_index[i];
            // Of each sequence, the last queries are those selected.
            const int64_t next = row_of(token) + 1, query = query_start_loc[next] + token - s.query_start_loc[next];
            std::memcpy(w.qkv + i * m.hidden_size, w.hidden + token * m.hidden_size, m.hidden_size * sizeof(float));
            std::memcpy(w.query + i * heads_size, w.heads + query * heads_size, heads_size * sizeof(T));
        }
        std::memcpy(w.hidden, w.qkv, s.num_logits * m.hidden_size * sizeof(float));
        std::memcpy(w.heads, w.query, s.num_logits * heads_size * sizeof(T));
    }

    const DecoderModel& m;
    const DecoderStep& s;
    const Team team;
    const bool is_packed = takes_packed<T>(m.head_dim, s.block_size);
    Carver carver;
    const Workspace<T> w;
    const int32_t* query_start_loc = s.query_start_loc;  // of the queries that attend
    std::vector<int32_t> selected_start_loc;
};

// Gives the place of the first NaN, else of the first of the highest numbers.
inline int64_t first_highest(const float* numbers, int64_t size) {
    constexpr int kWays = 64;
    float highest[kWays];
    int32_t odd[kWays] = {};
    std::fill_n(highest, kWays, kNegativeInfinity);
    int64_t i = 0;
    for (; i + kWays <= size; i += kWays)
        for (int way = 0; way < kWays; ++way) {
            const float x = numbers[i + way];
            highest[way] = x > highest[way] ? x : highest[way];
            odd[way] |= x != x;
        }
    for (int way = 0; i < size; ++i, ++way) {
        highest[way] = numbers[i] > highest[way] ? numbers[i] : highest[way];
        odd[way] |= numbers[i] != numbers[i];
    }
    const float wanted = *std::max_element(highest, highest + kWays);
    if (std::any_of(odd, odd + kWays, [](int32_t one) { return one != 0; }))
        return std::find_if(numbers, numbers + size, [](float x) { return x != x; }) - numbers;
    for (i = 0; i + kWays <= size; i += kWays) {
        int32_t found = 0;
        for (int way = 0; way < kWays; ++way) found |= numbers[i + way] == wanted;
        if (found) break;
    }
    return std::find(numbers + i, numbers + size, wanted) - numbers;
}

}  // namespace

// Gives choices[2][num_rows]: the first highest of each row of numbers[num_rows][size], NaN being higher than all, and
// what that number is: 0 for a finite one, 1 for minus infinity, 2 for infinity or NaN. Mirrored in sampler.py.
extern "C" int runnerd_decoder_choose(const float* numbers, int64_t num_rows, int64_t size, int64_t* choices,
                                      int64_t num_threads, ParallelRegion parallel_region) {
    const int64_t threads = std::min(num_threads, 1 + num_rows * size / kComparisonsPerThread);
    const bool done = Team{parallel_region, threads}.run(
        threads, num_rows, [] { return 0; },
        [&](int, int64_t row) {
            const int64_t place = first_highest(numbers + row * size, size);
            const float highest = numbers[row * size + place];
            choices[row] = place;
            choices[num_rows + row] = highest == kNegativeInfinity ? 1 : highest < -kNegativeInfinity ? 0 : 2;
        });
    return done ? kOk : kNoMemory;
}

// Gives 0 if this process may use what the library was compiled for; call it first.
extern "C" int runnerd_decoder_prepare() { return request_tiles() ? 0 : 1; }

extern "C" int64_t runnerd_decoder_workspace(const DecoderModel* model, int64_t num_tokens) {
    Carver carver(nullptr);
    if (model->head.weight_type == kFloat32Weight) Workspace<float>(*model, num_tokens, carver);
    else Workspace<BFloat16>(*model, num_tokens, carver);
    return carver.size();
}

extern "C" int runnerd_decoder_run(const DecoderModel* model, const DecoderStep* step) {
    const int64_t num_slots = step->num_blocks * step->block_size;
    for (int64_t token = 0; token < step->num_tokens; ++token)
        if (step->slot_mapping[token] < 0 || step->slot_mapping[token] >= num_slots) return kBadSlot;
    const int32_t *const begin = step->query_start_loc, *const end = begin + step->num_rows;
    if (*begin != 0 || *end != step->num_tokens || !std::is_sorted(begin, end + 1)) return kBadLengths;
    Status status = kOk;
    Team{step->parallel_region, step->num_threads}.gather([&](const Team& team) {
        try {
            if (model->head.weight_type == kFloat32Weight) status = Step<float>(*model, *step, team).run();
            else status = Step<BFloat16>(*model, *step, team).run();
        } catch (const std::bad_alloc&) {
            status = kNoMemory;
        }
    });
    return status;
}
