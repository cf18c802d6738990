// The C interface of paged attention.
#include "paged_attention.h"

#include <new>

// Gives 0 if this process may use what the library was compiled for; call it first.
extern "C" int runnerd_attention_prepare() { return request_tiles() ? 0 : 1; }

extern "C" int runnerd_attention_write(const WriteArgs* args) {
    const WriteArgs& a = *args;
    for (int64_t token = 0; token < a.num_tokens; ++token)
        if (a.slot_mapping[token] < 0 || a.slot_mapping[token] >= a.num_slots) return kBadSlot;
    const auto copy = [&](const void* from, int64_t token_stride, int64_t head_stride, void* cache, int64_t token) {
        const char* source = static_cast<const char*>(from) + token * token_stride * a.item_bytes;
        char* target = static_cast<char*>(cache) + a.slot_mapping[token] * a.num_kv_heads * a.head_bytes;
        for (int64_t head = 0; head < a.num_kv_heads; ++head)
            std::memcpy(target + head * a.head_bytes, source + head * head_stride * a.item_bytes, a.head_bytes);
    };
    for (int64_t token = 0; token < a.num_tokens; ++token) {
        copy(a.key, a.key_token_stride, a.key_head_stride, a.key_cache, token);
        copy(a.value, a.value_token_stride, a.value_head_stride, a.value_cache, token);
    }
    return kOk;
}

extern "C" int runnerd_attention_forward(const ForwardArgs* args) {
    try {
        const Team team{args->parallel_region, args->num_threads};
        if (args->dtype == kFloat32) return forward<float>(*args, team);
        return args->dtype == kBFloat16 ? forward<BFloat16>(*args, team) : forward<Float16>(*args, team);
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
}
