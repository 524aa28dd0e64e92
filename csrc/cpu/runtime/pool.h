// Threads: one call runs a list of phases, each a number of independent tasks handed out one by one.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace moefuse {

constexpr int kMaxThreads = 256;

struct Phase {
  int64_t tasks;
  // Runs `task`. `next` is the task this thread will run after it, or -1: something to prefetch for.
  // `worker` is below the thread count of the call; no two tasks that run at once share it.
  std::function<void(int64_t task, int64_t next, int worker)> run;
};

// Runs the phases in order, each finished before the next starts, on the caller and up to threads - 1 workers.
// A second caller at the same time runs its phases alone rather than wait.
void run_phases(const std::vector<Phase>& phases, int threads);

// GOMP_parallel: calls `run(data)` on every thread of the calling thread's OpenMP team, this one included.
using OpenMPParallel = void (*)(void (*run)(void*), void* data, unsigned threads, unsigned flags);

// From now on phases run on this runtime's teams, or on threads of our own if it is null. torch's OpenMP threads spin
// for milliseconds after each of its operations: as workers they start at once, beside ours they take their cores.
void share_openmp(OpenMPParallel parallel);
bool shares_openmp();

// The threads worth waking for this many multiply-adds, or elements moved.
int worth(int threads, int64_t operations);

}  // namespace moefuse
