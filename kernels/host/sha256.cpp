// SHA-256 of two streams at a time, where the CPU has instructions for it (x86's SHA extensions).
//
//   state' = compress(state, block)    FIPS 180-4, 6.2.2; blocks of 64 bytes, big-endian words
//
// A stream is a chain of dependent instructions, which leaves half of the unit idle: two rounds
// take four cycles and could start every two. A second stream fills them, and packing always has
// two: what it reads and what it writes. hashlib, one stream at a time, is what the tests compare
// with, and what runs where these instructions are missing.
#include <cstdint>
#include <cstring>

#ifdef __SHA__
#  include <immintrin.h>
#endif

namespace {

constexpr int64_t kBlock = 64;
// From here on the last block holds the length of the message in bits.
constexpr int64_t kLengthAt = 56;

// What Python passes: quantkit/device/host/hashing.py has the same fields.
struct Hash {
  uint32_t state[8];
  uint8_t tail[kBlock];  // bytes that do not fill a block yet
  int64_t length;        // bytes so far
};

struct Part {
  Hash* hash;
  const uint8_t* data;
  int64_t size;
};

#ifdef __SHA__

// FIPS 180-4, 4.2.2: the first 32 bits of the fractional parts of the cube roots of the primes.
alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The state as the instructions have it: words from the highest down are a b e f and c d g h.
struct Lane {
  __m128i abef, cdgh;
};

Lane load_state(const uint32_t* state) {
  const __m128i abcd = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
  const __m128i efgh = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
  const __m128i badc = _mm_shuffle_epi32(abcd, 0xb1), hgfe = _mm_shuffle_epi32(efgh, 0x1b);
  return {_mm_alignr_epi8(badc, hgfe, 8), _mm_blend_epi16(hgfe, badc, 0xf0)};
}

void store_state(const Lane& lane, uint32_t* state) {
  const __m128i feba = _mm_shuffle_epi32(lane.abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(lane.cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

__m128i load_words(const uint8_t* from) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  return _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), swap);
}

// The same number of blocks of each of kLanes streams.
template <int kLanes>
void compress(Hash* const* hash, const uint8_t* const* data, int64_t blocks) {
  Lane lane[kLanes];
  for (int l = 0; l < kLanes; ++l) lane[l] = load_state(hash[l]->state);
  for (int64_t b = 0; b < blocks; ++b) {
    Lane before[kLanes];
    __m128i word[kLanes][4];
    for (int l = 0; l < kLanes; ++l) {
      before[l] = lane[l];
      for (int j = 0; j < 4; ++j) word[l][j] = load_words(data[l] + b * kBlock + 16 * j);
    }
#  pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const __m128i round = _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + 4 * i));
#  pragma GCC unroll 2
      for (int l = 0; l < kLanes; ++l) {
        __m128i* w = word[l];
        const __m128i sum = _mm_add_epi32(w[i & 3], round);
        lane[l].cdgh = _mm_sha256rnds2_epu32(lane[l].cdgh, lane[l].abef, sum);
        const __m128i upper = _mm_shuffle_epi32(sum, 0x0e);
        lane[l].abef = _mm_sha256rnds2_epu32(lane[l].abef, lane[l].cdgh, upper);
        if (i >= 12) continue;
        const __m128i seventh = _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4);
        const __m128i partial = _mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]);
        w[i & 3] = _mm_sha256msg2_epu32(_mm_add_epi32(partial, seventh), w[(i + 3) & 3]);
      }
    }
    for (int l = 0; l < kLanes; ++l) {
      lane[l].abef = _mm_add_epi32(lane[l].abef, before[l].abef);
      lane[l].cdgh = _mm_add_epi32(lane[l].cdgh, before[l].cdgh);
    }
  }
  for (int l = 0; l < kLanes; ++l) store_state(lane[l], hash[l]->state);
}

void compress_one(Hash* hash, const uint8_t* data, int64_t blocks) {
  compress<1>(&hash, &data, blocks);
}

// Fill up the block that was begun; what is left of the part is whole blocks, but for its end.
void begin(Part& part) {
  const int64_t held = part.hash->length % kBlock;
  part.hash->length += part.size;
  if (!held) return;
  const int64_t room = kBlock - held, taken = part.size < room ? part.size : room;
  std::memcpy(part.hash->tail + held, part.data, taken);
  part.data += taken, part.size -= taken;
  if (taken == room) compress_one(part.hash, part.hash->tail, 1);
}

void end(Part& part) {
  if (part.size) std::memcpy(part.hash->tail, part.data, part.size);
}

#endif

}  // namespace

#ifdef __SHA__

/// Take the next bytes of streams, each named once, two of them at a time.
extern "C" __attribute__((visibility("default"))) void qk_sha256_update(Part* parts,
                                                                        int32_t count) {
  for (int32_t i = 0; i < count; ++i) begin(parts[i]);
  int32_t next = 0;
  Part* lane[2] = {nullptr, nullptr};
  for (;;) {
    for (Part*& mine : lane)
      while (!mine || mine->size < kBlock) {
        if (next == count) {
          mine = nullptr;
          break;
        }
        mine = &parts[next++];
      }
    if (!lane[0] || !lane[1]) break;
    const int64_t size = lane[0]->size < lane[1]->size ? lane[0]->size : lane[1]->size;
    const int64_t blocks = size / kBlock;
    Hash* hash[2] = {lane[0]->hash, lane[1]->hash};
    const uint8_t* data[2] = {lane[0]->data, lane[1]->data};
    compress<2>(hash, data, blocks);
    for (Part* part : lane) part->data += blocks * kBlock, part->size -= blocks * kBlock;
  }
  if (Part* rest = lane[0] ? lane[0] : lane[1]) {
    const int64_t blocks = rest->size / kBlock;
    compress_one(rest->hash, rest->data, blocks);
    rest->data += blocks * kBlock, rest->size -= blocks * kBlock;
  }
  for (int32_t i = 0; i < count; ++i) end(parts[i]);
}

/// Write the 32 bytes of a stream's digest; the stream may go on.
extern "C" __attribute__((visibility("default"))) void qk_sha256_digest(const Hash* hash,
                                                                        uint8_t* digest) {
  Hash last = *hash;
  const int64_t held = hash->length % kBlock;
  uint8_t padded[2 * kBlock] = {};
  std::memcpy(padded, hash->tail, held);
  padded[held] = 0x80;
  const int64_t blocks = held < kLengthAt ? 1 : 2;
  for (int i = 0; i < 8; ++i)
    padded[blocks * kBlock - 1 - i] = uint8_t(uint64_t(hash->length) * 8 >> 8 * i);
  compress_one(&last, padded, blocks);
  for (int i = 0; i < 32; ++i) digest[i] = uint8_t(last.state[i / 4] >> 8 * (3 - i % 4));
}

#endif

/// Tell whether the functions above are there.
extern "C" __attribute__((visibility("default"))) int32_t qk_sha256_is_built() {
#ifdef __SHA__
  return 1;
#else
  return 0;
#endif
}
