// libascendcl.so: devices, memory, streams, events, copies and graphs of the ACL runtime, on the host.
// Only the names and the binary interface are CANN's. Numbers are those of its public headers.
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "settings.hpp"
#include "stream.hpp"

#define API extern "C" __attribute__((visibility("default")))

using namespace ascend_sim;

namespace {

constexpr int kOk = 0;
constexpr int kInvalidDevice = 107001;
constexpr int kNoContext = 107002;
constexpr int kUnsupported = 207000;
constexpr int kOutOfMemory = 207001;
constexpr int kFailed = 507899;

std::mutex registry_mutex;
std::set<Stream*> streams;
std::map<int, Stream*> default_streams;
std::map<void*, std::pair<size_t, int>> allocations;  // bytes, device
std::map<int, size_t> used_bytes;
thread_local int current_device = -1;
int contexts[64];
thread_local std::string last_error;

Stream* make_stream() {
    static std::atomic<int> next_id{0};
    auto* stream = new Stream(next_id++, current_device);
    std::lock_guard lock(registry_mutex);
    streams.insert(stream);
    return stream;
}

// How often the host waited for a device, by kind.
struct Counters {
    std::atomic<long> synchronize_stream{0}, synchronize_device{0}, synchronize_event{0}, blocking_copy{0};
} counters;

struct Mark {  // one record of an event
    std::mutex mutex;
    std::condition_variable reached;
    bool done = false;
    std::chrono::steady_clock::time_point time;
    Stream* stream = nullptr;

    void wait() {
        std::unique_lock lock(mutex);
        reached.wait(lock, [this] { return done; });
    }
    bool is_done() {
        std::lock_guard lock(mutex);
        return done;
    }
};

struct Event {
    std::mutex mutex;
    std::shared_ptr<Mark> mark;

    std::shared_ptr<Mark> get() {
        std::lock_guard lock(mutex);
        return mark;
    }
};

std::shared_ptr<Mark> mark_of(void* event) { return static_cast<Event*>(event)->get(); }

int allocate(void** pointer, size_t bytes) {
    *pointer = nullptr;
    {
        std::lock_guard lock(registry_mutex);
        if (used_bytes[current_device] + bytes > Settings::get().memory_bytes) return kOutOfMemory;
    }
    if (posix_memalign(pointer, 512, bytes ? bytes : 512)) return kOutOfMemory;
    std::memset(*pointer, 0xA5, bytes);  // what nobody wrote is garbage
    std::lock_guard lock(registry_mutex);
    allocations[*pointer] = {bytes, current_device};
    used_bytes[current_device] += bytes;
    return kOk;
}

int copy_async(void* target, const void* source, size_t bytes, void* stream) {
    stream_of(stream)->push([=] {
        sleep_us(Settings::get().copy_us);
        std::memcpy(target, source, bytes);
        return kOk;
    });
    return kOk;
}

}  // namespace

Stream* ascend_sim::stream_of(void* handle) {
    if (handle) return static_cast<Stream*>(handle);
    {
        std::lock_guard lock(registry_mutex);
        if (auto found = default_streams.find(current_device); found != default_streams.end()) return found->second;
    }
    Stream* stream = make_stream();
    std::lock_guard lock(registry_mutex);
    return default_streams.emplace(current_device, stream).first->second;
}

// For tests.
API long ascend_sim_count(const char* name) {
    const std::string key = name;
    if (key == "synchronize_stream") return counters.synchronize_stream;
    if (key == "synchronize_device") return counters.synchronize_device;
    if (key == "synchronize_event") return counters.synchronize_event;
    if (key == "blocking_copy") return counters.blocking_copy;
    return -1;
}
API void ascend_sim_set_error(const char* text) { last_error = text; }

// Devices
API int aclInit(const char*) { return kOk; }
API int aclFinalize() { return kOk; }
API int aclrtGetDeviceCount(uint32_t* count) { return *count = Settings::get().devices, kOk; }
API const char* aclrtGetSocName() {
    const char* name = std::getenv("ASCEND_SIM_SOC");
    return name ? name : "Ascend910B3";
}
API const char* aclGetRecentErrMsg() { return last_error.empty() ? "simulated CANN" : last_error.c_str(); }
API void aclAppLog(int, const char*, const char*, uint32_t, const char*, ...) {}
API int aclrtSetDevice(int device) {
    if (device < 0 || device >= Settings::get().devices) return kInvalidDevice;
    return current_device = device, kOk;
}
API int aclrtGetDevice(int* device) { return current_device < 0 ? kNoContext : (*device = current_device, kOk); }
API int aclrtResetDevice(int) { return kOk; }
API int aclrtGetCurrentContext(void** context) {
    return current_device < 0 ? kNoContext : (*context = &contexts[current_device], kOk);
}
API int aclrtSetCurrentContext(void* context) {
    return current_device = static_cast<int>(static_cast<int*>(context) - contexts), kOk;
}
API int aclrtGetPrimaryCtxState(int device, uint32_t* flags, int* active) {
    if (flags) *flags = 0;
    if (active) *active = current_device == device;
    return kOk;
}
API int aclGetDeviceCapability(uint32_t, int, int64_t* value) { return *value = 0, kOk; }
API int aclrtGetDeviceInfo(uint32_t, int, int64_t* value) { return *value = 24, kOk; }
API int aclrtGetDeviceResLimit(int, int, uint32_t* value) { return *value = 24, kOk; }
API int aclrtGetStreamResLimit(void*, int, uint32_t* value) { return *value = 24, kOk; }
API int aclrtDeviceCanAccessPeer(int* can, int, int) { return *can = 0, kOk; }
API int aclrtDeviceGetBareTgid(int* id) { return *id = 0, kOk; }
API int aclrtPeekAtLastError(int) { return kOk; }
API int aclrtGetLastError(int) { return kOk; }
API int aclmdlInitDump() { return kOk; }
API int aclmdlFinalizeDump() { return kOk; }
API int aclmdlSetDump(const char*) { return kOk; }
API int aclrtSetDeviceSatMode(int) { return kOk; }
API int aclrtSetOpExecuteTimeOut(uint32_t) { return kOk; }
API int aclrtSetOpExecuteTimeOutV2(uint64_t, uint64_t* actual) {
    if (actual) *actual = 0;
    return kOk;
}
API int aclrtSetOpWaitTimeout(uint32_t) { return kOk; }

// Memory
API int aclrtGetMemInfo(int, size_t* free, size_t* total) {
    std::lock_guard lock(registry_mutex);
    *total = Settings::get().memory_bytes;
    *free = *total - used_bytes[current_device];
    return kOk;
}
API int aclrtMalloc(void** pointer, size_t bytes, int) { return allocate(pointer, bytes); }
API int aclrtMallocAlign32(void** pointer, size_t bytes, int) { return allocate(pointer, bytes); }
API int aclrtFree(void* pointer) {
    {
        std::lock_guard lock(registry_mutex);
        if (auto found = allocations.find(pointer); found != allocations.end()) {
            used_bytes[found->second.second] -= found->second.first;
            allocations.erase(found);
        }
    }
    std::free(pointer);
    return kOk;
}
API int aclrtMallocHost(void** pointer, size_t bytes) {
    return posix_memalign(pointer, 512, bytes ? bytes : 512) ? kOutOfMemory : kOk;
}
API int aclrtMallocHostWithCfg(void** pointer, uint64_t bytes, void*) { return aclrtMallocHost(pointer, bytes); }
API int aclrtFreeHost(void* pointer) { return std::free(pointer), kOk; }
API int aclrtHostRegister(void* pointer, uint64_t, int, void** device) { return *device = pointer, kOk; }
API int aclrtHostUnregister(void*) { return kOk; }
API int aclrtPointerGetAttributes(const void*, void*) { return kUnsupported; }
API int aclrtMemcpy(void* target, size_t, const void* source, size_t bytes, int) {
    ++counters.blocking_copy;
    return std::memcpy(target, source, bytes), kOk;
}
API int aclrtMemset(void* target, size_t, int value, size_t bytes) { return std::memset(target, value, bytes), kOk; }
API int aclrtMemcpyAsync(void* target, size_t, const void* source, size_t bytes, int, void* stream) {
    return copy_async(target, source, bytes, stream);
}
API int aclrtMemcpyBatchAsync(void** targets, size_t*, void** sources, size_t* bytes, size_t count, void*, size_t*,
                              size_t, size_t* failed, void* stream) {
    for (size_t i = 0; i < count; ++i) copy_async(targets[i], sources[i], bytes[i], stream);
    if (failed) *failed = ~size_t{0};
    return kOk;
}
API int aclrtMemsetAsync(void* target, size_t, int value, size_t bytes, void* stream) {
    stream_of(stream)->push([=] { return std::memset(target, value, bytes), kOk; });
    return kOk;
}

// Streams
API int aclrtCreateStreamWithConfig(void** stream, uint32_t, uint32_t) { return *stream = make_stream(), kOk; }
API int aclrtCreateStream(void** stream) { return *stream = make_stream(), kOk; }
API int aclrtDestroyStream(void*) { return kOk; }
API int aclrtDestroyStreamForce(void*) { return kOk; }
API int aclrtStreamGetId(void* stream, int* id) { return *id = stream_of(stream)->id(), kOk; }
API int aclrtSetStreamFailureMode(void*, uint64_t) { return kOk; }
API int aclrtSetStreamAttribute(void*, int, void*) { return kOk; }
API int aclrtSynchronizeStream(void* stream) {
    ++counters.synchronize_stream;
    if (stream_of(stream)->capture) return kUnsupported;  // what is recorded has not run
    WithoutPythonLock unlocked;
    stream_of(stream)->synchronize();
    return stream_of(stream)->error();
}
API int aclrtSynchronizeStreamWithTimeout(void* stream, int) { return aclrtSynchronizeStream(stream); }
API int aclrtStreamQuery(void* stream, int* status) { return *status = stream_of(stream)->idle() ? 0 : 1, kOk; }
API int aclrtSynchronizeDevice() {
    ++counters.synchronize_device;
    std::vector<Stream*> all;
    {
        std::lock_guard lock(registry_mutex);
        for (Stream* one : streams)
            if (one->device() == current_device) all.push_back(one);
    }
    WithoutPythonLock unlocked;
    int error = kOk;
    for (Stream* one : all) {
        one->synchronize();
        if (!error) error = one->error();
    }
    return error;
}
API int aclrtSynchronizeDeviceWithTimeout(int) { return aclrtSynchronizeDevice(); }
API int aclrtLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
    stream_of(stream)->push([=] { return function(argument), kOk; });
    return kOk;
}
API int aclrtLaunchCallback(void (*function)(void*), void* argument, int, void* stream) {
    return aclrtLaunchHostFunc(stream, function, argument);
}
API int aclrtSubscribeReport(uint64_t, void*) { return kOk; }
API int aclrtUnSubscribeReport(uint64_t, void*) { return kOk; }
API int aclrtProcessReport(int) { return kOk; }

// Events
API int aclrtCreateEvent(void** event) { return *event = new Event, kOk; }
API int aclrtCreateEventWithFlag(void** event, uint32_t) { return *event = new Event, kOk; }
API int aclrtCreateEventExWithFlag(void** event, uint32_t) { return *event = new Event, kOk; }
API int aclrtDestroyEvent(void* event) { return delete static_cast<Event*>(event), kOk; }
API int aclrtRecordEvent(void* event, void* stream) {
    auto mark = std::make_shared<Mark>();
    mark->stream = stream_of(stream);
    auto* one = static_cast<Event*>(event);
    {
        std::lock_guard lock(one->mutex);
        one->mark = mark;
    }
    mark->stream->push([mark] {
        {
            std::lock_guard lock(mark->mutex);
            mark->done = true;
            mark->time = std::chrono::steady_clock::now();
        }
        mark->reached.notify_all();
        return kOk;
    });
    return kOk;
}
API int aclrtStreamWaitEvent(void* stream, void* event) {
    stream_of(stream)->push([mark = mark_of(event)] {
        if (mark) mark->wait();
        return kOk;
    });
    return kOk;
}
API int aclrtResetEvent(void*, void*) { return kOk; }
API int aclrtSynchronizeEvent(void* event) {
    ++counters.synchronize_event;
    auto mark = mark_of(event);
    if (!mark) return kOk;
    WithoutPythonLock unlocked;
    mark->wait();
    return mark->stream->error();
}
API int aclrtQueryEventStatus(void* event, int* status) {
    auto mark = mark_of(event);
    return *status = !mark || mark->is_done() ? 1 : 0, kOk;
}
API int aclrtQueryEventWaitStatus(void* event, int* status) {
    auto mark = mark_of(event);
    return *status = !mark || mark->is_done() ? 0 : 0xffff, kOk;
}
API int aclrtEventElapsedTime(float* milliseconds, void* begin, void* end) {
    auto from = mark_of(begin), to = mark_of(end);
    if (!from || !to) return kFailed;
    WithoutPythonLock unlocked;
    from->wait();
    to->wait();
    *milliseconds = std::chrono::duration<float, std::milli>(to->time - from->time).count();
    return kOk;
}

// Words of device memory that streams write and wait for: what a captured task and its update agree by.
namespace {

std::mutex value_mutex;
std::condition_variable value_written;
enum Comparison : uint32_t { kAtLeast, kEqual, kAnd, kNor };

bool holds(uint64_t found, uint64_t value, uint32_t comparison) {
    switch (comparison) {
        case kAtLeast: return static_cast<int64_t>(found - value) >= 0;
        case kEqual: return found == value;
        case kAnd: return (found & value) != 0;
        default: return ~(found | value) != 0;
    }
}

}  // namespace

API int aclrtValueWrite(void* address, uint64_t value, uint32_t, void* stream) {
    stream_of(stream)->push([=] {
        {
            std::lock_guard lock(value_mutex);
            *static_cast<uint64_t*>(address) = value;
        }
        value_written.notify_all();
        return kOk;
    });
    return kOk;
}
API int aclrtValueWait(void* address, uint64_t value, uint32_t comparison, void* stream) {
    stream_of(stream)->push([=] {
        std::unique_lock lock(value_mutex);
        value_written.wait(lock, [=] { return holds(*static_cast<uint64_t*>(address), value, comparison); });
        return kOk;
    });
    return kOk;
}

// Graphs. A captured task group can be replaced by what is captured in an update of it.
namespace {

struct TaskGroup {
    std::shared_ptr<Graph> graph;
    size_t begin, end;
};

struct Update {
    TaskGroup* group;
    std::shared_ptr<Graph> tasks;
};

std::map<Stream*, size_t> group_begin;
std::map<Stream*, Update> updates;
std::mutex graph_mutex;

}  // namespace

API int aclmdlRICaptureBegin(void* stream, int) {
    Stream* one = stream_of(stream);
    if (one->capture) return kUnsupported;
    one->capture = std::make_shared<Graph>();
    one->graph_handle = new std::shared_ptr<Graph>(one->capture);
    return kOk;
}
API int aclmdlRICaptureEnd(void* stream, void** graph) {
    Stream* one = stream_of(stream);
    if (!one->capture) return kUnsupported;
    one->capture = nullptr;
    *graph = std::exchange(one->graph_handle, nullptr);
    return kOk;
}
API int aclmdlRICaptureGetInfo(void* stream, int* status, void** graph) {
    Stream* one = stream_of(stream);
    *status = one->capture ? 1 : 0;
    if (graph) *graph = one->graph_handle;
    return kOk;
}
API int aclmdlRICaptureThreadExchangeMode(int*) { return kOk; }
API int aclmdlRIExecuteAsync(void* graph, void* stream) {
    auto held = *static_cast<std::shared_ptr<Graph>*>(graph);
    stream_of(stream)->push([held] {
        for (size_t i = 0;; ++i) {
            Task task;
            {
                std::lock_guard lock(held->mutex);
                if (i == held->tasks.size()) return kOk;
                task = held->tasks[i];
            }
            if (const int error = task()) return error;
        }
    });
    return kOk;
}
API int aclmdlRIDestroy(void* graph) { return delete static_cast<std::shared_ptr<Graph>*>(graph), kOk; }
API int aclmdlRIGetId(void*, uint32_t* id) { return *id = 1, kOk; }
API int aclmdlRICaptureTaskGrpBegin(void* stream) {
    Stream* one = stream_of(stream);
    if (!one->capture) return kUnsupported;
    std::lock_guard lock(graph_mutex);
    group_begin[one] = one->capture->tasks.size();
    return kOk;
}
API int aclmdlRICaptureTaskGrpEnd(void* stream, void** group) {
    Stream* one = stream_of(stream);
    if (!one->capture) return kUnsupported;
    std::lock_guard lock(graph_mutex);
    *group = new TaskGroup{one->capture, group_begin[one], one->capture->tasks.size()};
    return kOk;
}
API int aclmdlRICaptureTaskUpdateBegin(void* stream, void* group) {
    Stream* one = stream_of(stream);
    one->capture = std::make_shared<Graph>();
    std::lock_guard lock(graph_mutex);
    updates[one] = {static_cast<TaskGroup*>(group), one->capture};
    return kOk;
}
API int aclmdlRICaptureTaskUpdateEnd(void* stream) {
    Stream* one = stream_of(stream);
    one->capture = nullptr;
    std::lock_guard lock(graph_mutex);
    Update update = updates[one];
    updates.erase(one);
    if (!update.group || update.tasks->tasks.size() != update.group->end - update.group->begin) return kUnsupported;
    // In the stream's order: what was launched on it before still sees the old tasks.
    one->push([update] {
        std::lock_guard held(update.group->graph->mutex);
        std::copy(update.tasks->tasks.begin(), update.tasks->tasks.end(),
                  update.group->graph->tasks.begin() + static_cast<long>(update.group->begin));
        return kOk;
    });
    return kOk;
}
