// Whether stored numbers and packed codes are what FORMAT.md allows: verifying on the host.
//
//   broken(x)        x is NaN or infinite, or not positive where that is asked for
//   largest_g        the largest magnitude, as a byte, of the codes that share a scale
//
// The rules are those of quantkit/checkpoint/contents.py, which does the same in PyTorch where no
// compiler is, and is the oracle of the tests. One pass over bytes, nothing is decoded. Loops are
// over integers without branches, which compilers turn into vectors.
#include <cstdint>
#include <cstring>

namespace {

enum Number : int32_t { kHalf, kBfloat, kFloat, kDouble, kE4m3, kE5m2 };
enum Codes : int32_t { kFloatE4m3, kFloatE5m2, kInt8, kNibbles };

constexpr int64_t kDone = -1;
// Numbers that are looked at before the next decision: 4096 doubles stay in the first cache.
constexpr int64_t kStride = 4096;

// What is wrong with codes, a bit each.
constexpr int32_t kBadFactor = 1, kBadCode = 2, kBadMeta = 4, kBadScale = 8;

// Largest magnitude of a number as a byte: 448, 57344, 127, and any two nibbles.
constexpr uint8_t kLargest[] = {0x7e, 0x7b, 0x7f, 0xff};
// Both nibbles of a byte hold code 0, which is stored as 8.
constexpr uint8_t kZeroNibbles = 0x88;
constexpr int kMaxFactor = 15;

// Signed, so that numbers that are not positive are at most 0, and broken ones at least kBroken.
template <class Signed>
int64_t first_broken(const void* from, int64_t count, Signed broken, bool positive) {
  const uint8_t* bytes = static_cast<const uint8_t*>(from);
  constexpr Signed kMagnitude = Signed(~(uint64_t{1} << (8 * sizeof(Signed) - 1)));
  const Signed low = positive ? 1 : 0;
  const auto wrong = [&](int64_t i) {
    Signed value;
    std::memcpy(&value, bytes + i * sizeof value, sizeof value);
    if (!positive) value &= kMagnitude;
    return value < low || value >= broken;
  };
  for (int64_t first = 0; first < count; first += kStride) {
    const int64_t stop = first + kStride < count ? first + kStride : count;
    bool any = false;
    for (int64_t i = first; i < stop; ++i) any |= wrong(i);
    if (!any) continue;
    for (int64_t i = first; i < stop; ++i)
      if (wrong(i)) return i;
  }
  return kDone;
}

// What Python passes: quantkit/device/host/checker.py has the same fields.
struct Check {
  const uint8_t* codes;   // (rows, row_bytes)
  const uint8_t* meta;    // (rows, K / 8), null where dense
  const int8_t* factors;  // (rows, K / 32), null where there are none
  const float* scale;     // (rows, groups), null where one serves the weight
  int64_t rows, row_bytes, meta_bytes, row_factors;
  int64_t groups;   // of a row, that have a scale each
  float found;      // out: the first scale of a group of zeros that is not 1
  int32_t largest;  // in and out: the largest magnitude so far
  int32_t kind;
};

template <int kKind>
uint8_t magnitude(uint8_t code) {
  if (kKind == kNibbles) return code ^ kZeroNibbles;
  // -128 has no negative: as a byte it is beyond 127.
  if (kKind == kInt8) return code & 0x80 ? uint8_t(-code) : code;
  return code & 0x7f;
}

template <int kKind>
uint8_t largest_of(const uint8_t* codes, int64_t count) {
  uint8_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t size = magnitude<kKind>(codes[i]);
    largest = size > largest ? size : largest;
  }
  return largest;
}

template <int kKind>
int32_t check_codes(Check& job) {
  int32_t wrong = 0;
  const int64_t bytes = job.row_bytes / job.groups;
  for (int64_t g = 0; g < job.rows * job.groups; ++g) {
    const uint8_t largest = largest_of<kKind>(job.codes + g * bytes, bytes);
    job.largest = largest > job.largest ? largest : job.largest;
    if (largest > kLargest[kKind]) wrong |= kBadCode;
    if (job.scale && largest == 0 && job.scale[g] != 1.0f && !(wrong & kBadScale)) {
      wrong |= kBadScale;
      job.found = job.scale[g];
    }
  }
  return wrong;
}

// Both nibbles name two distinct, ascending positions: first | second << 2.
struct LegalBytes {
  bool of[256];
  constexpr LegalBytes() : of{} {
    for (int byte = 0; byte < 256; ++byte) {
      const int low = byte & 15, high = byte >> 4;
      of[byte] = (low & 3) < (low >> 2) && (high & 3) < (high >> 2);
    }
  }
};
constexpr LegalBytes kLegal;

bool metadata_is_legal(const uint8_t* meta, int64_t count) {
  bool legal = true;
  for (int64_t i = 0; i < count; ++i) legal &= kLegal.of[meta[i]];
  return legal;
}

bool factors_are_legal(const int8_t* factors, int64_t count) {
  bool legal = true;
  for (int64_t i = 0; i < count; ++i) {
    const int size = factors[i] < 0 ? -factors[i] : factors[i];
    legal &= size >= 1 && size <= kMaxFactor;
  }
  return legal;
}

}  // namespace

/// Return the index of the first number that is NaN or infinite, or not above zero where
/// ``positive``; -1 when there is none.
extern "C" __attribute__((visibility("default"))) int64_t qk_first_broken(const void* numbers,
                                                                          int64_t count,
                                                                          int32_t kind,
                                                                          int32_t positive) {
  switch (kind) {
    case kHalf:
      return first_broken<int16_t>(numbers, count, 0x7c00, positive);
    case kBfloat:
      return first_broken<int16_t>(numbers, count, 0x7f80, positive);
    case kFloat:
      return first_broken<int32_t>(numbers, count, 0x7f800000, positive);
    case kDouble:
      return first_broken<int64_t>(numbers, count, int64_t{0x7ff} << 52, positive);
    case kE4m3:
      return first_broken<int8_t>(numbers, count, 0x7f, positive);
    default:
      return first_broken<int8_t>(numbers, count, 0x7c, positive);
  }
}

/// Look at rows of a packed weight; return what is wrong, a bit each. Thread-safe.
extern "C" __attribute__((visibility("default"))) int32_t qk_check_codes(Check* job) {
  int32_t wrong = 0;
  if (job->factors && !factors_are_legal(job->factors, job->rows * job->row_factors))
    wrong |= kBadFactor;
  if (job->meta && !metadata_is_legal(job->meta, job->rows * job->meta_bytes)) wrong |= kBadMeta;
  switch (job->kind) {
    case kFloatE4m3:
      return wrong | check_codes<kFloatE4m3>(*job);
    case kFloatE5m2:
      return wrong | check_codes<kFloatE5m2>(*job);
    case kInt8:
      return wrong | check_codes<kInt8>(*job);
    default:
      return wrong | check_codes<kNibbles>(*job);
  }
}
