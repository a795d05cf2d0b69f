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

class Pool {
public:
    explicit Pool(int workers) {
        for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { work(); });
    }

    ~Pool() {
        {
            std::lock_guard lock(mutex_);
            stop_ = true;
            generation_.fetch_add(1);
        }
        wake_.notify_all();
        for (auto& t : threads_) t.join();
    }

    void run(int64_t tasks, Body body, void* context) {
        {
            std::lock_guard lock(mutex_);
            body_ = body, context_ = context, tasks_ = tasks;
            next_.store(0);
            open_ = true;
            generation_.fetch_add(1);
        }
        wake_.notify_all();
        run_tasks();
        {
            std::lock_guard lock(mutex_);  // a worker that wakes up only now stays out
            open_ = false;
        }
        for (int spin = 0; active_.load(std::memory_order_acquire) > 0; ++spin)
            spin < kSpins ? relax() : std::this_thread::yield();
    }

private:
    void run_tasks() {
        for (int64_t t; (t = next_.fetch_add(1)) < tasks_;) body_(context_, t);
    }

    void work() {
        for (uint64_t seen = 0;;) {
            for (int spin = 0; generation_.load(std::memory_order_acquire) == seen; ++spin) {
                if (spin < kSpins) {
                    relax();
                    continue;
                }
                std::unique_lock lock(mutex_);
                wake_.wait(lock, [&] { return generation_.load() != seen; });
            }
            {
                std::lock_guard lock(mutex_);
                seen = generation_.load();
                if (stop_) return;
                if (!open_) continue;
                active_.fetch_add(1);
            }
            run_tasks();
            active_.fetch_sub(1, std::memory_order_release);
        }
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<uint64_t> generation_{0};
    std::atomic<int64_t> next_{0};
    std::atomic<int> active_{0};
    Body body_ = nullptr;
    void* context_ = nullptr;
    int64_t tasks_ = 0;
    bool open_ = false, stop_ = false;
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
        std::atomic<int64_t> next{0};
    } job{tasks, body, context};
    const auto run_tasks = [](void* data) {
        auto& job = *static_cast<Job*>(data);
        for (int64_t t; (t = job.next.fetch_add(1)) < job.tasks;) job.body(job.context, t);
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
