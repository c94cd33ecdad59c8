// Loops that a team of threads goes through together. A loop is over as soon as all its items are done, whoever did them: a thread that the
// system has stopped between two items holds up nobody, but at the end of the last loop, where OpenMP waits for all. A team that has every
// core is stopped by whatever else runs on the machine, in one thread or the other, and after each of OpenMP's loops all wait for all.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>

namespace baton {

using Clock = std::chrono::steady_clock;

constexpr Clock::duration OFFER_EVERY = std::chrono::microseconds(200);  // a first token waits for three who give way
constexpr int SPINS = 2000;  // looks at what others have done, before they are offered the core; not tuned
constexpr int64_t SHARES = 4;  // of short items, for each thread; not tuned

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// This thread's core, offered to others between two items, where nobody waits for what it has begun. Not again before as much time has passed
// as they took: who computes without a pause gets no more than half of it.
inline void offer_core() {
    thread_local Clock::time_point next = Clock::now();
    const auto before = Clock::now();
    if (before < next) return;
    std::this_thread::yield();
    const auto after = Clock::now();
    next = after + std::max(OFFER_EVERY, after - before);
}

struct alignas(64) Loop {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
};

// One thread of a team. All of them ask for the same loops, in the same order.
class Member {
  public:
    Member(Loop* first, int num_threads) : loop_(first), num_threads_(num_threads) {}

    // item(i) for each i in [0, count), by one member each; returns when all are done.
    template <typename Item>
    void each(int64_t count, const Item& item) {
        Loop& loop = *loop_++;
        for (int64_t i; (i = loop.next.fetch_add(1, std::memory_order_relaxed)) < count;) {
            item(i);
            loop.done.fetch_add(1, std::memory_order_release);
            if (loop.next.load(std::memory_order_relaxed) < count) offer_core();  // while there is something to do for the others
        }
        for (int spins = 0; loop.done.load(std::memory_order_acquire) < count; spins++) {
            if (spins < SPINS) {
                pause_briefly();
            } else {
                std::this_thread::yield();
            }
        }
    }

    // The same for short items, some at once.
    template <typename Item>
    void each_short(int64_t count, const Item& item) {
        const int64_t shares = std::min(count, SHARES * num_threads_);
        each(shares, [&](int64_t share) {
            for (int64_t i = share * count / shares; i < (share + 1) * count / shares; i++) item(i);
        });
    }

  private:
    Loop* loop_;
    int num_threads_;
};

// body(member) in each thread of a team, for so many loops at most.
template <typename Body>
void by_team(int num_threads, int64_t num_loops, const Body& body) {
    const std::unique_ptr<Loop[]> loops(new Loop[size_t(num_loops)]);
#pragma omp parallel num_threads(num_threads)
    {
        Member member(loops.get(), num_threads);
        body(member);
    }
}

}  // namespace baton
