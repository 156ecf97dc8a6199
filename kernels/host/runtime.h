// The host target: one fiber per HIP thread, blocks spread over operating-system threads.
//
// A fiber runs until it reaches a barrier, a wave collective or its end. The last of the threads
// that meet at a collective executes it for all of them. If every live fiber waits and none can go
// on, or the lanes of a wave meet at different collectives, the launch fails with a line that names
// kernel, block and thread: on a GPU the same mistake hangs or corrupts silently.
#pragma once

namespace qk {

using u8 = unsigned char;

namespace host {

/// What a running fiber can ask about itself.
struct Current {
  int thread;
  int block[3];
};

struct Launch {
  void (*run)(void (*kernel)(), void* const* args);  // calls the kernel with its unpacked arguments
  void (*kernel)();
  void* const* args;     // args[i] points at the i-th argument
  const unsigned* grid;  // blocks along x, y, z
  int threads;           // of a block
  int lds_bytes;
  const char* name;
};

/// Runs every block; 0, or 1 with one line in `error`. Results do not depend on `os_threads`.
int run(const Launch& launch, int os_threads, char* error, int error_size);

const Current* current();

/// The block's LDS: filled with 0xff (a NaN in every format) before each block starts.
u8* shared_memory(int bytes);

/// Scratch for collectives, one per operating-system thread, 64-byte aligned, kWorkspaceBytes long.
constexpr int kWorkspaceBytes = 96 * 1024;
u8* workspace();

void barrier();

/// Reports an error found inside a collective; the launch ends with this line.
void fail(const char* what);

/// All 32 lanes of a wave arrive with the same `operation`; the last one calls it on all 32
/// payloads.
using Collective = void (*)(void* const* lanes);
void wave_collective(Collective operation, void* payload);

template <int... kIndex>
struct Indices {};
template <int kCount, int... kIndex>
struct MakeIndices : MakeIndices<kCount - 1, kCount - 1, kIndex...> {};
template <int... kIndex>
struct MakeIndices<0, kIndex...> {
  using Type = Indices<kIndex...>;
};

/// Calls a kernel of any signature from an array of pointers to its arguments.
template <class... Args>
struct Unpacker {
  template <int... kIndex>
  static void call(void (*kernel)(Args...), void* const* args, Indices<kIndex...>) {
    kernel(*static_cast<Args*>(args[kIndex])...);
  }
  static void run(void (*kernel)(), void* const* args) {
    call(reinterpret_cast<void (*)(Args...)>(kernel), args,
         typename MakeIndices<sizeof...(Args)>::Type{});
  }
};
template <class... Args>
Unpacker<Args...> unpacker(void (*)(Args...)) {
  return {};
}

}  // namespace host
}  // namespace qk
