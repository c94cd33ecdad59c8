// Runs a sequence of parallel loops in one team of OpenMP threads.
//
// Threads take items dynamically. A loop ends when all its items are done, so a thread that the system has
// preempted between two items delays no other. Only the end of the last loop waits for all threads. With
// OpenMP's own loops, all threads wait for all others after each loop. If the team uses every core, other
// processes preempt one thread or another all the time.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>

namespace baton {

using Clock = std::chrono::steady_clock;

// Limits how long a prompt's first token waits when three processes yield.
constexpr Clock::duration MIN_YIELD_INTERVAL = std::chrono::microseconds(200);
// Polls of the loop counter before a waiting thread yields its core. Not tuned.
constexpr int SPINS_BEFORE_YIELD = 2000;
constexpr int64_t BATCHES_PER_THREAD = 4;  // batches of short items per thread; not tuned
// Fewer numbers of a loop that does little with each are not worth waking the other threads.
constexpr int64_t MIN_PARALLEL_ELEMENTS = 32768;

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Yields this thread's core between two items, when no other thread waits for its results. It then does not
// yield again for as long as the yield took. So a process that computes without pause gets at most half of
// the core.
inline void yield_core() {
    thread_local Clock::time_point next = Clock::now();
    const auto before = Clock::now();
    if (before < next) return;
    std::this_thread::yield();
    const auto after = Clock::now();
    next = after + std::max(MIN_YIELD_INTERVAL, after - before);
}

struct alignas(64) LoopCounters {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
};

// One thread of a team. All threads must call the same loops in the same order.
class TeamThread {
  public:
    TeamThread(LoopCounters* first, int num_threads) : loop_(first), num_threads_(num_threads) {}

    // Calls item(i) once for each i in [0, count), distributed over the threads. Returns when all are done.
    template <typename WorkItem>
    void parallel_for(int64_t count, const WorkItem& item) {
        LoopCounters& loop = *loop_++;
        for (int64_t i; (i = loop.next.fetch_add(1, std::memory_order_relaxed)) < count;) {
            item(i);
            loop.done.fetch_add(1, std::memory_order_release);
            // only while items are left for the others
            if (loop.next.load(std::memory_order_relaxed) < count) yield_core();
        }
        for (int spins = 0; loop.done.load(std::memory_order_acquire) < count; spins++) {
            if (spins < SPINS_BEFORE_YIELD) {
                pause_briefly();
            } else {
                std::this_thread::yield();
            }
        }
    }

    // Does the same for short items, several per turn of a thread.
    template <typename WorkItem>
    void parallel_for_batched(int64_t count, const WorkItem& item) {
        const int64_t num_batches = std::min(count, BATCHES_PER_THREAD * num_threads_);
        parallel_for(num_batches, [&](int64_t batch) {
            for (int64_t i = batch * count / num_batches; i < (batch + 1) * count / num_batches; i++) item(i);
        });
    }

  private:
    LoopCounters* loop_;
    int num_threads_;
};

// Calls body(team) in each of num_threads threads. `num_loops`: upper bound on the loops that body calls.
template <typename Body>
void run_team(int num_threads, int64_t num_loops, const Body& body) {
    const std::unique_ptr<LoopCounters[]> loops(new LoopCounters[size_t(num_loops)]);
#pragma omp parallel num_threads(num_threads)
    {
        TeamThread team(loops.get(), num_threads);
        body(team);
    }
}

}  // namespace baton
