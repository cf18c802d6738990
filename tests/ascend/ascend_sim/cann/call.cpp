#include "call.hpp"

#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>

#include "settings.hpp"
#include "stream.hpp"

#define API extern "C" __attribute__((visibility("default")))

extern "C" {
void ascend_sim_set_error(const char* text);
int PyGILState_Ensure();
void PyGILState_Release(int);
int PyRun_SimpleString(const char*);
}

namespace ascend_sim {

namespace {

constexpr int kFailed = 561103;  // an inner error of aclnn
constexpr int kRunFailed = 507015;  // an aicore exception

// Set by the Python package when it is imported.
using Check = const char* (*)(int op, const int64_t* words, int64_t count);  // null: fine
using Run = int (*)(int op, const int64_t* words, int64_t count);
Check check_call = nullptr;
Run run_call = nullptr;

bool import_interpreter() {
    static std::once_flag once;
    std::call_once(once, [] {
        const int state = PyGILState_Ensure();
        PyRun_SimpleString("import ascend_sim.interpreter");
        PyGILState_Release(state);
    });
    return check_call && run_call;
}

void append(Words& to, const Words& from) { to.insert(to.end(), from.begin(), from.end()); }

int64_t bits_of(double value) {
    int64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

}  // namespace

Call& Call::object(const void* packed) {
    if (packed) {
        append(words, static_cast<const Packed*>(packed)->words);
    } else {
        words.push_back(kNull);
    }
    return *this;
}

Call& Call::integer(int64_t value) {
    append(words, {kInteger, value});
    return *this;
}

Call& Call::real(double value) {
    append(words, {kDouble, bits_of(value)});
    return *this;
}

Call& Call::text(const char* value) {
    const size_t size = value ? std::strlen(value) : 0;
    append(words, {kString, static_cast<int64_t>(size)});
    Words bytes((size + 7) / 8);
    if (size) std::memcpy(bytes.data(), value, size);
    append(words, bytes);
    return *this;
}

int prepare(Call call, uint64_t* workspace_bytes, void** executor) {
    *workspace_bytes = 0;
    *executor = nullptr;
    if (!import_interpreter()) {
        ascend_sim_set_error("the simulated kernels cannot be imported; put the package ascend_sim on PYTHONPATH");
        return kFailed;
    }
    if (const char* wrong = check_call(call.op, call.words.data(), static_cast<int64_t>(call.words.size()))) {
        ascend_sim_set_error(wrong);
        return kFailed;
    }
    *executor = new std::shared_ptr<Call>(std::make_shared<Call>(std::move(call)));
    return 0;
}

int launch(void* executor, void* stream) {
    auto* held = static_cast<std::shared_ptr<Call>*>(executor);
    std::shared_ptr<Call> call = *held;
    delete held;  // an executor runs once; a captured task keeps the call
    stream_of(stream)->push([call] {
        sleep_us(Settings::get().op_us);
        return run_call(call->op, call->words.data(), static_cast<int64_t>(call->words.size())) ? kRunFailed : 0;
    });
    return 0;
}

int not_simulated(const char* name) {
    static thread_local std::string text;
    text = std::string(name) + " is not simulated; add a kernel to ascend_sim.ops";
    ascend_sim_set_error(text.c_str());
    return kFailed;
}

}  // namespace ascend_sim

using namespace ascend_sim;

API void ascend_sim_register(Check check, Run run) {
    check_call = check;
    run_call = run;
}

namespace {

Packed* array_of(Kind kind, Words values) {
    auto* packed = new Packed{{kind, static_cast<int64_t>(values.size())}};
    append(packed->words, values);
    return packed;
}

int destroy(void* packed) { return delete static_cast<Packed*>(packed), 0; }

size_t size_of(int dtype) {
    switch (dtype) {
        case 2: case 4: case 12: return 1;       // int8, uint8, bool
        case 1: case 6: case 7: case 27: return 2;  // float16, int16, uint16, bfloat16
        case 0: case 3: case 8: return 4;        // float, int32, uint32
        default: return 8;                       // int64, uint64, double
    }
}

}  // namespace

API void* aclCreateTensor(const int64_t* sizes, uint64_t dimensions, int dtype, const int64_t* strides, int64_t offset,
                          int, const int64_t*, uint64_t, void* data) {
    auto* packed = new Packed{{kTensor, reinterpret_cast<int64_t>(data), dtype, offset, static_cast<int64_t>(dimensions)}};
    packed->words.insert(packed->words.end(), sizes, sizes + dimensions);
    packed->words.insert(packed->words.end(), strides, strides + dimensions);
    return packed;
}
API void* aclCreateScalar(void* value, int dtype) {
    int64_t bits = 0;
    std::memcpy(&bits, value, size_of(dtype));
    return new Packed{{kScalar, dtype, bits}};
}
API void* aclCreateIntArray(const int64_t* values, uint64_t count) { return array_of(kIntegers, Words(values, values + count)); }
API void* aclCreateBoolArray(const bool* values, uint64_t count) { return array_of(kIntegers, Words(values, values + count)); }
API void* aclCreateFloatArray(const float* values, uint64_t count) {
    Words bits;
    for (uint64_t i = 0; i < count; ++i) bits.push_back(bits_of(values[i]));
    return array_of(kFloats, bits);
}
API void* aclCreateTensorList(const void* const* tensors, uint64_t count) {
    auto* packed = new Packed{{kTensors, static_cast<int64_t>(count)}};
    for (uint64_t i = 0; i < count; ++i) append(packed->words, static_cast<const Packed*>(tensors[i])->words);
    return packed;
}
API void* aclCreateScalarList(const void* const* scalars, uint64_t count) { return aclCreateTensorList(scalars, count); }
API int aclDestroyTensor(void* packed) { return destroy(packed); }
API int aclDestroyScalar(void* packed) { return destroy(packed); }
API int aclDestroyIntArray(void* packed) { return destroy(packed); }
API int aclDestroyBoolArray(void* packed) { return destroy(packed); }
API int aclDestroyFloatArray(void* packed) { return destroy(packed); }
API int aclDestroyTensorList(void* packed) { return destroy(packed); }
API int aclDestroyScalarList(void* packed) { return destroy(packed); }
API int InitHugeMemThreadLocal(void*, bool) { return 0; }
API void UnInitHugeMemThreadLocal(void*, bool) {}
API void ReleaseHugeMem(void*, bool) {}
