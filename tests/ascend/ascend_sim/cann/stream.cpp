#include "stream.hpp"

#include <atomic>
#include <chrono>

extern "C" {
// Python is in the process that loads this, or it is not.
int Py_IsInitialized() __attribute__((weak));
int PyGILState_Check() __attribute__((weak));
void* PyEval_SaveThread() __attribute__((weak));
void PyEval_RestoreThread(void*) __attribute__((weak));
}

namespace ascend_sim {

namespace {

std::atomic<int> first_errors[64];  // by device: what fails on one stream stops them all

}  // namespace

Stream::Stream(int id, int device) : id_(id), device_(device) {
    // Never joined: streams live as long as the process.
    std::thread([this] { run(); }).detach();
}

void Stream::run() {
    std::unique_lock lock(mutex_);
    for (;;) {
        pushed_.wait(lock, [this] { return !queue_.empty(); });
        Task task = std::move(queue_.front());
        queue_.pop_front();
        busy_ = true;
        lock.unlock();
        const int error = task();
        task = nullptr;
        lock.lock();
        busy_ = false;
        int none = 0;
        if (error) first_errors[device_ < 0 ? 0 : device_].compare_exchange_strong(none, error);
        if (queue_.empty()) drained_.notify_all();
    }
}

void Stream::push(Task task) {
    if (capture) {
        std::lock_guard lock(capture->mutex);
        capture->tasks.push_back(std::move(task));
        return;
    }
    {
        std::lock_guard lock(mutex_);
        queue_.push_back(std::move(task));
    }
    pushed_.notify_one();
}

void Stream::synchronize() {
    std::unique_lock lock(mutex_);
    drained_.wait(lock, [this] { return queue_.empty() && !busy_; });
}

bool Stream::idle() {
    std::lock_guard lock(mutex_);
    return queue_.empty() && !busy_;
}

int Stream::error() { return first_errors[device_ < 0 ? 0 : device_]; }

WithoutPythonLock::WithoutPythonLock() {
    if (Py_IsInitialized && Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
}

WithoutPythonLock::~WithoutPythonLock() {
    if (state_) PyEval_RestoreThread(state_);
}

void sleep_us(long microseconds) {
    if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

}  // namespace ascend_sim
