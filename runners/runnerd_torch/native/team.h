// A team of threads that shares pieces of work. Needs nothing but the C++17 library.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

extern "C" {
// Runs body(data) on a team of threads and waits for them: libgomp's entry point for a parallel region.
typedef void (*ParallelRegion)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
}

namespace {

struct Team {
    ParallelRegion parallel_region;  // null: threads of our own
    int64_t num_threads;

    // Calls work(scratch, i) for each i < num_items on up to most_threads threads, which take items as they get free;
    // each thread makes its scratch. Gives whether there was memory for it.
    template <typename MakeScratch, typename Work>
    bool run(int64_t most_threads, int64_t num_items, MakeScratch make_scratch, Work work) const {
        std::atomic<int64_t> next{0};
        std::atomic<bool> failed{false};
        auto member = [&] {
            try {
                auto scratch = make_scratch();
                for (int64_t i = next++; i < num_items; i = next++) work(scratch, i);
            } catch (const std::bad_alloc&) {
                failed = true;
            }
        };
        const int64_t count = std::min({most_threads, num_threads, num_items});
        if (count < 2) {
            member();
        } else if (parallel_region) {
            const auto body = [](void* data) { (*static_cast<decltype(member)*>(data))(); };
            parallel_region(body, &member, unsigned(count), 0);
        } else {
            std::vector<std::thread> others;
            try {
                for (int64_t i = 1; i < count; ++i) others.emplace_back(member);
            } catch (const std::system_error&) {  // no more threads to be had: those there are do the work
            }
            member();
            for (std::thread& other : others) other.join();
        }
        return !failed;
    }
};

}  // namespace
