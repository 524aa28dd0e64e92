#include "runtime/pool.h"

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

// A team whose last thread comes this long after the end of the work is left alone for up to kLongestPause calls.
constexpr auto kLate = std::chrono::microseconds(200);
constexpr int kLongestPause = 256;

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
  Clock::time_point finished() const { return finished_; }

  // Works as the next worker, unless there are enough.
  void join() {
    int worker = joined_.fetch_add(1, std::memory_order_relaxed);
    if (worker < threads_) work(worker);
  }

 private:
  void work(int worker) {
    for (int p = 0; p < count(); ++p) {
      await(p);
      drain(p, worker);
    }
    await(count());
  }

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
    if (p == count()) finished_ = Clock::now();
    open_.store(p, std::memory_order_release);
    open_.notify_all();
  }

  int threads_;
  const std::vector<Phase>& phases_;
  std::unique_ptr<Progress[]> progress_;
  Clock::time_point finished_;
  std::atomic<int> joined_{0};
  std::atomic<int> open_{0};  // the phase that may run; the phase count when all are done
};

std::atomic<OpenMPParallel> openmp{nullptr};

class Pool {
 public:
  // False when another caller has the workers.
  bool try_run(Job& job) {
    std::unique_lock<std::mutex> caller(callers_, std::try_to_lock);
    if (!caller.owns_lock()) return false;
    if (OpenMPParallel parallel = openmp.load(std::memory_order_relaxed); parallel != nullptr && pause_ == 0) {
      run_on_team(job, parallel);
    } else {
      pause_ = std::max(pause_ - 1, 0);
      run_on_own(job);
    }
    return true;
  }

  // A new team has not been late yet.
  void trust_team() {
    std::lock_guard<std::mutex> caller(callers_);
    pause_ = 0;
    next_pause_ = 1;
  }

 private:
  // A region ends when its last thread comes by, and where other processes have the cores that may be long after the
  // work is done (load of 5 on two cores: 9 ms). Then our own threads, who wait for nobody, take the next calls.
  void run_on_team(Job& job, OpenMPParallel parallel) {
    // The whole team, as for a smaller one the runtime would end threads and later start them again.
    constexpr unsigned kWholeTeam = 0, kNoFlags = 0;
    parallel([](void* data) { static_cast<Job*>(data)->join(); }, &job, kWholeTeam, kNoFlags);
    bool late = Clock::now() - job.finished() > kLate;
    next_pause_ = late ? std::min(2 * next_pause_, kLongestPause) : 1;
    if (late) pause_ = next_pause_;
  }

  void run_on_own(Job& job) {
    grow(job.threads() - 1);
    job_ = &job;
    uint32_t open = epoch_.load(std::memory_order_relaxed) + 1;
    epoch_.store(open);
    epoch_.notify_all();
    job.join();
    // A worker counts itself in before it looks at the epoch again, so none can enter once this count is zero.
    epoch_.store(open + 1);
    for (int inside = inside_.load(); inside != 0; inside = inside_.load()) wait_change(inside_, inside);
  }

  void grow(int workers) {
    try {
      for (; workers_ < workers; ++workers_) std::thread(&Pool::serve, this).detach();
    } catch (const std::system_error&) {
      // The system has no more threads to give: those there are do the work.
    }
  }

  void serve() {
    uint32_t seen = 0;
    for (;;) {
      uint32_t epoch = epoch_.load();
      if (epoch == seen || epoch % 2 == 0) {
        wait_change(epoch_, epoch);
        continue;
      }
      seen = epoch;
      inside_.fetch_add(1);
      if (epoch_.load() == epoch) job_->join();
      if (inside_.fetch_sub(1) == 1) inside_.notify_all();
    }
  }

  std::mutex callers_;
  std::atomic<uint32_t> epoch_{0};  // odd while a job is open
  std::atomic<int> inside_{0};      // workers that may be looking at job_
  Job* job_ = nullptr;
  int workers_ = 0;
  int pause_ = 0;  // calls for which the team is left alone
  int next_pause_ = 1;
};

std::atomic<Pool*> current{nullptr};

// A forked child has none of the parent's threads, and perhaps a locked mutex: it starts over, on threads of its own,
// as OpenMP would wait for those it had. The pool itself is never freed: its workers outlive every static destructor.
void start_over() {
  current.store(nullptr);
  openmp.store(nullptr);
}

// From the start, as torch may have used its team before us.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, start_over);

Pool& pool() {
  Pool* now = current.load(std::memory_order_acquire);
  if (now != nullptr) return *now;
  Pool* fresh = new Pool;
  if (current.compare_exchange_strong(now, fresh)) return *fresh;
  delete fresh;
  return *now;
}

}  // namespace

void share_openmp(OpenMPParallel parallel) {
  openmp.store(parallel);
  pool().trust_team();
}

bool shares_openmp() { return openmp.load() != nullptr; }

void run_phases(const std::vector<Phase>& phases, int threads) {
  Job job(phases, std::clamp(threads, 1, kMaxThreads));
  if (threads > 1 && pool().try_run(job)) return;
  job.join();
}

int worth(int threads, int64_t operations) {
  // A few microseconds of one core's work, about what a wake-up should cost. Not tuned.
  constexpr int64_t kGrain = 65536;
  return static_cast<int>(std::clamp<int64_t>(operations / kGrain, 1, std::clamp(threads, 1, kMaxThreads)));
}

}  // namespace moefuse
