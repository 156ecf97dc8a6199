// Chooses the matrix-instruction policy: the only place where architectures are told apart.
//
// A policy has: kSparse, kChunk (K bytes of a fragment), types A (weights), B (tokens), Acc (a
// lane's 8 values of a 16x16 block), load_a and load_b (LDS rows -> fragment), multiply (all blocks
// of a wave, wave-uniform), and the map from accumulators to (token, outputs) that the epilogue
// walks: Runs, kColumns, token, output, block, element.
#pragma once

#include "config.h"

#if defined(QK_HOST) && QK_HOST
#  include "mma_host.h"
#elif defined(__GFX10__)
#  include "mma_gfx10.h"
#elif defined(__gfx1200__) || defined(__gfx1201__) || defined(__gfx12_generic__)
#  include "mma_gfx12.h"
#elif defined(__GFX11__)
#  include "mma_gfx11.h"
#elif defined(QK_NVIDIA)
#  include "mma_sm89.h"
#elif defined(__HIP_DEVICE_COMPILE__)
#  error "no matrix policy for this target: RDNA2 to 4, NVIDIA from sm_80 on and the host have one"
#endif
