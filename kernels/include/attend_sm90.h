// clang-format off
// The loop of attention on Hopper: S = Q K^T, P = exp2 of it, O = P V, over tiles of keys.
//
// Queries are the rows of both products, so what a lane gets of S is what the second product wants
// of P when K's rows lie in another order: probabilities stay in their registers.
//
//   g = lane / 4, t = lane % 4; warp w of a warpgroup has queries 16w .. 16w + 15
//   S    acc[4j + e]    query 16w + g + 8 (e / 2), row 8j + 2t + e % 2 of the tile of K
//   row 8j + c of K     key 32 (j / 4) + 16 (j / 2 % 2) + 4 (c / 2) + 2 (j % 2) + c % 2
//   P    a[b][i]        query 16w + g + 8 (i % 2), keys 32b + 16 (i / 2) + 4t .. + 3
//   O    acc[4j + e]    query as S, column 8j + 2t + e % 2; behind D: the sum of the row's codes
//
// Eight rows of ones stand behind those of V^T: the matrix unit sums the codes.
// clang-format on
//
// One warpgroup fetches tiles (cp.async, since K's rows change places) into a ring of kStages; the
// others multiply. Hopper's FP8 unit keeps 13 bits below the largest of what it adds, so a tile's
// sums leave it for float32 before the next one's: measured at 4096 keys whose values share an
// offset, errors of .0025 instead of .065.
#pragma once

#include "held_sm90.h"
#include "panels_sm90.h"
#include "softmax.h"

namespace qk {

/// All heads: where their codes lie.
struct HopperHeads {
  const u8* q;         // [count, queries, kD]
  const u8* k;         // [count, keys, kD]
  const u8* v;         // [count, kD, pitch], of which `keys` columns count and the others are zero
  const f32* q_scale;  // [count, queries], of int8 codes
  const f32* k_scale;  // [count, ceil(keys / 16)], of int8 codes
  int count, queries, keys, pitch;
  // Of kMaps; rows of all heads behind each other.
  const TensorMap* q_map;  // [queries, columns]
  const TensorMap* k_map;  // [16 keys, 2, 4, 2, columns], in the order of a tile's rows
  const TensorMap* v_map;  // [columns, keys]
};

/// kGroups: warpgroups that multiply, each with 64 queries. kMaps: the copy engine fetches, which
/// it can where heads have a multiple of 16 keys; else a warpgroup does.
template <int kD, int kGroups, int kKeys, Format kQk, bool kMaps>
struct HopperAttention {
  static constexpr bool kInt8 = kQk == Format::kInt8;
  static constexpr int kRow = (kD + 31) / 32 * 32;
  using QueryTile = Panels<64, kRow>;
  using KeyTile = Panels<kKeys, kRow>;
  using ValueTile = Panels<kD + 8, kKeys>;
  using Score = Sum<kQk, kQk>;
  static constexpr int kThreads = 128 * (kGroups + 1), kQueries = 64 * kGroups;
  static constexpr int kHeadSteps = kRow / 32, kKeySteps = kKeys / 32;
  static constexpr int kScores = kKeys / 2, kOut = (kD + 8) / 2;
  static constexpr int kGroupsOfKeys = kKeys / 16;  // that share a scale, of int8 codes
  static constexpr int kQueryBytes = kGroups * QueryTile::kTotal;
  static constexpr int kRing = 2 * kQueryBytes;
  static constexpr int kValues = (KeyTile::kTotal + 1023) / 1024 * 1024;
  static constexpr int kScales = kValues + ValueTile::kTotal;
  static constexpr int kStageBytes =
      (kScales + (kInt8 ? 4 * kGroupsOfKeys : 0) + 1023) / 1024 * 1024;
  static constexpr int kStages = kRing + 8 * kStageBytes > 226 * 1024 ? 4 : 8;
  static constexpr int kBarriers = kRing + kStages * kStageBytes;  // full, empty, of queries
  static constexpr int kSharedBytes = kBarriers + 16 * kStages + 16;
  static constexpr int kCopying = 40, kMultiplying = 232;  // registers
  static_assert(kSharedBytes <= 227 * 1024, "the ring needs four stages");
  static_assert(kGroups == 2, "registers for two warpgroups");
  static_assert(kRing % 1024 == 0, "panels start on 1024 bytes");

  using Scores = f32[kScores];
  using Sums = Score[kScores];
  using Probabilities = u32[kKeySteps][4];
  using Out = f32[kOut];

  const HopperHeads& heads;
  u32 base;  // of shared memory
  int lane, tiles;
  f32 q_scale[2];
  f32 bias[2];
  Out out;

  // Tiles are counted through all of a block's work, which is pieces of kQueries queries of a head.
  QK_DEVICE u32 stage_at(u32 tile) const { return base + kRing + tile % kStages * kStageBytes; }
  QK_DEVICE u32 full(u32 tile) const { return base + kBarriers + tile % kStages * 8; }
  QK_DEVICE u32 empty(u32 tile) const { return full(tile) + 8 * kStages; }
  static QK_DEVICE int parity(u32 tile) { return static_cast<int>(tile / kStages & 1); }
  QK_DEVICE u32 queries_at(u32 piece) const { return base + piece % 2 * kQueryBytes; }
  QK_DEVICE u32 unread(u32 piece) const { return base + kBarriers + 16 * kStages + piece % 2 * 8; }
  QK_DEVICE int pieces() const { return (heads.queries + kQueries - 1) / kQueries; }

  /// Barriers, and the ones whose products are sums of codes.
  QK_DEVICE void init(u8* shared) const {
    const int thread = thread_index();
    if (thread == 0) {
      for (u32 stage = 0; stage < kStages; ++stage) {
        barrier_init(full(stage), kMaps ? 1 : 128);
        barrier_init(empty(stage), 4 * kGroups);
      }
      barrier_init(unread(0), 4 * kGroups);
      barrier_init(unread(1), 4 * kGroups);
      barrier_init_fence();
    }
    u8* const ring = shared + kRing;
    constexpr int kPieces = 8 * kKeys / 16;
    for (int i = thread; i < kPieces * kStages; i += kThreads) {
      const int piece = i % kPieces, row = kD + piece / (kKeys / 16);
      constexpr u32 kOnes = 0x38383838u;
      store(ring + i / kPieces * kStageBytes + kValues +
                ValueTile::offset(row, piece % (kKeys / 16) * 16),
            Vec16{{kOnes, kOnes, kOnes, kOnes}});
    }
    // A row that fills no whole number of instructions: what stands behind it stays zero.
    if constexpr (kD % 32 != 0 && !kMaps) {
      for (int i = thread; i < kKeys * kStages; i += kThreads)
        store(ring + i / kKeys * kStageBytes + KeyTile::offset(i % kKeys, kD), Vec16{});
      for (int i = thread; i < 2 * kQueries; i += kThreads)
        store(shared + i / 64 * QueryTile::kTotal + QueryTile::offset(i % 64, kD), Vec16{});
    }
    store_fence();
    __syncthreads();
  }

  /// Which key of a tile lies in a row of it: a sum of what bits of the row give.
  static constexpr QK_DEVICE int key_of(int row) {
    const int j = row / 8, c = row % 8;
    return 32 * (j / 4) + 16 * (j / 2 % 2) + 4 * (c / 2) + 2 * (j % 2) + c % 2;
  }

  /// Fetches the tiles of all pieces, those of a head's last keys first.
  QK_DEVICE void produce() const {
    if constexpr (kMaps) {
      if (thread_index() % 128 == 0) produce_by_maps();
    } else {
      produce_by_threads();
    }
  }

  QK_DEVICE void produce_by_maps() const {
    const int all = pieces() * heads.count;
    u32 tile = 0, piece = 0;
    QK_NO_UNROLL for (int work = block_x(); work < all; work += gridDim.x, ++piece) {
      const int row = work / pieces(), first = work % pieces() * kQueries;
      if (piece >= 2) barrier_wait(unread(piece), piece / 2 & 1 ^ 1);
      QK_NO_UNROLL for (int i = 0; i < tiles; ++i, ++tile) {
        wait_for_room(tile);
        barrier_expect(full(tile), kKeys * (kRow + kD) + (i == 0 ? kQueryBytes : 0));
        if (i == 0) copy_queries(row * heads.queries + first, piece, tile);
        const int key = (i == 0 ? tiles - 1 : i - 1) * kKeys;
        const u32 stage = stage_at(tile);
        QK_UNROLL for (int panel = 0; panel < kRow / KeyTile::kWidth; ++panel) {
          copy_keys(stage + panel * KeyTile::kPanelBytes, *heads.k_map, full(tile),
                    panel * KeyTile::kWidth, (row * heads.keys + key) / 16);
        }
        QK_UNROLL for (int panel = 0; panel < kKeys / ValueTile::kWidth; ++panel) {
          copy_box(stage + kValues + panel * ValueTile::kPanelBytes, *heads.v_map, full(tile),
                   Coordinates<2>{{key + panel * ValueTile::kWidth, row * kD}});
        }
      }
    }
  }
  QK_DEVICE void copy_queries(int first, u32 piece, u32 tile) const {
    QK_UNROLL for (int group = 0; group < kGroups; ++group) {
      QK_UNROLL for (int panel = 0; panel < kRow / QueryTile::kWidth; ++panel) {
        copy_box(queries_at(piece) + group * QueryTile::kTotal + panel * QueryTile::kPanelBytes,
                 *heads.q_map, full(tile),
                 Coordinates<2>{{panel * QueryTile::kWidth, first + 64 * group}});
      }
    }
  }

  QK_DEVICE void produce_by_threads() const {
    const int thread = thread_index() % 128, all = pieces() * heads.count;
    u32 tile = 0, piece = 0;
    QK_NO_UNROLL for (int work = block_x(); work < all; work += gridDim.x, ++piece) {
      const i64 row = work / pieces();
      if (piece >= 2) barrier_wait(unread(piece), piece / 2 & 1 ^ 1);
      fetch_queries(row, work % pieces() * kQueries, piece, thread);
      wait_for_room(tile);
      fetch_last(row, tile, thread);
      arrive_after_copies(full(tile));
      ++tile;
      tile = fetch_whole(row, tile, thread);
    }
  }
  QK_DEVICE void wait_for_room(u32 tile) const {
    if (tile >= kStages) barrier_wait(empty(tile), parity(tile) ^ 1);
  }

  QK_DEVICE void fetch_queries(i64 row, int first, u32 piece, int thread) const {
    const u8* const q = heads.q + row * heads.queries * kD;
    const PieceOf<kD> part(thread);
    QK_NO_UNROLL for (int i = part.row; i < kQueries && part.exists(); i += part.kRows) {
      const int query = first + i < heads.queries ? first + i : heads.queries - 1;
      copy_piece(
          queries_at(piece) + i / 64 * QueryTile::kTotal + QueryTile::offset(i % 64, part.byte),
          q + static_cast<i64>(query) * kD + part.byte);
    }
  }

  /// All tiles but the last; says which one comes next.
  QK_DEVICE u32 fetch_whole(i64 row, u32 tile, int thread) const {
    const PieceOf<kD> keys(thread);
    const PieceOf<kKeys> values(thread);
    const u8* k = heads.k + row * heads.keys * kD + key_of(keys.row) * kD + keys.byte;
    const u8* v = heads.v + (row * kD + values.row) * heads.pitch + values.byte;
    const f32* k_scale = heads.k_scale + row * ((heads.keys + 15) / 16) + thread;
    const u32 to_key = KeyTile::offset(keys.row, keys.byte);
    const u32 to_value = kValues + ValueTile::offset(values.row, values.byte);
    const u32 step = values.kRows * heads.pitch;
    QK_NO_UNROLL for (int i = 1; i < tiles; ++i, ++tile) {
      const u32 stage = stage_at(tile);
      wait_for_room(tile);
      if (keys.exists()) {
        QK_UNROLL for (int at = 0; at < kKeys; at += keys.kRows) {
          if (kKeys % keys.kRows == 0 || at + keys.row < kKeys)
            copy_piece(stage + to_key + at * KeyTile::kWidth, k + key_of(at) * kD);
        }
      }
      if (values.exists()) {
        const u8* from = v;
        QK_UNROLL for (int at = 0; at < kD; at += values.kRows) {
          if (kD % values.kRows == 0 || at + values.row < kD)
            copy_piece(stage + to_value + at * ValueTile::kWidth, from);
          from += step;
        }
      }
      if (kInt8 && thread < kGroupsOfKeys) copy_word(stage + kScales + 4 * thread, k_scale);
      arrive_after_copies(full(tile));
      k += kKeys * kD;
      v += kKeys;
      k_scale += kGroupsOfKeys;
    }
    return tile;
  }

  /// The tile that the keys need not fill: keys beyond the last repeat it, values are zeros.
  QK_DEVICE void fetch_last(i64 row, u32 tile, int thread) const {
    const int first = (tiles - 1) * kKeys;
    const u32 stage = stage_at(tile);
    const PieceOf<kD> keys(thread);
    const u8* const k = heads.k + row * heads.keys * kD + keys.byte;
    QK_NO_UNROLL for (int at = keys.row; at < kKeys && keys.exists(); at += keys.kRows) {
      int key = first + key_of(at);
      key = key < heads.keys ? key : heads.keys - 1;
      copy_piece(stage + KeyTile::offset(at, keys.byte), k + static_cast<i64>(key) * kD);
    }
    const PieceOf<kKeys> values(thread);
    const int column = first + values.byte;
    const bool there = column < heads.pitch;
    const u8* const v = heads.v + row * kD * heads.pitch + (there ? column : 0);
    QK_NO_UNROLL for (int at = values.row; at < kD && values.exists(); at += values.kRows) {
      copy_piece_or_zeros(stage + kValues + ValueTile::offset(at, values.byte),
                          v + static_cast<i64>(at) * heads.pitch, there);
    }
    if (kInt8 && thread < kGroupsOfKeys) {
      const int group = first / 16 + thread, last = (heads.keys - 1) / 16;
      copy_word(stage + kScales + 4 * thread,
                heads.k_scale + row * (last + 1) + (group < last ? group : last));
    }
  }

  /// Waits for a tile. Its writer used another way to shared memory than its readers.
  QK_DEVICE void take(u32 tile) const {
    barrier_wait(full(tile), parity(tile));
    if constexpr (!kMaps) store_fence();
  }
  QK_DEVICE void release(u32 tile) const {
    if (lane == 0) barrier_arrive(empty(tile));
  }

  QK_DEVICE void multiply_keys(Sums& sums, u32 queries, u32 tile) const {
    take(tile);
    wgmma_fence();
    const u32 keys = stage_at(tile);
    QK_UNROLL for (int step = 0; step < kHeadSteps; ++step) {
      Wgmma<kKeys>::template dense<kQk, kQk>(sums, QueryTile::operand(queries, step),
                                             KeyTile::operand(keys, step), step > 0);
    }
    wgmma_commit();
  }
  /// `p` is held from before the matrix instructions ahead of these.
  QK_DEVICE void multiply_values(Out& sums, const Probabilities& p, u32 tile) const {
    const u32 values = stage_at(tile) + kValues;
    QK_UNROLL for (int step = 0; step < kKeySteps; ++step)
      HeldWgmma<kD + 8>::multiply(sums, p[step], ValueTile::operand(values, step), step > 0);
    wgmma_commit();
  }

  /// The i-th score plus 8 - m, in powers of two.
  QK_DEVICE f32 score(const Sums& sums, const f32 (&k_scale)[kGroupsOfKeys], int i) const {
    const int r = i / 2 % 2;
    if constexpr (kInt8)
      return multiply_add(static_cast<f32>(sums[i]), k_scale[i / 8] * q_scale[r], bias[r]);
    else return sums[i] + bias[r];
  }
  QK_DEVICE void load_scales(f32 (&k_scale)[kGroupsOfKeys], u32 tile) const {
    if constexpr (kInt8) {
      QK_UNROLL for (int group = 0; group < kGroupsOfKeys; ++group)
        load_shared(k_scale[group], stage_at(tile) + kScales + 4 * group);
    }
  }

  /// Keys from `count` on get no probability.
  QK_DEVICE void mask(Scores& s, int count) const {
    QK_UNROLL for (int i = 0; i < kScores; ++i) {
      const int key = key_of(2 * (i / 4 * 4)) + 4 * (lane % 4) + i % 2;
      s[i] = key < count ? s[i] : -__int_as_float(0x7f800000);
    }
  }

  /// Lets maxima grow where a score has outgrown them; says whether one did, and what sums so far
  /// are to be multiplied by. tops: the largest scores of the lane's two queries.
  template <bool kFirst>
  QK_DEVICE bool grow(Scores& s, f32 (&tops)[2], f32 (&factors)[2]) {
    if (!kFirst && __builtin_expect(!any_lane(maximum(tops[0], tops[1]) > kOutgrown), 1))
      return false;
    QK_UNROLL for (int r = 0; r < 2; ++r) {
      QK_UNROLL for (int apart = 1; apart < 4; apart *= 2)
        tops[r] = maximum(tops[r], bits_float(lane_xor(float_bits(tops[r]), apart)));
      const f32 growth = kFirst || tops[r] > kOutgrown ? growth_to(tops[r]) : 0.0f;
      bias[r] -= growth;
      factors[r] = approx_exp2(-growth);
      QK_UNROLL for (int i = 0; i < kScores; ++i) {
        if (i / 2 % 2 == r) s[i] -= growth;
      }
    }
    return true;
  }

  static QK_DEVICE u32 encode(f32 a, f32 b, f32 c, f32 d) {
    u32 codes;
    asm("{\n\t.reg .b16 low, high;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
        "mov.b32 %0, {low, high};\n\t}"
        : "=r"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return codes;
  }
  /// Codes of the w-th four of a lane's probabilities.
  static QK_DEVICE void encode(Probabilities& p, const Scores& s, int w) {
    const f32* const v = s + 16 * (w / 4) + 8 * (w % 4 / 2) + 2 * (w % 2);
    p[w / 4][w % 4] = encode(v[0], v[1], v[4], v[5]);
  }
  static QK_DEVICE void hold(Probabilities& p) {
    QK_UNROLL for (int w = 0; w < kWords; ++w)
      asm volatile("" : "+r"(p[w / 4][w % 4])::"memory");
  }

  QK_DEVICE void scale(bool grown, const f32 (&factors)[2]) {
    if (__builtin_expect(!grown, 1)) return;
    QK_UNROLL for (int i = 0; i < kOut; ++i)
      out[i] *= factors[i / 2 % 2];
  }
  QK_DEVICE void add(const Out& part) {
    QK_UNROLL for (int i = 0; i < kOut; ++i)
      out[i] += part[i];
  }

  static constexpr int kWords = 4 * kKeySteps;
  // Of a tile's scores: those raised before its successor's are there, and then before the sums of
  // its predecessor are. So the source has it; the compiler moves both waits ahead of all of them
  // and keeps the order among the rest. Other parts were 1 to 3 % slower on an H100, exponentials
  // held ahead of the waits 6 to 14 % on an H200.
  static constexpr int kBefore = kScores / 4, kBetween = kKeys == 128 ? kScores / 4 : kScores / 2;
  /// 2^score, here and not later.
  static QK_DEVICE void raise(f32& s) {
    s = approx_exp2(s);
    asm volatile("" : "+f"(s));
  }

  /// A tile's probabilities from its scores, and meanwhile the next tile's scores and the sums of
  /// the tile before: side by side, because exponentials alone leave the other units idle.
  template <bool kAdd, bool kNext>
  QK_DEVICE void turn(Probabilities& p, Scores& s, Out& part, Sums& sums, u32 tile,
                      f32 (&tops)[2]) {
    QK_UNROLL for (int i = 0; i < kBefore; ++i)
      raise(s[i]);
    f32 k_scale[kGroupsOfKeys], four[4];
    Scores following;
    constexpr int kTimes = kScores / kBetween;
    if constexpr (kNext) {
      wgmma_wait<kAdd ? 1 : 0>();
      settle(sums);
      load_scales(k_scale, tile + 1);
    }
    QK_UNROLL for (int i = 0; i < kScores; ++i) {
      if (i % kTimes == 0) raise(s[kBefore + i / kTimes]);
      if constexpr (kNext) {
        following[i] = score(sums, k_scale, i);
        four[i % 4] = i < 4 ? following[i] : maximum(four[i % 4], following[i]);
      }
    }
    if constexpr (kAdd) {
      wgmma_wait<0>();
      settle(part);
      hold(p);
    }
    constexpr int kAfter = kScores - kBefore - kBetween;
    QK_UNROLL for (int i = 0; i < kAfter; ++i) {
      raise(s[kBefore + kBetween + i]);
      constexpr int kAdded = (kOut + kAfter - 1) / kAfter;
      if constexpr (kAdd) {
        QK_UNROLL for (int e = 0; e < kAdded; ++e) {
          if (kAdded * i + e < kOut) out[kAdded * i + e] += part[kAdded * i + e];
        }
      }
    }
    QK_UNROLL for (int w = 0; w < kWords; ++w)
      encode(p, s, w);
    if constexpr (kNext) {
      QK_UNROLL for (int i = 0; i < kScores; ++i)
        s[i] = following[i];
      tops[0] = maximum(four[0], four[1]);
      tops[1] = maximum(four[2], four[3]);
    }
  }

  /// All keys for 64 queries, from `tile` on: while a tile's scores become probabilities, the next
  /// one's are being multiplied, and so are the values of the one before.
  QK_DEVICE void consume(u32 queries, u32 tile, u32 piece) {
    bias[0] = bias[1] = kTop;
    Sums sums;
    Scores s;
    f32 tops[2], factors[2];
    multiply_keys(sums, queries, tile);
    wgmma_wait<0>();
    settle(sums);
    start(s, sums, tile, factors);
    const u32 last = tile + tiles - 1;
    Probabilities p;
    Out part;
    add_nothing();
    if (tile == last) {
      turn<false, false>(p, s, part, sums, tile, tops);
    } else {
      multiply_keys(sums, queries, tile + 1);
      turn<false, true>(p, s, part, sums, tile, tops);
      QK_NO_UNROLL for (; tile + 1 < last; ++tile) {
        hold(p);
        multiply_keys(sums, queries, tile + 2);
        multiply_values(part, p, tile);
        const bool grown = grow<false>(s, tops, factors);
        turn<true, true>(p, s, part, sums, tile + 1, tops);
        release(tile);
        scale(grown, factors);
      }
      hold(p);
      wgmma_fence();
      multiply_values(part, p, tile);
      const bool grown = grow<false>(s, tops, factors);
      turn<true, false>(p, s, part, sums, last, tops);
      release(tile);
      scale(grown, factors);
    }
    if (lane == 0) barrier_arrive(unread(piece));
    hold(p);
    wgmma_fence();
    multiply_values(part, p, last);
    wgmma_wait<0>();
    settle(part);
    hold(p);
    release(last);
    add(part);
  }

  QK_DEVICE void add_nothing() {
    QK_UNROLL for (int i = 0; i < kOut; ++i)
      out[i] = 0.0f;
  }
  QK_DEVICE void load_query_scales(i64 row, int first) {
    if constexpr (kInt8) {
      QK_UNROLL for (int r = 0; r < 2; ++r) {
        const int query = first + lane / 4 + 8 * r;
        q_scale[r] =
            heads
                .q_scale[row * heads.queries + (query < heads.queries ? query : heads.queries - 1)];
      }
    }
  }

  /// The first tile's scores, and the maxima to begin with.
  QK_DEVICE void start(Scores& s, const Sums& sums, u32 tile, f32 (&factors)[2]) {
    f32 k_scale[kGroupsOfKeys];
    load_scales(k_scale, tile);
    QK_UNROLL for (int i = 0; i < kScores; ++i)
      s[i] = score(sums, k_scale, i);
    if (heads.keys % kKeys != 0) mask(s, heads.keys - (tiles - 1) * kKeys);
    f32 tops[2] = {s[0], s[2]};
    QK_UNROLL for (int i = 0; i < kScores; ++i)
      tops[i / 2 % 2] = maximum(tops[i / 2 % 2], s[i]);
    grow<true>(s, tops, factors);
  }
};

}  // namespace qk
