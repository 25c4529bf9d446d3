// Enough of CUDA C++ for one block at a time on the CPU, so that a kernel's source can be tested
// without a GPU. Threads are fibers that switch at barriers and warp operations, in a random order
// of warps. Lanes that do not meet at the same operation abort the process.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__
using std::max;
using std::min;

struct alignas(16) int4 {
  int x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
struct Index {
  unsigned x;
};
static Index threadIdx, blockIdx;
alignas(16) int4 shared_memory[(1 << 18) / sizeof(int4)];

namespace fibers {
enum State { READY, AT_WARP, AT_BLOCK, DONE };
constexpr size_t STACK = 64 << 10;
struct Fiber {
  ucontext_t context;
  State state;
  const char *operation;
  int turn;  // which half of the warp's slots its next operation uses
  std::vector<char> stack;
};
static std::vector<Fiber> all(THREADS);
static ucontext_t scheduler;
static int slots[THREADS / 32][2][32];
static void (*body)();

inline Fiber &self() { return all[threadIdx.x]; }

inline void wait(State state, const char *operation) {
  const Index mine = threadIdx;
  self().state = state, self().operation = operation;
  swapcontext(&self().context, &scheduler);
  threadIdx = mine;
}

inline void enter() {
  body();
  self().state = DONE;
  swapcontext(&self().context, &scheduler);
}

// Every lane's value, once all lanes of the warp have given theirs.
inline const int *exchange(int value, const char *operation) {
  const int turn = self().turn;
  self().turn ^= 1;
  slots[threadIdx.x / 32][turn][threadIdx.x % 32] = value;
  wait(AT_WARP, operation);
  return slots[threadIdx.x / 32][turn];
}

inline bool together(int first, int count, State state) {
  for (int i = first; i < first + count; i++) {
    if (all[i].state != state || all[i].operation != all[first].operation) return false;
  }
  return true;
}

inline void release(int first, int count) {
  for (int i = first; i < first + count; i++) all[i].state = READY;
}

inline void run_block(void (*kernel)(), unsigned block, std::mt19937 &random) {
  body = kernel;
  blockIdx.x = block;
  for (int &word : reinterpret_cast<int(&)[sizeof(shared_memory) / 4]>(shared_memory)) {
    word = 0x5A5A5A5A;
  }
  for (Fiber &fiber : all) {
    fiber.stack.resize(STACK);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = STACK;
    makecontext(&fiber.context, enter, 0);
    fiber.state = READY, fiber.turn = 0, fiber.operation = nullptr;
  }
  while (!together(0, THREADS, DONE)) {
    std::vector<int> able;
    for (int warp = 0; warp < THREADS / 32; warp++) {
      if (together(warp * 32, 32, AT_WARP)) release(warp * 32, 32);
      for (int lane = 0; lane < 32; lane++) {
        if (all[warp * 32 + lane].state == READY) {
          able.push_back(warp * 32);
          break;
        }
      }
    }
    if (able.empty()) {
      if (!together(0, THREADS, AT_BLOCK)) {
        std::fprintf(stderr, "threads wait at different operations\n");
        std::abort();
      }
      release(0, THREADS);
      continue;
    }
    const int first = able[random() % able.size()];
    for (int i = first; i < first + 32; i++) {
      if (all[i].state != READY) continue;
      threadIdx.x = i;
      swapcontext(&scheduler, &all[i].context);
    }
  }
}
}  // namespace fibers

inline void __syncthreads() { fibers::wait(fibers::AT_BLOCK, "__syncthreads"); }

inline unsigned __ballot_sync(unsigned, bool wanted) {
  const int *lanes = fibers::exchange(wanted, "__ballot_sync");
  unsigned found = 0;
  for (int i = 0; i < 32; i++) found |= (unsigned)lanes[i] << i;
  return found;
}
inline int __shfl_sync(unsigned, int value, int lane) {
  return fibers::exchange(value, "__shfl_sync")[lane];
}
inline int __shfl_up_sync(unsigned, int value, int step) {
  const int lane = threadIdx.x % 32;
  return fibers::exchange(value, "__shfl_up_sync")[lane >= step ? lane - step : lane];
}
inline int __reduce_add_sync(unsigned, int value) {
  const int *lanes = fibers::exchange(value, "__reduce_add_sync");
  int sum = 0;
  for (int i = 0; i < 32; i++) sum += lanes[i];
  return sum;
}
inline int __reduce_max_sync(unsigned, int value) {
  const int *lanes = fibers::exchange(value, "__reduce_max_sync");
  return *std::max_element(lanes, lanes + 32);
}
inline int __reduce_min_sync(unsigned, int value) {
  const int *lanes = fibers::exchange(value, "__reduce_min_sync");
  return *std::min_element(lanes, lanes + 32);
}
inline int __popc(unsigned word) { return __builtin_popcount(word); }

inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int byte = 0; byte < 32; byte += 8) sum += (a >> byte & 0xFF) * (b >> byte & 0xFF);
  return sum;
}
inline int __clz(unsigned word) { return word ? __builtin_clz(word) : 32; }
inline int __ffs(unsigned word) { return __builtin_ffs(word); }
template <class T>
inline T atomicAdd(T *word, T value) {
  const T before = *word;
  *word += value;
  return before;
}
inline unsigned atomicOr(unsigned *word, unsigned value) {
  const unsigned before = *word;
  *word |= value;
  return before;
}
