// libhccl.so: collectives between processes of one machine, through shared memory, in the order of their streams.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>

#define API extern "C" __attribute__((visibility("default")))

extern "C" int aclrtLaunchHostFunc(void* stream, void (*function)(void*), void* argument);

namespace {

constexpr size_t kSlotBytes = size_t{16} << 20;
constexpr size_t kHeaderBytes = 4096;
constexpr int kFailed = 4;
enum Dtype { kInt32 = 2, kFloat = 4, kInt64 = 5, kBfloat16 = 11 };
enum Reduction { kSum, kProduct, kMaximum, kMinimum };

struct Header {
    std::atomic<uint32_t> arrived, generation;
};

struct Communicator {
    uint32_t ranks, rank;
    Header* header;
    char* base;
    char name[64];

    void barrier() {
        const uint32_t generation = header->generation.load();
        if (header->arrived.fetch_add(1) + 1 == ranks) {
            header->arrived = 0;
            ++header->generation;
        } else {
            while (header->generation.load() == generation) sched_yield();
        }
    }
    char* slot(uint32_t index) { return base + kHeaderBytes + index * kSlotBytes; }
};

size_t size_of(int dtype) {
    static const size_t sizes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};
    return sizes[dtype];
}

void post(void* stream, std::function<void()> task) {
    aclrtLaunchHostFunc(
        stream,
        [](void* held) {
            auto* one = static_cast<std::function<void()>*>(held);
            (*one)();
            delete one;
        },
        new std::function<void()>(std::move(task)));
}

float widen(uint16_t value) {
    const uint32_t bits = uint32_t{value} << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

uint16_t narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class T>
T reduced(T a, T b, int how) {
    switch (how) {
        case kSum: return a + b;
        case kProduct: return a * b;
        case kMaximum: return a > b ? a : b;
        default: return a < b ? a : b;
    }
}

template <class T>
void reduce_as(void* into, const void* from, size_t count, int how) {
    auto* a = static_cast<T*>(into);
    auto* b = static_cast<const T*>(from);
    for (size_t i = 0; i < count; ++i) a[i] = reduced(a[i], b[i], how);
}

void reduce(void* into, const void* from, size_t count, int dtype, int how) {
    if (dtype == kFloat) return reduce_as<float>(into, from, count, how);
    if (dtype == kInt32) return reduce_as<int32_t>(into, from, count, how);
    if (dtype == kInt64) return reduce_as<int64_t>(into, from, count, how);
    if (dtype == kBfloat16) {
        auto* a = static_cast<uint16_t*>(into);
        auto* b = static_cast<const uint16_t*>(from);
        for (size_t i = 0; i < count; ++i) a[i] = narrow(reduced(widen(a[i]), widen(b[i]), how));
        return;
    }
    std::fprintf(stderr, "simulated hccl: no reduction of dtype %d\n", dtype);
    std::abort();
}

int join(uint32_t ranks, const void* root, uint32_t rank, void** communicator) {
    auto* one = new Communicator{ranks, rank, nullptr, nullptr, {}};
    std::snprintf(one->name, sizeof one->name, "%s", static_cast<const char*>(root));
    const int file = shm_open(one->name, O_CREAT | O_RDWR, 0600);
    const size_t bytes = kHeaderBytes + ranks * kSlotBytes;
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes))) return kFailed;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return kFailed;
    one->header = static_cast<Header*>(memory);
    one->base = static_cast<char*>(memory);
    one->barrier();
    if (rank == 0) shm_unlink(one->name);
    *communicator = one;
    return 0;
}

}  // namespace

API int HcclGetRootInfo(void* root) {
    std::random_device random;
    std::memset(root, 0, 256);
    std::snprintf(static_cast<char*>(root), 64, "/ascend_sim_%d_%u", getpid(), random());
    return 0;
}
API int HcclCommInitRootInfo(uint32_t ranks, const void* root, uint32_t rank, void** communicator) {
    return join(ranks, root, rank, communicator);
}
API int HcclCommInitRootInfoConfig(uint32_t ranks, const void* root, uint32_t rank, const void*, void** communicator) {
    return join(ranks, root, rank, communicator);
}
API int HcclCommDestroy(void*) { return 0; }
API int HcclGetCommAsyncError(void*, int* error) { return *error = 0; }
API int HcclGetCommName(void* communicator, char* name) {
    std::strcpy(name, static_cast<Communicator*>(communicator)->name + 1);
    return 0;
}
API int HcclAllReduce(void* send, void* receive, uint64_t count, int dtype, int how, void* communicator, void* stream) {
    auto* one = static_cast<Communicator*>(communicator);
    post(stream, [=] {
        const size_t bytes = count * size_of(dtype);
        std::memcpy(one->slot(one->rank), send, bytes);
        one->barrier();
        std::memcpy(receive, one->slot(0), bytes);
        for (uint32_t i = 1; i < one->ranks; ++i) reduce(receive, one->slot(i), count, dtype, how);
        one->barrier();
    });
    return 0;
}
API int HcclAllGather(void* send, void* receive, uint64_t count, int dtype, void* communicator, void* stream) {
    auto* one = static_cast<Communicator*>(communicator);
    post(stream, [=] {
        const size_t bytes = count * size_of(dtype);
        std::memcpy(one->slot(one->rank), send, bytes);
        one->barrier();
        for (uint32_t i = 0; i < one->ranks; ++i) std::memcpy(static_cast<char*>(receive) + i * bytes, one->slot(i), bytes);
        one->barrier();
    });
    return 0;
}
API int HcclBroadcast(void* buffer, uint64_t count, int dtype, uint32_t root, void* communicator, void* stream) {
    auto* one = static_cast<Communicator*>(communicator);
    post(stream, [=] {
        const size_t bytes = count * size_of(dtype);
        if (one->rank == root) std::memcpy(one->slot(root), buffer, bytes);
        one->barrier();
        if (one->rank != root) std::memcpy(buffer, one->slot(root), bytes);
        one->barrier();
    });
    return 0;
}
API int HcclReduceScatter(void* send, void* receive, uint64_t count, int dtype, int how, void* communicator, void* stream) {
    auto* one = static_cast<Communicator*>(communicator);
    post(stream, [=] {
        const size_t bytes = count * size_of(dtype);
        std::memcpy(one->slot(one->rank), send, one->ranks * bytes);
        one->barrier();
        const size_t offset = one->rank * bytes;
        std::memcpy(receive, one->slot(0) + offset, bytes);
        for (uint32_t i = 1; i < one->ranks; ++i) reduce(receive, one->slot(i) + offset, count, dtype, how);
        one->barrier();
    });
    return 0;
}
