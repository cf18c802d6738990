// In-order streams: each is a queue and a thread that runs its tasks. While a stream captures, tasks are recorded
// instead. After a task that failed, whoever waits for its device is told.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ascend_sim {

using Task = std::function<int()>;  // gives 0 or an error code

struct Graph {
    std::mutex mutex;  // an update may come while a replay runs
    std::vector<Task> tasks;
};

class Stream {
  public:
    Stream(int id, int device);
    void push(Task task);
    void synchronize();  // the caller must not hold Python's lock
    bool idle();
    int error();
    int id() const { return id_; }
    int device() const { return device_; }
    std::shared_ptr<Graph> capture;  // set while the stream captures
    void* graph_handle = nullptr;    // what the captured graph is called outside

  private:
    void run();
    const int id_, device_;
    std::mutex mutex_;
    std::condition_variable pushed_, drained_;
    std::deque<Task> queue_;
    bool busy_ = false;
};

Stream* stream_of(void* handle);  // null: the current device's default stream

// Python's lock is released while one of these lives, if this thread holds it: what a stream runs may need it.
class WithoutPythonLock {
  public:
    WithoutPythonLock();
    ~WithoutPythonLock();

  private:
    void* state_ = nullptr;
};

void sleep_us(long microseconds);

}  // namespace ascend_sim
