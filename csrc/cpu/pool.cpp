#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace moefuse {
namespace {

using Clock = std::chrono::steady_clock;

// Long enough to bridge the end of a phase, short enough to cost little when another process has the core. Not tuned.
constexpr auto kSpin = std::chrono::microseconds(50);

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `value` is no longer `old`: spins for a bounded time, then sleeps.
template <class T>
void wait_change(const std::atomic<T>& value, T old) {
  auto deadline = Clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      relax();
    }
  } while (Clock::now() < deadline);
  value.wait(old, std::memory_order_acquire);
}

struct alignas(64) Progress {
  std::atomic<int64_t> claimed{0};
  alignas(64) std::atomic<int64_t> done{0};
};

// One call. A phase is over when its tasks are done, not when every worker has come by: one that the system has
// not scheduled yet holds up nobody.
class Job {
 public:
  Job(const std::vector<Phase>& phases, int threads)
      : threads_(threads), phases_(phases), progress_(new Progress[phases.size()]) {
    skip_empty(0);
  }

  int threads() const { return threads_; }

  void work(int worker) {
    for (int p = 0; p < count(); ++p) {
      await(p);
      drain(p, worker);
    }
    await(count());
  }

 private:
  int count() const { return static_cast<int>(phases_.size()); }

  void await(int p) const {
    for (int now = open_.load(std::memory_order_acquire); now < p; now = open_.load(std::memory_order_acquire)) {
      wait_change(open_, now);
    }
  }

  void drain(int p, int worker) {
    const Phase& phase = phases_[static_cast<size_t>(p)];
    Progress& progress = progress_[p];
    if (progress.claimed.load(std::memory_order_relaxed) >= phase.tasks) return;
    int64_t task = progress.claimed.fetch_add(1, std::memory_order_relaxed);
    while (task < phase.tasks) {
      int64_t next = progress.claimed.fetch_add(1, std::memory_order_relaxed);
      phase.run(task, next < phase.tasks ? next : -1, worker);
      if (progress.done.fetch_add(1, std::memory_order_acq_rel) + 1 == phase.tasks) skip_empty(p + 1);
      task = next;
    }
  }

  // Opens the first phase from p on that has tasks.
  void skip_empty(int p) {
    while (p < count() && phases_[static_cast<size_t>(p)].tasks == 0) ++p;
    open_.store(p, std::memory_order_release);
    open_.notify_all();
  }

  int threads_;
  const std::vector<Phase>& phases_;
  std::unique_ptr<Progress[]> progress_;
  std::atomic<int> open_{0};  // the phase that may run; the phase count when all are done
};

class Pool {
 public:
  // False when another caller has the workers.
  bool try_run(Job& job) {
    std::unique_lock<std::mutex> caller(callers_, std::try_to_lock);
    if (!caller.owns_lock()) return false;
    grow(job.threads() - 1);
    job_ = &job;
    uint32_t open = epoch_.load(std::memory_order_relaxed) + 1;
    epoch_.store(open);
    epoch_.notify_all();
    job.work(0);
    // A worker counts itself in before it looks at the epoch again, so none can enter once this count is zero.
    epoch_.store(open + 1);
    for (int inside = inside_.load(); inside != 0; inside = inside_.load()) wait_change(inside_, inside);
    return true;
  }

 private:
  void grow(int workers) {
    try {
      for (; workers_ < workers; ++workers_) std::thread(&Pool::serve, this, workers_ + 1).detach();
    } catch (const std::system_error&) {
      // The system has no more threads to give: those there are do the work.
    }
  }

  void serve(int worker) {
    uint32_t seen = 0;
    for (;;) {
      uint32_t epoch = epoch_.load();
      if (epoch == seen || epoch % 2 == 0) {
        wait_change(epoch_, epoch);
        continue;
      }
      seen = epoch;
      inside_.fetch_add(1);
      if (epoch_.load() == epoch && worker < job_->threads()) job_->work(worker);
      if (inside_.fetch_sub(1) == 1) inside_.notify_all();
    }
  }

  std::mutex callers_;
  std::atomic<uint32_t> epoch_{0};  // odd while a job is open
  std::atomic<int> inside_{0};      // workers that may be looking at job_
  Job* job_ = nullptr;
  int workers_ = 0;
};

std::atomic<Pool*> current{nullptr};

// A forked child has none of the parent's threads, and perhaps a locked mutex: it starts over. The pool itself is
// never freed, as its workers outlive every static destructor.
void forget_pool() { current.store(nullptr); }

Pool& pool() {
  Pool* now = current.load(std::memory_order_acquire);
  if (now != nullptr) return *now;
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
  static_cast<void>(registered);
  Pool* fresh = new Pool;
  if (current.compare_exchange_strong(now, fresh)) return *fresh;
  delete fresh;
  return *now;
}

}  // namespace

void run_phases(const std::vector<Phase>& phases, int threads) {
  Job job(phases, std::clamp(threads, 1, kMaxThreads));
  if (threads > 1 && pool().try_run(job)) return;
  job.work(0);
}

int worth(int threads, int64_t operations) {
  // A few microseconds of one core's work, about what a wake-up should cost. Not tuned.
  constexpr int64_t kGrain = 65536;
  return static_cast<int>(std::clamp<int64_t>(operations / kGrain, 1, std::clamp(threads, 1, kMaxThreads)));
}

}  // namespace moefuse
