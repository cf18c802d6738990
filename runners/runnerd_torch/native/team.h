// A team of threads that shares pieces of work. Needs nothing but the C++17 library.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <system_error>
#include <thread>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

extern "C" {
// Runs body(data) on a team of threads and waits for them: libgomp's entry point for a parallel region.
typedef void (*ParallelRegion)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
}

namespace {

// Threads that stay together for many small pieces of work: they wait for the next one awake, because waking up takes
// as long as such a piece. Who leads does not wait for helpers to come, only for those that took part to be done.
class Crew {
public:
    // Helps until dismissed.
    void help() {
        const int64_t number = ++num_helpers_;
        uint64_t last = 0;
        for (int64_t waited = 0; !dismissed_;) {
            const uint64_t job = job_;
            if (job == 0 || job == last) {
                rest(waited++);
                continue;
            }
            // The leader waits for those inside, so a job that is still open stays as it is.
            ++num_inside_;
            if (job_ == job && number < most_threads_) work_(data_, number);
            --num_inside_;
            last = job;
            waited = 0;
        }
    }

    // Has work(data, number) done by up to so many threads, the caller being number 0, and waits for them.
    void lead(int64_t most_threads, void (*work)(void*, int64_t), void* data) {
        most_threads_ = most_threads;
        work_ = work;
        data_ = data;
        job_ = ++num_jobs_;
        work(data, 0);
        job_ = 0;
        for (int64_t waited = 0; num_inside_ != 0; ++waited) rest(waited);
    }

    void dismiss() { dismissed_ = true; }

private:
    static void rest(int64_t waited) {
        // Whoever is waited for may need this very core.
        if (waited >= kRestsAwake) return std::this_thread::yield();
#if defined(__SSE2__)
        _mm_pause();
#endif
    }

    static constexpr int64_t kRestsAwake = 2000;  // 20 to 100 us

    alignas(64) std::atomic<uint64_t> job_{0};  // number of the job that is open; 0: none
    std::atomic<bool> dismissed_{false};
    alignas(64) std::atomic<int64_t> num_inside_{0};
    std::atomic<int64_t> num_helpers_{0};
    uint64_t num_jobs_ = 0;
    int64_t most_threads_ = 0;
    void (*work_)(void*, int64_t) = nullptr;
    void* data_ = nullptr;
};

struct Team {
    ParallelRegion parallel_region;  // null: threads of our own
    int64_t num_threads;
    Crew* crew = nullptr;  // threads that are together already

    // Calls lead(team) with a team whose threads stay together meanwhile. It must not throw.
    template <typename Lead>
    void gather(Lead lead) const {
        if (num_threads < 2) return lead(*this);
        Crew crew;
        const std::thread::id leader = std::this_thread::get_id();
        auto member = [&] {
            if (std::this_thread::get_id() != leader) return crew.help();
            lead(Team{parallel_region, num_threads, &crew});
            crew.dismiss();
        };
        on_threads(num_threads, member);
    }

    // Calls work(scratch, i) for each i < num_items on up to most_threads threads, which take items as they get free,
    // first those of their own share: what threads that stay together work on lies near their cores if it is in the same
    // share each time. Each thread makes its scratch. Gives whether there was memory for it.
    template <typename MakeScratch, typename Work>
    bool run(int64_t most_threads, int64_t num_items, MakeScratch make_scratch, Work work) const {
        const int64_t count = std::min({most_threads, num_threads, num_items});
        const int64_t num_shares = std::max<int64_t>(count, 1);
        struct alignas(64) Share {
            std::atomic<int64_t> next;
        };
        std::atomic<bool> failed{false};
        try {
            std::vector<Share> shares(num_shares);
            for (int64_t share = 0; share < num_shares; ++share) shares[share].next = share * num_items / num_shares;
            auto member = [&](int64_t number) {
                try {
                    auto scratch = make_scratch();
                    for (int64_t turn = 0; turn < num_shares; ++turn) {
                        const int64_t share = (number + turn) % num_shares, end = (share + 1) * num_items / num_shares;
                        for (int64_t i = shares[share].next++; i < end; i = shares[share].next++) work(scratch, i);
                    }
                } catch (const std::bad_alloc&) {
                    failed = true;
                }
            };
            if (count < 2) {
                member(0);
            } else if (crew) {
                const auto call_member = [](void* data, int64_t number) { (*static_cast<decltype(member)*>(data))(number); };
                crew->lead(count, call_member, &member);
            } else {
                std::atomic<int64_t> num_members{0};
                auto numbered = [&] { member(num_members++); };
                on_threads(count, numbered);
            }
        } catch (const std::bad_alloc&) {
            failed = true;
        }
        return !failed;
    }

private:
    template <typename Member>
    static void call(void* member) {
        (*static_cast<Member*>(member))();
    }

    // Calls member() on so many threads, the caller among them, and waits for them.
    template <typename Member>
    void on_threads(int64_t count, Member& member) const {
        if (parallel_region) return parallel_region(&call<Member>, &member, unsigned(count), 0);
        std::vector<std::thread> others;
        try {
            for (int64_t i = 1; i < count; ++i) others.emplace_back(std::ref(member));
        } catch (const std::system_error&) {  // no more threads to be had: those there are do the work
        }
        member();
        for (std::thread& other : others) other.join();
    }
};

}  // namespace
