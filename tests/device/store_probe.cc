// What a kernel's threads store to LDS in a step, and read from memory for it:
// compiled around the kernel that QK_PROBED names.
#include QK_PROBED

extern "C" {

/// Bytes of a buffer, of its tokens, of their rows, of the rows of weights, and
/// of their codes.
int probe_layout[] = {Loop::kBufferBytes, Loop::kBytesX, Loop::kPitchX,
                      Loop::kPitchW, decltype(Loop::w)::kCodes};

/// Stores zeros.
void probe_stores(unsigned char *buffer, int thread) {
  Loop loop{};
  loop.store_step(buffer, thread);
}

/// Offsets in x and w of a thread's vectors, where rows are `k` codes long;
/// returns their numbers.
int probe_loads(unsigned *x, unsigned *w, int k, int thread) {
  qk::MatrixTokens<Tile> tokens{};
  decltype(Loop::w) weights{};
  const int rows = 1 << 20;
  tokens.set_offsets({nullptr, nullptr, nullptr, rows, rows, k}, 0, thread);
  weights.set_offsets(k, qk::ClampedRows{rows}, thread);
  for (int i = 0; i < tokens.kCount; ++i)
    x[i] = tokens.offsets[i];
  for (int i = 0; i < weights.w.kCount; ++i)
    w[i] = weights.w.offsets[i];
  return tokens.kCount | weights.w.kCount << 8;
}
}
