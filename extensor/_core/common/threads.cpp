#include "common/threads.hpp"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace threads {
namespace {

constexpr int64_t kMinWork = 1 << 16;  // below this much work, waking a thread costs more
constexpr int kSpins = 40000;          // a worker polls this often before it goes to sleep

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// A job is open while `left_` counts tasks that nobody has taken. Whoever takes one may read the
// job: its owner waits until all of them are done. So a worker that comes late needs no lock.
//
// The owner takes tasks from the front, workers from the back: kernels that follow one another on
// the same arrays then find in a thread's cache, and in its table of pages, what it used before.
class Pool {
public:
    explicit Pool(int workers) {
        for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { work(); });
    }

    ~Pool() {
        stop_.store(true);
        {
            std::lock_guard lock(mutex_);
        }
        wake_.notify_all();
        for (auto& t : threads_) t.join();
    }

    void run(int64_t tasks, Body body, void* context) {
        body_ = body, context_ = context;
        done_.store(0, std::memory_order_relaxed);
        back_.store(tasks, std::memory_order_relaxed);
        left_.store(tasks);
        if (asleep_.load()) {  // counted before the sleeper looks at `left_` a last time
            {
                std::lock_guard lock(mutex_);
            }
            wake_.notify_all();
        }
        for (int64_t front = 0; take(); ++front) run_task(front);
        for (int spin = 0; done_.load(std::memory_order_acquire) < tasks; ++spin)
            spin < kSpins ? relax() : std::this_thread::yield();
    }

private:
    // Whether there was a task that nobody had taken.
    bool take() {
        int64_t left = left_.load(std::memory_order_acquire);
        do {
            if (left == 0) return false;
        } while (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel));
        return true;
    }

    void run_task(int64_t task) {
        body_(context_, task);
        done_.fetch_add(1, std::memory_order_release);
    }

    void work() {
        for (int spin = 0; !stop_.load(std::memory_order_relaxed);) {
            if (take()) {
                run_task(back_.fetch_sub(1, std::memory_order_relaxed) - 1);
                spin = 0;
            } else if (++spin < kSpins) {
                relax();
            } else {
                std::unique_lock lock(mutex_);
                asleep_.fetch_add(1);
                wake_.wait(lock, [&] { return left_.load() > 0 || stop_.load(); });
                asleep_.fetch_sub(1);
                spin = 0;
            }
        }
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
    alignas(64) Body body_ = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<int64_t> left_{0};
    std::atomic<int64_t> back_{0};  // one more than the task that the next worker takes
    alignas(64) std::atomic<int64_t> done_{0};
};

std::mutex gate;  // held by whoever uses or replaces the pool
Pool* pool = nullptr;
std::atomic<int> requested{1};
std::atomic<OpenMP> openmp{nullptr};
int running = 1;

// In a forked child the worker threads do not exist: forget the pool (its memory is lost on
// purpose) and build a new one when it is next needed. libgomp would wait for its own forever.
void after_fork() {
    new (&gate) std::mutex;
    pool = nullptr;
    openmp = nullptr;
    running = 1;
}

void register_after_fork() {
#if defined(__unix__) || defined(__APPLE__)
    static const int registered = pthread_atfork(nullptr, nullptr, after_fork);
    (void)registered;
#endif
}

void run_on_openmp(OpenMP parallel, int64_t tasks, Body body, void* context) {
    struct Job {
        int64_t tasks;
        Body body;
        void* context;
        std::thread::id owner = std::this_thread::get_id();
        std::atomic<int64_t> taken{0}, front{0}, back{0};
    } job{tasks, body, context};
    const auto run_tasks = [](void* data) {
        auto& job = *static_cast<Job*>(data);
        const bool owner = std::this_thread::get_id() == job.owner;
        while (job.taken.fetch_add(1) < job.tasks)
            job.body(job.context,
                     owner ? job.front.fetch_add(1) : job.tasks - 1 - job.back.fetch_add(1));
    };
    parallel(run_tasks, &job, 0, 0);  // 0: as many threads as its owner has set
}

}  // namespace

namespace {

struct Scratch {
    void* block[static_cast<int>(Slot::count)] = {};
    int64_t bytes[static_cast<int>(Slot::count)] = {};
    ~Scratch() {
        for (void* b : block) std::free(b);
    }
};

}  // namespace

void* scratch(Slot slot, int64_t bytes) {
    thread_local Scratch mine;
    const int i = static_cast<int>(slot);
    if (mine.bytes[i] < bytes) {
        const int64_t rounded = (bytes + 4095) / 4096 * 4096;
        std::free(mine.block[i]);
        mine.bytes[i] = 0;
        mine.block[i] = std::aligned_alloc(64, static_cast<size_t>(rounded));
        if (!mine.block[i]) throw std::bad_alloc();
        mine.bytes[i] = rounded;
    }
    return mine.block[i];
}

void set(int count) { requested.store(count < 1 ? 1 : count); }

int get() { return requested.load(); }

void use_openmp(OpenMP parallel) {
    register_after_fork();
    openmp = parallel;
}

void run_raw(int64_t tasks, int64_t work, Body body, void* context) {
    thread_local bool in_task = false;  // a task of this thread's own job: the gate is held already
    if (tasks > 1 && work > kMinWork && requested.load() > 1 && !in_task && gate.try_lock()) {
        std::lock_guard lock(gate, std::adopt_lock);
        struct InTask {
            bool& flag;
            explicit InTask(bool& flag) : flag(flag) { flag = true; }
            ~InTask() { flag = false; }
        } now(in_task);
        if (const OpenMP parallel = openmp.load())
            return run_on_openmp(parallel, tasks, body, context);
        if (running != requested.load()) {
            register_after_fork();
            delete pool;
            pool = nullptr;
            running = requested.load();
            pool = new Pool(running - 1);
        }
        pool->run(tasks, body, context);
        return;
    }
    for (int64_t t = 0; t < tasks; ++t) body(context, t);
}

}  // namespace threads
