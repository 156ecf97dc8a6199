// Fibers, barriers, wave collectives and the block loop of the host target (interface: runtime.h).
#include "runtime.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include "fiber.h"

namespace qk {
namespace host {
namespace {

constexpr int kWaveLanes = 32;
constexpr int kMaxThreads = 1024;
#ifdef __SANITIZE_ADDRESS__
constexpr long kStackBytes = 256 * 1024;  // its frames are many times as large
#else
constexpr long kStackBytes = 32 * 1024;
#endif
// Neighbouring stacks are an odd number of cache lines apart; a power of two would put the same
// local variable of all lanes into one cache set.
constexpr long kStackStride = kStackBytes + 9 * 64;
constexpr int kLdsLimit = 64 * 1024;
constexpr unsigned kStackCanary = 0x5afe57acu;

struct Wave {
  void* payload[kWaveLanes];
  Collective operation;
  int arrived;
};

/// Everything that one operating-system thread needs to run a block. Kept between launches: its
/// pages are touched.
struct Worker {
  Current now;  // must be first: current() hands out its address
  Context scheduler;
  Context fibers[kMaxThreads];
  Wave waves[kMaxThreads / kWaveLanes];
  int ready[kMaxThreads];  // ring of fibers that can go on
  int ready_first, ready_count;
  int at_barrier, finished;
  bool failed;
  const Launch* launch;
  char message[192];
  char* stacks;
  alignas(64) u8 lds[kLdsLimit];
  alignas(64) u8 scratch[kWorkspaceBytes];
};

thread_local Worker* worker = nullptr;

void push_ready(Worker& w, int fiber) {
  w.ready[(w.ready_first + w.ready_count++) & (kMaxThreads - 1)] = fiber;
}

/// Leaves the running fiber for the next ready one; with none left the block is stuck, and the
/// scheduler says so.
void switch_away(Worker& w) {
  Context& self = w.fibers[w.now.thread];
  if (w.ready_count == 0 || w.failed) return switch_context(self, w.scheduler);
  const int next = w.ready[w.ready_first];
  w.ready_first = (w.ready_first + 1) & (kMaxThreads - 1);
  --w.ready_count;
  w.now.thread = next;
  switch_context(self, w.fibers[next]);
}

void fiber_main() {
  Worker& w = *worker;
  w.launch->run(w.launch->kernel, w.launch->args);
  ++w.finished;
  switch_away(w);
}

void describe_stuck_block(Worker& w) {
  int lane = -1;
  for (int wave = 0; wave * kWaveLanes < w.launch->threads && lane < 0; ++wave) {
    if (w.waves[wave].arrived == 0) continue;
    for (lane = 0; w.waves[wave].payload[lane] == nullptr;) ++lane;
    lane += wave * kWaveLanes;
  }
  if (lane >= 0) {
    std::snprintf(w.message, sizeof w.message,
                  "thread %d waits at a wave operation that not all lanes reach", lane);
  } else {
    std::snprintf(w.message, sizeof w.message,
                  "divergent barrier: %d threads wait, %d have finished, of %d", w.at_barrier,
                  w.finished, w.launch->threads);
  }
}

bool stacks_intact(const Worker& w, int threads) {
  for (int i = 0; i < threads; ++i) {
    unsigned canary;
    std::memcpy(&canary, w.stacks + i * kStackStride, sizeof canary);
    if (canary != kStackCanary) return false;
  }
  return true;
}

/// Runs one block; false with a message in the worker when it diverged.
bool run_block(Worker& w, const Launch& launch, unsigned x, unsigned y, unsigned z) {
  w.launch = &launch;
  w.now.block[0] = static_cast<int>(x);
  w.now.block[1] = static_cast<int>(y);
  w.now.block[2] = static_cast<int>(z);
  w.ready_first = w.ready_count = w.at_barrier = w.finished = 0;
  w.failed = false;
  std::memset(w.waves, 0, sizeof(Wave) * static_cast<std::size_t>(launch.threads / kWaveLanes));
  std::memset(w.lds, 0xff, static_cast<std::size_t>(launch.lds_bytes));
  for (int i = 0; i < launch.threads; ++i) {
    char* stack = w.stacks + i * kStackStride;
    std::memcpy(stack, &kStackCanary, sizeof kStackCanary);
    make_context(w.fibers[i], stack, kStackBytes, &fiber_main);
    if (i > 0) push_ready(w, i);
  }
  w.now.thread = 0;
  switch_context(w.scheduler, w.fibers[0]);
  if (!w.failed && w.finished != launch.threads) {
    w.failed = true;
    describe_stuck_block(w);
  }
  if (!w.failed && !stacks_intact(w, launch.threads)) {
    w.failed = true;
    std::snprintf(w.message, sizeof w.message, "a thread overflowed its stack of %ld bytes",
                  kStackBytes);
  }
  return !w.failed;
}

/// Workers that no launch uses now. Never freed: a few touched pages per core, for the life of the
/// process.
struct Pool {
  std::mutex mutex;
  std::vector<Worker*> idle;
};
Pool& pool() {
  static Pool* const instance = new Pool;
  return *instance;
}

Worker* acquire() {
  {
    const std::lock_guard<std::mutex> hold(pool().mutex);
    if (!pool().idle.empty()) {
      Worker* const w = pool().idle.back();
      pool().idle.pop_back();
      return w;
    }
  }
  void* const memory =
      mmap(nullptr, sizeof(Worker) + kMaxThreads * kStackStride, PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  Worker* const w = new (memory) Worker;
  w->stacks = static_cast<char*>(memory) + sizeof(Worker);
  return w;
}

void release(Worker* w) {
  const std::lock_guard<std::mutex> hold(pool().mutex);
  pool().idle.push_back(w);
}

/// Blocks are handed out by a counter; each writes only its own outputs, so the order does not
/// matter.
struct Job {
  const Launch* launch;
  std::atomic<unsigned long long> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  char* error;
  int error_size;
};

void report(Job& job, const Worker* w) {
  const std::lock_guard<std::mutex> hold(job.mutex);
  if (job.failed.exchange(true) || job.error == nullptr || job.error_size <= 0) return;
  if (w == nullptr) {
    std::snprintf(job.error, static_cast<std::size_t>(job.error_size),
                  "%s: no memory for the host runtime", job.launch->name);
  } else {
    std::snprintf(job.error, static_cast<std::size_t>(job.error_size), "%s: block (%d, %d, %d): %s",
                  job.launch->name, w->now.block[0], w->now.block[1], w->now.block[2], w->message);
  }
}

void work(Job& job) {
  const unsigned* grid = job.launch->grid;
  const unsigned long long plane = 1ull * grid[0] * grid[1], blocks = plane * grid[2];
  Worker* const previous = worker;
  worker = acquire();
  if (worker == nullptr) report(job, nullptr);
  while (!job.failed) {
    const unsigned long long i = job.next++;
    if (i >= blocks) break;
    const bool fine =
        run_block(*worker, *job.launch, static_cast<unsigned>(i % grid[0]),
                  static_cast<unsigned>(i / grid[0] % grid[1]), static_cast<unsigned>(i / plane));
    if (!fine) report(job, worker);
  }
  if (worker != nullptr) release(worker);
  worker = previous;
}

}  // namespace

const Current* current() { return &worker->now; }

u8* workspace() { return worker->scratch; }

u8* shared_memory(int bytes) {
  if (bytes > worker->launch->lds_bytes)
    fail("the kernel asks for more LDS than its launch declares");
  return worker->lds;
}

void barrier() {
  Worker& w = *worker;
  if (++w.at_barrier < w.launch->threads) return switch_away(w);
  w.at_barrier = 0;
  for (int i = 0; i < w.launch->threads; ++i) {
    if (i != w.now.thread) push_ready(w, i);
  }
}

void wave_collective(Collective operation, void* payload) {
  Worker& w = *worker;
  const int thread = w.now.thread, lane = thread % kWaveLanes;
  Wave& wave = w.waves[thread / kWaveLanes];
  if (wave.arrived > 0 && wave.operation != operation)
    fail("lanes of one wave meet at different wave operations");
  wave.operation = operation;
  wave.payload[lane] = payload;
  if (++wave.arrived < kWaveLanes) return switch_away(w);
  operation(wave.payload);
  wave.arrived = 0;
  for (int i = 0; i < kWaveLanes; ++i) {
    wave.payload[i] = nullptr;
    if (i != lane) push_ready(w, thread - lane + i);
  }
}

void fail(const char* what) {
  Worker& w = *worker;
  w.failed = true;
  std::snprintf(w.message, sizeof w.message, "thread %d: %s", w.now.thread, what);
  switch_context(w.fibers[w.now.thread], w.scheduler);
}

int run(const Launch& launch, int os_threads, char* error, int error_size) {
  Job job;
  job.launch = &launch;
  job.error = error;
  job.error_size = error_size;
  if (launch.threads > kMaxThreads || launch.lds_bytes > kLdsLimit) {
    if (error != nullptr && error_size > 0) {
      std::snprintf(error, static_cast<std::size_t>(error_size),
                    "%s: %d threads and %d bytes of LDS exceed %d and %d", launch.name,
                    launch.threads, launch.lds_bytes, kMaxThreads, kLdsLimit);
    }
    return 1;
  }
  const unsigned long long blocks = 1ull * launch.grid[0] * launch.grid[1] * launch.grid[2];
  std::vector<std::thread> others;
  for (int i = 1; i < os_threads && static_cast<unsigned long long>(i) < blocks; ++i) {
    try {
      others.emplace_back([&job] { work(job); });
    } catch (const std::system_error&) {
      break;  // fewer threads, same result
    }
  }
  work(job);
  for (std::thread& other : others) other.join();
  return job.failed ? 1 : 0;
}

}  // namespace host
}  // namespace qk
